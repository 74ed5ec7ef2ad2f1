"""The implementations that the expert-layer benchmark runs: moe_ops, and its peers where they are
installed.

An implementation takes the weights of one shape and scheme (relayouts happen here, once) and
returns a builder, which makes a `Layer` of a cell (tuning happens here). Whatever raises is left
out of the table with its reason. Nothing outside of `Layer.call` is timed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import marlin_layer
import nf4_layers
import sonicmoe_layer
import torch
import torch.nn.functional as F
import vllm_cutlass
import vllm_gguf
from cases import SCHEMES, Cell, Weights
from records import OURS
from torch import Tensor

import moe_ops
from moe_ops.bench import layers
from moe_ops.tuning.backends import laid_out

# batched_mm copies both weights of every (token, expert) pair; past this it is not run.
MAX_GATHER_BYTES = 4 << 30
# Which backend's layout "auto" gets where no other one has kernels of a scheme; else Triton's.
PREPARED_FOR = {"int4_w4a8": "cutlass"}


@dataclass(frozen=True)
class Layer:
    """`call(which)` runs on one routing set. `finish`, where the output is not yet the layer's,
    makes the layer's result (M, K) on the last set of it, outside of the timed region."""

    call: Callable[[int], Tensor]
    finish: Callable[[Tensor], Tensor] | None = None


Builder = Callable[[Cell], Layer]


@dataclass(frozen=True)
class Implementation:
    """How to run a library: `make` for the schemes it has; `biases` says whether it runs layers
    with biases and the activations of their models."""

    make: Callable[[Weights], Builder]
    schemes: tuple[str, ...]
    biases: bool = False


def moe_ops_backend(backend: str) -> Callable[[Weights], Builder]:
    """This library under one backend, with weights as they are or else in its layout; "auto" with
    those laid out that `triton` reads faster so, or `cutlass` alone has kernels for."""

    def make(weights: Weights) -> Builder:
        w13, w2 = weights.w13, weights.w2
        if backend == "auto":
            layout = PREPARED_FOR.get(weights.scheme, "triton")
            w13, w2 = moe_ops.prepare(w13, layout), moe_ops.prepare(w2, layout)
        else:
            size = (1, weights.shape.top_k)
            x = torch.empty(1, w13.shape[2], dtype=torch.bfloat16, device=w13.device)
            ids = torch.zeros(size, dtype=torch.int32, device=w13.device)
            w13, w2 = laid_out(backend, w13, w2, x, ids)
        rest = {
            "activation": weights.shape.activation,
            "w13_bias": weights.w13_bias,
            "w2_bias": weights.w2_bias,
        }

        def build(cell: Cell) -> Layer:
            def call(which: int) -> Tensor:
                routing = cell.sets[which]
                return moe_ops.fused_experts(
                    *(cell.hidden_states, w13, w2, routing.weights, routing.ids),
                    backend=backend,
                    **rest,
                )

            moe_ops.warmup(lambda _: call(0), [cell.case.num_tokens], show_progress=False)
            return Layer(call)

        return build

    return make


