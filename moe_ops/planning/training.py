"""The plan of a call that records gradients: kernels around the grouped products of a backend, or
plain torch. The operators of `autograd` follow it, and `explain(training=True)` prints it.

Each operator plans for itself, because only there tensors have addresses, and because a graph may
run on another machine than the one that captured it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.backends.cutlass import products as cutlass
from moe_ops.backends.torch import grouped_mm
from moe_ops.environment import INTERPRETED
from moe_ops.kernels.rows import frozen
from moe_ops.ops.call import ExpertsCall, GroupedCall
from moe_ops.ops.memory import addressable
from moe_ops.ops.products import Products
from moe_ops.schemes import get_scheme

PORTABLE = grouped_mm.PORTABLE  # products for every device, also of quantized weights
_MULTIPLE = 8  # divides all sizes, so that rows of 16-bit elements start at multiples of 16 bytes
# Major compute capabilities for which torch builds its grouped product. Elsewhere, and for other
# dtypes, F.grouped_mm copies the offsets to the host and loops over the experts.
_GROUPED_MM_ON = (9, 10)


class TrainingPlan(NamedTuple):
    """What runs the forward and the backward pass."""

    why_plain: str | None  # why plain torch does; None: kernels do
    products: Products  # for plain weights


def plan(call: ExpertsCall | GroupedCall, matrices: Sequence[Tensor] = ()) -> TrainingPlan:
    """The plan of a call whose adapters have these matrices."""
    reason = why_not_kernels(call, matrices)
    if reason is not None or (call.w13.scheme and call.w2.scheme):
        return TrainingPlan(reason, PORTABLE)  # no library of products is loaded
    products, experts = _products(call.hidden_states), call.w13.data.shape[0]
    if products.most_experts is not None and experts > products.most_experts:
        reason = f"{products.name} take at most {products.most_experts} experts"
        return TrainingPlan(reason, PORTABLE)
    return TrainingPlan(None, products)


def _products(x: Tensor) -> Products:
    """The preferred products among those that run on the device of x."""
    if cutlass.takes(x):
        return cutlass.PRODUCTS
    return grouped_mm.NATIVE if x.is_cuda else PORTABLE


def why_not_kernels(
    call: ExpertsCall | GroupedCall, matrices: Sequence[Tensor] = ()
) -> str | None:
    """Reason why plain torch runs a call; None if kernels do."""
    x, w13, w2 = call.hidden_states, call.w13.data, call.w2.data
    if matrices:
        if call.options.batch_invariant:
            return "batch_invariant asks for products of rows that the others do not change"
        if not all([t.is_contiguous() and t.dtype == x.dtype for t in matrices]):
            return "its adapters are not contiguous, or of another dtype than hidden_states"
        if not addressable(matrices):
            return "its adapters have no addresses"
    if call.options.batch_invariant and x.device.type == "cpu":
        return "batch_invariant asks for the products that inference takes"
    weights = call.w13, call.w2
    schemes = [get_scheme(weight.scheme) for weight in weights]
    if schemes[0] != schemes[1] and any([scheme.activation for scheme in schemes]):
        return "its weights have two schemes, of which one quantizes activations"
    quantized = [weight for weight in weights if weight.scheme]
    unfrozen = frozen.why_not(*quantized) if quantized else None
    if unfrozen:
        return unfrozen
    if not x.shape[0]:
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
    for t in [weight.data for weight in weights if not weight.scheme]:
        if not (t.is_contiguous() or t.mT.is_contiguous()) or t.data_ptr() % 16:
            return "its weights are not contiguous, or begin askew"
    return None


def explanation(call: ExpertsCall) -> str:
    """What runs the forward and the backward pass of a call, in words."""
    reason, products = plan(call)
    if reason:
        return f"plain torch, because {reason}"
    schemes, names = (call.w13.scheme, call.w2.scheme), []
    if not all(schemes):
        names.append(products.name)
    if any(schemes):
        names.append("products that decode weights")
        how = frozen.frozen(call.w13.scheme)
        if how is not None and how.elements:
            names.append(f"of activations rounded to {how.elements}")
    output = ", the output by inference's kernels" if call.options.batch_invariant else ""
    return f"fused kernels, {', '.join(names)}{output}"
