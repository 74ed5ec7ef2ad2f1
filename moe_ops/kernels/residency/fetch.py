"""The kernel that copies the rows of arriving experts from pinned host memory. Imported at first
launch only.

An expert is a row of each of several pieces: tensors of its weights, one after the other in one
region of host memory, and likewise in the bank of slots. A piece is copied in words of 16 bytes
where its rows are whole ones, else byte by byte: such pieces are scales, or biases, of odd sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.device.pdl import gdc_wait
from moe_ops.kernels.launch import Constant, Gpu, Launch, Pointer, arguments, kernel
from moe_ops.kernels.residency.table import Table

NUM_WARPS = 8
WORDS = 4096  # int32 of a step: four loads of 16 bytes in flight for each thread


@arguments
class Fetch:
    bank: Pointer  # int32, written: the rows of S slots
    table: Table
    host: Pointer  # int32, pinned: the rows of E experts
    pieces: Pointer  # (NUM_PIECES, 3) int64: where a piece begins in host and bank, bytes of a row
    NUM_PIECES: Constant
    BLOCK_S: Constant
    WORDS: Constant
    PDL: Constant


@kernel(Fetch)
def moe_ops_fetch_experts(
    bank_ptr,
    slot_of_ptr,
    expert_of_ptr,
    order_ptr,
    wanted_ptr,
    served_ptr,
    arrivals_ptr,
    num_arrivals_ptr,
    counters_ptr,
    E,
    S,
    host_ptr,
    pieces_ptr,
    NUM_PIECES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the rows of the arrivals, and enter them in the table. Grid: any number of programs,
    which take steps of all pieces in turn. Waits for the kernel that admits.
    """
    # No gdc_launch_dependents: what follows may read weights and ids before it waits.
    gdc_wait(PDL)
    count = tl.load(num_arrivals_ptr)
    if count == 0:
        return
    program, programs = tl.program_id(0), tl.num_programs(0)
    if program == 0:
        j = tl.arange(0, BLOCK_S)
        expert = tl.load(arrivals_ptr + 2 * j, mask=j < count, other=0)
        slot = tl.load(arrivals_ptr + 2 * j + 1, mask=j < count, other=0)
        before = tl.load(expert_of_ptr + slot, mask=j < count, other=-1)
        tl.debug_barrier()  # all threads have loaded what is written now
        tl.store(slot_of_ptr + before, -1, mask=before >= 0)
        tl.store(expert_of_ptr + slot, expert, mask=j < count)
        tl.store(slot_of_ptr + expert, slot, mask=j < count)
        tl.store(served_ptr + expert, slot, mask=j < count)
    first = program  # of the steps of a piece
    for i in range(NUM_PIECES):
        source = tl.load(pieces_ptr + 3 * i)
        target = tl.load(pieces_ptr + 3 * i + 1)
        row = tl.load(pieces_ptr + 3 * i + 2)
        whole_words = row % 16 == 0
        size = tl.where(whole_words, 4 * WORDS, WORDS)  # bytes of a step
        steps_of_row = tl.cdiv(row, size).to(tl.int32)
        steps = count * steps_of_row
        for step in range(first, steps, programs):
            arrival = arrivals_ptr + 2 * (step // steps_of_row)
            expert, slot = tl.load(arrival).to(tl.int64), tl.load(arrival + 1).to(tl.int64)
            begin = (step % steps_of_row) * WORDS
            from_row, to_row = source + expert * row, target + slot * row
            if whole_words:
                # the compiler is told of 16 bytes, for loads and stores of so many
                word = tl.multiple_of(begin, 16) + tl.arange(0, WORDS)
                inside = word < tl.multiple_of((row // 4).to(tl.int32), 4)
                from_ptr = host_ptr + tl.multiple_of(from_row // 4, 4)
                to_ptr = bank_ptr + tl.multiple_of(to_row // 4, 4)
                tl.store(to_ptr + word, tl.load(from_ptr + word, mask=inside), mask=inside)
            else:
                byte = begin + tl.arange(0, WORDS)
                from_byte = host_ptr.to(tl.pointer_type(tl.uint8)) + from_row
                to_byte = bank_ptr.to(tl.pointer_type(tl.uint8)) + to_row
                value = tl.load(from_byte + byte, mask=byte < row)
                tl.store(to_byte + byte, value, mask=byte < row)
        first -= steps % programs
        first += tl.where(first < 0, programs, 0)


def fetch(
    table: Table,
    host: Tensor,  # int32
    bank: Tensor,  # int32, written
    pieces: Tensor,  # (pieces, 3) int64
    gpu: Gpu,
    programs: int,
) -> Launch:
    """Copy the rows of the experts that `admit` lets in."""
    args = Fetch(
        bank=bank,
        table=table,
        host=host,
        pieces=pieces,
        NUM_PIECES=pieces.shape[0],
        BLOCK_S=max(triton.next_power_of_2(table.S), 32),
        WORDS=WORDS,
        PDL=gpu.pdl,
    )
    return Launch(moe_ops_fetch_experts, (programs, 1, 1), args, NUM_WARPS)
