"""Schemes that Triton emulates, against fp64: interpreted on a CPU and compiled on a GPU (`-m
gpu`)."""

from __future__ import annotations

import math

import pytest
import torch

import moe_ops
from moe_ops import numerics
from moe_ops.activations import Activation
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.schemes import SCHEMES
from tests.support import cases, oracle
from tests.support.cases import BF16, FP32, Case
from tests.support.places import everywhere

pytest.importorskip("triton")

from moe_ops.backends.triton import backend
from moe_ops.kernels.configs import DECODED
from moe_ops.kernels.launch import gpu, run
from moe_ops.kernels.mixed_gemm import operands
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS
from moe_ops.kernels.rows import emulated, rounding
from moe_ops.kernels.rows.e4m3_int8 import counted
from moe_ops.kernels.rows.scales import rows_of

EMULATED = [name for name in SCHEMES if operands.describe(name) and rounding.describe(name)]
# one of each way that activations are scaled, and of each weight
WAYS = ["int4_w4a8", "mxfp4_w4a8", "mxfp8", "mxfp6_e3m2:mxfp4", "nvfp4"]
H200 = Machine("cuda", (9, 0), "NVIDIA H200", ("triton", "torch"))


def test_every_scheme_runs_and_says_whether_it_is_emulated():
    run = backend.WITH_KERNELS
    assert run == {"", *backend.BACKEND.takes.native_schemes, *EMULATED}
    for scheme in SCHEMES.keys() - run:  # which `torch` runs
        weight = SCHEMES[scheme].quantized_weight
        assert weight.two_levels or weight.dtype not in DECODED, scheme
    for scheme in run:
        silu = Options(Activation("silu"))
        problem = Problem("experts", 4, 128, 128, 256, 2, BF16, scheme, "", silu)
        for backend_name in ("triton", "auto"):
            plan = plans.plan(problem, H200, backend_name)
            assert plan.tiers[0][1].name == "triton"
            assert ("(emulated: " in str(plan)) == (scheme in EMULATED), scheme


# --- rounded activations -------------------------------------------------------------------------


def rounded(x, scheme, static=None, weights=NO_ROUTER_WEIGHTS):
    """x (rows, K) as the kernels round it, in fp64: what they write times what sums are multiplied
    by.
    """
    r = rounding.describe(scheme)
    (rows, K), facts = x.shape, gpu(x.get_device())
    size = rounding.x_elements(rows, K, r)
    workspace = cases.garbage(torch.empty(size, device=x.device))
    zero = torch.ones(1, device=x.device)
    ends = torch.tensor([rows], dtype=torch.int32, device=x.device)
    valid = counted("groups", ends)._replace(topk_weights=weights)
    launches, found = emulated.round_x(
        r, rows_of(x), rows, rows, K, workspace, static, valid, zero, facts
    )
    run(launches, x.get_device(), facts)
    assert zero.item() == 0
    q = found.data[: rows * K].view(rows, K).double()
    return q if found.scale is None else q * found.scale[: rows if r.SCALE == "row" else 1, None]


@everywhere
@pytest.mark.parametrize("scheme", EMULATED)
def test_rounded_activations_are_those_of_numerics(where, scheme):
    """Groups of every size of number, groups of zeros, halves between two codes, and a part of a
    group."""
    device, dtype = where
    g = torch.Generator().manual_seed(1)
    x = torch.randn(7, 1184, generator=g)
    x *= 2.0 ** torch.randint(-12, 13, (7, 37), generator=g).repeat_interleave(32, 1)
    x[1, 32:320] = 0
    x[2] = torch.arange(1184) % 193 / 16.0
    x[3] = 0
    x = x.to(dtype).to(device)
    expected = numerics.fake_quantize_activation(x, scheme).double()
    found = rounded(x, scheme)
    if SCHEMES[scheme].activation.is_mx or "w4a8" in scheme and "mx" in scheme:
        assert torch.equal(found, expected)
    # torch rounds values to fp32, these are exact but for the scale that sums are multiplied by
    else:
        torch.testing.assert_close(found, expected, rtol=2.0**-22, atol=0)


