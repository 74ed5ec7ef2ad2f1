"""Whole layers of bf16 tokens on a CPU with AVX2 or AVX-512: csrc/cpu/experts.cpp, called through
ctypes if it was built. Weights of 4 and 8 bits, and bf16 ones, are read where they lie; nothing of
their size is allocated.

Error against fp64 at unit scale: 2.5e-3, nearly all of it from rounding h to bf16.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.torch import cpu
from moe_ops.ops.args import ExpertsArgs
from moe_ops.schemes import (
    PER_BLOCK,
    PER_MX_BLOCK,
    PER_NV_BLOCK,
    PER_ROW,
    PER_TENSOR,
    PER_TOKEN_GROUP,
    QuantDesc,
    get_scheme,
)

# of experts.cpp, in the order of its ENTRIES
_DECODERS = (
    *("bf16", "int4", "int4_any", "mxfp4", "nvfp4", "int8", "fp8", "fp8_blocks"),
    *("int8_tokens", "fp8_tokens", "fp8_blocks_tokens"),
)
ACTIVATIONS = {  # of its Activation
    "silu": 0,
    "swigluoai": 0,
    "swigluoai_uninterleave": 0,
    "gelu_tanh": 1,
    "swiglustep": 2,
}
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
COLUMNS = 32  # K and I are multiples of it
# bf16 weights: rows an expert up to which the layer is faster than a grouped product at a time. On
# two EPYC cores with AVX-512 it took 0.42 of the time at one token, 0.57 at 1 row, 0.93 at 4.
MOST_ROWS_OF_BF16 = 4
ALIGNMENT = 64

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Matrix(ctypes.Structure):
    """struct Matrix of csrc/cpu/experts.cpp."""

    _fields_ = [
        *[(name, _pointer) for name in ("data", "scale", "zero_point", "global_", "bias")],
        *[(name, _size) for name in ("expert", "row", "scale_expert", "scale_row")],
        *[(name, _size) for name in ("zero_expert", "zero_row", "bias_expert")],
        *[(name, _int) for name in ("groups", "scale_type", "bias_type")],
    ]


class Experts(ctypes.Structure):
    """struct Experts of csrc/cpu/experts.cpp."""

    _fields_ = [
        *[(name, _pointer) for name in ("x", "ids", "weights", "map", "out")],
        *[(name, _size) for name in ("x_row", "M", "top_k", "E", "mapped", "K", "I")],
        ("w13", Matrix),
        ("w2", Matrix),
        *[(name, _int) for name in ("scheme", "activation", "interleaved", "threads", "powers")],
        ("batch_invariant", _int),
        *[(name, ctypes.c_float) for name in ("alpha", "beta", "limit")],
    ]


@functools.cache
def kernels() -> Any:
    """The kernels, or None where they do not run."""
    library = cpu.library()
    if library is None or not hasattr(library, "moe_ops_cpu_experts_avx"):
        return None
    if not library.moe_ops_cpu_experts_avx(512):  # the widest that it may use
        return None
    if library.moe_ops_cpu_experts_struct_bytes() != ctypes.sizeof(Experts):
        return None  # built from another version
    library.moe_ops_cpu_experts_scratch.restype = ctypes.c_int64
    library.moe_ops_cpu_experts.argtypes = [_pointer, _pointer]
    library.moe_ops_cpu_experts.restype = None
    return library


@functools.cache
def _decoder(scheme: str) -> str:
    """The decoder of a scheme's weights, beside its activations; "" if there is none."""
    described = get_scheme(scheme)
    desc, tokens = described.weight, described.activation
    if desc is None:
        return "bf16"
    if tokens is not None:
        return _beside(desc, tokens)
    if desc.dtype == "e2m1":
        of_group = {PER_MX_BLOCK: "mxfp4", PER_NV_BLOCK: "nvfp4"}.get(desc.group, "")
        fits = desc.is_mx if of_group == "mxfp4" else desc.global_scale
        return of_group if fits else ""
    if desc.scale_dtype not in (torch.float32, None):
        return ""
    if desc.dtype == "int4":
        return "int4_any" if _groups(desc) else ""
    of_rows = desc.group in (PER_ROW, PER_TENSOR) and not desc.zero_point
    if desc.dtype == "int8":
        return "int8" if of_rows else ""
    if desc.dtype == "e4m3" and desc.scale_dtype == torch.float32:
        return "fp8" if of_rows else "fp8_blocks" if desc.group == PER_BLOCK else ""
    return ""


def _beside(desc: QuantDesc, tokens: QuantDesc) -> str:
    """The decoder of weights of 8 bits beside quantized activations."""
    if desc.dtype != tokens.dtype or tokens.static or tokens.scale_dtype != torch.float32:
        return ""
    if desc.scale_dtype != torch.float32 or desc.zero_point:
        return ""
    if desc.group == PER_ROW and tokens.group == PER_ROW and not tokens.powers_of_two:
        return {"int8": "int8_tokens", "e4m3": "fp8_tokens"}.get(desc.dtype, "")
    blocks = desc.group == PER_BLOCK and tokens.group == PER_TOKEN_GROUP
    return "fp8_blocks_tokens" if blocks and desc.dtype == "e4m3" else ""


