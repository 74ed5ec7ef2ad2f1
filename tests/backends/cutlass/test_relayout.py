"""The layouts of block scales that SM100 and SM120 multiply and of int4 weights that SM90 does:
bit for bit by their definitions, by torchao's, and there and back.
"""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.backends.cutlass.relayout import REORDERED, SWIZZLED
from moe_ops.backends.cutlass.schemes import BLOCK_SCALED
from moe_ops.numerics.swizzle import swizzle, unswizzle
from tests.support import fake_cutlass, oracle

SHAPES = [(128, 4), (96, 10), (1, 1), (300, 6), (256, 8), (384, 3)]


@pytest.mark.parametrize("rows, columns", SHAPES)
def test_swizzled_scales_by_definition(rows, columns):
    """Row r, column c: tile (r // 128, c // 4) of 512 bytes, byte 16 (r % 32) + 4 (r // 32 % 4) +
    c % 4 of it. Padding is zero.
    """
    scale = torch.randint(1, 256, (2, rows, columns), dtype=torch.uint8)
    found = swizzle(scale)
    wide = -(-columns // 4) * 4
    assert found.shape == (2, -(-rows // 128) * 128, wide) and found.is_contiguous()
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    at = r // 128 * 128 * wide + c // 4 * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4
    flat = found.flatten(1)
    assert torch.equal(flat[:, at.flatten()].view_as(scale), scale)
    assert flat.count_nonzero() == scale.numel()
    assert torch.equal(unswizzle(found, rows, columns), scale)
    assert torch.equal(swizzle(scale[1]), found[1])


@pytest.mark.parametrize("rows, columns", SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_swizzled_scales_are_those_of_torchao(rows, columns, dtype):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scale = torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(dtype)
    blocked = utils.to_blocked(scale.view(torch.uint8), use_triton_kernel=False)
    assert torch.equal(swizzle(scale).view(torch.uint8).flatten(), blocked.flatten())


@pytest.mark.parametrize("scheme", BLOCK_SCALED)
@pytest.mark.parametrize("rows, columns", [(256, 128), (96, 160), (130, 32)])
def test_weights_come_back_bit_for_bit(scheme, rows, columns, tmp_path):
    w = moe_ops.quantize(torch.randn(3, rows, columns), scheme)
    ready = moe_ops.prepare(w, "cutlass")
    assert ready.weight_layout == SWIZZLED and ready.shape == w.shape
    assert torch.equal(ready.qdata.view(torch.uint8), w.qdata.view(torch.uint8))
    assert ready.scale.dtype == w.scale.dtype
    assert torch.equal(ready.scale.view(torch.uint8), swizzle(w.scale).view(torch.uint8))
    assert moe_ops.prepare(ready, "cutlass") is ready
    assert moe_ops.prepare(ready, "cutlass", activation="silu") is ready
    torch.save({"w": ready}, tmp_path / "file")
    for one in (ready, torch.load(tmp_path / "file", weights_only=True)["w"], ready.clone()):
        back = moe_ops.prepare(one, "torch")
        assert back.weight_layout == "" and back.shape == w.shape
        assert torch.equal(back.qdata.view(torch.uint8), w.qdata.view(torch.uint8))
        assert torch.equal(back.scale.view(torch.uint8), w.scale.view(torch.uint8))
    assert torch.equal(ready.dequantize(), w.dequantize())
    assert torch.equal(ready[1].dequantize(), w.dequantize()[1])
    assert torch.equal(ready[1:].dequantize(), w.dequantize()[1:])


def test_other_schemes_stay_natural():
    w = moe_ops.quantize(torch.randn(2, 64, 64), "fp8_channel")
    assert moe_ops.prepare(w, "cutlass") is w


# --- int4 ----------------------------------------------------------------------------------------


def int4_weight(rows: int, columns: int, experts: int = 2) -> moe_ops.ExpertTensor:
    """All codes, and scales of either sign, zeros of either sign, and the least and the most."""
    g = torch.Generator().manual_seed(rows + columns)
    scale = torch.randn(experts, rows, columns // 128, generator=g)
    scale[0, :4, 0] = torch.tensor([0.0, -0.0, 2.0**-9, 56.0])
    return moe_ops.from_quantized(
        "int4_w4a8",
        torch.randint(0, 256, (experts, rows, columns // 2), generator=g).to(torch.uint8),
        scale.to(torch.float8_e4m3fn),
        channel_scale=torch.rand(experts, rows, 1, generator=g),
    )


SIZES = [(16, 128), (128, 128), (80, 384), (256, 640)]


@pytest.mark.parametrize("rows, columns", SIZES)
def test_int4_by_definition(rows, columns):
    """Each weight, decoded from where tensor cores read it, is e4m3(code * scale)."""
    w = int4_weight(rows, columns)
    ready = moe_ops.prepare(w, "cutlass")
    assert ready.weight_layout == REORDERED and ready.shape == w.shape
    assert ready.qdata.shape == w.qdata.shape and ready.qdata.is_contiguous()
    assert ready.scale.shape == (2, columns // 128, rows, 8) and ready.scale.is_contiguous()
    assert torch.equal(ready.channel_scale, w.channel_scale)
    numbers = oracle.codes(w.qdata, 4).double() - 8
    wanted = oracle.e4m3(numbers * w.scale.double().repeat_interleave(128, 2))
    for e in range(2):
        addresses = ready.qdata[e].data_ptr(), ready.scale[e].data_ptr()
        found = fake_cutlass.int4_weights(*addresses, rows, columns)
        assert torch.equal(found, wanted[e])


@pytest.mark.parametrize("rows, columns", SIZES)
def test_int4_comes_back_bit_for_bit(rows, columns, tmp_path):
    w = int4_weight(rows, columns)
    ready = moe_ops.prepare(w, "cutlass")
    assert moe_ops.prepare(ready, "cutlass", activation="silu") is ready
    torch.save({"w": ready}, tmp_path / "file")
    for one in (ready, torch.load(tmp_path / "file", weights_only=True)["w"], ready.clone()):
        back = moe_ops.prepare(one, "torch")
        assert back.weight_layout == "" and back.shape == w.shape
        assert torch.equal(back.qdata, w.qdata)
        assert torch.equal(back.scale.view(torch.uint8), w.scale.view(torch.uint8))
        assert torch.equal(back.channel_scale, w.channel_scale)
    assert torch.equal(ready.dequantize(), w.dequantize())
    assert torch.equal(ready[1].dequantize(), w.dequantize()[1])
    assert torch.equal(ready[1:].dequantize(), w.dequantize()[1:])
    assert moe_ops.prepare(moe_ops.prepare(w[:0], "cutlass"), "torch").shape == w[:0].shape


def test_int4_saturates():
    """Beyond 448, as e4m3 does everywhere here."""
    w = int4_weight(16, 128)
    ready = moe_ops.prepare(w._replace(scale=torch.full_like(w.scale, 448.0)), "cutlass")
    assert (ready.scale.float() == -448).all()


def test_int4_of_odd_rows_is_refused():
    with pytest.raises(ValueError, match="multiple of 16 rows .* got 24"):
        moe_ops.prepare(int4_weight(24, 128), "cutlass")
