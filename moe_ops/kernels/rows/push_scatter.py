"""Tokens written into the memory of other ranks, and those of all ranks copied to the rows of
their pairs, which are sorted by expert: while a rank's tokens travel, each GPU copies its own.
Imported at first launch only.

Legend and protocol as in kernels/comm/push.py, whose blocks of rows these are: a rank may receive
by this kernel what others send by that one. The ids of all ranks' tokens have arrived, and S = R *
T * TOP_K pairs are placed, `rows` (S,): -1 for experts that are elsewhere, and for tokens that a
rank does not have.

Rows travel as they are, or (PACKED) as they are quantized: K bytes of e4m3 and then K / 128 fp32
scales, 1.03 bytes a column in place of 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
    as_bits,
    buffers_of,
    end_epoch,
    flag_of_block,
    grid_of,
    load_rows,
    peers_of,
    received,
    region,
    row_of_slot,
    send_rows,
    set_flags,
    tell_count,
    tile_of,
    tile_of_step,
    wait_for_flag,
    whole_words,
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
    unprefixed,
)
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.rows.formats import rounded_columns, store_scale
from moe_ops.kernels.rows.operand import Operand
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.exchange import has_own_rows, opened, sends_quantized

# Programs that send; the others copy to experts, several rows for each that arrives. Fewer leave
# the link idle, more the copies behind.
SENDERS = 32
PACKING_SENDERS = 64  # which quantize what they send, and wait for each block to arrive


def why_not(columns: int, y: Operand) -> str | None:
    """Why rows of so many columns cannot be copied to these on their way; None: they can."""
    if y.scales and (y.scales not in ("fp32", "powers") or columns % 128):
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
def rounded_tile(
    x, element: tl.constexpr, SCALES: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """(columns of tokens, x (TILE, BLOCK_K), as they are stored, their scales (TILE, BLOCK_K /
    128)); twice x where there are none.
    """
    y, scale = x, x
    if SCALES != "":
        y, scale = rounded_columns(tl.reshape(x, (GROUPS, 128)), SCALES, WIDTH, NATIVE)
        y = tl.reshape(y, x.shape).to(element)
        scale = tl.reshape(scale, (x.shape[0], x.shape[1] // 128))
    return y, scale


@triton.jit
def groups_of_step(step, tiles, K, BLOCK_K: tl.constexpr):
    """Groups of 128 columns of the tile of a step (`tile_of_step`)."""
    first = step % tiles % tl.cdiv(K, BLOCK_K) * (BLOCK_K // 128)
    return first + tl.arange(0, BLOCK_K // 128)


@triton.jit
def store_tile(
    y_ptr, scale_ptr, y, scale, rows, k, group, K, size, SCALES: tl.constexpr,
    TOP_K: tl.constexpr,
):  # fmt: skip
    """Columns k of tokens, and the scales of their groups, copied to all rows of the tokens."""
    for j in tl.static_range(TOP_K):
        row = rows[j].to(tl.int64)[:, None]
        inside = (row >= 0) & (k < K)[None, :]
        tl.store(y_ptr + row * K + k[None, :], y, mask=inside)
        if SCALES != "":
            inside = (row >= 0) & (group < K // 128)[None, :]
            store_scale(scale_ptr, scale, row, group[None, :], K // 128, size, inside, SCALES)


@triton.jit
def packed_scales(
    buffer_ptr, peer, row, group, K, ROWS_START: tl.constexpr, PITCH: tl.constexpr
):  # fmt: skip
    """Pointers to the scales of groups, which follow the packed rows of a buffer."""
    scales_ptr = region(buffer_ptr, peer, ROWS_START + K, tl.float32)
    return scales_ptr + row[:, None] * (PITCH // 4) + group[None, :]


@triton.jit
def send_packed(
    x_ptr, buffer_ptr, peers, program, SENDERS, epoch, T, M, K,
    element: tl.constexpr, SCALES: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    NATIVE: tl.constexpr, ROWS_START: tl.constexpr, PITCH: tl.constexpr, R: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The blocks of this rank's rows that a program sends, quantized, to all other ranks."""
    parity = epoch & 1
    blocks = tl.cdiv(T, ROWS)
    tiles = ROWS // TILE * tl.cdiv(K, BLOCK_K)
    steps = tl.cdiv(blocks - program, SENDERS) * tiles
    t, k = tile_of_step(0, tiles, program, SENDERS, K, ROWS, TILE, BLOCK_K)
    x = load_rows(x_ptr, t, K, k, (t < M)[:, None] & (k < K)[None, :])
    for step in range(steps):
        # what is stored after this one is loaded before, so that loads and stores overlap
        t, k = tile_of_step(step + 1, tiles, program, SENDERS, K, ROWS, TILE, BLOCK_K)
        following = load_rows(x_ptr, t, K, k, (t < M)[:, None] & (k < K)[None, :])
        t, k = tile_of_step(step, tiles, program, SENDERS, K, ROWS, TILE, BLOCK_K)
        y, scale = rounded_tile(x, element, SCALES, WIDTH, GROUPS, NATIVE)
        group = groups_of_step(step, tiles, K, BLOCK_K)
        there = (t < M)[:, None]
        for i in tl.static_range(1, R):
            rows_ptr = region(buffer_ptr, peers[i - 1], ROWS_START, element)
            row = row_of_slot(parity, R - 1 - i, t, T, R)
            row_ptrs = rows_ptr + row[:, None] * PITCH + k[None, :]
            tl.store(row_ptrs, y, mask=there & (k < K)[None, :])
            scale_ptrs = packed_scales(buffer_ptr, peers[i - 1], row, group, K, ROWS_START, PITCH)
            inside = there & (group < K // 128)[None, :]
            tl.store(scale_ptrs, scale, mask=inside)
        if step % tiles == tiles - 1:
            tl.debug_barrier()  # before thread 0 sets flags
            block = program + step // tiles * SENDERS
            set_flags(
                buffer_ptr, peers, parity, block, epoch, M, R, BLOCKS, ONE_FENCE=True
            )  # fmt: skip
        x = following


@unprefixed
class PushedFormat(NamedTuple):
    """How rows are quantized."""

    scale: Pointer  # (K / 128, rows) fp32, written, or None
    SCALES: Constant
    WIDTH: Constant
    GROUPS: Constant
    NATIVE: Constant


@arguments
class PushScatter:
    y: Pointer  # (rows, K), written
    quantized: PushedFormat
    x: Pointer  # (M, K)
    rows: Pointer  # (S,) int32
    size: Runtime  # all rows of y
    buffers: Buffers
    M: Runtime
    K: Specialized
    TOP_K: Constant
    PACKED: Constant
    WORD: Constant
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
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    SENDERS,
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    M,
    K,
    TOP_K: tl.constexpr,
    PACKED: tl.constexpr,
    WORD: tl.constexpr,
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
    element: tl.constexpr = y_ptr.dtype.element_ty
    sent: tl.constexpr = element if PACKED else x_ptr.dtype.element_ty
    if SEND and program < SENDERS:
        peers = peers_of(peers_ptr, rank, R)
        if program == 0:
            tell_count(buffer_ptr, peers, parity, epoch, M, R, BLOCKS)
        if PACKED:
            send_packed(
                x_ptr, buffer_ptr, peers, program, SENDERS, epoch, T, M, K, element, SCALES, WIDTH,
                GROUPS, NATIVE, ROWS_START, PITCH, R, BLOCKS, ROWS, TILE, BLOCK_K,
            )  # fmt: skip
        else:
            PARTS: tl.constexpr = WORD // x_ptr.dtype.element_ty.primitive_bitwidth
            send_rows(
                x_ptr, buffer_ptr, peers, program, SENDERS, epoch, T, M, K // PARTS, ROWS_START,
                PITCH // PARTS, R, BLOCKS, ROWS, False, WORD, TILE, BLOCK_K // PARTS,
            )  # fmt: skip
        end_epoch(epochs_ptr + program, epoch)
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
            y, scale = rounded_tile(x, element, SCALES, WIDTH, GROUPS, NATIVE)
            group = groups_of_step(step, tiles, K, BLOCK_K) if SCALES != "" else k
            store_tile(y_ptr, scale_ptr, y, scale, rows, k, group, K, size, SCALES, TOP_K)
            rows = next_rows
            x = following
        received_ptr = region(buffer_ptr, 0, ROWS_START, sent)
        for i in tl.static_range(1, R):
            of_rank = (rank + i) % R * T
            count_ptr = flag_of_block(buffer_ptr, 0, parity, i - 1, BLOCKS, R, BLOCKS)
            count = wait_for_flag(count_ptr, epoch, spins)
            for step in range(steps):
                t, k = tile_of_step(step, tiles, first, stride, K, ROWS, TILE, BLOCK_K)
                rows = rows_of_tokens(rows_ptr, of_rank + t, t < count, TOP_K)
                row = row_of_slot(parity, i - 1, t, T, R)
                row_ptrs = received_ptr + row[:, None] * PITCH + k[None, :]
                group = groups_of_step(step, tiles, K, BLOCK_K) if SCALES != "" else k
                if PACKED:
                    wanted = rows[0] >= 0
                    for j in tl.static_range(1, TOP_K):
                        wanted |= rows[j] >= 0
                    if step % tiles == 0:
                        block = first + step // tiles * stride
                        flag_ptr = flag_of_block(buffer_ptr, 0, parity, i - 1, block, R, BLOCKS)
                        wait_for_flag(flag_ptr, epoch, spins)
                    inside = wanted[:, None] & (k < K)[None, :]
                    y = tl.load(row_ptrs, mask=inside, cache_modifier=".cg")
                    scale_ptrs = packed_scales(buffer_ptr, 0, row, group, K, ROWS_START, PITCH)
                    inside = wanted[:, None] & (group < K // 128)[None, :]
                    scale = tl.load(scale_ptrs, mask=inside, cache_modifier=".cg")
                else:
                    there = (t < count)[:, None] & (k < K)[None, :]
                    bits_ptrs = as_bits(row_ptrs, sent.primitive_bitwidth)
                    (bits,) = received((bits_ptrs,), (there,), spins, 1)
                    x = bits.to(sent, bitcast=True)
                    y, scale = rounded_tile(x, element, SCALES, WIDTH, GROUPS, NATIVE)
                store_tile(y_ptr, scale_ptr, y, scale, rows, k, group, K, size, SCALES, TOP_K)
        end_epoch(epochs_ptr + program, epoch)


def push_scatter(
    y: Operand,  # (rows, K), written
    x: Tensor,  # (M, K), contiguous
    layout: Layout,  # of the pairs of all ranks' tokens
    top_k: int,
    mailbox: Mailbox,
    spins: int,  # after which another rank is given up
    gpu: Gpu,
    packed: bool = False,
    phases: Phases = BOTH,
) -> Launch:
    """The rows of all ranks' pairs, of which each rank has the tokens, quantized if y has scales.
    For operands of which `why_not` is None. `packed`: they travel quantized, through a mailbox of
    rows of `packed_bytes`; y has fp32 scales then.
    """
    (M, K), sent = x.shape, mailbox.layout
    x, word = whole_words(x)
    tile = tile_of(sent, K, MOST_COPIED // x.itemsize)
    rows, senders = (sent.block_rows, PACKING_SENDERS) if packed else (tile.rows, SENDERS)
    buffers = buffers_of(mailbox, spins, 1 if packed else x.itemsize, phases, rows, senders)
    data = y.data if y.scale is None or gpu.native else y.data.view(torch.uint8)
    groups = tile.rows * tile.columns // 128
    args = PushScatter(
        y=data,
        quantized=PushedFormat(y.scale, y.scales, y.width, groups, gpu.native),
        x=x,
        rows=layout.rows,
        size=layout.R,
        buffers=buffers,
        M=M,
        K=K,
        TOP_K=top_k,
        PACKED=packed,
        WORD=8 * word,
        TILE=tile.rows,
        BLOCK_K=tile.columns,
    )
    return Launch(moe_ops_push_scatter, grid_of(sent), args, tile.num_warps, MAX_REGISTERS)


def push_own_rows(a: ExpertsArgs, y: Operand, layout: Layout, gpu: Gpu) -> Launch | None:
    """The kernel of a call that has this rank's tokens alone; None where all are here already."""
    if not has_own_rows(a):
        return None
    sent, top_k = opened(a), a.topk_ids.shape[1]
    x = a.hidden_states.contiguous()
    packed = sends_quantized(a.options.exchange)
    return push_scatter(y, x, layout, top_k, sent.arrivals, sent.spins, gpu, packed)
