"""The fused router kernels: under the interpreter and on a GPU."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import moe_ops
from moe_ops.meta.router import MAX_TOKENS, max_tokens, router_tiles, router_workspace
from tests.kernels.router.test_topk import interpreter_only
from tests.routing.test_tokens import BF16, FP16, FP32, GROUPS, check, inputs, run_op


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CASES = {  # M, E, K, dtype, dtype of logits, method, options, bias of the linear layer
    "mixtral": (1, 8, 512, BF16, None, "renormalize", {}, False),
    "tails": (3, 12, 300, BF16, None, "default", {}, False),
    "deepseek_v3": (5, 24, 520, BF16, FP32, "deepseek_v3", GROUPS, False),
    "gpt_oss": (2, 10, 328, BF16, None, "renormalize", {}, True),
    "all tokens": (MAX_TOKENS, 5, 70, FP16, None, "sigmoid", {}, True),
    "fp32": (4, 9, 264, FP32, None, "sqrtsoftplus", {}, True),
    "many tokens": (MAX_TOKENS + 1, 6, 96, FP32, None, "renormalize", {}, True),
    "many tokens in fp32": (MAX_TOKENS + 1, 6, 96, BF16, FP32, "topk", {}, True),
}


@interpreter_only
@pytest.mark.parametrize("name", CASES)
def test_kernels_under_the_interpreter(name):
    M, E, K, dtype, logits, method, options, biased = CASES[name]
    x, w = inputs(M, E, K, dtype)
    bias = torch.randn(E).to(dtype) if biased else None
    if method in ("deepseek_v3", "sqrtsoftplus"):
        options = options | {"correction_bias": torch.randn(E)}
    result = run_op(x, w, 3, method, bias=bias, dtype=logits, **options)
    check(result, x, w, 3, method, bias=bias, **options)


@interpreter_only
@pytest.mark.parametrize("M", [1, 2])
def test_kernels_take_strides_and_write_any_dtype(M):
    x = torch.randn(140, 3).to(BF16)[::2].T[:M]
    w = (torch.randn(75, 24) / 8).to(BF16).T[::2, 5:]
    bias, correction = torch.randn(24).to(BF16)[::2], torch.randn(24)[::2]
    options = {"correction_bias": correction}
    outputs = BF16, torch.int64
    result = run_op(x, w, 2, "sigmoid", bias=bias, outputs=outputs, **options)
    assert [t.dtype for t in result] == [BF16, BF16, torch.int64]
    check(result, x, w, 2, "sigmoid", bias=bias, **options)


@interpreter_only
@pytest.mark.parametrize("M", [2, MAX_TOKENS + 1])
def test_the_choice_is_that_of_rounded_logits(M):
    """Expert 1 is the better one before rounding; equals go to the lower index."""
    x, w = torch.zeros(M, 64), torch.zeros(4, 64)
    x[:, 0], x[:, 1] = 1.0, 2.0**-10
    w[0, 0] = w[1, 0] = w[1, 1] = 1.0
    logits, _, ids = run_op(x.to(BF16), w.to(BF16), 1, "renormalize")
    assert (logits[:, 0] == logits[:, 1]).all() and (ids == 0).all()
    logits, _, ids = run_op(x.to(BF16), w.to(BF16), 1, "renormalize", dtype=FP32)
    assert (logits[:, 1] > logits[:, 0]).all() and (ids == 1).all()


@pytest.mark.parametrize(
    "E, K", [(8, 4096), (128, 2048), (256, 7168), (1, 1), (9, 70), (1024, 300), (8, 90000)]
)
def test_tiles_cover_the_weight(E, K):
    tiles = router_tiles(E, K)
    assert (tiles.splits - 1) * tiles.span < K <= tiles.splits * tiles.span
    assert tiles.span & (tiles.span - 1) == 0
    assert tiles.span * tiles.experts <= 64 * 32 * tiles.warps
    assert router_workspace(3, E, K) == (tiles.splits * 3 * E,)
    assert router_workspace(4096, E, K) == (tiles.splits * max_tokens(E, K) * E,)


# ---- on a GPU

GPU_SHAPES = {
    "mixtral": (8, 2, 4096, BF16, None),
    "qwen3": (128, 8, 2048, BF16, None),
    "deepseek_v3": (256, 8, 7168, BF16, FP32),
    "gpt_oss": (32, 4, 2880, BF16, None),
    "odd": (60, 4, 1000, FP16, None),
    "fp32": (130, 6, 777, FP32, None),
}
gpu_only = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu_case(name, M):
    E, top_k, K, dtype, logits_dtype = GPU_SHAPES[name]
    x, w = inputs(M, E, K, dtype, "cuda")
    options = {"logits_dtype": logits_dtype}
    method = "renormalize"
    if name == "deepseek_v3":
        method = "deepseek_v3"
        options |= {"correction_bias": torch.randn(E, device="cuda"), "num_expert_groups": 8}
        options |= {"topk_groups": 4, "scaling_factor": 2.5}
    if name == "gpt_oss":
        options["router_bias"] = torch.randn(E, device="cuda").to(dtype)
    return x, w, top_k, method, options


class TestOnGpu:
    pytestmark = gpu_only

    @pytest.mark.parametrize("M", [1, 2, 7, MAX_TOKENS, MAX_TOKENS + 1, 300])
    @pytest.mark.parametrize("name", GPU_SHAPES)
    def test_values(self, name, M):
        x, w, top_k, method, options = gpu_case(name, M)
        with torch.no_grad():
            result = moe_ops.route_tokens(x, w, top_k, method, **options)
            again = moe_ops.route_tokens(x, w, top_k, method, **options)
        assert all(map(torch.equal, result, again))
        logits, weights, ids = result
        exact = x.double() @ w.double().T
        if "router_bias" in options:
            exact = exact + options["router_bias"].double()
        error = (logits.double() - exact).abs().max()
        # torch's product may add its own splits in 16 bits
        low, few = logits.dtype != FP32, max_tokens(*w.shape)
        assert error <= ((2**-6 if low and few < M else 2**-7) if low else 2e-4) * 4
        kept = {k: v for k, v in options.items() if k not in ("logits_dtype", "router_bias")}
        two = moe_ops.route(logits, top_k, method, **kept)
        assert torch.equal(two[1], ids)  # exp of another kernel may end in another bit
        torch.testing.assert_close(weights, two[0], rtol=1e-6, atol=0)

    @pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
    @pytest.mark.parametrize("M", [1, 8, 40])
    def test_captured_graph_follows_its_inputs(self, name, M):
        x, w, top_k, method, options = gpu_case(name, M)
        moe_ops.route_tokens(x, w, top_k, method, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = moe_ops.route_tokens(x, w, top_k, method, **options)
        for _ in range(3):
            x.copy_(torch.randn(x.shape))
            for output in outputs:
                output.fill_(-1)
            graph.replay()
            wanted = moe_ops.route_tokens(x, w, top_k, method, **options)
            assert all(map(torch.equal, outputs, wanted))

    @pytest.mark.parametrize("name", GPU_SHAPES)
    def test_few_tokens_take_two_kernels(self, name):
        x, w, top_k, method, options = gpu_case(name, 4)
        moe_ops.route_tokens(x, w, top_k, method, **options)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as traced:
                moe_ops.route_tokens(x, w, top_k, method, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        device = torch.autograd.DeviceType.CUDA
        kernels = {e.name for e in traced.events() if e.device_type == device}
        assert kernels == {"moe_ops_router_sums", "moe_ops_router_choice"}

    def test_capture_before_a_warm_call_says_to_warm_up(self):
        x, w = inputs(2, 24, 712, BF16, "cuda")  # sizes no other test has
        with (
            pytest.raises(RuntimeError, match="warm up first"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            moe_ops.route_tokens(x, w, 2)
        torch.cuda.synchronize()
