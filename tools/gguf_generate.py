"""A small MoE that llama.cpp quantizes, generating through transformers and moe_ops on a CPU.

    python examples/tiny_moe/train.py --width 256 --steps 500 --batch-size 4 --lr 2e-3 \\
        --experts grouped_mm --out MODEL
    python -m tools.gguf_generate --sources FOLDER --model MODEL [--files FILES] [--write]
    python -m tools.gguf_generate --model MODEL --files FILES --device cuda [--out JSON]

MODEL becomes GGUF by llama.cpp's converter and quantizer (`tools.llama_cpp` says what FOLDER is).
Of each preset the model with packed experts and fp32 activations must write the greedy text of the
model that has the file's numbers in fp32, as the `gguf` package dequantizes them; and the
perplexities of both over held-out bytes stand beside that of llama.cpp, which rounds activations
to 8 bits. ``--write`` keeps them in benchmarks/results/gguf_generate.json, and makes the table of
docs/gguf.md anew, in which ON_GPU, another machine's JSON, stands beside if it is of the same
files. ``--files`` keeps the GGUF files, and what llama.cpp gave for them; without ``--sources``
both are read from there, where there is no llama.cpp, and of MODEL only config.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools import llama_cpp

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "gguf_generate.json"
ON_GPU = RESULT.with_name("gguf_generate_NVIDIA_H200.json")  # `--out` of a machine with this GPU
DOCUMENT = ROOT / "docs" / "gguf.md"
MARKS = "<!-- made by tools/gguf_generate.py -->\n", "<!-- end -->\n"
PRESETS = {
    "Q4_K_M": llama_cpp.Q4_K_M,
    "Q8_0": llama_cpp.Q8_0,
    "MXFP4_MOE": llama_cpp.MXFP4_MOE,
}
WINDOW, WINDOWS, BATCH = 256, 64, 8  # of held-out bytes
PROMPTS = [slice(i, i + 64) for i in range(20_000, 60_000, 5_000)]  # of those behind them
NEW_TOKENS = 160
LIMIT = 0.005  # of the difference of perplexities
BESIDE = "llama_cpp.json"  # llama.cpp's perplexities, beside the files
NAMES = {  # of a layer of qwen3moe
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_gate_inp": "mlp.gate.weight",
}
OUTSIDE = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}


def dequantized(model: Path, path: Path) -> tuple[Any, dict[str, int]]:
    """The plain fp32 model of a file's numbers, and how many tensors of experts have each type."""
    import gguf
    import transformers

    found, types = {}, Counter[str]()
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name.removesuffix(".weight")] = torch.from_numpy(values.copy())
        if "_exps" in tensor.name:
            types[tensor.tensor_type.name] += 1
    config = transformers.AutoConfig.from_pretrained(model)
    state = {to: found[name] for name, to in OUTSIDE.items()}
    for i in range(config.num_hidden_layers):
        layer = {to: found[f"blk.{i}.{name}"] for name, to in NAMES.items()}
        gate, up, down = (found[f"blk.{i}.ffn_{of}_exps"] for of in ("gate", "up", "down"))
        layer |= {"mlp.experts.gate_up_proj": torch.cat((gate, up), 1)}
        layer |= {"mlp.experts.down_proj": down}
        state |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    config.experts_implementation = "eager"
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.load_state_dict(state)
    return plain, dict(types)


def greedy(model: Any, prompts: list[bytes]) -> list[bytes]:
    """The continuations of prompts of one length."""
    ids = torch.tensor([[*prompt] for prompt in prompts], device=model.device)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return [bytes(row) for row in made[:, ids.shape[1] :].tolist()]


def perplexity(logits_of: Callable[[list[list[int]]], Tensor], text: bytes) -> float:
    """exp of the mean of -log p over all bytes but the first of each window."""
    windows = [[*text[i * WINDOW : (i + 1) * WINDOW]] for i in range(WINDOWS)]
    total = 0.0
    for i in range(0, WINDOWS, BATCH):
        ids = windows[i : i + BATCH]
        logits = logits_of(ids)[:, :-1].flatten(0, 1).double().cpu()
        following = torch.tensor(ids)[:, 1:].flatten()
        total += torch.nn.functional.cross_entropy(logits, following, reduction="sum").item()
    return math.exp(total / (WINDOWS * (WINDOW - 1)))


def logits_of(model: Any) -> Callable[[list[list[int]]], Tensor]:
    """The logits of windows of token ids, (windows, their length, vocabulary)."""
    return lambda ids: model(torch.tensor(ids, device=model.device)).logits


