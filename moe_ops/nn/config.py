"""MoEConfig: the sizes, dtypes, routing, backend and sharding of one layer."""

from dataclasses import dataclass, field

import torch

from moe_ops.activations import Activation, resolve
from moe_ops.backends import check_backend
from moe_ops.checks import check_integer, check_size
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.placement import Placement
from moe_ops.routing.methods import RoutingMethod, check_method_takes, resolve_routing_method

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class MoEConfig:
    """One MoE layer: its sizes, dtypes, activation, routing, backend and sharding.

    num_local_experts defaults to this rank's share of the `placement` (the first
    num_experts % ep_size ranks hold one more); with `parallel.enable_eplb` it may be larger, for
    replicas. router_logits_dtype defaults to in_dtype. max_num_tokens bounds the tokens that one
    device passes to a dispatcher in one step, from which `dispatched_shape` follows.

    Raises:
        ValueError: a size that is no integer or below 1, experts_per_token outside 1..num_experts
            or not 1 for llama4, an intermediate_size that tp_size does not divide, a
            num_local_experts that contradicts the placement, or an unknown dtype, activation,
            routing method or backend.
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
        share = len(self.placement.experts_of(rank))
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
    def placement(self) -> Placement:
        """Which rank of the expert-parallel group holds which experts."""
        parallel = self.parallel
        return Placement(self.num_experts, parallel.ep_size, parallel.expert_placement)

    @property
    def is_act_and_mul(self) -> bool:
        """The activation is gated: w13 has 2 * intermediate_size rows, gate and up."""
        return resolve(self.activation).gated

    @property
    def intermediate_size_per_partition(self) -> int:
        return self.intermediate_size // self.parallel.tp_size

    @property
    def dispatched_shape(self) -> tuple[int, ...]:
        """Shape of the most hidden states that arrive at this device's experts in one step.

        (num_local_experts, T, hidden_dim) in the batched format, for `batched_experts`; else
        (T, hidden_dim), for `fused_experts`. T = max_num_tokens * parallel.num_dispatchers, since
        all tokens of all devices may choose the same expert.
        """
        tokens = self.max_num_tokens * self.parallel.num_dispatchers
        if self.parallel.use_batched_activation_format:
            assert self.num_local_experts is not None  # __post_init__ has set it
            return (self.num_local_experts, tokens, self.hidden_dim)
        return (tokens, self.hidden_dim)
