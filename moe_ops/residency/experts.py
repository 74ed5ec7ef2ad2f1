"""ResidentExperts: the experts of a layer, in host memory, some of them in slots on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_ops import checks
from moe_ops.checks import check_rank, check_size, device_named
from moe_ops.kernels.residency.table import MAX_EXPERTS
from moe_ops.meta.scales import FLAT, TRANSPOSED
from moe_ops.ops.call import Weight, take_apart
from moe_ops.ops.resident import ResidentWeight, facts_of, name_resident
from moe_ops.residency.bank import Bank, Layer
from moe_ops.residency.holding import held_by
from moe_ops.schemes import get_scheme


class ResidencyStats(NamedTuple):
    """What calls found in slots, counted on the device, by distinct experts of each call."""

    hits: int  # experts that were in slots
    misses: int  # experts that were brought
    bytes: int  # that came from host memory

    @property
    def hit_rate(self) -> float:
        """Hits of all; 1 where nothing was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0


class ResidentExperts(nn.Module):
    """Experts of a layer that is larger than the GPU memory it may use.

    All experts lie in pinned host memory, as kernels read them, and as many as there are slots on
    the device. A call finds there which of its experts are in slots, brings the others in the
    place of those that were not used for longest, and runs all from their slots:

        experts = moe_ops.ResidentExperts(w13, w2, slots=32)
        out = moe_ops.fused_experts(x, experts.w13, experts.w2, topk_weights, topk_ids)

    The host takes no part in it, so that calls are compiled and captured as others are, in one
    graph for all routings and numbers of tokens; a graph needs the module to stay alive. Compile a
    model as a whole: code that is compiled for each layer alone is compiled anew for each
    (`torch._dynamo.config.recompile_limit`), since graphs hold the layer's name. Calls
    with more distinct experts than slots bring them in several passes. Threads take turns; calls
    on several streams wait for one another, and replays of captured graphs must not overlap.

    The bits are those of the same call, run by the same backend, on contiguous weights that are
    all on the device. A GPU runs resident experts by triton, a CPU by torch. With "auto" other
    weights may run by another backend, such as cutlass or deep_gemm for many tokens, whose bits
    differ.

    Args:
        w13: (E, N, K) as `fused_experts` takes it, plain or an ExpertTensor, on a CPU or GPU. It
            is copied to where it is to lie. On the meta device nothing is, and `rows` are to be
            filled.
        w2: (E, K, I), like w13.
        w13_bias: (E, N), which comes with the rows of w13. Calls do not pass it again.
        w2_bias: (E, K).
        slots: experts that the device holds, at least top_k of the calls to come. With E or more
            the layer lies on the device, and runs as any other.
        device: that runs the layer; None for the current CUDA device, or for the CPU where there
            is none. On a CPU both memories are RAM.

    Attributes:
        w13, w2: what `fused_experts` takes in the place of weights.
        rows: the tensors of all experts by name (w13, w2, w13_bias, w2_bias), in host memory.
            Before writing into them call `wait`, and `forget` after it.
        slots, device: as given.
        expert_bytes: bytes of one expert: those of a slot, and of a miss.

    `state_dict` has `rows`, and `load_state_dict` copies into them. `to()` and `cpu()` raise where
    they would move or convert the experts; `copy.deepcopy` makes experts of its own.

    Raises:
        ValueError: weights or biases do not fit together, require gradients, or are stored in a
            way that no slots have; or too few slots.
    """

    def __init__(
        self,
        w13: Tensor,  # (E, N, K)
        w2: Tensor,  # (E, K, I)
        *,
        w13_bias: Tensor | None = None,  # (E, N)
        w2_bias: Tensor | None = None,  # (E, K)
        slots: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        given = {"w13": w13, "w2": w2, "w13_bias": w13_bias, "w2_bias": w2_bias}
        check_size("slots", slots)
        self.device = device_of_slots(device)
        like = {"w13": w13, "w2": w2}
        layer = Layer(take_apart(w13), take_apart(w2), w13_bias, w2_bias)
        _check(given, layer)
        self.num_experts: int = w2.shape[0]
        self.slots = min(slots, self.num_experts)
        self._bank: Bank | None = None
        # calls outside of inference_mode write into what is made here, too
        with torch.inference_mode(False), torch.no_grad():
            self._make(given, like, layer)
        self.w13, self.w2 = [self._handle(role, like[role], layer) for role in ("w13", "w2")]

    def _make(
        self, given: Mapping[str, Tensor | None], like: Mapping[str, Tensor], layer: Layer
    ) -> None:
        """Bring all tensors to where they are to lie."""
        if self.slots == self.num_experts:
            rows = {name: _moved(self.device, t) for name, t in given.items() if t is not None}
            self.name = name_resident()
            for name, tensor in rows.items():
                # a parameter, which CUDA graphs of torch.compile read where it lies
                rows[name] = parameter = nn.Parameter(tensor, requires_grad=False)
                self.register_parameter(f"_{name}", parameter)
            self.rows: Mapping[str, Tensor] = rows
        else:
            w13, w2 = [tuple(like[role].shape) for role in ("w13", "w2")]
            self._bank = Bank(layer, w13, w2, self.slots, self.device)
            layouts = [(weight.scheme, weight.layout) for weight in layer[:2]]
            facts = repr((self.num_experts, self.slots, layouts, self._bank.pieces))
            self.name = name_resident(self._bank, facts)
            self.rows = {
                name: _rebuilt(tensor, weight)
                for (name, tensor), weight in zip(given.items(), self._bank.in_host, strict=True)
                if tensor is not None
            }

    def _handle(self, role: str, like: Tensor, layer: Layer) -> ResidentWeight:
        if self._bank is None:
            whole, bias = self.rows[role], self.rows.get(f"{role}_bias")
            return ResidentWeight(
                self.name, role, like, self.device, self.slots, whole=whole, whole_bias=bias
            )
        weight: Weight = getattr(layer, role)
        facts = [facts_of(tensor, self.device) for tensor in weight[:6]]
        described = Weight._make([*facts, weight.scheme, weight.layout])
        bias = facts_of(getattr(layer, f"{role}_bias"), self.device)
        return ResidentWeight(self.name, role, like, self.device, self.slots, described, bias)

    @property
    def expert_bytes(self) -> int:
        if self._bank is not None:
            return self._bank.expert_bytes
        return sum([t.nbytes for t in self.rows.values()]) // self.num_experts

    @property
    def pinned(self) -> bool:
        """Whether a GPU reads the host's rows by address."""
        return self._bank is not None and self._bank.host_memory.pinned

    def forget(self) -> None:
        """Let calls bring all experts anew: their rows were written."""
        if self._bank is not None:
            self._bank.forget()

    def wait(self) -> None:
        """Wait until the GPU has read what calls so far bring, so that rows may be written."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def extra_repr(self) -> str:
        scheme = self.w13.scheme or "plain"
        return (
            f"w13={self.w13.shape}, w2={self.w2.shape}, {scheme}, {self.w13.dtype}, "
            f"slots={self.slots}, device={str(self.device)!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ResidentExperts:
        probe = fn(torch.empty(0, dtype=self.w13.dtype, device=self.device))
        if probe.device != self.device or probe.dtype != self.w13.dtype:
            raise ValueError(
                f"resident experts stay {self.w13.dtype} on {self.device}, got a conversion to "
                f"{probe.dtype} on {probe.device}: make ResidentExperts of other weights, or for "
                "another device, with its rows: ResidentExperts(**experts.rows, slots=..., "
                "device=...)"
            )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.rows.items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.wait()
        for name, rows in self.rows.items():
            key, found = prefix + name, state_dict.get(prefix + name)
            if found is None:
                missing_keys.append(key)
            elif not isinstance(found, Tensor):
                error_msgs.append(f"{key} must be a torch.Tensor, got {type(found).__name__}")
            elif found.shape != rows.shape:
                error_msgs.append(
                    f"{key} must have shape {tuple(rows.shape)}, got {tuple(found.shape)}"
                )
            else:
                try:
                    with torch.no_grad():
                        rows.copy_(found)
                except Exception as error:  # raised by load_state_dict, after `forget`
                    error_msgs.append(f"{key} was not copied: {error}")
        if strict:
            own = {prefix + name for name in self.rows}
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in own]
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidentExperts:
        copy = _rebuild(dict(self.rows), self.slots, self.device, self.training)
        memo[id(self)] = copy
        return copy

    def __reduce__(self) -> tuple:
        return _rebuild, (dict(self.rows), self.slots, self.device, self.training)


def residency_stats(*modules: nn.Module) -> ResidencyStats:
    """What the calls of all ResidentExperts in these modules found in slots since the last time
    that this was asked. It waits for the device, which has counted.

    Raises:
        ValueError: there are no ResidentExperts in them.
    """
    inside = [held_by(m) or m for one in modules for m in one.modules()]
    residents = [getattr(found, "resident", found) for found in inside]
    found = {id(m): m for m in residents if isinstance(m, ResidentExperts)}
    if not found:
        raise ValueError(
            "modules must hold ResidentExperts, got "
            f"{', '.join([type(one).__name__ for one in modules]) or 'none'} without any"
        )
    banks = [(m._bank, m.expert_bytes) for m in found.values() if m._bank is not None]
    hits = misses = total = 0
    for (came, missed), (_, size) in zip(_read([bank for bank, _ in banks]), banks, strict=True):
        hits, misses, total = hits + came, misses + missed, total + missed * size
    return ResidencyStats(hits, misses, total)


def _read(banks: Iterable[Bank]) -> list[list[int]]:
    """(hits, misses) of each, which begin anew: one read a device."""
    counters = [bank.table.counters for bank in banks]
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in counters:
        by_device.setdefault(one.device, []).append(one)
    values = {device: iter(torch.stack(ts).tolist()) for device, ts in by_device.items()}
    found = [next(values[one.device]) for one in counters]
    for one in counters:
        one.zero_()
    return found


def device_of_slots(device: torch.device | str | int | None) -> torch.device:
    """The device that an argument means, with an index if it is a GPU.

    Raises:
        ValueError: it is neither a GPU of CUDA that exists nor the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = f"cuda:{device}" if isinstance(device, int) else device
    found = device_named("device", name, "choose one of them")
    if found.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be a GPU of CUDA, or the CPU, got {device!r}")
    return found


def _check(given: Mapping[str, Tensor | None], layer: Layer) -> None:
    """Raise unless weights and biases can be those of slots."""
    tensor: Any
    for name, tensor in given.items():
        if tensor is None and name.endswith("_bias"):
            continue
        check_rank(name, tensor, "(E, N)" if name.endswith("_bias") else "(E, N, K)")
        checks.check_local(name, tensor)
        if tensor.requires_grad:
            raise ValueError(
                f"{name} must not require gradients, for none flow to resident experts: pass "
                f"{name}.detach(), or train on weights that fit the GPU"
            )
        if tensor.shape[0] and not tensor.numel():
            raise ValueError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
        if name.endswith("_bias"):
            weight: Any = given[name.removesuffix("_bias")]
            if tensor.shape != weight.shape[:2]:
                raise ValueError(
                    f"{name} must have shape {tuple(weight.shape[:2])}, got {tuple(tensor.shape)}"
                )
    E = layer.w2.data.shape[0]
    if not 0 < E <= MAX_EXPERTS:
        raise ValueError(f"w2 must hold 1 to {MAX_EXPERTS} experts, got {E}")
    for name, tensor in layer.tensors().items():
        if tensor.shape[:1] != (E,):
            raise ValueError(
                f"{name} must have an entry for each of the {E} experts of w2, got shape "
                f"{tuple(tensor.shape)}"
            )
    for role, weight in (("w13", layer.w13), ("w2", layer.w2)):
        if weight.layout == TRANSPOSED or weight.layout.startswith(FLAT):
            raise ValueError(
                f"{role} must have its natural layout, or one that moe_ops.prepare made, got "
                f"{weight.layout!r}"
            )
        desc = get_scheme(weight.scheme).activation
        if desc is None:
            continue
        if weight.activation_scale is None and desc.one_scale:
            raise ValueError(
                f"{role} must have an activation_scale for scheme {weight.scheme!r}: without one "
                "all tokens share a scale, which passes over slots cannot know; give "
                "moe_ops.quantize one, or use a scheme with a scale of each token"
            )
        scale = weight.activation_scale
        if desc.global_scale and scale is not None and scale.numel() > 1:
            raise ValueError(
                f"{role} must have one activation_scale for scheme {weight.scheme!r}, got one of "
                "each expert: of these kernels use the largest of all experts; pass it"
            )


def _moved(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on a device; of a meta tensor memory that is to be filled."""
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    return tensor.detach().to(device, copy=True)


def _rebuilt(like: Tensor, weight: Any) -> Tensor:
    """The tensor of a weight taken apart, of the class of another one; a bias as it is."""
    if isinstance(weight, Tensor):
        return weight
    if not weight.scheme and type(like) in (Tensor, nn.Parameter):
        return weight.data
    quantized: Any = like
    names = ("scale", "zero_point", "global_scale", "channel_scale", "activation_scale")
    return quantized._replace(qdata=weight.data, **{name: getattr(weight, name) for name in names})


def _rebuild(
    rows: Mapping[str, Tensor], slots: int, device: torch.device, training: bool
) -> ResidentExperts:
    """ResidentExperts of copied rows."""
    arguments: Any = rows
    return ResidentExperts(**arguments, slots=slots, device=device).train(training)
