"""How the data of quantized weights lie: as their shape says, transposed, or as a backend wants them.

A backend whose kernels read elements or scales in another order gets them so once, by ``prepare``. It adds a
`Relayout` to `RELAYOUTS` under its own name, and accepts the layout's name in its ``supports``:

    RELAYOUTS["triton"] = (Relayout("triton_int4", is_int4, interleave, uninterleave),)

A relayout may permute the bytes of each expert's elements and reshape and permute its scales. qdata keeps its
shape (E, N, bytes of a row), from which the shape of the weights follows, and all tensors keep their first
dimension, so that experts can be taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from moe_ops.meta.scales import unpacked_size
from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.validation import TRANSPOSED

if TYPE_CHECKING:
    from moe_ops.tensors.base import ExpertTensor

__all__ = ["RELAYOUTS", "TRANSPOSED", "Relayout", "change", "logical", "natural"]

Tensors = dict[
    str, Tensor
]  # by the names of an ExpertTensor's tensors, of those that are to change


class Relayout(NamedTuple):
    """One way to lay out weights, and back."""

    layout: str  # its name: what ``weight_layout`` says and operators receive as ``layout``
    takes: Callable[[QuantScheme], bool]  # for which schemes
    apply: Callable[[ExpertTensor], Tensors]  # a natural tensor to the tensors that change
    undo: Callable[[ExpertTensor], Tensors]  # a tensor of this layout to the natural ones


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


def change(weight: ExpertTensor, backend: str) -> ExpertTensor:
    """``weight`` in the layout that ``backend`` wants for its scheme; itself if it is so already."""
    scheme = get_scheme(weight.scheme)
    wanted = [r for r in RELAYOUTS.get(backend, ()) if r.takes(scheme)]
    if weight.weight_layout == (wanted[0].layout if wanted else ""):
        return weight
    weight = natural(weight)
    if not wanted:
        return weight
    return weight._replace(**wanted[0].apply(weight), weight_layout=wanted[0].layout)


def natural(weight: ExpertTensor) -> ExpertTensor:
    """``weight`` in its natural layout."""
    if not weight.weight_layout:
        return weight
    for relayouts in RELAYOUTS.values():
        for relayout in relayouts:
            if relayout.layout == weight.weight_layout:
                return weight._replace(**relayout.undo(weight), weight_layout="")
    raise ValueError(f"weight must have a known layout, got {weight}")
