"""The shared fake kernels, which check shapes and dtypes, and the row checks that launchers
repeat.

Comparisons are between single dimensions, so that dynamic and unbacked row counts can be traced.
`bits` are those of stored elements: data have fewer columns if elements share bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops.meta.scales import sizes_of_layout, unpacked_size

_IDS = (torch.int32, torch.int64)


class Bits(NamedTuple):
    """Bits of a stored element of each operand; 8 for those that are not quantized."""

    w13: int  # or of the single weight of grouped_linear
    w2: int
    x: int  # of an input that arrives quantized


def _check(condition: bool, message: str) -> None:
    torch._check(condition, lambda: message)


def _check_rows(rows: Any, expected: Any, message: str) -> None:
    # An assertion about unbacked rows would become a guard, whose failure Dynamo reports as its
    # own bug. The launcher checks them instead, and names the argument.
    _check(not guard_or_false(rows != expected), message)


def _check_workspaces(a: Any) -> None:
    _check(a.index_workspace.dtype == torch.int32, "index_workspace must be int32")


def _check_weights(a: Any, width: int, bits: Bits) -> None:
    _check(a.w13.ndim == 3 and a.w2.ndim == 3, "w13 and w2 must be 3-D")
    _check(a.w13.shape[0] == a.w2.shape[0], "w13 and w2 must hold the same experts")
    columns = unpacked_size(a.w13.shape[2], bits.w13)
    if sizes_of_layout(a.layout):  # padded data
        _check(columns >= width, "w13 must have at least as many columns as hidden_states")
        width = columns
    _check(columns == width, "w13 must have as many columns as hidden_states")
    _check(a.w2.shape[1] == width, "w2 must have as many rows as hidden_states has columns")
    N, I = a.w13.shape[1], unpacked_size(a.w2.shape[2], bits.w2)
    _check(N == I or N == 2 * I, "w13 must have as many rows as w2 has columns, or twice that")


def _rows(name: str, rows: int, of: str, expected: int) -> None:
    raise ValueError(f"{name} must have one row per row of {of}, {expected}, got {rows}")


def _widths(x: str, K: int, w13: Any, w2: Any, bits: Bits, layout: str) -> None:
    (E, N, width), (experts, rows, I) = w13.shape, w2.shape
    if bits.w13 != 8 or bits.w2 != 8:
        width, I = unpacked_size(width, bits.w13), unpacked_size(I, bits.w2)
        if width > K and sizes_of_layout(layout):  # padded data
            K = width
    if width != K or rows != K or experts != E or (I != N and 2 * I != N):
        raise ValueError(
            f"w13 and w2 must have shapes (E, N, K) and (E, K, I) for {x} of width {K}, "
            f"got {tuple(w13.shape)} and {tuple(w2.shape)}"
        )


def _rows_of_scale(name: str, x: Any, scale: Any) -> None:
    """ValueError unless each row of an input that arrives quantized has its scales."""
    if scale.ndim == x.ndim and scale.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{name}_scale must have the rows of {name}, {tuple(x.shape[:-1])}, got "
            f"{tuple(scale.shape[:-1])}"
        )


def _width(x: Any, scale: Any, x_bits: int) -> int:
    """Columns that an input stands for; it has scales if it arrives quantized."""
    return x.shape[-1] if scale is None else unpacked_size(x.shape[-1], x_bits)


def rows_experts(a: Any) -> None:
    """Check the real numbers of rows of `<backend>_experts`, of an ExpertsArgs or ExpertsCall,
    before anything is launched. With an exchange hidden_states may be those of this rank, of which
    whoever opens it has the number.
    """
    rows = (a.topk_ids if a.options.exchange else a.hidden_states).shape[0]
    if a.hidden_states_scale is not None:
        _rows_of_scale("hidden_states", a.hidden_states, a.hidden_states_scale)
    ids, weights = a.topk_ids.shape[0], a.topk_weights.shape[0]
    if ids != rows:
        _rows("topk_ids", ids, "hidden_states", rows)
    if weights != rows:
        _rows("topk_weights", weights, "hidden_states", rows)


def _sizes_of_routing(a: Any) -> None:
    rows, out = a.topk_ids.shape[0], a.out.shape[0]
    if out != rows:
        _rows("out", out, "hidden_states", rows)
    if a.topk_weights.shape[1] != a.topk_ids.shape[1]:
        raise ValueError("topk_ids and topk_weights must have equal top_k")


def sizes_experts(a: Any, bits: Bits) -> None:
    """Check the real sizes of `<backend>_experts` but for rows of inputs: those that a plan has
    checked, which operators in graphs are called without.
    """
    _sizes_of_routing(a)
    K = _width(a.hidden_states, a.hidden_states_scale, bits.x)
    _widths("hidden_states", K, a.w13, a.w2, bits, a.layout)


def sizes_resident(a: Any, bits: Bits) -> None:
    """The same of `resident_experts`; who finds the weights compares the width with theirs."""
    _sizes_of_routing(a)
    K = _width(a.hidden_states, a.hidden_states_scale, bits.x)
    if a.out.shape[1] != K:
        raise ValueError(f"out must have the width of hidden_states, {K}, got {a.out.shape[1]}")


def rows_batched_experts(a: Any) -> None:
    """Check the real numbers of rows of `<backend>_batched_experts`."""
    x = a.hidden_states
    if a.hidden_states_scale is not None:
        _rows_of_scale("hidden_states", x, a.hidden_states_scale)
    if a.out.shape[:2] != x.shape[:2]:
        _rows("out", a.out.shape[1], "hidden_states", x.shape[1])


def sizes_batched_experts(a: Any, bits: Bits) -> None:
    """Check the other real sizes of `<backend>_batched_experts`."""
    K = _width(a.hidden_states, a.hidden_states_scale, bits.x)
    if a.out.shape[2] != K:
        raise ValueError(f"out must have the width of hidden_states, {K}, got {a.out.shape[2]}")
    _widths("hidden_states", K, a.w13, a.w2, bits, a.layout)


def rows_grouped_linear(a: Any) -> None:
    """Check the real numbers of rows of `<backend>_grouped_linear`."""
    if a.x_scale is not None:
        _rows_of_scale("x", a.x, a.x_scale)
    if a.out.shape[0] != a.x.shape[0]:
        _rows("out", a.out.shape[0], "x", a.x.shape[0])


def sizes_grouped_linear(a: Any, bits: Bits) -> None:
    """Check the other real sizes of `<backend>_grouped_linear`."""
    K = _width(a.x, a.x_scale, bits.x)
    columns = unpacked_size(a.weight.shape[2], bits.w13)
    if columns != K or a.out.shape[1] != a.weight.shape[1]:
        raise ValueError(
            f"weight must have shape (E, N, K) for x of width {K} and out of width "
            f"{a.out.shape[1]}, got {tuple(a.weight.shape)}"
        )


def _check_input(
    name: str, x: Any, scale: Any, out: Any, x_bits: int, may_be_fp32: bool = False
) -> Any:
    """The columns that an input stands for. Unless it arrives quantized, `out` has its dtype, or
    where it may be, fp32.
    """
    if scale is None:
        fits = x.dtype == out.dtype or (may_be_fp32 and out.dtype == torch.float32)
        _check(fits, f"out must have the dtype of {name}")
        return x.shape[-1]
    _check(out.dtype.is_floating_point, "out must be floating point")
    if scale.ndim == x.ndim:
        rows = f"{name}_scale must have one row per row of {name}"
        _check_rows(scale.shape[-2], x.shape[-2], rows)
    return unpacked_size(x.shape[-1], x_bits)


def check_experts(a: Any, bits: Bits) -> None:
    """Checks of `<backend>_experts`; `a` holds the op's arguments by name."""
    _check_weights(a, check_resident(a, bits), bits)


