"""ResidentExperts on a GPU: capture, replay with new routing, streams, and host memory."""

from __future__ import annotations

import gc

import pytest
import torch

import moe_ops
from moe_ops.choose import mixed as choose
from moe_ops.residency import bank, host
from moe_ops.schemes import SCHEMES
from tests.support.cases import BF16, Case, poisoned_memory
from tests.support.lru import Slots

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
E, TOP_K = 16, 4
SIZES = {"E": E, "top_k": TOP_K, "K": 256, "I": 128}


def case_of(scheme: str = "", M: int = 2, seed: int = 0, **options) -> Case:
    return Case("cuda", BF16, scheme, M=M, seed=seed, **SIZES, **options)


def experts_of(case: Case, slots: int) -> moe_ops.ResidentExperts:
    biases = {k: v for k, v in case.options.items() if k.endswith("_bias")}
    return moe_ops.ResidentExperts(*case.args[1:3], **biases, slots=slots)


def run(case: Case, experts: moe_ops.ResidentExperts, **options) -> torch.Tensor:
    x, _, _, weights, ids = case.args
    options = {"activation": case.options["activation"], "backend": "triton"} | options
    return moe_ops.fused_experts(x, experts.w13, experts.w2, weights, ids, **options)


def plain(case: Case, **options) -> torch.Tensor:
    return moe_ops.fused_experts(*case.args, **case.options, **({"backend": "triton"} | options))


def refused(scheme: str) -> bool:
    """Schemes of which rows share a dynamic scale."""
    desc = SCHEMES[scheme].activation
    if desc is None or desc.static:
        return False
    return desc.group.is_tensor or desc.global_scale


INVARIANT = ("", "fp8_block", "int4_w4a16:g128")


@pytest.mark.parametrize(
    "scheme, options",
    [(scheme, {}) for scheme in SCHEMES if not refused(scheme)]
    + [(scheme, {"batch_invariant": True}) for scheme in INVARIANT],
)
def test_bits_of_every_scheme(scheme, options):
    """One token, few, and more pairs than slots."""
    first = case_of(scheme, bias=True)
    try:
        plain(first, **options)
    except ValueError as error:
        if "triton has no kernels for" not in str(error):  # tests/matrix knows for which
            raise
        pytest.skip(str(error))
    experts = experts_of(first, slots=8)
    for seed, M in enumerate((1, 5, 1, 40, 2)):
        case = case_of(scheme, M, seed)
        case.args[1:3] = first.args[1:3]
        case.options |= {k: v for k, v in first.options.items() if k.endswith("_bias")}
        with poisoned_memory():
            out = run(case, experts, **options)
        assert torch.equal(out, plain(case, **options)), M


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16"])
@pytest.mark.parametrize("K", [256, 320])
def test_bits_of_prepared_weights(scheme, K, monkeypatch):
    monkeypatch.setitem(SIZES, "K", K)
    first = case_of(scheme)
    prepared = [moe_ops.prepare(weight, "triton") for weight in first.args[1:3]]
    experts = moe_ops.ResidentExperts(*prepared, slots=8)
    for seed, M in enumerate((1, 2, 5, 40)):
        case = case_of(scheme, M, seed)
        case.args[1:3] = prepared
        assert torch.equal(run(case, experts), plain(case)), M


@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g128", "mxfp4_w4a16"])
@pytest.mark.parametrize("M", [1, 2, 7, 64])
def test_replays_follow_new_routing(scheme, M, monkeypatch):
    case = case_of(scheme, M)
    experts, lru = experts_of(case, slots=8), Slots(E, 8)
    if M == 64:  # a prompt
        monkeypatch.setattr(bank, "FLOPS_OF_BYTE", 0)
    run(case, experts)  # compiles
    experts.forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(case, experts)
    moe_ops.residency_stats(experts)
    for seed in range(1, 8):
        new = case_of(scheme, M, seed)
        for i in (0, 3, 4):
            case.args[i].copy_(new.args[i])
        graph.replay()
        assert torch.equal(out, plain(case)), seed
        if M != 64:
            passes = -(-min(M * TOP_K, E) // 8)
            list(lru.passes(case.args[4].flatten().tolist(), passes))
    hits, misses, came = moe_ops.residency_stats(experts)
    if M == 64:
        assert (hits, misses) == (0, 7 * E)
    else:
        assert (hits, misses) == (lru.hits, lru.misses)
    assert came == misses * experts.expert_bytes


@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "fp8_w8a16:channel", "mxfp4_w4a16"])
@pytest.mark.parametrize("flops", [0, bank.FLOPS_OF_BYTE])
def test_bits_of_many_rows(scheme, flops, monkeypatch):
    """Products of rows without padding (mixed_gemm/sm90_packed.py), in passes of both kinds."""
    monkeypatch.setattr(choose, "many_rows", lambda *_: True)
    monkeypatch.setattr(bank, "FLOPS_OF_BYTE", flops)
    first = case_of(scheme)
    experts = experts_of(first, slots=6)
    for seed, M in enumerate((300, 3, 900)):
        case = case_of(scheme, M, seed)
        case.args[1:3] = first.args[1:3]
        for options in ({}, {"max_workspace_bytes": 1 << 20}):
            with poisoned_memory():
                out = run(case, experts, **options)
            assert torch.equal(out, plain(case, **options)), M


