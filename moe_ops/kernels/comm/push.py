"""Rows written into the memory of other ranks: tokens to all, partial outputs to the ranks of
their tokens, which may be sums that are made on the way. Imported at first launch only.

R ranks, of which this one is `rank`; T = max_num_tokens, the most rows of one rank; M rows that
this rank has; K columns of a row. Buffers are laid out as `moe_ops.meta.symmetric` says. Those of
all ranks are in this GPU's address space, `peers` bytes from this rank's own.

**Blocks.** The first SENDERS programs send blocks of ROWS rows, the others receive them. Since
both take programs of their own, the link is busy while what has arrived is copied or added up,
and two of them share a multiprocessor. The first of all tells how many rows this rank has.

**Rows of floats are their own flags.** Where nothing was sent, a buffer is all ones (EMPTY). No
float that travels is: a NaN of all ones loses its sign. A program that receives looks at its part
of a slot until no float there is all ones, takes it, and leaves all ones behind. So it needs no
order of memory between what it reads: each float is there or not. A sender never waits for its
stores to arrive, as it would between rows and a flag, and the link is never idle. Ids and weights
of experts travel like this, too, -1 as -2.

**Rows of other bits have a flag after each block,** the epoch and M. All threads store their
part of a block; a barrier of the program orders these stores before what thread 0 does next;
thread 0 sets the flag with release semantics at system scope, which are cumulative: who sees the
flag sees the stores of all threads. (Or, of the flags of several receivers, all after one fence of
thread 0.) Receiver: thread 0 reads the flag with acquire semantics at system scope; Triton hands
the value to the other threads through shared memory and a barrier, which orders their loads after
it. The rows that they load do not pass through L1 (`.cg`), which may hold what a set had two
epochs ago. Flags are never reset: each epoch has its own.

**Epochs.** A program counts its launches in `epochs`, in the GPU's own memory, so a CUDA graph
that is replayed goes on counting. All launches on one buffer have the same grid, on all ranks, so
all counters agree.

**Reuse.** The sets of slots alternate. A rank that sends epoch e + 2 overwrites what it sent in
epoch e. It has ended epoch e + 1, in which it took what every other rank had sent in that epoch,
or its count. That rank sent it in its own launch of epoch e + 1, which began after its launch of
epoch e had ended, with all that it read and emptied: both are on one stream, and neither is
launched early (no programmatic dependent launch). So no rank overwrites what another still reads,
nor a flag that another still waits for, and what it writes is not emptied: an epoch's rows are
taken in its own launch, all of them, also those that nobody wants. (Between launches it is their
order on a stream that orders memory, since looks have no acquire semantics.)

**Progress.** Programs that receive wait for programs of other GPUs that send, which wait for none.
These come first in a launch of at most PROGRAMS programs, and those that do not fit on a GPU at
once, as on one of less than 128 multiprocessors, are receivers, which start as others end.

Looks are counted. After `spins` of them a device assertion ends the process' work on the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels import launch
from moe_ops.kernels.comm.mailbox import PROGRAMS, Mailbox, has_flags
from moe_ops.kernels.device.blocks import local_expert
from moe_ops.kernels.device.interpreter import INTERPRET
from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Runtime,
    Specialized,
    arguments,
    kernel,
    unprefixed,
)
from moe_ops.meta.symmetric import SymmetricLayout
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.exchange import opened

THREADS = 256  # of a program at most
# Programs that send, at most. Few keep the link busy, and those that receive need the more of a
# launch's 256: from 24 to 48 make no difference, more are slower.
SENDERS = 40
# Of sums that are made on the way, which read what they send from several rows.
ADDING_SENDERS = 88
MOST_COPIED = 16384  # bytes that a program holds at a time
MOST_ROUTED = 1024  # pairs whose ids it does
# of one expert's outputs: with as many, 256 threads have those of eight experts in flight
_MOST_SUMMED_BYTES = 8192
# of a thread, so that two programs share a multiprocessor: those that receive must not be left to
# wait until all have sent
MAX_REGISTERS = 128


class Phases(NamedTuple):
    """What a launch does. GPUs do both at once; a test that plays all ranks lets all of them send
    before one waits.
    """

    send: bool
    receive: bool


BOTH = Phases(True, True)
LATE = tl.constexpr(
    "moe_ops symmetric_memory: another rank of the group ended, or did not call the layer within "
    "the timeout of the dispatcher"
)


@unprefixed
class Buffers(NamedTuple):
    """A mailbox, as kernels take it."""

    buffer: Pointer
    peers: Pointer
    epochs: Pointer
    rank: Runtime
    spins: Runtime
    T: Specialized
    META_START: Constant
    ROWS_START: Constant
    PITCH: Constant  # elements from one row of a buffer to the next
    R: Constant
    BLOCKS: Constant  # that have flags
    ROWS: Constant  # of a block
    SENDERS: Runtime  # programs
    SEND: Constant
    RECEIVE: Constant


def buffers_of(
    mailbox: Mailbox,
    spins: int,
    itemsize: int,
    phases: Phases,
    rows: int,  # of a block
    senders: int,  # at most
) -> Buffers:
    layout = mailbox.layout
    return Buffers(
        buffer=mailbox.buffers[mailbox.rank],
        peers=mailbox.peers,
        epochs=mailbox.epochs,
        rank=mailbox.rank,
        spins=spins,
        T=layout.max_num_tokens,
        META_START=layout.meta_start,
        ROWS_START=layout.rows_start,
        PITCH=layout.pitch // itemsize,
        R=layout.group_size,
        BLOCKS=layout.blocks,
        ROWS=rows,
        SENDERS=min(layout.blocks, senders, PROGRAMS // 2),
        SEND=phases.send,
        RECEIVE=phases.receive,
    )


def grid_of(layout: SymmetricLayout) -> tuple[int, int, int]:
    """Of every launch on a mailbox."""
    return min(2 * layout.blocks, PROGRAMS), 1, 1


def whole_words(x: Tensor) -> tuple[Tensor, int]:
    """(Rows, bytes that are stored and looked at together): two 16-bit floats, where rows have
    pairs of them. That follows from their shape alone, since all ranks must have it alike.
    """
    if x.itemsize != 2 or x.shape[1] % 2:
        return x, x.itemsize
    return x.clone() if x.data_ptr() % 4 else x, 4


class PushTile(NamedTuple):
    """Rows and columns that a program holds at a time, both powers of two."""

    rows: int
    columns: int

    @property
    def num_warps(self) -> int:
        return 8 if self.rows * self.columns > 2048 else 4


def tile_of(layout: SymmetricLayout, columns: int, most: int) -> PushTile:
    """The tile of a block, of at most `most` elements: whole rows, where they fit."""
    width = min(triton.next_power_of_2(columns), most)
    rows = max(1, min(layout.block_rows, most // width))
    return PushTile(rows, max(width, THREADS // rows))  # see `received`


def _most_added(group_size: int) -> int:
    """As many elements as two programs of a multiprocessor have registers for, from all ranks."""
    return (
        8192 if group_size == 2 else 4096 if group_size <= 4 else 1024 if group_size <= 8 else 512
    )


@triton.jit
def peers_of(peers_ptr, rank, R: tl.constexpr):
    """Bytes from this rank's buffer to those of the R - 1 others, of the next rank first. Loaded
    once: each would keep what is stored behind it waiting.
    """
    peers = ()
    for i in tl.static_range(1, R):
        # From an address alone, Triton would not know how pointers are aligned, and copy two
        # bytes at a time.
        peers += (tl.multiple_of(tl.load(peers_ptr + (rank + i) % R), 16),)  # type: ignore[assignment]
    return peers


@triton.jit
def peer_after(peers, after, R: tl.constexpr):
    """That of the rank so many after this one."""
    peer = tl.cast(0, tl.int64)
    for i in tl.static_range(1, R):
        peer = tl.where(after == i, peers[i - 1], peer)
    return peer


@triton.jit
def region(buffer_ptr, peer, start, element: tl.constexpr):
    """Pointer to a region of the buffer that is `peer` bytes from this rank's."""
    return (buffer_ptr + peer + start).to(tl.pointer_type(element), bitcast=True)


