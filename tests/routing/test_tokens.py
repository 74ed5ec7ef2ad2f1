"""route_tokens: logits against fp64 products, choices against the oracle of test_route, tracing,
errors."""

import math

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import moe_ops
from moe_ops.meta.router import router_workspace
from moe_ops.routing.tokens import _OP, fused_router
from tests.kernels.router.test_topk import interpreter_only
from tests.routing.test_route import METHODS, oracle
from tests.support.fake_cuda import Recorder, fake_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# half a step of the format, relative; Triton's interpreter cuts fp32 off to bf16
ROUNDING = {BF16: 2**-8 if torch.cuda.is_available() else 2**-7, FP16: 2**-11, FP32: 2**-24}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(M, E, K, dtype, device="cpu"):
    """Unit-scale hidden states and a weight that makes unit-scale logits."""
    x, w = torch.randn(M, K), torch.randn(E, K) / K**0.5
    return x.to(dtype).to(device), w.to(dtype).to(device)


def arguments_of(method, options):
    """scoring, renormalize, groups and kept groups of the operator."""
    scoring, renormalize, _, _ = METHODS[method]
    groups = options.get("num_expert_groups", 1), options.get("topk_groups", 1)
    return (scoring, renormalize, *groups)


def run_op(x, w, top_k, method, *, bias=None, dtype=None, outputs=(FP32, torch.int32), **options):
    """The operator on poisoned outputs and workspace."""
    M, (E, K) = x.shape[0], w.shape
    logits = torch.full((M, E), math.nan, dtype=dtype or x.dtype, device=x.device)
    weights = torch.full((M, top_k), math.nan, dtype=outputs[0], device=x.device)
    ids = torch.full((M, top_k), -7, dtype=outputs[1], device=x.device)
    workspace = torch.full(router_workspace(M, E, K), math.nan, device=x.device)
    correction, scale = options.get("correction_bias"), options.get("scaling_factor", 1.0)
    with np.errstate(over="ignore"):  # in the interpreter: exp of the stand-in for -inf
        _OP(
            *(logits, weights, ids, workspace, x, w, bias, correction),
            *(*arguments_of(method, options), scale),
        )
    return logits, weights, ids


def check(result, x, w, top_k, method, *, bias=None, **options):
    """Logits rounded once from the exact product; weights and ids those of the logits returned."""
    logits, weights, ids = result
    exact = x.double().cpu() @ w.double().cpu().T
    if bias is not None:
        exact = exact + bias.double().cpu()
    step = ROUNDING[logits.dtype]  # sums of fp32 round K times, at random: sqrt(K) * 2^-24
    slack = 4 * x.shape[1] ** 0.5 * 2**-24
    assert ((logits.double().cpu() - exact).abs() <= step * 1.01 * exact.abs() + slack).all()
    names = {
        "num_expert_groups": "groups",
        "topk_groups": "kept",
        "correction_bias": "bias",
        "scaling_factor": "scale",
    }
    theirs = {names[k]: v.cpu() if torch.is_tensor(v) else v for k, v in options.items()}
    expected = oracle(logits.cpu(), top_k, method, **theirs)
    assert torch.equal(ids.cpu().long(), expected[1])
    rtol = 2e-6 if weights.dtype == FP32 else ROUNDING[weights.dtype]
    torch.testing.assert_close(weights.cpu().double(), expected[0], rtol=rtol, atol=1e-30)


GROUPS = {"num_expert_groups": 4, "topk_groups": 2, "scaling_factor": 2.5}


@interpreter_only
def test_ties_nan_and_no_tokens():
    x, w = inputs(4, 8, 80, BF16)
    w[6] = w[3]
    x[1, 7] = math.nan  # the token's every logit
    x[2] = 0
    w = torch.cat((w, w.new_full((1, 80), math.nan)))  # an expert that is never a candidate
    logits, weights, ids = run_op(x, w, 8, "renormalize")
    assert ids[2].tolist() == list(range(8))
    for row in (0, 3):
        order = ids[row].tolist()
        assert order.index(6) == order.index(3) + 1 and 8 not in order
    assert logits[1].isnan().all() and (weights[1] == 0).all()
    assert sorted(set(ids[1].tolist())) == list(range(8))
    for output in run_op(x[:0], w, 2, "renormalize"):
        assert output.shape[0] == 0


