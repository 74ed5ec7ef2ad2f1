"""Weights of 4 and 8 bits on SM90: launches on a CPU, that the kernels compile, and values on a
GPU (`-m gpu`)."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import oracle
from tests.support.cases import BF16, FP32, Case, assert_matches, prepared, refill, tolerance

pytest.importorskip("triton.experimental.gluon")


import moe_ops
from moe_ops import environment
from moe_ops.choose import mixed as choose
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels import launch
from moe_ops.kernels.configs import SM90_WGMMA, GemmConfig, LayerConfig
from moe_ops.kernels.device.blocks import TAKEN1, TAKEN2, pack_block, unpack_block
from moe_ops.kernels.launch import Gpu, gpu
from moe_ops.kernels.mixed_gemm import (
    configs,
    gemv,
    operands,
    sm90_decode,
    sm90_mainloop,
    sm90_wgmma,
)
from moe_ops.kernels.mixed_gemm.operands import MixedOperand, operand
from moe_ops.kernels.mixed_gemm.sm90_occupancy import WgmmaKernel
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS, RouterWeights, Routing, route_pairs
from moe_ops.kernels.place.sort import Route, Sort, moe_ops_route
from moe_ops.kernels.rows.combine import Combine, moe_ops_combine
from moe_ops.kernels.rows.rounding import GAP, rounding_of
from moe_ops.kernels.rows.scales import rows_of
from moe_ops.meta.scales import TRITON_E2M1
from moe_ops.meta.workspace import cdiv
from moe_ops.ops import relayout
from moe_ops.pipeline import gathered
from tools import wgmma_registers

WHY_NO_GLUON = environment.why_no_gluon(environment.TRITON)
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
GPU = Gpu(227 * 1024, True, True)
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not SM90 or WHY_NO_GLUON is not None, reason=WHY_NO_GLUON or "needs SM90"),
)


INT4_NUMBERS = [
    torch.tensor(bits.value, dtype=torch.int16).view(BF16)
    for bits in (
        sm90_decode.INT4_LOW_BITS,
        sm90_decode.INT4_HIGH_BITS,
        sm90_decode.INT4_OFFSET_BITS,
    )
]


def columns_at(k_chunk: int, bits: int, x_bits: int = 16) -> torch.Tensor:
    """The column at every permuted index of a chunk."""
    return sm90_wgmma.permute_columns.fn(torch.arange(k_chunk), k_chunk, bits, x_bits)


def chunks_of(K: int, k_chunk: int, bits: int = 4) -> torch.Tensor:
    """(chunks, k_chunk) columns of a row as the mainloop takes it, -1 for a zero: the last chunk
    is of the row's last columns, and those of the one before it are zeros."""
    columns = torch.arange(-(-K // k_chunk) * k_chunk).view(-1, k_chunk)
    if K % k_chunk:
        missing = k_chunk - K % k_chunk
        columns[-1] = torch.where(
            columns[-1] - columns[-1, 0] < missing, -1, columns[-1] - missing
        )
    return columns[:, columns_at(k_chunk, bits)]


def permute(
    out,
    x,
    routing: Routing,
    S: int,
    k_chunk: int,
    bucket=0,
    table_block_m=0,
    scales=(None, None, 0),  # out_scale, x_scale and its stride
    weights=NO_ROUTER_WEIGHTS,
    rounded=sm90_wgmma.NOT_ROUNDED,
    x_bits=16,
    block_k=sm90_wgmma.PERMUTED_COLUMNS,
) -> None:
    """Run moe_ops_permute_tokens."""
    K = x.shape[1]
    pairs, pair_strides = sm90_wgmma.pair_routing(routing, S)
    args = sm90_wgmma.PermuteTokens(
        out=out,
        x=x,
        scales=sm90_wgmma.RowScales(*scales[:2]),
        pairs=pairs,
        K=K,
        pair_strides=pair_strides,
        strides=sm90_wgmma.TokenStrides(*x.stride(), scales[2]),
        topk_weights=weights,
        rounded=rounded,
        chunks=sm90_wgmma.Chunks(k_chunk, 4, x_bits, K % k_chunk > 0),
        BLOCK_K=block_k,
        PAIR_BUCKET=bucket,
        TABLE_BLOCK_M=table_block_m,
        PDL=False,
    )
    grid = (S, -(-out.shape[1] // block_k), 1)
    sm90_wgmma.moe_ops_permute_tokens.function[grid](*args)


def sort(routing: Routing, S: int, block_m: int) -> None:
    """Run moe_ops_route."""
    args = Route(routing=routing, sort=Sort(S, 16, block_m, 64), PDL=False)
    moe_ops_route.function[(routing.E, 1, 1)](*args)


@pytest.mark.parametrize("K, k_chunk", [(1280, 128), (192, 64), (192, 128), (1216, 128)])
def test_permute_tokens(K, k_chunk):
    """Rows at their pairs' positions, which may be left over from other calls where there are
    none."""
    tokens, top_k, blocks = 5, 2, 3
    x = torch.randn(tokens, K).to(BF16)
    pairs = torch.tensor([7, 0, 9, 2, 4, 1, 3, -5, 1 << 30, 8], dtype=torch.int32)
    index = torch.cat([torch.full((4 * blocks,), -1, dtype=torch.int32), pairs])
    columns = chunks_of(K, k_chunk).flatten()
    out = torch.full((10, len(columns)), float("nan"), dtype=BF16)
    permute(
        out, x, Routing(index, None, None, blocks, 4, 4, top_k, 0, 0, 0, "sorted"), 10, k_chunk
    )
    valid = (pairs >= 0) & (pairs < 10)
    assert torch.equal(
        out[valid], torch.where(columns < 0, 0, x[pairs[valid] // top_k][:, columns])
    )
    assert out[~valid].isnan().all()


@pytest.mark.parametrize("I, k_chunk", [(1280, 128), (192, 64), (192, 128), (1216, 128)])
@pytest.mark.parametrize("bits", [4, 8])
def test_permute_hidden(I, k_chunk, bits):
    """The columns that permute_tokens gives x, in the rows where they are."""
    h, columns = torch.randn(7, I).to(BF16), chunks_of(I, k_chunk, bits).flatten()
    out = torch.full((7, len(columns)), float("nan"), dtype=BF16)
    args = sm90_wgmma.PermuteHidden(
        out=out,
        h=h,
        I=I,
        chunks=sm90_wgmma.Chunks(k_chunk, bits, 16, I % k_chunk > 0),
        BLOCK_K=sm90_wgmma.PERMUTED_COLUMNS,
        PDL=False,
    )
    grid = (7, -(-len(columns) // sm90_wgmma.PERMUTED_COLUMNS), 1)
    sm90_wgmma.moe_ops_permute_hidden.function[grid](*args)
    assert torch.equal(out, torch.where(columns < 0, 0, h[:, columns]))


ROUNDING, E4M3_DTYPE = rounding_of("int4_w4a8"), torch.float8_e4m3fn


def signed(out: torch.Tensor) -> torch.Tensor:
    """(rows, K) of e4m3 rows (rows, 2 K) whose chunks of 128 are followed by their negatives."""
    numbers, negatives = out.view(E4M3_DTYPE).double().unflatten(1, (-1, 2, 128)).unbind(2)
    assert torch.equal(numbers.nan_to_num(), -negatives.nan_to_num())
    return numbers.flatten(1)


def assert_nearest(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Elements are e4m3 numbers nearest to quotients: in the middle of two, either one."""
    assert torch.equal(oracle.e4m3(found), found)
    least = (oracle.e4m3(exact) - exact).abs()
    assert ((found - exact).abs() <= least + 1e-6 * exact.abs()).all()


@pytest.mark.parametrize("K, whole_row", [(1280, False), (1280, True), (384, True)])
@pytest.mark.parametrize("x_bits", [8, 16])
@pytest.mark.parametrize("arrives", [False, True])
def test_permute_quantized_tokens(K, whole_row, x_bits, arrives):
    """Rows rounded to e4m3, times router weights, or decoded if they arrive so, and their scales,
    at their positions."""
    tokens, blocks = 5, 3
    x = torch.randn(tokens, K).to(BF16)
    x[3] = math.nan
    factors = torch.rand(tokens, 1) + 0.5
    pairs = torch.tensor([2, 0, 7, 3, 4], dtype=torch.int32)
    index = torch.cat([torch.full((4 * blocks,), -1, dtype=torch.int32), pairs])
    columns = (torch.arange(0, K, 128)[:, None] + columns_at(128, 4, x_bits)).flatten()
    out = torch.full((tokens, K), float("nan"), dtype=BF16)
    if x_bits == 8:
        out = torch.full((tokens, 2 * K), 0x7F, dtype=torch.uint8).view(E4M3_DTYPE)
    scales = torch.full((tokens,), -1.0)
    weighed = x.double() if arrives else x.double() * factors
    expected_scale = weighed.abs().amax(1) / 448
    quotients = weighed / expected_scale[:, None]
    elements = oracle.e4m3(quotients)
    if arrives:
        x = elements.to(E4M3_DTYPE).view(torch.uint8)
        given = {"scales": (scales, expected_scale.float()[:, None], 1)}
    else:
        rounded = ROUNDING.MANTISSA, ROUNDING.MIN_EXPONENT, ROUNDING.MAX_VALUE, whole_row
        given = {
            "scales": (scales, None, 0),
            "weights": RouterWeights(factors, 1, 1),
            "rounded": sm90_wgmma.Rounded(*rounded),
        }
    routing = Routing(index, None, None, blocks, 4, 4, 1, 0, 0, 0, "sorted")
    if whole_row:
        given["block_k"] = sm90_wgmma.rounding_block(K).columns
        assert given["block_k"] >= K
    permute(out, x, routing, tokens, 128, x_bits=x_bits, **given)
    found = signed(out) if x_bits == 8 else out.double()
    for position, pair in enumerate(pairs.tolist()):
        if pair >= tokens:
            assert found[position].isnan().all() and scales[position] == -1
            continue
        torch.testing.assert_close(
            scales[position].double(), expected_scale[pair], rtol=3e-7, atol=0, equal_nan=True
        )
        if pair == 3:  # in e4m3 the scale has it: the sums are multiplied by it
            assert x_bits == 8 or found[position].isnan().all()
            continue
        assert_nearest(found[position], (elements if arrives else quotients)[pair][columns])


@pytest.mark.parametrize("K", [384, 4224])
def test_rows_of_h_are_rounded(K):
    """At once, and 1024 columns at a time; a row of NaN stays in its row."""
    x = torch.randn(3, K)
    x[1] = math.nan
    w2 = mock.Mock(K=K, k_chunk=128)
    assert sm90_wgmma.rounding_block(K).whole_row == (K == 384)
    start = 3 * K + GAP
    space = torch.zeros(start + cdiv(3 * K, 2) + GAP + 3)
    space[: 3 * K] = x.flatten()
    rounded = sm90_wgmma.round_h(ROUNDING, 3, w2, space, launch.gpu(-1))
    launch.run(rounded.launches, -1, launch.gpu(-1))
    out, scale = rounded.read.data[: 6 * K].view(3, 2 * K), rounded.read.scale[:3]
    expected = x.double().abs().amax(1) / 448
    torch.testing.assert_close(scale.double(), expected, rtol=3e-7, atol=0, equal_nan=True)
    assert_nearest(signed(out)[::2], (x.double() / expected[:, None])[::2])


def test_products_are_kept_for_a_device():
    """Of every e4m3 scale, as `look_up_products` selects from them; none for other weights."""
    w, other = int4_e4m3(), int4(torch.zeros(2, 64, 128, dtype=torch.uint8))
    assert sm90_wgmma.products_on(w) is sm90_wgmma.products_on(w)
    assert sm90_wgmma.products_on(w).shape == (256, 4) and sm90_wgmma.products_on(other) is None


@pytest.mark.parametrize(
    "block_m, K, blocks", [(32, 2048, 0), (64, 2048, 48), (64, 4096, 48), (80, 14336, 10)]
)
def test_blocks_whose_rows_stay_in_the_l2(block_m, K, blocks):
    assert configs.blocks_together(block_m, K) == blocks


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("most, tokens", [(64, 32), (64, 11), (64, 1), (512, 256)])
def test_permute_few_tokens(most, tokens, mapped):
    """Positions it finds itself are those of the sorting kernel's order."""
    E, top_k, K, k_chunk = 6, 2, 192, 64
    blocks, S = E * tokens, tokens * top_k
    ids = torch.randint(-2, E + 3, (top_k, tokens)).T  # strided, some of no expert
    expert_map = torch.randperm(E + 2).to(torch.int32) - 2 if mapped else None
    x = torch.randn(tokens, K).to(BF16)
    ids[tokens // 2 :, 1] = 0 if expert_map is None else expert_map.argmax()  # many of one
    index = torch.full((4 * blocks + S,), -1, dtype=torch.int32)
    out = torch.full((S, K), float("nan"), dtype=BF16)
    routing = route_pairs(index, ids, expert_map, E, blocks, False)
    sort(routing, S, 8)
    nowhere = torch.empty(0, dtype=torch.int32)  # the order is not read
    permute(out, x, routing._replace(index=nowhere), S, k_chunk, most)
    order = index[4 * blocks :]
    if most == configs.PAIR_BUCKETS[0]:  # without a sorting kernel it writes what that one does
        found, again = torch.full((5 * S,), -1, dtype=torch.int32), torch.full_like(out, math.nan)
        unsorted = routing._replace(index=found, num_blocks=S)
        permute(again, x, unsorted, S, k_chunk, most, table_block_m=8)
        assert torch.equal(found[4 * S :], order)
        assert torch.equal(again[order >= 0], out[order >= 0])
        assert found[S : S + 2].tolist() == [0, 0]  # tiles taken
        blocks = [unpack_block.fn(block) for block in found[:S].tolist() if block >= 0]
        wanted = index[: 4 * E * tokens].view(-1, 4)[: index[3], :3].tolist()
        assert sorted(blocks) == [(e, at, min(at + 8, end)) for e, at, end in wanted]
    used = order >= 0
    assert used.tolist() == sorted(used.tolist(), reverse=True)
    assert tokens < 20 or 0 < used.sum() < S
    columns = (torch.arange(0, K, k_chunk)[:, None] + columns_at(k_chunk, 4)).flatten()
    assert torch.equal(out[used], x[order[used] // top_k][:, columns])
    assert out[~used].isnan().all()


@contextmanager
def on_torch_tensors(experts: torch.Tensor, table: torch.Tensor) -> Iterator[None]:
    """What the mainloop calls of Gluon, of pairs with these experts; pointers are places in
    `table`."""

    def load(place: Any, mask: Any = True, other: int = 0, cache_modifier: str = "") -> Any:
        mask = torch.as_tensor(mask)
        return torch.where(mask, table[torch.where(mask, place, 0)], other)

    def local_expert(_ids: Any, _map: Any, pair: Any, mask: Any, *_: Any) -> Any:
        return torch.where(mask, experts[pair.clamp(max=len(experts) - 1)], -1)

    replaced = {
        "arange": lambda a, b, layout: torch.arange(a, b),
        "associative_scan": lambda t, axis, _: t.cumsum(axis),
        "cdiv": lambda a, b: -(-a // b),
        "minimum": lambda a, b: torch.as_tensor(a).clamp(max=b),
        "maximum": lambda a, b: torch.as_tensor(a).clamp(min=b),
        "where": torch.where,
        "sum": torch.sum,
        "load": load,
    }
    with (
        mock.patch.multiple(sm90_mainloop.gl, **replaced),
        mock.patch.object(sm90_mainloop, "local_expert", local_expert),
        mock.patch.object(sm90_mainloop, "unpack_block", unpack_block.fn),
        mock.patch.object(
            sm90_mainloop, "first_tile_of_pair", sm90_mainloop.first_tile_of_pair.fn
        ),
        mock.patch.object(torch.Tensor, "to", lambda t, _: t.int()),
    ):
        yield


@contextmanager
def program_of(number: int, programs: int) -> Iterator[None]:
    numbers = {"program_id": lambda _: torch.tensor(number), "num_programs": lambda _: programs}
    with mock.patch.multiple(sm90_mainloop.gl, **numbers):
        yield


@pytest.mark.parametrize("programs", [1, 3, 12])
@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.parametrize("S, most", [(3, 3), (9, 3), (64, 1), (64, 4), (64, 70)])
def test_programs_of_few_pairs_have_all_tiles_once(block_m, S, most, programs):
    """First tiles, from the experts alone, and those that they take then: the blocks of at most 64
    pairs of any order, some of no expert, with 12 tiles each."""
    experts = torch.randint(-1, most, (S,))
    if most == 4:
        experts[: S // 2] = 2  # its first block has more programs than tiles
    blocks, first = [], 0
    for e in range(most):
        end = first + int((experts == e).sum())
        blocks += [(e, at, min(end, at + block_m)) for at in range(first, end, block_m)]
        first = end
    table = torch.full((S,), -1)
    order = torch.randperm(len(blocks)).tolist()
    table[torch.randperm(S)[: len(blocks)]] = torch.tensor(
        [pack_block.fn(*blocks[i]) for i in order], dtype=table.dtype
    )
    with on_torch_tensors(experts, table):
        args = (None, None, S, most, most, 1, 1, 1, 0, 12, 0, 64, block_m, 4)
        found = []
        for program in range(S * programs):
            with program_of(program, S * programs):
                found.append(sm90_mainloop.first_tile.fn(None, *args))
        found = [tile for here, *tile in found if here]
        left = sm90_mainloop.tiles_left.fn(torch.tensor(0), S, programs, 12, 64)
        *_, used, average = left
        assert not blocks or {int(n) for *_, n in found} >= set(range(programs))
        for i in range(used * average):
            e, *tile = sm90_mainloop.tile_of_left.fn(torch.tensor(i), left, 12)
            found += [(e, *tile)] if e >= 0 else []
    assert sorted(tuple(int(v) for v in tile) for tile in found) == [
        (*block, n) for block in blocks for n in range(12)
    ]


@pytest.mark.parametrize("split_k", [1, 3])
def test_partial_sums_are_combined(split_k):
    M, top_k, E, K = 3, 2, 4, 70
    ids = torch.tensor([[0, 3], [2, -1], [1, 0]])
    weights, y = torch.rand(M, top_k), torch.randn(split_k, M * top_k, K)
    y[:, 3] = float("nan")  # a pair that is not here
    out = torch.full((M, K), float("nan"))
    args = Combine(
        out=out,
        y=y,
        topk_weights=RouterWeights(weights, *weights.stride()),
        routing=route_pairs(torch.empty(0, dtype=torch.int32), ids, None, E, 0, False),
        K=K,
        out_stride_m=out.stride(0),
        out_stride_k=out.stride(1),
        TOP_K=top_k,
        WEIGHTED=True,
        SPLIT_K=split_k,
        NUM_BLOCKS=1,
        BLOCK_N=64,
        PDL=False,
    )
    moe_ops_combine.function[(M, 2, 1)](*args)
    here = (ids >= 0)[..., None]
    rows = torch.where(here, y.double().sum(0).reshape(M, top_k, K), 0.0)
    expected = (rows * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("experts", [[2, 2, 0, 2, 5], [7, 7, 7, 7, 7], [-1, -1, -1, -1, 9]])
def test_first_block_says_how_many_are_used(experts):
    E, block_m, blocks = 6, 2, 5
    ids = torch.tensor(experts)[:, None]
    index = torch.full((4 * blocks + len(experts),), -7, dtype=torch.int32)
    sort(route_pairs(index, ids, None, E, blocks, False), len(experts), block_m)
    used = sum(-(-experts.count(e) // block_m) for e in range(E))
    assert index[3] == used
    assert index[[TAKEN1.value, TAKEN2.value]].tolist() == [0, 0]
    assert (index[: 4 * blocks : 4] >= 0).tolist() == [i < used for i in range(blocks)]


COMPILE = """
from tools import compile_kernels as c
from tools.wgmma_registers import overwritten, product_loop
from moe_ops.choose.table import override
from moe_ops.kernels.configs import SM90_WGMMA, GemmConfig, LayerConfig
gpu = c.gpu_of(90)
cases = {"int4_w4a16:g64:zp": "silu", "nvfp4_w4a16": "swigluoai", "int4_w4a8": "gelu"}
cases |= {"fp8_w8a16:block": "relu2_no_mul"}
cases |= {"int8_w8a16:g128:zp": "silu", "mxfp4_w4a16": "silu", "int4_w4a16:g128": "silu"}
cases |= {"int8_w8a16:g32:zp": "silu", "int6_w6a16:g16": "silu", "int5_w5a16:g32:min": "gelu"}
cases |= {"int8_w8a16:channel": "silu", "int4_w4a16:g128:zp": "silu", "nf4_w4a16:g64": "silu"}
planes = ("int6_w6a16:g16:super", "int5_w5a16:g32:super:min")
cases |= dict.fromkeys(planes, "silu")
streamed = 0
for scheme, activation in cases.items():
    for block_m, gemm in (
        (8, GemmConfig(64, 256, 2, 4)),
        (16, GemmConfig(128, 128, 3, 4)),
        (80, GemmConfig(128, 128, 3, 4))
        if scheme == "mxfp4_w4a16"
        else (48, GemmConfig(128, 128, 3, 4))
        if scheme in ("int4_w4a16:g128", "int8_w8a16:channel")
        else (64, GemmConfig(128, 256, 2, 4))
        if scheme.startswith("int5")
        else (64, GemmConfig(128, 128, 3, 4))
        if scheme.startswith("int6")
        else (64, GemmConfig(128, 256, 2, 8)),
        *[(80, GemmConfig(128, 256, 2, 8))] * (scheme == "int4_w4a16:g64:zp"),
        *[(80, GemmConfig(256, 128, 4, 16))] * (scheme == "nf4_w4a16:g64"),
        *[(8, GemmConfig(128, 256, 2, 4))] * (scheme == "int4_w4a16:g128"),
        *[(8, GemmConfig(64, 256, 3, 4))]
        * (scheme in ("int4_w4a16:g128", "int4_w4a16:g128:zp", "int8_w8a16:channel")),
        *[(16, GemmConfig(64, 256, 3, 4))] * (scheme == "int8_w8a16:channel"),
        *[(16, GemmConfig(128, 256, 2, 4))] * (scheme == "int8_w8a16:channel"),
        *[(16, GemmConfig(64, 256, 3, 4))] * (scheme == "int4_w4a16:g128:zp"),
        *[(32, GemmConfig(128, 256, 2, 8))]
        * (scheme in ("int4_w4a16:g128:zp", "int8_w8a16:channel")),
        *[(8, GemmConfig(128, 256, 3, 8))] * (scheme == "nf4_w4a16:g64"),
        *[(8, GemmConfig(64, 256, 3, 4)), (32, GemmConfig(128, 256, 2, 8))] * (scheme in planes),
        *[(8, GemmConfig(64, 128, 4, 4)), (16, GemmConfig(128, 128, 2, 4))]
        * (scheme == "int6_w6a16:g16:super"),
        *[(32, GemmConfig(128, 128, 2, 4))] * (scheme == "int6_w6a16:g16:super"),
        *[(64, GemmConfig(128, 128, 3, 8))] * (scheme == "nf4_w4a16:g64"),
    ):
        prepared = block_m != 64 and scheme in ("nvfp4_w4a16", "mxfp4_w4a16")
        layout = "triton_e2m1" if prepared else ""
        whole = scheme in ("int4_w4a8", "int4_w4a16:g128:zp", "int5_w5a16:g32:min")
        sizes = (4, 2, 512, 512 if scheme in planes else 384 if whole else 320)
        if block_m == 8 and gemm.block_n == 128:  # long rows, which are streamed
            sizes = (4, 2, 4096, 4096)
        call = c.Call(sizes, 9, scheme, activation=activation, bias=True, layout=layout)
        with override(LayerConfig(gemm, gemm, block_m, 64, SM90_WGMMA)):
            found = c.compile_call(call, gpu, 90)
        gemms = [one for one in found if "wgmma" in one.name]
        assert len(gemms) == 2
        for one in gemms:
            ptx = one.binary.asm["ptx"]
            assert "wgmma.mma_async" in ptx
            assert ptx.count(".b8 level_pairs") == (scheme == "nf4_w4a16:g64")  # one table
            assert c.usage(one.binary).spilled <= 96, (scheme, block_m, c.usage(one.binary))
            sass = c._run_tool("nvdisasm", one.binary, "-c")
            assert product_loop(sass) and overwritten(sass) == [], (scheme, block_m)
            if one.constants["STREAM"]:  # ptxas has not made it wait for each product
                streamed += 1
                waits = [text for text in product_loop(sass) if "DEPBAR" in text]
                assert waits and not any(text.endswith("0x0 ;") for text in waits)
assert streamed == 2  # both GEMMs
for M, K in ((9, 2560), (9, 4096), (9, 2304), (60, 2560)):  # rows summed in two segments
    call = c.Call((4, 2, K, K), M, "int4_w4a16:g128", batch_invariant=True)
    found = [one for one in c.compile_call(call, gpu, 90) if "wgmma" in one.name]
    assert [one.constants["SEGMENTS"] for one in found] == [2, 2]
    for one in found:
        assert c.usage(one.binary).spilled <= 96, (M, K, c.usage(one.binary))
        sass = c._run_tool("nvdisasm", one.binary, "-c")
        assert product_loop(sass) and overwritten(sass) == [], (M, K)
"""


@pytest.mark.slow
@pytest.mark.skipif(WHY_NO_GLUON is not None, reason=str(WHY_NO_GLUON))
def test_compiles_for_sm90():
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=variables)


LOOP = """
.L_x_1:
        /*0010*/                   LDS.128 R12, [R7] ;
        /*0020*/                   HGMMA.64x8x16.F32.BF16 R24, R32, gdesc[UR8], R24 ;
        /*0030*/                   HGMMA.64x8x16.F32.BF16 R24, R36, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0050*/                   LOP3.LUT {written}, R12, 0xf000f, RZ, 0xc0, !PT ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(
    "left, written, early",
    [
        ("0x0", "R36", False),  # after all products
        ("0x1", "R36", True),  # an operand of the last group
        ("0x1", "R27", True),  # sums
        ("0x1", "R40", False),
    ],
)
def test_registers_of_products_in_flight_are_seen(left, written, early):
    found = wgmma_registers.overwritten(LOOP.format(left=left, written=written))
    assert [text.split()[1] for text in found] == ([f"{written},"] if early else [])


def taken(w: MixedOperand, dtype=BF16) -> bool:
    """Whether a weight can run on these kernels."""
    spaces = (torch.empty(0), torch.empty(0))
    return sm90_wgmma.why_not(w, w, dtype, spaces) is None


def int4(data: torch.Tensor, columns: int = 256) -> MixedOperand:
    """Weights (2, 64, columns) of int4."""
    scales = torch.zeros(2, 64, columns // 128, dtype=BF16)
    return operand("w", data, scales, None, None, None, "int4_w4a16:g128", gpu(-1))


def int4_e4m3() -> MixedOperand:
    """Weights (2, 64, 256) of int4_w4a8."""
    data, channels = torch.zeros(2, 64, 128, dtype=torch.uint8), torch.ones(2, 64, 1)
    scales = torch.ones(2, 64, 2).to(E4M3_DTYPE)
    return operand("w", data, scales, None, None, channels, "int4_w4a8", gpu(-1))


def mxfp4(data: torch.Tensor) -> MixedOperand:
    scales = torch.zeros(*data.shape[:2], data.shape[2] // 16, dtype=torch.uint8)
    return operand("w", data, scales, None, None, None, "mxfp4_w4a16", gpu(-1))


def prepare(w: MixedOperand, halves: int, gemm: GemmConfig):
    """A weight as a GEMM takes it, with boxes of a tile and a step."""
    ids, index = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(14, dtype=torch.int32)
    routing = route_pairs(index, ids, None, w.E, 2, False)
    pairs = sm90_wgmma.pair_routing(routing, 6).pairs
    return sm90_wgmma._operand(w, halves, gemm, 8, 1, pairs, GPU)


def test_descriptors_take_rows_of_16_byte_step_alone():
    from moe_ops.schemes import get_scheme

    def possible(scheme, K, group, dtype=BF16, scale=torch.bfloat16):
        storage = get_scheme(scheme).weight.storage_dtype
        data = torch.zeros(2, 64, K if "w8" in scheme else K // 2).to(storage)
        scales = torch.zeros(2, 64, max(K // group, 1), dtype=scale)
        w = operand("w", data, scales, None, None, None, scheme, gpu(-1))
        return taken(w, dtype)

    assert possible("int4_w4a16:g128", 256, 128) and possible("int4_w4a16:g64", 192, 64)
    assert possible("mxfp4_w4a16", 192, 32, scale=torch.uint8)
    assert not possible("mxfp4_w4a16", 96, 32, scale=torch.uint8)  # no chunk of 64 columns
    assert not possible("int4_w4a16:g128", 256, 128, torch.float16)
    assert possible("fp8_w8a16:block", 192, 128) and possible("int8_w8a16:g64", 192, 64)
    assert possible("int8_w8a16:g32", 192, 32) and not possible("int8_w8a16:g32", 96, 32)
    assert possible("int8_w8a16:g32", 192, 32, scale=torch.float16)  # GGUF's Q8_0
    assert possible("int4_w4a16:g32", 128, 32) and possible("int4_w4a16:g32", 192, 32)
    assert not possible("int4_w4a16:g32", 128, 32, scale=torch.float32)
    assert possible("int4_w4a16:g64", 192, 64, scale=torch.float32)
    assert possible("int4_w4a8", 256, 128, scale=torch.float8_e4m3fn)
    assert possible("nf4_w4a16:g32", 192, 32, scale=torch.float32)
    assert possible("nf4_w4a16:g64", 64, 64, scale=torch.float32)
    assert possible("iq4_w4a16:g32", 192, 32) and not possible("iq4_w4a16:g32", 96, 32)


@pytest.mark.parametrize("K", [128, 192, 256, 1216])
def test_last_chunk_of_weights_reaches_back(K):
    """What TMA is told of them, at the places `load_weights` asks for."""
    data = torch.randint(0, 256, (2, 32, K // 2), dtype=torch.uint8)
    w, gemm = mxfp4(data), GemmConfig(64, 256, 2, 4)
    k_chunk = w.k_chunk
    assert k_chunk == 128 and w.chunks(gemm) == (2 if K % k_chunk == 0 else 1)
    found = prepare(w, 2, gemm)
    tile = found.prepared.tile
    assert k_chunk == tile.K_CHUNK and w.block_k(gemm) == tile.BLOCK_K
    chunks = data.as_strided(found.w.shape, found.w.strides)
    for i in range(-(-K // k_chunk)):
        at = i if K % k_chunk == 0 else min(2 * i, K * 2 // k_chunk - 2)
        start = min(i * k_chunk, K - k_chunk) // 2
        expected = data[..., start : start + k_chunk // 2].unflatten(1, (2, 16))
        assert torch.equal(chunks[:, at], expected)
    assert at == found.w.shape[1] - 1


@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16"])
@pytest.mark.parametrize("K", [128, 192, 256, 1216])
def test_scales_lie_where_tma_takes_them(scheme, K):
    """Of each chunk, at the places `load_weights` asks for, the elements that `scale_layout` gives
    a row's four threads."""
    weight = torch.randn(2, 32, K).to(BF16) * torch.rand(2, 32, K).exp2()
    natural = moe_ops.quantize(weight, scheme)
    ready = prepared(natural)
    tensors = (ready.qdata, ready.scale, None, ready.global_scale, None)
    w = operand("w", *tensors, scheme, gpu(-1), TRITON_E2M1)
    found = prepare(w, 2, GemmConfig(64, 256, 2, 4)).w_scales
    assert found.block_shape[:3] == [1, 2 if K % 128 == 0 else 1, 2]
    chunks = found.base.as_strided(found.shape, found.strides)
    scales, group = natural.scale.view(torch.uint8), w.format.group
    R = group // 4
    for i in range(-(-K // 128)):
        at = i if K % 128 == 0 else min(2 * i, K * 2 // 128 - 2)
        elements = chunks[:, at].unflatten(-1, (2, R, 2)).transpose(-3, -2).flatten(-2)
        elements = elements.flatten(1, 3).contiguous().view(torch.uint8)
        start = min(i * 128, K - 128) // group
        assert torch.equal(elements, scales[:, :, start : start + 128 // group])
    assert at == found.shape[1] - 1
    assert found.layout.swizzle_byte_width == 32 and found.strides[-1] == 1
    memory = torch.zeros(w.scale.numel() + 8, dtype=torch.uint8)[8:].view(w.scale.dtype)
    moved = w._replace(pointers=w.pointers._replace(w_scale=memory.view_as(w.scale)))
    assert taken(w) and not taken(moved)
    assert gemv.why_not(w, moved) is not None


@pytest.mark.parametrize(
    "first, steps, possible",
    [
        (0, (64 * 128, 128, 1), True),
        (0, (64 * 144, 144, 1), True),
        (16, (64 * 144, 144, 1), True),
        (0, (64 * 136, 136, 1), False),
        (8, (64 * 128, 128, 1), False),
        (0, (128, 256, 2), False),  # columns apart
        (0, (0, 128, 1), False),  # experts that share their weights
    ],
)
def test_weights_in_other_places(first, steps, possible):
    data = torch.zeros(10**5, dtype=torch.uint8)[first:].as_strided((2, 64, 128), steps)
    assert taken(int4(data)) == possible


def test_rows_are_those_of_pairs():
    """Whatever room the workspaces have: behind the pairs of the index workspace is other
    memory."""
    w = int4(torch.zeros(2, 64, 128, dtype=torch.uint8))
    x, workspace = torch.zeros(3, 256, dtype=BF16), torch.zeros(40, 256, dtype=BF16)
    ids, index = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(14, dtype=torch.int32)
    routing = route_pairs(index, ids, None, 2, 2, False)
    of_pairs = sm90_wgmma.pair_routing(routing, 6)
    found = sm90_wgmma.permute_tokens(
        *(workspace, rows_of(x), w, of_pairs, NO_ROUTER_WEIGHTS, None, None, 8, gpu(-1))
    )
    named = found.named()
    assert found.grid == (6, 1, 1) and (named["num_blocks"], named["S"]) == (2, 6)


def wgmma_kernel(scheme: str, block_m: int, gemm: tuple) -> WgmmaKernel:
    """A GEMM as far as registers depend on it, in chunks of 128 columns; of "NAME prepared" or
    "NAME float32", as `check` has it."""
    name, _, how = scheme.partition(" ")
    found = operands.describe(name)
    if how == "prepared":
        found = found._replace(name="e2m1_words")
    found = operands._wgmma_format(found, FP32 if how == "float32" else BF16)
    return WgmmaKernel(found, 128, False, GemmConfig(*gemm), block_m, max(128, gemm[1]))


# --- values --------------------------------------------------------------------------------------


def layer(block_m: int, *gemm: int) -> LayerConfig:
    return LayerConfig(GemmConfig(*gemm), GemmConfig(*gemm), block_m, 64, SM90_WGMMA)


def watched(name: str = "gemm1"):
    """A mock that counts launches by a function of sm90_wgmma."""
    return mock.patch.object(sm90_wgmma, name, wraps=getattr(sm90_wgmma, name))


def check(scheme: str, config: LayerConfig | None, activation: str = "silu", **sizes) -> None:
    """Against the oracle; weights of "NAME prepared" as the backend wants them, others as they
    are, of "NAME DTYPE" with scales in that dtype."""
    name, _, how = scheme.partition(" ")
    words = how == "prepared"
    case = Case("cuda", BF16, name, activation, **sizes)
    if how and not words:
        scaled = [w._replace(scale=w.scale.to(getattr(torch, how))) for w in case.args[1:3]]
        case.args[1:3] = scaled
    with (
        mock.patch.dict(relayout.RELAYOUTS, {} if words else {"triton": ()}),
        override(config),
        watched() as used,
    ):
        case.check("triton")
    read = {call.args[2].format.name for call in used.call_args_list}
    assert read and (read == {"e2m1_words"}) == words


INT4 = ["int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g32", "int4_w4a16:channel"]
GPU_SCHEMES = [*INT4, "int4_w4a8", *(f"{name}:zp" for name in INT4), "mxfp4_w4a16", "nvfp4_w4a16"]
SHORT_INT4 = ["int4_w4a16:g64", "int4_w4a16:g64:zp", "int4_w4a16:g32", "int4_w4a16:g32:zp"]
PREPARED = ["mxfp4_w4a16 prepared", "nvfp4_w4a16 prepared"]
GPU_SCHEMES += ["int4_w4a16:g64 float16", "int4_w4a16:g128:zp float32"]  # groups' sums are scaled
GPU_SCHEMES += ["int4_w4a16:g32:super:min", "iq4_w4a16:g32:super"]
GPU_SCHEMES += ["int4_w4a16:g32:min", "int4_w4a16:g128:min", "int4_w4a16:g32:min float32"]
GPU_SCHEMES += [*PREPARED, "int8_w8a16:channel", "int8_w8a16:g64:zp", "int8_w8a16:g128"]
GPU_SCHEMES += ["int8_w8a16:g32 float16", "int8_w8a16:g32:zp"]  # weights are scaled
GPU_SCHEMES += ["int6_w6a16:g16:super", "int5_w5a16:g32:super:min"]
GPU_SCHEMES += ["int6_w6a16:g16", "int5_w5a16:g32"]
GPU_SCHEMES += [f"fp8_w8a16:{name}" for name in ("tensor", "channel", "block")]
GPU_SCHEMES += ["nf4_w4a16:g64", "nf4_w4a16:g32", "fp4_w4a16:g64", "iq4_w4a16:g32"]
CONFIGS = [  # block_m, and those of both GEMMs
    (8, 64, 256, 2, 4),
    (8, 128, 256, 3, 8),
    (8, 64, 256, 4, 4),
    (16, 128, 128, 4, 4),
    (32, 128, 128, 4, 4),
    (16, 64, 256, 3, 4),
    (16, 128, 256, 2, 4),
    (32, 128, 256, 2, 8),
    (32, 128, 256, 3, 8),
    (64, 128, 128, 4, 8),
    (64, 128, 256, 2, 8),
    (64, 128, 128, 4, 4),
]


@pytest.mark.parametrize("scheme", [pytest.param(name, marks=ON_GPU) for name in GPU_SCHEMES])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_values(scheme, config):
    """Blocks that are full and not, steps that pass the end of a row."""
    check(scheme, layer(*config), M=11 * config[0] // 8, E=4, top_k=2, K=640, I=384, bias=True)


EIGHT_WARPS = ("int4_w4a16:g32", "int4_w4a16:g64:zp", "int4_w4a16:g32:super:min", "nf4_w4a16:g64")


@pytest.mark.parametrize(
    "scheme, block_m",
    [
        pytest.param(name, block_m, marks=ON_GPU)
        for block_m, names in {
            80: ("int4_w4a16:g128", "int4_w4a16:g128:zp", *EIGHT_WARPS, *PREPARED),
            48: ("int8_w8a16:channel", "fp8_w8a16:channel", "int4_w4a16:g128", *PREPARED)
            + EIGHT_WARPS,
        }.items()
        for name in names
    ],
)
def test_blocks_of_two_operands(scheme, block_m):
    """Of 80 rows, 64 and 16: experts have fewer than 64, up to 80, and more. Of 48, 32 and 16:
    likewise."""
    gemms = [(128, 128, 3, 4)] + [(128, 256, 2, 4)] * ("8_w8a16" in scheme or "fp8" in scheme)
    if scheme in EIGHT_WARPS:
        gemms = [(128, 128, 4, 8), (128, 256, 2, 8)] + [(256, 128, 4, 16)] * (scheme[:3] == "nf4")
    experts = torch.tensor([-1] * 2 + [0] * 33 + [1] * 65 + [2] * 79 + [3] * 153)
    experts = experts[torch.randperm(332, generator=torch.Generator().manual_seed(0))]
    cases = itertools.product(gemms, ((2, False, 1), (1, True, 2)))
    for gemm, (top_k, on_input, split_k) in cases:
        sizes = {"M": 332 // top_k, "E": 4, "top_k": top_k, "K": 640, "I": 384}
        sizes |= {"ids": experts.view(-1, top_k), "bias": True, "on_input": on_input}
        check(scheme, layer(block_m, *gemm)._replace(split_k=split_k), "swigluoai", **sizes)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(n, marks=ON_GPU)
        for n in ("int4_w4a16:g64:zp", "int4_w4a16:g64 float32", "nvfp4_w4a16", *PREPARED)
    ],
)
@pytest.mark.parametrize("split_k", [2, 3])
@pytest.mark.parametrize("I", [128, 1088])
@pytest.mark.parametrize(
    "config", [(8, 64, 256, 4, 4), (32, 128, 256, 2, 4), (64, 128, 128, 3, 8)], ids=str
)
def test_split_k(scheme, split_k, I, config):
    """A part has more steps than the next; of one step, or more rows than the workspace has place
    for, there is one."""
    for M, expected in ((9, split_k if I > 128 else 1), (600, 1)):
        sizes = {"M": M, "E": 5, "top_k": 2, "K": 256, "I": I}
        with watched("gemm2") as used:
            check(scheme, layer(*config)._replace(split_k=split_k), bias=True, **sizes)
        assert {call.args[6] for call in used.call_args_list} == {expected}


@contextmanager
def few_programs(multiprocessors: int = 1) -> Iterator[None]:
    """As on a GPU of so many multiprocessors: each program has many tiles."""

    def at_once(held, gpu):
        return held.blocks * multiprocessors

    with mock.patch.object(sm90_wgmma, "programs_at_once", at_once):
        sm90_wgmma._prepare.cache_clear()
        try:
            yield
        finally:
            sm90_wgmma._prepare.cache_clear()


@pytest.mark.parametrize(
    "scheme, config",
    [
        pytest.param(name, config, marks=ON_GPU, id=f"{name} {config}")
        for config, names in {
            (8, 64, 256, 3, 4): ("int4_w4a16:g128", "int8_w8a16:g64:zp", "int4_w4a8", *PREPARED)
            + ("int6_w6a16:g16:super", "int5_w5a16:g32:super:min"),
            (8, 128, 256, 2, 4): ("int4_w4a16:g128", "int4_w4a16:g64:zp", *PREPARED),
            (16, 64, 256, 3, 4): ("int4_w4a16:g128:zp", "int4_w4a16:g32", "nf4_w4a16:g64"),
            (32, 128, 256, 2, 8): ("int4_w4a16:g128:zp", "int8_w8a16:channel", "int8_w8a16:g32"),
            (32, 128, 128, 4, 4): ("int4_w4a16:g128:zp", "fp8_w8a16:block", "mxfp4_w4a16"),
            (48, 128, 128, 3, 4): ("int4_w4a16:g128", "int8_w8a16:channel"),
            (64, 128, 256, 2, 8): ("int4_w4a16:g32", "int4_w4a8", "nvfp4_w4a16"),
            (80, 128, 128, 3, 4): ("int4_w4a16:g128", *PREPARED),
        }.items()
        for name in names
    ],
)
def test_programs_take_one_tile_after_the_other(scheme, config):
    """Of sorted pairs and of few that are not, of which some start no block; of several splits,
    and of rows that are streamed from one K tile to the next (int4 from 16 of them on)."""
    long = scheme == "int4_w4a16:g128" and config[0] == 8
    K, I, few, most = (4096, 4096, 8, 12) if long else (640, 384, 16, 40)
    sizes = {"top_k": 2, "K": K, "I": I}
    with few_programs():
        for M, E, split_k in (
            (11 * config[0], 5, 1),
            (9, 5, 2),
            (few // 2 - 1, few, 1),
            (most // 3, most, 2),
        ):
            options = {"M": M, "E": E, **sizes}
            if split_k == 2 and scheme != "int4_w4a8":
                options |= {"top_k": 1, "on_input": True}
            check(scheme, layer(*config)._replace(split_k=split_k), **options)


@pytest.mark.parametrize(
    "M, multiprocessors",
    [pytest.param(*m, marks=ON_GPU) for m in ((5, 1), (7, 12), (16, 1), (90, 1))],
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tiles_are_counted_anew_in_each_replay(M, multiprocessors, batch_invariant):
    """Bits are those of programs of one tile each, also where all tokens have the same experts."""
    sizes = {"M": M, "E": 16, "top_k": 2, "K": 2048, "I": 768}
    case = Case("cuda", BF16, "int4_w4a16:g128", "silu", **sizes)
    x, w13, w2, weights, ids = case.args[:5]
    x, weights = x.nan_to_num(), weights.nan_to_num()
    options = {"backend": "triton", "batch_invariant": batch_invariant}
    routings = [torch.rand(M, 16, device="cuda").topk(2).indices.to(ids) for _ in range(4)]
    routings += [routings[1][:1].expand_as(ids).clone(), routings[0]]
    with torch.no_grad():
        with few_programs(10**6):
            wanted = [moe_ops.fused_experts(x, w13, w2, weights, r, **options) for r in routings]
        with few_programs(multiprocessors):
            graph = torch.cuda.CUDAGraph()
            moe_ops.fused_experts(x, w13, w2, weights, ids, **options)
            with torch.cuda.graph(graph):
                found = moe_ops.fused_experts(x, w13, w2, weights, ids, **options)
        for routing, expected in zip(routings, wanted, strict=True):
            ids.copy_(routing)
            found.fill_(math.nan)
            graph.replay()
            assert torch.equal(found, expected)


def test_blocks_of_unsorted_pairs_are_not_grouped():
    """Their first tiles are numbered without groups; of a call's last chunk blocks are large."""
    few = configs.blocks_together(64, 2048)
    w = int4(torch.zeros(2, 64, 1024, dtype=torch.uint8), 2048)
    gemm = GemmConfig(128, 256, 2, 8)
    for number, expected in ((64, 0), (65, few)):  # a last chunk of a call, and a larger one
        options = (w.k_chunk, w.chunks(gemm), False, False, 1, None, (), 1, gemm, 64, 1)
        shape, strides = (128, 256, 1024), (256 * 1024, 1024, 1)
        made = sm90_wgmma._prepare(w.wgmma_format, shape, strides, *options, number, 128, 128, GPU)
        grouped = made.tile.GROUP_M
        assert grouped == expected
    assert few > 0


@pytest.mark.parametrize("M, E, blocks", [(1, 1, 1), (2, 8, 2), (3, 8, 3), (15, 1, 2), (40, 1, 5)])
def test_as_many_programs_as_run_at_once(M, E, blocks):
    """Unless the table has no room for counters, or there are fewer tiles."""
    case = Case("cpu", BF16, "mxfp4_w4a16", "silu", M=1, E=E, top_k=1, K=1024, I=1024)
    with few_programs():
        launches = launches_of(case, M, layer(8, 128, 128, 3, 4))
    gemms = [one for one in launches if "wgmma" in one.kernel.name]
    assert [one.named()["num_blocks"] for one in gemms] == [blocks] * 2
    for one, tiles in zip(gemms, (blocks * 16, blocks * 8), strict=True):
        held = one.grid[0]
        assert held == tiles if blocks < 3 else 3 <= held < tiles
        assert E == 1 or held % blocks == 0  # each pair has as many


def launches_of(
    case: Case, M: int, config: LayerConfig | None, **options: bool
) -> list[launch.Launch]:
    """What a layer of M tokens would launch on SM90."""
    x, top_k = case.args[0].new_zeros(M, case.args[0].shape[1]), case.args[4].shape[1]
    ids, weights = torch.zeros(M, top_k).long(), torch.ones(M, top_k)
    with (
        mock.patch.object(configs, "on_sm90", lambda _: True),
        mock.patch.object(sm90_wgmma, "why_not", lambda *_: None),
        mock.patch.object(launch, "run") as run,
        override(config),
    ):
        moe_ops.fused_experts(x, *case.args[1:3], weights, ids, backend="triton", **options)
    (launches, *_) = run.call_args.args
    return launches


def test_which_products_of_int4_w4a8_are_in_e4m3():
    """Those of blocks of up to 32 rows: h is rounded for them, and they get PRODUCTS. Under
    batch_invariant none, for any number of rows."""
    case = Case("cpu", BF16, "int4_w4a8", "silu", M=1, E=4, top_k=1, K=256, I=768)

    def in_e4m3(M: int, config: LayerConfig | None = None, **options: bool) -> bool:
        launches = launches_of(case, M, config, **options)
        gemms = [one.named() for one in launches if "wgmma" in one.kernel.name]
        found = {named["FORMAT"] == "int4_e4m3" for named in gemms}
        found |= {named["products_ptr"] is not None for named in gemms}
        found |= {named["x"].base.dtype == E4M3_DTYPE for named in gemms}
        (rounds,) = [one.named() for one in launches if one.kernel.name == "moe_ops_round"]
        found.add(rounds["K_CHUNK"] > 0)
        assert len(gemms) == 2 and len(found) == 1
        return found.pop()

    assert in_e4m3(1) and in_e4m3(16) and in_e4m3(60) and not in_e4m3(1024)
    assert in_e4m3(60, layer(32, 128, 256, 2, 4)) and not in_e4m3(60, layer(64, 128, 256, 2, 8))
    assert not any(in_e4m3(M, batch_invariant=True) for M in (1, 16, 60, 1024))


def test_which_sums_of_int4_are_scaled():
    """Those of zero points beside few rows, if a chunk has one scale; for any number of rows those
    of scales that are not bf16. Blocks of 8 rows serve more rows of these. Under batch_invariant,
    whose bits are those of any number of rows, weights are."""

    def scaled(scheme: str, M: int, **options: bool) -> set[str]:
        scheme, _, dtype = scheme.partition(" ")
        case = Case("cpu", BF16, scheme, "silu", M=1, E=4, top_k=1, K=256, I=768)
        if dtype:
            case.args[1:3] = [
                w._replace(scale=w.scale.to(getattr(torch, dtype))) for w in case.args[1:3]
            ]
        launches = launches_of(case, M, None, **options)
        gemms = [one.named() for one in launches if "wgmma" in one.kernel.name]
        assert len(gemms) == 2
        blocks.add(gemms[0]["BLOCK_M"])
        return {named["SCALE"] for named in gemms}

    blocks: set[int] = set()
    zero = "int4_w4a16:g128:zp"
    assert [scaled(zero, M) for M in (2, 16, 60, 100, 250)] == [{"sum"}] * 4 + [{"weight"}]
    assert {*scaled(zero, 2, batch_invariant=True)} == {"weight"}
    for scheme in ("int4_w4a16:g128", "int4_w4a16:g64:zp", "int4_w4a16:g32:zp"):
        assert scaled(scheme, 2) == {"weight"}
    for scheme in (f"{zero} float16", "int4_w4a16:g128 float32"):
        assert scaled(scheme, 2) == scaled(scheme, 250) == {"sum"}
    for scheme in (zero, "int4_w4a16:g128 float16", "int4_w4a16:g128", "int4_w4a16:g64:zp"):
        blocks.clear()
        assert scaled(scheme, 20)
        assert blocks == {8 if scheme in (zero, "int4_w4a16:g128 float16") else 16}


@pytest.mark.parametrize(
    "M, sizes, expected",
    [
        (1, (128, 8, 2048, 768), True),  # 256 programs of GEMM2, short ones
        (1, (8, 2, 4096, 14336), False),  # 128, of 28 K tiles
        (8, (8, 2, 4096, 14336), True),
        (64, (8, 2, 4096, 14336), True),
        (256, (8, 2, 4096, 14336), False),  # blocks of 64 rows
    ],
)
def test_where_products_in_e4m3_are_faster(M, sizes, expected):
    E, top_k, K, I = sizes
    config = choose.choose_wgmma(LayerSizes(M * top_k, E, K, I, GPU), 4)
    w2 = int4_e4m3()._replace(E=E, N=K, K=I)
    split_k = configs.split_k_of(w2, config.gemm2, config.split_k, M * top_k)
    assert configs.multiplies_e4m3(config, w2, split_k, min(M * top_k, w2.E), GPU) == expected


@pytest.mark.parametrize("words", [False, True])
def test_few_kernels_serve_all_numbers_of_tokens(words):
    """Calls of one specialization run one set of kernels, whatever M is."""
    case = Case("cpu", BF16, "mxfp4_w4a16", "silu", M=1, E=4, top_k=1, K=256, I=768)
    case.args[1:3] = [prepared(w) if words else w for w in case.args[1:3]]
    kept: dict[tuple, tuple] = {}
    config = layer(8, 128, 128, 3, 4)._replace(split_k=3)  # whatever a table or a search says
    for M in (2, 64, 65, 341, 342, 400, 512, 513, 1024, 1025):
        launches = launches_of(case, M, config)
        key = launch._specialization(launches, -1)
        constants: list = [one.maxnreg for one in launches]
        for one in launches:
            pairs = zip(one.args, one.kernel.arguments.roles, strict=True)
            constants += [value for value, role in pairs if role == "constant"]
        assert kept.setdefault(key, tuple(constants)) == tuple(constants)
    assert len(kept) == (8 if words else 5)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(n, marks=ON_GPU)
        for n in (
            "mxfp4_w4a16",
            "nvfp4_w4a16",
            *PREPARED,
            *SHORT_INT4,
            "int4_w4a16:g64:zp float16",
            "int8_w8a16:channel",
            "fp8_w8a16:channel",
            "int6_w6a16:g16",
        )
    ],
)
@pytest.mark.parametrize("config", [(8, 64, 64, 4, 4), (16, 64, 256, 4, 4)], ids=str)
def test_rows_that_end_within_128_columns(scheme, config):
    """Chunks of 64 columns, or of 128 whose last one reaches back."""
    sizes = {"M": 16, "E": 2, "top_k": 1, "K": 2880, "I": 320}
    check(scheme, layer(*config), "swigluoai", bias=True, **sizes)


@pytest.mark.parametrize("scheme", [pytest.param(n, marks=ON_GPU) for n in PREPARED])
@pytest.mark.parametrize("M", [2, 5, 31, 64, 65, 140, 700])
@pytest.mark.parametrize("sizes", [(256, 128), (2880, 320)], ids=str)
def test_prepared_weights_of_any_number_of_tokens(scheme, M, sizes):
    """With the config that is chosen: no other kernels read this layout, however many rows an
    expert has."""
    check(scheme, None, "swigluoai", bias=True, M=M, E=4, top_k=2, K=sizes[0], I=sizes[1])


@pytest.mark.parametrize(
    "scheme", [pytest.param(n, marks=ON_GPU) for n in ("mxfp4_w4a16", *SHORT_INT4, *PREPARED)]
)
def test_tiles_that_pass_the_last_row(scheme):
    sizes = {"M": 20, "E": 3, "top_k": 1, "K": 320, "I": 192}
    check(scheme, layer(16, 128, 128, 4, 4), "relu2_no_mul", bias=True, **sizes)


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(n, marks=ON_GPU)
        for n in ("int4_w4a16:g128:zp", "int4_w4a8", "nvfp4_w4a16", *PREPARED)
    ],
)
@pytest.mark.parametrize("activation", ["swigluoai", "relu2_no_mul", "gelu"])
def test_activations_map_and_weights_on_input(scheme, activation):
    sizes = {"M": 20, "E": 3, "top_k": 1, "K": 512, "I": 256}
    check(scheme, None, activation, expert_map=True, on_input=True, **sizes)


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(n, marks=ON_GPU) for n in ("int4_w4a16:g64", "mxfp4_w4a16", *PREPARED)],
)
@pytest.mark.parametrize("config", [(8, 128, 256, 2, 4), (16, 64, 256, 3, 4)], ids=str)
def test_rings_that_wrap(scheme, config):
    """Several times as many steps as places, of either parity."""
    check(scheme, layer(*config), M=20, E=3, top_k=2, K=2304, I=1280)


@pytest.mark.parametrize(
    "scheme, config, split_k, K, I, streamed",
    [
        pytest.param("int4_w4a16:g128", *case, marks=ON_GPU)
        for case in (
            # 17 K tiles in two slots, and 16
            ((8, 128, 256, 2, 4), 1, 4352, 256, [True, False]),
            ((8, 128, 256, 2, 4), 1, 256, 4096, [False, True]),
            # shares of 17 K tiles and of 16
            ((8, 128, 256, 2, 4), 2, 256, 8448, [False, True]),
        )
    ],
    ids=str,
)
def test_products_in_flight_across_k_tiles(scheme, config, split_k, K, I, streamed):
    sizes = {"M": 40, "E": 3, "top_k": 2, "K": K, "I": I, "bias": True}
    with mock.patch.object(launch, "run", wraps=launch.run) as run:
        check(scheme, layer(*config)._replace(split_k=split_k), **sizes)
    launches = [one for call in run.call_args_list for one in call.args[0]]
    gemms = [one.named() for one in launches if "wgmma_gemm" in one.kernel.name]
    assert [named["STREAM"] for named in gemms] == streamed * (len(gemms) // 2) != []


@pytest.mark.parametrize(
    "scheme", [pytest.param(n, marks=ON_GPU) for n in ("int4_w4a16:g64", "int8_w8a16:g64:zp")]
)
@pytest.mark.parametrize("M", [2, 5])
def test_fewer_rows_than_a_block_has(scheme, M):
    check(scheme, layer(16, 128, 128, 3, 4), M=M, E=1, top_k=1, K=64, I=64)


ROUTINGS = {
    "one expert": {"M": 64, "top_k": 1, "ids": torch.full((64, 1), 69)},
    "few experts": {"M": 32, "top_k": 2},
    "most of no expert": {"M": 16, "top_k": 4},
    "two tokens": {"M": 2, "top_k": 4},
}


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(n, marks=ON_GPU)
        for n in ("int4_w4a16:g128", "int4_w4a8", "nvfp4_w4a16", *PREPARED)
    ],
)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("block_m", [8, 16])
@pytest.mark.parametrize("options", [{}, {"expert_map": True, "ids_dtype": torch.int64}], ids=str)
def test_layers_without_a_sorting_kernel(scheme, routing, block_m, options):
    """At most 64 pairs of as many experts: several blocks of one expert, none of most, ids that
    are not here."""
    sizes = {"E": 70, "K": 256, "I": 128, "bias": True, **ROUTINGS[routing], **options}
    M, top_k = sizes["M"], sizes["top_k"]
    if routing == "few experts":
        sizes["ids"] = torch.rand(M, 3).topk(top_k).indices + 5
    elif routing == "most of no expert":
        sizes["ids"] = torch.where(torch.rand(M, top_k) < 0.7, -1, torch.randint(70, (M, top_k)))
    with mock.patch.object(gathered, "route") as route:
        check(scheme, layer(block_m, 64, 256, 2, 4), **sizes)
    assert not route.called


@pytest.mark.parametrize("scheme", [pytest.param("int4_w4a16:g128", marks=ON_GPU)])
def test_layers_without_a_sorting_kernel_weigh_their_input(scheme):
    sizes = {"M": 30, "E": 40, "top_k": 1, "K": 256, "I": 128}
    check(scheme, None, expert_map=True, on_input=True, **sizes)


def amid_others(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows 16 bytes longer, behind an expert and 16 bytes of others."""
    step = 16 // t.element_size()
    wide = t.new_empty(t.shape[0] + 1, t.shape[1], t.shape[2] + 2 * step)
    wide.view(torch.uint8).fill_(255)
    return wide[1:, :, step:-step].copy_(t)


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(n, marks=ON_GPU) for n in ("int4_w4a16:g128:zp", "mxfp4_w4a16", "nvfp4_w4a16")],
)
def test_weights_and_scales_that_are_parts_of_others(scheme):
    case = Case("cuda", BF16, scheme, M=20, E=3, top_k=2, K=512, I=256)
    for i in (1, 2):
        w = case.args[i]
        parts = {"qdata": amid_others(w.qdata)}
        for name in ("scale", "zero_point"):
            if getattr(w, name) is not None:  # columns apart
                parts[name] = getattr(w, name).mT.contiguous().mT
        case.args[i] = w._replace(**parts)
    with (
        mock.patch.dict(relayout.RELAYOUTS, {"triton": ()}),
        override(layer(16, 128, 128, 3, 4)),
        watched() as used,
    ):
        case.check("triton")
    (call,) = used.call_args_list
    w13 = call.args[2]
    assert not w13.data.is_contiguous() and not w13.scale.is_contiguous()


@pytest.mark.parametrize("scheme", [pytest.param(n, marks=ON_GPU) for n in PREPARED])
def test_prepared_experts_that_are_parts_of_others(scheme):
    """Every second one; what lies between belongs to others."""
    case = Case("cuda", BF16, scheme.partition(" ")[0], M=20, E=6, top_k=2, K=512, I=256)
    refill(case, 1)
    case.args[4] %= 3
    ready = case.args_for("triton")[1:3]
    assert all(w.weight_layout == TRITON_E2M1 for w in ready)
    case.args[1:3] = [w[1::2] for w in case.args[1:3]]
    args = [case.args[0], *[w[1::2] for w in ready], *case.args[3:]]
    out = moe_ops.fused_experts(*args, **case.options, backend="triton")
    assert_matches(out, case.reference(), tolerance(BF16, case.scheme, "cuda"))


@pytest.mark.parametrize(
    "scheme", [pytest.param(n, marks=ON_GPU) for n in ("mxfp4_w4a16", "int4_w4a16:g128")]
)
def test_repeatable(scheme):
    """Nothing depends on which copy arrives first: values stay the same, whatever ran before."""
    case = Case("cuda", BF16, scheme, M=40, E=4, top_k=2, K=1024, I=512)
    other = Case("cuda", BF16, scheme, M=9, E=4, top_k=2, K=1024, I=512, seed=1)
    with (
        override(layer(16, 128, 128, 3, 4)),
        watched() as used,
    ):
        first = case.check("triton")
        for _ in range(30):
            other.run("triton", poison=False)
            assert torch.equal(first, case.run("triton"))
    assert used.called
