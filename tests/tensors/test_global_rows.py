"""NVFP4 weights with a global scale for each row: views, copies, shares and files."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops.parallel.columns import shard_w2, shard_w13
from moe_ops.tensors import flatten, unflatten
from tests.support import oracle
from tests.support.cases import with_global_rows
from tests.tensors.test_e4m3 import same, sample

E, N, K = 4, 96, 64


def of_experts(seed: int = 0):
    return moe_ops.quantize(sample(E, N, K, seed=seed), "nvfp4")


def of_rows(seed: int = 0):
    return with_global_rows(of_experts(seed), seed)


def test_values():
    q = of_rows()
    assert q.global_scale.shape == (E, N, 1) and q.shape == (E, N, K)
    want = oracle.weight(q)
    torch.testing.assert_close(q.dequantize(torch.float32).double(), want, rtol=2e-7, atol=0)
    assert oracle.relative_error(of_experts().dequantize(), want) > 0.1
    alike = of_experts()
    rows = alike.global_scale[:, None, None].expand(E, N, 1)
    assert torch.equal(alike._replace(global_scale=rows).dequantize(), alike.dequantize())


VIEWS = {
    "experts": lambda t: t[1:3],
    "one expert": lambda t: t[2],
    "experts by number": lambda t: t[torch.tensor([3, 0])],
    "rows": lambda t: t[:, 10:50],
    "every third row": lambda t: t[:, 1::3],
    "rows of one": lambda t: t[1][5:9],
    "columns": lambda t: t[:, :, 16:48],
    "up": lambda t: t.chunk(2, 1)[1],
    "no rows": lambda t: t[:, 7:7],
    "transposed": lambda t: t.mT,
    "columns of the transposed": lambda t: t.mT[:, :, 30:41],
    "rows of the transposed": lambda t: t.mT[:, 32:64],
    "there and back": lambda t: t[2].T[16:32].T[4:],
    "flat": lambda t: t.view(-1),
    "flat and back": lambda t: t.view(-1).view(E, N, K),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views(view):
    q = of_rows()
    got, want = VIEWS[view](q), VIEWS[view](q.dequantize())
    assert got.shape == want.shape and torch.equal(got.dequantize(), want)
    assert torch.equal(got.clone().dequantize(), want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_shares_of_tensor_parallelism(interleaved):
    q = of_rows()
    for rank in range(2):
        got = shard_w13(q, 2, rank, interleaved=interleaved)
        want = shard_w13(q.dequantize(), 2, rank, interleaved=interleaved)
        assert torch.equal(got.dequantize(), want)
        assert torch.equal(shard_w2(q, 2, rank).dequantize(), shard_w2(q.dequantize(), 2, rank))


def test_files():
    q = of_rows()
    for weight in (q, q[1], q.mT):
        tensors, metadata = flatten({"w": weight})
        assert same(unflatten(tensors, metadata)["w"], weight)
        file = io.BytesIO()
        torch.save(weight, file)
        file.seek(0)
        assert same(torch.load(file, weights_only=True), weight)
    tensors, metadata = flatten({"w": q})
    tensors["w.global_scale"] = tensors["w.global_scale"][:, 1:]
    with pytest.raises(ValueError, match=r"w: global_scale must have shape \(4, 96, 1\)"):
        unflatten(tensors, metadata)


def test_copies():
    """One of an expert is that of each row; those of rows have no room in one."""
    q, alike = of_rows(), of_experts(1)
    target = q.clone()
    target.copy_(alike)
    assert torch.equal(target.dequantize(), alike.dequantize())
    assert target.global_scale.shape == (E, N, 1)
    target.copy_(q)
    assert same(target, q)
    with pytest.raises(ValueError, match="one of an expert cannot hold those of its rows"):
        alike.copy_(q)
    assert same(alike, of_experts(1))
    module = nn.Module()
    module.w = nn.Parameter(of_experts(1), requires_grad=False)
    module.load_state_dict({"w": q}, assign=True)
    assert same(module.w.detach(), q)


@pytest.mark.parametrize("shape", [(E, N), (E, N + 1, 1), (E, 1, 1), (E, N, 2), (N, 1)])
def test_other_shapes_are_refused(shape):
    q = of_experts()
    parts = {"qdata": q.qdata, "scale": q.scale}
    with pytest.raises(ValueError, match=r"global_scale must have shape \(4, 96, 1\) for scheme"):
        moe_ops.from_quantized("nvfp4", **parts, global_scale=torch.ones(shape))
    rows = with_global_rows(q).global_scale
    assert same(moe_ops.from_quantized("nvfp4", **parts, global_scale=rows), of_rows())
    x, ids = torch.randn(3, K), torch.zeros(3, 1, dtype=torch.int32)
    wrong = q._replace(global_scale=torch.ones(shape))
    w2 = moe_ops.quantize(sample(E, K, N // 2), "nvfp4")
    with pytest.raises(ValueError, match=r"w13's global_scale must have shape \(4, 96, 1\)"):
        moe_ops.fused_experts(x, wrong, w2, torch.ones(3, 1), ids)
    rows[1, 5] = 0
    with pytest.raises(ValueError, match="global_scale must be positive, got 0.0"):
        moe_ops.from_quantized("nvfp4", **parts, global_scale=rows)


def test_layouts():
    """What other backends read keeps the order of rows; flashinfer's scales an expert as one."""
    q = of_rows()
    ready = moe_ops.prepare(q, "cutlass")
    assert torch.equal(ready.dequantize(), q.dequantize())
    assert same(moe_ops.prepare(ready, "torch"), q)
    static = q._replace(activation_scale=torch.tensor(0.01))
    with pytest.raises(ValueError, match="must have one global scale for each expert"):
        moe_ops.prepare(static, "flashinfer", activation="silu")
