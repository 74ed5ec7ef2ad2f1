"""Backend cutlass: its kernels under Triton's interpreter around GEMMs in plain torch, and on a
GPU the real ones.
"""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.activations import NAMES
from moe_ops.backends.cutlass import backend, library
from moe_ops.backends.cutlass import schemes as library_schemes
from moe_ops.backends.cutlass.schemes import one_scale
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from tests.support import fake_cutlass, oracle
from tests.support.cases import (
    BF16,
    FP16,
    Case,
    assert_matches,
    garbage,
    poisoned_memory,
    refill,
    tolerance,
)
from tests.support.places import CUDA, devices

schemes = pytest.mark.parametrize("scheme", [*backend._FP8, "int4_w4a8"])


def forget() -> None:
    machines._machine_facts_cached.cache_clear()
    bind.forget()


@pytest.fixture(autouse=True)
def products(monkeypatch):
    """On a CPU the kernels are those of plain torch."""
    fake = None if CUDA else fake_cutlass.install(monkeypatch)
    forget()
    yield fake
    monkeypatch.undo()
    forget()


def case_of(device: str, scheme: str, dtype=BF16, **options) -> Case:
    return Case(device, dtype, scheme, **{"K": 64, "I": 48, **options})


def rounded(dtype: torch.dtype, reference) -> torch.Tensor:
    """The oracle with the first product rounded to 16 bits, as the library returns it."""
    real = oracle.activation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "activation", lambda x, **o: real(x.to(dtype).double(), **o))
        return reference()


def check(case: Case) -> torch.Tensor:
    out, dtype = case.run("cutlass"), case.dtype
    expected = rounded(dtype, case.reference)
    squared = str(case.options["activation"]).startswith("relu2")
    assert_matches(out, expected, tolerance(dtype, case.scheme, "cuda") * (2 if squared else 1))
    assert out.dtype == dtype and (out[case.nowhere] == 0).all()
    return out


@devices
@schemes
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_values(device, scheme, dtype):
    check(case_of(device, scheme, dtype, M=37, E=5, top_k=3))


@devices
@pytest.mark.parametrize("activation", NAMES)
def test_activations(device, activation):
    check(case_of(device, "fp8_channel", activation=activation, M=9, E=3))


@devices
@schemes
@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True, "ids_dtype": torch.int64, "weights_dtype": BF16, "M": 33, "E": 6},
        {"on_input": True, "top_k": 1, "M": 20},
        {"M": 3, "ids": torch.tensor([[-1, 4], [-9, 99], [2**31 - 1, -(2**31)]])},
        {"E": 1, "top_k": 3, "M": 5},
        {"M": 70, "top_k": 4, "K": 80, "I": 112},
    ],
    ids=lambda o: "-".join(o),
)
def test_options(device, scheme, options):
    """Repeats of an expert come as one; ids that name none are skipped, whatever their rows and
    weights hold."""
    check(case_of(device, scheme, **options))


@devices
@schemes
def test_strided_rows(device, scheme):
    case = case_of(device, scheme, M=7)
    K = case.args[0].shape[1]
    wide = garbage(torch.empty(7, 2 * K + 6, dtype=BF16, device=device))
    case.args[0] = wide[:, 3:-3:2].copy_(case.args[0])
    check(case)


@devices
@pytest.mark.parametrize("rows", [3, 200])
def test_several_tiles(device, rows, products):
    """In every direction, the last of each not whole."""
    check(case_of(device, "fp8_channel", M=rows, E=2, K=272, I=400))
    if products is not None:
        assert products.calls == ["moe_ops_sm90_fp8_bf16"] * 2


@devices
@pytest.mark.parametrize("dtype, name", [(BF16, "bf16"), (FP16, "f16")])
@pytest.mark.parametrize(
    "M, tile",
    [(3, "256x32"), (18, "256x32"), (40, "256x64"), (150, "256x128"), (300, "128x256")],
)
def test_int4_tiles(device, M, tile, dtype, name, products):
    """Each tile of tokens, whole and not; in w13 and w2 several tiles of rows and groups of
    columns.
    """
    ids = torch.randint(0, 2, (M, 2), generator=torch.Generator().manual_seed(2))
    options = {"M": M, "E": 2, "K": 256, "I": 640, "ids": ids, "activation": "relu2_no_mul"}
    check(case_of(device, "int4_w4a8", dtype, **options))
    if products is not None:
        assert products.calls == [f"moe_ops_sm90_int4_{name}_{tile}"] * 2


@devices
def test_int4_scales_of_either_sign_and_zero(device):
    """Codes of all sixteen numbers."""
    case = case_of(device, "int4_w4a8", M=20, E=3, K=256)
    for i in (1, 2):
        w = case.args[i]
        codes = torch.randint(0, 256, w.qdata.shape, generator=torch.Generator().manual_seed(i))
        scale = w.scale.float()
        scale[:, ::3] *= -1
        scale[:, 1::7] = 0
        case.args[i] = w._replace(
            qdata=codes.to(w.qdata), scale=scale.to(w.scale.dtype), channel_scale=-w.channel_scale
        )
    check(case)


