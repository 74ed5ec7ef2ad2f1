"""vLLM 0.26's experts on CUTLASS as a peer of experts.py: a whole layer of its compiled operators,
called in the order, and with the buffers, in which vLLM itself calls them.

MOE_OPS_BENCH_VLLM names a folder with _C_stable_libtorch.abi3.so and
_moe_C_stable_libtorch.abi3.so out of vLLM's wheel, of a version for this torch, and if wanted a
file VERSION. The operators are loaded from there; the package itself is not imported.

A layer quantizes the tokens, sorts the pairs and copies quantized rows, runs the first grouped
GEMM, silu-and-mul, quantizes, runs the second grouped GEMM and adds the rows up. vLLM has an
operator that activates and quantizes in one kernel by a known scale, and does not call it here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import Cell, RoutingSet, Weights
from torch import Tensor

FOLDER = "MOE_OPS_BENCH_VLLM"
LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
SCHEMES = ("fp8_channel", "fp8_tensor_static", "int4_w4a8")
# At most so many rows, its fp8 kernels take the weights as their first operand.
SWAPPED_ROWS = 64
W4A8_MULTIPLE = 256  # of K and I
W4A8_GROUP = 128


@functools.cache
def load() -> None:
    """Load the operators. Raises RuntimeError where there are none."""
    folder = os.environ.get(FOLDER)
    if not folder:
        raise RuntimeError(f"{FOLDER} does not name a folder with vLLM's compiled operators")
    for name in LIBRARIES:
        path = Path(folder, name)
        if not path.exists():
            raise RuntimeError(f"{FOLDER} must hold {name}, found none in {folder}")
        torch.ops.load_library(path)


def version() -> str | None:
    """What the folder says of itself, None if it says nothing."""
    path = Path(os.environ.get(FOLDER, ""), "VERSION")
    return path.read_text().strip() if path.is_file() else None


# A grouped GEMM: (out, rows, their scales, offsets of experts, problem sizes).
Gemm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def fp8_gemm(weight: Any, per_token: bool) -> Gemm:
    """cutlass_moe_mm on a weight (E, N, K) in fp8."""
    E, N, K = weight.qdata.shape
    of_rows = torch.full((E,), K, dtype=torch.int64, device=weight.device)
    of_out = torch.full((E,), N, dtype=torch.int64, device=weight.device)
    scale = weight.scale.contiguous()
    per_channel = scale.numel() > E

    def gemm(out: Tensor, rows: Tensor, row_scale: Tensor, offsets: Tensor, sizes: Tensor) -> None:
        torch.ops._C.cutlass_moe_mm(
            out, rows, weight.qdata, row_scale, scale, offsets, sizes, of_rows, of_rows, of_out,
            per_token, per_channel,
        )  # fmt: skip

    return gemm


def w4a8_gemm(weight: Any) -> Gemm:
    """cutlass_w4a8_moe_mm on a weight of scheme int4_w4a8: its codes as signed numbers, eight in
    an int32, encoded and reordered; each scale of a group as a table of its eight multiples."""
    E, N, K = weight.shape
    # code - 8 in two's complement is the code with its highest bit flipped
    signed = (weight.qdata ^ 0x88).view(torch.int32)
    encoded, layouts = torch.ops._C.cutlass_encode_and_reorder_int4b_grouped(signed)
    groups = weight.scale.permute(0, 2, 1).contiguous()  # (E, K / 128, N), at most 56
    groups = torch.ops._C.cutlass_pack_scale_fp8(groups)
    channels = weight.channel_scale.contiguous()
    of_rows = torch.full((E,), K, dtype=torch.int64, device=weight.device)
    of_out = torch.full((E,), N, dtype=torch.int64, device=weight.device)
    of_groups = torch.zeros(E, 2, dtype=torch.int64, device=weight.device)
    of_groups[:, 0] = N

    def gemm(out: Tensor, rows: Tensor, row_scale: Tensor, offsets: Tensor, sizes: Tensor) -> None:
        torch.ops._C.cutlass_w4a8_moe_mm(
            out, rows, encoded, row_scale, channels, groups, W4A8_GROUP, offsets, sizes, of_rows,
            layouts, of_out, of_groups, None,
        )  # fmt: skip

    return gemm


@dataclass(frozen=True)
class Sort:
    """What moe_permute needs and leaves, allocated once: vLLM keeps these from call to call."""

    top_k: int
    num_experts: int
    pair: Tensor  # (M, top_k): 0, 1, 2, ..
    offsets: Tensor  # (E + 1,) int64
    row_of_pair: Tensor  # (M, top_k)
    pair_of_row: Tensor  # (M * top_k,)
    scratch: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, M: int, top_k: int, E: int, device: torch.device) -> Sort:
        R = M * top_k
        size = torch.ops._moe_C.moe_permute_sort_workspace_size(R, E)

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        workspace = torch.empty(size, dtype=torch.int8, device=device)
        pair = torch.arange(R, dtype=torch.int32, device=device).view(M, top_k)
        offsets = torch.empty(E + 1, dtype=torch.int64, device=device)
        scratch = (workspace, ints(M, top_k), ints(M, top_k), ints(M, top_k))
        return cls(top_k, E, pair, offsets, ints(M, top_k), ints(R), scratch)

    def permute(self, x: Tensor, scale: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        """Copy tokens to the rows of their pairs, sorted by expert; returns the rows' scales."""
        R = rows.shape[0]
        self.pair_of_row.fill_(R)
        torch.ops._moe_C.moe_permute_with_scratch(
            x, ids, self.pair, None, self.num_experts, self.num_experts, self.top_k, rows,
            self.offsets, self.row_of_pair, self.pair_of_row, *self.scratch,
        )  # fmt: skip
        if scale.dim() < 2:  # one for all rows
            return scale
        return scale[self.pair_of_row.clamp(max=R - 1) // self.top_k]

    def unpermute(self, rows: Tensor, weights: Tensor, out: Tensor) -> None:
        """Add up the rows of each token, times its router weights."""
        torch.ops._moe_C.moe_unpermute(
            rows, weights, self.row_of_pair.view(-1), self.offsets, self.top_k, out
        )


def quantize(rows: Tensor, known: Tensor | None, out: Tensor) -> Tensor:
    """Quantize rows to e4m3 by a known scale, or each row by its own; returns the scales."""
    if known is not None:
        torch.ops._C.static_scaled_fp8_quant(out, rows, known, None)
        return known
    scale = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(out, rows, scale, None)
    return scale


def make(weights: Weights) -> Callable[[Cell], Callable[[int], Tensor]]:
    """The layer on weights of one scheme: a builder whose calls run on one routing set."""
    load()
    shape, int4 = weights.shape, weights.scheme == "int4_w4a8"
    E, top_k, K, I = shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size
    if shape.ep_size > 1:
        raise ValueError("runs all experts on one GPU here")
    if int4 and (K % W4A8_MULTIPLE or I % W4A8_MULTIPLE):
        raise ValueError(f"needs multiples of {W4A8_MULTIPLE}, got K = {K} and I = {I}")
    known = [w.activation_scale for w in (weights.w13, weights.w2)]
    if int4:
        first, second = w4a8_gemm(weights.w13), w4a8_gemm(weights.w2)
    else:
        per_token = known[0] is None
        first, second = fp8_gemm(weights.w13, per_token), fp8_gemm(weights.w2, per_token)

    def build(cell: Cell) -> Callable[[int], Tensor]:
        x, device = cell.hidden_states, cell.hidden_states.device
        M, R = x.shape[0], x.shape[0] * top_k
        sort = Sort.of(M, top_k, E, device)
        sizes = torch.empty(2, E, 3, dtype=torch.int32, device=device)
        swapped = int4 or R <= SWAPPED_ROWS

        def empty(rows: int, columns: int, dtype: torch.dtype = x.dtype) -> Tensor:
            return torch.empty(rows, columns, dtype=dtype, device=device)

        # vLLM places these in two workspaces, where they overlap
        e4m3 = torch.float8_e4m3fn
        qx, rows, h, qh = empty(M, K, e4m3), empty(R, K, e4m3), empty(R, I), empty(R, I, e4m3)
        gate_up, y = empty(R, 2 * I), empty(R, K)

        def call(which: int) -> Tensor:
            routing: RoutingSet = cell.sets[which]
            out = torch.empty_like(x)
            scale = sort.permute(qx, quantize(x, known[0], qx), routing.ids, rows)
            torch.ops._C.get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
                sort.offsets, sizes[0], sizes[1], I, K, swapped
            )
            first(gate_up, rows, scale, sort.offsets[:-1], sizes[0])
            torch.ops._C.silu_and_mul(h, gate_up)
            second(y, qh, quantize(h, known[1], qh), sort.offsets[:-1], sizes[1])
            sort.unpermute(y, routing.weights, out)
            return out

        return call

    return build