@triton.jit
def flag_of_block(buffer_ptr, peer, parity, slot, block, R: tl.constexpr, BLOCKS: tl.constexpr):
    """Pointer to a flag in a buffer; that of block BLOCKS is the count."""
    index = (parity * (R - 1) + slot) * (BLOCKS + 1) + block
    return region(buffer_ptr, peer, 0, tl.int64) + index


@triton.jit
def as_bits(ptr, WIDTH: tl.constexpr):
    """The pointer, to integers of as many bits."""
    if WIDTH == 8:
        return ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    elif WIDTH == 16:
        return ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    elif WIDTH == 32:
        return ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        return ptr.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def filled(bits, WIDTH: tl.constexpr):
    """Bits of floats of WIDTH bits without any float that is all ones, which says that nothing is
    there: such a NaN loses its sign.
    """
    WHOLE: tl.constexpr = bits.dtype.primitive_bitwidth
    if WIDTH == WHOLE:
        return tl.where(bits == -1, 2 ** (WHOLE - 1) - 1, bits)
    else:  # two in a word
        bits = tl.where((bits & 0xFFFF) == 0xFFFF, bits ^ 0x8000, bits)
        return tl.where(bits >> 16 == -1, bits ^ -2147483648, bits)


@triton.jit
def look(ptrs, inside, N: tl.constexpr):
    """(N tiles of bits, whether any of them is not there yet)."""
    found = ()
    empty = tl.zeros(inside[0].shape, tl.int32)
    for i in tl.static_range(N):
        bits = tl.load(ptrs[i], mask=inside[i], other=0, volatile=True)
        empty |= (bits == -1).to(tl.int32)
        found += (bits,)  # type: ignore[assignment]
    return found, tl.max(empty)


