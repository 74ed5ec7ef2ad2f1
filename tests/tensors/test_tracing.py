"""Compiled code that writes tensors of a quantized weight, or the weight, and reads the other."""

import copy

import pytest
import torch

import moe_ops
from tests.tensors.test_e4m3 import same, sample

E, N, K = 4, 64, 64
X = sample(6, K, dtype=torch.float32)
IDS, OFFSETS = torch.arange(6)[:, None] % E, torch.tensor([2, 3, 3, 6], dtype=torch.int32)
COUNTS = torch.full((E,), 2)
INT4, STATIC = "int4_w4a16:g32", "fp8_tensor_static"


def make(scheme, seed=0):
    scale = {"activation_scale": 1e-4} if "static" in scheme else {}
    return moe_ops.quantize(sample(E, N, K, seed=seed, dtype=torch.float32), scheme, **scale)


def layer(w):
    return moe_ops.fused_experts(X, w, w[:, :, :32], torch.ones(6, 1), IDS)


def few_uses(w):
    """What a layer makes of a weight, and its tensors."""
    return layer(w), w[1].mT.dequantize() + 0, w.qdata.float() + 0, w.scale * 1


def every_use(w):
    """And what each other function does."""
    return (
        *few_uses(w),
        moe_ops.grouped_linear(X, w, OFFSETS),
        moe_ops.batched_experts(X[:2].expand(E, 2, K), w, w[:, :, :32], COUNTS),
    )


def both(w, new):
    """By a tensor that was read before the weight was written."""
    scale = w.scale
    w.copy_(new)
    scale.mul_(2)


WRITES = {
    "scale": lambda w, new: w.scale.mul_(3),
    "qdata": lambda w, new: w.qdata.copy_(new.qdata),
    "an expert's": lambda w, new: w.scale.__setitem__(1, new.scale[1]),
    "a view's": lambda w, new: w[1].scale.mul_(3),
    "the weight": lambda w, new: w.copy_(new),
    "both": both,
}


def check(write, scheme, backend, uses=every_use, **options):
    new = make(scheme, 1)

    def step(w, new):
        return layer(w), write(w, new), uses(w)

    w = make(scheme)
    eager = copy.deepcopy(w)
    torch._dynamo.reset()
    call = torch.compile(step, backend=backend, **options)
    with torch.no_grad():
        for _ in range(2):
            (before, _, after), (was, _, now) = call(w, new), step(eager, new)
            for got, want in zip((before, *after), (was, *now), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            assert same(w, eager)
            for written in (w, eager):  # outside of the graph: it has the new values
                written.copy_(make(scheme, 2))
                written.scale[2] *= 2
    assert not torch.equal(was, now[0])


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(write, marks=[] if write in ("the weight", "both") else [pytest.mark.slow])
        for write in WRITES
    ],
)
def test_compiled_code_sees_what_it_wrote(write):
    uses = every_use if write == "the weight" else few_uses
    check(WRITES[write], INT4, "aot_eager", uses, fullgraph=True)


@pytest.mark.slow
def test_compiled_calibration():
    check(
        lambda w, new: w.activation_scale.copy_(X.abs().amax() / 448),
        STATIC,
        "aot_eager",
        few_uses,
        fullgraph=True,
    )


@pytest.mark.parametrize("write", [pytest.param("scale", marks=pytest.mark.slow), "both"])
def test_compiled_training_sees_what_it_wrote(write):
    new = make(INT4, 1)

    def step(x, w):
        with torch.no_grad():
            WRITES[write](w, new)
        return moe_ops.fused_experts(x, w, w[:, :, :32], torch.ones(6, 1), IDS).square().sum()

    torch._dynamo.reset()
    gradients = []
    for call in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        x = X.clone().requires_grad_()
        call(x, make(INT4)).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("write", ["scale", "the weight", "both"])
def test_inductor_sees_what_it_wrote(write):
    check(WRITES[write], INT4, "inductor")


@pytest.mark.slow
def test_graph_breaks_between_write_and_use():
    def write(w, new):
        scale = w.scale
        torch._dynamo.graph_break()
        scale.mul_(3)
        torch._dynamo.graph_break()

    check(write, INT4, "aot_eager")


@pytest.mark.parametrize("use", [layer, lambda w: w[1].dequantize()])
def test_tensors_that_compiled_code_assigns_are_refused(use):
    """They are assigned when the graph has run, which would compute with those of before."""

    def step(w):
        w.scale = w.scale * 2
        return use(w)

    w = make(INT4)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="must not be assigned by compiled code"):
        torch.compile(step, backend="aot_eager")(w)
    assert same(w, make(INT4))


@pytest.mark.parametrize(
    "write, given",
    [
        (lambda w, view: w.scale.mul_(2), lambda w: w[1]),
        (lambda w, view: view.copy_(w[2]), lambda w: w[1]),
        (lambda w, view: view.mul_(2), lambda w: w.scale[1]),
        (lambda w, view: w.copy_(view), lambda w: w.detach()),
    ],
)
def test_views_from_outside_are_refused_where_one_is_written(write, given):
    w = make(INT4)

    def step(w, view):
        write(w, view)
        return w.dequantize() + 0, view + 0 if type(view) is torch.Tensor else view.dequantize()

    torch._dynamo.reset()
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="that compiled code writes must be its only input with"),
    ):
        torch.compile(step, backend="aot_eager")(w, given(w))


def test_views_from_outside_are_read():
    w = make(INT4)
    torch._dynamo.reset()
    call = torch.compile(
        lambda w, one, scale, tail: (w.scale + 0, one.dequantize() + 0, scale + tail.mean()),
        backend="aot_eager",
        fullgraph=True,
    )
    got = call(w, w[1], w.scale, w.scale[1:])
    want = (w.scale, w[1].dequantize(), w.scale + w.scale[1:].mean())
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
