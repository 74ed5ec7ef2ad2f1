"""Measured configs, which take precedence over rules, and the override of a search, which takes
precedence over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, update_wrapper
from typing import Any, NamedTuple

import torch

from moe_ops.kernels.configs import LayerConfig, config_of, pairs_here
from moe_ops.kernels.launch import Gpu
from moe_ops.schemes import get_scheme
from moe_ops.tables import lookup

# Rows per expert for which configs are chosen under `batch_invariant`, whatever the real number,
# except where all tiles were shown to give the same bits (`plain.same_bits_in_all_tiles`,
# `mixed.wgmma_for_any_batch`). It gives tiles of 16 or 32 tokens, which waste little in decode and
# in prefill.
ROWS_OF_ANY_BATCH = 16


class LayerSizes(NamedTuple):
    """The sizes of an expert layer, or of one product of sorted rows, on a GPU."""

    pairs: int  # (token, expert), or rows of a sorted input
    experts: int  # local ones
    K: int
    I: int
    gpu: Gpu
    top_k: int = 1
    routed: int = 0  # experts of all devices, which share the pairs; 0: those here

    @property
    def rows(self) -> int:
        """Expected number of pairs with a local expert."""
        return pairs_here(self.pairs, self.experts, self.routed)

    @property
    def average(self) -> float:
        """Average rows per expert."""
        return self.rows / self.experts

    def with_rows(self, rows: int) -> LayerSizes:
        """The sizes with another number of local rows."""
        return self._replace(pairs=rows, routed=0)


def measured(base: LayerConfig, layer: LayerSizes, scheme: str, dtype: torch.dtype) -> LayerConfig:
    """The config that the GPU's table has for a layer; `base` if it has none, and inside of
    `override`.
    """
    if _override is not None:
        return base
    key = (layer.routed or layer.experts, layer.K, layer.I, layer.top_k)
    rows, name = get_scheme(scheme).measured_as, str(dtype).removeprefix("torch.")
    tokens = layer.pairs // layer.top_k
    fields = lookup.layer_config(layer.gpu.name, *key, rows, name, tokens)
    return base if fields is None else config_of(fields, base.sort_chunk)


_override: tuple[LayerConfig | None, list[LayerConfig]] | None = None


class Chosen:
    """A function that chooses a config, cached, unless `override` sets another one or disables the
    tables.
    """

    def __init__(self, function: Callable[..., LayerConfig]):
        self._cached = lru_cache(maxsize=8192)(function)
        self.cache_clear = self._cached.cache_clear
        update_wrapper(self, function)

    def __call__(self, *problem: Any) -> LayerConfig:
        if _override is None:
            return self._cached(*problem)
        config, seen = _override
        config = config or self._cached.__wrapped__(*problem)
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
