"""Matrices as groups that share a scale."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moe_ops.schemes import GroupShape


def split(t: Tensor, dim: int, size: int) -> Tensor:
    """View ``dim`` (negative) as (groups, size), padding it with zeros to a multiple of ``size``;
    -1 makes one group."""
    length = t.shape[dim]
    if size == -1:
        return t.unsqueeze(dim - 1)
    groups = (length + size - 1) // size
    if groups * size != length:
        t = F.pad(t, (0, 0) * (-dim - 1) + (0, groups * size - length))
    return t.unflatten(dim, (groups, size))


def grouped(t: Tensor, group: GroupShape) -> Tensor:
    """(..., N, K) as (..., groups of rows, rows, groups of columns, columns), zero-padded."""
    return split(split(t, -1, group.cols), -3, group.rows)


def ungrouped(t: Tensor, n: int, k: int) -> Tensor:
    """The inverse: (..., n, k)."""
    return t.flatten(-2).flatten(-3, -2)[..., :n, :k]
