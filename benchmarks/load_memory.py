"""Host memory that `from_pretrained` needs to quantize a bf16 checkpoint while it reads it.

    python benchmarks/load_memory.py [--gigabytes 4] [--scheme int4_w4a16] [--folder DIR]
                                     [--write]

Writes a synthetic Mixture-of-Experts checkpoint of random weights, in shards and with the tensor
names of Qwen3-MoE, then loads it in a fresh process and reports the peaks of its memory: private
(RssAnon, what the process holds) and resident (VmHWM, with the pages of mapped files, which the
system may drop). The target is the quantized model and one layer in bf16.
``--write`` keeps the numbers in benchmarks/results/load_memory_<gigabytes>GB.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from harness import format_table, machine_facts, write_json
from safetensors.torch import save_file
from tqdm import tqdm

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """A Qwen3-MoE of as many layers as the checkpoint's size asks for."""

    layers: int
    hidden: int = 2048
    intermediate: int = 768
    experts: int = 64
    vocabulary: int = 4096

    @property
    def layer_bytes(self) -> int:
        """bf16 bytes of one layer's experts and attention."""
        heads = 16 * 128
        attention = self.hidden * (2 * heads + 2 * 4 * 128)
        return 2 * (self.experts * (3 * self.intermediate * self.hidden + self.hidden) + attention)

    def config(self):
        import transformers

        return transformers.Qwen3MoeConfig(
            hidden_size=self.hidden,
            moe_intermediate_size=self.intermediate,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=self.experts,
            num_experts_per_tok=8,
            vocab_size=self.vocabulary,
            architectures=["Qwen3MoeForCausalLM"],
            dtype="bfloat16",
        )


def model_of(gigabytes: float) -> Model:
    return Model(max(1, round(gigabytes * GIB / Model(1).layer_bytes)))


def write_checkpoint(model: Model, folder: Path) -> None:
    """One shard for each layer, so that writing takes one layer of memory."""
    import transformers

    config = model.config()
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: tuple(p.shape)
            for name, p in transformers.Qwen3MoeForCausalLM(config).named_parameters()
        }
    generator = torch.Generator().manual_seed(0)
    shards: dict[str, dict] = {}
    for name, shape in shapes.items():
        layer = name.split(".")[2] if ".layers." in name else "other"
        shards.setdefault(layer, {})[name] = shape
    index = {}
    for number, entries in enumerate(tqdm(shards.values(), "writing", unit="shard")):
        tensors = {}
        for name, shape in entries.items():
            weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            tensors |= single_experts(name, weight)
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def single_experts(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that make up one parameter of the model."""
    if ".experts." not in name:
        return {name: weight}
    experts, _, last = name.rpartition(".")
    projections = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return {
        f"{experts}.{e}.{projection}.weight": part.clone()
        for e, expert in enumerate(weight)
        for projection, part in zip(projections, expert.chunk(len(projections)), strict=True)
    }


class PeakMemory(threading.Thread):
    """Samples this process's private memory every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.start_bytes = self.peak_bytes = status_bytes("RssAnon")
        self.running = True

    def run(self) -> None:
        while self.running:
            self.peak_bytes = max(self.peak_bytes, status_bytes("RssAnon"))
            time.sleep(0.005)


def status_bytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def load(folder: str, scheme: str) -> None:
    """In a process of its own: print what loading took, as JSON."""
    import transformers

    from moe_ops.integrations.transformers import MoeOpsConfig

    memory = PeakMemory()
    memory.start()
    begin = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=MoeOpsConfig(scheme)
    )
    seconds = time.perf_counter() - begin
    memory.running = False
    tensors = []
    for p in model.parameters():
        names = p.__tensor_flatten__()[0] if getattr(p, "scheme", None) else []
        tensors += [getattr(p, name) for name in names] or [p]
    result = {
        "seconds": seconds,
        "private_before": memory.start_bytes,
        "private_peak": memory.peak_bytes,
        "resident_peak": status_bytes("VmHWM"),
        "model": sum(t.numel() * t.element_size() for t in tensors),
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the bf16 checkpoint")
    parser.add_argument("--scheme", default="int4_w4a16")
    parser.add_argument("--folder", type=Path, help="where to write it (default: temporary)")
    parser.add_argument("--write", action="store_true", help="keep the numbers in results/")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        return load(args.load, args.scheme)
    model = model_of(args.gigabytes)
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        write_checkpoint(model, folder)
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        command = [sys.executable, __file__, "--load", str(folder), "--scheme", args.scheme]
        answer = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ
        )
    finally:
        shutil.rmtree(folder)
    measured = json.loads(answer.stdout.splitlines()[-1])
    report(args, model, size, measured)
    return None


def report(args, model: Model, size: int, measured: dict) -> None:
    needed = measured["private_peak"] - measured["private_before"]
    allowed = measured["model"] + model.layer_bytes
    rows = [
        ("bf16 checkpoint", size),
        ("quantized model", measured["model"]),
        ("one layer in bf16", model.layer_bytes),
        ("allowed: model and one layer", allowed),
        ("private memory, peak over before", needed),
        ("resident memory, peak, all", measured["resident_peak"]),
    ]
    print(format_table(("what", "GiB"), [(name, f"{value / GIB:.3f}") for name, value in rows]))
    print(
        f"{args.scheme}: loaded in {measured['seconds']:.0f} s, target "
        f"{'met' if needed <= allowed else 'MISSED'}"
    )
    if not args.write:
        return
    name = f"load_memory_{args.gigabytes:g}GB"
    result = {
        "scheme": args.scheme,
        "shape": asdict(model),
        "checkpoint": size,
        "layer": model.layer_bytes,
    }
    write_json(name, {**machine_facts(), **result, **measured})


if __name__ == "__main__":
    main()
