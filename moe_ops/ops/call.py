"""What the user gave: the arguments of a call, quantized weights taken apart."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.checks import check_rank, static_size


class Meta(NamedTuple):
    """The facts of a tensor without an M dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    contiguous: bool


class Rows(NamedTuple):
    """The facts of a tensor (M, width) but for M."""

    width: int
    dtype: torch.dtype
    device: torch.device


class Weight(NamedTuple):
    """An expert weight taken apart: plain tensors only, as the ops carry them."""

    data: Tensor
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    channel_scale: Tensor | None = None
    activation_scale: Tensor | None = None
    scheme: str = ""
    layout: str = ""

    @property
    def scales(self) -> tuple[Tensor | None, ...]:
        """scale, zero_point, global_scale, channel_scale: what `numerics.Scales` holds."""
        return self[1:5]

    def facts(self) -> WeightFacts:
        """The weight's signature."""
        data = meta(self.data)
        assert data is not None
        if not self.scheme:
            return WeightFacts(data, layout=self.layout)
        static = None if self.activation_scale is None else self.activation_scale.device
        scales = [meta(tensor) for tensor in self.scales]
        return WeightFacts._make((data, *scales, static, self.scheme, self.layout))


class WeightFacts(NamedTuple):
    """The signature of an expert weight."""

    data: Meta
    scale: Meta | None = None
    zero_point: Meta | None = None
    global_scale: Meta | None = None
    channel_scale: Meta | None = None
    activation_scale: torch.device | None = None  # where it is, of schemes that have one
    scheme: str = ""
    layout: str = ""

    @property
    def contiguous(self) -> bool:
        """Whether all of it lies in memory as its shapes say."""
        return all([part is None or part.contiguous for part in self[:5]])


def meta(tensor: Tensor | None) -> Meta | None:
    """The Meta of a tensor."""
    if tensor is None:
        return None
    shape = tuple([static_size(size) for size in tensor.shape])
    return Meta(shape, tensor.dtype, tensor.device, tensor.is_contiguous())


def rows(name: str, tensor: Tensor, shape: str) -> Rows:
    """The Rows of a tensor that must be 2-D; `shape` is its documented shape."""
    check_rank(name, tensor, shape)
    return Rows(static_size(tensor.shape[1]), tensor.dtype, tensor.device)


def blocks(name: str, tensor: Tensor, shape: str) -> tuple[int, Rows]:
    """The number of blocks of a 3-D tensor (E, T, width) and its Rows."""
    check_rank(name, tensor, shape)
    width = static_size(tensor.shape[2])
    return static_size(tensor.shape[0]), Rows(width, tensor.dtype, tensor.device)
