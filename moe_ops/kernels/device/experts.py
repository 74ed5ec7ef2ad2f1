"""Which expert a row belongs to, where rows of experts follow one another. Imported at first
launch only.
"""

import triton
import triton.language as tl


@triton.jit
def ends_of_experts(ends_ptr, E, BLOCK_E: tl.constexpr):
    """The row after each expert's last, (BLOCK_E,): beyond all rows for those from E on."""
    e = tl.arange(0, BLOCK_E)
    return tl.load(ends_ptr + e, mask=e < E, other=0x7FFFFFFF)


@triton.jit
def expert_of_row(ends, row):
    """The expert of a row: as many end before it, or with it as their end."""
    return tl.sum((ends <= row).to(tl.int32), 0)
