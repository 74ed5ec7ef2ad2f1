"""Backend `deep_gemm`: DeepGEMM's grouped products between three fused kernels of our own, bf16 or fp8_block.

Pairs are sorted by expert, every expert's rows padded to 128 (kernels/deep_gemm_launch.py). Then: tokens quantized and
copied to their rows; product with w13; activation and quantization; product with w2; weighted sum. Nothing is read by
the host: sizes follow from M, top_k and E, and padding is neither written nor read by our kernels.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from moe_ops.activations import NO_LIMIT
from moe_ops.kernels import deep_gemm_launch as dg
from moe_ops.kernels.triton_launch import INTERPRETED, Gpu, gpu
from moe_ops.library import BatchedExpertsArgs, ExpertsArgs, register
from moe_ops.meta.workspace import carve, padded_rows, round_up
from moe_ops.problem import Buffer, Machine, Problem, Workspaces

_SCHEMES = ("", "fp8_block")


def available() -> str | None:
    """None, or what to install."""
    for name, how in (
        ("deep_gemm", "pip install 'moe-ops[deepgemm]'"),
        ("triton", "a CUDA build of torch brings it, or pip install triton"),
    ):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; {how}"
    return None


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty means it can."""
    p, reasons = problem, []
    if machine.device_type != "cuda" and not (machine.device_type == "cpu" and INTERPRETED):
        reasons.append(f"deep_gemm needs a CUDA device, got {machine.device_type}")
    elif machine.device_type == "cuda" and machine.capability[0] != 9:
        major, minor = machine.capability
        reasons.append(f"deep_gemm runs on compute capability 9.0, got {major}.{minor}")
    if p.scheme not in _SCHEMES:
        reasons.append(f"deep_gemm has no kernel for scheme {p.scheme!r}")
    if p.layout:
        reasons.append(f"deep_gemm takes weights in their natural layout, got {p.layout!r}")
    if p.dtype != torch.bfloat16:
        reasons.append(f"deep_gemm takes bfloat16 hidden_states, got {p.dtype}")
    for name, size in (("K", p.hidden_size), ("I", p.intermediate_size)):
        if size % dg.ALIGNMENT:
            reasons.append(f"deep_gemm needs {name} to be a multiple of 128, got {size}")
    if not p.contiguous_weights:
        reasons.append("deep_gemm needs contiguous weights; call .contiguous() on them once")
    if p.has_bias:
        reasons.append("deep_gemm takes no bias")
    return reasons


def workspace_shapes(M, problem: Problem) -> Workspaces:
    """Of pairs in the contiguous layout workspace13 holds permuted x (rows, K), then the activation's output h (rows,
    I), and workspace2 gate and up (rows, N), then the products with w2 (rows, K). Of batches in the masked layout,
    whose experts have M rounded up to 128 rows, the two change places. x and h are e4m3 with fp32 scales of 128 columns
    behind them where activations are quantized, the others bf16. The index workspace: kernels/deep_gemm_launch.py.
    """
    p = problem
    E, N, K, I = p.num_experts, p.num_rows, p.hidden_size, p.intermediate_size  # noqa: E741
    if p.kind == "experts":
        rows = padded_rows(M, p.top_k, E, dg.ALIGNMENT)
        index = dg.index_parts(M * p.top_k, E, rows).end
    else:
        rows = E * round_up(M, dg.ALIGNMENT)
        index = round_up(E, 4) + E * M
    inputs = Buffer((rows, max(K, I)), torch.bfloat16)
    if p.scheme:
        inputs = Buffer((rows, _row_bytes(max(K, I))), torch.uint8)
    products = Buffer((rows, max(N, K)), torch.bfloat16)
    buffers = (inputs, products) if p.kind == "experts" else (products, inputs)
    return Workspaces(*buffers, Buffer((index,), torch.int32))


def _row_bytes(columns: int) -> int:
    """Of e4m3 data and their scales."""
    return columns + columns // 128 * 4


