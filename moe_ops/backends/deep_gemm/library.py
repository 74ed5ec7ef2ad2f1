"""DeepGEMM's grouped GEMMs: loading the library, and its calls. Imports torch alone.

DeepGEMM compiles a kernel with nvcc at the first call with a shape, which takes seconds, and
caches it on disk.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_ops.kernels.rows.operand import Operand
from moe_ops.meta.workspace import cdiv

# Rows that a group is padded to: get_mk_alignment_for_contiguous_layout(), which is 128 unless set
# otherwise. On SM90 it is also the GEMMs' BLOCK_M, so that no block has rows of two experts.
ALIGNMENT = 128


@cache
def library() -> Any:
    """The module deep_gemm.

    Raises:
        ImportError: it is not installed, or does not load.
        RuntimeError: groups are padded to more rows than fit into the workspaces.
    """
    try:
        module = importlib.import_module("deep_gemm")
    except Exception as error:  # its import runs native code, which raises errors of many types
        raise ImportError(
            f"deep_gemm cannot be imported ({type(error).__name__}: {error}); "
            "pip install sgl-deep-gemm"
        ) from error
    return module


def alignment() -> int:
    """Rows that a group is padded to, which is the rows of the GEMMs' blocks. Read at each call,
    because anybody may set it.
    """
    rows = int(library().get_mk_alignment_for_contiguous_layout())
    if ALIGNMENT % rows:
        raise RuntimeError(
            f"deep_gemm's alignment of contiguous layouts must divide {ALIGNMENT}, got {rows}; "
            f"call deep_gemm.set_mk_alignment_for_contiguous_layout({ALIGNMENT})"
        )
    return rows


# --- calls of the library ------------------------------------------------------------------------

_warm: set[tuple] = set()  # GEMMs whose kernels are compiled and loaded


def check_warm(keys: tuple[tuple, ...], device: int) -> None:
    """Raise while a CUDA graph is captured, unless the GEMMs of these keys have run before, or if
    there are no keys, unless any have.
    """
    if _warm and _warm.issuperset(keys):
        return
    if device >= 0 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "moe_ops backend 'deep_gemm' has no compiled kernel for this call and cannot compile "
            "one while a CUDA graph is captured; warm up first: call the same function once with "
            "tensors of these shapes and dtypes outside of torch.cuda.graph(...), or use "
            "moe_ops.warmup, then capture"
        )


def mark_warm(keys: tuple[tuple, ...]) -> None:
    """Record that the GEMMs of these keys have run."""
    _warm.update(keys)


def recipes(x: Operand, w: Operand) -> dict[str, Any]:
    """Options that describe a GEMM's scales; fp32 scales need none."""
    return {"recipe_a": (1, x.width), "recipe_b": (1, w.width)} if x.scales == "ue8m0" else {}


def gemm_keys(
    kind: str, w13: Operand, w2: Operand, expected: int, block_m: int
) -> tuple[tuple, ...]:
    """Keys of a layer's two GEMMs: everything on which the library's choice of kernels depends.
    That includes the rows that it is told to expect, and the rows of a block (0 for the masked
    layout, for which it chooses them itself).
    """
    return tuple(
        [(kind, expected, block_m, w.data.shape, w.data.dtype, w.data.device) for w in (w13, w2)]
    )


def expected_rows(pairs: int, experts: int) -> int:
    """Rows that an expert is expected to have: its share of the pairs of `experts`, of all
    devices, rounded to a power of two of blocks.

    The library chooses a kernel by the number of blocks, so that this keeps the number of kernels
    to compile small.
    """
    blocks = cdiv(cdiv(pairs, experts), ALIGNMENT)
    return ALIGNMENT << (blocks - 1).bit_length()


def grouped_gemm(d: Tensor, x: Operand, w: Operand, ends: Tensor, expected: int) -> None:
    """d (rows, N) = x (rows, K) @ w[expert of the row] (N, K).T, rows in the contiguous layout.

    `ends` (E,): the row after each expert's last pair. If the library is instead given the expert
    of each row, it also loads blocks that are all padding (and multiplies them in bf16), as many
    as the worst routing needs: docs/performance.md.
    """
    options = recipes(x, w)
    options |= {"use_psum_layout": True, "expected_m_for_psum_layout": expected}
    kind = "bf16" if x.scale is None else "fp8_fp4"
    function = getattr(library(), f"m_grouped_{kind}_gemm_nt_contiguous")
    function(x.argument, w.argument, d, ends, **options)


def masked_gemm(d: Tensor, x: Operand, w: Operand, counts: Tensor, expected: int) -> None:
    """d (E, R, N) = x (E, R, K) @ w (E, N, K).T in the rows before each count (E,), and in the
    rest of the last block of rows.
    """
    kind = "bf16" if x.scale is None else "fp8_fp4"
    function = getattr(library(), f"m_grouped_{kind}_gemm_nt_masked")
    function(x.argument, w.argument, d, counts, expected, **recipes(x, w))


def dense(t: Tensor) -> Tensor:
    """A contiguous tensor whose strides follow from its shape also for dimensions of size 1, which
    the library checks.
    """
    return t.view(-1).view(t.shape) if 1 in t.shape else t
