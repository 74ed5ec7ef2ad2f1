"""Pairs sorted to blocks of experts, against Python, and the bound of blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops.kernels import launch
from moe_ops.kernels.configs import SMALLEST_BLOCK_M, block_bound
from moe_ops.kernels.place.routing import route_pairs, sorted_rows
from tests.support.places import devices

triton = pytest.importorskip("triton")


from tests.kernels.gemm.test_sm80_mma import GARBAGE, poisoned

# --- routing alone -------------------------------------------------------------------------------


def route(ids, E, block_m, chunk, expert_map=None):
    """(blocks [(expert, first, end)], order) as the routing kernel writes them."""
    from moe_ops.kernels.place import sort

    S, gpu = ids.numel(), launch.gpu(ids.get_device())._replace(pdl=False)
    blocks = block_bound(S, E, block_m)
    index = poisoned((4 * blocks + S + 8,), torch.int32, ids.device)
    routing = route_pairs(index, ids, expert_map, E, blocks, direct=False)
    launch.run(
        [sort.route(routing, sort.sort_into(block_m, S, E, chunk), gpu)], ids.get_device(), gpu
    )
    assert (index[4 * blocks + S :] == GARBAGE).all()
    table = index[: 4 * blocks].view(blocks, 4)[:, :3].tolist()
    return [tuple(row) for row in table], index[4 * blocks : 4 * blocks + S].tolist()


def oracle_route(local, E, block_m):
    order, blocks = [], []
    for e in range(E):
        mine = [p for p, i in enumerate(local) if i == e]
        first, end = len(order), len(order) + len(mine)
        blocks += [(e, row, end) for row in range(first, end, block_m)]
        order += mine
    return blocks, order


@devices
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_routing_against_python(device, data):
    M, top_k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    E = data.draw(st.integers(1, 20))
    block_m = data.draw(st.sampled_from([16, 32]))
    low, high = data.draw(st.sampled_from([(-1, E), (0, 0), (-3, E - 1), (E, E + 3)]))
    ids = data.draw(st.lists(st.integers(low, high), min_size=M * top_k, max_size=M * top_k))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    tensor = torch.tensor(ids, dtype=dtype, device=device).view(M, top_k)
    table, local = None, ids
    if data.draw(st.booleans()):
        size = data.draw(st.integers(1, 25))
        entries = data.draw(st.lists(st.integers(-1, E), min_size=size, max_size=size))
        table = torch.tensor(entries, dtype=torch.int32, device=device)
        local = [entries[i] if 0 <= i < size else -1 for i in ids]
    blocks, order = route(tensor, E, block_m, 64, table)  # up to three chunks
    expected, expected_order = oracle_route(local, E, block_m)
    assert blocks[: len(expected)] == expected
    assert all(expert == -1 for expert, _, _ in blocks[len(expected) :])
    assert order[: len(expected_order)] == expected_order


@given(st.integers(0, 5000), st.integers(1, 300), st.sampled_from([16, 32, 64, 128]))
def test_block_bound_holds_for_the_worst_routing(rows, groups, block_m):
    """As many groups of one row as there can be, the rest in whole tiles but one row over."""
    singles = min(rows, groups)
    worst = singles + max(0, rows - singles) // block_m if singles else 0
    bound = block_bound(rows, groups, block_m)
    assert worst <= bound <= block_bound(rows, groups, SMALLEST_BLOCK_M)


@devices
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_blocks_of_groups_that_a_map_names(device, data):
    """Rows of other groups, and those past the last one, have none."""
    from moe_ops.kernels.place import sort

    E, block_m = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([16, 32]))
    counts = data.draw(st.lists(st.integers(0, 70), min_size=E, max_size=E))
    named = data.draw(st.lists(st.integers(-1, 40), min_size=E, max_size=E))
    ends = torch.tensor(counts).cumsum(0)
    S = int(ends[-1]) + data.draw(st.integers(0, 9))
    blocks = block_bound(S, E + 1, block_m)
    index = poisoned((4 * blocks + 8,), torch.int32, torch.device(device))
    gpu = launch.gpu(index.get_device())._replace(pdl=False)
    maps = torch.tensor(named, dtype=torch.int32, device=device)
    rows = ends.to(torch.int32).to(device)
    routing = sorted_rows(index, E, blocks)
    one = sort.group_blocks(routing, rows, S, 0, block_m, gpu, maps)
    launch.run([one], index.get_device(), gpu)
    expected = [
        (named[e], row, int(ends[e]))
        for e in range(E)
        if named[e] >= 0
        for row in range(int(ends[e]) - counts[e], int(ends[e]), block_m)
    ]
    table = index[: 4 * blocks].view(blocks, 4)[:, :3].tolist()
    assert [tuple(row) for row in table[: len(expected)]] == expected
    assert all(row == [-1, 0, 0] for row in table[len(expected) :])
    assert (index[4 * blocks :] == GARBAGE).all()
