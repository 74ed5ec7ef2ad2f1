"""The kernels of one token beside weights of 4 or 8 bits (kernels/mixed_gemm/gemv.py) against
fp64: interpreted on a CPU, compiled on a GPU.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

import moe_ops
from moe_ops.choose import candidates
from moe_ops.choose import mixed as choose
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels import launch
from moe_ops.kernels.configs import GEMV, GemmConfig, LayerConfig
from moe_ops.kernels.launch import gpu
from moe_ops.kernels.mixed_gemm.configs import FORMATS as DOTTED
from moe_ops.kernels.mixed_gemm.operands import describe
from moe_ops.schemes import get_scheme
from tests.kernels.gemm.test_gemv import amid_nan, off_by, steps_of
from tests.kernels.mixed_gemm.test_sm80_mma import FORMATS
from tests.support import cases
from tests.support.cases import BF16, FP16, FP32, Case, assert_matches, prepared, refill, tolerance
from tests.support.places import everywhere

pytest.importorskip("triton")

IDS = torch.tensor([[2, 0, 3]])
SIZES = {"M": 1, "E": 4, "top_k": 3, "K": 160, "I": 96, "ids": IDS}
ONE = GemmConfig(64, 256, 1, 2), GemmConfig(128, 512, 1, 2)
FEW = LayerConfig(*ONE, 1, 64, GEMV, direct=True)
KERNELS = ["moe_ops_mixed_gemv1", "moe_ops_mixed_gemv2"]
# one of each way that weights are decoded and scaled
WAYS = [
    "int4_w4a16:g32",
    "int4_w4a16:channel:zp",
    "int8_w8a16:g32:zp",
    "int4_w4a16:g32:min",
    "int4_w4a16:g32:super:min",
    "fp8_w8a16:block",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels that a test launched, which leave out those of sm90_mma.py on a GPU."""
    found: list[str] = []
    monkeypatch.setattr(choose, "token_facts", lambda *_: None)
    run = launch.run

    def spy(launches, *rest):
        found.extend(one.kernel.name for one in launches)
        return run(launches, *rest)

    monkeypatch.setattr(launch, "run", spy)
    return found


def few(where):
    """Few programs, as the interpreter takes its time for each; a GPU takes the usual ones."""
    return override(FEW) if where[0] == "cpu" else contextlib.nullcontext()


def check(case: Case) -> None:
    with few((case.device,)):
        case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", [name for name in FORMATS if describe(name).name in DOTTED])
def test_formats(where, scheme, kernels):
    # rows of whole units of planes
    sizes = SIZES | {"K": 256, "I": 128} if scheme.startswith(("int5", "int6")) else SIZES
    check(Case(*where, scheme, **sizes, bias=True))
    assert kernels == KERNELS


@everywhere
@pytest.mark.parametrize("scheme", ["int4_w4a16:g32:zp", "nvfp4_w4a16"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"bias": True, "expert_map": True, "ids": torch.tensor([[1, 4, 2]])},
        {"activation": "swigluoai", "bias": True},
        {"activation": "relu2_no_mul", "bias": True},
        {"on_input": True, "top_k": 1, "ids": IDS[:, :1]},
        {"ids": torch.tensor([[-1, 2, 9]]), "bias": True},  # two experts are elsewhere
        {"ids": torch.tensor([[2, 2, 0]]), "ids_dtype": torch.int64, "weights_dtype": BF16},
    ],
    ids=str,
)
def test_values(where, scheme, how, kernels):
    check(Case(*where, scheme, **{**SIZES, **how}))
    assert kernels == KERNELS


@everywhere
@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16"])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_prepared_weights(where, scheme, activation, kernels, monkeypatch):
    """Words with bits in another order: the same numbers."""
    if where[0] == "cuda" and where[1] != BF16:
        pytest.skip("prepared weights are beside bfloat16 on a GPU")
    case = Case(*where, scheme, activation, **{**SIZES, "K": 192, "I": 128}, bias=True)
    expected = case.reference()
    for i in (1, 2):
        case.args[i] = prepared(case.args[i])
    with few(where):
        out = moe_ops.fused_experts(*case.args, **case.options, backend="triton")
    assert_matches(out, expected, tolerance(case.dtype, scheme, case.device))
    assert kernels == KERNELS


