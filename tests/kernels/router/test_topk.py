"""The top-k kernel: under the interpreter, as an operator, and on a GPU."""

import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_ops.routing.route import _ROUTE_OP, route
from tests.routing.test_route import METHODS, NEEDS_BIAS, NEEDS_GROUPS, check, options, oracle

# ---- the fused kernel: under Triton's interpreter on the CPU, for real on a GPU


def kernel_arguments(method, ours):
    scoring, renormalize, _, _ = METHODS[method]
    groups = ours.get("num_expert_groups", 1)
    return ours["correction_bias"], scoring, renormalize, groups, ours.get("topk_groups", 1)


def run_op(logits, top_k, method, ours, scale):
    shape = (logits.shape[0], top_k)
    weights = torch.full(shape, math.nan, device=logits.device)
    ids = torch.full(shape, -7, dtype=torch.int32, device=logits.device)
    with np.errstate(over="ignore"):  # in the interpreter: exp of the stand-in for -inf
        _ROUTE_OP(weights, ids, logits, *kernel_arguments(method, ours), scale)
    return weights, ids


def hostile_logits(rows, num_experts, dtype=torch.float32):
    logits = (3 * torch.randn(rows, num_experts)).to(dtype)
    logits[0] = math.nan
    logits[1, : num_experts - 1] = math.nan
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3, 1] = -math.inf
    return logits


interpreter_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the GPU tests run the same kernel compiled"
)


@interpreter_only
@pytest.mark.parametrize("num_experts, top_k", [(12, 5), (8, 2)])  # groups of 3 and of 2
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_kernel_under_the_interpreter(method, grouped, num_experts, top_k):
    logits = hostile_logits(6, num_experts)
    top_k = 1 if method == "llama4" else top_k
    ours, theirs = options(method, num_experts, grouped=grouped, biased=grouped)
    result = run_op(logits, top_k, method, ours, 2.5)
    check(result, oracle(logits, top_k, method, scale=2.5, **theirs))


@interpreter_only
def test_kernel_takes_strides_and_half_precision():
    base = torch.randn(7, 10).bfloat16()
    bias = torch.randn(14)[::2]
    ours = {"correction_bias": bias}
    result = run_op(base.T[::2], 7, "sigmoid", ours, 1.0)
    check(result, oracle(base.T[::2], 7, "sigmoid", bias=bias))
    assert run_op(base.T[:0], 2, "sigmoid", ours, 1.0)[0].shape == (0, 2)


@interpreter_only
def test_kernel_keeps_small_scores():
    """sqrt(softplus) of negative logits: 1 + exp(x) alone would round most of exp(x) away."""
    logits, bias = torch.randn(4, 8) - 12.0, torch.randn(8)
    result = run_op(logits, 3, "sqrtsoftplus", {"correction_bias": bias}, 1.0)
    check(result, oracle(logits, 3, "sqrtsoftplus", bias=bias))
    check(
        route(logits, 3, "sqrtsoftplus", correction_bias=bias),
        oracle(logits, 3, "sqrtsoftplus", bias=bias),
    )


@interpreter_only
def test_opcheck():
    logits, bias = torch.randn(3, 8), torch.randn(8)
    for arguments in (
        (None, "softmax", True, 1, 1, 1.0),
        (bias, "sigmoid", True, 4, 2, 2.5),
        (bias, "sqrtsoftplus", False, 1, 1, 1.0),
    ):
        outputs = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
        torch.library.opcheck(_ROUTE_OP, (*outputs, logits, *arguments))


@pytest.mark.parametrize("method", METHODS)
def test_cuda_traces_to_one_op(method):
    """On fake CUDA tensors, which need no GPU."""
    top_k = 1 if method == "llama4" else 3
    with FakeTensorMode():
        logits = torch.empty(5, 16, device="cuda")
        bias = torch.empty(16, device="cuda") if method in NEEDS_BIAS else None
        groups = {"num_expert_groups": 4, "topk_groups": 2} if method in NEEDS_GROUPS else {}

        def run(logits):
            return route(logits, top_k, method, correction_bias=bias, **groups)

        def op_names(logits):
            graph = make_fx(run)(logits).graph
            return [str(node.target) for node in graph.nodes if node.op == "call_function"]

        assert op_names(logits) == ["aten.new_empty.default"] * 2 + ["moe_ops.route.default"]
        weights, ids = run(logits)
        assert (weights.shape, weights.dtype) == ((5, top_k), torch.float32)
        assert (ids.shape, ids.dtype, ids.device.type) == ((5, top_k), torch.int32, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(8, 2), (60, 4), (128, 8), (384, 8), (1024, 12)]
)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_kernel_on_gpu(method, grouped, num_experts, top_k, dtype):
    """route on CUDA (one launch) against route on the CPU (pure torch) and the oracle."""
    logits = hostile_logits(65, num_experts, dtype)
    top_k = 1 if method == "llama4" else top_k
    ours, theirs = options(method, num_experts, grouped=grouped, biased=grouped)
    bias = ours.pop("correction_bias")
    expected = oracle(logits, top_k, method, scale=2.5, **theirs)
    on_gpu = bias if bias is None else bias.cuda()
    weights, ids = route(
        logits.cuda(), top_k, method, scaling_factor=2.5, correction_bias=on_gpu, **ours
    )
    if bias is None:
        check((weights, ids), expected)
    else:  # near-ties of biased scores may fall either way: compare the weights by expert
        assert (ids.cpu().long() == expected[1]).float().mean() > 0.99
        same = (ids.cpu().long() == expected[1]).all(-1)
        torch.testing.assert_close(
            weights.cpu().double()[same], expected[0][same], rtol=5e-6, atol=1e-30
        )
    assert ((ids >= 0) & (ids < num_experts)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 4096])
def test_route_on_gpu_with_any_number_of_tokens(rows):
    logits = torch.randn(rows, 128)
    weights, ids = route(logits.cuda(), 8)
    expected = route(logits, 8)
    assert torch.equal(ids.cpu(), expected[1])
    torch.testing.assert_close(weights.cpu(), expected[0])


@pytest.mark.gpu
def test_capture_and_replay_with_other_logits():
    logits = torch.randn(4, 96, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="call it once"), torch.cuda.graph(graph):
        route(logits, 5, "sigmoid", scaling_factor=3.0)
    torch.cuda.synchronize()
    route(logits, 5, "sigmoid", scaling_factor=3.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = route(logits, 5, "sigmoid", scaling_factor=3.0)
    for _ in range(3):
        logits.normal_()
        graph.replay()
        check((weights, ids), oracle(logits.cpu(), 5, "sigmoid", scale=3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("mark", ["dynamic", "unbacked"])
def test_compiled_on_gpu(mark):
    compiled = torch.compile(route, fullgraph=True)
    for rows in (7, 300):
        logits = torch.randn(rows, 64, device="cuda")
        if mark == "dynamic":
            torch._dynamo.mark_dynamic(logits, 0)
        else:
            torch._dynamo.decorators.mark_unbacked(logits, 0)
        check(compiled(logits, 6, "renormalize"), oracle(logits.cpu(), 6, "renormalize"))
    torch._dynamo.reset()
