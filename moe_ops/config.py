"""Configuration of an MoE layer: how it routes, its sizes, and how it is spread over devices."""

from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real

import torch

from moe_ops.activations import Activation, resolve

ALL2ALL_BACKENDS = (
    "naive",
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "flashinfer_all2allv",
    "mori",
)
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RoutingMethod(StrEnum):
    """How router logits become expert ids and weights; `moe_ops.route` runs each one."""

    DEFAULT = "default"  # softmax -> top-k
    RENORMALIZE = "renormalize"  # top-k -> softmax
    RENORMALIZE_NAIVE = "renormalize_naive"  # softmax -> top-k -> renormalize
    DEEPSEEK_V3 = "deepseek_v3"  # sigmoid, bias, top groups, top-k -> renormalize
    GROUPED_SOFTMAX = "grouped_softmax"  # softmax, top groups, top-k
    GROUPED_SOFTMAX_RENORMALIZE = "grouped_softmax_renormalize"
    LLAMA4 = "llama4"  # top-1 -> sigmoid
    SIGMOID = "sigmoid"  # sigmoid -> top-k
    SIGMOID_RENORMALIZE = "sigmoid_renormalize"
    TOPK = "topk"  # top-k of the logits, which are the weights
    SQRTSOFTPLUS = "sqrtsoftplus"  # sqrt(softplus), bias, top-k -> renormalize
    CUSTOM = "custom"  # a callable given by the user
    SIMULATED = "simulated"  # random experts, equal weights
    UNSPECIFIED = "unspecified"  # none of these


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes and ranks along which one MoE layer is sharded, as this device sees them.

    `make` derives them from the sizes of a deployment; the fields are the result. With expert
    parallelism (use_ep) every device holds whole experts and tp_size is 1; without it every
    expert is cut along its intermediate dimension over all dp * pcp * tp devices and ep_size is 1.

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
    sp_size: int = 1  # sequence parallel
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
    def use_all2all_kernels(self) -> bool:
        """Tokens travel between devices: each has its own tokens and only some of the experts."""
        return self.dp_size > 1 and self.use_ep

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


