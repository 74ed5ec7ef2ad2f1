"""Checkpoints of bitsandbytes in 4 bits: nf4 and fp4.

Codes and scales run over all numbers of a matrix, or of a stack of them, one after the other,
whatever the rows are: two codes a byte, the first in the high half, and one scale, absmax, for
each block of (mostly 64) numbers. Shape and block size stand in a JSON object beside them. A block
may reach into the next row or expert; here it is taken apart at the rows, into groups of as many
columns as divide both, which have its scale each. What `stored` writes has no such blocks.

With double quantization absmax is one of 256 levels for each block, times a scale of 256 blocks,
plus one number for all; fp32 scales are made of them, as bitsandbytes makes them when it computes.

Dimensions: C matrices that are read together, N rows, K columns. See `formats` for what describe
and convert are.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints.common import Config, Matrix, require, shape_of, shown
from moe_ops.schemes import ELEMENT_FORMATS, GroupShape, QuantDesc, QuantScheme, get_scheme

KINDS = ("nf4", "fp4")
WEIGHT, ABSMAX, LEVELS = "weight", "weight.absmax", "weight.quant_map"
NESTED_ABSMAX, NESTED_LEVELS = "weight.nested_absmax", "weight.nested_quant_map"
STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in KINDS}
REQUIRED, NESTED = (WEIGHT, ABSMAX, LEVELS), (NESTED_ABSMAX, NESTED_LEVELS)
# of stacks, whose names have no ".weight"
ALIASES = {
    role.removeprefix("weight."): role for role in (ABSMAX, LEVELS, *NESTED, *STATES.values())
}
BLOCKS = tuple([2**n for n in range(5, 13)])  # sizes that bitsandbytes takes
_FIELDS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_FIELDS = {"nested_blocksize", "nested_dtype", "nested_offset"}


def check_state(state: dict[str, Any]) -> Config:
    """What the object beside a matrix says of it; ValueError for what it cannot mean."""
    for name in state.keys() - _FIELDS - _NESTED_FIELDS:
        raise ValueError(f"{name} of quant_state must be a field that moe_ops knows")
    kind, size, shape = (state.get(name) for name in ("quant_type", "blocksize", "shape"))
    if kind not in KINDS:
        raise ValueError(f"quant_type must be one of {KINDS}, got {shown(kind)}")
    sizes = shape if isinstance(shape, list) else []
    if len(sizes) not in (2, 3) or any(type(n) is not int or n < 1 for n in sizes):
        raise ValueError(
            f"shape must be (rows, columns) or (E, rows, columns), got {shown(shape)}"
        )
    nested = _NESTED_FIELDS & state.keys()
    sizes = [size, state["nested_blocksize"]] if "nested_blocksize" in nested else [size]
    if any(type(n) is not int or not 1 <= n < 2**31 for n in sizes):
        raise ValueError(f"blocksize must be a positive int32, got {shown(sizes)}")
    offset = state.get("nested_offset", 0.0)
    if nested and (nested != _NESTED_FIELDS or state["nested_dtype"] != "float32"):
        raise ValueError(
            f"{', '.join(sorted(_NESTED_FIELDS))} must be there together, the dtype 'float32', "
            f"got {shown({name: state[name] for name in sorted(nested)})}"
        )
    if type(offset) is not float or not math.isfinite(offset):
        raise ValueError(f"nested_offset must be a finite number, got {shown(offset)}")
    return state


def describe(t: dict, state: Config) -> Matrix:
    *batch, n, k = state["shape"]
    numbers, kind, size = math.prod(state["shape"]), state["quant_type"], state["blocksize"]
    if STATES[kind] not in t:
        raise ValueError(f"quant_type must be that of its tensor's name, got {kind!r}")
    if k % 2:
        raise ValueError(f"shape must have an even number of columns, got {state['shape']}")
    columns = math.gcd(size, k)
    if columns < 8:
        raise ValueError(
            f"shape must have columns that share a factor of 8 or more with the blocks of {size}, "
            f"got {k} columns: their scales would take as much as the codes"
        )
    require(t, WEIGHT, (numbers // 2, 1), torch.uint8)
    blocks = -(-numbers // size)
    nested = "nested_offset" in state
    # bitsandbytes' own layout for some CPUs has other dimensions, and scales rounded to bf16
    require(t, ABSMAX, (blocks,), torch.uint8 if nested else torch.float32)
    require(t, LEVELS, (16,), torch.float32)
    for role in NESTED:
        if nested != (role in t):
            raise ValueError(
                f"{role} must be {'there' if nested else 'absent'}, as quant_state "
                f"{'has' if nested else 'lacks'} nested_offset"
            )
    if nested:
        require(t, NESTED_ABSMAX, (-(-blocks // state["nested_blocksize"]),), torch.float32)
        require(t, NESTED_LEVELS, (256,), torch.float32)
    desc = QuantDesc(kind, GroupShape(1, columns))
    return Matrix(get_scheme(QuantScheme("its own", desc, None)).name, n, k, tuple(batch))


def convert(t: dict[str, Tensor], state: Config) -> dict[str, Tensor]:
    *batch, n, k = state["shape"]
    size, levels = state["blocksize"], t[LEVELS]
    known = torch.tensor(ELEMENT_FORMATS[state["quant_type"]].levels, device=levels.device)
    if not torch.equal(levels, known.expand(levels.shape)):
        raise ValueError(
            f"{LEVELS} must be the levels of {state['quant_type']}, got {levels[..., :4].tolist()}"
        )
    shape = (*shape_of(t, WEIGHT)[:-2], *batch, n)
    codes = t[WEIGHT].reshape(*shape, k // 2)
    columns = math.gcd(size, k)
    scale = _of_each(_absmax(t, state), math.prod(state["shape"]) // columns, size // columns)
    return {
        "qdata": (codes << 4) | (codes >> 4),
        "scale": scale.reshape(*shape, k // columns),
    }


def _absmax(t: dict[str, Tensor], state: Config) -> Tensor:
    """absmax in fp32, computed as bitsandbytes does."""
    absmax = t[ABSMAX]
    if "nested_offset" not in state:
        return absmax
    of_block = _of_each(t[NESTED_ABSMAX], absmax.shape[-1], state["nested_blocksize"])
    found = t[NESTED_LEVELS].gather(-1, absmax.long())
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=absmax.device)
    return (found * of_block).add_(offset)


def without_double_quantization(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of layers that bitsandbytes quantized, by their names in a model, with each
    absmax in fp32; other tensors unchanged.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(NESTED_ABSMAX)]:
        base = name.removesuffix(NESTED_ABSMAX)
        role = next(role for role in STATES.values() if base + role in tensors)
        t = {role: tensors[base + role] for role in (ABSMAX, *NESTED)}
        state = json.loads(bytes(tensors[base + role].tolist()))
        found[base + ABSMAX] = _absmax(t, state)
        single = {field: state[field] for field in state if field not in _NESTED_FIELDS}
        found[base + role] = _packed(single)
        for role in NESTED:
            del found[base + role]
    return found


def _packed(state: Config) -> Tensor:
    return torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)


def check_storable(scheme: QuantScheme) -> None:
    """Raise ValueError unless bitsandbytes has matrices of this scheme."""
    desc = scheme.quantized_weight
    fits = desc.dtype in KINDS and scheme.activation is None and desc.group.cols in BLOCKS
    if not fits or desc != QuantDesc(desc.dtype, GroupShape(1, desc.group.cols)):
        raise ValueError(
            f"scheme must be nf4 or fp4 in groups of {BLOCKS[0]} to {BLOCKS[-1]} columns, a power "
            f"of two, got {scheme.name!r}"
        )


def stored(
    scheme: QuantScheme,
    qdata: Tensor,  # (N, K / 2) or (E, N, K / 2)
    scale: Tensor,  # (N, K / group) or (E, N, K / group)
    dtype: torch.dtype,  # of the weights
) -> dict[str, Tensor]:
    """The tensors of a matrix, or of a stack, by role, without double quantization."""
    check_storable(scheme)
    desc, shape = scheme.quantized_weight, scheme.logical_shape(*qdata.shape)
    state = {
        "quant_type": desc.dtype,
        "blocksize": desc.group.cols,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [*shape],
    }
    return {
        WEIGHT: ((qdata << 4) | (qdata >> 4)).reshape(-1, 1),
        ABSMAX: scale.flatten(),
        LEVELS: torch.tensor(desc.format.levels),
        STATES[desc.dtype]: _packed(state),
    }


def _of_each(scale: Tensor, count: int, size: int) -> Tensor:
    """The scale (..., count) of each of so many things, of which ``size`` have one."""
    return scale[..., torch.arange(count, device=scale.device) // size]
