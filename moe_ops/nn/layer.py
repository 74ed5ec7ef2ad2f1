"""MoELayer: router -> experts -> weighted sum, with an optional shared expert.

Dimensions: M tokens, H hidden size, I intermediate size, E experts (E_local on this device),
top_k experts per token.

Parameter names are those of transformers' Qwen2-MoE, Qwen3-MoE and Mixtral blocks, the most common
checkpoints, so that `layer.load_state_dict(block.state_dict())` works: gate.weight,
experts.gate_up_proj, experts.down_proj, shared_expert.{gate,up,down}_proj.weight and
shared_expert_gate.weight. Parameters that those do not have are named as in a family that has
them: gate.bias and experts.*_bias (GPT-OSS), gate.e_score_correction_bias (DeepSeek-V3),
experts.up_proj for experts without a gate half (Nemotron-H).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_ops import activations
from moe_ops import batch_invariance as switch
from moe_ops.activations import Activation
from moe_ops.autograd.stack import LoRAStack
from moe_ops.backends import check_backend
from moe_ops.checks import check_number, check_size
from moe_ops.experts import fused_experts
from moe_ops.meta.buffers import KeepsBuffers
from moe_ops.nn.config import MoEConfig
from moe_ops.nn.load import count_tokens, load_balancing_loss
from moe_ops.nn.lora import ExpertsLoRA, ExpertsStack, checked_adapter_ids
from moe_ops.nn.modules import (
    Experts,
    Gate,
    SharedExpert,
    check_here,
    check_tokens,
    expert_map_on_host,
)
from moe_ops.nn.spread import NO_GROUP, combine_outputs, send_tokens, spread_of
from moe_ops.parallel.dispatch import Dispatcher
from moe_ops.parallel.replicas import Replicas, ReplicatedPlacement
from moe_ops.residency import holding
from moe_ops.routing.methods import RoutingMethod, check_method
from moe_ops.routing.route import router_probabilities
from moe_ops.schemes import QuantScheme

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MoELayer(KeepsBuffers):
    """A mixture-of-experts feed-forward layer.

    out = residual + residual_scale * (sum_j weight_j * expert_j(x) + shared_expert(x)), where the
    weights and experts of a token come from `moe_ops.route_tokens`, one operator on CUDA without
    gradients. The residual is optional. The layer traces as one graph with a dynamic number of
    tokens. `quantize` replaces the expert weights by quantized ones.

    There are two ways to spread a layer over devices. With a process group
    (`from_config(config, group=...)`) each rank passes tokens and gets their outputs, as from a
    whole layer. If ranks have tokens of their own, the layer sends them to the ranks of their
    experts, and the outputs back; if all have the same tokens, it adds up the outputs. Residual,
    shared expert, auxiliary loss and expert_load are those of the rank's tokens.

    Without a process group the layer does not communicate. Every device gets the same tokens,
    routes all of them, and returns the share of its own experts (`expert_map`) or of its own
    columns (a smaller intermediate_size). The outputs of a whole layer are the sum over the
    devices, which the caller computes (all_reduce, or reduce_scatter). Parts that are not split
    would be added once per device: pass the residual on one device only, and hold the shared
    expert on one device or equal shares of its columns on each (as `from_config` does). The
    auxiliary loss and expert_load count all experts and are equal on all devices: do not sum them.

    Args:
        hidden_size, intermediate_size, num_experts, top_k: H, I, E and experts per token.
        activation: a name or an `Activation`, with the same parameters for all experts.
        routing_method: a method of `route`, or a callable
            (router_logits, top_k) -> (weights, ids).
        scoring, num_expert_groups, topk_groups: as in `route`.
        correction_bias: hold gate.e_score_correction_bias (E,), a buffer that is added to the
            scores for the choice of experts.
        routed_scaling_factor: multiplies the router weights.
        router_bias: give the gate a bias.
        router_logits_dtype: dtype in which the gate computes, also under torch.autocast; None:
            the dtype of hidden_states, or autocast's.
        router_weight_on_input: multiply the experts' input by the router weight; top_k = 1 only.
        expert_bias: give both expert projections a bias.
        shared_expert_intermediate_size: width of an expert that takes every token; 0: none.
        shared_expert_gate: multiply the shared expert's output by sigmoid of a learned (1, H)
            projection, as Qwen2-MoE does.
        residual_scale: multiplies the layer's output before the residual is added.
        expert_map: (E,) int32, global expert id -> local id or -1; the layer then holds
            num_local_experts experts and returns their share of the sum (above). It is copied to
            `device`
            and keeps its values when a layer built on the meta device is materialized.
        num_local_experts: E_local; with expert_map only.
        track_load: count tokens per expert also in evaluation.
        max_workspace_bytes, recompute, backend: as in `fused_experts`.
        batch_invariant: as in `fused_experts`, for the experts only: router and shared expert are
            products of torch. With a process group the bits are those of one device if each rank
            holds whole eighths of the experts (docs/reproducibility.md).
        device, dtype: of the parameters.

    Attributes:
        expert_load: (E,) int64 buffer on the device, not in the state dict: tokens sent to each
            expert since it was last zeroed. Updated in training, and always with track_load.
            The second forward pass of activation checkpointing is not counted. A compiled layer
            cannot recognise it: torch.utils.checkpoint around one counts tokens twice, also with
            use_reentrant=False, unless the checkpoint itself is compiled.
        dispatcher: the `Dispatcher` that sends tokens between ranks; None: nothing is sent.
        replicas: the `Replicas`, the slots that hold each expert, of a layer with redundant
            experts (`from_config` with a group and enable_eplb); else None.

    Raises:
        ValueError: a size that is no integer or below 1, an unknown activation, backend, scoring
            or routing method, a batch_invariant that is no bool, arguments that the method needs
            or does not take, top_k outside 1..E, an expert_map of another shape, without values or
            with ids of experts that the layer does not hold, or arguments that contradict each
            other.
    """

    expert_load: Tensor
    expert_map: Tensor | None
    batch_invariant: bool | None
    dispatcher: Dispatcher | None = None
    # why a layer with a dispatcher does not return the bits of one device
    not_invariant: tuple[str, ...] = (
        "how its experts lie is not known; spread it by from_config(config, group=...) or "
        "distribute",
    )

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str | Activation = "silu",
        routing_method: RoutingMethod | str | Callable = RoutingMethod.RENORMALIZE,
        scoring: str | None = None,
        num_expert_groups: int | None = None,
        topk_groups: int | None = None,
        correction_bias: bool = False,
        routed_scaling_factor: float = 1.0,
        router_bias: bool = False,
        router_logits_dtype: torch.dtype | None = None,
        router_weight_on_input: bool = False,
        expert_bias: bool = False,
        shared_expert_intermediate_size: int = 0,
        shared_expert_gate: bool = False,
        residual_scale: float = 1.0,
        expert_map: Tensor | None = None,
        num_local_experts: int | None = None,
        track_load: bool = False,
        max_workspace_bytes: int | None = None,
        recompute: bool = False,
        backend: str = "auto",
        batch_invariant: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("hidden_size", hidden_size)
        check_size("intermediate_size", intermediate_size)
        check_size("num_experts", num_experts)
        check_size("shared_expert_intermediate_size", shared_expert_intermediate_size, 0)
        check_number("routed_scaling_factor", routed_scaling_factor)
        check_number("residual_scale", residual_scale)
        check_backend("backend", backend)
        if max_workspace_bytes is not None:
            check_size("max_workspace_bytes", max_workspace_bytes)
        switch.resolve(batch_invariant)  # raises unless it is None or a bool
        check_method(
            routing_method,
            num_experts,
            top_k,
            num_expert_groups=num_expert_groups,
            topk_groups=topk_groups,
            correction_bias=correction_bias,
            scoring=scoring,
        )
        if router_weight_on_input and top_k != 1:
            raise ValueError(
                f"router_weight_on_input must be False unless top_k is 1, got top_k {top_k}"
            )
        if (expert_map is None) != (num_local_experts is None):
            raise ValueError("expert_map and num_local_experts must be given together, got one")
        local = num_experts if num_local_experts is None else num_local_experts
        check_size("num_local_experts", local)
        if expert_map is not None:
            expert_map = expert_map_on_host(expert_map, num_experts, local)
        if shared_expert_gate and not shared_expert_intermediate_size:
            raise ValueError(
                "shared_expert_gate must be False with shared_expert_intermediate_size=0, got True"
            )
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.activation = activations.resolve_numbers(activation)
        self.routing_method = routing_method
        self.scoring = scoring
        self.num_expert_groups = num_expert_groups
        self.topk_groups = topk_groups
        self.routed_scaling_factor = routed_scaling_factor
        self.router_weight_on_input = router_weight_on_input
        self.residual_scale = residual_scale
        self.track_load = track_load
        self.max_workspace_bytes = max_workspace_bytes
        self.recompute = recompute
        self.batch_invariant = batch_invariant
        self.backend = backend
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = Gate(num_experts, hidden_size, router_bias, correction_bias, factory)
        self.gate.logits_dtype = router_logits_dtype
        self.experts = Experts(
            local, hidden_size, intermediate_size, self.activation.gated, expert_bias, factory
        )
        self.lora: ExpertsLoRA | None = None
        self.adapters: ExpertsStack | None = None
        self.replicas: Replicas | None = None
        self.shared_expert: SharedExpert | None = None
        self.shared_expert_gate: nn.Linear | None = None
        if shared_expert_intermediate_size:
            width = shared_expert_intermediate_size
            self.shared_expert = SharedExpert(hidden_size, width, self.activation, factory)
            if shared_expert_gate:
                self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False, **factory)
        load = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        # Not in the state dict, which has the names of whole checkpoints and is equal on every
        # device. A meta buffer has no values: they are kept here until the layer has a device.
        self._values = {"expert_load": load}
        if expert_map is not None:
            self._values["expert_map"] = expert_map
        where = torch.empty(0, device=device).device
        for name in ("expert_map", "expert_load"):
            value = self._values.get(name)
            value = None if value is None else value.to(where, copy=True)
            self.register_buffer(name, value, persistent=False)
        self.register_load_state_dict_post_hook(_fill_buffers)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, backend={self.backend}"

    @classmethod
    def from_config(
        cls,
        config: MoEConfig,
        *,
        group: ProcessGroup = NO_GROUP,
        name: str = "",
        **options: Any,
    ) -> MoELayer:
        """The layer of a MoEConfig, as this device holds it.

        With expert parallelism it holds num_local_experts experts, those of `config.placement`;
        with tensor parallelism intermediate_size_per_partition columns of each. Of a shared expert
        it holds shared_expert_intermediate_size / (ep_size * tp_size) columns: rows
        [rank * width, (rank + 1) * width) of gate_proj and up_proj, the same columns of down_proj,
        and all of shared_expert_gate. Either way its output is this device's share for the tokens
        it was given, which must be the same on every device: sum it over the devices, and give a
        residual to one of them only.

        With a process group each rank passes at most config.max_num_tokens tokens and gets their
        outputs; it holds the experts of its placement, or its columns of all experts
        (`shard_w13`, `shard_w2`), and all of a shared expert. All ranks of the group construct the
        layer, which compares their configurations, and call it equally often, backwards too.

        With `config.parallel.enable_eplb` each rank has num_local_experts slots, equally many, and
        experts may be in several of them: `layer.replicas.placement` says which, and
        `moe_ops.nn.rebalance.rebalance` changes it by the load that the layer counts. Such a layer
        runs frozen experts: gradients reach tokens, router and shared expert alone.

        Args:
            group: all devices of the deployment in the order of `config.parallel.ep_rank`, or of
                tp_rank without whole experts. Either each has tokens of its own, possibly none
                (dp_size, pcp_size, or sp_size as large as the tensor-parallel group), and
                `config.parallel.all2all_backend` names what sends them; or all have the same.
            name: with a group, what errors of communication call the layer, such as its name in
                the model.
            options: keyword arguments of the constructor that the configuration does not have;
                those that it has may be overridden (a callable routing_method for "custom").

        Raises:
            ValueError: config is no MoEConfig; as the constructor; with tensor parallelism an
                expert bias, which would be added once per device; a shared expert whose width the
                number of devices does not divide; or replicated experts without an expert_map.
                With a group as `make_dispatcher`, an expert_map of your own, fewer slots than
                experts, a configuration that is not the same on all of its ranks, naming field
                and ranks, or batch_invariant where sums are not those of one device, with every
                reason.
        """
        spread = spread_of(config, group, name, options)
        parallel = config.parallel
        layer = cls(
            config.hidden_dim,
            config.intermediate_size_per_partition,
            config.num_experts,
            config.experts_per_token,
            **spread.settings,
        )
        layer.dispatcher, layer.not_invariant = spread.dispatcher, spread.not_invariant
        if spread.slots is not None:
            layer._replicate(spread.slots, parallel.ep_rank, parallel.num_dispatchers > 1)
        return layer

    def _replicate(self, placement: ReplicatedPlacement, rank: int, own_tokens: bool) -> None:
        """Hold what a placement has on this rank, in place of each expert once."""
        self.replicas = Replicas(placement, rank if own_tokens else 0)
        self.replicas.to(self.gate.weight.device)
        expert_map = placement.physical.expert_map(rank)
        self._values["expert_map"] = expert_map
        self.expert_map = expert_map.to(self.expert_load.device, copy=True)
        self.track_load = True
        self.experts.requires_grad_(False)

    def forward(
        self,
        hidden_states: Tensor,  # (..., H)
        residual: Tensor | None = None,  # (..., H)
        *,
        adapter_ids: Tensor | None = None,  # (...,)
        return_aux_loss: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Route every token and run its experts.

        Args:
            hidden_states: (..., H), bf16, fp16 or fp32; leading dimensions are tokens. Not
                quantized, because the router and the shared expert need 16 bits or more: for
                quantized tokens route before, and call `fused_experts` with hidden_states_scale.
            residual: of hidden_states' shape, added to the scaled output.
            adapter_ids: of hidden_states' shape without the last dimension, int32 or int64: the
                slot of each token's adapter in the stack that `set_adapters` has set. Any other
                number, such as -1, is none, and None is none for all tokens.
            return_aux_loss: also return `load_balancing_loss`, a scalar fp32 tensor; scale it by
                a coefficient of your choice and add it to the training loss.

        Returns:
            (..., H) in hidden_states' dtype (autocast's under torch.autocast; a wider residual's),
            or (that, loss).

        Raises:
            ValueError: no tensor, quantized hidden_states, a wrong last dimension, a residual or
                adapter_ids of another shape, adapter_ids without adapters, a dtype that is not
                the layer's, and as `route` and `fused_experts`.
        """
        check_tokens(hidden_states, residual, self.hidden_size)
        x = hidden_states.flatten(0, -2)
        if adapter_ids is not None:
            adapter_ids = checked_adapter_ids(self, adapter_ids, hidden_states)
        out, router_logits, topk_ids = self._routed(x, adapter_ids)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
            out = out + shared
        out = out.reshape(hidden_states.shape)
        if self.residual_scale != 1.0:
            out = out * self.residual_scale
        if residual is not None:
            out = residual + out

        if self.training or self.track_load:
            count_tokens(topk_ids, self.expert_load)
        if not return_aux_loss:
            return out
        probabilities = router_probabilities(router_logits, self.routing_method, self.scoring)
        return out, load_balancing_loss(probabilities, topk_ids)

    def add_lora(self, rank: int, scale: float = 1.0) -> ExpertsLoRA:
        """Add a new `moe_ops.LoRA` of this rank to the experts, and freeze their weights, which
        may be quantized, and biases.

        Its parameters are `lora.a13`, `lora.b13`, `lora.a2` and `lora.b2`, in the dtype of the
        gate's weight; b13 and b2 are initially zero. An existing adapter is replaced;
        `layer.lora = None` removes it.

        Raises:
            ValueError: the rank is no integer or below 1, the scale is no finite number, the
                layer has replicas of experts, or it names a backend that has no adapters.
        """
        self.lora = ExpertsLoRA.of(self, rank, scale)
        return self.lora

    def set_adapters(self, stack: LoRAStack | None) -> None:
        """Let tokens have the adapters of a stack, by adapter_ids of `forward`; None removes them.

        The layer's buffers `adapters` are the stack's tensors, so that `stack.put` changes what
        the layer computes, until the layer moves to another device or dtype; from then on
        `layer.adapters.stack().put` does. Calls with adapter_ids record no gradients.

        Raises:
            ValueError: no LoRAStack, or the layer sends tokens to other ranks, has replicas of
                experts, or has an adapter of its own (`add_lora`).
        """
        self.adapters = None if stack is None else ExpertsStack.of(self, stack)

    def quantize(self, scheme: str | QuantScheme) -> MoELayer:
        """Quantize the expert weights in place, by `moe_ops.quantize`.

        Both weights are checked before the first one changes. Then one after the other is
        replaced by an `ExpertTensor` parameter that requires no gradient, so that at most one
        exists twice. Gate and shared expert keep their dtype. A state dict of the layer holds
        the quantized weights. It loads into a layer that was quantized by the same scheme, or
        with assign=True into one whose experts require no gradients.

        Args:
            scheme: as in `moe_ops.quantize`, except schemes with static activation scales, for
                which that function has the argument `activation_scale`.

        Returns:
            The layer itself.

        Raises:
            ValueError: as `moe_ops.quantize`, naming the parameter: an unknown scheme, one with
                static activation scales, sizes that it does not take, weights that are quantized
                already, parametrized or not finite.
        """
        self.experts.quantize(scheme, "experts.")
        return self

    def offload(self, slots: int, device: torch.device | str | None = None) -> MoELayer:
        """Keep the experts in pinned host memory, and run them from slots on a device, as
        `moe_ops.ResidentExperts` does. The rest of the layer moves to that device.

        The experts' parameters are those in host memory from then on, without gradients: the
        state dict stays what it was. The layer stays on the device and in its dtype, and is not
        copied.

        Args:
            slots: how many experts the device holds, at least top_k.
            device: None: the current GPU, or the CPU where there is none.

        Returns:
            The layer itself.

        Raises:
            ValueError: fewer slots than top_k, a layer that holds some of the experts, shares
                them with other processes, or has adapters; or as `moe_ops.ResidentExperts`.
        """
        check_size("slots", slots)
        check_here(self.experts, "be offloaded")
        spread = self.dispatcher is not None or self.replicas is not None
        adapted = self.lora is not None or self.adapters is not None
        if spread or self.expert_map is not None or adapted:
            raise ValueError(
                "layer must hold all experts, without adapters, to have them in host memory, got "
                "one with an expert_map, a process group or adapters; make a layer without"
            )
        if slots < self.top_k:
            raise ValueError(f"slots must be at least top_k={self.top_k}, got {slots}")
        where = self.experts.offload(slots, device)
        holding.guard(self)
        return self.to(where)

    def place_experts(self, expert_map: Tensor) -> None:
        """Hold the experts that a map of the class's form gives local ids, of which the weights
        are those already.
        """
        self._values["expert_map"] = expert_map.cpu()
        self.expert_map = expert_map.to(self.gate.weight.device)

    def _routed(
        self, x: Tensor, adapter_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Router and experts alone: x (M, H) -> out (M, H), router_logits (M, E), topk_ids (M,
        top_k).
        """
        router_logits, topk_weights, topk_ids = self.gate.route(
            x,
            self.top_k,
            self.routing_method,
            num_expert_groups=self.num_expert_groups,
            topk_groups=self.topk_groups,
            scaling_factor=self.routed_scaling_factor,
            scoring=self.scoring,
        )
        adapters: Any = None if self.lora is None else self.lora.adapter()
        if adapter_ids is not None and self.adapters is not None:
            adapters = self.adapters.stack()
        sent = send_tokens(self, x, topk_ids, topk_weights)
        w13, w2, w13_bias, w2_bias = self.experts.arguments()
        out = fused_experts(
            sent.rows,
            w13,
            w2,
            sent.weights,
            sent.ids,
            activation=self.activation,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            expert_map=self.expert_map,
            router_weight_on_input=self.router_weight_on_input,
            max_workspace_bytes=self.max_workspace_bytes,
            recompute=self.recompute,
            adapters=adapters,
            adapter_ids=adapter_ids,
            backend=self.backend,
            batch_invariant=self.batch_invariant,
            **sent.options,
        )
        out = combine_outputs(self, out, x, sent)
        return out, router_logits, topk_ids


def _fill_buffers(layer: MoELayer, incompatible_keys: object) -> None:
    """After load_state_dict(assign=True) replaced the parameters of a layer on the meta device."""
    device = layer.gate.weight.device
    layer.fill_buffers(device)
    if layer.replicas is not None:
        layer.replicas.fill_buffers(device)
