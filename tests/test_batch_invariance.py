"""Batch invariance on a CPU: the row of a token in any batch has the bits that it has alone, which
are compared with the fp64 oracle.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops import activations
from moe_ops import batch_invariance as switch
from moe_ops.backend import Takes
from moe_ops.backends.torch import cpu, grouped_mm, layer
from moe_ops.numerics.sums import add_by_tree
from moe_ops.ops import memory
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.ops.options import Options, decode
from moe_ops.ops.problem import Machine
from moe_ops.parallel.placement import Placement, shard_experts
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from moe_ops.planning import training as training_plans
from tests.support import oracle, outside
from tests.support.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    STATIC_SCALES,
    fitting,
    poisoned_memory,
    tolerance,
)

E, TOP_K, KNOWN = 8, 2, 12  # experts, experts of a token, tokens whose rows alone are known
COUNTS = (*range(1, 18), 32, 64, 256)
MANY = (1024, 4096)
VECTOR = 16  # fp32 numbers
SHARED = ("fp8_tensor", "fp8_channel_tensor", "int8_w8a8_tensor", "nvfp4")  # of the whole batch
SCHEMES = [scheme for scheme in oracle.ACTIVATIONS if scheme not in SHARED]
SIZES = ((288, 192), (44, 52))  # K and I: whole vectors and tiles, and neither
NAMES = ("silu", "gelu", "swigluoai", "relu2_no_mul")
ROUTINGS = ("uniform", "zipf", "one expert", "padding")


@pytest.fixture(autouse=True)
def avx(request) -> Iterator[None]:
    """The widest form of the CPU kernels that this processor runs, or the one that a test asks
    for; where none were built, none.
    """
    built, threads, form = cpu.library(), torch.get_num_threads(), getattr(request, "param", 0)
    torch.set_num_threads(3)  # so that threads divide rows and columns unevenly
    alone.cache_clear()
    try:
        if built is not None:
            widest = (built.moe_ops_cpu_avx, built.moe_ops_cpu_experts_avx)
            if {use(form or layer.WIDEST) for use in widest} != {form} and form:
                pytest.skip("this processor lacks it")
        elif form:
            pytest.skip("no kernels were built")
        yield
    finally:
        torch.set_num_threads(threads)
        if built is not None:
            built.moe_ops_cpu_avx(512)
            built.moe_ops_cpu_experts_avx(layer.WIDEST)


def normal(*shape: int, seed: int, dtype=FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@functools.lru_cache(maxsize=64)
def weights(scheme: str, dtype: torch.dtype, K: int, I: int, activation: str):
    """w13 and w2 of unit scale. The last expert is the first one with columns of w2, and the rows
    of w13 that make them, in another order, and with the other sign.
    """
    K, I = fitting(K, scheme), fitting(I, scheme)
    N = I if activation.endswith("no_mul") else 2 * I
    w13 = normal(E, N, K, seed=1, dtype=dtype) / K**0.5
    w2 = normal(E, K, I, seed=2, dtype=dtype) / I**0.5
    near = 16 if I % 16 == 0 else 4  # groups keep their scales
    order = torch.arange(0, I, near).unsqueeze(1)
    order = (order + torch.randperm(near, generator=torch.Generator().manual_seed(3))).flatten()
    halves = (
        (slice(0, N, 2), slice(1, N, 2)) if activation == "swigluoai" else (slice(I), slice(I, N))
    )
    for half in halves[: N // I]:
        w13[-1, half] = w13[0, half][order]
    w2[-1] = -w2[0, :, order]
    if not scheme:
        return w13, w2
    scales = STATIC_SCALES if scheme.endswith("_static") else (None, None)
    return [
        moe_ops.quantize(weight, scheme, activation_scale=scale)
        for weight, scale in zip((w13, w2), scales, strict=True)
    ]


class Call:
    """Experts of one kind, and what they return for tokens."""

    def __init__(self, scheme="", dtype=FP32, sizes=SIZES[0], activation="silu", **options):
        self.w13, self.w2 = weights(scheme, dtype, *sizes, activation)
        self.dtype, self.K = dtype, fitting(sizes[0], scheme)
        self.options = {"activation": activation, "batch_invariant": True, **options}

    def tokens(self, M: int, routing: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states, topk_weights and topk_ids; NaN where a token has no expert."""
        g = torch.Generator().manual_seed(seed)
        x = normal(M, self.K, seed=seed, dtype=self.dtype)
        if routing == "one expert":
            ids = torch.full((M, TOP_K), 3)
        elif routing == "zipf":
            odds = 1 / torch.arange(1.0, E + 1)
            ids = torch.multinomial(odds, M * TOP_K, True, generator=g).view(M, TOP_K)
        else:
            low, high = (-3, E + 3) if routing == "padding" else (0, E)
            ids = torch.randint(low, high, (M, TOP_K), generator=g)
        x[((ids < 0) | (ids >= E)).all(1)] = math.nan
        return x, torch.rand(M, TOP_K, generator=g) + 0.25, ids

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, **options) -> Tensor:
        return moe_ops.fused_experts(
            x, self.w13, self.w2, weights, ids, **{**self.options, **options}
        )


