"""Layers whose weights are narrower than their activations: the launches of both products by each
family of kernels. Imported at first launch only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels import launch
from moe_ops.kernels.activation import Activated
from moe_ops.kernels.configs import GEMV, SM90_MMA, SM90_PACKED, SM90_WGMMA, LayerConfig
from moe_ops.kernels.gemm.pair_adapters import InChunks, Summed
from moe_ops.kernels.gemm.token_adapters import NOTHING_ADDED, AdapterProducts, Where
from moe_ops.kernels.launch import Gpu, Launch
from moe_ops.kernels.mixed_gemm import configs, gemv, packed, sm80_mma
from moe_ops.kernels.mixed_gemm.operands import MixedOperand
from moe_ops.kernels.place.layout import Layout, index_parts
from moe_ops.kernels.place.place import place
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS, Routing, sorted_rows
from moe_ops.kernels.place.sort import group_blocks
from moe_ops.kernels.rows.combine import combine_rows
from moe_ops.kernels.rows.emulated import Hidden, decode_x, round_h, round_x
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.rounding import Rounding, x_elements
from moe_ops.kernels.rows.scales import (
    Input,
    Shared,
    flat,
    input_of,
)
from moe_ops.kernels.rows.scatter import scatter
from moe_ops.ops.args import ExpertsArgs
from moe_ops.pipeline.gathered import (
    AnyArgs,
    GatheredProducts,
    Passes,
    num_blocks_of,
    parts_of,
    placed,
    run_layer,
    weights_on_output,
    y_of,
)

E4M3 = torch.float8_e4m3fn


@cache
def sm90_wgmma() -> ModuleType:
    """Its kernels, which not every Triton can import."""
    return import_module("moe_ops.kernels.mixed_gemm.sm90_wgmma")


@cache
def sm90_mma() -> ModuleType:
    """Likewise."""
    return import_module("moe_ops.kernels.mixed_gemm.sm90_mma")


@cache
def sm90_packed() -> ModuleType:
    """Likewise."""
    return import_module("moe_ops.kernels.mixed_gemm.sm90_packed")


class MixedLayer(NamedTuple):
    """A layer of two weights that are narrower than its activations, and how it runs."""

    w13: MixedOperand
    w2: MixedOperand
    activated: Activated
    rounding: Rounding | None  # of activations
    config: LayerConfig
    gpu: Gpu
    split_k: int = 1  # of sm90_wgmma.py
    adapted: AdapterProducts | None = None

    def launch(self, a: ExpertsArgs) -> None:
        """Launch the layer."""
        w13, w2, activation, rounding, config, gpu, *_ = self
        device, parts, start = a.hidden_states.get_device(), parts_of(a), None
        if config.kernel == GEMV:
            return launch.run(gemv.launches(a, w13, w2, activation, config, gpu), device, gpu)
        if config.kernel == SM90_MMA:
            launches = sm90_mma().launches(a, w13, w2, activation, config, gpu)
            return launch.run(launches, device, gpu)
        if config.kernel == SM90_PACKED:
            for part in parts:
                launch.run(self.packed(part), device, gpu)
            return
        if rounding is not None and rounding.SCALE == "nv":
            (rows, top_k), K = parts[0].topk_ids.shape, w2.N
            start = max(rows * top_k * K, x_elements(rows, K, rounding))
        run_layer(a, parts, self.products, gpu, start)

    @property
    def products(self) -> Callable[..., GatheredProducts]:
        """The launches of both products for the layer or a part of it, and for the one scale of x
        and of h of a call in parts, if there is one.
        """
        return self.wgmma if self.config.kernel == SM90_WGMMA else self.mma

    def mma(self, a: AnyArgs, shared: Shared | None = None) -> GatheredProducts:
        """Products by mixed_gemm/sm80_mma.py."""
        w13, w2, activation, rounding, config, gpu, _, adapted = self
        p = placed(a, w2.E, config, gpu)
        x = input_of(a.hidden_states, a.hidden_states_scale, a.scheme, False)
        before, on_input = p.table(gpu), p.on_input
        if rounding is None:
            h = unrounded(a, x.data.dtype, p.h_rows, w2.K)
        else:
            h = round_h(rounding, p.h_rows, w2.K, a.workspace13, a.a2_scale, gpu, shared)
            sizes = (p.rows, p.rows_of_expert, w2.N, a.workspace2)
            if x.scale is None:  # router weights scale x before it is rounded
                known, on_input = (a.a13_scale, p.valid), NO_ROUTER_WEIGHTS
                more, x = round_x(rounding, x, *sizes, *known, h.amax, gpu, shared)
            else:
                whole, zero = a.hidden_states_global_scale, h.amax if shared is None else None
                more, x = decode_x(rounding, x, whole, *sizes, zero, gpu)
            before = [*before, *more]
        y, how = y_of(a, p.h_rows, w2.N, torch.float32), (config.block_m, gpu)
        of_adapters = NOTHING_ADDED
        if adapted is not None:
            where = Where(p.h_rows, p.routing, config.block_m, gpu, not before)
            written = Input(h.written, 0, w2.K, 1)
            of_adapters = adapted.around(
                *(a.hidden_states, p.on_input, w13.N, a.dtype, written, y),
                *(Summed(a.out, weights_on_output(a)), where),
            )
        gemm1 = sm80_mma.gemm1(
            *(h.written, h.amax, x, w13, p.routing, on_input, activation, config.gemm1, *how),
            of_adapters.added,
        )
        gemm2 = sm80_mma.gemm2(y, h.read, w2, p.routing, config.gemm2, *how)
        first = [*before, *of_adapters.beside, *of_adapters.before, gemm1]
        second = [*of_adapters.between, *h.launches, gemm2, *of_adapters.after]
        return GatheredProducts(first, second, p.routing, y, summed=of_adapters.summed)

    def wgmma(self, a: ExpertsArgs, _: Shared | None = None) -> GatheredProducts:
        """Products of weights of 4 to 8 bits by mixed_gemm/sm90_wgmma.py."""
        w13, w2, activation, rounding, config, gpu, split_k, adapted = self
        pairs, K, block_m = a.topk_ids.numel(), w2.N, config.block_m
        E = a.num_experts if a.options.slots else w2.E
        # kernels of adapters read the table of blocks, but those by pair
        routed = adapted is not None and not adapted.by_pair(pairs)
        unsorted = configs.max_unsorted_pairs(pairs, E) > 0 and not routed
        p = placed(a, E, config, gpu, unsorted)
        x = input_of(a.hidden_states, a.hidden_states_scale, a.scheme, False)
        on_input = before = p.on_input
        dtype, x_scale, I = x.data.dtype, None, w2.padded_k
        kernels = sm90_wgmma()
        if rounding is None:
            h = unrounded(a, dtype, pairs, I)
        else:
            dtype, start = rounding.dtype, configs.permuted_elements(pairs, K)
            x_scale = flat(a.workspace2, torch.float32, start + pairs)[start:]
            if w2.wgmma_format.x_bits == 8:
                dtype, h = E4M3, kernels.round_h(rounding, pairs, w2, a.workspace13, gpu)
            else:
                h = round_h(rounding, pairs, I, a.workspace13, None, gpu)
            if x.scale is None:  # router weights scale x before it is rounded
                on_input = NO_ROUTER_WEIGHTS
        # 16 bits a column, or two numbers of 8
        permuted = flat(a.workspace2, dtype, pairs * configs.padded(K) * 2 // dtype.itemsize)
        # Rounded where a program has all of a sum: half the bytes to write and read.
        rounds = split_k == 1 and (a.options.batch_invariant or a.out.dtype == torch.bfloat16)
        rounds = rounds and a.dtype == torch.bfloat16  # fp16 holds no sum above 65504
        rounds = rounds and not routed  # what adapters add is added to y
        y = y_of(a, split_k * pairs, K, torch.bfloat16 if rounds else torch.float32)
        of_pairs = kernels.pair_routing(p.routing, pairs)
        # For few pairs `permute_tokens` writes before gdc_wait, so that no launch before it may
        # use workspace2. For at most `max_unsorted_pairs` the GEMMs read ids before gdc_wait, so
        # that no launch of this layer may write ids.
        of_adapters = NOTHING_ADDED
        if adapted is not None:
            where, written = (
                Where(pairs, p.routing, block_m, gpu, False),
                Input(h.written, 0, I, 1),
            )
            bits = w13.wgmma_format.x_bits
            chunks = InChunks(w2.k_chunk, w2.order, bits, w2.K % w2.k_chunk > 0)
            of_adapters = adapted.around(
                *(a.hidden_states, p.on_input, w13.N, a.dtype, written, y),
                *(Summed(a.out, weights_on_output(a), split_k), where, chunks),
            )
        permuting = kernels.permute_tokens(
            *(permuted, x, w13, of_pairs, before, rounding, x_scale, block_m, gpu, routed)
        )
        begin, *rest = [*p.table(gpu), permuting]
        first = [
            begin,
            *of_adapters.beside,
            *rest,
            *of_adapters.before,
            kernels.gemm1(
                *(h.written, permuted, w13, w2, of_pairs, on_input, activation),
                *(config.gemm1, block_m, gpu, x_scale, routed, of_adapters.added),
            ),
        ]
        gemm2 = kernels.gemm2(
            *(y.data, h.read.data, w2, of_pairs, config.gemm2, block_m, split_k, gpu),
            *(h.read.scale, routed),
        )
        second = [*of_adapters.between, *h.launches, gemm2, *of_adapters.after]
        return GatheredProducts(first, second, p.routing, y, split_k, of_adapters.summed)

    def packed(self, a: ExpertsArgs) -> list[Launch]:
        """All launches by mixed_gemm/sm90_packed.py, whose products read rows that are sorted
        without padding.
        """
        rows = PackedRows.of(a, a.expert_map, self.w2.E, self.w2.K, self.gpu)
        return [
            *rows.placed,
            rows.blocks(None, self.gpu),
            rows.moved(a, self.gpu),
            *rows.products(self),
            rows.summed(a),
        ]


class PackedRows(NamedTuple):
    """The S rows of a call in the order of experts, for products of mixed_gemm/sm90_packed.py."""

    placed: list[Launch]
    layout: Layout
    routing: Routing
    x: Tensor  # (S, K), then y
    h: Tensor  # (S, I)

    @classmethod
    def of(
        cls,
        a: ExpertsArgs,
        expert_map: Tensor | None,
        E: int,
        I: int,
        gpu: Gpu,
    ) -> PackedRows:
        """Those of a call in its workspaces. `expert_map`: to the E experts that rows are of."""
        S, K, dtype = a.topk_ids.numel(), a.out.shape[1], a.hidden_states.dtype
        # workspace2 holds the counts of experts, then rows of x, then y
        counts = flat(a.workspace2, torch.int32, S * K)
        x = flat(a.workspace2, dtype, S * K)[: S * K].view(S, K)
        h = flat(a.workspace13, dtype, S * I)[: S * I].view(S, I)
        placed, layout = place(a.topk_ids, expert_map, a.index_workspace, E, S, 1, gpu, counts)
        blocks = num_blocks_of(S, E + 1, packed.BLOCK_M)  # rows of no expert are one more
        routing = sorted_rows(a.index_workspace[index_parts(S, E).counts :], E, blocks)
        return cls(placed, layout, routing, x, h)

    def blocks(self, expert_map: Tensor | None, gpu: Gpu) -> Launch:
        """Write the blocks: of a pass, whose experts alone a map (E,) names, or of all."""
        S, ends = self.x.shape[0], self.layout.groups
        return group_blocks(self.routing, ends, S, 0, packed.BLOCK_M, gpu, expert_map)

    def moved(self, a: ExpertsArgs, gpu: Gpu) -> Launch:
        """Move rows of tokens to their experts."""
        return scatter(a.hidden_states, Operand(self.x), self.layout, a.topk_ids.shape[1], gpu)

    def products(self, layer: MixedLayer) -> list[Launch]:
        """Both products of the rows that blocks are of. y is where x of these rows was."""
        multiply, x, h, routing = sm90_packed().multiply, self.x, self.h, self.routing
        return [
            multiply(h, x, layer.w13, routing, False, activation=layer.activated),
            multiply(x, h, layer.w2, routing, False),
        ]

    def summed(self, a: ExpertsArgs) -> Launch:
        """For each token the sum of its rows of y, times router weights."""
        return combine_rows(a.out, self.x, a.topk_weights, self.layout, a.topk_ids.shape[1])


def run_packed_in_passes(
    a: ExpertsArgs, passes: Passes, layer_of: Callable[[ExpertsArgs], MixedLayer], gpu: Gpu
) -> None:
    """As `run_in_passes`, by mixed_gemm/sm90_packed.py: rows of all experts are placed at once,
    and each pass multiplies those of its own.
    """
    device = a.hidden_states.get_device()
    for part in parts_of(a):
        rows = PackedRows.of(part, None, a.num_experts, layer_of(part).w2.K, gpu)
        launch.run([*rows.placed, rows.moved(part, gpu)], device, gpu)
        for one in passes(part):
            blocks = rows.blocks(one.expert_map, gpu)
            launch.run([blocks, *rows.products(layer_of(one))], device, gpu)
        launch.run([rows.summed(part)], device, gpu)


def unrounded(a: AnyArgs, dtype: torch.dtype, rows: int, I: int) -> Hidden:
    """h (rows, I) that the GEMMs hand over as it is."""
    h = flat(a.workspace13, dtype, rows * I)
    return Hidden(h, None, [], Input(h, 0, I, 1))
