"""Configs of an expert layer's kernels: look-up of measured ones, and how a search tries others.

Workspace sizes never depend on the config: h and y have one row per pair with every config (in the
mixed GEMM, y of few pairs has more rows, for SPLIT_K), and the table of blocks is sized for the
smallest BLOCK_M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from moe_ops.kernels.launch import Gpu
from moe_ops.meta.workspace import cdiv, minimum
from moe_ops.schemes import get_scheme
from moe_ops.tables import lookup

GROUP_M = 16  # blocks that use one weight tile in turn, while it is in L2
# bytes a block may use: GPUs with more have the tensor memory accelerator (TMA)
LARGE_SHARED_MEMORY = 200 * 1024
MULTIPROCESSORS = 132  # of an H100 or H200 with SXM
SM80_MMA, SM90_TMA, SM90_WGMMA, GEMV = "sm80_mma", "sm90_tma", "sm90_wgmma", "gemv"
SM90_MMA = "sm90_mma"  # one token
SM90_PACKED = "sm90_packed"  # many rows an expert


# Under `batch_invariant` kernel, tiles and order of the sums are those of so many rows an expert,
# however many there are, where tiles have not been shown to give the same bits
# (`same_bits_in_all_tiles`, `wgmma_for_any_batch`): a tile of 32 tokens, which wastes little of
# decoding and of prefilling.
ROWS_OF_ANY_BATCH = 16


class GemmConfig(NamedTuple):
    """Tile sizes BLOCK_N and BLOCK_K, pipeline stages and warps of one GEMM."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


class LayerConfig(NamedTuple):
    """Everything about a layer's launches that depends on the number of rows. Calls with equal
    configs run the same compiled kernels, so that warming up one of them warms up all.
    """

    gemm1: GemmConfig
    gemm2: GemmConfig
    block_m: int  # rows of a block
    sort_chunk: int  # pairs that the sorting kernel handles at a time
    kernel: str = SM80_MMA  # the kernel file of the GEMMs: in `gemm`, `mixed_gemm` or `training`
    direct: bool = False  # block b is pair b, and no sorting kernel runs
    quantize_x: bool = False  # a kernel of its own quantizes x, not GEMM1
    h_in_fp32: bool = False  # h is fp32, and GEMM2 quantizes it, not GEMM1
    split_m: int = 1  # programs of GEMM2 that share a block's rows (sm90_tma)
    split_k: int = 1  # programs of GEMM2 that share a tile's reduction (sm90_wgmma)


def block_bound(rows: Any, groups: int, block_m: int) -> Any:
    """Upper bound of the blocks of `block_m` rows that `rows` rows in `groups` groups need. int or
    SymInt.

    A group of c > 0 rows needs ceil(c / block_m) <= (c + block_m - 1) / block_m, and at most
    min(rows, groups) groups have rows. The bound falls as block_m grows.
    """
    return minimum(rows, (rows + minimum(rows, groups) * (block_m - 1)) // block_m)


def pairs_here(pairs: int, experts: int, routed: int) -> int:
    """As many of the pairs as come to `experts` of `routed` experts that are chosen alike: those
    here, of experts that are on several devices. `routed` 0: all are here.
    """
    return cdiv(pairs * experts, routed) if routed else pairs


def sort_chunk(rows: int) -> int:
    """Pairs that the sorting kernel handles at a time: the fastest of few sizes on an H200, so
    that few kernels are compiled.
    """
    if rows <= 512:
        return 64 if rows <= 64 else 256
    return 1024 if rows <= 4096 else 2048 if rows <= 16384 else 4096


def fields_of(config: LayerConfig) -> dict[str, Any]:
    """A config as a row of a table: its kernel, its tile sizes, and all other fields that differ
    from their defaults.

    `sort_chunk` is left out, because it follows from M alone.
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
    """The table's config for a layer on a GPU, or `base` if the table has none. E: experts that
    share the pairs, on all devices.
    """
    name = str(dtype).removeprefix("torch.")
    rows = get_scheme(scheme).measured_as
    fields = lookup.layer_config(gpu.name, E, K, I, top_k, rows, name, M)
    return base if fields is None else config_of(fields, base.sort_chunk)


_override: tuple[LayerConfig | None, list[LayerConfig]] | None = None


def find(function: Callable[..., LayerConfig], problem: tuple) -> LayerConfig:
    """`function(*problem)`, unless `override` sets another config or disables the tables."""
    if _override is None:
        return function(*problem)
    config, seen = _override
    config = config or function(*problem, tables=False)
    seen.append(config)
    return config


@contextmanager
def override(config: LayerConfig | None) -> Iterator[list[LayerConfig]]:
    """Run expert layers with this config, or if None without tables. Yields the list of the
    configs that were used.
    """
    global _override
    before = _override
    seen: list[LayerConfig] = []
    _override = (config, seen)
    try:
        yield seen
    finally:
        _override = before
