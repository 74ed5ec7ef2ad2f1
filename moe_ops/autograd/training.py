"""Experts with gradients as two functional operators: `moe_ops::experts_forward` returns what
`moe_ops::experts_backward` needs beside the inputs, the first product h (without its bias) and the
order of the pairs. All else is computed again.

Functional, because autograd refuses operators that write their arguments, and selective
checkpointing of one loses what it wrote. A compiler that partitions forward from backward keeps
what these two say: hidden_states, h and the index.

Both run in plain torch (portable.py), for any device and any call, and in fused.py for bf16 rows
on GPUs, beside weights in bf16 or frozen quantized ones.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from moe_ops import activations, environment
from moe_ops.autograd import experts as composition
from moe_ops.autograd import portable
from moe_ops.autograd.adapters import UNADAPTED, Adapters
from moe_ops.autograd.record import SCALES, recorded
from moe_ops.backends.cutlass import products as native
from moe_ops.environment import INTERPRETED
from moe_ops.kernels.launch import Lazy
from moe_ops.kernels.training import frozen
from moe_ops.meta import flops
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.ops.library import TORCH_DEVICES, options_of, register_function, text_of
from moe_ops.ops.memory import addressable
from moe_ops.schemes import get_scheme, layer_scheme, schemes_of_layer

_INPUTS = (
    "Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
    "Tensor?[] scales, Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map, str options"
)
# of the inputs, those that may get gradients, and their places
_GRADIENTS = (0, 1, 2, 3, 6, 7)  # hidden_states, w13, w2, topk_weights, w13_bias, w2_bias


# of plain weights: one slot of each. AOTInductor passes an empty list as None, which no operator
# with a derivative is given.
_NO_SCALES = (None, None)


class Options(NamedTuple):
    """What the operators' `options` say."""

    scheme: str  # `schemes.layer_scheme` of w13 and w2
    activation: str
    alpha: float
    beta: float
    limit: float
    router_weight_on_input: bool
    recompute: bool  # h is computed again in the backward pass
    batch_invariant: bool = False
    fp32_out: bool = False  # beside hidden_states of 16 bits


class Inputs(NamedTuple):
    """The inputs of both operators."""

    call: ExpertsCall
    recompute: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """E, N, K, I and top_k."""
        call = self.call
        E, N, K = get_scheme(call.w13.scheme).logical_shape(*call.w13.data.shape)
        I = get_scheme(call.w2.scheme).logical_shape(*call.w2.data.shape)[2]  # noqa: E741
        return E, N, K, I, call.topk_ids.shape[1]


def _inputs(values: tuple) -> Inputs:
    x, w13, w2, topk_weights, topk_ids, scales, b13, b2, expert_map, text = values
    o = options_of(text, Options)
    slots = len(scales) // 2
    none = [None] * (5 - slots)
    of_w13, of_w2 = schemes_of_layer(o.scheme)
    first = Weight._make((w13, *scales[:slots], *none, of_w13, ""))
    second = Weight._make((w2, *scales[slots:], *none, of_w2, ""))
    activation = activations.from_op(o.activation, o.alpha, o.beta, o.limit)
    call = ExpertsCall(
        *(x, first, second, topk_weights, topk_ids, b13, b2, expert_map, activation),
        *(o.router_weight_on_input, True, True),
        out_dtype=torch.float32 if o.fp32_out else None,
        batch_invariant=o.batch_invariant,
    )
    return Inputs(call, o.recompute)


# --- where it runs -------------------------------------------------------------------------------


_fused_forward = Lazy("moe_ops.autograd.fused:forward")
_fused_backward = Lazy("moe_ops.autograd.fused:backward")
_MULTIPLE = 8  # of sizes: rows of 16-bit numbers begin at multiples of 16 bytes
# Compute capabilities (major numbers) for which torch builds its grouped product, and the most
# experts it takes. Elsewhere, and for other dtypes, F.grouped_mm copies the offsets to the host
# and loops over experts.
_GROUPED_MM_ON, _MOST_EXPERTS = (9, 10), 1023


