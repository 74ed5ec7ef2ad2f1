"""Backend cutlass beside fp8_block weights: its kernels under Triton's interpreter around products
in plain torch, and on a GPU the real ones.
"""

from __future__ import annotations

import math

import pytest
import torch

import moe_ops
from moe_ops.activations import NAMES, Activation
from moe_ops.backends.cutlass import products as native
from moe_ops.backends.cutlass.products import Scaled
from moe_ops.backends.cutlass.schemes import SCHEMES_OF_GROUPS, ends_products
from moe_ops.kernels.activation import activated
from tests.backends.cutlass.test_layer import products  # noqa: F401  (a fixture)
from tests.backends.cutlass.test_products import (
    ACTIVATED,
    ROWS,
    few_multiprocessors,
    layout,
)
from tests.matrix.test_quantized_input import arriving
from tests.support import oracle
from tests.support.cases import BF16, FP16, Case, assert_matches, poisoned_memory, tolerance
from tests.support.places import CUDA, DEVICES, devices

E4M3 = torch.float8_e4m3fn
GATED = [name for name in NAMES if ends_products(Activation(name))]
# the tensor cores add up 128 products in fewer bits than fp32 has: 4e-4 of the largest was seen
SUMS = 1e-3
# on a CPU a stand-in multiplies: there the calls are tested, and few cases do
placed_rows = pytest.mark.parametrize(
    "device, rows",
    [
        pytest.param(*place.values, rows, marks=place.marks, id=f"{place.values[0]}-{name}")
        for place in DEVICES
        for name, rows in ROWS.items()
        if place.values != ("cpu",) or name in ("none", "few")
    ],
)
needs_kernels = pytest.mark.skipif(
    CUDA and native.kernels(0) is None, reason="the kernels are not built, or not for this GPU"
)


def case_of(device: str, scheme: str = "fp8_block", **options) -> Case:
    sizes = {"M": 37, "E": 5, "top_k": 3, "K": 256, "I": 128}
    case = Case(device, BF16, scheme, **{**sizes, **options})
    for weight in case.args[1:3]:  # no block's scale stands for another's
        block = torch.arange(weight.scale.numel(), device=device).view(weight.scale.shape)
        weight.scale.mul_(2.0 ** (block % 5 - 2).float())
    return case


def check(case: Case) -> torch.Tensor:
    out = case.run("cutlass")
    assert_matches(out, case.reference(), tolerance(BF16, case.scheme, "cuda"))
    assert out.dtype == BF16 and (out[case.nowhere] == 0).all()
    return out


@devices
@pytest.mark.parametrize("scheme", SCHEMES_OF_GROUPS)
@pytest.mark.parametrize("K, I", [(256, 128), (128, 64), (336, 192), (144, 320)])
@pytest.mark.parametrize("bias", [False, True])
def test_values(device, scheme, K, I, bias, products):  # noqa: F811
    check(case_of(device, scheme, K=K, I=I, bias=bias))
    if products is not None:
        assert products.calls == [f"moe_ops_sm90_blocks_{name}" for name in ("activated", "x_wt")]


@devices
@pytest.mark.parametrize("activation", GATED)
def test_activations(device, activation):
    check(case_of(device, activation=activation, bias=True))


@devices
@pytest.mark.parametrize("K, I", [(16, 16), (400, 208)])
def test_rows_in_turns(device, K, I):
    """The blocks of gate and up rows in turns hold both: sizes are multiples of 16."""
    check(case_of(device, activation="swigluoai", K=K, I=I, bias=True))


@devices
@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True, "ids_dtype": torch.int64},
        {"on_input": True, "top_k": 1},
        {"E": 1, "top_k": 1},
        {"M": 2, "E": 17},  # most experts have no row
        {"M": 300, "E": 3, "top_k": 2, "ids": torch.arange(600).view(300, 2) % 2},
    ],
    ids=["map", "on_input", "one_expert", "few_rows", "many_rows"],
)
def test_routing(device, options):
    check(case_of(device, **options))


@devices
@pytest.mark.parametrize("on_input", [False, True])
def test_input_that_arrives_quantized(device, on_input):
    case = case_of(device, top_k=1, on_input=on_input)
    args, options = arriving(case, strided=on_input)
    with poisoned_memory():
        out = moe_ops.fused_experts(*args, **options, backend="cutlass")
    assert_matches(out, case.reference(), tolerance(BF16, case.scheme, "cuda"))
    assert (out[case.nowhere] == 0).all()