@interpreter_only
def test_opcheck():
    x, w = inputs(2, 8, 40, FP32)
    for bias, correction, arguments in (
        (None, None, ("softmax", True, 1, 1, 1.0)),
        (torch.randn(8), torch.randn(8), ("sigmoid", True, 4, 2, 2.5)),
    ):
        outputs = torch.zeros(2, 8), torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int32)
        workspace = torch.zeros(router_workspace(2, 8, 40))
        torch.library.opcheck(_OP, (*outputs, workspace, x, w, bias, correction, *arguments))
        with pytest.raises(ValueError, match="workspace must have .* elements for M=2, E=8, K=40"):
            _OP(*outputs, workspace[1:], x, w, bias, correction, *arguments)


# ---- route_tokens itself


@pytest.mark.parametrize("M", [1, 20])
@pytest.mark.parametrize("method", METHODS)
def test_values(method, M):
    """The two steps; the operator's values on a GPU are below."""
    x, w = inputs(M, 16, 64, FP32)
    top_k = 1 if method == "llama4" else 3
    options = {"scaling_factor": 1.5}
    if method in ("deepseek_v3", "sqrtsoftplus"):
        options["correction_bias"] = torch.randn(16)
    if method.startswith("grouped"):
        options |= GROUPS
    bias = torch.randn(16)
    result = moe_ops.route_tokens(x, w, top_k, method, router_bias=bias, **options)
    check(result, x, w, top_k, method, bias=bias, **options)
    assert [t.dtype for t in result] == [FP32, FP32, torch.int32]


def test_logits_in_another_dtype():
    x, w = inputs(3, 8, 64, BF16)
    logits, weights, ids = moe_ops.route_tokens(x, w, 2, logits_dtype=FP32)
    check((logits, weights, ids), x, w, 2, "renormalize")
    assert logits.dtype == FP32
    logits, _, _ = moe_ops.route_tokens(x.float(), w.float(), 2, logits_dtype=BF16)
    assert torch.equal(logits, torch.nn.functional.linear(x, w))


def test_callables_and_simulated_run():
    x, w = inputs(5, 8, 32, FP32)

    def last(logits, top_k):
        return logits[:, -top_k:], torch.arange(8 - top_k, 8).expand(5, top_k)

    logits, weights, ids = moe_ops.route_tokens(x, w, 2, last)
    assert torch.equal(weights, logits[:, 6:]) and ids.tolist() == [[6, 7]] * 5
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    got, want = [moe_ops.route_tokens(x, w, 3, "simulated", generator=g) for g in generators]
    assert torch.equal(got[2], want[2]) and (got[1] == 1 / 3).all()


