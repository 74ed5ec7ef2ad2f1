"""The Triton kernels against fp64, under the interpreter on a CPU and compiled on a GPU (`-m
gpu`)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ops.activations import NAMES, Activation
from moe_ops.choose import plain as configs
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels.launch import Gpu
from moe_ops.ops.options import Options, encode
from moe_ops.ops.problem import Machine, Problem
from tests.support import oracle as formulas
from tests.support.cases import LIMITED
from tests.support.places import CUDA, INTERPRETED, everywhere

triton = pytest.importorskip("triton")

from moe_ops.backends.triton import backend

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Two roundings (h and the output) of half a unit each; the norm of the error stays below one unit.
# The interpreter truncates to 16 bits instead of rounding: two units.
TOLERANCE = {FP32: 2e-6, BF16: 2.0**-8, FP16: 2.0**-11}
GARBAGE = -(2**30)  # in integer workspaces: any address made from it would be far outside


# --- the oracle: a layer written out again, one pair at a time, in fp64 -------------------------


def oracle_expert(x, w13, w2, b13, b2, act):
    """One row through one expert, fp64."""
    v = w13.double() @ x
    v = v if b13 is None else v + b13.double()
    h = formulas.activation(v, act.name, act.alpha, act.beta, act.limit)
    y = w2.double() @ h
    return y if b2 is None else y + b2.double()


def oracle(c: Case) -> torch.Tensor:
    out = torch.zeros(c.x.shape, dtype=torch.float64, device=c.x.device)
    local = c.ids.tolist()
    if c.expert_map is not None:
        table = c.expert_map.tolist()
        local = [[table[i] if 0 <= i < len(table) else -1 for i in row] for row in local]
    for m, row in enumerate(local):
        for j, e in enumerate(row):
            if 0 <= e < c.w13.shape[0]:
                weight, x = c.weights[m, j].double(), c.x[m].double()
                if c.on_input:
                    x, weight = x * weight, 1.0
                b13 = None if c.b13 is None else c.b13[e]
                b2 = None if c.b2 is None else c.b2[e]
                out[m] += weight * oracle_expert(x, c.w13[e], c.w2[e], b13, b2, c.act)
    return out


# --- cases ---------------------------------------------------------------------------------------


class Case:
    """Inputs of one `experts` call: unit-scale data, distinct router weights, ids with everything
    in them."""

    def __init__(
        self,
        where,
        M,
        E,
        top_k,
        K,
        I,
        act="silu",
        *,
        ids=None,
        bias=False,
        seed=0,
    ):
        self.device, self.dtype = where
        g = torch.Generator().manual_seed(seed)
        self.act = act if isinstance(act, Activation) else Activation(act)
        N = 2 * I if self.act.gated else I

        def normal(*shape, scale=1.0):
            return (torch.randn(shape, generator=g) * scale).to(self.dtype).to(self.device)

        self.x = normal(M, K)
        self.w13, self.w2 = normal(E, N, K, scale=K**-0.5), normal(E, K, I, scale=I**-0.5)
        self.b13 = normal(E, N) if bias else None
        self.b2 = normal(E, K) if bias else None
        if ids is None:  # -1, in range and past the end
            ids = torch.randint(-1, E + 1, (M, top_k), generator=g, dtype=torch.int32)
        self.ids = ids.to(self.device)
        weights = (torch.arange(M * top_k) * 0.618034) % 1.0 + 0.25
        self.weights = weights.view(M, top_k).to(self.device)
        self.expert_map, self.on_input = None, False

    def problem(self) -> Problem:
        E, K, I = self.w2.shape
        return Problem(
            "experts",
            E,
            K,
            I,
            self.w13.shape[1],
            self.ids.shape[1],
            self.dtype,
            options=Options(self.act),
        )

    def run(self, out=None, workspaces=None) -> torch.Tensor:
        out = poisoned(self.x.shape, self.dtype, self.device) if out is None else out
        if workspaces is None:
            shapes = backend.workspace_shapes(self.x.shape[0], self.problem())
            workspaces = [poisoned(b.shape, b.dtype, self.device) for b in shapes]
        text = encode("", "", Options(self.act, self.on_input))
        backend.BACKEND.operators["experts"].op(
            *(out, *workspaces, self.x, self.w13, self.w2, self.weights, self.ids, []),
            *(self.b13, self.b2, self.expert_map, text),
        )
        return out

    def check(self, tolerance=None) -> torch.Tensor:
        out = self.run()
        assert_close(out, oracle(self), tolerance or TOLERANCE[self.dtype])
        return out


def poisoned(shape, dtype, device):
    return torch.full(
        shape, math.nan if dtype.is_floating_point else GARBAGE, dtype=dtype, device=device
    )


def assert_close(out, reference, tolerance):
    assert torch.isfinite(out).all()
    error = (out.double() - reference).norm() / reference.norm().clamp(min=1e-30)
    assert error < tolerance, f"relative error {error:.2e}"


# --- the expert layer ----------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("name", NAMES)
def test_every_activation(where, name):
    Case(where, 5, 3, 2, 48, 24, name, bias=True).check()


@everywhere
@pytest.mark.parametrize("act", LIMITED, ids=lambda act: act.name)
def test_limits_bite(where, act):
    Case(where, 4, 3, 2, 32, 20, act).check()


@everywhere
@pytest.mark.parametrize(
    "M, E, top_k, K, I",
    [
        (1, 4, 2, 128, 64),  # one token: no routing kernel
        (1, 1, 1, 1, 1),
        (3, 5, 2, 17, 1),
        (2, 3, 3, 1, 33),
        (7, 2, 1, 65, 35),
        (9, 4, 4, 130, 70),
        (2, 2, 2, 192, 96),
        (60, 3, 2, 33, 40),  # several blocks an expert
    ],
)
@pytest.mark.parametrize("name", ["silu", "relu2_no_mul"])
def test_odd_sizes(where, M, E, top_k, K, I, name):
    ids = torch.randint(0, E, (M, top_k), generator=torch.Generator().manual_seed(M))
    Case(where, M, E, top_k, K, I, name, ids=ids).check()


@INTERPRETED
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bit_inputs_under_the_interpreter(dtype):
    Case(("cpu", dtype), 5, 4, 2, 48, 32, bias=True).check(2 * TOLERANCE[dtype])


@everywhere
def test_no_tokens(where):
    out = Case(where, 0, 4, 2, 32, 16).run()
    assert out.shape == (0, 32)


@everywhere
@pytest.mark.parametrize("M", [1, 6])
def test_ids_out_of_range_contribute_exactly_zero(where, M):
    """A row without a local expert comes out zero even when it holds NaN, whatever its ids are."""
    far = [[-1, -1], [4, 2**31 - 1], [2**32, 2**32 + 1], [-(2**31), -(2**40)], [2, -1], [1, 3]]
    ids = torch.tensor(far[6 - M :] if M > 1 else far[2:3], dtype=torch.int64)
    c = Case(where, M, 4, 2, 32, 16, ids=ids)
    nowhere = ((ids < 0) | (ids >= 4)).all(1)
    c.x[nowhere] = math.nan
    c.weights[nowhere] = math.nan
    out = c.run()
    assert (out[nowhere] == 0).all()
    reference = oracle(c)
    if M > 1:
        assert_close(out[~nowhere], reference[~nowhere], TOLERANCE[c.dtype])


@everywhere
@pytest.mark.parametrize("M", [1, 40])
def test_all_tokens_on_one_expert_and_duplicate_ids(where, M):
    ids = torch.full((M, 3), 2, dtype=torch.int32)
    Case(where, M, 4, 3, 32, 16, ids=ids).check()


@everywhere
@pytest.mark.parametrize("M", [1, 9])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_expert_map(where, M, ids_dtype):
    c = Case(where, M, 3, 2, 32, 16)
    # global ids 0..6 of 7 on three local experts; one entry is out of range; ids reach past both
    # ends
    c.expert_map = torch.tensor([-1, 2, 0, -1, 9, 1, -1], dtype=ids_dtype, device=c.device)
    g = torch.Generator().manual_seed(3)
    c.ids = torch.randint(-2, 9, (M, 2), generator=g).to(ids_dtype).to(c.device)
    if M == 1:
        c.ids[0, 0] = 5
    c.check()
    c.expert_map = torch.stack([c.expert_map, c.expert_map * 0 - 1], 1)[:, 0]  # strided
    c.check()


@everywhere
@pytest.mark.parametrize("M", [1, 5])
def test_router_weight_on_input_weighs_once(where, M):
    c = Case(where, M, 3, 1, 32, 16, bias=True, ids=torch.arange(M)[:, None] % 3)
    c.on_input = True
    c.check()


@everywhere
def test_strided_routing_hidden_states_and_out(where):
    """Every stride that may differ from the usual one does; neighbours hold NaN or ids out of
    range."""
    c = Case(where, 6, 3, 2, 32, 16)
    ids, weights, x = c.ids, c.weights, c.x
    c.ids = torch.full((4, 6), 10**9, dtype=torch.int64, device=c.device).t()[:, ::2]
    c.ids.copy_(ids)
    c.weights = poisoned((6, 6), FP16, c.device)[:, 1::3]
    c.weights.copy_(weights)
    c.x = poisoned((6, 50), c.dtype, c.device)[:, 3:35]
    c.x.copy_(x)
    c.check()
    c.x = poisoned((32, 8), c.dtype, c.device)[:, 1:7].t()
    c.x.copy_(x)
    wide = poisoned((6, 40), c.dtype, c.device)
    out = c.run(out=wide[:, 4:36])
    assert_close(out, oracle(c), TOLERANCE[c.dtype])
    assert torch.isnan(wide[:, :4]).all() and torch.isnan(wide[:, 36:]).all()


@everywhere
@pytest.mark.parametrize("name", ["swigluoai", "silu", "gelu_no_mul"])
def test_transposed_weights(where, name):
    """gpt-oss stores (E, K, N): the op sees a transposed view, and slices along E, N and K."""
    c = Case(where, 5, 3, 2, 48, 32, name, bias=True)
    c.w13 = c.w13.mT.contiguous().mT
    c.w2 = c.w2.mT.contiguous().mT
    c.check()
    N = c.w13.shape[1]
    big = poisoned((6, N + 3, 60), c.dtype, c.device)
    view = big[1::2, 3:, 5:53]
    view.copy_(c.w13)
    c.w13 = view
    c.check()


@everywhere
def test_workspaces_as_shared_bytes(where):
    c = Case(where, 9, 3, 2, 33, 21)
    shapes = backend.workspace_shapes(9, c.problem())
    sizes = [b.dtype.itemsize * math.prod(b.shape) for b in shapes]
    flat = [
        poisoned((-(-size // 512) * 128,), FP32, c.device).view(torch.uint8) for size in sizes[:2]
    ]
    index = poisoned((sizes[2] // 4 + 7,), torch.int32, c.device)
    out = c.run(workspaces=[*flat, index])
    assert torch.equal(out, c.run())
    assert_close(out, oracle(c), TOLERANCE[c.dtype])


@everywhere
def test_nothing_is_written_outside_and_inputs_stay(where):
    """Guards around every workspace keep their contents; routing tensors and weights are not
    touched."""
    c = Case(where, 30, 4, 2, 32, 16)
    shapes = backend.workspace_shapes(30, c.problem())
    guarded = [poisoned((math.prod(b.shape) + 64,), b.dtype, c.device) for b in shapes]
    before = [t.clone() for t in (c.x, c.w13, c.w2, c.weights, c.ids)]
    c.run(workspaces=[g[32:-32] for g in guarded])
    for g in guarded:
        edge = torch.cat([g[:32], g[-32:]])
        assert (torch.isnan(edge) if edge.dtype.is_floating_point else edge == GARBAGE).all()
    for old, new in zip(before, (c.x, c.w13, c.w2, c.weights, c.ids), strict=True):
        assert torch.equal(old, new)


@everywhere
def test_bitwise_repeatable(where):
    c = Case(where, 40, 3, 4, 48, 24)
    first = c.run()
    for _ in range(1 if c.device == "cpu" else 20):
        assert torch.equal(first, c.run())


@everywhere
def test_many_tokens(where):
    """Blocks of more than 16 rows, and more of them than one group of the schedule holds."""
    M = 200 if where[0] == "cpu" else 1500
    g = torch.Generator().manual_seed(1)
    ids = torch.rand((M, 3), generator=g).square().mul(7).int() - 1  # skewed, with -1
    Case(where, M, 5, 3, 32, 16, ids=ids).check()


@everywhere
def test_rows_of_fewer_tokens_do_not_depend_on_the_batch_of_one_tile(where):
    """Within one tile choice a token's result is bitwise the same whoever else is in the batch."""
    c = Case(where, 8, 4, 2, 32, 16)
    whole = c.run()
    c.x, c.ids, c.weights = c.x[:5], c.ids[:5], c.weights[:5]
    assert torch.equal(c.run(), whole[:5])


