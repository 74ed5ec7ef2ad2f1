"""Plans: which backend is chosen, what is said about the others, and that plans know nothing of
M."""

import dataclasses
import threading

import pytest
import torch

import moe_ops
from moe_ops import backends as backends_module
from moe_ops.activations import Activation
from moe_ops.backend import Claim, Library
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.planning import training as training_plans
from moe_ops.tables import lookup

H200 = Machine("cuda", (9, 0), "NVIDIA H200", ("triton", "torch"))
CPU = Machine("cpu", available=("triton", "torch"))
PLAIN = Problem("experts", 8, 64, 32, 64, 2, torch.bfloat16)
FP8 = dataclasses.replace(PLAIN, scheme="fp8_block")
WIDE = dataclasses.replace(PLAIN, dtype=torch.float64)  # torch alone runs it


def names(plan: plans.Plan) -> list[tuple[int, str]]:
    return [(limit, backend.name) for limit, backend in plan.tiers]


# --- named backends ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", backends_module.list_backends())
def test_a_named_backend_runs_alone(name, table):
    others = [other for other in backends_module.list_backends() if other != name]
    table((4, others[0]), (-1, name))
    everything = dataclasses.replace(H200, available=backends_module.list_backends())
    reasons = plans._reasons(backends_module.named(name), PLAIN, everything)
    if reasons:
        with pytest.raises(ValueError, match=f"backend '{name}' cannot run this call: ") as error:
            plans.plan(PLAIN, everything, name)
        assert str(error.value).endswith("; ".join(reasons))
        return
    plan = plans.plan(PLAIN, everything, name)
    assert names(plan) == [(-1, name)]
    assert plan.backend == name and plan.tiers_text == ""
    assert plan.op.name() == f"moe_ops::{name}_experts"
    assert plan.refused == () and plan.basis == ""


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError) as error:
        plans.plan(PLAIN, H200, "tritton")
    known = ", ".join(backends_module.list_backends())
    assert str(error.value) == (
        f"backend must be one of auto, {known}, got 'tritton'; did you mean 'triton'?"
    )
    x, w13, w2, ids = torch.randn(1, 4), torch.randn(1, 4, 4), torch.randn(1, 4, 2), [[0]]
    ids = torch.tensor(ids)
    with pytest.raises(ValueError, match="backend must be one of auto, .*, got ''"):
        moe_ops.fused_experts(x, w13, w2, torch.ones(1, 1), ids, backend="")


def test_a_named_backend_never_falls_back():
    problem = dataclasses.replace(WIDE, layout="shuffled")
    with pytest.raises(ValueError) as error:
        plans.plan(problem, H200, "triton")
    text = str(error.value)
    assert text.startswith("backend 'triton' cannot run this call: ")
    for reason in ("got 'shuffled'", "got torch.float64"):
        assert reason in text, "every reason is told"
    with pytest.raises(ValueError, match="got layout 'shuffled'"):
        plans.plan(problem, H200, "torch")


def test_a_missing_library_is_an_import_error(monkeypatch):
    there = Machine("cuda", (9, 0), "NVIDIA H200", ("torch",))
    lacking = dataclasses.replace(
        backends_module.named("triton"),
        library=Library(available=lambda: "triton is not installed; pip install triton"),
    )
    monkeypatch.setattr(backends_module, "BACKENDS", (lacking, backends_module.named("torch")))
    with pytest.raises(ImportError) as error:
        plans.plan(PLAIN, there, "triton")
    assert "pip install triton" in str(error.value)
    plan = plans.plan(PLAIN, there, "auto")
    assert names(plan) == [(-1, "torch")]
    assert plan.refused == (("triton", ("triton is not installed; pip install triton",)),)