@devices
def test_nan_stays_in_its_token(device):
    ids = torch.arange(63)[:, None] % 3
    case = case_of(device, M=63, E=3, top_k=1, ids=ids)
    clean = check(case)
    case.args[0][::7] = math.nan
    out = case.run("cutlass")
    keep = torch.arange(63, device=out.device) % 7 != 0
    assert torch.equal(out[keep], clean[keep]) and torch.isnan(out[~keep]).all()


@devices
def test_chunks(device, products):  # noqa: F811
    case = case_of(device, M=40)
    whole = check(case)
    case.options["max_workspace_bytes"] = 60_000
    assert torch.equal(case.run("cutlass"), whole)
    assert products is None or len(products.calls) > 4  # two a chunk


@devices
@pytest.mark.parametrize("M", [1, 2, 3, 9])
@pytest.mark.parametrize("K, I", [(16, 64), (32, 64), (48, 64), (64, 64)])
def test_few_narrow_rows(device, M, K, I):
    """Scales and their alignment take more than the elements there."""
    ids = torch.arange(M)[:, None] % 3
    check(case_of(device, M=M, E=3, top_k=1, K=K, I=I, ids=ids))


@devices
def test_scales_at_any_address(device):
    """Those of a range of experts begin at any multiple of 4 bytes."""
    case = case_of(device, K=400, I=192)
    for i in (1, 2):
        scale = case.args[i].scale
        moved = torch.empty(scale.numel() + 1, device=device)[1:].view(scale.shape).copy_(scale)
        assert moved.data_ptr() % 16
        case.args[i] = case.args[i]._replace(scale=moved)
    check(case)


@devices
@pytest.mark.parametrize(
    "options, reason",
    [
        ({"I": 72}, "cutlass needs I to be a multiple of 16, got 72"),
        ({"I": 48}, "cutlass needs I to be a multiple of 64 with gate and up in halves, got 48"),
        ({"activation": "silu_no_mul"}, "cutlass runs fp8_block with gated activations alone"),
        ({"activation": "situ"}, "cutlass ends products with activations silu, .*, got 'situ'"),
        (
            {"dtype": FP16},
            "cutlass takes bfloat16 hidden_states with fp8_block, got torch.float16",
        ),
    ],
    ids=str,
)
def test_what_it_does_not_run(device, options, reason):
    options = dict(options)
    dtype = options.pop("dtype", BF16)
    case = Case(device, dtype, "fp8_block", **{"K": 64, "I": 64, **options})
    with pytest.raises(ValueError, match=reason):
        case.run("cutlass")


# --- the products alone --------------------------------------------------------------------------


def scaled(size: tuple[int, ...], scales: tuple[int, ...], device: str) -> Scaled:
    """e4m3 of unit scale, and scales that differ by factors."""
    data = (torch.randn(size, device=device) * 16).to(E4M3)
    wide = size[-1] ** -0.25  # of rows and of a weight: products of unit scale
    return Scaled(data, (torch.rand(scales, device=device) + 0.25) * wide / 16)


def wide_rows(rows: Scaled) -> torch.Tensor:
    scale = rows.scale.double().repeat_interleave(128, 0)[: rows.data.shape[1]]
    return rows.data.double() * scale.t()


def wide_weight(weight: Scaled, e: int) -> torch.Tensor:
    data, scale = weight.data[e].double(), weight.scale[e].double()
    scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return data * scale[: data.shape[0], : data.shape[1]]


def blocks(size: int) -> int:
    return -(-size // 128)


def rows_of(S: int, K: int, experts: torch.Tensor, which: int, device: str) -> Scaled:
    """Rows of which those of no expert and of every other one are NaN, in data or in scales."""
    rows = scaled((S, K), (blocks(K), S), device)
    skipped = (experts < 0) | (experts % 2 == which)
    data = rows.data.float()
    data[skipped] = math.nan
    rows.scale[:, skipped] = math.nan
    return Scaled(data.to(E4M3), rows.scale)


@placed_rows
@needs_kernels
@pytest.mark.parametrize("N, K", [(16, 16), (272, 144), (768, 400)])
def test_product(device, rows, N, K):
    ends, experts = layout(rows, device)
    E, S = len(rows), len(experts)
    weight = scaled((E, N, K), (E, blocks(N), blocks(K)), device)
    for which in (0, 1):
        x = rows_of(S, K, experts, which, device)
        out = torch.full((S, N), math.nan, device=device, dtype=BF16)
        native.multiply_blocks_into(out, x, weight, ends)
        assert out[experts < 0].isnan().all()
        exact = wide_rows(x)
        for e in range(1 - which, E, 2):
            expected = exact[experts == e] @ wide_weight(weight, e).mT
            close(out[experts == e].double(), expected)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    largest = float(expected.abs().max() if expected.numel() else 0)
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=SUMS * largest)


