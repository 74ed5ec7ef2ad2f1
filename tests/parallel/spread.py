"""What each process does with layers that `distribute` spread, against the whole ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moe_ops
from moe_ops.nn.distribute import distribute
from moe_ops.parallel.placement import Placement
from moe_ops.tensors import ExpertTensor
from tests.parallel import ranks
from tests.parallel.ranks import BF16, FP32, MOST, SCHEMES, E, H, difference, refused

CASES = (  # mesh dimension, whole experts, options
    ("dp", True, {"expert_placement": "round_robin"}),
    ("dp", False, {"all2all_backend": "all_to_all"}),
    ("tp", True, {}),
    ("tp", False, {}),
)


def model_of_layers(dtype: torch.dtype, width: int) -> nn.Module:
    options = {"shared_expert_intermediate_size": 32, "dtype": dtype}
    layers = [moe_ops.MoELayer(H, width, E, ranks.TOP_K, **options) for _ in range(2)]
    return nn.Sequential(*layers)


def quantize(model: nn.Module, scheme: str) -> nn.Module:
    for layer in model:
        for name, weight in list(layer.experts.named_parameters()):
            weight = moe_ops.quantize(weight.detach(), scheme)
            setattr(layer.experts, name, nn.Parameter(weight, requires_grad=False))
    return model


def distributed(rank: int, size: int) -> Iterator[tuple[str, float, float]]:
    """Layers that are quantized before and after they are spread, and plain ones."""
    device = torch.get_default_device().type
    for number, (dim, whole_experts, options) in enumerate(CASES):
        mesh = init_device_mesh(device, (size,), mesh_dim_names=(dim,))
        options = {
            "enable_expert_parallel": whole_experts,
            "max_num_tokens": size * MOST,
            **options,
        }
        for scheme in ("", SCHEMES[1 + number % (len(SCHEMES) - 1)]):
            name = f"distribute, {dim}, {whole_experts}, {scheme}"
            plain = model_of_layers(torch.bfloat16 if scheme else torch.float32, 128 * size)
            whole = quantize(copy.deepcopy(plain), scheme) if scheme else plain
            x = torch.randn(size * MOST, H, dtype=plain[0].gate.weight.dtype)
            mine = slice(rank * MOST, (rank + 1) * MOST - rank) if dim == "dp" else slice(None)
            want = whole(x)[mine]
            before = distribute(copy.deepcopy(whole), mesh, **options)
            got, most = before(x[mine]), (4 * BF16 if scheme else 2 * FP32)
            yield name, difference(got, want), most
            if scheme:
                after = quantize(distribute(copy.deepcopy(plain), mesh, **options), scheme)
                yield f"{name}, quantized afterwards", difference(after(x[mine]), got), 0.0
                kept = before[0].experts.down_proj
                count = len(Placement(E, size).experts_of(rank)) if whole_experts else E
                share = (count, H, 128 * size if whole_experts else 128)
                right = isinstance(kept, ExpertTensor) and kept.shape == share
                yield f"{name}, its share", float(not right), 0.0
    yield from refusals(rank, size, mesh)


def refusals(rank: int, size: int, mesh) -> Iterator[tuple[str, float, float]]:
    whole = model_of_layers(torch.float32, 128 * size)
    if rank == size - 1:
        whole[1].top_k = 1
    others = ", ".join(map(str, range(size - 1)))
    ranks_ = f"rank{'s' * (size > 2)} {others}"
    said = refused(lambda: distribute(whole, mesh))
    right = said.startswith(
        f"1 top_k must be equal on all ranks of the group, got 2 on {ranks_} and"
    )
    yield f"what distribute says of ranks that differ: {said}", float(not right), 0.0
    whole[1].top_k = ranks.TOP_K
    distribute(whole, mesh)
    said = refused(lambda: distribute(whole, mesh))
    right = said.startswith("layer '0' must hold all of its experts, got one that is spread")
    yield f"what distribute says the second time: {said}", float(not right), 0.0
