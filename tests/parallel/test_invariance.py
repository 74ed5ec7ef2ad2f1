"""Which deployments keep the promise of `batch_invariant`, and what the others say. That those
have the bits of one process is tested by tests/parallel/ranks.py.
"""

import pytest
import torch

import moe_ops
from moe_ops import MoEConfig, MoELayer, ParallelConfig
from moe_ops.parallel import invariance


def parallel(**fields):
    return ParallelConfig.make(**{"enable_expert_parallel": True, **fields})


@pytest.mark.parametrize(
    ("fields", "num_experts", "reasons"),
    [
        ({}, 8, []),
        ({"dp_size": 2}, 8, []),
        ({"tp_size": 4}, 128, []),
        ({"dp_size": 8}, 256, []),
        ({"dp_size": 2}, 60, ["the number of experts must be a multiple of 8, got 60"]),
        (
            {"dp_size": 16, "expert_placement": "round_robin"},
            64,
            ["ep_size must be one of 1, 2, 4, 8, got 16", "expert_placement must be 'linear'"],
        ),
        ({"dp_size": 2, "enable_eplb": True}, 64, ["redundant experts are elsewhere"]),
        ({"tp_size": 2, "enable_expert_parallel": False}, 64, ["ranks hold columns of all"]),
    ],
)
def test_every_reason_is_given(fields, num_experts, reasons):
    found = invariance.why_not(parallel(**fields), num_experts)
    assert len(found) == len(reasons)
    for reason, begin in zip(found, reasons, strict=True):
        assert reason.startswith(begin)


def test_layers_refuse_when_they_are_made_and_when_they_run(world):
    world(1, 2)
    group = torch.distributed.group.WORLD
    config = MoEConfig(
        6, 2, 64, 64, in_dtype=torch.float32, parallel=parallel(dp_size=2, dp_rank=1)
    )
    said = "batch_invariant must be False for a layer .* multiple of 8, got 6"
    with pytest.raises(ValueError, match=said):
        MoELayer.from_config(config, group=group, batch_invariant=True)
    layer = MoELayer.from_config(config, group=group)
    with moe_ops.set_batch_invariant(True), pytest.raises(ValueError, match=said):
        layer(torch.randn(3, 64))


def test_a_dispatcher_must_add_by_the_tree():
    (reason,) = invariance.why_not(ParallelConfig(), 8, object())
    assert reason == "object has no combine_by_tree"
