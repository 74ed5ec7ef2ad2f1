"""Blocks of a multiprocessor, and the tiles that are chosen for them."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")


from moe_ops.kernels import gluon_packed_blocks as blocks
from moe_ops.kernels import gluon_packed_launch as launch
from moe_ops.kernels.triton_tiles import Tile
from tests.kernels.mixed_gemm.test_sm90_wgmma import product


@pytest.mark.parametrize(
    "scheme",
    [
        *("int4_w4a16:g128", "int4_w4a16:g128 float32"),
        *("mxfp4_w4a16", "nvfp4_w4a16 prepared", "fp8_w8a16:block"),
    ],
)
@pytest.mark.parametrize("tokens", [8, 32, 64])
@pytest.mark.parametrize(
    "tile", [(64, 256, 2, 4), (64, 256, 4, 4), (128, 128, 4, 4), (128, 256, 3, 8)], ids=str
)
def test_registers_fit_a_multiprocessor(scheme, tokens, tile):
    """Four more warps have 24 each, and what they leave is rounded to 8 for the others, 232 at
    most."""
    p = product(scheme, tokens, tile)
    for tiles in range(0, 5000, 97):
        found = blocks.resident(p, tiles)
        of_products = (found.registers * (tile[3] + 4) - 24 * 4) / tile[3]
        assert found.registers % 8 == 0 and 72 <= of_products <= 232
        assert found.blocks * found.registers * 32 * (tile[3] + 4) <= blocks.REGISTERS
        needed = blocks._least(p, found.overlap)
        assert of_products > needed - 16 or found.blocks == 2  # rounded twice; two rather spill


def test_blocks_follow_from_rounds():
    """As many as fit, but of prepared weights as many as fill their rounds: of 7.0 and 3.6 tiles a
    multiprocessor, and of 9.7 and 5.0, those that were the fastest on an H200."""
    p = product("nvfp4_w4a16 prepared", 8, (128, 128, 3, 4))
    most = blocks.resident(p._replace(format=p.format._replace(name="e2m1")), 0).blocks
    each = 132
    chosen = {7.0: (4, True), 3.6: (4, True), 9.7: (5, False), 4.9: (5, False), 5.5: (3, True)}
    for tiles, expected in chosen.items():
        found = blocks.resident(p, int(tiles * each))
        assert (found.blocks, found.overlap) == expected
    natural = product("nvfp4_w4a16", 8, (128, 128, 3, 4))
    assert {blocks.resident(natural, n).blocks for n in range(0, 5000, 50)} == {most}


@pytest.mark.parametrize(
    "sizes, tiles",
    [  # pairs, experts here, of all; programs of a tile
        ((32, 32, 32, 1), 20.4 * 3),
        ((32, 32, 32, 2), 20.4 * 3 * 2),
        ((10**6, 32, 32, 1), 10**6 / 8 * 3),  # every expert has many blocks
        ((64, 8, 16, 1), 7.9 * 3),  # half of the pairs are here
    ],
)
def test_tiles_of_a_layer(sizes, tiles):
    pairs, experts, num_ids, parts = sizes
    assert launch._tiles(pairs, experts, num_ids, 8, 3) * parts == pytest.approx(tiles, rel=0.03)


def test_search_tries_parts_and_none():
    base = launch.choose(128, 8, 4096, 14336, 4, 256)
    assert base.parts == 3  # 256 tiles of GEMM2 for 132 multiprocessors of three blocks
    for ones, twos in launch.search_space(base, 16, 8, 4096):
        assert {t.parts for t in ones} == {1} and {t.parts for t in twos} >= {1, 2, 3}
    for _, twos in launch.search_space(base, 4, 128, 2048):
        assert {t.parts for t in twos} == {1}


@pytest.mark.parametrize("columns", range(128, 1700, 128))
def test_every_part_has_a_step(columns):
    """Shared out as `tile_at` does."""
    from moe_ops.kernels.triton_launch import gpu
    from moe_ops.kernels.triton_packed_launch import packed

    data = torch.zeros(1, 128, columns // 2, dtype=torch.uint8)
    scales = torch.zeros(1, 128, columns // 32, dtype=torch.uint8)
    w = packed("w", data, scales, None, None, None, "mxfp4_w4a16", gpu(-1))
    for k, most in itertools.product((128, 256), (1, 2, 3)):
        steps = -(-columns // k)
        tile = Tile(128, k, 2, 4)
        parts = launch.parts_of(w, tile, most, 10)
        each = -(-steps // parts)
        assert 1 <= parts <= most and (parts - 1) * each < steps <= parts * each
        assert parts == most or steps < most * each
    for pairs, most in ((341, 3), (342, 2), (512, 2), (513, 1)):  # room for that many
        assert launch.parts_of(w, tile, 3, pairs) == launch.parts_of(w, tile, most, 10)


@pytest.mark.parametrize("pairs", [1, 64, 341, 342, 1023, 1024, 5000])
def test_workspace_holds_parts_of_few_rows(pairs):
    rows = launch.y_rows(pairs)
    assert rows >= pairs and rows == max(pairs, min(3 * pairs, 1024))


def test_who_serves_many_rows():
    """Of 4 bits these kernels are the faster ones however many rows an expert has; of 8 bits
    others are, from 80 on."""
    for rows in (2, 64, 640, 700, 10**6):
        assert launch.choose(rows, 8, 4096, 4096, 4, 256).wgmma
        assert (launch.choose(rows, 8, 4096, 4096, 8, 256) is None) == (rows > 640)


@pytest.mark.parametrize("average", [0.1, 1, 4, 4.5, 8, 10, 10.5, 16, 22, 23, 48, 64, 65, 500])
def test_chosen_blocks_are_worth_it(average):
    found = launch.choose(int(average * 1000), 1000, 4096, 4096, 4, 256)
    assert launch.worth(found.tokens, average)
