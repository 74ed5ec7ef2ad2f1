"""Workspace shapes for the layouts of permuted rows. Arithmetic only, on int or SymInt.

M tokens, N rows of w13, K hidden size, I intermediate size, E local experts. Every size is an
upper bound from (M, top_k, E), never from the routing data.
"""

from __future__ import annotations

from typing import Any

import torch

Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def maximum(a: Any, b: Any) -> Any:
    """max(a, b) that never guards on a symbolic size."""
    # Dynamo of torch 2.11 cannot trace sym_max of two ints, and turns max of symbolic ones into
    # it.
    return max(a, b) if type(a) is int and type(b) is int else torch.sym_max(a, b)


def minimum(a: Any, b: Any) -> Any:
    """min(a, b) that never guards on a symbolic size."""
    return min(a, b) if type(a) is int and type(b) is int else torch.sym_min(a, b)


def cdiv(a: int, b: int) -> int:
    """ceil(a / b)."""
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    """The least multiple of b that is at least a."""
    return (a + b - 1) // b * b


def dense(M: int, N: int, K: int, I: int, top_k: int) -> Shapes:
    """Rows are the M * top_k pairs in token order.

    Returns (workspace13 shape, workspace2 shape): workspace13 holds the activation's output (..,
    I) or permuted inputs (.., K); workspace2 holds gate/up (.., N) and the expert outputs (.., K).
    """
    rows = M * top_k
    return (rows, maximum(I, K)), (rows, maximum(N, K))


def padded_rows(M: int, top_k: int, E: int, alignment: int) -> int:
    """Rows of the contiguous layout: pairs grouped by expert, every group padded to
    `alignment`.
    """
    pairs = M * top_k
    return round_up(pairs + minimum(pairs, E) * (alignment - 1), alignment)


def masked(E: int, T: int, N: int, K: int, I: int) -> Shapes:
    """One padded block of T rows per expert.

    Returns (workspace13 shape, workspace2 shape): workspace13 holds gate/up (E, T, N) and expert
    outputs (E, T, K); workspace2 holds the activation's output (E, T, I).
    """
    return (E, T, maximum(K, N)), (E, T, I)


def carve(buffer: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The first bytes of `buffer` (contiguous, any shape and dtype) as a tensor.

    Launchers use workspaces only through this function, because the tiered op passes the same
    bytes to every tier.
    """
    size = 1
    for s in shape:
        size *= s
    return buffer.reshape(-1).view(dtype)[:size].view(shape)
