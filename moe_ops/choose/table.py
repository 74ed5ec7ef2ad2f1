"""Configs that were measured go before rules, and one that a search tries before both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moe_ops.kernels.configs import LayerConfig, config_of
from moe_ops.kernels.launch import Gpu
from moe_ops.schemes import get_scheme
from moe_ops.tables import lookup

# Under `batch_invariant` kernel, tiles and order of the sums are those of so many rows an expert,
# however many there are, where tiles have not been shown to give the same bits
# (`plain.same_bits_in_all_tiles`, `mixed.wgmma_for_any_batch`): a tile of 32 tokens, which wastes
# little of decoding and of prefilling.
ROWS_OF_ANY_BATCH = 16


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
