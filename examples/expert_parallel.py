"""A MoE layer whose experts are spread over processes, each with tokens of its own.

Every process holds some of the experts and passes as many tokens as it has. The layer sends tokens
to the experts and the outputs back, so each process gets what a layer with all experts gives it.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

Started by python, it starts two such processes itself. Each has a GPU of its own where there are
as many, and they talk through NCCL; else they are on the CPU and talk through gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from common import check, max_error, title

from moe_ops import MoEConfig, MoELayer, ParallelConfig, quantize
from moe_ops.parallel.placement import shard_experts

CONFIG = MoEConfig(
    num_experts=8,
    experts_per_token=2,
    hidden_dim=128,
    intermediate_size=128,
    in_dtype=torch.float32,
    max_num_tokens=16,
)
WEIGHTS = ("gate_up_proj", "down_proj")
# NVLink multicast, which NCCL would use, takes the GPUs of some hosts out of service.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def spread(whole: MoELayer, config: MoEConfig) -> MoELayer:
    """The layer on all processes: this one's experts, and the router, which every one has."""
    layer = MoELayer.from_config(config, group=dist.group.WORLD)
    state = whole.state_dict()
    for name in WEIGHTS:
        key = f"experts.{name}"
        state[key] = shard_experts(state[key], config.placement, config.parallel.ep_rank)
    layer.load_state_dict(state)
    return layer


def worst(error: float) -> float:
    """The largest of all processes' errors."""
    errors = torch.tensor([error])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return errors.item()


def run(tokens: int) -> None:
    cuda = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if cuda else "gloo")
    most = 1e-3 if cuda else 1e-5  # a GPU may multiply in tf32
    parallel = ParallelConfig.from_torchrun(enable_expert_parallel=True)
    rank, ranks = parallel.ep_rank, parallel.ep_size
    torch.manual_seed(0)  # the whole layer is the same everywhere, to compare with
    whole = MoELayer.from_config(CONFIG)
    config = dataclasses.replace(CONFIG, parallel=parallel, num_local_experts=None)
    layer = spread(whole, config)
    torch.manual_seed(rank + 1)
    own = max(tokens - rank, 0)  # fewer on each further process
    x = torch.randn(own, CONFIG.hidden_dim, requires_grad=True)

    def report(error: float, most: float, claim: str) -> None:
        error = worst(error)
        if rank == 0:
            check(error <= most, f"{claim} (largest difference {error:.1e})")

    def difference(got: torch.Tensor, want: torch.Tensor) -> float:
        return max_error(got.detach(), want.detach()) if own else 0.0

    if rank == 0:
        title(f"{CONFIG.num_experts} experts on {ranks} processes, up to {tokens} tokens each")
    report(difference(layer(x), whole(x)), most, "outputs are those of one process")

    upstream = torch.randn_like(x)
    (want,) = torch.autograd.grad(whole(x), x, upstream)
    (got,) = torch.autograd.grad(layer(x), x, upstream)
    report(difference(got, want), most, "gradients of the tokens are those of one process")

    for name in WEIGHTS:
        weight = quantize(getattr(whole.experts, name).detach(), "fp8_block")
        shard = shard_experts(weight, config.placement, rank)
        setattr(whole.experts, name, torch.nn.Parameter(weight, False))
        setattr(layer.experts, name, torch.nn.Parameter(shard, False))
    with torch.no_grad():
        report(difference(layer(x), whole(x)), most, "so are outputs of fp8_block experts")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=9, help="of the first process, at most 16")
    args = parser.parse_args()
    for name, value in WITHOUT_MULTICAST.items():
        os.environ.setdefault(name, value)
    if "WORLD_SIZE" in os.environ:
        run(args.tokens)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv]).returncode)


if __name__ == "__main__":
    main()
