"""ResidentExperts: bits of the layer that is all on the device, one graph, errors, and what
nn.Module does with it.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import threading

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops.backends.triton.backend import WITH_KERNELS
from moe_ops.ops import resident
from moe_ops.residency import bank
from tests.support import oracle
from tests.support.cases import BF16, FP32, Case, assert_matches, poisoned_memory, tolerance
from tests.support.fake_cuda import Recorder
from tests.support.lru import Slots

CUDA = torch.cuda.is_available()
SCHEMES = ["", "fp8_block", "int4_w4a16:g64", "mxfp4_w4a16", "int8_w8a8", "fp8_tensor_static"]
SCHEMES += ["int4_w4a16:g32:super:min+int6_w6a16:g16:super"]  # Q4_K and Q6_K


def experts_of(case: Case, slots: int, **options) -> moe_ops.ResidentExperts:
    """The experts of a case in so many slots."""
    biases = {name: case.options[name] for name in ("w13_bias", "w2_bias") if name in case.options}
    options = {"device": case.device} | biases | options
    return moe_ops.ResidentExperts(case.args[1], case.args[2], slots=slots, **options)


def run(case: Case, experts: moe_ops.ResidentExperts, **options) -> torch.Tensor:
    x, _, _, weights, ids = case.args
    given = {k: v for k, v in case.options.items() if not k.endswith("_bias")}
    return moe_ops.fused_experts(x, experts.w13, experts.w2, weights, ids, **given, **options)


def small(scheme: str = "", seed: int = 0, **sizes) -> Case:
    """Eight experts of a few dozen columns, and biases; ids of all kinds."""
    sizes = {"M": 3, "E": 8, "top_k": 2, "K": 64, "I": 32, "bias": True} | sizes
    return Case("cuda" if CUDA else "cpu", BF16, scheme, seed=seed, **sizes)


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    elif CUDA:
        pytest.skip("torch runs resident experts on CPUs")
    return request.param


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_are_those_of_the_layer_on_the_device(scheme, backend):
    """Calls one after the other, so that experts stay, come and go."""
    if backend == "triton" and not WITH_KERNELS.issuperset(oracle.schemes_of(scheme)):
        pytest.skip("triton has no kernels for it")
    first = small(scheme)
    experts, lru = experts_of(first, slots=6), Slots(8, 6)
    for seed, M in enumerate((3, 1, 3, 2, 3)):
        case = small(scheme, seed, M=M)
        case.args[1:3] = first.args[1:3]
        case.options |= {k: first.options[k] for k in ("w13_bias", "w2_bias")}
        expected = moe_ops.fused_experts(*case.args, **case.options, backend=backend)
        with poisoned_memory():
            out = run(case, experts, backend=backend)
        assert torch.equal(out, expected)
        assert_matches(out, case.reference(), tolerance(BF16, scheme, case.device), floor=1.0)
        list(lru.passes(case.args[4].flatten().tolist(), 1))
    stats = moe_ops.residency_stats(experts)
    assert stats == (lru.hits, lru.misses, lru.misses * experts.expert_bytes)
    assert moe_ops.residency_stats(experts) == (0, 0, 0)


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g64", "mxfp4_w4a16", "int8_w8a8"])
@pytest.mark.parametrize("slots, streams", [(5, False), (2, False), (5, True), (2, True)])
def test_passes_have_the_bits_of_one(scheme, slots, streams, monkeypatch):
    """More pairs than slots, in passes over chosen experts or, as prompts, over all."""
    pytest.importorskip("triton")
    if streams:
        monkeypatch.setattr(bank, "FLOPS_OF_BYTE", 0)
    first = small(scheme)
    experts, lru = experts_of(first, slots), Slots(8, slots)
    for seed, M in enumerate((7, 1, 3, 5)):
        case = small(scheme, seed, M=M)
        case.args[1:3] = first.args[1:3]
        case.options |= {k: first.options[k] for k in ("w13_bias", "w2_bias")}
        expected = moe_ops.fused_experts(*case.args, **case.options, backend="triton")
        with poisoned_memory():
            out = run(case, experts, backend="triton")
        assert torch.equal(out, expected), M
        if not streams:
            passes = -(-min(2 * M, 8) // slots)
            list(lru.passes(case.args[4].flatten().tolist(), passes))
    hits, misses, _ = moe_ops.residency_stats(experts)
    if not streams:
        assert (hits, misses) == (lru.hits, lru.misses)


CALLS = {
    "router weights on the input": ({"top_k": 1, "on_input": True}, {}),
    "batch invariant": ({}, {"batch_invariant": True}),
    "one token": ({"M": 1, "ids_dtype": torch.int64}, {}),
    "no gate": ({"activation": "relu2_no_mul"}, {}),
    "chunks of tokens": ({"M": 40}, {"max_workspace_bytes": 60000}),
    "two schemes": ({"scheme": "int4_w4a16:g64+plain"}, {}),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_other_kinds(name, backend):
    sizes, options = CALLS[name]
    case = small(**({"M": 6, "bias": False, "scheme": "int4_w4a16:g64"} | sizes))
    experts = experts_of(case, slots=3)
    expected = moe_ops.fused_experts(*case.args, **case.options, **options, backend=backend)
    for _ in range(2):
        with poisoned_memory():
            assert torch.equal(run(case, experts, backend=backend, **options), expected)


@pytest.mark.slow
def test_a_prompt_leaves_a_true_table(monkeypatch):
    """After all experts have streamed, calls find the last ones, and the slot between halves
    is empty.
    """
    pytest.importorskip("triton")
    case = small(M=9)
    experts = experts_of(case, slots=5)
    monkeypatch.setattr(bank, "FLOPS_OF_BYTE", 0)
    run(case, experts, backend="triton")
    monkeypatch.undo()
    assert moe_ops.residency_stats(experts)[:2] == (0, 8)
    for ids, hits in (([6, 7], 2), ([4, 5], 2), ([0, 6], 1)):
        one = small(M=1, ids=torch.tensor([ids]))
        one.args[1:3] = case.args[1:3]
        one.options |= {k: case.options[k] for k in ("w13_bias", "w2_bias")}
        expected = moe_ops.fused_experts(*one.args, **one.options, backend="triton")
        assert torch.equal(run(one, experts, backend="triton"), expected)
        assert moe_ops.residency_stats(experts)[:2] == (hits, 2 - hits)


def test_more_pairs_than_slots_read_host_memory_on_a_cpu():
    case = small(M=9)
    experts = experts_of(case, slots=4, device="cpu")
    expected = moe_ops.fused_experts(*case.args, **case.options, backend="torch")
    assert torch.equal(run(case, experts, backend="torch"), expected)
    assert moe_ops.residency_stats(experts) == (0, 0, 0)


def test_slots_for_all_experts_are_the_layer_on_the_device(backend):
    case = small(M=9)
    experts = experts_of(case, slots=100)
    assert experts.slots == 8 and isinstance(experts.w13.whole, torch.nn.Parameter)
    expected = moe_ops.fused_experts(*case.args, **case.options, backend=backend)
    assert torch.equal(run(case, experts, backend=backend), expected)
    assert moe_ops.residency_stats(experts).hit_rate == 1


@pytest.mark.parametrize("M", [0, 3])
def test_no_tokens_and_no_experts(M, backend):
    case = small(M=M, ids=torch.full((M, 2), -1))
    experts = experts_of(case, slots=6)
    assert torch.equal(run(case, experts, backend=backend), torch.zeros_like(case.args[0]))
    assert moe_ops.residency_stats(experts) == (0, 0, 0)


@pytest.mark.slow
def test_one_graph_for_all_numbers_of_tokens():
    case = small(bias=False)
    experts = experts_of(case, slots=6)
    recorder = Recorder()

    def layer(x, weights, ids):
        return moe_ops.fused_experts(x, experts.w13, experts.w2, weights, ids)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=recorder.backend)
    with torch.no_grad():
        for seed, M in enumerate((3, 2, 9)):
            x, w13, w2, weights, ids = small(seed=seed, M=M, bias=False).args
            w13, w2 = case.args[1:3]
            expected = moe_ops.fused_experts(x, w13, w2, weights, ids)
            assert torch.equal(compiled(x, weights, ids), expected)
    ((op, arguments),) = recorder.calls()
    assert op is torch.ops.moe_ops.resident_experts.default
    held = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
    assert all(t.shape[0] != 8 or t.ndim < 3 for t in held)  # no weight is an input


@pytest.mark.slow
def test_inductor():
    case = small("fp8_block")
    experts = experts_of(case, slots=6)
    x, w13, w2, weights, ids = case.args
    layer = torch.compile(lambda x: run(case, experts) * 2, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(layer(x), 2 * moe_ops.fused_experts(*case.args, **case.options))


@pytest.mark.parametrize("scheme", ["", "fp8_channel"])
def test_opcheck(scheme):
    case = small(scheme, bias=False)
    experts = experts_of(case, slots=6)
    x, _, _, weights, ids = case.args
    seen = []
    op = torch.ops.moe_ops.resident_experts.default

    class Keep(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is op:
                seen.append((args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Keep():
        run(case, experts)
    ((args, kwargs),) = seen
    opcheck(op, args, kwargs)


def test_warmup_export_and_flops_know_the_operator():
    case = small(bias=False)
    experts = experts_of(case, slots=6)
    x, w13, w2, weights, ids = case.args

    def call(M):
        return moe_ops.fused_experts(x[:M], experts.w13, experts.w2, weights[:M], ids[:M])

    report = moe_ops.warmup(call, (1, 3), show_progress=False)
    backend = moe_ops.explain(x, experts.w13, experts.w2, ids).tiers[0][1].name
    assert [one.backends for one in report.layers[0].calls] == [(backend,)] * 2

    class Layer(torch.nn.Module):
        def forward(self, x, weights, ids):
            return moe_ops.fused_experts(x, experts.w13, experts.w2, weights, ids)

    rows = ({0: torch.export.Dim("M", max=1000)},) * 3
    with torch.no_grad():
        program = torch.export.export(Layer(), (x, weights, ids), dynamic_shapes=rows)
    expected = moe_ops.fused_experts(*case.args)
    assert torch.equal(program.module()(x, weights, ids), expected)
    with FlopCounterMode(display=False) as ours, torch.no_grad():
        call(3)
    with FlopCounterMode(display=False) as plain, torch.no_grad():
        moe_ops.fused_experts(*case.args)
    assert ours.get_total_flops() == plain.get_total_flops() > 0


def test_autocast_casts_tokens_alone():
    case = small(bias=False)
    experts = experts_of(case, slots=6)
    x, w13, w2, weights, ids = case.args
    with torch.autocast(case.device, BF16):
        out = moe_ops.fused_experts(x.to(FP32), experts.w13, experts.w2, weights, ids)
    assert torch.equal(out, moe_ops.fused_experts(x, w13, w2, weights, ids))


def test_names_that_are_gone_are_refused():
    case = small()
    with pytest.raises(RuntimeError, match="keep the module alive"):
        resident.resident_of("experts-1")
    experts = experts_of(case, slots=6)
    name = experts.name
    del experts
    with pytest.raises(RuntimeError, match="keep the module alive"):
        resident.resident_of(name)


def test_names_are_those_of_equal_sizes_alone(monkeypatch):
    """A program of another process, where as many experts were made before, but others."""

    def name(slots: int = 4, scheme: str = "", **sizes) -> str:
        monkeypatch.setattr(resident, "_numbers", itertools.count(10**6))
        return experts_of(small(scheme, **sizes), slots=slots).name

    assert name() == name(seed=1)
    schemes = [name(scheme="int8_w8a16"), name(scheme="int4_w4a16:g64")]
    others = [name(I=96), name(E=9), name(slots=5), name(bias=False), *schemes]
    assert len({name(), *others}) == 7


def refused(case, experts, match, **options):
    with pytest.raises(ValueError, match=match):
        run(case, experts, **options)


def test_calls_that_are_refused():
    case = small()
    experts, others = experts_of(case, slots=6), experts_of(case, slots=8)
    x, w13, w2, weights, ids = case.args
    refused(case, experts, "w13_bias must be left out", w13_bias=torch.zeros(8, 64))
    refused(case, experts, "expert_map must be left out", expert_map=torch.arange(8))
    refused(case, experts, "exchange must be left out", exchange="a group")
    for pair in ((experts.w13, others.w2), (experts.w2, experts.w13), (experts.w13, w2)):
        with pytest.raises(ValueError, match="those of one ResidentExperts"):
            moe_ops.fused_experts(x, *pair, weights, ids)
    case.args[0] = x.to(FP32)
    refused(case, experts, "w13 must have dtype torch.float32")
    case.args[0] = x[:, :32]
    refused(case, experts, r"w13 must have shape \(E, N, 32\)")
    case.args[0] = x.clone().requires_grad_()
    refused(case, experts, "torch.no_grad")
    with torch.no_grad():
        run(case, experts)
    few = experts_of(small(), slots=1)
    refused(small(), few, "at least top_k=2, got 1")
    for backend in ("cutlass", "deep_gemm"):
        refused(small(), experts, "resident experts|needs a CUDA device", backend=backend)
    with pytest.raises(ValueError, match="fused_experts alone runs"):
        moe_ops.grouped_linear(x, experts.w13, torch.full((8,), 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="fused_experts alone runs"):
        moe_ops.batched_experts(x[None], experts.w13, experts.w2, ids[0])


def test_layers_that_are_refused():
    case = small("fp8_tensor")
    with pytest.raises(ValueError, match="which passes over slots cannot know"):
        experts_of(case, slots=4)
    plain = small()
    w13, w2 = plain.args[1:3]
    with pytest.raises(ValueError, match="must not require gradients"):
        moe_ops.ResidentExperts(w13.clone().requires_grad_(), w2, slots=4)
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        moe_ops.ResidentExperts(w13, w2, slots=0)
    with pytest.raises(ValueError, match=r"w2 must not be empty, got shape \(8, 64, 0\)"):
        moe_ops.ResidentExperts(w13, w2[..., :0], slots=3)
    with pytest.raises(ValueError, match=r"w2_bias must have shape \(8, 64\), got \(8, 32\)"):
        moe_ops.ResidentExperts(w13, w2, w2_bias=torch.zeros(8, 32), slots=3)
    for device in ("meta", "xpu"):
        with pytest.raises(ValueError, match="device must be a GPU of CUDA, or the CPU, got"):
            moe_ops.ResidentExperts(w13, w2, slots=3, device=device)
    with pytest.raises(ValueError, match="an entry for each of the 8 experts"):
        moe_ops.ResidentExperts(w13[:4], w2, slots=3)


def test_explain_names_slots_and_refusals():
    case = small()
    experts = experts_of(case, slots=6)
    text = str(moe_ops.explain(case.args[0], experts.w13, experts.w2, case.args[4]))
    assert "slots" in text
    assert "does not run resident experts" in text or "needs a CUDA device" in text


@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g64"])
@pytest.mark.parametrize("slots", [6, 8])
def test_state_dict_has_the_rows_under_the_weights_names(scheme, slots):
    case, other = small(scheme), small(scheme, seed=1)
    model = torch.nn.ModuleDict({"experts": experts_of(case, slots)})
    state = model.state_dict()
    assert list(state) == [f"experts.{n}" for n in ("w13", "w2", "w13_bias", "w2_bias")]
    w13 = state["experts.w13"]
    assert type(w13) is type(case.args[1]) and torch.equal(values(w13), values(case.args[1]))
    run(case, model["experts"])
    model.load_state_dict(
        {
            "experts.w13": other.args[1],
            "experts.w2": other.args[2],
            "experts.w13_bias": other.options["w13_bias"],
            "experts.w2_bias": other.options["w2_bias"],
        }
    )
    expected = moe_ops.fused_experts(*other.args, **other.options)
    assert torch.equal(run(other, model["experts"]), expected)
    with pytest.raises(RuntimeError, match="Missing.*w2"):
        model.load_state_dict({"experts.w13": other.args[1]})


@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g64"])
@pytest.mark.parametrize(
    "wrong", [lambda t: 5, lambda t: t[:4], lambda t: moe_ops.quantize(t, "int8_w8a16")]
)
def test_calls_after_a_load_that_failed_have_one_set_of_rows(scheme, wrong):
    """w13 was copied when w2 is refused, so that its rows in slots are those of before."""
    case, other = small(scheme, bias=False), small(bias=False, seed=1)
    experts, (x, _, w2, weights, ids) = experts_of(case, slots=6), case.args
    run(case, experts)
    w13 = small(scheme, bias=False, seed=1).args[1]
    with pytest.raises(RuntimeError, match="w2 (must|was not copied)"):
        experts.load_state_dict({"w13": w13, "w2": wrong(other.args[2])})
    assert torch.equal(run(case, experts), moe_ops.fused_experts(x, w13, w2, weights, ids))


def values(weight: torch.Tensor) -> torch.Tensor:
    return (weight.dequantize() if hasattr(weight, "scheme") else weight).cpu()


@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g64"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("slots", [6, 8])
def test_copies_have_slots_of_their_own(scheme, how, slots):
    case = small(scheme)
    experts = experts_of(case, slots)
    expected = run(case, experts)
    other = how(experts)
    assert other.name != experts.name
    for rows in experts.rows.values():
        getattr(rows, "qdata", rows).zero_()
    assert torch.equal(run(case, other), expected)
    assert (moe_ops.residency_stats(other).misses > 0) == (slots < 8)


@pytest.mark.parametrize(
    "scheme", ["", "mxfp4_w4a16", "fp8_tensor_static", "int5_w5a16:g32:super:min"]
)
@pytest.mark.parametrize("slots", [6, 8])
def test_rows_that_are_filled_later(scheme, slots):
    case = small(scheme, bias=False)
    w13, w2 = case.args[1:3]
    on_meta = w13.to("meta"), w2.to("meta")
    experts = moe_ops.ResidentExperts(*on_meta, slots=slots, device=case.device)
    experts.rows["w13"].copy_(w13)
    experts.rows["w2"].copy_(w2)
    experts.forget()
    expected = moe_ops.fused_experts(*case.args)
    assert torch.equal(
        moe_ops.fused_experts(case.args[0], experts.w13, experts.w2, *case.args[3:]), expected
    )


@pytest.mark.parametrize("slots", [6, 8])
def test_experts_are_made_under_any_defaults(slots):
    """Other default devices and dtypes, and inference_mode, outside of which calls are made."""
    case = small()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            experts = experts_of(case, slots)
    finally:
        torch.set_default_dtype(before)
    expected = moe_ops.fused_experts(*case.args, **case.options)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(run(case, experts), expected)


@pytest.mark.parametrize("slots", [6, 8])
def test_experts_stay_where_they_are(slots):
    case = small()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), experts_of(case, slots))
    model.to(case.device)
    with pytest.raises(ValueError, match="resident experts stay torch.bfloat16"):
        model.to(torch.float16)
    with pytest.raises(ValueError, match="resident experts stay torch.bfloat16 on"):
        model.to("meta")


def test_threads_take_turns():
    case = small()
    experts = experts_of(case, slots=6)
    cases = [small(seed=seed) for seed in range(2)]
    for one in cases:
        one.args[1:3] = case.args[1:3]
        one.options |= {k: case.options[k] for k in ("w13_bias", "w2_bias")}
    expected = [moe_ops.fused_experts(*c.args, **c.options) for c in cases]
    wrong = []

    def calls(i):
        for _ in range(50):
            if not torch.equal(run(cases[i], experts), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
