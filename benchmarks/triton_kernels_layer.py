"""triton_kernels as vLLM 0.26 ships it, as a peer of experts.py: mxfp4 weights beside bf16
activations, as vLLM runs gpt-oss. A whole layer: routing from logits and given ids, product with
swiglu in its epilogue (another activation is a kernel of vLLM's), product, sum.

The folder of vllm_cutlass.py must hold `triton_kernels/` out of vllm/third_party of the wheel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import vllm_cutlass
from cases import Cell, Weights
from torch import Tensor

from moe_ops import activations

SCHEMES = ("mxfp4_w4a16",)
NUM_WARPS = 8  # vLLM's choice for its layout of scales


def load() -> None:
    """Make the package importable. Raises RuntimeError where there is none."""
    folder = os.environ.get(vllm_cutlass.FOLDER, "")
    if not os.path.isdir(os.path.join(folder, "triton_kernels")):
        raise RuntimeError(f"{vllm_cutlass.FOLDER} names no folder with triton_kernels")
    if folder not in sys.path:
        sys.path.append(folder)


def operand(weight: Any) -> tuple[Any, Any]:
    """An ExpertTensor (E, N, K) as (weight, precision config), as vLLM's _swizzle_mxfp4 makes
    them."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    opt_flags.update_opt_flags_constraints({"split_k": 1})
    values, of_values = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales, of_scales = layout.make_default_matmul_mxfp4_w_scale_layout(
        mx_axis=1, num_warps=NUM_WARPS
    )
    scale = F.pad(weight.scale, (0, -weight.scale.shape[-1] % 4))
    q = wrap_torch_tensor(weight.qdata.transpose(-2, -1), dtype=FP4)
    q = convert_layout(q, values, **of_values)
    scale = convert_layout(wrap_torch_tensor(scale.transpose(-2, -1)), scales, **of_scales)
    flex = FlexCtx(rhs_data=InFlexData())
    return q, PrecisionConfig(weight_scale=scale, flex_ctx=flex, out_dtype=torch.bfloat16)


def make(weights: Weights) -> Callable[[Cell], Callable[[int], Tensor]]:
    """The layer on mxfp4 weights: a builder whose calls run on one routing set."""
    load()
    import triton_kernels.swiglu
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, matmul_ogs
    from triton_kernels.routing import routing

    shape = weights.shape
    if shape.ep_size > 1:
        raise ValueError("runs all experts on one GPU here")
    if shape.top_k & (shape.top_k - 1):
        raise ValueError(f"its sort takes a power of two of experts a token, got {shape.top_k}")
    E, top_k, I = shape.num_experts, shape.top_k, shape.intermediate_size  # noqa: E741
    w13, of_w13 = operand(weights.w13)
    w2, of_w2 = operand(weights.w2)
    biases = [b if b is None else b.float() for b in (weights.w13_bias, weights.w2_bias)]
    fused = None
    if shape.activation == "swigluoai":
        act = activations.resolve(shape.activation)
        specs = FnSpecs("swiglu", triton_kernels.swiglu.swiglu_fn, ("alpha", "limit"))
        fused = FusedActivation(specs, (act.alpha, act.limit), 2)
    else:
        vllm_cutlass.load()

    def build(cell: Cell) -> Callable[[int], Tensor]:
        x = cell.hidden_states
        M, rows = x.shape[0], x.shape[0] * top_k
        logits = [
            torch.full((M, E), -1e4, device=x.device).scatter_(1, s.ids.long(), s.weights.log())
            for s in cell.sets
        ]
        ids = [s.ids.int() for s in cell.sets]  # of 16 bits, its masks of 32 would overflow

        def call(which: int) -> Tensor:
            data, gather, scatter = routing(logits[which], top_k, expt_indx=ids[which])
            h, out = x.new_empty(1, rows, I), x.new_empty(1, *x.shape)
            if fused is not None:
                matmul_ogs(
                    *(x, w13, biases[0], data),
                    gather_indx=gather,
                    precision_config=of_w13,
                    fused_activation=fused,
                    y=h,
                )
            else:
                gate_up = matmul_ogs(
                    x, w13, biases[0], data, gather_indx=gather, precision_config=of_w13
                )
                torch.ops._C.silu_and_mul(h[0], gate_up)
            matmul_ogs(
                *(h[0], w2, biases[1], data),
                scatter_indx=scatter,
                precision_config=of_w2,
                gammas=data.gate_scal,
                y=out,
            )
            return out[0]

        return call

    return build
