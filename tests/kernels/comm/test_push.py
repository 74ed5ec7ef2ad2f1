"""Kernels that write into each other's memory, with all ranks played by one process: every rank
sends before one waits.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from moe_ops.kernels import launch
from moe_ops.kernels.comm import push
from moe_ops.kernels.comm.mailbox import EMPTY, Mailbox
from moe_ops.kernels.comm.push import Phases
from moe_ops.meta import symmetric
from moe_ops.meta.symmetric import SymmetricLayout
from moe_ops.parallel import stand_in

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")
GPU = launch.gpu(-1)
SPINS = 3


@pytest.fixture(autouse=True)
def asserting(monkeypatch):
    """The interpreter leaves out assertions, whatever a launch says: without them, who waits in
    vain would go on.
    """
    from triton.runtime.interpreter import interpreter_builder

    options = replace(interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter_builder, "options", options)


def mailboxes(layout):
    """Of all ranks of a group."""
    buffers = []
    for _ in range(layout.group_size):
        buffer = torch.full((layout.num_bytes,), EMPTY, dtype=torch.uint8)
        buffer[: layout.meta_start] = 0
        buffers.append(buffer)
    return [Mailbox.of(layout, rank, buffers) for rank in range(layout.group_size)]


def run(launched):
    launch.run([launched], -1, GPU)


def gather(boxes, rows, ids=None, weights=None):
    """What each rank gets in one epoch."""
    layout = boxes[0].layout
    total, K = layout.group_size * layout.max_num_tokens, rows[0].shape[1]
    poison = torch.nan if rows[0].is_floating_point() else 77
    outs = []
    for _ in boxes:
        out = [torch.full((total, K), poison, dtype=rows[0].dtype), None, None]
        if ids is not None:
            out[1] = torch.full((total, layout.top_k), -7, dtype=torch.int32)
            out[2] = torch.full((total, layout.top_k), torch.nan)
        outs.append(out)
    for phases in (Phases(True, False), Phases(False, True)):
        for r, box in enumerate(boxes):
            routed = (None, None) if ids is None else (ids[r], weights[r])
            run(push.push_rows(*outs[r], rows[r], *routed, box, SPINS, phases))
    return outs


def reduce(boxes, rows, counts):
    outs = [torch.full((M, rows[0].shape[1]), torch.nan, dtype=rows[0].dtype) for M in counts]
    for phases in (Phases(True, False), Phases(False, True)):
        for r, box in enumerate(boxes):
            run(push.push_sums(outs[r], rows[r], box, SPINS, phases))
    return outs


def padded(parts, T, value):
    return torch.cat(
        [torch.nn.functional.pad(p, (0, 0, 0, T - len(p)), value=value) for p in parts]
    )


@pytest.mark.parametrize(
    ("R", "T", "K", "dtype", "few"),
    [
        (2, 3, 32, torch.bfloat16, 128),
        (4, 5, 40, torch.float32, 2),  # blocks of 4 rows
        (2, 19, 9, torch.float16, 1),  # 3 blocks of 8 rows, which are padded in buffers
        (2, 40, 4, torch.float32, 1),  # 3 blocks of 16 small rows
        (2, 19, 10, torch.float16, 1),  # words of two floats
        (3, 5, 6, torch.float64, 2),
        (2, 19, 9, torch.int32, 1),  # any bits
        (3, 5, 7, torch.uint8, 2),
    ],
)
def test_rows_of_all_ranks_arrive(R, T, K, dtype, few, monkeypatch):
    """Whichever blocks there are, one program sends all of them or each one. Rows of floats leave
    nothing behind.
    """
    monkeypatch.setattr(symmetric, "FEW_BLOCKS", few)
    monkeypatch.setattr(symmetric, "MOST_BLOCK_BYTES", 256 * (T == 40))
    monkeypatch.setattr(push, "PROGRAMS", 2 * min(few, 2))
    ids_dtype = torch.int32 if few == 2 else torch.int64
    layout = SymmetricLayout(R, T, K * dtype.itemsize, 3)
    assert layout.blocks == {3: 3, 5: 2, 19: 3, 40: 3}[T]
    floats = dtype.is_floating_point
    boxes = mailboxes(layout)
    for epoch in range(4):  # both sets, twice
        counts = [(T - r - epoch) % (T + 1) for r in range(R)]
        rows = [torch.randn(M, K).to(dtype) for M in counts]
        if not floats:
            rows = [torch.randint(0, 256, (M, K * dtype.itemsize)) for M in counts]
            rows = [torch.where(x > 200, 255, x).to(torch.uint8).view(dtype) for x in rows]
        ids = [torch.randint(0, 9, (M, 3), dtype=ids_dtype) for M in counts]
        if ids_dtype == torch.int64:
            for these in ids:
                these[::2, 0] = 2**32 + 5
                these[1::2, 1] = -(2**40)
        weights = [torch.rand(M, 3).to(dtype if floats else torch.float32) for M in counts]
        for out, got_ids, got_weights in gather(boxes, rows, ids, weights):
            assert torch.equal(out, padded(rows, T, 0))
            want = padded([i.clamp(-1, 2**31 - 1).int() for i in ids], T, -1)
            assert torch.equal(got_ids, want)
            assert torch.equal(got_weights, padded([w.float() for w in weights], T, 0))
    programs = 2 * min(layout.blocks, push.PROGRAMS // 2)
    for box in boxes:
        assert box.epochs[:programs].eq(4).all() and box.epochs[programs:].eq(0).all()
        for left in box.buffers:
            assert left[layout.meta_start : layout.rows_start].eq(EMPTY).all()
            assert left[layout.rows_start :].eq(EMPTY).all() == floats


@pytest.mark.parametrize(
    ("R", "T", "K", "dtype", "few"),
    [
        (2, 3, 32, torch.float16, 128),  # the interpreter cuts off bits of bf16
        (4, 5, 40, torch.float16, 2),
        (3, 5, 40, torch.float32, 2),
        (4, 7, 24, torch.float32, 128),
        (2, 19, 9, torch.float32, 1),
        (1, 3, 40, torch.float32, 128),
    ],
)
def test_sums_are_in_the_order_of_ranks(R, T, K, dtype, few, monkeypatch):
    monkeypatch.setattr(symmetric, "FEW_BLOCKS", few)
    monkeypatch.setattr(symmetric, "MOST_BLOCK_BYTES", 0)
    monkeypatch.setattr(push, "PROGRAMS", 2 * min(few, 2))
    boxes = mailboxes(SymmetricLayout(R, T, K * dtype.itemsize))
    for epoch in range(3):
        counts = [(T - r - epoch) % (T + 1) for r in range(R)]
        rows = [torch.randn(R * T, K).to(dtype) for _ in range(R)]
        for r, scale in enumerate((1, 2**-8, -1, 2**-9)[:R]):  # which order, tells
            rows[r][:, 0] *= scale
        for r, out in enumerate(reduce(boxes, rows, counts)):
            want = torch.zeros(counts[r], K)
            for share in rows:
                want += share[r * T : r * T + counts[r]].float()
            assert torch.equal(out, want.to(dtype))
    for box in boxes:  # also of rows that no token is behind
        assert box.buffers[box.rank][box.layout.rows_start :].eq(EMPTY).all()


@pytest.mark.parametrize(
    ("R", "T", "K", "top_k", "split_k", "few"),
    [(2, 5, 40, 3, 1, 128), (3, 7, 24, 2, 2, 2), (2, 19, 9, 1, 1, 1)],
)
def test_pairs_are_summed_on_the_way(R, T, K, top_k, split_k, few, monkeypatch):
    """As each rank's weighted sums, rounded, and then the ranks in their order. Rows of experts
    that are elsewhere hold NaN.
    """
    monkeypatch.setattr(symmetric, "FEW_BLOCKS", few)
    monkeypatch.setattr(symmetric, "MOST_BLOCK_BYTES", 0)
    monkeypatch.setattr(push, "PROGRAMS", 2 * min(few, 2))
    E, S = 4, R * T * top_k
    boxes = mailboxes(SymmetricLayout(R, T, K * 2))
    ids = torch.randint(-1, R * E + 1, (R * T, top_k))
    # sums without rounding, so that it does not matter how they are made
    weights = None if top_k == 1 else torch.randint(1, 9, (top_k, R * T)).T / 8
    parts, shares = [], []
    for r in range(R):
        expert_map = torch.full((R * E,), -1, dtype=torch.int32)
        expert_map[r * E : (r + 1) * E] = torch.arange(E)
        flat = ids.flatten()
        here = (flat >= r * E) & (flat < (r + 1) * E)
        y = torch.randint(-99, 99, (split_k, S, K)) / 16
        factor = 1 if weights is None else weights[..., None]
        terms = torch.where(here[:, None], y.sum(0), 0).view(R * T, top_k, K)
        shares.append((terms * factor).sum(1).half().float())
        y[:, ~here] = torch.nan
        rows, split = None, split_k
        if r % 2 and split_k == 1:  # sorted, with room between experts
            order = torch.randperm(2 * S)[:S]
            rows = torch.where(here, order, -1).int()
            y, given = torch.full((2 * S, K), torch.nan), y
            y[order] = given[0]
        parts.append((y, push.pairs_of(ids, expert_map, E, rows, weights, split)))
    outs = [torch.full((T - r, K), torch.nan).half() for r in range(R)]
    for phases in (Phases(True, False), Phases(False, True)):
        for out, (y, pairs), box in zip(outs, parts, boxes, strict=True):
            run(push.push_sums(out, y.contiguous(), box, SPINS, phases, pairs))
    for r, out in enumerate(outs):
        want = torch.zeros(T - r, K)
        for share in shares:
            want += share[r * T : r * T + T - r]
        assert want.abs().sum() > 0 and torch.equal(out, want.half())


@pytest.mark.parametrize("tokens, split_k, bound", [(8, 1, 128), (8, 2, None), (512, 2, 128)])
def test_registers_of_programs_that_may_share_a_multiprocessor(tokens, split_k, bound):
    """All are bound but those of parts of sums that have a multiprocessor each."""
    (box, _) = mailboxes(SymmetricLayout(2, tokens, 64))
    ids = torch.zeros(2 * tokens, 1, dtype=torch.int64)
    pairs = push.pairs_of(ids, None, 1, None, None, split_k)
    out, y = torch.empty(tokens, 32).half(), torch.empty(split_k, 2 * tokens, 32)
    found = push.push_sums(out, y, box, SPINS, pairs=pairs)
    assert (found.grid[0] > launch.gpu(-1).multiprocessors) == (tokens == 512)
    assert found.maxnreg == bound


def test_the_stand_in_reads_what_kernels_sent():
    """Layout, flags and epochs of the one are those of the other, for rows with flags."""
    R, T, K, top_k = 3, 5, 24, 2
    boxes = mailboxes(SymmetricLayout(R, T, K * 4, top_k))
    rows = [torch.randint(-9, 9, (T - r, K), dtype=torch.int32) for r in range(R)]
    ids = [torch.randint(0, 9, (T - r, top_k)) for r in range(R)]
    weights = [torch.rand(T - r, top_k) for r in range(R)]
    shapes = (R * T, K), (R * T, top_k)
    for r, box in enumerate(boxes):
        outs = torch.empty(shapes[0]).int(), torch.empty(shapes[1]).int(), torch.empty(shapes[1])
        sends = Phases(True, False)
        run(push.push_rows(*outs, rows[r], ids[r], weights[r], box, SPINS, sends))
    for box in boxes:
        box.epochs.zero_()  # the stand-in sends as much once more
    for r, box in enumerate(boxes):
        outs = torch.empty(shapes[0]).int(), torch.empty(shapes[1]).int(), torch.empty(shapes[1])
        stand_in.push_rows(*outs, rows[r], ids[r], weights[r], box, 0.1)
        wanted = padded(rows, T, 0), padded(ids, T, -1).int(), padded(weights, T, 0)
        assert all(torch.equal(got, want) for got, want in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("sums", [False, True])
def test_a_rank_may_run_ahead(sums):
    """By as much as it can: to the rows of the next epoch, before others have taken any."""
    T, K, epochs = 5, 24, 5
    boxes = mailboxes(SymmetricLayout(2, T, K * 2))
    given = torch.randn(2, epochs, T * (1 + sums), K).half()
    counts = torch.randint(0, T + 1, (2, epochs))
    outs = [[None] * epochs, [None] * epochs]

    def step(rank, epoch, send):
        M = int(counts[rank, epoch])
        phases = Phases(send, not send)
        if sums:
            out = torch.full((M, K), torch.nan).half()
            run(push.push_sums(out, given[rank, epoch], boxes[rank], SPINS, phases))
        else:
            out = torch.full((2 * T, K), torch.nan).half()
            x = given[rank, epoch, :M]
            run(push.push_rows(out, None, None, x, None, None, boxes[rank], SPINS, phases))
        outs[rank][epoch] = out

    step(1, 0, True)
    for epoch in range(epochs):
        ahead, behind = epoch % 2, 1 - epoch % 2
        step(ahead, epoch, True) if epoch == 0 else None
        step(ahead, epoch, False)
        if epoch + 1 < epochs:
            step(ahead, epoch + 1, True)
        step(behind, epoch, False)
        if epoch + 1 < epochs:
            step(behind, epoch + 1, True)
    for epoch in range(epochs):
        for rank in range(2):
            if sums:
                here = slice(rank * T, rank * T + int(counts[rank, epoch]))
                want = (given[0, epoch, here].float() + given[1, epoch, here].float()).half()
            else:
                parts = [given[r, epoch, : int(counts[r, epoch])] for r in range(2)]
                want = padded(parts, T, 0)
            assert torch.equal(outs[rank][epoch], want), (rank, epoch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_and_weights_of_ones_arrive_as_nan(dtype):
    """Where all bits are ones, nothing would seem to be there: a NaN like this loses its sign."""
    layout = SymmetricLayout(2, 3, 8 * dtype.itemsize, 2)
    boxes = mailboxes(layout)
    whole = torch.int16 if dtype == torch.float16 else torch.int32
    ones = torch.tensor(-1, dtype=whole).view(dtype)
    for _ in range(3):
        rows = [torch.randn(3, 8).to(dtype) for _ in range(2)]
        weights = [torch.rand(3, 2) for _ in range(2)]
        for x, w in zip(rows, weights, strict=True):
            x[0], x[1, ::2], x[2, 7] = ones, ones, ones
            w[1, 0] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
        ids = [torch.full((3, 2), -1), torch.arange(6).view(3, 2)]
        for out, got_ids, got_weights in gather(boxes, rows, ids, weights):
            want = torch.cat(rows)
            assert want.isnan().sum() == 26
            assert torch.equal(out.isnan(), want.isnan())
            assert torch.equal(out.nan_to_num(7), want.nan_to_num(7))
            assert torch.equal(got_ids, torch.cat(ids).int())
            assert torch.equal(got_weights.nan_to_num(7), torch.cat(weights).nan_to_num(7))
    sums = mailboxes(SymmetricLayout(2, 3, 8 * dtype.itemsize))
    shares = [torch.randn(6, 8).to(dtype) for _ in range(2)]
    for share in shares:
        share[::2, 3] = ones
    for r, out in enumerate(reduce(sums, shares, [3, 2])):
        here = slice(3 * r, 3 * r + len(out))
        want = shares[0][here].float() + shares[1][here].float()
        assert torch.equal(out.nan_to_num(7), want.to(dtype).nan_to_num(7)) and out.isnan().any()


def test_rows_of_an_address_that_is_no_word_s():
    """Two 16-bit floats travel together, wherever they begin on one rank."""
    boxes = mailboxes(SymmetricLayout(2, 3, 16))
    rows = [torch.randn(25).half()[1:].view(3, 8), torch.randn(3, 8).half()]
    assert rows[0].data_ptr() % 4
    assert push.whole_words(rows[0])[0].data_ptr() % 4 == 0
    assert [push.whole_words(x)[1] for x in (rows[0], rows[0][:, 1:])] == [4, 2]
    for out, _, _ in gather(boxes, rows):
        assert torch.equal(out, torch.cat(rows))


@pytest.mark.slow
@pytest.mark.parametrize("sums", [False, True])
def test_a_launch_keeps_the_buffers_that_it_writes(sums):
    """Also those of other ranks, to which only addresses lead."""
    boxes = mailboxes(SymmetricLayout(3, 3, 32, 0 if sums else 2))
    buffers = [weakref.ref(buffer) for buffer in boxes[0].buffers]
    launched = (pushed_sums if sums else pushed_rows)(torch.randn(3, 8), boxes[0], push.BOTH)
    del boxes
    gc.collect()
    assert all(buffer() is not None for buffer in buffers)
    del launched
    gc.collect()
    assert not any(buffer() is not None for buffer in buffers)


def given_up():
    return pytest.raises(Exception, match="another rank of the group ended, or did not call")


def pushed_rows(x, box, phases):
    R = box.layout.group_size
    ids, weights = torch.randint(0, 9, (3, 2)), torch.rand(3, 2)
    outs = x.new_empty(3 * R, 8), torch.empty(3 * R, 2).int(), torch.empty(3 * R, 2)
    return push.push_rows(*outs, x, ids, weights, box, SPINS, phases)


def pushed_sums(x, box, phases):
    parts = torch.cat([x] * box.layout.group_size)
    return push.push_sums(torch.empty(3, 8), parts, box, SPINS, phases)


@pytest.mark.parametrize("R", [2, 3])
@pytest.mark.parametrize("push_it", [pushed_rows, pushed_sums])
def test_each_element_is_awaited(push_it, R):
    """Of rows, and of ids and weights that travel with them, from every rank."""
    top_k = 2 if push_it is pushed_rows else 0
    layout, x = SymmetricLayout(R, 3, 32, top_k), torch.randn(3, 8)
    at, words = [], 2 * top_k
    for row in [3 * (R - 1 + slot) + row for slot in range(R - 1) for row in (0, 2)]:  # of epoch 1
        at += [layout.rows_start + row * layout.pitch + 4 * k for k in (0, 7)]
        at += [layout.meta_start + 4 * (words * row + word) for word in (0, words - 1) if words]
    for missing in (None, *at):
        boxes = mailboxes(layout)
        for box in boxes[:-1]:
            run(push_it(x, box, Phases(True, False)))
        if missing is None:
            run(push_it(x, boxes[-1], Phases(False, True)))
            continue
        boxes[-1].buffers[-1][missing : missing + 4] = EMPTY
        with given_up():
            run(push_it(x, boxes[-1], Phases(False, True)))


def test_a_rank_that_sends_nothing_is_given_up():
    x, layout, routed = torch.randn(3, 8), SymmetricLayout(2, 3, 32), SymmetricLayout(2, 3, 32, 2)
    for push_it, rows, of in (
        (pushed_rows, x, routed),
        (pushed_rows, x.view(torch.int32), routed),
        (pushed_sums, x, layout),
    ):
        with given_up():
            run(push_it(rows, mailboxes(of)[0], push.BOTH))
    box = mailboxes(layout)[1]
    for said in ("rank 0 sent nothing within 0.01 s", "an earlier exchange was given up"):
        with pytest.raises(stand_in.Late, match=said):
            stand_in.push_sums(torch.empty(3, 8), torch.randn(6, 8), box, 0.01)