# --- batched experts and grouped linear ----------------------------------------------------------


def run_batched(c: Case, x, counts):
    problem = dataclasses.replace(c.problem(), kind="batched_experts", top_k=0)
    shapes = backend.workspace_shapes(x.shape[1], problem)
    workspaces = [poisoned(b.shape, b.dtype, c.device) for b in shapes]
    out = poisoned(x.shape, c.dtype, c.device)
    backend.BACKEND.operators["batched_experts"].op(
        *(out, *workspaces, x, c.w13, c.w2, counts, [], c.b13, c.b2),
        encode("", "", Options(c.act)),
    )
    return out


@everywhere
@pytest.mark.parametrize("name", ["silu", "swigluoai", "gelu_tanh_no_mul"])
@pytest.mark.parametrize("T", [7, 40])
@pytest.mark.parametrize("contiguous", [True, False])
def test_batched_experts(where, name, T, contiguous):
    E, K, I = 4, 32, 24
    c = Case(where, 1, E, 1, K, I, name, bias=True)
    counts = torch.tensor([0, T, 3, -2], dtype=torch.int64 if contiguous else torch.int32)
    x = poisoned((E, T, K), c.dtype, c.device)
    if not contiguous:
        x = poisoned((T, E, K + 16), c.dtype, c.device).transpose(0, 1)[..., :K]
    g = torch.Generator().manual_seed(2)
    for e in range(E):
        n = max(int(counts[e]), 0)
        x[e, :n] = torch.randn((n, K), generator=g).to(c.dtype)
    out = run_batched(c, x, counts.to(c.device))
    for e in range(E):
        n = max(int(counts[e]), 0)
        if n:
            rows = [
                oracle_expert(x[e, t].double(), c.w13[e], c.w2[e], c.b13[e], c.b2[e], c.act)
                for t in range(n)
            ]
            assert_close(out[e, :n], torch.stack(rows), TOLERANCE[c.dtype])