def _operand(buffer: Tensor, shape: tuple[int, ...], scheme: str) -> dg.Operand:
    """(.., rows, columns) of a workspace, with scales of groups of 128 columns if there is a scheme."""
    if not scheme:
        return dg.Operand(carve(buffer, shape, torch.bfloat16))
    *batch, rows, columns = shape
    size, groups = math.prod(shape), columns // 128
    everything = carve(buffer, (size // columns * _row_bytes(columns),), torch.uint8)
    data = everything[:size].view(torch.float8_e4m3fn).view(shape)
    scale = everything[size:].view(torch.float32).view(*batch, groups, rows)
    return dg.Operand(data, scale.transpose(-2, -1))


def _weight(name: str, data: Tensor, scale: Tensor | None, scheme: str) -> dg.Operand:
    """A weight for the products; ValueError where what plans do not know of is not as they need it."""
    expected = torch.float8_e4m3fn if scheme else torch.bfloat16
    if data.dtype != expected:
        raise ValueError(f"{name} must have dtype {expected}, got {data.dtype}")
    if not data.is_contiguous():
        raise ValueError(f"{name} must be contiguous for deep_gemm; call .contiguous() on it once")
    if scale is not None and not scale.is_contiguous():
        raise ValueError(f"the scale of {name} must be contiguous for deep_gemm; make it so once")
    return dg.Operand(data, scale)


def _weights(a: ExpertsArgs | BatchedExpertsArgs) -> tuple[dg.Operand, dg.Operand]:
    return (
        _weight("w13", a.w13, a.w13_scale, a.scheme),
        _weight("w2", a.w2, a.w2_scale, a.scheme),
    )


def _launch_experts(a: ExpertsArgs) -> None:
    M, top_k = a.topk_ids.shape
    if M == 0:
        return
    x, device = a.hidden_states, a.hidden_states.get_device()
    (E, N, K), I = a.w13.shape, a.w2.shape[2]  # noqa: E741
    chip: Gpu = gpu(device)
    w13, w2 = _weights(a)
    size = padded_rows(M, top_k, E, dg.alignment())
    expected = dg.expected_rows(M * top_k, E) if dg.LAYOUT.ends else size
    permuted = _operand(a.workspace13, (size, K), a.scheme)
    hidden = _operand(a.workspace13, (size, I), a.scheme)
    gate_up = carve(a.workspace2, (size, N), torch.bfloat16)
    y = carve(a.workspace2, (size, K), torch.bfloat16)
    products = dg.product_keys("contiguous", w13, w2, expected)
    dg.check_warm(products, device)
    launches, placed = dg.place(a, size, chip)
    launches.append(dg.scatter(x, permuted, placed, top_k, chip))
    key = (E, top_k, dg.strides_key(x), K, a.expert_map is None)
    dg.start(launches, key, device, chip.dependent)
    dg.grouped_product(gate_up, permuted, w13, placed.groups, expected)
    weights = a.topk_weights
    on_input, on_output = (weights, None) if a.router_weight_on_input else (None, weights)
    _activate(a, hidden, gate_up, placed, on_input, chip, device)
    dg.grouped_product(y, hidden, w2, placed.groups, expected)
    last = dg.combine(a.out, y, on_output, placed, top_k)
    dg.start([last], (K, top_k, dg.strides_key(a.out)), device)
    dg.warmed(products)


def _launch_batched_experts(a: BatchedExpertsArgs) -> None:
    x, out, device = a.hidden_states, a.out, a.hidden_states.get_device()
    (E, T, K), N, I = x.shape, a.w13.shape[1], a.w2.shape[2]  # noqa: E741
    if T == 0:
        return
    chip: Gpu = gpu(device)
    w13, w2 = _weights(a)
    # A product stores whole blocks of rows: those behind an expert's last must be its own.
    R = round_up(T, dg.ALIGNMENT)
    gate_up = carve(a.workspace13, (E, R, N), torch.bfloat16)
    in_place = R == T and out.is_contiguous()
    y = out if in_place else carve(a.workspace13, (E, R, K), torch.bfloat16)
    hidden = _operand(a.workspace2, (E, R, I), a.scheme)
    products = dg.product_keys("masked", w13, w2, T)
    dg.check_warm(products, device)
    first, placed = dg.place_batches(a, R, chip)
    if a.scheme or R != T or not x.is_contiguous():
        inputs = _operand(a.workspace2, (E, R, K), a.scheme)
        launches = [first, dg.scatter(x, inputs, placed, 1, chip)]
    else:
        inputs, launches = dg.Operand(x), [first]
    dg.start(launches, (dg.strides_key(x), K), device, chip.dependent)
    dg.masked_product(gate_up, inputs, w13, placed.groups, T)
    _activate(a, hidden, gate_up, placed, None, chip, device)
    dg.masked_product(y, hidden, w2, placed.groups, T)
    if not in_place:
        dg.start([dg.combine(out, y, None, placed, 1)], (K, dg.strides_key(out)), device)
    dg.warmed(products)


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
    dg.start([launch], (a.w2.shape[2], a.activation, a.limit < NO_LIMIT), device)


BACKEND = register(
    "deep_gemm",
    available=available,
    supports=supports,
    workspace_shapes=workspace_shapes,
    launch={"experts": _launch_experts, "batched_experts": _launch_batched_experts},
    devices=("CUDA",),
    native_schemes=("fp8_block",),
    native_capability=(9, 0),
    interpreted=INTERPRETED,
)
