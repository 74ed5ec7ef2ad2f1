"""Floating-point operations of the ops, as torch.utils.flop_counter counts them: two for each
multiplication of a matrix product, and none for the rest.

Which experts run is known on the device alone, so a formula counts every (token, expert) pair and
every row of a padded block, also those that contribute nothing. Arguments hold shapes where ops
have tensors; `bits` are those of stored elements.
"""

from __future__ import annotations

from typing import Any

from moe_ops.meta.fake import Bits
from moe_ops.meta.scales import unpacked_size


def experts(a: Any, bits: Bits) -> int:
    """FLOPs of `<backend>_experts`: both products for M * top_k pairs."""
    M, K = a.out  # hidden_states that arrive packed have fewer columns
    return 2 * M * a.topk_ids[1] * K * (a.w13[1] + unpacked_size(a.w2[2], bits.w2))


def adapted_experts(a: Any, bits: Bits) -> int:
    """FLOPs of `adapted_experts`: those of `experts`, and the low-rank products as if each token
    had an adapter.
    """
    matrices = [t for t in (a.a13, a.b13, a.a2, a.b2) if t is not None]
    of_pair = sum([t[2] * t[3] for t in matrices])
    return experts(a, bits) + 2 * a.out[0] * a.topk_ids[1] * of_pair


def batched_experts(a: Any, bits: Bits) -> int:
    """FLOPs of `<backend>_batched_experts`: both products for E * T rows."""
    E, T, K = a.out
    return 2 * E * T * K * (a.w13[1] + unpacked_size(a.w2[2], bits.w2))


def grouped_linear(a: Any, bits: Bits) -> int:
    """FLOPs of `<backend>_grouped_linear`."""
    K = unpacked_size(a.weight[2], bits.w13)
    return 2 * a.x[0] * K * a.weight[1]


def grouped_mm(x: tuple, weight: tuple, *_: Any, out_shape: tuple, **__: Any) -> int:
    """FLOPs of `grouped_mm`, forward or backward: the weight may be transposed."""
    return 2 * x[0] * x[1] * out_shape[1]


def grouped_outer(a: tuple, b: tuple, *_: Any, **__: Any) -> int:
    """FLOPs of `grouped_outer`, the gradient of weights."""
    return 2 * a[0] * a[1] * b[1]


def experts_forward(
    x: tuple, w13: tuple, w2: tuple, _: tuple, ids: tuple, *__: Any, **k: Any
) -> int:
    """FLOPs of `experts_forward`: both products for M * top_k pairs."""
    return 2 * x[0] * ids[1] * x[1] * (w13[1] + _columns_of_w2(x, w13, w2))


def experts_backward(
    grad: tuple,
    h: tuple,
    _: tuple,
    x: tuple,
    w13: tuple,
    w2: tuple,
    weights: tuple,
    ids: tuple,
    *rest: Any,
    **__: Any,
) -> int:
    """FLOPs of `experts_backward`: the products that the needed gradients take, and the first of
    the forward pass where it is computed again.
    """
    needs_x, needs_w13, needs_w2, needs_weights, needs_b13, _ = rest[-1]
    through_w2 = needs_x or needs_w13 or needs_weights or needs_b13
    first, second = w13[1], _columns_of_w2(x, w13, w2)
    again = h[0] == 0
    columns = first * (needs_x + needs_w13 + again) + second * (through_w2 + needs_w2)
    return 2 * x[0] * ids[1] * x[1] * columns


def lora_experts_forward(x: tuple, *rest: Any, **k: Any) -> int:
    """FLOPs of `lora_experts_forward`: those of `experts_forward`, plus the low-rank products."""
    a13, b13, a2, b2 = rest[9:13]
    of_pair = sum([t[1] * t[2] for t in (a13, b13, a2, b2) if t is not None])
    return experts_forward(x, *rest[:9], **k) + 2 * x[0] * rest[3][1] * of_pair


def lora_experts_backward(
    grad: tuple, h: tuple, u: tuple, index: tuple, *rest: Any, **k: Any
) -> int:
    """FLOPs of `lora_experts_backward`: those of `experts_backward`, plus the low-rank products.
    Where an adapter is trained, two outer products follow; rows of the rank are computed again
    for that of w2.
    """
    x, ids, needs = rest[0], rest[4], rest[-1]
    columns = 0
    of_experts = [*needs[:4], needs[4] or any(needs[6:8]), needs[5]]
    through_w2 = bool(needs[0] or needs[1] or any(of_experts[3:5]))
    for (a, b), trained, passes, again in (
        (rest[10:12], any(needs[6:8]), bool(needs[0]), 0),
        (rest[12:14], any(needs[8:10]), through_w2, 1),
    ):
        if a is not None:
            columns += b[1] * b[2] * ((passes or trained) + trained)
            columns += a[1] * a[2] * (passes + (1 + again) * trained)
    if h[0] == 0 and rest[10] is not None:
        columns += sum([t[1] * t[2] for t in rest[10:12]])
    experts = experts_backward(grad, h, index, *rest[:10], of_experts, **k)
    return experts + 2 * x[0] * ids[1] * columns


def grouped_experts_forward(
    x: tuple,
    w13: tuple,
    w2: tuple,
    counts: tuple,
    scales: Any,
    b13: Any,
    b2: Any,
    *rest: Any,
    **k: Any,
) -> int:
    """FLOPs of `grouped_experts_forward`: those of `lora_experts_forward` of one expert a row."""
    one = (x[0], 1)
    return lora_experts_forward(x, w13, w2, one, one, scales, b13, b2, None, *rest, **k)


def grouped_experts_backward(
    grad: tuple, h: tuple, u: tuple, index: tuple, *rest: Any, **k: Any
) -> int:
    """FLOPs of `grouped_experts_backward`: likewise."""
    x, w13, w2, _, scales, b13, b2, *others, needs = rest
    one, needs = (x[0], 1), [*needs[:3], False, *needs[3:]]
    inputs = (x, w13, w2, one, one, scales, b13, b2, None, *others, needs)
    return lora_experts_backward(grad, h, u, index, *inputs, **k)


def grouped_pair_forward(x: tuple, gate: tuple, up: tuple, w2: tuple, *_: Any, **k: Any) -> int:
    """FLOPs of `grouped_pair_forward`: those of `experts_forward` of one expert a row."""
    one = (x[0], 1)
    return experts_forward(x, _joined(gate), w2, one, one)


def grouped_pair_backward(grad: tuple, h: tuple, hidden: tuple, *rest: Any, **k: Any) -> int:
    """FLOPs of `grouped_pair_backward`: likewise."""
    index, x, gate, up, w2, *_, (needs_x, needs_gate, needs_up, needs_w2) = rest
    one, needs = (x[0], 1), [needs_x, needs_gate or needs_up, needs_w2, False, False, False]
    return experts_backward(grad, h, index, x, _joined(gate), w2, one, one, needs)


def _joined(gate: tuple) -> tuple:
    E, I, K = gate
    return E, 2 * I, K


def _columns_of_w2(x: tuple, w13: tuple, w2: tuple) -> int:
    """I, also of packed weights: K is known from x."""
    return w2[2] * x[1] // w13[2]


def route_tokens(
    logits: tuple,
    weights: tuple,
    ids: tuple,
    workspace: tuple,
    hidden_states: tuple,
    *_: Any,
    **__: Any,
) -> int:
    """FLOPs of `route_tokens`: the router's matrix product."""
    return 2 * logits[0] * logits[1] * hidden_states[1]
