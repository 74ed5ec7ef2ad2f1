"""Where rows of x and h, and their scales, are in the workspaces of a layer, and what products
read of them. torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends.cutlass.schemes import BLOCK_SCALED, grouped_bytes
from moe_ops.kernels.rows.operand import Blocks, Operand
from moe_ops.kernels.rows.rounding import rounding_of
from moe_ops.meta.workspace import carve, cdiv, round_up


def groups_in(buffer: Tensor, num_rows: int, columns: int, powers: bool) -> Operand:
    """e4m3 rows at the start of a workspace, followed by their scales per group."""
    everything = carve(buffer, (grouped_bytes(num_rows, columns),), torch.uint8)
    data = everything[: num_rows * columns].view(torch.float8_e4m3fn).view(num_rows, columns)
    scale = everything[round_up(num_rows * columns, 128) :].view(torch.float32)
    scale = scale.view(cdiv(columns, 128), num_rows)
    return Operand(data, scale, "powers" if powers else "fp32")


def rows_in(
    buffer: Tensor,
    num_rows: int,
    columns: int,
    known: Tensor | None,
    largest: Tensor | None,
    arrived: Tensor | None = None,
) -> Operand:
    """e4m3 rows at the start of a workspace, followed by the scales that are written with them:
    known ones, one that follows from largest magnitudes, those of rows that arrived quantized, or
    those of each row.
    """
    size = round_up(num_rows * columns, 128)
    everything = carve(buffer, (size + 4 * num_rows,), torch.uint8)
    data = everything[: num_rows * columns].view(torch.float8_e4m3fn).view(num_rows, columns)
    scale = everything[size:].view(torch.float32)
    if arrived is not None:
        if arrived.numel() == 1 and arrived.ndim < 2:
            return Operand(data, None, "given", known="one", known_scale=arrived.reshape(-1))
        return Operand(data, scale, "given")
    if largest is not None:
        return Operand(data, scale[:1], "row", known="largest", known_scale=largest)
    if known is None:
        return Operand(data, scale, "row")
    return Operand(data, None, "row", known=_of(known), known_scale=known)


def tiles_in(
    buffer: Tensor,
    num_rows: int,
    of_scales: int,  # rows of scales
    columns: int,
    scheme: str,
    known: Tensor | None,
    largest: Tensor | None,
    w_global: Tensor | None,  # (E,), or (E, N, 1), of which alpha has nothing
    alpha: Tensor,
) -> Operand:
    """Rows at the start of a workspace, followed by their scales in swizzled tiles."""
    format, rounding, whole = BLOCK_SCALED[scheme], rounding_of(scheme), ""
    assert rounding is not None
    row_bytes, size = format.row_bytes(columns), format.operand_bytes(num_rows, of_scales, columns)
    everything = carve(buffer, (size,), torch.uint8)
    if w_global is None:
        known = None
    elif known is not None:
        whole = _of(known)
    else:
        known, whole = largest, "largest"
    blocks = Blocks(
        columns=columns,
        scale_columns=format.scale_columns(columns),
        rounding=rounding,
        alpha=None if w_global is None else alpha,
        w_global=None if w_global is None or w_global.dim() > 1 else w_global,
    )
    return Operand(
        data=everything[: num_rows * row_bytes].view(num_rows, row_bytes),
        scale=everything[round_up(num_rows * row_bytes, 128) :],
        scales=rounding.SCALE,
        width=format.group,
        known=whole,
        known_scale=known,
        blocks=blocks,
    )


def _of(known: Tensor) -> str:
    return "one" if known.numel() == 1 else "experts"


def scales_of_gemm(x: Operand) -> tuple[Tensor | None, int]:
    """The scales of rows that a product reads, and the elements between those of two experts: -1
    where each row has its own, and 0 also where their places follow from the layout.
    """
    if x.known in ("one", "experts") and x.blocks is None:
        assert x.known_scale is not None
        return x.known_scale, min(x.known_scale.numel() - 1, 1)
    return x.scale, 0 if x.known == "largest" or x.blocks is not None else -1
