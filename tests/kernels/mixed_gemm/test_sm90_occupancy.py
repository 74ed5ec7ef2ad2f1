"""Occupancy of the wgmma kernels, and what their launches derive from a config."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")


from moe_ops.choose import mixed
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels.configs import GemmConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm import (
    configs,
    operands,
    sm90_levels,
    sm90_occupancy,
    sm90_wgmma,
)
from moe_ops.kernels.mixed_gemm.sm90_occupancy import occupancy
from tests.kernels.mixed_gemm.test_sm90_wgmma import int4, mxfp4, wgmma_kernel

GPU = Gpu(227 * 1024, True, True)


@pytest.mark.parametrize(
    "scheme",
    [
        *("int4_w4a16:g128", "int4_w4a16:g128 float32"),
        *("mxfp4_w4a16", "nvfp4_w4a16 prepared", "fp8_w8a16:block"),
    ],
)
@pytest.mark.parametrize("block_m", [8, 32, 64])
@pytest.mark.parametrize(
    "gemm", [(64, 256, 2, 4), (64, 256, 4, 4), (128, 128, 4, 4), (128, 256, 3, 8)], ids=str
)
def test_registers_fit_a_multiprocessor(scheme, block_m, gemm):
    """Four more warps have 24 each, and what they leave is rounded to 8 for the others, 232 at
    most."""
    p = wgmma_kernel(scheme, block_m, gemm)
    for tiles in range(0, 5000, 97):
        found = occupancy(p, tiles, GPU)
        of_consumers = (found.registers * (gemm[3] + 4) - 24 * 4) / gemm[3]
        assert found.registers % 8 == 0 and 72 <= of_consumers <= 232
        assert found.blocks * found.registers * 32 * (gemm[3] + 4) <= GPU.registers
        needed = sm90_occupancy._min_registers(p, found.overlap)
        assert of_consumers > needed - 16 or found.blocks == 2  # rounded twice; two rather spill


def test_blocks_follow_from_waves():
    """As many as fit, but of prepared weights as many as fill their waves: of 7.0 and 3.6 tiles a
    multiprocessor, and of 9.7 and 5.0, those that were the fastest on an H200."""
    p = wgmma_kernel("nvfp4_w4a16 prepared", 8, (128, 128, 3, 4))
    most = occupancy(p._replace(format=p.format._replace(name="e2m1")), 0, GPU).blocks
    each = 132
    chosen = {7.0: (4, True), 3.6: (4, True), 9.7: (5, False), 4.9: (5, False), 5.5: (3, True)}
    for tiles, expected in chosen.items():
        found = occupancy(p, int(tiles * each), GPU)
        assert (found.blocks, found.overlap) == expected
    natural = wgmma_kernel("nvfp4_w4a16", 8, (128, 128, 3, 4))
    assert {occupancy(natural, n, GPU).blocks for n in range(0, 5000, 50)} == {most}


def test_which_weights_are_streamed():
    """int4 with a scale for a whole chunk, beside few tokens if its rows are long. Four blocks
    fit."""
    p = wgmma_kernel("int4_w4a16:g128", 8, (128, 256, 2, 4))._replace(streams=True, steps=16)
    assert occupancy(p, 256, GPU) == (4, 64, True, True)
    assert not occupancy(p._replace(steps=15), 256, GPU).stream
    assert not occupancy(p._replace(streams=False), 256, GPU).stream
    assert not occupancy(p._replace(block_m=32), 256, GPU).stream
    assert not occupancy(
        p._replace(config=GemmConfig(128, 128, 4, 4), block_m=64), 256, GPU
    ).stream
    one_slot = p._replace(config=p.config._replace(num_stages=1))  # it would never be freed
    assert not occupancy(one_slot, 256, GPU).stream
    w = int4(torch.zeros(2, 64, 128, dtype=torch.uint8))
    assert w.streams and not w._replace(k_chunk=0).streams
    zero = w.pointers._replace(w_zero=torch.zeros(1))
    assert not w._replace(pointers=zero).streams


def test_int4_overlaps_where_three_blocks_hold_all_tiles():
    """Others have a fourth block in place of the overlap."""
    kernel = wgmma_kernel("int4_w4a16:g32", 8, (128, 256, 2, 4))
    assert occupancy(kernel, 3 * 132, GPU) == (3, 80, True, False)
    assert occupancy(kernel, 3 * 132 + 1, GPU) == (4, 64, False, False)


@pytest.mark.parametrize("scheme", ["nf4_w4a16:g64", "iq4_w4a16:g32:super"])
def test_blocks_hold_their_own_tables_of_levels(scheme):
    """Two of eight warps or one of 16; each asks for so much memory beside its table that Triton
    asks for both.
    """
    for block_m, average in ((8, 4), (16, 8), (32, 16), (48, 32), (64, 50), (80, 64)):
        for columns in (2048, 2880):
            layer = LayerSizes(8 * average, 8, columns, columns, GPU)
            found = mixed.choose_wgmma(layer, 4, operands.STAGES_OF_EIGHT_WARPS, "levels")
            tile, blocks = found.gemm1, 16 // found.gemm1.num_warps
            assert found.block_m == block_m
            assert sm90_occupancy.beside_pairs(tile, block_m, tile.block_k) == tile
            kernel = wgmma_kernel(scheme, block_m, tile)
            assert occupancy(kernel, 2000, GPU).blocks == blocks
            ring = tile.num_stages * tile.stage_bytes(block_m, 4, 2)
            assert ring >= 48 << 10 and blocks * (ring + (34 << 10)) <= GPU.multiprocessor_memory
    short = GemmConfig(64, 128, 3, 4)  # 6 KB a stage
    assert sm90_occupancy.beside_pairs(short, 8, 128).num_stages == 8
    assert sm90_occupancy.PAIRS_BYTES == sm90_levels.PAIRS_BYTES


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
    pairs, experts, num_ids, split_k = sizes
    found = sm90_wgmma.expected_blocks(pairs, experts, num_ids, 8) * 3 * split_k
    assert found == pytest.approx(tiles, rel=0.03)


@pytest.mark.parametrize(
    "of, expected",
    [  # that run at once, blocks, pairs, tiles of a block
        ((528, 21, 32, 90), 16),  # those of all pairs
        ((528, 10.6, 12, 45), 45),  # those of second pairs have no tile
        ((528, 15.6, 20, 45), 26),
        ((528, 70, 600, 12), 1),
        ((528, 0.1, 0.1, 45), 45),
    ],
)
def test_programs_of_a_pair(of, expected):
    assert sm90_wgmma.programs_of_pair(*of) == expected


@pytest.mark.parametrize("columns", range(128, 1700, 128))
def test_every_split_has_a_step(columns):
    """Shared out as `share_of` does."""
    w = mxfp4(torch.zeros(1, 128, columns // 2, dtype=torch.uint8))
    for k, most in itertools.product((128, 256), (1, 2, 3)):
        steps = -(-columns // k)
        gemm = GemmConfig(128, k, 2, 4)
        split_k = configs.split_k_of(w, gemm, most, 10)
        each = -(-steps // split_k)
        assert 1 <= split_k <= most and (split_k - 1) * each < steps <= split_k * each
        assert split_k == most or steps < most * each
    for pairs, most in ((341, 3), (342, 2), (512, 2), (513, 1)):  # room for that many
        assert configs.split_k_of(w, gemm, 3, pairs) == configs.split_k_of(w, gemm, most, 10)


@pytest.mark.parametrize("pairs", [1, 64, 341, 342, 1023, 1024, 5000])
def test_workspace_holds_partial_sums_of_few_rows(pairs):
    rows = configs.y_rows(pairs)
    assert rows >= pairs and rows == max(pairs, min(3 * pairs, 1024))
