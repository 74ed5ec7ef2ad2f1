"""Tokens of all ranks, which one process plays, copied to the rows of their pairs on arrival."""

import sys

import pytest
import torch

pytest.importorskip("triton")

from moe_ops import numerics
from moe_ops.kernels import launch
from moe_ops.kernels.comm import push
from moe_ops.kernels.comm.mailbox import EMPTY
from moe_ops.kernels.comm.push import Phases
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.push_scatter import push_scatter, why_not
from moe_ops.meta import symmetric
from moe_ops.meta.symmetric import SymmetricLayout
from moe_ops.parallel.symmetric_memory import packed_rows
from tests.kernels.comm.test_push import (
    GPU,
    SPINS,
    asserting,  # noqa: F401  (a fixture)
    mailboxes,
    run,
)

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize(
    ("R", "T", "K", "top_k", "scales", "few", "held", "packed"),
    [
        (2, 19, 40, 3, "", 1, 8192, False),
        (2, 19, 40, 3, "", 1, 128, False),  # 4 tiles of 2 rows
        (3, 5, 256, 2, "fp32", 2, 8192, False),
        (3, 5, 256, 2, "fp32", 2, 128, False),  # 8 tiles of half a row
        (2, 3, 384, 1, "powers", 128, 8192, False),
        (3, 5, 256, 2, "fp32", 2, 8192, True),
        (2, 19, 384, 3, "fp32", 1, 256, True),  # tiles of some columns of a row
        (2, 3, 128, 1, "powers", 128, 8192, True),
    ],
)
def test_rows_of_pairs_have_their_tokens(R, T, K, top_k, scales, few, held, packed, monkeypatch):
    """Quantized as the tokens are; other rows are left alone, and a rank that copies what arrives
    without scattering it sees the same blocks, of rows that were quantized before they travelled.
    """
    monkeypatch.setattr(symmetric, "FEW_BLOCKS", few)
    monkeypatch.setattr(symmetric, "MOST_BLOCK_BYTES", 0)
    monkeypatch.setattr(push, "PROGRAMS", 2 * min(few, 2))
    monkeypatch.setattr(sys.modules[push_scatter.__module__], "MOST_COPIED", held)
    S, size = R * T * top_k, 2 * R * T * top_k
    boxes = mailboxes(SymmetricLayout(R, T, symmetric.packed_bytes(K) if packed else K * 2))
    scheme = "fp8_block:ue8m0" if scales == "powers" else "fp8_block"

    def sent(x):
        """As a rank sends it that does not quantize on the way."""
        if not packed:
            return x
        q, scale, *_ = numerics.quantize_activation(x.float(), scheme)
        return packed_rows(q, scale)

    for epoch in range(3):
        counts = [max(0, T - 4 * ((r + epoch) % R)) for r in range(R)]  # 0 of one, where T is 3
        tokens = [torch.randn(M, K).half() for M in counts]
        whole = torch.cat([torch.cat((x, x.new_zeros(T - len(x), K))) for x in tokens])
        there = torch.cat([torch.arange(T) < M for M in counts])[:, None]
        launches, wanted = [], []
        for r in range(R - 1):
            here = there & (torch.rand(R * T, top_k) < 0.6)
            rows = torch.where(here, torch.randperm(size)[:S].view(R * T, top_k), -1)
            y = Operand(torch.full((size, K), torch.nan).half())
            want = y.data.clone()
            want[rows[here]] = whole[:, None].expand(-1, top_k, -1)[here]
            scale = torch.full((K // 128, size), torch.nan)
            if scales:
                data = torch.zeros(size, K, dtype=torch.float8_e4m3fn)
                y = Operand(data, scale.clone(), scales)
            assert why_not(K, y) is None
            wanted.append((want, rows[here], y))
            layout = Layout(rows.flatten().int(), torch.empty(0), size)
            launches.append((y, tokens[r], layout, top_k, boxes[r]))
        whole = torch.cat([sent(x) for x in whole.split(T)])
        whole[~there[:, 0]] = 0
        out = torch.full_like(whole, 77)
        for phases in (Phases(True, False), Phases(False, True)):
            for given in launches:
                run(push_scatter(*given, SPINS, GPU, packed, phases))
            box, last = boxes[-1], sent(tokens[-1])
            run(push.push_rows(out, None, None, last, None, None, box, SPINS, phases))
        if packed:  # the interpreter rounds small negative numbers to 0, not to -0
            for rows in out, whole:
                q = rows.view(torch.uint8)[:, :K]
                q[q == 0x80] = 0
        assert torch.equal(out, whole)
        for want, rows, y in wanted:
            if not scales:
                assert torch.equal(y.data.nan_to_num(77), want.nan_to_num(77))
                continue
            q = numerics.quantize_activation(want[rows].float(), scheme)
            assert torch.equal(y.data[rows].float(), q[0].float())
            assert torch.equal(y.scale[:, rows].T, q[1])
            left = torch.ones(size, dtype=torch.bool)
            left[rows] = False
            assert y.scale[:, left].isnan().all() and y.data[left].float().eq(0).all()
    programs = push.grid_of(boxes[0].layout)[0]
    assert all(box.epochs[:programs].eq(3).all() for box in boxes)


@pytest.mark.parametrize("packed", [False, True])
def test_every_block_of_every_rank_is_awaited(packed, monkeypatch):
    """Also those of which no row is wanted: a rank that runs ahead must not overwrite them. Rows
    of floats are taken, whether they are wanted or not.
    """
    monkeypatch.setattr(symmetric, "FEW_BLOCKS", 2)
    K = 128 if packed else 16
    row_bytes = symmetric.packed_bytes(K) if packed else 2 * K
    layout, x = SymmetricLayout(2, 3, row_bytes), torch.randn(3, K).half()
    y = Operand(torch.zeros(6, K).half())
    if packed:
        y = Operand(torch.zeros(6, K, dtype=torch.float8_e4m3fn), torch.zeros(1, 6), "fp32")
    nowhere = Layout(torch.full((6,), -1, dtype=torch.int32), torch.empty(0), 6)
    assert layout.blocks == 2
    for late in (None, 0, 1, 2):
        boxes = mailboxes(layout)
        run(push_scatter(y, x, nowhere, 1, boxes[0], SPINS, GPU, packed, Phases(True, False)))
        own = boxes[1].buffers[1]
        # of the set of epoch 1: a flag or the count, or the last element of a row
        at = layout.rows_start + (3 + (late or 0)) * layout.pitch + row_bytes - 2
        if packed and late is not None:
            own[8 * (3 + late) : 8 * (4 + late)] = 0
        elif late is not None:
            own[at : at + 2] = 0xFF
        given = y, x, nowhere, 1, boxes[1], SPINS, GPU, packed, Phases(False, True)
        if late is not None:
            with pytest.raises(Exception, match="another rank of the group ended, or did not"):
                run(push_scatter(*given))
            continue
        run(push_scatter(*given))
        assert packed or own[layout.rows_start :].eq(EMPTY).all()


@pytest.mark.parametrize("ones", [(0, 1), (0,), (1,)])
def test_floats_of_ones_are_copied_as_nan(ones):
    """Two floats travel as one word, and are looked at one by one."""
    boxes = mailboxes(SymmetricLayout(2, 3, 32))
    x = torch.randn(3, 16).half()
    for column in ones:
        x[1, 6 + column] = torch.tensor(-1, dtype=torch.int16).view(torch.float16)
    rows = torch.arange(6, dtype=torch.int32)
    outs = [Operand(torch.full((6, 16), 77.0).half()) for _ in range(2)]
    for phases in (Phases(True, False), Phases(False, True)):
        for y, box in zip(outs, boxes, strict=True):
            run(push_scatter(y, x, Layout(rows, rows, 6), 1, box, SPINS, GPU, False, phases))
    for y in outs:
        assert y.data.isnan().sum() == 2 * len(ones)
        assert torch.equal(y.data.nan_to_num(7), torch.cat([x, x]).nan_to_num(7))