@everywhere
@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4", "mxfp6_e2m3"])
def test_what_is_not_finite_stays_in_its_group(where, scheme):
    device, _ = where
    x = torch.randn(3, 256).to(device)
    expected = numerics.fake_quantize_activation(x, scheme)
    x[1, 40], x[2, 8] = math.nan, -math.inf if scheme != "nvfp4" else math.nan
    found = rounded(x, scheme)
    assert torch.isnan(found[1, 32:48]).all() and torch.isnan(found[2, :16]).all()
    if scheme != "nvfp4":  # whose groups share more than a power of two
        keep = ~torch.isnan(found)
        assert keep.sum() == 3 * 256 - 64
        assert torch.equal(found[keep], expected.double()[keep])


@everywhere
def test_static_scale_and_strided_rows(where):
    device, dtype = where
    x = torch.randn(512, 9).to(dtype).to(device).t()[::2]
    static = torch.tensor(0.0021, device=device)
    expected = numerics.fake_quantize_activation(x, "nvfp4", static).double()
    torch.testing.assert_close(rounded(x, "nvfp4", static), expected, rtol=2.0**-22, atol=0)


# --- the three operators -------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("scheme", EMULATED)
def test_formats(where, scheme):
    """Every scheme with bias; 160 columns are more than a group of 128 and part of one."""
    Case(*where, scheme, M=5, E=2, top_k=2, K=160, I=96, bias=True).check("triton")


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
def test_one_token(where, scheme):
    Case(*where, scheme, M=1, E=3, top_k=2, K=256, I=128, bias=True).check("triton")


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
@pytest.mark.parametrize("M", [20, 150])
def test_many_tokens(where, scheme, M):
    if where[0] == "cpu" and M > 20:
        pytest.skip("slow under the interpreter")
    Case(*where, scheme, M=M, E=2, top_k=1, K=256, I=128).check("triton")


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
@pytest.mark.parametrize("name", ["swigluoai", "relu2_no_mul"])
def test_gates(where, scheme, name):
    Case(*where, scheme, name, M=4, E=2, top_k=1, K=128, I=128, bias=True).check("triton")


@everywhere
@pytest.mark.parametrize("scheme", ["int4_w4a8", "mxfp6_e3m2:mxfp4", "nvfp4"])
def test_router_weight_on_input_and_expert_map(where, scheme):
    """Rounding to powers of two does not commute with the router's weight."""
    ids = torch.arange(9)[:, None] % 3 - 1
    Case(*where, scheme, M=9, E=2, top_k=1, K=128, I=128, ids=ids, on_input=True).check("triton")
    case = Case(
        *where, scheme, M=9, E=3, top_k=2, K=128, I=128, expert_map=True, ids_dtype=torch.int64
    )
    case.check("triton")


@everywhere
@pytest.mark.parametrize("known", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("M", [1, 6])
def test_known_scales_of_nvfp4(where, known, M):
    device, _ = where
    case = Case(*where, "nvfp4", M=M, E=2, top_k=1, K=80, I=48, ids=torch.arange(M)[:, None] % 2)
    for i, scale in ((1, 0.0011), (2, 0.0017)):
        if known[i - 1]:
            static = torch.tensor(scale, device=device)
            case.args[i] = case.args[i]._replace(activation_scale=static)
    case.check("triton")


@everywhere
@pytest.mark.parametrize("huge", [1e6, math.inf])
def test_trap_scale_of_rows_nobody_wrote(where, huge):
    """The scale that all rows of nvfp4 share sees no row without an expert, nor one past a count
    or the last end."""
    device, dtype = where
    huge = min(huge, torch.finfo(dtype).max) if huge == 1e6 else huge
    ids = torch.tensor([[0, 1], [-1, 5], [1, -1], [7, 7]])
    case = Case(device, dtype, "nvfp4", M=4, E=2, top_k=2, K=64, I=32, ids=ids)
    case.args[0][case.nowhere] = huge
    case.check("triton")
    x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(4)).to(dtype).to(device)
    x[1] *= 5  # the row that counts most is not of the first expert
    counts = torch.tensor([4, 1], dtype=torch.int32, device=device)
    x[torch.arange(6, device=device) >= counts[:, None]] = huge
    _, w13, w2, *_ = case.args
    within = cases.tolerance(dtype, "nvfp4", device)
    with cases.poisoned_memory():
        out = moe_ops.batched_experts(x, w13, w2, counts, backend="triton")
    expected = oracle.batched(x, w13, w2, counts)
    inside = ~torch.isnan(expected)
    cases.assert_matches(out[inside], expected[inside], within)
    x = torch.cat((x[0, :4], x[1]))
    ends = torch.tensor([4, 5], dtype=torch.int32, device=device)
    with cases.poisoned_memory():
        out = moe_ops.grouped_linear(x, w13, ends, backend="triton")
    cases.assert_matches(out, oracle.grouped_linear(x, w13, ends), within)


