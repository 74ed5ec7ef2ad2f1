"""Weights of 4 and 8 bits on SM90: launches on a CPU, that the kernels compile, and values on a
GPU (`-m gpu`)."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from tests.support.cases import BF16, FP32, Case, assert_matches, prepared, refill, tolerance

pytest.importorskip("triton.experimental.gluon")


import moe_ops
from moe_ops.kernels import gluon_packed as kernels
from moe_ops.kernels import gluon_packed_blocks as blocks
from moe_ops.kernels import gluon_packed_launch as launch
from moe_ops.kernels import gluon_packed_matmul as matmul
from moe_ops.kernels import gluon_packed_operands as operands
from moe_ops.kernels import (
    triton_launch,
    triton_packed_launch,
    triton_tiles,
    triton_vector_packed_launch,
)
from moe_ops.kernels.triton_tiles import Tile, Tiles
from moe_ops.meta.scales import TRITON_E2M1
from moe_ops.ops import relayout

SPOKEN = launch.spoken()
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and SPOKEN
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not SM90, reason="needs a GPU of SM90 and Triton 3.6"),
)


INT4_NUMBERS = [
    torch.tensor(bits.value, dtype=torch.int16).view(BF16)
    for bits in (operands.INT4_LOW_BITS, operands.INT4_HIGH_BITS, operands.INT4_OFFSET_BITS)
]


def columns_at(U: int, bits: int) -> torch.Tensor:
    """The column at every place of a piece."""
    return kernels.in_place.fn(torch.arange(U), U, bits)


def pieces_of(K: int, U: int) -> torch.Tensor:
    """(pieces, U) columns of a row as the product takes it, -1 for a zero: the last piece is of
    the row's last U columns, and those of the one before it are zeros."""
    columns = torch.arange(-(-K // U) * U).view(-1, U)
    if K % U:
        columns[-1] = torch.where(
            columns[-1] - columns[-1, 0] < U - K % U, -1, columns[-1] - (U - K % U)
        )
    return columns[:, columns_at(U, 4)]


@pytest.mark.parametrize("K, U", [(1280, 128), (192, 64), (192, 128), (1216, 128)])
def test_arrange(K, U):
    """Rows at their pairs' positions, which may be left over from other calls where there are
    none."""
    tokens, top_k, blocks = 5, 2, 3
    x = torch.randn(tokens, K).to(BF16)
    pairs = torch.tensor([7, 0, 9, 2, 4, 1, 3, -5, 1 << 30, 8], dtype=torch.int32)
    index = torch.cat([torch.full((4 * blocks,), -1, dtype=torch.int32), pairs])
    columns = pieces_of(K, U).flatten()
    out = torch.full((10, len(columns)), float("nan"), dtype=BF16)
    args = (out, x, index, None, None, blocks, 10, 4, 4, top_k, K, 0, 0, 0, *x.stride(), U, 4)
    kernels.moe_ops_arrange[(10, -(-len(columns) // launch.COLUMNS), 1)](
        *args, launch.COLUMNS, 0, False, K % U > 0, False, False
    )
    valid = (pairs >= 0) & (pairs < 10)
    assert torch.equal(
        out[valid], torch.where(columns < 0, 0, x[pairs[valid] // top_k][:, columns])
    )
    assert out[~valid].isnan().all()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("most", launch.FEW_PAIRS)
def test_arrange_of_few_pairs(most, mapped):
    """Positions it finds itself are those of the routing kernel's order."""
    from moe_ops.kernels.triton_routing import moe_ops_route

    E, top_k, K, U = 6, 2, 192, 64
    tokens = most // top_k
    blocks, S = E * tokens, tokens * top_k
    ids = torch.randint(-2, E + 3, (top_k, tokens)).T  # strided, some of no expert
    expert_map = torch.randperm(E + 2).to(torch.int32) - 2 if mapped else None
    maps = (E + 2, 1) if mapped else (E, 0)
    x = torch.randn(tokens, K).to(BF16)
    index = torch.full((4 * blocks + S,), -1, dtype=torch.int32)
    out = torch.full((S, K), float("nan"), dtype=BF16)
    args = (index, ids, expert_map, S, E, maps[0], blocks, top_k, *ids.stride(), maps[1])
    moe_ops_route[(E, 1, 1)](*args, 16, 8, 64, mapped, False)
    nowhere = torch.empty(0, dtype=torch.int32)  # the order is not read
    args = (out, x, nowhere, ids, expert_map, blocks, S, E, maps[0], top_k, K, *ids.stride())
    kernels.moe_ops_arrange[(S, 1, 1)](
        *args, maps[1], *x.stride(), U, 4, launch.COLUMNS, most, False, False, mapped, False
    )
    order = index[4 * blocks :]
    if most == launch.FEW_PAIRS[0]:  # without a routing kernel it writes the order, too
        found, again = torch.full((S,), -1, dtype=torch.int32), torch.full_like(out, math.nan)
        args = (again, x, found, ids, expert_map, 0, S, E, maps[0], top_k, K, *ids.stride())
        kernels.moe_ops_arrange[(S, 1, 1)](
            *args, maps[1], *x.stride(), U, 4, launch.COLUMNS, most, True, False, mapped, False
        )
        assert torch.equal(found, order) and torch.equal(again[order >= 0], out[order >= 0])
    used = order >= 0
    assert 0 < used.sum() < S and used.tolist() == sorted(used.tolist(), reverse=True)
    columns = (torch.arange(0, K, U)[:, None] + columns_at(U, 4)).flatten()
    assert torch.equal(out[used], x[order[used] // top_k][:, columns])
    assert out[~used].isnan().all()


@pytest.mark.parametrize("BM", [8, 16])
@pytest.mark.parametrize("S, most", [(1, 3), (9, 3), (64, 1), (64, 4), (64, 70)])
def test_programs_find_the_blocks_of_the_routing_kernel(BM, S, most):
    """Those of at most 64 pairs, from the experts alone; of any order, with some of no expert."""
    experts = torch.randint(-1, most, (S,))
    with (
        mock.patch.object(matmul.gl, "arange", lambda a, b, layout: torch.arange(a, b)),
        mock.patch.object(matmul.gl, "where", torch.where),
        mock.patch.object(matmul.gl, "sum", torch.sum),
        mock.patch.object(
            matmul,
            "local_expert",
            lambda *a: torch.where(a[3], experts[a[2].clamp(max=S - 1)], -1),
        ),
        mock.patch.object(torch.Tensor, "to", lambda t, _: t.int()),
    ):
        args = (None, None, S, most, most, 1, 1, 1, 0, 64, False, BM, 4)
        found = [matmul.block_of.fn(torch.tensor(p), *args) for p in range(S)]
    blocks = sorted([[int(v) for v in numbers] for here, *numbers in found if here])
    expected, first = [], 0
    for e in range(most):
        end = first + int((experts == e).sum())
        expected += [[e, at, end] for at in range(first, end, BM)]
        first = end
    assert blocks == expected


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_are_summed(parts):
    from moe_ops.kernels.triton_experts import moe_ops_combine

    M, top_k, E, K = 3, 2, 4, 70
    ids = torch.tensor([[0, 3], [2, -1], [1, 0]])
    weights, y = torch.rand(M, top_k), torch.randn(parts, M * top_k, K)
    y[:, 3] = float("nan")  # a pair that is not here
    out = torch.full((M, K), float("nan"))
    args = (out, y, weights, ids, None, E, E, K, *ids.stride(), 0, *weights.stride())
    moe_ops_combine[(M, 2, 1)](*args, *out.stride(), top_k, False, True, parts, 64, False)
    here = (ids >= 0)[..., None]
    rows = torch.where(here, y.double().sum(0).reshape(M, top_k, K), 0.0)
    expected = (rows * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("experts", [[2, 2, 0, 2, 5], [7, 7, 7, 7, 7], [-1, -1, -1, -1, 9]])
def test_first_block_says_how_many_are_used(experts):
    from moe_ops.kernels.triton_routing import moe_ops_route

    E, TILE, blocks = 6, 2, 5
    ids = torch.tensor(experts)[:, None]
    index = torch.full((4 * blocks + len(experts),), -7, dtype=torch.int32)
    args = (index, ids, None, len(experts), E, E, blocks, 1, *ids.stride(), 0)
    moe_ops_route[(E, 1, 1)](*args, 16, TILE, 64, False, False)
    used = sum(-(-experts.count(e) // TILE) for e in range(E))
    assert index[3] == used
    assert (index[: 4 * blocks : 4] >= 0).tolist() == [i < used for i in range(blocks)]


COMPILE = """
from benchmarks import compile_kernels as c
from moe_ops.kernels import triton_tiles
from moe_ops.kernels import gluon_packed_launch as launch
from moe_ops.kernels.triton_tiles import Tile, Tiles
chip = c.chip_of(90)
cases = {"int4_w4a16:g64:zp": "silu", "nvfp4_w4a16": "swigluoai"}
cases |= {"fp8_w8a16:block": "relu2_no_mul"}
cases |= {"int8_w8a16:g128:zp": "silu", "mxfp4_w4a16": "silu", "int4_w4a16:g128": "silu"}
for scheme, activation in cases.items():
    for tokens, tile in (
        (8, Tile(64, 256, 2, 4)),
        (16, Tile(128, 128, 3, 4)),
        (64, Tile(128, 256, 2, 8)),
    ):
        layout = "triton_e2m1" if tokens < 64 and scheme in ("nvfp4_w4a16", "mxfp4_w4a16") else ""
        call = c.Call((4, 2, 512, 320), 9, scheme, activation=activation, bias=True, layout=layout)
        tiles = Tiles(False, tokens, tile, tile, 64, wgmma=True)
        with triton_tiles.searching(tiles):
            found = c.compile_call(call, chip, 90)
        products = [one for one in found if one.name.startswith("moe_ops_gluon")]
        assert len(products) == 2
        for one in products:
            assert "wgmma.mma_async" in one.binary.asm["ptx"]
            assert c.usage(one.binary).spilled <= 96, (scheme, tokens, c.usage(one.binary))
"""


@pytest.mark.slow
@pytest.mark.skipif(not SPOKEN, reason="this Triton has another experimental language")
def test_compiles_for_sm90():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=environment)


def test_descriptors_take_rows_of_16_byte_step_alone():
    from moe_ops.kernels.triton_launch import gpu
    from moe_ops.kernels.triton_packed_launch import packed
    from moe_ops.schemes import get_scheme

    def possible(scheme, K, group, dtype=BF16, scale=torch.bfloat16):
        storage = get_scheme(scheme).weight.storage_dtype
        data = torch.zeros(2, 64, K if "w8" in scheme else K // 2).to(storage)
        scales = torch.zeros(2, 64, max(K // group, 1), dtype=scale)
        w = packed("w", data, scales, None, None, None, scheme, gpu(-1))
        return launch.possible(w, dtype)

    assert possible("int4_w4a16:g128", 256, 128) and possible("int4_w4a16:g64", 192, 64)
    assert possible("mxfp4_w4a16", 192, 32, scale=torch.uint8)
    assert not possible("mxfp4_w4a16", 96, 32, scale=torch.uint8)  # no piece of 64 columns
    assert not possible("int4_w4a16:g128", 256, 128, torch.float16)
    assert possible("fp8_w8a16:block", 192, 128) and possible("int8_w8a16:g64", 192, 64)
    assert not possible("int8_w8a16:g32", 192, 32)
    assert possible("int4_w4a16:g32", 128, 32) and possible("int4_w4a16:g32", 192, 32)
    assert not possible("int4_w4a16:g32", 128, 32, scale=torch.float32)
    assert possible("int4_w4a16:g64", 192, 64, scale=torch.float32)


@pytest.mark.parametrize("K", [128, 192, 256, 1216])
def test_last_piece_of_weights_reaches_back(K):
    """What the copy engine is told of them, at the places `fill_weights` asks for."""
    from moe_ops.kernels.triton_launch import gpu
    from moe_ops.kernels.triton_packed_launch import packed

    data = torch.randint(0, 256, (2, 6, K // 2), dtype=torch.uint8)
    scales = torch.zeros(2, 6, K // 32, dtype=torch.uint8)
    w = packed("w", data, scales, None, None, None, "mxfp4_w4a16", gpu(-1))
    U, tile = launch.piece(w), Tile(2, 256, 2, 4)
    assert U == 128 and launch._pieces(w, tile) == (2 if K % U == 0 else 1)
    found = launch._described(w, 2, tile)
    pieces = data.as_strided(found.shape, found.strides)
    for i in range(-(-K // U)):
        at = i if K % U == 0 else min(2 * i, K * 2 // U - 2)
        start = min(i * U, K - U) // 2
        expected = data[..., start : start + U // 2].unflatten(1, (2, 3))
        assert torch.equal(pieces[:, at], expected)
    assert at == found.shape[1] - 1


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16"])
@pytest.mark.parametrize("K", [128, 192, 256, 1216])
def test_scales_lie_where_the_copy_engine_takes_them(scheme, K):
    """Of each piece, at the places `fill_weights` asks for, the numbers that `scale_layout` gives
    a row's four threads."""
    from moe_ops.kernels.triton_launch import gpu
    from moe_ops.kernels.triton_packed_launch import packed

    weight = torch.randn(2, 32, K).to(BF16) * torch.rand(2, 32, K).exp2()
    natural = moe_ops.quantize(weight, scheme)
    ready = prepared(natural)
    tensors = (ready.qdata, ready.scale, None, ready.global_scale, None)
    w = packed("w", *tensors, scheme, gpu(-1), TRITON_E2M1)
    tile = Tile(16, 256, 2, 4)
    found = launch._scales(w, 2, tile)[0][0]
    assert found.block_shape[:3] == [1, 2 if K % 128 == 0 else 1, 2]
    pieces = found.base.as_strided(found.shape, found.strides)
    scales, group = natural.scale.view(torch.uint8), w.format.group
    R = group // 4
    for i in range(-(-K // 128)):
        at = i if K % 128 == 0 else min(2 * i, K * 2 // 128 - 2)
        numbers = pieces[:, at].unflatten(-1, (2, R, 2)).transpose(-3, -2).flatten(-2)
        numbers = numbers.flatten(1, 3).contiguous().view(torch.uint8)
        start = min(i * 128, K - 128) // group
        assert torch.equal(numbers, scales[:, :, start : start + 128 // group])
    assert at == found.shape[1] - 1
    assert found.layout.swizzle_byte_width == 32 and found.strides[-1] == 1
    taken = launch.possible(w, BF16)
    moved = torch.zeros(w.scale.numel() + 8, dtype=torch.uint8)[8:].view(w.scale.dtype)
    assert taken and not launch.possible(w._replace(scale=moved.view_as(w.scale)), BF16)
    assert not triton_vector_packed_launch.possible(w, w._replace(scale=moved.view_as(w.scale)))


@pytest.mark.parametrize(
    "first, steps, taken",
    [
        (0, (64 * 128, 128, 1), True),
        (0, (64 * 144, 144, 1), True),
        (16, (64 * 144, 144, 1), True),
        (0, (64 * 136, 136, 1), False),
        (8, (64 * 128, 128, 1), False),
        (0, (128, 256, 2), False),  # columns apart
        (0, (0, 128, 1), False),  # experts that share their weights
    ],
)
def test_weights_in_other_places(first, steps, taken):
    from moe_ops.kernels.triton_launch import gpu
    from moe_ops.kernels.triton_packed_launch import packed

    data = torch.zeros(10**5, dtype=torch.uint8)[first:].as_strided((2, 64, 128), steps)
    scales = torch.zeros(2, 64, 2, dtype=BF16)
    w = packed("w", data, scales, None, None, None, "int4_w4a16:g128", gpu(-1))
    assert launch.possible(w, BF16) == taken


def test_rows_are_those_of_pairs():
    """Whatever room the workspaces have: behind the pairs of the index workspace is other
    memory."""
    from moe_ops.kernels.triton_launch import gpu
    from moe_ops.kernels.triton_packed_launch import packed
    from moe_ops.kernels.triton_rows import pair_rows

    data, scales = torch.zeros(2, 64, 128, dtype=torch.uint8), torch.zeros(2, 64, 2, dtype=BF16)
    w = packed("w", data, scales, None, None, None, "int4_w4a16:g128", gpu(-1))
    x, workspace = torch.zeros(3, 256, dtype=BF16), torch.zeros(40, 256, dtype=BF16)
    ids, index = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(14, dtype=torch.int32)
    rows = pair_rows(index, ids, None, 2, 2, False, 8, 2)
    found = launch.arrange(workspace, x, w, 6, rows, gpu(-1))
    assert found.grid == (6, 1, 1) and found.args[5:7] == (2, 6)


def product(scheme: str, tokens: int, tile: tuple) -> blocks.Product:
    """A GEMM as far as registers depend on it, in pieces of 128 columns; of "NAME prepared" or
    "NAME float32", as `check` has it."""
    name, _, how = scheme.partition(" ")
    found = triton_packed_launch.describe(name)
    if how == "prepared":
        found = found._replace(name="e2m1_words")
    found = launch._scaled(found, FP32 if how == "float32" else BF16)
    return blocks.Product(found, 128, False, Tile(*tile), tokens, max(128, tile[1]))


# --- values --------------------------------------------------------------------------------------


def tiles(tokens: int, *tile: int) -> Tiles:
    return Tiles(False, tokens, Tile(*tile), Tile(*tile), 64, wgmma=True)


def check(scheme: str, tiles: Tiles | None, activation: str = "silu", **sizes) -> None:
    """Against the oracle; weights of "NAME prepared" as the backend wants them, others as they
    are, of "NAME DTYPE" with scales in that dtype."""
    name, _, how = scheme.partition(" ")
    words = how == "prepared"
    case = Case("cuda", BF16, name, activation, **sizes)
    if how and not words:
        scaled = [w._replace(scale=w.scale.to(getattr(torch, how))) for w in case.args[1:3]]
        case.args[1:3] = scaled
    with (
        mock.patch.dict(relayout.RELAYOUTS, {} if words else {"triton": ()}),
        triton_tiles.searching(tiles),
        mock.patch.object(launch, "gemm1", wraps=launch.gemm1) as used,
    ):
        case.check("triton")
    read = {call.args[0].format.name for call in used.call_args_list}
    assert read and (read == {"e2m1_words"}) == words


INT4 = ["int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g32", "int4_w4a16:channel"]
GPU_SCHEMES = [*INT4, *(f"{name}:zp" for name in INT4), "mxfp4_w4a16", "nvfp4_w4a16"]
SHORT_INT4 = ["int4_w4a16:g64", "int4_w4a16:g64:zp", "int4_w4a16:g32", "int4_w4a16:g32:zp"]
PREPARED = ["mxfp4_w4a16 prepared", "nvfp4_w4a16 prepared"]
GPU_SCHEMES += ["int4_w4a16:g64 float16", "int4_w4a16:g128:zp float32"]  # groups' sums are scaled
GPU_SCHEMES += [*PREPARED, "int8_w8a16:channel", "int8_w8a16:g64:zp", "int8_w8a16:g128"]
GPU_SCHEMES += [f"fp8_w8a16:{name}" for name in ("tensor", "channel", "block")]
TILES = [
    (8, 64, 256, 2, 4),
    (8, 64, 256, 4, 4),
    (16, 128, 128, 4, 4),
    (32, 128, 128, 4, 4),
    (16, 128, 256, 2, 4),
    (32, 128, 256, 3, 8),
    (64, 128, 128, 4, 8),
    (64, 128, 256, 2, 8),
]


@pytest.mark.parametrize("scheme", [pytest.param(name, marks=ON_GPU) for name in GPU_SCHEMES])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_values(scheme, tile):
    """Blocks that are full and not, steps that pass the end of a row."""
    check(scheme, tiles(*tile), M=11 * tile[0] // 8, E=4, top_k=2, K=640, I=384, bias=True)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(n, marks=ON_GPU)
        for n in ("int4_w4a16:g64:zp", "int4_w4a16:g64 float32", "nvfp4_w4a16", *PREPARED)
    ],
)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("I", [128, 1088])
@pytest.mark.parametrize(
    "tile", [(8, 64, 256, 4, 4), (32, 128, 256, 2, 4), (64, 128, 128, 3, 8)], ids=str
)
def test_parts_of_the_columns(scheme, parts, I, tile):  # noqa: E741
    """A part has more steps than the next; of one step, or more rows than the workspace has place
    for, there is one."""
    for M, expected in ((9, parts if I > 128 else 1), (600, 1)):
        sizes = {"M": M, "E": 5, "top_k": 2, "K": 256, "I": I}
        with mock.patch.object(launch, "gemm2", wraps=launch.gemm2) as used:
            check(scheme, tiles(*tile)._replace(parts=parts), bias=True, **sizes)
        assert {call.args[-1] for call in used.call_args_list} == {expected}


@pytest.mark.parametrize("words", [False, True])
def test_kernels_are_kept_by_what_they_are_compiled_for(words):
    """Calls of one key run one set of kernels: their constants must be alike."""
    from moe_ops.kernels import triton_packed_launch as packed_launch

    case = Case("cpu", BF16, "mxfp4_w4a16", "silu", M=1, E=4, top_k=1, K=256, I=768)
    w13, w2 = [prepared(w) if words else w for w in case.args[1:3]]
    kept: dict[tuple, tuple] = {}
    some = {"chunk": 64, "parts": 3}  # whatever a table or a search says
    for M in (2, 64, 65, 341, 342, 400, 512, 513, 1024, 1025):
        x, ids, weights = (
            torch.zeros(M, 256, dtype=BF16),
            torch.zeros(M, 1).long(),
            torch.ones(M, 1),
        )
        with (
            mock.patch.object(launch, "usable", lambda *_: True),
            mock.patch.object(packed_launch, "run") as run,
            triton_tiles.searching(tiles(8, 128, 128, 3, 4)._replace(**some)),
        ):
            moe_ops.fused_experts(x, w13, w2, weights, ids, backend="triton")
        launches, key, *_ = run.call_args.args
        constants = [one.registers for one in launches]
        for one in launches:
            names = inspect.signature(triton_launch._kernels()[one.kernel].fn).parameters
            values = zip(names.values(), one.args, strict=True)
            constants += [value for p, value in values if "constexpr" in str(p.annotation)]
        assert kept.setdefault(key, tuple(constants)) == tuple(constants)
    assert len(kept) == (8 if words else 5)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(n, marks=ON_GPU)
        for n in (
            "mxfp4_w4a16",
            "nvfp4_w4a16",
            *PREPARED,
            *SHORT_INT4,
            "int4_w4a16:g64:zp float16",
        )
    ],
)
@pytest.mark.parametrize("tile", [(8, 64, 64, 4, 4), (16, 64, 256, 3, 4)], ids=str)
def test_rows_that_end_within_128_columns(scheme, tile):
    """Pieces of 64 columns, or of 128 whose last one reaches back."""
    sizes = {"M": 16, "E": 2, "top_k": 1, "K": 2880, "I": 320}
    check(scheme, tiles(*tile), "swigluoai", bias=True, **sizes)


@pytest.mark.parametrize("scheme", [pytest.param(n, marks=ON_GPU) for n in PREPARED])
@pytest.mark.parametrize("M", [2, 5, 31, 64, 65, 200, 700])
@pytest.mark.parametrize("sizes", [(256, 128), (2880, 320)], ids=str)
def test_prepared_weights_of_any_number_of_tokens(scheme, M, sizes):
    """With the tiles that are chosen: no other kernels read this layout, however many rows an
    expert has."""
    check(scheme, None, "swigluoai", bias=True, M=M, E=4, top_k=2, K=sizes[0], I=sizes[1])


@pytest.mark.parametrize(
    "scheme", [pytest.param(n, marks=ON_GPU) for n in ("mxfp4_w4a16", *SHORT_INT4, *PREPARED)]
)
def test_tiles_that_pass_the_last_row(scheme):
    sizes = {"M": 20, "E": 3, "top_k": 1, "K": 320, "I": 192}
    check(scheme, tiles(16, 128, 128, 4, 4), "relu2_no_mul", bias=True, **sizes)


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(n, marks=ON_GPU) for n in ("int4_w4a16:g128:zp", "nvfp4_w4a16", *PREPARED)],
)
@pytest.mark.parametrize("activation", ["swigluoai", "relu2_no_mul", "gelu"])
def test_activations_map_and_weights_on_input(scheme, activation):
    sizes = {"M": 20, "E": 3, "top_k": 1, "K": 512, "I": 256}
    check(scheme, None, activation, expert_map=True, on_input=True, **sizes)


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(n, marks=ON_GPU) for n in ("int4_w4a16:g64", "mxfp4_w4a16", *PREPARED)],
)
@pytest.mark.parametrize("tile", [(8, 128, 256, 2, 4), (16, 64, 256, 3, 4)], ids=str)
def test_rings_that_wrap(scheme, tile):
    """Several times as many steps as places, of either parity."""
    check(scheme, tiles(*tile), M=20, E=3, top_k=2, K=2304, I=1280)


@pytest.mark.parametrize(
    "scheme", [pytest.param(n, marks=ON_GPU) for n in ("int4_w4a16:g64", "int8_w8a16:g64:zp")]
)
@pytest.mark.parametrize("M", [2, 5])
def test_fewer_rows_than_a_block_has(scheme, M):
    check(scheme, tiles(16, 128, 128, 3, 4), M=M, E=1, top_k=1, K=64, I=64)


ROUTINGS = {
    "one expert": {"M": 64, "top_k": 1, "ids": torch.full((64, 1), 69)},
    "few experts": {"M": 32, "top_k": 2},
    "most of no expert": {"M": 16, "top_k": 4},
    "two tokens": {"M": 2, "top_k": 4},
}


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(n, marks=ON_GPU) for n in ("int4_w4a16:g128", "nvfp4_w4a16", *PREPARED)],
)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("options", [{}, {"expert_map": True, "ids_dtype": torch.int64}], ids=str)
def test_layers_without_a_routing_kernel(scheme, routing, tokens, options):
    """At most 64 pairs of as many experts: several blocks of one expert, none of most, ids that
    are not here."""
    sizes = {"E": 70, "K": 256, "I": 128, "bias": True, **ROUTINGS[routing], **options}
    M, top_k = sizes["M"], sizes["top_k"]
    if routing == "few experts":
        sizes["ids"] = torch.rand(M, 3).topk(top_k).indices + 5
    elif routing == "most of no expert":
        sizes["ids"] = torch.where(torch.rand(M, top_k) < 0.7, -1, torch.randint(70, (M, top_k)))
    with mock.patch.object(triton_packed_launch, "route") as route:
        check(scheme, tiles(tokens, 64, 256, 2, 4), **sizes)
    assert not route.called


@pytest.mark.parametrize("scheme", [pytest.param("int4_w4a16:g128", marks=ON_GPU)])
def test_layers_without_a_routing_kernel_weigh_their_input(scheme):
    sizes = {"M": 30, "E": 40, "top_k": 1, "K": 256, "I": 128}
    check(scheme, None, expert_map=True, on_input=True, **sizes)


def amid_others(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows 16 bytes longer, behind an expert and 16 bytes of others."""
    step = 16 // t.element_size()
    wide = t.new_empty(t.shape[0] + 1, t.shape[1], t.shape[2] + 2 * step)
    wide.view(torch.uint8).fill_(255)
    return wide[1:, :, step:-step].copy_(t)


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(n, marks=ON_GPU) for n in ("int4_w4a16:g128:zp", "mxfp4_w4a16", "nvfp4_w4a16")],
)
def test_weights_and_scales_that_are_parts_of_others(scheme):
    case = Case("cuda", BF16, scheme, M=20, E=3, top_k=2, K=512, I=256)
    for i in (1, 2):
        w = case.args[i]
        parts = {"qdata": amid_others(w.qdata)}
        for name in ("scale", "zero_point"):
            if getattr(w, name) is not None:  # columns apart
                parts[name] = getattr(w, name).mT.contiguous().mT
        case.args[i] = w._replace(**parts)
    with (
        mock.patch.dict(relayout.RELAYOUTS, {"triton": ()}),
        triton_tiles.searching(tiles(16, 128, 128, 3, 4)),
        mock.patch.object(launch, "gemm1", wraps=launch.gemm1) as used,
    ):
        case.check("triton")
    (call,) = used.call_args_list
    assert not call.args[0].data.is_contiguous() and not call.args[0].scale.is_contiguous()


@pytest.mark.parametrize("scheme", [pytest.param(n, marks=ON_GPU) for n in PREPARED])
def test_prepared_experts_that_are_parts_of_others(scheme):
    """Every second one; what lies between belongs to others."""
    case = Case("cuda", BF16, scheme.partition(" ")[0], M=20, E=6, top_k=2, K=512, I=256)
    refill(case, 1)
    case.args[4] %= 3
    ready = case.args_for("triton")[1:3]
    assert all(w.weight_layout == TRITON_E2M1 for w in ready)
    case.args[1:3] = [w[1::2] for w in case.args[1:3]]
    args = [case.args[0], *[w[1::2] for w in ready], *case.args[3:]]
    out = moe_ops.fused_experts(*args, **case.options, backend="triton")
    assert_matches(out, case.reference(), tolerance(BF16, case.scheme, "cuda"))


@pytest.mark.parametrize(
    "scheme", [pytest.param(n, marks=ON_GPU) for n in ("mxfp4_w4a16", "int4_w4a16:g128")]
)
def test_repeatable(scheme):
    """Nothing depends on which copy arrives first: values stay the same, whatever ran before."""
    case = Case("cuda", BF16, scheme, M=40, E=4, top_k=2, K=1024, I=512)
    other = Case("cuda", BF16, scheme, M=9, E=4, top_k=2, K=1024, I=512, seed=1)
    with (
        triton_tiles.searching(tiles(16, 128, 128, 3, 4)),
        mock.patch.object(launch, "gemm1", wraps=launch.gemm1) as used,
    ):
        first = case.check("triton")
        for _ in range(30):
            other.run("triton", poison=False)
            assert torch.equal(first, case.run("triton"))
    assert used.called