@triton.jit
def received(ptrs, inside, spins, N: tl.constexpr):
    """N tiles of bits that others send, waited for; nothing is there any more afterwards.

    Each has at least as many elements as a program has threads, so that one thread alone loads an
    element, looks at it and stores it.
    """
    found, empty = look(ptrs, inside, N)
    while (empty != 0) & (spins > 0):
        found, empty = look(ptrs, inside, N)
        spins -= 2  # it takes about as long as two looks at a flag
    tl.device_assert(empty == 0, LATE)
    for i in tl.static_range(N):
        tl.store(ptrs[i], tl.full(found[i].shape, -1, found[i].dtype), mask=inside[i])
    return found


@triton.jit
def end_epoch(epoch_ptr, epoch):
    tl.debug_barrier()  # all threads have loaded the last one
    tl.store(epoch_ptr, epoch)


@triton.jit
def row_of_slot(parity, slot, row, T, R: tl.constexpr):
    """Index of a row among those of all slots."""
    return ((parity * (R - 1) + slot) * T + row).to(tl.int64)


# A store by thread 0, after what it has seen: other threads' stores before a barrier, too.
_STORE = """
{
.reg .pred first;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
FENCE
@first st.relaxed.sys.global.b64 [$1], $2;
mov.b32 $0, thread;
}
"""
FENCE_AND_STORE = tl.constexpr(_STORE.replace("FENCE", "@first fence.acq_rel.sys;"))
STORE = tl.constexpr(_STORE.replace("FENCE", ""))