@everywhere
@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16"])
def test_prepared_experts_that_are_parts_of_others(where, scheme, kernels):
    """Every second one; what lies between belongs to others."""
    if where[0] == "cuda" and where[1] != BF16:
        pytest.skip("prepared weights are beside bfloat16 on a GPU")
    case = Case(*where, scheme, **{**SIZES, "E": 6, "K": 192, "I": 128})
    refill(case, 1)
    case.args[4] %= 3
    ready = [prepared(w)[1::2] for w in case.args[1:3]]
    case.args[1:3] = [w[1::2] for w in case.args[1:3]]
    expected = case.reference()
    case.args[1:3] = ready
    with few(where):
        out = moe_ops.fused_experts(*case.args, **case.options, backend="triton")
    assert_matches(out, expected, tolerance(case.dtype, scheme, case.device))
    assert kernels == KERNELS


@everywhere
@pytest.mark.parametrize("scheme", ["int4_w4a16:g32", "mxfp4_w4a16"])
def test_no_expert_is_here(where, scheme, kernels):
    case = Case(*where, scheme, **{**SIZES, "ids": torch.tensor([[-1, 4, 2**31 - 1]])}, bias=True)
    with few(where):
        assert (case.run("triton") == 0).all()
    assert kernels == KERNELS


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
@pytest.mark.parametrize(
    "first, second", [((32, 128, 2), (64, 64, 1)), ((128, 512, 1), (32, 128, 4))]
)
def test_every_kind_of_tile(where, scheme, first, second):
    """One step and several, steps that pass from one expert to the next and past the last, and
    rows past the end."""
    case = Case(*where, scheme, **SIZES)
    gemms = [GemmConfig(rows, k, 1, warps) for rows, k, warps in (first, second)]
    with override(LayerConfig(*gemms, 1, 64, GEMV, direct=True)):
        case.check("triton")


