"""How the data of quantized weights lie: as their shape says, transposed, or as a backend wants
them.

A backend whose kernels read elements or scales in another order gets them so once, by ``prepare``.
It registers a `Relayout`, and accepts the layout's name in its ``supports``:

    BACKEND = register("triton", relayouts=(Relayout("triton_int4", is_int4, interleave,
    uninterleave),), ...)

A relayout may permute the bytes of each expert's elements and reshape and permute its scales. The
shape of the weights follows from that of qdata, (E, N, bytes of a row). Where a relayout pads
these, the layout's name also says how many rows and columns the weights have
(`meta.scales.padded_layout`). All tensors keep their first dimension, so that experts can be taken
apart.

A backend may want the rows of w13 in another order, which depends on the activation that follows.
Its relayouts for that say so by ``rows``, and in their name behind a colon: w13 and w2 fit
together if their layouts agree up to there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

from moe_ops.meta.scales import FLAT, TRANSPOSED, base_layout, sizes_of_layout, unpacked_size
from moe_ops.ops.problem import Problem
from moe_ops.schemes import QuantScheme, get_scheme

# an ExpertTensor: the tensors of this package are built on what is here
ExpertTensor = Any
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
    if layout.startswith(FLAT):
        shape, _ = logical(qdata, scheme, layout.removeprefix(FLAT))
        return (math.prod(shape),), (1,)
    desc = get_scheme(scheme).weight
    bits = 8 if desc is None else desc.format.bits
    shape, strides = tuple(qdata.shape), tuple(qdata.stride())
    sizes = sizes_of_layout(layout)
    if sizes:
        strides = (*[unpacked_size(s, bits) for s in strides[:-1]], 1)
        return (*shape[:-2], *sizes), strides
    if bits == 8:
        return shape, strides
    packed = len(shape) - (2 if layout == TRANSPOSED else 1)
    whole = (*shape[:packed], unpacked_size(shape[packed], bits), *shape[packed + 1 :])
    if layout == TRANSPOSED and qdata.is_contiguous():  # a copy of a view
        return whole, make_contiguous_strides_for(whole)
    strides = tuple([1 if d == packed else unpacked_size(s, bits) for d, s in enumerate(strides)])
    return whole, strides


def variants(problem: Problem, backend: str) -> Iterator[Problem]:
    """The problem with weights as they are, then in each layout that ``backend`` wants of its
    scheme.
    """
    yield problem
    w13, w2 = problem.schemes
    for relayout in RELAYOUTS.get(backend, ()) if w13 == w2 else ():
        if relayout.takes(get_scheme(problem.scheme)):
            yield replace(problem, layout=relayout.layout)


def natural(weight: ExpertTensor) -> Tensor:
    """``weight`` in its natural layout; a plain tensor where it is not quantized."""
    if not weight.weight_layout:
        return weight
    scheme, layout = get_scheme(weight.scheme), base_layout(weight.weight_layout)
    for relayouts in RELAYOUTS.values():
        for relayout in relayouts:
            if relayout.layout == layout and relayout.takes(scheme):
                back = weight._replace(**relayout.undo(weight), weight_layout="")
                return back if weight.scheme else back.qdata
    raise ValueError(f"weight must have a known layout, got {weight}")
