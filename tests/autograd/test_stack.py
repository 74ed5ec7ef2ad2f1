"""Calls whose tokens have adapters of a stack, against fp64, for random mixtures."""

import math

import pytest
import torch

import moe_ops
from moe_ops import LoRA, LoRAStack
from tests.support import oracle
from tests.support.cases import BF16, FP32, FP64, Case, assert_matches, poisoned_memory, tolerance
from tests.support.fake_cuda import Recorder, fake_gpu

MATRICES = ("a13", "b13", "a2", "b2")
NO_ADAPTER = [-1, -7, 2**31 - 1, -(2**31)]


def adapters_of(case: Case, ranks, seed=0, dtype=None, of=MATRICES) -> list[LoRA]:
    """Random adapters of these ranks, whose products are as large as the weights."""
    g = torch.Generator().manual_seed(seed + 1)
    E, N, K = oracle.weight(case.args[1]).shape
    I = oracle.weight(case.args[2]).shape[2]
    found = []
    for i, r in enumerate(ranks):
        sizes = {"a13": (r, K), "b13": (N, r), "a2": (r, I), "b2": (K, r)}
        made = {
            name: (torch.randn(E, *size, generator=g) * size[1] ** -0.5)
            .to(dtype or case.dtype)
            .to(case.device)
            for name, size in sizes.items()
            if name in of
        }
        found.append(LoRA(*[made.get(name) for name in MATRICES], 0.5 + 0.25 * i))
    return found


def ids_of(case: Case, n: int, seed=0, dtype=torch.int64) -> torch.Tensor:
    """An adapter for each token, or any number that is none."""
    g = torch.Generator().manual_seed(seed)
    M = case.args[0].shape[0]
    ids = torch.randint(0, n + 2, (M,), generator=g)
    none = torch.tensor([*NO_ADAPTER, n])[torch.arange(M) % 5]
    return torch.where(ids < n, ids, none).to(dtype).to(case.device)


def expected(case: Case, adapters, adapter_ids, round_hidden=False) -> torch.Tensor:
    """The layer in fp64, one (token, expert) pair after the other. A scheme rounds what weights
    multiply; adapters multiply tokens before that, and h before or (`round_hidden`) after it.
    """
    x, w13, w2, weights, ids = case.args
    options, act = case.options, case.options["activation"]
    b13, b2 = options.get("w13_bias"), options.get("w2_bias")
    on_input = options.get("router_weight_on_input", False)
    pairs = oracle.local_pairs(ids, w13.shape[0], options.get("expert_map"))
    out = torch.zeros(x.shape, dtype=FP64, device=x.device)
    if not pairs:
        return out
    m, j, e = torch.tensor(pairs, device=x.device).T
    rows, scale = x.double()[m], weights.double()[m, j].unsqueeze(1)
    if on_input:
        rows = rows * scale
    known = [i if 0 <= i < len(adapters) else None for i in adapter_ids.tolist()]

    def product(rows, rounded, w, bias, a, b):
        y = oracle._linear(rounded, oracle.weight(w), bias, e)
        for p, (token, expert) in enumerate(zip(m.tolist(), e.tolist(), strict=True)):
            if known[token] is None or adapters[known[token]][a] is None:
                continue
            one = adapters[known[token]]
            u = one[a].double()[expert] @ rows[p]
            y[p] += one.scale * (one[b].double()[expert] @ u)
        return y

    def rounded(rows, w):
        scheme = getattr(w, "scheme", "")
        return oracle.quantized_activation(rows, scheme, oracle.static_scale(w, e))

    h = oracle.activation(product(rows, rounded(rows, w13), w13, b13, 0, 1), act)
    h2 = rounded(h, w2)
    y = product(h2 if round_hidden else h, h2, w2, b2, 2, 3)
    return out.index_add(0, m, y if on_input else y * scale)


def run(case: Case, stack, adapter_ids, backend="auto"):
    with poisoned_memory(), torch.no_grad():
        return moe_ops.fused_experts(
            *case.args, **case.options, adapters=stack, adapter_ids=adapter_ids, backend=backend
        )


def check(case: Case, ranks=(4, 1, 9), backend="auto", seed=0, of=MATRICES):
    adapters = adapters_of(case, ranks, seed, of=of)
    adapter_ids = ids_of(case, len(ranks), seed)
    out = run(case, LoRAStack.of(adapters), adapter_ids, backend)
    squared = str(case.options["activation"]).startswith("relu2")  # doubles relative errors
    within = tolerance(case.dtype, case.scheme, case.device) * (2 if squared else 1)
    wanted = [expected(case, adapters, adapter_ids)]
    if oracle.ACTIVATIONS[oracle.schemes_of(case.scheme)[1]]:
        wanted.append(expected(case, adapters, adapter_ids, round_hidden=True))
    best = min(wanted, key=lambda want: oracle.relative_error(out, want))
    assert out.dtype == case.dtype
    assert_matches(out, best, within)
    assert (out[case.nowhere] == 0).all()
    return out