@everywhere
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("group, has_zero", [(32, True), (64, False), (128, True)])
def test_any_codes_and_zero_points(where, dtype, group, has_zero, kernels):
    """Checkpoints bring scales in a dtype of their own, and zero points that no data made."""
    device, to = where
    g = torch.Generator().manual_seed(group)
    case = Case(device, to, **{**SIZES, "K": 256, "I": 128})
    for i, (N, K) in ((1, (256, 256)), (2, (256, 128))):
        q = torch.randint(0, 256, (4, N, K // 2), generator=g).to(torch.uint8)
        scale = ((torch.rand(4, N, K // group, generator=g) + 0.5) / 80).to(dtype)
        zero = torch.randint(0, 16, scale.shape, generator=g).to(torch.uint8)
        q, scale, zero = q.to(device), scale.to(device), zero.to(device) if has_zero else None
        case.args[i] = moe_ops.from_quantized(f"int4_w4a16:g{group}", q, scale, zero_point=zero)
    case.scheme = f"int4_w4a16:g{group}" + ":zp" * has_zero
    check(case)
    assert kernels == KERNELS


@everywhere
@pytest.mark.parametrize(
    "scheme", ["int4_w4a16:g32", "mxfp4_w4a16", "nvfp4_w4a16", "int8_w8a16:g64"]
)
def test_scales_of_very_different_size(where, scheme, kernels):
    """Each group of columns, row and expert has a size of its own: no scale stands for another."""
    device, dtype = where
    K = I = 256
    case = Case(device, FP32, **{**SIZES, "K": K, "I": I})
    x, w13, w2 = case.args[:3]
    g = torch.Generator().manual_seed(0)

    def sizes(*shape, step):
        one = 2.0 ** torch.randint(-3, 4, shape, generator=g)
        return one.repeat_interleave(step, -1).to(device)

    step = get_scheme(scheme).quantized_weight.group.cols
    columns = sizes(1, K // step, step=step)
    x /= columns
    w13 *= columns * sizes(4, 2 * I, 1, step=1)
    w2 *= sizes(4, K, I // step, step=step)
    weights = [moe_ops.quantize(w.to(dtype), scheme) for w in (w13, w2)]
    case.args[:3] = [x.to(dtype), *weights]
    case.dtype, case.scheme = dtype, scheme
    check(case)
    assert kernels == KERNELS


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
def test_nan_stays_where_it_is(where, scheme):
    """NaN of experts that nobody chose, the first among them, of the routing weight of one
    elsewhere, and in x."""
    case = Case(*where, scheme, **{**SIZES, "ids": torch.tensor([[2, -1, 3]])})
    expected = case.reference()
    case.args[3][0, 1] = math.nan
    for w in case.args[1:3]:
        for t in (w.scale, w.global_scale):
            if t is not None:
                t[:2].view(torch.uint8).fill_(255)
    with few(where):
        assert_matches(case.run("triton"), expected, tolerance(where[1], scheme, where[0]))
        case.args[0][0, 3] = math.nan
        assert case.run("triton").isnan().all()


@everywhere
@pytest.mark.parametrize("scheme", WAYS)
def test_strides(where, scheme, kernels):
    """A token whose columns lie apart, and weights, scales and zero points that are parts of
    others."""
    case = Case(*where, scheme, **SIZES)
    x, w13, w2, weights, ids = case.args
    wide = cases.garbage(x.new_empty(1, 3 * x.shape[1]))
    wide[:, ::3] = x
    names = ("qdata", "scale", "zero_point")
    w13, w2 = [
        w._replace(**{n: amid_nan(getattr(w, n)) for n in names if getattr(w, n) is not None})
        for w in (w13, w2)
    ]
    case.args = [wide[:, ::3], w13, w2, weights, ids]
    check(case)
    assert kernels == KERNELS


@pytest.mark.parametrize("spoil", [lambda t: off_by(t, 1), lambda t: steps_of(t, 1)])
@pytest.mark.parametrize("which", [1, 2])
def test_weights_out_of_16_byte_step_take_other_kernels(which, spoil, kernels):
    case = Case("cpu", FP32, "int4_w4a16:g32", **SIZES)
    case.args[which] = case.args[which]._replace(qdata=spoil(case.args[which].qdata))
    case.check("triton")
    assert kernels and not any("gemv" in kernel for kernel in kernels)


@pytest.mark.parametrize(
    "scheme, sizes",
    [
        ("nvfp4_w4a16", {"K": 144}),
        ("int4_w4a16:channel", {"I": 80}),
        ("mxfp6_e3m2_w6a16", {}),
        ("int4_w4a8", {"K": 128, "I": 128}),
        ("int4_w4a16:g32", {"M": 2, "ids": None}),
    ],
)
def test_other_layers_take_other_kernels(scheme, sizes, kernels):
    Case("cpu", FP32, scheme, **{**SIZES, **sizes}).check("triton")
    assert kernels and not any("gemv" in kernel for kernel in kernels)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "K, I, top_k", [(4096, 14336, 2), (2048, 768, 8), (2880, 2880, 4), (96, 64, 1)]
)
def test_configs_to_search(bits, K, I, top_k):
    """Every warp of a program has columns of its own, and the tiles taken without a table are
    among those searched.
    """
    base = choose.choose_gemv(LayerSizes(top_k, 8, K, I, gpu(-1), top_k), bits)
    ((first, second),) = candidates.mixed_gemv_space(base, top_k, K, I, bits)
    ones, twos = [config.gemm1 for config in first], [config.gemm2 for config in second]
    assert base.kernel == GEMV and base.gemm1 in ones and base.gemm2 in twos
    for gemm in (*ones, *twos):
        assert gemm.num_warps == 1 or gemm.block_k * bits // 128 >= 32 * gemm.num_warps
