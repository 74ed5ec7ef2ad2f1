"""Loads whose threads are spread alike by every Triton. Imported at first launch only."""

import triton
import triton.language as tl


@triton.jit
def load_along_rows(ptrs, mask, other: tl.constexpr):
    """Numbers of two dimensions, neighbouring threads in the last.

    The load itself has one dimension. Of several, none of them known to be contiguous in memory,
    Triton 3.6 spreads threads over the first and later versions over the last.
    """
    rows: tl.constexpr = ptrs.shape[0]
    columns: tl.constexpr = ptrs.shape[1]
    mask = tl.broadcast_to(mask, (rows, columns)).reshape(rows * columns)
    return tl.load(ptrs.reshape(rows * columns), mask=mask, other=other).reshape(rows, columns)
