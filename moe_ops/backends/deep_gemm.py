"""Backend `deep_gemm`: DeepGEMM's grouped products between three fused kernels of our own, bf16 or fp8_block.

Pairs are sorted by expert, every expert's rows padded to 128 (kernels/deep_gemm_launch.py). Then: tokens quantized and
copied to their rows; product with w13; activation and quantization; product with w2; weighted sum. Nothing is read by
the host: sizes follow from M, top_k and E, and padding is neither written nor read by our kernels.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from moe_ops.kernels import deep_gemm_launch as dg
from moe_ops.kernels.triton_launch import INTERPRETED, Gpu, gpu
from moe_ops.library import ExpertsArgs, register
from moe_ops.meta import workspace
from moe_ops.meta.workspace import carve, padded_rows
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
    """workspace13 holds permuted x (rows, K), then the activation's output h (rows, I), in e4m3 with fp32 scales
    of 128 columns behind them where activations are quantized; workspace2 gate and up (rows, N), then the products
    with w2 (rows, K), bf16. The index workspace: kernels/deep_gemm_launch.py, `Index`.
    """
    p = problem
    E, pairs = p.num_experts, M * p.top_k
    K, I = p.hidden_size, p.intermediate_size  # noqa: E741
    dtype = torch.bfloat16
    if p.scheme:
        K, I, dtype = _row_bytes(K), _row_bytes(I), torch.uint8  # noqa: E741
    permuted, _ = workspace.contiguous(M, p.num_rows, K, I, p.top_k, E, dg.ALIGNMENT)
    _, products = workspace.contiguous(
        M, p.num_rows, p.hidden_size, p.intermediate_size, p.top_k, E, dg.ALIGNMENT
    )
    index = dg.index_parts(pairs, E, padded_rows(M, p.top_k, E, dg.ALIGNMENT)).end
    return Workspaces(
        Buffer(permuted, dtype), Buffer(products, torch.bfloat16), Buffer((index,), torch.int32)
    )


def _row_bytes(columns: int) -> int:
    """Of e4m3 data and their scales."""
    return columns + 4 * workspace.cdiv(columns, 128)


def _operand(buffer: Tensor, rows: int, columns: int, scheme: str) -> dg.Operand:
    """(rows, columns) of a workspace, with scales of groups of 128 columns if there is a scheme."""
    if not scheme:
        return dg.Operand(carve(buffer, (rows, columns), torch.bfloat16))
    size, groups = rows * columns, columns // 128
    everything = carve(buffer, (rows * _row_bytes(columns),), torch.uint8)
    data = everything[:size].view(torch.float8_e4m3fn).view(rows, columns)
    return dg.Operand(data, everything[size:].view(torch.float32).view(groups, rows).t())


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


def _launch_experts(a: ExpertsArgs) -> None:
    M, top_k = a.topk_ids.shape
    if M == 0:
        return
    x, scheme, device = a.hidden_states, a.scheme, a.hidden_states.get_device()
    (E, N, K), I = a.w13.shape, a.w2.shape[2]  # noqa: E741
    chip: Gpu = gpu(device)
    w13 = _weight("w13", a.w13, a.w13_scale, scheme)
    w2 = _weight("w2", a.w2, a.w2_scale, scheme)
    size = padded_rows(M, top_k, E, dg.alignment())
    expected = dg.expected_rows(M * top_k, E) if dg.LAYOUT.ends else size
    permuted = _operand(a.workspace13, size, K, scheme)
    hidden = _operand(a.workspace13, size, I, scheme)
    gate_up = carve(a.workspace2, (size, N), torch.bfloat16)
    y = carve(a.workspace2, (size, K), torch.bfloat16)
    products = tuple([dg.product_key("contiguous", permuted, w, expected) for w in (w13, w2)])
    dg.check_warm(products, device)
    launches, placed = dg.place(a, size, chip)
    launches.append(dg.scatter(a, permuted, placed, chip))
    key = (E, top_k, x.stride(), K, a.expert_map is None)
    dg.start(launches, key, device, chip.dependent)
    dg.grouped_product(gate_up, permuted, w13, placed.groups, expected)
    input_weights = a.topk_weights if a.router_weight_on_input else None
    activation = dg.activate(a, hidden, gate_up, placed.rows, size, input_weights, chip)
    dg.start([activation], (I, a.activation, a.limit < dg.NO_LIMIT), device)
    dg.grouped_product(y, hidden, w2, placed.groups, expected)
    dg.start(
        [dg.combine(a, y, placed)], (K, top_k, a.out.stride(), a.router_weight_on_input), device
    )
    dg.warmed(products)


BACKEND = register(
    "deep_gemm",
    available=available,
    supports=supports,
    workspace_shapes=workspace_shapes,
    launch={"experts": _launch_experts},
    devices=("CUDA",),
    native_schemes=("fp8_block",),
    native_capability=(9, 0),
    interpreted=INTERPRETED,
)
