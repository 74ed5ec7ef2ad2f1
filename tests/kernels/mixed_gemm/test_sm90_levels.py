"""The table of pairs of levels in shared memory, run on numbers: what warps write to it, what
threads find, and which columns they take it for."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from moe_ops.kernels.configs import LEVELS
from tests.kernels.mixed_gemm.test_decode import MASK, execute, halves, run_registers, words
from tests.kernels.mixed_gemm.test_levels import in_units

pytest.importorskip("triton.experimental.gluon")

from moe_ops.kernels.device.permutation import NEIGHBOURS
from moe_ops.kernels.mixed_gemm import levels, sm90_decode, sm90_levels, sm90_registers
from tests.kernels.mixed_gemm.test_sm90_wgmma import columns_at

SOURCE = "mixed_gemm/sm90_levels.py"
BEGIN = 0x2400  # of the table
every_table = pytest.mark.parametrize("name", LEVELS)


def written(name: str, num_warps: int, lane: int) -> dict[int, int]:
    """What a lane of all consumer warps writes, by address."""
    memory: dict[int, int] = {}
    assembly = levels.look_up(levels.NEIGHBOURS, 1), levels.registers(1)
    patched = {
        "place_of_pairs": lambda _: BEGIN + 4 * lane,
        "table_words": lambda _: [levels.table_word(name, i) & MASK for i in range(8)],
        "words_of_levels": lambda word, tables: execute(*assembly, word, *tables),
        "store_pairs": lambda *inputs: run_registers(
            "store_pairs", *inputs, source=SOURCE, memory=memory
        ),
        "barrier": lambda: None,
    }
    with mock.patch.multiple(sm90_levels, **patched):
        for warp in range(num_warps):
            with mock.patch.object(sm90_levels, "warp_of_thread", lambda _, warp=warp: warp):
                assert sm90_levels.write_pairs.fn(0, name, num_warps) == BEGIN + 4 * lane
    return memory


@every_table
@pytest.mark.parametrize("num_warps", [4, 8, 16])
def test_table(name, num_warps):
    """All pairs, in each lane's own bank: the lower column of a byte is the lower half."""
    numbers = in_units(name).tolist()
    for lane in (0, 31):
        memory = written(name, num_warps, lane)
        assert len(memory) == 256 and sm90_levels.PAIRS_BYTES == 256 * 128
        for code in range(256):
            pair = halves(memory[BEGIN + 128 * code + 4 * lane])
            assert pair == [numbers[code & 15], numbers[code >> 4]]


@every_table
def test_pairs_of_words(name):
    """Every code in every place, whatever its neighbours are."""
    memory, numbers = written(name, 8, 5), in_units(name).tolist()
    for word in words():
        registers = run_registers(
            "load_pairs", word, *[BEGIN + 20] * 4, source=SOURCE, memory=memory
        )
        found = [n for register in registers for n in halves(register)]
        assert found == [numbers[word >> 4 * column & 15] for column in range(8)]


@pytest.mark.parametrize("name", sm90_registers.TABLED)
def test_half_of_the_pairs(name):
    """Those that come from shared memory are those that are looked up."""
    memory, numbers = written(name, sm90_registers.NUM_WARPS, 5), in_units(name).tolist()
    tables = [levels.table_word(name, i) & MASK for i in range(8)]
    assembly = sm90_registers.LEVEL_PAIRS.value, sm90_registers.LEVEL_OPERANDS.value
    assert assembly[1].startswith("=&r,=&r,=&r,=&r,r")  # all inputs are read after the first one
    for word in words():
        registers = execute(*assembly, word, BEGIN + 20, *tables, memory=memory)
        found = [n for register in registers for n in halves(register)]
        assert found == [numbers[word >> 4 * column & 15] for column in range(8)]


@pytest.mark.parametrize("U", [64, 128])
@every_table
def test_product_of_a_piece(name, U):
    """Bytes of a tile through the kernel's own steps, times activations in that order."""
    rows, tokens = 16, 8
    g = torch.Generator().manual_seed(U)
    codes = torch.randint(0, 16, (rows, U), generator=g)
    x = torch.randn(tokens, U, generator=g).double()
    tile = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    memory = written(name, 4, 0)
    found = [
        halves(register)
        for word in tile.view(torch.int32).flatten().tolist()
        for register in run_registers(
            "load_pairs", word & MASK, *[BEGIN] * 4, source=SOURCE, memory=memory
        )
    ]
    pairs = torch.tensor(found, dtype=torch.float64).view(rows, U // 8, 2, 4)
    with mock.patch.object(sm90_decode.gl, "convert_layout", lambda t, layout, assert_trivial: t):
        first, second = [
            sm90_decode.fragment.fn(pairs[:, :, i].reshape(rows, U // 2), None) for i in (0, 1)
        ]
    arranged = x[:, columns_at(U, NEIGHBOURS.value)]
    product = first @ arranged[:, : U // 2].T + second @ arranged[:, U // 2 :].T
    expected = in_units(name)[codes] @ x.T
    assert torch.allclose(product, expected, rtol=1e-12, atol=1e-12 * math.sqrt(U))