def check_not_finite(case: Case, name: str, backend: str):
    """One adapter has an infinite matrix: what tokens of others get is what they get beside a
    finite one.
    """
    ids = (torch.arange(case.args[0].shape[0]) % 4 - 1).to(case.device)
    stack = LoRAStack.of(adapters_of(case, (4, 2, 9)))
    finite = run(case, stack, ids, backend)
    getattr(stack, name)[1] = math.inf
    out, of_others = run(case, stack, ids, backend), ids != 1
    assert not out[~of_others].isfinite().all()
    assert_matches(out[of_others], finite[of_others], tolerance(case.dtype, "", case.device))


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_values(dtype, activation):
    check(Case("cpu", dtype, activation=activation, M=11, top_k=3))


@pytest.mark.parametrize(
    "scheme",
    ["int4_w4a16:g32", "int8_w8a16:channel", "fp8_block", "fp8_channel", "nvfp4", "mxfp4_w4a16"],
)
def test_quantized_weights(scheme):
    check(Case("cpu", FP32, scheme, M=11, K=64, I=32))


@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True, "M": 20, "E": 6},
        {"M": 1, "top_k": 4, "seed": 1},
        {"M": 0},
        {"M": 37, "ids_dtype": torch.int64, "weights_dtype": BF16},
        {"bias": True, "on_input": True, "top_k": 1, "expert_map": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options):
    check(Case("cpu", FP32, **options))


@pytest.mark.parametrize("of", [("a13", "b13"), ("a2", "b2")], ids=str)
def test_one_weight_alone(of):
    check(Case(M=9), of=of)


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture(seed):
    g = torch.Generator().manual_seed(seed)

    def between(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=g))

    case = Case(
        "cpu",
        [FP64, FP32][seed % 2],
        M=between(1, 40),
        E=between(1, 7),
        top_k=between(1, 4),
        K=8 * between(1, 9),
        I=8 * between(1, 6),
        expert_map=seed % 3 == 0,
        seed=seed,
    )
    check(case, [between(1, 20) for _ in range(between(1, 9))], seed=seed)


def test_without_adapters_of_any_token_values_are_those_of_the_layer():
    case = Case(M=9)
    stack = LoRAStack.of(adapters_of(case, (4, 2)))
    out = run(case, stack, torch.full((9,), -1))
    assert_matches(out, case.reference(), tolerance(FP32))


def test_one_adapter_for_all_is_what_lora_gives():
    case = Case(M=9)
    (adapter,) = adapters_of(case, (4,))
    out = run(case, LoRAStack.of([adapter], slots=3, rank=7), torch.zeros(9, dtype=torch.int32))
    with torch.no_grad():
        want = moe_ops.fused_experts(*case.args, **case.options, adapters=adapter)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("name", MATRICES)
def test_an_adapter_that_is_not_finite_is_its_tokens_alone(name):
    check_not_finite(Case(M=9), name, "torch")


def test_put_replaces_and_empties_a_slot():
    case, ids = Case(M=9), torch.arange(9) % 3
    first, second, third = adapters_of(case, (6, 6, 2))
    stack = LoRAStack.of([first, second], slots=3)
    stack.put(0, third)  # of a lower rank: nothing of the first one is left behind it
    stack.put(2, first)
    stack.put(1, None)
    nothing = LoRA(*[torch.zeros_like(t) for t in second[:4]], 1.0)
    want = expected(case, [third, nothing, first], ids)
    assert_matches(run(case, stack, ids), want, tolerance(FP32))


@pytest.mark.slow
def test_one_graph_serves_every_mixture():
    case = Case(M=9)
    adapters = adapters_of(case, (4, 9, 1, 3))
    stack, graphs = LoRAStack.of(adapters), []

    def count(gm, inputs):
        graphs.append(gm)
        return gm

    def layer(x, w13, w2, weights, ids, stack, of_tokens):
        return moe_ops.fused_experts(
            x, w13, w2, weights, ids, adapters=stack, adapter_ids=of_tokens
        )

    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for seed in range(5):
            other = Case(M=5 + seed, seed=seed)
            other.args[1:3] = case.args[1:3]
            of_tokens = ids_of(other, 4, seed)
            out = compiled(*other.args, stack, of_tokens)
            assert_matches(out, expected(other, adapters, of_tokens), tolerance(FP32))
            if seed == 2:
                adapters[1] = adapters_of(case, (5,), seed=77)[0]
                stack.put(1, adapters[1])
    assert len(graphs) == 1


def test_ids_of_adapters_are_not_read_on_the_host():
    case = Case(M=9)
    stack = LoRAStack.of(adapters_of(case, (4, 2)))
    with torch.no_grad(), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        args = [mode.from_tensor(t) for t in case.args]
        fakes = LoRAStack(*[mode.from_tensor(t) for t in stack])
        ids = mode.from_tensor(torch.zeros(9, dtype=torch.int64))
        out = moe_ops.fused_experts(*args, adapters=fakes, adapter_ids=ids)
    assert out.shape == (9, 48)


