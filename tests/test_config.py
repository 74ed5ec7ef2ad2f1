"""Configuration: the sharding table, validation, and what follows from the fields."""

import dataclasses

import pytest
import torch

from moe_ops.nn.config import MoEConfig
from moe_ops.parallel.config import ALL2ALL_BACKENDS, ParallelConfig, flatten_tp_across_dp_and_pcp
from moe_ops.routing.methods import RoutingMethod, get_routing_method, resolve_routing_method

# tp, dp, expert parallel -> per device r: (tp size, rank), (dp size, rank), (ep size, rank)
SHARDING = {
    (2, 1, False): [((2, r), (1, 0), (1, 0)) for r in range(2)],
    (1, 2, False): [((2, r), (2, r), (1, 0)) for r in range(2)],
    (2, 2, False): [((4, r), (2, r // 2), (1, 0)) for r in range(4)],
    (2, 1, True): [((1, 0), (1, 0), (2, r)) for r in range(2)],
    (1, 2, True): [((1, 0), (2, r), (2, r)) for r in range(2)],
    (2, 2, True): [((1, 0), (2, r // 2), (4, r)) for r in range(4)],
    (1, 1, True): [((1, 0), (1, 0), (1, 0))],
}


@pytest.mark.parametrize(("tp", "dp", "expert_parallel"), SHARDING)
def test_sharding_table(tp, dp, expert_parallel):
    for device, expected in enumerate(SHARDING[tp, dp, expert_parallel]):
        config = ParallelConfig.make(
            tp_size=tp,
            tp_rank=device % tp,
            dp_size=dp,
            dp_rank=device // tp,
            enable_expert_parallel=expert_parallel,
        )
        assert (config.tp_size, config.tp_rank) == expected[0]
        assert (config.dp_size, config.dp_rank) == expected[1]
        assert (config.ep_size, config.ep_rank) == expected[2]
        assert config.use_ep == (expert_parallel and tp * dp > 1)
        assert config.use_all2all_kernels == (expert_parallel and dp > 1)


def test_ranks_are_flattened_tp_fastest_and_dp_slowest():
    ranks = [
        flatten_tp_across_dp_and_pcp(2, tp, 3, dp, 4, pcp)
        for dp in range(3)
        for pcp in range(4)
        for tp in range(2)
    ]
    assert ranks == [(24, rank) for rank in range(24)]
    config = ParallelConfig.make(
        tp_size=2, tp_rank=1, dp_size=3, dp_rank=2, pcp_size=4, pcp_rank=1, sp_size=2, sp_rank=1
    )
    assert (config.tp_size, config.tp_rank) == (24, 2 * 8 + 1 * 2 + 1)
    assert (config.pcp_size, config.pcp_rank) == (4, 1)
    assert (config.sp_size, config.sp_rank) == (2, 1)


@pytest.mark.parametrize("backend", ALL2ALL_BACKENDS)
def test_exactly_one_all2all_predicate_holds(backend):
    parallel = ParallelConfig.make(
        dp_size=2, dp_rank=1, enable_expert_parallel=True, all2all_backend=backend
    )
    predicates = {name: getattr(parallel, f"use_{name}_kernels") for name in ALL2ALL_BACKENDS}
    assert predicates == {name: name == backend for name in ALL2ALL_BACKENDS}
    assert parallel.use_batched_activation_format == (backend == "deepep_low_latency")
    alone = ParallelConfig.make(tp_size=2, enable_expert_parallel=True, all2all_backend=backend)
    assert not any(getattr(alone, f"use_{name}_kernels") for name in ALL2ALL_BACKENDS)
    assert not alone.use_batched_activation_format


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_size": 0}, "tp_size must be at least 1, got 0"),
        ({"tp_size": 2.0}, "tp_size must be an integer, got 2.0"),
        ({"tp_size": 2, "tp_rank": "1"}, "tp_rank must be an integer, got '1'"),
        ({"dp_size": 2, "dp_rank": 2}, r"dp_rank must be in 0..dp_size - 1 = 1, got 2"),
        ({"sp_rank": -1}, "sp_rank must be in"),
        ({"ep_size": 2}, "ep_size must be 1 without use_ep, got 2"),
        ({"use_ep": True, "ep_size": 2, "tp_size": 2}, "tp_size must be 1 with use_ep, got 2"),
        ({"enable_eplb": True}, "enable_eplb must be False without use_ep"),
        ({"all2all_backend": "nccl"}, "must be one of naive, .*mori, got 'nccl'"),
    ],
)
def test_bad_parallel_config(fields, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**fields)


def test_make_rejects_a_rank_that_flattening_would_hide():
    with pytest.raises(ValueError, match="tp_rank must be in 0..tp_size - 1 = 1, got 2"):
        ParallelConfig.make(tp_size=2, tp_rank=2, dp_size=2)


def moe_config(**fields):
    sizes = {"num_experts": 8, "experts_per_token": 2, "hidden_dim": 64, "intermediate_size": 32}
    return MoEConfig(**(sizes | fields))


def test_moe_config_defaults_follow_the_other_fields():
    config = moe_config(in_dtype=torch.float16)
    assert config.router_logits_dtype == torch.float16
    assert config.num_local_experts == 8
    assert config.intermediate_size_per_partition == 32
    assert config.is_act_and_mul
    assert config.routing_method is RoutingMethod.RENORMALIZE
    assert not moe_config(activation="relu2_no_mul").is_act_and_mul
    llama4 = moe_config(routing_method="llama4", experts_per_token=1)
    assert llama4.routing_method is RoutingMethod.LLAMA4
    sharded = moe_config(parallel=ParallelConfig.make(tp_size=4, tp_rank=1))
    assert sharded.intermediate_size_per_partition == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_experts = 4
    assert hash(config) == hash(moe_config(in_dtype=torch.float16))


def test_local_experts_of_all_ranks_add_up():
    def local(rank, **fields):
        parallel = ParallelConfig.make(
            tp_size=3, tp_rank=rank, enable_expert_parallel=True, **fields
        )
        return parallel

    counts = [moe_config(parallel=local(rank)).num_local_experts for rank in range(3)]
    assert counts == [3, 3, 2]
    assert moe_config(parallel=local(2, enable_eplb=True), num_local_experts=4)
    with pytest.raises(ValueError, match="num_local_experts must be 2 on rank 2 of 3"):
        moe_config(parallel=local(2), num_local_experts=4)
    with pytest.raises(ValueError, match="num_local_experts must be 2 on rank 2 of 3"):
        moe_config(parallel=local(2, enable_eplb=True), num_local_experts=1)
    with pytest.raises(ValueError, match="num_experts must be at least ep_size=3, got 2"):
        moe_config(parallel=local(2), num_experts=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
        ({"hidden_dim": 64.0}, "hidden_dim must be an integer, got 64.0"),
        ({"num_experts": "8"}, "num_experts must be an integer, got '8'"),
        ({"max_num_tokens": True}, "max_num_tokens must be an integer, got True"),
        ({"experts_per_token": 2.0}, "experts_per_token must be an integer, got 2.0"),
        ({"num_local_experts": 8.0}, "num_local_experts must be an integer, got 8.0"),
        ({"moe_backend": "cutlas"}, "moe_backend must be one of auto, .*got 'cutlas'"),
        ({"routing_method": "llama4"}, "experts_per_token must be 1 for method 'llama4', got 2"),
        ({"experts_per_token": 9}, r"experts_per_token must be in 1..num_experts=8, got 9"),
        ({"activation": "swish"}, "activation must be one of silu, .*'swish'"),
        ({"routing_method": "best"}, "must be one of default, renormalize, .*got 'best'"),
        ({"in_dtype": torch.float64}, "in_dtype must be torch.bfloat16.*got torch.float64"),
        ({"router_logits_dtype": torch.int8}, "router_logits_dtype must be"),
        ({"parallel": ParallelConfig(tp_size=3)}, "must be a multiple of tp_size=3, got 32"),
        ({"num_local_experts": 4}, "num_local_experts must be 8 on rank 0 of 1"),
    ],
)
def test_bad_moe_config(fields, message):
    with pytest.raises(ValueError, match=message):
        moe_config(**fields)


def test_routing_method_names_resolve():
    for method in RoutingMethod:
        assert resolve_routing_method(str(method)) is method
        assert resolve_routing_method(method) is method


@pytest.mark.parametrize(
    ("scoring", "top_k", "renormalize", "groups", "bias", "expected"),
    [
        ("sigmoid", 8, True, 8, True, RoutingMethod.DEEPSEEK_V3),
        ("sigmoid", 1, False, 1, True, RoutingMethod.DEEPSEEK_V3),
        ("sigmoid", 8, True, 0, True, RoutingMethod.UNSPECIFIED),
        ("sigmoid", 8, True, None, True, RoutingMethod.UNSPECIFIED),
        ("softmax", 8, True, 8, True, RoutingMethod.UNSPECIFIED),
        ("sqrtsoftplus", 8, True, 8, True, RoutingMethod.UNSPECIFIED),
        ("sigmoid", 1, False, None, False, RoutingMethod.LLAMA4),
        ("sigmoid", 2, True, None, False, RoutingMethod.UNSPECIFIED),
        ("softmax", 2, True, None, False, RoutingMethod.RENORMALIZE),
        ("softmax", 2, False, None, False, RoutingMethod.DEFAULT),
        ("sqrtsoftplus", 2, True, None, False, RoutingMethod.UNSPECIFIED),
    ],
)
def test_get_routing_method(scoring, top_k, renormalize, groups, bias, expected):
    assert get_routing_method(scoring, top_k, renormalize, groups, bias) is expected


def test_get_routing_method_rejects_an_unknown_scoring():
    with pytest.raises(ValueError, match="scoring must be one of softmax, .*got 'tanh'"):
        get_routing_method("tanh", 2, True, None, False)
