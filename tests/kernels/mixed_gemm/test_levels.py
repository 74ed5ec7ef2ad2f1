"""Codes that stand for levels of a table: what the assembly looks up, run on numbers, and what
kernels find without assembly."""

from __future__ import annotations

import pytest
import torch

from moe_ops.environment import INTERPRETED
from moe_ops.kernels.configs import LEVELS
from tests.kernels.mixed_gemm.test_decode import MASK, execute, halves, words
from tests.support import oracle
from tests.support.cases import BF16

triton = pytest.importorskip("triton")

import triton.language as tl

from moe_ops.kernels.mixed_gemm import levels

ORDERS = {
    levels.NEIGHBOURS.value: (0, 1, 2, 3, 4, 5, 6, 7),
    levels.EVEN_AND_ODD.value: (0, 2, 4, 6, 1, 3, 5, 7),
}
every_table = pytest.mark.parametrize("name", LEVELS)


def exact(name: str) -> torch.Tensor:
    return torch.tensor(oracle.code_values(name), dtype=torch.float64)


def in_units(name: str) -> torch.Tensor:
    """What a table's codes are looked up as."""
    bits = torch.tensor(levels.TABLES.value[name].bits, dtype=torch.int32) << 16
    return bits.view(torch.float32).double()


def found(name: str) -> torch.Tensor:
    return in_units(name) * levels.TABLES.value[name].unit


def test_tables():
    assert set(LEVELS) == set(oracle.LEVELS) == {"nf4", "fp4", "iq4"}


@every_table
def test_units_bring_levels_near_numbers_of_bf16(name):
    """Within what rounding each of them to bf16 may cost, and so near as the module says."""
    off = ((found(name) - exact(name)).abs() / exact(name).abs().clamp(min=1e-9)).max()
    assert off <= (1.9e-3 if name == "nf4" else 1e-7)
    assert torch.equal(found(name).sign(), exact(name).sign())
    alone = exact(name).float().to(BF16).double()
    assert (found(name) - exact(name)).norm() <= (alone - exact(name)).norm()


@every_table
@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_look_up(name, order, pack):
    """Each code in its own place, whatever its neighbours are."""
    numbers = in_units(name).tolist()
    table = [levels.table_word(name, i) & MASK for i in range(8) for _ in range(pack)]
    how = levels.look_up(order, pack), levels.registers(pack)
    for word in words(64):
        values = [n for register in execute(*how, word, *table) for n in halves(register)]
        assert values == [numbers[word >> 4 * column & 15] for column in ORDERS[order]]


def test_look_up_of_whole_levels():
    """128 more, as multiples of 2^-133."""
    whole = [name for name in LEVELS if levels.has_whole_levels(name)]
    assert whole == ["iq4"]
    table = [levels.byte_word("iq4", i) & MASK for i in range(4)]
    how = levels.look_up_bytes(True), levels.registers(1, 4)
    for word in words(64):
        found = [n for register in execute(*how, word, *table) for n in halves(register)]
        values = [n * 2.0**133 - 128 for n in found]
        assert values == [exact("iq4")[word >> 4 * column & 15] for column in range(8)]


def test_look_up_of_whole_levels_as_bytes():
    how = levels.look_up_bytes(False), levels.registers(1, 4, 2)
    table = [levels.byte_word("iq4", i) & MASK for i in range(4)]
    for word in words(64):
        found = [n - 128 for r in execute(*how, word, *table) for n in r.to_bytes(4, "little")]
        assert found == [exact("iq4")[word >> 4 * column & 15] for column in range(8)]


@triton.jit
def table(out_ptr, FORMAT: tl.constexpr):
    code = tl.arange(0, 16)
    tl.store(out_ptr + code, levels.level(code.to(tl.uint8), FORMAT))


@pytest.mark.skipif(not INTERPRETED, reason="with a GPU kernels are compiled")
@every_table
def test_levels_are_exact_without_assembly(name):
    out = torch.full((16,), torch.nan)
    table[(1,)](out, name)
    assert torch.equal(out.double(), exact(name))
