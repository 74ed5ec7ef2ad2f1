"""The layout of block scales that SM100 and SM120 multiply: bit for bit by its definition, by
torchao's, and there and back.
"""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.backends.cutlass.relayout import SWIZZLED
from moe_ops.backends.cutlass.schemes import BLOCK_SCALED
from moe_ops.numerics.swizzle import swizzle, unswizzle

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
