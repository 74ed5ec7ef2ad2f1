"""Workspace sizes: one formula for int and SymInt, the documented numbers, and large enough."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import moe_ops
from moe_ops import backends
from moe_ops.activations import Activation
from moe_ops.kernels.configs import block_bound
from moe_ops.meta import workspace
from moe_ops.meta.scales import DEEP_GEMM_UE8M0
from moe_ops.ops.problem import Buffer, Machine, Problem, Workspaces
from moe_ops.planning import plan as plans_module

H200 = Machine("cuda", (9, 0), "NVIDIA H200", backends.list_backends())
KINDS = ("experts", "batched_experts", "grouped_linear")
sizes = st.integers(1, 300)


def problem(kind: str, E: int, K: int, I: int, top_k: int, **facts) -> Problem:
    """A problem of silu experts, or of one linear with I columns."""
    if kind == "grouped_linear":
        return Problem(kind, E, K, 0, I, 0, torch.bfloat16).replace(**facts)
    top_k = top_k if kind == "experts" else 0
    return Problem(kind, E, K, I, 2 * I, top_k, torch.bfloat16).replace(**facts)


def plans(
    p: Problem, machine: Machine = H200, chunk_rows: int = 0
) -> dict[str, plans_module.Plan]:
    """The plan of each backend that takes a problem, and of all of them as tiers."""
    able = [b for b in backends.BACKENDS if p.kind in b.operators and not b.supports(p, machine)]
    tiers = {b.name: ((-1, b),) for b in able}
    if len(able) > 1:
        limits = [*range(4, 4 * len(able), 4), -1]
        tiers["auto"] = tuple(zip(limits, able, strict=True))
    return {
        name: plans_module.Plan(p.replace(chunk_rows=chunk_rows), machine, of)
        for name, of in tiers.items()
    }


def at(size, M: int) -> int:
    """The value of a size at M."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, M)))


def nbytes(buffer: Buffer) -> int:
    return buffer.dtype.itemsize * torch.Size(buffer.shape).numel()


def symbols() -> dict[str, tuple[ShapeEnv, torch.SymInt]]:
    """M as Dynamo makes it: with an example value (mark_dynamic) and without one
    (mark_unbacked)."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    backed, unbacked = ShapeEnv(), ShapeEnv()
    source = ConstantSource("M")
    symbol = backed.create_symbol(7, source, DimDynamic.DYNAMIC)
    number = unbacked.create_unbacked_symint()
    return {
        "backed": (backed, backed.create_symintnode(symbol, hint=7, source=source)),
        "unbacked": (unbacked, number),
    }


# --- int and SymInt ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sweep
@settings(deadline=None, max_examples=15)
@given(
    sizes, sizes, sizes, st.integers(1, 8), st.lists(st.integers(0, 5000), min_size=4, max_size=4)
)
@pytest.mark.parametrize("scheme", ("", "fp8_block", "fp8_channel"))
@pytest.mark.parametrize("kind, chunk_rows", [
    *[(kind, 0) for kind in KINDS], ("experts", 48), ("batched_experts", 1024),
])  # fmt: skip
def test_symbols_give_what_numbers_give(kind, chunk_rows, scheme, E, K, I, top_k, tokens):
    found = plans(problem(kind, E, K, I, top_k, scheme=scheme), chunk_rows=chunk_rows)
    assert "torch" in found
    for name, plan in found.items():
        for how, (env, M) in symbols().items():
            symbolic = plan.workspace_shapes(M)
            assert not env.guards, f"{name} guards on a {how} number of tokens: {env.guards}"
            assert not env.deferred_runtime_asserts
            # a backed symbol stands for 2 and above
            for count in [2 + t for t in tokens] if how == "backed" else tokens:
                plain = plan.workspace_shapes(count)
                for one, other in zip(symbolic, plain, strict=True):
                    assert one.dtype == other.dtype
                    assert all(type(size) is int for size in other.shape), "ints must give ints"
                    assert tuple(at(size, count) for size in one.shape) == other.shape


def test_every_backend_is_looked_at():
    seen = set()
    for kind, scheme in itertools.product(KINDS, ("", "fp8_block", "fp8_channel")):
        seen |= set(plans(problem(kind, 4, 128, 128, 2, scheme=scheme)))
    facts = {"scheme": "mxfp4_w4a8", "layout": DEEP_GEMM_UE8M0, "activation": Activation("silu")}
    sm100 = dataclasses.replace(H200, capability=(10, 0))
    seen |= set(plans(problem("experts", 4, 128, 128, 2, **facts), sm100))
    assert seen == {*backends.list_backends(), "auto"}


# --- the formulas --------------------------------------------------------------------------------


@given(sizes, sizes, sizes, sizes, st.integers(1, 8))
def test_dense_layout(M, N, K, I, top_k):
    rows = M * top_k
    assert workspace.dense(M, N, K, I, top_k) == ((rows, max(I, K)), (rows, max(N, K)))


@given(st.integers(0, 300), st.integers(1, 8), sizes, st.integers(1, 256))
def test_contiguous_layout(M, top_k, E, alignment):
    pairs = M * top_k
    rows = pairs + min(pairs, E) * (alignment - 1)
    rows += -rows % alignment
    assert workspace.padded_rows(M, top_k, E, alignment) == rows


@given(sizes, sizes, sizes, sizes, sizes)
def test_masked_layout(E, T, N, K, I):
    assert workspace.masked(E, T, N, K, I) == ((E, T, max(K, N)), (E, T, I))


def test_documented_sizes():
    """Numbers worked out by hand from the layouts' definitions."""
    assert workspace.dense(3, 10, 8, 5, 2) == ((6, 8), (6, 10))
    assert workspace.padded_rows(3, 2, 4, 16) == 80  # 6 + 4 * 15 = 66
    assert workspace.padded_rows(1, 2, 64, 128) == 256  # 2 experts' pads
    assert workspace.masked(4, 3, 10, 8, 5) == ((4, 3, 10), (4, 3, 5))
    torch_plan, triton_plan = (
        plans(problem("experts", 4, 8, 5, 2))[name] for name in ("torch", "triton")
    )
    assert torch_plan.workspace_shapes(3) == (
        ((6, 8), torch.bfloat16),
        ((6, 10), torch.bfloat16),
        ((0,), torch.int32),
    )
    # h in bf16, y in fp32; 6 pairs of 4 experts need at most (6 + 4 * 15) // 16 = 4 blocks of 16
    # rows, of 4 numbers each
    sizes_in_bytes = [nbytes(buffer) for buffer in triton_plan.workspace_shapes(3)]
    assert sizes_in_bytes == [6 * 5 * 2, 6 * 8 * 4, (4 * 4 + 6) * 4]
    quantized = plans(problem("experts", 4, 8, 5, 2, scheme="fp8_block"))["torch"]
    assert [b.dtype for b in quantized.workspace_shapes(3)[:2]] == [torch.float32] * 2