def test_a_library_is_asked_for_only_where_it_would_help(monkeypatch):
    monkeypatch.setattr(plans, "_why_not_available", lambda name: f"pip install {name}")

    def refused(device, capability, **changes):
        there = Machine(device, capability, "", ("torch",))
        sizes = {"hidden_size": 256, "intermediate_size": 128, "num_rows": 256}
        return dict(plans.plan(FP8.replace(**sizes, **changes), there).refused)

    on_xpu = refused("xpu", (0, 0))
    assert set(on_xpu) == set(backends_module.list_backends()) - {"torch"}
    for name, reasons in on_xpu.items():
        assert len(reasons) == 1 and reasons[0].startswith(f"{name} needs a CUDA")
    with pytest.raises(ValueError, match="cannot run this call: flashinfer needs a CUDA device"):
        plans.plan(FP8, Machine("xpu", available=("torch",)), "flashinfer")

    (wrong_gpu,) = refused("cuda", (8, 0))["deep_gemm"]
    assert "on compute capability 9.x, 10.x, 12.x, got 8.0" in wrong_gpu
    assert refused("cuda", (9, 0))["deep_gemm"] == ("pip install deep_gemm",)
    (layout, hint) = refused("cuda", (10, 0))["deep_gemm"]
    assert "moe_ops.prepare(weight, 'deep_gemm')" in layout and hint == "pip install deep_gemm"
    for change in ({"dtype": torch.float16}, {"needs_grad": True}):
        assert "pip" not in " ".join(refused("cuda", (9, 0), **change)["deep_gemm"])


def test_gradients_need_a_backward():
    training = PLAIN.replace(needs_grad=True)
    with pytest.raises(ValueError, match="has no backward: wrap the call in torch.no_grad()"):
        plans.plan(training, H200, "triton")
    assert names(plans.plan(training, H200)) == [(-1, "torch")]
    assert plans.plan(training, H200).differentiable
    assert not plans.plan(PLAIN, H200).differentiable


def test_old_gpus_and_cpus_are_refused_by_triton():
    old = Machine("cuda", (7, 5), "Tesla T4", ("triton", "torch"))
    plan = plans.plan(PLAIN, old)
    assert names(plan) == [(-1, "torch")]
    assert plan.refused[0][1] == ("triton needs compute capability 8.0 or higher, got 7.5",)
    assert names(plans.plan(PLAIN, CPU)) == [(-1, "torch")]  # the interpreter: only when named


def test_gpus_that_no_test_ran_on_are_named():
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        text = str(plans.plan(PLAIN, Machine("cuda", capability, "", ("triton", "torch"))))
        told = (
            f"not run on hardware: nothing of this package was tested on a GPU of "
            f"SM{capability[0]}"
        )
        assert (told in text) == (capability != (9, 0))
    assert "not run" not in str(plans.plan(PLAIN, CPU))


def test_no_backend_at_all_tells_why_of_each():
    problem = dataclasses.replace(PLAIN, layout="shuffled")
    with pytest.raises(ValueError) as error:
        plans.plan(problem, H200)
    text = str(error.value)
    assert text.startswith("no backend can run this call: ")
    for name in backends_module.list_backends():
        assert f"{name}: " in text


# --- measured tiers ------------------------------------------------------------------------------


def test_tiers_come_from_the_table(table):
    table((16, "torch"), (-1, "triton"))
    plan = plans.plan(PLAIN, H200)
    assert names(plan) == [(16, "torch"), (-1, "triton")]
    assert plan.backend == "auto" and plan.tiers_text == "16:torch,-1:triton"
    assert plan.op.name() == "moe_ops::auto_experts"
    # half of these experts, who get as many of the tokens' pairs each
    half = dataclasses.replace(PLAIN, num_experts=4, mapped_experts=8)
    assert names(plans.plan(half, H200)) == [(16, "torch"), (-1, "triton")]
    # no such entry: the first in order of preference
    other = dataclasses.replace(PLAIN, hidden_size=128)
    assert names(plans.plan(other, H200)) == [(-1, backends_module.list_backends()[0])]
    elsewhere = dataclasses.replace(H200, gpu_name="NVIDIA B200")
    assert names(plans.plan(PLAIN, elsewhere)) == [(-1, backends_module.list_backends()[0])]
    for change in ({"top_k": 1}, {"dtype": torch.float16}, {"num_experts": 9}):
        assert len(plans.plan(dataclasses.replace(PLAIN, **change), H200).tiers) == 1


def test_tiers_skip_backends_that_refuse(table):
    table((16, "triton"), (64, "torch"), (256, "triton"), (-1, "torch"))
    assert names(plans.plan(PLAIN, H200)) == [
        (16, "triton"),
        (64, "torch"),
        (256, "triton"),
        (-1, "torch"),
    ]
    plan = plans.plan(WIDE, H200)  # triton refuses; its neighbours become one tier
    assert names(plan) == [(-1, "torch")]
    assert plan.backend == "torch"
    assert plan.refused[0][0] == "triton"


