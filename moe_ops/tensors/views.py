"""Views of quantized weights: each moves the data and the scales that belong to it.

Arguments are those of the torch functions of the same name. They raise ValueError where the result
would have no scales of its own, naming what to do instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moe_ops.meta.scales import FLAT, TRANSPOSED, packed_size, unit_of_planes
from moe_ops.numerics.elements import pack, unpack
from moe_ops.schemes import SUPER_BLOCK, QuantDesc, get_scheme
from moe_ops.tensors.base import ExpertTensor

aten = torch.ops.aten


def axis(self: ExpertTensor, dim: int) -> tuple[str, int]:
    """("expert", "row" or "col", the dimension counted from the end)."""
    if not -self.dim() <= dim < self.dim():
        raise IndexError(f"dim must be in [{-self.dim()}, {self.dim() - 1}], got {dim}")
    dim = dim - self.dim() if dim >= 0 else dim
    if dim == -3:
        return "expert", dim
    if self.weight_layout.startswith(FLAT):
        raise ValueError(
            f"views of {self} must restore its shape first, "
            f"view({', '.join(map(str, self._unflattened().shape))}); or view dequantize()"
        )
    if self.weight_layout not in ("", TRANSPOSED):
        raise ValueError(
            f"views of {self} must be along the expert dimension 0: its rows and columns lie in "
            "another order; moe_ops.prepare(weight, 'torch') restores it"
        )
    return ("row" if (dim == -2) != (self.weight_layout == TRANSPOSED) else "col"), dim


def slice_(
    self: ExpertTensor, dim: int, start: int | None, end: int | None, step: int
) -> ExpertTensor:
    if self.dim() == 1 and range(self.shape[0])[start:end:step] == range(self.shape[0]):
        return self._map(_alias)  # all of flat weights
    kind, dim = axis(self, dim)
    if kind == "expert":
        return self._with_weights(lambda t: aten.slice.Tensor(t, 0, start, end, step))
    desc = get_scheme(self.scheme).quantized_weight
    size = self.shape[dim]
    start, end, step = slice(start, end, step).indices(size)
    if end <= start:  # no elements, no scales
        start = end = 0
        step = 1
    if kind == "row":
        return self._replace(**_rows(self, desc, dim, size, start, end, step))
    return self._replace(**_columns(self, desc, dim, size, start, end, step))


def _rows(
    self: ExpertTensor, desc: QuantDesc, dim: int, size: int, start: int, end: int, step: int
) -> dict[str, Tensor]:
    names = ["qdata", *self._scales_of_rows]
    changed = {n: aten.slice.Tensor(getattr(self, n), dim, start, end, step) for n in names}
    return changed | _scales(self, desc.group.rows, desc, dim, size, start, end, step)


def _columns(
    self: ExpertTensor, desc: QuantDesc, dim: int, size: int, start: int, end: int, step: int
) -> dict[str, Tensor]:
    bits, group = desc.format.bits, desc.group.cols
    if desc.format.high_bits:
        unit = unit_of_planes(size)
        where = "bits of columns that lie together begin"
        if end > start and unit_of_planes(end - start) != unit:
            raise ValueError(
                f"slices of {self} along dim {dim + self.dim()} must have columns of which {unit} "
                f"lie together, as in the whole, got {end - start}; quantize or load the slice"
            )
        _require_multiples(self, dim, unit, where, None, start, end, step)
    elif bits != 8 and group == -1:
        _require_multiples(self, dim, 2, "a byte begins", None, start, end, step)
    changed = _scales_of_columns(self, desc, dim, size, start, end, step)
    if bits != 8:
        start, end = packed_size(start, bits), packed_size(end, bits)
    return changed | {"qdata": aten.slice.Tensor(self.qdata, dim, start, end, step)}


def in_planes(self: ExpertTensor) -> bool:
    return get_scheme(self.scheme).quantized_weight.format.high_bits > 0


def repacked_columns(self: ExpertTensor, start: int, end: int) -> ExpertTensor:
    """Columns of a weight (E, N, K) whose bits lie in planes, from any group on: a copy, because
    in the slice other columns lie together.
    """
    desc = get_scheme(self.scheme).quantized_weight
    changed = _scales_of_columns(self, desc, -1, self.shape[-1], start, end, 1)
    codes = unpack(self.qdata, desc.format)[..., start:end]
    return self._replace(**changed, qdata=pack(codes, desc.format)).clone()


def _scales_of_columns(
    self: ExpertTensor, desc: QuantDesc, dim: int, size: int, start: int, end: int, step: int
) -> dict[str, Tensor]:
    above = {}
    if desc.two_levels:
        where = "a scale of scales begins"
        _require_multiples(self, dim, SUPER_BLOCK, where, None, start, end, step)
        first, last = [at // SUPER_BLOCK * desc.super_width for at in (start, end)]
        assert self.channel_scale is not None
        above["channel_scale"] = aten.slice.Tensor(self.channel_scale, dim, first, last)
    return above | _scales(self, desc.group.cols, desc, dim, size, start, end, step)


def _scales(
    self: ExpertTensor,
    group: int,
    desc: QuantDesc,
    dim: int,
    size: int,
    start: int,
    end: int,
    step: int,
) -> dict[str, Tensor]:
    """The scales, and zero points, of a slice along a dimension whose groups have this size."""
    if group == -1:
        return {}
    if group > 1:
        whole = size if not desc.whole_groups else None
        _require_multiples(self, dim, group, "a scale begins", whole, start, end, step)
        start, end = start // group, (end + group - 1) // group
    names = ("scale",) if self.zero_point is None else ("scale", "zero_point")
    return {n: aten.slice.Tensor(getattr(self, n), dim, start, end, step) for n in names}


def _require_multiples(
    self: ExpertTensor,
    dim: int,
    of: int,
    where: str,
    last: int | None,
    start: int,
    end: int,
    step: int,
) -> None:
    """Raise unless a slice begins and ends at multiples; with ``last`` it may end anywhere."""
    if start % of or step != 1:
        raise ValueError(
            f"slices of {self} along dim {dim + self.dim()} must start at a multiple of {of}, "
            f"where {where}, with step 1, got start {start} and step {step}"
        )
    if last is None and end % of:
        raise ValueError(
            f"slices of {self} along dim {dim + self.dim()} must end at a multiple of {of}, "
            f"where {where}, got end {end}"
        )


def require_experts(self: ExpertTensor, dim: int, what: str) -> None:
    if self.dim() != 3 or dim not in (0, -3):
        raise ValueError(
            f"{what} of {self} must be along the expert dimension 0 of a 3-D tensor, got dim "
            f"{dim}; take a slice, or dequantize()"
        )


def select(self: ExpertTensor, dim: int, index: int) -> ExpertTensor:
    require_experts(self, dim, "select")
    return self._with_weights(lambda t: t.select(0, index))


def take(self: ExpertTensor, index: Tensor) -> ExpertTensor:
    require_experts(self, 0, "indexing by a tensor")
    if index.dim() > 1:
        raise ValueError(f"an index into {self} must be 0-D or 1-D, got {index.dim()}-D")
    return self._with_weights(lambda t: aten.index.Tensor(t, [index]))


def index_select(self: ExpertTensor, dim: int, index: Tensor) -> ExpertTensor:
    require_experts(self, dim, "index_select")
    # no negative ones, as index_select of torch has it
    return self._with_weights(lambda t: aten.index_select(t, 0, index))


def narrow(self: ExpertTensor, dim: int, start: int, length: int) -> ExpertTensor:
    axis(self, dim)
    size, first = self.shape[dim], int(start)
    first += size if first < 0 else 0
    if length < 0 or not 0 <= first <= size - length:
        raise IndexError(
            f"narrow of {self} along dim {dim} must stay within its {size} entries, got start "
            f"{start} and length {length}"
        )
    return slice_(self, dim, first, first + length, 1)


def chunk(self: ExpertTensor, chunks: int, dim: int = 0) -> tuple[ExpertTensor, ...]:
    axis(self, dim)
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}")
    total = self.shape[dim]
    return split(self, -(-total // chunks) if total else [0] * chunks, dim)


def split(self: ExpertTensor, split_size: Any, dim: int = 0) -> tuple[ExpertTensor, ...]:
    axis(self, dim)
    total = self.shape[dim]
    if not isinstance(split_size, (int, torch.SymInt)):
        sizes = list(split_size)
    elif split_size > 0:
        left: Any = total
        sizes = []
        while left > split_size:  # not range(), which would ask for the value of a symbol
            sizes.append(split_size)
            left = left - split_size
        sizes.append(left)
    else:
        sizes = [0] if split_size == 0 else [split_size]
    if any([size < 0 for size in sizes]) or sum(sizes) != total:
        raise ValueError(
            f"split of {self} along dim {dim} must be into parts of together {total} entries, got "
            f"{split_size}"
        )
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
    return self._transposed()


def matrix_transpose(self: ExpertTensor) -> ExpertTensor:
    """`t` and `T`, which torch defines of matrices alone."""
    if self.dim() != 2:
        raise ValueError(
            f"t and T of a quantized weight must be of one expert's matrix, got {self}; mT "
            "exchanges the last two dimensions"
        )
    return self._transposed()


def view(self: ExpertTensor, size: tuple[int, ...]) -> ExpertTensor:
    """The same weights in their shape, in one dimension, or back in their shape.

    FSDP2 flattens its shards by ``view(-1)``.
    """
    shape = tuple(self.shape)
    viewed = tuple(torch.empty_strided(shape, self.stride(), device="meta").view(size).shape)
    if viewed == shape:
        return self._map(_alias)
    if self.weight_layout.startswith(FLAT):
        whole = self._unflattened()
        if viewed == tuple(whole.shape):
            return whole._map(_alias)
    elif len(viewed) == 1:
        return self._map(_alias, weight_layout=FLAT + self.weight_layout)
    raise ValueError(
        f"a view of {self} must have its shape, or one dimension, got {viewed}; {_VIEW}"
    )


def as_strided(
    self: ExpertTensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None = None
) -> ExpertTensor:
    """As `view`: FSDP2 shapes gathered weights by it, and compilers repeat views by it."""
    if offset in (None, self.qdata.storage_offset()) and math.prod(size) == self.numel():
        viewed = view(self, size)
        if tuple(viewed.stride()) == tuple(stride):
            return viewed
    raise ValueError(
        f"as_strided of {self} must keep its shape, strides and offset, got {tuple(size)}, "
        f"{tuple(stride)} and {offset}; {_VIEW}"
    )


_VIEW = "view dequantize()"


def _alias(t: Tensor) -> Tensor:
    return t.view(t.shape)


def getitem(self: ExpertTensor, key: Any) -> ExpertTensor:
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
        elif hasattr(k, "__len__"):  # a tensor, an array, a list, a range
            require_experts(view, dim, "indexing by a tensor")
            index = list(k) if isinstance(k, range) else k
            empty = not isinstance(k, Tensor) and len(k) == 0
            dtype = torch.int64 if empty else None
            view = take(view, torch.as_tensor(index, dtype=dtype, device=view.device))
        elif k is None or isinstance(k, bool):
            raise ValueError(f"an index into {self} must not be {k}; index dequantize()")
        else:
            view = select(view, dim, k)
        dim += 1 - (before - view.dim())
    return view