def why_not_fused(call: ExpertsCall) -> str | None:
    """Why a call runs in plain torch; None if it runs in fused.py. Each operator asks once."""
    x, w13, w2 = call.hidden_states, call.w13.data, call.w2.data
    if call.batch_invariant and x.device.type == "cpu":
        return "batch_invariant asks for the products that inference takes"
    weights = call.w13, call.w2
    schemes = [get_scheme(weight.scheme) for weight in weights]
    if schemes[0] != schemes[1] and any([scheme.activation for scheme in schemes]):
        return "its weights have two schemes, of which one quantizes activations"
    unfrozen = frozen.why_not(*[weight for weight in weights if weight.scheme])
    if unfrozen:
        return unfrozen
    if not call.topk_ids.numel():
        return "it has no tokens"
    shapes = [scheme.logical_shape(*t.shape) for scheme, t in zip(schemes, (w13, w2), strict=True)]
    if any([size % _MULTIPLE for shape in shapes for size in shape[1:]]):
        return f"its sizes are no multiples of {_MULTIPLE}"
    if x.device.type != "cuda":
        return None if INTERPRETED and x.dtype == torch.float32 else "it is not on a CUDA device"
    if x.dtype != torch.bfloat16:
        return f"torch's grouped product takes bf16, not {x.dtype}"
    plain = all([type(t) is Tensor or type(t) is torch.nn.Parameter for t in (w13, w2)])
    if not plain or not addressable((w13, w2)):
        return "its weights have no addresses"
    if environment.capability(x.device)[0] not in _GROUPED_MM_ON:
        return "torch's grouped product is built for compute capability 9 and 10"
    if w13.shape[0] > _MOST_EXPERTS:
        return f"torch's grouped product takes at most {_MOST_EXPERTS} experts"
    for t in [weight.data for weight in weights if not weight.scheme]:
        if not (t.is_contiguous() or t.mT.is_contiguous()) or t.data_ptr() % 16:
            return "its weights are not contiguous, or begin askew"
    return None


def explanation(call: ExpertsCall) -> str:
    """How the operators run a call, in words."""
    reason = why_not_fused(call)
    if reason:
        return f"plain torch, because {reason}"
    schemes, products = (call.w13.scheme, call.w2.scheme), []
    if not all(schemes):
        there = native.kernels(call.hidden_states.get_device()) is not None
        products.append(
            "grouped products of csrc/cutlass" if there else "torch's grouped products"
        )
    if any(schemes):
        products.append("products that decode weights")
        how = frozen.frozen(call.w13.scheme)
        if how is not None and how.elements is not None:
            products.append(f"of activations rounded to {how.elements.DTYPE}")
    output = ", the output by inference's kernels" if call.batch_invariant else ""
    return f"fused kernels, {', '.join(products)}{output}"


_warned = False


def warn_of_plain_torch(
    x: Tensor,
    reason: str,
    cause: str = "gradients are recorded",
    remedy: str = "wrap the call in torch.no_grad() or torch.inference_mode()",
) -> None:
    """Say once that a call on a GPU, whose tokens are x, leaves fast kernels unused, and why."""
    global _warned
    if _warned or not x.is_cuda or not x.numel():
        return
    _warned = True
    warnings.warn(
        f"moe_ops runs its differentiable torch path, because {cause}, and {reason}. For "
        f"inference {remedy} to use the fast kernels.",
        stacklevel=2,
    )


# --- forward -------------------------------------------------------------------------------------


