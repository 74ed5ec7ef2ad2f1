"""quantize, from_quantized, prepare: the functions that make quantized expert weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moe_ops import activations
from moe_ops.activations import Activation, rows_before
from moe_ops.checks import check_one_of, check_strided, check_tensor
from moe_ops.meta.scales import TRANSPOSED, base_layout, padded_layout
from moe_ops.ops.relayout import RELAYOUTS, natural
from moe_ops.schemes import SCHEMES, QuantScheme, get_scheme
from moe_ops.tensors.base import ExpertTensor
from moe_ops.tensors.checks import check_quantizable, checked_activation_scale, checked_parts
from moe_ops.tensors.formats import (
    Float8ExpertTensor,
    Int4ExpertTensor,
    Int8ExpertTensor,
    LevelsExpertTensor,
    MXExpertTensor,
    NVFP4ExpertTensor,
    PackedIntExpertTensor,
    PlainExpertTensor,
)


def _class_of(scheme: QuantScheme) -> type[ExpertTensor]:
    desc = scheme.quantized_weight
    if desc.format.levels:
        return LevelsExpertTensor
    if not desc.format.is_float:
        return {"int8": Int8ExpertTensor, "int4": Int4ExpertTensor}.get(
            desc.dtype, PackedIntExpertTensor
        )
    if desc.is_mx:
        return MXExpertTensor
    return NVFP4ExpertTensor if desc.global_scale else Float8ExpertTensor


def quantize(
    weight: Tensor,  # (E, N, K)
    scheme: str | QuantScheme,
    *,
    activation_scale: Tensor | float | None = None,
) -> ExpertTensor:
    """Quantize expert weights for use as ``w13`` or ``w2``.

    Args:
        weight: (E, N, K), bf16, fp16 or fp32. It is read, not kept.
        scheme: a name such as "fp8_block", "int4_w4a16:g64" or "mxfp4_w4a16:ceil", or a
            QuantScheme.
        activation_scale: a positive fp32 number, or one per expert, (E,). Required by schemes with
            static activation scales, optional for "nvfp4", where it is amax / (448 * 6), refused
            by the others. Activations of this weight are quantized as round(x / activation_scale).
            With one scale per expert backends "torch", "cutlass" and, except for "nvfp4",
            "triton" quantize each (token, expert) pair by the scale of the expert; the others
            quantize a token once, by the largest (docs/backends.md).

    Raises:
        ValueError: a wrong rank, dtype or scheme; columns that are no multiple of the scheme's
            group; an activation_scale that is missing or unused; a weight that is quantized
            already or not finite (the message names the experts).
    """
    scheme = get_scheme(scheme)
    cls = _class_of(scheme)
    if isinstance(weight, nn.Module):
        raise ValueError(
            f"weight must be a torch.Tensor (E, N, K), got {type(weight).__name__}; a MoELayer "
            "has layer.quantize(scheme), a transformers model "
            "moe_ops.integrations.transformers.quantize(model, scheme)"
        )
    check_tensor("weight", weight)
    check_quantizable("weight", weight, scheme)
    activation_scale = checked_activation_scale(
        activation_scale, scheme, weight.device, weight.shape[0]
    )
    return cls.from_hp(weight, scheme.name, activation_scale)


def from_quantized(
    scheme: str | QuantScheme,
    qdata: Tensor,
    scale: Tensor,
    *,
    zero_point: Tensor | None = None,
    global_scale: Tensor | None = None,
    channel_scale: Tensor | None = None,
    activation_scale: Tensor | float | None = None,
) -> ExpertTensor:
    """Wrap expert weights that are quantized already. No element is changed or copied.

    The class of each format describes its tensors, e.g. `Int4ExpertTensor`.

    Args:
        scheme: a name such as "fp8_block", or a QuantScheme.
        qdata: (E, N, K) in the scheme's storage dtype, with fewer columns where elements share
            bytes (`moe_ops.schemes.ElementFormat` says how).
        scale: the factor that multiplies elements. Schemes with fp32 scales also take
            float8_e8m0fnu, converted exactly; "fp8_block:ue8m0" takes only powers of two. Schemes
            with e8m0 scales take uint8 or float8_e8m0fnu.
        zero_point: shaped like scale, uint8 0..15 for int4, int8 for int8. It selects the variant
            with zero points, e.g. "int4_w4a16:g128:zp" of "int4_w4a16:g128". In the floating-point
            dtype of scale it holds minima, the values of the least element (0 for int4, -128 for
            int8), and selects "int4_w4a16:g128:min"; beside int8 scales their codes.
        global_scale: fp32, (E,) or one per row, (E, N, 1), for "nvfp4": value = element * scale /
            global_scale.
        channel_scale: (E, N, 1) fp32, for "int4_w4a8": value = e4m3(element * scale) *
            channel_scale. For schemes with int8 scales, such as "int6_w6a16:g16:super", what
            multiplies those of 256 columns, fp16 (E, N, K / 256), of either sign; with a minimum
            (E, N, K / 128), each beside what multiplies the codes of the minima.
        activation_scale: as for ``quantize``.

    Returns:
        An ExpertTensor of dtype bfloat16; ``.to(dtype)`` changes what ``dequantize()`` returns.

    Raises:
        ValueError: a wrong rank, shape, dtype, device or scheme, a scale that is not finite or too
            large (2^33 of mxfp4, 2^58 of int4, 56 of int4_w4a8), or a tensor that is missing or
            that the scheme does not have.
    """
    scheme = get_scheme(scheme)
    if zero_point is not None:
        is_minimum = isinstance(zero_point, Tensor) and zero_point.is_floating_point()
        scheme = SCHEMES.get(f"{scheme.name}:{'min' if is_minimum else 'zp'}", scheme)
    parts: dict[str, Any] = checked_parts(
        scheme,
        {
            "qdata": qdata,
            "scale": scale,
            "zero_point": zero_point,
            "global_scale": global_scale,
            "channel_scale": channel_scale,
        },
    )
    activation_scale = checked_activation_scale(
        activation_scale, scheme, qdata.device, qdata.shape[0]
    )
    return _class_of(scheme)(**parts, scheme=scheme.name, activation_scale=activation_scale)


def prepare(weight: Tensor, backend: str, *, activation: str | Activation | None = None) -> Tensor:
    """Bring expert weights, plain or quantized, into the layout that ``backend`` reads.

    A weight that already has the layout is returned unchanged. One that was prepared for another
    backend is first brought back to the natural layout, which "torch" reads. ``weight_layout`` and
    ``repr`` show the layout.

        w13 = moe_ops.prepare(w13, "flashinfer", activation="silu")
        w2 = moe_ops.prepare(w2, "flashinfer")

    Args:
        weight: (E, N, K), or (N, K) for one expert. It is returned unchanged if the backend reads
            the natural layout.
        activation: for w13 the activation after it, for w2 None. Some backends read up rows before
            gate rows; the activation defines the order that they are converted from.

    Raises:
        ValueError: an unknown backend or activation, a wrong shape or dtype, a transposed view, or
            a shape or scales that do not admit the layout.
    """
    check_tensor("weight", weight)
    check_strided("weight", weight)
    check_one_of("backend", backend, ("auto", *RELAYOUTS))
    if weight.dim() not in (2, 3) or not weight.is_floating_point():
        raise ValueError(
            "weight must have shape (E, N, K), or (N, K) of one expert, and a floating dtype "
            f"unless it is an ExpertTensor, got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    act = None if activation is None else activations.resolve(activation)
    if backend == "auto":
        return weight
    if getattr(weight, "weight_layout", "") == TRANSPOSED:
        raise ValueError(f"weight must have the natural layout, got {weight}; transpose it back")
    return change(weight, backend, act)


def change(weight: Any, backend: str, activation: Activation | None = None) -> Tensor:
    """``weight``, plain or an ExpertTensor, in the layout that ``backend`` wants for its scheme;
    itself if it is so already.

    ``activation`` is what follows w13, None for w2. Raises ValueError for a layout that the
    weight's shape has not.
    """
    scheme = get_scheme(getattr(weight, "scheme", ""))
    relayouts = [
        r
        for r in RELAYOUTS.get(backend, ())
        if r.takes(scheme) and (r.on is None or r.on(weight.device))
    ]
    wanted = [r for r in relayouts if r.rows == rows_before(activation)]
    wanted = wanted or [r for r in relayouts if not r.rows]
    layout = base_layout(getattr(weight, "weight_layout", ""))
    if layout == (wanted[0].layout if wanted else ""):
        return weight
    if activation is None and layout in [r.layout for r in relayouts]:
        return weight  # w13, prepared before
    if layout:
        weight = natural(weight)
    if not wanted:
        return weight
    if not hasattr(weight, "weight_layout"):
        weight = PlainExpertTensor(weight.detach(), dtype=weight.dtype)
    changed, layout = wanted[0].apply(weight), wanted[0].layout
    if changed.get("qdata", weight.qdata).shape != weight.qdata.shape:
        layout = padded_layout(layout, *weight.shape[-2:])
    return weight._replace(**changed, weight_layout=layout)
