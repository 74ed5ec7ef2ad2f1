"""Time and host memory of `from_pretrained` with MoeOpsConfig, of one checkout beside another.

    python benchmarks/loading.py [CHECKOUT ...] [--gb 4] [--formats int4 fp8 nvfp4 gptq bf16]
                                 [--repeats 1] [--device cpu] [--folder DIR] [--write]

Writes a synthetic checkpoint of Qwen3-MoE layers for each format (compressed-tensors' int4 and
NVFP4, fine-grained fp8, GPTQ; bf16 is quantized to int4_w4a16 while it is read), in shards and
with the names of the files that people have, and loads it from the file cache in fresh processes,
the checkouts in turns. Reports the fastest time, CPU seconds, the peak of private memory (RssAnon,
what the process holds) above what it held before, and whether that is at most the model and one
layer as the files hold it. The checkouts' models must be equal, bit for bit.
``--write`` keeps the numbers in benchmarks/results/loading_<gb>GB_<threads>threads.json.
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
import zlib
from pathlib import Path

import numpy as np
import torch

GIB = 2**30
HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 128
PROJECTIONS = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
ELEMENTS = ("weight", "weight_packed", "qweight")
_RNG = np.random.default_rng(0)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.from_numpy(_RNG.integers(0, 256, shape, np.uint8))


def int4(n: int, k: int) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": random_bytes(n, k // 2).view(torch.int32),
        "weight_scale": torch.rand(n, k // 128).bfloat16(),
        "weight_shape": torch.tensor([n, k]),
    }


def fp8(n: int, k: int) -> dict[str, torch.Tensor]:
    return {
        "weight": (random_bytes(n, k) & 0xF7).view(torch.float8_e4m3fn),  # no NaN
        "weight_scale_inv": torch.rand(n // 128, k // 128),
    }


def nvfp4(n: int, k: int) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": random_bytes(n, k // 2),
        "weight_scale": (random_bytes(n, k // 16) & 0x77).view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([100.0]),
        "input_global_scale": torch.tensor([10.0]),
    }


def gptq(n: int, k: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": random_bytes(k // 8, n * 4).view(torch.int32),
        "qzeros": torch.full((k // 128, n // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.rand(k // 128, n).half(),
        "g_idx": (torch.arange(k) // 128).int(),
    }


def bf16(n: int, k: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randn(n, k).mul_(0.02).bfloat16()}


def _compressed(form: str, weights: dict, activations: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_INT4 = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
}
_NVFP4 = _INT4 | {"type": "float", "strategy": "tensor_group", "group_size": 16}
FORMATS = {
    "int4": (int4, _compressed("pack-quantized", _INT4)),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nvfp4": (nvfp4, _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"})),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}),
    "bf16": (bf16, None),
}


def write_checkpoint(form: str, gigabytes: float, folder: Path) -> tuple[int, int]:
    """Files of about that many 10^9 bytes, one for each layer; returns their bytes and those of
    one layer. The values of all layers are the same, but for the first element of each matrix.
    """
    import transformers
    from safetensors.torch import save_file

    make, quantization = FORMATS[form]
    experts = {
        f"{e}.{name}.{role}": t
        for e in range(EXPERTS)
        for name, shape in PROJECTIONS.items()
        for role, t in make(*shape).items()
    }
    layer_bytes = sum(t.nbytes for t in experts.values())
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / layer_bytes)),
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=EXPERTS,
        num_experts_per_tok=8,
        vocab_size=4096,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    if quantization:
        said = json.loads((folder / "config.json").read_text())
        said["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(said))
    with torch.device("meta"):
        parameters = dict(transformers.Qwen3MoeForCausalLM(config).named_parameters())
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, p in parameters.items():
        shard = name.split(".")[2] if ".layers." in name else "other"
        if ".experts." not in name:
            weight = torch.randn(p.shape).mul_(0.02).bfloat16()
            shards.setdefault(shard, {})[name] = weight
    index = {}
    for number, (shard, tensors) in enumerate(shards.items()):
        if shard != "other":
            for name, t in experts.items():
                if name.endswith(ELEMENTS):
                    t.view(-1).view(torch.uint8)[0] = number
                tensors[f"model.layers.{shard}.mlp.experts.{name}"] = t
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")), layer_bytes


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


def load(folder: str, scheme: str | None, device: str) -> None:
    """In a process of its own: print what loading took, as JSON."""
    import transformers

    import moe_ops
    from moe_ops.integrations.transformers import MoeOpsConfig

    torch.zeros(1, device=device)
    memory, cpu, begin = PeakMemory(), os.times(), time.perf_counter()
    memory.start()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=MoeOpsConfig(scheme), device_map={"": device}
    )
    if device != "cpu":
        torch.cuda.synchronize()
    seconds, after = time.perf_counter() - begin, os.times()
    memory.running = False
    tensors = []
    for p in model.parameters():
        names = p.__tensor_flatten__()[0] if getattr(p, "scheme", None) else []
        tensors += [getattr(p, name) for name in names] or [p]
    digest = 1
    for t in tensors:
        data = t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest = zlib.adler32(data, digest)
    result = {
        "moe_ops": str(Path(moe_ops.__file__).parents[1]),
        "seconds": seconds,
        "cpu_seconds": after.user + after.system - cpu.user - cpu.system,
        "private": memory.peak_bytes - memory.start_bytes,
        "resident_peak": status_bytes("VmHWM"),
        "model": sum(t.nbytes for t in tensors),
        "digest": digest,
    }
    if device != "cpu":
        result["device_peak"] = torch.cuda.max_memory_allocated()
    print(json.dumps(result))


def measure(checkout: Path, folder: Path, form: str, device: str) -> dict:
    command = [sys.executable, __file__, "--load", str(folder), "--device", device]
    command += ["--scheme", "int4_w4a16"] if form == "bf16" else []
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    answer = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    if answer.returncode:
        raise SystemExit(answer.stderr[-4000:])
    found = json.loads(answer.stdout.splitlines()[-1])
    assert Path(found.pop("moe_ops")) == checkout, checkout
    return found


def compare(form: str, args: argparse.Namespace) -> dict:
    """One format, by all checkouts in turns."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        size, layer = write_checkpoint(form, args.gb, folder)
        turns = [
            [measure(checkout, folder, form, args.device) for checkout in args.checkouts]
            for _ in range(args.repeats)
        ]
    finally:
        shutil.rmtree(folder)
    if len({found["digest"] for turn in turns for found in turn}) > 1:
        raise SystemExit(f"{form}: the checkouts' models differ")
    best = [
        {name: min(found[name] for found in runs) for name in ("seconds", "cpu_seconds")}
        | {name: max(found[name] for found in runs) for name in runs[0] if "seconds" not in name}
        for runs in zip(*turns, strict=True)
    ]
    return {"checkpoint": size, "layer": layer, "checkouts": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parents[1].resolve()
    parser.add_argument("checkouts", nargs="*", type=Path, help="the older first; default: this")
    parser.add_argument("--gb", type=float, default=4.0, help="10^9 bytes of each checkpoint")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS][:4])
    parser.add_argument("--repeats", type=int, default=1, help="loads by each checkout")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where to write files (default: temporary)")
    parser.add_argument("--write", action="store_true", help="keep the numbers in results/")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--scheme", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        return load(args.load, args.scheme, args.device)
    from harness import format_table, machine_facts, write_json

    args.checkouts = [path.resolve() for path in args.checkouts] or [here]
    header = ("format", "checkout", "s", "CPU s", "times as fast", "peak GiB", "allowed", "met")
    rows, results = [], {}
    for form in args.formats:
        found = results[form] = compare(form, args)
        for path, run in zip(args.checkouts, found["checkouts"], strict=True):
            allowed = found["layer"] + (run["model"] if args.device == "cpu" else 0)
            ratio = found["checkouts"][0]["seconds"] / run["seconds"]
            peak, most = run["private"] / GIB, allowed / GIB
            met = "yes" if peak <= most else "NO"
            times = f"{run['seconds']:.1f}", f"{run['cpu_seconds']:.1f}", f"{ratio:.2f}"
            rows.append((form, path.name, *times, f"{peak:.3f}", f"{most:.3f}", met))
        print(format_table(header, rows[-len(args.checkouts) :]), flush=True)
        if args.write:
            on = "" if args.device == "cpu" else f"_{args.device}"
            name = f"loading_{args.gb:g}GB_{torch.get_num_threads()}threads{on}"
            facts = {"device": args.device, "repeats": args.repeats, "formats": results}
            write_json(name, {**machine_facts(), **facts})
    return None


if __name__ == "__main__":
    main()
