"""What each process of a group does with the tiny model under transformers' expert parallelism,
against the same model in one process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM, logging
from transformers.distributed import DistributedConfig

import moe_ops.integrations.transformers as moe_transformers
from moe_ops.integrations.checkpoints.files import TensorFiles
from moe_ops.tensors import sharding
from tests.support.paths import EXAMPLES

sys.path.insert(0, str(EXAMPLES))
from tiny_moe.model import HERE, encode

SCHEME = "int4_w4a16:g64"
# of different lengths, so that ranks have different numbers of tokens
PROMPTS = ("class Queue:\n    def __init__(self, items=None):\n", "def read(", "import ", "x")
EXPERTS = "model.layers.{}.mlp.experts"
# ranks that have the same tokens, and ranks that have their own
SIZES = {"tp": {"tp_size": 2, "ep_size": 2}, "fsdp": {"fsdp_size": 2, "ep_size": 2}}
Models = dict[str, Qwen3MoeForCausalLM]  # by the names of SIZES


def load(dtype=torch.bfloat16, scheme=None, path=HERE, **sizes):
    """The model, whole or as DistributedConfig's sizes say."""
    options = {}
    if sizes:
        options["distributed_config"] = DistributedConfig(ep_implementation="moe_ops", **sizes)
    if scheme is not None:
        options["quantization_config"] = moe_transformers.MoeOpsConfig(scheme or None)
    model = Qwen3MoeForCausalLM.from_pretrained(
        path, dtype=dtype, experts_implementation="moe_ops", **options
    )
    return model.eval()


def text(model, prompt: str) -> list[int]:
    ids = encode(prompt)
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False).tolist()


def experts(model, name: str, layer: int = 0):
    return getattr(model.get_submodule(EXPERTS.format(layer)), name)


def parts(weight) -> list[torch.Tensor]:
    if not hasattr(weight, "scheme"):
        return [weight]
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


def same(got, want) -> bool:
    pairs = list(zip(parts(got), parts(want), strict=True))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def saved_alike(model, whole, folder: Path, rank: int) -> bool:
    """Whether both write the same tensors."""
    model.save_pretrained(folder / "ranks")
    if rank:
        return True
    whole.save_pretrained(folder / "one")
    got, want = (load_file(folder / name / "model.safetensors") for name in ("ranks", "one"))
    return got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want)


def plain(models: Models, rank: int, folder: Path) -> Iterator[tuple[str, bool]]:
    whole = load()
    for name, model in models.items():
        prompt = PROMPTS[rank if name == "fsdp" else 0]
        yield f"text, {name}", text(model, prompt) == text(whole, prompt)
        held = sharding.local_part(experts(model, "down_proj").detach())
        yield f"experts, {name}", same(held, experts(whole, "down_proj")[4 * rank :][:4])
        yield f"saved, {name}", saved_alike(model, whole, folder / name, rank)


def quantized(whole, rank: int, folder: Path) -> Iterator[tuple[str, bool]]:
    """On loading, and from what the ranks saved."""
    read, bytes_read = TensorFiles.read, []

    def counted(self, name, *args, **options):
        tensor = read(self, name, *args, **options)
        bytes_read.append(tensor.nbytes)
        return tensor

    weights = [p for n, p in whole.named_parameters() if ".experts." in n]
    plain_bytes = sum(2 * w.numel() for w in weights)
    stored_bytes = sum(part.nbytes for w in weights for part in parts(w))
    TensorFiles.read = counted
    for name, path, scheme, size in (
        ("tp", HERE, SCHEME, plain_bytes),
        ("fsdp", HERE, SCHEME, plain_bytes),
        ("fsdp", folder / "ranks", "", stored_bytes),
    ):
        bytes_read.clear()
        model = load(scheme=scheme, path=path, **SIZES[name])
        name = f"{name} from {path.name}"
        yield f"half of the bytes, {name}", sum(bytes_read) == size // 2
        for weight in ("gate_up_proj", "down_proj"):
            held = sharding.local_part(experts(model, weight))
            yield f"{weight}, {name}", same(held, experts(whole, weight)[4 * rank :][:4])
        prompt = PROMPTS[rank if "fsdp" in name else 0]
        yield f"text, {name}", text(model, prompt) == text(whole, prompt)
        yield f"saved, {name}", saved_alike(model, whole, folder, rank)
    TensorFiles.read = read
    for call, right in (
        (
            lambda: model.save_pretrained(folder / "shards", distributed_checkpoint=True),
            "distributed_checkpoint must be False for quantized experts",
        ),
        (
            lambda: load(scheme=SCHEME, tp_size=2),
            f"{EXPERTS.format(0)}.down_proj must be replicated or sharded along experts",
        ),
    ):
        said = refused(call)
        yield f"what is said: {said}", said.startswith(right)


