"""What parameters of transformers' models are of the tensors of a GGUF file, where those are in
another order or stand for another number.

Dimensions: H attention heads of D rows, R rows of a latent; for layers of linear attention K key
heads and V value heads, of which V / K share a key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class HeadSizes(NamedTuple):
    """Numbers of heads of a file's model, and of their rows; 0 where it has none."""

    heads: int
    key_heads: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_rows: int
    linear_value_rows: int


def _halves(t: Tensor, heads: int) -> Tensor:
    """Rows (H * D, ...) of heads whose pairs rotate -> of heads whose halves do."""
    return t.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _value_heads(sizes: HeadSizes, t: Tensor, dim: int = 0) -> Tensor:
    """(V / K * K * rows, ...) -> (K * V / K * rows, ...), or so along another dimension."""
    keys = sizes.linear_key_heads
    apart = t.unflatten(dim, (sizes.linear_value_heads // keys, keys, -1))
    return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)


def _value_heads_behind_keys(sizes: HeadSizes, t: Tensor) -> Tensor:
    """Queries and keys as they are, and `_value_heads` behind them."""
    begin = 2 * sizes.linear_key_heads * sizes.linear_key_rows
    return torch.cat((t[:begin], _value_heads(sizes, t[begin:])))


def _by_key_heads(sizes: HeadSizes, qkv: Tensor, z: Tensor) -> Tensor:
    """Rows of q, k, v and z of all heads -> those of the first key head, of the second, ..."""
    keys = sizes.linear_key_heads * sizes.linear_key_rows
    values = sizes.linear_value_heads * sizes.linear_value_rows
    parts = [*qkv.split([keys, keys, values]), z]
    apart = [part.unflatten(0, (sizes.linear_key_heads, -1)) for part in parts]
    return torch.cat(apart, 1).flatten(0, 1)


def _keys_above_values(sizes: HeadSizes, keys: Tensor, values: Tensor) -> Tensor:
    """Of latent attention: (H, R, D of keys) and (H, D of values, R) -> (H * D of both, R)."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {  # (sizes, tensor) -> tensor
    "halves_of_heads": lambda sizes, t: _halves(t, sizes.heads),
    "halves_of_key_heads": lambda sizes, t: _halves(t, sizes.key_heads),
    "less_one": lambda sizes, t: t - 1,
    "log_of_negative": lambda sizes, t: torch.log(-t),
    "of_one_channel": lambda sizes, t: t.unsqueeze(1),
    "one_row": lambda sizes, t: t.reshape(1, -1),  # some files have a vector
    "value_columns": lambda sizes, t: _value_heads(sizes, t, 1),
    "value_heads": _value_heads,
    "value_heads_behind_keys": _value_heads_behind_keys,
}
JOINING: dict[str, Callable[..., Tensor]] = {  # (sizes, *tensors) -> tensor
    "by_key_heads": _by_key_heads,
    "keys_above_values": _keys_above_values,
    "one_above_the_other": lambda sizes, *tensors: torch.cat(tensors),
}
