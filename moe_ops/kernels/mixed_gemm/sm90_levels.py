"""Weights of 4 bits whose codes stand for the 16 numbers of a table, looked up on SM90 two at a
time. Imported at first launch only.

Shared memory has what each byte of weights stands for, its two levels in bf16, 32 times: a copy
for each lane, in a bank of its own. So one load gives a thread two neighbouring columns, in the
order of a left operand, whatever the table. Its address takes two instructions, and one multiplies
by the scale: eight weights take 16, of which 4 are on the pipe of `prmt`, which limits
`levels.look_up` with its 22.

The columns of a byte are neighbours in a product here, while other weights of 4 bits have the
lower nibbles of a chunk in one product and the upper ones in another (device/permutation.py).
"""

from moe_ops.kernels.device.gluon import barrier, gl, gluon
from moe_ops.kernels.mixed_gemm.levels import table_words, words_of_levels

PAIRS_BYTES = 256 * 32 * 4  # of the table


@gluon.jit
def place_of_pairs(zero):
    """Where this lane's copy begins: an address in shared memory. Not a call of Triton's, because
    only assembly can load from an address of a thread's own.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 l;
        .shared .align 1024 .b8 level_pairs[32768];
        mov.u32 l, %laneid; shl.b32 l, l, 2; mov.u32 $0, level_pairs; add.u32 $0, $0, l;
        }""",
        "=&r,r",
        [zero],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def warp_of_thread(zero):
    """The warp of a consumer thread."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; mov.u32 t, %tid.x; shr.u32 $0, t, 5; }",
        "=r,r",
        [zero],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def store_pairs(place, a, b, c, d):
    """Write four pairs that follow each other."""
    gl.inline_asm_elementwise(
        """{
        st.shared.b32 [$1], $2; st.shared.b32 [$1+128], $3;
        st.shared.b32 [$1+256], $4; st.shared.b32 [$1+384], $5; mov.b32 $0, 0;
        }""",
        "=r,r,r,r,r,r",
        [place, a, b, c, d],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def write_pairs(zero, FORMAT: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Write the table, by all consumer warps. Returns `place_of_pairs`."""
    place = place_of_pairs(zero)
    warp = warp_of_thread(zero)
    tables = table_words(FORMAT)
    for i in range(64 // NUM_WARPS):
        four = i * NUM_WARPS + warp
        a, b, c, d = words_of_levels(four * 0x04040404 + 0x03020100, tables)
        store_pairs(place + four * 512, a, b, c, d)
    barrier()
    return place


@gluon.jit
def load_pairs(codes, place):
    """(Pairs of the lower two of each 4 bytes, pairs of the upper two) in bf16."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, 0, 0x4440; prmt.b32 b, $4, 0, 0x4441;
        prmt.b32 c, $4, 0, 0x4442; prmt.b32 d, $4, 0, 0x4443;
        mad.lo.u32 a, a, 128, $5; mad.lo.u32 b, b, 128, $5;
        mad.lo.u32 c, c, 128, $5; mad.lo.u32 d, d, 128, $5;
        ld.shared.b32 $0, [a]; ld.shared.b32 $1, [b];
        ld.shared.b32 $2, [c]; ld.shared.b32 $3, [d];
        }""",
        "=r,=r,=r,=r,r,r,r,r,r",
        [codes, place],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
