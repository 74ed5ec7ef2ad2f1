"""The kernel that quantizes tokens with scales of blocks into the rows of their pairs. Imported at
first launch only. Legend: blocks.py.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from moe_ops.backends.cutlass.blocks import (
    CHUNK,
    Operand,
    Written,
    global_scale,
    place_of_scales,
    quantized,
    store,
    store_alphas,
)
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.rows.rounding import Rounding
from moe_ops.meta.workspace import cdiv


@arguments
class ScatterBlocks:
    to: Written
    x: Pointer  # (M, K)
    x_stride_m: Specialized
    x_stride_k: Specialized
    weights: Pointer  # (M,) that multiply x before it is quantized, or None
    weights_stride: Runtime
    layout: Layout
    rounding: Rounding
    K: Specialized
    TOP_K: Constant
    CHUNK: Constant
    PDL: Constant


@kernel(ScatterBlocks)
def moe_ops_cutlass_scatter_blocks(
    data_ptr,
    scale_ptr,
    alpha_ptr,
    known_ptr,
    w_global_ptr,
    E,
    columns,
    WHOLE: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    x_stride_m,
    x_stride_k,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    K,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read CHUNK columns of a token once, quantize them, and write them to the rows of its pairs.
    Grid: (M, chunks).
    """
    GROUPS: tl.constexpr = CHUNK // SCALE_GROUP
    m = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    lane = tl.arange(0, GROUPS)[:, None] * SCALE_GROUP + tl.arange(0, SCALE_GROUP)[None, :]
    k = first * SCALE_GROUP + lane
    x = tl.load(x_ptr + m * x_stride_m + k.to(tl.int64) * x_stride_k, mask=k < K, other=0.0)
    x = x.to(tl.float32)
    if weights_ptr is not None:
        x *= tl.load(weights_ptr + m * weights_stride).to(tl.float32)
    gdc_wait(PDL)  # the kernels before this one write `rows`, `ends` and largest magnitudes
    gdc_launch_dependents(PDL)
    # two branches, of which a kernel without alpha_ptr has neither
    if alpha_ptr is not None:  # noqa: SIM102
        if (m == 0) & (first == 0):
            store_alphas(
                alpha_ptr, known_ptr, w_global_ptr, E, WHOLE, PARTIALS, MAX_VALUE, BLOCK_E
            )
    if WHOLE != "experts":
        whole = global_scale(known_ptr, 0, WHOLE, PARTIALS, MAX_VALUE)
        q, code = quantized(
            x, whole, SCALE, RULE, MANTISSA, MIN_EXPONENT, MAX_VALUE, NATIVE
        )  # fmt: skip
    for j in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + m * TOP_K + j)
        if row >= 0:
            expert, scale_row = place_of_scales(groups_ptr, row, E, BLOCK_E)
            if WHOLE == "experts":
                of_expert = global_scale(known_ptr, expert, WHOLE, PARTIALS, MAX_VALUE)
                q_of, code_of = quantized(
                    x, of_expert, SCALE, RULE, MANTISSA, MIN_EXPONENT, MAX_VALUE, NATIVE
                )  # fmt: skip
                store(
                    data_ptr, scale_ptr, columns, row, scale_row, first, K, q_of, code_of,
                    SCALE_GROUP, MAX_VALUE,
                )  # fmt: skip
            else:
                store(
                    data_ptr, scale_ptr, columns, row, scale_row, first, K, q, code,
                    SCALE_GROUP, MAX_VALUE,
                )  # fmt: skip


def scatter_blocks(
    y: Operand, x: Tensor, layout: Layout, top_k: int, weights: Tensor | None, gpu: Gpu
) -> Launch:
    """x (M, K) quantized into the rows of its pairs, after it was multiplied by weights (M, 1) if
    there are any.
    """
    M, K = x.shape
    args = ScatterBlocks(
        to=y.written(layout.groups.shape[0], gpu),
        x=x,
        x_stride_m=x.stride(0),
        x_stride_k=x.stride(1),
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        rounding=y.rounding,
        K=K,
        TOP_K=top_k,
        CHUNK=CHUNK,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_scatter_blocks, (M, cdiv(K, CHUNK), 1), args)
