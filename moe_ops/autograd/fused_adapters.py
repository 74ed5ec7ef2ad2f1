"""What adapts the products of fused.py. Imported at first launch only."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moe_ops.autograd.adapters import Adapters, LowRank
from moe_ops.kernels.launch import Launch
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.place.routing import Routing
from moe_ops.kernels.training import low_rank


class Step(Protocol):
    """What an adapter needs of a pass."""

    x: Tensor
    of_input: Tensor | None
    layout: Layout
    top_k: int

    @property
    def tokens(self) -> Tensor: ...
    @property
    def order(self) -> Tensor: ...
    def run(self, *launches: Launch) -> None: ...
    def rows(self, columns: int) -> Tensor: ...
    def blocks(self, block_m: int) -> Routing: ...


class Adapter:
    """What adapts one product, in one pass: scale * rows a[e]^T b[e]^T. With `transpose` rows are
    the gradient of what the product returns, and go through b first.

    Where rows are those of tokens (`tokens`, or `outputs` for transposed ones), each token is read
    where it is, through the pair of each row: copied rows are top_k times as many.
    """

    def __init__(
        self,
        step: Step,
        of: LowRank,
        tokens: Tensor | None = None,
        outputs: Tensor | None = None,
        u: Tensor | None = None,  # rows made narrow, where they are known
    ):
        self.step, self.of = step, of
        self.tokens = tokens, outputs
        self.found: list[Tensor | None] = [u, None]

    def source(self, rows: Tensor | None, transpose: bool) -> tuple[Tensor, Tensor | None]:
        """The wide rows, and if those of tokens stand for them, the pair of each."""
        tokens = self.tokens[transpose]
        if tokens is not None:
            return tokens, self.step.order
        assert rows is not None
        return rows, None

    def new(self, transpose: bool) -> Tensor:
        """(S, r), which its caller fills."""
        u = self.found[transpose] = self.step.rows(self.of.a.shape[1])
        return u

    def narrow(
        self,
        x: Tensor,
        transpose: bool,
        pairs: Tensor | None,
        weights: Tensor | None = None,
        copy: Tensor | None = None,
    ) -> Tensor:
        """Rows, or tokens through the pair of each, through the first matrix, scaled."""
        a, b, scale = self.of
        matrix, u = b if transpose else a, self.new(transpose)
        blocks, top_k = self.step.blocks(low_rank.BLOCK_M), self.step.top_k
        args = (u, x, matrix, not transpose, scale, blocks, pairs, top_k, weights, copy)
        self.step.run(low_rank.narrow(*args))
        return u

    def narrowed(self, rows: Tensor | None, transpose: bool = False) -> Tensor:
        """(S, r): rows through the first matrix, scaled."""
        u = self.found[transpose]
        if u is None:
            x, pairs = self.source(rows, transpose)
            u = self.narrow(x, transpose, pairs)
        return u

    def added(self, rows: Tensor, transpose: bool) -> tuple[Tensor, Tensor]:
        """What a product of these rows adds: rows (S, r), and the matrix of each expert that
        makes them wide, b (E, N, r), or with `transpose` a (E, r, K).
        """
        return self.narrowed(rows, transpose), self.of.a if transpose else self.of.b

    def gradients(self, rows: Tensor | None, grad: Tensor) -> list[Tensor]:
        """Of a and b: du^T rows and grad^T u."""
        u, du = self.narrowed(rows), self.narrowed(grad, True)
        found = [torch.empty_like(self.of.a), torch.empty_like(self.of.b)]
        for out, wide, narrow, transpose in zip(
            found, (rows, grad), (du, u), (False, True), strict=True
        ):
            x, pairs = self.source(wide, transpose)
            args = (out, not transpose, x, narrow, self.step.layout, pairs, self.step.top_k)
            self.step.run(low_rank.outer(*args))
        return found


def of_products(
    step: Step, adapters: Adapters, grad: Tensor | None = None, u: Tensor | None = None
) -> tuple[Adapter | None, Adapter | None]:
    """What adapts both products; `grad` is the gradient of the output, `u` what the first one
    makes narrow, where it is known.
    """
    first, second = adapters
    tokens = step.tokens if first is not None and step.of_input is None else None
    if u is not None:
        u = u.to(step.x.dtype)
    return (
        None if first is None else Adapter(step, first, tokens=tokens, u=u),
        None if second is None else Adapter(step, second, outputs=grad),
    )
