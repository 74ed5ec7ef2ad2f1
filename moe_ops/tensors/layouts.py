"""How the data of quantized weights lie: as their shape says, transposed, or as a backend wants them.

A backend whose kernels read elements or scales in another order gets them so once, by ``prepare``. It adds a
`Relayout` to `RELAYOUTS` under its own name, and accepts the layout's name in its ``supports``:

    RELAYOUTS["triton"] = (Relayout("triton_int4", is_int4, interleave, uninterleave),)

A relayout may permute the bytes of each expert's elements and reshape and permute its scales. qdata keeps its
shape (E, N, bytes of a row), from which the shape of the weights follows, and all tensors keep their first
dimension, so that experts can be taken apart.

A backend may want the rows of w13 in another order, which depends on the activation that follows. Its relayouts for
that say so by ``rows``, and in their name behind a colon: w13 and w2 fit together if their layouts agree up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.activations import Activation, rows_before
from moe_ops.meta.scales import unpacked_size
from moe_ops.problem import Problem
from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.validation import TRANSPOSED

if TYPE_CHECKING:
    from moe_ops.tensors.base import ExpertTensor

__all__ = ["RELAYOUTS", "TRANSPOSED", "Relayout", "change", "logical", "natural", "variants"]

Tensors = dict[
    str, Tensor
]  # by the names of an ExpertTensor's tensors, of those that are to change


class Relayout(NamedTuple):
    """One way to lay out weights, and back."""

    layout: str  # its name: what ``weight_layout`` says and operators receive as ``layout``
    takes: Callable[[QuantScheme], bool]  # for which schemes
    apply: Callable[[ExpertTensor], Tensors]  # a natural tensor to the tensors that change
    undo: Callable[[ExpertTensor], Tensors]  # a tensor of this layout to the natural ones
    rows: str = ""  # the order of w13's rows that it makes, "" for the natural one
    on: Callable[[torch.device], bool] | None = (
        None  # where weights lie that want it; None: anywhere
    )


# backend -> the relayouts it wants; schemes that none of them takes stay natural
RELAYOUTS: dict[str, tuple[Relayout, ...]] = {}


def logical(qdata: Tensor, scheme: str, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of the weights that ``qdata`` holds."""
    desc = get_scheme(scheme).weight
    bits = 8 if desc is None else desc.format.bits
    shape, strides = tuple(qdata.shape), tuple(qdata.stride())
    if bits == 8:
        return shape, strides
    packed = len(shape) - (2 if layout == TRANSPOSED else 1)
    strides = tuple([1 if d == packed else unpacked_size(s, bits) for d, s in enumerate(strides)])
    return (*shape[:packed], unpacked_size(shape[packed], bits), *shape[packed + 1 :]), strides


def change(weight: Any, backend: str, activation: Activation | None = None) -> Tensor:
    """``weight``, plain or an ExpertTensor, in the layout that ``backend`` wants for its scheme; itself if it is so already.

    ``activation`` is what follows w13, None for w2. Raises ValueError for a layout that the weight's shape has not.
    """
    scheme = get_scheme(getattr(weight, "scheme", ""))
    relayouts = [
        r
        for r in RELAYOUTS.get(backend, ())
        if r.takes(scheme) and (r.on is None or r.on(weight.device))
    ]
    wanted = [r for r in relayouts if r.rows == rows_before(activation)]
    wanted = wanted or [r for r in relayouts if not r.rows]
    layout = getattr(weight, "weight_layout", "")
    if layout == (wanted[0].layout if wanted else ""):
        return weight
    if activation is None and layout in [r.layout for r in relayouts]:
        return weight  # w13, prepared before
    if layout:
        weight = natural(weight)
    if not wanted:
        return weight
    if not hasattr(weight, "weight_layout"):
        from moe_ops.tensors.plain import PlainExpertTensor  # which imports this file

        weight = PlainExpertTensor(weight.detach(), dtype=weight.dtype)
    return weight._replace(**wanted[0].apply(weight), weight_layout=wanted[0].layout)


def variants(problem: Problem, backend: str) -> Iterator[Problem]:
    """The problem with weights as they are, then in each layout that ``backend`` wants of its scheme."""
    yield problem
    for relayout in RELAYOUTS.get(backend, ()):
        if relayout.takes(get_scheme(problem.scheme)):
            yield replace(problem, layout=relayout.layout)


def natural(weight: ExpertTensor) -> Tensor:
    """``weight`` in its natural layout; a plain tensor where it is not quantized."""
    if not weight.weight_layout:
        return weight
    scheme = get_scheme(weight.scheme)
    for relayouts in RELAYOUTS.values():
        for relayout in relayouts:
            if relayout.layout == weight.weight_layout and relayout.takes(scheme):
                back = weight._replace(**relayout.undo(weight), weight_layout="")
                return back if weight.scheme else back.qdata
    raise ValueError(f"weight must have a known layout, got {weight}")
