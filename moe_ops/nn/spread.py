"""A MoELayer over several devices: what each holds of a configuration, and how tokens travel."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moe_ops.activations import Activation
from moe_ops.checks import autocasting, check_size
from moe_ops.nn.config import MoEConfig
from moe_ops.nn.lora import ExpertsLoRA
from moe_ops.nn.modules import Experts
from moe_ops.parallel import invariance, wire
from moe_ops.parallel.agreement import check_agreement
from moe_ops.parallel.dispatch import Dispatcher, make_dispatcher
from moe_ops.parallel.replicas import Replicas, ReplicatedPlacement, balanced
from moe_ops.schemes import layer_scheme

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# not None, which torch.distributed.group.WORLD is where init_process_group was forgotten
NO_GROUP: Any = object()


class Spread(NamedTuple):
    """The share of a layer that one device holds, and the dispatcher of its tokens."""

    settings: dict[str, Any]  # keyword arguments of MoELayer
    dispatcher: Dispatcher | None
    not_invariant: tuple[str, ...]  # why a layer with a dispatcher has not the bits of one device
    slots: ReplicatedPlacement | None  # where replicated experts are


def spread_of(
    config: MoEConfig, group: ProcessGroup, name: str, options: dict[str, Any]
) -> Spread:
    """The Spread of a configuration on this device, with the arguments of
    `MoELayer.from_config`, which says what it raises. All ranks of a group call it.
    """
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config must be a moe_ops.MoEConfig, got {type(config).__name__}")
    parallel = config.parallel
    dispatcher = slots = None
    if group is not NO_GROUP:
        check_agreement(_common_fields(config, {"name": name, **options}), group)
        dispatcher = make_dispatcher(
            parallel,
            group,
            max_num_tokens=config.max_num_tokens,
            label=label_of(name, config.num_experts),
        )
        if "expert_map" in options:
            raise ValueError(
                "expert_map must be left out with a group; the layer places experts by "
                "config.parallel.expert_placement"
            )
        if parallel.enable_eplb:
            slots = _first_slots(config)
    not_invariant = invariance.why_not(parallel, config.num_experts, dispatcher)
    if dispatcher is not None:  # after ranks agreed: else one might wait for others that refuse
        invariance.check(options.get("batch_invariant"), not_invariant)
    same_dtype = config.router_logits_dtype == config.in_dtype
    settings: dict[str, Any] = {
        "activation": config.activation,
        "routing_method": config.routing_method,
        # None if nothing is cast, so that autocast still applies
        "router_logits_dtype": None if same_dtype else config.router_logits_dtype,
        "expert_bias": config.has_bias,
        "backend": config.moe_backend,
        "dtype": config.in_dtype,
    }
    if parallel.use_ep:
        settings["num_local_experts"] = config.num_local_experts
        if slots is not None:  # of experts; the layer makes it one of slots
            settings["expert_map"] = torch.full((config.num_experts,), -1, device="cpu")
        elif "expert_map" not in options:
            settings["expert_map"] = _placed_expert_map(config)
    settings |= options
    # One of the sizes is 1. A rank's own tokens need a whole shared expert.
    devices = 1 if dispatcher is not None else parallel.ep_size * parallel.tp_size
    if width := settings.get("shared_expert_intermediate_size", 0):
        check_size("shared_expert_intermediate_size", width)
        if width % devices:
            raise ValueError(
                "shared_expert_intermediate_size must be a multiple of the "
                f"{devices} devices over which the layer is spread, got {width}; pad it with "
                "zeros, or give none and add the shared expert after the sum"
            )
        settings["shared_expert_intermediate_size"] = width // devices
    if parallel.tp_size > 1 and settings["expert_bias"]:
        raise ValueError(
            f"has_bias must be False with tp_size={parallel.tp_size}: each device would add "
            "the bias of the second projection; use expert parallelism"
        )
    return Spread(settings, dispatcher, not_invariant, slots)


def label_of(name: str, num_experts: int) -> str:
    """Name of a layer in errors of communication."""
    return f"MoELayer {name}" if name else f"a MoELayer of {num_experts} experts"


class SpreadLayer(Protocol):
    """The attributes of a MoELayer, which imports this module, that are used here."""

    experts: Experts
    lora: ExpertsLoRA | None
    replicas: Replicas | None
    dispatcher: Dispatcher | None
    not_invariant: tuple[str, ...]
    batch_invariant: bool | None
    router_weight_on_input: bool
    backend: str


class Sent(NamedTuple):
    """Tokens for the experts of this device; its own where nothing is sent."""

    rows: Tensor
    ids: Tensor
    weights: Tensor
    options: dict[str, Any]  # of `fused_experts`
    by_tree: bool  # whether outputs are added as one device adds them
    added: bool = False  # whether `fused_experts` adds them, in the first rows of what it returns


def send_tokens(layer: SpreadLayer, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Sent:
    """x (M, H), ids and weights (M, top_k) -> what the layer's experts on this device multiply."""
    if layer.replicas is not None:
        _refuse_training(layer.experts)
        topk_ids = layer.replicas(topk_ids)
    if layer.dispatcher is None:
        return Sent(x, topk_ids, topk_weights, {}, False)
    by_tree = invariance.check(layer.batch_invariant, layer.not_invariant)
    options: dict[str, Any] = {}
    if not by_tree and not _records_gradients(layer, x, topk_weights):
        options["exchange"] = getattr(layer.dispatcher, "exchange", "")
    added = bool(options.get("exchange"))
    if not by_tree and _sends_quantized(layer, x, topk_weights):
        sent = wire.quantize_rows(x, layer.experts.w13)
        send: Any = layer.dispatcher
        rows, scale, ids, weights = send.dispatch_quantized(
            sent.q, sent.scale, topk_ids, topk_weights
        )
        options |= {
            "hidden_states_scale": scale,
            "hidden_states_global_scale": sent.global_scale,
            "out_dtype": x.dtype,
        }
        return Sent(rows, ids, weights, options, by_tree, added)
    if added and _sends_later(layer):
        dispatcher: Any = layer.dispatcher
        ids, weights = dispatcher.dispatch_routing(topk_ids, topk_weights)
        quantized = getattr(dispatcher, "exchange_quantized", "")  # an adapter may have none
        if quantized and x.is_cuda and wire.quantizes_later(_scheme(layer), x.shape[1]):
            options["exchange"] = quantized
        return Sent(x, ids, weights, options, by_tree, added)
    rows, ids, weights = layer.dispatcher.dispatch(x, topk_ids, topk_weights)
    if by_tree and x.dtype != torch.float64:
        options["out_dtype"] = torch.float32
    return Sent(rows, ids, weights, options, by_tree, added)


