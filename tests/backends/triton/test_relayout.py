"""Weights of e2m1 as the SM90 kernels read them: the same numbers, and who takes them."""

from __future__ import annotations

import dataclasses
import re
from unittest import mock

import pytest
import torch

from tests.support.cases import BF16, FP32, Case, prepared

pytest.importorskip("triton.experimental.gluon")


import moe_ops
from moe_ops.backends.triton import backend
from moe_ops.choose import mixed
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels.configs import SM90_WGMMA
from moe_ops.kernels.launch import gpu
from moe_ops.meta.scales import TRITON_E2M1, triton_e2m1_scale_shape
from moe_ops.ops import relayout as relayout_module
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning.plan import plan


@pytest.fixture
def on_any_device(monkeypatch):
    (relayout,) = relayout_module.RELAYOUTS["triton"]
    monkeypatch.setitem(relayout_module.RELAYOUTS, "triton", (relayout._replace(on=None),))


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "mxfp4_w4a16:ceil", "nvfp4_w4a16"])
def test_prepared_weights_are_the_same_numbers(scheme, on_any_device):
    plain = torch.randn(3, 32, 192) * torch.rand(3, 32, 192).exp2()
    w = moe_ops.quantize(plain.to(BF16), scheme)
    ready = moe_ops.prepare(w, "triton")
    assert ready.weight_layout == TRITON_E2M1 and ready.shape == w.shape
    assert not torch.equal(ready.qdata, w.qdata) and ready.scale.dtype == w.scale.dtype
    group = 192 // w.scale.shape[-1]
    rows, columns = torch.arange(32)[:, None], torch.arange(192 // group)
    tall, wide = group // 4, 64 // group  # rows and columns of 16 bytes
    at = columns // wide * 16 + rows % tall * wide + columns % wide
    scale, natural = ready.scale.view(torch.uint8), w.scale.view(torch.uint8)
    assert scale.shape == triton_e2m1_scale_shape(*w.shape, group)
    assert torch.equal(scale[:, rows // tall, at], natural)
    assert torch.equal(ready.dequantize(), w.dequantize())
    assert torch.equal(ready[1:].dequantize(), w[1:].dequantize())
    back = moe_ops.prepare(ready, "torch")
    assert back.weight_layout == "" and torch.equal(back.qdata, w.qdata)
    assert torch.equal(back.scale.view(torch.uint8), natural) and back.scale.is_contiguous()
    one = moe_ops.prepare(w[0], "triton")
    assert torch.equal(one.qdata, ready.qdata[0]) and torch.equal(
        one.dequantize(), w[0].dequantize()
    )
    buffer = torch.zeros(w.qdata.numel() + 1, dtype=torch.uint8)[1:]
    w = w._replace(qdata=buffer.view_as(w.qdata).copy_(w.qdata))
    assert torch.equal(moe_ops.prepare(w, "triton").qdata, ready.qdata)


def test_weights_that_cannot_be_prepared(on_any_device):
    for scheme in ("int4_w4a16:g128", "mxfp4_w4a8", "nvfp4", "fp8_w8a16:channel"):
        w = moe_ops.quantize(torch.randn(2, 8, 128).to(BF16), scheme)
        assert moe_ops.prepare(w, "triton") is w
    for rows, columns in ((16, 96), (16, 64), (8, 128)):
        w = moe_ops.quantize(torch.randn(2, rows, columns).to(BF16), "mxfp4_w4a16")
        got = f"rows that 16 divides.* got {rows} rows of {columns}; leave w13 and w2"
        with pytest.raises(ValueError, match=f"columns that 64 divides, at least 128, and {got}"):
            moe_ops.prepare(w, "triton")
    w = moe_ops.quantize(torch.randn(2, 16, 128).half(), "mxfp4_w4a16")
    with pytest.raises(ValueError, match="beside bfloat16 .* got dtype torch.float16; leave w13"):
        moe_ops.prepare(w, "triton")


def test_prepared_only_where_its_kernels_run():
    w = moe_ops.quantize(torch.randn(2, 8, 64).to(BF16), "mxfp4_w4a16")
    assert moe_ops.prepare(w, "triton") is w  # on a CPU


def problem(**changes) -> Problem:
    act = moe_ops.Activation("silu")
    sizes = ("experts", 4, 256, 128, 256, 2, BF16, "mxfp4_w4a16", TRITON_E2M1, Options(act))
    return Problem(*sizes).replace(**changes)


HOPPER = Machine("cuda", (9, 0), "NVIDIA H200", ("triton",))


@pytest.mark.parametrize(
    "changes, machine, reason",
    [
        ({}, {}, ""),
        ({"scheme": "nvfp4_w4a16"}, {}, ""),
        ({"scheme": "int4_w4a16:g128"}, {}, "of e2m1 weights .* got scheme 'int4_w4a16:g128'"),
        ({"scheme": "mxfp4_w4a8"}, {}, "of e2m1 weights .* got scheme 'mxfp4_w4a8'"),
        ({"scheme": "fp8_block"}, {}, "of e2m1 weights .* got scheme 'fp8_block'"),
        ({"scheme": ""}, {}, "of e2m1 weights .* got scheme ''"),
        ({"kind": "batched_experts", "top_k": 0}, {}, "in fused_experts alone"),
        ({"dtype": torch.float16}, {}, "takes bfloat16 .* got torch.float16"),
        ({}, {"capability": (8, 0)}, "9.0 under Triton 3.6 to 3.9, got 8.0"),
        ({"layout": "flashinfer_mixed"}, {}, "natural layout or in 'triton_e2m1', got"),
    ],
)
def test_who_takes_prepared_weights(changes, machine, reason, monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    where = dataclasses.replace(HOPPER, **{"triton": "3.6.0", **machine})
    reasons = backend.supports(problem(**changes), where)
    assert len(reasons) == bool(reason)
    if reason:
        assert re.search(reason, reasons[0]) and "prepare(weight, 'torch')" in reasons[0]


def test_interpreter_and_other_languages_do_not_take_prepared_weights(monkeypatch):
    for version, interpreted, found in (
        ("3.5.1", False, "Triton 3.5.1"),
        ("4.0.0", False, "Triton 4.0.0"),
        ("", False, "Triton None"),
        ("3.6.0", True, "its inter"),
    ):
        monkeypatch.setattr(backend, "INTERPRETED", interpreted)
        (reason,) = backend.supports(problem(), dataclasses.replace(HOPPER, triton=version))
        assert f"got 9.0 under {found}" in reason


def test_explain_says_which_version_of_triton_costs_kernels():
    served = problem(layout="")
    plans_of = {
        version: str(plan(served, dataclasses.replace(HOPPER, triton=version), "triton"))
        for version in ("3.6.0", "3.9.1", "3.5.1")
    }
    note = "triton runs without some of its kernels: the Gluon kernels"
    assert [note in text for text in plans_of.values()] == [False, False, True]
    assert "need Triton 3.6 to 3.9, got 3.5.1" in plans_of["3.5.1"]
    old = dataclasses.replace(HOPPER, triton="3.5.1")
    for other in ({"scheme": "fp8_block"}, {"dtype": torch.float16}):
        assert note not in str(plan(problem(layout="", **other), old, "triton"))
    ada = dataclasses.replace(old, capability=(8, 9))
    assert note not in str(plan(served, ada, "triton"))


@pytest.mark.parametrize("M", [2, 64, 300, 5000])
def test_prepared_weights_get_configs_that_read_them(M):
    """However many rows an expert has, and whatever a table says."""
    layer = LayerSizes(2 * M, 4, 256, 128, gpu(-1), 2)
    others = mixed.choose(layer, 4, BF16, False)
    args = (layer, BF16, "mxfp4_w4a16", 4, True, False, True)
    with mock.patch.object(mixed, "measured", lambda *_: others):
        found = mixed.for_experts.__wrapped__(*args)
    assert found.kernel == SM90_WGMMA and found.block_m >= min(64, M * 2 / 4 / 4)


def test_what_no_kernel_reads_is_refused():
    """Many tokens off Hopper: nothing is launched on words whose bits lie in another order."""
    case = Case("cpu", FP32, "mxfp4_w4a16", M=5, E=4, top_k=2, K=128, I=128)
    for i in (1, 2):
        case.args[i] = prepared(case.args[i])
    with pytest.raises(
        RuntimeError, match=r"layout 'triton_e2m1' need .*prepare\(weight, 'torch'\)"
    ):
        moe_ops.fused_experts(*case.args, backend="triton")
    w = case.args[2]
    case.args[2] = w._replace(scale=w.scale[:, :1])
    with pytest.raises(ValueError, match=r"w2's scale must have shape \(4, 16, 32\)"):
        moe_ops.explain(*case.args[:3], case.args[4], backend="triton")
