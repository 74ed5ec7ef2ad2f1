"""Layouts of weights that FlashInfer's CUTLASS layer reads: up rows before gate rows, and its
orders of 4-bit data.

Registered for ``moe_ops.prepare(weight, "flashinfer")``; plain torch on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_ops.activations import UP_GATE, UP_GATE_OF_PAIRS
from moe_ops.meta.workspace import round_up
from moe_ops.numerics.swizzle import swizzle, unswizzle
from moe_ops.ops.relayout import Relayout, Tensors
from moe_ops.schemes import QuantScheme

if TYPE_CHECKING:
    from moe_ops.tensors.base import ExpertTensor

MIXED = "flashinfer_mixed"  # 4-bit weights and 16-bit activations, on SM90
# contiguous scales of 128 rows and 4 columns, as SM100's tensor cores read them
SWIZZLED = "flashinfer_swizzled"

NATURAL = ("", "fp8_tensor_static", "fp8_block")  # schemes whose elements do not move


def up_first(t: Tensor, pairs: bool) -> Tensor:
    """t (..., 2I, K) with up rows before gate rows. In t they alternate (``pairs``), or gate rows
    are first.
    """
    gate, up = (t[..., ::2, :], t[..., 1::2, :]) if pairs else t.chunk(2, -2)
    return _cat(up, gate)


def gate_first(t: Tensor, pairs: bool) -> Tensor:
    """The inverse of `up_first`."""
    up, gate = t.chunk(2, -2)
    if not pairs:
        return _cat(gate, up)
    data = torch.stack((_raw(gate), _raw(up)), -2).flatten(-3, -2)
    return data.view(t.dtype)


def _raw(t: Tensor) -> Tensor:
    """Elements of one byte as uint8: not every version of torch can concatenate e4m3."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _cat(*parts: Tensor) -> Tensor:
    return torch.cat([_raw(t) for t in parts], -2).view(parts[0].dtype)


def reorder_rows(w: ExpertTensor, order: str, undo: bool = False) -> Tensors:
    """The tensors of ``w`` that have rows, with rows in the order of that name, or (``undo``) back
    in the natural order.
    """
    if not order:
        return {}
    pairs = order == UP_GATE_OF_PAIRS
    if w.qdata.shape[-2] % 2:
        raise ValueError(
            "weight must have as many gate rows as up rows before a gated activation, got "
            f"{w.qdata.shape[-2]} rows; leave activation out for w2"
        )
    if w.scheme == "fp8_block" and (pairs or w.qdata.shape[-2] % 256):
        raise ValueError(
            "weight must have scales of 128 rows that are all gate or all up rows to be laid out "
            f"for flashinfer, got {w.qdata.shape[-2]} "
            f"rows{' of which every other one is a gate row' if pairs else ''}; "
            "use backend 'triton'"
        )
    move = gate_first if undo else up_first
    names = [name for name in ("qdata", "scale") if getattr(w, name) is not None]
    return {name: move(getattr(w, name), pairs) for name in names if getattr(w, name).dim() > 1}


