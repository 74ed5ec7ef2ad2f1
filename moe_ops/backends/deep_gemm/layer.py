"""The expert layer around DeepGEMM's GEMMs, of both backends. Imported at first launch only.

Pairs are sorted by expert, with every expert's rows padded to 128. Then tokens are quantized and
copied to their rows; GEMM with w13; activation and quantization; GEMM with w2; weighted sum. The
host reads no device memory: sizes follow from M, top_k and E, and our kernels neither write nor
read padding.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.backends.deep_gemm import library as dg
from moe_ops.kernels import launch
from moe_ops.kernels.activation import Activated, activated
from moe_ops.kernels.comm.push import sum_ranks
from moe_ops.kernels.launch import Gpu, run
from moe_ops.kernels.place.place import place, place_batches
from moe_ops.kernels.rows.activate import activate
from moe_ops.kernels.rows.combine import combine_rows
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.push_scatter import push_own_rows, why_not
from moe_ops.kernels.rows.scatter import scatter
from moe_ops.meta.workspace import carve, cdiv, padded_rows, round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.chunks import batched_chunks, chunks
from moe_ops.ops.exchange import gathered


class Format(NamedTuple):
    """Scales of quantized operands: kernels/rows/operand.py."""

    scales: str
    width: int  # of rows: columns that share a scale
    weight_width: int


def format_of(scheme: str, layout: str) -> Format:
    """The Format of weights of a scheme, in their natural layout or in DEEP_GEMM_UE8M0."""
    if not scheme:
        return Format("", 128, 128)
    if not layout:
        return Format("powers" if scheme == "fp8_block:ue8m0" else "fp32", 128, 128)
    width = 128 if scheme.startswith("fp8_block") else 32
    return Format("ue8m0", 32 if scheme == "mxfp8" else 128, width)


def rows_in(buffer: Tensor, shape: tuple[int, ...], form: Format) -> Operand:
    """Rows (.., rows, columns) in a workspace, with scales if the format has any."""
    if not form.scales:
        return Operand(carve(buffer, shape, torch.bfloat16))
    *batch, rows, columns = shape
    size, groups, dtype = math.prod(shape), columns // form.width, torch.float32
    if form.scales == "ue8m0":
        groups, dtype = cdiv(groups, 4), torch.int32
    words = size // columns * groups
    everything = carve(buffer, (size + 4 * words,), torch.uint8)
    data = everything[:size].view(torch.float8_e4m3fn).view(shape)
    scale = everything[size:].view(dtype).view(*batch, groups, rows).transpose(-2, -1)
    return Operand(data, scale, form.scales, form.width)


def _weight(name: str, data: Tensor, scale: Tensor | None, form: Format) -> Operand:
    """A weight for the GEMMs. Raises ValueError for what they need and plans cannot check."""
    dtypes = {"": (torch.bfloat16,), "ue8m0": (torch.float8_e4m3fn, torch.uint8)}
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


def _weights(a: ExpertsArgs | BatchedExpertsArgs, form: Format) -> tuple[Operand, Operand]:
    return (
        _weight("w13", a.w13, a.w13_scale, form),
        _weight("w2", a.w2, a.w2_scale, form),
    )


def intermediate_size(a: ExpertsArgs | BatchedExpertsArgs) -> int:
    """I: the columns of w2, also if two share a byte."""
    return a.w13.shape[1] // (2 if _activation(a).GATED else 1)


def _activation(a: ExpertsArgs | BatchedExpertsArgs) -> Activated:
    return activated(a.activation, a.alpha, a.beta, a.limit)


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::deep_gemm_experts` or `moe_ops::deep_gemm_fp4_experts`."""
    M, top_k = a.topk_ids.shape
    if M == 0:
        return
    device = a.hidden_states.get_device()
    gpu, form = launch.gpu(device), format_of(a.scheme, a.layout)
    w13, w2 = _weights(a, form)
    dg.check_warm((), device)  # before the library is loaded
    alignment = dg.alignment()
    expected = dg.expected_rows(M * top_k, a.global_experts)
    gemms = dg.gemm_keys("contiguous", w13, w2, expected, alignment)
    dg.check_warm(gemms, device)
    for part in chunks(a):
        _experts(part, w13, w2, form, alignment, expected, gpu)
    dg.mark_warm(gemms)