@functools.lru_cache(maxsize=64)
def alone(*what) -> tuple[Call, tuple[Tensor, Tensor, Tensor], Tensor]:
    """A call, some tokens, and the row of each in a batch of its own. Of every
    other token two experts cancel each other: what is left are the last bits of their products.
    """
    call = Call(*what)
    known = x, router, ids = call.tokens(KNOWN, "padding", 3)
    x[::2], router[::2] = x[::2].nan_to_num(0.5), router[::2, :1]
    ids[::2] = torch.tensor([0, E - 1])
    rows = [call(*[t[i : i + 1] for t in known]) for i in range(KNOWN)]
    return call, known, torch.cat(rows)


def check_rows(M: int, routing: str, seed: int, *what) -> None:
    """Half of a batch are known tokens in any order, some of them several times."""
    call, known, want = alone(*what)
    g = torch.Generator().manual_seed(seed)
    which = torch.randint(-KNOWN, KNOWN, (M,), generator=g)
    which[torch.randint(0, M, (1,), generator=g)] = seed % KNOWN
    batch = call.tokens(M, routing, seed)
    for of_batch, of_known in zip(batch, known, strict=True):
        of_batch[which >= 0] = of_known[which[which >= 0]]
    out = call(*batch)
    assert out.isfinite().all()
    assert torch.equal(out[which >= 0], want[which[which >= 0]])


# --- every batch ---------------------------------------------------------------------------------


NATIVE = [scheme for scheme in SCHEMES if layer._decoder(scheme)]  # by csrc/cpu/experts.cpp


def variants_are_slow(schemes: list[str], *more) -> list:
    """Parameters, of which those are slow that run as others do but for numbers."""
    rules = (
        *(":round", ":ceil", ":zp", ":ue8m0", ":mxfp4", ":mxfp8", "_static", ":g64"),
        *("e2m3", "e2m3_w6a16", "mxfp4_mxfp6_e3m2"),
    )
    return [
        pytest.param(
            s, *more, marks=[pytest.mark.slow] if s.endswith(rules) or ":super" in s else []
        )
        for s in schemes
    ]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "scheme, avx",
    [*variants_are_slow(SCHEMES, 0), *variants_are_slow(NATIVE, 2)],
    indirect=["avx"],
)
def test_a_row_is_the_same_in_any_batch(scheme, avx):
    @settings(max_examples=6, deadline=None)
    @given(
        M=st.sampled_from(COUNTS),
        routing=st.sampled_from(ROUTINGS),
        seed=st.integers(0, 2**31),
        dtype=st.sampled_from((BF16, FP32)),
        activation=st.sampled_from(NAMES[:3:2]),
    )
    def check(M, routing, seed, dtype, activation):
        check_rows(M, routing, seed, scheme, dtype, SIZES[0], activation)

    check()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("avx", [512, 2], indirect=True)
