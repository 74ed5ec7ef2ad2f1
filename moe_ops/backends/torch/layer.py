"""Whole layers of bf16 tokens on a CPU with AVX2, AVX-512, AMX or NEON: csrc/cpu/experts.cpp,
called through ctypes if it was built. Weights of 4 and 8 bits, and bf16 ones, are read where they
lie; nothing of their size is allocated.

Error against fp64 at unit scale: 1.7e-3 from rounding the output; 2.5e-3 where h is rounded, too.
Integers and e2m1 meet tokens and h in whole numbers of 16 bits, under a scale for 128 columns;
with AMX, int8 alone, under one for all columns: the others meet both in bf16. So do 4 bits in
calls of many rows with AVX-512 on processors that are not Intel's.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.backends.torch import cpu
from moe_ops.meta import scales
from moe_ops.numerics import elements
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.backend import Shortcut
from moe_ops.ops.call import ExpertsCall
from moe_ops.ops.memory import EMPTY_STRIDED
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.schemes import (
    ELEMENT_FORMATS,
    PER_BLOCK,
    PER_MX_BLOCK,
    PER_NV_BLOCK,
    PER_ROW,
    PER_TENSOR,
    PER_TOKEN_GROUP,
    SUPER_BLOCK,
    QuantDesc,
    get_scheme,
    schemes_of_layer,
)

# of experts.cpp, in the order of its ENTRIES
_DECODERS = (
    *("bf16", "int4", "int4_any", "int4_minima", "mxfp4", "nvfp4", "levels", "int5", "int6"),
    *("int8", "int8_any", "int8_minima", "fp8", "fp8_blocks"),
    *("int8_tokens", "fp8_tokens", "fp8_blocks_tokens"),
)
_MOST_LEVEL = 8190  # eight products with whole numbers of 16 bits fit 32
ACTIVATIONS = {  # enum Activation of csrc/cpu/activation.inc
    "silu": 0,
    "swigluoai": 0,
    "swigluoai_uninterleave": 0,
    "gelu_tanh": 1,
    "swiglustep": 2,
    "relu2": 3,
    "situ": 4,
    "powlu": 5,
}
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_TWO_LEVELS = 3  # such a type of scales
WIDEST = 1024  # AMX beside AVX-512, of the instructions that the kernels may use
COLUMNS = 32  # K and I are multiples of it
# bf16 weights: rows per expert up to which the layer is faster than a grouped product at a time,
# by the instructions in use. With AMX a weight is read once for up to 32 rows.
MOST_ROWS_OF_BF16 = {1024: 32, 512: 12, 128: 4, 2: 3}
ALIGNMENT = 64
# where in ExpertsArgs the tensors begin, the scales and biases, and the expert map after them
_FIRST, _FIRST_SCALE, _MAP = [
    ExpertsArgs._fields.index(name) for name in ("hidden_states", "w13_scale", "expert_map")
]

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Matrix(ctypes.Structure):
    """struct Matrix of csrc/cpu/experts.cpp."""

    _fields_ = [
        *[(name, _pointer) for name in ("data", "scale", "zero_point", "global_", "super")],
        ("bias", _pointer),
        *[(name, _size) for name in ("expert", "row", "scale_expert", "scale_row")],
        *[(name, _size) for name in ("zero_expert", "zero_row", "bias_expert")],
        *[(name, _size) for name in ("global_expert", "global_row", "super_expert", "super_row")],
        *[(name, _int) for name in ("groups", "scale_type", "minima")],
        *[(name, _int) for name in ("decoder", "bias_type", "together")],
        ("levels", ctypes.c_int16 * 16),
        ("unit", ctypes.c_float),
    ]


class Experts(ctypes.Structure):
    """struct Experts of csrc/cpu/experts.cpp, with zeros where CALL has what it holds."""

    _fields_ = [
        *[(name, _pointer) for name in ("x", "ids", "weights", "map", "out", "by_expert")],
        *[(name, _size) for name in ("x_row", "weights_row", "ids_row", "M", "top_k", "E")],
        *[(name, _size) for name in ("mapped", "K", "I")],
        ("w13", Matrix),
        ("w2", Matrix),
        *[(name, _int) for name in ("activation", "interleaved", "threads", "powers")],
        *[(name, _int) for name in ("batch_invariant", "wide", "ids_bytes", "weights_type")],
        *[(name, ctypes.c_float) for name in ("alpha", "beta", "limit")],
    ]


# struct Call of csrc/cpu/experts.cpp: `out` and the other tensors of ExpertsArgs, then strides of
# rows of hidden_states, topk_weights and topk_ids, M, top_k and threads
_NUMBERS = "6q"
CALL = struct.Struct("22P" + _NUMBERS)


@functools.cache
def kernels() -> Any:
    """The kernels, or None where they do not run."""
    library = cpu.library()
    if library is None:
        return None
    if not library.moe_ops_cpu_experts_avx(WIDEST):
        return None
    if library.moe_ops_cpu_experts_struct_bytes() != ctypes.sizeof(Experts) + CALL.size:
        return None
    library.moe_ops_cpu_experts_scratch.argtypes = [_pointer, ctypes.c_char_p]
    library.moe_ops_cpu_experts_scratch.restype = _size
    library.moe_ops_cpu_experts_run.argtypes = [_pointer, ctypes.c_char_p, _pointer]
    library.moe_ops_cpu_experts_run.restype = None
    return library


@functools.cache
def _decoder(scheme: str) -> str:
    """The decoder of weights, beside their activations; "" if there is none."""
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
    if desc.scale_dtype not in (torch.float32, torch.int8, None):
        return ""
    if _groups(desc):
        return _of_groups(desc)
    of_rows = desc.group in (PER_ROW, PER_TENSOR) and not desc.has_zero
    if desc.dtype == "int8":
        return "int8" if of_rows else ""
    if desc.dtype == "e4m3" and desc.scale_dtype == torch.float32:
        return "fp8" if of_rows else "fp8_blocks" if desc.group == PER_BLOCK else ""
    return ""


def _beside(desc: QuantDesc, tokens: QuantDesc) -> str:
    """The decoder of weights of 8 bits beside quantized activations."""
    if desc.dtype != tokens.dtype or tokens.static or tokens.scale_dtype != torch.float32:
        return ""
    if desc.scale_dtype != torch.float32 or desc.has_zero:
        return ""
    if desc.group == PER_ROW and tokens.group == PER_ROW and not tokens.powers_of_two:
        return {"int8": "int8_tokens", "e4m3": "fp8_tokens"}.get(desc.dtype, "")
    blocks = desc.group == PER_BLOCK and tokens.group == PER_TOKEN_GROUP
    return "fp8_blocks_tokens" if blocks and desc.dtype == "e4m3" else ""


@functools.cache
def _decoders(scheme: str) -> tuple[str, ...]:
    """Those of a layer's weights, w13 and w2; () if one has none. Two schemes of a layer have
    activations that are not quantized.
    """
    of_weights = schemes_of_layer(scheme)
    both = tuple([_decoder(name) for name in of_weights])
    quantized = any([get_scheme(name).activation is not None for name in of_weights])
    alike = of_weights[0] == of_weights[1]
    return both if all(both) and (alike or not quantized) else ()


def _of_groups(desc: QuantDesc) -> str:
    """The decoder of weights with scales of groups of columns."""
    if desc.format.levels:
        return "levels"
    if desc.dtype == "int8":
        return "int8_minima" if desc.has_zero else "int8_any"
    if desc.dtype == "int4":
        return "int4_minima" if desc.minimum else "int4_any"
    return desc.dtype


def _groups(desc: QuantDesc) -> int:
    """Scales of 128 columns of a row, if `_of_groups` names a decoder of such weights, else 0."""
    sizes = {"int4": (16, 32, 64, 128), "int8": (32, 64, 128)}
    sizes |= dict.fromkeys(("int5", "int6"), sizes["int4"])
    taken = sizes["int8"] if desc.format.levels else sizes.get(desc.dtype, ())
    return 128 // desc.group.cols if desc.group.rows == 1 and desc.group.cols in taken else 0


class Form(NamedTuple):
    """Everything that calls share which differ only in values, addresses and M."""

    experts: Experts
    address: int  # of experts
    run: Any  # of the kernels
    scratch: Any
    sizes: dict[tuple[int, ...], int]  # of scratch memory, by M, top_k and threads


def form_of(a: ExpertsArgs) -> Form | None:
    """The form of a call that the kernels run, else None."""
    of = a.activation_by_expert
    if of is not None and (of.dtype != torch.float32 or of.shape != (3, a.w13.shape[0])):
        return None
    if kernels() is None or not a.scheme and not _few_bf16(a):
        return None
    x, out = a.hidden_states, a.out
    return _form(
        a.scheme,
        out.is_cpu and out.is_contiguous() and a.hidden_states_scale is None,
        x.dtype,
        out.dtype,
        a.options,
        _facts(a.w13, a.w13_scale, a.w13_zero_point, a.w13_global_scale, a.w13_bias),
        _facts(a.w2, a.w2_scale, a.w2_zero_point, a.w2_global_scale, a.w2_bias),
        0 if a.expert_map is None else a.expert_map.shape[0],
        (a.topk_ids.dtype, a.topk_weights.dtype),
    )


def decodes(problem: Problem, machine: Machine) -> bool:
    """Whether the kernels run calls with quantized weights, by all that a problem says."""
    p, of, columns = problem, problem.options, (problem.hidden_size, problem.intermediate_size)
    return (
        (machine.device_type, p.kind, p.dtype) == ("cpu", "experts", torch.bfloat16)
        and not (p.quantized_input or of.needs_grad or of.router_weight_on_input or p.layout)
        and of.activation is not None
        and of.activation.name in ACTIVATIONS
        and all([n > 0 and n % COLUMNS == 0 for n in columns])
        and bool(p.scheme and _decoders(p.scheme))
        and kernels() is not None
    )


def _few_bf16(a: ExpertsArgs) -> bool:
    if a.options.batch_invariant:  # one path for however many rows: that of grouped products
        return False
    if not a.w13.dtype == a.w2.dtype == torch.bfloat16:
        return False
    return a.topk_ids.numel() <= _most_pairs_of_bf16(a.w13.shape[0])


def _most_pairs_of_bf16(E: int) -> int:
    return E * MOST_ROWS_OF_BF16[kernels().moe_ops_cpu_experts_in_use()]


class _Facts(NamedTuple):
    """Facts of a weight."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    scale: tuple[torch.dtype, torch.Size] | None
    zero_point: torch.Size | None
    global_scale: torch.Size | None
    bias: torch.dtype | None


