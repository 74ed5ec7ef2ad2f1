"""Experts with adapters on GPUs with grouped products: the passes of fused.py with the products
through ranks between them. Imported at first launch only. Values are those of the portable code in
training.py.

Products through ranks make rows narrow, and then wide again where the rows of the base product
lie. Of tokens and of the gradient of the output they read each token where it is, through the pair
of each row, rather than the rows that are copied for torch's products: those are top_k times as
many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.autograd import fused
from moe_ops.autograd.adapters import Adapters, LowRank
from moe_ops.kernels.training.low_rank import (
    blocks_of,
    count_of_blocks,
    narrow,
    order,
    outer,
    widen,
)
from moe_ops.kernels.training.rows import activate, derive
from moe_ops.ops.call import ExpertsCall


class _Step(fused._Step):
    """What forward and backward pass share."""

    blocks: Tensor  # of the rows
    order: Tensor  # (S,) the pair of each row; of rows of no pair anything

    def share_rows(self) -> None:
        """Find blocks and pairs of the rows, once they are placed."""
        blocks = count_of_blocks(self.S, self.E), 4
        self.blocks = self.x.new_empty(blocks, dtype=torch.int32)
        self.order = self.x.new_empty(self.S, dtype=torch.int32)
        self.run(blocks_of(self.blocks, self.layout))
        self.run(order(self.order, self.layout))

    def narrowed(
        self, x: Tensor, adapter: LowRank, transpose: bool = False, tokens: bool = False
    ) -> Tensor:
        """(S, r): rows x, or those of tokens x, through the first matrix of an adapter, scaled."""
        matrix = adapter.b if transpose else adapter.a
        u = self.rows(adapter.a.shape[1])
        pairs = self.order if tokens else None
        self.run(
            narrow(u, x, matrix, not transpose, adapter.scale, self.blocks, pairs, self.top_k)
        )
        return u

    def adapted(
        self,
        rows: Tensor,
        weight: Tensor,
        adapter: LowRank | None,
        u: Tensor | None,
        transpose: bool = False,
    ) -> Tensor:
        """rows times weight[e]^T, or weight[e], and what adapts it, from the narrow rows."""
        y = self.multiply(rows, weight, transpose)
        if adapter is not None:
            assert u is not None
            matrix = adapter.a if transpose else adapter.b
            self.run(widen(y, u, matrix, transpose, self.blocks))
        return y

    def outer_product(
        self, like: Tensor, rank_first: bool, x: Tensor, u: Tensor, tokens: bool = False
    ) -> Tensor:
        """The gradient of a matrix (E, r, W), u^T x, or of one (E, W, r), x^T u."""
        out = torch.empty_like(like)
        pairs = self.order if tokens else None
        self.run(outer(out, rank_first, x, u, self.layout, pairs, self.top_k))
        return out


@fused.on_device
def forward(call: ExpertsCall, adapters: Adapters) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(out, h, u, index), as lora.py defines them."""
    step = _Step(call)
    index = step.place()
    step.share_rows()
    x, first, second = call.hidden_states, adapters.w13, adapters.w2
    u = None if first is None else step.narrowed(x, first, tokens=True)
    h = step.adapted(step.gathered(x), call.w13.data, first, u)
    hidden = step.rows(step.I)
    step.run(activate(step.activation, hidden, h, step.layout))
    v = None if second is None else step.narrowed(hidden, second)
    y = step.adapted(hidden, call.w2.data, second, v)
    return step.summed(y, call.topk_weights), h, u, index


@fused.on_device
def backward(
    call: ExpertsCall,
    adapters: Adapters,
    grad: Tensor,
    h: Tensor | None,
    u: Tensor | None,
    index: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """The gradients that are needed, as lora.py defines them; `h` and `u` are None if they
    are computed again.
    """
    needs_x, needs_w13, needs_w2, needs_weights, *_ = needs
    needs_first, needs_second = any(needs[6:8]), any(needs[8:])
    first, second = adapters
    step = _Step(call)
    step.read(index)
    step.share_rows()
    found: list[Any] = [None] * 10
    x = None
    if h is None or needs_w13:
        x = step.gathered(call.hidden_states)
    if h is None:
        assert x is not None
        if first is not None:
            u = step.narrowed(call.hidden_states, first, tokens=True)
        h = step.adapted(x, call.w13.data, first, u)
    dout = step.gathered(grad)
    dv = None if second is None else step.narrowed(grad, second, transpose=True, tokens=True)
    dhidden = step.adapted(dout, call.w2.data, second, dv, transpose=True)
    dh, hidden = step.rows(step.N), step.rows(step.I) if needs_w2 or needs_second else None
    dweights = dh.new_empty(call.topk_weights.shape, dtype=torch.float32)
    weights, layout = call.topk_weights, step.layout
    step.run(derive(step.activation, dh, hidden, dweights, h, dhidden, weights, layout))
    if needs_weights:
        found[3] = dweights.to(weights.dtype)
    if needs_w2:
        assert hidden is not None
        found[2] = step.outer(dout, hidden)
    if needs_second:
        assert second is not None and dv is not None and hidden is not None
        found[8] = step.outer_product(second.a, True, hidden, dv)
        v = step.narrowed(hidden, second)
        found[9] = step.outer_product(second.b, False, grad, v, tokens=True)
    del dout, dhidden, hidden
    if needs_w13:
        assert x is not None
        found[1] = step.outer(dh, x)
    du = None
    if first is not None and (needs_x or needs_first):
        du = step.narrowed(dh, first, transpose=True)
    if needs_first:
        assert first is not None and u is not None and du is not None
        found[6] = step.outer_product(first.a, True, call.hidden_states, du, tokens=True)
        found[7] = step.outer_product(first.b, False, dh, u)
    if needs_x:
        dx = step.adapted(dh, call.w13.data, first, du, transpose=True)
        found[0] = step.summed(dx, None)
    return found