@everywhere
def test_scale_of_h_sees_no_row_that_fills_a_block(where):
    """Rows of a block that are no token's hold the activation of the bias, here far above that of
    any token."""
    case = Case(*where, "", M=3, E=2, top_k=1, K=64, I=32, ids=torch.arange(3)[:, None] % 2)
    case.args[0][:, :16], case.args[1][..., :16] = 1, -2
    case.args[1:3] = [moe_ops.quantize(w, "nvfp4") for w in case.args[1:3]]
    case.scheme = "nvfp4"
    bias = torch.full((2, 64), 32.0, dtype=where[1], device=where[0])
    case.options["w13_bias"] = bias + torch.randn(64, device=where[0]).to(where[1])
    case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
def test_batched_experts(where, scheme):
    cases.check_batched(*where, scheme, K=128, I=160)


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
def test_grouped_linear(where, scheme):
    device, dtype = where
    g = torch.Generator().manual_seed(7)
    x = torch.randn(22, 256, generator=g).to(dtype).to(device)
    x[20:] = math.nan
    w = moe_ops.quantize((torch.randn(3, 144, 256, generator=g) / 16).to(dtype).to(device), scheme)
    bias = torch.randn(3, 144, generator=g).to(dtype).to(device)
    offsets = torch.tensor([9, 9, 20], dtype=torch.int32, device=device)
    with cases.poisoned_memory():
        out = moe_ops.grouped_linear(x, w, offsets, bias=bias, backend="triton")
    expected = oracle.grouped_linear(x, w, offsets, bias=bias)
    cases.assert_matches(out, expected, cases.tolerance(dtype, scheme, device))
    assert (out[20:] == 0).all()


@everywhere
@pytest.mark.parametrize("scheme", ["int4_w4a8", "nvfp4"])
def test_bitwise_repeatable(where, scheme):
    case = Case(*where, scheme, M=9, E=3, top_k=4, K=128, I=128)
    first = case.run("triton")
    for _ in range(1 if where[0] == "cpu" else 20):
        assert torch.equal(first, case.run("triton"))


@pytest.mark.parametrize("scheme", WAYS)
def test_workspaces_hold_what_is_rounded(scheme):
    """h in fp32, behind it h rounded; x rounded in the place of y."""
    case = Case("cpu", FP32, scheme, M=3, E=2, K=128, I=384, top_k=2)
    x, w13, w2, _, ids = case.args
    with machines.pretend(H200):
        plan = moe_ops.explain(x.to(BF16), w13, w2, ids, backend="triton")
    hidden, y, _ = plan.workspace_shapes(3)
    r = rounding.describe(scheme)
    assert hidden.dtype == y.dtype == FP32
    assert hidden.shape[0] * 4 >= 6 * 384 * (4 + r.dtype.itemsize)
    assert y.shape[0] * 4 >= max(6 * 128 * 4, 3 * 128 * r.dtype.itemsize)
