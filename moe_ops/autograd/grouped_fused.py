"""Passes of `grouped_experts` on GPUs: the products and kernels of fused.py on rows where they
are. Imported at first launch only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.autograd.adapters import Adapters
from moe_ops.autograd.fused import FusedStep
from moe_ops.autograd.step import Adapter, Needs
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.place.place import place_sorted
from moe_ops.kernels.rows.derive import zero_tail
from moe_ops.ops.call import GroupedCall
from moe_ops.ops.products import Products

_ALIGNMENT = 16  # bytes, of the first row that a product reads


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


class PairStep(GroupedFusedStep):
    """One pass of a `GroupedCall` whose w13 are gate rows (E, I, K), with the up rows beside it,
    by products that read both where they are. The gradient of h is (2, S, I): that of its gate
    columns, then that of its up columns.
    """

    def __init__(self, up: Tensor, call: Any, adapters: Adapters, products: Products):
        super().__init__(call, adapters, products)
        self.up, self.N = up, 2 * self.I

    def h_and_activated(self) -> tuple[Tensor, Tensor]:
        h, hidden, activate = self.rows(self.N), self.rows(self.I), self.products.activate_into
        assert activate is not None
        given = hidden, self.inputs(), self.call.w13.data, self.layout.groups, self.activation
        activate(*given, gate_up=h, up=self.up)
        return h, hidden

    def h_of(self, rows: Tensor) -> Tensor:
        return self.h_and_activated()[0]

    def gradient_of_h(self) -> tuple[Tensor, Tensor, Tensor | None]:
        dh = self.x.new_empty(2, self.S, self.I)
        return dh, dh[0], dh[1]

    def through_w13(self, found: list[Tensor | None], needs: Needs, dh: Tensor) -> None:
        """The gradient of up rows comes behind the others."""
        of_gate, of_up = dh
        if needs.w13:
            x = self.inputs()
            found[1] = self.outer(of_gate, x)
            found.append(self.outer(of_up, x))
        if needs.x:
            given, low = (of_gate, self.call.w13.data, self.layout.groups), (of_up, self.up)
            found[0] = self.summed(self.products.multiply(*given, transpose=True, low=low))


def multiplied(rows: Tensor) -> Tensor:
    """Rows as products read them: one after the other, from an aligned address."""
    if rows.is_contiguous() and rows.data_ptr() % _ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
