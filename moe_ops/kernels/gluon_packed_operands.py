"""Operands of the packed product on SM90: weights of 4 and 8 bits as bf16 in the registers `wgmma` reads, and the order
of columns that takes no exchange between threads. Imported at first launch only.

A row of weights is taken in pieces of U columns. Thread t % 4 of a row's four takes a quarter of a piece's bytes, which
lie side by side, and decodes them four at a time in the order that costs least. Which column a tensor core takes them
for follows from where they are: activations are put in that order (`bits_of_place`), weights stay as they are.

FORMAT and SCALE as in triton_packed_matmul.py; beside those "e2m1_words", e2m1 whose bits backends/triton/relayout.py has put where
decoding takes fewer instructions: 12 for eight weights, 17 in their natural order.
"""

from moe_ops.kernels.device.gluon import gl, gluon
from moe_ops.kernels.triton_packed_operands import is_e2m1, twice
from moe_ops.meta.scales import rows_side_by_side

# What int4_pair makes of a code and its zero point is their difference times INT4_ONE.
INT4_LOW, INT4_HIGH, INT4_ONE = (gl.constexpr(2.0**n) for n in (69, 65, -64))
# INT4_LOW, INT4_HIGH and -8 * INT4_ONE as bits of bf16
INT4_LOW_BITS, INT4_HIGH_BITS, INT4_OFFSET_BITS = (
    gl.constexpr(n) for n in (0x6200, 0x6000, 0xA100 - 65536)
)


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def bits_of(FORMAT):
    return 4 if FORMAT == "int4" or is_e2m1(FORMAT) else 8


@gluon.constexpr_function
def groups_of(U, G):
    """Scales of a piece, at least one."""
    return U // G if 0 < G < U else 1


@gluon.constexpr_function
def scales_of(dtype, SCALE):
    """Scales that are read as one number of `dtype`: two e4m3 ones of 16 bits, where the launcher says so."""
    return 2 if SCALE == "e4m3" and dtype.primitive_bitwidth == 16 else 1


@gluon.jit
def each_scale(s, SCALE: gl.constexpr):
    """(WN, n) numbers as the (WN, n) or (WN, 2 n) scales they are."""
    if scales_of(s.dtype, SCALE) == 1:
        return s
    else:
        both = gl.join((s & 0xFF).to(gl.uint8), (s >> 8).to(gl.uint8))
        return both.reshape((s.shape[0], 2 * s.shape[1]))