def check_resident(a: Any, bits: Bits) -> Any:
    """Checks of `resident_experts`, and of all but the weights of others. Returns K."""
    _check_workspaces(a)
    x, ids, weights = a.hidden_states, a.topk_ids, a.topk_weights
    _check(x.ndim == 2 and a.out.ndim == 2, "hidden_states and out must be 2-D")
    _check(ids.ndim == 2 and weights.ndim == 2, "topk_ids and topk_weights must be 2-D")
    rows = (ids if a.options.exchange else x).shape[0]  # as in rows_experts
    _check_rows(ids.shape[0], rows, "topk_ids must have one row per row of hidden_states")
    _check_rows(weights.shape[0], rows, "topk_weights must have one row per row of hidden_states")
    _check_rows(a.out.shape[0], rows, "out must have one row per row of hidden_states")
    _check(ids.shape[1] == weights.shape[1], "topk_ids and topk_weights must have equal top_k")
    scale = a.hidden_states_scale
    K = _check_input("hidden_states", x, scale, a.out, bits.x, a.options.batch_invariant)
    _check(a.out.shape[1] == K, "out must have hidden_states' width")
    _check(ids.dtype in _IDS, "topk_ids must be int32 or int64")
    _check(weights.dtype.is_floating_point, "topk_weights must be floating point")
    return K


