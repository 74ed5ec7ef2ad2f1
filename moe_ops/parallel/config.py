"""ParallelConfig: how one layer is spread over devices."""

from dataclasses import dataclass

from moe_ops.checks import check_integer, check_size

ALL2ALL_BACKENDS = (
    "naive",
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "flashinfer_all2allv",
    "mori",
)


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes and ranks along which one MoE layer is sharded, as this device sees them.

    `make` derives them from the sizes of a deployment; the fields are the result. With expert
    parallelism (use_ep) every device holds whole experts and tp_size is 1; without it every
    expert is cut along its intermediate dimension over all dp * pcp * tp devices and ep_size is 1.

    sp_size devices of a tensor-parallel group have divided the tokens of their sequences among
    them. all2all_backend is the dispatcher of whoever runs this layer: this library has none, and
    takes from its name in which format rows arrive (`MoEConfig.dispatched_shape`).

    Raises:
        ValueError: a size that is no integer or below 1, a rank outside its size, sizes that
            contradict use_ep, or an unknown all2all_backend.
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
        if self.all2all_backend not in ALL2ALL_BACKENDS:
            raise ValueError(
                f"all2all_backend must be one of {', '.join(ALL2ALL_BACKENDS)}, "
                f"got {self.all2all_backend!r}"
            )

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
        all2all_backend: str = "allgather_reducescatter",
        enable_eplb: bool = False,
    ) -> "ParallelConfig":
        """Shard a layer over a deployment of dp_size * pcp_size * tp_size devices.

        The ranks say which of them this device is. Experts are placed whole on devices if
        enable_expert_parallel and there is more than one device; otherwise they are cut along the
        intermediate dimension over all of them.

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
            all2all_backend=all2all_backend,
            enable_eplb=enable_eplb,
        )

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

    @property
    def use_naive_kernels(self) -> bool:
        return self._uses("naive")

    @property
    def use_allgather_reducescatter_kernels(self) -> bool:
        return self._uses("allgather_reducescatter")

    @property
    def use_deepep_high_throughput_kernels(self) -> bool:
        return self._uses("deepep_high_throughput")

    @property
    def use_deepep_low_latency_kernels(self) -> bool:
        return self._uses("deepep_low_latency")

    @property
    def use_flashinfer_all2allv_kernels(self) -> bool:
        return self._uses("flashinfer_all2allv")

    @property
    def use_mori_kernels(self) -> bool:
        return self._uses("mori")

    @property
    def use_batched_activation_format(self) -> bool:
        """The dispatcher hands each local expert its own padded block of rows, (E, T, K)."""
        return self.use_deepep_low_latency_kernels

    def _uses(self, backend: str) -> bool:
        return self.use_all2all_kernels and self.all2all_backend == backend


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