def _experts(
    a: ExpertsArgs,
    w13: Operand,
    w2: Operand,
    form: Format,
    alignment: int,
    expected: int,
    gpu: Gpu,
) -> None:
    """A layer, or a chunk of its tokens, with the kernels for `expected` rows an expert."""
    (M, top_k), K, device = a.topk_ids.shape, a.hidden_states.shape[1], a.out.get_device()
    (E, N), I = a.w13.shape[:2], intermediate_size(a)  # noqa: E741
    size = padded_rows(M, top_k, E, alignment)
    permuted = rows_in(a.workspace13, (size, K), form)
    if a.router_weight_on_input or why_not(K, permuted):
        a = gathered(a)
    x = a.hidden_states
    h = rows_in(a.workspace13, (size, I), form)
    gate_up = carve(a.workspace2, (size, N), torch.bfloat16)
    y = carve(a.workspace2, (size, K), torch.bfloat16)
    weights, scale = a.topk_weights, a.hidden_states_scale
    on_input, on_output = (weights, None) if a.router_weight_on_input else (None, weights)
    # rows that are quantized here are weighed before
    before, after = (on_input, None) if form.scales and scale is None else (None, on_input)
    launches, layout = place(
        a.topk_ids, a.expert_map, a.index_workspace, a.w13.shape[0], size, alignment, gpu
    )
    copies = push_own_rows(a, permuted, layout, gpu)
    if copies is None:
        copies = scatter(x, permuted, layout, top_k, gpu, scale, before)
    run([*launches, copies], device, gpu)
    dg.grouped_gemm(gate_up, permuted, w13, layout.groups, expected)
    run([activate(h, _activation(a), gate_up, layout, gpu, after)], device, gpu)
    dg.grouped_gemm(y, h, w2, layout.groups, expected)
    if a.exchange:
        last = sum_ranks(a, y, layout.rows)
    else:
        last = combine_rows(a.out, y, on_output, layout, top_k)
    run([last], device, gpu)


def _readable(scale: Tensor | None, rows: int, form: Format) -> bool:
    """Whether the GEMM reads batched rows in place: without scales, or with fp32 scales
    (E, rows, groups) of which those of neighbouring rows are contiguous.
    """
    if scale is None or form.scales != "fp32":
        return not form.scales
    return scale.stride() == (rows * scale.shape[2], 1, rows)


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::deep_gemm_batched_experts` or `moe_ops::deep_gemm_fp4_batched_experts`."""
    x, out, device = a.hidden_states, a.out, a.hidden_states.get_device()
    (E, T, K), N, I = x.shape, a.w13.shape[1], intermediate_size(a)  # noqa: E741
    if T == 0:
        return
    parts = batched_chunks(a)
    if len(parts) > 1:
        for part in parts:
            batched_experts(part)
        return
    gpu, form = launch.gpu(device), format_of(a.scheme, a.layout)
    w13, w2 = _weights(a, form)
    # A GEMM stores whole blocks of rows: the rows after an expert's last row must be its own.
    R = round_up(T, dg.ALIGNMENT)
    gate_up = carve(a.workspace13, (E, R, N), torch.bfloat16)
    in_place = R == T and out.is_contiguous()
    y = dg.dense(out) if in_place else carve(a.workspace13, (E, R, K), torch.bfloat16)
    h = rows_in(a.workspace2, (E, R, I), form)
    gemms = dg.gemm_keys("masked", w13, w2, T, 0)
    dg.check_warm(gemms, device)
    first, layout = place_batches(a, R, gpu)
    launches = [first]
    scale = a.hidden_states_scale
    if R == T and x.is_contiguous() and _readable(scale, T, form):
        inputs = Operand(dg.dense(x), scale, form.scales, form.width)
    else:
        inputs = rows_in(a.workspace2, (E, R, K), form)
        launches.append(scatter(x, inputs, layout, 1, gpu, scale))
    run(launches, device, gpu)
    dg.masked_gemm(gate_up, inputs, w13, layout.groups, T)
    run([activate(h, _activation(a), gate_up, layout, gpu)], device, gpu)
    dg.masked_gemm(y, h, w2, layout.groups, T)
    if not in_place:
        run([combine_rows(out, y, None, layout, 1)], device, gpu)
    dg.mark_warm(gemms)
