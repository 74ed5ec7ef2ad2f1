"""grouped_experts: experts on rows that are sorted already, beside the fp64 oracle."""

import math

import pytest
import torch

import moe_ops
from moe_ops.activations import Activation
from moe_ops.autograd import gate_up, grouped, grouped_fused
from moe_ops.environment import INTERPRETED
from moe_ops.planning import training as planning
from tests.autograd.conftest import on_gpu
from tests.autograd.test_gradients import TOLERANCE
from tests.support import oracle
from tests.support.cases import BF16, FP32, FP64, poisoned_memory, tolerance
from tests.support.stand_ins import stand_ins

COUNTS = (3, 0, 9, 1, 4, 0)
LEAVES = ("x", "w13", "w2", "w13_bias", "w2_bias")


class Rows:
    """Rows of six experts, two of them without any, and a tail of NaN; `given` are arguments of
    grouped_experts by name, `cotangent` the gradient of the output, NaN in the tail, too."""

    def __init__(
        self, device="cpu", dtype=FP32, counts=COUNTS, tail=5, bias=False, activation="silu",
        K=48, I=24, integers=torch.int64, seed=0,
    ):  # fmt: skip
        g = torch.Generator().manual_seed(seed)

        def normal(*shape, scale=1.0):
            return (torch.randn(shape, generator=g) * scale).to(dtype).to(device)

        E, R = len(counts), sum(counts) + tail
        N = 2 * I if Activation(activation).gated else I
        self.counts = torch.tensor(counts, dtype=integers, device=device)
        self.activation, self.inside, self.dtype = activation, R - tail, dtype
        self.given = {
            "x": normal(R, K),
            "w13": normal(E, N, K, scale=K**-0.5),
            "w2": normal(E, K, I, scale=I**-0.5),
        }
        if bias:
            self.given |= {"w13_bias": normal(E, N), "w2_bias": normal(E, K)}
        self.cotangent = normal(R, K)
        for t in (self.given["x"], self.cotangent):
            t[self.inside :] = math.nan

    def leaves(self, dtype=None) -> dict:
        return {
            name: t.detach().clone().to(dtype or t.dtype).requires_grad_()
            for name, t in self.given.items()
        }

    def call(self, given: dict, function=moe_ops.grouped_experts, **options):
        named = {name: t for name, t in given.items() if name.endswith("bias")}
        x, w13, w2 = [given[name] for name in LEAVES[:3]]
        return function(x, w13, w2, self.counts, activation=self.activation, **named, **options)

    def gradients(self, function=moe_ops.grouped_experts, **options) -> tuple:
        """(the output, the gradients by name), out of memory that held garbage."""
        given = self.leaves()
        with poisoned_memory():
            out = self.call(given, function, **options)
            found = torch.autograd.grad(out, list(given.values()), self.cotangent)
        return out, dict(zip(given, found, strict=True))

    def expected(self) -> tuple:
        given = self.leaves(FP64)
        out = self.call(given, oracle.grouped)
        cotangent = self.cotangent.double().nan_to_num(0)
        found = torch.autograd.grad(out, list(given.values()), cotangent)
        return out, dict(zip(given, found, strict=True))

    def check(self, function=moe_ops.grouped_experts, **options) -> dict:
        (out, found), (want, expected) = self.gradients(function, **options), self.expected()
        self.compare(out, want, found, expected)
        return found

    def compare(self, out, want, found: dict, expected: dict) -> None:
        within = TOLERANCE[self.dtype]
        assert out.dtype == self.dtype
        assert oracle.relative_error(out, want) <= within
        for t in (out, found.get("x", out)):
            assert (t[self.inside :] == 0).all()
        for name, grad in found.items():
            assert grad.dtype == self.given[name].dtype
            assert oracle.relative_error(grad, expected[name]) <= within, name
        empty = self.counts.cpu() == 0
        for name in set(found) - {"x"}:
            assert (found[name][empty] == 0).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "activation": "swigluoai", "integers": torch.int32},
        {"tail": 0, "activation": "relu2_no_mul"},
        {"counts": (0, 40, 0), "bias": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_values_and_gradients(where, options):
    Rows(*where, **options).check()


def test_recomputing_gives_the_same_bits(where):
    (_, kept), (_, again) = [
        Rows(*where, bias=True).gradients(recompute=recompute) for recompute in (False, True)
    ]
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_no_rows():
    rows = Rows(counts=(0, 0, 0), tail=0, bias=True)
    out, found = rows.gradients()
    assert out.shape == (0, 48) and all((grad == 0).all() for grad in found.values())
    with torch.no_grad():
        assert rows.call(rows.given).shape == (0, 48)
    out, found = Rows(counts=(0, 0, 0), tail=4).gradients()
    assert (out == 0).all() and all((grad == 0).all() for grad in found.values())


@pytest.mark.parametrize(
    ("counts", "meant"),
    [((3, 40, 2), (3, 9, 0)), ((13, 1, 1), (12, 0, 0)), ((2, -5, 4), (2, 0, 4)),
     ((2**40, 2**62, 2**62), (12, 0, 0))],
)  # fmt: skip
def test_counts_that_do_not_add_up(where, counts, meant):
    """They are data: what is past the last row is left out, and a negative count is none."""
    rows = Rows(*where, counts=meant, tail=12 - sum(meant), bias=True)
    want, expected = rows.expected()
    rows.counts = torch.tensor(counts, device=where[0])
    out, found = rows.gradients()
    rows.counts = torch.tensor(meant)
    rows.compare(out, want, found, expected)
    rows.counts = torch.tensor(counts, device=where[0])
    with torch.no_grad():
        out = rows.call(rows.given)
    assert oracle.relative_error(out, want) <= TOLERANCE[where[1]]


def in_turn(t):
    """(E, N, ..) with gate rows first as (E, I, 2, ..)."""
    return torch.stack(t.chunk(2, 1), 2)


@pytest.mark.parametrize("cast", [False, True], ids=["", "cast"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("form", ["pair", "in turn"])
def test_other_orders_of_w13(where, form, activation, cast):
    """Their gradients have the order that was given."""

    def function(x, w13, w2, counts, *, w13_bias, **options):
        if form == "pair":
            w13, w13_bias = w13.chunk(2, 1), w13_bias.chunk(2, 1)
        else:
            w13, w13_bias = in_turn(w13), in_turn(w13_bias)
        options["dtype"] = where[1] if cast else None
        return moe_ops.grouped_experts(x, w13, w2, counts, w13_bias=w13_bias, **options)

    rows = Rows(*where, bias=True, activation=activation)
    if cast:
        rows.given["w13"] = rows.given["w13"].double()
    rows.check(function)


def of_pair(x, w13, w2, counts, **options):
    """grouped_experts of gate and up rows as parameters of their own."""
    gate, up = [half.contiguous() for half in w13.chunk(2, 1)]
    return moe_ops.grouped_experts(x, (gate, up), w2, counts, **options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_pair_without_a_cast(where, activation, recompute):
    """Which kernels read where it is, if there are any."""
    Rows(*where, activation=activation).check(of_pair, recompute=recompute)


@pytest.mark.parametrize("scheme", ["", "int8_w8a16:channel"])
@pytest.mark.parametrize("biased", [False, True])
def test_pair_beside_what_no_kernel_reads_with_it(where, biased, scheme):
    """A bias of w2 alone, and a quantized w2: neither is left out."""
    rows = Rows(*where, K=64, I=32, bias=biased)
    rows.given.pop("w13_bias", None)
    if scheme:
        rows.given["w2"] = moe_ops.quantize(rows.given["w2"], scheme)
    names = [name for name in rows.given if not (scheme and name == "w2")]

    def gradients(given, function):
        leaves = {name: given[name].requires_grad_() for name in names}
        out = rows.call(rows.given | leaves, function)
        cotangent = rows.cotangent.to(out.dtype).nan_to_num(0)
        found = torch.autograd.grad(out, [*leaves.values()], cotangent)
        return out, dict(zip(names, found, strict=True))

    copies = {name: rows.given[name].detach().clone() for name in names}
    want, expected = gradients({n: t.double() for n, t in copies.items()}, oracle.grouped)
    out, found = gradients(copies, of_pair)
    rows.compare(out, want, found, expected)


@pytest.mark.skipif(not INTERPRETED, reason="kernels of csrc/cutlass need a GPU")
@pytest.mark.parametrize("frozen", ["", "w13", "x", "x w2", "w2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_pair_that_is_not_copied(recompute, frozen, monkeypatch):
    """By products that take both matrices; each gradient alone, too. The gradient of h is made
    beside the product that gives that of w2.
    """
    ran, beside = [], []
    derive = grouped_fused.derive
    monkeypatch.setattr(grouped_fused, "SPARE_FROM", 0)

    def noted(*args):  # the interpreter knows no kernel beside another
        beside.append(args[-1])
        return derive(*args[:-1])

    monkeypatch.setattr(grouped_fused, "derive", noted)
    monkeypatch.setattr(planning, "INTERPRETED", True)
    monkeypatch.setattr(planning, "_products", lambda *_: stand_ins(ran))
    monkeypatch.setattr(gate_up, "_gate_up", lambda *_: pytest.fail("copied"))
    rows = Rows()
    names = [name for name in rows.given if name not in frozen.split()]
    want, expected = rows.expected()
    given = {n: t.detach().clone().requires_grad_(n in names) for n, t in rows.given.items()}
    with poisoned_memory():
        out = rows.call(given, of_pair, recompute=recompute)
        found = torch.autograd.grad(out, [given[name] for name in names], rows.cotangent)
    rows.compare(out, want, dict(zip(names, found, strict=True)), expected)
    assert ran.count("pair") == 1 + recompute and ran.count("low") == ("x" in names)
    assert beside == ["w2" in names] and ran.count("spare 32") == ("w2" in names)


@pytest.mark.parametrize("fused_first", [True, False])
@pytest.mark.skipif(not INTERPRETED, reason="kernels of csrc/cutlass need a GPU")
def test_a_pair_is_read_by_one_another(fused_first, monkeypatch):
    """What a pass keeps that copied it the other one finds."""
    monkeypatch.setattr(planning, "INTERPRETED", True)
    rows, ran = Rows(), []
    want, expected = rows.expected()
    given = rows.leaves()
    for fused in (fused_first, not fused_first):
        one = stand_ins(ran) if fused else planning.PORTABLE
        monkeypatch.setattr(planning, "_products", lambda *_, one=one: one)
        if fused == fused_first:
            out = rows.call(given, of_pair)
    found = torch.autograd.grad(out, list(given.values()), rows.cotangent)
    rows.compare(out, want, dict(zip(given, found, strict=True)), expected)
    assert ran == (["pair"] if fused_first else ["low"])


@on_gpu
def test_bits_of_a_pair_with_kernels_beside_products(where, monkeypatch):
    """In memory that is used again and again, with rows and counts that change."""
    for seed in range(6):
        counts = (700 + 90 * seed, 0, 1300 - 50 * seed, 64, 513)
        rows = Rows(*where, counts=counts, K=1024, I=384, seed=seed)
        found = []
        for first in (1 << 30, 0, 0):
            monkeypatch.setattr(grouped_fused, "SPARE_FROM", first)
            found.append(rows.gradients(of_pair)[1])
        for name, want in found[0].items():
            assert torch.isfinite(want).all(), name
            assert all(torch.equal(one[name], want) for one in found[1:]), name


def test_master_weights_are_cast_once():
    """The values of a call in bf16; gradients in the dtypes of the weights."""
    rows = Rows(dtype=FP32, bias=True)
    out, found = rows.gradients(dtype=BF16)
    low = {name: t.detach().to(BF16).requires_grad_() for name, t in rows.given.items()}
    again = rows.call(low)
    expected = torch.autograd.grad(again, list(low.values()), rows.cotangent.to(BF16))
    assert out.dtype == FP32 and torch.equal(out, again.float())
    for (name, grad), want in zip(found.items(), expected, strict=True):
        assert grad.dtype == FP32 and torch.equal(grad, want.float()), name
    with torch.autocast("cpu", BF16):
        auto = rows.call(rows.given)
    with torch.no_grad():
        assert auto.dtype == BF16 and torch.equal(auto, rows.call(low))


@pytest.mark.parametrize("scheme", ["fp8_block", "int4_w4a16:g32"])
def test_frozen_quantized_experts(where, scheme):
    """Gradients of rows and biases; the inference of the same rows."""
    rows = Rows(*where, counts=(3, 0, 2), tail=2, K=128, I=32, bias=True)
    for name in ("w13", "w2"):
        rows.given[name] = moe_ops.quantize(rows.given[name], scheme)
    given = {n: rows.given[n].detach().clone() for n in ("x", "w13_bias", "w2_bias")}
    with torch.no_grad():
        inference = rows.call(rows.given)
    for t in given.values():
        t.requires_grad_()
    out = rows.call(rows.given | given)
    found = torch.autograd.grad(out, list(given.values()), rows.cotangent)
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    want = rows.call(rows.given | wide, oracle.grouped)
    cotangent = rows.cotangent.double().nan_to_num(0)
    expected = torch.autograd.grad(want, list(wide.values()), cotangent)
    within = TOLERANCE[where[1]] + tolerance(where[1], scheme, where[0])
    assert oracle.relative_error(out, want) <= within
    assert oracle.relative_error(inference, want) <= within
    for grad, right in zip(found, expected, strict=True):
        assert oracle.relative_error(grad, right) <= within


@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g32"])
def test_adapters(where, scheme):
    """As of weights that they are merged into."""
    rows, (R, S) = Rows(*where, K=160, I=64), (4, 8)
    if scheme:
        for name in ("w13", "w2"):
            rows.given[name] = moe_ops.quantize(rows.given[name], scheme)
    g = torch.Generator().manual_seed(5)
    shapes = ((6, R, 160), (6, 128, R), (6, S, 64), (6, 160, S))
    made = [
        (torch.randn(shape, generator=g) * max(shape[1:]) ** -0.5).to(where[1]).to(where[0])
        for shape in shapes
    ]
    made = [t.requires_grad_() for t in made]
    x = rows.given["x"].clone().requires_grad_()
    out = rows.call(rows.given | {"x": x}, adapters=moe_ops.LoRA(*made, scale=0.7))
    found = torch.autograd.grad(out, [x, *made], rows.cotangent)
    wide = [t.detach().double().requires_grad_() for t in (x, *made)]
    merged = dict(zip(("w13", "w2"), (wide[1:3], wide[3:5]), strict=True))
    merged = {n: oracle.weight(rows.given[n]) + 0.7 * (b @ a) for n, (a, b) in merged.items()}
    want = rows.call(merged | {"x": wide[0]}, oracle.grouped)
    expected = torch.autograd.grad(want, wide, rows.cotangent.double().nan_to_num(0))
    within = 2 * TOLERANCE[where[1]]
    assert oracle.relative_error(out, want) <= within
    assert (out[rows.inside :] == 0).all() and (found[0][rows.inside :] == 0).all()
    for grad, right in zip(found, expected, strict=True):
        assert oracle.relative_error(grad, right) <= within


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_inference(backend, scheme):
    rows = Rows(K=128, I=64, bias=True)
    if scheme:
        for name in ("w13", "w2"):
            rows.given[name] = moe_ops.quantize(rows.given[name], scheme)
    with poisoned_memory():
        out = rows.call(rows.given, backend=backend)
    want = rows.call(rows.given, oracle.grouped)
    assert oracle.relative_error(out, want) <= tolerance(FP32, scheme)
    assert (out[rows.inside :] == 0).all()


@pytest.mark.parametrize("pair", [False, True])
def test_second_derivatives(pair):
    rows = Rows(dtype=FP64, K=3, I=2, counts=(1, 0, 1), tail=1)
    of = of_pair if pair else moe_ops.grouped_experts
    for t in (rows.given["x"], rows.cotangent):
        t.nan_to_num_()
    given = rows.leaves()

    def function(*values):
        return rows.call(dict(zip(given, values, strict=True)), of)

    assert torch.autograd.gradgradcheck(function, tuple(given.values()))


@pytest.mark.slow
@pytest.mark.parametrize("of", [moe_ops.grouped_experts, of_pair])
def test_one_graph_for_any_number_of_rows(of):
    """Compiled forward and backward, for counts on the device alone."""
    torch._dynamo.reset()
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for counts in (COUNTS, (1, 2, 3, 4, 0, 9)):
            Rows(counts=counts, bias=of is not of_pair).check(compiled)


@pytest.mark.slow
def test_one_graph_of_inference():
    """Of rows whose number is unknown, and of rows of w13 that take turns and are cast."""
    torch._dynamo.reset()
    compiled = torch.compile(moe_ops.grouped_experts, fullgraph=True, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tail in (3, 7):
            rows = Rows(tail=tail)
            rows.given["w13"] = in_turn(rows.given["w13"])
            torch._dynamo.decorators.mark_unbacked(rows.given["x"], 0)
            out = rows.call(rows.given, compiled, dtype=BF16)
            assert torch.equal(out, rows.call(rows.given, dtype=BF16))


@on_gpu
def test_a_captured_step_follows_the_counts(where):
    rows = [
        Rows(*where, counts=counts, tail=20 - sum(counts), seed=seed)
        for seed, counts in enumerate(((3, 0, 9, 1), (0, 7, 7, 6)))
    ]
    held, given = rows[0], rows[0].leaves()

    def step():
        out = held.call(given)
        return (out, *torch.autograd.grad(out, list(given.values()), held.cotangent))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for one in rows:
        with torch.no_grad():
            for name, t in given.items():
                t.copy_(one.given[name])
            held.counts.copy_(one.counts)
            held.cotangent.copy_(one.cotangent)
        graph.replay()
        out, expected = one.gradients()
        assert torch.equal(found[0], out)
        for got, want in zip(found[1:], expected.values(), strict=True):
            assert torch.equal(got, want)


def test_end_rows():
    counts = torch.tensor([3, -1, 2**40, 5])
    assert grouped.end_rows(counts, 10).tolist() == [3, 3, 10, 10]


def test_errors():
    rows = Rows(counts=(2, 3), bias=True)
    x, w13, w2 = [rows.given[name] for name in LEAVES[:3]]
    counts = rows.counts

    def refused(match, *args, **options):
        with pytest.raises(ValueError, match=match):
            moe_ops.grouped_experts(*args, **options)

    refused(r"num_tokens_per_expert must have shape \(2,\)", x, w13, w2, counts[:1])
    refused("num_tokens_per_expert must be int32 or int64", x, w13, w2, counts.float())
    refused("num_tokens_per_expert must be a torch.Tensor", x, w13, w2, [2, 3])
    refused(r"hidden_states must have shape \(R, K\)", x[None], w13, w2, counts)
    refused("w13 must have dtype torch.bfloat16", x.to(BF16), w13, w2, counts)
    refused(r"w2 must have shape \(E, K, I\)", x, w13, w2.mT, counts)
    refused("w13 must be a pair", x, (w13,), w2, counts)
    refused("equal shapes", x, (w13[:, :24], w13[:, :23]), w2, counts)
    refused(r"\(E, I, 2, K\)", x, w13.unflatten(1, (2, 24)), w2, counts)
    refused("gate rows before up rows", x, in_turn(w13), w2, counts, activation="swigluoai")
    refused("w13_bias must be a pair", x, w13.chunk(2, 1), w2, counts, w13_bias=w2)
    gate, up = w13.chunk(2, 1)
    refused(r"w13\[1\] must be on", x, (gate, up.to("meta")), w2, counts)
    bad = (torch.zeros(2, 23), torch.zeros(2, 25))
    refused(r"w13_bias\[0\] must have shape", x, (gate, up), w2, counts, w13_bias=bad)
    refused("w13_bias must be a torch.Tensor", x, w13, w2, counts, w13_bias=bad)
    refused("w2_bias must be a torch.Tensor", x, w13, w2, counts, w2_bias=[0.0])
    for codes in (torch.float8_e4m3fn, torch.int8, torch.uint8):  # whose scales are missing
        pair = gate.to(codes), up.to(codes)
        refused(r"w13\[0\] must be of a float dtype", x, pair, w2, counts, dtype=BF16)
        refused("w13 must be of a float dtype", x, in_turn(w13).to(codes), w2, counts, dtype=BF16)
    refused("dtype must be a float dtype", x, w13, w2, counts, dtype=torch.int8)
    of_experts = Activation("silu", limit=torch.ones(2))
    refused("alpha, beta and limit as numbers", x, w13, w2, counts, activation=of_experts)
    w13.requires_grad_()
    refused("backend must be 'auto' or 'torch'", x, w13, w2, counts, backend="triton")
    refused("batch_invariant must be False", x, w13, w2, counts, batch_invariant=True)
