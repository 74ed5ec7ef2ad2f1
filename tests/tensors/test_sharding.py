"""Weights sharded over processes by experts: FSDP2 around a layer, DTensors in fused_experts."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_ops

SCHEMES = (
    "",
    "fp8_block",
    "fp8_tensor",
    "int8_w8a8",
    "int4_w4a16:g64:zp",
    "int4_w4a8",
    "nvfp4",
    "mxfp4_w4a16",
)
E = 4


def layer_of(scheme, num_experts=E):
    torch.manual_seed(0)
    layer = moe_ops.MoELayer(128, 128, num_experts=num_experts, top_k=2).requires_grad_(False)
    for name in ("gate_up_proj", "down_proj") if scheme else ():
        weight = moe_ops.quantize(getattr(layer.experts, name).detach(), scheme)
        setattr(layer.experts, name, nn.Parameter(weight, requires_grad=False))
    return layer


def data_of(weight):
    if not getattr(weight, "scheme", None):
        return [weight]
    return [
        getattr(weight, name)
        for name in weight.__tensor_flatten__()[0]
        if name != "activation_scale"
    ]


def run(rank, file, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    x, router = torch.randn(6, 128), torch.rand(6, 2) + 0.1
    ids = torch.stack([torch.randperm(E)[:2] for _ in range(6)])
    parts = [init(3) for init in (torch.zeros, torch.ones)]
    with pytest.raises(
        ValueError, match="qdata must be a plain tensor, got a DTensor; pass its to_local"
    ):
        moe_ops.from_quantized("fp8_block", *[DTensor.from_local(t, mesh) for t in parts])
    for scheme in SCHEMES:
        layer = layer_of(scheme)
        want = layer(x)
        weights = layer.experts.w13, layer.experts.down_proj
        straight = moe_ops.fused_experts(x, *weights, router, ids)
        half = slice(rank * E // world, (rank + 1) * E // world)
        for placement in (Shard(0), Replicate()):
            own = [w[half].detach() if placement == Shard(0) else w.detach() for w in weights]
            sharded = [DTensor.from_local(w, mesh, [placement]) for w in own]
            assert torch.equal(moe_ops.fused_experts(x, *sharded, router, ids), straight), scheme

        fully_shard(layer, mesh=mesh)
        for _ in range(2):  # the second time memory of the first is used again
            assert torch.equal(layer(x), want), scheme
        layer.reshard()
        local = layer.experts.down_proj.to_local()
        assert local.shape[0] == E // world
        assert getattr(local, "scheme", "") == getattr(weights[1], "scheme", "")
        for got, all_of_it in zip(data_of(local), data_of(weights[1]), strict=True):
            mine = all_of_it[half]
            assert torch.equal(
                got.contiguous().view(torch.uint8), mine.contiguous().view(torch.uint8)
            )
    if world == 2:
        odd = layer_of("fp8_block", num_experts=3)
        fully_shard(odd, mesh=mesh)
        with pytest.raises(ValueError, match="experts that the 2 processes of FSDP divide, got 3"):
            odd(x)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_processes(world, tmp_path):
    torch.multiprocessing.spawn(run, (str(tmp_path / "rendezvous"), world), nprocs=world)


def test_zeros_and_views():
    weight = moe_ops.quantize(torch.randn(4, 32, 64), "int4_w4a16:g32")
    zeros = weight.new_zeros((2, 32, 64))
    assert zeros.shape == (2, 32, 64) and not zeros.scale.any() and zeros.scheme == weight.scheme
    assert torch.equal(weight.view(4, 32, 64).dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match="differ in the number of experts alone"):
        weight.new_zeros((4, 32, 32))
    with pytest.raises(ValueError, match="a view of .* must have its shape"):
        weight.view(8, 16, 64)
    assert torch.equal(copy.deepcopy(weight).qdata, weight.qdata)