def test_batched_experts_without_rows():
    where = ("cuda", BF16) if CUDA else ("cpu", FP32)
    c = Case(where, 1, 3, 1, 32, 16)
    x = torch.empty(3, 0, 32, dtype=c.dtype, device=c.device)
    assert run_batched(c, x, torch.zeros(3, dtype=torch.int32, device=c.device)).shape == x.shape


def run_grouped(x, weight, offsets, bias=None, out=None):
    E, N, K = weight.shape
    problem = Problem("grouped_linear", E, K, 0, N, 0, x.dtype)
    shapes = backend.workspace_shapes(x.shape[0], problem)
    workspaces = [poisoned(b.shape, b.dtype, x.device) for b in shapes]
    out = poisoned((x.shape[0], N), x.dtype, x.device) if out is None else out
    backend.BACKEND.operators["grouped_linear"].op(
        *(out, *workspaces, x, weight, offsets, [], bias),
        encode("", "", Options()),
    )
    return out


@everywhere
@pytest.mark.parametrize(
    "ends, S, K, N",
    [
        ([3, 3, 20, 37], 40, 33, 21),  # an empty group, several blocks, three rows past the end
        ([0, 0, 0, 0], 5, 32, 16),
        ([6, 6, 6, 6], 6, 48, 70),
        ([50, 51], 200, 32, 130),
        ([1], 1, 1, 1),
    ],
)
def test_grouped_linear(where, ends, S, K, N):
    device, dtype = where
    g = torch.Generator().manual_seed(S)
    E = len(ends)
    x = torch.randn(S, K, generator=g).to(dtype).to(device)
    x[ends[-1] :] = math.nan
    weight = (torch.randn(E, N, K, generator=g) / K**0.5).to(dtype).to(device)
    bias = torch.randn(E, N, generator=g).to(dtype).to(device)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    reference = torch.zeros(S, N, dtype=torch.float64, device=device)
    start = 0
    for e, end in enumerate(ends):
        reference[start:end] = x[start:end].double() @ weight[e].double().mT + bias[e].double()
        start = end
    out = run_grouped(x, weight, offsets, bias)
    assert_close(out, reference, TOLERANCE[dtype])
    assert (out[ends[-1] :] == 0).all()
    wide = poisoned((S, N + 9), dtype, device)[:, 4 : N + 4]
    transposed = weight.mT.contiguous().mT
    padded = poisoned((S, K + 5), dtype, device)[:, 2 : K + 2]
    padded.copy_(x)
    out = run_grouped(padded, transposed, offsets, bias.t().contiguous().t(), out=wide)
    assert_close(out, reference, TOLERANCE[dtype])


