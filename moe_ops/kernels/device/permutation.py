"""The order of columns in which the kernels of mixed_gemm/sm90_wgmma.py read activations, as
sm90_decode.py explains it.
"""

import triton
import triton.language as tl

# W_BITS of four bits whose columns are looked up two at a time, those of a byte
NEIGHBOURS = tl.constexpr(2)


@triton.constexpr_function
def log2(n):
    """The binary logarithm of a power of two."""
    return n.bit_length() - 1


@triton.constexpr_function
def permutation_bits(K_CHUNK, W_BITS, X_BITS):
    """The permutation of a chunk's columns, as a permutation of the bits of their indices.

    Bit i of a column's permuted index is bit `permutation_bits[i]` of the column. In the index of
    a byte, bits 0 and 1 are its place within a word of 4 bytes, the next bits the word of a
    thread, and the last two the thread. For X_BITS = 8 it is the index of one of four columns, of
    which a word of weights has two times four.
    """
    if X_BITS == 8:
        bits = log2(K_CHUNK)
        return [0, 1, bits - 2, bits - 1, *range(2, bits - 2)]
    bits = log2(K_CHUNK if W_BITS == 8 else K_CHUNK // 2)
    order = [1, bits - 2, bits - 1, 0, *range(2, bits - 2)]
    if W_BITS == 8:
        return order
    order = [0, *[bit + 1 for bit in order]]
    # the two columns of a byte are neighbours, or its place in a word
    return order[:1] + order[2:] + [2] if NEIGHBOURS.value == W_BITS else order[1:] + [0]


@triton.jit
def permuted_column(column, BITS: tl.constexpr):
    """Index of a column within its chunk after the fragment permutation (`permutation_bits`)."""
    permuted = column * 0
    for i in tl.static_range(len(BITS)):
        permuted |= (column >> BITS[i] & 1) << i
    return permuted


@triton.jit
def permuted_column_of_row(
    column, K_CHUNK: tl.constexpr, W_BITS: tl.constexpr, X_BITS: tl.constexpr
):
    """Index of a column within its row after the fragment permutation; of W_BITS 16 none."""
    if W_BITS == 16:
        return column
    else:
        BITS: tl.constexpr = permutation_bits(K_CHUNK, W_BITS, X_BITS)
        return column // K_CHUNK * K_CHUNK + permuted_column(column % K_CHUNK, BITS)


@triton.jit
def column_in_chunks(
    column,
    columns,
    K_CHUNK: tl.constexpr,
    W_BITS: tl.constexpr,
    X_BITS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Where a column of a row of `columns` lies in a row of whole chunks whose columns are
    permuted. With TAIL the last chunk overlaps the one before, whose columns it has as zeros.
    """
    if TAIL:
        whole = tl.cdiv(columns, K_CHUNK) * K_CHUNK
        column = tl.where(column >= whole - K_CHUNK, column + (whole - columns), column)
    return permuted_column_of_row(column, K_CHUNK, W_BITS, X_BITS)
