"""Layers that are timed: this library's, and what people would use instead.

M tokens, K hidden size, I intermediate size, E experts, top_k experts per token. w13 is (E, 2I,
K), gate rows first; w2 is (E, K, I). A layer takes (hidden_states (M, K), topk_weights (M, top_k),
topk_ids (M, top_k)) and returns (M, K).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.bench.shapes import Shape
from moe_ops.experts import fused_experts
from moe_ops.schemes import get_scheme
from moe_ops.tensors import from_quantized, prepare, quantize

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
_CHUNK_BYTES = 512 << 20  # of weights that are quantized at a time


def make_weights(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """w13 and w2, scaled so that unit inputs give near-unit outputs. Experts hold the same rows in
    different orders: drawing all of them would take longer than the benchmark.
    """
    rng = torch.Generator(device).manual_seed(0)
    E, K, I = shape.num_experts, shape.hidden_size, shape.intermediate_size
    weights = []
    for rows, columns in ((2 * I, K), (K, I)):
        one = torch.randn(rows, columns, generator=rng, device=device) / math.sqrt(columns)
        one = one.to(dtype)
        out = torch.empty(E, rows, columns, dtype=dtype, device=device)
        for e in range(E):
            order = torch.randperm(rows, generator=rng, device=device)
            torch.index_select(one, 0, order, out=out[e])
        weights.append(out)
    return weights[0], weights[1]


def quantized(plain: Tensor, scheme: str, activation_scale: float | None = None) -> Any:
    """`moe_ops.quantize`, some experts at a time: it computes in fp32, which takes 4x of bf16."""
    storage = get_scheme(scheme).quantized_weight.storage_dtype
    step = max(1, _CHUNK_BYTES // (plain[0].numel() * plain.itemsize))
    qdata_shape = get_scheme(scheme).qdata_shape(*plain.shape)
    qdata = torch.empty(qdata_shape, dtype=storage, device=plain.device)
    names = ("scale", "zero_point", "global_scale", "channel_scale")
    others: dict[str, list[Tensor]] = {name: [] for name in names}
    for e in range(0, plain.shape[0], step):
        part = quantize(plain[e : e + step], scheme, activation_scale=activation_scale)
        qdata[e : e + step].copy_(part.qdata)
        for name in names:
            if getattr(part, name) is not None:
                others[name].append(getattr(part, name).view(torch.uint8))
    dtypes = {name: getattr(part, name).dtype for name in names if others[name]}
    found = {name: torch.cat(others[name]).view(dtype) for name, dtype in dtypes.items()}
    return from_quantized(scheme, qdata, **found, activation_scale=activation_scale)


def ours(w13: Tensor, w2: Tensor, scheme: str, backend: str = "auto") -> Layer:
    """This library's layer, with weights of a scheme ("" for plain ones).

    Raises:
        ValueError: the scheme does not take these sizes, or the backend does not take the layer.
    """
    if scheme:
        for name, w in (("w13", w13), ("w2", w2)):
            if why := get_scheme(scheme).why_not_shape(*w.shape[1:]):
                raise ValueError(f"{name} cannot be quantized to {scheme!r}: {why}")
        activation = get_scheme(scheme).activation
        scale = None
        if activation is not None and activation.static:
            scale = 8 / activation.format.max  # of activations of unit scale, which reach some 6
        w13, w2 = quantized(w13, scheme, scale), quantized(w2, scheme, scale)
        if w13.device.type == "cuda" and backend == "auto":
            w13, w2 = prepare(w13, "triton"), prepare(w2, "triton")
    return lambda x, weights, ids: fused_experts(x, w13, w2, weights, ids, backend=backend)


def transformers_experts(
    shape: Shape, w13: Tensor, w2: Tensor, implementation: str
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The experts module of transformers' Qwen3-MoE with these weights, under one of its experts
    implementations ("eager", "grouped_mm", "batched_mm"), as it is called there: (hidden_states,
    topk_ids, topk_weights).
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(w13, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(w2, requires_grad=False)
    return experts


def per_expert_loop(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> Tensor:
    """One expert after the other, in the dtype of x: in fp64 what others are held to."""
    out = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        rows, slot = torch.where(topk_ids == expert)
        gate, up = (x[rows] @ w13[expert].to(x.dtype).T).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ w2[expert].to(x.dtype).T
        out.index_add_(0, rows, y * topk_weights[rows, slot, None].to(x.dtype))
    return out


def grouped_mm_layer(w13: Tensor, w2: Tensor, ep: bool = False) -> Layer:
    """Two torch.nn.functional.grouped_mm with the sort, gather and weighted sum around them.
    Router weights must have the dtype of the hidden states.

    Args:
        ep: ids may be those of experts elsewhere.
    """
    E = w13.shape[0]
    w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    experts = torch.arange(E, device=w13.device, dtype=torch.int32)

    def layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        (M, K), top_k = x.shape, topk_ids.shape[1]
        ids, order = topk_ids.view(-1).sort()
        offsets = torch.searchsorted(ids, experts, right=True, out_int32=True)
        gate, up = F.grouped_mm(x[order // top_k], w13, offs=offsets).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, w2, offs=offsets)
        if ep:  # rows past the last offset are not written
            y = torch.where((ids < E).unsqueeze(1), y, 0)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(M * top_k, device=x.device)
        return torch.bmm(topk_weights.unsqueeze(1), y[rows].view(M, top_k, K)).squeeze(1)

    return layer


def peers(shape: Shape, w13: Tensor, w2: Tensor) -> dict[str, Layer]:
    """What people would use instead: transformers' loop over experts and its grouped GEMM; without
    transformers the same two in plain torch.
    """
    if importlib.util.find_spec("transformers") is None:
        grouped = grouped_mm_layer(w13, w2)
        return {
            "torch loop": lambda x, weights, ids: per_expert_loop(x, w13, w2, weights, ids),
            "torch grouped_mm": lambda x, weights, ids: grouped(x, weights.to(x.dtype), ids),
        }

    def own(implementation: str) -> Layer:
        experts = transformers_experts(shape, w13, w2, implementation)
        return lambda x, weights, ids: experts(x, ids.long(), weights.to(x.dtype))

    return {f"HF {name}": own(name) for name in ("eager", "grouped_mm")}