@given(
    st.integers(1, 5000), st.integers(1, 256), st.integers(1, 9000), st.integers(1, 9000),
    st.sampled_from([2, 4]), st.sampled_from([99 * 1024, 163 * 1024, 227 * 1024]),
)  # fmt: skip
def test_configs_fit_shared_memory(rows, groups, K, I, itemsize, limit):
    layer = LayerSizes(rows, groups, K, I, Gpu(limit, True, True))
    config = configs.choose(layer, itemsize, False)
    for n, k, num_stages, _ in (config.gemm1, config.gemm2):
        assert num_stages >= 2 and n >= 64 and k >= 16
        assert num_stages * (n + config.block_m) * k * itemsize <= limit


# --- what the backend accepts --------------------------------------------------------------------


def test_supports_says_why_not():
    problem = Problem("experts", 4, 64, 32, 64, 2, BF16)
    h200 = Machine("cuda", (9, 0), "NVIDIA H200", ("triton",))
    assert backend.supports(problem, h200) == []

    def reason(machine=h200, **changes):
        (text,) = backend.supports(dataclasses.replace(problem, **changes), machine)
        return text

    assert backend.supports(dataclasses.replace(problem, scheme="fp8_block"), h200) == []
    assert "interleaved" in reason(layout="interleaved")
    assert "torch.float64" in reason(dtype=torch.float64)
    assert "8.0" in reason(Machine("cuda", (7, 5)))
    assert "mps" in reason(Machine("mps"))
    assert bool(backend.supports(problem, Machine("cpu"))) != backend.INTERPRETED


