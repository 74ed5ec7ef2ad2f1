"""Checks of single operands of calls: inputs, weights with their scales, biases."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.activations import Activation
from moe_ops.checks import check_rank, static_size
from moe_ops.meta.scales import (
    FLAT,
    TRANSPOSED,
    TRITON_E2M1,
    base_layout,
    sizes_of_layout,
    unpacked_size,
)
from moe_ops.ops.call import Weight
from moe_ops.ops.options import Options
from moe_ops.schemes import QuantScheme, get_scheme

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor without an M dimension, as constants."""
    return tuple([static_size(size) for size in tensor.shape])


def check_input(
    name: str,
    x: Tensor,
    scale: Tensor | None,
    global_scale: Tensor | None,
    options: Options,
    scheme_name: str,
    may_be_fp32: bool = False,  # whether the output may be fp32 beside an input of 16 bits
) -> tuple[torch.dtype, int]:
    """(dtype of the input's values, or if it arrives quantized of the output; columns that the
    input stands for).
    """
    out_dtype = options.out_dtype
    if scale is None:
        if global_scale is not None:
            raise ValueError(
                f"{name}_global_scale must be None without {name}_scale, which says that {name} "
                "arrives quantized"
            )
        if x.dtype not in FLOATS:
            hint = f"; if it arrives quantized, pass its scales as {name}_scale"
            raise ValueError(
                f"{name} must be a floating-point tensor, got {x.dtype}"
                + hint * (x.dtype.itemsize == 1)
            )
        wide = may_be_fp32 and out_dtype == torch.float32 and x.dtype != torch.float64
        if out_dtype not in (None, x.dtype) and not wide:
            or_fp32 = ", or torch.float32 with batch_invariant," * (x.dtype.itemsize == 2)
            raise ValueError(
                f"out_dtype must be None or {name}'s dtype {x.dtype}{or_fp32} unless {name} "
                f"arrives quantized, got {out_dtype}; convert the result with .to()"
            )
        return x.dtype, static_size(x.shape[-1])
    if options.needs_grad:
        raise ValueError(
            f"{name} must not arrive quantized ({name}_scale must be None) where gradients are "
            f"required, for none flow through it: wrap the call in torch.no_grad(), or pass "
            f"{name} unquantized"
        )
    desc = get_scheme(scheme_name).activation
    if desc is None:
        raise ValueError(
            f"{name}_scale must be None for {_scheme(scheme_name)}, whose activations are not "
            f"quantized; pass {name} in 16 or 32 bits"
        )
    if x.dtype != desc.storage_dtype:
        raise ValueError(
            f"{name} with {name}_scale must have dtype {desc.storage_dtype}, as scheme "
            f"{scheme_name} quantizes activations, got {x.dtype}"
        )
    columns = unpacked_size(static_size(x.shape[-1]), desc.format.bits)
    groups = None if desc.group.is_tensor else desc.scale_shape(1, columns)[1]
    found = tuple(scale.shape)
    if groups is None:
        fits, expected = found in ((), (1,)), "() or (1,)"
    else:
        rows = "E, T" if x.ndim == 3 else "S" if name == "x" else "M"
        expected = f"({rows}, {groups})"
        # rows that may be symbols are compared where they are known
        fits = len(found) == x.ndim and static_size(found[-1]) == groups
    if not fits:
        raise ValueError(
            f"{name}_scale must have shape {expected} for scheme {scheme_name}, got {found}"
        )
    kinds = (torch.uint8, torch.float8_e8m0fnu) if desc.is_mx else (desc.scale_dtype,)
    if scale.dtype not in kinds:
        names = " or ".join([str(kind) for kind in kinds])
        raise ValueError(
            f"{name}_scale must have dtype {names} for scheme {scheme_name}, got {scale.dtype}"
        )
    check_device(f"{name}_scale", scale.device, x.device)
    if (global_scale is not None) != desc.global_scale:
        must = "a tensor () or (1,)" if desc.global_scale else "None"
        raise ValueError(
            f"{name}_global_scale must be {must} for scheme {scheme_name}, got "
            f"{None if global_scale is None else tuple(global_scale.shape)}"
        )
    if global_scale is not None:
        if tuple(global_scale.shape) not in ((), (1,)) or global_scale.dtype != torch.float32:
            raise ValueError(
                f"{name}_global_scale must be a float32 tensor () or (1,), got "
                f"{global_scale.dtype} of shape {tuple(global_scale.shape)}"
            )
        check_device(f"{name}_global_scale", global_scale.device, x.device)
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    check_float("out_dtype", out_dtype)
    return out_dtype, columns


