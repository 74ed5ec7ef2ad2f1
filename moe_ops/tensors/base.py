"""ExpertTensor: expert weights in a quantized format, which behave as the weights they represent.

An ExpertTensor has the shape and dtype of the weights it replaces; its data are plain tensors.
Operators never get one: ``fused_experts`` passes them ``qdata``, ``scale`` and so on. The scheme
alone describes the data, so everything here holds for every format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._guards import TracingContext
from torchao.utils import TorchAOBaseTensor

from moe_ops.meta.scales import FLAT, TRANSPOSED
from moe_ops.numerics import dequantize_weight, quantize_experts
from moe_ops.ops.relayout import logical, natural
from moe_ops.pickling import rebuild_expert_tensor, stored
from moe_ops.schemes import get_scheme
from moe_ops.tensors import tracing

Types = Iterable[type]  # of a call's arguments, as torch hands them over
_VERSIONS = torch._C.DispatchKey.ADInplaceOrView  # what counts writes, and what views share


class ExpertTensor(TorchAOBaseTensor):
    """Quantized weights of all experts (E, N, K), or of one expert (N, K).

    Tensors:
        qdata: the quantized elements, with fewer columns than the shape if elements share bytes.
        scale: see ``moe_ops.schemes.QuantScheme.batched_scale_shape``.
        zero_point: shaped like scale, the element that represents zero; for schemes that end in
            ":min" the value of the least element; else None.
        global_scale, channel_scale: None for schemes without them. A global scale is per expert,
            (E,), or per row, (E, N, 1). A channel scale is per row, or where scales have two
            levels (``moe_ops.schemes.QuantDesc``) the upper one.
        activation_scale: fp32, () or one per expert, (E,), for schemes whose activations have a
            static scale; else None.

    Attributes:
        scheme: full name, e.g. "fp8_w8a16:block".
        weight_layout: "" for the natural layout; "transposed" for shape (E, K, N), whose data are
            the natural ones with the last two dimensions exchanged; else the name of a layout that
            ``moe_ops.prepare`` made. After the prefix "flat:" it is the layout of a tensor that
            ``view(-1)`` flattened: the shape has one dimension, the data keep theirs. (``layout``
            is torch's: strided.)
        dtype: dtype of the represented weights and of ``dequantize()``. ``.to(dtype)`` changes
            nothing else.

    Views (along E, N and K, transposed, chunked) have their own scales. Slices must begin at the
    boundary of a scale group, and end at one if groups must be whole. Prepared weights can only be
    sliced along E. Matrix products with activations dequantize, so eager code that multiplies by
    one expert works, without the speed of a kernel and with unquantized activations. Gradients
    flow to the other operand, never to the quantized weight.

    ``cls(tensor, requires_grad=False)`` returns ``tensor``, as ``nn.Parameter`` does: libraries
    that move models rebuild parameters by calling their type this way.
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
    ) -> Any:
        refuse_grad(requires_grad)
        if isinstance(qdata, ExpertTensor):
            return qdata
        # an inference tensor could not be the view of a weight made outside inference_mode
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            shape, strides = logical(qdata, scheme, weight_layout)
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
    ) -> None:
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

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        if TracingContext.try_get() is not None:
            tracing.watch()
        return super().__tensor_flatten__()

    @classmethod
    def __tensor_unflatten__(
        cls,
        tensor_data_dict: dict[str, Tensor],
        tensor_attributes: dict[str, Any],
        outer_size: torch.Size | None,
        outer_stride: tuple[int, ...] | None,
    ) -> ExpertTensor:
        arguments: dict[str, Any] = {**tensor_data_dict, **tensor_attributes}
        if outer_size is None or all([type(size) is int for size in outer_size]):
            return cls(**arguments)
        # A compiler that makes symbols of sizes names those of the weights. Sizes computed from
        # packed data would be expressions it cannot guard on.
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

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the tensors that store these weights, not of the weights they represent."""
        return sum([getattr(self, name).nbytes for name in self.__tensor_flatten__()[0]])

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights as a plain tensor of this shape, in ``dtype`` (default: ``self.dtype``)."""
        dtype = self.dtype if dtype is None else dtype
        if self.weight_layout.startswith(FLAT):
            return self._unflattened().dequantize(dtype).reshape(-1)
        if self.weight_layout == TRANSPOSED:
            return self._transposed().dequantize(dtype).transpose(-2, -1)
        if self.weight_layout:
            restored: Any = natural(self)
            return restored.dequantize(dtype)
        scales = (self.scale, self.zero_point, self.global_scale, self.channel_scale)
        return dequantize_weight(self.qdata, self.scheme, *scales, dtype=dtype)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        names, attributes = self.__tensor_flatten__()
        arguments = {name: stored(getattr(self, name)) for name in names} | attributes
        own = (*self.tensor_data_names, *self.optional_tensor_data_names, *attributes)
        others = {name: value for name, value in vars(self).items() if name not in own}
        return rebuild_expert_tensor, (type(self).__name__, arguments, others)

    def _stable_hash_for_caching(self) -> str:
        """Key of compile caches: everything that compiled code depends on."""
        tensors, attributes = self.__tensor_flatten__()
        data = [
            (name, t.shape, t.stride(), t.storage_offset(), t.dtype, t.device)
            for name, t in ((name, getattr(self, name)) for name in tensors)
        ]
        return str((type(self).__qualname__, sorted(attributes.items(), key=str), data))

    def _replace(self, **changed: Any) -> ExpertTensor:
        """This tensor with some of its tensors and attributes replaced."""
        names, attributes = self.__tensor_flatten__()
        return type(self)(**({name: getattr(self, name) for name in names} | attributes | changed))

    def _map(self, function: Callable[[Tensor], Tensor], **changed: Any) -> ExpertTensor:
        """This tensor with ``function`` applied to each of its tensors and attributes replaced."""
        names = self.__tensor_flatten__()[0]
        return self._replace(**{name: function(getattr(self, name)) for name in names}, **changed)

    def _transposed(self) -> ExpertTensor:
        """This tensor with its last two dimensions exchanged."""
        names = ["qdata", "zero_point", *self._scales_of_rows]
        if not get_scheme(self.scheme).quantized_weight.group.is_tensor:
            names.append("scale")
        changed = {name: getattr(self, name) for name in names}
        return self._replace(
            **{name: t.transpose(-2, -1) for name, t in changed.items() if t is not None},
            weight_layout="" if self.weight_layout == TRANSPOSED else TRANSPOSED,
        )

    @property
    def _scales_of_rows(self) -> list[str]:
        """Names of the tensors after `scale` that have one number per row."""
        names = ["channel_scale"]
        if self.global_scale is not None and self.global_scale.dim() == self.qdata.dim():
            names.append("global_scale")
        return [name for name in names if getattr(self, name) is not None]

    def _unflattened(self) -> ExpertTensor:
        """This tensor in the shape of its data, before ``view(-1)``."""
        return self._replace(weight_layout=self.weight_layout.removeprefix(FLAT))

    @property
    def _per_expert(self) -> list[str]:
        """Names of the tensors that have one entry for each expert: all but a shared scale of
        activations.
        """
        scale = self.activation_scale
        names = self.__tensor_flatten__()[0]
        shared = scale is None or scale.dim() == 0
        return [name for name in names if name != "activation_scale" or not shared]

    def _with_weights(self, function: Callable[[Tensor], Tensor]) -> ExpertTensor:
        """This tensor with ``function`` applied to all that has one entry for each expert."""
        return self._replace(**{name: function(getattr(self, name)) for name in self._per_expert})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Types, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if torch.jit.is_tracing():
            raise RuntimeError(
                "quantized weights cannot be traced by torch.jit.trace; use torch.export.export "
                "or torch.compile"
            )
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Types, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = cls._ATEN_OP_TABLE[cls].get(func)
        # Parts of a view share the version counters of those of the weight, and writes increment
        # them: parts are what a backward pass keeps, and checks.
        with torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, False):
            if handler is not None:
                result = handler(func, types, args, kwargs)
            else:  # under inference_mode composite operators arrive whole
                result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            refuse(func, cls, writes=func._schema.is_mutable)
        return result


implements = ExpertTensor.implements
implements_torch_function = ExpertTensor.implements_torch_function


def refuse(func: Any, cls: type, writes: bool) -> NoReturn:
    """Raise for a function that quantized weights do not have."""
    remedy = "call it on weight.dequantize()"
    if writes:
        remedy = (
            "merge adapters into plain weights, and quantize the result: "
            "moe_ops.quantize(weight.dequantize() + change, weight.scheme), or those of PEFT by "
            "moe_ops.integrations.transformers.merge_adapters(model); weights that are quantized "
            "alike are written by copy_"
        )
    name = func if isinstance(func, torch._ops.OpOverload) else func.__name__
    raise NotImplementedError(f"{name} has no meaning for a quantized {cls.__name__}; {remedy}")


def refuse_grad(requires_grad: bool) -> None:
    if requires_grad:
        raise ValueError(
            "requires_grad must be False for quantized weights, which receive no gradient; use "
            "nn.Parameter(weight, requires_grad=False), and before load_state_dict(assign=True) "
            "call requires_grad_(False) on the model or on its experts' parameters"
        )