def _of_each_expert(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``function``, which takes (E, N, K), for one expert's (N, K) too."""

    @wraps(function)
    def of(t: Tensor) -> Tensor:
        return function(t) if t.dim() == 3 else function(t.unsqueeze(0)).squeeze(0)

    return of


@_of_each_expert
def interleave_e2m1(q: Tensor) -> Tensor:
    """Bytes (E, N, K/2) of e2m1 pairs in the order of the SM90 kernels for 16-bit activations.

    In each tile of 16 rows and 64 columns, rows r and r + 8 swap nibbles, so that a byte holds
    both rows' elements of one column, and bytes move so that a thread loads all of its bytes at
    once. Formula: interleave_fp4_weights_for_sm90_mixed_gemm of FlashInfer 0.6.13. N is a multiple
    of 16, K of 64.
    """
    E, N, B = q.shape
    upper, lower = q.view(E, N // 16, 2, 8, B // 32, 32).unbind(2)
    pairs = torch.stack(((upper & 15) | (lower << 4), (lower & 240) | (upper >> 4)), -1)
    # byte `lane` of the 32 is (half of the columns, quarter: row or row + 8, two, four)
    pairs = pairs.unflatten(-2, (2, 2, 2, 4))  # (E, tile, 8, parts, half, quarter, two, four, 2)
    pairs = pairs.permute(0, 1, 5, 2, 3, 4, 7, 6, 8)
    return pairs.reshape(E, N, B)


@_of_each_expert
def separate_e2m1(q: Tensor) -> Tensor:
    """The inverse of `interleave_e2m1`."""
    E, N, B = q.shape
    pairs = q.view(E, N // 16, 2, 8, B // 32, 2, 4, 2, 2)
    pairs = pairs.permute(0, 1, 3, 4, 5, 2, 7, 6, 8).flatten(4, 7)  # (E, tile, 8, parts, 32, 2)
    a, b = pairs.unbind(-1)
    upper, lower = (a & 15) | (b << 4), (a >> 4) | (b & 240)
    return torch.stack((upper, lower), 2).reshape(E, N, B)


@_of_each_expert
def interleave_scales(scale: Tensor) -> Tensor:
    """e8m0 scales (E, N, K/32) as (E, K/128, 4N): four scales of 128 columns for each row."""
    E, N, G = scale.shape
    return scale.view(E, N, G // 4, 4).transpose(1, 2).reshape(E, G // 4, 4 * N)


@_of_each_expert
def separate_scales(scale: Tensor) -> Tensor:
    """The inverse of `interleave_scales`."""
    E, parts, rows = scale.shape
    return scale.view(E, parts, rows // 4, 4).transpose(1, 2).reshape(E, rows // 4, 4 * parts)


def _pad(t: Tensor, rows: int, columns: int) -> Tensor:
    """t (.., N, K) followed by zeros to (.., rows, columns)."""
    more = (0, columns - t.shape[-1], 0, rows - t.shape[-2])
    return torch.nn.functional.pad(_raw(t), more).view(t.dtype) if any(more) else t


def _whole(t: Tensor, columns: int, halves: int) -> Tensor:
    """t (.., N, K) with as many columns, and with rows padded to a multiple of 128 in each of
    `halves` parts.
    """
    rows = round_up(t.shape[-2] // halves, 128)
    return _cat(*[_pad(part, rows, columns) for part in t.chunk(halves, -2)])


def _part(t: Tensor, rows: int, columns: int, halves: int) -> Tensor:
    """The inverse of `_whole` for t (.., rows, columns)."""
    return _cat(*[part[..., : rows // halves, :columns] for part in t.chunk(halves, -2)])


def _padded(w: ExpertTensor, order: str) -> Tensors:
    """Elements and scales in an order of rows, padded with zeros so that 128 divides I and K: zero
    rows of w13 give zeros, which zero columns of w2 multiply.
    """
    t, halves = {"qdata": w.qdata, "scale": w.scale} | reorder_rows(w, order), 2 if order else 1
    K = w.shape[-1]
    return {
        name: _whole(t[name], t[name].shape[-1] * round_up(K, 128) // K, halves).contiguous()
        for name in ("qdata", "scale")
    }


def _unpadded(w: ExpertTensor, order: str, qdata: Tensor, scale: Tensor) -> Tensors:
    """The natural elements and scales of a weight, from those that `_padded` made."""
    (N, K), halves = w.shape[-2:], 2 if order else 1
    parts = {
        name: _part(t, N, t.shape[-1] * K // round_up(K, 128), halves)
        for name, t in (("qdata", qdata), ("scale", scale))
    }
    return parts | reorder_rows(w._replace(**parts), order, undo=True)


def _swizzled(w: ExpertTensor, order: str) -> Tensors:
    if w.scheme == "nvfp4" and w.activation_scale is None:
        raise ValueError(
            "weight must have an activation_scale to be laid out for flashinfer, whose kernels "
            "quantize activations by scales known beforehand; give one to moe_ops.quantize or "
            "moe_ops.from_quantized"
        )
    if w.global_scale is not None and w.global_scale.dim() == w.dim():
        raise ValueError(
            "weight must have one global scale for each expert to be laid out for flashinfer, got "
            "one for each row; leave it as it is, for another backend"
        )
    t = _padded(w, order)
    return {"qdata": t["qdata"], "scale": swizzle(t["scale"])}


def _unswizzled(w: ExpertTensor, order: str) -> Tensors:
    return _unpadded(w, order, w.qdata, unswizzle(w.scale, *w.scale.shape[-2:]))


def _mixed(w: ExpertTensor, order: str) -> Tensors:
    t = _padded(w, order)
    return {"qdata": interleave_e2m1(t["qdata"]), "scale": interleave_scales(t["scale"])}


def _unmixed(w: ExpertTensor, order: str) -> Tensors:
    return _unpadded(w, order, separate_e2m1(w.qdata), separate_scales(w.scale))


def _takes(*schemes: str) -> Callable[[QuantScheme], bool]:
    return lambda scheme: scheme.name.split(":")[0] in schemes


def _undo_rows(w: ExpertTensor, order: str) -> Tensors:
    return reorder_rows(w, order, undo=True)


def _relayouts() -> Iterator[Relayout]:
    kinds = (
        ("", _takes(*NATURAL), reorder_rows, _undo_rows),
        (MIXED, _takes("mxfp4_w4a16"), _mixed, _unmixed),
        (SWIZZLED, _takes("nvfp4", "mxfp4_mxfp8"), _swizzled, _unswizzled),
    )
    for layout, takes, apply, undo in kinds:
        for order in ("", UP_GATE, UP_GATE_OF_PAIRS):
            name = f"{layout}:{order}" if order else layout
            if name:
                do, back = partial(apply, order=order), partial(undo, order=order)
                yield Relayout(name, takes, do, back, order)


RELAYOUTS = tuple(_relayouts())