@gluon.constexpr_function
def bits_of_place(U, BITS):
    """For every bit of a column's place in the product the bit of the column, from the lowest on.

    Bits of a byte's index are 0 and 1 within 4 bytes, then the 4 bytes of a thread, the last two the thread.
    """
    bits = log2(U * BITS // 8)
    order = [1, bits - 2, bits - 1, 0, *range(2, bits - 2)]
    return order if BITS == 8 else [bit + 1 for bit in order] + [0]


@gluon.constexpr_function
def rows_of_threads(WN, WARPS, GATED, INTERLEAVED):
    """Rows of a tile, as they lie in memory, that registers, lanes and warps count by, each from the lowest bit on.

    Row r of the product is row r of a tile, but of gated ones i + 8 of every 16 is the up row of gate i: there both
    meet in a thread.
    """

    def row(r):
        if not GATED:
            return r
        i, up = r // 16 * 8 + r % 8, r // 8 % 2
        return 2 * i + up if INTERLEAVED else i + WN // 2 * up

    registers = [8, *[16 * WARPS << i for i in range(log2(WN // (16 * WARPS)))]]
    warps = [16 << i for i in range(log2(WARPS))]
    return [[row(r) for r in rows] for rows in (registers, [1, 2, 4], warps)]


@gluon.constexpr_function
def weight_layout(WN, BYTES, WARPS, GATED, INTERLEAVED):
    """(WN, BYTES) in the registers of the threads that decode them, rows as they lie in memory."""
    found = rows_of_threads(WN, WARPS, GATED, INTERLEAVED)
    registers, lanes, warps = [[[row, 0] for row in rows] for rows in found]
    registers = [[0, 1 << i] for i in range(log2(BYTES // 4))] + registers
    lanes = [[0, BYTES // 4], [0, BYTES // 2], *lanes]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [WN, BYTES])


scale_rows = gluon.constexpr_function(rows_side_by_side)  # R


@gluon.constexpr_function
def scale_layout(WN, G, WARPS, GATED, INTERLEAVED):
    """(WN // R, 4 R) numbers, of R rows the scales of a piece, in the threads that decode what they scale, as they lie in
    memory: by half of the piece, then by row. A number is a thread's scales, one or two.
    """
    R = scale_rows(G)
    found = rows_of_threads(WN, WARPS, GATED, INTERLEAVED)
    registers, lanes, warps = [[[row // R, row % R * 2] for row in rows] for rows in found]
    lanes = [[0, 1], [0, 2 * R], *lanes]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [WN // R, 4 * R])


@gluon.jit
def scales_in_order(s, G: gl.constexpr):
    """(WN // R, 4 R) numbers as (WN, 4), rows as they lie in memory. Nothing moves."""
    R: gl.constexpr = scale_rows(G)
    TILES: gl.constexpr = s.shape[0]
    return s.reshape((TILES, 2, R, 2)).permute((0, 2, 1, 3)).reshape((TILES * R, 4))


@gluon.constexpr_function
def grouped_layout(WN, BYTES, WARPS, GROUPS):
    """(WN, GROUPS, bytes of a group): as above, rows in the product's order."""
    each = BYTES // GROUPS

    def place(base):
        return [base[0], base[1] // each, base[1] % each]

    flat = weight_layout(WN, BYTES, WARPS, False, False)
    bases = [[place(b) for b in f] for f in (flat.reg_bases, flat.lane_bases, flat.warp_bases)]
    return gl.DistributedLinearLayout(*bases, [], [WN, GROUPS, each])


@gluon.jit
def in_order(w, GATED: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Rows of a tile in the product's order. Nothing moves."""
    WN: gl.constexpr = w.shape[0]
    BYTES: gl.constexpr = w.shape[1]
    if not GATED:
        return w
    elif INTERLEAVED:
        return w.reshape((WN // 16, 8, 2, BYTES)).permute((0, 2, 1, 3)).reshape((WN, BYTES))
    else:
        return w.reshape((2, WN // 16, 8, BYTES)).permute((1, 0, 2, 3)).reshape((WN, BYTES))


@gluon.jit
def fragment(w, LAYOUT: gl.constexpr):
    """Decoded bytes as the left operand of a product. Nothing moves."""
    WN: gl.constexpr = w.shape[0]
    BYTES: gl.constexpr = w.shape[1]
    w = w.reshape((WN, 4, BYTES // 16, 2, 2)).permute((0, 2, 3, 1, 4)).reshape((WN, BYTES))
    return gl.convert_layout(w, LAYOUT, assert_trivial=True)


@gluon.jit
def int4_pair(p, low, high, offset):
    """bf16 of the even and of the odd columns' nibbles times `low` and times `high` times 16, each times 2^-133, plus an offset.

    The low 8 bits of a bf16 count in steps of 2^-133, so nibbles of either half of a byte need no shift. Here and below elements of 4 bytes come in the order 0, 2, 1, 3.
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
        [p, low, high, offset],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def e2m1_pair(p, s):
    """bf16 of nibbles times 2^-126 times a scale (bf16) each."""
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
        [p, s],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def e2m1_words_pair(p, s):
    """As e2m1_pair, of words of 4 bytes whose bits lie as backends/triton/relayout.py puts them.

    Sign and magnitude of a pair are where bf16 has them at once, after a shift by 3, or a rotation by 6; those of the
    last one a product puts there, the sum of three shifts whose bits do not meet.
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
        [p, s],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def int8_value(p):
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
        [p],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def e4m3_value(p):
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
        [p],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def decoded(
    p,  # (WN, BYTES) uint8, rows in the product's order
    s,  # scales (WN, GROUPS), or two in each number
    zero,  # zero points (WN, GROUPS), or anything
    GROUPS: gl.constexpr,
    WARPS: gl.constexpr,
    FORMAT: gl.constexpr,
    SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):
    """bf16 (WN, BYTES) of the even and of the odd columns, times their scales where weights are scaled.

    Of 8-bit formats the second repeats the first; e2m1 times 2^-32 or 2^-8 (`twice`), int4 times 2^-64.
    """
    WN: gl.constexpr = p.shape[0]
    BYTES: gl.constexpr = p.shape[1]
    EACH: gl.constexpr = BYTES // GROUPS
    LAYOUT: gl.constexpr = grouped_layout(WN, BYTES, WARPS, GROUPS)
    p = gl.convert_layout(p.reshape((WN, GROUPS, EACH)), LAYOUT, assert_trivial=True)
    s = each_scale(s, SCALE)
    s = gl.convert_layout(s, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    if HAS_ZERO:
        zero = gl.convert_layout(zero, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
    if is_e2m1(FORMAT):
        s = twice(s, SCALE).to(gl.int16).to(gl.bfloat16, bitcast=True)
        s = gl.expand_dims(s, 2).broadcast_to((WN, GROUPS, EACH))
        if FORMAT == "e2m1_words":
            w0, w1 = e2m1_words_pair(p, s)
        else:
            w0, w1 = e2m1_pair(p, s)
    elif FORMAT == "e4m3":
        w0 = e4m3_value(p)
        w1 = w0
    elif FORMAT == "int8":
        w0 = int8_value(p)
        if HAS_ZERO:  # at most 255, which bf16 holds
            zero = zero.to(gl.int8, bitcast=True).to(gl.bfloat16)
            w0 -= gl.expand_dims(zero, 2).broadcast_to((WN, GROUPS, EACH))
        w1 = w0
    else:
        # Numbers in fp32, which the compiler narrows, or by their bits: of bf16 constants Triton 3.6 keeps six decimals.
        if SCALE == "weight" and not HAS_ZERO:
            s = gl.expand_dims(s.to(gl.float32), 2)
            low, high = (s * INT4_LOW).to(gl.bfloat16), (s * INT4_HIGH).to(gl.bfloat16)
            offset = (s * (-8 * INT4_ONE)).to(gl.bfloat16)
        else:
            low = gl.full((WN, GROUPS, 1), INT4_LOW_BITS, gl.int16, LAYOUT)
            low = low.to(gl.bfloat16, bitcast=True)
            high = gl.full((WN, GROUPS, 1), INT4_HIGH_BITS, gl.int16, LAYOUT)
            high = high.to(gl.bfloat16, bitcast=True)
            if HAS_ZERO:
                offset = (gl.expand_dims(zero.to(gl.float32), 2) * -INT4_ONE).to(gl.bfloat16)
            else:
                offset = gl.full((WN, GROUPS, 1), INT4_OFFSET_BITS, gl.int16, LAYOUT)
                offset = offset.to(gl.bfloat16, bitcast=True)
        low = low.broadcast_to((WN, GROUPS, EACH))
        high = high.broadcast_to((WN, GROUPS, EACH))
        w0, w1 = int4_pair(p, low, high, offset.broadcast_to((WN, GROUPS, EACH)))
        if SCALE == "weight" and HAS_ZERO:
            s = gl.expand_dims(s.to(gl.bfloat16), 2).broadcast_to((WN, GROUPS, EACH))
            w0 *= s
            w1 *= s
    return w0.reshape((WN, BYTES)), w1.reshape((WN, BYTES))
