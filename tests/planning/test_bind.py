"""Eager calls skip the dispatcher where it has nothing to do, and only there; values are the
same."""

import dataclasses
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import activations
from moe_ops import backends as backends_module
from moe_ops.ops import library
from moe_ops.ops.library import nothing_listens
from moe_ops.ops.options import Options, decode, encode, text_of_tiers, tiers_of_text
from moe_ops.planning import auto, bind
from moe_ops.planning import machine as machines
from moe_ops.planning.register import replace_backends

M, E, TOP_K, K, I = 5, 4, 2, 64, 32


def arguments() -> tuple:
    x = torch.randn(M, K)
    w13, w2 = torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5
    weights, ids = torch.rand(M, E).topk(TOP_K)
    return x, w13, w2, weights, ids.int()


def reference(x, w13, w2, weights, ids) -> torch.Tensor:
    x, w13, w2, weights = (t.double() for t in (x, w13, w2, weights))
    out = torch.zeros_like(x)
    for m, j in ((m, j) for m in range(M) for j in range(TOP_K)):
        gate, up = (w13[ids[m, j]] @ x[m]).chunk(2)
        out[m] += weights[m, j] * (w2[ids[m, j]] @ (torch.nn.functional.silu(gate) * up))
    return out


class Listener(TorchDispatchMode):
    """Collects the names of the library's operators."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_ops":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def direct(monkeypatch) -> list[bool]:
    """Whether each call so far went past the dispatcher."""
    seen = []

    def run(bound, call, M, direct=False):
        seen.append(direct)
        return run_(bound, call, M, direct)

    run_ = bind.BoundPlan.run
    monkeypatch.setattr(bind.BoundPlan, "run", run)
    return seen


def test_a_plain_call_goes_straight_to_the_kernel(direct):
    args = arguments()
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            out = moe_ops.fused_experts(*args, backend="torch")
        torch.testing.assert_close(out.double(), reference(*args), rtol=1e-5, atol=1e-5)
    assert direct == [True] * 3


def test_parameters_are_plain_and_quantized_weights_too(direct):
    x, w13, w2, weights, ids = arguments()
    with torch.no_grad():
        made = (torch.nn.Parameter(w13), torch.nn.Parameter(w2))
        out = moe_ops.fused_experts(x, *made, weights, ids, backend="torch")
        made = (moe_ops.quantize(w13, "fp8_block"), moe_ops.quantize(w2, "fp8_block"))
        again = moe_ops.fused_experts(x, *made, weights, ids, backend="torch")
    expected = reference(x, w13, w2, weights, ids)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert (again.double() - expected).norm() < 0.1 * expected.norm()
    assert direct == [True] * 2


def test_a_mode_sees_the_operator(direct):
    args = arguments()
    plain = moe_ops.fused_experts(*args, backend="torch")
    with Listener() as listener:
        out = moe_ops.fused_experts(*args, backend="torch")
    assert listener.names == ["moe_ops.torch_experts.default"]
    assert direct == [True, False]
    assert torch.equal(out, plain)


def test_a_profiler_sees_the_operator():
    args = arguments()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        moe_ops.fused_experts(*args, backend="torch")
    assert "moe_ops::torch_experts" in {event.key for event in profile.key_averages()}


def test_a_subclass_goes_through_the_dispatcher(direct):
    class Marked(torch.Tensor):
        pass

    x, *rest = arguments()
    moe_ops.fused_experts(x.as_subclass(Marked), *rest, backend="torch")
    x, w13, w2, weights, ids = arguments()
    moe_ops.fused_experts(x, w13, w2.as_subclass(Marked), weights, ids, backend="torch")
    moe_ops.fused_experts(x, w13, w2, weights, ids.as_subclass(Marked), backend="torch")
    assert direct == [False] * 3


def test_a_torch_of_other_guards(direct, monkeypatch):
    """They are private to it: where they are called otherwise, all calls are planned."""

    class Fewer:
        def __init__(self, *tensors):
            pass

    class Unlike:
        def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
            pass

        def check(self, tensors):
            return True

    args = arguments()
    want = moe_ops.fused_experts(*args, backend="torch")
    for guards in (None, Fewer, Unlike):
        monkeypatch.setattr(bind, "_TensorGuards", guards)
        bind.forget()
        for _ in range(2):
            assert torch.equal(moe_ops.fused_experts(*args, backend="torch"), want)
        assert not bind._alike
    assert direct == [True] + [False] * 6


def test_many_kinds_of_layers_keep_their_guards(monkeypatch):
    x, _, _, *of_router = arguments()
    layers = [
        (x, torch.randn(E, 2 * n, K), torch.randn(E, K, n), *of_router)
        for n in range(1, bind._MOST_KNOWN + 3)
    ]
    bind.forget()
    want = [moe_ops.fused_experts(*args, backend="torch") for args in layers]
    monkeypatch.setattr(bind, "make_plan", lambda *_: pytest.fail("planned"))
    for args, out in zip(layers, want, strict=True):
        assert torch.equal(moe_ops.fused_experts(*args, backend="torch"), out)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_call_of_no_tokens_is_planned_once(dtype, monkeypatch):
    """Of a rank that gets none; and its plan serves calls that have some."""
    x, w13, w2, weights, ids = arguments()
    of_layer = w13.to(dtype), w2.to(dtype)
    x = x.to(dtype)
    want = moe_ops.fused_experts(x, *of_layer, weights, ids, backend="torch")
    bind.forget()

    def call(M):
        return moe_ops.fused_experts(x[:M], *of_layer, weights[:M], ids[:M], backend="torch")

    assert call(0).shape == (0, K)
    monkeypatch.setattr(bind, "make_plan", lambda *_: pytest.fail("planned"))
    assert call(0).shape == (0, K)
    assert torch.equal(call(M), want)
    assert call(0).shape == (0, K)


def test_lazily_negated_rows_are_never_read_by_address():
    """Nor where a plan was made for none of them: what lies there is not negated."""
    x, w13, w2, weights, ids = arguments()
    x, w13, w2 = [t.bfloat16() for t in (x, w13, w2)]  # of which kernels take addresses
    want = moe_ops.fused_experts(-x, w13, w2, weights, ids, backend="torch")
    negated = torch._neg_view(x)
    bind.forget()
    for rows in (0, M):
        args = negated[:rows], w13, w2, weights[:rows], ids[:rows]
        assert torch.equal(moe_ops.fused_experts(*args, backend="torch"), want[:rows])


def test_a_tensor_in_two_places_leaves_no_guards():
    """They never hold for it, and would push out others."""
    args, bias = arguments(), torch.randn(E, 2 * I)
    bind.forget()
    outs = [
        moe_ops.fused_experts(*args, w13_bias=bias, w2_bias=of_w2, backend="torch")
        for of_w2 in (bias.clone(), bias, bias)
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert [len(alike.known) for alike in bind._alike.values()] == [1]


def test_not_idle_in_modes_transforms_and_tracers():
    seen = {}

    def note(name):
        def function(x):
            seen[name] = nothing_listens()
            return x.sum()

        return function

    x = torch.ones(3)
    note("outside")(x)
    with torch._subclasses.FakeTensorMode():
        note("fake")(torch.ones(3))
    torch.func.vmap(note("vmap"))(torch.ones(2, 3))
    torch.func.grad(note("grad"))(x)
    torch.fx.experimental.proxy_tensor.make_fx(note("make_fx"))(x)
    torch.jit.trace(note("jit"), (x,), check_trace=False)
    assert seen.pop("outside")
    assert len(seen) == 5 and not any(seen.values())


def test_wrong_sizes_raise_without_the_dispatcher_too(direct):
    x, w13, w2, weights, ids = arguments()
    moe_ops.fused_experts(x, w13, w2, weights, ids, backend="torch")
    with pytest.raises(ValueError, match="topk_ids must have one row per row of hidden_states, 5"):
        moe_ops.fused_experts(x, w13, w2, weights, ids[:3], backend="torch")
    assert direct == [True] * 2


OPTIONS = Options(
    activations.Activation("swigluoai", 1, 0.5, 2),
    router_weight_on_input=True,
    atomic_sums=True,
    needs_grad=True,
    recompute=True,
    max_workspace_bytes=12,
    out_dtype=torch.float32,
    batch_invariant=True,
    exchange="a group's",
    slots=3,
    resident="experts0",
    tiers_text="4:torch,-1:triton",
    chunk_rows=3,
)


def test_options_are_told_apart():
    kind = library.KINDS["grouped_linear"]
    for options in (OPTIONS, Options()):
        args = kind.unpack((*range(7), [], None, encode("fp8_block", "x", options)))
        assert args[:7] == tuple(range(7)) and args.weight_scale is None and args.bias is None
        assert (args.scheme, args.layout, args.options) == ("fp8_block", "x", options)
    act = args.options.activation
    assert act is None and type(decode(encode("", "", OPTIONS))[2].activation.alpha) is float
    assert all(a != b for a, b in zip(OPTIONS, Options(), strict=True))  # none is left out above
    text = encode("", "", OPTIONS)
    for wrong in (
        *("{'scheme': ''}", text[:-1] + ", 'depth': 3}", text.replace(", 'chunk_rows': 3", "")),
        *("", "scheme", "['scheme']", "{[]: 1}", "7", "{"),
    ):
        with pytest.raises(ValueError, match="options must be a dict of scheme, layout, activat"):
            kind.unpack((*range(7), [], None, wrong))


def test_tiers_as_text():
    tiers = ((4, "torch"), (-1, "triton"))
    assert tiers_of_text(text_of_tiers(tiers)) == tiers


def test_scales_of_the_weights_and_of_the_input():
    """The input's are left out where it does not arrive quantized."""
    text = encode("", "", Options())
    for of_input in ((), ("x0", "x1")):
        scales = [*range(10), *of_input]
        args = library.KINDS["experts"].unpack((*range(9), scales, "bias", None, None, text))
        first = args._fields.index("w13_scale")
        assert args[first : first + 12] == (*range(10), *(of_input or (None, None)))
        assert args.w13_bias == "bias"