@torch.no_grad()
def measure(
    model: Path, path: Path, text: bytes, device: str = "cpu", beside: float | None = None
) -> dict[str, Any]:
    """What one file gives, ``beside`` llama.cpp's perplexity, which is taken here if None."""
    import transformers

    from moe_ops.integrations.transformers import MoeOpsConfig

    plain, types = dequantized(model, path)
    plain.to(device)
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=MoeOpsConfig(),
        dtype=torch.float32,
        device_map=device,
    ).eval()
    found = {"moe_ops": perplexity(logits_of(packed), text)}
    found["dequantized"] = perplexity(logits_of(plain), text)
    if beside is None:
        forward = llama_cpp.Forward(path, WINDOW)
        beside = perplexity(lambda ids: torch.stack([forward.logits(one) for one in ids]), text)
    found["llama.cpp"] = beside
    experts = [n for n, _ in packed.named_parameters() if ".experts." in n]
    prompts = [text[part] for part in PROMPTS]
    texts = [*zip(greedy(packed, prompts), greedy(plain, prompts), strict=True)]
    return {
        "types": types,
        "schemes": sorted({packed.get_parameter(name).scheme for name in experts}),
        "same_texts": sum(got == want for got, want in texts),
        "texts": len(texts),
        "different_bytes": len({byte for got, _ in texts for byte in got}),
        "text": texts[0][0].decode(errors="replace"),
        "perplexity": found,
    }


def check(result: dict[str, Any]) -> None:
    """Raise AssertionError unless a file gives what it must."""
    found = result["perplexity"]
    assert result["same_texts"] == result["texts"] and result["different_bytes"] > 20, result
    assert abs(found["moe_ops"] / found["dequantized"] - 1) < 1e-5, found
    assert abs(found["moe_ops"] / found["llama.cpp"] - 1) < LIMIT, found


def on_gpu(results: dict[str, Any]) -> dict[str, Any]:
    """What a GPU gave for the presets, if its files were those of `results`."""
    presets = json.loads(ON_GPU.read_text())["presets"] if ON_GPU.exists() else {}

    def of_llama_cpp(found: dict[str, Any]) -> dict[str, float]:
        return {preset: of["perplexity"]["llama.cpp"] for preset, of in found.items()}

    return presets if of_llama_cpp(presets) == of_llama_cpp(results["presets"]) else {}


def table(results: dict[str, Any]) -> str:
    """The rows of docs/gguf.md."""
    rows = [
        "| preset | types of the experts' tensors | same texts | perplexity | on an H200 "
        "| of llama.cpp |",
        "|---|---|---|---|---|---|",
    ]
    beside = on_gpu(results)
    for preset, found in results["presets"].items():
        types = ", ".join(f"{count} {name}" for name, count in sorted(found["types"].items()))
        values, there = found["perplexity"], "not run"
        if preset in beside:
            other = beside[preset]
            texts = f"{other['same_texts']} of {other['texts']}"
            there = f"{texts}, {other['perplexity']['moe_ops']:.4f}"
        rows.append(
            f"| {preset} | {types} | {found['same_texts']} of {found['texts']} | "
            f"{values['moe_ops']:.4f} | {there} | {values['llama.cpp']:.4f} |"
        )
    return "\n".join(rows) + "\n"


def write_document(results: dict[str, Any]) -> None:
    begin, end = MARKS
    before, _, rest = DOCUMENT.read_text().partition(begin)
    _, _, after = rest.partition(end)
    DOCUMENT.write_text(before + begin + table(results) + end + after)


def main() -> None:
    from moe_ops.bench.timing import machine_facts

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--files", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a JSON file for what was found")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.sources is None and (args.files is None or args.write):
        parser.error("without --sources there must be --files, and no --write")
    text = (ROOT / "examples" / "tiny_moe" / "held_out.txt").read_bytes()
    presets: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.files or Path(temporary)
        beside = {} if args.sources else json.loads((folder / BESIDE).read_text())
        if args.sources:
            folder.mkdir(exist_ok=True)
            llama_cpp.convert(args.sources, args.model, Path(temporary) / "f32.gguf")
        for preset, number in PRESETS.items():
            path = folder / f"{preset}.gguf"
            if args.sources:
                llama_cpp.quantize(Path(temporary) / "f32.gguf", path, number)
            found = measure(args.model, path, text, args.device, beside.get(preset))
            presets[preset] = found
            print(preset, json.dumps(found, indent=1), flush=True)
            if args.out:
                content = {"machine": machine_facts(), "presets": presets}
                args.out.write_text(json.dumps(content, indent=1) + "\n")
            check(found)
        if args.sources:
            beside = {
                preset: found["perplexity"]["llama.cpp"] for preset, found in presets.items()
            }
            (folder / BESIDE).write_text(json.dumps(beside, indent=1) + "\n")
    assert {"Q4_K", "Q6_K"} == presets["Q4_K_M"]["types"].keys(), presets["Q4_K_M"]["types"]
    if not args.write:
        return
    config = json.loads((args.model / "config.json").read_text())
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
    package = (args.sources / "llama_cpp" / "__init__.py").read_text()
    llama = re.search(r'__version__ = "([^"]+)"', package)
    results = {
        "command": "python -m tools.gguf_generate --sources FOLDER --model MODEL --write",
        "machine": machine_facts(),
        "versions": versions | {"llama-cpp-python": llama[1] if llama else ""},
        "model": {key: config[key] for key in ("hidden_size", "moe_intermediate_size")}
        | {"layers": config["num_hidden_layers"], "experts": config["num_local_experts"]},
        "tokens": WINDOWS * WINDOW,
        "new_tokens": NEW_TOKENS,
        "presets": presets,
    }
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    write_document(results)


if __name__ == "__main__":
    main()
