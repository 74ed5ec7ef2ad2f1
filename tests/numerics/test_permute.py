"""Sorting pairs and putting results back, alone: every element against fp64 rounded once.

M tokens, S = M * top_k pairs, E experts, K columns. Norms over whole tensors hide a rounding of
the router weights or of a partial sum behind the rounding of the result; single elements do not.
"""

from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops.backends.torch import cpu
from moe_ops.numerics import permute
from tests.support import oracle

M, E, TOP_K, K = 37, 6, 8, 16
BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}  # of the stored mantissa
half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def assert_rounded_once(got, want, magnitude):
    """Within half a unit in the last place of fp64 `want`, and what TOP_K sums in fp32 may add."""
    exponent = torch.floor(torch.log2(want.abs().clamp(min=2.0**-14)))
    allowed = 2.0 ** (exponent - BITS[got.dtype] - 1) + (TOP_K + 1) * 2.0**-24 * magnitude
    excess = (got.double() - want).abs() - allowed
    assert got.shape == want.shape and excess.max() <= 0, (
        f"{excess.max():.2e} above what is allowed"
    )


def routing(seed=0, dtype=torch.int64):
    """Ids of every kind, (M, TOP_K), and weights of which none is a bf16 or fp16 number."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, E + 2, (M, TOP_K), generator=g)
    ids = torch.where(ids == 1, 2, ids)  # expert 1 has no rows
    ids[0], ids[1], ids[2, 0], ids[2, 1] = 3, -1, 2**31 - 1, 2**8 + 3
    if dtype == torch.int64:
        ids[3, 0] = 2**32 + 3  # expert 3 if its upper half is dropped
    weights = (torch.arange(M * TOP_K) * 0.618034) % 1.0 + 0.25 + 2.0**-13
    return ids.to(dtype), weights.view(M, TOP_K)


def listed(ids, expert_map=None):
    """[(expert, pair)] in sorted order, experts that are not here as E."""
    table = list(range(E)) if expert_map is None else expert_map.tolist()
    pairs = []
    for pair, e in enumerate(ids.flatten().tolist()):
        e = table[e] if 0 <= e < len(table) else -1
        pairs.append((e if 0 <= e < E else E, pair))
    return sorted(pairs)


MAPS = {"no map": None, "map": torch.tensor([2, -1, 0, 5, E, 1, 3, -7], dtype=torch.int32)}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("expert_map", MAPS.values(), ids=MAPS)
def test_local_ids(expert_map, dtype):
    ids, _ = routing(dtype=dtype)
    expected = [0] * ids.numel()
    for e, pair in listed(ids, expert_map):
        expected[pair] = e
    got = permute.local_ids(ids, E, expert_map)
    assert got.dtype == torch.int64
    assert got.flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("expert_map", MAPS.values(), ids=MAPS)
def test_sort_pairs(expert_map, dtype):
    ids, _ = routing(dtype=dtype)
    expected = listed(ids, expert_map)
    sort = torch.sort

    def adverse(x, stable=False, **options):
        """Leaves ties in the worst order it may."""
        values, order = sort(x if stable else x.flip(-1), stable=True, **options)
        return values, order if stable else x.shape[-1] - 1 - order

    with mock.patch.object(torch, "sort", adverse):
        pairs = permute.sort_pairs(ids, E, expert_map)
    assert pairs.experts.tolist() == [e for e, _ in expected]
    assert pairs.order.tolist() == [pair for _, pair in expected]
    assert pairs.order[pairs.inverse].tolist() == list(range(M * TOP_K))
    assert pairs.offsets.dtype == torch.int32
    ends = [sum(e <= expert for e, _ in expected) for expert in range(E)]
    assert pairs.offsets.tolist() == ends
    valid = [False] * (M * TOP_K)
    for e, pair in expected:
        valid[pair] = e < E
    assert pairs.valid.shape == (M, TOP_K)
    assert pairs.valid.flatten().tolist() == valid


@half
def test_gather_tokens(dtype):
    ids, _ = routing()
    pairs = permute.sort_pairs(ids, E)
    x = torch.randn(M, K).to(dtype).requires_grad_()
    rows = permute.gather_tokens(x, pairs)
    tokens = [pair // TOP_K for _, pair in listed(ids)]
    assert torch.equal(rows, x[tokens])
    grad = torch.randn(rows.shape).to(dtype)
    rows.backward(grad)
    want = torch.zeros(M, K, dtype=torch.float64)
    magnitude = torch.zeros(M, K, dtype=torch.float64)
    for row, m in zip(grad.double(), tokens, strict=True):
        want[m] += row
        magnitude[m] += row.abs()
    assert x.grad.dtype == dtype
    assert_rounded_once(x.grad, want, magnitude)


@half
def test_weigh_inputs(dtype):
    """One product in fp32, one rounding: a weight rounded first shows in one element out of
    two."""
    ids, weights = routing()
    pairs = permute.sort_pairs(ids[:, :1], E)
    x = torch.randn(M, K).to(dtype)
    x[~pairs.valid[:, 0]] = float("nan")
    got = permute.weigh_inputs(x, weights[:, :1], pairs)
    here = pairs.valid[:, 0]
    want = x[here].double() * weights[here, :1].double()
    assert got.dtype == dtype and here.any() and not here.all()
    assert_rounded_once(got[here], want, want.abs())


@half
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_combine(dtype, out_dtype):
    ids, weights = routing()
    pairs = permute.sort_pairs(ids, E)
    y = torch.randn(M * TOP_K, K).to(dtype)
    y[pairs.experts == E] = float("nan")  # rows of experts held elsewhere hold anything
    y.requires_grad_()
    weights.requires_grad_()
    out_dtype = out_dtype or dtype
    got = permute.combine(y, weights, pairs, out_dtype)
    assert got.dtype == out_dtype
    want = torch.zeros(M, K, dtype=torch.float64)
    magnitude = torch.zeros(M, K, dtype=torch.float64)
    dots = torch.zeros(M, TOP_K, dtype=torch.float64)
    rows_grad = torch.zeros(M * TOP_K, K, dtype=torch.float64)
    grad = torch.randn(M, K).to(out_dtype)
    for row, (e, pair) in enumerate(listed(ids)):
        if e == E:
            continue
        m, j = divmod(pair, TOP_K)
        value, weight = y[row].detach().double(), weights[m, j].detach().double()
        want[m] += weight * value
        magnitude[m] += (weight * value).abs()
        dots[m, j] = (grad[m].double() * value).sum()
        rows_grad[row] = grad[m].double() * weight
    assert_rounded_once(got.detach(), want, magnitude)
    got.backward(grad)
    assert y.grad.dtype == dtype
    assert_rounded_once(y.grad, rows_grad, rows_grad.abs())
    torch.testing.assert_close(weights.grad.double(), dots, rtol=1e-5, atol=1e-5)


@half
@pytest.mark.parametrize("path", ["operator", "without the CPU kernels", "gradients", "compiled"])
def test_router_weights_are_not_rounded(path, dtype):
    """fused_experts in 16 bits with outputs of the experts that are small integers, exact
    everywhere.

    Expert e computes (e + 1) * x^2. Weights that agree in bf16 and fp16 give the sums of their
    fp32 values.
    """
    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 5, (M, K), generator=g).to(dtype)
    w13 = torch.eye(K, dtype=dtype).expand(TOP_K, K, K).contiguous()
    w2 = w13 * torch.arange(1, TOP_K + 1).view(TOP_K, 1, 1).to(dtype)
    ids = torch.stack([torch.randperm(TOP_K, generator=g) for _ in range(M)])
    # the large parts cancel: pairs of columns hold v + d and -v, and v + d rounds to v
    large = torch.tensor([64.0, -64.0]).repeat(TOP_K // 2)
    ids[:, 1::2] = ids[:, ::2]
    tail = torch.rand(M, TOP_K, generator=g) * 2.0**-6
    assert torch.equal((large + tail).to(dtype), large.to(dtype).expand(M, TOP_K))
    function = moe_ops.fused_experts
    if path == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    if path == "gradients":
        x.requires_grad_()
    kernels = {} if path == "without the CPU kernels" else cpu._kernels()
    for weights in (large + tail, large + tail.flip(0)):
        with mock.patch.object(cpu, "_kernels", lambda: kernels):
            got = function(x, w13, w2, weights, ids, activation="relu2_no_mul", backend="torch")
        want = oracle.experts(x, w13, w2, weights, ids, activation="relu2_no_mul").detach()
        magnitude = oracle.experts(x, w13, w2, weights.abs(), ids, activation="relu2_no_mul")
        assert want.abs().median() > 1e-2
        assert_rounded_once(got.detach(), want, magnitude.detach())