def transformers_experts(implementation: str, compiled: bool) -> Callable[[Weights], Builder]:
    """The experts module of Qwen3-MoE holding these weights, under one experts implementation.

    It gets bf16 router weights, as the model's router gives it.
    """

    def make(weights: Weights) -> Builder:
        shape = weights.shape
        experts = layers.transformers_experts(shape, weights.w13, weights.w2, implementation)

        def build(cell: Cell) -> Layer:
            if implementation == "batched_mm":
                gather = cell.case.num_tokens * shape.top_k * cell.case.bytes_per_expert
                if gather > MAX_GATHER_BYTES:
                    raise ValueError(f"would copy {gather / 2**30:.0f} GiB of weights")
                if shape.ep_size > 1:
                    raise ValueError("does not leave out experts held elsewhere")

            def run(x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
                return experts(x, ids, router)

            if compiled:
                torch._dynamo.reset()
                run = torch.compile(run, fullgraph=True, dynamic=False)
            router = [routing.weights.to(torch.bfloat16) for routing in cell.sets]
            ids = [routing.ids.long() for routing in cell.sets]
            return Layer(lambda which: run(cell.hidden_states, ids[which], router[which]))

        return build

    return make


def torch_grouped_mm(weights: Weights) -> Builder:
    """A plain layer around two torch.nn.functional.grouped_mm: sort, gather, products, weighted
    sum."""
    layer = layers.grouped_mm_layer(weights.w13, weights.w2, weights.shape.ep_size > 1)

    def build(cell: Cell) -> Layer:
        x = cell.hidden_states
        router = [routing.weights.to(x.dtype) for routing in cell.sets]
        return Layer(lambda which: layer(x, router[which], cell.sets[which].ids))

    return build


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 rows (R, K) and a scale for each (R,), as scheme fp8_channel quantizes tokens."""
    x = x.float()
    scale = x.abs().amax(-1) / 448
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return (x * inverse[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def torch_scaled_grouped_mm(weights: Weights) -> Builder:
    """A layer around two torch.nn.functional.scaled_grouped_mm with a scale for each row: what is
    before, between and after them is compiled by torch.compile."""
    ByRow = torch.nn.functional.ScalingType.RowWise  # type: ignore[attr-defined]
    shape = weights.shape
    if shape.ep_size > 1:
        raise ValueError("does not leave out experts held elsewhere")
    E, top_k = shape.num_experts, shape.top_k

    def gemm(rows: Tensor, scale: Tensor, w: Any, offsets: Tensor) -> Tensor:
        return F.scaled_grouped_mm(  # type: ignore[attr-defined, no-any-return]
            rows,
            w.qdata.transpose(1, 2),
            scale,
            ByRow,
            w.scale.view(w.shape[:2]),
            ByRow,
            offs=offsets,
            output_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    experts = torch.arange(E, device=weights.plain13.device, dtype=torch.int32)

    def before(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, order = ids.view(-1).sort()
        offsets = torch.searchsorted(ids, experts, right=True, out_int32=True)
        q, scale = quantize_rows(x)
        token = order // top_k
        return q.view(torch.uint8)[token].view(q.dtype), scale[token], offsets, order

    def between(gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return quantize_rows(F.silu(gate) * up)

    def after(y: Tensor, order: Tensor, router: Tensor) -> Tensor:
        row = torch.empty_like(order)
        row[order] = torch.arange(order.numel(), device=y.device)
        of_token = y[row].view(*router.shape, -1).float()
        return (of_token * router[..., None]).sum(1).to(y.dtype)

    def build(cell: Cell) -> Layer:
        x = cell.hidden_states
        parts = [before, between, after]
        if x.is_cuda:
            torch._dynamo.reset()
            parts = [torch.compile(part, fullgraph=True, dynamic=False) for part in parts]

        def call(which: int) -> Tensor:
            routing = cell.sets[which]
            rows, scale, offsets, order = parts[0](x, routing.ids)
            h = parts[1](gemm(rows, scale, weights.w13, offsets))
            return parts[2](gemm(*h, weights.w2, offsets), order, routing.weights)

        return Layer(call)

    return build


def layer_of(
    made: Callable[[Weights], Callable[[Cell], Callable[[int], Tensor]]],
) -> Callable[[Weights], Builder]:
    """The layer of what takes weights, then a cell, and returns the call."""

    def make(weights: Weights) -> Builder:
        build = made(weights)
        return lambda cell: Layer(build(cell))

    return make


def flashinfer_cutlass(weights: Weights) -> Builder:
    """FlashInfer's CUTLASS layer, autotuned at each number of tokens. It wants up rows before gate
    rows. Of fp8_tensor_static it takes tokens that are quantized: a compiled kernel does that
    first."""
    from flashinfer import autotune
    from flashinfer.fused_moe import cutlass_fused_moe

    def up_first(t: Tensor) -> Tensor:
        gate, up = t.chunk(2, dim=1)
        return torch.cat((up, gate), dim=1)

    scheme = weights.scheme
    block, static = scheme == "fp8_block", scheme == "fp8_tensor_static"
    if block:
        if weights.shape.intermediate_size % 128:
            raise ValueError("gate and up share a scale block: I is not a multiple of 128")
        # concatenated as bytes: not every version of torch can concatenate e4m3
        w13 = up_first(weights.w13.qdata.view(torch.uint8)).view(torch.float8_e4m3fn)
        w2 = weights.w2.qdata
        scales = [up_first(weights.w13.scale), weights.w2.scale]
    elif static:
        w13 = up_first(weights.w13.qdata.view(torch.uint8)).view(torch.float8_e4m3fn)
        w2 = weights.w2.qdata
        of_x, of_h = weights.w13.activation_scale, weights.w2.activation_scale
        # products of the scales of both operands, and what quantizes the second GEMM's input
        scales = [weights.w13.scale * of_x, 1 / of_h, weights.w2.scale * of_h, of_x]
        inverse = 1 / of_x
    else:
        w13, w2, scales = up_first(weights.w13), weights.w2, None

    def quantize(x: Tensor) -> Tensor:
        return (x.float() * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)

    if static:
        torch._dynamo.reset()
        quantize = torch.compile(quantize, dynamic=False)

    def build(cell: Cell) -> Layer:
        M = cell.case.num_tokens

        def call(which: int, tune: bool = False) -> Tensor:
            # One bucket, this M: the default ones would tune 21 numbers of tokens.
            with autotune(tune, tuning_buckets=(M,)):
                out = cutlass_fused_moe(
                    quantize(cell.hidden_states) if static else cell.hidden_states,
                    cell.sets[which].ids,
                    cell.sets[which].weights,
                    w13,
                    w2,
                    torch.bfloat16,
                    quant_scales=scales,
                    ep_size=weights.shape.ep_size,
                    ep_rank=0,
                    use_deepseek_fp8_block_scale=block,
                )
            return out[0] if isinstance(out, (list, tuple)) else out

        if not block:  # that one has one tactic only
            with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
                call(0, tune=True)
        return Layer(call)

    return build


IMPLEMENTATIONS = {
    OURS: Implementation(moe_ops_backend("auto"), SCHEMES, biases=True),
    **{
        f"{OURS} {name}": Implementation(moe_ops_backend(name), SCHEMES, biases=True)
        for name in moe_ops.list_backends()
    },
    "HF grouped_mm": Implementation(transformers_experts("grouped_mm", False), ("",)),
    "HF grouped_mm compiled": Implementation(transformers_experts("grouped_mm", True), ("",)),
    "HF batched_mm": Implementation(transformers_experts("batched_mm", False), ("",)),
    "F.grouped_mm": Implementation(torch_grouped_mm, ("",)),
    "F.scaled_grouped_mm": Implementation(torch_scaled_grouped_mm, ("fp8_channel",)),
    "FlashInfer CUTLASS": Implementation(
        flashinfer_cutlass, ("", "fp8_block", "fp8_tensor_static")
    ),
    "vLLM CUTLASS": Implementation(layer_of(vllm_cutlass.make), vllm_cutlass.SCHEMES),
    "vllm-gguf-plugin": Implementation(layer_of(vllm_gguf.make), vllm_gguf.SCHEMES),
    "unsloth-zoo nf4": Implementation(
        layer_of(nf4_layers.by_sorted_rows("unsloth")), nf4_layers.SCHEMES
    ),
    "bitsandbytes, F.grouped_mm": Implementation(
        layer_of(nf4_layers.by_sorted_rows("dequantize")), nf4_layers.SCHEMES
    ),
    "grouped-nf4-gemm": Implementation(layer_of(nf4_layers.grouped_nf4_gemm), nf4_layers.SCHEMES),
    "Marlin": Implementation(layer_of(marlin_layer.make), marlin_layer.SCHEMES, biases=True),
    "SonicMoE": Implementation(layer_of(sonicmoe_layer.make), ("",)),
}
# in a few cells of the committed results; what called them is gone
MEASURED_ONCE = ("DeepGEMM two GEMMs only", "triton_kernels", "humming", "vLLM wna16")
PARTS_OF_LAYERS = MEASURED_ONCE[:1]  # never the best peer
# The named backends of moe_ops run when asked for: "moe_ops" is the one of them that users get.
DEFAULT = tuple(name for name in IMPLEMENTATIONS if not name.startswith(OURS + " "))

# vLLM 0.26's Triton layer with its tuned H200 configurations where it has them (not for dsv3 and
# gptoss20), under graph replay on an H200 with torch 2.11: us by (shape, scheme) and M. Measured
# once and not in the runs of this benchmark; its sort is left out, its activation, quantization
# and sum are compiled torch.
VLLM_NAME = "vLLM table"
VLLM_US = {
    ("qwen3", ""): {1: 28.7, 8: 124, 32: 252, 64: 291, 256: 324, 1024: 403, 4096: 887},
    ("qwen3", "fp8_block"): {1: 24.8, 8: 74.2, 32: 140, 64: 158, 256: 201, 1024: 306, 4096: 890},
    ("mixtral", ""): {1: 179, 8: 561, 32: 643, 64: 646, 256: 719, 1024: 1660, 4096: 5504},
    ("mixtral", "fp8_block"): {1: 125, 8: 297, 32: 341, 64: 368, 256: 538, 1024: 1330, 4096: 4961},
    ("dsv3", "fp8_block"): {1: 106, 8: 603, 64: 2253, 256: 2691, 1024: 3354, 4096: 7054},
    ("gptoss20", ""): {1: 70.8, 8: 265, 64: 407, 256: 423, 4096: 2191},
}