@pytest.mark.slow
@devices
def test_an_expert_with_all_rows(device):
    check(case_of(device, "fp8_channel", M=300, top_k=1, ids=torch.full((300, 1), 2), E=4))


@devices
@schemes
@pytest.mark.parametrize("on_input", [False, True])
def test_chunks_are_one_piece(device, scheme, on_input, products):
    """Of a scale that all rows share, the largest token and the largest h may lie in any chunk."""
    case = case_of(device, scheme, M=37, E=3, on_input=on_input, top_k=1 if on_input else 2)
    case.args[0][20] *= 3
    whole = check(case)
    x, w13, w2, _, ids = args = case.args_for("cutlass")
    call = {**case.options, "backend": "cutlass"}
    most = moe_ops.explain(x, w13, w2, ids, **call).num_bytes(16)
    before = len(products.calls) if products is not None else 0
    out = moe_ops.fused_experts(*args, **call, max_workspace_bytes=most)
    assert torch.equal(out, whole)
    if products is not None:  # the first GEMM twice where h has one scale of all rows
        assert len(products.calls) - before == (9 if one_scale(scheme) else 6)


@devices
@schemes
def test_arriving_quantized(device, scheme):
    """The bits of quantizing inside."""
    case = case_of(device, scheme, M=21, E=4, expert_map=True)
    whole = check(case)
    x, w13, *rest = case.args_for("cutlass")
    known = w13.activation_scale
    found = moe_ops.numerics.quantize_activation(x, scheme, known, ~case.nowhere)
    found.q.view(torch.uint8)[case.nowhere] = 127
    scale = found.scale
    if scale.ndim:
        wide = garbage(torch.empty(len(x), 3, device=device))
        scale = wide[:, 1:2].copy_(scale)
    out = moe_ops.fused_experts(
        found.q, w13, *rest, **case.options, hidden_states_scale=scale, out_dtype=BF16,
        backend="cutlass",
    )  # fmt: skip
    assert torch.equal(out, whole)


@devices
def test_scales_of_experts(device):
    """Each pair is quantized by the scale of its expert."""
    case = case_of(device, "fp8_tensor_static", M=40, E=5)
    w13, w2 = case.args[1:3]
    steps = torch.linspace(0.5, 2.0, 5, device=device)
    case.args[1] = w13._replace(activation_scale=w13.activation_scale * steps)
    case.args[2] = w2._replace(activation_scale=w2.activation_scale * steps.flip(0))
    check(case)


def batches(device, scheme, E=3, T=9, dtype=BF16):
    """(x, w13, w2, counts) whose rows behind the counts hold NaN; one batch is empty, one full."""
    case = case_of(device, scheme, E=E)
    _, w13, w2, *_ = case.args_for("cutlass")
    x = (
        torch.randn(E, T, w13.shape[-1], generator=torch.Generator().manual_seed(1))
        .to(dtype)
        .to(device)
    )
    counts = torch.tensor([4, 0, T, 1][:E], dtype=torch.int32, device=device)
    inside = torch.arange(T, device=device) < counts[:, None]
    x[~inside] = torch.nan
    return x, w13, w2, counts, inside


@devices
@schemes
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_batches(device, scheme, dtype):
    x, w13, w2, counts, inside = batches(device, scheme, dtype=dtype)
    w13, w2 = w13.to(dtype), w2.to(dtype)
    natural = [moe_ops.prepare(w, "torch") for w in (w13, w2)]
    expected = rounded(dtype, lambda: oracle.batched(x, *natural, counts))
    with poisoned_memory():
        out = moe_ops.batched_experts(x, w13, w2, counts, backend="cutlass")
    assert_matches(out[inside], expected[inside], tolerance(dtype, scheme, "cuda"))


@devices
@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_tensor"])
def test_chunks_of_batches_are_one_piece(device, scheme, products):
    x, w13, w2, counts, inside = batches(device, scheme, E=4, T=6)
    whole = moe_ops.batched_experts(x, w13, w2, counts, backend="cutlass")
    before = len(products.calls) if products is not None else 0
    # room for the 128 rows that are planned for an expert, and not for those of two
    parts = moe_ops.batched_experts(
        x, w13, w2, counts, backend="cutlass", max_workspace_bytes=250_000
    )
    if products is not None:
        assert len(products.calls) - before > 2
    assert torch.equal(parts[inside], whole[inside])