def check_adapted(a: Any, bits: Bits) -> None:
    """Checks of `adapted_experts`."""
    check_experts(a, bits)
    ids = a.adapter_ids
    _check(a.adapter_workspace.dtype == torch.float32, "adapter_workspace must be fp32")
    _check(ids.ndim == 1 and ids.dtype in _IDS, "adapter_ids must be 1-D, int32 or int64")
    _check_rows(ids.shape[0], a.out.shape[0], "adapter_ids must have one per row of hidden_states")
    _check(not _wrong_matrix(a, bits), "adapters must have the shapes of the weights")


def rows_adapted(a: Any) -> None:
    """Check the real numbers of rows of `adapted_experts`."""
    rows_experts(a)
    if a.adapter_ids.shape[0] != a.hidden_states.shape[0]:
        _rows("adapter_ids", a.adapter_ids.shape[0], "hidden_states", a.hidden_states.shape[0])


def sizes_adapted(a: Any, bits: Bits) -> None:
    """Check the other real sizes of `adapted_experts`."""
    sizes_experts(a, bits)
    wrong = _wrong_matrix(a, bits)
    if wrong:
        raise ValueError(
            f"{wrong} must have the experts, rows and columns of its weight, and its partner's "
            f"rank, got {tuple(getattr(a, wrong).shape)}"
        )


def _wrong_matrix(a: Any, bits: Bits) -> str:
    """Name of a matrix of `adapted_experts` whose shape does not fit; "" if all do."""
    (E, N, _), n = a.w13.shape, a.adapter_scales.shape[0]
    K, I = a.out.shape[1], unpacked_size(a.w2.shape[2], bits.w2)
    for suffix, rows, columns in (("13", N, K), ("2", K, I)):
        of_a, of_b = getattr(a, f"a{suffix}"), getattr(a, f"b{suffix}")
        if of_a is None and of_b is None:
            continue
        if of_a is None or of_a.ndim != 4 or of_a.shape != (n, E, of_a.shape[2], columns):
            return f"a{suffix}"
        if of_b is None or of_b.shape != (n, E, rows, of_a.shape[2]):
            return f"b{suffix}"
    return ""


def check_batched_experts(a: Any, bits: Bits) -> None:
    """Checks of `<backend>_batched_experts`."""
    _check_workspaces(a)
    x = a.hidden_states
    _check(x.ndim == 3 and a.out.ndim == 3, "hidden_states and out must be 3-D")
    _check(x.shape[0] == a.w13.shape[0], "hidden_states must have one block per expert")
    _check_rows(a.out.shape[1], x.shape[1], "out must have hidden_states' rows")
    K = _check_input("hidden_states", x, a.hidden_states_scale, a.out, bits.x)
    _check(a.out.shape[2] == K, "out must have hidden_states' width")
    _check(a.expert_num_tokens.ndim == 1, "expert_num_tokens must be 1-D")
    _check(a.expert_num_tokens.shape[0] == x.shape[0], "expert_num_tokens must have E entries")
    _check(a.expert_num_tokens.dtype in _IDS, "expert_num_tokens must be int32 or int64")
    _check_weights(a, K, bits)


def check_grouped_linear(a: Any, bits: Bits) -> None:
    """Checks of `<backend>_grouped_linear`."""
    _check_workspaces(a)
    _check(a.x.ndim == 2 and a.out.ndim == 2, "x and out must be 2-D")
    _check_rows(a.out.shape[0], a.x.shape[0], "out must have one row per row of x")
    K = _check_input("x", a.x, a.x_scale, a.out, bits.x)
    columns = unpacked_size(a.weight.shape[2], bits.w13)
    _check(columns == K, "weight must have as many columns as x")
    _check(a.out.shape[1] == a.weight.shape[1], "out must have as many columns as weight has rows")
    _check(a.offsets.ndim == 1, "offsets must be 1-D")
    _check(a.offsets.shape[0] == a.weight.shape[0], "offsets must have E entries")
    _check(a.offsets.dtype == torch.int32, "offsets must be int32")
