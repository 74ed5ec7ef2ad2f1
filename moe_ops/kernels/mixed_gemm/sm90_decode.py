"""Operands of the mixed GEMM on SM90: weights of 4 to 8 bits decoded to bf16 or e4m3 in the
register fragments that `wgmma` reads, and the order of columns in which no data moves between
threads. Imported at first launch only.

A row of weights is decoded K_CHUNK columns at a time. Of the four threads that share a row, each
loads a contiguous quarter of a chunk's bytes, and decodes four bytes at a time in the order that
takes the fewest instructions. A weight's place in a fragment decides which column the tensor core
takes it for. So activations are permuted to that order (`permutation_bits`), and weights stay as
they are.

FORMAT and SCALE as in sm80_mma.py. In addition "int4_e4m3": int4 with e4m3 scales, whose rounded
products are multiplied in e4m3; and "e2m1_words": e2m1 with the bits of each word in
the order of backends/triton/relayout.py, which takes 12 instructions to decode eight weights,
instead of 17.
"""

from moe_ops.kernels.device.gluon import gl, gluon
from moe_ops.kernels.device.permutation import log2
from moe_ops.kernels.mixed_gemm.decode import (
    high_bits,
    in_pairs,
    is_e2m1,
    runs_of,
    scale_above,
    scale_bf16x2,
)
from moe_ops.kernels.mixed_gemm.levels import is_level
from moe_ops.kernels.mixed_gemm.sm90_levels import load_pairs
from moe_ops.meta.scales import rows_side_by_side

# decode_int4 gives the difference of a code and its zero point, times INT4_ONE.
INT4_LOW, INT4_HIGH, INT4_ONE = (gl.constexpr(2.0**n) for n in (69, 65, -64))
# INT4_LOW, INT4_HIGH and -8 * INT4_ONE as bits of bf16
INT4_LOW_BITS, INT4_HIGH_BITS, INT4_OFFSET_BITS = (
    gl.constexpr(n) for n in (0x6200, 0x6000, 0xA100 - 65536)
)

# The same for the scales of `scale_above`, which are 64 times as large
INT4_LOW_ABOVE_BITS, INT4_HIGH_ABOVE_BITS, INT4_OFFSET_ABOVE_BITS = (
    gl.constexpr(n) for n in (0x5F00, 0x5D00, 0x9E00 - 65536)
)


@gluon.constexpr_function
def weight_bits(FORMAT):
    """Bits of a weight, of formats in planes those of the low plane."""
    return 4 if in_pairs(FORMAT) else 8


@gluon.constexpr_function
def operand_bits(FORMAT):
    """Bits of a number of both operands of the products."""
    return 8 if FORMAT == "int4_e4m3" else 16


@gluon.constexpr_function
def groups_per_chunk(K_CHUNK, SCALE_GROUP):
    """Scales of one row in a chunk, at least one."""
    return K_CHUNK // SCALE_GROUP if 0 < SCALE_GROUP < K_CHUNK else 1


@gluon.constexpr_function
def scales_per_element(dtype, SCALE):
    """Scales in one element of `dtype`: two e4m3 scales, if the host views them as 16 bits."""
    return 2 if SCALE == "e4m3" and dtype.primitive_bitwidth == 16 else 1


@gluon.jit
def split_scales(s, SCALE: gl.constexpr):
    """The scales (BLOCK_N, n) or (BLOCK_N, 2 n) in elements (BLOCK_N, n)."""
    if scales_per_element(s.dtype, SCALE) == 1:
        return s
    else:
        both = gl.join((s & 0xFF).to(gl.uint8), (s >> 8).to(gl.uint8))
        return both.reshape((s.shape[0], 2 * s.shape[1]))


