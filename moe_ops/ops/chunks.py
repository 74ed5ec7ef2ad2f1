"""Chunks: an operator whose workspaces have no room for all rows runs them in parts, one after
another.

Kernel configs are chosen for all rows, and only the tensors of a call are cut. So every row is
computed as without chunks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops.meta.workspace import cdiv, maximum, minimum, round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs

ALIGNMENT = 16  # tokens: a chunk of a tensor starts at a multiple of 16 bytes if the tensor does

_OF_TOKENS = ("out", "hidden_states", "topk_weights", "topk_ids")  # (M, ..)


def chunks(a: ExpertsArgs) -> list[ExpertsArgs]:
    """Arguments of the chunks: at most `chunk_rows` tokens each, in nearly equal numbers."""
    M, rows = a.hidden_states.shape[0], a.options.chunk_rows
    if not 0 < rows < M:
        return [a]
    step = min(rows, round_up(cdiv(M, cdiv(M, rows)), ALIGNMENT))
    of_tokens, scale = {name: getattr(a, name) for name in _OF_TOKENS}, a.hidden_states_scale
    if scale is not None and scale.ndim == 2:  # else one scale of all
        of_tokens["hidden_states_scale"] = scale
    return [
        a._replace(**{name: value[m : m + step] for name, value in of_tokens.items()})
        for m in range(0, M, step)
    ]


def experts_of_chunk(E: int, T: int, chunk_rows: int) -> int:
    """Number of experts in a chunk of `batched_experts` with E experts of T rows: as many as fit
    `chunk_rows` rows, each padded to a multiple of 128, but at least one. int or SymInt.
    """
    return maximum(1, minimum(E, chunk_rows // round_up(maximum(T, 1), 128)))


def batched_chunks(a: BatchedExpertsArgs) -> list[BatchedExpertsArgs]:
    """Arguments of the chunks of experts, in nearly equal numbers."""
    E, T = a.hidden_states.shape[:2]
    most = experts_of_chunk(E, T, a.options.chunk_rows) if a.options.chunk_rows else E
    if most == E:
        return [a]
    step = cdiv(E, cdiv(E, most))
    written = ("workspace13", "workspace2", "index_workspace")
    of_experts: dict[str, Any] = {
        name: value
        for name, value in zip(a._fields, a, strict=True)
        if isinstance(value, Tensor) and name not in written and value.shape[:1] == (E,)
    }
    return [
        a._replace(**{name: value[e : e + step] for name, value in of_experts.items()})
        for e in range(0, E, step)
    ]