def test_weights_of_another_dtype_are_refused():
    c = Case(("cuda", BF16) if CUDA else ("cpu", FP32), 3, 2, 1, 32, 16)
    c.w2 = c.w2.half()
    with pytest.raises(ValueError, match="w2 must have the input's dtype"):
        c.run()


# --- CUDA alone ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("M", [1, 24])
def test_captured_graph_follows_new_routing(M):
    c = Case(("cuda", BF16), M, 8, 2, 128, 64, bias=True)
    shapes = backend.workspace_shapes(M, c.problem())
    workspaces = [poisoned(b.shape, b.dtype, "cuda") for b in shapes]
    out = c.run(workspaces=workspaces)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c.run(out=out, workspaces=workspaces)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        c.ids.copy_(torch.randint(-1, 9, (M, 2), generator=g))
        c.x.copy_(torch.randn(c.x.shape, generator=g))
        out.fill_(math.nan)
        graph.replay()
        assert_close(out, oracle(c), TOLERANCE[BF16])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_capture_needs_a_warm_call_and_one_covers_its_tile():
    c = Case(("cuda", BF16), 24, 8, 2, 176, 80)  # sizes no other test has
    shapes = backend.workspace_shapes(24, c.problem())
    workspaces = [poisoned(b.shape, b.dtype, "cuda") for b in shapes]
    out = poisoned(c.x.shape, BF16, "cuda")
    with pytest.raises(RuntimeError, match="warm up"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        c.run(out=out, workspaces=workspaces)
    torch.cuda.synchronize()
    c.run(out=out, workspaces=workspaces)
    c.x, c.ids, c.weights = c.x[:17], c.ids[:17], c.weights[:17]  # another M, the same config
    out = out[:17]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c.run(out=out, workspaces=workspaces)
    out.fill_(math.nan)
    graph.replay()
    assert_close(out, oracle(c), TOLERANCE[BF16])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_offsets_past_two_to_the_31():
    """h and y have more than 2^31 elements, one expert's weight lies past 2^31 of them."""
    M, E, top_k, K, I = 140_000, 3, 8, 2048, 2048
    ids = torch.arange(M * top_k, dtype=torch.int32).view(M, top_k) % E
    c = Case(("cuda", BF16), 8, E, top_k, K, I, ids=ids[:8])
    last = 2**31 // (2 * I * K) + 1
    storage = torch.empty(last + 1, 2 * I, K, dtype=BF16, device="cuda")
    storage[0], storage[last // 2], storage[last] = c.w13[0], c.w13[1], c.w13[2]
    c.ids = c.ids * (last // 2) + (c.ids == 2) * (last % 2)
    c.x = c.x.repeat(M // 8, 1)
    c.ids = c.ids.repeat(M // 8, 1)
    c.weights = c.weights.repeat(M // 8, 1)
    w2 = torch.empty(last + 1, K, I, dtype=BF16, device="cuda")
    w2[0], w2[last // 2], w2[last] = c.w2[0], c.w2[1], c.w2[2]
    c.w13, c.w2 = storage, w2
    out = c.run()
    c.x, c.ids, c.weights = c.x[:8], c.ids[:8], c.weights[:8]
    assert_close(out[:8], oracle(c), TOLERANCE[BF16])
    assert (out.view(-1, 8, K) == out[:8]).all()
