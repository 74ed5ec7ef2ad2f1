"""The mainloop of the mixed GEMM on SM90: activations of 16 bits, or in e4m3, times weights of 4
to 8 bits. Imported at first launch only.

Weights are the left operand of `wgmma`, from registers, and tokens the right operand, from shared
memory: each weight is decoded once for all tokens of a block. A producer warp fills a ring buffer
of NUM_STAGES slots by TMA. Consumer warps decode and multiply. Both synchronize through the slots'
mbarriers alone. (If a consumer thread issued the copies, the compiler would put a fence of all
memory accesses into each K tile, which waits for the scales just prefetched.) Depending on the
tile, and with everything included, this takes 1.7 to 2.0 instructions a weight for int4, also with
minima of bf16, 2.3 to 2.7 with zero points if weights are scaled, 2.6 to 2.9 with scales and
minima in two levels, 2.8 to 3.1 for e2m1, 2.0 to 2.5 for prepared e2m1, 2.8 to 3.4 for iq4,
3.8 to 4.2 for other levels, and 3.1 to 3.9 for int5 and int6.

FORMAT and SCALE as in sm80_mma.py; K_CHUNK and the accumulator's order of rows and columns as in
sm90_decode.py.
"""

from moe_ops.kernels.device.blocks import USED, local_expert, unpack_block
from moe_ops.kernels.device.gluon import (
    async_load,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from moe_ops.kernels.device.pdl import gdc_wait
from moe_ops.kernels.mixed_gemm.decode import (
    SUPER,
    factors_above,
    half,
    high_bits,
    is_e2m1,
    runs_of,
)
from moe_ops.kernels.mixed_gemm.levels import is_level, level_unit
from moe_ops.kernels.mixed_gemm.sm90_decode import (
    decode_products,
    decode_weights,
    fragment,
    grouped_layout,
    groups_per_chunk,
    high_layout,
    operand_bits,
    permute_rows,
    scale_layout,
    scale_rows,
    scales_by_row,
    scales_per_element,
    sign_of,
    weight_bits,
    weight_layout,
)

E8M0_SHIFT = gl.constexpr(4294967296.0)  # 2^32, as in sm80_mma.py
E4M3_SHIFT = gl.constexpr(256.0)
INT4_SHIFT = gl.constexpr(2.0**64)
HANDED = gl.constexpr(2)  # tiles of which the producer may be ahead of the consumers


@gluon.constexpr_function
def accumulator_layout(FORMAT, BLOCK_M, NUM_WARPS):
    """Layout of the accumulators."""
    K = 256 // operand_bits(FORMAT)  # columns of one instruction
    return gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, K])


