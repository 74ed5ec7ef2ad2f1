"""ParallelConfig: the sharding table, ranks and validation."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_ops.parallel import all2all
from moe_ops.parallel.config import ParallelConfig, flatten_tp_across_dp_and_pcp

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


@pytest.mark.parametrize("kind", ["dp", "pcp", "sp"])
def test_devices_with_tokens_of_their_own_send_them(kind):
    sizes = {f"{kind}_size": 2, f"{kind}_rank": 1}
    for tp in (1, 2):
        alone = ParallelConfig.make(tp_size=tp, enable_expert_parallel=True)
        parallel = ParallelConfig.make(tp_size=2, enable_expert_parallel=True, **sizes)
        assert (alone.num_dispatchers, parallel.num_dispatchers) == (1, 2)
        assert parallel.use_all2all_kernels and not alone.use_all2all_kernels
        assert parallel.is_sequence_parallel == (kind == "sp")
        # without whole experts on devices every device computes a part of each token
        assert not ParallelConfig.make(tp_size=2, **sizes).use_all2all_kernels


# predicates that hold for more than the backend of their own name
ALIASES = {
    "flashinfer_all2allv": {"flashinfer_nvlink_two_sided"},
    "flashinfer_nvlink_two_sided": {"flashinfer_all2allv"},
    "mori_high_throughput": {"mori"},
    "mori_low_latency": {"mori"},
}


@pytest.mark.parametrize("backend", all2all.NAMES)
def test_all2all_predicates_hold_for_their_names(backend):
    parallel = ParallelConfig.make(
        dp_size=2, dp_rank=1, enable_expert_parallel=True, all2all_backend=backend
    )
    found = {name for name in all2all.NAMES if getattr(parallel, f"use_{name}_kernels")}
    assert found == {backend} | ALIASES.get(backend, set())
    batched = backend in ("deepep_low_latency", "nixl_ep")
    assert parallel.use_batched_activation_format == batched
    alone = ParallelConfig.make(tp_size=2, enable_expert_parallel=True, all2all_backend=backend)
    assert not any(getattr(alone, f"use_{name}_kernels") for name in all2all.NAMES)
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
        ({"expert_placement": "first"}, "expert_placement must be one of linear, round_robin"),
        ({"all2all_backend": "nccl"}, "must be one of naive, .*nixl_ep, got 'nccl'"),
    ],
)
def test_bad_parallel_config(fields, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**fields)


def test_make_rejects_a_rank_that_flattening_would_hide():
    with pytest.raises(ValueError, match="tp_rank must be in 0..tp_size - 1 = 1, got 2"):
        ParallelConfig.make(tp_size=2, tp_rank=2, dp_size=2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_meshes_and_torchrun_say_what_make_is_told(
    world, monkeypatch, expert_parallel, sequence_parallel
):
    """For each rank of 12 devices in (dp, pcp, tp) = (3, 2, 2)."""
    for rank in range(12):
        tp_rank = rank % 2
        wanted = ParallelConfig.make(
            tp_size=2,
            tp_rank=tp_rank,
            pcp_size=2,
            pcp_rank=rank // 2 % 2,
            dp_size=3,
            dp_rank=rank // 4,
            sp_size=2 if sequence_parallel else 1,
            sp_rank=tp_rank if sequence_parallel else 0,
            enable_expert_parallel=expert_parallel,
            all2all_backend="naive",
            enable_eplb=expert_parallel,
            expert_placement="round_robin",
        )
        assert (wanted.ep_rank if expert_parallel else wanted.tp_rank) == rank
        options = {
            "sequence_parallel": sequence_parallel,
            "enable_expert_parallel": expert_parallel,
            "all2all_backend": "naive",
            "enable_eplb": expert_parallel,
            "expert_placement": "round_robin",
        }
        world(rank, 12)
        mesh = init_device_mesh("cpu", (3, 2, 2), mesh_dim_names=("dp", "pcp", "tp"))
        assert ParallelConfig.from_mesh(mesh, **options) == wanted
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "12")
        assert ParallelConfig.from_torchrun(tp_size=2, pcp_size=2, **options) == wanted


def test_dimensions_that_a_mesh_lacks_have_size_one(world):
    world(5, 6)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    assert ParallelConfig.from_mesh(mesh["dp"], enable_expert_parallel=True) == (
        ParallelConfig.make(dp_size=3, dp_rank=2, enable_expert_parallel=True)
    )
    assert ParallelConfig.from_mesh(mesh["tp"]) == ParallelConfig.make(tp_size=2, tp_rank=1)


@pytest.mark.parametrize("names", [None, ("tp", "dp"), ("dp", "ep")])
def test_meshes_with_other_dimensions_are_refused(world, names):
    world(0, 6)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=names)
    with pytest.raises(ValueError, match="mesh must have dimensions named dp, pcp, tp .*got"):
        ParallelConfig.from_mesh(mesh)


def test_a_mesh_of_other_ranks_is_refused(world):
    world(2, 4)
    mesh = dist.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="mesh must contain this process's device"):
        ParallelConfig.from_mesh(mesh)


@pytest.mark.parametrize(
    ("variables", "sizes", "message"),
    [
        ({"RANK": "0"}, {}, "WORLD_SIZE must be set in the environment.*torchrun"),
        ({"WORLD_SIZE": "2"}, {}, "RANK must be set in the environment.*ParallelConfig.make"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, {}, "RANK must be an integer .*got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, {}, r"RANK must be in 0..WORLD_SIZE - 1 = 1, got 2"),
        (
            {"RANK": "0", "WORLD_SIZE": "6"},
            {"tp_size": 2, "pcp_size": 2},
            r"tp_size \* pcp_size must divide WORLD_SIZE=6, got 2 \* 2",
        ),
        ({"RANK": "0", "WORLD_SIZE": "6"}, {"tp_size": 0}, "tp_size must be at least 1, got 0"),
    ],
)
def test_bad_environments_of_torchrun(monkeypatch, variables, sizes, message):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        ParallelConfig.from_torchrun(**sizes)
