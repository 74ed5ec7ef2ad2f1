"""Launches of kernels/gluon_packed.py: when they can run, their tiles, the tensor descriptors they take, their arguments."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ops.environment import version
from moe_ops.kernels.gluon_packed_blocks import E2M1, MULTIPROCESSORS, Product, Residence, resident
from moe_ops.kernels.triton_launch import INTERPRETED, Gpu, Launch
from moe_ops.kernels.triton_rows import Rows
from moe_ops.kernels.triton_tiles import Tile, Tiles
from moe_ops.meta.scales import rows_side_by_side
from moe_ops.meta.workspace import cdiv, maximum, minimum

if TYPE_CHECKING:
    from moe_ops.kernels.triton_packed_launch import Format, Packed

FORMATS = ("int4", "e2m1", "e2m1_words", "int8", "e4m3")
TRITON = ((3, 6), (3, 9))  # the oldest and the newest Triton that compile these kernels
MOST_PARTS = 3  # programs that share a tile of GEMM2 by columns, where it has few tiles
SHARED_ROWS = 1024  # of y in all parts
COLUMNS = 1024  # of a row that a program puts in order: 16 bytes a thread
FEW_PAIRS = (64, 512)  # of so many or fewer, programs look at all
MOST_ROWS_OF_8_BITS = 80  # of an expert, on average: from there on products count


@cache
def gluon_supported(installed: str | None) -> str | None:
    """Why a version of Triton cannot compile the kernels written in Gluon; None where it can.

    Gluon is experimental and changes from one version to the next, so a newer version than those
    that were tried is refused, too.
    """
    kernels = "the Gluon kernels of compute capability 9.0 for weights of 4 and 8 bits"
    oldest, newest = (".".join(map(str, bound)) for bound in TRITON)
    if installed is None:
        return f"{kernels} need Triton {oldest} to {newest}, which is not installed"
    found = tuple(int(part) for part in installed.split(".")[:2])
    if TRITON[0] <= found <= TRITON[1]:
        return None
    return f"{kernels} need Triton {oldest} to {newest}, got {installed}"


def spoken() -> bool:
    """Whether the installed Triton compiles the kernels."""
    return gluon_supported(version("triton")) is None


@cache
def on_sm90(device: int) -> bool:
    """Whether a CUDA device has the instructions, and Triton the language."""
    if device < 0 or INTERPRETED or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return spoken()


def kernels() -> dict:
    """The kernels by the names that launches call them."""
    try:
        from moe_ops.kernels import gluon_packed
    except (ImportError, AttributeError):  # a Triton of another language
        return {}
    return {
        "arrange": gluon_packed.moe_ops_arrange,
        "gluon_gemm1": gluon_packed.moe_ops_gluon_gemm1,
        "gluon_gemm2": gluon_packed.moe_ops_gluon_gemm2,
    }


@lru_cache(maxsize=64)
def _with_weights_scaled(of: Format) -> Format:
    return of._replace(scale="weight")


def _scaled(of: Format, scales: torch.dtype) -> Format:
    """A format whose `scale` says what these kernels scale: of int4, weights by bf16 scales, which are rounded to bf16 so.

    A group's sums then need no registers, are not waited for and not multiplied: Mixtral took 264 us instead of 273 at M = 64,
    506 instead of 649 at 256. Other scales would lose bits in bf16.
    """
    if of.name != "int4" or of.scale != "sum" or scales != torch.bfloat16:
        return of
    return _with_weights_scaled(of)


def _format(w: Packed) -> Format:
    return _scaled(w.format, w.scale.dtype)


def _piece(columns: int, of: Format) -> int:
    if columns % 64:
        return 0
    if (of.name in E2M1 or of.scale == "weight") and columns >= 128:
        return 128
    return 64 if of.bits == 8 or of.group == 64 or columns % 128 else 128


def piece(w: Packed) -> int:
    """Columns that the product takes in an order of their own, all of one group where sums are scaled; 0 for none.

    They may be more than what is left of a row for the last piece. Then this one is the row's last columns, of which those of
    the piece before meet zeros. (gptoss20 of 2880 columns, at 64 tokens: in mxfp4 163 us by 64 columns, whose scales are asked
    for by twice as many loads, and 155 so; in nvfp4 182 and 173.)
    """
    return _piece(w.columns, _format(w))


def padded(columns: int) -> int:
    """Columns of a row of x or h in whole pieces, at most."""
    return cdiv(columns, 128) * 128 if columns % 64 == 0 else columns


@lru_cache(maxsize=1024)
def _possible(of: Format, columns: int, strides: tuple, dtype: torch.dtype) -> bool:
    size = _piece(columns, of)
    if dtype != torch.bfloat16 or of.name not in FORMATS or size == 0:
        return False
    if of.bits == 8 and of.scale not in ("end", "sum", "block"):
        return False
    if of.scale in ("sum", "block") and of.group % size:
        return False
    return min(strides) == 1 == strides[2] and (strides[0] | strides[1]) % 16 == 0


def possible(w: Packed, dtype: torch.dtype) -> bool:
    """Whether the kernels can run with this weight: descriptors take rows of 16-byte step alone."""
    data = w.data
    if w.format.name == "e2m1_words" and not w.scales_in_place:
        return False
    return data.data_ptr() % 16 == 0 and _possible(_format(w), w.columns, data.stride(), dtype)


def choose(
    rows: int,
    groups: int,
    K: int,
    I: int,  # noqa: E741
    bits: int,
    chunk: int,
) -> Tiles | None:
    """Tiles of the two GEMMs; None where other kernels serve so many rows. An expert's should usually fit a block.

    As measured on an H200 for qwen3, mixtral, gptoss20 and gptoss120 at 8 to 256 tokens. Multiprocessors of more blocks
    were faster than those of deeper rings, which leave scales less of the L1 cache, and GEMM2 of few tiles where its programs
    share the columns: of Mixtral's 64 tokens, three parts are two rounds of three blocks a multiprocessor. With 256
    columns a step instead of 128 Mixtral in nvfp4, prepared, took 236 us instead of 244 at M = 32, 548 instead of 566 at 256.

    Of many rows, those of triton_packed.py decode as often, and more slowly: of 64, 128, 256 and 512 rows an expert Mixtral in
    int4 took 1132, 1759, 3015 and 5308 us with them, and 506, 849, 1583 and 3114 with these; of fp8 990, 1335, 2322
    and 4165, and 850, 1412, 2485 and 5011.
    """
    average = rows / groups
    if bits == 8 and average > MOST_ROWS_OF_8_BITS:
        return None
    tokens = 8 if average <= 4 else 16 if average <= 10 else 32 if average <= 22 else 64

    def tile(columns: int, few: bool) -> Tile:
        wide = bits == 4 and columns % 256 == 0
        if tokens == 64:  # four warps have no registers for sums and what they come from
            return Tile(128, 256, 2, 8) if wide else Tile(128, 128, 4, 8)
        if not wide:
            return Tile(128, 128, 3, 4)
        return Tile(64 if tokens == 8 and few else 128, 256, 2, 4)

    few = min(rows, groups) * cdiv(K, 128) <= 2 * MULTIPROCESSORS
    parts = (3 if tokens == 32 else 2) if few else 1
    ones, twos = tile(K, average < 1), tile(I, False)
    return Tiles(False, tokens, ones, twos, chunk, parts=parts, wgmma=True)


def y_rows(pairs):
    """Rows of y (fp32) in the workspace, int or SymInt: parts of few rows too."""
    return maximum(pairs, minimum(MOST_PARTS * pairs, SHARED_ROWS))


def parts_of(w2: Packed, tile: Tile, parts: int, pairs: int) -> int:
    """How many programs share the columns of a tile of GEMM2: at most `parts`, and as many as y has room for.

    Each has a step of its own: one without would write y, where GEMM1's x is, with nothing of GEMM1's to wait for.
    """
    steps = cdiv(w2.columns, _step(w2, tile))
    parts = min(parts, y_rows(pairs) // pairs)
    return cdiv(steps, cdiv(steps, parts))


def worth(tokens: int, average: float) -> bool:
    """Whether blocks of so many tokens may be the best for experts of so many rows on average.

    Weights are read once, if the largest blocks allow it, and blocks are not empty. (In mxfp4 Mixtral's layer of 32 tokens took
    265 us with 16, 288 with 32.)
    """
    return min(average, 64) <= tokens < max(9, 4 * average)


def search_space(
    base: Tiles, average: float, experts: int, K: int
) -> list[tuple[list[Tiles], list[Tiles]]]:
    """For the search (moe_ops.tuning): variants of GEMM1 and of GEMM2, a pair of lists for each kind of block.

    Args:
        average: rows an expert has on average.
        experts: how many there are.
        K: rows of GEMM2's weights.
    """
    tiles = [(64, 128, 4, 4), (64, 256, 2, 4), (64, 256, 4, 4)]
    tiles += [(128, 128, 3, 4), (128, 128, 4, 4), (128, 256, 2, 4)]
    tiles += [(128, 128, 4, 8), (128, 256, 2, 8), (128, 256, 3, 8)]
    space = []
    for tokens in [t for t in (8, 16, 32, 64) if worth(t, average)] or [64]:
        shared = base._replace(tokens=tokens, parts=1)
        ones = [shared._replace(gemm1=Tile(*t), gemm2=Tile(*t)) for t in tiles]
        twos = ones + [
            one._replace(parts=parts)
            for one in ones
            for parts in range(2, MOST_PARTS + 1)
            if min(1, average) * experts * cdiv(K, one.gemm2.rows) * parts <= 800
        ]
        space.append((ones, twos))
    return space


def usable(w13: Packed, w2: Packed, x: Tensor, workspaces: tuple[Tensor, Tensor]) -> bool:
    """Whether a layer of several tokens can run on these kernels."""
    return (
        on_sm90(x.get_device())
        and possible(w13, x.dtype)
        and possible(w2, x.dtype)
        and all(workspace.data_ptr() % 16 == 0 for workspace in workspaces)
    )


@cache
def _language() -> tuple:
    from moe_ops.kernels.device.gluon import TensorDescriptor, gl

    return TensorDescriptor, cache(gl.NVMMASharedLayout)


def _descriptor(base: Tensor, shape: list, strides: list, box: list, swizzle: int, bits: int):
    """A tensor descriptor. Its constructor takes 7 us to check what `possible` knows, so it is left out."""
    descriptor, layout = _language()
    found = object.__new__(descriptor)
    found.base, found.shape, found.strides, found.block_shape = base, shape, strides, box
    found.layout, found.padding = layout(swizzle, bits, len(box)), "zero"
    return found


def _described(w: Packed, parts: int, tile: Tile):
    """Descriptor of a weight whose rows are `parts` parts, with boxes of a tile and a step."""
    data = w.data if w.data.dtype == torch.uint8 else w.data.view(torch.uint8)
    return _in_pieces(data, _bytes(w), w, parts, tile, 1)


def _in_pieces(data: Tensor, size: int, w: Packed, parts: int, tile: Tile, each: int):
    """Descriptor of (E, rows, row), a row of `each` rows of w, with boxes of a tile and a step in pieces of `size`."""
    E, N, row = data.shape
    expert, step, _ = data.stride()
    every = size if row % size == 0 else size // 2  # from one piece described to the next
    shape = [E, (row - size) // every + 1, parts, N // parts, size]
    strides = [expert, every, N // parts * step]
    box = [1, _pieces(w, tile), parts, tile.rows // each // parts, size]
    bytes_ = data.element_size()
    return _descriptor(data, shape, [*strides, step, 1], box, size * bytes_, 8 * bytes_)


def _bytes(w: Packed) -> int:
    """Bytes of a piece."""
    return piece(w) * w.format.bits // 8


def _pieces(w: Packed, tile: Tile) -> int:
    """Pieces of a step: one where the last may reach back into the one before."""
    return max(1, tile.k // piece(w)) if w.columns % piece(w) == 0 else 1


def _step(w: Packed, tile: Tile) -> int:
    """Columns of a step."""
    return _pieces(w, tile) * piece(w)


def _whole(w: Packed) -> int:
    """Columns of a row of x in whole pieces."""
    return cdiv(w.columns, piece(w)) * piece(w)


def _rows_described(x: Tensor, w: Packed, rows: int, tokens: int, tile: Tile):
    """Descriptor of rows that `w` is multiplied with, with boxes of a block and a step.

    Of every row and the `tokens - 1` after it, so that a box that starts before a row ends as many rows after it: the copy
    engine reads a block's own rows alone. (Boxes of whole blocks: Mixtral at M = 64 took 302 us in mxfp4 for 293 so, gptoss20 in
    nvfp4 184 for 180.)
    """
    part = _bytes(w)  # columns: a half of a piece, or all of it
    K = _whole(w)
    box = [piece(w) // part * _pieces(w, tile), tokens, 1, part]
    return _descriptor(x, [K // part, tokens, rows, part], [part, K, K, 1], box, 2 * part, 16)


def few_pairs(pairs: int) -> int:
    """The least of FEW_PAIRS that `pairs` are no more than, 0 for none."""
    return next((most for most in FEW_PAIRS if pairs <= most), 0)


def alone(pairs: int, experts: int) -> int:
    """The most pairs of a layer without a routing kernel, 0 with one: programs of the GEMMs find their blocks then.

    Where many pairs share few experts, most programs would find none.
    """
    return FEW_PAIRS[0] if pairs <= min(FEW_PAIRS[0], experts) else 0


def arrange(out: Tensor, x: Tensor, w: Packed, pairs: int, rows: Rows, chip: Gpu) -> Launch:
    """Rows of x sorted by expert, columns in the order in which `w` takes them."""
    index, ids, expert_map, blocks, experts, num_ids, top_k, *strides = rows.args
    U, K = piece(w), w.columns
    args = (out, x, index, ids, expert_map, blocks, pairs, experts, num_ids, top_k, K, *strides)
    args += (*x.stride(), U, w.format.bits, COLUMNS, few_pairs(pairs))
    args += (alone(pairs, experts) > 0, K % U > 0, rows.has_map, chip.dependent)
    return Launch("arrange", (pairs, cdiv(_whole(w), COLUMNS), 1), args)


def _constants(w: Packed, tile: Tile, rows: Rows, pairs: int, overlap: bool) -> tuple:
    """FORMAT to U; BM to DEPENDENT."""
    of = _format(w)
    return (of.name, of.scale, of.group, piece(w)), (
        *(rows.tokens, tile.rows, _step(w, tile), tile.stages, tile.warps, overlap),
        *(alone(pairs, rows.args[4]), rows.has_map, w.chip.dependent),
    )


@lru_cache(maxsize=4096)
def _tiles(pairs: int, experts: int, num_ids: int, tokens: int, across: int) -> int:
    """Tiles of a layer, `across` of each block, where experts are equally likely: of those that get a pair, or of more."""
    of_these = pairs * experts / num_ids
    blocks = max(experts * (1 - (1 - 1 / experts) ** of_these), of_these / tokens)
    return int(blocks * across)


def _resident(
    w: Packed, tile: Tile, rows: Rows, pairs: int, columns: int, parts: int
) -> Residence:
    """Of a GEMM to so many columns, shared by `parts` programs a tile."""
    _, _, _, _, experts, num_ids, *_ = rows.args
    across = cdiv(columns, tile.rows)
    tiles = parts * _tiles(pairs, experts, num_ids, rows.tokens, across)
    product = Product(_format(w), piece(w), w.zero is not None, tile, rows.tokens, _step(w, tile))
    return resident(product, tiles)


def _scales(w: Packed, parts: int, tile: Tile) -> tuple:
    """(descriptor of scales that lie side by side or None, scales or None, zero points, factor; strides of all but the first).

    Where a thread reads two e4m3 scales, they are one number.
    """
    of, scale, (expert, row, group, *others) = w.format, w.scale, w.strides[3:]
    if of.name == "e2m1_words":
        numbers = scale.view(torch.int16 if of.scale == "e4m3" else torch.uint8)
        each = rows_side_by_side(of.group)
        found = _in_pieces(numbers, 4 * each, w, parts, tile, each)
        return (found, None, None, w.factor), (0, 0, 0, *others)
    bits = expert | row | scale.storage_offset() | scale.data_ptr()
    if of.name in E2M1 and (of.scale, piece(w), group, bits % 2) == ("e4m3", 128, 1, 0):
        scale, expert, row = scale.view(torch.int16), expert // 2, row // 2
    return (None, scale, *w.pointers()[2:]), (expert, row, group, *others)


def _pairs(rows: Rows, pairs: int) -> tuple:
    """index_ptr to stride_map."""
    index, ids, expert_map, blocks, *others = rows.args
    return (index, ids, expert_map, blocks, pairs, *others)


def gemm1(
    w: Packed,
    w2: Packed,
    bias: Tensor | None,
    h: Tensor,  # (pairs, I in whole pieces), columns in the order in which w2 takes them
    x: Tensor,
    pairs: int,
    rows: Rows,
    input_weights: Tensor | None,  # router weights to scale the input by
    activation: tuple,  # alpha, beta, limit; name, gated, interleaved, limited
    tile: Tile,
) -> Launch:
    """h = activation(x @ w.T + bias)."""
    _, gated, interleaved, _ = activation[3:]
    I = w2.columns  # noqa: E741
    held = _resident(w, tile, rows, pairs, w.data.shape[1], 1)
    how, sizes = _constants(w, tile, rows, pairs, held.overlap)
    parts = 2 if gated and not interleaved else 1
    scales, strides = _scales(w, parts, tile)
    args = (
        *(h, _rows_described(x, w, pairs, rows.tokens, tile), _described(w, parts, tile)),
        *(*scales, bias),
        *(*_pairs(rows, pairs), input_weights),
        *((0, 0) if input_weights is None else input_weights.stride()),
        *(w.columns, I, *strides, *((0, 0) if bias is None else bias.stride())),
        *(*activation[:3], input_weights is not None, *activation[3:]),
        *(*how, piece(w2), I % piece(w2) > 0, w.format.bits, *sizes),
    )
    columns = tile.rows // 2 if gated else tile.rows
    grid = ((rows.blocks or pairs) * cdiv(I, columns), 1, 1)
    return Launch("gluon_gemm1", grid, args, tile.warps, held.registers)


def gemm2(
    w: Packed,
    bias: Tensor | None,
    y: Tensor,
    h: Tensor,
    pairs: int,
    rows: Rows,
    tile: Tile,
    parts: int,
) -> Launch:
    """y (parts, pairs, N) in fp32, which sum to h @ w.T + bias: from pairs sorted by expert to their own order."""
    N = w.data.shape[1]
    held = _resident(w, tile, rows, pairs, N, parts)
    how, sizes = _constants(w, tile, rows, pairs, held.overlap)
    scales, strides = _scales(w, 1, tile)
    args = (
        *(y, _rows_described(h, w, pairs, rows.tokens, tile), _described(w, 1, tile)),
        *(*scales, bias, *_pairs(rows, pairs), w.columns, N, *strides),
        *(*((0, 0) if bias is None else bias.stride()), *how, parts, *sizes),
    )
    grid = ((rows.blocks or pairs) * cdiv(N, tile.rows) * parts, 1, 1)
    return Launch("gluon_gemm2", grid, args, tile.warps, held.registers)
