"""Activations of schemes that GPUs without the hardware emulate: how they are rounded, where they live in the
workspaces, and the launches of kernels/triton_emulated.py."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.triton_launch import Gpu, Launch
from moe_ops.kernels.triton_scales import PARTS, Input, Validity, amax, flat, split
from moe_ops.meta.workspace import cdiv
from moe_ops.schemes import get_scheme

_CHUNK = 1024  # columns that a program rounds at a time
_GAP = 32  # fp32 elements that align what comes second in a workspace


class Rounding(NamedTuple):
    """A scheme's quantized activations in the words of kernels/triton_emulated.py."""

    scale: str
    group: int  # columns that share a scale; of whole rows any
    rule: str
    mantissa: int
    least: int
    largest: float

    @property
    def dtype(self) -> torch.dtype:
        """What holds the rounded activations."""
        return torch.float32 if self.scale == "group" else torch.bfloat16

    def scales(self, rows):
        """fp32 elements behind the rounded activations: scales of rows; parts of the largest magnitude and one scale."""
        return rows if self.scale == "row" else PARTS + 1 if self.scale == "nv" else 0


def describe(scheme: str) -> Rounding | None:
    """The Rounding of a scheme's activations; None where they stay as they are."""
    desc = get_scheme(scheme).activation
    if desc is None:
        return None
    fmt, group = desc.format, desc.group.cols
    how = "mx" if desc.is_mx else "nv" if desc.global_scale else "row" if group == -1 else "group"
    least = 1 - fmt.bias
    return Rounding(how, max(group, 16), desc.scale_rule, fmt.mantissa, least, fmt.max)


rounding_of = cache(describe)  # for launches; in traced code Dynamo warns of a cached function


def x_elements(rows, K: int, r: Rounding):
    """fp32 elements that rounded x (rows, K) and its scales need. int or SymInt."""
    return cdiv(rows * K * r.dtype.itemsize, 4) + _GAP + r.scales(rows)


def h_elements(rows, I: int, r: Rounding):  # noqa: E741
    """fp32 elements that h (rows, I), its largest magnitude, rounded h and its scales need. int or SymInt."""
    return rows * I + _GAP + x_elements(rows, I, r)


class Hidden(NamedTuple):
    """What becomes of h between the products."""

    written: Tensor  # h in fp32, by GEMM1
    amax: Tensor | None  # raised by GEMM1 to its largest magnitude; zero before
    launches: list[Launch]  # before GEMM2
    read: Input  # by GEMM2


def round_x(
    r: Rounding,
    x: Input,
    rows: int,
    rows_of_expert: int,  # of batched x, else all
    K: int,
    workspace: Tensor,
    static: Tensor | None,
    validity: Validity,
    zero: Tensor | None,  # of h: its largest magnitude, which GEMM1 raises
    chip: Gpu,
) -> tuple[list[Launch], Input]:
    """Launches that come before GEMM1, and what it reads as x: scaled by input weights, if there are any."""
    data, behind = split(workspace, rows, K, r.dtype, r.scales(rows))
    launches = []
    if r.scale == "nv" and static is None:
        launches.append(amax(x, rows, rows_of_expert, K, behind, validity, None, chip))
    weights = validity.input_weights
    launch, rounded = _round(
        r, x, rows, rows_of_expert, K, data, behind, static, PARTS, zero, weights, chip
    )
    return [*launches, launch], rounded


def round_h(
    r: Rounding,
    rows: int,
    I: int,  # noqa: E741
    workspace: Tensor,
    static: Tensor | None,
    chip: Gpu,
) -> Hidden:
    h = flat(workspace, torch.float32, h_elements(rows, I, r))
    behind = h[rows * I :]
    largest = behind[:1] if r.scale == "nv" and static is None else None
    data, scale = split(behind[_GAP:], rows, I, r.dtype, r.scales(rows))
    source = Input(h, (0, I, 1), largest)
    launch, read = _round(r, source, rows, rows, I, data, scale, static, 1, None, None, chip)
    return Hidden(h, largest, [launch], read)


def _round(
    r: Rounding,
    source: Input,  # its scale, if any: the largest magnitude
    rows: int,
    rows_of_expert: int,
    columns: int,
    data: Tensor,
    behind: Tensor,
    static: Tensor | None,
    parts: int,
    zero: Tensor | None,
    weights: Tensor | None,
    chip: Gpu,
) -> tuple[Launch, Input]:
    scale = largest = None
    if r.scale == "row":
        scale = behind
    elif r.scale == "nv":
        scale = behind[PARTS:]
        largest = (
            static if static is not None else behind if source.scale is None else source.scale
        )
    args: tuple = (data, scale, zero, source.data, largest, weights, rows_of_expert)
    args += (0 if weights is None else weights.stride(0), columns, *source.strides)
    args += (*r, static is not None, parts, _CHUNK, chip.dependent)
    parts_of_row = 1 if r.scale == "row" else cdiv(columns, _CHUNK)
    rounded = Input(data, (0, columns, 1), scale, stride_row=int(r.scale == "row"))
    return Launch("fake_quantize", (rows, parts_of_row, 1), args), rounded
