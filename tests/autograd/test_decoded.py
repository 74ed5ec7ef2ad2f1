"""Training steps over frozen quantized experts that are decoded a few at a time."""

from unittest import mock

import pytest
import torch

from moe_ops.autograd import decoded, fused
from moe_ops.backends.cutlass import products as native
from moe_ops.kernels.activation import Activated
from moe_ops.planning import training as planning
from tests.autograd import test_lora
from tests.autograd.conftest import CUDA, kernels, on_gpu
from tests.autograd.test_gradients import check, check_captured_step, gradients
from tests.support import oracle
from tests.support.cases import Case, Largest

E, K, I = 5, 128, 64
pytestmark = pytest.mark.skipif(
    CUDA and native.kernels(0) is None, reason="the kernels are not built, or not for this GPU"
)


def multiply_into(out, rows, weight, ends, transpose=False, low=None, spare=0, first=0):
    assert spare == (decoded.SPARE if first + len(weight) < len(ends) else 0)
    for e in range(len(weight)):
        start, end = (0, *ends.tolist())[first + e : first + e + 2]
        mine = rows[start:end].double()
        found = mine @ (weight[e] if transpose else weight[e].T).double()
        if low is not None:
            matrix = low[1][e] if transpose else low[1][e].T
            found += low[0][start:end].double() @ matrix.double()
        out[start:end] = found.to(out.dtype)


def activate_into(
    out, rows, weight, ends, of: Activated, bias, gate_up, low=None, spare=0, first=0
):
    assert of.ACTIVATION in ("silu", "swigluoai")
    multiply_into(gate_up, rows, weight, ends, False, low, spare, first)
    for e in range(len(weight)):
        start, end = (0, *ends.tolist())[first + e : first + e + 2]
        found = gate_up[start:end].double()
        if bias is not None:
            found += bias[e].double()
        name = "swigluoai_uninterleave" if of.ACTIVATION == "swigluoai" else of.ACTIVATION
        limit = of.limit if of.HAS_LIMIT else None
        out[start:end] = oracle.activation(found, name, of.alpha, of.beta, limit).to(out.dtype)


@pytest.fixture(autouse=True)
def two_experts_at_a_time(monkeypatch):
    monkeypatch.setattr(planning, "DECODED_FROM", 2)
    if not CUDA:
        of = planning.PORTABLE._replace(
            activate_into=activate_into,
            activations=("silu", "swigluoai"),
            multiply_into=multiply_into,
            adds=True,
        )
        monkeypatch.setattr(planning, "_products", lambda x: of)
    monkeypatch.setattr(decoded, "BYTES", 2 * 2 * K * I * 4)


def case_of(where, scheme, **options) -> Case:
    return Case(*where, scheme, **{"M": 12, "E": E, "top_k": 2, "K": K, "I": I, **options})


@kernels
@pytest.mark.parametrize(
    "scheme, options",
    [
        ("nf4_w4a16:g64", {}),
        ("nf4_w4a16:g64", {"bias": True, "activation": "swigluoai_uninterleave"}),
        ("int4_w4a16:g32", {"activation": "swigluoai"}),  # gate and up rows take turns
        ("fp8_w8a16:block", {"activation": "relu2_no_mul"}),
        ("nf4_w4a16:g64", {"activation": "situ"}),  # which products do not compute
        ("int8_w8a16:channel", {"expert_map": True, "M": 40}),
        ("mxfp4_w4a16", {"on_input": True, "top_k": 1}),
        ("iq4_w4a16:g32:super", {"K": 256, "I": 256}),
    ],
    ids=lambda of: of if isinstance(of, str) else "-".join(of),
)
def test_gradients(where, scheme, options):
    case = case_of(where, scheme, **options)
    with mock.patch.object(fused.decoded, "_dequantize", wraps=decoded._dequantize) as wrote:
        check(case)
    assert wrote.call_count >= 2 * (2 + 2)  # at least two parts of each weight in both passes


@kernels
@pytest.mark.parametrize("scheme", ["nf4_w4a16:g64", "mxfp4_w4a16"])
def test_with_adapters(where, scheme):
    case = case_of(where, scheme)
    test_lora.check(case, [test_lora.adapter(case, (16, 16))], within=0.02)


@kernels
@pytest.mark.parametrize("scheme, rows", [("nf4_w4a16:g64", 4), ("nvfp4_w4a16", 0)])
def test_packed_weights_where_it_does_not_pay(where, scheme, rows, monkeypatch):
    """Few rows an expert, and a format that the kernel does not take."""
    monkeypatch.setattr(planning, "DECODED_FROM", rows + 1)
    with mock.patch.object(fused.decoded, "in_parts") as decodes:
        check(case_of(where, scheme, M=10))
    assert not decodes.called


@kernels
def test_no_more_than_two_parts_are_decoded(where):
    case = case_of(where, "nf4_w4a16:g64")
    first = gradients(case)
    with Largest() as largest:
        second = gradients(case)
    assert largest.elements <= 2 * decoded.BYTES // case.args[0].element_size()
    assert largest.elements < case.args[1].numel()
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_gpu
def test_a_captured_step(where):
    cases = [case_of(where, "nf4_w4a16:g64", M=64, seed=seed) for seed in (0, 1)]
    cases[1].args[1:3] = cases[0].args[1:3]  # the weights of one
    check_captured_step(cases)
