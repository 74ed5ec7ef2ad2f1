"""Placement: every expert on one rank, maps and their inverses, shards of weights."""

import pytest
import torch

import moe_ops
from moe_ops import MoEConfig, MoELayer, ParallelConfig
from moe_ops.parallel.placement import PLACEMENTS, Placement, shard_experts

SMALL = [(E, size) for E in range(1, 10) for size in range(1, 12)]


@pytest.mark.parametrize("strategy", PLACEMENTS)
def test_every_expert_is_on_one_rank_and_ranks_hold_equally_many(strategy):
    for E, size in SMALL:
        placement = Placement(E, size, strategy)
        held = [list(placement.experts_of(rank)) for rank in range(size)]
        assert sorted(sum(held, [])) == list(range(E))
        counts = [len(experts) for experts in held]
        assert counts == [E // size + 1] * (E % size) + [E // size] * (size - E % size)


@pytest.mark.parametrize("strategy", PLACEMENTS)
def test_maps_and_their_inverses(strategy):
    for E, size in SMALL:
        placement = Placement(E, size, strategy)
        for rank in range(size):
            there, back = placement.expert_map(rank), placement.global_ids(rank)
            assert there.dtype == back.dtype == torch.int32
            assert back.tolist() == list(placement.experts_of(rank))
            local = {e: i for i, e in enumerate(back.tolist())}
            assert there.tolist() == [local.get(e, -1) for e in range(E)]


def test_which_experts_a_rank_holds():
    linear, round_robin = Placement(7, 3), Placement(7, 3, "round_robin")
    assert [list(linear.experts_of(r)) for r in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [list(round_robin.experts_of(r)) for r in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert round_robin.expert_map(1).tolist() == [-1, 0, -1, -1, 1, -1, -1]


@pytest.mark.parametrize("strategy", PLACEMENTS)
def test_shards_of_plain_weights_own_their_memory(strategy):
    placement = Placement(7, 3, strategy)
    weight = torch.randn(7, 4, 6)
    for rank in range(3):
        shard = shard_experts(weight, placement, rank)
        assert torch.equal(shard, weight[list(placement.experts_of(rank))])
        assert shard.is_contiguous()
        assert shard.untyped_storage().nbytes() == shard.nbytes
    assert torch.equal(
        shard_experts(weight[:, 0, 0], placement, 1), weight[[*placement.experts_of(1)], 0, 0]
    )


def test_ranks_without_experts():
    """Their maps name no local expert; a MoEConfig with one says so."""
    for strategy in PLACEMENTS:
        placement = Placement(2, 3, strategy)
        assert placement.expert_map(2).tolist() == [-1, -1]
        assert shard_experts(torch.randn(2, 4, 6), placement, 2).shape == (0, 4, 6)
        parallel = ParallelConfig.make(
            dp_size=3, dp_rank=2, enable_expert_parallel=True, expert_placement=strategy
        )
        with pytest.raises(ValueError, match="rank 2 would hold no expert"):
            MoEConfig(2, 1, 64, 64, parallel=parallel)


def test_layers_hold_the_experts_of_their_placement():
    for rank in range(3):
        parallel = ParallelConfig.make(
            tp_size=3, tp_rank=rank, enable_expert_parallel=True, expert_placement="round_robin"
        )
        layer = MoELayer.from_config(MoEConfig(7, 2, 64, 64, parallel=parallel))
        placement = Placement(7, 3, "round_robin")
        assert torch.equal(layer.expert_map, placement.expert_map(rank))
        assert layer.experts.down_proj.shape[0] == len(placement.experts_of(rank))


@pytest.mark.parametrize("strategy", PLACEMENTS)
@pytest.mark.parametrize(
    "scheme",
    ["fp8_tensor", "fp8_channel", "fp8_block", "int4_w4a16:g64:zp", "mxfp4_w4a16", "nvfp4"],
)
def test_shards_of_quantized_weights_have_their_scales(strategy, scheme):
    placement = Placement(5, 2, strategy)
    weight = torch.randn(5, 128, 128) * torch.arange(1, 6).view(5, 1, 1)  # scales that differ
    quantized = moe_ops.quantize(weight, scheme)
    for rank in range(2):
        shard = shard_experts(quantized, placement, rank)
        experts = list(placement.experts_of(rank))
        assert shard.scheme == quantized.scheme and shard.shape == (len(experts), 128, 128)
        assert torch.equal(shard.dequantize(), quantized.dequantize()[experts])
        for name in shard.__tensor_flatten__()[0]:
            part = getattr(shard, name)
            assert part.untyped_storage().nbytes() == part.nbytes, name


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Placement(0, 1), "num_experts must be at least 1, got 0"),
        (lambda: Placement(4, 2.0), "ep_size must be an integer, got 2.0"),
        (lambda: Placement(4, 2, "random"), "must be one of linear, round_robin, got 'random'"),
        (lambda: Placement(4, 2).experts_of(2), r"rank must be in 0..ep_size - 1 = 1, got 2"),
        (lambda: Placement(4, 2).expert_map(-1), "rank must be in 0.*got -1"),
        (lambda: Placement(4, 2).global_ids(True), "rank must be an integer, got True"),
        (
            lambda: shard_experts([1], Placement(1, 1), 0),
            "weight must be a torch.Tensor, got list",
        ),
        (
            lambda: shard_experts(torch.ones(2, 3), Placement(4, 2), 0),
            r"weight must have shape \(E=4, ...\), got \(2, 3\); pass the weight of all experts",
        ),
        (lambda: shard_experts(torch.ones(4), Placement(4, 2), 5), "rank must be in"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
