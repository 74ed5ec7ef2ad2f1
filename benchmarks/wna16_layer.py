"""vLLM 0.26's own kernels of int4 weights in groups beside bf16 activations (moe_wna16), as a peer
of experts.py: a compiled one for up to six pairs an expert, else one in Triton. A whole layer, in
the order in which vLLM's fused_experts calls it. Weights stay in their natural order.

The folder of vllm_cutlass.py must hold fused_moe.py out of
vllm/model_executor/layers/fused_moe of the wheel; the kernels are taken from its text, since it
imports all of vLLM.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import vllm_cutlass
from cases import Cell, Weights
from marlin_layer import Aligned, align
from torch import Tensor

from moe_ops.schemes import get_scheme

SCHEMES = (
    *("int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g32"),
    *("int4_w4a16:g128:zp", "int4_w4a16:g64:zp", "int4_w4a16:g32:zp"),
)
MOST_PAIRS_OF_COMPILED = 6  # an expert, on average
TAKEN = (
    *("write_zeros_to_output", "fused_moe_kernel_gptq_awq"),
    *("_ensure_block_size_k_divisible", "get_moe_wna16_block_config"),
)


@functools.cache
def load() -> ModuleType:
    """The functions TAKEN. Raises RuntimeError where there are none."""
    vllm_cutlass.load()
    path = Path(os.environ[vllm_cutlass.FOLDER], "fused_moe.py")
    if not path.is_file():
        raise RuntimeError(f"{vllm_cutlass.FOLDER} must hold fused_moe.py, found none")
    text = path.read_text()
    parts = ["import torch\nimport triton\nimport triton.language as tl\n"]
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in TAKEN:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            parts.append("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    file = Path(tempfile.mkdtemp(prefix="wna16_")) / "wna16_kernels.py"
    file.write_text("\n\n\n".join(parts) + "\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Operand:
    """A weight (E, N, K) in int4 as the kernels take it."""

    q: Tensor  # (E, N, K / 2)
    scale: Tensor  # (E, N, K / group)
    zeros: Tensor | None  # (E, N / 2, K / group), two rows a byte
    group: int

    @classmethod
    def of(cls, weight: Any) -> Operand:
        desc = get_scheme(weight.scheme).weight
        assert desc is not None
        zero = weight.zero_point
        if zero is not None:
            zero = (zero[:, ::2] | zero[:, 1::2] << 4).contiguous()
        return cls(weight.qdata, weight.scale.to(torch.bfloat16), zero, desc.group.cols)

    def compiled(
        self, out: Tensor, x: Tensor, top_k: int, aligned: Aligned, router: Tensor | None
    ) -> None:
        config = self._config(x, top_k, aligned.block_size, True)
        torch.ops._moe_C.moe_wna16_gemm(
            x, out, self.q, self.scale, self.zeros, router, aligned.pairs, aligned.experts,
            aligned.count, top_k, aligned.block_size, config["BLOCK_SIZE_N"],
            config["BLOCK_SIZE_K"], 4,
        )  # fmt: skip

    def in_triton(
        self, out: Tensor, x: Tensor, top_k: int, aligned: Aligned, router: Tensor | None
    ) -> None:
        import triton.language as tl

        block_m, N, K = aligned.block_size, self.q.shape[1], x.shape[1]
        config = self._config(x, top_k, block_m, False)
        EM = aligned.pairs.shape[0]
        if x.shape[0] < block_m:
            EM = min(EM, x.shape[0] * top_k * block_m)
        grid = (-(-EM // block_m) * -(-N // config["BLOCK_SIZE_N"]),)
        zero_strides = (0, 0, 0)
        if self.zeros is not None:
            zero_strides = (self.zeros.stride(0), self.zeros.stride(2), self.zeros.stride(1))
        q, scale = self.q, self.scale
        load().fused_moe_kernel_gptq_awq[grid](
            x, q, out, scale, self.zeros, router, aligned.pairs, aligned.experts, aligned.count,
            N, K, EM, x.shape[0] * top_k, x.stride(0), x.stride(1), q.stride(0), q.stride(2),
            q.stride(1), out.stride(0), out.stride(1), scale.stride(0), scale.stride(2),
            scale.stride(1), *zero_strides, block_k_diviable=K % config["BLOCK_SIZE_K"] == 0,
            group_size=self.group, MUL_ROUTED_WEIGHT=router is not None, top_k=top_k,
            compute_type=tl.bfloat16, has_zp=self.zeros is not None, use_int4_w4a16=True,
            use_int8_w8a16=False, BLOCK_SIZE_M=block_m, GROUP_SIZE_M=1, SPLIT_K=1, **config,
        )  # fmt: skip

    def _config(self, x: Tensor, top_k: int, block_m: int, compiled: bool) -> dict[str, int]:
        N = self.q.shape[1]
        return load().get_moe_wna16_block_config(
            config={},
            use_moe_wna16_cuda=compiled,
            num_valid_tokens=x.shape[0] * top_k,
            size_k=x.shape[1],
            size_n=N,
            num_experts=N,  # as vLLM calls it
            group_size=self.group,
            real_top_k=top_k,
            block_size_m=block_m,
        )


def make(weights: Weights) -> Callable[[Cell], Callable[[int], Tensor]]:
    """The layer on int4 weights: a builder whose calls run on one routing set."""
    load()
    shape = weights.shape
    if shape.ep_size > 1:
        raise ValueError("runs all experts on one GPU here")
    E, top_k, K, I = shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size  # noqa: E741
    first, second = Operand.of(weights.w13), Operand.of(weights.w2)

    def build(cell: Cell) -> Callable[[int], Tensor]:
        x = cell.hidden_states
        M, rows = x.shape[0], x.shape[0] * top_k
        compiled = rows / E <= MOST_PAIRS_OF_COMPILED
        product = Operand.compiled if compiled else Operand.in_triton
        block_size = min(16, M) if compiled else 16 if M <= 20 else 32 if M <= 40 else 64
        locks = torch.empty(0, device=x.device)

        def call(which: int) -> Tensor:
            routing = cell.sets[which]
            gate_up, h = x.new_empty(rows, 2 * I), x.new_empty(rows, I)
            y, out = x.new_empty(rows, K), torch.empty_like(x)
            aligned = align(routing.ids, E, block_size, locks)
            product(first, gate_up, x, top_k, aligned, None)
            torch.ops._C.silu_and_mul(h, gate_up)
            product(second, y, h, 1, aligned, routing.weights)
            torch.ops._moe_C.moe_sum(y.view(M, top_k, K), out, None, None)
            return out

        return call

    return build