def _groups(desc: QuantDesc) -> int:
    """Scales of 128 columns of a row; 0 of what int4_any does not decode."""
    cols = desc.group.cols
    return 128 // cols if desc.group.rows == 1 and cols in (32, 64, 128) else 0


def takes(a: ExpertsArgs) -> bool:
    """Whether the kernels run a call."""
    return (
        kernels() is not None
        and a.out.device.type == "cpu"
        and a.out.dtype == a.hidden_states.dtype == torch.bfloat16
        and a.hidden_states_scale is None
        and not a.router_weight_on_input
        and a.activation in ACTIVATIONS
        and _decoder(a.scheme) != ""
        and all([n > 0 and n % COLUMNS == 0 for n in (a.out.shape[1], _logical_columns(a.w2))])
        and all([_readable(weight) for weight in (a.w13, a.w2)])
        and all([s is None or s.dtype in _SCALE_TYPES for s in (a.w13_scale, a.w2_scale)])
        and all([b is None or b.dtype in _TYPES for b in (a.w13_bias, a.w2_bias)])
        and (a.scheme != "" or _few_bf16(a))
        and a.out.is_contiguous()
    )


def _few_bf16(a: ExpertsArgs) -> bool:
    if a.batch_invariant:  # one path for however many rows: that of grouped products
        return False
    few = a.topk_ids.numel() <= MOST_ROWS_OF_BF16 * a.w13.shape[0]
    return few and a.w13.dtype == a.w2.dtype == torch.bfloat16


_SCALE_TYPES = (*_TYPES, torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)


def _logical_columns(weight: Tensor) -> int:
    return weight.shape[2] * (2 if weight.dtype == torch.uint8 else 1)


def _readable(weight: Tensor) -> bool:
    """Whether the elements of a row lie one after the other."""
    return weight.stride(2) == 1 and weight.stride(1) >= weight.shape[2]


def run(a: ExpertsArgs) -> None:
    """A layer, or a chunk of its tokens, that `takes`."""
    library, decoder = kernels(), _decoder(a.scheme)
    M, top_k = a.topk_ids.shape
    x = a.hidden_states if a.hidden_states.stride(1) == 1 else a.hidden_states.contiguous()
    ids = a.topk_ids.to(torch.int64).contiguous()
    weights = a.topk_weights.to(torch.float32).contiguous()
    expert_map = None if a.expert_map is None else a.expert_map.to(torch.int64).contiguous()
    scales13, scales2 = (
        [None if t is None else t.contiguous() for t in scales]
        for scales in (
            (a.w13_scale, a.w13_zero_point, a.w13_global_scale, a.w13_bias),
            (a.w2_scale, a.w2_zero_point, a.w2_global_scale, a.w2_bias),
        )
    )
    groups = _groups(get_scheme(a.scheme).quantized_weight) if decoder == "int4_any" else 0
    w13, w2 = _matrix(a.w13, groups, *scales13), _matrix(a.w2, groups, *scales2)
    if groups and all([_is_simple(m) for m in (w13, w2)]):
        decoder = "int4"
    call = Experts(
        *(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), _address(expert_map)),
        *(a.out.data_ptr(), x.stride(0), M, top_k, a.w13.shape[0]),
        *(0 if expert_map is None else expert_map.numel(), a.out.shape[1]),
        *(_logical_columns(a.w2), w13, w2, _DECODERS.index(decoder)),
        *(ACTIVATIONS[a.activation], a.activation == "swigluoai", torch.get_num_threads()),
        *(_powers_of_two(a.scheme), a.batch_invariant, a.alpha, a.beta, a.limit),
    )
    of_call = ctypes.byref(call)
    needed = library.moe_ops_cpu_experts_scratch(of_call)
    # a default device may be another one
    scratch = torch.empty(needed + ALIGNMENT, dtype=torch.uint8, device="cpu")
    library.moe_ops_cpu_experts(of_call, -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT)


@functools.cache
def _powers_of_two(scheme: str) -> bool:
    tokens = get_scheme(scheme).activation
    return tokens is not None and tokens.powers_of_two


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_simple(matrix: Matrix) -> bool:
    """Whether int4 weights have a bf16 scale for 128 columns and no zero points."""
    return matrix.groups == 1 and matrix.scale_type == 0 and not matrix.zero_point


def _matrix(
    weight: Tensor,
    groups: int,
    scale: Tensor | None,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
) -> Matrix:
    """A weight with its contiguous scales and bias."""
    size, (expert, row, _) = weight.element_size(), weight.stride()
    scale_expert = scale_row = scale_type = 0
    if scale is not None:
        scale_type, of_scale = _TYPES.get(scale.dtype, 0), scale.element_size()
        if scale.dim() == 3:
            scale_expert, scale_row = [of_scale * stride for stride in scale.stride()[:2]]
        elif scale.shape[0] > 1:
            scale_expert = of_scale
    return Matrix(
        *(weight.data_ptr(), _address(scale), _address(zero_point), _address(global_scale)),
        *(_address(bias), expert * size, row * size, scale_expert, scale_row),
        *((0, 0) if zero_point is None else zero_point.stride()[:2]),
        *(0 if bias is None else bias.shape[1], groups, scale_type),
        0 if bias is None else _TYPES[bias.dtype],
    )