def test_neighbours_of_one_backend_are_one_tier(table):
    table((4, "torch"), (16, "torch"), (64, "triton"), (-1, "triton"))
    assert names(plans.plan(PLAIN, H200)) == [(16, "torch"), (-1, "triton")]
    # a table that ends at some size goes on with its last backend
    table((4, "triton"), (64, "torch"))
    assert names(plans.plan(PLAIN, H200)) == [(4, "triton"), (-1, "torch")]


def test_unknown_names_in_a_table_are_left_out(table):
    table((16, "gone"), (-1, "torch"))
    assert names(plans.plan(PLAIN, H200)) == [(-1, "torch")]
    table((16, "gone"))
    assert names(plans.plan(PLAIN, H200)) == [(-1, backends_module.list_backends()[0])]


@pytest.mark.parametrize(
    "times, accepted, tiers",
    [
        ([], "ab", ()),
        ([(8, {"a": 1.0})], "b", ()),
        ([(8, {"a": 1.0, "b": 2.0})], "ab", ((-1, "a"),)),
        # twice as slow at 16, twice as fast at 64: equal halfway, at 32
        ([(16, {"a": 1, "b": 2}), (64, {"a": 4, "b": 2})], "ab", ((32, "a"), (-1, "b"))),
        # four times as slow, then twice as fast: two thirds of the way from 1 to 100
        ([(1, {"a": 1, "b": 4}), (100, {"a": 4, "b": 2})], "ab", ((21, "a"), (-1, "b"))),
        # one that was not measured at both sides: halfway
        ([(4, {"a": 1}), (16, {"a": 4, "b": 2})], "ab", ((8, "a"), (-1, "b"))),
        ([(4, {"a": 1}), (16, {"b": 2})], "ab", ((8, "a"), (-1, "b"))),
        # neighbouring numbers of tokens leave nothing between them
        ([(4, {"a": 1, "b": 9}), (5, {"a": 9, "b": 1})], "ab", ((4, "a"), (-1, "b"))),
        # half a percent is noise, two are not
        ([(1, {"a": 10, "b": 11}), (9, {"a": 10, "b": 9.95})], "ab", ((-1, "a"),)),
        ([(1, {"a": 10, "b": 9.95}), (9, {"a": 10, "b": 11})], "ab", ((1, "b"), (-1, "a"))),
        # as fast but for noise at the first, faster at the second: it begins right behind the
        # first
        ([(4, {"a": 1, "b": 1, "c": 0.995}), (9, {"a": 2, "b": 1, "c": 2})], "abc",
         ((3, "a"), (4, "c"), (-1, "b"))),
        # of fewer tokens than were measured nothing is known
        ([(256, {"a": 2, "b": 1})], "ab", ((255, "a"), (-1, "b"))),
        ([(256, {"a": 2, "b": 1})], "b", ((-1, "b"),)),
        # the fastest is not there: the next has its place, and where that is slower another one
        ([(1, {"a": 1, "b": 4, "c": 2}), (64, {"a": 1, "b": 2, "c": 4})], "bc",
         ((8, "c"), (-1, "b"))),
        ([(1, {"a": 1, "b": 2}), (2, {"c": 5}), (4, {"a": 4, "b": 2})], "ab",
         ((2, "a"), (-1, "b"))),
    ],
)  # fmt: skip
def test_crossovers(times, accepted, tiers):
    assert lookup.crossovers(times, tuple(accepted)) == tiers


