"""Checks of weights, scales and schemes before they become an ExpertTensor."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_ops.checks import check_local, check_strided, check_tensor
from moe_ops.ops.memory import refuse_lost
from moe_ops.schemes import ElementFormat, QuantDesc, QuantScheme, get_scheme
from moe_ops.tensors.base import ExpertTensor

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
# Largest e8m0 code of e2m1 elements, 2^33: kernels that scale them in bf16 have room from 2^-93 to
# there. One bit more and they would return infinities, then zeros.
LARGEST_E8M0 = 160
# Largest scale of int4 elements, of all schemes for simplicity: kernels that scale them in bf16
# are exact from 2^-62 to here and return infinities from 2^59 on.
LARGEST_INT4_SCALE = 2.0**58
# Largest scale of int4 elements whose products with it are rounded to e4m3: eight times as much is
# e4m3's largest number. Kernels round larger products too, but not to 448.
LARGEST_E4M3_PRODUCT_SCALE = 56.0
# Largest scale, and largest magnitude of a minimum, that `quantize` finds in two levels: half of
# what codes of 127 and fp16 reach.
LARGEST_OF_TWO_LEVELS = 127 * 65504.0 / 2


def check_quantizable(name: str, weight: Tensor, scheme: str | QuantScheme | None = None) -> None:
    """Raise ValueError, naming the weight, unless `quantize` takes it: reads it once, keeps
    nothing.
    """
    check_tensor(name, weight)
    check_strided(name, weight)
    if isinstance(weight, ExpertTensor):
        raise ValueError(
            f"{name} must be a plain tensor, got {weight}; quantize its dequantize() to change "
            f"its scheme"
        )
    if weight.dtype not in HIGH_PRECISION:
        raise ValueError(
            f"{name} must be bfloat16, float16 or float32, got {weight.dtype}; weights that are "
            f"quantized already go through moe_ops.from_quantized"
        )
    refuse_lost(name, weight)
    _check_matrices(name, weight)
    quantized = None if scheme is None else get_scheme(scheme)
    if quantized is not None:
        check_groups(name, weight.shape, quantized)
    largest = torch.linalg.vector_norm(weight.detach(), math.inf, (1, 2))
    _check_finite(name, largest.isfinite())
    desc = None if quantized is None else quantized.weight
    most = None if desc is None else _most(desc)
    if quantized is not None and most is not None:
        _check_at_most(name, largest, most, f"for scheme {quantized.name!r}; scale it down")


def _most(desc: QuantDesc) -> float | None:
    """The largest magnitude that `quantize` takes, None for any."""
    if desc.two_levels:
        return LARGEST_OF_TWO_LEVELS * (1.0 if desc.minimum else desc.format.max)
    if desc.dtype == "int4":
        return desc.format.max * LARGEST_INT4_SCALE
    if desc.is_mx and desc.dtype == "e2m1":
        return desc.format.max * 2.0 ** (LARGEST_E8M0 - 127)
    return None


def check_groups(name: str, shape: tuple[int, ...], scheme: QuantScheme) -> None:
    """Raise unless (E, N, K) weights can have the scheme's groups."""
    reason = scheme.why_not_shape(*shape[1:])
    if reason:
        raise ValueError(
            f"{name} of shape {tuple(shape)} cannot have scheme {scheme.name!r}: {reason}"
        )


