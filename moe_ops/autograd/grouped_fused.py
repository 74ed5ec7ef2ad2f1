"""Passes of `grouped_experts` on GPUs: the products and kernels of fused.py on rows where they
are. Imported at first launch only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.autograd.adapters import Adapters
from moe_ops.autograd.fused import FusedStep
from moe_ops.autograd.kept import Kept
from moe_ops.autograd.step import Adapter, Needs
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.place.place import place_sorted
from moe_ops.kernels.rows.derive import Gradients, derive, zero_tail
from moe_ops.ops.call import GroupedCall
from moe_ops.ops.products import Products

_ALIGNMENT = 16  # bytes, of the first row that a product reads
# Rows from which on `derive` runs beside a product, and the multiprocessors that it then has times
# the columns of rows.
SPARE_FROM, SPARE = 8192, 32768


class GroupedFusedStep(FusedStep):
    """One pass of a `GroupedCall` whose plan has kernels."""

    call: GroupedCall  # type: ignore[assignment]
    spare = 0  # nothing is copied or summed beside products

    def __init__(self, call: Any, adapters: Adapters, products: Products):
        super().__init__(call, adapters, products)
        self.x = multiplied(self.x)

    def place(self) -> Tensor:
        R, E = self.S, self.E
        index = self.x.new_empty(E + R, dtype=torch.int32)
        self.layout = Layout(index[E:], index[:E], R)
        self.run(place_sorted(self.layout, self.call.num_tokens_per_expert))
        return index

    def inputs(self, into: Tensor | None = None) -> Tensor:
        return self.tokens

    def gradient_rows(self, narrow: bool) -> Tensor:
        return multiplied(self.grad)

    def adapt(self, outputs: Tensor | None = None) -> None:
        self.first, self.second = [None if of is None else Adapter(of) for of in self.adapters]

    def output(self, hidden: Tensor) -> Tensor:
        y = self.multiply(hidden, self.call.w2, self.second)
        if self.b2 is not None:
            return self.combined(y, None, self.b2)
        return self.summed(y)

    def summed(self, drows: Tensor) -> Tensor:
        self.run(zero_tail(drows, self.layout))
        return drows


class KeptFusedStep(Kept, GroupedFusedStep):
    """`Kept` by kernels."""


class PairStep(KeptFusedStep):
    """One pass of a `GroupedCall` whose w13 are gate rows (E, I, K), with the up rows beside it,
    by products that read both where they are.
    """

    def __init__(self, up: Tensor, call: Any, adapters: Adapters, products: Products):
        super().__init__(call, adapters, products)
        self.up, self.N = up, 2 * self.I

    def h_and_activated(self) -> tuple[Tensor, Tensor]:
        h, self.hidden = self.rows(self.N), self.rows(self.I)
        activate = self.products.activate_into
        assert activate is not None
        given = self.inputs(), self.call.w13.data, self.layout.groups, self.activation
        activate(self.hidden, *given, gate_up=h, up=self.up)
        return h, self.hidden

    def backward(
        self,
        grad: Tensor,
        h: Tensor | None,
        hidden: Tensor | None,
        index: Tensor,
        needs: Needs,
    ) -> list[Tensor | None]:
        """The gradient of the up rows is the last one. That of h has gate and up columns apart,
        and is written beside the product that gives that of w2, which does not need it.
        """
        found: list[Tensor | None] = [None] * 11
        self.read(index)
        if h is None:
            h, hidden = self.h_and_activated()
        assert hidden is not None
        dout = multiplied(grad.to(self.x.dtype))
        dh = dhidden = None
        if needs.x or needs.w13:
            dhidden = self.multiply(dout, self.call.w2, transpose=True)
            dh = self.x.new_empty(2, self.S, self.I)  # before the product beside `derive`
        spare = 0 if dh is None else spare_beside_derive(self.S, self.K)
        if needs.w2:
            found[2] = self.outer(dout, hidden, spare)
        if dh is None:
            return found
        of_gate, of_up = dh
        args = self.activation, Gradients(of_gate, of_up, None, None, None), h, None, None, dhidden
        beside = needs.w2 and spare > 0
        self.run(derive(*args, None, self.I, self.top_k, self.layout, beside))
        if needs.w13:
            x = self.inputs()
            found[1], found[10] = self.outer(of_gate, x), self.outer(of_up, x)
        if needs.x:
            given, low = (of_gate, self.call.w13.data, self.layout.groups), (of_up, self.up)
            found[0] = self.summed(self.products.multiply(*given, transpose=True, low=low))
        return found


def spare_beside_derive(rows: int, columns: int) -> int:
    """Multiprocessors that the product for the gradient of w2 (E, columns, I) leaves to `derive`,
    whole clusters of two. Its time is in proportion to its columns, and that of `derive` is not.
    """
    return min(32, SPARE // columns // 2 * 2) if rows >= SPARE_FROM else 0


def multiplied(rows: Tensor) -> Tensor:
    """Rows as products read them: one after the other, from an aligned address."""
    if rows.is_contiguous() and rows.data_ptr() % _ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