def test_what_is_not_installed_leaves_its_tier_to_the_next(monkeypatch, table):
    """Three backends measured, one of them gone: no other plan than one measured without it."""
    torch_backend = backends_module.named("torch")
    backends = [dataclasses.replace(torch_backend, name=name) for name in ("few", "some", "many")]
    monkeypatch.setattr(backends_module, "BACKENDS", tuple(backends))
    times = [
        (1, {"few": 1, "some": 2, "many": 8}),
        (16, {"few": 8, "some": 2, "many": 8}),
        (256, {"few": 64, "some": 32, "many": 8}),
    ]
    monkeypatch.setattr(lookup, "backend_times", lambda *key: times)

    def planned(*available):
        plan = plans.plan(PLAIN, dataclasses.replace(H200, available=available))
        assert plan.basis == ("measured" if len(available) > 1 else "")
        return names(plan)

    assert planned("few", "some", "many") == [(2, "few"), (64, "some"), (-1, "many")]
    assert planned("few", "many") == [(16, "few"), (-1, "many")]
    assert planned("some", "many") == [(64, "some"), (-1, "many")]
    assert planned("few") == [(-1, "few")]


def test_the_heuristic_for_what_was_not_measured(monkeypatch, table):
    """`deep_gemm` alone has a row of claims, in fp8_block and from so many rows an expert on."""
    torch_backend = backends_module.named("torch")
    pair = [dataclasses.replace(torch_backend, name=name) for name in ("triton", "deep_gemm")]
    monkeypatch.setattr(backends_module, "BACKENDS", tuple(pair))
    here = dataclasses.replace(H200, available=("triton", "deep_gemm"))
    row = {"backend": "deep_gemm", "scheme": "fp8_block", "since": 100}
    monkeypatch.setattr(lookup, "_claims", lambda: [row | {"elements": 1 << 40}, row])
    plan = plans.plan(FP8, here)
    # 8 experts, two a token: 399 tokens are 99.75 rows an expert
    assert names(plan) == [(399, "triton"), (-1, "deep_gemm")] and plan.basis == "heuristic"
    for other in (PLAIN, dataclasses.replace(FP8, scheme="fp8_channel")):
        assert names(plans.plan(other, here)) == [(-1, "triton")]
    linear = dataclasses.replace(FP8, kind="grouped_linear", top_k=0)
    assert names(plans.plan(linear, here)) == [(-1, "triton")]
    table((4, "deep_gemm"), (-1, "triton"), scheme="fp8_block")
    assert names(plans.plan(FP8, here)) == [(4, "deep_gemm"), (-1, "triton")]


def test_what_was_not_timed_comes_from_where_it_is_faster(monkeypatch):
    """Of backends that a table timed it does not count what they say."""
    torch_backend = backends_module.named("torch")
    rows = {"few": None, "some": 2, "many": 50, "new": 10}

    def backend(name, since, until=None):
        claim = None if since is None else lambda problem: Claim(since, until)
        return dataclasses.replace(torch_backend, name=name, claim=claim)

    monkeypatch.setattr(
        backends_module, "BACKENDS", tuple([backend(*one) for one in rows.items()])
    )
    times = [(8, {"few": 1, "some": 2}), (64, {"few": 2, "some": 1})]
    monkeypatch.setattr(lookup, "backend_times", lambda *key: times)

    def planned(*available):
        return plans.plan(PLAIN, dataclasses.replace(H200, available=available))

    measured = [(22, "few"), (-1, "some")]
    assert names(planned("few", "some")) == measured
    # 8 experts, two a token: 10 rows an expert are 40 tokens, 50 are 200
    plan = planned("few", "some", "new")
    assert names(plan) == [(22, "few"), (39, "some"), (-1, "new")] and plan.basis == "measured"
    assert "new was not timed here: faster elsewhere" in str(plan)
    everyone = planned(*rows)  # the last one's claim begins below that of the one before it
    assert names(everyone) == [(22, "few"), (39, "some"), (-1, "new")]
    # of fewer tokens than a table has the first one runs, which need not be timed
    monkeypatch.setattr(lookup, "backend_times", lambda *key: [(8, {"some": 1})])
    plan = planned("few", "some", "new")
    assert names(plan) == [(7, "few"), (39, "some"), (-1, "new")]
    assert "few was not timed" not in str(plan)
    monkeypatch.setattr(lookup, "backend_times", lambda *key: [(8, {"many": 1})])
    assert names(planned("some", "many")) == [(-1, "some")]
    monkeypatch.setattr(lookup, "backend_times", lambda *key: [])
    assert names(planned(*rows)) == [(7, "few"), (39, "some"), (-1, "new")]
    assert names(planned("few", "some", "many")) == [(7, "few"), (199, "some"), (-1, "many")]
    # the last one may leave more rows to the one before it, if that one claims any
    back = backend("new", 10, 100)
    known = tuple([backend(name, rows[name]) for name in ("few", "some")])
    monkeypatch.setattr(backends_module, "BACKENDS", (*known, back))
    tiers = [(7, "few"), (39, "some"), (399, "new"), (-1, "some")]
    assert names(planned("few", "some", "new")) == tiers
    assert names(planned("few", "new")) == [(39, "few"), (-1, "new")]
    # to what a table says of them, and of rows that the one before it claims, if they are more
    measured = [(8, {"few": 1, "some": 2}), (2000, {"few": 1, "some": 2}), (4000, {"some": 1})]
    monkeypatch.setattr(lookup, "backend_times", lambda *key: measured)
    tiers = [(39, "few"), (399, "new"), (2828, "few"), (-1, "some")]
    assert names(planned("few", "some", "new")) == tiers
    monkeypatch.setattr(lookup, "backend_times", lambda *key: [])
    for to, end in ((100, 799), (5, None)):
        late, back = backend("some", 200 if to == 100 else 2), backend("new", 10, to)
        monkeypatch.setattr(backends_module, "BACKENDS", (known[0], late, back))
        found = names(planned("few", "some", "new"))
        assert found[-2:] == ([(end, "new"), (-1, "some")] if end else [(39, "some"), (-1, "new")])