def checked_parts(scheme: QuantScheme, parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The tensors of an ExpertTensor, by name, from those of a checkpoint; ValueError unless they
    fit.

    Some arrive as another view of what is stored: e8m0 scales as float8_e8m0fnu, pairs of e2m1 as
    float4_e2m1fn_x2.
    """
    desc = scheme.quantized_weight
    qdata = parts["qdata"]
    _check_plain("qdata", qdata)
    assert qdata is not None
    if desc.dtype == "e2m1" and qdata.dtype == torch.float4_e2m1fn_x2:
        qdata = qdata.view(torch.uint8)
    if qdata.dtype != desc.storage_dtype:
        same = "; bytes of another dtype can be viewed as it" if desc.format.bits < 8 else ""
        raise ValueError(
            f"qdata must be {desc.storage_dtype} for scheme {scheme.name!r}, got "
            f"{qdata.dtype}{same}"
        )
    _check_matrices("qdata", qdata)
    shape = E, N, K = scheme.logical_shape(*qdata.shape)
    if scheme.qdata_shape(*shape) != tuple(qdata.shape):
        raise ValueError(
            f"qdata must hold whole elements for scheme {scheme.name!r}, got shape "
            f"{tuple(qdata.shape)}"
        )
    check_groups("qdata (counted in elements)", shape, scheme)
    checked = {"qdata": qdata.detach()}
    whole = parts.get("global_scale")
    global_rows = isinstance(whole, Tensor) and whole.dim() > 1
    for name, expected in scheme.scale_shapes(E, N, K, global_rows=global_rows).items():
        value = parts.get(name)
        if expected is None:
            if value is not None:
                raise ValueError(f"{name} must be None: scheme {scheme.name!r} has none")
            continue
        if value is None and name != "scale":
            raise ValueError(f"{name} must be given for scheme {scheme.name!r}, got None")
        _check_plain(name, value)
        assert value is not None
        checked[name] = _checked_scale(name, value.detach(), expected, scheme, qdata)
    if desc.minimum and checked["zero_point"].dtype != checked["scale"].dtype:
        raise ValueError(
            f"zero_point of scheme {scheme.name!r}, the minimum of a group, must have the dtype "
            f"of scale, {checked['scale'].dtype}, got {checked['zero_point'].dtype}"
        )
    return checked


def _checked_scale(
    name: str, value: Tensor, expected: tuple[int, ...], scheme: QuantScheme, qdata: Tensor
) -> Tensor:
    desc = scheme.quantized_weight
    if tuple(value.shape) != expected:
        raise ValueError(
            f"{name} must have shape {expected} for scheme {scheme.name!r} and qdata of shape "
            f"{tuple(qdata.shape)}, got {tuple(value.shape)}"
        )
    if value.device != qdata.device:
        raise ValueError(
            f"{name} must be on the device of qdata, {qdata.device}, got {value.device}"
        )
    if name == "scale" and value.dtype == torch.float8_e8m0fnu:
        value = value.view(torch.uint8) if desc.is_mx else value.to(torch.float32)
    of_scale = HIGH_PRECISION if desc.scale_dtype is None else (desc.scale_dtype,)
    dtypes = {
        "scale": of_scale,
        "zero_point": of_scale if desc.minimum else (desc.storage_dtype,),
        "channel_scale": (torch.float16 if desc.two_levels else torch.float32,),
    }.get(name, (torch.float32,))
    if name == "scale" and desc.is_mx:
        dtypes = (torch.uint8,)
    if value.dtype not in dtypes:
        known = " or ".join([str(dtype) for dtype in dtypes])
        raise ValueError(f"{name} must be {known}, got {value.dtype}")
    if name == "zero_point" and not desc.minimum:
        _check_zero_points(value, desc.format)
    elif name == "scale" and desc.is_mx:
        _check_finite(name, _per_expert(value).amax(1) != 255)
        if desc.dtype == "e2m1":
            _check_at_most(name, value, LARGEST_E8M0, "(2^33) for e2m1 elements")
    elif value.is_floating_point():
        _check_finite(name, _are_finite(value))
        if name == "scale" and desc.powers_of_two:
            _check_powers_of_two(name, value, scheme)
        if name == "scale" and desc.e4m3_products:
            _check_at_most(
                name,
                value.float().abs(),
                LARGEST_E4M3_PRODUCT_SCALE,
                "(448 / 8), so that products with int4 elements are within e4m3: an eighth of "
                "scale and eight times channel_scale have the same product",
            )
        elif name == "scale" and desc.dtype == "int4":
            _check_at_most(
                name, value.float().abs(), LARGEST_INT4_SCALE, "(2^58) for int4 elements"
            )
    if name in ("global_scale", "channel_scale") and not desc.two_levels:
        _check_positive(name, value)
    return value


def _check_zero_points(value: Tensor, fmt: ElementFormat) -> None:
    most = 2**fmt.bits - 1
    if fmt.bits < 8 and known(value) and bool((value > most).any()):
        raise ValueError(
            f"zero_point must be in 0..{most} for {fmt.name}, got {value.max().item()}"
        )


def _check_positive(name: str, value: Tensor) -> None:
    if known(value) and not bool((value > 0).all()):
        raise ValueError(f"{name} must be positive, got {value.min().item()}")


def _check_powers_of_two(name: str, value: Tensor, scheme: QuantScheme) -> None:
    if known(value) and not bool((torch.frexp(value.abs()).mantissa == 0.5).all()):
        raise ValueError(
            f"{name} must hold powers of two for scheme {scheme.name!r}, got "
            f"{value[torch.frexp(value.abs()).mantissa != 0.5][0].item()}; the scheme whose "
            "scales are any numbers takes it, 'fp8_block' instead of 'fp8_block:ue8m0'"
        )


def known(values: Tensor) -> bool:
    """Whether a tensor has values: not on the meta device, not traced."""
    return values.device.type != "meta" and not isinstance(values, FakeTensor)


def _check_at_most(name: str, values: Tensor, most: float, why: str) -> None:
    if known(values) and values.max() > most:
        raise ValueError(f"{name} must be at most {most:g} {why}, got {values.max().item():g}")


def _check_plain(name: str, value: object) -> None:
    check_tensor(name, value)
    assert isinstance(value, Tensor)
    check_strided(name, value)
    if isinstance(value, ExpertTensor):
        raise ValueError(f"{name} must be a plain tensor, got {value}")
    if isinstance(value, Tensor):
        refuse_lost(name, value)
    check_local(name, value)


def _check_matrices(name: str, t: Tensor) -> None:
    if t.dim() != 3 or 0 in t.shape:
        raise ValueError(
            f"{name} must have shape (E, N, K) with no empty dimension, got {tuple(t.shape)}; "
            f"one expert's (N, K) becomes (1, N, K) by unsqueeze(0)"
        )


def _per_expert(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1)


def _are_finite(values: Tensor) -> Tensor:
    """(E,) of numbers (E, ...); makes nothing of their size but of narrow dtypes."""
    if values.dtype == torch.float8_e4m3fn:  # NaN has the largest code
        return (_per_expert(values.view(torch.uint8)) & 127).amax(1) != 127
    return torch.linalg.vector_norm(_per_expert(values).float(), math.inf, 1).isfinite()


def _check_finite(name: str, finite: Tensor) -> None:
    """Raise, naming the experts, unless the numbers of all are finite, (E,) bool."""
    if not known(finite):
        return
    experts = (~finite).nonzero().flatten().tolist()
    if experts:
        raise ValueError(f"{name} must be finite, got NaN or Inf in experts {experts}")


def checked_activation_scale(
    value: Tensor | float | None, scheme: QuantScheme, device: torch.device, num_experts: int
) -> Tensor | None:
    """() or (E,) fp32 of its own, or None where there is none and need not be; ValueError
    else.
    """
    desc = scheme.activation
    if desc is not None and not desc.static and not desc.global_scale:
        desc = None
    if value is None:
        if desc is not None and desc.static:
            raise ValueError(
                f"activation_scale must be given for scheme {scheme.name!r}: its activations have "
                f"one static scale (largest magnitude seen / {desc.format.max})"
            )
        return None
    if desc is None:
        raise ValueError(f"activation_scale must be None: scheme {scheme.name!r} does not use it")
    scale = torch.as_tensor(value, dtype=torch.float32, device=device).detach()
    if scale.numel() != 1 and tuple(scale.shape) != (num_experts,):
        raise ValueError(
            f"activation_scale must be one number, or one of each expert, ({num_experts},); got "
            f"shape {tuple(scale.shape)}"
        )
    if known(scale) and not bool(((scale > 0) & (scale < torch.inf)).all()):
        found = scale.item() if scale.numel() == 1 else scale.tolist()
        raise ValueError(f"activation_scale must be positive and finite, got {found}")
    return scale.reshape(() if scale.numel() == 1 else scale.shape).clone()
