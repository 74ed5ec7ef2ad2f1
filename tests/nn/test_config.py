"""MoEConfig: validation, and what follows from the fields."""

import dataclasses

import pytest
import torch

import moe_ops
from moe_ops.nn.config import MoEConfig
from moe_ops.parallel.config import ParallelConfig
from moe_ops.routing.methods import RoutingMethod
from tests.support import oracle


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


@pytest.mark.parametrize("backend", ["deepep_low_latency", "allgather_reducescatter"])
@pytest.mark.parametrize("same_expert", [False, True])
def test_what_dispatchers_send_has_room(backend, same_expert):
    """Two devices with 5 and 7 tokens, at most 8: all may choose experts of one device."""
    torch.manual_seed(0)
    E, K, I, top_k = 4, 16, 8, 1
    w13, w2 = torch.randn(E, 2 * I, K) / 4, torch.randn(E, K, I) / 3
    x, weights = torch.randn(12, K), torch.rand(12, top_k) + 0.1
    ids = torch.ones(12, top_k, dtype=torch.long) if same_expert else torch.randint(E, (12, top_k))
    total = torch.zeros(12, K, dtype=torch.float64)
    for rank in range(2):
        config = MoEConfig(
            num_experts=E,
            experts_per_token=top_k,
            hidden_dim=K,
            intermediate_size=I,
            in_dtype=torch.float32,
            max_num_tokens=8,
            parallel=ParallelConfig.make(
                dp_size=2, dp_rank=rank, enable_expert_parallel=True, all2all_backend=backend
            ),
        )
        mine = slice(2 * rank, 2 * rank + config.num_local_experts)
        if config.parallel.use_batched_activation_format:
            assert config.dispatched_shape == (2, 16, K)
            rows = torch.zeros(config.dispatched_shape)
            tokens = [(ids[:, 0] == e).nonzero()[:, 0] for e in range(E)[mine]]
            for e, chosen in enumerate(tokens):
                rows[e, : len(chosen)] = x[chosen]
            counts = torch.tensor([len(chosen) for chosen in tokens], dtype=torch.int32)
            out = moe_ops.batched_experts(rows, w13[mine], w2[mine], counts)
            for e, chosen in enumerate(tokens):
                total[chosen] += (weights[chosen] * out[e, : len(chosen)]).double()
        else:
            assert config.dispatched_shape == (16, K)
            rows = torch.zeros(config.dispatched_shape)
            rows[:12] = x
            local = torch.nn.functional.pad(ids - 2 * rank, (0, 0, 0, 4), value=-1)
            router = torch.nn.functional.pad(weights, (0, 0, 0, 4))
            total += moe_ops.fused_experts(rows, w13[mine], w2[mine], router, local)[:12].double()
    expected = oracle.experts(x, w13, w2, weights, ids)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


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
