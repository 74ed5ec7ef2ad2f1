"""The two operators behind gradients: what they keep, what compilers see of them, and the formulas
that torch does not derive."""

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops import activations
from moe_ops.activations import NAMES, Activation
from tests.autograd.test_gradients import (
    call,
    check,
    compare,
    expected_gradients,
    gradients,
    leaves,
    plain_torch_on_cpus,  # noqa: F401
)
from tests.support.cases import BF16, FP32, FP64, LIMITED, Case

OPS = torch.ops.moe_ops
pytestmark = pytest.mark.usefixtures("plain_torch_on_cpus")


def recomputing(*args, **options):
    return moe_ops.fused_experts(*args, **options, recompute=True)


# --- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation",
    [*[Activation(name) for name in NAMES], *LIMITED],
    ids=str,
)
def test_derivatives_of_activations(activation):
    """Those that torch derives from the formula, at limits too."""
    x = torch.randn(64, 12, dtype=FP64)
    x[0], x[1] = activation.limit, -activation.limit
    x.requires_grad_()
    out = activations.formula(x, activation)
    grad = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, x, grad)
    found = activations.derivative(x.detach(), grad, activation)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "fp8_tensor", "bias": True},
        {"scheme": "int4_w4a16:g32", "K": 64, "I": 32},
    ],
    ids=lambda options: "-".join(options),
)
def test_recomputing_gives_the_same_bits(dtype, options):
    case = Case(dtype=dtype, **options)
    kept, again = gradients(case), gradients(case, recomputing)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


# --- what is kept --------------------------------------------------------------------------------


def kept_beside_inputs(function, case: Case) -> list[tuple]:
    """(shape, dtype) of tensors kept for the backward pass that are no input."""
    given = leaves(case)
    known = {t.data_ptr() for t in (*given.values(), *case.args) if isinstance(t, torch.Tensor)}
    kept = []

    def pack(t):
        if t.data_ptr() not in known and t.numel():
            kept.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(function, case, given)
    return kept


def test_what_is_kept():
    """h and the order of the pairs; with recompute the order alone."""
    case = Case(dtype=BF16, M=7, E=4, top_k=2, I=40)
    order = ((4 + 14,), torch.int32)
    assert kept_beside_inputs(recomputing, case) == [order]
    assert kept_beside_inputs(moe_ops.fused_experts, case) == [((14, 80), BF16), order]


def test_a_layer_that_recomputes_keeps_no_product():
    for recompute in (False, True):
        layer = moe_ops.MoELayer(32, 24, 4, 2, recompute=recompute)
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=shapes: to.append(tuple(t.shape)) or t, lambda t: t
        ):
            out = layer(torch.randn(5, 32))
        assert ((10, 48) in shapes) != recompute
        out.sum().backward()
        assert layer.experts.w13.grad.norm() > 0


@pytest.mark.parametrize(
    "changed",
    [*("hidden_states", "w13", "w2", "topk_weights", "w13_bias", "w2_bias"), "topk_ids"],
)
def test_a_changed_input_is_noticed(changed):
    """By torch, whichever path runs: both get what the operators have kept."""
    case = Case(bias=True)
    given = leaves(case) | {"topk_ids": case.args[4]}
    given[changed] = given[changed].clone()
    out = call(moe_ops.fused_experts, case, given)
    with torch.no_grad():
        given[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self):
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keep", [False, True])
def test_checkpointing(keep):
    """Selective checkpointing keeps what the operator returned, and does not run it again."""
    case = Case(bias=True)
    forward = OPS.experts_forward.default

    def policy(_, op, *args, **kwargs):
        wanted = keep and op == forward
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    def function(*args, **options):
        return checkpoint(
            moe_ops.fused_experts,
            *args,
            **options,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )

    with Count() as counted:
        found = gradients(case, function)
    compare(case, found, expected_gradients(case))
    assert counted.calls["moe_ops.experts_forward.default"] == (1 if keep else 2)
    assert counted.calls["moe_ops.experts_backward.default"] == 1


@pytest.mark.parametrize("function", [moe_ops.fused_experts, recomputing])
def test_a_partitioner_keeps_the_same(function):
    """Of a compiled step too: beside inputs h and the index, or the index alone."""
    kept = []

    def forward_compiler(graph, inputs):
        outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]
        kept.extend(n.meta["val"] for n in outputs if n is not None and n.op != "placeholder")
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=lambda g, _: g.forward)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    case = Case(M=7, E=4, top_k=2, I=40)
    check(case, compiled)
    shapes = sorted(tuple(map(int, t.shape)) for t in kept if t.numel())
    h = [] if function is recomputing else [(14, 80)]
    assert shapes == sorted([(7, 48), *h, (18,)])  # and the result


# --- as operators --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"bias": True}, {"scheme": "int4_w4a16:g32", "K": 64, "I": 32}]
)
def test_opcheck(options):
    case = Case(**options)
    recorded = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "moe_ops":
                recorded.append((func, args))
            return func(*args, **(kwargs or {}))

    with Record():
        gradients(case)
    assert [func._schema.name for func, _ in recorded] == [
        "moe_ops::experts_forward",
        "moe_ops::experts_backward",
    ]
    for func, args in recorded:
        clean = [
            a.detach().nan_to_num()
            if torch.is_tensor(a) and a.is_floating_point() and a.itemsize > 1
            else a
            for a in args
        ]
        torch.library.opcheck(func, tuple(clean))


def test_flops():
    """Three times the products of the forward pass, of which frozen weights take one less."""
    case = Case(M=7, top_k=2, K=48, I=40)
    one = 2 * 14 * 48 * (80 + 40)
    for only, times in ((None, 3), (["hidden_states"], 2)):
        with FlopCounterMode(display=False) as counted:
            gradients(case, only=only)
        assert counted.get_total_flops() == times * one
    with FlopCounterMode(display=False) as counted:
        gradients(case, recomputing)
    assert counted.get_total_flops() == 3 * one + 2 * 14 * 48 * 80


def test_one_operator_each_in_an_exported_graph():
    case = Case(M=6)
    given = leaves(case)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w13 = torch.nn.Parameter(given["w13"].detach())
            self.w2 = torch.nn.Parameter(given["w2"].detach())

        def forward(self, x, weights, ids):
            return moe_ops.fused_experts(x, self.w13, self.w2, weights, ids)

    args = (case.args[0].nan_to_num(), *case.args[3:])
    program = torch.export.export(Layer(), args)
    found = [str(n.target) for n in program.graph.nodes if "moe_ops" in str(n.target)]
    assert found == ["moe_ops.experts_forward.default"]


@pytest.mark.slow
def test_a_step_of_training_is_one_graph_for_every_number_of_tokens():
    torch._dynamo.reset()
    compiled = torch.compile(
        moe_ops.fused_experts, fullgraph=True, backend="aot_eager", dynamic=True
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for M in (64, 100, 1024, 3):
            check(Case(M=M, K=16, I=8), compiled)
