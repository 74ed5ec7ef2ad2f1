"""Redundant experts: balanced placements, and which replica a token takes."""

import pytest
import torch

import moe_ops
from moe_ops.nn.rebalance import rebalance
from moe_ops.parallel.placement import shard_experts
from moe_ops.parallel.replicas import Replicas, ReplicatedPlacement, balanced


@pytest.mark.parametrize(("E", "size", "slots"), [(6, 2, 4), (8, 4, 3), (5, 3, 2), (3, 4, 2)])
def test_balanced_placements_hold_every_expert(E, size, slots):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        load = torch.rand(E, generator=generator).pow(4).tolist()
        placement = balanced(load, size, slots)
        replicas = placement.replicas()
        assert placement == balanced(load, size, slots)
        assert sum(map(len, replicas)) == size * slots and all(replicas)
        for rank in range(size):
            assert len(placement.experts_of(rank)) == slots
        loads = placement.rank_loads(load)
        assert sum(loads) == pytest.approx(sum(load))
        heaviest = max(range(E), key=lambda e: load[e])
        assert len(replicas[heaviest]) == max(map(len, replicas))


def test_the_heaviest_experts_are_replicated():
    load = [8, 1, 1, 1, 1, 0]
    placement = balanced(load, 2, 4)
    assert [len(ids) for ids in placement.replicas()] == [2, 2, 1, 1, 1, 1]
    assert placement.rank_loads(load) == [6.5, 5.5]
    # of no load at all every expert counts alike
    assert balanced([0, 0, 0, 0], 2, 2).slots == ((0, 2), (1, 3))


def test_tokens_take_turns_among_replicas():
    """By their index in the batch, the position among their experts, and the offset: nothing
    else.
    """
    placement = ReplicatedPlacement(3, ((0, 1), (0, 2), (0, 1)))
    assert placement.replicas() == [[0, 2, 4], [1, 5], [3]]
    for offset in (0, 1, 2):
        replicas = Replicas(placement, offset)
        ids = torch.tensor([[0, 1], [1, 0], [2, 0], [-1, 3], [0, 2**40]])
        found = replicas(ids)
        assert found.dtype == torch.int32
        for m, row in enumerate(ids.tolist()):
            for j, expert in enumerate(row):
                want = -1
                if 0 <= expert < 3:
                    of_expert = placement.replicas()[expert]
                    want = of_expert[(m + j + offset) % len(of_expert)]
                assert found[m, j] == want
        assert replicas(ids[:0]).shape == (0, 2)
    loads = torch.bincount(Replicas(placement, 0)(torch.zeros(300, 1).long()).flatten())
    assert loads.tolist() == [100, 0, 100, 0, 100]


def test_placements_are_replaced_in_place():
    first = balanced([1.0] * 4, 2, 3)
    replicas = Replicas(first, 0)
    assert replicas.placement == first
    buffers = [replicas.physical_ids, replicas.counts]
    second = balanced([1.0, 1.0, 5.0, 9.0], 2, 3)
    replicas.place(second)
    assert replicas.placement == second != first
    assert buffers[0] is replicas.physical_ids and buffers[1] is replicas.counts
    copied = Replicas(first, 0)
    copied.load_state_dict(replicas.state_dict())
    assert copied.placement == second
    with pytest.raises(ValueError, match=r"\(E, ep_size, S\) = \(4, 2, 3\), got \(4, 2, 2\)"):
        replicas.place(balanced([1.0] * 4, 2, 2))


def test_tables_keep_their_values_on_the_meta_device(world):
    """Which a layer leaves by to_empty, or by a state dict with or without the tables."""
    world(0, 2)
    parallel = moe_ops.ParallelConfig.make(
        dp_size=2, enable_expert_parallel=True, enable_eplb=True
    )
    config = moe_ops.MoEConfig(4, 2, 64, 64, num_local_experts=3, parallel=parallel)

    def layer(**options):
        group = torch.distributed.group.WORLD
        return moe_ops.MoELayer.from_config(config, group=group, **options)

    plain = layer()
    first, moved = plain.replicas.placement, balanced([1.0, 1.0, 5.0, 9.0], 2, 3)
    plain.replicas.place(moved)
    state = plain.state_dict()
    without = {name: value for name, value in state.items() if "replicas" not in name}
    for given, wanted in ((None, first), (without, first), (state, moved)):
        made = layer(device="meta")
        assert made.replicas.physical_ids.is_meta
        if given is None:
            made.to_empty(device="cpu")
        else:
            made.load_state_dict(given, assign=True)
        assert made.replicas.placement == wanted
        assert torch.equal(made.expert_map, plain.expert_map)
    assert plain.to("meta").to_empty(device="cpu").replicas.placement == moved


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"counts": torch.tensor([1, 1, 1, 2])}, "physical_ids and counts must name each of 6"),
        ({"physical_ids": torch.zeros(4, 6).int()}, "must name each of 6 slots once"),
        ({"counts": torch.tensor([0, 2, 2, 2])}, "must name each of 6 slots once"),
        ({"counts": None}, "physical_ids and counts must be given together"),
        ({"counts": torch.ones(3)}, "size mismatch for counts"),
    ],
)
def test_tables_of_no_placement_are_not_loaded(changed, message):
    replicas = Replicas(balanced([1.0] * 4, 2, 3), 0)
    before = replicas.placement
    state = {k: v for k, v in (replicas.state_dict() | changed).items() if v is not None}
    with pytest.raises(RuntimeError, match=message):
        replicas.load_state_dict(state)
    assert replicas.placement == before


@pytest.mark.parametrize("scheme", ["", "fp8_block", "nvfp4"])
def test_shards_of_replicated_placements(scheme):
    placement = balanced([5.0, 1, 1, 1], 2, 3)
    weight = torch.randn(4, 128, 128) * torch.arange(1, 5).view(4, 1, 1)
    if scheme:
        weight = moe_ops.quantize(weight, scheme)
    whole = weight.dequantize() if scheme else weight
    for rank in range(2):
        shard = shard_experts(weight, placement, rank)
        values = shard.dequantize() if scheme else shard
        assert torch.equal(values, whole[list(placement.experts_of(rank))])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced([1.0] * 5, 2, 2), "must be at least the number of experts, 5"),
        (lambda: balanced([1.0, -1.0], 2, 1), "load must be finite and not negative, got -1.0"),
        (lambda: balanced([], 2, 1), "must be at least the number of experts, 0"),
        (lambda: ReplicatedPlacement(2, ((0, 1), (0,))), r"equally many of each rank, got \[2, 1"),
        (lambda: ReplicatedPlacement(3, ((0, 1), (0, 1))), r"some that lack \[2\]"),
        (lambda: ReplicatedPlacement(2, ((0, 1), (0, 2))), r"name no expert by \[2\]"),
        (lambda: balanced([1.0] * 4, 2, 2).experts_of(2), "rank must be in 0..ep_size - 1 = 1"),
        (lambda: rebalance(torch.nn.Linear(2, 2), None), "layer must be a moe_ops.nn.layer.MoEL"),
        (lambda: rebalance(moe_ops.MoELayer(8, 8, 2, 1), None), "group must be a torch.distrib"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
