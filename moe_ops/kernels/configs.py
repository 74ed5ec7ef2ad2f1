"""Configs of an expert layer's kernels, the look-up of measured ones, and how a search tries
others.

The workspace never depends on the config: h and y have one row per pair whatever it is (y of few
pairs beside packed weights has more), and the table of blocks is sized for the smallest tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from moe_ops.kernels.launch import Gpu
from moe_ops.meta.workspace import minimum
from moe_ops.tables import lookup

GROUP_M = 16  # blocks that pass over one weight tile before the next tile's turn
# bytes a block: GPUs with more have a copy engine that fills it (the tensor memory accelerator)
LARGE_SHARED_MEMORY = 200 * 1024
SM80_MMA, SM90_TMA, SM90_WGMMA, GEMV = "sm80_mma", "sm90_tma", "sm90_wgmma", "gemv"


class GemmConfig(NamedTuple):
    """One GEMM: weight rows of a tile, step along the reduction, pipeline stages, warps."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


class LayerConfig(NamedTuple):
    """Everything about a layer's launches that the number of rows decides, so one value is one
    warm-up.
    """

    gemm1: GemmConfig
    gemm2: GemmConfig
    block_m: int  # rows of a block
    sort_chunk: int  # pairs that the sorting kernel handles at a time
    kernel: str = SM80_MMA  # the file of the GEMMs, in `gemm` or `mixed_gemm`
    direct: bool = False  # pair b is block b: no sorting kernel
    quantize_x: bool = False  # x is quantized by a kernel of its own, not by GEMM1
    h_in_fp32: bool = False  # h is fp32 and quantized by GEMM2, not by GEMM1
    split_m: int = 1  # programs of GEMM2 that share a block's rows (sm90_tma)
    split_k: int = 1  # programs of GEMM2 that share a tile's reduction (sm90_wgmma)


def block_bound(rows: Any, groups: int, block_m: int) -> Any:
    """Most blocks of `block_m` rows that `rows` rows in `groups` groups can need; int or SymInt.

    A group of c > 0 rows needs ceil(c / block_m) <= (c + block_m - 1) / block_m, and at most
    min(rows, groups) groups have rows. Falls as block_m grows.
    """
    return minimum(rows, (rows + minimum(rows, groups) * (block_m - 1)) // block_m)


def sort_chunk(rows: int) -> int:
    """Pairs to sort at a time: the fastest on an H200, in steps of four so that few kernels are
    compiled.
    """
    if rows <= 512:
        return 64 if rows <= 64 else 256
    return 1024 if rows <= 4096 else 2048 if rows <= 16384 else 4096


def fields_of(config: LayerConfig) -> dict[str, Any]:
    """A config as tables have it: its kernel and tiles, and what else is not a default.

    `sort_chunk` is left out, as it follows from M alone.
    """
    fields: dict[str, Any] = {"kernel": config.kernel, "block_m": config.block_m}
    fields |= {"gemm1": config.gemm1._asdict(), "gemm2": config.gemm2._asdict()}
    defaults = LayerConfig._field_defaults
    return fields | {
        name: value
        for name, value in config._asdict().items()
        if name in defaults and name not in fields and value != defaults[name]
    }


def config_of(fields: Mapping[str, Any], sort_chunk: int) -> LayerConfig:
    """The config that `fields_of` wrote."""
    gemms = {name: GemmConfig(**fields[name]) for name in ("gemm1", "gemm2")}
    return LayerConfig(**{**fields, **gemms}, sort_chunk=sort_chunk)


def measured(
    base: LayerConfig,
    gpu: Gpu,
    M: int,
    top_k: int,
    E: int,
    K: int,
    I: int,  # noqa: E741
    scheme: str,
    dtype: torch.dtype,
) -> LayerConfig:
    """The table's config for a layer on a GPU, `base` where it has none."""
    name = str(dtype).removeprefix("torch.")
    fields = lookup.layer_config(gpu.name, E, K, I, top_k, scheme, name, M)
    return base if fields is None else config_of(fields, base.sort_chunk)


_override: tuple[LayerConfig | None, list[LayerConfig]] | None = None


def find(function: Callable[..., LayerConfig], problem: tuple) -> LayerConfig:
    """`function(*problem)`, unless a search says otherwise or wants no tables."""
    if _override is None:
        return function(*problem)
    config, seen = _override
    config = config or function(*problem, tables=False)
    seen.append(config)
    return config


@contextmanager
def override(config: LayerConfig | None) -> Iterator[list[LayerConfig]]:
    """Run expert layers with this config, or without tables if None; yields the list of configs
    used.
    """
    global _override
    before = _override
    seen: list[LayerConfig] = []
    _override = (config, seen)
    try:
        yield seen
    finally:
        _override = before
