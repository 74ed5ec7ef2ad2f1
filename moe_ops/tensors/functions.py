"""torch's functions and operators on expert tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import fill_defaults

from moe_ops.ops.library import part
from moe_ops.tensors import views
from moe_ops.tensors.base import (
    ExpertTensor,
    Types,
    implements,
    implements_torch_function,
    refuse,
    refuse_grad,
)
from moe_ops.tensors.checks import known

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
    if isinstance(kwargs.get("out"), ExpertTensor):
        refuse(func, type(kwargs["out"]), writes=True)
    plain = [a.dequantize() if isinstance(a, ExpertTensor) else a for a in args]
    named = {k: a.dequantize() if isinstance(a, ExpertTensor) else a for k, a in kwargs.items()}
    return func(*plain, **named)


@implements(part)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return getattr(*args)


@implements(aten._to_copy.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    self, dtype = args[0], _dtype(args[0], kwargs)
    where = {k: kwargs[k] for k in ("device", "non_blocking") if kwargs.get(k) is not None}
    if not self.scheme:
        where["dtype"] = dtype
    return self._map(lambda t: func(t, **where), dtype=dtype)


@implements(aten.empty_like.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    dtype = _dtype(args[0], kwargs)
    kwargs = kwargs | {"dtype": None if args[0].scheme else dtype}
    return args[0]._map(lambda t: func(t, **kwargs), dtype=dtype)


@implements([aten.new_zeros.default, aten.zeros_like.default, aten.new_empty.default])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    """Weights that are zero, of as many experts as the size says."""
    self, dtype = args[0], _dtype(args[0], kwargs)
    size = tuple(self.shape) if func is aten.zeros_like.default else tuple(args[1])
    whole = size == tuple(self.shape)
    if not whole and (self.dim() != 3 or size[1:] != tuple(self.shape[1:])):
        raise ValueError(
            f"new weights like {self} must differ in the number of experts alone, got shape {size}"
        )

    def zeros(name: str, t: Tensor) -> Tensor:
        shape = t.shape if whole or name not in self._per_expert else (size[0], *t.shape[1:])
        own = t.dtype if self.scheme else dtype
        # positive, as these scales must be: values are divided by one of them
        fill = 1 if name in ("global_scale", "channel_scale", "activation_scale") else 0
        return t.new_full(shape, fill, dtype=own, device=kwargs.get("device"))

    names = self.__tensor_flatten__()[0]
    return self._replace(**{n: zeros(n, getattr(self, n)) for n in names}, dtype=dtype)


def _dtype(self: ExpertTensor, kwargs: dict) -> torch.dtype:
    """The dtype that a new tensor stands for. Raises ValueError for one that weights cannot
    have.
    """
    dtype = kwargs.get("dtype") or self.dtype
    if dtype not in _HIGH_PRECISION:
        raise ValueError(
            f"dtype of quantized weights must be one of {_HIGH_PRECISION}, got {dtype}; "
            f"dequantize() takes any dtype"
        )
    return dtype


@implements(aten.copy_.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    self, src = args[0], args[1]
    if not isinstance(src, ExpertTensor):
        if _holds(self, src):
            return self
        raise ValueError(
            f"source of a copy into {self} must be quantized alike, got a plain tensor of other "
            "values; pass it through moe_ops.quantize first"
        )
    if not isinstance(self, ExpertTensor):
        raise ValueError(
            f"target of a copy from {src} must be quantized alike, got a plain tensor; copy from "
            "dequantize(), or call model.requires_grad_(False) (enough: on the experts' "
            "parameters) and then load_state_dict(..., assign=True)"
        )
    own, other = (
        (*t.__tensor_flatten__()[0], t.scheme, t.weight_layout, *t.shape, *t.qdata.shape)
        for t in (self, src)
    )
    if own != other:
        raise ValueError(f"source of a copy into {self} must be quantized alike, got {src}")
    mine, given = self.global_scale, src.global_scale
    if mine is not None and given is not None and given.dim() > mine.dim():
        raise ValueError(
            f"global_scale of a copy into {self} must have shape {tuple(mine.shape)}, got "
            f"{tuple(given.shape)}: one of an expert cannot hold those of its rows; call "
            "load_state_dict(..., assign=True), or put the source in the place of the target"
        )
    mine, given = self.activation_scale, src.activation_scale
    # one of all experts is that of each
    if mine is not None and given is not None and given.ndim and given.shape != mine.shape:
        raise ValueError(
            f"activation_scale of a copy into {self} must have shape {tuple(mine.shape)}, got "
            f"{tuple(given.shape)}: one cannot hold those of all experts; quantize the target "
            "with activation_scale=torch.ones(num_experts)"
        )
    for name in self.__tensor_flatten__()[0]:
        target, source = getattr(self, name), getattr(src, name)
        if name == "global_scale" and target.dim() > source.dim():
            source = source[..., None, None]  # that of an expert is that of each row
        target.copy_(source, *args[2:])
    return self


@implements(aten._foreach_copy_.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> None:
    for target, source in zip(args[0], args[1], strict=True):
        target.copy_(source, *args[2:])


@implements_torch_function(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    self, data = args
    if type(data) is not type(self):
        got = data if isinstance(data, ExpertTensor) else "a plain tensor"
        raise ValueError(
            f"data of {self} must be of its class, got {got}; put another parameter in its place, "
            "nn.Parameter(moe_ops.quantize(weight, scheme), requires_grad=False)"
        )
    with torch._C.DisableTorchFunctionSubclass():
        func(self, data)  # shape, strides, dtype and device
    for name in (*self.tensor_data_names, *self.optional_tensor_data_names):
        setattr(self, name, getattr(data, name))
    self.scheme, self.weight_layout = data.scheme, data.weight_layout


@implements_torch_function(torch.Tensor.share_memory_)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    for name in args[0].__tensor_flatten__()[0]:
        getattr(args[0], name).share_memory_()
    return args[0]


@implements_torch_function(torch.Tensor.numpy)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    refuse(func, type(args[0]), writes=False)


@implements_torch_function(torch.Tensor.storage)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    """safetensors asks for it, because an untyped storage of several tensors has no address."""
    raise ValueError(
        f"a state_dict with a quantized {type(args[0]).__name__} must be taken apart to be saved "
        "by safetensors, which keeps plain tensors: tensors, metadata = "
        "moe_ops.tensors.flatten(state_dict), then save_file(tensors, path, metadata); a "
        "transformers model is saved by save_pretrained"
    )


@implements_torch_function(torch.Tensor.is_shared)
@implements(aten.is_pinned.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    names = args[0].__tensor_flatten__()[0]
    return all([func(getattr(args[0], name), *args[1:], **kwargs) for name in names])


@implements(aten._pin_memory.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return args[0]._map(lambda t: func(t, *args[1:], **kwargs))


def _holds(self: ExpertTensor, values: Tensor) -> bool:
    """Whether plain values are those of a quantized weight, whose copy changes nothing."""
    alike = (self.shape, self.dtype, self.device) == (values.shape, values.dtype, values.device)
    return alike and known(values) and torch.equal(self.dequantize(), values)


@implements_torch_function([torch.cat, torch.concat, torch.concatenate])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    """The values of flat weights, as `parameters_to_vector` joins them."""
    tensors = args[0] if args else kwargs.pop("tensors")
    for t in tensors:
        if isinstance(t, ExpertTensor) and t.dim() != 1:
            refuse(func, type(t), writes=False)
    plain = [t.dequantize() if isinstance(t, ExpertTensor) else t for t in tensors]
    return func(plain, *args[1:], **kwargs)


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
    return views.narrow(*args, **kwargs)


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


@implements_torch_function([torch.transpose, torch.Tensor.transpose])
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.transpose(*args, **kwargs)


@implements_torch_function(torch.Tensor.mT.__get__)  # type: ignore[attr-defined]
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.transpose(args[0])


@implements_torch_function(
    [torch.t, torch.Tensor.t, torch.Tensor.T.__get__]  # type: ignore[attr-defined]
)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return views.matrix_transpose(args[0])


@implements(aten.slice.Tensor)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    new = views.slice_(*fill_defaults(args, 5, [0, None, None, 1]))
    return return_and_correct_aliasing(func, args, kwargs, new)


@implements(aten.select.int)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, views.select(*args))


@implements(aten.transpose.int)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, views.transpose(*args))


@implements(aten.t.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, views.matrix_transpose(*args))


@implements(aten.view.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, views.view(*args))


@implements(aten.as_strided.default)
def _(func: Callable, types: Types, args: tuple, kwargs: dict) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, views.as_strided(*args, **kwargs))


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
