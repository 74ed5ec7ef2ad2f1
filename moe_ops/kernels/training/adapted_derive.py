"""Back through the activation of adapted experts, with the narrow products of their adapters.
Imported at first launch only. Legend: adapted.py.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.activations import (
    activate_one,
    derivative_of_one,
    derivatives_of_two,
)
from moe_ops.kernels.gemm.operands import Activated
from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
)
from moe_ops.kernels.permute.rows import RouterWeights, Routing, router_weights
from moe_ops.kernels.training.adapted import (
    Adapted,
    AdaptedTile,
    activation_rows,
    load_rows,
    narrow_rows,
    of_a,
    store_narrow,
)
from moe_ops.kernels.training.low_rank import BLOCK_M, last_first
from moe_ops.kernels.training.rows import Gradients

# rows of a program, columns of a step of its loop, and warps
TILE = (64, 32, 4)


@arguments
class DeriveAdapted:
    to: Gradients
    x: Pointer  # (S, N)
    bias: Pointer  # (E, N), added to x; or None
    dh: Pointer  # (S, I): the gradient of the activation, without the router weight
    weights: RouterWeights  # or none: 1
    order: Pointer  # (S,): the pair of each row
    index: Pointer  # the table of blocks
    E: Runtime
    N: Specialized
    I: Specialized  # noqa: E741
    activation: Activated
    first: Adapted
    second: Adapted
    TOP_K: Constant
    tile: AdaptedTile


@kernel(DeriveAdapted)
def moe_ops_train_derive_adapted(
    to_dx_ptr,
    to_scaled_ptr,
    to_dweights_ptr,
    to_factors_ptr,
    x_ptr,
    bias_ptr,
    dh_ptr,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    order_ptr,
    index_ptr,
    E,
    N,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    first_wide_ptr,
    first_narrow_ptr,
    first_matrix_ptr,
    first_scale,
    first_R,
    first_BLOCK_R: tl.constexpr,
    second_wide_ptr,
    second_narrow_ptr,
    second_matrix_ptr,
    second_scale,
    second_R,
    second_BLOCK_R: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """`derive` of rows.py, with x + u b[e]^T in the place of x and dh + dv a[e] in that of dh; and
    du = scale * dx b[e], v = scale * (s * h) a[e]^T. Grid: (blocks, parts of a block).
    """
    index_ptr += 4 * last_first()
    e = tl.load(index_ptr)
    if (e < 0) | (e >= E):
        return
    begin, end = tl.load(index_ptr + 1) + tl.program_id(1) * ROWS, tl.load(index_ptr + 2)
    if begin >= end:
        return
    rows = begin + tl.arange(0, ROWS)
    inside = rows < end
    pair = tl.load(order_ptr + rows, mask=inside, other=0)
    rows = rows.to(tl.int64)
    e = e.to(tl.int64)
    s = tl.full((ROWS,), 1.0, tl.float32)
    if weights_ptr is not None:
        at = (pair // TOP_K).to(tl.int64) * weights_stride_m + (pair % TOP_K) * weights_stride_k
        s = tl.load(weights_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if to_factors_ptr is not None:
        tl.store(to_factors_ptr + rows, s, mask=inside)
    if bias_ptr is not None:
        bias_ptr += e * N
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    u = tl.zeros((ROWS, first_BLOCK_R), dtype)
    if first_matrix_ptr is not None:
        first_matrix_ptr += e * N * first_R
        u = narrow_rows(first_wide_ptr, rows, inside, first_R, first_BLOCK_R)
    dv = tl.zeros((ROWS, second_BLOCK_R), dtype)
    if second_matrix_ptr is not None:
        second_matrix_ptr += e * second_R * I
        if second_wide_ptr is not None:
            dv = narrow_rows(second_wide_ptr, rows, inside, second_R, second_BLOCK_R)
    du = tl.zeros((ROWS, first_BLOCK_R), tl.float32)
    v = tl.zeros((ROWS, second_BLOCK_R), tl.float32)
    ds = tl.zeros((ROWS,), tl.float32)
    next_x, next_up = load_rows(x_ptr, 0, rows, inside, N, I, GATED, INTERLEAVED, BLOCK_I)
    if dh_ptr is not None:
        dh_ptr += rows[:, None] * I
        i = tl.arange(0, BLOCK_I)
        next_dh = tl.load(dh_ptr + i[None, :], mask=inside[:, None] & (i < I)[None, :], other=0.0)
    for start in tl.range(0, I, BLOCK_I, num_stages=3):
        x, up = next_x, next_up
        # one step ahead of their use
        next_x, next_up = load_rows(
            x_ptr, start + BLOCK_I, rows, inside, N, I, GATED, INTERLEAVED, BLOCK_I
        )
        if dh_ptr is not None:
            dh = next_dh.to(tl.float32)
            i = start + BLOCK_I + tl.arange(0, BLOCK_I)
            ok = inside[:, None] & (i < I)[None, :]
            next_dh = tl.load(dh_ptr + i[None, :], mask=ok, other=0.0)
        i = start + tl.arange(0, BLOCK_I)
        ok = inside[:, None] & (i < I)[None, :]
        gate, up, b, b_up = activation_rows(
            x, up, bias_ptr, start, N, I,
            u, first_wide_ptr, first_matrix_ptr, first_R, first_BLOCK_R,
            GATED, INTERLEAVED, ROWS, BLOCK_I,
        )  # fmt: skip
        if GATED:
            h, dg, dup = derivatives_of_two(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
        else:
            h, dg = activate_one(gate, ACTIVATION), derivative_of_one(gate, ACTIVATION)
        if second_matrix_ptr is not None:
            a = of_a(second_matrix_ptr, i, I, second_R, second_BLOCK_R)
        if to_scaled_ptr is not None or second_narrow_ptr is not None:
            scaled = (s[:, None] * h).to(dtype)
            if to_scaled_ptr is not None:
                tl.store(to_scaled_ptr + rows[:, None] * I + i[None, :], scaled, mask=ok)
            if second_narrow_ptr is not None:
                v = tl.dot(scaled, tl.trans(a), v, input_precision="ieee")
        if dh_ptr is not None:
            if second_wide_ptr is not None:
                dh = tl.dot(dv, a, dh, input_precision="ieee")
            ds += tl.sum(tl.where(ok, dh * h, 0.0), 1)
            if to_dx_ptr is not None:
                dh *= s[:, None]
                dg = (dh * dg).to(dtype)
                if GATED:
                    dup = (dh * dup).to(dtype)
                if GATED and INTERLEAVED:
                    n = 2 * start + tl.arange(0, 2 * BLOCK_I)
                    dg = tl.reshape(tl.join(dg, dup), (ROWS, 2 * BLOCK_I))
                    dx_ok = inside[:, None] & (n < N)[None, :]
                    tl.store(to_dx_ptr + rows[:, None] * N + n[None, :], dg, mask=dx_ok)
                else:
                    dx_ptrs = to_dx_ptr + rows[:, None] * N + i[None, :]
                    tl.store(dx_ptrs, dg, mask=ok)
                    if GATED:
                        tl.store(dx_ptrs + I, dup, mask=ok)
                if first_narrow_ptr is not None:
                    du = tl.dot(dg, b, du, input_precision="ieee")
                    if GATED and not INTERLEAVED:
                        du = tl.dot(dup, b_up, du, input_precision="ieee")
    if to_dweights_ptr is not None:
        tl.store(to_dweights_ptr + pair, ds, mask=inside)
    if first_narrow_ptr is not None:
        store_narrow(first_narrow_ptr, du * first_scale, rows, inside, first_R, first_BLOCK_R)
    if second_narrow_ptr is not None:
        store_narrow(second_narrow_ptr, v * second_scale, rows, inside, second_R, second_BLOCK_R)


def derive(
    activation: Activated,
    to: Gradients,
    x: Tensor,
    bias: Tensor | None,
    dh: Tensor | None,
    weights: Tensor | None,  # (M, top_k)
    I: int,  # noqa: E741
    top_k: int,
    order: Tensor,
    first: Adapted,
    second: Adapted,
    blocks: Routing,
) -> Launch:
    """Gradients through the activation and the router weights, and what both adapters add to its
    input and make narrow of what it returns.
    """
    args = DeriveAdapted(
        to=to,
        x=x,
        bias=bias,
        dh=dh,
        weights=router_weights(weights),
        order=order,
        index=blocks.index,
        E=blocks.E,
        N=x.shape[1],
        I=I,
        activation=activation,
        first=first,
        second=second,
        TOP_K=top_k,
        tile=AdaptedTile(*TILE[:2]),
    )
    grid = (blocks.num_blocks, BLOCK_M // TILE[0], 1)
    return Launch(moe_ops_train_derive_adapted, grid, args, TILE[2])