def test_gradients_are_those_of_the_two_steps():
    x, w = inputs(6, 8, 32, FP32)
    bias = torch.randn(8)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    logits, weights, ids = moe_ops.route_tokens(x, w, 3, router_bias=bias)
    expected = torch.nn.functional.linear(x, w, bias)
    wanted = torch.softmax(expected.gather(1, ids.long()), -1)
    upstream, other = torch.randn_like(weights), torch.randn_like(logits)
    got = torch.autograd.grad((weights * upstream).sum() + (logits * other).sum(), leaves)
    want = torch.autograd.grad((wanted * upstream).sum() + (expected * other).sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.sweep
@pytest.mark.parametrize("mark", ["dynamic", "unbacked"])
def test_one_graph_for_every_number_of_tokens(mark):
    counter = CompileCounter()
    compiled = torch.compile(moe_ops.route_tokens, backend=counter, fullgraph=True)
    for M in (5, 2, 33):
        x, w = inputs(M, 8, 32, FP32)
        if mark == "dynamic":
            torch._dynamo.mark_dynamic(x, 0)
        else:
            torch._dynamo.decorators.mark_unbacked(x, 0)
        got, want = compiled(x, w, 2), moe_ops.route_tokens(x, w, 2)
        assert torch.equal(got[2], want[2])
        torch.testing.assert_close(got[1], want[1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("rows", ["static", "dynamic", "unbacked"])
def test_traces_to_one_operator_on_a_gpu(rows):
    recorder = Recorder()
    with fake_gpu() as mode, torch.device("cuda"):
        M = 7
        old = torch.__version__.startswith("2.11")  # whose tracer takes no such fake tensors
        if rows == "unbacked" and not old:
            M = mode.shape_env.create_unbacked_symint()
            torch._check(M >= 0)
        x, w = torch.empty(M, 2048, dtype=BF16), torch.empty(128, 2048, dtype=BF16)
        if rows == "unbacked" and old:
            torch._dynamo.decorators.mark_unbacked(x, 0)
        if rows == "dynamic":
            torch._dynamo.mark_dynamic(x, 0)
        compiled = torch.compile(
            lambda x, w: moe_ops.route_tokens(x, w, 8, logits_dtype=FP32),
            fullgraph=True,
            backend=recorder.backend,
        )
        logits, weights, ids = compiled(x, w)
    ((op, arguments),) = recorder.calls()
    assert op.name() == "moe_ops::route_tokens"
    (graph,) = recorder.graphs
    names = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert not [name for name in names if "mm" in name or "topk" in name or "_to_copy" in name]
    assert (logits.dtype, weights.dtype, ids.dtype) == (FP32, FP32, torch.int32)
    assert logits.shape[1] == 128 and weights.shape[1] == ids.shape[1] == 8
    traced = arguments["hidden_states"].shape[0]
    assert (type(traced) is int) == (rows == "static")
    (size,) = router_workspace(traced, 128, 2048)
    assert str(arguments["workspace"].shape[0]) == str(size)


def test_what_runs_in_two_steps_on_a_gpu(monkeypatch):
    with fake_gpu(), torch.device("cuda"):
        x, w = torch.empty(3, 64), torch.empty(8, 64)
        arguments = (2, "renormalize", {}, (FP32, torch.int32))
        assert fused_router(x, w, None, None, *arguments) is not None
        assert fused_router(x, w, None, BF16, *arguments) is None  # rounds before the product
        assert fused_router(x.double(), w.double(), None, None, *arguments) is None
        assert fused_router(x, torch.empty(1025, 64), None, None, *arguments) is None
        with monkeypatch.context() as patch:  # a build without CUDA disables its autocast
            patch.setattr(
                "moe_ops.routing.tokens.autocasting", lambda device: device.type == "cuda"
            )
            assert fused_router(x, w, None, None, *arguments) is None
        w.requires_grad_()
        assert fused_router(x, w, None, None, *arguments) is None
        with torch.no_grad():
            assert fused_router(x, w, None, None, *arguments) is not None


X, W = torch.zeros(2, 16), torch.zeros(8, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_states": None}, "hidden_states must be a torch.Tensor, got NoneType"),
        (
            {"hidden_states": X.view(1, 2, 16)},
            r"shape \(M, K\), got a 3-D tensor; .*hidden_states.flatten\(0, 1\)",
        ),
        ({"router_weight": W.T}, r"shape \(E, K=16\), .*; it is transposed: pass router_weight.T"),
        ({"hidden_states": X.int()}, "must be floating point, got torch.int32"),
        ({"router_weight": [0]}, "router_weight must be a torch.Tensor, got list"),
        ({"router_weight": W.to("meta")}, "router_weight must be on the device of hidden_states"),
        ({"router_weight": W.half()}, "router_weight must have the dtype .*give logits_dtype"),
        ({"router_bias": 0.0}, "router_bias must be a torch.Tensor, got float"),
        ({"router_bias": X[0]}, r"router_bias must have shape \(E=8,\), got \(16,\)"),
        ({"router_bias": W[:, 0].half()}, "router_bias must have the dtype of hidden_states"),
        ({"logits_dtype": torch.int32}, "logits_dtype must be a floating-point dtype"),
        ({"top_k": 9}, r"top_k must be in 1..E=8, got 9"),
        ({"method": "softmax"}, "method must be one of default, .*got 'softmax'"),
        ({"method": "deepseek_v3"}, "correction_bias must be given"),
        ({"generator": torch.Generator()}, "generator must be None"),
    ],
)
def test_bad_input(arguments, message):
    call = {"hidden_states": X, "router_weight": W, "top_k": 2} | arguments
    with pytest.raises(ValueError, match=message):
        moe_ops.route_tokens(**call)