@gluon.constexpr_function
def row_bases(BLOCK_N, NUM_WARPS, GATED, INTERLEAVED):
    """Rows of a tile, in the order of memory, at the basis vectors of registers, lanes and warps,
    each from the lowest bit on.

    Row r of the accumulator is row r of the tile. If gated, rows i and i + 8 of every 16 are a
    gate row and its up row, because one thread has both.
    """

    def row(r):
        if not GATED:
            return r
        i, up = r // 16 * 8 + r % 8, r // 8 % 2
        return 2 * i + up if INTERLEAVED else i + BLOCK_N // 2 * up

    registers = [8, *[16 * NUM_WARPS << i for i in range(log2(BLOCK_N // (16 * NUM_WARPS)))]]
    warps = [16 << i for i in range(log2(NUM_WARPS))]
    return [[row(r) for r in rows] for rows in (registers, [1, 2, 4], warps)]


@gluon.constexpr_function
def weight_layout(BLOCK_N, CHUNK_BYTES, NUM_WARPS, GATED, INTERLEAVED):
    """Layout of a chunk (BLOCK_N, CHUNK_BYTES), with rows in the order of memory, in the registers
    of the threads that decode it.
    """
    found = row_bases(BLOCK_N, NUM_WARPS, GATED, INTERLEAVED)
    registers, lanes, warps = [[[row, 0] for row in rows] for rows in found]
    registers = [[0, 1 << i] for i in range(log2(CHUNK_BYTES // 4))] + registers
    lanes = [[0, CHUNK_BYTES // 4], [0, CHUNK_BYTES // 2], *lanes]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, CHUNK_BYTES])


@gluon.constexpr_function
def high_layout(BLOCK_N, HIGH_BYTES, RUNS, NUM_WARPS, GATED, INTERLEAVED):
    """Layout of a chunk's bytes of high bits (BLOCK_N, HIGH_BYTES), with rows in the order of
    memory: each thread has those of its low bytes, which the threads of RUNS runs share.
    """
    found = row_bases(BLOCK_N, NUM_WARPS, GATED, INTERLEAVED)
    registers, lanes, warps = [[[row, 0] for row in rows] for rows in found]
    quarter = RUNS * HIGH_BYTES // 4  # low bytes of a thread
    registers = [[0, 1 << i] for i in range(log2(quarter))] + registers
    lanes = [[0, n * quarter % HIGH_BYTES] for n in (1, 2)] + lanes
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, HIGH_BYTES])


scale_rows = gluon.constexpr_function(rows_side_by_side)  # R of `scale_layout`


@gluon.constexpr_function
def scale_layout(BLOCK_N, SCALE_GROUP, NUM_WARPS, GATED, INTERLEAVED):
    """Layout of a chunk's scales in the threads that decode the weights they scale.

    In memory they are (BLOCK_N // R, 4 R) elements: for R rows the scales of a chunk, ordered by
    half of the chunk, then by row. An element holds the one or two scales of a thread.
    """
    R = scale_rows(SCALE_GROUP)
    found = row_bases(BLOCK_N, NUM_WARPS, GATED, INTERLEAVED)
    registers, lanes, warps = [[[row // R, row % R * 2] for row in rows] for rows in found]
    lanes = [[0, 1], [0, 2 * R], *lanes]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N // R, 4 * R])


@gluon.jit
def scales_by_row(s, SCALE_GROUP: gl.constexpr):
    """Elements (BLOCK_N // R, 4 R) as (BLOCK_N, 4), rows in the order of memory. No data
    movement.
    """
    R: gl.constexpr = scale_rows(SCALE_GROUP)
    TILES: gl.constexpr = s.shape[0]
    return s.reshape((TILES, 2, R, 2)).permute((0, 2, 1, 3)).reshape((TILES * R, 4))


@gluon.constexpr_function
def grouped_layout(BLOCK_N, CHUNK_BYTES, NUM_WARPS, GROUPS):
    """`weight_layout` for (BLOCK_N, GROUPS, bytes of a group), rows in the accumulator's order."""
    group_bytes = CHUNK_BYTES // GROUPS

    def split(base):
        return [base[0], base[1] // group_bytes, base[1] % group_bytes]

    flat = weight_layout(BLOCK_N, CHUNK_BYTES, NUM_WARPS, False, False)
    bases = [[split(b) for b in f] for f in (flat.reg_bases, flat.lane_bases, flat.warp_bases)]
    return gl.DistributedLinearLayout(*bases, [], [BLOCK_N, GROUPS, group_bytes])


@gluon.jit
def permute_rows(w, GATED: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Rows of a tile in the accumulator's order. No data movement."""
    BLOCK_N: gl.constexpr = w.shape[0]
    BYTES: gl.constexpr = w.shape[1]
    if not GATED:
        return w
    elif INTERLEAVED:
        w = w.reshape((BLOCK_N // 16, 8, 2, BYTES)).permute((0, 2, 1, 3))
        return w.reshape((BLOCK_N, BYTES))
    else:
        w = w.reshape((2, BLOCK_N // 16, 8, BYTES)).permute((1, 0, 2, 3))
        return w.reshape((BLOCK_N, BYTES))


@gluon.jit
def fragment(w, LAYOUT: gl.constexpr):
    """Decoded weights as the left operand (A fragment) of a `wgmma`. No data movement."""
    BLOCK_N: gl.constexpr = w.shape[0]
    BYTES: gl.constexpr = w.shape[1]
    w = w.reshape((BLOCK_N, 4, BYTES // 16, 2, 2)).permute((0, 2, 3, 1, 4))
    return gl.convert_layout(w.reshape((BLOCK_N, BYTES)), LAYOUT, assert_trivial=True)


@gluon.jit
def decode_int4(codes, low, high, offset):
    """(even columns, odd columns) in bf16: low nibbles times `low`, high nibbles times 16 `high`,
    each times 2^-133, plus an offset.

    As bf16, an integer of 8 bits is that multiple of 2^-133, a subnormal number. So neither nibble
    of a byte needs a shift. Here and below, the elements of 4 bytes are in the order 0, 2, 1, 3.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r;
        shr.u32 r, $4, 8;
        and.b32 a, $4, 0x000f000f; and.b32 b, r, 0x000f000f;
        and.b32 c, $4, 0x00f000f0; and.b32 d, r, 0x00f000f0;
        fma.rn.bf16x2 $0, a, $5, $9; fma.rn.bf16x2 $1, b, $6, $10;
        fma.rn.bf16x2 $2, c, $7, $9; fma.rn.bf16x2 $3, d, $8, $10;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r",
        [codes, low, high, offset],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decode_int4_e4m3(codes, low, high, offset):
    """As decode_int4, cut off after four significant bits: with the scales of `scale_above`,
    weights rounded to e4m3.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r;
        shr.u32 r, $4, 8;
        and.b32 a, $4, 0x000f000f; and.b32 b, r, 0x000f000f;
        and.b32 c, $4, 0x00f000f0; and.b32 d, r, 0x00f000f0;
        fma.rn.bf16x2 a, a, $5, $9; fma.rn.bf16x2 b, b, $6, $10;
        fma.rn.bf16x2 c, c, $7, $9; fma.rn.bf16x2 d, d, $8, $10;
        and.b32 $0, a, 0xfff0fff0; and.b32 $1, b, 0xfff0fff0;
        and.b32 $2, c, 0xfff0fff0; and.b32 $3, d, 0xfff0fff0;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r",
        [codes, low, high, offset],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def load_products(ptrs):
    """The four words of 32 bits at each pointer."""
    return gl.inline_asm_elementwise(
        "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [ptrs],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def look_up_products(codes, t0, t1, t2, t3):
    """Of 4 bytes of int4, e4m3 numbers of the first four nibbles and of the last four, in two
    operands: what nibbles from 8 on stand for, then magnitudes of what those below 8 stand for.
    Each has zeros for the other's. The words of a row of PRODUCTS are t0 to t3.

    Three bits of a nibble select a byte of a table. Its highest bit makes prmt replicate the sign
    of that byte instead, which is 0.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 n, h, m;
        xor.b32 n, $4, 0x88888888; shr.u32 h, $4, 16; shr.u32 m, n, 16;
        prmt.b32 $0, $13, $17, n; prmt.b32 $1, $13, $17, m;
        prmt.b32 $2, $5, $9, $4; prmt.b32 $3, $5, $9, h;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [codes, t0, t1, t2, t3],
        dtype=(gl.uint8, gl.uint8, gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decode_products(
    codes,  # (BLOCK_N, CHUNK_BYTES) uint8, rows in the accumulator's order
    s,  # e4m3 scales (BLOCK_N, 1), in 32 bits each
    products_ptr,  # (256, 4) int32: PRODUCTS
    NUM_WARPS: gl.constexpr,
    A: gl.constexpr,
):
    """int4 weights times the magnitudes of their scales, rounded to e4m3, as two left operands:
    weights that are not negative, and magnitudes of those that are. Zeros fill both.
    """
    BLOCK_N: gl.constexpr = codes.shape[0]
    CHUNK_BYTES: gl.constexpr = codes.shape[1]
    LAYOUT: gl.constexpr = grouped_layout(BLOCK_N, CHUNK_BYTES, NUM_WARPS, 1)
    SHAPE: gl.constexpr = (BLOCK_N, 1, CHUNK_BYTES)
    codes = gl.convert_layout(codes.reshape(SHAPE), LAYOUT, assert_trivial=True)
    s = gl.convert_layout(s, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    t0, t1, t2, t3 = load_products(products_ptr + s * 4)
    p0, p1, n0, n1 = look_up_products(
        codes,
        gl.expand_dims(t0, 2).broadcast_to(SHAPE),
        gl.expand_dims(t1, 2).broadcast_to(SHAPE),
        gl.expand_dims(t2, 2).broadcast_to(SHAPE),
        gl.expand_dims(t3, 2).broadcast_to(SHAPE),
    )
    return fragment_e4m3(p0, p1, A), fragment_e4m3(n0, n1, A)


@gluon.jit
def fragment_e4m3(low, high, LAYOUT: gl.constexpr):
    """e4m3 numbers of the lower and of the upper half of each word as the left operand of a
    `wgmma`. No data movement.
    """
    BLOCK_N: gl.constexpr = low.shape[0]
    BYTES: gl.constexpr = low.shape[2]
    w = gl.join(low, high).reshape((BLOCK_N, 4, BYTES // 16, 4, 2)).permute((0, 2, 4, 1, 3))
    w = w.reshape((BLOCK_N, 2 * BYTES)).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(w, LAYOUT, assert_trivial=True)


@gluon.jit
def sign_of(s):
    """1 or -1 in fp32, the sign of e4m3 scales in 32 bits each."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 s, o;
        mov.b32 o, 0x3f800000; shl.b32 s, $1, 24; lop3.b32 $0, s, 0x80000000, o, 0xea;
        }""",
        "=r,r",
        [s],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def planes_assembly(HIGH):
    """What `decode_planes` runs: codes of even and of odd columns are put together four to a
    word, and then two to a word.
    """
    mask = ((1 << HIGH) - 1 << 4) * 0x01010101
    return f"""{{
        .reg .b32 g, h, e, o, a, b, c, d;
        shr.u32 g, $5, $10;
        shl.b32 h, g, 4; and.b32 h, h, {mask:#x}; lop3.b32 e, $4, 0x0f0f0f0f, h, 0xea;
        shr.u32 o, $4, 4; shl.b32 h, g, {4 - HIGH}; and.b32 h, h, {mask:#x};
        lop3.b32 o, o, 0x0f0f0f0f, h, 0xea;
        and.b32 a, e, 0x00ff00ff; prmt.b32 b, e, 0, 0x4341;
        and.b32 c, o, 0x00ff00ff; prmt.b32 d, o, 0, 0x4341;
        fma.rn.bf16x2 $0, a, $6, $8; fma.rn.bf16x2 $1, b, $7, $9;
        fma.rn.bf16x2 $2, c, $6, $8; fma.rn.bf16x2 $3, d, $7, $9;
        }}"""


@gluon.jit
def decode_planes(codes, high, place, scale, offset, FORMAT: gl.constexpr):
    """(even columns, odd columns) in bf16: codes of low nibbles and of the high bits from bit
    `place` of each byte of `high` on, times `scale`, times 2^-133, plus an offset.
    """
    ASSEMBLY: gl.constexpr = planes_assembly(high_bits(FORMAT))
    return gl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [codes, high, scale, offset, place],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decode_e2m1(codes, s):
    """(even columns, odd columns) in bf16: nibbles times 2^-126 times a scale (bf16) each."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r, z;
        mov.b32 z, 0x80008000; shr.u32 r, $4, 8;
        and.b32 a, $4, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
        and.b32 b, r, 0x000f000f; mul.lo.u32 b, b, 0x1040; and.b32 b, b, 0x81c081c0;
        and.b32 c, $4, 0x00f000f0; mul.lo.u32 c, c, 0x0104; and.b32 c, c, 0x81c081c0;
        and.b32 d, r, 0x00f000f0; mul.lo.u32 d, d, 0x0104; and.b32 d, d, 0x81c081c0;
        fma.rn.bf16x2 $0, a, $5, z; fma.rn.bf16x2 $1, b, $6, z;
        fma.rn.bf16x2 $2, c, $5, z; fma.rn.bf16x2 $3, d, $6, z;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [codes, s],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decode_e2m1_words(codes, s):
    """As decode_e2m1, for words of 4 bytes whose bits are in the order of
    backends/triton/relayout.py.

    Sign and magnitude of the first pair of columns are at their places in bf16 already. Those of
    the next two are there after a shift by 3 or a rotation by 6. Those of the last pair are moved
    by a multiplication: a sum of three shifts whose bits do not overlap.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, z;
        mov.b32 z, 0x80008000; and.b32 a, $4, 0x81c081c0;
        shl.b32 b, $4, 3; and.b32 b, b, 0x81c081c0;
        shf.l.wrap.b32 c, $4, $4, 6;
        and.b32 d, c, 0x001b001b; mul.lo.u32 d, d, 0x4108; and.b32 d, d, 0x81c081c0;
        and.b32 c, c, 0x81c081c0;
        fma.rn.bf16x2 $0, a, $5, z; fma.rn.bf16x2 $1, b, $6, z;
        fma.rn.bf16x2 $2, c, $5, z; fma.rn.bf16x2 $3, d, $6, z;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [codes, s],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decode_int8(codes):
    """bf16 of int8 codes (given as uint8): 128 + the low 7 bits, minus 128 or 256."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, r, o, m, u;
        mov.b32 o, 0x43004300; mov.b32 m, 0xc300c300; mov.b32 u, 0x3f803f80;
        shr.u32 r, $2, 8;
        lop3.b32 a, $2, 0x007f007f, o, 0xea; lop3.b32 b, $2, 0x00800080, m, 0xea;
        lop3.b32 c, r, 0x007f007f, o, 0xea; lop3.b32 d, r, 0x00800080, m, 0xea;
        fma.rn.bf16x2 $0, a, u, b; fma.rn.bf16x2 $1, c, u, d;
        }""",
        "=r,=r,r",
        [codes],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decode_e4m3(codes):
    """bf16 of e4m3 codes (given as uint8); the NaN code becomes 480."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, s, m, z;
        mov.b32 m, 0x7b807b80; mov.b32 z, 0x80008000;
        shl.b32 s, $2, 8; shl.b32 a, $2, 4; and.b32 a, a, 0x07f007f0;
        lop3.b32 a, s, 0x80008000, a, 0xea;
        shr.u32 b, $2, 4; and.b32 b, b, 0x07f007f0; lop3.b32 b, $2, 0x80008000, b, 0xea;
        fma.rn.bf16x2 $0, a, m, z; fma.rn.bf16x2 $1, b, m, z;
        }""",
        "=r,=r,r",
        [codes],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def constant(like, BITS: gl.constexpr):
    """A tensor like another with one bf16 number, given by its bits."""
    return gl.full(like.shape, BITS, gl.int16, like.type.layout).to(gl.bfloat16, bitcast=True)


@gluon.jit
def over_group(x, SHAPE: gl.constexpr):
    """bf16 (BLOCK_N, GROUPS, bytes of a group) of one number for each group."""
    return gl.expand_dims(x.to(gl.bfloat16), 2).broadcast_to(SHAPE)


@gluon.jit
def times_scales(w, s):
    """Weights (BLOCK_N, GROUPS, n) in bf16 times their scales, rounded once: scales of more bits
    than bf16 are the sum of two numbers of it.
    """
    near = s.to(gl.bfloat16)
    if s.dtype == gl.bfloat16:
        return w * over_group(near, w.shape)
    else:
        rest = over_group(s.to(gl.float32) - near.to(gl.float32), w.shape)
        return gl.fma(w, over_group(near, w.shape), w * rest)


@gluon.jit
def decode_int4_weights(codes, s, zero, SCALE: gl.constexpr, HAS_ZERO: gl.constexpr):
    """`decode_weights` of int4. Scales of more bits than bf16 are rounded, and a minimum beside
    them is that of codes less 8, which is small, so that its rounding is, too.
    """
    SHAPE: gl.constexpr = codes.shape
    # Constants are fp32, which the compiler narrows, or given by their bits: Triton 3.6 keeps six
    # decimals of bf16 constants.
    if SCALE == "e4m3":
        s = scale_above(s)
        low = over_group(s * constant(s, INT4_LOW_ABOVE_BITS), SHAPE)
        high = over_group(s * constant(s, INT4_HIGH_ABOVE_BITS), SHAPE)
        offset = over_group(s * constant(s, INT4_OFFSET_ABOVE_BITS), SHAPE)
        return decode_int4_e4m3(codes, low, high, offset)
    MINIMUM: gl.constexpr = SCALE == "minimum"
    AT_ONCE: gl.constexpr = s.dtype == gl.bfloat16 if MINIMUM else not HAS_ZERO
    wide = s.to(gl.float32)
    if AT_ONCE and (MINIMUM or SCALE == "weight"):
        low, high = over_group(wide * INT4_LOW, SHAPE), over_group(wide * INT4_HIGH, SHAPE)
        offset = zero.to(gl.float32) * INT4_ONE if MINIMUM else wide * (-8 * INT4_ONE)
        return decode_int4(codes, low, high, over_group(offset, SHAPE))
    one = gl.full(s.shape, 0, gl.int16, s.type.layout)
    low = over_group(constant(one, INT4_LOW_BITS), SHAPE)
    high = over_group(constant(one, INT4_HIGH_BITS), SHAPE)
    offset = over_group(constant(one, INT4_OFFSET_BITS), SHAPE)
    if HAS_ZERO and not MINIMUM:
        offset = over_group(zero.to(gl.float32) * -INT4_ONE, SHAPE)
    w0, w1 = decode_int4(codes, low, high, offset)
    if MINIMUM:
        middle = over_group((zero.to(gl.float32) + 8.0 * wide) * INT4_ONE, SHAPE)
        s = over_group(s, SHAPE)
        w0, w1 = gl.fma(w0, s, middle), gl.fma(w1, s, middle)
    elif SCALE == "weight":
        s = over_group(s, SHAPE)
        w0 *= s
        w1 *= s
    return w0, w1


@gluon.jit
def decode_plane_weights(
    codes, high, s, zero, NUM_WARPS: gl.constexpr, FORMAT: gl.constexpr, HAS_ZERO: gl.constexpr
):  # fmt: skip
    """`decode_weights` of int5 and int6, times 2^-64: `codes` (BLOCK_N, GROUPS, bytes of a group)
    of low bits, `high` (BLOCK_N, HIGH_BYTES). Scales are rounded to bf16; a minimum beside them
    is that of codes less their middle, which is small, so that its rounding is, too.
    """
    SHAPE: gl.constexpr = codes.shape
    BLOCK_N: gl.constexpr = high.shape[0]
    RUNS: gl.constexpr = runs_of(FORMAT)
    HIGH_BYTES: gl.constexpr = high.shape[1]
    OF_RUNS: gl.constexpr = (BLOCK_N, RUNS, HIGH_BYTES)
    LAYOUT: gl.constexpr = grouped_layout(BLOCK_N, RUNS * HIGH_BYTES, NUM_WARPS, RUNS)
    high = gl.convert_layout(high, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    high = gl.expand_dims(high, 1).broadcast_to(OF_RUNS).reshape(SHAPE)
    high = gl.convert_layout(high, codes.type.layout, assert_trivial=True)
    run = gl.arange(0, RUNS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    place = gl.expand_dims(gl.expand_dims(run * (8 // RUNS), 0), 2).broadcast_to(OF_RUNS)
    place = gl.convert_layout(place.reshape(SHAPE), codes.type.layout, assert_trivial=True)
    MIDDLE: gl.constexpr = 8.0 * (1 << high_bits(FORMAT))
    wide = s.to(gl.float32)
    if HAS_ZERO:
        one = gl.full(s.shape, 0, gl.int16, s.type.layout)
        low = over_group(constant(one, INT4_LOW_BITS), SHAPE)
        # not folded to a constant of bf16, of which Triton 3.6 keeps six decimals
        offset = over_group(wide * 0.0 - MIDDLE * INT4_ONE, SHAPE)
        w0, w1 = decode_planes(codes, high, place, low, offset, FORMAT)
        middle = over_group((zero.to(gl.float32) + MIDDLE * wide) * INT4_ONE, SHAPE)
        scale = over_group(s, SHAPE)
        return gl.fma(w0, scale, middle), gl.fma(w1, scale, middle)
    else:
        low = over_group(wide * INT4_LOW, SHAPE)
        offset = over_group(wide * (-MIDDLE * INT4_ONE), SHAPE)
        return decode_planes(codes, high, place, low, offset, FORMAT)


@gluon.jit
def decode_weights(
    codes,  # (BLOCK_N, CHUNK_BYTES) uint8, rows in the accumulator's order
    high,  # (BLOCK_N, HIGH_BYTES) uint8 of formats in planes, likewise; else None
    s,  # scales (BLOCK_N, GROUPS), or two in each element
    zero,  # zero points or minima (BLOCK_N, GROUPS); not used without HAS_ZERO
    pairs,  # `place_of_pairs` of levels; not used otherwise
    GROUPS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):
    """(even columns, odd columns) of a chunk in bf16, each (BLOCK_N, CHUNK_BYTES), times their
    scales if SCALE says that weights are scaled, which are rounded to bf16.

    For 8-bit formats both are all columns. e2m1 is multiplied by 2^-32 or 2^-8 (`scale_bf16x2`),
    integers below 8 bits and whole levels by 2^-64, and levels are in units of their table. int4
    weights with e4m3 scales are rounded to e4m3 (`scale_above`).
    """
    BLOCK_N: gl.constexpr = codes.shape[0]
    CHUNK_BYTES: gl.constexpr = codes.shape[1]
    SHAPE: gl.constexpr = (BLOCK_N, GROUPS, CHUNK_BYTES // GROUPS)
    LAYOUT: gl.constexpr = grouped_layout(BLOCK_N, CHUNK_BYTES, NUM_WARPS, GROUPS)
    codes = gl.convert_layout(codes.reshape(SHAPE), LAYOUT, assert_trivial=True)
    s = split_scales(s, SCALE)
    s = gl.convert_layout(s, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    if HAS_ZERO:
        zero = gl.convert_layout(zero, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    if is_e2m1(FORMAT):
        s = scale_bf16x2(s, SCALE).to(gl.int16).to(gl.bfloat16, bitcast=True)
        if FORMAT == "e2m1_words":
            w0, w1 = decode_e2m1_words(codes, over_group(s, SHAPE))
        else:
            w0, w1 = decode_e2m1(codes, over_group(s, SHAPE))
    elif is_level(FORMAT):
        w0, w1 = load_pairs(codes, pairs)
        if SCALE == "weight":
            s = over_group(s, SHAPE)
            w0 *= s
            w1 *= s
    elif high is not None:
        w0, w1 = decode_plane_weights(codes, high, s, zero, NUM_WARPS, FORMAT, HAS_ZERO)
    elif FORMAT == "e4m3":
        w0 = decode_e4m3(codes)
        w1 = w0
    elif FORMAT == "int8":
        w0 = decode_int8(codes)
        if HAS_ZERO:  # at most 255, which bf16 holds
            w0 -= over_group(zero.to(gl.int8, bitcast=True), SHAPE)
        if SCALE == "weight":
            w0 = times_scales(w0, s)
        w1 = w0
    else:
        w0, w1 = decode_int4_weights(codes, s, zero, SCALE, HAS_ZERO)
    return w0.reshape((BLOCK_N, CHUNK_BYTES)), w1.reshape((BLOCK_N, CHUNK_BYTES))
