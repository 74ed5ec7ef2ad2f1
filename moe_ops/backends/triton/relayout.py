"""The layout of e2m1 weights that the triton backend decodes fastest on SM90.

Registered for ``moe_ops.prepare(weight, "triton")``; plain torch on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ops.kernels.mixed_gemm import configs
from moe_ops.meta.scales import TRITON_E2M1, rows_side_by_side
from moe_ops.ops.relayout import Relayout, Tensors
from moe_ops.schemes import get_scheme

if TYPE_CHECKING:
    from moe_ops.tensors.base import ExpertTensor

# Places of an element's bits, the lowest first, in each half of a word, for each of its four
# columns. For three columns, a shift moves sign and magnitude to their places in bf16. Bits of the
# fourth are in the other half too, and a rotation by 6 brings them together
# (decode_e2m1_words in kernels/mixed_gemm/sm90_decode.py).
_BITS = ((6, 7, 8, 15), (0, 1, 2, 9), (3, 4, 5, 12), (-3, -2, -6, -5))


def _moves() -> dict[int, int]:
    """Distance in bits to the left -> mask of the bits of a word that move by it."""
    masks: dict[int, int] = {}
    for column in range(8):
        for bit, place in enumerate(_BITS[column % 4]):
            source = 4 * column + bit
            shift = (place + 16 * (column // 4)) % 32 - source
            masks[shift] = masks.get(shift, 0) | 1 << source
    return masks


_MOVES = _moves()


def _moved(q: Tensor, moves: dict[int, int]) -> Tensor:
    """Bytes (.., bytes of a row), with the bits of each word of 4 bytes moved."""
    if q.storage_offset() % 4 or not q.is_contiguous():
        q = q.clone(memory_format=torch.contiguous_format)
    words = q.view(torch.int32)
    out = torch.zeros_like(words)
    for shift, mask in moves.items():
        moved = words << shift if shift >= 0 else words >> -shift
        to = (mask << shift if shift >= 0 else mask >> -shift) & 0xFFFFFFFF
        out |= moved & (to - (to >> 31 << 32))  # masks the sign, which `>>` repeats
    return out.view(torch.uint8)


def to_words(q: Tensor) -> Tensor:
    """Bytes (E, N, K/2) of e2m1 pairs, the even column in the low half, with the bits of each word
    of 4 bytes moved to the places in ``_BITS``.
    """
    return _of_each(q, _MOVES)


def from_words(q: Tensor) -> Tensor:
    """The inverse of `to_words`."""
    inverse = {-s: (m << s if s >= 0 else m >> -s) & 0xFFFFFFFF for s, m in _MOVES.items()}
    return _of_each(q, inverse)


def _of_each(q: Tensor, moves: dict[int, int]) -> Tensor:
    if q.dim() == 2:
        return _moved(q, moves)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for e in range(q.shape[0]):  # one expert at a time, because each step makes copies
        out[e] = _moved(q[e], moves)
    return out


def scales_of_rows(s: Tensor, group: int) -> Tensor:
    """Scales (E, N, K / group) as (E, N / R, 16 K / 64), R = group / 4: 16 bytes hold those of 64
    columns of R rows, by row.
    """
    rows, columns = rows_side_by_side(group), 64 // group
    return s.unflatten(-2, (-1, rows)).unflatten(-1, (-1, columns)).transpose(-3, -2).flatten(-3)


def rows_of_scales(s: Tensor, group: int) -> Tensor:
    """The inverse of `scales_of_rows`."""
    rows, columns = rows_side_by_side(group), 64 // group
    return s.unflatten(-1, (-1, rows, columns)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _apply(w: ExpertTensor) -> Tensors:
    if w.dtype != torch.bfloat16:
        raise ValueError(
            "weight must be beside bfloat16 activations to be laid out for triton, got dtype "
            f"{w.dtype}; leave w13 and w2 as they are, which backend 'triton' takes too"
        )
    rows, columns = w.shape[-2:]
    if columns % 64 or columns < 128 or rows % 16:
        raise ValueError(
            "weight must have columns that 64 divides, at least 128, and rows that 16 divides, to "
            f"be laid out for triton, got {rows} rows of {columns}; leave w13 and w2 as they are, "
            "which backend 'triton' takes too"
        )
    return lay_out(w)


def lay_out(w: ExpertTensor) -> Tensors:
    """The tensors of a weight in its natural layout that this layout changes."""
    return {"qdata": to_words(w.qdata), "scale": scales_of_rows(w.scale, _group(w))}


def _undo(w: ExpertTensor) -> Tensors:
    return {"qdata": from_words(w.qdata), "scale": rows_of_scales(w.scale, _group(w))}


def _group(w: ExpertTensor) -> int:
    return get_scheme(w.scheme).quantized_weight.group.cols


def _on(device: torch.device) -> bool:
    """Whether a device runs the kernels that read this layout: SM90, with a Triton that compiles
    them.
    """
    if device.type != "cuda":
        return False
    return configs.on_sm90(torch.cuda.current_device() if device.index is None else device.index)


RELAYOUTS = (Relayout(TRITON_E2M1, lambda scheme: scheme.e2m1_weight_only, _apply, _undo, on=_on),)