def test_prompts_leave_a_true_table(monkeypatch):
    """After all experts have streamed, calls find the last ones."""
    case = case_of(M=64)
    experts = experts_of(case, slots=7)  # three to a half, and one slot more
    monkeypatch.setattr(bank, "FLOPS_OF_BYTE", 0)
    assert torch.equal(run(case, experts), plain(case))
    monkeypatch.undo()
    moe_ops.residency_stats(experts)
    last = case_of(M=1, ids=torch.tensor([[12, 13, 14, 15]]))
    last.args[1:3] = case.args[1:3]
    assert torch.equal(run(last, experts), plain(last))
    assert moe_ops.residency_stats(experts)[:2] == (4, 0)


def test_a_warm_call_does_not_wait_for_the_device():
    case = case_of(M=5)
    experts = experts_of(case, slots=8)
    run(case, experts)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case, experts)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_capture_before_a_call_says_what_to_do():
    case = Case("cuda", BF16, M=3, E=24, top_k=3, K=80, I=48)
    experts = moe_ops.ResidentExperts(*case.args[1:3], slots=11)
    from moe_ops.kernels import launch

    launch._compiled.clear()
    with (
        pytest.raises(RuntimeError, match="warm up first"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        run(case, experts)


def test_streams_wait_for_one_another():
    case, other = case_of(M=1), case_of(M=1, seed=3)
    other.args[1:3] = case.args[1:3]
    experts = experts_of(case, slots=4)
    expected = [plain(case), plain(other)]
    run(case, experts)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outs = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            outs.append((i % 2, run((case, other)[i % 2], experts)))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i]) for i, out in outs)


def test_forget_comes_after_calls_of_other_streams():
    """Rows that a call brought before it are not taken for those that were written then."""
    case = case_of(M=1)
    experts, stream = experts_of(case, slots=4), torch.cuda.Stream()
    run(case, experts)  # compiles
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)  # clocks
        run(case, experts)
    experts.forget()
    torch.cuda.synchronize()
    assert (experts._bank.table.expert_of == -1).all()


def test_two_layers_on_two_streams():
    cases = [case_of(M=1, seed=seed) for seed in range(2)]
    layers = [experts_of(case, slots=5) for case in cases]
    expected = [plain(case) for case in cases]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            outs.append((i % 2, run(cases[i % 2], layers[i % 2])))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i]) for i, out in outs)


def test_compiled_layers_run_as_cuda_graphs():
    case = case_of("int4_w4a16:g128", M=2)
    experts = experts_of(case, slots=8)
    x, _, _, weights, ids = case.args

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def layer(x, weights, ids):
        return (
            moe_ops.fused_experts(x, experts.w13, experts.w2, weights, ids, backend="triton") * 2
        )

    with torch.no_grad():
        for seed in range(6):
            new = case_of("int4_w4a16:g128", M=2, seed=seed)
            for tensor, value in zip((x, weights, ids), (new.args[0], *new.args[3:]), strict=True):
                tensor.copy_(value)
            assert torch.equal(layer(x, weights, ids), 2 * plain(case))


@pytest.mark.parametrize("M", [2, 40])
def test_loading_waits_until_calls_have_read_the_rows(M, monkeypatch):
    monkeypatch.setitem(SIZES, "K", 2048)
    monkeypatch.setitem(SIZES, "I", 1024)  # copies take much longer than launches
    case, other = case_of(M=M), case_of(M=M, seed=1)
    experts = experts_of(case, slots=8)
    layer = torch.nn.ModuleDict({"experts": experts})
    want, loaded = plain(case), {"w13": other.args[1].cpu(), "w2": other.args[2].cpu()}
    run(case, experts)
    for _ in range(3):
        experts.forget()
        torch.cuda.synchronize()
        out = run(case, experts)
        layer.load_state_dict({f"experts.{name}": rows for name, rows in loaded.items()})
        assert torch.equal(out, want)
        layer.load_state_dict({"experts.w13": case.args[1], "experts.w2": case.args[2]})
    assert torch.equal(run(case, experts), want)


@pytest.mark.parametrize("M", [2, 40])
def test_experts_may_go_while_a_call_reads_them(M, monkeypatch):
    monkeypatch.setitem(SIZES, "K", 2048)
    monkeypatch.setitem(SIZES, "I", 1024)
    case = case_of(M=M)
    want = plain(case)
    for _ in range(3):
        experts = experts_of(case, slots=8)
        run(case, experts)
        experts.forget()
        torch.cuda.synchronize()
        out = run(case, experts)
        del experts
        gc.collect()
        assert torch.equal(out, want)


def test_host_memory_is_pinned_and_released():
    memory = host.HostMemory(3 << 20, torch.device("cuda"))
    data = memory.data
    assert memory.pinned and data.is_pinned() and data.data_ptr() % 4096 == 0
    del memory
    assert not data.is_pinned()


@pytest.mark.parametrize("M", [2, 5, 64])
def test_memory_that_is_not_pinned(M, monkeypatch):
    monkeypatch.setattr(host, "_PORTABLE_AND_MAPPED", 1 << 20)  # flags that CUDA refuses
    case = case_of("fp8_block", M=M)
    with pytest.warns(UserWarning, match="did not pin"):
        experts = experts_of(case, slots=8)
    if M == 64:
        monkeypatch.setattr(bank, "FLOPS_OF_BYTE", 0)
    for seed in range(3):
        new = case_of("fp8_block", M, seed)
        new.args[1:3] = case.args[1:3]
        assert torch.equal(run(new, experts), plain(new))
    with pytest.raises(RuntimeError, match="not pinned"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(case, experts)


def test_all_hits_cost_no_copies():
    case = case_of(M=1)
    experts = experts_of(case, slots=8)
    run(case, experts)
    moe_ops.residency_stats(experts)
    for _ in range(5):
        run(case, experts)
    assert moe_ops.residency_stats(experts).misses == 0
