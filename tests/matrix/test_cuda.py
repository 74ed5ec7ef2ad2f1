"""What only a CUDA device shows: graphs, host synchronisation, launches, several devices, sizes
past 2^31."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import moe_ops
from moe_ops import backends
from tests.support import oracle
from tests.support.cases import BF16, FP32, TOLERANCE, Case, assert_matches, refill, tolerance

CUDA = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
SCHEMES = ["", "fp8_tensor", "fp8_channel", "fp8_block"]


def needs(name: str, case: Case) -> None:
    """Skip unless a backend takes the case; backends that must are asserted to."""
    x, w13, w2, _, ids = case.args
    plan = moe_ops.explain(x, w13, w2, ids, backend="torch", **case.options)
    (backend,) = [b for b in backends.BACKENDS if b.name == name]
    machine = plan.machine
    taken = name in machine.available and not backend.supports(plan.problem, machine)
    assert taken or name not in ("torch", "triton")
    if not taken:
        pytest.skip(f"{name} does not take this case here")


def captured(case: Case, backend: str):
    """A graph of one call, and its output. The call has been warm."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(backend, poison=False)
    return graph, out


@pytest.mark.parametrize("backend", ["auto", *backends.list_backends()])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("M", [1, 40])
def test_captured_graph_follows_tokens_and_routing(backend, scheme, M):
    case = Case("cuda", BF16, scheme, M=M, E=8, K=160, I=136, bias=True)
    if backend != "auto":
        needs(backend, case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.run(backend, poison=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph, out = captured(case, backend)
    for seed in range(3):
        refill(case, seed)
        out.fill_(float("nan"))
        graph.replay()
        assert_matches(out, case.reference(), tolerance(BF16, scheme, "cuda"))


def check_steps(step, case: Case, renew) -> None:
    """A step that writes the inputs of `case` and runs it, eager and as a graph, on new values
    each time."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for run in (step, graph.replay) * 3:
        renew()
        out.fill_(float("nan"))
        torch.cuda.synchronize()  # so that nothing but the step itself orders what it does
        found = run()
        expected = case.reference()
        assert_matches(
            out if found is None else found, expected, tolerance(BF16, case.scheme, "cuda")
        )


def write_by_copy(ids, source):
    ids.copy_(source)


def write_by_kernel(ids, source):
    torch.add(source, 0, out=ids)


def write_after_memset(ids, source):
    ids.zero_()
    ids += source


def write_on_another_stream(ids, source):
    here, there = torch.cuda.current_stream(), torch.cuda.Stream()
    there.wait_stream(here)
    with torch.cuda.stream(there):
        torch.cuda._sleep(200_000)
        ids.copy_(source)
    here.wait_stream(there)


@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g128"])
@pytest.mark.parametrize("M", [1, 9, 40])
@pytest.mark.parametrize(
    "write", [write_by_copy, write_by_kernel, write_after_memset, write_on_another_stream]
)
def test_waits_for_what_writes_its_inputs(scheme, M, write):
    """The first kernel may be launched early behind nodes of any kind, eager and captured."""
    case = Case("cuda", BF16, scheme, M=M, E=40, K=256, I=128)
    refill(case, 1)  # without NaN
    ids = case.args[4]
    source = torch.zeros_like(ids)

    def step():
        torch.cuda._sleep(200_000)
        write(ids, source)
        return case.run("triton", poison=False)

    g = torch.Generator("cuda").manual_seed(2)
    check_steps(step, case, lambda: source.random_(0, 40, generator=g))


@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g128"])
@pytest.mark.parametrize("M", [1, 9, 40])
def test_waits_for_a_kernel_that_lets_it_start_early(scheme, M):
    """Whose writes come 0.1 ms after it let the next kernel start: of ids, router weights and
    hidden states."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("kernels are launched early from SM90 on")
    pytest.importorskip("triton")
    from tests.support.late_writer import moe_ops_test_late_writer

    case = Case("cuda", BF16, scheme, M=M, E=40, K=256, I=128)
    refill(case, 1)  # without NaN
    x, _, _, weights, ids = case.args
    sources = [torch.zeros_like(t) for t in (x, weights, ids)]

    def step():
        arguments = [t for pair in zip((x, weights, ids), sources, strict=True) for t in pair]
        sizes = [t.numel() for t in (x, weights, ids)]
        moe_ops_test_late_writer[(1,)](*arguments, *sizes, 100_000)
        return case.run("triton", poison=False)

    g = torch.Generator("cuda").manual_seed(2)  # the error of a single token varies widely

    def renew():
        sources[0].normal_(generator=g)
        sources[1].uniform_(generator=g)
        sources[2].random_(0, 40, generator=g)

    check_steps(step, case, renew)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_trap_workspace_grown_after_capture(backend):
    """A larger eager call between capture and replay does not move what the graph uses."""
    case = Case("cuda", BF16, M=9, E=8, K=160, I=136)
    case.run(backend, poison=False)
    graph, out = captured(case, backend)
    Case("cuda", BF16, M=900, E=8, K=160, I=136).run(backend)
    refill(case, 5)
    graph.replay()
    assert_matches(out, case.reference(), TOLERANCE[BF16])


def test_capture_before_a_warm_call_says_to_warm_up():
    case = Case("cuda", BF16, M=9, K=112, I=72)  # sizes no other test has
    with pytest.raises(RuntimeError, match="warm up first: call the same function once"):
        captured(case, "triton")
    torch.cuda.synchronize()
    case.check("triton")
    graph, out = captured(case, "triton")
    graph.replay()
    assert_matches(out, case.reference(), TOLERANCE[BF16])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("scheme", ["", "fp8_tensor", "fp8_channel", "fp8_block"])
def test_no_host_synchronisation(backend, dtype, scheme):
    case = Case("cuda", dtype, scheme, M=20, E=8, K=160, I=136, bias=True, expert_map=True)
    needs(backend, case)
    x = torch.randn(8, 4, 160, device="cuda", dtype=dtype)
    counts = torch.tensor([4, 0, 2, 1, 3, 0, 4, 1], dtype=torch.int32, device="cuda")
    _, w13, w2, *_ = case.args

    def calls():
        return (
            case.run(backend, poison=False),
            moe_ops.batched_experts(x, w13, w2, counts, backend=backend),
            moe_ops.grouped_linear(x.flatten(0, 1), w13, counts.cumsum(0).int(), backend=backend),
        )

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_gradients_do_not_synchronise():
    case = Case("cuda", BF16, M=20, E=8, K=160, I=136, bias=True)
    leaves = [t.requires_grad_() for t in case.args[:4]]

    def step():
        out = case.run(poison=False)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("M", [1, 32, 500])
def test_triton_launches_four_kernels_at_most(M):
    case = Case("cuda", BF16, M=M, E=8, top_k=2, K=256, I=128, bias=True)
    case.run("triton", poison=False)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        case.run("triton", poison=False)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    kernels = [e.name for e in traced.events() if e.device_type == device]
    assert 2 <= len(kernels) <= 4 and all("moe_ops" in name for name in kernels), kernels


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_second_device(backend):
    """Tensors decide where a call runs, not the current device."""
    assert torch.cuda.current_device() == 0
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        out = Case(device, BF16, bias=True).check(backend)
        assert out.device == torch.device(device)
    assert torch.cuda.current_device() == 0


def test_two_streams():
    cases = [Case("cuda", BF16, M=200, E=8, K=256, I=128, seed=seed) for seed in range(2)]
    streams = [torch.cuda.Stream() for _ in cases]
    for case in cases:
        case.run("triton", poison=False)
    torch.cuda.synchronize()
    outs = []
    for _ in range(10):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append((case, case.run("triton", poison=False)))
    torch.cuda.synchronize()
    first = {}
    for case, out in outs:
        assert torch.equal(first.setdefault(case, out), out)
    for case, out in first.items():
        assert_matches(out, case.reference(), TOLERANCE[BF16])


def enough_memory(gibibytes: int) -> bool:
    return torch.cuda.mem_get_info()[0] >= gibibytes << 30


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_trap_offsets_past_two_to_the_31(backend):
    """M * top_k * N > 2^31: eight tokens repeated, so eight rows tell about all of them."""
    if not enough_memory(60):
        pytest.skip("needs 60 GiB of device memory")
    M, top_k = 140_000, 8
    case = Case("cuda", BF16, M=8, E=4, top_k=top_k, K=64, I=1024)
    assert M * top_k * 2048 > 2**31
    expected = case.reference()
    nowhere = case.nowhere
    for i in (0, 3, 4):
        case.args[i] = case.args[i].repeat(M // 8, 1)
    out = case.run(backend, poison=False).view(-1, 8, 64)
    assert_matches(out[0], expected, TOLERANCE[BF16])
    assert_matches(out[-1], expected, TOLERANCE[BF16])
    assert (out[:, nowhere] == 0).all()
    spread = (out.float() - out[:1].float()).norm(dim=2) / out[:1].float().norm(dim=2).clamp(min=1)
    assert spread.max() < TOLERANCE[BF16]


@pytest.mark.parametrize("backend", backends.list_backends())
@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_block"])
@pytest.mark.parametrize("M", [7232, 40000])
def test_trap_fp8_sizes_that_went_wrong(backend, scheme, M):
    """(M, I, K) = (M, 2048, 5120), where others have returned wrong values; sampled tokens
    tell."""
    if not enough_memory(40):
        pytest.skip("needs 40 GiB of device memory")
    small = Case("cuda", BF16, scheme, M=64, E=4, top_k=1, K=5120, I=2048)
    needs(backend, small)
    x, w13, w2, weights, ids = small.args
    order = torch.arange(M) % 64  # tokens 0 to 63 again and again
    case = Case("cuda", BF16, M=4, K=16, I=8)
    case.args = [x[order], w13, w2, weights[order], ids[order]]
    out = case.run(backend, poison=False)
    picked = torch.tensor([0, 5, 31, M // 2, M - 200, M - 1])
    few = Case("cuda", BF16, scheme, M=4, K=16, I=8)
    few.args = [x[order[picked]], w13, w2, weights[order[picked]], ids[order[picked]]]
    assert oracle.relative_error(out[picked], few.reference()) <= tolerance(BF16, scheme, "cuda")


@pytest.mark.parametrize("scheme", ["", "fp8_channel", "int4_w4a8"])
def test_reduce_overhead(scheme):
    """Inductor with CUDA graphs of its own, two numbers of tokens; what a first call keeps for
    those after it is none of the graphs' memory.
    """
    from moe_ops.kernels.mixed_gemm import sm90_wgmma

    torch._dynamo.reset()
    sm90_wgmma._products_on.clear()
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        K, I = (256, 256) if scheme == "int4_w4a8" else (160, 136)
        for M in (16, 24):
            case = Case("cuda", BF16, scheme, M=M, E=8, K=K, I=I, bias=True)
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                out = compiled(*case.args, **case.options).clone()
                assert_matches(out, case.reference(), tolerance(BF16, scheme, "cuda"))