def _facts(
    weight: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
) -> _Facts:
    return _Facts(
        weight.dtype,
        weight.shape,
        weight.stride(),
        None if scale is None else (scale.dtype, scale.shape),
        None if zero_point is None else zero_point.shape,
        None if global_scale is None else global_scale.shape,
        None if bias is None else bias.dtype,
    )


@functools.lru_cache(maxsize=1024)
def _form(
    scheme: str,
    plain: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    options: Options,
    w13: _Facts,
    w2: _Facts,
    mapped: int,
    of_router: tuple[torch.dtype, torch.dtype],
) -> Form | None:
    ids, weights = of_router
    activation = options.activation
    decoders, (E, K, _) = _decoders(scheme), w2.shape
    of_weights = [get_scheme(name) for name in schemes_of_layer(scheme)]
    I = of_weights[1].logical_shape(*w2.shape)[2]
    if (
        not (plain and dtype == torch.bfloat16 and out_dtype in (dtype, torch.float32))
        or options.router_weight_on_input
        or activation.name not in ACTIVATIONS
        or not decoders
        or ids not in (torch.int32, torch.int64)
        or not all([_readable(weight) for weight in (w13, w2)])
        or not all([n > 0 and n % COLUMNS == 0 for n in (K, I)])
    ):
        return None
    experts = Experts(
        **{"E": E, "mapped": mapped, "K": K, "I": I},
        **{
            name: _matrix(weight, of.weight, decoder)
            for name, weight, of, decoder in zip(
                ("w13", "w2"), (w13, w2), of_weights, decoders, strict=True
            )
        },
        **{"activation": ACTIVATIONS[activation.name], "interleaved": activation.interleaved},
        **{"powers": _powers_of_two(of_weights[0].activation)},
        **{"batch_invariant": options.batch_invariant, "wide": out_dtype != dtype},
        **{name: getattr(activation, name) for name in ("alpha", "beta", "limit")},
        **{"ids_bytes": ids.itemsize, "weights_type": _TYPES.get(weights, 2)},
    )
    library = kernels()
    return Form(
        experts,
        ctypes.addressof(experts),
        library.moe_ops_cpu_experts_run,
        library.moe_ops_cpu_experts_scratch,
        {},
    )


