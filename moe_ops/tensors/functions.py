"""What torch's functions and operators do with expert tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import fill_defaults

from moe_ops.tensors import views
from moe_ops.tensors.base import (
    ExpertTensor,
    Types,
    implements,
    implements_torch_function,
    refuse_grad,
)

aten = torch.ops.aten

_HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)


@implements_torch_function(
    [torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__]  # type: ignore[attr-defined]
)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    refuse_grad(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    return args[0]


@implements_torch_function(
    [
        torch.nn.functional.linear,
        torch.nn.functional.grouped_mm,
        torch._grouped_mm,
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
        torch.mm,
        torch.Tensor.mm,
        torch.bmm,
        torch.Tensor.bmm,
        torch.addmm,
        torch.Tensor.addmm,
        torch.baddbmm,
        torch.Tensor.baddbmm,
    ]
)
@implements(
    [
        aten.linear.default,
        aten._grouped_mm.default,
        aten.matmul.default,
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
    ]
)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    plain = [a.dequantize() if isinstance(a, ExpertTensor) else a for a in args]
    named = {k: a.dequantize() if isinstance(a, ExpertTensor) else a for k, a in kwargs.items()}
    return func(*plain, **named)


@implements(aten._to_copy.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    self = args[0]
    dtype = kwargs.get("dtype") or self.dtype
    if dtype not in _HIGH_PRECISION:
        raise ValueError(
            f"dtype of quantized weights must be one of {_HIGH_PRECISION}, got {dtype}; "
            f"dequantize() takes any dtype"
        )
    where = {k: kwargs[k] for k in ("device", "non_blocking") if kwargs.get(k) is not None}
    if not self.scheme:
        where["dtype"] = dtype
    return self._map(lambda t: func(t, **where), dtype=dtype)


@implements(aten.empty_like.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    dtype = kwargs.pop("dtype", None) or args[0].dtype
    if not args[0].scheme:
        kwargs["dtype"] = dtype
    return args[0]._map(lambda t: func(t, **kwargs), dtype=dtype)


@implements(aten.copy_.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    self, src = args[0], args[1]
    if not isinstance(src, ExpertTensor):
        raise ValueError(
            f"source of a copy into {self} must be quantized alike, got a plain tensor; "
            f"pass it through moe_ops.quantize first"
        )
    if not isinstance(self, ExpertTensor):
        raise ValueError(
            f"target of a copy from {src} must be quantized alike, got a plain tensor; copy from "
            "dequantize(), or call model.requires_grad_(False) (enough: on the experts' "
            "parameters) and then load_state_dict(..., assign=True)"
        )
    own, other = (
        (*t.__tensor_flatten__()[0], t.scheme, t.weight_layout, *t.shape) for t in (self, src)
    )
    if own != other:
        raise ValueError(f"source of a copy into {self} must be quantized alike, got {src}")
    for name in self.__tensor_flatten__()[0]:
        getattr(self, name).copy_(getattr(src, name), *args[2:])
    return self


# Views are registered twice: as torch functions, for tracers that would otherwise see an operator
# on a tensor they do not know, and as operators, for all that arrives below them.


@implements_torch_function([torch.Tensor.__getitem__])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.getitem(*args)


@implements_torch_function([torch.select, torch.Tensor.select])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.select(*args, **kwargs)


@implements_torch_function([torch.narrow, torch.Tensor.narrow])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    def narrow(self: ExpertTensor, dim: int, start: int, length: int) -> ExpertTensor:
        return views.slice_(self, dim, start, start + length, 1)

    return narrow(*args, **kwargs)


@implements_torch_function([torch.chunk, torch.Tensor.chunk])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.chunk(*args, **kwargs)


@implements_torch_function([torch.split, torch.Tensor.split])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.split(*args, **kwargs)


@implements_torch_function([torch.index_select, torch.Tensor.index_select])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.index_select(*args, **kwargs)


@implements_torch_function([torch.unbind, torch.Tensor.unbind, torch.Tensor.__iter__])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    parts = views.unbind(*args, **kwargs)
    return iter(parts) if func is torch.Tensor.__iter__ else parts


@implements_torch_function([torch.transpose, torch.Tensor.transpose, torch.t, torch.Tensor.t])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.transpose(*args, **kwargs)


@implements_torch_function(
    [torch.Tensor.mT.__get__, torch.Tensor.T.__get__]  # type: ignore[attr-defined]
)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.transpose(args[0])


@implements(aten.slice.Tensor)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    new = views.slice_(*fill_defaults(args, 5, [0, None, None, 1]))
    return return_and_correct_aliasing(func, args, kwargs, new)


@implements(aten.select.int)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, views.select(*args))


@implements([aten.transpose.int, aten.t.default])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, views.transpose(*args))


@implements([aten.split.Tensor, aten.split_with_sizes.default])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return list(views.split(*args, **kwargs))


@implements(aten.unbind.int)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return list(views.unbind(*args))


@implements(aten.index_select.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.index_select(*args)


@implements(aten.index.Tensor)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    self, indices = args
    for dim, index in enumerate(indices):
        if index is not None:
            views.require_experts(self, dim, "indexing by a tensor")
    return views.take(self, indices[0])
