"""Under torch.compile, torch.export and make_fx: how many graphs, what is in them, and right
values."""

import ast
import dataclasses
import json
import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops import backends as backends_module
from moe_ops.meta import workspace
from moe_ops.ops.problem import Machine
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from moe_ops.tables import lookup
from tests.support.cases import measured_tiers

E, K, I, TOP_K = 4, 32, 24, 2
N = 2 * I  # differs from K, so that no two of an op's buffers have equal sizes
SIZES = (5, 1, 2, 64, 4096)
SCHEMES = ("", "fp8_channel", "fp8_block")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No graphs of other tests, and no pool of compiler processes for a few small kernels."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


class Layers(torch.nn.Module):
    """`depth` expert layers in a row on the same routing, of any scheme."""

    def __init__(self, depth: int = 1, scheme: str = "", backend: str = "auto"):
        super().__init__()
        self.backend = backend
        self.w13, self.w2 = torch.nn.ParameterList(), torch.nn.ParameterList()
        for _ in range(depth):
            for weights, shape in ((self.w13, (E, N, K)), (self.w2, (E, K, I))):
                weight = torch.randn(shape) / shape[2] ** 0.5
                weight = moe_ops.quantize(weight, scheme) if scheme else weight
                weights.append(torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, x, topk_weights, topk_ids):
        for w13, w2 in zip(self.w13, self.w2, strict=True):
            x = moe_ops.fused_experts(x, w13, w2, topk_weights, topk_ids, backend=self.backend)
        return x


def inputs(M: int, mark=None):
    """Hidden states and a routing with distinct weights and absent experts; `mark` their rows."""
    args = torch.randn(M, K), torch.rand(M, TOP_K) + 0.1, torch.randint(-1, E + 1, (M, TOP_K))
    for arg in args:
        if mark is not None:
            mark(arg, 0)
    return args


def oracle(layers: Layers, x, topk_weights, topk_ids):
    """Every expert on every token in fp64; ids outside 0..E-1 count nothing."""
    share = (
        F.one_hot(topk_ids.clamp(-1, E) + 1, E + 2)[..., 1:-1] * topk_weights.double()[..., None]
    )
    x = x.double()
    for w13, w2 in zip(layers.w13, layers.w2, strict=True):
        gate, up = torch.einsum("mk,enk->men", x, w13.double()).chunk(2, -1)
        every = torch.einsum("mei,eki->mek", F.silu(gate) * up, w2.double())
        x = torch.einsum("me,mek->mk", share.sum(1), every)
    return x


def assert_near(got, want):
    """fp32 sums of a few hundred products of unit scale against fp64."""
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


def recorder(graphs: list):
    """A backend that keeps each graph AOTAutograd makes, with its metadata, and runs it as it
    is."""

    def keep(graph, _):
        graphs.append((graph, TracingContext.get().fw_metadata))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


def op_names(graph: torch.fx.GraphModule) -> str:
    """One line per call: the operator's name; for functionalized ones, what they will mutate
    with."""
    names = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            target = node.target
            if str(target).startswith("auto_functionalized"):
                target = node.args[0]
            names.append(getattr(target, "__name__", None) or str(target))
            if isinstance(target, torch._ops.OpOverload):
                names[-1] = str(target)
    return "\n".join(names) + "\n"


# --- one graph for every number of tokens --------------------------------------------------------

MARKS = {
    "unbacked": (torch._dynamo.decorators.mark_unbacked, 1, (*SIZES, 0)),
    "dynamic": (torch._dynamo.mark_dynamic, 2, SIZES),  # torch specialises a size of 1, and of 0
}
marked = pytest.mark.parametrize("mark", MARKS)


@marked
@pytest.mark.parametrize("scheme", SCHEMES)
def test_graphs_of_fused_experts(mark, scheme):
    mark, most_graphs, sizes = MARKS[mark]
    layers = Layers(scheme=scheme)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    for M in sizes:
        args = inputs(M, mark if mark is MARKS["unbacked"][0] or M > 1 else None)
        if scheme:  # tests/tensors/test_e4m3.py holds eager calls to the meaning of the scheme
            assert_near(compiled(*args), layers(*args))
        else:
            assert_near(compiled(*args), oracle(layers, *args))
    assert counter.frame_count <= most_graphs


