"""FLOPs as torch.utils.flop_counter.FlopCounterMode counts them, against the same arithmetic by
hand.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import moe_ops
from tests.house.test_documents import run_python

M, E, TOP_K, K, I = 6, 4, 2, 128, 64
# ops without a matrix product
NO_PRODUCT = {"route"}


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def arguments(scheme="", activation="silu"):
    N = 2 * I if activation == "silu" else I
    x, w13, w2 = torch.randn(M, K), torch.randn(E, N, K), torch.randn(E, K, I)
    if scheme:
        w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
    return x, w13, w2, torch.rand(M, TOP_K), torch.randint(0, E, (M, TOP_K))


@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g32", "mxfp6_e3m2"])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_experts(scheme, activation):
    x, w13, w2, weights, ids = arguments(scheme, activation)
    N = w13.shape[1]
    args = x, w13, w2, weights, ids
    assert flops(lambda: moe_ops.fused_experts(*args, activation=activation)) == (
        2 * M * TOP_K * (N * K + I * K)
    )
    blocks, counts = torch.randn(E, 5, K), torch.full((E,), 3, dtype=torch.int32)
    assert flops(
        lambda: moe_ops.batched_experts(blocks, w13, w2, counts, activation=activation)
    ) == 2 * E * 5 * (N * K + I * K)
    ends = torch.tensor([1, 2, 3, 6], dtype=torch.int32)
    assert flops(lambda: moe_ops.grouped_linear(x, w13, ends)) == 2 * M * N * K


@pytest.mark.parametrize("scheme", ["fp8_channel", "nvfp4", "mxfp4", "mxfp6_e3m2"])
def test_activations_that_arrive_quantized(scheme):
    """Elements count, of which two share a byte where they have 4 bits, and four share three."""
    x, w13, w2, weights, ids = arguments(scheme)
    q, scale, global_scale, _ = moe_ops.quantize_activation(x, scheme)
    scales = {"hidden_states_scale": scale, "hidden_states_global_scale": global_scale}
    assert flops(lambda: moe_ops.fused_experts(q, w13, w2, weights, ids, **scales)) == (
        2 * M * TOP_K * 3 * I * K
    )
    counts = torch.full((1,), M, dtype=torch.int32)
    batched = {name: s[None] if s is not None and s.ndim else s for name, s in scales.items()}
    assert flops(lambda: moe_ops.batched_experts(q[None], w13[:1], w2[:1], counts, **batched)) == (
        2 * M * 3 * I * K
    )
    ends = torch.tensor([1, 2, 3, 6], dtype=torch.int32)
    of_x = {"x_scale": scale, "x_global_scale": global_scale}
    assert flops(lambda: moe_ops.grouped_linear(q, w13, ends, **of_x)) == 2 * M * 2 * I * K


@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g32"])
def test_forward_and_backward(scheme):
    """Backward computes one product more for each of a layer's inputs and of its weights."""
    x, w13, w2, weights, ids = arguments(scheme)
    forward = 2 * M * TOP_K * 3 * I * K
    x.requires_grad_()
    assert flops(lambda: moe_ops.fused_experts(x, w13, w2, weights, ids)) == forward
    out = moe_ops.fused_experts(x, w13, w2, weights, ids)
    assert flops(lambda: out.sum().backward()) == forward  # to the input
    if not scheme:
        w13.requires_grad_(), w2.requires_grad_()
        out = moe_ops.fused_experts(x, w13, w2, weights, ids)
        assert flops(lambda: out.sum().backward()) == 2 * forward


def test_every_op_with_a_product_has_a_formula():
    ours = {name.split("::")[1].split(".")[0] for name in _ops()}
    counted = {str(op).split(".")[1] for op in flop_registry if str(op).startswith("moe_ops.")}
    assert ours - counted == NO_PRODUCT
    shapes = (M, E), (M, TOP_K), (M, TOP_K), (9,), (M, K), (E, K), None, None
    formula = flop_registry[torch.ops.moe_ops.route_tokens]
    meta = [s if s is None else torch.empty(s, device="meta") for s in shapes]
    assert formula(*meta, "softmax", True, 1, 1, 1.0, out_val=None) == 2 * M * E * K


def _ops():
    """Ops of the package alone: other tests register backends of their own."""
    from moe_ops import backends
    from moe_ops.planning.auto import AUTO

    for backend in (*backends.BACKENDS, AUTO):
        yield from [known.op.name() for known in backend.operators.values()]
    yield from ("moe_ops::route", "moe_ops::route_tokens")
    yield from ("moe_ops::grouped_mm", "moe_ops::grouped_outer")


@pytest.mark.slow  # a fresh process imports torch
def test_whoever_imports_the_counter_later_has_the_formulas():
    code = """
import importlib.util, sys, moe_ops
importlib.util.find_spec("torch.utils.flop_counter")  # whoever asks whether it is there
before = "torch.utils.flop_counter" in sys.modules
from torch.utils.flop_counter import flop_registry
import torch
print(before, torch.ops.moe_ops.torch_experts in flop_registry)
"""
    assert run_python(code).splitlines()[-1] == "False True"
