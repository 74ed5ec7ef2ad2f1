"""A layer in passes over subsets of its experts has the bits of one call over all of them."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.backends.triton import backend
from moe_ops.kernels import launch
from moe_ops.ops.args import ExpertsArgs
from tests.meta.test_workspace import fenced, fences_hold
from tests.support.cases import (
    BF16,
    FP32,
    STATIC_SCALES,
    Case,
    assert_matches,
    garbage,
    tolerance,
)

TWO = ((0, 2, 5), (4, 1, 3))
THREE = ((3,), (0, 5, 1), (2, 4))
EIGHT = ((7, 0, 2, 5), (4, 1), (3, 6))
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
HERE = pytest.mark.skipif(not backend.INTERPRETED, reason="runs in Triton's interpreter")
SCHEMES = {
    **{"": BF16, "fp8_block": FP32, "int4_w4a16:g128": BF16, "mxfp4_w4a16": BF16},
    # one scale a row, known ones of all rows, and rounded rows
    **{"fp8_channel": FP32, "fp8_tensor_static": FP32, "mxfp8": FP32, "int4_w4a8": BF16},
    **{"nvfp4": FP32},
    **{"int4_w4a16:g32:zp+plain": BF16, "plain+mxfp4_w4a16": BF16},
}
# the first four in the fast tests, one for each way to multiply
OF_EACH = [
    pytest.param(name, marks=() if i < 4 else pytest.mark.slow) for i, name in enumerate(SCHEMES)
]


def some(whole: Tensor, rows: tuple[int, ...], bank: Tensor) -> Tensor:
    """The bank, with these rows of a tensor in its first ones and garbage behind."""
    garbage(bank)[: len(rows)] = whole[list(rows)]
    return bank


def in_passes(a: ExpertsArgs, case: Case, subsets: tuple[tuple[int, ...], ...], rows: int) -> None:
    """Run the arguments of a call over all experts in passes, in memory of the planned sizes."""
    E, slots = sum(map(len, subsets)), max(map(len, subsets))
    plan = moe_ops.explain(*case.args[:3], case.args[4], **case.options, backend="triton")
    problem = plan.problem.replace(slots=slots, chunk_rows=rows)
    shapes = backend.BACKEND.workspace_shapes(rows or len(case.args[0]), problem)
    memory = [fenced(*shape, case.device) for shape in shapes]
    whole = {
        name: value
        for name, value in zip(a._fields[5:], a[5:], strict=True)
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == E
    }
    # strides as those of all experts, which may have a layout of their own
    banks = {
        name: t.new_empty_strided((slots, *t.shape[1:]), t.stride()) for name, t in whole.items()
    }
    named = ("workspace13", "workspace2", "index_workspace")
    buffers = {name: garbage(inside) for name, (inside, _) in zip(named, memory, strict=True)}
    nowhere = torch.full((E,), -1, dtype=torch.int32, device=case.device)
    options = a.options._replace(slots=slots, chunk_rows=rows)
    of_slots = a._replace(expert_map=nowhere, options=options, **buffers, **banks)
    passed = []

    def passes(part: ExpertsArgs):
        for subset in subsets:
            slot_of = nowhere.clone()
            slot_of[list(subset)] = torch.arange(len(subset), dtype=torch.int32).to(case.device)
            weights = {name: some(whole[name], subset, banks[name]) for name in whole}
            passed.append(subset)
            yield part._replace(expert_map=slot_of, **weights)

    backend.BACKEND.takes.passes(of_slots, passes)
    assert passed == [*subsets] * (-(-len(case.args[0]) // rows) if rows else 1)
    assert all(fences_hold(fence) for _, fence in memory)


def check(
    scheme: str,
    subsets: tuple,
    rows: int = 0,
    *,
    device: str = "cpu",
    batch_invariant: bool = False,
    **sizes,
) -> list:
    """Compare one call over all experts with one in passes; the launches of the latter."""
    dtype, E = SCHEMES[scheme] if device == "cpu" else BF16, sum(map(len, subsets))
    case = Case(device, dtype, scheme, E=E, **({"M": 21, "K": 128, "I": 128} | sizes))
    if scheme == "nvfp4":  # one scale of all tokens that is known
        for i, scale in zip((1, 2), STATIC_SCALES, strict=True):
            known = torch.tensor(scale, device=device)
            case.args[i] = case.args[i]._replace(activation_scale=known)
    reference = case.reference()
    case.options["batch_invariant"] = batch_invariant
    options = {**case.options, "backend": "triton"}
    want = moe_ops.fused_experts(*case.args, **options)
    within = tolerance(dtype, scheme, device) * (1.25 if batch_invariant else 1)  # y is rounded
    assert_matches(want, reference, within)
    found, start = [], launch._start

    def spy(one, *rest):
        found.append(one)
        return start(one, *rest)

    def launcher(run):
        return lambda a, *passes: (run if passes else of_call)(a, *passes)

    def of_call(a: ExpertsArgs) -> None:
        in_passes(a, case, subsets, rows)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch, "_start", spy))
        for of in (backend._PLAIN, backend._MIXED, backend._TWO):
            lazy = of["experts"]
            stack.enter_context(mock.patch.object(lazy, "function", launcher(lazy.resolve())))
        out = moe_ops.fused_experts(*case.args, **options)
    assert torch.equal(out, want)
    return found


@HERE
@pytest.mark.parametrize("scheme", OF_EACH)
def test_bits_are_those_of_one_call(scheme):
    found = check(scheme, THREE, bias=True)
    products = [one.kernel.name for one in found if one.kernel.name.endswith("gemm2")]
    assert len(products) == 3
    assert [one.kernel.name for one in found].count("moe_ops_combine") == 1


@HERE
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_chunks_have_passes_each(scheme):
    check(scheme, TWO, 16, top_k=3)


@HERE
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g128"])
def test_bits_of_any_batch(scheme):
    """A token's experts are summed in the blocks of all experts of the layer."""
    found = check(scheme, EIGHT, batch_invariant=True, top_k=5)
    assert found[-1].named()["NUM_BLOCKS"] == 8


@HERE
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp8"])
def test_router_weights_on_the_input(scheme):
    check(scheme, TWO, on_input=True, top_k=1)


@HERE
@pytest.mark.slow
def test_tiles_are_those_of_the_whole_layer():
    tiles = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "NUM_STAGES", "E", "S")
    one, two = [
        {
            (one.kernel.name, name): one.named().get(name)
            for one in check("mxfp4_w4a16", subsets, M=9)
            for name in tiles
        }
        for subsets in (((0, 1, 2, 3, 4, 5),), TWO)
    ]
    assert one == two != {}


@pytest.mark.parametrize("scheme", [pytest.param(name, marks=ON_GPU) for name in SCHEMES])
@pytest.mark.parametrize("M", [5, 21, 300])
def test_bits_on_a_gpu(scheme, M):
    sizes = {"device": "cuda", "M": M, "K": 512, "I": 384}
    check(scheme, THREE, bias=True, **sizes)
    check(scheme, EIGHT, batch_invariant=True, **sizes)
    check(scheme, TWO, 16, top_k=1, on_input=True, **sizes)
