"""Tiles of the mixed GEMMs that are chosen by rule, and those that a search tries."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from moe_ops.choose import candidates, mixed
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels.configs import SM90_WGMMA, GemmConfig, LayerConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm import sm90_occupancy
from moe_ops.kernels.mixed_gemm.operands import STAGES_OF_EIGHT_WARPS
from moe_ops.kernels.mixed_gemm.sm90_occupancy import occupancy
from tests.kernels.mixed_gemm.test_sm90_wgmma import wgmma_kernel

GPU = Gpu(227 * 1024, True, True)


def choose_wgmma(rows, experts, K, I, *facts):
    return mixed.choose_wgmma(LayerSizes(rows, experts, K, I, GPU), *facts)


def any_batch(rows, experts, K, I, *facts):
    return mixed.wgmma_of_segments(LayerSizes(rows, experts, K, I, GPU), *facts)


def test_warps_of_blocks_of_64_rows():
    """Four of prepared e2m1 whose rows are no whole K tiles of 256, eight elsewhere."""
    for many, K, expected in (
        (3, 2880, GemmConfig(128, 128, 4, 4)),
        (4, 2880, GemmConfig(128, 128, 4, 8)),
        (0, 2880, GemmConfig(128, 128, 4, 8)),
        (3, 4096, GemmConfig(128, 256, 2, 8)),
        (4, 4096, GemmConfig(128, 256, 2, 8)),
    ):
        found = choose_wgmma(400, 8, K, K, 4, many)
        assert found.block_m == 64 and found.gemm1 == found.gemm2 == expected


def test_blocks_of_80_rows():
    """Where about half of the experts have more than 64, two blocks fit, of int4 and prepared."""
    for name, stages in (("int4_w4a16:g128", 4), ("mxfp4_w4a16 prepared", 3)):
        for average, block_m in ((56, 64), (57, 80), (80, 80), (81, 64)):
            found = choose_wgmma(8 * average, 8, 4096, 14336, 4, stages)
            assert found.block_m == block_m
        assert choose_wgmma(512, 8, 4096, 14336, 4).block_m == 64
        found = choose_wgmma(512, 8, 4096, 14336, 4, stages)
        assert found.gemm1 == found.gemm2 == GemmConfig(128, 128, stages, 4)
        kernel = wgmma_kernel(name, 80, found.gemm1)._replace(streams=stages == 4, steps=32)
        assert (kernel.more, sm90_occupancy.columns_of(80)) == (16, 64)
        assert occupancy(kernel, 256, GPU) == (2, 128, True, False)


def test_blocks_of_two_operands_by_eight_warps():
    """Of weights of 4 bits that lack registers in four."""
    scheme = "int4_w4a16:g32"
    for average, block_m in ((30, 32), (31, 48), (39, 64), (57, 80), (80, 80), (81, 64)):
        for K, tile in ((4096, (128, 256, 2, 8)), (2880, (128, 128, 4, 8))):
            found = choose_wgmma(8 * average, 8, K, K, 4, STAGES_OF_EIGHT_WARPS, "weights")
            assert found.block_m == block_m
            if block_m > 32:
                assert found.gemm1 == found.gemm2 == GemmConfig(*tile)
            if block_m in (48, 80):
                kernel = wgmma_kernel(scheme, block_m, found.gemm1)
                assert kernel.more == 16
                assert occupancy(kernel, 256, GPU) == (2, 80, False, False)


def test_blocks_of_48_rows():
    """Between blocks of 32 and of 64, as two operands of 32 and 16 rows, two on a
    multiprocessor; others have the nearest of these."""
    stages = {"int4_w4a16:g128": 4, "mxfp4_w4a16 prepared": 3, "int8_w8a16:channel": 4}
    for name, many in stages.items():
        bits = 8 if name.startswith("int8") else 4
        most = 44 if bits == 8 else 38
        for average, block_m in ((30, 32), (31, 48), (most, 48), (most + 1, 64)):
            found = choose_wgmma(8 * average, 8, 4096, 14336, bits, many)
            assert found.block_m == block_m
        assert choose_wgmma(8 * 31, 8, 4096, 14336, bits).block_m == 64
        found = choose_wgmma(8 * 31, 8, 4096, 14336, bits, many)
        kernel = wgmma_kernel(name, 48, found.gemm1)
        assert (kernel.more, sm90_occupancy.columns_of(48), found.split_k) == (16, 32, 1)
        assert occupancy(kernel, 256, GPU) == (2, 128, True, False)


def test_tiles_that_were_measured():
    """Beside few rows in 8 bits and of 4 bits that do not stream, and of rows that are no whole
    chunks; where programs of GEMM2 are long and its last wave would be short, it is split, or has
    other tiles."""
    wide, half, narrow = (GemmConfig(*t, 4) for t in ((128, 256, 2), (64, 256, 2), (64, 128, 4)))
    usual, deep = GemmConfig(128, 128, 3, 4), GemmConfig(64, 256, 3, 4)
    deeper, eight = GemmConfig(64, 256, 4, 4), GemmConfig(128, 256, 2, 8)
    for sizes, expected in {
        (16, 16, 4096, 6400, 8): (half, wide, 1),
        (64, 16, 4096, 6400, 8): (half, half, 1),
        (128, 16, 4096, 6400, 8): (wide, half, 1),
        (64, 8, 4096, 14336, 8): (wide, wide, 1),
        (32, 4, 4096, 14336, 8): (wide, wide, 2),
        (32, 4, 5120, 8192, 8): (wide, wide, 2),  # 160 tiles of GEMM2
        (48, 6, 4096, 14336, 8): (wide, wide, 2),  # 192
        (64, 8, 6144, 16384, 8): (wide, usual, 1),  # 384, of which three fit
        (64, 8, 4096, 4096, 8): (wide, wide, 1),
        (64, 8, 4096, 4032, 8): (wide, usual, 2),
        (128, 16, 4096, 6464, 8): (wide, half, 1),
        (1024, 128, 2048, 768, 8): (wide, usual, 1),
        (32, 128, 2048, 768, 8): (half, wide, 1),  # 453, but of short rows
        (1024, 128, 2880, 2880, 8): (deeper, deeper, 1),
        (256, 128, 2880, 2880, 8): (deep, deep, 1),
        (32, 128, 2880, 2880, 8): (half, wide, 1),
        (2560, 512, 2048, 512, 8): (wide, usual, 1),
        (16, 8, 4096, 14336, 8): (half, wide, 3),
        (128, 8, 4096, 14336, 8): (eight, eight, 1),
        (64, 4, 4096, 14336, 8): (eight, eight, 3),  # 128 tiles of GEMM2
        (160, 8, 6144, 16384, 8): (eight, usual, 1),  # 384, of which three fit
        (2048, 128, 2048, 768, 8): (eight, eight, 1),
        (16, 8, 192, 192, 8): (usual, usual, 2),
        (128, 8, 192, 192, 8): (usual, usual, 3),
        (256, 128, 2880, 2880, 4): (narrow, narrow, 1),
        (256, 32, 2880, 2880, 4): (narrow, narrow, 1),
        (32, 16, 5120, 8192, 4): (wide, wide, 2),
        (32, 16, 4096, 6400, 4): (wide, wide, 1),
        (128, 16, 5120, 8192, 4): (wide, wide, 2),
        (256, 16, 5120, 8192, 4): (wide, wide, 1),
    }.items():
        found = choose_wgmma(*sizes)
        assert (found.gemm1, found.gemm2, found.split_k) == expected, sizes
    in_three = half._replace(num_stages=3)  # GEMM1 of streamed int4
    for rows, K, many, expected in (
        (16, 4096, 4, in_three),
        (15, 4096, 4, half),
        (16, 2048, 4, in_three),
        (16, 4096, 3, wide),
        (80, 4096, 4, wide),
    ):
        found = choose_wgmma(rows, 16, K, 6400, 4, many)
        assert (found.gemm1, found.gemm2) == (expected, wide)
    for sizes, expected in {  # of weights that are scaled in their natural order
        (32, 16, 5120, 8192): (8, half, wide, 2),  # 640 tiles of GEMM2, of which four fit
        (32, 16, 4096, 6400): (8, half, wide, 1),
        (128, 16, 5120, 8192): (16, half, half, 1),  # 1280
        (128, 16, 4096, 6400): (16, half, half, 1),
        (1024, 128, 2048, 768): (16, half, wide, 1),
        (256, 128, 2880, 2880): (8, narrow, narrow, 1),
        (128, 8, 4096, 14336): (32, wide, wide, 3),
    }.items():
        found = choose_wgmma(*sizes, 4, 0, "weights")
        assert (found.block_m, found.gemm1, found.gemm2, found.split_k) == expected, sizes
    for sizes, expected in {  # of levels
        (64, 128, 2048, 768): (8, (128, 256, 3, 8), (128, 256, 3, 8)),
        (1024, 128, 2048, 768): (16, (128, 256, 3, 8), (128, 256, 3, 8)),
        (2048, 128, 2048, 768): (32, (256, 256, 2, 16), (256, 256, 2, 16)),
        (2048, 128, 2880, 2048): (32, (128, 128, 4, 8), (256, 256, 2, 16)),
        (4096, 128, 2048, 2880): (48, (128, 256, 2, 8), (128, 128, 3, 8)),
        (6000, 128, 2048, 768): (64, (128, 128, 3, 8), (128, 128, 3, 8)),
        (8192, 128, 2048, 768): (80, (128, 128, 2, 8), (128, 128, 2, 8)),
        (256, 128, 2880, 2880): (8, (128, 128, 6, 8), (128, 128, 6, 8)),
    }.items():
        for found in (
            choose_wgmma(*sizes, 4, STAGES_OF_EIGHT_WARPS, "levels"),
            any_batch(*sizes, 4, 1, 1, STAGES_OF_EIGHT_WARPS, True),
        ):
            assert (found.block_m, *found[:2]) == expected, sizes
    for sizes, expected in {  # of sums that are scaled
        (16, 8, 4096, 14336): (8, deep, half, 2),
        (48, 8, 4096, 14336): (8, deep, half, 2),
        (49, 8, 4096, 14336): (16, wide, deep, 2),
        (128, 8, 4096, 14336): (32, wide, eight, 1),
        (64, 4, 4096, 14336): (32, wide, eight, 3),
        (160, 8, 6144, 16384): (32, wide, wide, 1),  # 384, of which three fit, and two do not
        (16, 8, 6144, 16384): (8, deep, half, 2),  # 768, of which four fit
        (64, 128, 2048, 768): (8, deep, wide, 1),
        (2048, 128, 2048, 768): (32, wide, wide, 1),
        (32, 16, 5120, 8192): (8, deep, half, 1),  # 1280
        (512, 8, 4096, 14336): (64, eight, eight, 2),
    }.items():
        found = choose_wgmma(*sizes, 4, 0, "sums")
        assert (found.block_m, found.gemm1, found.gemm2, found.split_k) == expected, sizes
    # rows of prepared e2m1 that are no whole chunks, of experts with less than one of them
    for rows, expected in ((8, usual), (16, usual), (32, narrow), (127, narrow), (128, usual)):
        found = choose_wgmma(rows, 128, 2880, 2880, 4, 3)
        assert found.gemm1 == found.gemm2 == expected
    # of 3 experts one block each, and three: 288 tiles of GEMM2, and 864
    assert [choose_wgmma(n, 3, 12288, 8192, 4).split_k for n in (150, 510)] == [2, 1]


@pytest.mark.parametrize("bits", [5, 6])
def test_tiles_of_any_batch_in_planes(bits):
    """Of one operand, and never with a sum that programs share."""
    for average, I in itertools.product((0.5, 3, 3.5, 4, 8, 20, 40, 200), (640, 768, 2880)):
        found = any_batch(int(8 * average), 8, 2048, I, bits, 1, 1, 0)
        assert found.block_m in (8, 16, 32, 64) and found.split_k == 1
        assert found.block_m == 8 or average > (3 if bits == 6 else 4)
        for gemm, columns in ((found.gemm1, 2048), (found.gemm2, I)):
            assert gemm.block_k == (256 if bits == 5 and columns % 256 == 0 else 128)


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_of_any_batch_are_those_whose_bits_were_compared(bits):
    """`batch_invariant` takes none of the tiles that were added since but blocks of two
    operands.
    """
    sizes = itertools.product((4, 14, 60, 120, 150, 250, 400, 800), (1024, 2880, 5120, 8192))
    for (rows, K), I in itertools.product(sizes, (320, 2880, 8192)):
        found = any_batch(rows, 8, K, I, bits, 1, 1, 0)
        assert found.block_m in (8, 16, 32, 64) and found.split_k == 1
        for gemm, columns in ((found.gemm1, K), (found.gemm2, I)):
            wide = bits == 4 and columns % 256 == 0
            assert gemm.block_k == (256 if wide else 128)
            assert gemm.block_n == 128 or (wide and found.block_m == 8)
    scout = any_batch(14, 16, 5120, 8192, bits, 1, 1, 0)  # of many programs
    assert scout.gemm2.block_n == 128
    averages = (30, 31, 38, 39, 44, 45, 56, 57, 80, 81)
    of_4_bits = (32, 48, 48, 64, 64, 64, 64, 80, 80, 64)
    of_8_bits = (32, 48, 48, 48, 48, 64, 64, 64, 64, 64)
    for average, *expected in zip(averages, of_4_bits, of_8_bits, strict=True):
        found = any_batch(8 * average, 8, 2048, 768, bits, 1, 1, 4)
        assert (found.block_m, found.split_k) == (expected[bits == 8], 1)


def test_search_tries_split_k_and_none():
    base = choose_wgmma(128, 8, 4096, 14336, 4)
    assert base.split_k == 3  # 256 tiles of GEMM2 for 132 multiprocessors of three blocks
    for ones, twos in candidates.mixed_space(base, 16, 4, 8, 4096):
        assert {t.split_k for t in ones} == {1} and {t.split_k for t in twos} >= {1, 2, 3}
    for _, twos in candidates.mixed_space(base, 4, 4, 128, 2048):
        assert {t.split_k for t in twos} == {1}


@pytest.mark.parametrize("average, block_m", [(34, 48), (64, 80)])
def test_search_tries_blocks_of_two_operands(average, block_m):
    """Where the default has them, with the tiles that such kernels compile with."""
    base = choose_wgmma(8 * average, 8, 4096, 14336, 4, 4)
    space = candidates.mixed_space(base, average, 4, 8, 4096)
    of_two = [t for ones, twos in space for t in ones + twos if t.block_m == block_m]
    assert base.block_m == block_m and base in of_two
    assert {(g.block_n, g.num_warps) for t in of_two for g in t[:2]} == {(128, 4)}
    assert {t.block_m for ones, _ in space for t in ones} == {64, block_m}


def test_tables_give_blocks_of_two_operands_to_weights_that_run_in_them(monkeypatch):
    """A scheme has others, too: with fp32 scales sums are apart, and no such kernel compiles."""
    gemm = GemmConfig(128, 128, 3, 4)
    tuned = LayerConfig(gemm, gemm, 48, 256, SM90_WGMMA)
    monkeypatch.setattr(mixed, "measured", lambda *_: tuned)
    layer = LayerSizes(280, 8, 4096, 14336, GPU, 2)
    problem = layer, torch.bfloat16, "int4_w4a16", 4
    for many, expected in ((4, 48), (0, 64)):
        found = mixed.for_experts(*problem, True, False, False, many)
        assert found.block_m == expected


def test_who_serves_many_rows():
    """Of 4 bits these kernels are the faster ones however many rows an expert has; of 8 bits
    others are, from 80 on."""
    for rows in (2, 64, 640, 700, 10**6):
        assert choose_wgmma(rows, 8, 4096, 4096, 4).kernel == SM90_WGMMA
        assert (choose_wgmma(rows, 8, 4096, 4096, 8) is None) == (rows > 640)


@pytest.mark.parametrize("average", [0.1, 1, 4, 4.5, 8, 10, 10.5, 16, 22, 23, 48, 64, 65, 500])
def test_chosen_blocks_are_worth_it(average):
    found = choose_wgmma(int(average * 1000), 1000, 4096, 4096, 4)
    assert candidates.fits_wgmma(found.block_m, average)
