"""DeepGEMM's GEMMs in the steps of a layer, of both backends. Imported at first launch only.

Pairs are sorted by expert, with every expert's rows padded to 128. Our kernels neither write nor
read padding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.backends.deep_gemm import library as dg
from moe_ops.kernels.launch import Launch
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.rows.operand import Operand
from moe_ops.meta.workspace import carve, cdiv, padded_rows, round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.chunks import batched_chunks, chunks
from moe_ops.pipeline.layer import AnyArgs, BatchSteps, PairSteps, activation_of, run_steps

BF16 = torch.bfloat16


class ScaleFormat(NamedTuple):
    """Scales of quantized operands: kernels/rows/operand.py."""

    scales: str
    width: int  # of rows: columns that share a scale
    weight_width: int


def format_of(scheme: str, layout: str) -> ScaleFormat:
    """The ScaleFormat of weights of a scheme, in their natural layout or in DEEP_GEMM_UE8M0."""
    if not scheme:
        return ScaleFormat("", 128, 128)
    if not layout:
        return ScaleFormat("powers" if scheme == "fp8_block:ue8m0" else "fp32", 128, 128)
    width = 128 if scheme.startswith("fp8_block") else 32
    return ScaleFormat("ue8m0", 32 if scheme == "mxfp8" else 128, width)


def rows_in(buffer: Tensor, shape: tuple[int, ...], form: ScaleFormat) -> Operand:
    """Rows (.., rows, columns) in a workspace, with scales if the format has any."""
    if not form.scales:
        return Operand(carve(buffer, shape, BF16))
    *batch, rows, columns = shape
    size, groups, dtype = math.prod(shape), columns // form.width, torch.float32
    if form.scales == "ue8m0":
        groups, dtype = cdiv(groups, 4), torch.int32
    words = size // columns * groups
    everything = carve(buffer, (size + 4 * words,), torch.uint8)
    data = everything[:size].view(torch.float8_e4m3fn).view(shape)
    scale = everything[size:].view(dtype).view(*batch, groups, rows).transpose(-2, -1)
    return Operand(data, scale, form.scales, form.width)


def _weight(name: str, data: Tensor, scale: Tensor | None, form: ScaleFormat) -> Operand:
    """A weight for the GEMMs. Raises ValueError for what they need and plans cannot check."""
    dtypes = {"": (BF16,), "ue8m0": (torch.float8_e4m3fn, torch.uint8)}
    expected = dtypes.get(form.scales, (torch.float8_e4m3fn,))
    if data.dtype not in expected:
        raise ValueError(f"{name} must have dtype {expected[0]}, got {data.dtype}")
    for what, tensor in ((name, data), (f"the scale of {name}", scale)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{what} must be contiguous for deep_gemm; make it so once")
    data = dg.dense(data)
    if scale is None:
        return Operand(data)
    scale = dg.dense(scale)
    if form.scales == "ue8m0":
        data = data.view(torch.int8) if data.dtype == torch.uint8 else data  # pairs of e2m1
        scale = scale.transpose(-2, -1)
    return Operand(data, scale, form.scales, form.weight_width)


def _weights(a: AnyArgs, form: ScaleFormat) -> tuple[Operand, Operand]:
    return (
        _weight("w13", a.w13, a.w13_scale, form),
        _weight("w2", a.w2, a.w2_scale, form),
    )


class DeepGemmProducts:
    """DeepGEMM's two products, and the rows between which they stand."""

    def __init__(
        self,
        masked: bool,  # rows are batches
        expected: int,  # rows of an expert
        x: Operand,
        gate_up: Tensor,
        h: Operand,
        y: Tensor,
        w13: Operand,
        w2: Operand,
    ):
        self.x, self.h, self.y, self.w13, self.w2 = x, h, y, w13, w2
        self.gate_up, self.expected = gate_up, expected
        self.product = dg.masked_gemm if masked else dg.grouped_gemm

    def prepare(self, layout: Layout) -> list[Launch]:
        return []

    def first(self, layout: Layout) -> None:
        self.product(self.gate_up, self.x, self.w13, layout.groups, self.expected)

    def second(self, layout: Layout) -> None:
        self.product(self.y, self.h, self.w2, layout.groups, self.expected)


