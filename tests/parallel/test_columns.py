"""Shares of w13 and w2 in tensor parallelism: the numbers of each rank, and what is refused."""

import pytest
import torch

import moe_ops
from moe_ops.parallel.columns import shard_w2, shard_w13

SCHEMES = (
    *(
        "fp8_block",
        "fp8_tensor",
        "fp8_channel",
        "int8_w8a8",
        "int4_w4a16:g128",
        "int4_w4a16:g64:zp",
    ),
    *(
        "int4_w4a16:g32:super:min",
        "int6_w6a16:g16:super",
        "int4_w4a8",
        "mxfp4_w4a16",
        "mxfp8",
        "nvfp4",
    ),
)


@pytest.mark.parametrize("gated", [True, False])
def test_rows_of_gate_and_up_go_together(gated):
    E, K, share = 3, 4, 5
    w13, bias = torch.randn(E, 2 * 3 * share, K), torch.randn(E, 2 * 3 * share)
    size = 3 if gated else 6
    for rank in range(size):
        rows = list(range(rank * share, (rank + 1) * share))
        if gated:
            rows += [3 * share + row for row in rows]
        for whole in (w13, bias):
            got = shard_w13(whole, size, rank, gated=gated)
            assert torch.equal(got, whole[:, rows])
            assert got.untyped_storage().nbytes() == got.nbytes


def test_rows_of_gate_and_up_in_turns():
    """Of two ranks that each run their part of a layer the sum is the whole layer."""
    E, K, I = 3, 16, 24
    w13, w2 = torch.randn(E, 2 * I, K), torch.randn(E, K, I)
    x, ids = torch.randn(5, K), torch.arange(10).view(5, 2) % E
    weights = torch.rand(5, 2)
    whole = moe_ops.fused_experts(x, w13, w2, weights, ids, activation="swigluoai")
    parts = []
    for rank in range(2):
        share = shard_w13(w13, 2, rank, interleaved=True), shard_w2(w2, 2, rank)
        parts.append(moe_ops.fused_experts(x, *share, weights, ids, activation="swigluoai"))
    torch.testing.assert_close(sum(parts), whole)
    with pytest.raises(ValueError, match="between pairs of gate and up rows, got shares of 3"):
        shard_w13(w13, 16, 0, interleaved=True)


def test_columns_of_w2():
    w2 = torch.randn(3, 4, 15)
    for rank in range(3):
        got = shard_w2(w2, 3, rank)
        assert torch.equal(got, w2[:, :, 5 * rank : 5 * (rank + 1)])
        assert got.is_contiguous() and got.untyped_storage().nbytes() == got.nbytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_shares_have_their_scales(scheme):
    E, K, I, size = 3, 256, 512, 2
    rows = torch.logspace(0, 2, 2 * I).view(1, -1, 1)  # scales that differ
    w13 = moe_ops.quantize(torch.randn(E, 2 * I, K) * rows, scheme)
    w2 = moe_ops.quantize(torch.randn(E, K, I) * rows[:, :I].mT, scheme)
    share = I // size
    for rank in range(size):
        part = slice(rank * share, (rank + 1) * share)
        gate, up = w13.dequantize().chunk(2, 1)
        for got, want in (
            (shard_w13(w13, size, rank), torch.cat([gate[:, part], up[:, part]], 1)),
            (shard_w2(w2, size, rank), w2.dequantize()[:, :, part]),
        ):
            assert got.scheme == w13.scheme and got.shape == want.shape
            assert torch.equal(got.dequantize(), want)
            for name in got.__tensor_flatten__()[0]:
                tensor = getattr(got, name)
                assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


@pytest.mark.parametrize(
    "scheme", ["int5_w5a16:g32", "int5_w5a16:g32:min", "int6_w6a16:g16", "int6_w6a16:g16:super"]
)
@pytest.mark.parametrize("size", [2, 4])
def test_columns_that_lie_together_are_packed_anew(scheme, size):
    """Of 192 columns 64 do, of 768 128."""
    if scheme.endswith("super"):  # whole groups of 256 columns
        size = 3
    w2 = moe_ops.quantize(torch.randn(2, 8, 768), scheme)
    want = w2.dequantize().chunk(size, 2)
    for rank in range(size):
        got = shard_w2(w2, size, rank)
        assert torch.equal(got.dequantize(), want[rank])
        assert got.qdata.is_contiguous() and got.shape == want[rank].shape


def quantized(rows, columns, scheme="fp8_block"):
    return moe_ops.quantize(torch.randn(2, rows, columns), scheme)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard_w13([1], 2, 0), "weight must be a torch.Tensor, got list"),
        (lambda: shard_w13(torch.ones(2, 4, 3), 2, 2), r"rank must be in 0..size - 1 = 1, got 2"),
        (lambda: shard_w13(torch.ones(2, 4, 3), 2.0, 0), "size must be an integer, got 2.0"),
        (lambda: shard_w13(torch.ones(4), 2, 0), r"weight must have shape \(E, N, K\) or"),
        (lambda: shard_w2(torch.ones(2, 4), 2, 0), r"weight must have shape \(E, K, I\), got \(2"),
        (
            lambda: shard_w13(torch.ones(2, 6, 3), 2, 0),
            "a number of rows of w13 that 4 divides, got 6; choose another number of ranks",
        ),
        (lambda: shard_w2(torch.ones(2, 6, 3), 2, 0), "columns of w2 that 2 divides, got 3"),
        (  # Qwen3's 768 on 8 ranks: 96
            lambda: shard_w13(quantized(1536, 128), 8, 1),
            "must be cut between blocks of 128 rows of w13, .*shares of 96 for 8 ranks",
        ),
        (
            lambda: shard_w13(quantized(1536, 128), 8, 0),
            "must be cut between blocks of 128 rows of w13, .*shares of 96 for 8 ranks",
        ),
        (
            lambda: shard_w2(quantized(128, 768), 8, 0),
            "must be cut between blocks of 128 columns of w2, .*shares of 96 for 8 ranks",
        ),
        (
            lambda: shard_w2(quantized(128, 256, "int4_w4a16:g128"), 4, 1),
            "must be cut between blocks of 128 columns of w2, .*shares of 64 for 4 ranks",
        ),
        (
            lambda: shard_w2(quantized(128, 256, "q4_k"), 2, 0),
            "must be cut between blocks of 256 columns of w2, .*shares of 128 for 2 ranks",
        ),
        (
            lambda: shard_w2(quantized(128, 128).transpose(1, 2), 1, 0),
            "weight must be in its natural layout, .*prepare",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