@pytest.mark.slow
@marked
def test_graphs_of_batched_experts(mark):
    mark, most_graphs, sizes = MARKS[mark]
    layers = Layers()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compiled(x, counts):
        return moe_ops.batched_experts(x, layers.w13[0], layers.w2[0], counts)

    for T in sizes:
        x = torch.randn(E, T, K)
        counts = torch.randint(0, T + 1, (E,))
        if mark is MARKS["unbacked"][0] or T > 1:
            mark(x, 1)
        got = compiled(x, counts)
        for e, count in enumerate(counts.tolist()):
            one = torch.ones(count, 1), torch.full((count, 1), e)
            assert_near(got[e, :count], oracle(layers, x[e, :count], *one))
        # torch gives an empty (E, 0, K) the strides of (E, 1, K), and so a graph of its own
        assert counter.frame_count <= most_graphs + (T == 0)


@marked
@pytest.mark.parametrize("scheme", ("", "fp8_channel"))
def test_graphs_of_grouped_linear(mark, scheme):
    mark, most_graphs, sizes = MARKS[mark]
    weight = Layers(scheme=scheme).w13[0]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe_ops.grouped_linear, fullgraph=True, backend=counter)
    for S in sizes:
        x = torch.randn(S, K)
        ends = torch.randint(0, S + 1, (E,)).sort().values
        if mark is MARKS["unbacked"][0] or S > 1:
            mark(x, 0)
        got = compiled(x, weight, ends.int())
        if scheme:
            assert_near(got, moe_ops.grouped_linear(x, weight, ends.int()))
            continue
        want, start = torch.zeros(S, N, dtype=torch.float64), 0
        for e, end in enumerate(ends.tolist()):
            want[start:end] = x[start:end].double() @ weight[e].double().T
            start = end
        assert_near(got, want)
    assert counter.frame_count <= most_graphs


