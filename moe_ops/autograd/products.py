"""The differentiable grouped products: two ops whose derivatives consist of the same two ops.

They are opaque to torch, because the row counts of experts are on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.meta import flops
from moe_ops.numerics import Scales
from moe_ops.ops.library import TORCH_DEVICES, register_function
from moe_ops.planning.training import PORTABLE
from moe_ops.schemes import get_scheme

_PLAIN = (None, None, None, None)  # scales of plain weights


def _columns(weight: Tensor, scheme: str, of_result: bool) -> int:
    """K of weights (E, N, K), the columns of x, or with `of_result` N, those of the result."""
    return get_scheme(scheme).logical_shape(*weight.shape)[1 if of_result else 2]


def _check(x: Tensor, weight: Tensor, offsets: Tensor, scheme: str, transpose: bool) -> None:
    columns = _columns(weight, scheme, transpose)
    torch._check(x.shape[1] == columns, lambda: f"x must have {columns} columns as weight has")
    torch._check(offsets.dtype == torch.int32, lambda: "offsets must be int32")
    torch._check(offsets.shape[0] == weight.shape[0], lambda: "offsets must have E entries")


def _grouped_mm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    channel_scale: Tensor | None,
    bias: Tensor | None,
    scheme: str,
    transpose: bool,
    batch_invariant: bool = False,
) -> Tensor:
    _check(x, weight, offsets, scheme, transpose)
    scales = None
    if scheme:
        assert scale is not None
        scales = Scales(scale, zero_point, global_scale, channel_scale)
    return PORTABLE.multiply(
        *(x, weight, offsets),
        scales=scales,
        scheme=scheme,
        bias=bias,
        transpose=transpose,
        batch_invariant=batch_invariant,
    )


def _grouped_mm_fake(x: Tensor, weight: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    scheme, transpose = rest[5:7]
    _check(x, weight, offsets, scheme, transpose)
    return x.new_empty(x.shape[0], _columns(weight, scheme, not transpose))


def _grouped_outer_fake(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _save_mm(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, offsets, *scales, bias, ctx.scheme, ctx.transpose, _ = inputs
    ctx.save_for_backward(x, weight, offsets, *scales)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _mm_backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight, offsets, *scales = ctx.saved_tensors
    grad = grad.contiguous()
    dx = dweight = dbias = None
    if ctx.needs_input_grad[0]:
        dx = grouped_mm(grad, weight, offsets, *scales, None, ctx.scheme, not ctx.transpose)
    if ctx.needs_input_grad[1]:
        a, b = (x, grad) if ctx.transpose else (grad, x)
        dweight = grouped_outer(a, b, offsets).to(weight.dtype)
    if ctx.needs_input_grad[7]:
        # a product with ones sums each expert's rows in a fixed order; index_add would not
        ones = grad.new_ones(grad.shape[0], 8)
        dbias = grouped_outer(grad, ones, offsets)[..., 0].to(ctx.bias_dtype)
    return dx, dweight, None, None, None, None, None, dbias, None, None, None


def _save_outer(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _outer_backward(ctx: Any, grad: Tensor) -> tuple:
    a, b, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    da = (
        grouped_mm(b, grad, offsets, *_PLAIN, None, "", False) if ctx.needs_input_grad[0] else None
    )
    db = grouped_mm(a, grad, offsets, *_PLAIN, None, "", True) if ctx.needs_input_grad[1] else None
    return da, db, None


# Derivatives consist of the same two products, so they have derivatives themselves. They are
# registered for the ops, not in a torch.autograd.Function around them: so a graph that
# torch.export or make_fx traced keeps them.
grouped_mm = register_function(
    "grouped_mm",
    "(Tensor x, Tensor weight, Tensor offsets, Tensor? scale, Tensor? zero_point, "
    "Tensor? global_scale, Tensor? channel_scale, Tensor? bias, str scheme, bool transpose, "
    "bool batch_invariant=False) -> Tensor",
    _grouped_mm,
    _grouped_mm_fake,
    (_mm_backward, _save_mm),
    devices=TORCH_DEVICES,
    flops=flops.grouped_mm,
    one_by_one=True,
)


grouped_outer = register_function(
    "grouped_outer",
    "(Tensor a, Tensor b, Tensor offsets) -> Tensor",
    PORTABLE.outer,
    _grouped_outer_fake,
    (_outer_backward, _save_outer),
    devices=TORCH_DEVICES,
    flops=flops.grouped_outer,
    one_by_one=True,
)