@devices
def test_batches_that_are_strided_and_arrive_quantized(device):
    x, w13, w2, counts, inside = batches(device, "fp8_channel")
    whole = moe_ops.batched_experts(x, w13, w2, counts.long() + 0, backend="cutlass")
    wide = garbage(torch.empty(3, 9, 2 * 64, dtype=BF16, device=device))
    strided = wide[..., ::2].copy_(x)
    again = moe_ops.batched_experts(strided, w13, w2, counts, backend="cutlass")
    assert torch.equal(again[inside], whole[inside])
    found = moe_ops.numerics.quantize_activation(x.nan_to_num(), "fp8_channel")
    found.q.view(torch.uint8)[~inside] = 127
    arrived = moe_ops.batched_experts(
        found.q, w13, w2, counts, hidden_states_scale=found.scale, out_dtype=BF16,
        backend="cutlass",
    )  # fmt: skip
    assert torch.equal(arrived[inside], whole[inside])


@devices
def test_addresses_that_the_instructions_do_not_take(device):
    """Weights are refused, with the remedy; an output is copied to."""
    case = case_of(device, "fp8_channel", M=5)
    w13 = case.args[1]
    bytes_ = torch.empty(w13.qdata.numel() + 1, dtype=torch.uint8, device=device)
    moved = bytes_[1:].view(torch.float8_e4m3fn).view(w13.qdata.shape).copy_(w13.qdata)
    case.args[1] = w13._replace(qdata=moved)
    with pytest.raises(ValueError, match="w13 must begin at a multiple of 16 bytes .*clone"):
        case.run("cutlass")
    x, w13, w2, counts, inside = batches(device, "fp8_channel")
    whole = moe_ops.batched_experts(x, w13, w2, counts, backend="cutlass")
    real = library.aligned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "aligned", lambda t: t.shape != whole.shape and real(t))
        copied = moe_ops.batched_experts(x, w13, w2, counts, backend="cutlass")
    assert torch.equal(copied[inside], whole[inside])


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"scheme": "int8_w8a8"}, "cutlass has no kernel for scheme 'int8_w8a8'"),
        ({"scheme": "fp8_channel", "K": 72}, "needs K to be a multiple of 16, got 72"),
        ({"scheme": "fp8_channel", "I": 40}, "needs I to be a multiple of 16, got 40"),
        ({"scheme": "fp8_channel", "bias": True}, "cutlass takes no bias"),
        ({"scheme": "int4_w4a8", "bias": True}, "cutlass takes no bias"),
    ],
    ids=lambda o: "-".join(o) if isinstance(o, dict) else "",
)
def test_what_is_refused(options, reason):
    case = case_of("cpu", **options)
    with pytest.raises(ValueError, match=reason):
        case.run("cutlass")


@pytest.mark.gpu
@pytest.mark.parametrize("M", [5, 40, 200, 600])
@pytest.mark.parametrize("scheme", ["fp8_channel", "int4_w4a8"])
def test_replay_follows_the_routing(scheme, M):
    """A captured call computes with the tokens and the routing that its tensors hold later."""
    case = case_of("cuda", scheme, M=M, E=5, K=256)
    args = case.args_for("cutlass")
    moe_ops.fused_experts(*args, backend="cutlass")  # loads and compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_ops.fused_experts(*args, backend="cutlass")
    for seed in (1, 2):
        refill(case, seed)
        graph.replay()
        assert torch.equal(out, moe_ops.fused_experts(*args, backend="cutlass"))
        within = tolerance(BF16, scheme, "cuda")
        assert_matches(out, rounded(BF16, case.reference), within)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [5, 600])
@pytest.mark.parametrize("scheme", ["", "fp8_channel", "fp8_block", "int4_w4a8"])
def test_two_streams_at_once(scheme, M):
    """Calls that run side by side share nothing: each returns what it returns alone."""
    sizes = {"M": M, "E": 5, "K": 256, "I": 128}
    calls = [case_of("cuda", scheme, **sizes, seed=seed).args_for("cutlass") for seed in range(2)]
    alone = [moe_ops.fused_experts(*args, backend="cutlass") for args in calls]
    assert not torch.equal(*alone)
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append((i, moe_ops.fused_experts(*calls[i], backend="cutlass")))
    torch.cuda.synchronize()
    assert all(torch.equal(out, alone[i]) for i, out in found)


@pytest.mark.parametrize("kind", library_schemes.DESCRIPTOR_BYTES)
def test_parts_do_not_overlap(kind):
    for E in (1, 8, 128, 513):
        at = library_schemes.parts(1001, E, kind)
        assert not any(start % 32 for start in at) and at.arrays >= 1001
        assert at.layouts - at.arrays >= 2 * 2 * library_schemes.NUMBERS * E
        assert at.sizes - at.layouts >= 2 * 2 * library_schemes.LAYOUT_WORDS * E
        assert at.alphas - at.sizes >= 2 * 3 * E and at.descriptors - at.alphas >= 2 * E
        size = library_schemes.DESCRIPTOR_BYTES[kind]
        assert 4 * (at.shared - at.descriptors) == 2 * size
        assert at.end - at.shared >= library.SHARED
