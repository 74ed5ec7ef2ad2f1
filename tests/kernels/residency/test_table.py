"""Experts in slots, brought by the kernels and by plain torch, against an LRU in Python."""

from __future__ import annotations

import random

import pytest
import torch

from moe_ops.kernels import launch
from moe_ops.kernels.residency.table import (
    admit_by_torch,
    empty_placement,
    enter_by_torch,
    table_of,
)
from moe_ops.residency.rows import ExpertEntry, bytes_of, rows_in
from tests.support.lru import Slots
from tests.support.places import INTERPRETED, ON_GPU

pytest.importorskip("triton")


# rows of 16-byte words, in more than one step and in part of one, and rows of other sizes
PIECES = {
    "w13.data": ExpertEntry((33, 8, 64), torch.uint8),
    "w13.scale": ExpertEntry((), torch.float32),
    "w2.data": ExpertEntry((24,), torch.bfloat16),
    "w2_bias": ExpertEntry((3,), torch.bfloat16),
}


class ByTorch:
    """A bank whose table plain torch keeps."""

    def __init__(self, E: int, S: int, device: str, pieces=PIECES) -> None:
        self.device, self.E, self.S = torch.device(device), E, S
        self.table = table_of(empty_placement(E, S).to(device), E, S)
        for part in (self.table.wanted, self.table.served, self.table.arrivals):
            part.fill_(-(2**30))
        self.host = rows_in(random_bytes(bytes_of(pieces, E)[1]), pieces, E)
        region = torch.full((bytes_of(pieces, S)[1],), 255, dtype=torch.uint8, device=device)
        self.bank = rows_in(region, pieces, S)

    def bring(self, ids: torch.Tensor | None) -> None:
        admit_by_torch(self.table, ids)
        experts, slots = enter_by_torch(self.table)
        for name, entries in self.host.entries.items():
            self.bank.entries[name][slots] = entries[experts]


class ByKernels(ByTorch):
    """One that the kernels keep."""

    def __init__(self, E: int, S: int, device: str, pieces=PIECES) -> None:
        super().__init__(E, S, device, pieces)
        index = -1 if device == "cpu" else torch.cuda.current_device()
        self.gpu, self.index = launch.gpu(index), index
        region = self.host.region if index < 0 else self.host.region.pin_memory()
        self.words = region.view(torch.int32), self.bank.region.view(torch.int32)
        self.pieces = torch.tensor(
            [
                (self.host.starts[name], self.bank.starts[name], piece.row_bytes)
                for name, piece in pieces.items()
            ],
            device=device,
        )

    def bring(self, ids: torch.Tensor | None) -> None:
        from moe_ops.kernels.residency.admit import admit
        from moe_ops.kernels.residency.fetch import fetch

        launches = [
            admit(self.table, ids, self.gpu),
            fetch(self.table, *self.words, self.pieces, self.gpu, 1 + len(self.pieces) // 2),
        ]
        launch.run(launches, self.index, self.gpu)


def random_bytes(count: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count,), generator=g, dtype=torch.uint8)


BANKS = [
    pytest.param(ByTorch, "cpu", id="torch"),
    pytest.param(ByKernels, "cpu", id="interpreted", marks=INTERPRETED),
    pytest.param(ByKernels, "cuda", id="cuda", marks=ON_GPU),
]


def check_calls(bank: ByTorch, calls: int, seed: int) -> None:
    """Random calls: none to more pairs than slots, of few and of all experts, with ids that are
    equal and out of range.
    """
    E, S, rng, lru = bank.E, bank.S, random.Random(seed), Slots(bank.E, bank.S)
    for _ in range(calls):
        M, top_k = rng.choice([0, 1, 1, 1, 2, 3, S, E]), rng.randint(1, S)
        near = rng.randrange(E)
        draws = (
            [rng.randint(-2, E + 1) for _ in range(M * top_k)],
            [(near + rng.randrange(3)) % E for _ in range(M * top_k)],
            [rng.choice([-(2**31), 2**31 - 1, near]) for _ in range(M * top_k)],
        )
        ids = rng.choice(draws)
        dtype = rng.choice([torch.int32, torch.int64])
        tensor = torch.tensor(ids, dtype=dtype, device=bank.device).view(M, top_k)
        if rng.random() < 0.5:  # rows of other strides
            tensor = tensor.t().contiguous().t()
        passes = max(-(-min(M * top_k, E) // S), 1)
        expected = lru.passes(ids, passes)
        for i, served in enumerate(expected):
            bank.bring(tensor if i == 0 else None)
            check_table(bank, lru, served)
    assert bank.table.counters.tolist() == [lru.hits, lru.misses]
    assert calls < 100 or (lru.hits and lru.misses)


def check_table(bank: ByTorch, lru: Slots, served: dict[int, int]) -> None:
    """Each entry of the table, and the rows of all slots that hold an expert."""
    table = bank.table
    assert table.order.tolist() == lru.order
    assert table.expert_of.tolist() == [-1 if e is None else e for e in lru.content]
    where = {e: slot for slot, e in enumerate(lru.content)}
    assert table.slot_of.tolist() == [where.get(e, -1) for e in range(bank.E)]
    assert table.served.tolist() == [served.get(e, -1) for e in range(bank.E)]
    slots = [slot for slot, e in enumerate(lru.content) if e is not None]
    experts = [e for e in lru.content if e is not None]
    for name, entries in bank.host.entries.items():
        assert torch.equal(bank.bank.entries[name][slots].cpu(), entries[experts])


@pytest.mark.parametrize("kind, device", BANKS)
@pytest.mark.parametrize("E, S", [(8, 3), (40, 33), (5, 1)])
def test_slots_are_those_of_an_lru(kind, device, E, S):
    check_calls(kind(E, S, device), 12, seed=E)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(14))
@pytest.mark.parametrize("kind, device", BANKS)
@pytest.mark.parametrize(
    "E, S, calls", [(16, 6, 500), (64, 17, 200), (1024, 1023, 2), (300, 9, 14)]
)
def test_ten_thousand_calls(kind, device, E, S, calls, seed):
    """So many with all seeds, on each device."""
    one = {"w2_bias": PIECES["w2_bias"]}
    check_calls(kind(E, S, device, one), calls, seed=14 * calls + seed)
