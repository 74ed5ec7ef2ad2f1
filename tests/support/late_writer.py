"""A kernel that lets the next one start long before it writes. It stands in a file, where Triton
finds its source."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer


@triton.jit
def copied(to_ptr, source_ptr, size):
    for first in range(0, size, 1024):
        i = first + tl.arange(0, 1024)
        tl.store(to_ptr + i, tl.load(source_ptr + i, mask=i < size), mask=i < size)


@triton.jit
def moe_ops_test_late_writer(
    x_ptr,
    new_x_ptr,
    weights_ptr,
    new_weights_ptr,
    ids_ptr,
    new_ids_ptr,
    x_size,
    weights_size,
    ids_size,
    NANOSECONDS: tl.constexpr,
):
    gdc_launch_dependents()
    start = globaltimer()
    while globaltimer() - start < NANOSECONDS:
        pass
    copied(x_ptr, new_x_ptr, x_size)
    copied(weights_ptr, new_weights_ptr, weights_size)
    copied(ids_ptr, new_ids_ptr, ids_size)
