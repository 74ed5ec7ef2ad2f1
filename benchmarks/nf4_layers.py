"""Layers over experts in nf4 as peers of experts.py: products of other libraries, between rows
that are sorted and summed as qlora_nf4.py does it.

MOE_OPS_BENCH_NF4 names a folder with wheels or zip files of them:

- unsloth-zoo's grouped product, which decodes nf4 in its loop, and bitsandbytes' Triton kernel
  that decodes weights before torch's grouped product, both as in qlora_nf4.py;
- grouped-nf4-gemm 0.51: its products of single rows at one token, else its tiles of rows that a
  CUDA graph can hold, whose height is its own choice for the mean rows of an expert.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import nf4_peers
import torch
from cases import Cell, RoutingSet, Weights
from torch import Tensor
from vllm_gguf import between_products

FOLDER = "MOE_OPS_BENCH_NF4"
SCHEMES = (nf4_peers.NF4,)
GROUPED = "nf4_grouped"  # grouped-nf4-gemm's module

Builder = Callable[[Cell], Callable[[int], Tensor]]


@functools.cache
def sorted_rows_modules() -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The modules of qlora_nf4.py's peers by name, and why others are missing."""
    return nf4_peers.load_peers(os.environ.get(FOLDER))


@functools.cache
def grouped_module() -> ModuleType:
    """grouped-nf4-gemm, unpacked: Triton reads sources. RuntimeError where there is none."""
    folder = os.environ.get(FOLDER)
    for archive in filter(zipfile.is_zipfile, Path(folder).iterdir() if folder else ()):
        with zipfile.ZipFile(archive) as opened:
            if f"{GROUPED}.py" in opened.namelist():
                place = tempfile.mkdtemp(prefix="peers_")
                opened.extractall(place)
                sys.path.append(place)
                return importlib.import_module(GROUPED)
    raise RuntimeError(f"{FOLDER} names no folder with an archive of {GROUPED}.py")


def by_sorted_rows(name: str) -> Callable[[Weights], Builder]:
    """A layer of qlora_nf4.py's."""

    def make(weights: Weights) -> Builder:
        modules, told = sorted_rows_modules()
        if name not in modules:
            raise RuntimeError(told[name])
        of = SimpleNamespace(w13=weights.w13, w2=weights.w2, adapter=None)
        layer = nf4_peers.peer(name, modules[name], of)  # type: ignore[arg-type]

        def build(cell: Cell) -> Callable[[int], Tensor]:
            x = cell.hidden_states
            router = [routing.weights.to(x.dtype) for routing in cell.sets]

            def call(which: int) -> Tensor:
                ids = cell.sets[which].ids
                return layer(x, weights.w13, weights.w2, router[which], ids)

            call(0)
            if failed := getattr(modules[name], "FAILED_SHAPES", None):
                raise RuntimeError(f"it fell back to another way for {failed}")
            return call

        return build

    return make


def grouped_nf4_gemm(weights: Weights) -> Builder:
    """A layer of grouped-nf4-gemm's products."""
    module, shape = grouped_module(), weights.shape
    E, top_k = shape.num_experts, shape.top_k
    packed = []
    for w in (weights.w13, weights.w2):
        codes, absmax, (_, N, K) = nf4_peers.packed_as_bitsandbytes(w)
        packed.append((codes.view(E, N, K // 2), absmax.float().view(E, N, K // 64)))
    activate, combine = between_products(weights.w13.is_cuda)

    def of_one_token(x: Tensor, routing: RoutingSet) -> Tensor:
        ids, sizes = routing.ids.view(-1), [1] * top_k
        h = activate(
            module.gemm_4bit_grouped(x.expand(top_k, -1).contiguous(), *packed[0], sizes, ids)
        )
        return combine(module.gemm_4bit_grouped(h, *packed[1], sizes, ids), routing.weights)

    def of_tiles(x: Tensor, routing: RoutingSet, rows: int) -> Tensor:
        tiles = module.build_group_tiles_device(routing.ids.view(-1), E, rows)
        *tiles, order, _ = tiles
        product = module.gemm_4bit_grouped_captured
        h = activate(product(x[order // top_k], *packed[0], *tiles, rows))
        y = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
        y[order] = product(h, *packed[1], *tiles, rows)
        return combine(y, routing.weights)

    def build(cell: Cell) -> Callable[[int], Tensor]:
        x, M = cell.hidden_states, cell.hidden_states.shape[0]
        if M == 1:
            return lambda which: of_one_token(x, cell.sets[which])
        rows = module._prefill_block_m(-(-M * top_k // E))
        return lambda which: of_tiles(x, cell.sets[which], rows)

    return build
