"""The kernel that activates and quantizes what the first GEMM returns, to e4m3. Imported at first
launch only. Legend: rows.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.backends.cutlass.rows import (
    Operand,
    Quantized,
    by_known,
    known_scale,
    quantized_row,
    tensor_scale,
    warps,
)
from moe_ops.kernels.device.activations import activated_columns
from moe_ops.kernels.device.pdl import gdc_launch_dependents
from moe_ops.kernels.gemm.operands import Activated
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
from moe_ops.kernels.place.layout import Layout, programs_of_expert


@triton.jit
def raise_to(amax_ptr, h):
    """Raise the fp32 number >= 0 at an address to the largest magnitude in h, NaN left aside.

    As integers, the bits of floats >= 0 have the order of the floats. The final maximum does not
    depend on the order of the atomics, and most programs see that they need none.
    """
    amax = tl.max(tl.where(h == h, tl.abs(h), 0.0), 0)
    if amax > tl.load(amax_ptr, volatile=True):
        bits = amax.to(tl.int32, bitcast=True)
        tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@arguments
class Activate:
    h: Pointer  # (rows, I), written
    quantized: Quantized
    x: Pointer  # (rows, N)
    weights: Pointer  # (S,) that multiply x first, or None
    weights_stride: Runtime
    layout: Layout
    N: Specialized
    I: Specialized  # noqa: E741
    activation: Activated
    programs: Runtime
    BLOCK_I: Constant
    PDL: Constant


@kernel(Activate, waits=False)
def moe_ops_cutlass_activate(
    h_ptr,
    scale_ptr,
    known_ptr,
    E,
    SCALES: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    weights_ptr,
    weights_stride,
    rows_ptr,
    groups_ptr,
    R,
    N,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    programs,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = activation(x), quantized. Grid: one program a pair; of batches, `programs` that share
    the rows of an expert.
    """
    gdc_launch_dependents(PDL)
    i = tl.arange(0, BLOCK_I)
    if SCALES == "tensor" and tl.program_id(0) == 0:
        tl.store(scale_ptr, tensor_scale(known_ptr, PARTIALS))
    if rows_ptr is None:
        e = (tl.program_id(0) // programs).to(tl.int64)
        for t in range(tl.program_id(0) % programs, tl.load(groups_ptr + e), programs):
            row = e * R + t
            h = activated_columns(
                x_ptr + row * N, 1.0, 0, I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED,
                HAS_LIMIT, BLOCK_I,
            )  # fmt: skip
            if SCALES == "amax":
                raise_to(known_ptr, h)
            else:
                y, scale = quantized_row(h, None, known_ptr, e, SCALES, PARTIALS, NATIVE)
                tl.store(h_ptr + row * I + i, y, mask=i < I)
                if SCALES == "token":
                    tl.store(scale_ptr + row, scale)
    else:
        pair = tl.program_id(0).to(tl.int64)
        row = tl.load(rows_ptr + pair).to(tl.int64)
        if row < 0:
            return
        weight = 1.0
        if weights_ptr is not None:
            weight = tl.load(weights_ptr + pair * weights_stride).to(tl.float32)
        h = activated_columns(
            x_ptr + row * N, weight, 0, I, alpha, beta, limit, ACTIVATION, GATED, INTERLEAVED,
            HAS_LIMIT, BLOCK_I,
        )  # fmt: skip
        if SCALES == "amax":
            raise_to(known_ptr, h)
        else:
            if SCALES == "experts":
                scale = known_scale(known_ptr, groups_ptr, row, E, BLOCK_E)
                y = by_known(h, scale, NATIVE)
            else:
                y, scale = quantized_row(h, None, known_ptr, None, SCALES, PARTIALS, NATIVE)
            tl.store(h_ptr + row * I + i, y, mask=i < I)
            if SCALES == "token":
                tl.store(scale_ptr + row, scale)


def activate(
    h: Operand,
    activation: Activated,
    x: Tensor,  # (rows, N)
    layout: Layout,
    weights: Tensor | None,
    gpu: Gpu,
) -> Launch:
    """h = activation(x), quantized; x is multiplied by weights (S, 1) first if there are any."""
    I = h.data.shape[1]  # noqa: E741
    block, E = triton.next_power_of_2(I), layout.groups.shape[0]
    if layout.rows is not None:
        programs, shared = layout.rows.numel(), 1
    else:
        shared = programs_of_expert(layout.R, E)
        programs = E * shared
    args = Activate(
        h=h.codes(gpu),
        quantized=h.quantized(E, gpu),
        x=x,
        weights=weights,
        weights_stride=0 if weights is None else weights.stride(0),
        layout=layout,
        N=x.shape[1],
        I=I,
        activation=activation,
        programs=shared,
        BLOCK_I=block,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_cutlass_activate, (programs, 1, 1), args, warps(block))