@pytest.mark.parametrize("kind, top_k, rows, limit", [
    ("experts", 2, 10, 39),
    ("grouped_linear", 0, 10, 79),  # S rows of 8 experts
    ("batched_experts", 0, 10, 9),  # T rows of each expert
    ("experts", 2, 1, 3),
    ("experts", 2, 0, None),
])  # fmt: skip
def test_rows_an_expert_as_tokens(kind, top_k, rows, limit, monkeypatch):
    """The largest number of tokens with fewer rows an expert on average."""
    torch_backend = backends_module.named("torch")
    pair = (
        dataclasses.replace(torch_backend, name="few"),
        dataclasses.replace(torch_backend, name="many", claim=lambda problem: Claim(rows)),
    )
    monkeypatch.setattr(backends_module, "BACKENDS", pair)
    here = dataclasses.replace(H200, available=("few", "many"))
    problem = dataclasses.replace(PLAIN, kind=kind, top_k=top_k)
    few = [] if limit is None else [(limit, "few")]
    assert names(plans.plan(problem, here)) == [*few, (-1, "many")]


# --- what a plan says ----------------------------------------------------------------------------


@pytest.fixture
def two_backends(monkeypatch):
    pair = (backends_module.named("triton"), backends_module.named("torch"))
    monkeypatch.setattr(backends_module, "BACKENDS", pair)


def test_a_plan_reads_well(table, two_backends):
    table((16, "torch"), (-1, "triton"))
    # per pair: torch 2 * 64 and 2 * 64 bytes, for 16 rows at most; triton 2 * 32 and 4 * 64, and
    # its table of blocks
    assert str(plans.plan(PLAIN, H200)) == (
        "experts: E=8 top_k=2 K=64 I=32 plain bfloat16 on NVIDIA H200\n"
        "  M in 0..16: torch\n"
        "  M >= 17: triton\n"
        "  measured, us a layer:\n"
        "           M      triton       torch\n"
        "           1         2.0         1.0\n"
        "          16         2.0         1.0\n"
        "          17         1.0         2.0\n"
        "  workspace at M=1: 0.00 MiB\n"
        "  workspace at M=64: 0.04 MiB\n"
        "  workspace at M=4096: 2.54 MiB"
    )
    assert str(plans.plan(WIDE, H200)) == (
        "experts: E=8 top_k=2 K=64 I=32 plain float64 on NVIDIA H200\n"
        "  M >= 0: torch\n"
        "  workspace at M=1: 0.00 MiB\n"
        "  workspace at M=64: 0.12 MiB\n"
        "  workspace at M=4096: 8.00 MiB\n"
        "  not triton: triton takes bfloat16, float16 or float32, got torch.float64"
    )
    unmeasured = str(plans.plan(dataclasses.replace(PLAIN, top_k=1), H200)).splitlines()
    assert unmeasured[1:3] == [
        "  M >= 0: triton",
        "  chosen by a heuristic: this problem was not measured on this GPU",
    ]
    emulated = str(plans.plan(FP8, H200, "torch")).splitlines()
    assert emulated[:2] == [
        "experts: E=8 top_k=2 K=64 I=32 fp8_block bfloat16 on NVIDIA H200",
        "  M >= 0: torch (emulated: operands dequantized, products in a wider type)",
    ]


