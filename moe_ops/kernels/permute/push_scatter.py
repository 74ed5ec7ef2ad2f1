"""Tokens written into the memory of other ranks, and those of all ranks copied to the rows of
their pairs, which are sorted by expert: while a rank's tokens travel, each GPU copies its own.
Imported at first launch only.

Legend and protocol as in kernels/comm/push.py, whose blocks of rows these are: a rank may receive
by this kernel what others send by that one. The ids of all ranks' tokens have arrived, and S = R *
T * TOP_K pairs are placed, `rows` (S,): -1 for experts that are elsewhere, and for tokens that a
rank does not have.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.comm.mailbox import Mailbox
from moe_ops.kernels.comm.push import (
    BOTH,
    MAX_REGISTERS,
    MOST_COPIED,
    Buffers,
    Phases,
    buffers_of,
    flag_of_block,
    grid_of,
    load_rows,
    region,
    row_of_slot,
    send_rows,
    tile_of,
    tile_of_step,
    wait_for_flag,
)
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
from moe_ops.kernels.permute.layout import Layout
from moe_ops.kernels.permute.scatter import (
    OperandRows,
    Quantized,
    quantized,
    rounded_columns,
    store_scale,
)

# of the programs of a launch, a quarter sends: the link is as busy as with a half, and more of
# them copy to experts, several rows for each that arrives
_SENDERS = 4


def why_not(columns: int, y: OperandRows) -> str | None:
    """Why rows of so many columns cannot be copied to these on their way; None: they can."""
    if y.scale is not None and (y.scales == "ue8m0" or y.width != 128 or columns % 128):
        return f"scales {y.scales!r} of {y.width} columns"
    return None


@triton.jit
def rows_of_tokens(rows_ptr, t, there, TOP_K: tl.constexpr):
    """The rows of each of the TOP_K pairs of tokens t (TILE,), -1 where none is here."""
    rows = ()
    for j in tl.static_range(TOP_K):
        rows += (tl.load(rows_ptr + t * TOP_K + j, mask=there, other=-1),)  # type: ignore[assignment]
    return rows


@triton.jit
def scatter_tile(
    y_ptr, scale_ptr, x, rows, k, K, size, SCALES: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, NATIVE: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """Columns k of tokens, x (TILE, BLOCK_K), quantized once and copied to all of their rows."""
    y, scale = x, x
    if SCALES != "":
        y, scale = rounded_columns(tl.reshape(x, (GROUPS, 128)), SCALES, WIDTH, NATIVE)
        y = tl.reshape(y, x.shape)
        scale = tl.reshape(scale, (x.shape[0], x.shape[1] // 128))
        group = tl.min(k, 0) // 128 + tl.arange(0, x.shape[1] // 128)
    for j in tl.static_range(TOP_K):
        row = rows[j].to(tl.int64)[:, None]
        inside = (row >= 0) & (k < K)[None, :]
        tl.store(y_ptr + row * K + k[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
        if SCALES != "":
            inside = (row >= 0) & (group < K // 128)[None, :]
            store_scale(scale_ptr, scale, row, group[None, :], K // 128, size, inside, SCALES)


@arguments
class PushScatter:
    y: Pointer  # (rows, K), written
    quantized: Quantized
    x: Pointer  # (M, K)
    rows: Pointer  # (S,) int32
    size: Runtime  # all rows of y
    buffers: Buffers
    M: Runtime
    K: Specialized
    TOP_K: Constant
    TILE: Constant
    BLOCK_K: Constant


@kernel(PushScatter, asserts=True)
def moe_ops_push_scatter(
    y_ptr,
    scale_ptr,
    SCALES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    x_ptr,
    rows_ptr,
    size,
    buffer_ptr,
    peers_ptr,
    epochs_ptr,
    rank,
    spins,
    T,
    META_START: tl.constexpr,
    ROWS_START: tl.constexpr,
    PITCH: tl.constexpr,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    SENDERS,
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    M,
    K,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y[rows[p]] = row t of rank r for each pair p of token r * T + t that has a row. Programs
    that receive copy this rank's own tokens first.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr + program) + 1
    parity = epoch & 1
    blocks = tl.cdiv(T, ROWS)
    tiles = ROWS // TILE * tl.cdiv(K, BLOCK_K)
    element: tl.constexpr = x_ptr.dtype.element_ty
    if SEND and program < SENDERS:
        send_rows(
            x_ptr, None, None, buffer_ptr, peers_ptr, rank, program, SENDERS, epoch, T, M, K, 0, 1,
            META_START, ROWS_START, PITCH, R, ROWS, TILE, BLOCK_K,
        )  # fmt: skip
        tl.store(epochs_ptr + program, epoch)
    if RECEIVE and program >= SENDERS:
        first, stride = program - SENDERS, programs - SENDERS
        steps = tl.cdiv(blocks - first, stride) * tiles
        t, k = tile_of_step(0, tiles, first, stride, K, ROWS, TILE, BLOCK_K)
        rows = rows_of_tokens(rows_ptr, rank * T + t, t < M, TOP_K)
        x = load_rows(x_ptr, t, K, k, (t < M)[:, None] & (k < K)[None, :])
        for step in range(steps):
            # what is stored after this one is loaded before, so that loads and stores overlap
            t, k = tile_of_step(step + 1, tiles, first, stride, K, ROWS, TILE, BLOCK_K)
            next_rows = rows_of_tokens(rows_ptr, rank * T + t, t < M, TOP_K)
            following = load_rows(x_ptr, t, K, k, (t < M)[:, None] & (k < K)[None, :])
            _, k = tile_of_step(step, tiles, first, stride, K, ROWS, TILE, BLOCK_K)
            scatter_tile(
                y_ptr, scale_ptr, x, rows, k, K, size, SCALES, WIDTH, GROUPS, NATIVE, TOP_K
            )
            rows = next_rows
            x = following
        received_ptr = region(buffer_ptr, peers_ptr, rank, ROWS_START, element)
        for i in tl.static_range(1, R):
            of_rank = (rank + i) % R * T
            for step in range(steps):
                t, k = tile_of_step(step, tiles, first, stride, K, ROWS, TILE, BLOCK_K)
                rows = rows_of_tokens(rows_ptr, of_rank + t, t < T, TOP_K)
                wanted = rows[0] >= 0
                for j in tl.static_range(1, TOP_K):
                    wanted |= rows[j] >= 0
                if step % tiles == 0:
                    block = first + step // tiles * stride
                    flag_ptr = flag_of_block(
                        buffer_ptr, peers_ptr, rank, parity, i - 1, block, T, R, ROWS
                    )
                    wait_for_flag(flag_ptr, epoch, spins)
                slot_row = row_of_slot(parity, i - 1, t, T, R)
                x = tl.load(
                    received_ptr + slot_row[:, None] * PITCH + k[None, :],
                    mask=wanted[:, None] & (k < K)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                scatter_tile(
                    y_ptr, scale_ptr, x, rows, k, K, size, SCALES, WIDTH, GROUPS, NATIVE, TOP_K
                )
        tl.store(epochs_ptr + program, epoch)


def push_scatter(
    y: OperandRows,  # (rows, K), written
    x: Tensor,  # (M, K), contiguous
    layout: Layout,  # of the pairs of all ranks' tokens
    top_k: int,
    mailbox: Mailbox,
    spins: int,  # after which another rank is given up
    gpu: Gpu,
    phases: Phases = BOTH,
) -> Launch:
    """The rows of all ranks' pairs, of which each rank has the tokens, quantized if y has scales.
    For operands of which `why_not` is None.
    """
    (M, K), grid = x.shape, grid_of(mailbox.layout)
    buffers = buffers_of(mailbox, spins, x.itemsize, phases)
    tile = tile_of(mailbox.layout, K, MOST_COPIED)
    data, how = quantized(y, gpu)
    args = PushScatter(
        y=data,
        quantized=how._replace(GROUPS=tile.rows * tile.columns // 128),
        x=x,
        rows=layout.rows,
        size=layout.R,
        buffers=buffers._replace(SENDERS=max(1, grid[0] // _SENDERS)),
        M=M,
        K=K,
        TOP_K=top_k,
        TILE=tile.rows,
        BLOCK_K=tile.columns,
    )
    return Launch(moe_ops_push_scatter, grid, args, tile.num_warps, MAX_REGISTERS)
