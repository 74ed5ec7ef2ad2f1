"""Training steps over frozen quantized experts by kernels that decode them: under Triton's
interpreter, and on a GPU.
"""

import math
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops.autograd import fused
from moe_ops.autograd.adapters import UNADAPTED
from moe_ops.autograd.step import Needs
from moe_ops.kernels.mixed_gemm import configs, packed
from moe_ops.ops.call import ExpertsCall, take_apart
from moe_ops.ops.options import Options
from moe_ops.planning import training as planning
from tests.autograd import test_lora
from tests.autograd.conftest import kernels, on_gpu
from tests.autograd.test_gradients import (
    TOLERANCE,
    call,
    check,
    check_captured_step,
    compare,
    cotangent,
    expected_gradients,
    gradients,
    leaves,
)
from tests.support import oracle
from tests.support.cases import BF16, FP32, Case, Largest, with_global_rows

SCHEMES = [
    *("int4_w4a16:g32", "int4_w4a16:g64:zp", "int4_w4a16:g128", "int4_w4a16:channel:zp"),
    *("int4_w4a16:g32:min", "int4_w4a16:g32:super:min", "iq4_w4a16:g32:super"),
    *("int8_w8a16:channel", "int8_w8a16:g32:zp", "fp8_w8a16:channel", "fp8_w8a16:block"),
    *("mxfp4_w4a16", "nvfp4_w4a16", "mxfp6_e2m3_w6a16"),
    *("nf4_w4a16:g32", "fp4_w4a16:g32", "iq4_w4a16:g32"),
]
# These quantize activations, too. In bf16 what they round was rounded before, so some elements
# come to the other neighbour.
ROUNDED = [
    *("fp8_block", "fp8_block:ue8m0", "fp8_channel", "fp8_tensor_static", "int8_w8a8"),
    *("int8_w8a8_static", "mxfp8", "mxfp4_mxfp8", "mxfp4:ceil", "mxfp6_e3m2"),
]


def tolerance(where, scheme: str) -> float:
    """Of outputs and gradients."""
    if where[1] != BF16 or scheme not in ROUNDED:
        return TOLERANCE[where[1]]
    # of a step of e4m3 6 %; scales that are powers of two leave rounded values exact
    return 0.03 if scheme in ("fp8_block", "fp8_channel", "fp8_tensor_static") else 0.0156


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    """Small tiles, so that small sizes have many of them, if it is an interpreter that runs."""
    if planning.INTERPRETED:
        for name in ("BLOCK_M", "BLOCK_OUT", "STEP"):
            monkeypatch.setattr(packed, name, 16 if name == "BLOCK_M" else 32)


def recomputing(*args, **options):
    return moe_ops.fused_experts(*args, **options, recompute=True)


@kernels
@pytest.mark.parametrize("scheme", SCHEMES + ROUNDED)
def test_schemes(where, scheme):
    """The output and both gradients, of one computation."""
    case = Case(*where, scheme, top_k=3, K=72, I=40)
    given = leaves(case)
    out = call(moe_ops.fused_experts, case, given)
    within = tolerance(where, scheme)
    assert oracle.relative_error(out, case.reference()) <= within
    grads = torch.autograd.grad(out, list(given.values()), cotangent(case))
    compare(case, dict(zip(given, grads, strict=True)), expected_gradients(case), within)


@pytest.mark.slow
@kernels
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_global_scales_of_rows(where, activation):
    """Of both weights; on SM90 products with w.T are those of its own kernel."""
    case = Case(*where, "nvfp4_w4a16", activation, M=60, E=3, K=128, I=128, bias=True)
    for which in (1, 2):
        case.args[which] = with_global_rows(case.args[which], which)
    given = leaves(case)
    out = call(moe_ops.fused_experts, case, given)
    within = TOLERANCE[where[1]]
    assert oracle.relative_error(out, case.reference()) <= within
    grads = torch.autograd.grad(out, list(given.values()), cotangent(case))
    compare(case, dict(zip(given, grads, strict=True)), expected_gradients(case), within)