@pytest.mark.parametrize("name, inputs, biases, wrong", [
    ("experts", 9, 3, (1, 8, 9, 11, 14)),
    ("batched_experts", 8, 2, (3, 11)),
    ("grouped_linear", 7, 1, (4, 6, 10)),
])  # fmt: skip
def test_scales_that_no_weights_have_are_refused(name, inputs, biases, wrong):
    for count in wrong:
        values = (*range(inputs), [None] * count, *[None] * biases, "{}")
        with pytest.raises(ValueError, match=f"scales must hold .* got {count} in all"):
            library.KINDS[name].unpack(values)


def test_a_plan_made_while_backends_change_is_not_kept(monkeypatch):
    """Another thread registers a backend between planning and remembering the plan."""
    args, make_plan, facts = arguments(), bind.make_plan, machines._find_machine_facts
    bind.forget()

    def plan_and_register(*values):
        plan = make_plan(*values)
        replace_backends(backends_module.BACKENDS)
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(bind, "make_plan", plan_and_register)
        moe_ops.fused_experts(*args)
    assert not bind._alike
    moe_ops.fused_experts(*args)
    assert len(bind._alike) == 1

    def find_and_register(*values):
        found = facts(*values)
        with monkeypatch.context() as patch:
            patch.setattr(machines, "_find_machine_facts", facts)
            machines.forget()
        return found

    monkeypatch.setattr(machines, "_machine_facts_cached", functools.cache(find_and_register))
    machines.machine(torch.device("cpu"))
    assert machines._machine_facts_cached.cache_info().currsize == 0


