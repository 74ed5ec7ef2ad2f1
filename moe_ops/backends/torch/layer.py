"""Whole layers of bf16 tokens on a CPU with AVX-512: csrc/cpu/experts.cpp, called through ctypes
if it was built. Weights of 4 and 8 bits beside 16-bit activations, and bf16 ones, are read where
they lie; nothing of their size is allocated.

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
from moe_ops.schemes import PER_BLOCK, QuantDesc, get_scheme

# of experts.cpp, in the order of its ENTRIES
_DECODERS = ("bf16", "int4", "int4_any", "mxfp4", "nvfp4", "int8", "fp8", "fp8_blocks")
_ACTIVATIONS = {  # of its Activation
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
        *[(name, _int) for name in ("scheme", "activation", "interleaved", "threads")],
        *[(name, ctypes.c_float) for name in ("alpha", "beta", "limit")],
    ]


@functools.cache
def _library() -> Any:
    """The kernels, or None where they do not run."""
    library = cpu.library()
    if library is None or not hasattr(library, "moe_ops_cpu_experts_runs"):
        return None
    if not library.moe_ops_cpu_experts_runs():
        return None
    if library.moe_ops_cpu_experts_struct_bytes() != ctypes.sizeof(Experts):
        return None  # built from another version
    library.moe_ops_cpu_experts_scratch.restype = ctypes.c_int64
    library.moe_ops_cpu_experts.argtypes = [_pointer, _pointer]
    library.moe_ops_cpu_experts.restype = None
    return library


@functools.cache
def _decoder(scheme: str) -> str:
    """The decoder of a scheme's weights; "" if there is none, or activations are quantized."""
    described = get_scheme(scheme)
    desc = described.weight
    if desc is None:
        return "bf16"
    if described.activation is not None or desc.channel_scale:
        return ""
    if desc.dtype == "e2m1":
        return "nvfp4" if desc.global_scale else "mxfp4" if desc.is_mx else ""
    if desc.dtype == "int4":
        return "int4_any" if _groups(desc) else ""
    of_rows = desc.group.cols == -1 and not desc.zero_point
    if desc.dtype == "int8":
        return "int8" if of_rows else ""
    if desc.dtype == "e4m3" and desc.scale_dtype == torch.float32:
        return "fp8" if of_rows else "fp8_blocks" if desc.group == PER_BLOCK else ""
    return ""


def _groups(desc: QuantDesc) -> int:
    """Scales of 128 columns of a row; 0 of what int4_any does not decode."""
    cols = desc.group.cols
    return 128 // cols if desc.group.rows == 1 and cols in (32, 64, 128) else 0


def takes(a: ExpertsArgs) -> bool:
    """Whether the kernels run a call."""
    return (
        _library() is not None
        and a.out.device.type == "cpu"
        and a.out.dtype == a.hidden_states.dtype == torch.bfloat16
        and a.hidden_states_scale is None
        and not a.router_weight_on_input
        and a.activation in _ACTIVATIONS
        and _decoder(a.scheme) != ""
        and a.hidden_states.shape[1] % COLUMNS == 0
        and _logical_columns(a.w2) % COLUMNS == 0
        and all([_readable(weight) for weight in (a.w13, a.w2)])
        and all([s is None or s.dtype in _SCALE_TYPES for s in (a.w13_scale, a.w2_scale)])
        and all([b is None or b.dtype in _TYPES for b in (a.w13_bias, a.w2_bias)])
        and (a.scheme != "" or _few_bf16(a))
        and a.out.is_contiguous()
    )


def _few_bf16(a: ExpertsArgs) -> bool:
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
    library = _library()
    decoder = _decoder(a.scheme)
    M, top_k = a.topk_ids.shape
    x = a.hidden_states if a.hidden_states.stride(1) == 1 else a.hidden_states.contiguous()
    ids = a.topk_ids.to(torch.int64).contiguous()
    weights = a.topk_weights.to(torch.float32).contiguous()
    expert_map = None if a.expert_map is None else a.expert_map.to(torch.int32).contiguous()
    w13, kept13 = _matrix(a, "w13", decoder)
    w2, kept2 = _matrix(a, "w2", decoder)
    if decoder == "int4_any" and all([_is_simple(m) for m in (w13, w2)]):
        decoder = "int4"
    call = Experts(
        x=x.data_ptr(),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        map=None if expert_map is None else expert_map.data_ptr(),
        out=a.out.data_ptr(),
        x_row=x.stride(0),
        M=M,
        top_k=top_k,
        E=a.w13.shape[0],
        mapped=0 if expert_map is None else expert_map.numel(),
        K=a.out.shape[1],
        I=_logical_columns(a.w2),
        w13=w13,
        w2=w2,
        scheme=_DECODERS.index(decoder),
        activation=_ACTIVATIONS[a.activation],
        interleaved=a.activation == "swigluoai",
        threads=torch.get_num_threads(),
        alpha=a.alpha,
        beta=a.beta,
        limit=a.limit,
    )
    needed = library.moe_ops_cpu_experts_scratch(ctypes.byref(call))
    scratch = torch.empty(needed + ALIGNMENT, dtype=torch.uint8)
    begin = -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
    library.moe_ops_cpu_experts(ctypes.byref(call), begin)
    del kept13, kept2  # what was made contiguous for the call


def _is_simple(matrix: Matrix) -> bool:
    """Whether int4 weights have a bf16 scale for 128 columns and no zero points."""
    return matrix.groups == 1 and matrix.scale_type == 0 and not matrix.zero_point


def _matrix(a: ExpertsArgs, name: str, decoder: str) -> tuple[Matrix, list[Tensor]]:
    """A weight with its scales and its bias, and the tensors that it points to."""
    weight = getattr(a, name)
    scale, zero_point = getattr(a, f"{name}_scale"), getattr(a, f"{name}_zero_point")
    global_scale, bias = getattr(a, f"{name}_global_scale"), getattr(a, f"{name}_bias")
    kept = [t.contiguous() for t in (scale, zero_point, global_scale, bias) if t is not None]
    tensors = iter(kept)
    found = Matrix(
        data=weight.data_ptr(),
        expert=weight.stride(0) * weight.element_size(),
        row=weight.stride(1) * weight.element_size(),
    )
    if scale is not None:
        of = next(tensors)
        found.scale, size = of.data_ptr(), of.element_size()
        found.scale_expert = size * (of.stride(0) if of.shape[0] > 1 else 0)
        found.scale_row = size * of.stride(1) if of.dim() == 3 else 0
        found.scale_type = _TYPES.get(of.dtype, 0)
    if zero_point is not None:
        of = next(tensors)
        found.zero_point, found.zero_expert, found.zero_row = of.data_ptr(), *of.stride()[:2]
    if global_scale is not None:
        found.global_ = next(tensors).data_ptr()
    if bias is not None:
        of = next(tensors)
        found.bias, found.bias_expert = of.data_ptr(), of.stride(0)
        found.bias_type = _TYPES[of.dtype]
    if decoder == "int4_any":
        found.groups = _groups(get_scheme(a.scheme).quantized_weight)
    return found, kept
