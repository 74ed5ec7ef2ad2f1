"""`Products`: what a backend provides for gradients with plain weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Products(NamedTuple):
    """The grouped products of a backend on rows sorted by expert, and what they do beside."""

    name: str  # for `explain`
    # rows (S, K) @ weight[e].T for weights (E, N, K), or with `transpose` rows (S, N) @ weight[e];
    # the rows of expert e end at ends[e]
    multiply: Callable[..., Tensor]
    # a[rows of e].T @ b[rows of e] -> (E, M, N) for a (S, M) and b (S, N)
    outer: Callable[..., Tensor]
    # the product with w13, which is kept, fused with the activation after it; None: not fused
    activate_into: Callable[..., None] | None = None
    activations: tuple[str, ...] = ()  # names of those of `activate_into`
    adds: bool = False  # `multiply` adds the product of `low`, the narrow rows of an adapter
    # `activate_into` takes gate and up rows (E, I, K) that are two tensors; such products also add
    pairs: bool = False
    most_experts: int | None = None  # None: any number
    zeroes: bool = True  # `outer` writes zeros for experts without rows
    # (device, pairs, columns of h) -> multiprocessors that products leave to concurrent kernels,
    # their argument `spare`; None: none
    spare: Callable[[int, int, int], int] | None = None