def test_tiers_parsed_while_backends_change_are_not_kept(monkeypatch):
    parse = auto._parse

    def parse_and_register(text):
        found = parse(text)
        with monkeypatch.context() as patch:
            patch.setattr(auto, "_parse", parse)
            auto.forget()
        return found

    monkeypatch.setattr(auto, "_parse_tiers", functools.lru_cache(parse_and_register))
    assert [limit for limit, _ in auto._parse_tiers("4:torch,-1:triton")] == [4, -1]
    assert auto._parse_tiers.cache_info().currsize == 0


class FakeCall:
    """A call whose result has a shape and whose op takes one value."""

    def __init__(self, shape: tuple):
        self.shape, self.hidden_states = shape, torch.empty(0)

    def output(self) -> tuple:
        return self.shape, torch.float16

    def op_values(self, options: str) -> tuple:
        return "input", options


@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (4, 0), (2, 3, 4), (6,), (2, 0, 3)])
def test_direct_calls_allocate_what_others_do(shape):
    plan = moe_ops.explain(*arguments()[:3], arguments()[4], backend="torch")
    bound, call = bind.BoundPlan(plan), FakeCall(shape)
    found = [bound.allocate(direct, call, 5) for direct in (True, False)]
    for a, b in zip(*found, strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    assert found[0][0].shape == shape and found[0][0].dtype == torch.float16
    assert [t.shape for t in found[0][1:]] == [
        torch.Size(b.shape) for b in plan.workspace_shapes(5)
    ]


def test_calls_of_known_size_run_their_tier_alone():
    """The operator of the tier's backend, with its options and workspaces and no other's."""
    plan = moe_ops.explain(*arguments()[:3], arguments()[4], backend="torch")
    backends = [backends_module.named(name) for name in ("torch", "triton")]
    tiers = tuple(zip((4, -1), backends, strict=True))
    bound = bind.BoundPlan(dataclasses.replace(plan, tiers=tiers)).split()
    called = []
    for _, alone in bound.tiers:
        alone.op = lambda *values, name=alone.plan.backend: called.append((name, values))
    for M, backend in ((0, "torch"), (4, "torch"), (5, "triton"), (4096, "triton")):
        out = bound.run(FakeCall((M, 3)), M)
        name, (first, *workspaces, values, options) = called.pop()
        assert name == backend and first is out and out.shape == (M, 3) and values == "input"
        assert "'tiers_text': ''" in options and "'tiers_text': '4:" in bound.options
        wanted = backends_module.named(backend).workspace_shapes(M, plan.problem)
        assert [(t.shape, t.dtype) for t in workspaces] == [
            (torch.Size(b.shape), b.dtype) for b in wanted
        ]


def test_deterministic_algorithms_fill_what_nobody_writes():
    x, w13, w2 = torch.randn(3, 5, 32), torch.randn(3, 32, 32), torch.randn(3, 32, 16)
    counts = torch.tensor([2, 5, 0], dtype=torch.int32)
    torch.use_deterministic_algorithms(True)
    try:
        out = moe_ops.batched_experts(x, w13, w2, counts, backend="torch")
    finally:
        torch.use_deterministic_algorithms(False)
    assert out[0, 2:].isnan().all() and out[2].isnan().all()
    assert out[0, :2].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g32", "nvfp4"])
def test_meta_tensors_give_meta_results(scheme):
    """Shapes and dtypes of what the same call computes elsewhere, forward and backward."""
    x, w13, w2, weights, ids = arguments()
    if scheme:
        w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
    counts, ends = (torch.zeros(E, dtype=torch.int32), torch.full((E,), M, dtype=torch.int32))
    blocks = torch.randn(E, 3, K).to(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        a, b = w13.to(dtype), w2.to(dtype)
        for function, args in (
            (moe_ops.fused_experts, (x.to(dtype), a, b, weights, ids)),
            (moe_ops.batched_experts, (blocks.to(dtype), a, b, counts)),
            (moe_ops.grouped_linear, (x.to(dtype), a, ends)),
        ):
            want, got = function(*args), function(*[t.to("meta") for t in args])
            assert got.device.type == "meta" and not got.requires_grad
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    x = x.to("meta").requires_grad_()
    rest = [t.to("meta") for t in (w13, w2, weights, ids)]
    (grad,) = torch.autograd.grad(moe_ops.fused_experts(x, *rest).sum(), x)
    assert grad.device.type == "meta" and grad.shape == x.shape


def test_meta_layers():
    with torch.device("meta"):
        layer = moe_ops.MoELayer(K, I, num_experts=E, top_k=TOP_K)
        x = torch.randn(M, K)
    assert layer(x).shape == (M, K) and layer(x).requires_grad
    with torch.no_grad():
        assert layer(x).device.type == "meta"