@dataclass(frozen=True)
class MoEConfig:
    """One MoE layer: its sizes, dtypes, activation, routing, backend and sharding.

    num_local_experts defaults to this rank's share of a linear placement (the first
    num_experts % ep_size ranks hold one more); with `parallel.enable_eplb` it may be larger, for
    replicas. router_logits_dtype defaults to in_dtype. max_num_tokens bounds the tokens that one
    device hands to a dispatcher in one step (the T of the batched format is made of it).

    Raises:
        ValueError: a size that is no integer or below 1, experts_per_token outside 1..num_experts or
            not 1 for llama4, an intermediate_size that tp_size does not divide, a num_local_experts
            that contradicts the placement, or an unknown dtype, activation, routing method or backend.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_local_experts: int | None = None
    activation: str | Activation = "silu"
    routing_method: RoutingMethod | str = RoutingMethod.RENORMALIZE
    in_dtype: torch.dtype = torch.bfloat16
    router_logits_dtype: torch.dtype | None = None
    max_num_tokens: int = 256
    has_bias: bool = False
    moe_backend: str = "auto"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        from moe_ops.registry import check_backend  # here, since this file is a leaf

        for name in ("num_experts", "hidden_dim", "intermediate_size", "max_num_tokens"):
            check_size(name, getattr(self, name))
        check_integer("experts_per_token", self.experts_per_token)
        if self.num_local_experts is not None:
            check_integer("num_local_experts", self.num_local_experts)
        check_backend("moe_backend", self.moe_backend)
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token must be in 1..num_experts={self.num_experts}, "
                f"got {self.experts_per_token}"
            )
        if self.intermediate_size % self.parallel.tp_size:
            raise ValueError(
                f"intermediate_size must be a multiple of tp_size={self.parallel.tp_size}, "
                f"got {self.intermediate_size}; pad it or choose another tp_size"
            )
        resolve(self.activation)  # raises for an unknown name, listing the known ones
        object.__setattr__(self, "routing_method", resolve_routing_method(self.routing_method))
        check_method_takes("experts_per_token", self.experts_per_token, self.routing_method)
        if self.router_logits_dtype is None:
            object.__setattr__(self, "router_logits_dtype", self.in_dtype)
        for name in ("in_dtype", "router_logits_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"{name} must be torch.bfloat16, torch.float16 or torch.float32, "
                    f"got {getattr(self, name)}"
                )
        self._set_num_local_experts()

    def _set_num_local_experts(self) -> None:
        size, rank = self.parallel.ep_size, self.parallel.ep_rank
        share = self.num_experts // size + (rank < self.num_experts % size)
        local = share if self.num_local_experts is None else self.num_local_experts
        if local != share and not (self.parallel.enable_eplb and local > share):
            raise ValueError(
                f"num_local_experts must be {share} on rank {rank} of {size} for "
                f"num_experts={self.num_experts}, got {local}; leave it out, or set enable_eplb "
                "in the ParallelConfig to hold replicas"
            )
        if local < 1:
            raise ValueError(
                f"num_experts must be at least ep_size={size}, got {self.num_experts}; "
                f"rank {rank} would hold no expert"
            )
        object.__setattr__(self, "num_local_experts", local)

    @property
    def is_act_and_mul(self) -> bool:
        """The activation is gated: w13 has 2 * intermediate_size rows, gate and up."""
        return resolve(self.activation).gated

    @property
    def intermediate_size_per_partition(self) -> int:
        return self.intermediate_size // self.parallel.tp_size


def flatten_tp_across_dp_and_pcp(
    tp_size: int, tp_rank: int, dp_size: int, dp_rank: int, pcp_size: int, pcp_rank: int
) -> tuple[int, int]:
    """(size, rank) of this device among all dp * pcp * tp devices, tp fastest, dp slowest."""
    size = dp_size * pcp_size * tp_size
    return size, dp_rank * pcp_size * tp_size + pcp_rank * tp_size + tp_rank


_METHODS = tuple(RoutingMethod)  # a tuple: Dynamo of torch 2.11 cannot iterate over an enum class


def resolve_routing_method(method: RoutingMethod | str) -> RoutingMethod:
    """The RoutingMethod of a name.

    Raises:
        ValueError: unknown name, listing the known ones.
    """
    for known in _METHODS:
        if method == known:
            return known
    raise ValueError(
        f"routing method must be one of {', '.join(_METHODS)}, got {method!r}; "
        "pass a callable for a method of your own"
    )


def get_routing_method(
    scoring: str,
    top_k: int,
    renormalize: bool,
    num_expert_group: int | None,
    has_correction_bias: bool,
) -> RoutingMethod:
    """The method that a model's router settings name to kernels that route by themselves.

    A correction bias with sigmoid scores and groups is DeepSeekV3, any other bias Unspecified;
    sigmoid top-1 is Llama4, any other sigmoid Unspecified; softmax is Renormalize or Default. It
    tells apart no more than that: softmax with groups maps as softmax without.

    Raises:
        ValueError: unknown scoring.
    """
    check_scoring(scoring)
    if has_correction_bias:
        if scoring == "sigmoid" and (num_expert_group or 0) > 0:
            return RoutingMethod.DEEPSEEK_V3
        return RoutingMethod.UNSPECIFIED
    if scoring == "sigmoid" and top_k == 1:
        return RoutingMethod.LLAMA4
    if scoring == "softmax":
        return RoutingMethod.RENORMALIZE if renormalize else RoutingMethod.DEFAULT
    return RoutingMethod.UNSPECIFIED


def check_method_takes(name: str, top_k: int, method: RoutingMethod | str) -> None:
    """Raise for a number of experts per token, the argument `name`, that the method does not take."""
    if method == RoutingMethod.LLAMA4 and top_k != 1:
        raise ValueError(f"{name} must be 1 for method 'llama4', got {top_k}; use 'sigmoid'")


def check_scoring(scoring: str) -> None:
    if scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")


def check_integer(name: str, value: int) -> None:
    """Raise unless `value` is an integer, also a symbolic one; True and False are none."""
    if type(value) is int:  # route asks in every call
        return
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise ValueError(f"{name} must be an integer, got {value!r}")


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    check_integer(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_number(name: str, value: float) -> None:
    """Raise unless `value` is a number; a tensor is none."""
    if type(value) is not float and not isinstance(value, (Real, torch.SymFloat)):
        raise ValueError(f"{name} must be a number, got {value!r}")


def _check_size_and_rank(name: str, size: int, rank: int) -> None:
    check_size(f"{name}_size", size)
    check_integer(f"{name}_rank", rank)
    if not 0 <= rank < size:
        raise ValueError(f"{name}_rank must be in 0..{name}_size - 1 = {size - 1}, got {rank}")
