"""What passes of `grouped_experts` keep where gate and up rows are two matrices."""

from __future__ import annotations

from torch import Tensor

from moe_ops.autograd.step import Step


class Kept(Step):
    """A pass without adapters whose rows that w2 multiplies are kept, in the place of the narrow
    rows of an adapter: no router weight scales them.
    """

    hidden: Tensor

    def h_and_activated(self) -> tuple[Tensor, Tensor]:
        h, self.hidden = super().h_and_activated()
        return h, self.hidden

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        out, h, _, index = super().forward()
        return out, h, self.hidden, index
