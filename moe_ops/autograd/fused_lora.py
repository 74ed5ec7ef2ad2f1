"""Experts with adapters on GPUs with grouped products: the passes of fused.py with the products
through ranks between them. Imported at first launch only. Values are those of the portable code in
training.py.

A product through the rank reads rows once to make them narrow, and adds to the rows of the base
product where they lie. Of the gradients, da' = dO (w2 + b2 a2) and dh (w13 + b13 a13) share the
narrow rows with those of the adapters.
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

    blocks: Tensor

    def share_rows(self) -> None:
        """Find the blocks of the rows, once they are placed."""
        count = count_of_blocks(self.S, self.E)
        self.blocks = self.x.new_empty((count, 4), dtype=torch.int32)
        self.run(blocks_of(self.blocks, self.layout))

    def narrowed(
        self,
        rows: Tensor,
        adapter: LowRank,
        transpose: bool = False,
        pairs: Tensor | None = None,
    ) -> Tensor:
        """(S, r): rows through the first matrix of an adapter, scaled; with the pairs of rows,
        `rows` are tokens.
        """
        matrix = adapter.b if transpose else adapter.a
        u = self.rows(adapter.a.shape[1])
        scale = adapter.scale
        self.run(narrow(u, rows, matrix, not transpose, scale, self.blocks, pairs, self.top_k))
        return u

    def adapted(self, rows: Tensor, weight: Tensor, adapter: LowRank | None) -> Tensor:
        """rows times weight[e]^T, and what adapts it."""
        y = self.multiply(rows, weight)
        if adapter is not None:
            u = self.narrowed(rows, adapter)
            self.run(widen(y, u, adapter.b, False, self.blocks))
        return y

    def adapted_back(
        self, rows: Tensor, weight: Tensor, adapter: LowRank | None, u: Tensor | None
    ) -> Tensor:
        """rows times weight[e], and what adapts it, from the narrow rows."""
        y = self.multiply(rows, weight, transpose=True)
        if adapter is not None:
            assert u is not None
            self.run(widen(y, u, adapter.a, True, self.blocks))
        return y

    def order(self) -> Tensor:
        """(S,) int32: the pair of each row; of rows of no pair anything."""
        pairs = self.x.new_empty(self.S, dtype=torch.int32)
        self.run(order(pairs, self.layout))
        return pairs

    def outer_products(
        self,
        adapter: LowRank,
        rows: Tensor,
        du: Tensor,
        grad: Tensor,
        u: Tensor,
        pairs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """du^T rows and grad^T u, the gradients of a and b; with the pairs of rows, `rows` are
        tokens.
        """
        da, db = torch.empty_like(adapter.a), torch.empty_like(adapter.b)
        self.run(outer(da, True, rows, du, self.layout, pairs, self.top_k))
        self.run(outer(db, False, grad, u, self.layout))
        return da, db


@fused.on_device
def forward(call: ExpertsCall, adapters: Adapters) -> tuple[Tensor, Tensor, Tensor]:
    """(out, h, index), as lora.py defines them."""
    step = _Step(call)
    index = step.place()
    step.share_rows()
    h = step.adapted(step.gathered(call.hidden_states), call.w13.data, adapters.w13)
    hidden = step.rows(step.I)
    step.run(activate(step.activation, hidden, h, step.layout))
    y = step.adapted(hidden, call.w2.data, adapters.w2)
    return step.summed(y, call.topk_weights), h, index


@fused.on_device
def backward(
    call: ExpertsCall,
    adapters: Adapters,
    grad: Tensor,
    h: Tensor | None,
    index: Tensor,
    needs: list[bool],
) -> list[Tensor | None]:
    """The gradients that are needed, as lora.py defines them; `h` is None if it is computed
    again.
    """
    needs_x, needs_w13, needs_w2, needs_weights, *_ = needs
    needs_first, needs_second = any(needs[6:8]), any(needs[8:])
    first, second = adapters
    step = _Step(call)
    step.read(index)
    step.share_rows()
    found: list[Any] = [None] * 10
    x = None
    if h is None:
        x = step.gathered(call.hidden_states)
        h = step.adapted(x, call.w13.data, first)
    dout = step.gathered(grad)
    dv = None if second is None else step.narrowed(dout, second, transpose=True)
    dhidden = step.adapted_back(dout, call.w2.data, second, dv)
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
        v = step.narrowed(hidden, second)
        found[8:] = step.outer_products(second, hidden, dv, dout, v)
    del dout, dhidden, hidden
    if needs_w13:
        x = step.gathered(call.hidden_states) if x is None else x
        found[1] = step.outer(dh, x)
    du = None
    if first is not None and (needs_x or needs_first):
        du = step.narrowed(dh, first, transpose=True)
    if needs_first:
        assert first is not None and du is not None
        # tokens are read where they are: their rows, where nothing else needs them, are not made
        rows, pairs = (call.hidden_states, step.order()) if x is None else (x, None)
        u = step.narrowed(rows, first, pairs=pairs)
        found[6:8] = step.outer_products(first, rows, du, dh, u, pairs)
    if needs_x:
        dx = step.adapted_back(dh, call.w13.data, first, du)
        found[0] = step.summed(dx, None)
    return found
