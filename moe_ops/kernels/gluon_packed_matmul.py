"""The product of 16-bit activations with weights of 4 and 8 bits on SM90. Imported at first launch only.

Weights are the left operand of `wgmma` and reach it from registers, tokens the right one from shared memory: a weight is
decoded once for all tokens of a block. The copy engine fills a ring of STAGES tiles at the request of a warp of its own:
those that decode meet it in barriers of the ring alone. (A thread of them that asked itself would need the compiler's
fence of all memory accesses in each step, which waits for the scales just asked for.) By tile, all included, a weight
of int4 takes 1.7 to 2.0 instructions, with zero points 2.3 to 2.7, one of e2m1 2.8 to 3.1, prepared 2.0 to 2.5.

FORMAT and SCALE as in triton_packed_matmul.py; U, pieces and the product's order of rows and columns as in
gluon_packed_operands.py.
"""

from moe_ops.kernels.device.gluon import (
    async_load,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from moe_ops.kernels.gluon_packed_operands import (
    bits_of,
    decoded,
    fragment,
    grouped_layout,
    groups_of,
    in_order,
    scale_layout,
    scale_rows,
    scales_in_order,
    scales_of,
    weight_layout,
)
from moe_ops.kernels.triton_packed_operands import is_e2m1
from moe_ops.kernels.triton_routing import local_expert, wait

E8M0_SHIFT = gl.constexpr(4294967296.0)  # 2^32, as in triton_packed_matmul.py
E4M3_SHIFT = gl.constexpr(256.0)
INT4_SHIFT = gl.constexpr(2.0**64)


@gluon.jit
def product_row(LAYOUT: gl.constexpr, WN: gl.constexpr, GATED: gl.constexpr):
    """(column of the tile, whether its up row) of every row of the product."""
    r = gl.arange(0, WN, LAYOUT)
    if GATED:
        return r // 16 * 8 + r % 8, r // 8 % 2
    else:
        return r, r * 0


@gluon.jit
def first_scales(
    ptr, offset, stride_n, stride_k, column, I,
    FORMAT: gl.constexpr, SCALE: gl.constexpr, GATED: gl.constexpr, INTERLEAVED: gl.constexpr,
    WN: gl.constexpr, U: gl.constexpr, G: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Pointers (WN, GROUPS) to scales or zero points of the first piece, of the tile from `column` of I on.

    Where a number is two scales, strides are of numbers, and GROUPS is half.
    """
    GROUPS: gl.constexpr = groups_of(U, G) // scales_of(ptr.dtype.element_ty, SCALE)
    BYTES: gl.constexpr = U * bits_of(FORMAT) // 8
    PAIRS: gl.constexpr = gl.SliceLayout(2, grouped_layout(WN, BYTES, WARPS, GROUPS))
    i, up = product_row(gl.SliceLayout(1, PAIRS), WN, GATED)
    i = gl.minimum(column + i, I - 1)
    row = gl.expand_dims(2 * i + up if INTERLEAVED else i + up * I, 1).to(gl.int64)
    if SCALE == "block":
        row = row // 128
    group = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, PAIRS)), 0)
    if ptr.dtype.element_ty.primitive_bitwidth == 8:
        ptr = ptr.to(gl.pointer_type(gl.uint8))
    return ptr + offset + (row * stride_n + group * stride_k)


@gluon.jit
def finish(
    acc, scale_ptr, factor_ptr, e64, row, stride_se, stride_sn, stride_fe, stride_fn,
    FORMAT: gl.constexpr, SCALE: gl.constexpr,
):  # fmt: skip
    """Sums times what whole rows or experts are scaled by."""
    if SCALE == "end":
        own = gl.load(scale_ptr + e64 * stride_se + row.to(gl.int64) * stride_sn)
        acc *= gl.expand_dims(own.to(gl.float32), 1)
    if SCALE == "e4m3":
        factor = gl.load(factor_ptr + e64 * stride_fe + row.to(gl.int64) * stride_fn).to(
            gl.float32
        )
        if FORMAT == "int4":
            acc *= gl.expand_dims(factor, 1)
        else:
            acc /= gl.expand_dims(factor, 1)
    return acc


@gluon.jit
def block_of(
    p, ids_ptr, map_ptr, S, E, num_ids, top_k, stride_im, stride_ik, stride_map,
    PAIRS: gl.constexpr, HAS_MAP: gl.constexpr, BM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(whether pair p opens a block; its expert, first position, end position) of at most PAIRS pairs.

    Of an expert's pairs, in their order, every BM-th opens one. Each warp looks at all pairs; one sum has three numbers.
    Ids come through L1: past it, all programs ask one part of L2, and Qwen3 at M = 8 takes 61 us in mxfp4 for 51.
    """
    LANES: gl.constexpr = gl.BlockedLayout([PAIRS // 32], [32], [WARPS], [0])
    other = gl.arange(0, PAIRS, LANES)
    e = local_expert(
        ids_ptr, map_ptr, p, p < S, E, num_ids, top_k, stride_im, stride_ik, stride_map, HAS_MAP
    )
    experts = local_expert(
        ids_ptr,
        map_ptr,
        other,
        other < S,
        E,
        num_ids,
        top_k,
        stride_im,
        stride_ik,
        stride_map,
        HAS_MAP,
    )
    same = (experts == e).to(gl.int32)
    less = ((experts >= 0) & (experts < e)).to(gl.int32)
    before = gl.where(other < p, same, 0)
    counts = gl.sum(less + (same << 8) + (before << 16), 0)
    less, same, before = counts & 255, counts >> 8 & 255, counts >> 16
    return (e >= 0) & (before % BM == 0), e, less + before, less + same


@gluon.jit
def tile_at(
    index_ptr, ids_ptr, map_ptr, num_blocks, S, E, num_ids, top_k, stride_im, stride_ik, stride_map,
    across, steps, SPLIT: gl.constexpr, PAIRS: gl.constexpr, HAS_MAP: gl.constexpr, BM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """(whether the program has a tile; its expert, first position and end of at most BM, tile of rows, part, first step and
    end of the steps, shared by SPLIT parts).

    Blocks take turns: side by side, tiles of one block would all read the same rows of x at a time. (Mixtral's GEMM1 of
    64 tokens took 216 us so, and 182 in turns; programs that took one tile after the other were no faster.)
    """
    tile = gl.program_id(0)
    if PAIRS:
        here, e, first, last = block_of(
            tile % S, ids_ptr, map_ptr, S, E, num_ids, top_k, stride_im, stride_ik, stride_map,
            PAIRS, HAS_MAP, BM, WARPS,
        )  # fmt: skip
        n = tile // S
    else:
        used = gl.load(index_ptr + 3, cache_modifier=".cg")
        blocks = gl.maximum(used, 1)
        n = tile // blocks
        here = tile < used * across
        slot = index_ptr + 4 * gl.where(here, tile % blocks, 0)
        e = gl.load(slot, cache_modifier=".cg")
        first = gl.load(slot + 1, cache_modifier=".cg")
        last = gl.load(slot + 2, cache_modifier=".cg")
    part = n % SPLIT
    begin = part * gl.cdiv(steps, SPLIT)
    end = gl.minimum(begin + gl.cdiv(steps, SPLIT), steps)
    return here, e, first, gl.minimum(last, first + BM), n // SPLIT, part, begin, end


@gluon.jit
def fill_weights(
    w, scales, w_smem, s_smem, full, slot, i, wanted, e, row, K, SIZE: gl.constexpr, G: gl.constexpr, U: gl.constexpr
):  # fmt: skip
    """Ask for the weights of step i where they are wanted, and tell its barrier of everything to come."""
    PIECES: gl.constexpr = w.block_shape[1]
    at = i * PIECES
    if PIECES == 1:  # where 64 columns remain, pieces are described from every 64th on
        at = gl.where(K % U == 0, at, gl.minimum(2 * at, K * 2 // U - 2))
    mbarrier.expect(full.index(slot), SIZE, wanted)
    to = w_smem.index(slot)
    async_load(w, [e, at, 0, row, 0], full.index(slot), to, wanted)
    if scales is not None:
        to = s_smem.index(slot)
        row = row // scale_rows(G)
        async_load(scales, [e, at, 0, row, 0], full.index(slot), to, wanted)


@gluon.jit
def fill_rows(x, x_smem, full, slot, i, wanted, first, last):
    """Ask for the rows of step i, the block's last ones. Those before them, of no row, the copy engine fills with zeros."""
    PARTS: gl.constexpr = x.block_shape[0]
    BM: gl.constexpr = x.block_shape[1]
    at = [i * PARTS, last - first - BM, first, 0]
    async_load(x, at, full.index(slot), x_smem.index(slot), wanted)


@gluon.jit
def following(slot, phase, STAGES: gl.constexpr):
    """The next place of the ring, and whether the round of it is an odd one."""
    phase ^= (slot == STAGES - 1).to(gl.int32)
    return gl.where(slot == STAGES - 1, 0, slot + 1), phase


@gluon.jit
def fill(
    x, w, scales, x_smem, w_smem, s_smem, full, empty, first, last, e, row, begin, end, K,
    SIZE: gl.constexpr, G: gl.constexpr, U: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A warp of its own: fill the ring."""
    for i in gl.static_range(STAGES):
        fill_weights(
            w, scales, w_smem, s_smem, full, i, begin + i, begin + i < end, e, row, K, SIZE, G, U
        )
    wait(DEPENDENT)
    for i in gl.static_range(STAGES):
        fill_rows(x, x_smem, full, i, begin + i, begin + i < end, first, last)
    slot, phase = begin * 0, begin * 0
    for step in range(begin + STAGES, end):
        mbarrier.wait(empty.index(slot), phase)
        fill_weights(w, scales, w_smem, s_smem, full, slot, step, True, e, row, K, SIZE, G, U)
        fill_rows(x, x_smem, full, slot, step, True, first, last)
        slot, phase = following(slot, phase, STAGES)


@gluon.jit
def group_at(piece, K, U: gl.constexpr, G: gl.constexpr):
    """First group of G columns of a piece; of the row's last U columns for pieces that pass its end."""
    if G == 0:
        return 0
    elif G < U:
        return gl.minimum(piece * (U // G), (K - U) // G)
    else:
        return gl.minimum(piece, K // U - 1) // (G // U)


@gluon.constexpr_function
def load_of(dtype):
    return f"ld.global.nc.L2::128B.b{dtype.primitive_bitwidth} $0, [$1];"


@gluon.jit
def asked(ptrs):
    """Scales or zero points, in 32 bits each.

    What is loaded as of fewer the compiler packs in pairs where the step ends, and waits for it there.
    """
    ASSEMBLY: gl.constexpr = load_of(ptrs.dtype.element_ty)
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=r,l", [ptrs], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrived(t, dtype: gl.constexpr):
    """What was asked for as what it is."""
    if dtype.primitive_bitwidth == 8:
        return t.to(gl.uint8).to(dtype, bitcast=True)
    elif dtype.primitive_bitwidth == 16:
        return t.to(gl.uint16).to(dtype, bitcast=True)
    else:
        return t.to(dtype, bitcast=True)


@gluon.constexpr_function
def widens(dtype):
    return dtype in (gl.bfloat16, gl.float32)


@gluon.jit
def widened(t, dtype: gl.constexpr):
    """fp32 of bf16 or fp32 that was asked for, here and now: its register is to be loaded anew before it is used."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $1, 16;", "=r,r", [t], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "mul.f32 $0, $1, 0f3F800000;", "=r,r", [t], dtype=gl.float32, is_pure=False, pack=1
        )


@gluon.jit
def halves(t):
    """The first and the second half of the rows, which a thread has of both. Nothing moves."""
    ROWS: gl.constexpr = t.shape[0] // 2
    return t.reshape((2, ROWS, t.shape[1])).permute((1, 2, 0)).split()


@gluon.jit
def started(
    p, s, zero, x0, x1, acc,
    GROUPS: gl.constexpr, WARPS: gl.constexpr, FORMAT: gl.constexpr, SCALE: gl.constexpr,
    SUM: gl.constexpr, HAS_ZERO: gl.constexpr,
):  # fmt: skip
    """A piece's product on its way: alone where sums are scaled (SUM), else on top of acc."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    w0, w1 = decoded(p, s, zero, GROUPS, WARPS, FORMAT, SCALE, HAS_ZERO)
    d = warpgroup_mma(fragment(w0, A), x0, acc, use_acc=not SUM, is_async=True)
    if bits_of(FORMAT) == 4:
        d = warpgroup_mma(fragment(w1, A), x1, d, is_async=True)
    return d


@gluon.jit
def added(acc, d, s, SCALE: gl.constexpr, SUM: gl.constexpr):
    """acc and a piece's sum d times the scales of its rows; d where it is on top of acc already."""
    if not SUM:
        return d
    else:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        s = gl.convert_layout(s.reshape((s.shape[0],)), LAYOUT, assert_trivial=True)
        if SCALE == "e4m3":
            s = s.to(gl.float8e4nv, bitcast=True)
        return acc + d * gl.expand_dims(s.to(gl.float32), 1)


@gluon.jit
def sums(
    w_pieces, x_halves, s_pieces, full, empty, begin, end, K, scale_ptrs, zero_ptrs, stride_sk, stride_zk,
    FORMAT: gl.constexpr, SCALE: gl.constexpr, G: gl.constexpr, U: gl.constexpr,
    GATED: gl.constexpr, INTERLEAVED: gl.constexpr, BM: gl.constexpr, WN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Decode and multiply what is in the ring: sums of the first and of the second half of the rows.

    OVERLAP: what was decoded last is multiplied while more is decoded, at 32 registers more a thread.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    BYTES: gl.constexpr = w_pieces.shape[2]
    HALVES: gl.constexpr = U // BYTES
    WEIGHT: gl.constexpr = weight_layout(WN, BYTES, WARPS, GATED, INTERLEAVED)
    ROWS: gl.constexpr = min(WN, 16 * WARPS)  # decoded at a time
    PIECES: gl.constexpr = BK // U
    GROUPS: gl.constexpr = groups_of(U, G)
    # a group's finished sum is scaled; of int4, e4m3 scales like all others
    SUM: gl.constexpr = (
        SCALE == "sum" or SCALE == "block" or (FORMAT == "int4" and SCALE == "e4m3")
    )
    HAS_ZERO: gl.constexpr = zero_ptrs is not None
    WIDENED: gl.constexpr = widens(scale_ptrs.dtype.element_ty) if SUM else False
    ASKED: gl.constexpr = HALVES  # products on their way that may stay so: the last piece's
    # Scales that are not in the ring are asked for two pieces ahead, and one does for those past the end.
    piece = begin * PIECES
    if s_pieces is None:
        S_COLUMNS: gl.constexpr = G * scales_of(scale_ptrs.dtype.element_ty, SCALE)  # of a number
        s = asked(scale_ptrs + group_at(piece, K, U, S_COLUMNS) * stride_sk)
        soon = asked(scale_ptrs + group_at(piece + 1, K, U, S_COLUMNS) * stride_sk)
    else:
        S_LAYOUT: gl.constexpr = scale_layout(WN, G, WARPS, GATED, INTERLEAVED)
        s, soon = begin, begin
    zero, soon_zero = s, s
    if HAS_ZERO:
        zero = asked(zero_ptrs + group_at(piece, K, U, G) * stride_zk)
        soon_zero = asked(zero_ptrs + group_at(piece + 1, K, U, G) * stride_zk)
    acc = gl.zeros([ROWS, BM], gl.float32, MMA)
    more = acc  # of the second half of the rows, where a thread has rows of both
    slot, phase = begin * 0, begin * 0
    for i in range(begin, end):
        mbarrier.wait(full.index(slot), phase)
        for j in gl.static_range(PIECES):
            p = w_pieces.index(slot * PIECES + j).load(WEIGHT)
            p = in_order(p, GATED, INTERLEAVED)
            part = (slot * PIECES + j) * HALVES
            x0 = x_halves.index(part).permute((1, 0))
            x1 = x_halves.index(part + HALVES - 1).permute((1, 0))
            if s_pieces is not None:
                now = s_pieces.index(slot * PIECES + j).load(S_LAYOUT)
                now = in_order(scales_in_order(now, G), GATED, INTERLEAVED)
            elif WIDENED:
                now = widened(s, scale_ptrs.dtype.element_ty)
            else:
                now = arrived(s, scale_ptrs.dtype.element_ty)
            zero_now = now
            if HAS_ZERO:
                zero_now = arrived(zero, zero_ptrs.dtype.element_ty)
            if ROWS == WN:
                d = started(
                    p, now, zero_now, x0, x1, acc, GROUPS, WARPS, FORMAT, SCALE, SUM, HAS_ZERO
                )
                if not OVERLAP:
                    d = warpgroup_mma_wait(0, [d])
                    acc = added(acc, d, now, SCALE, SUM)
                elif not SUM:
                    acc = warpgroup_mma_wait(ASKED, [d])
                    before, scale_before = acc, now
                else:
                    if j > 0:
                        before = warpgroup_mma_wait(ASKED, [before])
                        acc = added(acc, before, scale_before, SCALE, SUM)
                    before, scale_before = d, now
            else:
                p, q = halves(p)
                now, then = halves(now)
                zero_now, zero_then = halves(zero_now)
                d = started(
                    p, now, zero_now, x0, x1, acc, GROUPS, WARPS, FORMAT, SCALE, SUM, HAS_ZERO
                )
                if not OVERLAP:
                    d = warpgroup_mma_wait(0, [d])
                    acc = added(acc, d, now, SCALE, SUM)
                elif j > 0:
                    before = warpgroup_mma_wait(ASKED, [before])
                    more = added(more, before, scale_before, SCALE, SUM)
                f = started(
                    q, then, zero_then, x0, x1, more, GROUPS, WARPS, FORMAT, SCALE, SUM, HAS_ZERO
                )
                if OVERLAP:
                    d = warpgroup_mma_wait(ASKED, [d])
                    acc = added(acc, d, now, SCALE, SUM)
                else:
                    f = warpgroup_mma_wait(0, [f])
                    more = added(more, f, then, SCALE, SUM)
                before, scale_before = f, then
            piece = i * PIECES + j + 2
            s, zero = soon, soon_zero
            if s_pieces is None:
                soon = asked(scale_ptrs + group_at(piece, K, U, S_COLUMNS) * stride_sk)
            if HAS_ZERO:
                soon_zero = asked(zero_ptrs + group_at(piece, K, U, G) * stride_zk)
        if OVERLAP:
            before = warpgroup_mma_wait(0, [before])
            if ROWS == WN:
                acc = added(acc, before, scale_before, SCALE, SUM)
            else:
                more = added(more, before, scale_before, SCALE, SUM)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = following(slot, phase, STAGES)
    return acc, more


@gluon.jit
def product(
    x,  # descriptor of (parts of pieces, BM rows from each of S, BYTES), box [parts of a step, BM, 1, BYTES]
    w,  # descriptor of (E, pieces, parts, rows, BYTES), box [1, pieces of a step, parts, WN // parts, BYTES]
    scales,  # alike of R rows each: (E, pieces, parts, rows // R, numbers) as `scale_layout` has them, or None
    first,
    last,
    e,
    tile_row,
    begin,  # steps
    end,
    K,
    scale_ptrs,  # (WN, scales of a piece) of the first piece, as `first_scales` has them; None with `scales`
    zero_ptrs,  # as scale_ptrs, or None
    stride_sk,
    stride_zk,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    G: gl.constexpr,
    U: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    BM: gl.constexpr,
    WN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """w @ x.T (WN, BM) in fp32, of the BM positions before `last` and, with zeros, those of them before `first`.

    Rows are in the product's order. Scales of whole rows are left to the caller.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    ROWS: gl.constexpr = min(WN, 16 * WARPS)  # decoded at a time
    # of a piece, and columns of a part of x: a half or all
    BYTES: gl.constexpr = U * bits_of(FORMAT) // 8
    S_BYTES: gl.constexpr = 0 if scales is None else U // G  # of a row
    SIZE: gl.constexpr = BK // U * (WN * (BYTES + S_BYTES) + BM * U * 2)  # of a step
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES] + w.block_shape, w.layout)
    x_smem = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_shape, x.layout)
    w_pieces = reinterpret(
        w_smem, gl.uint8, [STAGES * (BK // U), WN, BYTES], gl.NVMMASharedLayout(BYTES, 8, 2)
    )
    x_halves = reinterpret(
        x_smem,
        x.dtype,
        [STAGES * x.block_shape[0], BM, BYTES],
        gl.NVMMASharedLayout(2 * BYTES, 16, 2),
    )
    s_smem, s_pieces = None, None
    if scales is not None:
        NUMBERS: gl.constexpr = 4 * scale_rows(G)
        BITS: gl.constexpr = scales.dtype.primitive_bitwidth
        s_smem = gl.allocate_shared_memory(
            scales.dtype, [STAGES] + scales.block_shape, scales.layout
        )
        s_pieces = reinterpret(
            s_smem,
            scales.dtype,
            [STAGES * (BK // U), WN // scale_rows(G), NUMBERS],
            gl.NVMMASharedLayout(NUMBERS * BITS // 8, BITS, 2),
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    fence_async_shared()  # the copy engine sees them
    acc, more = gl.warp_specialize(
        [
            (sums, (
                w_pieces, x_halves, s_pieces, full, empty, begin, end, K, scale_ptrs, zero_ptrs, stride_sk, stride_zk,
                FORMAT, SCALE, G, U, GATED, INTERLEAVED, BM, WN, BK, STAGES, WARPS, OVERLAP,
            )),
            (fill, (
                x, w, scales, x_smem, w_smem, s_smem, full, empty, first, last, e, tile_row, begin, end, K,
                SIZE, G, U, STAGES, DEPENDENT,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
    if ROWS < WN:
        acc = gl.join(acc, more).permute((2, 0, 1)).reshape((WN, BM))
        acc = gl.convert_layout(acc, MMA, assert_trivial=True)
    if is_e2m1(FORMAT):
        acc *= E8M0_SHIFT if SCALE == "e8m0" else E4M3_SHIFT
    elif FORMAT == "int4":
        acc *= INT4_SHIFT
    return acc
