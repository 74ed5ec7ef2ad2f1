"""Which scheme `quantize` takes where none is named: one of 8 bits that is fast on the machine of
the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.backends.torch import layer as kernels
from moe_ops.integrations.transformers.activations import FUSED, activation_of, path_of
from moe_ops.integrations.transformers.layers import Layer

_FP8_CAPABILITY = (8, 9)  # the first with e4m3 products
_NAME_ONE = "name a scheme: any saves memory"


class DefaultScheme(NamedTuple):
    """A scheme, and why it was chosen, in words."""

    name: str
    reason: str


def default_scheme(layers: Sequence[Layer]) -> DefaultScheme:
    """The scheme for these layers, whose weights are plain.

    8 bits, because 4 cost a model more than most would give up unasked. On a GPU that multiplies
    e4m3 fp8_block, which prefill gains from, too; on other GPUs, and on CPUs, int8 beside 16-bit
    activations, which is the more exact one and as fast (docs/quantization.md).

    Raises:
        ValueError: no scheme is fast there, or layers lie on several kinds of devices; the remedy
            is named.
    """
    found = {_of_weight(layer, layer.natural_weight(name)) for layer in layers
             for name in layer.weights}  # fmt: skip
    if len(found) > 1:
        raise ValueError(
            "scheme must be given for experts on several kinds of devices, got None; each has "
            f"another default: {', '.join(sorted({one.name for one in found}))}"
        )
    return found.pop()


def _of_weight(layer: Layer, weight: Tensor) -> DefaultScheme:
    device = weight.device
    if device.type == "cuda":
        if environment.capability(device) >= _FP8_CAPABILITY:
            return DefaultScheme("fp8_block", "this GPU multiplies e4m3")
        return DefaultScheme("int8_w8a16:channel", "nothing multiplies e4m3 on this GPU")
    if device.type != "cpu":
        raise ValueError(
            f"scheme must be given for experts on {device.type}, got None: none was timed there; "
            f"{_NAME_ONE}"
        )
    if kernels.kernels() is None:
        raise ValueError(
            "scheme must be given for experts on this CPU, got None: no scheme is fast there "
            f"without the kernels, which need AVX2, and g++ at installation; {_NAME_ONE}"
        )
    if not _takes(layer):
        raise ValueError(
            f"scheme must be given for {type(layer.owner).__name__} on a CPU, got None: no scheme "
            f"is fast there beside its activation or its own forward; {_NAME_ONE}"
        )
    if weight.dtype != torch.bfloat16 or weight.shape[2] % kernels.COLUMNS:
        raise ValueError(
            f"scheme must be given for experts of {weight.dtype} with {weight.shape[2]} columns, "
            f"got None: on a CPU schemes are fast beside torch.bfloat16 and multiples of "
            f"{kernels.COLUMNS} columns; convert the model by .to(torch.bfloat16), or {_NAME_ONE}"
        )
    return DefaultScheme("int8_w8a16:channel", "kernels of this CPU read it in place")


def _takes(layer: Layer) -> bool:
    """Whether the CPU kernels run the calls of a layer."""
    if not layer.on_hook or path_of(layer.owner) != FUSED:
        return False
    activation = activation_of(layer.owner)
    return activation is not None and activation.name in kernels.ACTIVATIONS