# --- upper bounds, against every routing there is ------------------------------------------------


def most_blocks(rows: int, groups: int, block_m: int) -> int:
    """Most blocks that `rows` rows need over all ways to share them out to `groups` groups."""
    ways = itertools.combinations_with_replacement(range(groups), rows)
    return max(sum(-(-way.count(g) // block_m) for g in range(groups)) for way in ways)


CASES = [
    (rows, groups, block_m)
    for rows in range(8)
    for groups in range(1, 5)
    for block_m in (1, 2, 3, 4)
]


def test_bound_of_blocks_is_reached_and_never_passed():
    for rows, groups, block_m in CASES:
        assert block_bound(rows, groups, block_m) == most_blocks(rows, groups, block_m)


def test_contiguous_rows_hold_every_routing():
    for pairs, E, alignment in CASES:
        needed = most_blocks(pairs, E, alignment) * alignment
        rows = workspace.padded_rows(pairs, 1, E, alignment)
        assert needed <= rows <= needed + alignment
        assert rows % alignment == 0


@given(st.integers(0, 10**6), st.integers(1, 512), st.integers(16, 256), st.integers(1, 256))
def test_bound_of_blocks_falls_as_blocks_grow(rows, groups, block_m, more):
    """So that the table sized for the smallest BLOCK_M holds the blocks of any other."""
    assert block_bound(rows, groups, block_m + more) <= block_bound(rows, groups, block_m) <= rows


def fenced(shape, dtype, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor of that many bytes inside a buffer of ones, and the bytes on both
    sides."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    whole = torch.full((count + 512,), 0xFF, dtype=torch.uint8, device=device)
    return whole[256 : count + 256].view(dtype).view(shape), whole


def fences_hold(whole: torch.Tensor) -> bool:
    return bool((whole[:256] == 0xFF).all() and (whole[-256:] == 0xFF).all())


@pytest.mark.parametrize("M", (1, 2, 5, 19))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", backends.list_backends())
def test_kernels_stay_inside_their_workspaces(name, kind, M):
    """Buffers of exactly the stated sizes, full of NaN, between fences; a run on workspaces four
    times as large gives the same numbers."""
    E, K, I, top_k = 3, 16, 12, 2
    backend = backends.named(name)
    here = Machine("cpu", available=(name,))
    p = problem(kind, E, K, I, top_k, dtype=torch.float32)
    if kind not in backend.operators or backend.supports(p, here):
        pytest.skip(f"{name} has no {kind} on a CPU")
    w13, w2 = torch.randn(E, 2 * I, K), torch.randn(E, K, I)
    # the routing that needs most: one row for each expert but the last, which has all the others,
    # and for the linear one row past them all
    ids = torch.tensor([min(i, E - 1) for i in range(M * top_k)])
    x, ids = torch.randn(M, K), ids[torch.randperm(M * top_k)].view(M, top_k)
    blocks, counts = torch.randn(E, M, K), torch.tensor([M, 0, M])
    ends = torch.tensor([1, 2, max(M - 1, 2)], dtype=torch.int32).clamp(max=M)
    weights = torch.rand(M, top_k)

    def call():
        if kind == "experts":
            return moe_ops.fused_experts(x, w13, w2, weights, ids, backend=name)
        if kind == "batched_experts":
            out = moe_ops.batched_experts(blocks, w13, w2, counts, backend=name)
            return torch.cat([out[e, : counts[e]] for e in range(E)])
        return moe_ops.grouped_linear(x, w13, ends, backend=name)

    shapes = backend.workspace_shapes
    fences = []

    class Fenced(plans_module.Plan):
        factor = 1

        def workspace_shapes(self, M):
            return Workspaces(
                *[
                    Buffer((self.factor * b.shape[0], *b.shape[1:]), b.dtype)
                    for b in shapes(M, self.problem)
                ]
            )

    results = []
    for factor in (1, 4):

        def allocate(bound, direct, call, M, factor=factor):
            plan = Fenced(bound.plan.problem, bound.plan.machine, bound.plan.tiers)
            (shape, dtype), device = call.output(), call.hidden_states.device
            object.__setattr__(plan, "factor", factor)
            found = [torch.empty(*shape, dtype=dtype, device=device)]
            for shape, dtype in plan.workspace_shapes(M):
                inside, whole = fenced(shape, dtype)
                found.append(inside)
                fences.append(whole)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe_ops.planning.bind.BoundPlan, "allocate", allocate)
            results.append(call())
    assert len(fences) == 6 and all(fences_hold(whole) for whole in fences)
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


# --- pieces and tiers ----------------------------------------------------------------------------


def test_carve_sees_the_first_bytes():
    buffer = torch.zeros(4, 8, dtype=torch.uint8)
    piece = workspace.carve(buffer, (2, 3), torch.float32)
    assert piece.shape == (2, 3) and piece.dtype == torch.float32 and piece.is_contiguous()
    assert piece.data_ptr() == buffer.data_ptr()
    piece.fill_(1.0)
    assert buffer.view(-1)[:24].view(torch.float32).tolist() == [1.0] * 6
    assert not buffer.view(-1)[24:].any()
    whole = workspace.carve(torch.zeros(5, 2, dtype=torch.bfloat16), (5,), torch.float32)
    assert whole.shape == (5,)
    assert workspace.carve(torch.zeros(0), (0, 7), torch.float32).shape == (0, 7)
    with pytest.raises(RuntimeError):
        workspace.carve(buffer, (3, 3), torch.float32)


def sized(name: str, *buffers: Buffer):
    """A backend whose workspaces have these shapes, times M in the first dimension."""

    def workspace_shapes(M, _):
        return Workspaces(*[Buffer((M * b.shape[0], *b.shape[1:]), b.dtype) for b in buffers])

    original = backends.named("torch")
    return dataclasses.replace(original, name=name, workspace_shapes=workspace_shapes)


def test_tiers_share_the_largest_of_each_buffer():
    small = sized(
        "small",
        Buffer((1, 100), torch.float32),  # 400 bytes a token
        Buffer((2, 3), torch.bfloat16),  # 12
        Buffer((5,), torch.int32),  # 20
    )
    large = sized(
        "large",
        Buffer((1, 150), torch.bfloat16),  # 300
        Buffer((3,), torch.float32),  # 12
        Buffer((200,), torch.int32),  # 800
    )
    p = problem("experts", 4, 8, 5, 2, activation=Activation("silu"))
    for tiers in (((4, small), (-1, large)), ((4, large), (-1, small))):
        plan = plans_module.Plan(p, H200, tiers)
        # the first one's only for 4 rows
        most = [b.workspace_shapes(m, p) for (_, b), m in zip(tiers, (4, 4000), strict=True)]
        assert [nbytes(b) for b in plan.workspace_shapes(4000)] == [
            -(-max(map(nbytes, of_tiers)) // 128) * 128 for of_tiers in zip(*most, strict=True)
        ]
        # whole multiples of 128 bytes: 1200, 36 and 2400 bytes at M = 3
        assert plan.workspace_shapes(3) == (
            ((1280,), torch.uint8),
            ((128,), torch.uint8),
            ((608,), torch.int32),
        )
        assert plan.workspace_shapes(0) == (
            ((0,), torch.uint8),
            ((0,), torch.uint8),
            ((0,), torch.int32),
        )
    # a single tier keeps its shapes and dtypes as they are
    assert plans_module.Plan(p, H200, ((-1, small),)).workspace_shapes(3)[0] == (
        (3, 100),
        torch.float32,
    )


@given(st.integers(0, 5000), sizes, sizes, sizes, st.integers(1, 8))
def test_tiers_hold_every_backend(M, E, K, I, top_k):
    found = plans(problem("experts", E, K, I, top_k))
    whole = found.pop("auto")
    tiered = whole.workspace_shapes(M)
    for limit, backend in whole.tiers:
        needed = found[backend.name].workspace_shapes(M if limit < 0 else min(M, limit))
        for one, shared in zip(needed, tiered, strict=True):
            assert nbytes(one) <= nbytes(shared)
