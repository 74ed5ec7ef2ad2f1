"""Checkpoints of bitsandbytes in 4 bits: nf4 and fp4.

Codes and scales run over all numbers of a matrix, or of a stack of them, one after the other,
whatever the rows are: two codes a byte, the first in the high half, and one scale, absmax, for
each block of (mostly 64) numbers. Shape and block size stand in a JSON object beside them. A block
may reach into the next row or expert; here it is taken apart at the rows, into groups of as many
columns as divide both, which have its scale each.

With double quantization absmax is one of 256 levels for each block, times a scale of 256 blocks,
plus one number for all; fp32 scales are made of them, as bitsandbytes makes them when it computes.

Dimensions: C matrices that are read together, N rows, K columns. See `formats` for what describe
and convert are.
"""

from __future__ import annotations

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
    absmax = t[ABSMAX]
    if "nested_offset" in state:
        of_block = _of_each(t[NESTED_ABSMAX], absmax.shape[-1], state["nested_blocksize"])
        found = t[NESTED_LEVELS].gather(-1, absmax.long())
        offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=absmax.device)
        absmax = (found * of_block).add_(offset)
    columns = math.gcd(size, k)
    scale = _of_each(absmax, math.prod(state["shape"]) // columns, size // columns)
    return {
        "qdata": (codes << 4) | (codes >> 4),
        "scale": scale.reshape(*shape, k // columns),
    }


def _of_each(scale: Tensor, count: int, size: int) -> Tensor:
    """The scale (..., count) of each of so many things, of which ``size`` have one."""
    return scale[..., torch.arange(count, device=scale.device) // size]
