"""Tiles of the kernels of plain and 8-bit weights."""

import pytest

from moe_ops.kernels.gemm import configs


@pytest.mark.parametrize("shared_memory", [65536, 101376, 166912, 232448])
def test_tiles_that_quantize_h_hold_whole_groups(shared_memory):
    """GEMM1 writes scales of 128 columns, from 256 rows of gate and up, also where 64 KiB of
    shared memory hold one such tile (gfx942)."""
    for average in (1, 8, 24, 100):
        for gated in (True, False):
            facts = (1, False, shared_memory, "block", "group", gated, False)
            config = configs.choose(8 * average, 8, 2048, 768, *facts)
            rows = 256 if gated else 128
            assert config.h_in_fp32 or config.gemm1.block_n == rows
            used = (rows + config.block_m) * 128 * config.gemm1.num_stages
            assert config.h_in_fp32 or used <= shared_memory