@triton.jit
def set_flags(
    buffer_ptr, peers, parity, block, epoch, count, R: tl.constexpr, BLOCKS: tl.constexpr,
    ONE_FENCE: tl.constexpr,
):  # fmt: skip
    """Tell all receivers that a block is there; count: rows of this rank. ONE_FENCE serves the
    flags of several receivers, where a release of each has a fence of its own.
    """
    flag = (epoch.to(tl.int64) << 32) | count.to(tl.int64)
    for i in tl.static_range(1, R):
        flag_ptr = flag_of_block(buffer_ptr, peers[i - 1], parity, R - 1 - i, block, R, BLOCKS)
        if INTERPRET or R == 2 or not ONE_FENCE:
            tl.atomic_xchg(flag_ptr, flag, sem="release", scope="sys")
        else:
            address = flag_ptr.to(tl.int64)
            tl.inline_asm_elementwise(
                FENCE_AND_STORE if i == 1 else STORE, "=r,l,l,~{memory}", [address, flag],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def tell_count(buffer_ptr, peers, parity, epoch, count, R: tl.constexpr, BLOCKS: tl.constexpr):
    """Tell all receivers how many rows this rank has."""
    flag = (epoch.to(tl.int64) << 32) | count.to(tl.int64)
    for i in tl.static_range(1, R):
        flag_ptr = flag_of_block(buffer_ptr, peers[i - 1], parity, R - 1 - i, BLOCKS, R, BLOCKS)
        tl.atomic_xchg(flag_ptr, flag, sem="relaxed", scope="sys")


@triton.jit
def wait_for_flag(flag_ptr, epoch, spins):
    """Wait until a flag of this epoch is set; the number of rows of its sender."""
    flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while ((flag >> 32).to(tl.int32) != epoch) & (spins > 0):
        flag = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        spins -= 1
    tl.device_assert((flag >> 32).to(tl.int32) == epoch, LATE)
    return flag.to(tl.int32)


@triton.jit
def routed_rows(ids_ptr, weights_ptr, t, M, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr):
    """Ids and weights of this rank's rows t; -1 and 0 from row M on."""
    j = tl.arange(0, BLOCK_TOP_K)[None, :]
    there = (t < M)[:, None] & (j < TOP_K)
    at = t.to(tl.int64)[:, None] * TOP_K + j
    ids = tl.load(ids_ptr + at, mask=there, other=-1)
    weights = tl.load(weights_ptr + at, mask=there, other=0.0).to(tl.float32)
    # ids that int32 lacks must not wrap to others
    return tl.minimum(tl.maximum(ids, -1), 2147483647).to(tl.int32), weights


@triton.jit
def send_routing(
    ids_ptr, weights_ptr, buffer_ptr, peers, program, SENDERS, parity, T, M,
    META_START: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """A program's part of this rank's ids and weights, to all other ranks."""
    j = tl.arange(0, BLOCK_TOP_K)[None, :]
    for start in range(program * TOKENS, M, SENDERS * TOKENS):
        t = start + tl.arange(0, TOKENS)
        there = (t < M)[:, None] & (j < TOP_K)
        ids, weights = routed_rows(ids_ptr, weights_ptr, t, M, TOP_K, BLOCK_TOP_K)
        ids = tl.where(ids == -1, -2, ids)
        bits = filled(weights.to(tl.int32, bitcast=True), 32)
        for i in tl.static_range(1, R):
            meta_ptr = region(buffer_ptr, peers[i - 1], META_START, tl.int32)
            row = row_of_slot(parity, R - 1 - i, t, T, R)
            meta_ptrs = meta_ptr + row[:, None] * (2 * TOP_K) + j
            tl.store(meta_ptrs, ids, mask=there)
            tl.store(meta_ptrs + TOP_K, bits, mask=there)


@triton.jit
def receive_routing(
    out_ids_ptr, out_weights_ptr, buffer_ptr, r, slot, program, PROGRAMS, parity, T, count, spins,
    META_START: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """A program's part of the ids and weights of rank r, which has `count` rows."""
    meta_ptr = region(buffer_ptr, 0, META_START, tl.int32)
    j = tl.arange(0, BLOCK_TOP_K)[None, :]
    for start in range(program * TOKENS, T, PROGRAMS * TOKENS):
        t = start + tl.arange(0, TOKENS)
        there = (t < count)[:, None] & (j < TOP_K)
        row = row_of_slot(parity, slot, t, T, R)
        meta_ptrs = meta_ptr + row[:, None] * (2 * TOP_K) + j
        ids, bits = received((meta_ptrs, meta_ptrs + TOP_K), (there, there), spins, 2)
        ids = tl.where(there, tl.maximum(ids, -1), -1)
        weights = bits.to(tl.float32, bitcast=True)
        store_routed(
            out_ids_ptr, out_weights_ptr, ids, weights, r, t, T, TOP_K, BLOCK_TOP_K
        )  # fmt: skip


@triton.jit
def store_routed(
    out_ids_ptr, out_weights_ptr, ids, weights, r, t, T, TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):  # fmt: skip
    """Ids and weights of rows t of rank r, to the outputs."""
    j = tl.arange(0, BLOCK_TOP_K)[None, :]
    inside = (t < T)[:, None] & (j < TOP_K)
    at = (r * T + t).to(tl.int64)[:, None] * TOP_K + j
    tl.store(out_ids_ptr + at, ids, mask=inside)
    tl.store(out_weights_ptr + at, weights, mask=inside)


@triton.jit
def tile_of_step(
    step, tiles, first, stride, K, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Rows t and columns k of a tile: a program with the blocks first, first + stride and so on
    takes `tiles` steps for each.
    """
    number, chunks = step % tiles, tl.cdiv(K, BLOCK_K)
    block = first + step // tiles * stride
    t = block * ROWS + number // chunks % (ROWS // TILE) * TILE + tl.arange(0, TILE)
    return t, number % chunks * BLOCK_K + tl.arange(0, BLOCK_K)


@triton.jit
def load_rows(x_ptr, row, K, k, there):
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * K + k[None, :], mask=there, other=0.0)


@triton.jit
def send_rows(
    x_ptr, buffer_ptr, peers, program, SENDERS, epoch, T, M, K, ROWS_START: tl.constexpr,
    PITCH: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    FLAGS: tl.constexpr, WORD: tl.constexpr, TILE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The blocks of this rank's rows that a program sends, to all other ranks."""
    parity = epoch & 1
    tiles = ROWS // TILE * tl.cdiv(K, BLOCK_K)
    WIDTH: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    x_ptr = as_bits(x_ptr, WORD)
    element: tl.constexpr = x_ptr.dtype.element_ty
    steps = tl.cdiv(tl.cdiv(T, ROWS) - program, SENDERS) * tiles
    t, k = tile_of_step(0, tiles, program, SENDERS, K, ROWS, TILE, BLOCK_K)
    x = load_rows(x_ptr, t, K, k, (t < M)[:, None] & (k < K)[None, :])
    for step in range(steps):
        # what is stored after this one is loaded before, so that loads and stores overlap
        t, k = tile_of_step(step + 1, tiles, program, SENDERS, K, ROWS, TILE, BLOCK_K)
        following = load_rows(x_ptr, t, K, k, (t < M)[:, None] & (k < K)[None, :])
        t, k = tile_of_step(step, tiles, program, SENDERS, K, ROWS, TILE, BLOCK_K)
        bits = x if FLAGS else filled(x, WIDTH)
        for i in tl.static_range(1, R):
            rows_ptr = region(buffer_ptr, peers[i - 1], ROWS_START, element)
            row = row_of_slot(parity, R - 1 - i, t, T, R)
            there = (t < M)[:, None] & (k < K)[None, :]
            tl.store(rows_ptr + row[:, None] * PITCH + k[None, :], bits, mask=there)
        if FLAGS and step % tiles == tiles - 1:
            tl.debug_barrier()  # before thread 0 sets flags
            # One fence for all ranks serves few tokens, a fence for each many of them.
            set_flags(
                buffer_ptr, peers, parity, program + step // tiles * SENDERS, epoch, M, R, BLOCKS,
                ONE_FENCE=ROWS == 1,
            )  # fmt: skip
        x = following


@unprefixed
class Routed(NamedTuple):
    """Ids and weights that travel with rows, or none: TOP_K is 0, and pointers are None."""

    out_ids: Pointer  # (R * T, TOP_K) int32, written
    out_weights: Pointer  # (R * T, TOP_K) fp32, written
    ids: Pointer  # (M, TOP_K), any integers
    weights: Pointer  # (M, TOP_K), any floats
    TOP_K: Constant
    BLOCK_TOP_K: Constant
    TOKENS: Constant  # of a tile of ids


@arguments
class PushRows:
    out: Pointer  # (R * T, K), written
    x: Pointer  # (M, K)
    routed: Routed
    buffers: Buffers
    M: Runtime
    K: Specialized
    FLAGS: Constant
    WORD: Constant
    TILE: Constant
    BLOCK_K: Constant


@kernel(PushRows, asserts=True)
def moe_ops_push_rows(
    out_ptr,
    x_ptr,
    out_ids_ptr,
    out_weights_ptr,
    ids_ptr,
    weights_ptr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
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
    FLAGS: tl.constexpr,
    WORD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[r * T + t] = row t of rank r, zero from its number of rows on; ids are -1 there.
    Programs that receive copy this rank's own rows, too, before they wait for the others'.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr + program) + 1
    parity = epoch & 1
    tiles = ROWS // TILE * tl.cdiv(K, BLOCK_K)
    if SEND and program < SENDERS:
        peers = peers_of(peers_ptr, rank, R)
        if program == 0:
            tell_count(buffer_ptr, peers, parity, epoch, M, R, BLOCKS)
        if TOP_K > 0:
            send_routing(
                ids_ptr, weights_ptr, buffer_ptr, peers, program, SENDERS, parity, T, M,
                META_START, R, TOP_K, BLOCK_TOP_K, TOKENS,
            )  # fmt: skip
        send_rows(
            x_ptr, buffer_ptr, peers, program, SENDERS, epoch, T, M, K, ROWS_START, PITCH, R,
            BLOCKS, ROWS, FLAGS, WORD, TILE, BLOCK_K,
        )  # fmt: skip
        end_epoch(epochs_ptr + program, epoch)
    if RECEIVE and program >= SENDERS:
        first, stride = program - SENDERS, programs - SENDERS
        steps = tl.cdiv(tl.cdiv(T, ROWS) - first, stride) * tiles
        from_ptr, to_ptr = as_bits(x_ptr, WORD), as_bits(out_ptr, WORD)
        for step in range(steps):
            t, k = tile_of_step(step, tiles, first, stride, K, ROWS, TILE, BLOCK_K)
            x = load_rows(from_ptr, t, K, k, (t < M)[:, None] & (k < K)[None, :])
            to_ptrs = to_ptr + (rank * T + t).to(tl.int64)[:, None] * K + k[None, :]
            tl.store(to_ptrs, x, mask=(t < T)[:, None] & (k < K)[None, :])
        if TOP_K > 0:
            for start in range(first * TOKENS, T, stride * TOKENS):
                t = start + tl.arange(0, TOKENS)
                ids, weights = routed_rows(ids_ptr, weights_ptr, t, M, TOP_K, BLOCK_TOP_K)
                store_routed(
                    out_ids_ptr, out_weights_ptr, ids, weights, rank, t, T, TOP_K, BLOCK_TOP_K
                )  # fmt: skip
        from_ptr = region(buffer_ptr, 0, ROWS_START, to_ptr.dtype.element_ty)
        for i in tl.static_range(1, R):
            peer = (rank + i) % R
            count_ptr = flag_of_block(buffer_ptr, 0, parity, i - 1, BLOCKS, R, BLOCKS)
            count = wait_for_flag(count_ptr, epoch, spins)
            if TOP_K > 0:
                receive_routing(
                    out_ids_ptr, out_weights_ptr, buffer_ptr, peer, i - 1, first, stride, parity,
                    T, count, spins, META_START, R, TOP_K, BLOCK_TOP_K, TOKENS,
                )  # fmt: skip
            for step in range(steps):
                t, k = tile_of_step(step, tiles, first, stride, K, ROWS, TILE, BLOCK_K)
                row = row_of_slot(parity, i - 1, t, T, R)
                row_ptrs = from_ptr + row[:, None] * PITCH + k[None, :]
                there = (t < count)[:, None] & (k < K)[None, :]
                if FLAGS:
                    if step % tiles == 0:
                        block = first + step // tiles * stride
                        flag_ptr = flag_of_block(buffer_ptr, 0, parity, i - 1, block, R, BLOCKS)
                        wait_for_flag(flag_ptr, epoch, spins)
                    bits = tl.load(row_ptrs, mask=there, other=0, cache_modifier=".cg")
                else:
                    (bits,) = received((row_ptrs,), (there,), spins, 1)
                to_ptrs = to_ptr + (peer * T + t).to(tl.int64)[:, None] * K + k[None, :]
                tl.store(to_ptrs, bits, mask=(t < T)[:, None] & (k < K)[None, :])
        end_epoch(epochs_ptr + program, epoch)


def push_rows(
    out: Tensor,  # (R * T, K), contiguous, written
    out_ids: Tensor | None,  # (R * T, top_k) int32, contiguous, written
    out_weights: Tensor | None,  # (R * T, top_k) fp32, contiguous, written
    x: Tensor,  # (M, K), contiguous
    topk_ids: Tensor | None,  # (M, top_k), contiguous
    topk_weights: Tensor | None,  # (M, top_k), contiguous
    mailbox: Mailbox,
    spins: int,  # after which another rank is given up
    phases: Phases = BOTH,
) -> Launch:
    """Rows of all ranks, with the ids and weights of their experts if given."""
    layout, M, flags = mailbox.layout, x.shape[0], has_flags(x.dtype)
    x, word = whole_words(x)
    K = x.shape[1] * x.itemsize // word
    tile = tile_of(layout, K, MOST_COPIED // word)
    width = max(triton.next_power_of_2(layout.top_k), 1)
    rows, senders = (layout.block_rows, PROGRAMS // 2) if flags else (tile.rows, SENDERS)
    args = PushRows(
        out=out,
        x=x,
        routed=Routed(
            out_ids=out_ids,
            out_weights=out_weights,
            ids=topk_ids,
            weights=topk_weights,
            TOP_K=layout.top_k,
            BLOCK_TOP_K=width,
            TOKENS=max(MOST_ROUTED // width, 1),
        ),
        buffers=buffers_of(mailbox, spins, word, phases, rows, senders),
        M=M,
        K=K,
        FLAGS=flags,
        WORD=8 * word,
        TILE=tile.rows,
        BLOCK_K=tile.columns,
    )
    return Launch(moe_ops_push_rows, grid_of(layout), args, tile.num_warps)


@unprefixed
class Pairs(NamedTuple):
    """Pairs whose rows are weighed and added up as they are sent, or none: TOP_K is 0."""

    # (R * T * TOP_K,) int32 row of each pair, -1 if its expert is not here. None: rows are in the
    # order of pairs, and ids and map say whose expert is here.
    rows: Pointer
    ids: Pointer  # (R * T, TOP_K)
    map: Pointer  # (num_ids,) global id -> local id, or None
    E: Runtime
    num_ids: Runtime
    ids_stride_m: Runtime
    ids_stride_k: Runtime
    map_stride: Runtime
    weights: Pointer  # (R * T, TOP_K), or None
    weights_stride_m: Runtime
    weights_stride_k: Runtime
    TOP_K: Constant
    SPLIT_K: Constant  # parts of each row, (SPLIT_K, R * T * TOP_K, K)


NO_PAIRS = Pairs(None, None, None, 0, 0, 0, 0, 0, None, 0, 0, 0, 1)


@arguments
class PushSums:
    out: Pointer  # (M, K), written
    x: Pointer  # (R * T, K), or rows of pairs
    pairs: Pairs
    buffers: Buffers
    M: Runtime
    K: Specialized
    TILE: Constant
    BLOCK_K: Constant


@triton.jit
def share_of_tokens(
    x_ptr, rows_ptr, ids_ptr, map_ptr, E, num_ids, ids_stride_m, ids_stride_k, map_stride,
    weights_ptr, weights_stride_m, weights_stride_k, t, there, k, K, split_stride,
    element: tl.constexpr, TOP_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """This rank's share of the outputs of tokens t: a row of x, or the sum of a token's pairs as
    kernels/rows/combine.py adds it up. 0 for tokens that are not there (TILE,).
    """
    if TOP_K == 0:
        return load_rows(x_ptr, t, K, k, there[:, None] & (k < K)[None, :])
    else:
        total = tl.zeros((t.shape[0], k.shape[0]), tl.float32)
        for j in tl.static_range(TOP_K):
            pair = t * TOP_K + j
            if rows_ptr is not None:
                row = tl.load(rows_ptr + pair, mask=there, other=-1)
            else:
                e = local_expert(
                    ids_ptr, map_ptr, pair, there, E, num_ids, TOP_K,
                    ids_stride_m, ids_stride_k, map_stride,
                )  # fmt: skip
                row = tl.where(e >= 0, pair, -1)
            here = row >= 0
            y_ptrs = x_ptr + row.to(tl.int64)[:, None] * K + k[None, :]
            inside = here[:, None] & (k < K)[None, :]
            y = tl.load(y_ptrs, mask=inside, other=0.0).to(tl.float32)
            for _ in tl.static_range(1, SPLIT_K):
                y_ptrs += split_stride
                y += tl.load(y_ptrs, mask=inside, other=0.0).to(tl.float32)
            if weights_ptr is not None:
                weight_ptrs = weights_ptr + t.to(tl.int64) * weights_stride_m
                weight = tl.load(weight_ptrs + j * weights_stride_k, mask=here, other=0.0)
                weight = tl.broadcast_to(weight.to(tl.float32)[:, None], y.shape)
                total = tl.fma(y, weight, total)
            else:
                total += y
        return (total + 0.0).to(element)  # where products vanish at -0, the sum is +0


@kernel(PushSums, asserts=True)
def moe_ops_push_sums(
    out_ptr,
    x_ptr,
    rows_ptr,
    ids_ptr,
    map_ptr,
    E,
    num_ids,
    ids_stride_m,
    ids_stride_k,
    map_stride,
    weights_ptr,
    weights_stride_m,
    weights_stride_k,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
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
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t] = sum over ranks of their shares of token rank * T + t, each rounded to out's dtype,
    in fp32, in the order of ranks, rounded once. Programs that receive compute this rank's own
    share before they wait for the others'.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs_ptr + program) + 1
    parity = epoch & 1
    blocks = tl.cdiv(T, ROWS)
    tiles = ROWS // TILE * tl.cdiv(K, BLOCK_K)
    element: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = element.primitive_bitwidth
    bits_type: tl.constexpr = as_bits(out_ptr, WIDTH).dtype.element_ty
    split_stride = tl.cast(R * T, tl.int64) * TOP_K * K  # T = 1 is a constant
    if SEND and program < SENDERS:
        to_all = (R - 1) * tiles  # steps of a block: one rank's tiles after another's
        steps = tl.cdiv(blocks - program, SENDERS) * to_all
        peers = peers_of(peers_ptr, rank, R)
        x = tl.zeros((TILE, BLOCK_K), element)
        for step in range(steps + 1 if R > 1 else 0):
            # what is stored after this one is loaded before, so that loads and stores overlap
            t, k = tile_of_step(step, to_all, program, SENDERS, K, ROWS, TILE, BLOCK_K)
            following = share_of_tokens(
                x_ptr, rows_ptr, ids_ptr, map_ptr, E, num_ids, ids_stride_m, ids_stride_k,
                map_stride, weights_ptr, weights_stride_m, weights_stride_k,
                (rank + 1 + step % to_all // tiles) % R * T + t, t < tl.where(step < steps, T, 0),
                k, K, split_stride, element, TOP_K, SPLIT_K,
            )  # fmt: skip
            if step > 0:
                last = step - 1
                t, k = tile_of_step(last, to_all, program, SENDERS, K, ROWS, TILE, BLOCK_K)
                after = 1 + last % to_all // tiles
                peer = peer_after(peers, after, R)
                rows_ptrs = region(buffer_ptr, peer, ROWS_START, bits_type)
                rows_ptrs += row_of_slot(parity, R - 1 - after, t, T, R)[:, None] * PITCH
                bits = filled(x.to(bits_type, bitcast=True), WIDTH)
                tl.store(rows_ptrs + k[None, :], bits, mask=(t < T)[:, None] & (k < K)[None, :])
            x = following
        end_epoch(epochs_ptr + program, epoch)
    if RECEIVE and program >= SENDERS:
        received_ptr = region(buffer_ptr, 0, ROWS_START, bits_type)
        for block in range(program - SENDERS, blocks, programs - SENDERS):
            for number in range(tiles):
                t, k = tile_of_step(number, tiles, block, 0, K, ROWS, TILE, BLOCK_K)
                own = share_of_tokens(
                    x_ptr, rows_ptr, ids_ptr, map_ptr, E, num_ids, ids_stride_m, ids_stride_k,
                    map_stride, weights_ptr, weights_stride_m, weights_stride_k, rank * T + t,
                    t < M, k, K, split_stride, element, TOP_K, SPLIT_K,
                )  # fmt: skip
                total = tl.zeros((TILE, BLOCK_K), tl.float32)
                if R > 1:
                    ptrs, there = (), ()
                    for i in tl.static_range(R - 1):  # of the others, in their order
                        after = (i + (i >= rank).to(tl.int32) - rank + R) % R
                        row = row_of_slot(parity, after - 1, t, T, R)
                        ptrs += (received_ptr + row[:, None] * PITCH + k[None, :],)  # type: ignore[assignment]
                        # all rows that were sent, see "Reuse" above
                        there += ((t < T)[:, None] & (k < K)[None, :],)  # type: ignore[assignment]
                    arrived = received(ptrs, there, spins, R - 1)
                    for i in tl.static_range(R - 1):
                        total = tl.where(i == rank, total + own.to(tl.float32), total)
                        total += arrived[i].to(element, bitcast=True).to(tl.float32)
                total = tl.where(rank == R - 1, total + own.to(tl.float32), total)
                tl.store(
                    out_ptr + t.to(tl.int64)[:, None] * K + k[None, :],
                    total.to(element),
                    mask=(t < M)[:, None] & (k < K)[None, :],
                )
        end_epoch(epochs_ptr + program, epoch)


def push_sums(
    out: Tensor,  # (M, K), contiguous, written
    x: Tensor,  # (R * T, K), contiguous, or the rows of pairs
    mailbox: Mailbox,
    spins: int,  # after which another rank is given up
    phases: Phases = BOTH,
    pairs: Pairs = NO_PAIRS,
) -> Launch:
    """The sums over all ranks of the rows of this one, or of the weighted sums of its pairs."""
    layout, (M, K) = mailbox.layout, out.shape
    most, num_warps, senders = _most_added(layout.group_size), None, SENDERS
    if pairs.TOP_K:
        senders = ADDING_SENDERS
        most = most if layout.group_size == 2 else most // 2
        # so that threads hold four elements at least, where there are up to eight ranks
        num_warps = 8 if layout.group_size <= 4 else 4
        most = min(most, _MOST_SUMMED_BYTES // x.itemsize)
    tile = tile_of(layout, K, most)
    args = PushSums(
        out=out,
        x=x,
        pairs=pairs,
        buffers=buffers_of(mailbox, spins, out.itemsize, phases, tile.rows, senders),
        M=M,
        K=K,
        TILE=tile.rows,
        BLOCK_K=tile.columns,
    )
    grid = grid_of(layout)
    # Sums of parts spill 23 to 114 of a thread's registers with so few. They are of few pairs,
    # whose programs mostly have a multiprocessor each.
    alone = pairs.SPLIT_K > 1 and grid[0] <= launch.gpu(out.get_device()).multiprocessors
    most_registers = None if alone else MAX_REGISTERS
    return Launch(moe_ops_push_sums, grid, args, num_warps or tile.num_warps, most_registers)


def pairs_of(
    ids: Tensor,  # (R * T, top_k)
    expert_map: Tensor | None,
    num_experts: int,  # here
    rows: Tensor | None,  # (R * T * top_k,) int32: see `Pairs`
    weights: Tensor | None,  # (R * T, top_k)
    split_k: int = 1,
) -> Pairs:
    """The Pairs of all ranks' tokens; ids are left out where rows say what they would."""
    known, map_stride = num_experts, 0
    if expert_map is not None:
        known, map_stride = expert_map.shape[0], expert_map.stride(0)
    return Pairs(
        rows=rows,
        ids=ids if rows is None else None,
        map=expert_map if rows is None else None,
        E=num_experts,
        num_ids=known,
        ids_stride_m=ids.stride(0),
        ids_stride_k=ids.stride(1),
        map_stride=map_stride,
        weights=weights,
        weights_stride_m=0 if weights is None else weights.stride(0),
        weights_stride_k=0 if weights is None else weights.stride(1),
        TOP_K=ids.shape[1],
        SPLIT_K=split_k,
    )


def sum_ranks(a: ExpertsArgs, y: Tensor, rows: Tensor | None, split_k: int = 1) -> Launch:
    """The last kernel of a call with an exchange: each rank's weighted sums of y, the rows of
    pairs, added up over ranks.
    """
    exchange = opened(a)
    weights = None if a.options.router_weight_on_input else a.topk_weights
    pairs = pairs_of(a.topk_ids, a.expert_map, a.w2.shape[0], rows, weights, split_k)
    out = a.out[: exchange.mailbox.layout.max_num_tokens]
    return push_sums(out, y, exchange.mailbox, exchange.spins, pairs=pairs)