def combine_outputs(layer: SpreadLayer, out: Tensor, x: Tensor, sent: Sent) -> Tensor:
    """Outputs of this device's experts for `Sent` -> the outputs (M, H) of its own tokens x."""
    if layer.dispatcher is None:
        return out
    if sent.added:
        return out[: x.shape[0]]
    if not sent.by_tree:
        return layer.dispatcher.combine(out, x.shape[0])
    combine: Any = layer.dispatcher
    out = combine.combine_by_tree(out, x.shape[0])
    dtype = torch.get_autocast_dtype(x.device.type) if autocasting(x.device) else x.dtype
    # only where it changes the dtype: else compiled gradients are lost
    return out.to(dtype) if out.dtype == torch.float32 != dtype else out


def _records_gradients(layer: SpreadLayer, x: Tensor, topk_weights: Tensor) -> bool:
    """Whether the experts run as calls that record gradients do."""
    if layer.lora is not None:
        return True
    experts = layer.experts  # whose weights may be no parameters
    return _wants_gradients(x, topk_weights, experts.w13, experts.down_proj, *_biases(experts))


def _biases(experts: Experts) -> tuple[Tensor | None, Tensor | None]:
    return experts.w13_bias, experts.down_proj_bias


def _wants_gradients(*tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any([t is not None and t.requires_grad for t in tensors])


def _sends_quantized(layer: SpreadLayer, x: Tensor, topk_weights: Tensor) -> bool:
    """Whether tokens travel as their experts' scheme quantizes them.

    Not where gradients are recorded, which do not flow through quantized rows, nor where the
    experts would have other values to quantize.
    """
    asked = getattr(layer.dispatcher, "send_quantized", False)
    if not (x.is_cuda if asked is None else asked) or layer.router_weight_on_input:
        return False
    if layer.lora is not None or autocasting(x.device):
        return False
    if _wants_gradients(x, topk_weights, *_biases(layer.experts)):
        return False
    return wire.why_not_quantized(layer.experts.w13, x.shape[1], layer.backend) is None


def _sends_later(layer: SpreadLayer) -> bool:
    """Whether tokens travel after their routing."""
    if not getattr(layer.dispatcher, "sends_rows_later", False) or layer.router_weight_on_input:
        return False
    layout = getattr(layer.experts.w13, "weight_layout", "")
    return wire.pays_later(_scheme(layer), layout, layer.backend)


def _scheme(layer: SpreadLayer) -> str:
    """`layer_scheme` of the experts, by which backends send rows: none does with two schemes."""
    weights = layer.experts.w13, layer.experts.down_proj
    return layer_scheme(*[getattr(weight, "scheme", "") for weight in weights])


def _refuse_training(experts: Experts) -> None:
    if torch.is_grad_enabled() and any(p.requires_grad for p in experts.parameters()):
        raise ValueError(
            "experts must not require gradients in a layer with replicas: each would have those "
            "of its own tokens alone. Freeze them, layer.experts.requires_grad_(False), or train "
            "without enable_eplb"
        )


def _placed_expert_map(config: MoEConfig) -> Tensor:
    """Global id -> local id or -1, by the configuration's placement."""
    rank = config.parallel.ep_rank
    count = len(config.placement.experts_of(rank))
    if config.num_local_experts != count:
        raise ValueError(
            f"expert_map must be given for num_local_experts={config.num_local_experts}, more "
            f"than the {count} of a {config.parallel.expert_placement} placement"
        )
    return config.placement.expert_map(rank)


def _first_slots(config: MoEConfig) -> ReplicatedPlacement:
    """Where replicated experts are before any load is known."""
    size, slots = config.parallel.ep_size, config.num_local_experts
    assert slots is not None  # the configuration has set it
    if size * slots < config.num_experts:
        raise ValueError(
            f"num_local_experts must be at least {-(-config.num_experts // size)} with "
            f"enable_eplb, for {size} ranks of equally many slots and num_experts="
            f"{config.num_experts}, got {slots}"
        )
    return balanced([1.0] * config.num_experts, size, slots)


def _common_fields(config: MoEConfig, options: dict[str, Any]) -> dict[str, object]:
    """Fields that must be equal on all ranks of a dispatcher, by name."""
    fields: dict[str, object] = {}
    for part in (config, config.parallel):
        for field in dataclasses.fields(part):
            fields[field.name] = getattr(part, field.name)
    for name in [name for name in fields if name.endswith("_rank")]:
        del fields[name]
    if not config.parallel.enable_eplb:  # else as many slots on each
        del fields["num_local_experts"]
    del fields["parallel"]
    for name, value in options.items():  # of others, such as callables, repr has an address
        plain = isinstance(value, (str, int, float, torch.dtype, Activation))
        fields[name] = value if plain or value is None else type(value).__name__
    fields.pop("device", None)
    return fields