@pytest.mark.slow
def test_decoding_stops_compiling_after_the_first_sizes():
    """Nothing marked: the size 1, the first other size, then one graph with a symbol for it."""
    layers = Layers(2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    for M in range(1, 65):
        args = inputs(M)
        assert_near(compiled(*args), oracle(layers, *args))
        if M == 3:
            graphs = counter.frame_count
    assert counter.frame_count == graphs <= 3


@pytest.mark.slow
def test_dynamic_true_makes_constants_of_all_sizes_but_tokens():
    layers = Layers()
    graphs = []

    @torch.compile(fullgraph=True, backend=recorder(graphs), dynamic=True)
    def compiled(x, w13, w2, topk_weights, topk_ids):
        return moe_ops.fused_experts(x, w13, w2, topk_weights, topk_ids)

    for M in (6, 9, 40):
        x, *routing = inputs(M)
        got = compiled(x, layers.w13[0], layers.w2[0], *routing)
        assert_near(got, oracle(layers, x, *routing))
    assert len(graphs) == 1
    for node in graphs[0][0].graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
            rows, *others = node.meta["val"].shape
            assert all(type(size) is int for size in others), node.meta["val"].shape
            assert len(others) == 2 or type(rows) is not int, "the number of tokens was fixed"


@pytest.mark.slow
def test_a_wrong_call_raises_the_eager_sentence():
    layers = Layers()
    compiled = torch.compile(layers, fullgraph=True, backend="eager")
    x, topk_weights, topk_ids = inputs(5)
    for wrong, sentence in (
        (
            (x, topk_weights, topk_ids.float()),
            "topk_ids must be int32 or int64, got torch.float32",
        ),
        ((x[:, :8], topk_weights, topk_ids), "w13 must have shape (E, N, 8) for hidden_states"),
        ((x, topk_weights[:, :1], topk_ids), "topk_weights must have shape (M, 2) like topk_ids"),
        ((x, topk_weights, topk_ids[:3]), "topk_ids must have one row per row of hidden_states"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            layers(*wrong)
        with pytest.raises(Exception, match=re.escape(sentence)):
            compiled(*wrong)


def test_unbacked_row_counts_are_compared_when_the_op_runs():
    layers = Layers()
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    mark = torch._dynamo.decorators.mark_unbacked
    args = inputs(5, mark)
    assert_near(compiled(*args), oracle(layers, *args))
    _, topk_weights, topk_ids = inputs(3, mark)
    x = args[0]
    sentence = "must have one row per row of hidden_states, 5, got 3"
    with pytest.raises(ValueError, match=f"topk_ids {sentence}"):
        compiled(x, args[1], topk_ids)
    with pytest.raises(ValueError, match=f"topk_weights {sentence}"):
        compiled(x, topk_weights, args[2])


# --- what stands in the graph --------------------------------------------------------------------


@pytest.mark.slow
def test_ops_of_a_forward_graph():
    graphs = []
    layers = Layers(2)
    compiled = torch.compile(layers, fullgraph=True, backend=recorder(graphs))
    args = inputs(5, torch._dynamo.mark_dynamic)
    assert_near(compiled(*args), oracle(layers, *args))
    assert_expected_inline(
        op_names(graphs[0][0]),
        """\
mul
aten.empty.memory_format
aten.empty.memory_format
aten.empty.memory_format
aten.empty.memory_format
moe_ops.torch_experts.default
getitem
aten.empty.memory_format
aten.empty.memory_format
aten.empty.memory_format
aten.empty.memory_format
moe_ops.torch_experts.default
getitem
""",
    )


def test_ops_of_a_quantized_forward_graph():
    graphs = []
    layers = Layers(scheme="fp8_block")
    compiled = torch.compile(layers, fullgraph=True, backend=recorder(graphs))
    args = inputs(5, torch._dynamo.mark_dynamic)
    assert_near(compiled(*args), layers(*args))
    assert_expected_inline(
        op_names(graphs[0][0]),
        """\
mul
aten.empty.memory_format
aten.empty.memory_format
aten.empty.memory_format
aten.empty.memory_format
moe_ops.torch_experts.default
getitem
""",
    )


def test_ops_of_training_graphs():
    graphs = []
    layers = Layers().requires_grad_(True)
    compiled = torch.compile(layers, fullgraph=True, backend=recorder(graphs))
    x, topk_weights, topk_ids = inputs(5)
    x.requires_grad_()
    got = compiled(x, topk_weights, topk_ids)
    assert_near(got, oracle(layers, x, topk_weights, topk_ids))
    got.square().sum().backward()
    leaves = (x, layers.w13[0], layers.w2[0])
    got_grads = [leaf.grad for leaf in leaves]
    want = oracle(layers, x, topk_weights, topk_ids).square().sum()
    for got_grad, want_grad in zip(got_grads, torch.autograd.grad(want, leaves), strict=True):
        torch.testing.assert_close(got_grad, want_grad, rtol=1e-4, atol=1e-4)
    (forward, _), (backward, _) = graphs
    ours = [
        [name for name in op_names(graph).split() if name.startswith("moe_ops")]
        for graph in (forward, backward)
    ]
    assert ours == [
        ["moe_ops.experts_forward.default"],
        ["moe_ops.experts_backward.default"],
    ]
    assert_expected_inline(
        op_names(forward),
        """\
moe_ops.experts_forward.default
getitem
getitem
getitem
""",
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_are_neither_mutated_nor_returned(scheme):
    graphs = []
    layers = Layers(scheme=scheme)
    args = inputs(5)
    before = [arg.clone() for arg in args]
    got = torch.compile(layers, fullgraph=True, backend=recorder(graphs))(*args)
    ((_, metadata),) = graphs
    assert not any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
    assert [info.output_type.name for info in metadata.output_info] == ["non_alias"]
    for arg, copy in zip(args, before, strict=True):
        assert torch.equal(arg, copy)
        assert got.untyped_storage().data_ptr() != arg.untyped_storage().data_ptr()


@pytest.mark.skipif(
    not backends_module.named("triton").library.interpreted, reason="needs Triton's interpreter"
)
@pytest.mark.slow
def test_two_backends_in_one_graph():
    first, second = Layers(backend="torch"), Layers(backend="triton")
    graphs = []

    @torch.compile(fullgraph=True, backend=recorder(graphs))
    def compiled(x, *routing):
        return second(first(x, *routing), *routing)

    args = inputs(7)
    assert_near(compiled(*args), oracle(second, oracle(first, *args), *args[1:]))
    names = [name for name in op_names(graphs[0][0]).split() if "moe_ops" in name]
    assert names == ["moe_ops.torch_experts.default", "moe_ops.triton_experts.default"]


# --- Inductor: buffers and caches ----------------------------------------------------------------


def inductor_code(layers: Layers, mark=torch._dynamo.mark_dynamic) -> str:
    """What Inductor generated for a call, whose result is checked."""
    args = inputs(6, mark)
    got, (code,) = run_and_get_code(torch.compile(layers, fullgraph=True), *args)
    assert_near(got, layers(*args))
    torch._dynamo.reset()
    return code


def buffers_of_calls(code: str) -> list[list[str]]:
    """Names of out, workspace13, workspace2 and index_workspace of each op call."""
    calls = re.findall(r"torch\.ops\.moe_ops\.\w+\.default\(([^)]*)\)", code)
    return [[name.strip() for name in call.split(",")[:4]] for call in calls]


def most_bytes(code: str, M: int) -> int:
    """Most bytes of allocated buffers alive at a time: the generated function followed line by
    line."""
    size_of, most = {}, 0
    for line in code[code.index("def call(") :].splitlines():
        allocated = re.match(r"\s+(\w+) = empty_strided_cpu\(\(([^)]*)\), .*torch\.(\w+)\)", line)
        if allocated:
            name, shape, dtype = allocated.groups()
            numbers = re.sub(r"\b[su]\d+\b", str(M), shape)
            size_of[name] = getattr(torch, dtype).itemsize
            for size in filter(None, numbers.replace(" ", "").split(",")):
                size_of[name] *= eval(size)  # e.g. 2*6
        moved = re.match(r"\s+(\w+) = (\w+); del \2  # reuse", line)
        if moved and moved[2] in size_of:
            size_of[moved[1]] = size_of.pop(moved[2])
        for name in re.findall(r"^\s+del (\w+)$", line):
            size_of.pop(name, None)
        most = max(most, sum(size_of.values()))
    return most


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ("", "fp8_channel"))
@pytest.mark.parametrize("size", ("static", "dynamic", "unbacked"))
def test_inductor_reuses_the_workspaces(scheme, size):
    mark = {
        "static": None,
        "dynamic": torch._dynamo.mark_dynamic,
        "unbacked": torch._dynamo.decorators.mark_unbacked,
    }[size]
    one, code = inductor_code(Layers(1, scheme), mark), inductor_code(Layers(3, scheme), mark)
    calls = buffers_of_calls(code)
    assert len(calls) == 3 and len(buffers_of_calls(one)) == 1
    reused = dict(re.findall(r"(\w+) = (\w+); del \w+  # reuse", code))
    for before, after in zip(calls, calls[1:], strict=False):
        # out is the next layer's input and cannot be handed on; the three workspaces are
        assert [reused.get(name, name) for name in after[1:]] == before[1:]
    # two outputs are alive while a layer reads the one and writes the other, whatever the depth
    outputs = 2 * 6 * K * 4
    assert most_bytes(code, 6) == most_bytes(one, 6) - outputs // 2 + outputs
    assert most_bytes(code, 6) == most_bytes(inductor_code(Layers(5, scheme), mark), 6)
    for copying in ("aten.clone", "aten.copy_", ".clone(", ".copy_(", "auto_functionalized"):
        assert copying not in code, copying
    assert "cpp_fused" not in code, "a kernel of Inductor's own touches the buffers"


def compile_with_caches(layers: Layers) -> dict[str, int]:
    """Hits and misses of the caches that the compilation of a call met."""
    torch._dynamo.reset()
    counters.clear()
    args = inputs(6, torch._dynamo.mark_dynamic)
    assert_near(torch.compile(layers, fullgraph=True)(*args), layers(*args))
    found = {**counters["inductor"], **counters["aot_autograd"]}
    names = [f"{c}_cache_{o}" for c in ("fxgraph", "autograd") for o in ("hit", "miss")]
    return {name: found[name] for name in names if found.get(name)}


HIT = {"fxgraph_cache_hit": 1, "autograd_cache_hit": 1}
MISS = {"fxgraph_cache_miss": 1, "autograd_cache_miss": 1}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ("", "fp8_block"))
def test_compile_caches_know_the_workspace_formula(scheme, monkeypatch):
    layers = Layers(2, scheme)
    dense = workspace.dense

    def larger(M, N, K, I, top_k):
        (rows, width13), (_, width2) = dense(M, N, K, I, top_k)
        return (rows, width13), (rows + 8, width2)

    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=True):
        assert compile_with_caches(layers) == MISS
        assert compile_with_caches(layers) == HIT
        monkeypatch.setattr(workspace, "dense", larger)
        assert compile_with_caches(layers) == MISS
        monkeypatch.setattr(workspace, "dense", dense)
        assert compile_with_caches(layers) == HIT


# --- a plan that changes -------------------------------------------------------------------------

HERE = Machine("cpu", available=("torch", "triton"))


def tiers_in(graph: torch.fx.GraphModule) -> list[str]:
    """The tiers of each op call of a graph."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("auto_functionalized"):
            found.append(ast.literal_eval(node.kwargs["options"])["tiers_text"])
    return found


@pytest.mark.slow
def test_another_machine_compiles_again():
    layers = Layers()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    args = inputs(6)
    want = oracle(layers, *args)
    assert_near(compiled(*args), want)
    with machines.pretend(HERE):
        assert_near(compiled(*args), want)
    assert counter.frame_count == 2
    with (
        machines.pretend(Machine("cpu", available=("triton",))),
        pytest.raises(Exception, match="torch: is not available on this machine"),
    ):
        compiled(*args)
    assert_near(compiled(*args), want)
    with machines.pretend(HERE):
        assert_near(compiled(*args), want)
    assert counter.frame_count == 2


@pytest.mark.slow
def test_another_table_gives_another_graph(tmp_path, monkeypatch):
    """Tables are constants of a process, as a GPU's name is; a new one shows after a reset."""
    backends = backends_module.BACKENDS
    two = dataclasses.replace(backends_module.named("torch"), name="other")
    monkeypatch.setattr(backends_module, "BACKENDS", (*backends, two))
    monkeypatch.setattr(lookup, "_FOLDER", tmp_path)
    layers, args = Layers(), inputs(6)

    def compile_with(tiers):
        table = {"num_experts": E, "hidden_size": K, "intermediate_size": I, "top_k": TOP_K}
        table |= {"scheme": "", "dtype": "float32"}
        table["backends"] = measured_tiers(*tiers)
        (tmp_path / "some.json").write_text(json.dumps({"gpu": "some", "entries": [table]}))
        lookup._entries.cache_clear()
        torch._dynamo.reset()
        graphs = []
        with machines.pretend(Machine("cpu", (0, 0), "some", ("torch", "other"))):
            compiled = torch.compile(layers, fullgraph=True, backend=recorder(graphs))
            assert_near(compiled(*args), oracle(layers, *args))
        return tiers_in(graphs[0][0])

    assert compile_with([(4, "torch"), (-1, "other")]) == ["4:torch,-1:other"]
    assert compile_with([(8, "other"), (64, "torch")]) == ["8:other,-1:torch"]
    assert compile_with([(64, "torch")]) == [""]
    lookup._entries.cache_clear()


# --- other tracers -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strict", (True, False), ids=("strict", "non-strict"))
@pytest.mark.parametrize("scheme", ("", "fp8_block"))
def test_export_with_any_number_of_tokens(scheme, strict):
    layers = Layers(2, scheme)
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    program = torch.export.export(
        layers, inputs(6), dynamic_shapes=({0: tokens},) * 3, strict=strict
    )
    for M in SIZES:
        args = inputs(M)
        assert_near(program.module()(*args), layers(*args))
    names = [str(node.target) for node in program.graph.nodes if "moe_ops" in str(node.target)]
    assert names == ["moe_ops.torch_experts.default"] * 2
    signature = program.graph_signature
    assert not signature.buffers_to_mutate and not signature.user_inputs_to_mutate


def test_exported_program_survives_decomposition_and_saving(tmp_path):
    layers = Layers(scheme="fp8_channel")
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    program = torch.export.export(layers, inputs(6), dynamic_shapes=({0: tokens},) * 3)
    path = tmp_path / "layers.pt2"
    torch.export.save(program.run_decompositions(), path)
    args = inputs(9)
    assert_near(torch.export.load(path).module()(*args), layers(*args))


@pytest.mark.parametrize("tracing_mode", ("real", "fake", "symbolic"))
@pytest.mark.parametrize("scheme", ("", "fp8_channel"))
def test_make_fx(scheme, tracing_mode):
    layers = Layers(scheme=scheme)
    graph = make_fx(layers, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*inputs(6))
    args = inputs(11 if tracing_mode == "symbolic" else 6)
    assert_near(graph(*args), layers(*args))
    assert op_names(graph).count("moe_ops.torch_experts") == 1


@pytest.mark.slow
def test_eager_plans_of_one_size_serve_another():
    """Eager calls after a compiled one, and the reverse, at other sizes."""
    bind.forget()
    layers = Layers()
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=True)
    for run, M in ((compiled, 4), (layers, 9), (compiled, 3), (layers, 1), (layers, 0)):
        args = inputs(M)
        assert_near(run(*args), oracle(layers, *args))
