"""What runs on a GPU under `batch_invariant`: kernels with one order of sums for every number of
tokens. Which are launched is compared here, and bits in Triton's interpreter; on a GPU
benchmarks/batch_invariant.py compares them, and here those of `cutlass`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops import activations
from moe_ops.autograd import fused, training
from moe_ops.autograd.adapters import UNADAPTED
from moe_ops.backend import Library
from moe_ops.backends.triton import backend, mixed, plain
from moe_ops.choose import plain as choose
from moe_ops.kernels import launch
from moe_ops.kernels.launch import Gpu
from moe_ops.numerics.sums import add_by_tree
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine
from moe_ops.parallel.placement import Placement, shard_experts
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.planning.training import PORTABLE
from moe_ops.tables import lookup
from tests.support import oracle
from tests.support.cases import BF16, FP16, FP32, STATIC_SCALES, fitting, prepared, tolerance
from tests.support.fake_cuda import fake_gpu

E, TOP_K = 4, 2
COUNTS = (1, 2, 16, 24, 48, 64, 128, 200, 1024, 4096)
SCHEMES = (
    *("", "fp8_channel", "fp8_tensor_static", "fp8_block", "int8_w8a8", "int4_w4a16:g32"),
    *("int4_w4a8", "fp8_w8a16:channel", "mxfp4_w4a16", "mxfp4_w4a8", "mxfp8", "nvfp4_w4a16"),
)
H200 = Gpu(227 * 1024, True, True, "NVIDIA H200")
MACHINE = Machine("cuda", (9, 0), "NVIDIA H200", tuple(moe_ops.list_backends()))


def measured(*problem: Any) -> dict:
    """A row of a table, of other tiles for few tokens than for many."""
    block_k = 32 if problem[-1] <= 64 else 64
    gemm = {"block_n": 64, "block_k": block_k, "num_stages": 2, "num_warps": 4}
    if problem[5] == "fp8_block":
        gemm |= {"block_k": 128, "num_warps": 2}
    return {"kernel": "sm80_mma", "block_m": 16, "gemm1": gemm, "gemm2": gemm}


@contextlib.contextmanager
def launched() -> Iterator[list]:
    """The launches of each call, which are not run, as an H200 with a measured table gets them."""
    found: list = []
    with contextlib.ExitStack() as stack:
        keep = mock.patch.object(launch, "run", lambda launches, *_: found.append(launches))
        stack.enter_context(keep)
        stack.enter_context(mock.patch.object(launch, "gpu", lambda device: H200))
        stack.enter_context(mock.patch.object(plain, "same_bits_in_all_tiles", in_all_tiles))
        stack.enter_context(mock.patch.object(lookup, "layer_config", measured))
        yield found


def weights(scheme: str, dtype: torch.dtype, K: int = 64, I: int = 128):
    g = torch.Generator().manual_seed(0)
    shapes = (
        (E, 2 * fitting(I, scheme), fitting(K, scheme)),
        (E, fitting(K, scheme), fitting(I, scheme)),
    )
    scales = STATIC_SCALES if scheme.endswith("_static") else (None, None)
    found = []
    for shape, scale in zip(shapes, scales, strict=True):
        weight = (torch.randn(shape, generator=g) / shape[2] ** 0.5).to(dtype)
        found.append(
            moe_ops.quantize(weight, scheme, activation_scale=scale) if scheme else weight
        )
    return found


def tokens(M: int, K: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(M)
    x = torch.randn(M, K, generator=g).to(dtype)
    return (
        x,
        torch.rand(M, TOP_K, generator=g) + 0.25,
        torch.randint(-1, E + 1, (M, TOP_K), generator=g),
    )


# kernels, or parts of one, that say which rows stand in which block, and compute nothing
SORTS = ("moe_ops_route", "moe_ops_group_blocks")
SORTING = ("CHUNK", "BLOCK_E", "BLOCK_M", "S")


def what_computes(launches: list) -> list:
    """Of the launches that compute values, all that decides how: kernel, warps and constants.
    Strides say where rows are.
    """
    found = []
    for one in launches:
        name, skipped = one.kernel.name, ()
        if name in SORTS:
            continue
        if name == "moe_ops_quantize":  # perhaps in one launch with the sort, which has the warps
            skipped = (*SORTING, "ROWS", "SORTS", "FIRST")
        facts = {
            field: value
            for field, role, value in zip(
                one.kernel.arguments.names, one.kernel.arguments.roles, one.args, strict=True
            )
            if role in ("constant", "specialized")
            and field not in skipped
            and "stride" not in field
        }
        y = one.named().get("y_ptr")
        if y is not None:
            facts["y"] = y.dtype  # sums are rounded to it
        warps = 0 if skipped else one.num_warps
        found.append((name, warps, one.maxnreg, facts))
    return found


def in_all_tiles(dtype: torch.dtype, device: int) -> bool:
    return dtype == BF16  # as on an SM90


def computed(
    kind: str, scheme: str, dtype: torch.dtype, M: int, batch_invariant: bool, *sizes: int
) -> list:
    w13, w2 = weights(scheme, dtype, *sizes)
    x, router, ids = tokens(M, w2.shape[1], dtype)
    options = {"backend": "triton", "batch_invariant": batch_invariant}
    with launched() as calls:
        if kind == "experts":
            moe_ops.fused_experts(x, w13, w2, router, ids, **options)
        elif kind == "batched_experts":
            x, counts = x.expand(E, *x.shape), torch.full((E,), M)
            moe_ops.batched_experts(x, w13, w2, counts, **options)
        else:
            ends = torch.tensor([0, M // 2, M // 2, M], dtype=torch.int32)
            moe_ops.grouped_linear(x, w13, ends, **options)
    (launches,) = calls
    return what_computes(launches)


# in bf16 all tiles of two kernels gave the same bits on an H100
ALL_TILES = ("", "fp8_block", "fp8_channel", "fp8_tensor_static", "int8_w8a8")


def sums(launches: list) -> list:
    """What `what_computes` gives without tiles and kernels that gave the same bits on an H100."""
    found = []
    for name, warps, _, facts in launches:
        gemm = "gemm" in name
        if gemm and facts["W_SCALE"]:
            # with fewer warps or rows the tensor core's other instruction runs, whose sums differ
            assert warps >= 4 and facts["BLOCK_N"] >= 64, facts
            assert facts["BLOCK_K"] == 128
        found.append("gemm" if gemm else name)
    return [name for name in found if name != "moe_ops_quantize"]


@pytest.mark.parametrize("kind", ["experts", "batched_experts", "grouped_linear"])
@pytest.mark.parametrize("scheme", ALL_TILES)
def test_every_number_of_tokens_is_summed_alike(kind, scheme):
    on = [computed(kind, scheme, BF16, M, True) for M in COUNTS]
    assert not any("gemv" in name for launches in on for name, *_ in launches)
    assert all(sums(launches) == sums(on[0]) for launches in on)


def test_tiles_follow_rows_on_sm90_alone():
    same_bits = choose.same_bits_in_all_tiles.__wrapped__
    for device, major, shown in ((0, 9, True), (0, 10, False), (0, 8, False), (-1, 9, False)):
        with mock.patch.object(choose.environment, "capability", lambda _, m=major: (m, 0)):
            assert same_bits(BF16, device) == shown
            assert not same_bits(FP16, device) and not same_bits(FP32, device)


@pytest.mark.parametrize("kind", ["experts", "batched_experts", "grouped_linear"])
def test_every_number_of_tokens_is_computed_alike(kind):
    for scheme in SCHEMES:
        for dtype in (FP32,) if scheme in ALL_TILES else (BF16, FP32):
            on = [computed(kind, scheme, dtype, M, True) for M in COUNTS]
            names = [name for name, *_ in on[0]]
            assert any("gemm2" in name for name in names), names
            assert not any("gemv" in name or "tma" in name or "wgmma" in name for name in names)
            assert all(facts == on[0] for facts in on[1:]), (scheme, dtype)


def test_a_tier_that_is_let_through_is_seen():
    """The same comparison of calls without the mode, by scheme, and of a config that follows M."""
    for scheme in ("", "int4_w4a16:g32"):
        off = [computed("experts", scheme, BF16, M, False) for M in COUNTS]
        assert any(facts != off[0] for facts in off[1:]), scheme

    with mock.patch.object(plain, "for_any_batch", choose.choose):
        leaking = [computed("experts", "", FP32, M, True) for M in COUNTS]
    assert any(facts != leaking[0] for facts in leaking[1:])
    with mock.patch.object(choose, "_has_wgmma_of_8_bits", lambda config: True):
        choose.for_experts.cache_clear()
        try:
            with pytest.raises(AssertionError, match="2 >= 4"):
                sums(computed("experts", "fp8_block", BF16, 8, True))
        finally:
            choose.for_experts.cache_clear()


@pytest.mark.parametrize(
    "scheme, I",
    [("int4_w4a16:g128", 512), ("int4_w4a16:g128", 2304), ("int4_w4a8", 512)]
    + [("fp8_w8a16:channel", 512)],
)
def test_mixed_schemes_run_one_kernel_of_sm90(scheme, I):
    """For every number of rows, none of a table's, and with no sum that programs share. One token
    in int4 has kernels of its own, which take the same chunks of columns and sum as many parts of
    a row apart.
    """
    with mock.patch.object(mixed, "runs_wgmma", lambda *_: True):
        on = [computed("experts", scheme, BF16, M, True, 512, I) for M in COUNTS]
    of_token = [scheme.startswith("int4_w4a16") and M == 1 for M in COUNTS]
    chunks = []  # K tiles of one and two of them gave the same bits on an H100
    for launches, token in zip(on, of_token, strict=True):
        gemms = [(name, facts) for name, _, _, facts in launches if "gem" in name]
        expected = "moe_ops_token_gemm" if token else "wgmma"
        assert len(gemms) == 2 and all(expected in name for name, _ in gemms), launches
        assert len(launches) == 2 or not token, launches
        assert all(facts.get("SPLIT_K", 1) == 1 for _, facts in gemms)
        names = ("FORMAT", "SCALE", "SCALE_GROUP", "K_CHUNK")
        parts = [facts["SPLIT"] if token else facts["SEGMENTS"] for _, facts in gemms]
        assert not any(facts.get("TWO") for _, facts in gemms)
        of_gemms = [[facts[name] for name in names] for _, facts in gemms]
        assert parts == [1, 2 if I > 2048 else 1]
        second = gemms[1][1]
        assert second["ROUNDED"] if token else second["y"] == BF16
        chunks.append([*of_gemms, parts])
    assert all(chunk == chunks[0] for chunk in chunks), chunks


def test_tiers_of_a_gpu_give_the_same_bits(monkeypatch):
    x, router, ids = tokens(3, 512, BF16)
    w13, w2 = weights("", BF16, 512, 256)
    times = [(8, {"triton": 5.0, "deep_gemm": 1.0}), (64, {"triton": 9.0, "deep_gemm": 1.0})]
    monkeypatch.setattr(lookup, "backend_times", lambda *_: times)
    with machines.pretend(MACHINE):
        assert len(moe_ops.explain(x, w13, w2, ids).tiers) == 2
        plan = moe_ops.explain(x, w13, w2, ids, batch_invariant=True)
        assert [(limit, b.name) for limit, b in plan.tiers] == [(-1, "triton")]
        text = str(plan)
        for name in ("deep_gemm", "flashinfer"):
            assert any(
                line.startswith(f"  not {name}: ") and "not shown to be batch invariant" in line
                for line in text.splitlines()
            ), text
        assert "not torch: not batch invariant on cuda" in text
        everyone = [
            dataclasses.replace(b, library=Library()) if b.name == "cutlass" else b
            for b in plans.backends.BACKENDS
        ]
        monkeypatch.setattr(plans.backends, "BACKENDS", tuple(everyone))
        plan = moe_ops.explain(x, w13, w2, ids, batch_invariant=True)
        assert [b.name for _, b in plan.tiers] == ["triton", "cutlass"]
        for options, reason in (
            ({"router_weight_on_input": True}, "rounds hidden_states after router weights"),
            ({"w2_bias": w2[..., 0].contiguous()}, "adds biases after"),
            ({"activation": "gelu"}, "erf of gelu"),
            ({"activation": "silu_no_mul"}, "before their activation, unless that is gated"),
        ):
            first = w13[:, :256].contiguous() if "no_mul" in str(options) else w13
            with pytest.raises(ValueError, match=reason):
                moe_ops.explain(
                    x, first, w2, ids[:, :1], batch_invariant=True, backend="cutlass", **options
                )
        # the output of a recording call is that of inference, whose reasons are its own
        plan = moe_ops.explain(x, w13, w2, ids, batch_invariant=True, training=True)
        assert [b.name for _, b in plan.tiers] == ["torch"]
        monkeypatch.setattr(backend, "INTERPRETED", False)  # an SM90 reads this layout
        words = [prepared(w) for w in weights("mxfp4_w4a16", BF16, 256, 256)]
        x = torch.zeros(3, 256, dtype=BF16)
        assert moe_ops.explain(x, *words, ids).tiers[0][1].name == "triton"
        with pytest.raises(ValueError, match="triton is not batch invariant with weights in layo"):
            moe_ops.explain(x, *words, ids, batch_invariant=True)
    amd = Machine("cuda", gpu_name="MI300X", available=("triton", "torch"), gfx="gfx942")
    x = torch.zeros(3, 512, dtype=BF16)
    for recording in (False, True):
        with machines.pretend(amd), pytest.raises(ValueError, match="not shown to be .* gfx942"):
            moe_ops.explain(x, w13, w2, ids, batch_invariant=True, training=recording)


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels there")


def check_bits(scheme: str) -> None:
    K, I, M = (32, 32, 19) if not scheme else (128, 128, 19)
    w13, w2 = weights(scheme, FP32, K, I)
    x, router, ids = tokens(M, K, FP32)
    ids[5:, 0] = 1  # more rows than one block has

    def run(*rows):
        which = torch.tensor(rows)
        return moe_ops.fused_experts(
            *(x[which], w13, w2, router[which], ids[which]),
            backend="triton",
            batch_invariant=True,
        )

    want = run(*range(M))
    rows = oracle.experts(x, w13, w2, router, ids, activation="silu")
    assert oracle.relative_error(want, rows) <= tolerance(FP32, scheme)
    for batch in ([0], [7], [18, 3], [4, 4, 4], torch.randperm(M)[:9].tolist()):
        assert torch.equal(run(*batch), want[torch.tensor(batch)])


@interpreted
@pytest.mark.parametrize("scheme", ["", "fp8_channel", "fp8_block", "int4_w4a16:g32", "mxfp8"])
def test_bits_in_the_interpreter(scheme):
    check_bits(scheme)


@interpreted
def test_the_interpreter_sees_a_kernel_that_is_let_through(monkeypatch):
    """That of one token."""
    chosen = plain.for_any_batch

    def leaking(layer, *facts):
        one = choose.choose_gemv(layer, False, 4)
        return one if layer.pairs == TOP_K else chosen(layer, *facts)

    monkeypatch.setattr(plain, "for_any_batch", leaking)
    with pytest.raises(AssertionError, match="torch.equal"):
        check_bits("")


class Ranks:
    """A layer of 16 experts, whole and as the ranks of a group of any size hold it."""

    EXPERTS, TOP_K = 16, 4

    def __init__(self, scheme: str, dtype: torch.dtype, K: int, I: int, device: str):
        self.g = torch.Generator(device).manual_seed(0)
        self.dtype, self.K, self.device = dtype, K, device
        shapes = (self.EXPERTS, 2 * I, K), (self.EXPERTS, K, I)
        whole = [(self.normal(*shape) / shape[2] ** 0.5).to(dtype) for shape in shapes]
        self.whole = [moe_ops.quantize(w, scheme) for w in whole] if scheme else whole

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.g, device=self.device)

    def tokens(self, M: int) -> tuple[torch.Tensor, ...]:
        size = (M, self.TOP_K)
        router = torch.rand(size, generator=self.g, device=self.device) + 0.25
        ids = torch.randint(-1, self.EXPERTS + 1, size, generator=self.g, device=self.device)
        return self.normal(M, self.K).to(self.dtype), router, ids

    def run(self, batch: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
        x, router, ids = batch
        options = {"batch_invariant": True, **options}
        return moe_ops.fused_experts(x, *self.whole, router, ids, **options)

    def parts(
        self, size: int, batch: tuple[torch.Tensor, ...], **options: Any
    ) -> list[torch.Tensor]:
        """What each rank returns."""
        placement, (x, router, ids) = Placement(self.EXPERTS, size), batch
        options = {"batch_invariant": True, "out_dtype": FP32, **options}
        return [
            moe_ops.fused_experts(
                *(x, *[shard_experts(w, placement, rank) for w in self.whole], router, ids),
                expert_map=placement.expert_map(rank).to(self.device),
                **options,
            )
            for rank in range(size)
        ]


@interpreted
@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g32"])
def test_ranks_add_up_to_the_bits_of_one_device_in_the_interpreter(scheme):
    layer = Ranks(scheme, FP32, *((64, 32) if scheme else (16, 16)), "cpu")
    batch = layer.tokens(5)
    parts = layer.parts(4, batch, backend="triton")
    whole = layer.run(batch, backend="triton")
    assert torch.equal(add_by_tree(parts), whole)
    assert not torch.equal(sum(parts), whole)  # one after another


def test_recording_calls_on_a_gpu_take_the_output_of_inference():
    layer = Ranks("", FP32, 16, 16, "cpu")
    x, router, ids = layer.tokens(5)
    activation = activations.resolve("silu")
    call = ExpertsCall(
        *(x, *map(Weight, layer.whole), router, ids, None, None, None),
        Options(activation, needs_grad=True, batch_invariant=True),
    )

    def forward(call):
        return fused.FusedStep(call, UNADAPTED, PORTABLE).forward()

    if not torch.cuda.is_available():
        out, h, _, index = forward(call)
        assert torch.equal(out, layer.run((x, router, ids)))
        options = call.options._replace(batch_invariant=False)
        other, *kept = forward(call._replace(options=options))
        assert not torch.equal(out, other)
        assert torch.equal(h, kept[0]) and torch.equal(index, kept[2])
    with fake_gpu(), torch.device("cuda"), torch.no_grad():
        x = torch.empty(5, 64, dtype=BF16)
        w13, w2 = torch.empty(16, 256, 64, dtype=BF16), torch.empty(16, 64, 128, dtype=BF16)
        router, ids = torch.empty(5, 4), torch.empty(5, 4, dtype=torch.int64)
        assert (
            moe_ops.explain(x, w13, w2, ids, batch_invariant=True, training=True).backend
            == "torch"
        )
        for dtype in (BF16, FP32):
            traced = call._replace(
                hidden_states=x,
                w13=Weight(w13),
                w2=Weight(w2),
                topk_weights=router,
                topk_ids=ids,
                options=call.options._replace(out_dtype=dtype),
            )
            out, h, _ = training.forward(*training.op_values(traced, False))
            assert out.dtype == dtype and h.dtype == BF16 and out.device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme", ["", "fp8_block", "fp8_channel", "int8_w8a8", "int4_w4a16:g128"]
)
def test_ranks_and_recording_calls_have_the_bits_of_one_device(scheme):
    layer = Ranks(scheme, BF16, 1024, 512, "cuda")
    batch = layer.tokens(3000)
    whole = layer.run(batch)
    assert whole.isfinite().all() and whole.float().square().mean() > 0.01
    for size in (2, 4, 8):
        for M in (1, 17, 3000):
            parts = layer.parts(size, tuple(t[:M] for t in batch))
            assert torch.equal(add_by_tree(parts).to(BF16), whole[:M]), (size, M)
    for M in (1, 2, 16, 64, 700, 3000):
        x, router, ids = (t[:M] for t in batch)
        leaves = [x.clone().requires_grad_(), router.clone().requires_grad_()]
        out = layer.run((*leaves, ids))
        assert torch.equal(out, whole[:M]), M
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        off = layer.run((*leaves, ids), batch_invariant=False)
        others = torch.autograd.grad(off.float().square().sum(), leaves)
        for one, other in zip(gradients, others, strict=True):
            assert oracle.relative_error(one, other) <= 4 * tolerance(BF16, scheme), M
    # as a rank records them
    (part, *_) = layer.parts(2, (leaves[0], *batch[1:]))
    assert part.requires_grad and torch.equal(part, layer.parts(2, batch)[0])
    part.square().sum().backward()
    a13, b13 = layer.normal(16, 8, 1024).to(BF16), layer.normal(16, 1024, 8).to(BF16)
    with pytest.raises(ValueError, match="batch_invariant must be False for adapters on a GPU"):
        layer.run(batch, adapters=moe_ops.LoRA(a13, b13, None, None))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "int4_w4a16:g32", "mxfp4_w4a16"])
@pytest.mark.parametrize("K, I", [(1024, 512), (2304, 1536), (4096, 2560)])
def test_one_token_has_the_bits_of_many(scheme, K, I):
    """Kernels of one token on SM90: with absent experts, biases, a map of experts, router weights
    on the input, int4 with scales of fp32, which multiply sums, and rows of one sum and of two.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("one token has kernels of its own on SM90 alone")
    experts, M = 16, 12
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda")

    plain = [normal(experts, 2 * I, K) / K**0.5, normal(experts, K, I) / I**0.5]
    biases = [normal(experts, n).to(BF16) for n in (2 * I, K)]
    moved = torch.randperm(2 * experts, generator=g, device="cuda")
    expert_map = torch.where(moved < experts, moved, -1).to(torch.int32)
    x, router = normal(M, K).to(BF16), torch.rand(M, 10, generator=g, device="cuda") + 0.25
    ids = torch.randint(-1, experts + 1, (M, 10), generator=g, device="cuda")
    dtype = FP32 if "g128" in scheme else BF16  # of other scales; sums have groups of 64 or more
    layers = [[moe_ops.quantize(w.to(t), scheme).to(BF16) for w in plain] for t in (BF16, dtype)]
    for layer, top_k, options in (
        (0, 8, {}),
        (0, 4, {"w13_bias": biases[0], "w2_bias": biases[1], "activation": "swigluoai"}),
        (1, 10, {"expert_map": expert_map}),
        (1, 1, {"router_weight_on_input": True, "out_dtype": FP32}),
    ):

        def run(rows: slice, layer=layer, top_k=top_k, options=options):
            return moe_ops.fused_experts(
                *(x[rows], *layers[layer], router[rows, :top_k], ids[rows, :top_k]),
                backend="triton",
                batch_invariant=True,
                **options,
            )

        want = run(slice(M))
        assert want.isfinite().all() and want.float().square().mean() > 0.01
        own = mixed.sm90_mma()
        with mock.patch.object(own, "launches", wraps=own.launches) as launches:
            alone = torch.cat([run(slice(m, m + 1)) for m in range(M)])
        assert launches.call_count == M
        assert torch.equal(alone, want), (top_k, options.keys())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme, blocks",
    [
        ("int4_w4a16:g128", {(64, 0), (32, 16), (64, 16)}),
        ("fp8_w8a16:channel", {(64, 0), (32, 16)}),
    ],
)
def test_blocks_of_two_operands_have_the_bits_of_one(scheme, blocks):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels need SM90")
    layer, seen = Ranks(scheme, BF16, 2048, 768, "cuda"), set()
    batch, start = layer.tokens(1000), launch._specialization

    def noted(launches, device):
        for one in launches:
            named = one.named()
            if "MORE_M" in named:
                seen.add((named["BLOCK_M"], named["MORE_M"]))
        return start(launches, device)

    with mock.patch.object(launch, "_specialization", noted):
        whole = layer.run(batch)
        for M in (20, 140, 260, 700):  # of which an expert has a quarter
            assert torch.equal(layer.run(tuple(t[:M] for t in batch)), whole[:M]), M
    assert seen >= blocks


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ALL_TILES)
def test_tiles_of_any_rows_have_the_same_bits(scheme):
    """On SM90 tiles follow the rows of an expert: with biases, router weights on the input, rows
    that tiles do not divide and rows that are loaded by element.
    """
    for K, I, options in (
        (1024, 512, {"bias": True, "activation": "swigluoai"}),
        (1040, 720, {"router_weight_on_input": True}),
        (1000, 360, {"bias": True}),
    ):
        if scheme == "fp8_block" and K % 128:
            continue
        g = torch.Generator("cuda").manual_seed(K)
        normal = functools.partial(torch.randn, generator=g, device="cuda")
        layer = [normal(E, 2 * I, K) / K**0.5, normal(E, K, I) / I**0.5]
        biases = [normal(E, n).to(BF16) for n in (2 * I, K)] if options.pop("bias", 0) else []
        options |= dict(zip(("w13_bias", "w2_bias"), biases, strict=False))
        layer = [w.to(BF16) for w in layer]
        if scheme:
            scales = STATIC_SCALES if scheme.endswith("_static") else (None, None)
            layer = [
                moe_ops.quantize(w, scheme, activation_scale=scale)
                for w, scale in zip(layer, scales, strict=True)
            ]
        x, router = normal(3000, K).to(BF16), torch.rand(3000, 1, generator=g, device="cuda")
        ids = torch.randint(-1, E + 1, (3000, 1), generator=g, device="cuda")

        def run(M: int, layer=layer, rows=(x, router + 0.25, ids), options=options):
            x, router, ids = (t[:M] for t in rows)
            return moe_ops.fused_experts(
                *(x, *layer, router, ids), backend="triton", batch_invariant=True, **options
            )

        want = run(3000)
        assert want.isfinite().all() and want.float().square().mean() > 0.01
        for M in (1, 2, 15, 40, 90, 180, 300, 900):
            assert torch.equal(run(M), want[:M]), (K, M)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swigluoai", "swiglustep"])
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_cutlass_gives_the_same_bits(scheme, activation):
    """Beside every number of rows of the other kernels, with the limits of gpt-oss."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("backend cutlass runs these schemes on SM90 alone")
    K, I, experts = 2880 if not scheme else 1024, 768, 8
    g = torch.Generator("cuda").manual_seed(0)
    w13 = torch.randn(experts, 2 * I, K, generator=g, device="cuda") / K**0.5
    w2 = torch.randn(experts, K, I, generator=g, device="cuda") / I**0.5
    x = torch.randn(4096, K, generator=g, device="cuda").to(BF16)
    router = torch.rand(4096, TOP_K, generator=g, device="cuda") + 0.25
    ids = torch.randint(-1, experts + 1, (4096, TOP_K), generator=g, device="cuda")
    layer = [w.to(BF16) for w in (w13, w2)]
    if scheme:
        layer = [moe_ops.quantize(w, scheme) for w in layer]

    def run(M: int, backend: str):
        return moe_ops.fused_experts(
            *(x[:M], *layer, router[:M], ids[:M]),
            activation=activation,
            backend=backend,
            batch_invariant=True,
        )

    want = run(4096, "cutlass")
    assert want.isfinite().all() and want.float().square().mean() > 0.01
    for M in (1, 3, 16, 60, 200, 700, 4096):
        assert torch.equal(run(M, "triton"), want[:M]), M
        assert torch.equal(run(M, "cutlass"), want[:M]), M
