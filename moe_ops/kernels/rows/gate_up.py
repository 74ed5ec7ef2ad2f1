"""The kernel that joins gate and up rows to w13, or splits them, in the pass that casts them.
Imported at first launch only.

Legend: E local experts, F intermediate size, D hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
)

MOST_COLUMNS = 2048  # that a program takes at a time


@arguments
class GateUp:
    w13: Pointer  # (E, 2F, D): gate rows, then up rows
    gate: Pointer  # (E, F, D); or both in turn, (E, F, 2, D)
    up: Pointer  # (E, F, D), or None
    F: Runtime
    D: Specialized
    JOINS: Constant  # writes w13, from the others; else the others, from w13
    BLOCK: Constant


@kernel(GateUp)
def moe_ops_train_gate_up(
    w13_ptr,
    gate_ptr,
    up_ptr,
    F,
    D,
    JOINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies rows of D numbers, from one dtype to the other. Grid: E * 2F, the rows of w13."""
    row = tl.program_id(0).to(tl.int64)
    e, n = row // (2 * F), row % (2 * F)
    is_up, f = n // F, n % F
    if up_ptr is None:
        part_ptr = gate_ptr + ((e * F + f) * 2 + is_up) * D
    else:
        part_ptr = gate_ptr + (e * F + f) * D
        if is_up > 0:
            part_ptr = up_ptr + (e * F + f) * D
    w13_ptr += row * D
    for start in tl.range(0, D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        if JOINS:
            x = tl.load(part_ptr + i, mask=i < D)
            tl.store(w13_ptr + i, x.to(w13_ptr.dtype.element_ty), mask=i < D)
        else:
            x = tl.load(w13_ptr + i, mask=i < D)
            tl.store(part_ptr + i, x.to(part_ptr.dtype.element_ty), mask=i < D)


def gate_up(w13: Tensor, gate: Tensor, up: Tensor | None, joins: bool) -> Launch:
    """Write w13 from gate and up rows, or with `joins` False those from w13. All are
    contiguous.
    """
    E, N, D = w13.shape
    block = min(MOST_COLUMNS, triton.next_power_of_2(D))
    args = GateUp(w13=w13, gate=gate, up=up, F=N // 2, D=D, JOINS=joins, BLOCK=block)
    return Launch(moe_ops_train_gate_up, (E * N, 1, 1), args)