@kernels
@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True, "M": 20, "E": 6},
        {"M": 1, "top_k": 4},
        {"M": 37, "ids_dtype": torch.int64, "weights_dtype": BF16},
        {"M": 5, "E": 40, "top_k": 1},  # most experts have no rows
        {"M": 60, "E": 2, "top_k": 2},  # several blocks an expert
        {"activation": "swigluoai"},
        {"activation": "relu2_no_mul"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(where, options):
    check(Case(*where, "int4_w4a16:g32", **{"K": 64, "I": 32, **options}))


@kernels
@pytest.mark.parametrize(
    "scheme, options",
    [
        ("fp8_block", {"bias": True, "K": 136, "I": 16, "M": 4, "E": 2}),  # two groups of columns
        ("fp8_channel", {"on_input": True, "top_k": 1, "expert_map": True, "M": 20, "E": 6}),
        ("int8_w8a8", {"activation": "swigluoai", "bias": True}),
        ("mxfp4_mxfp8", {"activation": "relu2_no_mul", "K": 32, "I": 64}),
    ],
    ids=lambda of: of if isinstance(of, str) else "-".join(of),
)
def test_activations_are_rounded(where, scheme, options):
    """As they are without gradients; adapters see the rounded ones."""
    case = Case(*where, scheme, **options)
    within = tolerance(where, scheme) + 2e-3
    test_lora.check(case, [test_lora.adapter(case)], within=within)
    out = call(moe_ops.fused_experts, case, leaves(case))
    assert oracle.relative_error(out, case.reference()) <= within


@kernels
def test_no_pair_has_an_expert(where):
    nowhere = torch.full((5, 2), 11, dtype=torch.int32)
    grads = gradients(Case(*where, "mxfp4_w4a16", M=5, ids=nowhere))
    assert all((grad == 0).all() for grad in grads.values())


@kernels
@pytest.mark.parametrize("only", ["hidden_states", "topk_weights"])
def test_one_argument_alone(where, only):
    check(Case(*where, "int4_w4a16:g32"), only=[only])


@pytest.mark.slow
@kernels
@pytest.mark.parametrize("scheme", ["int4_w4a16:g32", "fp8_block"])
def test_recomputed_and_repeated_to_the_bit(where, scheme):
    case = Case(*where, scheme, M=20, top_k=3)
    first, second, again = gradients(case), gradients(case), gradients(case, recomputing)
    for name in first:
        assert torch.equal(first[name], second[name]) and torch.equal(first[name], again[name])


@kernels
def test_a_nan_gradient_stays_with_its_token(where):
    case = Case(*where, "mxfp4_w4a16", M=9, E=6)
    clean, spoiled, given = gradients(case), cotangent(case), leaves(case)
    spoiled[4] = math.nan
    out = call(moe_ops.fused_experts, case, given)
    found = dict(zip(given, torch.autograd.grad(out, list(given.values()), spoiled), strict=True))
    others = torch.arange(9) != 4
    assert found["hidden_states"][4].isnan().all()
    for name in ("hidden_states", "topk_weights"):
        assert torch.equal(found[name].cpu()[others], clean[name].cpu()[others])


@on_gpu
@pytest.mark.parametrize("rank", [0, 16, 32, 64])
@pytest.mark.parametrize(
    "scheme",
    ["int4_w4a16:g32", "int4_w4a16:g64:zp", "int4_w4a16:g128", "mxfp4_w4a16", "nvfp4_w4a16"]
    + ["int4_w4a16:channel:zp", "nf4_w4a16:g64", "fp4_w4a16:g32", "iq4_w4a16:g32"]
    + ["fp8_w8a16:block", "int8_w8a16:channel", "int8_w8a16:g32"],
)
@pytest.mark.parametrize("size", [(64, 128, 128), (300, 384, 256)], ids=("short", "long"))
def test_sizes_of_whole_tiles(where, scheme, rank, size):
    """Those that the kernel of SM90 takes: rings of stages that are not filled, and that wrap."""
    M, K, I = size
    case = Case(*where, scheme, M=M, E=3, top_k=2, K=K, I=I)
    if rank:
        test_lora.check(case, [test_lora.adapter(case, (rank, rank))], within=0.02)
    else:
        check(case)
    if not configs.on_sm90(torch.cuda.current_device()):
        return
    from moe_ops.kernels.mixed_gemm import sm90_packed, sm90_registers

    with mock.patch.object(fused, "run", wraps=fused.run) as run:
        first, second = gradients(case), gradients(case)
    kernels = {one.kernel for given in run.call_args_list for one in given.args[0]}
    assert sm90_packed.moe_ops_train_wgmma_packed in kernels
    in_registers = scheme.startswith(("int4", "nf4", "fp4", "iq4"))
    assert (sm90_registers.moe_ops_train_wgmma_registers in kernels) == in_registers
    assert packed.moe_ops_train_packed not in kernels
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- no copy of a weight -------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "scheme", ["int4_w4a16:g64:zp", "mxfp4_w4a16", "fp8_w8a16:block", "nf4_w4a16:g64"]
)
def test_no_tensor_holds_even_one_expert(where, recompute, scheme):
    """What the kernels write to is allocated by torch. All of it is for rows, which here are fewer
    than the elements of one expert's smaller weight.
    """
    case = Case(*where, scheme, M=6, K=64, I=64)
    x, w13, w2, weights, ids = case.args
    step = ExpertsCall(
        *(x, take_apart(w13), take_apart(w2), weights, ids, None, None, None),
        Options(moe_ops.activations.resolve("silu"), needs_grad=True),
    )
    products = planning.plan(step).products
    with Largest() as largest:
        forward, backward = [fused.FusedStep(step, UNADAPTED, products) for _ in range(2)]
        _, h, u, index = forward.forward()
        needs = Needs(True, False, False, True, False, False)
        kept = None if recompute else h
        dx, *_ = backward.backward(cotangent(case), kept, u, index, needs)
    assert oracle.relative_error(dx, expected_gradients(case)["hidden_states"]) < 0.02
    assert 0 < largest.elements < 64 * 64
    with Largest() as largest:  # it would see one
        w2.dequantize()
    assert largest.elements >= 64 * 64


@on_gpu
@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "mxfp4_w4a16", "nf4_w4a16:g64"])
def test_memory_of_a_step(where, scheme):
    """Less than the weights would take in 16 bits, and gradients of whole tiles."""
    case = Case(*where, scheme, M=200, E=64, top_k=2, K=1024, I=512)
    check(case)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(case)
    assert torch.cuda.max_memory_allocated() - before < 64 * 1024 * 512 * 2


@on_gpu
def test_a_captured_step_follows_the_routing(where):
    cases = [Case(*where, "int4_w4a16:g32", M=64, E=8, seed=seed) for seed in (0, 1)]
    cases[1].args[1:3] = cases[0].args[1:3]  # the weights of one
    check_captured_step(cases)


# --- beside the portable code --------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["int4_w4a16:g32", "fp8_block"])
def test_what_is_kept_in_plain_torch(scheme):
    """h is in 16 bits as that of the kernels, since what is traced runs anywhere; in fp32 where
    activations are quantized.
    """
    case = Case("cpu", BF16, scheme, K=64, I=32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = call(moe_ops.fused_experts, case, leaves(case))
    (h,) = [t for t in kept if t.shape == (14, 64)]
    assert h.dtype == (FP32 if scheme == "fp8_block" else BF16) and out.dtype == BF16
