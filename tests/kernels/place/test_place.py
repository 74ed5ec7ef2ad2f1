"""Placing pairs in the contiguous layout, against plain torch."""

import pytest
import torch

from moe_ops.kernels import launch
from moe_ops.kernels.place.layout import index_parts
from tests.support.places import devices

pytest.importorskip("triton")

from tests.kernels.gemm.test_sm80_mma import poisoned


@devices
@pytest.mark.parametrize("pairs", [6, 700, 2600])
@pytest.mark.parametrize("alignment", [1, 64])
@pytest.mark.parametrize("mapped", [False, True])
def test_rows_of_pairs(device, pairs, alignment, mapped, monkeypatch):
    """Parts of one share, and of several; the last ones are not whole."""
    from moe_ops.kernels.place import place

    if pairs == 2600:
        monkeypatch.setattr(place, "MAX_PARTS", 3)
    E, g = 21, torch.Generator().manual_seed(pairs)
    ids = torch.randint(-2, E + 3, (pairs // 2, 2), generator=g)
    table = torch.randint(-1, E + 1, (E + 1,), generator=g, dtype=torch.int32) if mapped else None
    local = ids.flatten()
    if table is not None:
        local = torch.where((local >= 0) & (local <= E), table[local.clamp(0, E)].long(), -1)
    here = (local >= 0) & (local < E)
    index = poisoned((index_parts(pairs, E).end,), torch.int32, device)
    tensors = [None if t is None else t.to(device) for t in (ids, table)]
    gpu = launch.gpu(index.get_device())._replace(pdl=False)
    launches, layout = place.place(*tensors, index, E, pairs, alignment, gpu)
    launch.run(launches, index.get_device(), gpu)

    counts = torch.bincount(local[here], minlength=E)
    padded = -(-counts // alignment) * alignment
    first = padded.cumsum(0) - padded
    expected = torch.full_like(local, -1)
    for e in range(E):
        mine = (local == e).nonzero().flatten()
        expected[mine] = first[e] + torch.arange(mine.numel())
    assert layout.rows.tolist() == expected.tolist()
    assert layout.groups.tolist() == (first + counts).tolist()
