"""Views of quantized weights: each moves the data and the scales that belong to it.

Arguments are those of the torch functions of the same name. They raise ValueError where the result
would have no scales of its own, naming what to do instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ops.schemes import get_scheme

if TYPE_CHECKING:
    from moe_ops.tensors.base import ExpertTensor

aten = torch.ops.aten

TRANSPOSED = "transposed"


def axis(self: ExpertTensor, dim: int) -> tuple[str, int]:
    """("expert", "row" or "col", the dimension counted from the end)."""
    if not -self.dim() <= dim < self.dim():
        raise IndexError(f"dim must be in [{-self.dim()}, {self.dim() - 1}], got {dim}")
    dim = dim - self.dim() if dim >= 0 else dim
    if dim == -3:
        return "expert", dim
    return ("row" if (dim == -2) != (self.weight_layout == TRANSPOSED) else "col"), dim


def slice_(self: ExpertTensor, dim: int, start, end, step) -> ExpertTensor:
    kind, dim = axis(self, dim)
    if kind == "expert":
        return self._with_weights(lambda t: aten.slice.Tensor(t, 0, start, end, step))
    desc = get_scheme(self.scheme).quantized_weight
    group = desc.group.rows if kind == "row" else desc.group.cols
    qdata = aten.slice.Tensor(self.qdata, dim, start, end, step)
    scale = self.scale
    if group > 1:
        start, end, step = slice(start, end, step).indices(self.shape[dim])
        if end <= start:  # no elements, no scales
            start = end = 0
        elif start % group or step != 1:
            raise ValueError(
                f"slices of {self} along dim {dim + self.dim()} must start at a multiple of {group}, "
                f"where a scale begins, with step 1, got start {start} and step {step}"
            )
        end = (end + group - 1) // group
        scale = aten.slice.Tensor(scale, scale.dim() + dim, start // group, end, 1)
    elif group == 1:
        scale = aten.slice.Tensor(scale, scale.dim() + dim, start, end, step)
    return self._replace(qdata=qdata, scale=scale)


def require_experts(self: ExpertTensor, dim: int, what: str) -> None:
    if self.dim() != 3 or dim not in (0, -3):
        raise ValueError(
            f"{what} of {self} must be along the expert dimension 0 of a 3-D tensor, got dim {dim}; "
            f"take a slice, or dequantize()"
        )


def select(self: ExpertTensor, dim: int, index) -> ExpertTensor:
    require_experts(self, dim, "select")
    return self._with_weights(lambda t: t.select(0, index))


def index(self: ExpertTensor, index: Tensor) -> ExpertTensor:
    require_experts(self, 0, "indexing by a tensor")
    if index.dim() > 1:
        raise ValueError(f"an index into {self} must be 0-D or 1-D, got {index.dim()}-D")
    return self._with_weights(lambda t: aten.index.Tensor(t, [index]))


def split(self: ExpertTensor, sizes: int | list[int], dim: int = 0) -> tuple[ExpertTensor, ...]:
    total = self.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    parts, start = [], 0
    for size in sizes:
        parts.append(slice_(self, dim, start, start + size, 1))
        start += size
    return tuple(parts)


def unbind(self: ExpertTensor, dim: int = 0) -> tuple[ExpertTensor, ...]:
    require_experts(self, dim, "unbind")
    return tuple(select(self, 0, index) for index in range(self.shape[0]))


def transpose(self: ExpertTensor, dim0: int = -2, dim1: int = -1) -> ExpertTensor:
    if {axis(self, dim0)[0], axis(self, dim1)[0]} != {"row", "col"}:
        raise ValueError(
            f"transpose of {self} must exchange its last two dimensions, got {dim0} and {dim1}"
        )
    scale = self.scale
    if not get_scheme(self.scheme).quantized_weight.group.is_tensor:
        scale = scale.transpose(-2, -1)
    return self._replace(
        qdata=self.qdata.transpose(-2, -1),
        scale=scale,
        weight_layout="" if self.weight_layout == TRANSPOSED else TRANSPOSED,
    )


def getitem(self: ExpertTensor, key) -> ExpertTensor:
    keys = key if isinstance(key, tuple) else (key,)
    ellipses = [at for at, k in enumerate(keys) if k is Ellipsis]
    if ellipses:
        at, missing = ellipses[0], self.dim() - len(keys) + 1
        keys = keys[:at] + (slice(None),) * missing + keys[at + 1 :]
    view, dim = self, 0
    for k in keys:
        before = view.dim()
        if isinstance(k, slice):
            view = slice_(view, dim, k.start, k.stop, 1 if k.step is None else k.step)
        elif isinstance(k, (Tensor, list)):
            require_experts(view, dim, "indexing by a tensor")
            view = index(view, torch.as_tensor(k, device=view.device))
        elif k is None or isinstance(k, bool):
            raise ValueError(f"an index into {self} must not be {k}; index dequantize()")
        else:
            view = select(view, dim, k)
        dim += 1 - (before - view.dim())
    return view
