"""Low-rank adapters of experts: checks of a call's adapters, which are joined into one per
product.

Dimensions: E local experts, K hidden size, I intermediate size, N rows of w13, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import SymFloat, Tensor

from moe_ops.checks import check_number, check_rank, static_size
from moe_ops.ops.memory import refuse_lost
from moe_ops.ops.problem import Problem


class LoRA(NamedTuple):
    """A low-rank adapter of experts. Results are as if scale * b13[e] @ a13[e] were added to
    w13[e] and scale * b2[e] @ a2[e] to w2[e]; these sums are never formed.

    Matrices may have any floating-point dtype, and are rounded to that of hidden_states. A pair of
    None leaves its weight unadapted. The two pairs may have different ranks.
    """

    a13: Tensor | None  # (E, r, K)
    b13: Tensor | None  # (E, N, r)
    a2: Tensor | None  # (E, r, I)
    b2: Tensor | None  # (E, K, r)
    scale: float = 1.0


class LowRank(NamedTuple):
    """The adapter scale * b @ a of the weight (E, N, K) of one product."""

    a: Tensor  # (E, r, K)
    b: Tensor  # (E, N, r)
    scale: float


class Adapters(NamedTuple):
    """The adapters of both products of the experts."""

    w13: LowRank | None = None
    w2: LowRank | None = None


UNADAPTED = Adapters()


def check_call(adapters: Any, backend: str, hidden_states_scale: Tensor | None) -> list[Tensor]:
    """The tensors of one or several adapters.

    Raises:
        ValueError: they are not a `LoRA` or a sequence of them, or the backend is not one that
            adds adapters, or the input arrives quantized.
    """
    if backend not in ("auto", "torch"):
        raise ValueError(
            f"backend must be 'auto' or 'torch' for a call with adapters, got {backend!r}; merge "
            "them into the weights to run it there"
        )
    if hidden_states_scale is not None:
        raise ValueError(
            "hidden_states must not arrive quantized (hidden_states_scale must be None) where "
            "adapters are given: pass hidden_states unquantized"
        )
    return [t for _, one in _named(adapters) for t in one[:4] if isinstance(t, Tensor)]


def join(adapters: Any, problem: Problem, hidden_states: Tensor) -> Adapters:
    """The adapters of a call joined into one per product, by concatenation along the rank.

    Raises:
        ValueError: a matrix has a wrong shape, dtype or device for this `problem`, or lacks its
            partner; the message names it.
    """
    dtype, device = hidden_states.dtype, hidden_states.device
    E, K = problem.num_experts, problem.hidden_size
    sizes = (("13", problem.num_rows, K), ("2", K, problem.intermediate_size))
    parts: dict[str, list[LowRank]] = {"13": [], "2": []}
    for name, one in _named(adapters):
        check_number(f"{name}.scale", one.scale)
        for suffix, rows, columns in sizes:
            a, b = one[:2] if suffix == "13" else one[2:4]
            if a is None and b is None:
                continue
            rank = _check(f"{name}.a{suffix}", a, (E, None, columns), device)
            _check(f"{name}.b{suffix}", b, (E, rows, rank), device)
            assert a is not None and b is not None
            scale = one.scale if isinstance(one.scale, SymFloat) else float(one.scale)
            parts[suffix].append(LowRank(a, b, scale))
    return Adapters(*[_joined(part, dtype) for part in parts.values()])


def _named(adapters: Any) -> Iterator[tuple[str, LoRA]]:
    if isinstance(adapters, LoRA):
        yield "adapters", adapters
        return
    if not isinstance(adapters, Sequence):
        raise ValueError(
            f"adapters must be a moe_ops.LoRA or a sequence of them, got {type(adapters).__name__}"
        )
    for i, one in enumerate(adapters):
        if not isinstance(one, LoRA):
            raise ValueError(
                f"adapters[{i}] must be a moe_ops.LoRA, got {type(one).__name__}; name its "
                "fields: LoRA(a13=.., b13=.., a2=.., b2=.., scale=..)"
            )
        yield f"adapters[{i}]", one


def _check(name: str, t: Any, shape: tuple, device: torch.device) -> int:
    """Raise unless a matrix has this shape, with any size where that is None; returns the rank."""
    if isinstance(t, Tensor) and hasattr(t, "device_mesh"):
        raise ValueError(
            f"{name} must be a plain tensor, got a DTensor; let fully_shard wrap the module whose "
            "forward calls the experts, or pass full_tensor(grad_placements=[Partial()])"
        )
    letters = {"a13": "(E, r, K)", "b13": "(E, N, r)", "a2": "(E, r, I)", "b2": "(E, K, r)"}
    expected = letters[name.rpartition(".")[2]]
    if t is None:
        raise ValueError(
            f"{name} must be a tensor {expected}, got None: of a pair a and b give both, or "
            "neither"
        )
    check_rank(name, t, expected)
    if not torch.compiler.is_compiling():
        refuse_lost(name, t)
    found = tuple([static_size(size) for size in t.shape])
    if not _fits(found, shape):
        text = ", ".join(["r" if size is None else str(size) for size in shape])
        turned = _fits((found[0], found[2], found[1]), shape)
        remedy = f"; it is transposed: pass {name}.transpose(1, 2)" if turned else ""
        raise ValueError(f"{name} must have shape {expected} = ({text}), got {found}{remedy}")
    rank = found[expected.split(", ").index("r") if "(E, r" in expected else 2]
    if rank < 1:
        raise ValueError(f"{name} must have a rank of at least 1, got shape {found}")
    if not t.dtype.is_floating_point or t.dtype.itemsize == 1:
        raise ValueError(
            f"{name} must have a floating-point dtype of 16 bits or more, got {t.dtype}; convert "
            "it with .to()"
        )
    if t.device != device:
        raise ValueError(f"{name} must be on {device}, got {t.device}; move it with .to()")
    return rank


def _fits(found: tuple, shape: tuple) -> bool:
    return all([want in (None, size) for want, size in zip(shape, found, strict=True)])


def _joined(parts: list[LowRank], dtype: torch.dtype) -> LowRank | None:
    if not parts:
        return None
    a, b, scale = parts[0]
    if len(parts) > 1:
        # the sum of b @ a is one product of the joined matrices
        a = torch.cat([(part.a * part.scale).to(dtype) for part in parts], 1)
        b, scale = torch.cat([part.b.to(dtype) for part in parts], 2), 1.0
    # kernels read them in order: those of peft have the expert index innermost
    return LowRank(a.to(dtype).contiguous(), b.to(dtype).contiguous(), scale)
