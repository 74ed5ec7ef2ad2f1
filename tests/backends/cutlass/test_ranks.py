"""Calls of backend cutlass with an exchange between two ranks, which one process plays: the other
rank has sent its tokens and its share of the outputs before this one calls.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import moe_ops
from moe_ops.kernels import launch
from moe_ops.kernels.comm import push
from moe_ops.kernels.comm.mailbox import Mailbox
from moe_ops.kernels.comm.push import Phases
from moe_ops.meta.symmetric import SymmetricLayout, packed_bytes
from moe_ops.numerics import quantize_activation
from moe_ops.ops import exchange
from moe_ops.parallel.symmetric_memory import _Opened, packed_rows
from tests.backends.cutlass.test_layer import products  # noqa: F401  (a fixture)
from tests.kernels.comm.test_push import asserting  # noqa: F401  (a fixture)
from tests.support import oracle
from tests.support.cases import BF16, FP16, assert_matches, poisoned_memory, tolerance
from tests.support.places import devices

T, E, TOP_K, K, I = 11, 4, 3, 256, 128  # experts of both ranks
COUNTS = 9, 11  # tokens of each
SPINS = 1000
SENDS = Phases(True, False)


class Played(NamedTuple):
    """The exchange of this rank, 0 of 2."""

    out: torch.Tensor
    arrivals: Mailbox
    mailbox: Mailbox
    spins: int = SPINS

    def gather(self, x):
        out = x.new_full((2 * T, x.shape[1]), 77)
        ran(push.push_rows(out, None, None, x, None, None, self.arrivals, SPINS))
        return out

    def gather_quantized(self, x, scheme):
        return _Opened.gather_quantized(self, x, scheme)  # which asks for `gather` alone

    def add(self):
        out = torch.full_like(self.out[: COUNTS[0]], torch.nan)
        ran(push.push_sums(out, self.out, self.mailbox, SPINS))
        self.out[: COUNTS[0]] = out


def ran(launched):
    at = launched.args[0].get_device()
    launch.run([launched], at, launch.gpu(at))


def mailboxes(device, row_bytes=2 * K):
    layout = SymmetricLayout(2, T, row_bytes)
    buffers = []
    for _ in range(2):
        buffer = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8, device=device)
        buffer[: layout.meta_start] = 0
        buffers.append(buffer)
    return [Mailbox.of(layout, rank, buffers) for rank in range(2)]


CASES = [
    ("cutlass", scheme, dtype, sent)
    for scheme, dtype in (("", BF16), ("fp8_block", BF16), ("fp8_channel", FP16))
    for sent in ("all", "own", "quantized", "chunks")
    if scheme == "fp8_block" or sent not in ("quantized", "chunks")
]


@devices
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("on_input", [False, True], ids=["", "on_input"])
@pytest.mark.parametrize(
    "backend, scheme, dtype, sent", [*CASES, ("triton", "fp8_block", BF16, "quantized")]
)
def test_outputs_are_those_of_all_experts(
    device, backend, scheme, dtype, sent, bias, on_input, monkeypatch
):
    """Also where the other rank has quantized its tokens, and this one sends, receives, runs
    chunks or leaves it to a step before the backend.
    """
    if scheme == "fp8_channel" and bias:
        pytest.skip("cutlass takes no bias with it")
    quantized = sent in ("quantized", "chunks")
    if quantized and on_input:
        pytest.skip("rows that router weights multiply are not quantized before they travel")
    top_k = 1 if on_input else TOP_K
    tokens = [torch.randn(M, K).to(device, dtype) for M in COUNTS]
    x = torch.cat([torch.nn.functional.pad(x, (0, 0, 0, T - len(x))) for x in tokens])
    ids = torch.stack([torch.randperm(E + 1)[:top_k] for _ in range(2 * T)]).int()  # E: nowhere
    ids[COUNTS[0] : T] = -1
    ids, weights = ids.to(device), torch.rand(2 * T, top_k).to(device) + 0.25
    w13 = (torch.randn(E, 2 * I, K) / K**0.5).to(device, dtype)
    w2 = (torch.randn(E, K, I) / I**0.5).to(device, dtype)
    b13, b2 = torch.randn(E, 2 * I).to(device, dtype), torch.randn(E, K).to(device, dtype)
    if scheme:
        w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
    options = {"router_weight_on_input": on_input}
    whole = options | ({"w13_bias": b13, "w2_bias": b2} if bias else {})
    want = oracle.experts(x.float(), w13, w2, weights, ids, **whole)[: COUNTS[0]]

    arrivals = mailboxes(device, packed_bytes(K) if quantized else 2 * K)
    shares, theirs = mailboxes(device), tokens[1]
    if quantized:
        theirs = packed_rows(*quantize_activation(theirs, scheme)[:2])
    ran(push.push_rows(theirs, None, None, theirs, None, None, arrivals[1], SPINS, SENDS))
    half = E // 2
    maps = torch.tensor([[0, 1, -1, -1], [-1, -1, 0, 1]], dtype=torch.int32, device=device)

    def part(of, rank):
        return None if of is None else of[rank * half : (rank + 1) * half]

    def call(rank, x, **options):
        if bias:
            options |= {"w13_bias": part(b13, rank), "w2_bias": part(b2, rank)}
        return moe_ops.fused_experts(
            x, part(w13, rank), part(w2, rank), weights, ids, expert_map=maps[rank],
            backend=backend, router_weight_on_input=on_input, **options,
        )  # fmt: skip

    other = call(1, x)
    assert other.abs().sum() > 0
    out = torch.empty_like(x[: COUNTS[1]])
    ran(push.push_sums(out, other, shares[1], SPINS, SENDS))

    def opened(name, out, num_rows):
        return Played(out, arrivals[0], shares[0])

    monkeypatch.setattr(exchange, "_open", opened)
    options = {"max_workspace_bytes": 40_000} if sent == "chunks" else {}
    rows = x if sent == "all" else tokens[0]
    with poisoned_memory():
        name = exchange.QUANTIZED * quantized + "played"
        got = call(0, rows, exchange=name, **options)[: COUNTS[0]]
    assert_matches(got, want, 2 * tolerance(dtype, scheme, "cuda"))
    epochs = arrivals[0].epochs[0].item(), shares[0].epochs[0].item()
    assert epochs == (int(sent != "all"), 1)


def test_tokens_of_all_ranks_are_not_quantized_again():
    x, w13, w2 = torch.randn(4, K), torch.randn(2, 2 * I, K), torch.randn(2, K, I)
    given = torch.rand(4, 1), torch.zeros(4, 1, dtype=torch.int32)
    packed = [moe_ops.quantize(w, "fp8_block") for w in (w13, w2)]
    name = exchange.QUANTIZED + "played"
    with pytest.raises(ValueError, match="hidden_states must be this rank's tokens .* got 4 rows"):
        moe_ops.fused_experts(x, *packed, *given, exchange=name)
    odd = [moe_ops.quantize(torch.randn(size), "fp8_block") for size in ((2, 8, 130), (2, 130, 4))]
    for rows, weights, options, why in (
        (x, (w13, w2), {}, "scheme '', K=256 and router_weight_on_input=False: .* for fp8_block"),
        (x, packed, {"router_weight_on_input": True}, "router_weight_on_input=True: .*"),
        (x[:, :130], odd, {}, "scheme 'fp8_block', K=130 .* a multiple of 128"),
    ):
        with pytest.raises(ValueError, match=f"exchange must leave tokens as they are, .*{why}"):
            moe_ops.fused_experts(rows, *weights, *given, exchange=name, **options)
