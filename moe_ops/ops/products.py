"""What a backend provides for gradients: products of rows sorted by expert with plain weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Products(NamedTuple):
    """The grouped products of one backend, and what they leave to their caller."""

    name: str  # as `explain` says it
    # rows (S, K) @ weight[e].T of weights (E, N, K), or with `transpose` rows (S, N) @ weight[e],
    # for the rows of each expert, which end at `ends` (E,)
    multiply: Callable[..., Tensor]
    # a[rows of e].T @ b[rows of e], (E, M, N) of a (S, M) and b (S, N)
    outer: Callable[..., Tensor]
    # the product with w13, kept, and the activation behind it; None where nothing fuses them
    activate_into: Callable[..., None] | None = None
    adds: bool = False  # `multiply` adds the product of `low`, rows and matrices of a rank
    zeroes: bool = True  # `outer` writes zeros for experts without rows
    # (device, pairs, columns of h) -> multiprocessors that products leave, as their argument
    # `spare`, to kernels that run beside them; None: they leave none
    spare: Callable[[int, int, int], int] | None = None
