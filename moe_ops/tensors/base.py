"""ExpertTensor: expert weights in a quantized format, behaving as the weights they stand for.

Shape and dtype of an ExpertTensor are those of the weights it replaces; the data sits in plain
tensors. Operators never see one: ``fused_experts`` hands them ``qdata``, ``scale`` and so on. What the data
look like is said by the scheme alone, so everything here holds for every format.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import TorchAOBaseTensor, fill_defaults

from moe_ops.numerics import dequantize_weight, quantize_experts
from moe_ops.pickling import rebuild_expert_tensor
from moe_ops.schemes import get_scheme
from moe_ops.tensors import layouts, views
from moe_ops.tensors.layouts import TRANSPOSED

aten = torch.ops.aten

_HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)


class ExpertTensor(TorchAOBaseTensor):
    """Quantized weights of all experts (E, N, K), or of one expert (N, K).

    Tensors:
        qdata: the quantized elements, with fewer columns than the shape where elements share bytes.
        scale: see ``moe_ops.schemes.QuantScheme.batched_scale_shape``.
        zero_point, global_scale, channel_scale: of schemes that have them, else None.
        activation_scale: () fp32, of schemes whose activations have one static scale, else None.

    Attributes:
        scheme: full name, e.g. "fp8_w8a16:block".
        weight_layout: how the data lies: "" as the shape says; "transposed" for (E, K, N), where the data
            are the natural ones with their last two dimensions exchanged; else the name of a layout that
            ``moe_ops.prepare`` made. (``layout`` is torch's: strided.)
        dtype: of the weights this stands for and of ``dequantize()``; ``.to(dtype)`` changes it alone.

    Views (along E, N and K, transposed, chunked) carry their scales. Slices must begin at a scale
    group, and end at one where groups are whole. Prepared weights are taken apart along E alone. Matrix products with activations dequantize, so eager code that multiplies by one expert
    keeps running, without the speed of a kernel and with unquantized activations. Gradients flow to
    the other operand and never to the quantized weight.

    ``cls(tensor, requires_grad=False)`` returns ``tensor``, as ``nn.Parameter`` would: libraries that
    move models rebuild a parameter by calling its type this way.
    """

    tensor_data_names = ["qdata", "scale"]
    tensor_attribute_names = ["scheme", "weight_layout", "dtype"]
    optional_tensor_data_names = [
        "zero_point",
        "global_scale",
        "channel_scale",
        "activation_scale",
    ]

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    channel_scale: Tensor | None
    activation_scale: Tensor | None
    scheme: str
    weight_layout: str

    def __new__(
        cls,
        qdata: Tensor,
        scale: Tensor | None = None,
        scheme: str = "",
        weight_layout: str = "",
        dtype: torch.dtype = torch.bfloat16,
        zero_point: Tensor | None = None,
        global_scale: Tensor | None = None,
        channel_scale: Tensor | None = None,
        activation_scale: Tensor | None = None,
        requires_grad: bool = False,
    ):
        _refuse_grad(requires_grad)
        if isinstance(qdata, ExpertTensor):
            return qdata
        # an inference tensor could not be the view of a weight made outside inference_mode
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            shape, strides = layouts.logical(qdata, scheme, weight_layout)
            return torch.Tensor._make_wrapper_subclass(
                cls, shape, strides=strides, dtype=dtype, device=qdata.device
            )

    def __init__(
        self,
        qdata: Tensor,
        scale: Tensor | None = None,
        scheme: str = "",
        weight_layout: str = "",
        dtype: torch.dtype = torch.bfloat16,
        zero_point: Tensor | None = None,
        global_scale: Tensor | None = None,
        channel_scale: Tensor | None = None,
        activation_scale: Tensor | None = None,
        requires_grad: bool = False,
    ):
        if qdata is self:
            return
        assert scale is not None or not scheme
        super().__init__()
        self.qdata = qdata
        self.scale = scale  # type: ignore[assignment]  # None for plain weights alone
        self.zero_point = zero_point
        self.global_scale = global_scale
        self.channel_scale = channel_scale
        self.activation_scale = activation_scale
        self.scheme = scheme
        self.weight_layout = weight_layout

    @classmethod
    def __tensor_unflatten__(cls, tensor_data_dict, tensor_attributes, outer_size, outer_stride):
        arguments = tensor_data_dict | tensor_attributes
        if outer_size is None or all([type(size) is int for size in outer_size]):
            return cls(**arguments)
        # A compiler that makes symbols of sizes names those of the weights. Sizes computed from packed data would
        # be expressions it cannot guard on.
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            outer_size,
            strides=outer_stride,
            dtype=arguments["dtype"],
            device=arguments["qdata"].device,
        )
        cls.__init__(self, **arguments)
        return self

    def __repr__(self) -> str:
        layout = f", weight_layout={self.weight_layout!r}" if self.weight_layout else ""
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, scheme={self.scheme!r}{layout}, "
            f"dtype={self.dtype}, device={str(self.device)!r})"
        )

    @classmethod
    def from_hp(
        cls, weight: Tensor, scheme: str, activation_scale: Tensor | None = None
    ) -> ExpertTensor:
        """Quantize plain weights (E, N, K) or (N, K); ``moe_ops.quantize`` adds the checks."""
        name = get_scheme(scheme).name
        qdata, scales = quantize_experts(weight.detach(), name)
        return cls(
            qdata,
            scheme=name,
            dtype=weight.dtype,
            activation_scale=activation_scale,
            **scales._asdict(),
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights as a plain tensor of this shape, in ``dtype`` (default: ``self.dtype``)."""
        dtype = self.dtype if dtype is None else dtype
        if self.weight_layout == TRANSPOSED:
            return views.transpose(self).dequantize(dtype).transpose(-2, -1)
        if self.weight_layout:
            return layouts.natural(self).dequantize(dtype)
        scales = (self.scale, self.zero_point, self.global_scale, self.channel_scale)
        return dequantize_weight(self.qdata, self.scheme, *scales, dtype=dtype)

    def __reduce_ex__(self, protocol):
        names, attributes = self.__tensor_flatten__()
        arguments = {name: getattr(self, name) for name in names} | attributes
        own = (*self.tensor_data_names, *self.optional_tensor_data_names, *attributes)
        others = {name: value for name, value in vars(self).items() if name not in own}
        return rebuild_expert_tensor, (type(self).__name__, arguments, others)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, for the keys of compile caches."""
        tensors, attributes = self.__tensor_flatten__()
        data = [
            (name, t.shape, t.stride(), t.storage_offset(), t.dtype, t.device)
            for name, t in ((name, getattr(self, name)) for name in tensors)
        ]
        return str((type(self).__qualname__, sorted(attributes.items(), key=str), data))

    def _replace(self, **changed) -> ExpertTensor:
        """This tensor with some of its tensors and attributes replaced."""
        names, attributes = self.__tensor_flatten__()
        return type(self)(**({name: getattr(self, name) for name in names} | attributes | changed))

    def _map(self, function: Callable[[Tensor], Tensor], **changed) -> ExpertTensor:
        """This tensor with ``function`` applied to each of its tensors and attributes replaced."""
        names = self.__tensor_flatten__()[0]
        return self._replace(**{name: function(getattr(self, name)) for name in names}, **changed)

    def _with_weights(self, function: Callable[[Tensor], Tensor]) -> ExpertTensor:
        """This tensor with ``function`` applied to all that has one entry for each expert."""
        names = [name for name in self.__tensor_flatten__()[0] if name != "activation_scale"]
        return self._replace(**{name: function(getattr(self, name)) for name in names})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handler = cls._ATEN_OP_TABLE[cls].get(func)
        if handler is not None:
            return handler(func, types, args, kwargs)
        # under inference_mode composite operators arrive whole
        result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(
                f"{func} has no meaning for a quantized {cls.__name__}; "
                f"call it on weight.dequantize()"
            )
        return result


implements = ExpertTensor.implements
implements_torch_function = ExpertTensor.implements_torch_function


def _refuse_grad(requires_grad: bool) -> None:
    if requires_grad:
        raise ValueError(
            "requires_grad must be False for quantized weights, which receive no gradient; "
            "use nn.Parameter(weight, requires_grad=False), and before load_state_dict(assign=True) "
            "call requires_grad_(False) on the model or on its experts' parameters"
        )


@implements_torch_function(
    [torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__]  # type: ignore[attr-defined]
)
def _(func, types, args, kwargs):
    _refuse_grad(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
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
def _(func, types, args, kwargs):
    plain = [a.dequantize() if isinstance(a, ExpertTensor) else a for a in args]
    named = {k: a.dequantize() if isinstance(a, ExpertTensor) else a for k, a in kwargs.items()}
    return func(*plain, **named)


@implements(aten._to_copy.default)
def _(func, types, args, kwargs):
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
def _(func, types, args, kwargs):
    dtype = kwargs.pop("dtype", None) or args[0].dtype
    if not args[0].scheme:
        kwargs["dtype"] = dtype
    return args[0]._map(lambda t: func(t, **kwargs), dtype=dtype)


@implements(aten.copy_.default)
def _(func, types, args, kwargs):
    self, src = args[0], args[1]
    if not isinstance(src, ExpertTensor):
        raise ValueError(
            f"source of a copy into {self} must be quantized alike, got a plain tensor; "
            f"pass it through moe_ops.quantize first"
        )
    if not isinstance(self, ExpertTensor):
        raise ValueError(
            f"target of a copy from {src} must be quantized alike, got a plain tensor; copy from "
            f"dequantize(), or call model.requires_grad_(False) (enough: on the experts' parameters) "
            f"and then load_state_dict(..., assign=True)"
        )
    own, other = (
        (*t.__tensor_flatten__()[0], t.scheme, t.weight_layout, *t.shape) for t in (self, src)
    )
    if own != other:
        raise ValueError(f"source of a copy into {self} must be quantized alike, got {src}")
    for name in self.__tensor_flatten__()[0]:
        getattr(self, name).copy_(getattr(src, name), *args[2:])
    return self


# Views are registered twice: as torch functions, for tracers that would otherwise see an operator on
# a tensor they do not know, and as operators, for all that arrives below them.


@implements_torch_function([torch.Tensor.__getitem__])
def _(func, types, args, kwargs):
    return views.getitem(*args)


@implements_torch_function([torch.select, torch.Tensor.select])
def _(func, types, args, kwargs):
    return views.select(*args, **kwargs)


@implements_torch_function([torch.narrow, torch.Tensor.narrow])
def _(func, types, args, kwargs):
    def narrow(self, dim, start, length):
        return views.slice_(self, dim, start, start + length, 1)

    return narrow(*args, **kwargs)


@implements_torch_function([torch.chunk, torch.Tensor.chunk])
def _(func, types, args, kwargs):
    return views.chunk(*args, **kwargs)


@implements_torch_function([torch.split, torch.Tensor.split])
def _(func, types, args, kwargs):
    return views.split(*args, **kwargs)


@implements_torch_function([torch.index_select, torch.Tensor.index_select])
def _(func, types, args, kwargs):
    return views.index_select(*args, **kwargs)


@implements_torch_function([torch.unbind, torch.Tensor.unbind, torch.Tensor.__iter__])
def _(func, types, args, kwargs):
    parts = views.unbind(*args, **kwargs)
    return iter(parts) if func is torch.Tensor.__iter__ else parts


@implements_torch_function([torch.transpose, torch.Tensor.transpose, torch.t, torch.Tensor.t])
def _(func, types, args, kwargs):
    return views.transpose(*args, **kwargs)


@implements_torch_function(
    [torch.Tensor.mT.__get__, torch.Tensor.T.__get__]  # type: ignore[attr-defined]
)
def _(func, types, args, kwargs):
    return views.transpose(args[0])


@implements(aten.slice.Tensor)
def _(func, types, args, kwargs):
    new = views.slice_(*fill_defaults(args, 5, [0, None, None, 1]))
    return return_and_correct_aliasing(func, args, kwargs, new)


@implements(aten.select.int)
def _(func, types, args, kwargs):
    return return_and_correct_aliasing(func, args, kwargs, views.select(*args))


@implements([aten.transpose.int, aten.t.default])
def _(func, types, args, kwargs):
    return return_and_correct_aliasing(func, args, kwargs, views.transpose(*args))


@implements([aten.split.Tensor, aten.split_with_sizes.default])
def _(func, types, args, kwargs):
    return list(views.split(*args, **kwargs))


@implements(aten.unbind.int)
def _(func, types, args, kwargs):
    return list(views.unbind(*args))


@implements(aten.index_select.default)
def _(func, types, args, kwargs):
    return views.index_select(*args)


@implements(aten.index.Tensor)
def _(func, types, args, kwargs):
    self, indices = args
    for dim, index in enumerate(indices):
        if index is not None:
            views.require_experts(self, dim, "indexing by a tensor")
    return views.take(self, indices[0])
