"""Floating-point operations of the ops, as torch.utils.flop_counter counts them: two for each
multiplication of a matrix product, and none for the rest.

Which experts run is known on the device alone, so a formula counts every (token, expert) pair and
every row of a padded block, also those that contribute nothing. Arguments hold shapes where ops
have tensors; `bits` are those of a weight's stored element.
"""

from __future__ import annotations

from typing import Any

from moe_ops.meta.scales import unpacked_size


def experts(a: Any, bits: int) -> int:
    """Of `<backend>_experts`: M * top_k pairs through both products."""
    M, K = a.out  # hidden_states that arrive packed have fewer columns
    return 2 * M * a.topk_ids[1] * K * (a.w13[1] + unpacked_size(a.w2[2], bits))


def batched_experts(a: Any, bits: int) -> int:
    """Of `<backend>_batched_experts`: E * T rows through both products."""
    E, T, K = a.out
    return 2 * E * T * K * (a.w13[1] + unpacked_size(a.w2[2], bits))


def grouped_linear(a: Any, bits: int) -> int:
    """Of `<backend>_grouped_linear`."""
    K = unpacked_size(a.weight[2], bits)
    return 2 * a.x[0] * K * a.weight[1]


def grouped_mm(x: tuple, weight: tuple, *_: Any, out_shape: tuple, **__: Any) -> int:
    """Of `grouped_mm`, forward or backward: the weight may be transposed."""
    return 2 * x[0] * x[1] * out_shape[1]


def grouped_outer(a: tuple, b: tuple, *_: Any, **__: Any) -> int:
    """Of `grouped_outer`, the gradient of weights."""
    return 2 * a[0] * a[1] * b[1]


def route_tokens(
    logits: tuple,
    weights: tuple,
    ids: tuple,
    workspace: tuple,
    hidden_states: tuple,
    *_: Any,
    **__: Any,
) -> int:
    """Of `route_tokens`: the router's matrix product."""
    return 2 * logits[0] * logits[1] * hidden_states[1]
