"""Tensor parallelism: each rank's columns of every expert's intermediate dimension.

E experts, K hidden size, I intermediate size, N rows of w13 (2I for gated activations, else I), R
ranks. Rank r holds the columns [r * I / R, (r + 1) * I / R) of w2, and the rows of gate and up
that they are multiplied by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.checks import check_integer, check_size, check_tensor
from moe_ops.schemes import get_scheme
from moe_ops.tensors.base import ExpertTensor
from moe_ops.tensors.views import in_planes, repacked_columns


def shard_w13(
    weight: Tensor,  # (E, N, K) or (E, N)
    size: int,
    rank: int,
    *,
    gated: bool = True,
    interleaved: bool = False,
) -> Tensor:  # (E, N / R, K) or (E, N / R)
    """A copy of a rank's rows of w13, or entries of its bias: of gate and of up alike.

    Args:
        weight: of the first projection: plain or quantized in its natural layout, or a bias.
        size: R.
        rank: whose rows to take.
        gated: the first half of N belongs to the gate, the second to up.
        interleaved: gate and up rows take turns instead, as those of activation "swigluoai".

    Raises:
        ValueError: no such tensor, a rank outside 0..R - 1, rows that R does not divide, or a
            quantized weight of which a share would begin or end inside of a block that has one
            scale.
    """
    halves = 2 if gated and not interleaved else 1
    share = _share("rows of w13", weight, 1, size, rank, halves)
    if interleaved and share % 2:
        raise ValueError(
            f"weight must be cut between pairs of gate and up rows, got shares of {share} rows "
            f"for {size} ranks; choose another number of ranks"
        )
    half = weight.shape[1] // halves
    starts = [start + rank * share for start in range(0, halves * half, half)]
    parts: list[Any] = [weight.narrow(1, start, share) for start in starts]
    if not isinstance(weight, ExpertTensor):
        return torch.cat(parts, 1)
    names = ["qdata", *weight._scales_of_rows]
    if get_scheme(weight.scheme).quantized_weight.group.rows != -1:  # else one for all rows
        names += ["scale", "zero_point"]
    # torch.cat would have to join tensors whose other scales differ
    joined = {
        name: torch.cat([getattr(part, name) for part in parts], 1)
        for name in names
        if getattr(weight, name) is not None
    }
    return parts[0]._replace(**joined).clone()


def shard_w2(
    weight: Tensor,  # (E, K, I)
    size: int,
    rank: int,
) -> Tensor:  # (E, K, I / R)
    """A copy of a rank's columns of w2. Its bias is not cut: one rank alone adds it.

    Args:
        weight: of the second projection, plain or quantized in its natural layout.
        size: R.
        rank: whose columns to take.

    Raises:
        ValueError: as `shard_w13`.
    """
    share = _share("columns of w2", weight, 2, size, rank, 1)
    start = rank * share
    if isinstance(weight, ExpertTensor) and in_planes(weight):
        return repacked_columns(weight, start, start + share)
    return weight.narrow(2, start, share).clone()


def _share(what: str, weight: Tensor, dim: int, size: int, rank: int, halves: int) -> int:
    """Rows or columns of one rank, in each half."""
    check_tensor("weight", weight)
    check_size("size", size)
    check_integer("rank", rank)
    if not 0 <= rank < size:
        raise ValueError(f"rank must be in 0..size - 1 = {size - 1}, got {rank}")
    if not dim < weight.dim() <= 3:
        shape = "(E, N, K) or (E, N)" if dim == 1 else "(E, K, I)"
        raise ValueError(f"weight must have shape {shape}, got {tuple(weight.shape)}")
    count = weight.shape[dim]
    if count % (halves * size):
        raise ValueError(
            f"weight must have a number of {what} that {halves * size} divides, got {count}; "
            "choose another number of ranks, or pad the intermediate size with zeros"
        )
    share = count // (halves * size)
    if isinstance(weight, ExpertTensor):
        if weight.weight_layout:
            raise ValueError(
                f"weight must be in its natural layout, got {weight}; "
                "moe_ops.prepare(weight, 'torch') restores it"
            )
        desc = get_scheme(weight.scheme).quantized_weight
        block = desc.group.rows if dim == 1 else max(desc.group.cols, desc.whole_columns)
        if block > 0 and share % block:  # also where this rank's share begins with a block
            raise ValueError(
                f"weight must be cut between blocks of {block} {what}, which have one scale, got "
                f"shares of {share} for {size} ranks; choose another number of ranks, or a scheme "
                "with smaller blocks"
            )
    return share