def _forward(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out (M, K); h (S, N), or (0, N) if it is computed again, whose rows behind those of the last
    expert may hold anything; int32 index (E + S,): the row after each expert's last pair, then the
    row of each pair, or -1 if its expert is not here.

    h is the product with w13, and what adapts it, rounded to its dtype. Whoever reads it adds
    w13_bias, in fp32, so that the product of torch, which takes none, needs no pass over h.
    """
    call, recompute = _inputs(values)
    reason = why_not_fused(call)
    if reason is not None:
        warn_of_plain_torch(call.hidden_states, reason)
    out, h, _, index = run_forward(call, UNADAPTED, recompute, reason is None)
    return out, h, index


def run_forward(
    call: ExpertsCall, adapters: Adapters, recompute: bool, fused: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """out, h, u and index: u (S, r) is what an adapter of w13 makes narrow, None without one."""

    def kept(t: Tensor) -> Tensor:
        return (t[:0].clone() if recompute else t).to(portable.kept_dtype(call))

    out, h, u, index = (_fused_forward if fused else portable.forward)(call, adapters)
    return out, kept(h), None if u is None else kept(u), index


def _forward_fake(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _inputs(values)
    call, (E, N, _, _, top_k) = inputs.call, inputs.sizes
    x = call.hidden_states
    S = x.shape[0] * top_k
    h = x.new_empty((0 if inputs.recompute else S, N), dtype=portable.kept_dtype(call))
    out = x.new_empty(x.shape, dtype=call.output()[1])
    return out, h, call.topk_ids.new_empty((E + S,), dtype=torch.int32)


# --- backward ------------------------------------------------------------------------------------


def _backward(grad: Tensor, h: Tensor, index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of hidden_states, w13, w2, topk_weights, w13_bias and w2_bias; (0,) for those that
    are not needed.
    """
    *values, needs = rest
    inputs = _inputs(tuple(values))
    fused = why_not_fused(inputs.call) is None
    return run_backward(inputs, grad, h, None, index, needs, UNADAPTED, fused)


def run_backward(
    inputs: Inputs,
    grad: Tensor,
    h: Tensor,
    u: Tensor | None,
    index: Tensor,
    needs: list[bool],
    adapters: Adapters,
    fused: bool,
) -> tuple[Tensor, ...]:
    """The gradients, and where `needs` has them, behind them those of a13, b13, a2 and b2."""
    run = _fused_backward if fused else portable.backward
    known_h, known_u = (None, None) if inputs.recompute else (h, u)
    found = run(inputs.call, grad, known_h, known_u, index, needs, adapters)
    # outputs may not share memory
    return tuple([h.new_empty(0) if t is None else t for t in found])


def _backward_fake(grad: Tensor, h: Tensor, index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *values, needs = rest
    x, w13, w2, topk_weights, _, _, b13, b2, *_ = values
    like = (x, w13, w2, topk_weights, b13, b2)
    return tuple(
        [
            t.new_empty(t.shape) if need else h.new_empty(0)
            for t, need in zip(like, needs, strict=True)
        ]
    )


# --- the operators -------------------------------------------------------------------------------


def _run_backward(*values: Any) -> tuple[Tensor, ...]:
    return backward(*values)


def _layer(values: tuple) -> Tensor:
    return composition.fused_experts(_inputs(values).call)


forward = register_function(
    "experts_forward",
    f"({_INPUTS}) -> (Tensor out, Tensor h, Tensor index)",
    _forward,
    _forward_fake,
    recorded((9,), _GRADIENTS, _run_backward, _layer),
    devices=TORCH_DEVICES,
    flops=flops.experts_forward,
)


backward = register_function(
    "experts_backward",
    f"(Tensor grad, Tensor h, Tensor index, {_INPUTS}, bool[6] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    devices=TORCH_DEVICES,
    flops=flops.experts_backward,
    one_by_one=True,
)


def fused_experts(call: ExpertsCall, recompute: bool) -> Tensor:
    """Differentiable experts, (M, K) in the call's dtype. With `recompute` nothing is kept for
    the backward pass but the inputs and the order of the pairs.
    """
    return forward(*op_values(call, recompute))[0]


def op_values(call: ExpertsCall, recompute: bool) -> tuple:
    """The inputs of both operators."""
    a = call.activation
    # constants, also where dynamic=True makes symbols of them
    numbers = [float(guard_scalar(x)) for x in (a.alpha, a.beta, a.limit)]
    scheme = layer_scheme(call.w13.scheme, call.w2.scheme)
    values = (scheme, a.name, *numbers, call.router_weight_on_input, recompute)
    fp32_out = call.output()[1] != call.hidden_states.dtype
    values += (True, fp32_out) if call.batch_invariant else ()  # the last ones may be left out
    inputs = [*call.op_values(text_of(Options._fields[: len(values)], values))]
    inputs[SCALES] = inputs[SCALES] or _NO_SCALES
    return tuple(inputs)
