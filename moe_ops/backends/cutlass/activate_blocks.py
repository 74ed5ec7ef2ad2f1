"""The kernel that activates what the first GEMM returns, and quantizes it with scales of blocks.
Imported at first launch only. Legend: blocks.py.
"""

from __future__ import annotations

import torch
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
from moe_ops.kernels.device.activations import activated_columns
from moe_ops.kernels.device.e4m3 import largest_magnitude
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.gemm.operands import Activated
from moe_ops.kernels.launch import (
    Constant,
    Gpu,
    Launch,
    Pointer,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.rows.rounding import Rounding
from moe_ops.meta.workspace import cdiv


@arguments
class ActivateBlocks:
    to: Written
    amax: Pointer  # (1,) int32 bits of a magnitude that this raises, and writes nothing else; None
    x: Pointer  # (rows, N)
    divisors: Pointer  # (E, N) fp32 global scales of w13's rows, by which x is divided, or None
    layout: Layout
    rounding: Rounding
    I: Specialized  # noqa: E741
    activation: Activated
    CHUNK: Constant
    PDL: Constant


@kernel(ActivateBlocks)
def moe_ops_cutlass_activate_blocks(
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
    amax_ptr,
    x_ptr,
    divisors_ptr,
    rows_ptr,
    groups_ptr,
    R,
    SCALE: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    RULE: tl.constexpr,
    MANTISSA: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x), quantized; or with `amax` its largest magnitude alone. Grid: (S, chunks).

    Where a global scale follows from h, the activation is computed twice: reading x once more
    costs no more than h in fp32, written and read.
    """
    GROUPS: tl.constexpr = CHUNK // SCALE_GROUP
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    pair = tl.program_id(0)
    first = tl.program_id(1) * GROUPS
    if amax_ptr is None and alpha_ptr is not None:  # noqa: SIM102
        if (pair == 0) & (first == 0):
            store_alphas(
                alpha_ptr, known_ptr, w_global_ptr, E, WHOLE, PARTIALS, MAX_VALUE, BLOCK_E
            )
    row = tl.load(rows_ptr + pair)
    if row < 0:
        return
    N: tl.constexpr = 2 if GATED else 1
    of_expert = None
    if divisors_ptr is not None:
        expert, _ = place_of_scales(groups_ptr, row, E, BLOCK_E)
        of_expert = divisors_ptr + expert.to(tl.int64) * (N * I)
    h = activated_columns(
        x_ptr + row.to(tl.int64) * (N * I), 1.0, first * SCALE_GROUP, I, alpha, beta, limit,
        ACTIVATION, GATED, INTERLEAVED, HAS_LIMIT, CHUNK, of_expert,
    )  # fmt: skip
    h = tl.reshape(h, (GROUPS, SCALE_GROUP))
    if amax_ptr is not None:
        largest = largest_magnitude(largest_magnitude(h, 1), 0)
        tl.atomic_max(amax_ptr, largest.to(tl.int32, bitcast=True))
    else:
        expert, scale_row = place_of_scales(groups_ptr, row, E, BLOCK_E)
        of = expert if WHOLE == "experts" else 0
        whole = global_scale(known_ptr, of, WHOLE, PARTIALS, MAX_VALUE)
        q, code = quantized(
            h, whole, SCALE, RULE, MANTISSA, MIN_EXPONENT, MAX_VALUE, NATIVE
        )  # fmt: skip
        store(
            data_ptr, scale_ptr, columns, row, scale_row, first, I, q, code,
            SCALE_GROUP, MAX_VALUE,
        )  # fmt: skip


def activate_blocks(
    h: Operand,
    activation: Activated,
    x: Tensor,
    divisors: Tensor | None,  # (E, N, 1) fp32
    layout: Layout,
    gpu: Gpu,
) -> Launch:
    """h = activation(x), where global scales of w13's rows divide x if there are any, quantized,
    or its largest magnitude raised.
    """
    assert layout.rows is not None
    raised = None
    if h.raises:
        assert h.known is not None
        raised = h.known.view(torch.int32)
    args = ActivateBlocks(
        to=h.written(layout.groups.shape[0], gpu),
        amax=raised,
        x=x,
        divisors=divisors,
        layout=layout,
        rounding=h.rounding,
        I=h.columns,
        activation=activation,
        CHUNK=CHUNK,
        PDL=gpu.pdl,
    )
    grid = (layout.rows.numel(), cdiv(h.columns, CHUNK), 1)
    return Launch(moe_ops_cutlass_activate_blocks, grid, args)