@placed_rows
@needs_kernels
@pytest.mark.parametrize("I, K", [(64, 16), (192, 144), (384, 400)])
@pytest.mark.parametrize("options", ACTIVATED.values(), ids=ACTIVATED)
@pytest.mark.parametrize("powers", (False, True))
def test_activated(device, rows, I, K, options, powers):
    activation, of_bias, _ = options
    of = activated(activation)
    ends, experts = layout(rows, device)
    E, S = len(rows), len(experts)
    weight = scaled((E, 2 * I, K), (E, blocks(2 * I), blocks(K)), device)
    bias = None if of_bias is None else torch.randn(E, 2 * I, device=device, dtype=of_bias)
    for which in (0, 1):
        x, exact = rows_of(S, K, experts, which, device), None
        poison = torch.full((S, I), math.nan, device=device).to(E4M3)
        out = Scaled(poison, torch.full((blocks(I), S), math.nan, device=device))
        native.activate_blocks_into(out, x, weight, ends, of, powers, bias)
        assert out.scale[:, experts < 0].isnan().all()
        assert out.data[experts < 0].float().isnan().all()
        exact = wide_rows(x)
        for e in range(1 - which, E, 2):
            mine = experts == e
            product = exact[mine] @ wide_weight(weight, e).mT
            biased = product if bias is None else product + bias[e].double()
            numbers = activation.alpha, activation.beta, activation.limit
            expected = oracle.activation(biased, activation.name, *numbers)
            check_quantized(out, mine, expected, error_behind(biased, activation), powers)


def error_behind(found: torch.Tensor, activation: Activation) -> torch.Tensor:
    """(rows, I): how far errors of the sums of gate and up (rows, 2 I) reach behind the
    activation, whose gate has a slope of at most 1.2.
    """
    parts = found.unflatten(1, (-1, 2) if activation.interleaved else (2, -1))
    magnitudes = parts.abs().sum(2 if activation.interleaved else 1) + abs(activation.beta)
    return SUMS * float(found.abs().max() if found.numel() else 0) * 1.2 * magnitudes


def check_quantized(
    out: Scaled, mine: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, powers: bool
) -> None:
    """Scales are those of the largest magnitudes, and elements within half a step of e4m3, beside
    the error of what is rounded.
    """
    count, I = expected.shape
    if count == 0:
        return
    groups, error = [
        torch.nn.functional.pad(x, (0, -I % 128)).view(count, blocks(I), 128)
        for x in (expected, error)
    ]
    scale, least = out.scale[:, mine].t().double(), groups.abs().amax(-1) / 448
    if powers:
        assert (torch.frexp(scale)[0] == 0.5).all()
        exact = torch.where(least == 0, 1.0, torch.exp2(torch.ceil(torch.log2(least))))
        near = (scale == exact) | (2 * scale == exact) | (scale == 2 * exact)
        assert near.all() and (scale != exact).sum() <= 2 + 0.02 * scale.numel()
    else:
        exact = torch.where(least == 0, 1.0, least)
        assert ((scale - exact).abs() <= 1e-6 * exact + error.amax(-1) / 448).all()
    found = torch.nn.functional.pad(out.data[mine].double(), (0, -I % 128)).view(groups.shape)
    found *= scale[:, :, None]
    # half a step of three bits of mantissa, or of the least numbers
    allowed = groups.abs() * 2**-4 + scale[:, :, None] * 2**-10 + error
    assert ((found - groups).abs() <= allowed * 1.07).all()
    # few large elements make up most of the norm, and the largest is exact without powers of two
    relative = (found - groups).norm() / groups.norm()
    assert relative < (2**-4 if powers else 0.04), relative


@placed_rows
@needs_kernels
def test_many_tiles_of_many_steps(device, rows, monkeypatch):
    few_multiprocessors(monkeypatch)
    test_product(device, rows, 784, 1168)
    for name in ("silu", "swigluoai, rows", "gelu"):  # the last one with biases
        test_activated(device, rows, 448, 1168, ACTIVATED[name], False)