def test_explain_plans_the_call_it_is_given():
    x, ids = torch.randn(5, 64), torch.zeros(5, 2, dtype=torch.int64)
    w13, w2 = torch.randn(8, 64, 64), torch.randn(8, 64, 32)
    plan = moe_ops.explain(x, w13, w2, ids, activation=Activation("silu", limit=3.0))
    problem = Problem(
        "experts", 8, 64, 32, 64, 2, torch.float32, "", "", Options(Activation("silu", limit=3))
    )
    assert plan.problem == problem
    text = str(plan)
    assert "E=8 top_k=2 K=64 I=32 plain float32 on cpu" in text and "M >= 0: torch" in text
    quantized = [moe_ops.quantize(w, "fp8_channel") for w in (w13, w2)]
    assert "emulated" in str(moe_ops.explain(x, *quantized, ids))
    with pytest.raises(ValueError, match="topk_ids must have shape"):
        moe_ops.explain(x, w13, w2, ids[0])
    with pytest.raises(ValueError, match="cannot run this call"):
        moe_ops.explain(x.double(), w13.double(), w2.double(), ids, backend="triton")
    with machines.pretend(H200):
        assert "on NVIDIA H200" in str(moe_ops.explain(x, w13, w2, ids))


@pytest.mark.parametrize(
    ("interpreted", "dtype", "scheme", "how"),
    [
        (True, torch.float32, "", "fused kernels, torch's grouped products"),
        (False, torch.float32, "", "plain torch, because it is not on a CUDA device"),
        (True, torch.float16, "", "plain torch, because it is not on a CUDA device"),
        (
            True,
            torch.float32,
            "fp8_channel",
            "fused kernels, products that decode weights, of activations rounded to e4m3",
        ),
        (
            True,
            torch.float32,
            "fp8_tensor",
            "plain torch, because its scheme has no name, channel scales, a number format that no "
            "kernel decodes, or a scale of all activations of a call",
        ),
    ],
)
def test_explain_says_how_a_step_of_training_runs(monkeypatch, interpreted, dtype, scheme, how):
    monkeypatch.setattr(training_plans, "INTERPRETED", interpreted)
    x, ids = torch.randn(5, 64, dtype=dtype), torch.zeros(5, 2, dtype=torch.int64)
    weights = [torch.randn(8, n, k, dtype=dtype) for n, k in ((64, 64), (64, 32))]
    if scheme:
        weights = [moe_ops.quantize(w, scheme) for w in weights]
    plan = moe_ops.explain(x, *weights, ids, training=True)
    assert plan.gradients == how
    text = str(plan).splitlines()
    assert text[1] == f"  forward and backward pass: {how}"
    assert not any("workspace" in line or "M >= 0" in line for line in text)
    # a call runs as explained
    asked = []
    why_not = training_plans.why_not_kernels

    def noted(*args):
        asked.append(why_not(*args))
        return asked[-1]

    monkeypatch.setattr(training_plans, "why_not_kernels", noted)
    router = torch.rand(5, 2, requires_grad=True)
    moe_ops.fused_experts(x, *weights, router, ids).sum().backward()
    assert len(asked) == 2 and len(set(asked)) == 1  # once an operator
    assert how == ("plain torch, because " + asked[0] if asked[0] else how)
    assert not moe_ops.explain(x, *weights, ids).gradients
    with pytest.raises(ValueError, match="triton.* has no backward"):
        moe_ops.explain(x, *weights, ids, backend="triton", training=True)


def test_pretending_ends():
    here = machines.machine(torch.device("cpu"))
    assert machines.pretended is None and here.device_type == "cpu"
    assert "torch" in here.available
    with machines.pretend(H200) as one:
        assert machines.machine(torch.device("cpu")) is one is H200
        with machines.pretend(CPU):
            assert machines.machine(torch.device("cpu")) is CPU
        assert machines.machine(torch.device("cpu")) is H200
    with pytest.raises(KeyError), machines.pretend(H200):
        raise KeyError
    assert machines.pretended is None
    assert machines.machine(torch.device("cpu")) == here