def test_every_number_of_plain_tokens(dtype, sizes, avx):
    for M in COUNTS:
        activation = NAMES[M % len(NAMES)]
        check_rows(M, ROUTINGS[M // 4 % 4], M, "", dtype, sizes, activation)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_tokens(scheme):
    for i, routing in enumerate(ROUTINGS):
        check_rows(MANY[i % 2], routing, i, scheme, BF16, SIZES[0], NAMES[2 * (i // 2)])


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", variants_are_slow(SCHEMES))
def test_values_are_the_oracles(scheme):
    dtype = BF16 if scheme else FP32
    call = Call(scheme, dtype)
    x, router, ids = call.tokens(33, "padding", 5)
    with poisoned_memory():
        out = call(x, router, ids)
    want = oracle.experts(x, call.w13, call.w2, router, ids, activation="silu")
    assert oracle.relative_error(out, want) <= tolerance(dtype, scheme)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_without_kernels_of_our_own(dtype, monkeypatch):
    """As an installation without a C++ compiler runs: a product for each token."""
    monkeypatch.setattr(cpu, "_kernels", dict)
    monkeypatch.setattr(layer, "kernels", lambda: None)
    for scheme in ("", "int8_w8a16:channel"):
        for M in (1, 2, 9, 64):
            check_rows(M, ROUTINGS[M % 4], M, scheme, dtype, SIZES[0], "swigluoai")
    alone.cache_clear()


def test_options_of_a_call_change_nothing():
    """Biases of another dtype, an expert map, router weights on the input, chunks, strides."""
    bias = {"w13_bias": normal(E, 384, seed=7), "w2_bias": normal(E, 288, seed=8)}
    table = torch.tensor([4, -1, 0, 2, 1, 3, -1])
    for dtype in (BF16, FP32):
        call = Call("", dtype, **bias, expert_map=table)
        x, router, ids = call.tokens(300, "padding", 4)
        x = x.nan_to_num(0.5)  # the map gives some of them experts
        want = torch.cat([call(x[i : i + 1], router[i : i + 1], ids[i : i + 1]) for i in range(9)])
        assert torch.equal(call(x, router, ids)[:9], want)
        assert torch.equal(call(x, router, ids, max_workspace_bytes=600_000)[:9], want)
        wide = torch.full((300, 300), math.nan, dtype=dtype)
        wide[:, 3:291] = x
        assert torch.equal(call(wide[:, 3:291], router, ids.to(torch.int32))[:9], want)
        one = {"router_weight_on_input": True}
        want = torch.cat(
            [
                call(x[i : i + 1], router[i : i + 1, :1], ids[i : i + 1, :1], **one)
                for i in range(9)
            ]
        )
        assert torch.equal(call(x, router[:, :1], ids[:, :1], **one)[:9], want)


@pytest.mark.parametrize("scheme", ["", "int8_w8a16:channel"])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_surrounds_a_call_changes_nothing(scheme, sizes):
    """autocast, which operators do not leave, a default device, and no tokens at all."""
    call = Call(scheme, BF16, sizes, "gelu")
    batch = call.tokens(9, "padding", 4)
    want = call(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(*batch), want)
        x = batch[0].clone().requires_grad_()
        assert torch.equal(call(x, *batch[1:]), want)
    with torch.device("meta"):
        assert torch.equal(call(*batch), want)
    none = [t[:0] for t in batch]
    assert call(*none).shape == (0, call.K)
    assert call(none[0].clone().requires_grad_(), *none[1:]).shape == (0, call.K)


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g32", "fp8_channel", "mxfp8"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_batches_of_each_expert(scheme, dtype):
    call, T = Call(scheme, dtype, SIZES[1], "gelu"), 40
    x = normal(E, T, call.K, seed=6, dtype=dtype)

    def run(x, *counts):
        counts = torch.tensor(counts, dtype=torch.int32)
        return moe_ops.batched_experts(x, call.w13, call.w2, counts, **call.options)

    want = run(x, *[T] * E)
    rows = oracle.batched(x, call.w13, call.w2, torch.full((E,), T), activation="gelu")
    assert oracle.relative_error(want, rows) <= tolerance(dtype, scheme)
    assert torch.equal(run(x.mT.contiguous().mT, *[T] * E), want)
    for e in range(E):
        counts = [0] * E
        counts[e] = 1
        assert torch.equal(run(x[:, 7:8], *counts)[e, 0], want[e, 7])
        counts[e], counts[e - 1] = 5, 9
        shuffled = x[:, torch.randperm(T)[:11]].clone()
        shuffled[e, 4] = x[e, 7]
        assert torch.equal(run(shuffled, *counts)[e, 4], want[e, 7])


@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g32", "fp8_channel", "nvfp4_w4a16"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_rows_of_a_grouped_product(scheme, dtype):
    call = Call(scheme, dtype, SIZES[1])
    x = normal(200, call.K, seed=6, dtype=dtype)
    bias = normal(E, call.w13.shape[1], seed=7)

    def run(x, ends):
        ends = torch.tensor(ends, dtype=torch.int32)
        return moe_ops.grouped_linear(x, call.w13, ends, bias=bias, batch_invariant=True)

    ends = [3, 3, 100, 150, 170, 170, 170, 170]
    want = run(x, ends)
    rows = oracle.grouped_linear(x, call.w13, torch.tensor(ends), bias=bias)
    assert oracle.relative_error(want[:170], rows[:170]) <= tolerance(dtype, scheme)
    for row, e in ((0, 0), (50, 2), (99, 2), (120, 3), (169, 4)):
        assert torch.equal(run(x[row : row + 1], [0] * e + [1] * (E - e))[0], want[row])
        transposed = x[row - 5 : row + 7].t().contiguous().t() if row >= 5 else x[row : row + 12]
        at = min(row, 5)
        ends_here = [0] * e + [12] * (E - e)
        assert torch.equal(run(transposed, ends_here)[at], want[row])


# --- ranks of an expert-parallel group -----------------------------------------------------------


@pytest.mark.parametrize(
    "scheme, avx",
    [("", 512), ("int4_w4a16:g32", 512), ("fp8_channel", 512), ("mxfp8", 512), ("", 2)]
    + [("int4_w4a16:g32", 2), pytest.param("fp8_channel", 2, marks=pytest.mark.slow)],
    indirect=["avx"],  # of which mxfp8 has no kernels
)
def test_sums_of_ranks_add_up_to_one_process(scheme, avx, monkeypatch):
    """Blocks of experts by the tree of `moe_ops.meta.blocks`, in fp32 until the end. For every
    other token two experts nearly cancel each other: the last bits of fp32 are seen in 16.
    """
    monkeypatch.setattr(training_plans, "INTERPRETED", False)  # gradients, in a tenth of the time
    experts, K, I = 16, 96, 64
    w13, w2 = normal(experts, 2 * I, K, seed=1) / 10, normal(experts, K, I, seed=2) / 8
    w13[1], w2[1] = w13[0], w2[0] * (-63 / 64)
    router, ids = normal(200, 5, seed=3).abs(), torch.randint(-2, experts + 2, (200, 5))
    ids[0] = -1
    ids[1::2], router[1::2, 1] = torch.tensor([0, 1, -1, -1, -1]), router[1::2, 0]
    for dtype in (BF16, torch.float16, FP32):
        x, weights = normal(200, K, seed=4, dtype=dtype), [w.to(dtype) for w in (w13, w2)]
        if scheme:
            weights = [moe_ops.quantize(w, scheme) for w in weights]
        options = {"batch_invariant": True}
        whole = moe_ops.fused_experts(x, *weights, router, ids, **options)
        rows = oracle.experts(x, *weights, router, ids, activation="silu")
        assert oracle.relative_error(whole, rows) <= tolerance(dtype, scheme)
        options["out_dtype"] = FP32
        for size in (2, 8):
            placement = Placement(experts, size)
            parts = [
                moe_ops.fused_experts(
                    *(x, *[shard_experts(w, placement, rank) for w in weights], router, ids),
                    expert_map=placement.expert_map(rank),
                    **options,
                )
                for rank in range(size)
            ]
            assert torch.equal(add_by_tree(parts).to(dtype), whole), (dtype, size)
        assert not torch.equal(sum(parts), add_by_tree(parts))  # not one after another
        leaf = x.clone().requires_grad_()
        wide = moe_ops.fused_experts(leaf, *weights, router, ids, **options)
        assert wide.dtype == FP32 and torch.equal(wide.to(dtype), whole)
        (gradient,) = torch.autograd.grad(wide.square().sum(), leaf)
        leaf = x.clone().requires_grad_()
        out = moe_ops.fused_experts(leaf, *weights, router, ids).float()
        (other,) = torch.autograd.grad(out.square().sum(), leaf)
        assert oracle.relative_error(gradient, other) <= 4 * tolerance(dtype, scheme)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ValueError, match="out_dtype must be None or hidden_states's dtype"):
            moe_ops.fused_experts(
                x.bfloat16(), w13.bfloat16(), w2.bfloat16(), router, ids, out_dtype=dtype
            )


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g32", "fp8_w8a16:block", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_forward_passes_of_training_are_those_of_inference(scheme, dtype):
    sizes, rows = ((96, 128), 256) if scheme else (SIZES[1], 104)
    call = Call(scheme, dtype, sizes, "swigluoai", w13_bias=normal(E, rows, seed=8))
    x, router, ids = call.tokens(37, "padding", 9)
    x = x.nan_to_num(0.5)
    want = call(x, router, ids)
    gradients = []
    off = {"recompute": True, "batch_invariant": False}
    for options in ({}, {"recompute": True}, off):
        if options is off and dtype == FP32:
            continue  # kernels of a GPU, in an interpreter
        leaf = x.clone().requires_grad_()
        out = call(leaf, router, ids, **options)
        if options.get("batch_invariant", True):
            assert out.requires_grad and torch.equal(out, want)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), leaf)
        gradients.append(gradient)
    # what is kept for the backward pass does not depend on how the output was computed
    on, recomputed, *others = gradients
    assert torch.equal(on, recomputed)
    for gradient in others:
        assert oracle.relative_error(on, gradient) <= tolerance(dtype, scheme) * 4


@pytest.mark.parametrize("scheme, rank", [("", 4), ("", 8), ("int4_w4a16:g32", 8)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_adapters(scheme, dtype, rank):
    call = Call(scheme, dtype, (64, 128))
    shapes = ((E, rank, 64), (E, 256, rank), (E, rank, 128), (E, 64, rank))
    lora = moe_ops.LoRA(*[normal(*s, seed=i, dtype=dtype) / 8 for i, s in enumerate(shapes)])
    batch = call.tokens(100, "uniform", 2)
    want = torch.cat([call(*[t[i : i + 1] for t in batch], adapters=lora) for i in range(20)])
    for M in (20, 33, 100):
        assert torch.equal(call(*[t[:M] for t in batch], adapters=lora)[:20], want)
    x = batch[0].clone().requires_grad_()
    assert torch.equal(call(x, *batch[1:], adapters=lora)[:20], want)
    off = call(*batch, adapters=lora, batch_invariant=False)[:20]
    assert oracle.relative_error(want, off) <= tolerance(dtype, scheme)


def test_a_grouped_product_that_records_gradients():
    for dtype in (BF16, FP16, FP32):
        call = Call("", dtype, SIZES[1])
        x = normal(30, call.K, seed=6, dtype=dtype)
        ends = torch.tensor([3, 3, 10, 20, *[28] * (E - 4)], dtype=torch.int32)
        want = moe_ops.grouped_linear(x, call.w13, ends, batch_invariant=True)
        leaf = x.clone().requires_grad_()
        out = moe_ops.grouped_linear(leaf, call.w13, ends, batch_invariant=True)
        assert torch.equal(out, want)
        (gradient,) = torch.autograd.grad(out.float().sum(), leaf)
        rows = oracle.grouped_linear(
            torch.ones(30, 104), call.w13.transpose(1, 2).contiguous().float(), ends
        )
        assert oracle.relative_error(gradient, rows) <= tolerance(dtype)
    with pytest.raises(ValueError, match="gradients pass through quantized activations"):
        quantized = Call("fp8_channel", FP32).w13
        x = normal(30, 288, seed=6).requires_grad_()
        moe_ops.grouped_linear(x, quantized, ends, batch_invariant=True)


# --- what is let through is seen -----------------------------------------------------------------


def library_product(a, b, bias, out):
    grouped_mm._product(a, b, bias, out)


def any_columns(x, weight, bias, batch_invariant=False):
    return cpu_can_multiply(x, weight.new_empty(1, 8, weight.shape[2]), bias, batch_invariant)


cpu_can_multiply = cpu.can_multiply


def in_any_batch(a):
    return a._replace(options=a.options._replace(batch_invariant=False))


def few_rows(a):
    return layer_few_bf16(in_any_batch(a))


layer_few_bf16 = layer._few_bf16


def rounded_by_vectors(gate_up, activation, out):
    """As a vector loop may: the elements behind the last whole vector by another formula, whose
    last bit differs.
    """
    flat = activations.apply(gate_up, activation).flatten()
    ends = flat[flat.numel() // VECTOR * VECTOR :]
    ends.copy_(ends.nextafter(torch.tensor(math.inf)))
    out.copy_(flat.view_as(out))


def tiles_by_rows(a, form):
    a = in_any_batch(a)
    layer_run(a, layer.form_of(a))


layer_run = layer.run


LEAKS: dict[str, tuple[object, str, Callable, tuple]] = {
    "a kernel for few rows": (layer, "_few_bf16", few_rows, ("", BF16)),
    "columns left over": (cpu, "can_multiply", any_columns, ("", FP32, SIZES[1])),
    "tiles by rows": (layer, "run", tiles_by_rows, ("fp8_w8a16:channel", BF16)),
    "products of a library": (
        *(grouped_mm, "product_of_rows", library_product),
        ("int8_w8a16:channel", FP32),
    ),
    "ends of vectors": (
        *(activations, "apply_by_blocks", rounded_by_vectors),
        ("", FP32, SIZES[1], "swigluoai"),
    ),
}


def torch_multiplies_rows_alike() -> bool:
    """Whether torch's products, on this machine, give a row the same bits anywhere."""
    x, w = normal(256, 192, seed=1), normal(288, 192, seed=2)
    return torch.equal(x @ w.t(), torch.cat([row @ w.t() for row in x.split(1)]))


@pytest.mark.parametrize("leak", LEAKS)
def test_the_check_sees_what_is_let_through(leak, monkeypatch):
    module, name, replacement, what = LEAKS[leak]
    if name == "product_of_rows" and torch_multiplies_rows_alike():
        pytest.skip("torch gives a row the same bits anywhere on this machine")
    if name in ("_few_bf16", "can_multiply", "run") and not cpu._kernels():
        pytest.skip("no kernels were built")
    if leak == "columns left over" and cpu.library().moe_ops_cpu_avx(512) != 512:
        pytest.skip("AVX2 sums single columns as it sums four")
    monkeypatch.setattr(module, name, replacement)
    monkeypatch.delitem(memory.EMPTY_STRIDED, "cpu")  # without which no call takes a shortcut
    bind.forget()
    alone.cache_clear()
    try:
        with pytest.raises(AssertionError):
            for M in COUNTS:
                check_rows(M, ROUTINGS[M % 4], M, *what)
    finally:
        bind.forget()
        alone.cache_clear()


# --- compiled ------------------------------------------------------------------------------------


def different_paths(call: Call, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Results with the mode off and on, of few tokens beside plain bf16 weights."""
    off, on = [call(*batch, batch_invariant=value) for value in (False, True)]
    if torch.equal(off, on):
        pytest.skip("this machine has one path, or they give the same bits")
    return [off, on]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("scheme", [pytest.param("", marks=pytest.mark.slow), "int4_w4a16:g32"])
def test_one_graph_for_every_number_of_tokens(scheme, fresh_dynamo):
    call = Call(scheme, BF16)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call.__call__, backend=counter, fullgraph=True)
    known = call.tokens(64, "padding", 3)
    want = torch.cat([call(*[t[i : i + 1] for t in known]) for i in range(64)])
    for M in (64, 2, 17, 32, 5):
        batch = [t[:M].clone() for t in known]
        for t in batch:
            torch._dynamo.decorators.mark_unbacked(t, 0)
        assert torch.equal(compiled(*batch), want[:M])
    assert counter.frame_count == 1


def test_a_compiled_step_of_training_has_the_bits_of_inference(fresh_dynamo):
    call = Call("", BF16, SIZES[1])
    x, router, ids = call.tokens(9, "uniform", 3)
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(call.__call__, backend="aot_eager", fullgraph=True)
    out = compiled(leaf, router, ids)
    assert out.requires_grad and torch.equal(out, call(x, router, ids))
    eager = call(leaf, router, ids)
    gradients = [torch.autograd.grad(y.float().sum(), leaf)[0] for y in (out, eager)]
    assert torch.equal(*gradients)


@pytest.mark.slow
def test_the_switch_is_guarded(fresh_dynamo):
    """A graph that was traced under one setting does not run under the other."""
    call = Call("", BF16)
    batch = call.tokens(3, "uniform", 3)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def run(*batch):
        return call(*batch, batch_invariant=None)

    off, on = different_paths(call, batch)
    for _ in range(2):
        assert torch.equal(run(*batch), off)
        with moe_ops.set_batch_invariant(True):
            assert torch.equal(run(*batch), on)
    assert counter.frame_count == 2
    options = [
        node.args[-1] if node.args else node.kwargs["options"]
        for graph in counter.graphs
        for node in graph.graph.nodes
        if "moe_ops" in str(node.target)
    ]
    assert ["'batch_invariant': True" in text for text in options] == [False, True]


def test_an_exported_program_keeps_the_mode():
    call = Call("", BF16)
    batch = call.tokens(9, "uniform", 3)

    class Layer(torch.nn.Module):
        def forward(self, *batch):
            return call(*batch, batch_invariant=None)

    with moe_ops.set_batch_invariant(True):
        program = torch.export.export(Layer(), batch)
    assert torch.equal(program.module()(*batch), call(*batch))


# --- the switch, the plan and the operators' options ---------------------------------------------


def test_the_switch():
    assert switch.resolve(None) is False
    try:
        moe_ops.set_batch_invariant(True)
        assert switch.resolve(None) and not switch.resolve(False)
        with pytest.raises(KeyError), moe_ops.set_batch_invariant(False):
            assert not switch.resolve(None) and switch.resolve(True)
            raise KeyError
        assert switch.resolve(None)
        moe_ops.set_batch_invariant(False)
        block = moe_ops.set_batch_invariant(True)
        moe_ops.set_batch_invariant(False)
        for _ in range(2):  # made before, and entered again
            with block:
                assert switch.resolve(None)
                with block:
                    assert switch.resolve(None)
                assert switch.resolve(None)
            assert not switch.resolve(None)
    finally:
        moe_ops.set_batch_invariant(False)
    for wrong in (1, "yes", torch.tensor(True)):
        with pytest.raises(ValueError, match="enabled must be True or False, got"):
            moe_ops.set_batch_invariant(wrong)
        with pytest.raises(ValueError, match="batch_invariant must be True, False, or None"):
            Call()(*Call().tokens(2, "uniform", 0), batch_invariant=wrong)


def test_eager_calls_follow_the_switch():
    """Plans are found by what calls depend on, and that is one more fact."""
    call = Call("", BF16)
    batch = call.tokens(3, "uniform", 3)
    off, on = different_paths(call, batch)
    for _ in range(2):
        assert torch.equal(call(*batch, batch_invariant=None), off)
        with moe_ops.set_batch_invariant(True):
            assert torch.equal(call(*batch, batch_invariant=None), on)


def test_a_layer_hands_it_on():
    layer = moe_ops.MoELayer(288, 192, E, TOP_K, batch_invariant=True, dtype=BF16).eval()
    x = normal(3, 288, seed=1, dtype=BF16)
    with torch.no_grad():
        on = layer(x)
        layer.batch_invariant = None
        off = layer(x)
        with moe_ops.set_batch_invariant(True):
            assert torch.equal(layer(x), on)
    if cpu._kernels():
        assert not torch.equal(on, off)
    layer.dispatcher, layer.batch_invariant = object(), True
    with pytest.raises(ValueError, match="must be False .*how its experts lie is not known"):
        layer(x)
    with pytest.raises(ValueError, match="batch_invariant must be True, False, or None"):
        moe_ops.MoELayer(64, 128, E, TOP_K, batch_invariant=1)


@pytest.mark.parametrize("scheme", SHARED)
def test_scales_of_the_whole_batch_are_refused(scheme):
    call = Call(scheme, FP32)
    batch = call.tokens(3, "uniform", 3)
    remedy = "activation_scale" if scheme == "nvfp4" else "fp8_channel"
    message = f"batch_invariant must be False for scheme '{scheme}', got True: .*{remedy}"
    with pytest.raises(ValueError, match=message):
        call(*batch)
    counts, ends = torch.ones(E, dtype=torch.int32), torch.arange(1, E + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        moe_ops.batched_experts(
            normal(E, 1, 288, seed=0), call.w13, call.w2, counts, batch_invariant=True
        )
    x = normal(E, 288, seed=0)
    with pytest.raises(ValueError, match=message):
        moe_ops.grouped_linear(x, call.w13, ends, batch_invariant=True)
    # what arrives quantized has its scale; a second product would need one of its own
    quantized = moe_ops.quantize_activation(x, scheme)

    def run(rows, ends):
        scale = quantized.scale[rows] if quantized.scale.ndim == 2 else quantized.scale
        return moe_ops.grouped_linear(
            *(quantized.q[rows], call.w13, torch.tensor(ends, dtype=torch.int32)),
            x_scale=scale,
            x_global_scale=quantized.global_scale,
            batch_invariant=True,
        )

    out = run(slice(None), range(1, E + 1))
    for i in range(E):
        assert torch.equal(run(slice(i, i + 1), [0] * i + [1] * (E - i))[0], out[i])


def test_nvfp4_with_known_scales():
    w13, w2 = weights("", FP32, *SIZES[0], "silu")
    call = Call("", FP32)
    call.w13 = moe_ops.quantize(w13, "nvfp4", activation_scale=0.01)
    call.w2 = moe_ops.quantize(w2, "nvfp4", activation_scale=0.02)
    batch = call.tokens(64, "padding", 3)
    want = torch.cat([call(*[t[i : i + 1] for t in batch]) for i in range(64)])
    assert torch.equal(call(*batch), want)


H200 = Machine("cuda", (9, 0), "NVIDIA H200", tuple(moe_ops.list_backends()))


def test_a_plan_has_one_tier_and_names_who_was_left_out(monkeypatch):
    x, w13, w2, ids = (
        normal(4, 288, seed=0),
        *weights("", FP32, *SIZES[0], "silu"),
        torch.zeros(4, 2).int(),
    )
    with machines.pretend(Machine("cpu", available=tuple(moe_ops.list_backends()))):
        text = str(moe_ops.explain(x, w13, w2, ids, batch_invariant=True))
        assert "batch invariant: a token's row has the same bits in every batch" in text
        assert "M >= 0: torch" in text
        assert "batch invariant" not in str(moe_ops.explain(x, w13, w2, ids))
        step = moe_ops.explain(x, w13, w2, ids, batch_invariant=True, training=True)
        assert step.gradients == (
            "plain torch, because batch_invariant asks for the products that inference takes"
        )
    with machines.pretend(H200):
        for name in ("deep_gemm", "flashinfer"):
            with pytest.raises(ValueError, match=f"'{name}' .*not shown to be batch invariant"):
                moe_ops.explain(
                    *(x.bfloat16(), w13.bfloat16(), w2.bfloat16(), ids),
                    batch_invariant=True,
                    backend=name,
                )
        ends, leaf = torch.zeros(E, dtype=torch.int32), x.clone().requires_grad_()
        with pytest.raises(ValueError, match="torch: not batch invariant on cuda"):
            moe_ops.grouped_linear(leaf, w13, ends, batch_invariant=True)


def test_options_of_the_operators():
    call = Call("", BF16)
    x, router, ids = call.tokens(3, "uniform", 3)

    def planned(batch_invariant):
        options = Options(activations.resolve("silu"), batch_invariant=batch_invariant)
        weights = Weight(call.w13), Weight(call.w2)
        of = ExpertsCall(x, *weights, router, ids, None, None, None, options)
        return decode(bind.make_plan(of, "auto").options)[2]

    assert planned(True).batch_invariant and not planned(False).batch_invariant


def test_backends_of_others_are_refused_unless_they_say_more():
    x, (w13, w2) = normal(4, 288, seed=0), weights("", FP32, *SIZES[0], "silu")
    ids = torch.zeros(4, 2, dtype=torch.int32)
    refused = pytest.raises(ValueError, match="not shown to be batch invariant")
    with outside.registered(outside.dense()) as other, refused:
        moe_ops.explain(x, w13, w2, ids, backend=other.name, batch_invariant=True)
    says = dataclasses.replace(outside.dense(), takes=Takes(depends_on_batch=lambda p, m: []))
    with outside.registered(says):
        plan = moe_ops.explain(x, w13, w2, ids, backend=says.name, batch_invariant=True)
        assert plan.tiers == ((-1, says),)
