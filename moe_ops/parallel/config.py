"""ParallelConfig: how one layer is spread over devices."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch

from moe_ops.checks import check_integer, check_one_of, check_size, check_type
from moe_ops.parallel import all2all
from moe_ops.parallel.placement import PLACEMENTS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# dimensions of a mesh that devices are counted along, the slowest first
MESH_DIMS = ("dp", "pcp", "tp")


class _Fields(TypedDict, total=False):
    """Fields that all constructors take as they are."""

    all2all_backend: str
    enable_eplb: bool
    expert_placement: str


class _Options(_Fields, total=False):
    """Options of `make` in addition to sizes and ranks."""

    enable_expert_parallel: bool


def _sent_by(*backends: str) -> property:
    """Property of a ParallelConfig: tokens travel by a dispatcher of one of these names."""
    return property(lambda self: self.use_all2all_kernels and self.all2all_backend in backends)


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes and ranks along which one MoE layer is sharded, as this device sees them.

    `make` derives them from the sizes of a deployment, `from_mesh` and `from_torchrun` from what
    torch.distributed knows of it; the fields are the result. With expert
    parallelism (use_ep) every device holds whole experts and tp_size is 1; without it every
    expert is cut along its intermediate dimension over all dp * pcp * tp devices and ep_size is 1.

    sp_size devices of a tensor-parallel group have divided the tokens of their sequences among
    them. all2all_backend is the dispatcher of whoever runs this layer; its name says in which
    format rows arrive (`MoEConfig.dispatched_shape`). `MoELayer.from_config` with a process group
    runs "allgather_reducescatter", "all_to_all" and "symmetric_memory" itself, and those that
    `moe_ops.parallel.dispatch.register_dispatcher` was given; other names describe what you run.
    expert_placement says which experts a device holds with use_ep: "linear" a run of neighbours,
    "round_robin" every ep_size-th. With enable_eplb a layer with a group has slots that hold the
    experts which their load puts there (`moe_ops.parallel.replicas.balanced`) in its place.

    Raises:
        ValueError: a size that is no integer or below 1, a rank outside its size, sizes that
            contradict use_ep, or an unknown all2all_backend or expert_placement.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pcp_size: int = 1  # prefill context parallel
    pcp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    sp_size: int = 1  # sequence parallel: tokens are divided inside a tensor-parallel group
    sp_rank: int = 0
    use_ep: bool = False
    all2all_backend: str = "allgather_reducescatter"
    enable_eplb: bool = False  # experts may be replicated and moved between devices
    expert_placement: str = "linear"

    def __post_init__(self) -> None:
        for name in ("tp", "pcp", "dp", "ep", "sp"):
            _check_size_and_rank(
                name, getattr(self, f"{name}_size"), getattr(self, f"{name}_rank")
            )
        if self.use_ep and self.tp_size != 1:
            raise ValueError(
                f"tp_size must be 1 with use_ep, got {self.tp_size}; whole experts are placed on "
                "devices: build the configuration with ParallelConfig.make"
            )
        if not self.use_ep and self.ep_size != 1:
            raise ValueError(
                f"ep_size must be 1 without use_ep, got {self.ep_size}; pass use_ep=True or build "
                "the configuration with ParallelConfig.make"
            )
        if self.enable_eplb and not self.use_ep:
            raise ValueError(
                "enable_eplb must be False without use_ep, got True; only whole experts can be "
                "moved between devices"
            )
        check_one_of("all2all_backend", self.all2all_backend, all2all.NAMES)
        check_one_of("expert_placement", self.expert_placement, PLACEMENTS)

    @classmethod
    def make(
        cls,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        pcp_size: int = 1,
        pcp_rank: int = 0,
        dp_size: int = 1,
        dp_rank: int = 0,
        sp_size: int = 1,
        sp_rank: int = 0,
        enable_expert_parallel: bool = False,
        **kept: Unpack[_Fields],
    ) -> ParallelConfig:
        """Shard a layer over a deployment of dp_size * pcp_size * tp_size devices.

        The ranks say which of them this device is. Experts are placed whole on devices if
        enable_expert_parallel and there is more than one device; otherwise they are cut along the
        intermediate dimension over all of them. all2all_backend, enable_eplb and expert_placement
        are the class's fields.

        Raises:
            ValueError: as the class does, and for ranks outside the sizes given here.
        """
        for name, size, rank in (("tp", tp_size, tp_rank), ("pcp", pcp_size, pcp_rank)):
            _check_size_and_rank(name, size, rank)
        size, rank = flatten_tp_across_dp_and_pcp(
            tp_size, tp_rank, dp_size, dp_rank, pcp_size, pcp_rank
        )
        use_ep = enable_expert_parallel and size > 1
        sharded, whole = (size, rank), (1, 0)
        tp, ep = (whole, sharded) if use_ep else (sharded, whole)
        return cls(
            tp_size=tp[0],
            tp_rank=tp[1],
            pcp_size=pcp_size,
            pcp_rank=pcp_rank,
            dp_size=dp_size,
            dp_rank=dp_rank,
            ep_size=ep[0],
            ep_rank=ep[1],
            sp_size=sp_size,
            sp_rank=sp_rank,
            use_ep=use_ep,
            **kept,
        )

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        sequence_parallel: bool = False,
        **options: Unpack[_Options],
    ) -> ParallelConfig:
        """Shard a layer over all devices of a mesh, as this process's device sees them.

        Args:
            mesh: a DeviceMesh whose dimensions are named "dp", "pcp" or "tp", in this order; those
                that it lacks have size 1. `init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp",
                "tp"))` makes one.
            sequence_parallel: the devices along "tp" have different tokens.
            options: enable_expert_parallel, all2all_backend, enable_eplb and expert_placement, as
                in `make`.

        Raises:
            ValueError: as `make`; a mesh without names, with others, or with these in another
                order; or a process that is not in the mesh.
        """
        check_type("mesh", mesh, torch.distributed.device_mesh.DeviceMesh)
        names = mesh.mesh_dim_names
        expected = tuple(name for name in MESH_DIMS if name in (names or ()))
        if not names or tuple(names) != expected:
            raise ValueError(
                f"mesh must have dimensions named {', '.join(MESH_DIMS)} or some of them, in this "
                f"order, got {names}; pass mesh_dim_names to init_device_mesh, or a part of the "
                "mesh, mesh['dp', 'tp']"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                "mesh must contain this process's device, got one of other ranks; build the layer "
                "on the mesh's own ranks alone"
            )
        places = {
            name: (mesh.size(dim), mesh.get_local_rank(name)) for dim, name in enumerate(names)
        }
        return cls._of_places(places, sequence_parallel, **options)

    @classmethod
    def from_torchrun(
        cls,
        *,
        tp_size: int = 1,
        pcp_size: int = 1,
        sequence_parallel: bool = False,
        **options: Unpack[_Options],
    ) -> ParallelConfig:
        """Shard a layer over all processes that torchrun started, from the environment variables
        RANK and WORLD_SIZE, which it sets.

        Ranks are counted along tp first, then pcp, then dp, whose size is what the world leaves:
        WORLD_SIZE / (tp_size * pcp_size). No process group is needed.

        Args:
            tp_size, pcp_size: sizes of a deployment.
            sequence_parallel: the devices of a tensor-parallel group have different tokens.
            options: enable_expert_parallel, all2all_backend, enable_eplb and expert_placement, as
                in `make`.

        Raises:
            ValueError: as `make`; a variable that is not set or no integer; or a WORLD_SIZE that
                tp_size * pcp_size does not divide.
        """
        check_size("tp_size", tp_size)
        check_size("pcp_size", pcp_size)
        world, rank = _environment_integer("WORLD_SIZE"), _environment_integer("RANK")
        if world < 1 or not 0 <= rank < world:
            raise ValueError(
                f"RANK must be in 0..WORLD_SIZE - 1 = {world - 1}, got {rank}; start the program "
                "by torchrun, which sets both"
            )
        if world % (tp_size * pcp_size):
            raise ValueError(
                f"tp_size * pcp_size must divide WORLD_SIZE={world}, got {tp_size} * {pcp_size}; "
                "choose other sizes or another number of processes"
            )
        inner, tp_rank = divmod(rank, tp_size)
        dp_rank, pcp_rank = divmod(inner, pcp_size)
        places = {
            "tp": (tp_size, tp_rank),
            "pcp": (pcp_size, pcp_rank),
            "dp": (world // (tp_size * pcp_size), dp_rank),
        }
        return cls._of_places(places, sequence_parallel, **options)

    @classmethod
    def _of_places(
        cls,
        places: dict[str, tuple[int, int]],  # (size, rank) by name; missing ones are (1, 0)
        sequence_parallel: bool,
        **options: Unpack[_Options],
    ) -> ParallelConfig:
        if sequence_parallel:
            places = places | {"sp": places.get("tp", (1, 0))}
        sizes = {f"{name}_size": size for name, (size, _) in places.items()}
        ranks = {f"{name}_rank": rank for name, (_, rank) in places.items()}
        return cls.make(**sizes, **ranks, **options)

    @property
    def is_sequence_parallel(self) -> bool:
        """Devices of one tensor-parallel group have different tokens."""
        return self.sp_size > 1

    @property
    def num_dispatchers(self) -> int:
        """Devices with tokens of their own, which they send to the experts."""
        return self.dp_size * self.pcp_size * self.sp_size

    @property
    def use_all2all_kernels(self) -> bool:
        """Tokens travel between devices: each has its own tokens and only some of the experts."""
        return self.use_ep and self.num_dispatchers > 1

    # Whether the named dispatcher sends them. "mori" leaves open which of its two; of
    # flashinfer_nvlink_two_sided, flashinfer_all2allv is the older name.
    use_naive_kernels = _sent_by("naive")
    use_allgather_reducescatter_kernels = _sent_by("allgather_reducescatter")
    use_all_to_all_kernels = _sent_by("all_to_all")
    use_symmetric_memory_kernels = _sent_by("symmetric_memory")
    use_deepep_high_throughput_kernels = _sent_by("deepep_high_throughput")
    use_deepep_low_latency_kernels = _sent_by("deepep_low_latency")
    use_deepep_v2_kernels = _sent_by("deepep_v2")
    use_flashinfer_all2allv_kernels = _sent_by(
        "flashinfer_all2allv", "flashinfer_nvlink_two_sided"
    )
    use_flashinfer_nvlink_one_sided_kernels = _sent_by("flashinfer_nvlink_one_sided")
    use_flashinfer_nvlink_two_sided_kernels = use_flashinfer_all2allv_kernels
    use_mori_kernels = _sent_by("mori", "mori_high_throughput", "mori_low_latency")
    use_mori_high_throughput_kernels = _sent_by("mori_high_throughput")
    use_mori_low_latency_kernels = _sent_by("mori_low_latency")
    use_nixl_ep_kernels = _sent_by("nixl_ep")
    # each local expert gets its own padded block of rows, (E, T, K)
    use_batched_activation_format = _sent_by(*all2all.BATCHED)


def flatten_tp_across_dp_and_pcp(
    tp_size: int, tp_rank: int, dp_size: int, dp_rank: int, pcp_size: int, pcp_rank: int
) -> tuple[int, int]:
    """(size, rank) of this device among all dp * pcp * tp devices, tp fastest, dp slowest."""
    size = dp_size * pcp_size * tp_size
    return size, dp_rank * pcp_size * tp_size + pcp_rank * tp_size + tp_rank


def _check_size_and_rank(name: str, size: int, rank: int) -> None:
    check_size(f"{name}_size", size)
    check_integer(f"{name}_rank", rank)
    if not 0 <= rank < size:
        raise ValueError(f"{name}_rank must be in 0..{name}_size - 1 = {size - 1}, got {rank}")


def _environment_integer(name: str) -> int:
    text = os.environ.get(name)
    if text is None:
        raise ValueError(
            f"{name} must be set in the environment, got none; start the program by torchrun, or "
            "use ParallelConfig.make"
        )
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer in the environment, got {text!r}") from None
