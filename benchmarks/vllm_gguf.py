"""The expert kernels of vllm-gguf-plugin 0.0.5 as a peer of experts.py: a whole layer of its
compiled operators, chosen as the plugin chooses them.

MOE_OPS_BENCH_GGUF names a folder with _C_gguf.abi3.so out of the plugin's wheel; neither the
plugin nor vLLM is imported. Up to 64 tokens, and always for IQ types, an operator multiplies the
matrix of each pair by its token; above, another multiplies blocks of an expert's pairs. Both
quantize activations to 8 bits first. The activation and the weighted sum between and behind them,
vLLM's own, are compiled here. The order of pairs by expert, which vLLM computes in each call, is
made once, outside of what is timed.

The wheel is built for torch 2.13. The two functions of its stable interface that torch 2.11 lacks
allocate and free an argument that may be absent, as the headers of 2.11 do themselves; they are
compiled here, beside two that say what an error was.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import Cell, RoutingSet, Weights
from gguf_blocks import TYPES
from torch import Tensor

FOLDER, LIBRARY = "MOE_OPS_BENCH_GGUF", "_C_gguf.abi3.so"
SCHEMES = tuple(TYPES)
VECTOR_TOKENS = 64  # at most so many tokens are multiplied one by one
NO_BLOCKS = ("IQ4_NL", "IQ4_XS")  # types that have the kernel for single tokens alone
ADDED = """
#include <cstdint>
extern "C" {
int32_t torch_new_stable_ivalue(uint64_t **made) { *made = new uint64_t(0); return 0; }
int32_t torch_delete_stable_ivalue(uint64_t *value) { delete value; return 0; }
const char *torch_exception_get_what() { return "an error of torch"; }
const char *torch_exception_get_what_without_backtrace() { return "an error of torch"; }
}
"""


@functools.cache
def load() -> Any:
    """The operators. Raises RuntimeError where there are none."""
    folder = os.environ.get(FOLDER)
    path = Path(folder or "", LIBRARY)
    if not folder or not path.is_file():
        raise RuntimeError(f"{FOLDER} does not name a folder with {LIBRARY}")
    of_torch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if not hasattr(of_torch, "torch_new_stable_ivalue"):
        library = Path(tempfile.mkdtemp(), "added.so")
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
        subprocess.run(command, input=ADDED, text=True, check=True)
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    torch.ops.load_library(path)
    return torch.ops._C_gguf


def in_blocks(ids: Tensor, num_experts: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of ids (M, top_k) by expert, each expert's padded to whole blocks with the number of
    all pairs; the expert of each block; how many there are with the padding, (1,). int32."""
    flat = ids.flatten().long()
    counts = torch.bincount(flat, minlength=num_experts)
    blocks = (counts + size - 1) // size
    experts = torch.arange(num_experts, device=ids.device).repeat_interleave(blocks)
    order = flat.argsort(stable=True)
    begin, padded = counts.cumsum(0) - counts, (blocks.cumsum(0) - blocks) * size
    place = torch.arange(len(flat), device=ids.device) + (padded - begin)[flat[order]]
    pairs = flat.new_full((len(experts) * size,), len(flat))
    pairs[place] = order
    return pairs.int(), experts.int(), torch.tensor([len(pairs)], device=ids.device).int()


def activated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def summed(rows: Tensor, weights: Tensor) -> Tensor:
    of_token = rows.view(*weights.shape, -1).float()
    return (of_token * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


@functools.cache
def between_products(compiled: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """`activated` and `summed`, compiled once for all sizes."""
    parts = activated, summed
    return tuple(torch.compile(part, dynamic=True) for part in parts) if compiled else parts


def make(weights: Weights) -> Callable[[Cell], Callable[[int], Tensor]]:
    """The layer on weights of one type: a builder whose calls run on one routing set."""
    operators, of = load(), TYPES[weights.scheme]
    shape, w13, w2 = weights.shape, weights.blocks13, weights.blocks2
    assert w13 is not None and w2 is not None
    if shape.ep_size > 1:
        raise ValueError("does not leave out experts held elsewhere")
    E, top_k, K = shape.num_experts, shape.top_k, shape.hidden_size
    activate, combine = between_products(w13.is_cuda)

    def by_token(x: Tensor, routing: RoutingSet) -> Tensor:
        M = x.shape[0]
        vector = operators.ggml_moe_a8_vec
        h = activate(vector(x, w13, routing.ids, top_k, of.number, w13.shape[1], M))
        y = vector(h, w2, routing.ids, 1, of.number, K, M * top_k)
        return combine(y, routing.weights)

    def by_blocks(x: Tensor, routing: RoutingSet, blocks: tuple[Tensor, ...]) -> Tensor:
        M = x.shape[0]
        product = operators.ggml_moe_a8
        h = activate(product(x, w13, *blocks, of.number, w13.shape[1], top_k, M))
        y = product(h, w2, *blocks, of.number, K, 1, M * top_k)
        return combine(y, routing.weights)

    def build(cell: Cell) -> Callable[[int], Tensor]:
        x = cell.hidden_states
        if x.shape[0] <= VECTOR_TOKENS or of.name in NO_BLOCKS:
            return lambda which: by_token(x, cell.sets[which])
        size = operators.ggml_moe_get_block_size(of.number)
        blocks = [in_blocks(routing.ids, E, size) for routing in cell.sets]
        return lambda which: by_blocks(x, cell.sets[which], blocks[which])

    return build
