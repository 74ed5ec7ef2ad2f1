"""What a checkpoint's description of a matrix is checked with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Config = dict[str, Any]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Matrix:
    """What a checkpoint says of one matrix, or of a stack of them."""

    scheme: str
    rows: int  # N
    columns: int  # K
    batch: tuple[int, ...] = ()  # leading dimensions, (E,) of a stack


def shape_of(tensors: dict, role: str) -> tuple[int, ...]:
    return tuple(tensors[role].shape)


def require(tensors: dict, role: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless a tensor has this shape and one of these dtypes."""
    t = tensors[role]
    if tuple(t.shape) != shape:
        raise ValueError(f"{role} must have shape {shape}, got {tuple(t.shape)}")
    if dtypes and t.dtype not in dtypes:
        raise ValueError(f"{role} must be one of {dtypes}, got {t.dtype}")


def activations(config: Config, default: dict | None = None) -> dict | None:
    """compressed-tensors' description of the activations; None where they stay as they are."""
    return config.get("input_activations", default)