def refusal(case, stack, ids, match, **options):
    with pytest.raises(ValueError, match=match):
        moe_ops.fused_experts(
            *case.args, **(case.options | options), adapters=stack, adapter_ids=ids
        )


def test_refusals():
    case, ids = Case(M=9), torch.zeros(9, dtype=torch.int64)
    first, second = adapters_of(case, (4, 2))
    stack = LoRAStack.of([first, second])
    refusal(case, stack, None, "adapter_ids must be given")
    refusal(case, first, ids, "must be a moe_ops.LoRAStack beside adapter_ids")
    refusal(case, stack, ids.float(), "adapter_ids must have shape")
    refusal(case, stack, ids[:8], "adapter_ids must have one per row|one row per row")
    refusal(case, stack, ids, "backend must be 'auto' or one of", backend="cutlass")
    refusal(case, stack, ids, "batch_invariant must be False", batch_invariant=True)
    refusal(case, stack._replace(b2=None), ids, "adapters.b2 must be a tensor")
    refusal(case, stack._replace(scales=stack.scales.double()), ids, "adapters.scales must have")
    of_all = stack.scales[:1].expand(2)
    refusal(case, stack._replace(scales=of_all), ids, "adapters.scales must have shape .* contig")
    refusal(case, stack._replace(scales=of_all[0]), ids, "adapters.scales must have shape")
    other = Case(M=9, K=56)
    refusal(other, stack, ids, "stack of another layer")
    refusal(Case(M=9, dtype=BF16), stack, ids, "must have the dtype of hidden_states")
    trained = stack._replace(a13=stack.a13.clone().requires_grad_())
    refusal(case, trained, ids, "where gradients are recorded")
    case.args[0].requires_grad_()
    refusal(case, stack, ids, "where gradients are recorded")


def test_refusals_of_a_stack():
    case = Case(M=9)
    first, second = adapters_of(case, (4, 6))
    with pytest.raises(ValueError, match="at least one LoRA"):
        LoRAStack.of([])
    with pytest.raises(ValueError, match="slots must be at least 2"):
        LoRAStack.of([first, second], slots=1)
    with pytest.raises(ValueError, match="rank of at most 5, got 6; make the stack with rank=6"):
        LoRAStack.of([first, second], rank=5)
    stack = LoRAStack.of([first], slots=2)
    kept = [t.clone() for t in stack]
    with pytest.raises(ValueError, match="rank of at most 4"):
        stack.put(0, second)
    with pytest.raises(ValueError, match="slot must be in 0..1, got 2"):
        stack.put(2, first)
    with pytest.raises(ValueError, match="adapter of another layer"):
        stack.put(1, adapters_of(Case(K=56), (4,))[0])
    with pytest.raises(ValueError, match="adapter.a2 must be a tensor"):
        stack.put(1, first._replace(a2=None, b2=None))
    for before, now in zip(kept, stack, strict=True):
        assert torch.equal(before, now)
    assert not any(math.isnan(t.sum()) for t in stack)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g128"])
def test_planned_for_a_gpu(scheme):
    """One graph for any number of tokens, on Triton's kernels, whose workspaces the graph has."""
    E, K, I, r = 4, 256, 128, 16
    sizes = ((r, K), (2 * I, r), (r, I), (K, r))
    given = [torch.randn(E, *size, dtype=BF16) for size in ((2 * I, K), (K, I))]
    given = [moe_ops.quantize(w, scheme) if scheme else w for w in given]
    recorder = Recorder()

    def layer(x, w13, w2, weights, ids, stack, of_tokens):
        return moe_ops.fused_experts(
            x, w13, w2, weights, ids, adapters=stack, adapter_ids=of_tokens
        )

    with fake_gpu(), torch.no_grad():

        def empty(*size, dtype=BF16):
            return torch.empty(*size, dtype=dtype, device="cuda")

        weights = []
        for w in given:
            parts = {n: getattr(w, n, None) for n in ("qdata", "scale")} if scheme else {}
            fakes = {n: empty(*t.shape, dtype=t.dtype) for n, t in parts.items()}
            weights.append(w._replace(**fakes) if scheme else empty(*w.shape))
        stack = LoRAStack(*[empty(8, E, *size) for size in sizes], empty(8, dtype=FP32))
        compiled = torch.compile(layer, backend=recorder.backend, fullgraph=True, dynamic=True)
        for M in (5, 9):
            router = empty(M, 2, dtype=FP32), empty(M, 2, dtype=torch.int64)
            of_tokens = empty(M, dtype=torch.int64)
            assert compiled(empty(M, K), *weights, *router, stack, of_tokens).shape == (M, K)
    ((op, args),) = recorder.calls()
    assert op is torch.ops.moe_ops.adapted_experts.default
    assert "'tiers_text': '-1:triton'" in args["options"]