def _scheme(name: str) -> str:
    return f"scheme {name}" if name else "plain weights"


def check_weights(
    w13: Weight, w2: Weight, x: Tensor, width: int, activation: Activation, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """(E, N, K, I) of a pair of expert weights that fit together, the input and the activation."""
    E, N, K = check_weight("w13", w13, x, "hidden_states", dtype)
    shape = check_weight("w2", w2, x, "hidden_states", dtype)
    if width != K:
        swapped = (N, shape[2]) == (width, width) and shape[1] == (1 + activation.gated) * K
        of_w2 = (width, K // (1 + activation.gated))  # beside a transposed w13
        fits = width == N and shape[1:] in (of_w2, of_w2[::-1])
        remedy = "; w13 and w2 are swapped" if swapped else if_transposed("w13", w13, fits)
        raise ValueError(
            f"w13 must have shape (E, N, {width}) for hidden_states (M, {width}), got "
            f"{(E, N, K)}{remedy}"
        )
    half = _other_gate((E, N, K), shape, activation)
    if activation.gated and N % 2:
        raise ValueError(
            f"w13 must have an even number of rows for {activation.name}, got {N}{half}"
        )
    I = N // 2 if activation.gated else N
    if shape != (E, K, I):
        remedy = half or if_transposed("w2", w2, shape == (E, I, K))
        raise ValueError(
            f"w2 must have shape (E, K, I) = {(E, K, I)} for w13 {(E, N, K)} and the "
            f"{'gated' if activation.gated else 'not gated'} activation {activation.name}, got "
            f"{shape}{remedy}"
        )
    one, other = _layouts(w13, w2)
    if w13.scheme != w2.scheme and (one or other):
        raise ValueError(
            "w13 and w2 must have their natural layout where their schemes differ, got "
            f"{_scheme(w13.scheme)} and {_scheme(w2.scheme)} in layouts {one or 'none'} and "
            f"{other or 'none'}; moe_ops.prepare(weight, 'torch') brings each back"
        )
    if one != other:
        one, other = one or "none", other or "none"
        raise ValueError(
            f"w2 must have the layout of w13, {one}, got {other}; prepare both for one backend, "
            "or neither"
        )
    return E, N, K, I


def if_transposed(name: str, weight: Weight, is_transposed: bool) -> str:
    """Remedy for a weight that is stored as (E, columns, rows), after a semicolon; else ""."""
    if not is_transposed:
        return ""
    if weight.scheme:
        return f"; it was quantized transposed: quantize {name}.dequantize().transpose(1, 2)"
    return f"; it is transposed: pass {name}.transpose(1, 2)"


def _other_gate(w13: tuple, w2: tuple, activation: Activation) -> str:
    """Remedy for w13 (E, N, K) with, or without, gate rows beside a w2 that fits an activation of
    the other kind, after a semicolon; else "".
    """
    E, N, K = w13
    if activation.gated and w2 in ((E, K, N), (E, N, K)):
        return (
            "; w13 has one projection's rows: give gate and up, torch.cat((gate, up), 1), or an "
            "activation without a gate, such as 'silu_no_mul'"
        )
    if not activation.gated and N % 2 == 0 and w2 in ((E, K, N // 2), (E, N // 2, K)):
        return "; w13 has gate and up rows: give a gated activation, such as 'silu'"
    return ""


def _layouts(w13: Weight, w2: Weight) -> tuple[str, str]:
    """The parts of two layouts that must agree: w13's without its order of rows, after a colon."""
    return base_layout(w13.layout).partition(":")[0], base_layout(w2.layout)


def check_weight(
    name: str, weight: Weight, x: Tensor, x_name: str, dtype: torch.dtype
) -> tuple[int, int, int]:
    """The logical (E, N, K) of a weight. A plain weight must have the dtype of x's values, or if x
    arrives quantized that of the output.
    """
    data, stored = weight.data, shape_of(weight.data)
    if not weight.resident:
        check_rank(name, data, "(E, N, K)")
    check_device(name, data.device, x.device)
    if stored[0] == 0:
        raise ValueError(f"{name} must hold at least one expert, got shape {stored}")
    if not weight.scheme:
        like = f"{dtype} like {x_name if x.dtype == dtype else 'the output'}"
        if data.dtype.itemsize == 1:
            raise ValueError(
                f"{name} must have dtype {like}, got {data.dtype}; wrap it with "
                f"its scales: moe_ops.from_quantized(scheme, {name}, scale)"
            )
        if data.dtype != dtype:
            raise ValueError(
                f"{name} must have dtype {like}, got {data.dtype}; convert one of them, run under "
                "torch.autocast, or wrap quantized data with moe_ops.from_quantized"
            )
        E, N, K = stored
        return E, N, K
    scheme = get_scheme(weight.scheme)
    if weight.layout == TRANSPOSED or weight.layout.startswith(FLAT):
        transposed = weight.layout == TRANSPOSED
        raise ValueError(
            f"{name} must have its natural layout, got a "
            + (f"transposed view of {stored}; transpose it back" if transposed else "flat view")
        )
    E, N, K = scheme.logical_shape(*stored)
    N, K = sizes_of_layout(weight.layout) or (N, K)
    _check_scales(name, weight, scheme, (E, N, K), x.device)
    return E, N, K


def _check_scales(
    name: str, weight: Weight, scheme: QuantScheme, shape: tuple, device: torch.device
) -> None:
    """Raise unless a quantized weight has the scales of its scheme, in their shapes and on the
    device.
    """
    num_experts, n, k = shape
    shapes = scheme.scale_shapes(
        *(num_experts, n, k, weight.layout), global_rows=weight.global_rows
    )
    for what, expected in shapes.items():
        given = getattr(weight, what)
        if given is not None:
            check_device(f"{name}'s {what}", given.device, device)
        got = None if given is None else shape_of(given)
        known = weight.layout in ("", TRITON_E2M1)  # how scales lie in others, backends know
        if got != expected and (known or (got is None) != (expected is None)):
            raise ValueError(
                f"{name}'s {what} must have shape {expected} for scheme {weight.scheme}, got {got}"
            )
    act = scheme.activation
    static = act is not None and act.static
    given = weight.activation_scale is not None
    if static != given and not (given and act is not None and act.global_scale):
        must, found = ("an", "None") if static else ("no", "one")
        raise ValueError(
            f"{name} must have {must} activation_scale for scheme {weight.scheme}, got {found}; "
            "moe_ops.quantize and moe_ops.from_quantized make weights that fit their scheme"
        )
    if weight.activation_scale is not None:
        check_device(f"{name}'s activation_scale", weight.activation_scale.device, device)
        got = shape_of(weight.activation_scale)
        if got not in ((), (1,), (num_experts,)):
            raise ValueError(
                f"{name}'s activation_scale must have shape () or ({num_experts},), got {got}"
            )


def check_bias(name: str, bias: Tensor | None, shape: tuple, device: torch.device) -> None:
    if bias is None:
        return
    if shape_of(bias) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {shape_of(bias)}")
    check_float(name, bias.dtype)
    check_device(name, bias.device, device)


def check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ValueError(f"{name} must be a floating-point tensor, got {dtype}")


def check_dtype(name: str, dtype: torch.dtype, expected: tuple) -> None:
    if dtype not in expected:
        names = " or ".join([str(d).removeprefix("torch.") for d in expected])
        raise ValueError(f"{name} must be {names}, got {dtype}; convert it with .to()")


def check_device(name: str, device: torch.device, expected: torch.device) -> None:
    if device != expected:
        raise ValueError(f"{name} must be on {expected}, got {device}; move it with .to()")