@gluon.jit
def accumulator_rows(LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """(output column within the tile, 1 for its up row or 0) of every row of the accumulator."""
    r = gl.arange(0, BLOCK_N, LAYOUT)
    if GATED:
        return r // 16 * 8 + r % 8, r // 8 % 2
    else:
        return r, r * 0


@gluon.jit
def scale_pointers(
    ptr, offset, stride_n, stride_g, column, I,
    FORMAT: gl.constexpr, SCALE: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    BLOCK_N: gl.constexpr, K_CHUNK: gl.constexpr, SCALE_GROUP: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Pointers (BLOCK_N, GROUPS) to the scales or zero points of the first chunk, for the tile
    whose first output column is `column` of I.

    If an element holds two scales, strides count elements, and GROUPS is half.
    """
    GROUPS: gl.constexpr = groups_per_chunk(K_CHUNK, SCALE_GROUP) // scales_per_element(
        ptr.dtype.element_ty, SCALE
    )
    CHUNK_BYTES: gl.constexpr = K_CHUNK * weight_bits(FORMAT) // 8
    LAYOUT: gl.constexpr = gl.SliceLayout(
        2, grouped_layout(BLOCK_N, CHUNK_BYTES, NUM_WARPS, GROUPS)
    )
    i, up = accumulator_rows(gl.SliceLayout(1, LAYOUT), BLOCK_N, GATED)
    i = gl.minimum(column + i, I - 1)
    row = gl.expand_dims(2 * i + up if INTERLEAVED else i + up * I, 1).to(gl.int64)
    if SCALE == "block":
        row = row // 128
    group = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, LAYOUT)), 0)
    if ptr.dtype.element_ty.primitive_bitwidth == 8:
        ptr = ptr.to(gl.pointer_type(gl.uint8))
    return ptr + offset + (row * stride_n + group * stride_g)


@gluon.jit
def unshifted(acc, FORMAT: gl.constexpr, SCALE: gl.constexpr):
    """Sums of products without the factor that weights were decoded with."""
    if is_e2m1(FORMAT):
        acc *= E8M0_SHIFT if SCALE == "e8m0" else E4M3_SHIFT
    elif is_level(FORMAT):
        acc *= level_unit(FORMAT)
    elif FORMAT == "int4" or high_bits(FORMAT) > 0:
        acc *= INT4_SHIFT
    return acc


@gluon.constexpr_function
def in_two_levels(scale_ptr):
    """Whether scales are codes under factors."""
    return scale_ptr is not None and scale_ptr.dtype.element_ty == gl.int8


@gluon.constexpr_function
def chunks_of_factor(BLOCK_K, K_CHUNK):
    """Chunks for which a factor is loaded: all of its own where K tiles have whole ones, or 1."""
    return SUPER.value // K_CHUNK if BLOCK_K % SUPER.value == 0 else 1


@gluon.jit
def factor_pointers(
    ptr, offset, stride_n, column, I, HAS_ZERO: gl.constexpr,
    FORMAT: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    BLOCK_N: gl.constexpr, K_CHUNK: gl.constexpr, SCALE_GROUP: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Pointers (BLOCK_N,) to the factors (`decode.factors_above`) of the first 256 columns, in the
    threads that have the rows' scales.
    """
    GROUPS: gl.constexpr = groups_per_chunk(K_CHUNK, SCALE_GROUP)
    CHUNK_BYTES: gl.constexpr = K_CHUNK * weight_bits(FORMAT) // 8
    LAYOUT: gl.constexpr = gl.SliceLayout(
        2, grouped_layout(BLOCK_N, CHUNK_BYTES, NUM_WARPS, GROUPS)
    )
    i, up = accumulator_rows(gl.SliceLayout(1, LAYOUT), BLOCK_N, GATED)
    i = gl.minimum(column + i, I - 1)
    row = (2 * i + up if INTERLEAVED else i + up * I).to(gl.int64)
    return factors_above(ptr, offset + row * stride_n, HAS_ZERO)


@gluon.jit
def apply_row_scales(
    acc, scale_ptr, factor_ptr, expert64, row,
    scale_stride_e, scale_stride_n, factor_stride_e, factor_stride_n,
    FORMAT: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """The accumulator times the scales of whole rows or experts."""
    if SCALE == "end":
        scale = gl.load(scale_ptr + expert64 * scale_stride_e + row.to(gl.int64) * scale_stride_n)
        acc *= gl.expand_dims(scale.to(gl.float32), 1)
    if SCALE == "e4m3":
        factor = gl.load(
            factor_ptr + expert64 * factor_stride_e + row.to(gl.int64) * factor_stride_n
        ).to(gl.float32)
        factor = gl.expand_dims(factor, 1)
        acc = acc / factor if is_e2m1(FORMAT) else acc * factor
    return acc


@gluon.jit
def apply_column_scales(acc, scale_ptr, position, first):
    """The accumulator times the scales of the rows of x, if there are any."""
    if scale_ptr is not None:
        scale = gl.load(scale_ptr + position, mask=position >= first, other=0.0)
        acc *= gl.expand_dims(scale, 0)
    return acc


@gluon.jit
def tile_of_table(
    tile, used, index_ptr, tiles_per_block, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """(Expert, first and end position of at most BLOCK_M, tile out of `tiles_per_block`) of a tile
    of the `used` blocks in the table.

    Consecutive tiles have different blocks, because programs of one block would all read the same
    rows of x at the same time. All tiles of GROUP_M blocks come before those of the next blocks,
    so that the L2 keeps the rows of x; 0: of all blocks.
    """
    block = used * 0  # the first one of a group
    blocks = gl.maximum(used, 1)
    if GROUP_M:
        block = tile // (GROUP_M * tiles_per_block) * GROUP_M
        tile -= block * tiles_per_block
        blocks = gl.minimum(gl.maximum(used - block, 1), GROUP_M)
    block_ptr = index_ptr + 4 * (block + tile % blocks)
    e = gl.load(block_ptr, cache_modifier=".cg")
    first = gl.load(block_ptr + 1, cache_modifier=".cg")
    end = gl.load(block_ptr + 2, cache_modifier=".cg")
    return e, first, gl.minimum(end, first + BLOCK_M), tile // blocks


@gluon.jit
def first_tile_of_pair(
    pair, n, programs, ids_ptr, map_ptr, S, E, num_ids, top_k, ids_stride_m, ids_stride_k,
    map_stride, tiles_per_block,
    MAX_PAIRS: gl.constexpr, BLOCK_M: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """What `first_tile` says of the n-th of `programs` programs of one of at most MAX_PAIRS pairs.

    A block has the tiles of the programs of all its pairs, those of its first pair first. So as
    many programs have a tile if all tokens have the same experts as if they have different ones.
    Each warp reads the ids of all pairs, and one reduction computes three counts. Ids are cached
    in L1: otherwise all programs load from the same slice of L2.
    """
    LANES: gl.constexpr = gl.BlockedLayout([MAX_PAIRS // 32], [32], [NUM_WARPS], [0])
    other = gl.arange(0, MAX_PAIRS, LANES)
    e = local_expert(
        ids_ptr, map_ptr, pair, pair < S, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride
    )
    experts = local_expert(
        ids_ptr, map_ptr, other, other < S, E, num_ids, top_k,
        ids_stride_m, ids_stride_k, map_stride,
    )  # fmt: skip
    same = (experts == e).to(gl.int32)
    less = ((experts >= 0) & (experts < e)).to(gl.int32)
    before = gl.where(other < pair, same, 0)
    counts = gl.sum(less + (same << 8) + (before << 16), 0)
    less, same, before = counts & 255, counts >> 8 & 255, counts >> 16
    first = less + before // BLOCK_M * BLOCK_M
    n += before % BLOCK_M * programs
    return (e >= 0) & (n < tiles_per_block), e, first, gl.minimum(less + same, first + BLOCK_M), n


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def tiles_left(index_ptr, S, programs, tiles_per_block, MAX_PAIRS: gl.constexpr):
    """The tiles that no program of `first_tile_of_pair` has, by one warp: (for each of at most
    MAX_PAIRS pairs the block that starts at it (`pack_block`), and the first and end number of its
    tiles; how many blocks have any; how many a block has on average, rounded up).

    Blocks are cached in L1, and not read again: all programs would ask one part of the L2 for
    three numbers of each block.
    """
    LANES: gl.constexpr = gl.BlockedLayout([MAX_PAIRS // 32], [32], [1], [0])
    pair = gl.arange(0, MAX_PAIRS, LANES)
    block = gl.load(index_ptr + pair, mask=pair < S, other=-1)
    _, first, end = unpack_block(block)
    left = gl.maximum(tiles_per_block - programs * (end - first), 0)
    left = gl.where(block >= 0, left, 0)
    numbers = gl.associative_scan(left, 0, add)
    used = gl.sum((left > 0).to(gl.int32), 0)
    average = gl.cdiv(gl.sum(left, 0), gl.maximum(used, 1))
    return block, numbers - left, numbers, used, average


@gluon.jit
def tile_of_left(i, left, tiles_per_block):
    """What `tile_of_table` says of the i-th of the tiles of `tiles_left`; expert -1 for some of
    the used times average numbers. Consecutive ones are of different blocks if these have about
    as many tiles left.
    """
    blocks, begin, end, used, average = left
    tile = i % used * average + i // used
    here = (begin <= tile) & (tile < end)
    end_of_block = gl.sum(gl.where(here, end, 0), 0)
    e, first, end = unpack_block(gl.sum(gl.where(here, blocks, 0), 0))
    return gl.where(end_of_block > 0, e, -1), first, end, tiles_per_block + tile - end_of_block


@gluon.jit
def first_tile(
    index_ptr, ids_ptr, map_ptr, S, E, num_ids, top_k, ids_stride_m, ids_stride_k, map_stride,
    tiles_per_block, GROUP_M: gl.constexpr, MAX_UNSORTED_PAIRS: gl.constexpr,
    BLOCK_M: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """(Whether this program has a tile; what `tile_of_table` says of it)."""
    tile = gl.program_id(0)
    if MAX_UNSORTED_PAIRS:  # the table is yet to be written
        return first_tile_of_pair(
            tile % S, tile // S, gl.num_programs(0) // S, ids_ptr, map_ptr, S, E, num_ids, top_k,
            ids_stride_m, ids_stride_k, map_stride, tiles_per_block,
            MAX_UNSORTED_PAIRS, BLOCK_M, NUM_WARPS,
        )  # fmt: skip
    else:
        used = gl.load(index_ptr + USED, cache_modifier=".cg")
        has_tile = tile < used * tiles_per_block
        tile = gl.where(has_tile, tile, 0)
        e, first, end, n = tile_of_table(tile, used, index_ptr, tiles_per_block, GROUP_M, BLOCK_M)
        return has_tile, e, first, end, n


@gluon.jit
def share_of(n, k_tiles, SPLIT_K: gl.constexpr):
    """First and end K tile of a tile, which has one of SPLIT_K shares of them. None is empty."""
    begin = n % SPLIT_K * gl.cdiv(k_tiles, SPLIT_K)
    return begin, gl.minimum(begin + gl.cdiv(k_tiles, SPLIT_K), k_tiles)


@gluon.jit
def mbarriers(NUMBER: gl.constexpr):
    """So many mbarriers, each for one arrival."""
    found = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(found.index(i), 1)
    return found


@gluon.jit
def number_of(numbers, i, NUM_WARPS: gl.constexpr):
    """A number in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    return gl.max(numbers.index(i).load(LAYOUT), 0)


@gluon.jit
def next_tile(handed, i, NUM_WARPS: gl.constexpr):
    """The i-th tile that the producer hands to the consumers; expert -1 after the last one."""
    numbers, written, read = handed
    slot, phase = i % HANDED, i // HANDED & 1
    mbarrier.wait(written.index(slot), phase)
    e = number_of(numbers, 4 * slot, NUM_WARPS)
    first = number_of(numbers, 4 * slot + 1, NUM_WARPS)
    end = number_of(numbers, 4 * slot + 2, NUM_WARPS)
    n = number_of(numbers, 4 * slot + 3, NUM_WARPS)
    mbarrier.arrive(read.index(slot), count=1)
    return e, first, end, n


@gluon.jit
def hand_tile(handed, i, e, first, end, n):
    """Hand the i-th tile to the consumers, by the one warp of the producer."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers, written, read = handed
    slot, phase = i % HANDED, i // HANDED & 1
    mbarrier.wait(read.index(slot), phase ^ 1)
    zero = gl.full([1], 0, gl.int32, LAYOUT)
    numbers.index(4 * slot).store(zero + e)
    numbers.index(4 * slot + 1).store(zero + first)
    numbers.index(4 * slot + 2).store(zero + end)
    numbers.index(4 * slot + 3).store(zero + n)
    mbarrier.arrive(written.index(slot), count=1)


@gluon.jit
def load_weights(
    w, w_high, w_scales, w_smem, h_smem, s_smem, full, slot, k_tile, pred, e, row, K,
    STAGE_BYTES: gl.constexpr, SCALE_GROUP: gl.constexpr, K_CHUNK: gl.constexpr,
):  # fmt: skip
    """Issue the copies of a K tile's weights, after telling the slot's mbarrier how many bytes to
    expect, those of the tokens included.
    """
    CHUNKS: gl.constexpr = w.block_shape[1]
    at = k_tile * CHUNKS
    if CHUNKS == 1:  # if a row ends in 64 columns, the descriptor has a chunk from every 64th on
        at = gl.where(K % K_CHUNK == 0, at, gl.minimum(2 * at, K * 2 // K_CHUNK - 2))
    mbarrier.expect(full.index(slot), STAGE_BYTES, pred)
    stage = w_smem.index(slot)
    async_load(w, [e, at, 0, row, 0], full.index(slot), stage, pred)
    if w_high is not None:
        async_load(w_high, [e, at, 0, row, 0], full.index(slot), h_smem.index(slot), pred)
    if w_scales is not None:
        stage = s_smem.index(slot)
        row = row // scale_rows(SCALE_GROUP)
        async_load(w_scales, [e, at, 0, row, 0], full.index(slot), stage, pred)


@gluon.jit
def load_tokens(x, x_more, x_smem, more_smem, full, slot, k_tile, pred, first, end):
    """Issue the copies of a K tile of the block's rows, which are the last rows of the box, and of
    those before them (`x_more`). Rows before `first` are out of bounds, and TMA fills them with
    zeros.
    """
    PARTS: gl.constexpr = x.block_shape[0]
    BLOCK_M: gl.constexpr = x.block_shape[1]
    at = [k_tile * PARTS, end - first - BLOCK_M, first, 0]
    async_load(x, at, full.index(slot), x_smem.index(slot), pred)
    if x_more is not None:
        at = [k_tile * PARTS, end - first - BLOCK_M - x_more.block_shape[1], first, 0]
        async_load(x_more, at, full.index(slot), more_smem.index(slot), pred)


@gluon.jit
def advance_slot(slot, phase, NUM_STAGES: gl.constexpr):
    """The next slot of the ring buffer, and the phase of its mbarriers."""
    phase ^= (slot == NUM_STAGES - 1).to(gl.int32)
    return gl.where(slot == NUM_STAGES - 1, 0, slot + 1), phase


@gluon.jit
def slot_before(slot, NUM_STAGES: gl.constexpr):
    """The slot of the ring buffer before this one."""
    return gl.where(slot == 0, NUM_STAGES, slot) - 1


@gluon.jit
def load_tile(
    x, x_more, w, w_high, w_scales, ring, slot, phase, e, first, end, row, k_begin, k_end, K,
    STAGE_BYTES: gl.constexpr, SCALE_GROUP: gl.constexpr, K_CHUNK: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Copy K tiles of a tile into the ring buffer's slots, from `slot` on, as they become empty.
    Returns the next slot, and the phase of its mbarriers.
    """
    x_smem, more_smem, w_smem, h_smem, s_smem, full, empty = ring
    for k_tile in range(k_begin, k_end):
        mbarrier.wait(empty.index(slot), phase)
        load_weights(
            w, w_high, w_scales, w_smem, h_smem, s_smem, full, slot, k_tile, True, e, row, K,
            STAGE_BYTES, SCALE_GROUP, K_CHUNK,
        )  # fmt: skip
        load_tokens(x, x_more, x_smem, more_smem, full, slot, k_tile, True, first, end)
        slot, phase = advance_slot(slot, phase, NUM_STAGES)
    return slot, phase


@gluon.jit
def producer(
    x, x_more, w, w_high, w_scales, ring, handed, index_ptr, num_blocks, taken_ptr, e, first, end,
    n, tiles_per_block, K,
    TILE_ROWS: gl.constexpr, SPLIT_K: gl.constexpr, GROUP_M: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGE_BYTES: gl.constexpr,
    SCALE_GROUP: gl.constexpr, K_CHUNK: gl.constexpr, NUM_STAGES: gl.constexpr,
    MAX_UNSORTED_PAIRS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer warp: fill the ring buffer, with the first weights before gdc_wait, and tokens
    after it. It then takes one tile after the other, as this GEMM's counter in the index workspace
    says, and hands it to the consumers while they still have all of the tile before.

    So short rows cost no time in which nothing is copied. (Programs with fixed tiles end at
    different times.)
    """
    x_smem, more_smem, w_smem, h_smem, s_smem, full, _ = ring
    k_tiles = gl.cdiv(K, BLOCK_K)
    k_begin, k_end = share_of(n, k_tiles, SPLIT_K)
    row = n // SPLIT_K * TILE_ROWS
    for i in gl.static_range(NUM_STAGES):
        load_weights(
            w, w_high, w_scales, w_smem, h_smem, s_smem, full, i, k_begin + i,
            k_begin + i < k_end, e, row, K, STAGE_BYTES, SCALE_GROUP, K_CHUNK,
        )  # fmt: skip
    gdc_wait(PDL)
    for i in gl.static_range(NUM_STAGES):
        load_tokens(
            x, x_more, x_smem, more_smem, full, i, k_begin + i, k_begin + i < k_end, first, end
        )
    loaded = gl.minimum(k_end - k_begin, NUM_STAGES)
    # a slot that is filled for the first time is waited for in the phase before its first one
    slot, phase = loaded % NUM_STAGES, (loaded < NUM_STAGES).to(gl.int32)
    slot, phase = load_tile(
        x, x_more, w, w_high, w_scales, ring, slot, phase, e, first, end, row, k_begin + loaded,
        k_end, K, STAGE_BYTES, SCALE_GROUP, K_CHUNK, NUM_STAGES,
    )  # fmt: skip
    programs = gl.num_programs(0)
    if MAX_UNSORTED_PAIRS:
        left = tiles_left(
            index_ptr, num_blocks, programs // num_blocks, tiles_per_block, MAX_UNSORTED_PAIRS
        )
        number = left[3] * left[4]
    else:
        used = gl.load(index_ptr + USED, cache_modifier=".cg")
        number = used * tiles_per_block - programs
    i = number * 0
    more = number > 0
    while more:
        tile = gl.atomic_add(taken_ptr, 1, sem="relaxed")
        more = tile < number
        if more:
            if MAX_UNSORTED_PAIRS:
                e, first, end, n = tile_of_left(tile, left, tiles_per_block)
            else:
                e, first, end, n = tile_of_table(
                    tile + programs, used, index_ptr, tiles_per_block, GROUP_M, BLOCK_M
                )
            if e >= 0:
                hand_tile(handed, i, e, first, end, n)
                i += 1
                k_begin, k_end = share_of(n, k_tiles, SPLIT_K)
                slot, phase = load_tile(
                    x, x_more, w, w_high, w_scales, ring, slot, phase, e, first, end,
                    n // SPLIT_K * TILE_ROWS, k_begin, k_end, K,
                    STAGE_BYTES, SCALE_GROUP, K_CHUNK, NUM_STAGES,
                )  # fmt: skip
    hand_tile(handed, i, -1, 0, 0, 0)


@gluon.jit
def group_index(chunk, K, K_CHUNK: gl.constexpr, SCALE_GROUP: gl.constexpr):
    """Index of the first group of SCALE_GROUP columns of a chunk. A chunk past the row's end has
    that of the row's last K_CHUNK columns.
    """
    if SCALE_GROUP == 0:
        return 0
    elif SCALE_GROUP < K_CHUNK:
        return gl.minimum(chunk * (K_CHUNK // SCALE_GROUP), (K - K_CHUNK) // SCALE_GROUP)
    else:
        return gl.minimum(chunk, K // K_CHUNK - 1) // (SCALE_GROUP // K_CHUNK)


@gluon.constexpr_function
def load_instruction(dtype):
    """PTX that loads a `dtype` into 32 bits."""
    return f"ld.global.nc.L2::128B.b{dtype.primitive_bitwidth} $0, [$1];"


@gluon.jit
def prefetch_scale(ptrs):
    """Scales or zero points, each in 32 bits.

    If they were loaded as 8 or 16 bits, the compiler would pack them in pairs at the end of the K
    tile, and wait for them there.
    """
    ASSEMBLY: gl.constexpr = load_instruction(ptrs.dtype.element_ty)
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,l", [ptrs], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unpack_scale(t, dtype: gl.constexpr):
    """Prefetched scales or zero points as `dtype`."""
    if dtype.primitive_bitwidth == 8:
        return t.to(gl.uint8).to(dtype, bitcast=True)
    elif dtype.primitive_bitwidth == 16:
        return t.to(gl.uint16).to(dtype, bitcast=True)
    else:
        return t.to(dtype, bitcast=True)


@gluon.constexpr_function
def is_widened(dtype):
    """Whether prefetched scales of `dtype` become fp32 by `widen_scale`."""
    return dtype in (gl.bfloat16, gl.float32)


@gluon.jit
def widen_scale(t, dtype: gl.constexpr):
    """fp32 of prefetched bf16 or fp32 scales. In assembly, so that the compiler does not move it
    past the next prefetch into the same register.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $1, 16;", "=r,r", [t], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "mul.f32 $0, $1, 0f3F800000;", "=r,r", [t], dtype=gl.float32, is_pure=False, pack=1
        )


@gluon.jit
def split_rows(t):
    """(first half of the rows, second half). Each thread has rows of both: no data movement."""
    ROWS: gl.constexpr = t.shape[0] // 2
    return t.reshape((2, ROWS, t.shape[1])).permute((1, 2, 0)).split()


@gluon.jit
def issue_wgmma(
    codes, high, scale, zero, products_ptr, x0, x1, acc,
    GROUPS: gl.constexpr, NUM_WARPS: gl.constexpr, FORMAT: gl.constexpr, SCALE: gl.constexpr,
    PROMOTE: gl.constexpr, HAS_ZERO: gl.constexpr,
):  # fmt: skip
    """Issue the products of a chunk: into new accumulators (PROMOTE), or added to acc. Returns
    them and the two left operands. Of levels products_ptr is `place_of_pairs`.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 32 // operand_bits(FORMAT))
    if FORMAT == "int4_e4m3":
        w0, w1 = decode_products(codes, scale, products_ptr, NUM_WARPS, A)
    else:
        w0, w1 = decode_weights(
            codes, high, scale, zero, products_ptr, GROUPS, NUM_WARPS, FORMAT, SCALE, HAS_ZERO
        )
        w0, w1 = fragment(w0, A), fragment(w1, A)
    d = warpgroup_mma(w0, x0, acc, use_acc=not PROMOTE, is_async=True)
    if weight_bits(FORMAT) == 4:
        d = warpgroup_mma(w1, x1, d, is_async=True)
    return d, w0, w1


@gluon.jit
def issue_more(w0, w1, x0, x1, acc, FORMAT: gl.constexpr):
    """Issue the products of a chunk's left operands with the rows of x that a block has besides
    BLOCK_M, added to acc.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    w0 = gl.convert_layout(w0, A, assert_trivial=True)
    acc = warpgroup_mma(w0, x0, acc, is_async=True)
    if weight_bits(FORMAT) == 4:
        w1 = gl.convert_layout(w1, A, assert_trivial=True)
        acc = warpgroup_mma(w1, x1, acc, is_async=True)
    return acc


@gluon.jit
def accumulate(acc, d, scale, FORMAT: gl.constexpr, PROMOTE: gl.constexpr):
    """acc plus a chunk's sums d times the scales of their rows (PROMOTE); else d, which has acc.
    Of int4_e4m3 weights have the magnitudes of their scales, and sums get the signs.
    """
    if not PROMOTE:
        return d
    else:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        scale = scale.reshape((scale.shape[0],))
        if FORMAT == "int4_e4m3":
            scale = sign_of(scale)
        scale = gl.convert_layout(scale, LAYOUT, assert_trivial=True)
        return acc + d * gl.expand_dims(scale.to(gl.float32), 1)


@gluon.jit
def join_halves(acc0, acc1):
    """The accumulator of all rows, of those of both halves."""
    MMA: gl.constexpr = acc0.type.layout
    acc = gl.join(acc0, acc1).permute((2, 0, 1)).reshape((2 * acc0.shape[0], acc0.shape[1]))
    return gl.convert_layout(acc, MMA, assert_trivial=True)


@gluon.jit
def prefetch_first(
    scale_ptrs, zero_ptrs, factor_ptrs, scale_stride_g, zero_stride_g, k_begin, K,
    HAS_SCALE: gl.constexpr, HAS_ZERO: gl.constexpr, TWO_LEVELS: gl.constexpr, SCALE: gl.constexpr,
    SCALE_GROUP: gl.constexpr, K_CHUNK: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Scales of a tile's first and second chunk, and zero points and factors of these. (Scales
    that are not in the ring buffer are prefetched two chunks ahead.)
    """
    chunk = k_begin * (BLOCK_K // K_CHUNK)
    scale, next_scale = k_begin, k_begin
    if HAS_SCALE:
        S_COLUMNS: gl.constexpr = SCALE_GROUP * scales_per_element(  # columns of an element
            scale_ptrs.dtype.element_ty, SCALE
        )
        scale = prefetch_scale(
            scale_ptrs + group_index(chunk, K, K_CHUNK, S_COLUMNS) * scale_stride_g
        )
        next_scale = prefetch_scale(
            scale_ptrs + group_index(chunk + 1, K, K_CHUNK, S_COLUMNS) * scale_stride_g
        )
    zero, next_zero = scale, next_scale
    if HAS_ZERO:
        zero = prefetch_scale(
            zero_ptrs + group_index(chunk, K, K_CHUNK, SCALE_GROUP) * zero_stride_g
        )
        next_zero = prefetch_scale(
            zero_ptrs + group_index(chunk + 1, K, K_CHUNK, SCALE_GROUP) * zero_stride_g
        )
    factor, next_factor = scale, next_scale
    if TWO_LEVELS:
        ahead: gl.constexpr = chunks_of_factor(BLOCK_K, K_CHUNK)
        factor = prefetch_scale(factor_ptrs + group_index(chunk, K, K_CHUNK, SUPER))
        next_factor = prefetch_scale(factor_ptrs + group_index(chunk + ahead, K, K_CHUNK, SUPER))
    return scale, next_scale, zero, next_zero, factor, next_factor


@gluon.jit
def consume(
    ring, slot, phase, k_begin, k_end, K, scales, scale_ptrs, zero_ptrs, factor_ptrs, products_ptr,
    scale_stride_g, zero_stride_g, HAS_ZERO: gl.constexpr, TWO_LEVELS: gl.constexpr,
    FORMAT: gl.constexpr, SCALE: gl.constexpr, SCALE_GROUP: gl.constexpr, K_CHUNK: gl.constexpr,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, BLOCK_M: gl.constexpr,
    MORE_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    NUM_STAGES: gl.constexpr, NUM_WARPS: gl.constexpr, OVERLAP: gl.constexpr,
    STREAM: gl.constexpr, SEGMENTS: gl.constexpr,
):  # fmt: skip
    """The consumer warps: decode and multiply a tile's chunks in the ring buffer, from `slot` on,
    with the first scales from `prefetch_first`. Returns the next slot, the phase of its mbarriers,
    and w @ x.T (BLOCK_N, BLOCK_M) in fp32, for the BLOCK_M positions before the block's end and,
    with MORE_M, for the positions before these; those before its first one are zero. Rows are in
    the accumulator's order. The caller applies the scales of whole rows.

    SEGMENTS: so many equal parts of the K tiles have sums of their own, which are then added.

    OVERLAP: a chunk is decoded while the one before is multiplied, which takes 32 more registers a
    thread. STREAM: so is the first chunk of a K tile, while the last one of the K tile before is,
    whose slot it then frees. The sums must need no scales, and threads have rows of both halves.
    """
    w_chunks, h_chunks, x_operands, more_operands, s_chunks, full, empty = ring
    MMA: gl.constexpr = accumulator_layout(FORMAT, BLOCK_M, NUM_WARPS)
    CHUNK_BYTES: gl.constexpr = w_chunks.shape[2]
    MMAS: gl.constexpr = K_CHUNK // CHUNK_BYTES  # products of a chunk, each with an operand of x
    WEIGHT: gl.constexpr = weight_layout(BLOCK_N, CHUNK_BYTES, NUM_WARPS, GATED, INTERLEAVED)
    HIGH: gl.constexpr = high_layout(
        BLOCK_N, CHUNK_BYTES // runs_of(FORMAT), runs_of(FORMAT), NUM_WARPS, GATED, INTERLEAVED
    )
    ROWS: gl.constexpr = min(BLOCK_N, 16 * NUM_WARPS)  # rows decoded at a time
    CHUNKS: gl.constexpr = BLOCK_K // K_CHUNK
    GROUPS: gl.constexpr = groups_per_chunk(K_CHUNK, SCALE_GROUP)
    FACTOR_CHUNKS: gl.constexpr = chunks_of_factor(BLOCK_K, K_CHUNK)
    # Each group's finished sums are scaled and added to the total.
    PROMOTE: gl.constexpr = SCALE == "sum" or SCALE == "block" or FORMAT == "int4_e4m3"
    gl.static_assert(not STREAM or (OVERLAP and ROWS < BLOCK_N and not PROMOTE))
    gl.static_assert(not STREAM or NUM_STAGES > 1)  # a slot is freed once the next one is full
    WIDEN: gl.constexpr = is_widened(scale_ptrs.dtype.element_ty) if PROMOTE else False
    # products that may stay in flight: the last chunk's
    PENDING: gl.constexpr = 2 * MMAS if MORE_M else MMAS
    gl.static_assert(MORE_M == 0 or ((ROWS < BLOCK_N) == OVERLAP and not PROMOTE and not STREAM))
    gl.static_assert(MORE_M == 0 or SEGMENTS == 1)
    scale, next_scale, zero, next_zero, factor, next_factor = scales
    if s_chunks is None:
        S_COLUMNS: gl.constexpr = SCALE_GROUP * scales_per_element(  # columns of an element
            scale_ptrs.dtype.element_ty, SCALE
        )
    else:
        S_LAYOUT: gl.constexpr = scale_layout(BLOCK_N, SCALE_GROUP, NUM_WARPS, GATED, INTERLEAVED)
    acc0 = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
    acc1 = acc0  # of the second half of the rows, if threads have rows of both
    total0, total1 = acc0, acc1  # of the segments before
    if MORE_M:
        MMA_MORE: gl.constexpr = accumulator_layout(FORMAT, MORE_M, NUM_WARPS)
        more0 = gl.zeros([ROWS, MORE_M], gl.float32, MMA_MORE)
        more1 = more0
    begin, end = k_begin, k_end
    for segment in range(SEGMENTS):
        if SEGMENTS > 1:
            begin = k_begin + segment * ((k_end - k_begin) // SEGMENTS)
            end = begin + (k_end - k_begin) // SEGMENTS
            acc0 = gl.zeros([ROWS, BLOCK_M], gl.float32, MMA)
            acc1 = acc0
        if STREAM:
            acc1 = warpgroup_mma_init(acc1)  # now on sums of products that may be in flight
            # Without this, ptxas waits for each product: where a loop of no K tiles would end,
            # sums in flight meet zeros.
            gl.assume(begin < end)
        for k_tile in range(begin, end):
            mbarrier.wait(full.index(slot), phase)
            for j in gl.static_range(CHUNKS):
                codes = w_chunks.index(slot * CHUNKS + j).load(WEIGHT)
                codes = permute_rows(codes, GATED, INTERLEAVED)
                high = None
                if h_chunks is not None:
                    high = h_chunks.index(slot * CHUNKS + j).load(HIGH)
                    high = permute_rows(high, GATED, INTERLEAVED)
                operand = (slot * CHUNKS + j) * MMAS
                x0 = x_operands.index(operand).permute((1, 0))
                x1 = x_operands.index(operand + MMAS - 1).permute((1, 0))
                if MORE_M:
                    x2 = more_operands.index(operand).permute((1, 0))
                    x3 = more_operands.index(operand + MMAS - 1).permute((1, 0))
                if s_chunks is not None:
                    s = s_chunks.index(slot * CHUNKS + j).load(S_LAYOUT)
                    s = permute_rows(scales_by_row(s, SCALE_GROUP), GATED, INTERLEAVED)
                elif FORMAT == "int4_e4m3":
                    s = scale
                elif TWO_LEVELS:
                    s = unpack_scale(scale, gl.int8)
                elif WIDEN:
                    s = widen_scale(scale, scale_ptrs.dtype.element_ty)
                else:
                    s = unpack_scale(scale, scale_ptrs.dtype.element_ty)
                z = s
                if HAS_ZERO:
                    z = unpack_scale(zero, gl.int8 if TWO_LEVELS else zero_ptrs.dtype.element_ty)
                if TWO_LEVELS:
                    s = s.to(gl.float32) * gl.expand_dims(half(factor), 1)
                    if HAS_ZERO:
                        z = z.to(gl.float32) * gl.expand_dims(half(factor >> 16), 1)
                if ROWS == BLOCK_N:
                    d, w0, w1 = issue_wgmma(
                        codes, high, s, z, products_ptr, x0, x1, acc0,
                        GROUPS, NUM_WARPS, FORMAT, SCALE, PROMOTE, HAS_ZERO,
                    )  # fmt: skip
                    if MORE_M:
                        more0 = issue_more(w0, w1, x2, x3, more0, FORMAT)
                        acc0, more0 = warpgroup_mma_wait(0, [d, more0])
                    elif not OVERLAP:
                        d = warpgroup_mma_wait(0, [d])
                        acc0 = accumulate(acc0, d, s, FORMAT, PROMOTE)
                    elif not PROMOTE:
                        acc0 = warpgroup_mma_wait(PENDING, [d])
                        pending, pending_scale = acc0, s
                    else:
                        if j > 0:
                            pending = warpgroup_mma_wait(PENDING, [pending])
                            acc0 = accumulate(acc0, pending, pending_scale, FORMAT, PROMOTE)
                        pending, pending_scale = d, s
                else:
                    codes0, codes1 = split_rows(codes)
                    high0, high1 = None, None
                    if h_chunks is not None:
                        high0, high1 = split_rows(high)
                    s0, s1 = split_rows(s)
                    z0, z1 = split_rows(z)
                    d0, a0, a1 = issue_wgmma(
                        codes0, high0, s0, z0, products_ptr, x0, x1, acc0,
                        GROUPS, NUM_WARPS, FORMAT, SCALE, PROMOTE, HAS_ZERO,
                    )  # fmt: skip
                    if MORE_M:
                        more0 = issue_more(a0, a1, x2, x3, more0, FORMAT)
                    if not OVERLAP:
                        d0 = warpgroup_mma_wait(0, [d0])
                        acc0 = accumulate(acc0, d0, s0, FORMAT, PROMOTE)
                    elif STREAM:
                        # Before the next ones are decoded: across the end of a loop, ptxas does
                        # not keep registers apart that products in flight still read.
                        acc1 = warpgroup_mma_wait(PENDING, [acc1])
                        if j == 0:
                            previous = slot_before(slot, NUM_STAGES)
                            mbarrier.arrive(empty.index(previous), count=1, pred=k_tile > k_begin)
                    elif j > 0:
                        if MORE_M:
                            pending, more1 = warpgroup_mma_wait(PENDING, [pending, more1])
                        else:
                            pending = warpgroup_mma_wait(PENDING, [pending])
                        acc1 = accumulate(acc1, pending, pending_scale, FORMAT, PROMOTE)
                    d1, w0, w1 = issue_wgmma(
                        codes1, high1, s1, z1, products_ptr, x0, x1, acc1,
                        GROUPS, NUM_WARPS, FORMAT, SCALE, PROMOTE, HAS_ZERO,
                    )  # fmt: skip
                    if MORE_M:
                        more1 = issue_more(w0, w1, x2, x3, more1, FORMAT)
                    if OVERLAP:
                        if MORE_M:
                            d0, more0 = warpgroup_mma_wait(PENDING, [d0, more0])
                        else:
                            d0 = warpgroup_mma_wait(PENDING, [d0])
                        acc0 = accumulate(acc0, d0, s0, FORMAT, PROMOTE)
                    else:
                        d1 = warpgroup_mma_wait(0, [d1])
                        acc1 = accumulate(acc1, d1, s1, FORMAT, PROMOTE)
                    if STREAM:
                        acc1 = d1
                    else:
                        pending, pending_scale = d1, s1
                chunk = k_tile * CHUNKS + j + 2
                scale, zero = next_scale, next_zero
                if s_chunks is None:  # past the row's end, the last scales are loaded again
                    next_scale = prefetch_scale(
                        scale_ptrs + group_index(chunk, K, K_CHUNK, S_COLUMNS) * scale_stride_g
                    )
                if TWO_LEVELS and (j + 1) % FACTOR_CHUNKS == 0:
                    factor = next_factor
                    next_factor = prefetch_scale(
                        factor_ptrs + group_index(chunk - 1 + FACTOR_CHUNKS, K, K_CHUNK, SUPER)
                    )
                if HAS_ZERO:
                    next_zero = prefetch_scale(
                        zero_ptrs + group_index(chunk, K, K_CHUNK, SCALE_GROUP) * zero_stride_g
                    )
            if OVERLAP and not STREAM:
                if MORE_M:
                    pending, more1 = warpgroup_mma_wait(0, [pending, more1])
                else:
                    pending = warpgroup_mma_wait(0, [pending])
                if ROWS == BLOCK_N:
                    acc0 = accumulate(acc0, pending, pending_scale, FORMAT, PROMOTE)
                else:
                    acc1 = accumulate(acc1, pending, pending_scale, FORMAT, PROMOTE)
            if not STREAM:
                mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = advance_slot(slot, phase, NUM_STAGES)
        if STREAM:
            acc1 = warpgroup_mma_wait(0, [acc1])
        if SEGMENTS > 1:  # as sm90_mma.py adds them
            total0 += unshifted(acc0, FORMAT, SCALE)
            if ROWS < BLOCK_N:
                total1 += unshifted(acc1, FORMAT, SCALE)
    if STREAM:
        mbarrier.arrive(empty.index(slot_before(slot, NUM_STAGES)), count=1)
    acc = acc0
    if SEGMENTS > 1:
        acc, acc1 = total0, total1
    if ROWS < BLOCK_N:
        acc = join_halves(acc, acc1)
    more = acc
    if MORE_M:
        more = join_halves(more0, more1) if ROWS < BLOCK_N else more0
    if SEGMENTS > 1:
        return slot, phase, acc, more
    else:
        return slot, phase, unshifted(acc, FORMAT, SCALE), unshifted(more, FORMAT, SCALE)
