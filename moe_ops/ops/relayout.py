"""Layouts of quantized weights: the natural one, the transposed one, and those of backends.

``prepare`` brings a weight into the layout of a backend whose kernels read elements or scales in
another order, once. The backend registers a `Relayout`, and accepts the layout's name in its
``supports``:

    BACKEND = register("triton", relayouts=(Relayout("triton_int4", is_int4, interleave,
    uninterleave),), ...)

A relayout may permute the bytes of each expert's elements, and reshape and permute its scales. The
shape of the weight follows from that of qdata, (E, N, bytes of a row). If a relayout pads these,
the layout's name also has the rows and columns of the weight (`meta.scales.padded_layout`). All
tensors keep their first dimension, so that single experts can be taken out.

A backend may want the rows of w13 in another order, which depends on the activation. Such
relayouts name that order in ``rows``, and after a colon in the layout's name. w13 and w2 fit
together if their layouts agree up to the colon.
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

# an ExpertTensor, whose classes are on a higher floor
ExpertTensor = Any
Tensors = dict[
    str, Tensor
]  # by the names of an ExpertTensor's tensors, of those that are to change


class Relayout(NamedTuple):
    """A layout of weights: how it is made, and how it is undone."""

    layout: str  # its name: ``weight_layout`` of tensors and ``layout`` of operators
    takes: Callable[[QuantScheme], bool]  # whether a scheme has it
    apply: Callable[[ExpertTensor], Tensors]  # natural tensor -> its tensors that change
    undo: Callable[[ExpertTensor], Tensors]  # tensor of this layout -> its natural tensors
    rows: str = ""  # order of w13's rows that it makes, "" for the natural one
    on: Callable[[torch.device], bool] | None = (
        None  # where weights lie that want it; None: anywhere
    )


# backend -> its relayouts; schemes that none of them takes keep the natural layout
RELAYOUTS: dict[str, tuple[Relayout, ...]] = {}


def logical(qdata: Tensor, scheme: str, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of the weight that ``qdata`` stores."""
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
    """The problem as it is, then with weights in each layout of ``backend`` for its scheme."""
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