def refused(call) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def quantized_later(models: Models, whole, rank: int) -> Iterator[tuple[str, bool]]:
    said = refused(lambda: moe_transformers.quantize(models["fsdp"], SCHEME))
    yield f"what is said: {said}", "must be quantized before its model is first called" in said
    for name, model in (("tp", models["tp"]), ("fsdp", load(**SIZES["fsdp"]))):
        report = moe_transformers.quantize(model, SCHEME)
        check = "FSDP wants the whole model" if name == "fsdp" else "differs from its own forward"
        yield f"report, {name}: {report}", all(check in layer.check for layer in report.layers)
        held = sharding.local_part(experts(model, "down_proj", 3))
        yield (
            f"quantized later, {name}",
            same(held, experts(whole, "down_proj", 3)[4 * rank :][:4]),
        )
        prompt = PROMPTS[rank if name == "fsdp" else 0]
        yield f"text, quantized later, {name}", text(model, prompt) == text(whole, prompt)


def loss(model, prompt: str) -> torch.Tensor:
    ids = encode(prompt)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    got = sharding.gathered(got) if sharding.is_sharded(got) else got
    return float((got - want).norm() / want.norm())


def gradients(whole, batches: int, **sizes: int) -> Iterator[tuple[str, bool]]:
    """Each tensor-parallel group has a prompt of its own; their losses are averaged."""
    model = load(torch.float32, **sizes)
    mine = dist.get_rank() // (dist.get_world_size() // batches)
    want = torch.stack([loss(whole, prompt) for prompt in PROMPTS[:batches]])
    got = loss(model, PROMPTS[mine])
    yield f"loss with {sizes}", abs((got - want[mine]).item()) <= 1e-5
    whole.zero_grad()
    want.mean().backward()
    got.backward()
    others = dict(model.named_parameters())
    for layer in (0, 3):
        for name in ("experts.gate_up_proj", "experts.down_proj", "gate.weight"):
            name = f"model.layers.{layer}.mlp.{name}"
            error = difference(others[name].grad, whole.get_parameter(name).grad)
            yield f"gradient of {name} with {sizes}: {error:.1e}", error <= 1e-4


def compiled(model) -> Iterator[tuple[str, bool]]:
    """Where all ranks have the same tokens, a layer is one graph for any number of them."""
    module = model.get_submodule(EXPERTS.format(1))
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(module.forward, fullgraph=True, dynamic=True, backend=backend)
    for M in (3, 5):
        ids = torch.stack([torch.randperm(8)[:2] for _ in range(M)])
        tokens = torch.randn(M, 128).bfloat16(), ids, torch.rand(M, 2).bfloat16()
        with torch.no_grad():
            yield f"compiled, {M} tokens", torch.equal(call(*tokens), module(*tokens))
    yield f"{len(graphs)} graphs", len(graphs) == 1


def faults(models: Models, rank: int) -> Iterator[tuple[str, bool]]:
    """The last rank ends, and the other says which layer missed it."""
    dist.barrier()
    if rank:
        os._exit(0)
    layer = EXPERTS.format(2)
    tokens = torch.randn(3, 128).bfloat16(), torch.zeros(3, 2).long(), torch.rand(3, 2)
    for model in models.values():
        # the forward alone: FSDP's own hooks would miss the other rank first
        forward = model.get_submodule(layer).forward
        said = refused(lambda forward=forward: forward(*tokens))
        right = f"{layer} could not exchange tokens with the other ranks: one of them ended, or"
        yield f"what a layer says: {said}", said.startswith(right)


def two(rank: int, folder: Path) -> Iterator[tuple[str, bool]]:
    models = {name: load(**sizes) for name, sizes in SIZES.items()}
    yield from plain(models, rank, folder)
    yield from compiled(models["tp"])
    whole = load(scheme=SCHEME)
    yield from quantized(whole, rank, folder)
    yield from quantized_later(models, whole, rank)
    whole = load(torch.float32)
    yield from gradients(whole, 1, **SIZES["tp"])
    yield from gradients(whole, 2, **SIZES["fsdp"])
    yield from faults(models, rank)


def four(rank: int, folder: Path) -> Iterator[tuple[str, bool]]:
    """Ranks that share tokens beside ranks that do not; each expert in shares of FSDP."""
    yield from gradients(load(torch.float32), 2, tp_size=2, fsdp_size=2, ep_size=4)
    whole, model = load(scheme=SCHEME), load(scheme=SCHEME, fsdp_size=4, ep_size=2)
    first = 4 * (rank % 2) + 2 * (rank // 2)
    held = sharding.local_part(experts(model, "gate_up_proj"))
    yield "quarters", same(held, experts(whole, "gate_up_proj")[first : first + 2])
    with torch.no_grad():
        got, want = (m(input_ids=encode(PROMPTS[rank])).logits for m in (model, whole))
    yield "logits", difference(got.float(), want.float()) <= 2e-2


def run(rank: int, size: int, folder: str, seconds: float) -> None:
    """All cases; whether each held goes to a file of this rank."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    torch.manual_seed(3)
    with Path(folder, f"{rank}.json").open("w") as file:
        for found in {2: two, 4: four}[size](rank, Path(folder)):
            print(json.dumps(found), file=file, flush=True)
    os._exit(0)  # no rank waits for one that ended
