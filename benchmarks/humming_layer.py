"""Experts on humming-kernels 0.1.19 as a peer of experts.py: weights of 4 and 8 bits beside bf16
activations. A whole layer as vLLM 0.26 runs it with `indexed` products: align the pairs, product,
activation, product, weighted sum. Its own heuristics choose the configurations, and nvrtc compiles
the kernels at their first call, some seconds each.

What aligns and activates are operators of the folder of vllm_cutlass.py. vLLM has a Triton kernel
for the weighted sum, here it is compiled by torch.compile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import vllm_cutlass
from cases import Cell, Weights
from marlin_layer import ACTIVATIONS, align, pack
from torch import Tensor

from moe_ops.schemes import get_scheme

SCHEMES = (
    *("int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g32"),
    *("int4_w4a16:g128:zp", "int4_w4a16:g64:zp", "int4_w4a16:g32:zp"),
    *("mxfp4_w4a16", "nvfp4_w4a16", "fp8_w8a16:channel", "int8_w8a16:channel"),
)
COMPUTE = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
DTYPES = {"int4": "uint4", "int8": "uint8", "e4m3": "float8e4m3", "e2m1": "float4e2m1"}


def layer_of(weight: Any, bias: Tensor | None) -> Any:
    """humming's layer of an ExpertTensor (E, N, K)."""
    from humming.layer import HummingLayer

    E, N, K = weight.shape
    desc = get_scheme(weight.scheme).weight
    assert desc is not None
    config = {"dtype": DTYPES[desc.dtype], "group_size": max(desc.group.cols, 0)}
    qdata = weight.qdata.view(torch.uint8)
    if desc.dtype == "int8":
        qdata = qdata ^ 128
    scale = weight.scale if weight.scale.itemsize < 4 else weight.scale.to(torch.bfloat16)
    tensors = {
        "weight": qdata.contiguous().view(torch.int32),
        "weight_scale": scale.view(E, N, -1),
    }
    if desc.is_mx:
        config["scale_dtype"] = "float8e8m0"
        tensors["weight_scale"] = scale.view(torch.float8_e8m0fnu)
    if weight.global_scale is not None:
        config |= {"scale_dtype": "float8e4m3", "scale_2_type": "tensor"}
        tensors["weight_scale_2"] = 1 / weight.global_scale
    if weight.zero_point is not None:
        config["has_zero_point"] = True
        zero = weight.zero_point.view(E, N, -1).transpose(1, 2)  # words of eight rows
        tensors["zero_point"] = pack(zero, 4).transpose(1, 2).contiguous()
    if bias is not None:
        tensors["bias"] = bias
    with torch.device(weight.device):
        layer = HummingLayer(
            *(N, K, config),
            pad_n_to_multiple=256,  # as in vLLM
            pad_k_to_multiple=128,
            num_experts=E,
            has_bias=bias is not None,
            torch_dtype=torch.bfloat16,
        )
    for name, tensor in tensors.items():
        if getattr(layer, name).shape != tensor.shape:
            tensor = tensor.view(getattr(layer, name).shape)
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    layer.transform()
    return layer


def tuned(config: Any, rows: int) -> dict[str, Any]:
    """What humming's heuristics choose for a layer's configuration and so many pairs."""
    from humming.tune import get_heuristics_config

    found = get_heuristics_config(layer_config=config, gemm_type=COMPUTE["gemm_type"])
    return next(chosen for low, high, chosen in found if low < rows <= high)


def weighted_sum(y: Tensor, router: Tensor) -> Tensor:
    return (y.view(*router.shape, -1).float() * router[..., None]).sum(1).to(y.dtype)


def make(weights: Weights) -> Callable[[Cell], Callable[[int], Tensor]]:
    """The layer on weights of one scheme: a builder whose calls run on one routing set."""
    vllm_cutlass.load()
    shape = weights.shape
    if shape.ep_size > 1:
        raise ValueError("runs all experts on one GPU here")
    E, top_k, K, I = shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size  # noqa: E741
    first = layer_of(weights.w13, weights.w13_bias)
    second = layer_of(weights.w2, weights.w2_bias)
    activate = getattr(torch.ops._C, ACTIVATIONS[shape.activation])

    def build(cell: Cell) -> Callable[[int], Tensor]:
        x = cell.hidden_states
        rows = x.shape[0] * top_k
        configs = [tuned(layer.humming_config, rows) for layer in (first, second)]
        block_size = configs[0]["block_shape"][0]
        locks = torch.empty(0, device=x.device)
        torch._dynamo.reset()
        add_up = torch.compile(weighted_sum, fullgraph=True, dynamic=False)

        def call(which: int) -> Tensor:
            routing = cell.sets[which]
            gate_up, h = x.new_empty(rows, 2 * I), x.new_empty(rows, I)
            y = x.new_empty(rows, K)
            aligned = align(routing.ids, E, block_size, locks)
            rest = {
                "sorted_ids": aligned.pairs,
                "expert_ids": aligned.experts,
                "num_tokens_padded": aligned.count,
                "compute_config": json.dumps(COMPUTE),
                "valid_shape_m": rows,
            }
            first(x, gate_up, top_k=top_k, tuning_config=json.dumps(configs[0]), **rest)
            activate(h, gate_up)
            second(h, y, top_k=1, tuning_config=json.dumps(configs[1]), **rest)
            return add_up(y, routing.weights)

        return call

    return build
