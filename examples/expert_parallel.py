"""Experts spread over processes: a layer, text of a transformers model, and a training step.

Every process holds some of the experts and has tokens of its own. A layer sends them to the
experts and the outputs back, so each process gets what a layer with all experts gives it. The tiny
model does the same inside transformers: each process reads its own experts, and quantizes them if
asked; the text is that of one process, and so is a training step with FSDP2 around the experts.

    torchrun --nproc-per-node 2 examples/expert_parallel.py

Started by python, it starts two such processes itself. Each has a GPU of its own where there are
as many, and they talk through NCCL; else they are on the CPU and talk through gloo. The model
wants transformers 5.23.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from common import check, max_error, title
from torch.distributed.device_mesh import init_device_mesh

from moe_ops import MoELayer, quantize
from moe_ops.nn.distribute import distribute

EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 128, 128, 2
PROMPTS = ("class Queue:\n    def __init__(self, items=None):\n", "def read(path):\n    ")
SCHEME = "int4_w4a16:g64"
# NVLink multicast, which NCCL would use, takes the GPUs of some hosts out of service.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def report(holds: bool, claim: str, value: float | None = None) -> None:
    """A claim that must hold on all processes; with the largest of their values."""
    found = torch.tensor([float(not holds), value or 0.0])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        shown = "" if value is None else f" (largest difference {found[1].item():.1e})"
        check(found[0].item() == 0, claim + shown)
    elif found[0].item():
        sys.exit(1)


def layer(tokens: int, device: str) -> None:
    """`distribute`: the layer on all processes, plain and with quantized weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    most = 1e-3 if device == "cuda" else 1e-5  # a GPU may multiply in tf32
    torch.manual_seed(0)  # the whole layer is the same everywhere, to compare with
    whole = MoELayer(HIDDEN, WIDTH, EXPERTS, TOP_K)
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))
    spread = distribute(copy.deepcopy(whole), mesh, max_num_tokens=max(tokens, 1))
    torch.manual_seed(rank + 1)
    own = max(tokens - rank, 0)  # fewer on each further process
    x = torch.randn(own, HIDDEN, requires_grad=True)

    def agree(claim: str, got: torch.Tensor, want: torch.Tensor) -> None:
        error = max_error(got.detach(), want.detach()) if own else 0.0
        report(error <= most, claim, error)

    if rank == 0:
        title(f"{EXPERTS} experts on {ranks} processes, up to {tokens} tokens each")
    agree("outputs are those of one process", spread(x), whole(x))
    upstream = torch.randn_like(x)
    (want,) = torch.autograd.grad(whole(x), x, upstream)
    (got,) = torch.autograd.grad(spread(x), x, upstream)
    agree("gradients of the tokens are those of one process", got, want)
    for name in ("gate_up_proj", "down_proj"):
        weight = quantize(getattr(whole.experts, name).detach(), "fp8_block")
        setattr(whole.experts, name, torch.nn.Parameter(weight, False))
    spread = distribute(copy.deepcopy(whole), mesh, max_num_tokens=max(tokens, 1))
    with torch.no_grad():
        agree("so are outputs of fp8_block experts", spread(x), whole(x))


def model(tokens: int, device: str) -> None:
    """transformers with ep_implementation="moe_ops"."""
    import tiny_moe.model as tiny
    from transformers import logging
    from transformers.distributed import DistributedConfig

    from moe_ops.integrations.transformers import MoeOpsConfig
    from moe_ops.tensors.sharding import local_experts, local_part

    logging.set_verbosity_error()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def load(dtype: torch.dtype, sizes: dict | None = None, scheme: str | None = None):
        options = {}
        if sizes:
            sizes = {**sizes, "ep_implementation": "moe_ops"}
            options["distributed_config"] = DistributedConfig(**sizes)
        if scheme:
            options["quantization_config"] = MoeOpsConfig(scheme)
        return tiny.load("moe_ops", dtype, device, **options)

    def text(language_model, prompt: str) -> str:
        ids = tiny.encode(prompt, device)
        mask = torch.ones_like(ids)
        out = language_model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False
        )
        return tiny.decode(out)

    def bytes_of(language_model) -> int:
        weights = [p for n, p in language_model.named_parameters() if ".experts." in n]
        return sum(local_part(w).nbytes for w in weights)

    own_tokens = {"fsdp_size": ranks, "ep_size": ranks}
    kinds = [("a prompt each", own_tokens, PROMPTS[rank % 2])]
    if ranks <= 2:  # each has one of the model's two key-value heads
        kinds.append(("one prompt", {"tp_size": ranks, "ep_size": ranks}, PROMPTS[0]))
    if rank == 0:
        title(f"the tiny model on {ranks} processes: {tokens} tokens of text")
    for scheme in (None, SCHEME):
        whole = load(torch.bfloat16, scheme=scheme)
        name = scheme or "bf16"
        for kind, sizes, prompt in kinds:
            spread = load(torch.bfloat16, sizes, scheme)
            share = bytes_of(spread) * ranks == bytes_of(whole)
            right = share and text(spread, prompt) == text(whole, prompt)
            claim = f"{name} experts, {kind}: the text of one process, a share of its experts each"
            report(right, claim)

    if rank == 0:
        title("a training step: expert parallelism inside FSDP2, a prompt for each process")
    whole, spread = load(torch.float32), load(torch.float32, own_tokens)

    def step(language_model, prompts: list[str]) -> torch.Tensor:
        """SGD on the mean of the prompts' losses, which FSDP2 takes over the processes."""
        language_model.train()
        optimizer = torch.optim.SGD(language_model.parameters(), lr=1.0)
        batches = [tiny.encode(prompt, device) for prompt in prompts]
        losses = [language_model(input_ids=ids, labels=ids).loss for ids in batches]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        return losses[-1].detach()

    most = 1e-2 if device == "cuda" else 1e-3
    got = step(spread, [PROMPTS[rank % 2]])
    want = step(
        whole, [PROMPTS[other % 2] for other in (*range(rank + 1, ranks), *range(rank + 1))]
    )
    error = max_error(got, want)
    report(error <= most, "the loss is that of one process", error)
    before = load(torch.float32)
    ours, old = dict(spread.named_parameters()), dict(before.named_parameters())
    errors = []
    for name, weight in whole.named_parameters():
        if ".mlp." in name:  # experts and routers, of which FSDP2 gives each process some rows
            rows = local_experts(ours[name])
            mine = slice(rows.start, rows.stop)
            got, want, start = local_part(ours[name]), weight[mine], old[name][mine]
            errors.append(max_error((got - start).detach(), (want - start).detach()))
    report(max(errors) <= most, "so is the change of experts and routers", max(errors))


def run(args: argparse.Namespace) -> None:
    cuda = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if cuda else "gloo")
    device = "cuda" if cuda else "cpu"
    layer(args.tokens, device)
    found = importlib.util.find_spec("transformers") is not None
    if found and importlib.util.find_spec("transformers.distributed.expert_parallel"):
        model(args.text, device)
    elif dist.get_rank() == 0:
        print("\ntransformers 5.23 or later is not installed: no model, no training step")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=9, help="of the first process's layer")
    parser.add_argument("--text", type=int, default=60, help="tokens to generate")
    args = parser.parse_args()
    for name, value in WITHOUT_MULTICAST.items():
        os.environ.setdefault(name, value)
    if "WORLD_SIZE" in os.environ:
        run(args)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv]).returncode)


if __name__ == "__main__":
    main()
