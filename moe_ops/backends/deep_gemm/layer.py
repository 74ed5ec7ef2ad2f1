"""The expert layer around DeepGEMM's products, for the backends of its formats. Torch alone is imported here.

Pairs are sorted by expert, every expert's rows padded to 128. Then: tokens quantized and copied to their rows; product
with w13; activation and quantization; product with w2; weighted sum. Nothing is read by the host: sizes follow from M,
top_k and E, and padding is neither written nor read by our kernels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activations import NO_LIMIT
from moe_ops.backends.deep_gemm import library as dg
from moe_ops.kernels.triton_launch import Gpu, gpu
from moe_ops.kernels.triton_rows import activation_of
from moe_ops.meta.workspace import carve, cdiv, padded_rows, round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs


class Format(NamedTuple):
    """What scales quantized operands have, in the words of backends/deep_gemm/rows.py."""

    scales: str
    width: int  # of rows: columns that share one
    weight_width: int


def format_of(scheme: str, layout: str) -> Format:
    """The Format of weights of a scheme, in their natural layout or in DEEP_GEMM_UE8M0."""
    if not scheme:
        return Format("", 128, 128)
    if not layout:
        return Format("fp32", 128, 128)
    width = 128 if scheme == "fp8_block" else 32
    return Format("ue8m0", 32 if scheme == "mxfp8" else 128, width)


def rows_of(buffer: Tensor, shape: tuple[int, ...], form: Format) -> dg.Operand:
    """(.., rows, columns) of a workspace, with scales of groups of columns if there are any."""
    if not form.scales:
        return dg.Operand(carve(buffer, shape, torch.bfloat16))
    *batch, rows, columns = shape
    size, groups, dtype = math.prod(shape), columns // form.width, torch.float32
    if form.scales == "ue8m0":
        groups, dtype = cdiv(groups, 4), torch.int32
    words = size // columns * groups
    everything = carve(buffer, (size + 4 * words,), torch.uint8)
    data = everything[:size].view(torch.float8_e4m3fn).view(shape)
    scale = everything[size:].view(dtype).view(*batch, groups, rows).transpose(-2, -1)
    return dg.Operand(data, scale, form.scales, form.width)


def _weight(name: str, data: Tensor, scale: Tensor | None, form: Format) -> dg.Operand:
    """A weight for the products; ValueError where what plans do not know of is not as they need it."""
    dtypes = {"": (torch.bfloat16,), "fp32": (torch.float8_e4m3fn,)}
    expected = dtypes.get(form.scales, (torch.float8_e4m3fn, torch.uint8))
    if data.dtype not in expected:
        raise ValueError(f"{name} must have dtype {expected[0]}, got {data.dtype}")
    for what, tensor in ((name, data), (f"the scale of {name}", scale)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{what} must be contiguous for deep_gemm; make it so once")
    data = dg.dense(data)
    if scale is None:
        return dg.Operand(data)
    scale = dg.dense(scale)
    if form.scales == "ue8m0":
        data = data.view(torch.int8) if data.dtype == torch.uint8 else data  # pairs of e2m1
        scale = scale.transpose(-2, -1)
    return dg.Operand(data, scale, form.scales, form.weight_width)


def _weights(a: ExpertsArgs | BatchedExpertsArgs, form: Format) -> tuple[dg.Operand, dg.Operand]:
    return (
        _weight("w13", a.w13, a.w13_scale, form),
        _weight("w2", a.w2, a.w2_scale, form),
    )


def launch_experts(a: ExpertsArgs) -> None:
    M, top_k = a.topk_ids.shape
    if M == 0:
        return
    x, device = a.hidden_states, a.hidden_states.get_device()
    (E, N), K, I = a.w13.shape[:2], x.shape[1], intermediate_size(a)  # noqa: E741
    chip, form = gpu(device), format_of(a.scheme, a.layout)
    w13, w2 = _weights(a, form)
    dg.check_warm((), device)  # before the library is loaded
    alignment = dg.alignment()
    expected = dg.expected_rows(M * top_k, E)
    products = dg.product_keys("contiguous", w13, w2, expected, alignment)
    dg.check_warm(products, device)
    size = padded_rows(M, top_k, E, alignment)
    permuted = rows_of(a.workspace13, (size, K), form)
    hidden = rows_of(a.workspace13, (size, I), form)
    gate_up = carve(a.workspace2, (size, N), torch.bfloat16)
    y = carve(a.workspace2, (size, K), torch.bfloat16)
    launches, placed = dg.place(a, size, alignment, chip)
    launches.append(dg.scatter(x, permuted, placed, top_k, chip))
    key = (E, top_k, x.stride(), K, a.expert_map is None, form, alignment)
    dg.start(launches, key, device, chip.dependent)
    dg.grouped_product(gate_up, permuted, w13, placed.groups, expected)
    weights = a.topk_weights
    on_input, on_output = (weights, None) if a.router_weight_on_input else (None, weights)
    _activate(a, hidden, gate_up, placed, on_input, chip, device)
    dg.grouped_product(y, hidden, w2, placed.groups, expected)
    last = dg.combine(a.out, y, on_output, placed, top_k)
    dg.start([last], (K, top_k, a.out.stride()), device)
    dg.warmed(products)


def launch_batched_experts(a: BatchedExpertsArgs) -> None:
    x, out, device = a.hidden_states, a.out, a.hidden_states.get_device()
    (E, T, K), N, I = x.shape, a.w13.shape[1], intermediate_size(a)  # noqa: E741
    if T == 0:
        return
    chip, form = gpu(device), format_of(a.scheme, a.layout)
    w13, w2 = _weights(a, form)
    # A product stores whole blocks of rows: those behind an expert's last must be its own.
    R = round_up(T, dg.ALIGNMENT)
    gate_up = carve(a.workspace13, (E, R, N), torch.bfloat16)
    in_place = R == T and out.is_contiguous()
    y = dg.dense(out) if in_place else carve(a.workspace13, (E, R, K), torch.bfloat16)
    hidden = rows_of(a.workspace2, (E, R, I), form)
    products = dg.product_keys("masked", w13, w2, T, 0)
    dg.check_warm(products, device)
    first, placed = dg.place_batches(a, R, chip)
    if form.scales or R != T or not x.is_contiguous():
        inputs = rows_of(a.workspace2, (E, R, K), form)
        launches = [first, dg.scatter(x, inputs, placed, 1, chip)]
    else:
        inputs, launches = dg.Operand(dg.dense(x)), [first]
    dg.start(launches, (x.stride(), K, form), device, chip.dependent)
    dg.masked_product(gate_up, inputs, w13, placed.groups, T)
    _activate(a, hidden, gate_up, placed, None, chip, device)
    dg.masked_product(y, hidden, w2, placed.groups, T)
    if not in_place:
        dg.start([dg.combine(out, y, None, placed, 1)], (K, out.stride()), device)
    dg.warmed(products)


def intermediate_size(a: ExpertsArgs | BatchedExpertsArgs) -> int:
    """I: the columns of w2, also where two share a byte."""
    return a.w13.shape[1] // (2 if activation_of(a.activation)[1] else 1)


def _activate(
    a: ExpertsArgs | BatchedExpertsArgs,
    hidden: dg.Operand,
    gate_up: Tensor,
    placed: dg.Placed,
    weights: Tensor | None,
    chip: Gpu,
    device: int,
) -> None:
    launch = dg.activate(a, hidden, gate_up, placed, weights, chip)
    key = (intermediate_size(a), a.activation, a.limit < NO_LIMIT, hidden.scales, hidden.width)
    key += (placed.rows is None,)
    dg.start([launch], key, device)
