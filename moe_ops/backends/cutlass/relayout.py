"""The layouts of weights that kernels of backend cutlass multiply. On SM100 and SM120: elements as
they are, scales of blocks in tiles (numerics/swizzle.py), padded to whole ones. On SM90: int4
weights in the order in which a thread reads them into registers, with tables for scales.

For ``moe_ops.prepare(weight, "cutlass")``; plain torch on any device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ops.backends.cutlass.schemes import BLOCK_SCALED, BLOCKS, INT4, INT4_SCHEME
from moe_ops.numerics.elements import e4m3_to_float32
from moe_ops.numerics.swizzle import swizzle, unswizzle
from moe_ops.ops.relayout import Relayout, Tensors

if TYPE_CHECKING:
    from moe_ops.tensors.base import ExpertTensor

SWIZZLED = "cutlass_swizzled"
REORDERED = "cutlass_int4"
LAYOUT_OF_KIND = {BLOCKS: SWIZZLED, INT4: REORDERED}


# --- scales of blocks ----------------------------------------------------------------------------


def _swizzled(weight: ExpertTensor) -> Tensors:
    return {"scale": swizzle(weight.scale)}


def _natural(weight: ExpertTensor) -> Tensors:
    rows, columns = weight.shape[-2:]
    return {"scale": unswizzle(weight.scale, rows, columns // BLOCK_SCALED[weight.scheme].group)}


# --- int4 ----------------------------------------------------------------------------------------

# Atoms of 16 rows x 32 columns, those of a column of atoms after one another. Four neighbouring
# columns stay together (16 bits); those of row n and columns 4 c.. are place
# n % 8 * 16 + c // 2 % 2 * 8 + c % 2 * 4 + c // 4 * 2 + n // 8 of the 128 in an atom.
_ATOM = (2, 8), (2, 2, 2)  # rows: n // 8, n % 8; fours of columns: c // 4, c // 2 % 2, c % 2
# (E, atoms of rows, 2, 8, atoms of columns, 2, 2, 2) to memory, and back
_TO_MEMORY = (0, 4, 1, 3, 6, 7, 5, 2)
_BACK = tuple(_TO_MEMORY.index(d) for d in range(len(_TO_MEMORY)))


def _codes(q: Tensor, table: list[int]) -> Tensor:
    """Bytes of two codes with each replaced by what the table of 16 has for it."""
    both = [low | high << 4 for high in table for low in table]
    of_bytes, out = torch.tensor(both, dtype=torch.uint8, device=q.device), torch.empty_like(q)
    for i, expert in enumerate(q):  # one at a time: indices have four times the bytes
        out[i] = of_bytes[expert.int()]
    return out


# The kernels look e4m3(code * scale) up in a table of e4m3(-8 s) .. e4m3(-s): negative numbers by
# their last three bits, positive ones with the other sign by 8 - number.
_NUMBERS = [code - 8 for code in range(16)]
_ENCODED = [8 - number if number > 0 else number & 15 for number in _NUMBERS]
_DECODED = [_ENCODED.index(nibble) for nibble in range(16)]


def _atoms(experts: int, N: int, half: int) -> list[int]:
    """The sizes of weights (E, N, bytes of a row) by atoms, in units of four weights."""
    return [experts, N // 16, *_ATOM[0], half // 16, *_ATOM[1]]


def _reordered(weight: ExpertTensor) -> Tensors:
    *batch, N, half = weight.qdata.shape
    if N % 16:
        raise ValueError(
            f"weight must have a multiple of 16 rows to be prepared for 'cutlass', got {N}; use "
            "backend='triton'"
        )
    fours = weight.qdata.contiguous().view(torch.int16).view(_atoms(math.prod(batch), N, half))
    q = fours.permute(_TO_MEMORY).reshape(math.prod(batch), N, half // 2).view(torch.uint8)
    steps = torch.arange(-8, 0, dtype=torch.float32, device=q.device)
    # (.., K / 128, N)
    scale = e4m3_to_float32(weight.scale).transpose(-2, -1).contiguous()
    table = (scale.unsqueeze(-1) * steps).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return {"qdata": _codes(q, _ENCODED).view(weight.qdata.shape), "scale": table}


def _unordered(weight: ExpertTensor) -> Tensors:
    *batch, N, half = weight.qdata.shape
    sizes = _atoms(math.prod(batch), N, half)
    fours = weight.qdata.contiguous().view(torch.int16).view([sizes[d] for d in _TO_MEMORY])
    q = fours.permute(_BACK).reshape(sizes[0], N, half // 2).view(torch.uint8)
    bits = weight.scale.view(torch.uint8)[..., 7].transpose(-2, -1).contiguous()
    qdata = _codes(q, _DECODED).view(weight.qdata.shape)
    return {"qdata": qdata, "scale": (bits ^ 128).view(torch.float8_e4m3fn)}


RELAYOUTS = (
    Relayout(SWIZZLED, lambda scheme: scheme.name in BLOCK_SCALED, _swizzled, _natural),
    Relayout(REORDERED, lambda scheme: scheme.name == INT4_SCHEME, _reordered, _unordered),
)