def intermediate_size(a: AnyArgs) -> int:
    """I: the columns of w2, also if two share a byte."""
    return a.w13.shape[1] // (2 if activation_of(a).GATED else 1)


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::deep_gemm_experts` or `moe_ops::deep_gemm_fp4_experts`."""
    M, top_k = a.topk_ids.shape
    if M == 0:
        return
    device = a.hidden_states.get_device()
    form = format_of(a.scheme, a.layout)
    w13, w2 = _weights(a, form)
    dg.check_warm((), device)  # before the library is loaded
    alignment = dg.alignment()
    expected = dg.expected_rows(M * top_k, a.global_experts)
    gemms = dg.gemm_keys("contiguous", w13, w2, expected, alignment)
    dg.check_warm(gemms, device)
    run_steps([_pairs(part, w13, w2, form, alignment, expected) for part in chunks(a)])
    dg.mark_warm(gemms)


def _pairs(
    a: ExpertsArgs, w13: Operand, w2: Operand, form: ScaleFormat, alignment: int, expected: int
) -> PairSteps:
    """A layer, or a chunk of its tokens, with the kernels for `expected` rows per expert."""
    (M, top_k), K = a.topk_ids.shape, a.out.shape[1]
    (E, N), I = a.w13.shape[:2], intermediate_size(a)
    size = padded_rows(M, top_k, E, alignment)
    products = DeepGemmProducts(
        masked=False,
        expected=expected,
        x=rows_in(a.workspace13, (size, K), form),
        gate_up=carve(a.workspace2, (size, N), BF16),
        h=rows_in(a.workspace13, (size, I), form),
        y=carve(a.workspace2, (size, K), BF16),
        w13=w13,
        w2=w2,
    )
    quantized_here = form.scales and a.hidden_states_scale is None
    return PairSteps(a, products, alignment, size, weighs_after=not quantized_here)


def _readable(scale: Tensor | None, rows: int, form: ScaleFormat) -> bool:
    """Whether the GEMM reads batched rows in place: without scales, or with fp32 scales
    (E, rows, groups) of which those of neighbouring rows are contiguous.
    """
    if scale is None or form.scales != "fp32":
        return not form.scales
    return scale.stride() == (rows * scale.shape[2], 1, rows)


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::deep_gemm_batched_experts` or `moe_ops::deep_gemm_fp4_batched_experts`."""
    x, out, device = a.hidden_states, a.out, a.hidden_states.get_device()
    (E, T, K), N, I = x.shape, a.w13.shape[1], intermediate_size(a)
    if T == 0:
        return
    parts = batched_chunks(a)
    if len(parts) > 1:
        for part in parts:
            batched_experts(part)
        return
    form = format_of(a.scheme, a.layout)
    w13, w2 = _weights(a, form)
    # A GEMM stores whole blocks of rows: the rows after an expert's last row must be its own.
    R = round_up(T, dg.ALIGNMENT)
    gemms = dg.gemm_keys("masked", w13, w2, T, 0)
    dg.check_warm(gemms, device)
    scale, y_in_place = a.hidden_states_scale, R == T and out.is_contiguous()
    x_in_place = R == T and x.is_contiguous() and _readable(scale, T, form)
    if x_in_place:
        rows = Operand(dg.dense(x), scale, form.scales, form.width)
    else:
        rows = rows_in(a.workspace2, (E, R, K), form)
    products = DeepGemmProducts(
        masked=True,
        expected=T,
        x=rows,
        gate_up=carve(a.workspace13, (E, R, N), BF16),
        h=rows_in(a.workspace2, (E, R, I), form),
        y=dg.dense(out) if y_in_place else carve(a.workspace13, (E, R, K), BF16),
        w13=w13,
        w2=w2,
    )
    run_steps([BatchSteps(a, products, R, x_in_place, y_in_place)])
    dg.mark_warm(gemms)
