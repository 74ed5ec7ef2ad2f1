"""How the kernels around DeepGEMM's products are launched, and how the library is called. Torch alone is imported here.

DeepGEMM compiles a kernel with nvcc when a shape is first met, 1 to 3 s, and keeps it on disk.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.activations import NO_LIMIT
from moe_ops.kernels.triton_launch import Gpu, Launch, pointers, run
from moe_ops.kernels.triton_rows import activation_of
from moe_ops.meta.workspace import cdiv, round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs

# Rows that a group is padded to: get_mk_alignment_for_contiguous_layout(), which is 128 unless set otherwise. On SM90
# it is the products' BLOCK_M too, so that no block reaches into the next expert's rows.
ALIGNMENT = 128
PARTS = 128  # programs that place pairs, at most
CHUNK = 128  # pairs that they handle at a time
_SCATTER_GROUPS = 16  # groups of 128 columns that a program handles at a time
_ACTIVATE_GROUPS = 16
_COMBINE_COLUMNS = 1024
_PROGRAMS = 4096  # of a launch over batches, about, that share what rows there are


@cache
def library() -> Any:
    """The module deep_gemm.

    Raises:
        ImportError: it is not installed, or does not load.
        RuntimeError: groups are padded to more rows than workspaces have room for.
    """
    try:
        module = importlib.import_module("deep_gemm")
    except Exception as error:  # its import runs native code, whose errors are of many types
        raise ImportError(
            f"deep_gemm cannot be imported ({type(error).__name__}: {error}); "
            "pip install 'moe-ops[deepgemm]'"
        ) from error
    return module


def alignment() -> int:
    """Rows that a group is padded to. Asked for at each call, as anybody may set it: blocks of the products have as many."""
    rows = int(library().get_mk_alignment_for_contiguous_layout())
    if ALIGNMENT % rows:
        raise RuntimeError(
            f"deep_gemm's alignment of contiguous layouts must divide {ALIGNMENT}, got {rows}; "
            f"call deep_gemm.set_mk_alignment_for_contiguous_layout({ALIGNMENT})"
        )
    return rows


# --- calls of the library -----------------------------------------------------------------------

_warm: set[tuple] = set()  # products whose kernels are compiled and loaded


def check_warm(keys: tuple[tuple, ...], device: int) -> None:
    """Raise while a CUDA graph is captured, unless the products of these keys (none: any) have run before."""
    if _warm and _warm.issuperset(keys):
        return
    if device >= 0 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "moe_ops backend 'deep_gemm' has no compiled kernel for this call and cannot compile one while a "
            "CUDA graph is captured; warm up first: call the same function once with tensors of these shapes "
            "and dtypes outside of torch.cuda.graph(...), or use moe_ops.warmup, then capture"
        )


def warmed(keys: tuple[tuple, ...]) -> None:
    """The products of these keys have run."""
    _warm.update(keys)


class Operand(NamedTuple):
    """Rows or weights as a product takes them: in bf16, or quantized with scales."""

    data: Tensor
    scale: Tensor | None = None
    scales: str = ""  # what they are, in the words of backends/deep_gemm/rows.py
    width: int = 128  # columns that share one

    @property
    def argument(self) -> Any:
        return self.data if self.scale is None else (self.data, self.scale)


def options_of(x: Operand, w: Operand) -> dict[str, Any]:
    """How a product is told what its scales are; of fp32 ones it knows."""
    return {"recipe_a": (1, x.width), "recipe_b": (1, w.width)} if x.scales == "ue8m0" else {}


def product_keys(
    kind: str, w13: Operand, w2: Operand, expected: int, rows: int
) -> tuple[tuple, ...]:
    """What the choice of a layer's two kernels depends on: what the library is told to expect, and the rows of a block
    (of the masked layout it chooses those itself)."""
    return tuple(
        [(kind, expected, rows, w.data.shape, w.data.dtype, w.data.device) for w in (w13, w2)]
    )


def expected_rows(pairs: int, experts: int) -> int:
    """Rows an expert is expected to have: its share of the pairs, in powers of two blocks.

    So there are few kernels to compile: the library chooses one by how many blocks there will be.
    """
    blocks = cdiv(cdiv(pairs, experts), ALIGNMENT)
    return ALIGNMENT << (blocks - 1).bit_length()


def grouped_product(d: Tensor, x: Operand, w: Operand, groups: Tensor, expected: int) -> None:
    """d (rows, N) = x (rows, K) @ w[expert of the row] (N, K).T, rows in the contiguous layout.

    `groups` (E,): the row behind each expert's last pair. Told the expert of each row instead, the library also loads
    blocks of padding alone (and multiplies them in bf16), up to the most that a routing can need: docs/performance.md.
    """
    options = options_of(x, w)
    options |= {"use_psum_layout": True, "expected_m_for_psum_layout": expected}
    kind = "bf16" if x.scale is None else "fp8_fp4"
    function = getattr(library(), f"m_grouped_{kind}_gemm_nt_contiguous")
    function(x.argument, w.argument, d, groups, **options)


def masked_product(d: Tensor, x: Operand, w: Operand, counts: Tensor, expected: int) -> None:
    """d (E, R, N) = x (E, R, K) @ w (E, N, K).T in the rows before each count (E,), and whole blocks of rows behind."""
    kind = "bf16" if x.scale is None else "fp8_fp4"
    function = getattr(library(), f"m_grouped_{kind}_gemm_nt_masked")
    function(x.argument, w.argument, d, counts, expected, **options_of(x, w))


# --- the contiguous layout ----------------------------------------------------------------------


class Index(NamedTuple):
    """The int32 workspace: what each part of it starts at. int or SymInt."""

    rows: int  # (S,) the row of each pair
    counts: int  # (PARTS, EP) pairs of each expert in each part
    end: int


def padded_experts(E: int) -> int:
    """EP of backends/deep_gemm/permute.py."""
    return max(16, 1 << (E - 1).bit_length())


def index_parts(pairs: Any, E: int) -> Index:
    """The parts behind the end rows (E,), each beginning on 16 bytes."""
    starts = [round_up(E, 4)]
    for size in (pairs, PARTS * padded_experts(E)):
        starts.append(starts[-1] + (size + 3) // 4 * 4)
    return Index(*starts)


class Placed(NamedTuple):
    """Where the rows of x lie in a layout of blocks of R rows."""

    rows: Tensor | None  # (S,) of each pair; None of batches
    groups: (
        Tensor  # (E,) the row behind each expert's last pair, or its pairs in the masked layout
    )
    R: int  # all rows of the contiguous layout, those of an expert in the masked one


def place(a: ExpertsArgs, size: int, rows_of_block: int, chip: Gpu) -> tuple[list[Launch], Placed]:
    """Launches that sort pairs by expert into the contiguous layout of `size` rows."""
    ids, expert_map, index = a.topk_ids, a.expert_map, a.index_workspace
    E, pairs = a.w13.shape[0], ids.numel()
    at = index_parts(pairs, E)
    rows, counts, ends = index[at.rows : at.rows + pairs], index[at.counts : at.end], index[:E]
    has_map = expert_map is not None
    num_ids, map_stride = (expert_map.shape[0], expert_map.stride(0)) if has_map else (E, 0)
    length = round_up(cdiv(pairs, PARTS), CHUNK)
    routing = (ids, expert_map, pairs, E, num_ids, ids.shape[1], *ids.stride(), map_stride, length)
    constants = (has_map, chip.dependent)
    EP = padded_experts(E)
    grid = (cdiv(pairs, length), 1, 1)
    placing = (rows, ends, counts, *routing, EP, CHUNK, rows_of_block, *constants)
    launches = [
        Launch("deep_gemm_count", grid, (counts, *routing, EP, CHUNK, *constants)),
        Launch("deep_gemm_place", grid, placing, 8),
    ]
    return launches, Placed(rows, ends, size)


def place_batches(a: BatchedExpertsArgs, R: int, chip: Gpu) -> tuple[Launch, Placed]:
    """The launch that counts rows of batched x, which lie as they are in the masked layout of R rows an expert."""
    E, T, _ = a.hidden_states.shape
    sizes, counts = a.expert_num_tokens, a.index_workspace[:E]
    args = (counts, sizes, T, E, sizes.stride(0), 128, chip.dependent)
    return Launch("deep_gemm_batches", (cdiv(E, 128), 1, 1), args), Placed(None, counts, R)


def _programs(tasks: int, experts: int) -> int:
    """Programs that share the tasks of one expert, `tasks` at most.

    A program for each of E * T rows took 1 us for 1000 of them. Not timed: all rows in one of many experts.
    """
    return min(tasks, cdiv(_PROGRAMS, experts))


def _first_axis(x: Tensor, placed: Placed, top_k: int) -> tuple[int, int]:
    """(programs along the first axis, those of one expert): one a token, or some that share a batch."""
    if placed.rows is not None:
        return placed.rows.numel() // top_k, 1
    programs = _programs(x.shape[1], x.shape[0])
    return x.shape[0] * programs, programs


def scatter(x: Tensor, y: Operand, placed: Placed, top_k: int, chip: Gpu) -> Launch:
    """x (M, K) or (E, T, K), quantized where y has scales, copied to the rows of its pairs."""
    K, (programs, shared) = x.shape[-1], _first_axis(x, placed, top_k)
    args = (*kernel_arguments(y, chip), x, *placed, K, *batch_strides(x))
    args += (shared, top_k, y.scales, y.width, _SCATTER_GROUPS, chip.native, chip.dependent)
    return Launch("deep_gemm_scatter", (programs, cdiv(K, _SCATTER_GROUPS * 128), 1), args)


def activate(
    a: ExpertsArgs | BatchedExpertsArgs,
    h: Operand,
    x: Tensor,
    placed: Placed,
    weights: Tensor | None,
    chip: Gpu,
) -> Launch:
    """h = activation(x), quantized where h has scales. `weights` (S, 1) multiply x first."""
    I = h.data.shape[-1]  # noqa: E741
    if placed.rows is not None:
        pairs, shared = placed.rows.numel(), 1
        programs = cdiv(pairs * (I // 128), _ACTIVATE_GROUPS)
    else:
        E, pairs = h.data.shape[0], 0
        shared = _programs(cdiv(placed.R * (I // 128), _ACTIVATE_GROUPS), E)
        programs = E * shared
    function, gated, interleaved = activation_of(a.activation)
    args = (*kernel_arguments(h, chip), x, placed.rows, placed.groups, weights)
    args += (0 if weights is None else weights.stride(0), placed.R, pairs, I)
    args += (a.alpha, a.beta, a.limit, shared, function, gated, interleaved, a.limit < NO_LIMIT)
    args += (h.scales, h.width, _ACTIVATE_GROUPS, chip.native, chip.dependent)
    return Launch("deep_gemm_activate", (programs, 1, 1), args)


def combine(out: Tensor, y: Tensor, weights: Tensor | None, placed: Placed, top_k: int) -> Launch:
    """out (M, K) or (E, T, K): the sum of a token's rows of y, by weights (M, top_k) or as they are."""
    K, (programs, shared) = out.shape[-1], _first_axis(out, placed, top_k)
    args = (out, y, weights, *placed, K, *((0, 0) if weights is None else weights.stride()))
    args += (*batch_strides(out), shared, top_k, _COMBINE_COLUMNS)
    return Launch("deep_gemm_combine", (programs, cdiv(K, _COMBINE_COLUMNS), 1), args)


def batch_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of batches (0 where there are none), rows and columns."""
    return x.stride() if x.ndim == 3 else (0, *x.stride())


def kernel_arguments(operand: Operand, chip: Gpu) -> tuple[Tensor, Tensor | None]:
    """Data and scales for Triton, which takes e4m3 as bytes where the GPU does not know it."""
    data, scale = operand[:2]
    if scale is not None and not chip.native:
        data = data.view(torch.uint8)
    if operand.scales == "ue8m0":  # by bytes; kernels take no more than the address
        scale = scale.transpose(-2, -1).view(torch.uint8)
    return data, scale


def dense(t: Tensor) -> Tensor:
    """A contiguous tensor with the strides that its shape gives: the library looks at those of single elements too."""
    return t.view(-1).view(t.shape) if 1 in t.shape else t


def start(launches: list[Launch], key: tuple, device: int, dependent: bool = False) -> None:
    """Run kernels; `key` holds what they are specialised on besides their tensors."""
    tensors = [arg for launch in launches for arg in launch.args if isinstance(arg, Tensor)]
    names = tuple([launch.kernel for launch in launches])
    run(launches, (device, names, key, pointers(*tensors)), device, dependent)