# --- nothing of M, and safe to share -------------------------------------------------------------


def test_no_plan_knows_the_number_of_tokens(monkeypatch):
    """The same plan object serves every M, and `supports` is asked once."""
    fields = {field.name for field in dataclasses.fields(Problem)}
    assert not fields & {"M", "T", "S", "num_tokens", "tokens", "rows", "batch_size"}
    asked = []
    backend = backends_module.named("torch")
    counting = dataclasses.replace(
        backend, supports=lambda p, m: asked.append(p) or backend.supports(p, m)
    )
    monkeypatch.setattr(backends_module, "BACKENDS", (counting,))
    bind.forget()
    w13, w2 = torch.randn(2, 8, 6), torch.randn(2, 6, 4)
    for M in (3, 1, 0, 700):
        ids = torch.zeros(M, 1, dtype=torch.int64)
        moe_ops.fused_experts(torch.randn(M, 6), w13, w2, torch.ones(M, 1), ids)
    assert len(asked) == 1
    bind.forget()


def test_every_difference_that_matters_is_planned_anew():
    """Eager calls look plans up; each wrong call raises although a right one came before."""
    x, w13, w2 = torch.randn(3, 6), torch.randn(2, 8, 6), torch.randn(2, 6, 4)
    weights, ids = torch.rand(3, 1), torch.zeros(3, 1, dtype=torch.int64)
    counts = torch.tensor([1, 2])
    offsets = counts.int()
    right = {"hidden_states": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": ids}
    moe_ops.fused_experts(**right)
    moe_ops.batched_experts(torch.randn(2, 3, 6), w13, w2, counts)
    moe_ops.grouped_linear(x, w13, offsets)
    for name, wrong in (
        ("hidden_states", x.int()),
        ("hidden_states", x[:, :5]),
        ("hidden_states", x[None]),
        ("w13", w13.double()),
        ("w13", w13[:1]),
        ("w13", w13[0]),
        ("w2", w2[:, :, :3]),
        ("topk_weights", torch.rand(3, 2)),
        ("topk_weights", torch.rand(2, 1)),
        ("topk_weights", weights[:, 0]),
        ("topk_ids", ids.float()),
        ("topk_ids", ids[:2]),
        ("w13_bias", torch.zeros(2, 7)),
        ("w2_bias", torch.zeros(2, 6, dtype=torch.int32)),
        ("expert_map", torch.zeros(2, 2, dtype=torch.int32)),
        ("activation", "silu_no_mul"),
    ):
        with pytest.raises(ValueError):
            moe_ops.fused_experts(**(right | {name: wrong}))
    for blocks in (1, 3):
        with pytest.raises(ValueError, match=f"got {blocks} blocks"):
            moe_ops.batched_experts(torch.randn(blocks, 3, 6), w13, w2, counts)
    with pytest.raises(ValueError, match="expert_num_tokens must have shape"):
        moe_ops.batched_experts(torch.randn(2, 3, 6), w13, w2, counts[:1])
    with pytest.raises(ValueError, match="offsets must be int32"):
        moe_ops.grouped_linear(x, w13, offsets.long())


def test_threads_share_the_plans():
    """Eight threads, each with sizes of its own, meeting in an empty and overflowing look-up."""
    bind.forget()
    problems = []
    for i in range(24):
        E, K, I = 2 + i % 3, 4 + 2 * i, 3 + i
        M = 1 + i % 5
        args = torch.randn(M, K), torch.randn(E, 2 * I, K), torch.randn(E, K, I)
        args += torch.rand(M, 2), torch.randint(0, E, (M, 2))
        problems.append((args, moe_ops.fused_experts(*args)))
    bind.forget()
    wrong, start = [], threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        for step in range(60):
            args, want = problems[(seed * 7 + step * 5) % len(problems)]
            if step % 20 == 0:
                bind.forget()
            try:
                if not torch.equal(moe_ops.fused_experts(*args), want):
                    wrong.append("another result")
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