_SCALE_TYPES = (*_TYPES, torch.int8, torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)


def _readable(weight: _Facts) -> bool:
    """Whether the elements of a row lie one after the other, beside scales and a bias of known
    types.
    """
    return (
        weight.stride[2] == 1
        and weight.stride[1] >= weight.shape[2]
        and (weight.scale is None or weight.scale[0] in _SCALE_TYPES)
        and (weight.bias is None or weight.bias in _TYPES)
    )


def run(a: ExpertsArgs, form: Form) -> None:
    """A layer, or a chunk of its tokens."""
    rows = [t if t.stride(1) == 1 else t.contiguous() for t in _rows(a)]
    if rows[1].dtype not in _TYPES:
        rows[1] = rows[1].to(torch.float32)
    expert_map = None if a.expert_map is None else a.expert_map.to(torch.int64)
    others = [t if t is None else t.contiguous() for t in (*_scales(a), expert_map)]
    x, weights, ids = rows
    # held until the kernels have run
    tensors = (a.out, x, a.w13, a.w2, weights, ids, *others)
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    call, needed = _call_of(form, CALL.pack, addresses, rows)
    _launch(form, call, torch.empty(needed, dtype=torch.uint8, device=a.out.device))


def shortcut(a: ExpertsArgs) -> Shortcut | None:
    """Calls like this one past the launcher, where nothing of them is to be converted."""
    # of one row: calls of fewer rows may have a form where this one has none
    form = form_of(a._replace(topk_ids=a.topk_ids[:1]))
    empty, expert_map = EMPTY_STRIDED.get("cpu"), a.expert_map
    if form is None or empty is None or a.topk_weights.dtype not in _TYPES:
        return None
    if expert_map is not None and expert_map.dtype != torch.int64:
        return None
    others = [t for t in (*_scales(a), expert_map) if t is not None]
    if not all([t.stride(1) == 1 for t in _rows(a)] + [t.is_contiguous() for t in others]):
        return None
    K, dtype, most = a.out.shape[1], a.out.dtype, a.options.chunk_rows or sys.maxsize
    if not a.scheme:
        most = min(most, _most_pairs_of_bf16(a.w13.shape[0]) // a.topk_ids.shape[1])
    tensors = (a.out, *tuple(a)[_FIRST : _MAP + 1])
    pack = struct.Struct("".join(["8x" if t is None else "P" for t in tensors]) + _NUMBERS).pack

    def launch(call: ExpertsCall, M: int, addresses: Sequence[int]) -> Tensor:
        out = empty((M, K), (K, 1), dtype)
        packed, needed = _call_of(form, pack, (out.data_ptr(), *addresses), _rows(call))
        _launch(form, packed, empty((needed,), (1,), torch.uint8))
        return out

    return Shortcut(most, launch)


def _scales(a: ExpertsArgs) -> tuple[Any, ...]:
    """The scales and biases of a call."""
    return tuple(a)[_FIRST_SCALE:_MAP]


def _rows(a: ExpertsArgs | ExpertsCall) -> list[Tensor]:
    return [a.hidden_states, a.topk_weights, a.topk_ids]


def _call_of(
    form: Form, pack: Callable[..., bytes], addresses: Sequence[int], rows: Sequence[Tensor]
) -> tuple[bytes, int]:
    """A CALL, and bytes of scratch memory for it."""
    x, weights, ids = rows
    size = (*ids.shape, torch.get_num_threads())
    packed = pack(*addresses, x.stride(0), weights.stride(0), ids.stride(0), *size)
    needed = form.sizes.get(size)
    if needed is None:
        if len(form.sizes) >= 256:
            form.sizes.clear()
        needed = form.sizes[size] = form.scratch(form.address, packed) + ALIGNMENT
    return packed, needed


def _launch(form: Form, call: bytes, scratch: Tensor) -> None:
    form.run(form.address, call, -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT)


def _powers_of_two(tokens: QuantDesc | None) -> bool:
    return tokens is not None and tokens.powers_of_two


def _is_simple(weight: _Facts, groups: int) -> bool:
    """Whether int4 weights have a bf16 scale for 128 columns and no zero points."""
    bf16 = weight.scale is not None and weight.scale[0] == torch.bfloat16
    return groups == 1 and bf16 and weight.zero_point is None


@functools.cache
def _levels(dtype: str) -> tuple[list[int], float]:
    """What the codes of a format of 4 bits stand for, in whole numbers of a unit, and the unit:
    that in which these numbers, and their roundings to bf16 that AMX multiplies, have the least
    errors.
    """
    fmt = ELEMENT_FORMATS[dtype]
    codes = torch.arange(16, dtype=torch.uint8, device="cpu")
    levels = elements.decode(elements.pack(codes, fmt), fmt)
    per_level = torch.arange(1, int(_MOST_LEVEL / levels.abs().max()) + 1, device="cpu")[:, None]
    whole = (levels.double() * per_level).round()
    rounded = torch.stack([whole, whole.bfloat16().double()])
    error = ((rounded / per_level).float() - levels).norm(dim=2).sum(dim=0)
    best = int(error.argmin())
    return whole[best].int().tolist(), 1 / (best + 1)


def _matrix(weight: _Facts, desc: QuantDesc | None, decoder: str) -> Matrix:
    """A weight beside contiguous scales and bias."""
    groups = 0 if desc is None else _groups(desc)
    if decoder == "int4_any" and _is_simple(weight, groups):
        decoder = "int4"
    size, rows = weight.dtype.itemsize, weight.shape[1]
    expert, row, _ = weight.stride
    found = Matrix(expert=expert * size, row=row * size, groups=groups, bias_expert=rows)
    found.decoder = _DECODERS.index(decoder)
    if desc is not None and desc.format.bits == 4:
        levels, found.unit = _levels(desc.dtype)
        found.levels[:] = levels
    if weight.scale is not None:
        dtype, shape = weight.scale
        found.scale_type = _TWO_LEVELS if dtype == torch.int8 else _TYPES.get(dtype, 0)
        if len(shape) == 3:
            found.scale_expert = shape[1] * shape[2] * dtype.itemsize
            found.scale_row = shape[2] * dtype.itemsize
        elif shape[0] > 1:
            found.scale_expert = dtype.itemsize
    if weight.zero_point is not None and desc is not None:
        found.minima = desc.minimum
        found.zero_row = found.scale_row if desc.minimum else weight.zero_point[2]
        found.zero_expert = found.zero_row * weight.zero_point[1]
    columns = 0 if desc is None else scales.unpacked_size(weight.shape[2], desc.format.bits)
    if desc is not None and desc.format.high_bits:
        found.together = scales.unit_of_planes(columns)
    if desc is not None and desc.two_levels:
        found.super_row = columns // SUPER_BLOCK * desc.super_width * 2  # fp16
        found.super_expert = found.super_row * rows
    if weight.global_scale is not None:  # fp32
        of_rows = len(weight.global_scale) > 1
        found.global_expert = 4 * (rows if of_rows else 1)
        found.global_row = 4 * of_rows
    if weight.bias is not None:
        found.bias_type = _TYPES[weight.bias]
    return found
