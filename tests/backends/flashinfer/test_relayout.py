"""FlashInfer's layouts: bit for bit there and back, and refusals."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.activations import Activation, rows_before
from moe_ops.backends.flashinfer import relayout, schemes
from tests.backends.flashinfer.test_layer import SCHEMES, WHOLE
from tests.support.cases import BF16, FP16, FP32, Case
from tests.support.fake_flashinfer import unswizzled

# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", None])
def test_layouts_come_back_bit_for_bit(scheme, activation):
    case = Case("cpu", BF16, scheme, "silu", **WHOLE)
    w = case.args[1]
    if scheme == "nvfp4":
        w = w._replace(activation_scale=torch.tensor(0.01))
    if scheme == "fp8_block" and activation == "swigluoai":
        with pytest.raises(ValueError, match="scales of 128 rows that are all gate or all up"):
            moe_ops.prepare(w, "flashinfer", activation=activation)
        return
    ready = moe_ops.prepare(w, "flashinfer", activation=activation)
    gated = activation in ("silu", "swigluoai")
    base = schemes.SCHEMES[scheme].layout
    assert getattr(ready, "weight_layout", "") == base + (
        f":{rows_before(Activation(activation))}" if gated else ""
    )
    if not gated and not base:
        assert ready is w
        return
    assert ready.shape == w.shape and ready.dtype == w.dtype
    assert moe_ops.prepare(ready, "flashinfer", activation=activation) is ready
    assert moe_ops.prepare(ready, "flashinfer") is ready
    back = moe_ops.prepare(ready, "torch")
    assert getattr(back, "weight_layout", "") == ""
    for name in ("qdata", "scale", "global_scale"):
        one, other = [getattr(t, name, t if name == "qdata" else None) for t in (back, w)]
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    plain = w.dequantize() if scheme else w
    assert torch.equal(ready.dequantize(), plain) and torch.equal(
        ready[1:].dequantize(), plain[1:]
    )
    assert torch.equal(ready[2].dequantize(), plain[2])
    assert torch.equal(
        ready[:2].qdata, moe_ops.prepare(w[:2], "flashinfer", activation=activation).qdata
    )


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if schemes.SCHEMES[s].layout])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", None])
def test_padded_layouts_come_back_bit_for_bit(scheme, activation, tmp_path):
    w = moe_ops.quantize(torch.randn(3, 2 * 96, 160), scheme)
    if scheme == "nvfp4":
        w = w._replace(activation_scale=torch.tensor(0.01))
    ready = moe_ops.prepare(w, "flashinfer", activation=activation)
    # 256 rows are two halves of 96 padded to 128, or 192 padded at once
    assert ready.qdata.shape == (3, 256, 128) and ready.shape == w.shape
    assert ready.weight_layout.endswith("[192x160]")
    assert moe_ops.prepare(ready, "flashinfer", activation=activation) is ready
    assert moe_ops.prepare(ready, "flashinfer") is ready
    torch.save({"w": ready}, tmp_path / "file")
    for one in (ready, torch.load(tmp_path / "file", weights_only=True)["w"], ready.clone()):
        back = moe_ops.prepare(one, "torch")
        assert back.weight_layout == "" and back.shape == w.shape
        assert torch.equal(back.qdata, w.qdata)
        assert torch.equal(back.scale.view(torch.uint8), w.scale.view(torch.uint8))
    assert torch.equal(ready[1].dequantize(), w.dequantize()[1])
    assert torch.equal(ready[1:].dequantize(), w.dequantize()[1:])


@pytest.mark.parametrize("shape", [(96, 10), (128, 4), (1, 1), (300, 6)])
def test_swizzled_scales_are_padded(shape):
    """To tiles of 128 rows and 4 columns, of which each row and column has its place."""
    scale = torch.randint(1, 255, (2, *shape), dtype=torch.uint8)
    swizzled = relayout.swizzle(scale)
    rows, columns = -(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4
    assert swizzled.shape == (2, rows, columns)
    assert torch.equal(relayout.unswizzle(swizzled, *shape), scale)
    assert torch.equal(relayout.unswizzle(relayout.swizzle(scale[0]), *shape), scale[0])
    everything = unswizzled(swizzled, rows, columns)
    assert torch.equal(everything[:, : shape[0], : shape[1]], scale)
    assert everything.count_nonzero() == scale.numel()


def test_up_rows_come_first():
    w = torch.arange(12.0).view(1, 6, 2)
    for activation, rows in (("silu", [3, 4, 5, 0, 1, 2]), ("swigluoai", [1, 3, 5, 0, 2, 4])):
        ready = moe_ops.prepare(w, "flashinfer", activation=activation)
        assert torch.equal(ready.qdata, w[:, rows])


def test_prepared_plain_weights_travel(tmp_path):
    w = torch.nn.Parameter(torch.randn(2, 8, 4), requires_grad=False)
    ready = torch.nn.Parameter(moe_ops.prepare(w, "flashinfer", activation="silu"), False)
    assert type(ready) is moe_ops.PlainExpertTensor and ready.device == w.device
    torch.save({"w": ready}, tmp_path / "file")
    copies = [
        torch.load(tmp_path / "file", weights_only=True)["w"],
        moe_ops.tensors.unflatten(*moe_ops.tensors.flatten({"w": ready}))["w"],
        ready.clone(),
        ready.to("cpu"),
    ]
    for copy in copies:
        assert copy.weight_layout == ":up_gate" and torch.equal(copy.dequantize(), w)
    half = ready.to(FP16)
    assert half.dtype == half.qdata.dtype == FP16
    assert torch.equal(half.dequantize(), w.to(FP16))
    got = torch.nn.functional.linear(torch.ones(4), ready[0])
    torch.testing.assert_close(got, w[0].sum(1))  # fp32 sums in either order
    with pytest.raises(ValueError, match="views of .* along the expert dimension"):
        ready[:, :4]


def test_weights_of_other_layouts_are_refused():
    case = Case("cpu", FP32)
    x, w13, w2, weights, ids = case.args
    ready = moe_ops.prepare(w13, "flashinfer", activation="silu")
    for backend in ("torch", "triton", "auto"):
        with pytest.raises(ValueError, match="natural layout.*'torch'\\) brings it back"):
            moe_ops.fused_experts(x, ready, w2, weights, ids, backend=backend)
    other = moe_ops.prepare(w2, "flashinfer", activation="silu")
    with pytest.raises(ValueError, match="w2 must have the layout of w13, none, got :up_gate"):
        moe_ops.fused_experts(x, w13, other, weights, ids)
    nvfp4 = moe_ops.quantize(torch.randn(1, 128, 128), "nvfp4")
    with pytest.raises(ValueError, match="must have an activation_scale"):
        moe_ops.prepare(nvfp4, "flashinfer")


def test_weights_that_cannot_be_prepared_are_named():
    with pytest.raises(ValueError, match="as many gate rows as up rows .* got 3 rows; leave act"):
        moe_ops.prepare(torch.randn(2, 3, 4), "flashinfer", activation="silu")
    for weight in (torch.randn(4), torch.ones(2, 4, 4, dtype=torch.int32)):
        for backend in ("flashinfer", "torch", "auto"):
            with pytest.raises(
                ValueError, match=r"shape \(E, N, K\).* floating dtype .*got torch"
            ):
                moe_ops.prepare(weight, backend)
    with pytest.raises(ValueError, match="backend must be one of auto, .*, torch.*, got 'vllm'"):
        moe_ops.prepare(torch.randn(2, 4, 4), "vllm")
    with pytest.raises(ValueError, match="activation must be one of"):
        moe_ops.prepare(torch.randn(2, 4, 4), "auto", activation="swish")
