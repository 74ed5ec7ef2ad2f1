"""Seconds from the start of a process until a model's prompt and decode step are compiled: with
nothing cached, with a bundle of moe_ops.save_warm beside empty caches, and with warm caches.

    python benchmarks/cold_start.py [--layers 8] [--rounds 1] [--experts moe_ops] [--export]
                                    [--results FOLDER] [--bundle FOLDER] [--limit SECONDS]
    python benchmarks/cold_start.py --dry-run   # a tiny model on a CPU, the decode step alone

A Qwen3-MoE of real widths with random bf16 weights. Each case is a process of its own, with its
own folders for every cache (the home directory is one), and runs: the imports, `load_warm`, the
model, `moe_ops.warmup` for one token and for the prompt, a greedy decode step with a static cache
(fullgraph, mode="reduce-overhead"), and a forward over the prompt (fullgraph). Counted are the
compilers that it or its workers started, what Triton compiled in it, and the kernels that came
into the folders of Triton and DeepGEMM after the bundle was loaded. `imports` are seconds of new
processes until transformers' modelling code of the model is imported, and ours after it.

`--export` keeps the bundle in the results folder, in parts of 15 MiB. `--bundle` takes such a
folder of another machine of the same kind, leaves out the case with warm caches, and keeps what
the first machine's results there say (`made_by`). Results go to
FOLDER/cold_start_<GPU>.json, or cold_start_elsewhere_<GPU>.json with --bundle, after each process;
past the limit no process is begun, and one that runs is ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import site
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compilers import Compilers

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
CASES = ("nothing cached", "bundle", "warm folders")
PART_BYTES = 15 << 20
IMPORTS = """import time
began = time.perf_counter()
import transformers.models.qwen3_moe.modeling_qwen3_moe
theirs = time.perf_counter()
import moe_ops.integrations.transformers
print(theirs - began, time.perf_counter() - began)"""
# what is wanted: of the time with nothing cached, seconds of imports, MiB
MOST, MOST_IMPORT, MOST_MIB = 0.6, 0.5, 48
PROMPT, CACHE = 512, 1024  # tokens
STEPS = 4  # decode steps: one compiles, the next two record and check the CUDA graph
WIDTHS = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 4096},
}
TINY = {
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 96},
}


class Stages:
    """Seconds that each part of a process took, from before the interpreter started."""

    def __init__(self, begin: float):
        self.last, self.seconds = begin, dict[str, float]()

    def end(self, name: str) -> None:
        now = time.time()
        self.seconds[name] = round(now - self.last, 2)
        self.last = now
        print(f"    {name}: {self.seconds[name]} s", file=sys.stderr, flush=True)


def case(arguments: argparse.Namespace) -> dict[str, Any]:
    """What one process does; everything is imported here, because that is timed, too."""
    stages = Stages(arguments.begin)
    import torch
    import transformers

    import moe_ops
    import moe_ops.integrations.transformers

    device = "cpu" if arguments.dry_run else "cuda"
    torch.zeros(1, device=device)
    stages.end("imports")
    compiled_by_triton = count_triton() if device == "cuda" else []
    report = moe_ops.load_warm(arguments.bundle) if arguments.bundle else None
    stages.end("load")
    before = kernels()
    config = transformers.Qwen3MoeConfig(
        **(TINY if arguments.dry_run else WIDTHS),
        num_hidden_layers=arguments.layers,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen3MoeForCausalLM._from_config(
            config,
            dtype=torch.float32 if arguments.dry_run else torch.bfloat16,
            experts_implementation=arguments.experts,
        )
    with torch.no_grad():  # so that tokens differ, and with them their experts
        model.model.embed_tokens.weight.normal_()
        model.lm_head.weight.normal_(std=0.05)
    model.requires_grad_(False).eval()
    prompt = torch.randint(config.vocab_size, (1, PROMPT), device=device)
    torch.cuda.synchronize() if device == "cuda" else None
    stages.end("model")
    if arguments.experts == "moe_ops":
        moe_ops.warmup(model, (1, PROMPT), show_progress=False)
    stages.end("eager")
    cache = transformers.StaticCache(config=config, max_cache_len=CACHE)

    def decode(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits

    mode = "reduce-overhead" if device == "cuda" else "default"
    options: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    found = []
    with torch.no_grad():
        logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        stages.end("prompt, eagerly")
        step = torch.compile(decode, mode=mode, **options)
        for _ in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            tokens.copy_(step(tokens))
            found.append(int(tokens))
        stages.end("decode")
        if not arguments.dry_run:
            logits = torch.compile(forward, **options)(prompt)
            found.append(int(logits[0, -1].argmax()))
            stages.end("prompt")
    row = {
        "seconds": round(time.time() - arguments.begin, 2),
        "stages": stages.seconds,
        "tokens": found,
        "compiled_by_triton": len(compiled_by_triton),
        "new_kernels": {name: len(now - before[name]) for name, now in kernels().items()},
        "refused": report.refused if report else "",
    }
    if arguments.save:
        row["saved"] = str(moe_ops.warmup(model, (1,), save=arguments.save).bundle)
    return row


def count_triton() -> list[str]:
    """The names of the kernels that Triton compiles in this process from now on."""
    from triton import knobs

    names: list[str] = []

    def listener(*, src: Any, metadata: dict, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            names.append(str(metadata.get("name")))

    knobs.compilation.listener = listener
    return names


def kernels() -> dict[str, set[str]]:
    """The entries of the caches of Triton and DeepGEMM."""
    home = Path.home()
    folders = {
        "triton": [home / ".triton/cache", *(home / "inductor/triton").glob("*")],
        "deep_gemm": [home / ".deep_gemm/cache"],
    }
    return {
        name: {path.name for folder in of for path in folder.glob("*") if path.is_dir()}
        for name, of in folders.items()
    }


def imports(rounds: int) -> dict[str, float]:
    """Seconds of processes that import, medians. A first one, not timed, keeps the bytecode, which
    installed packages have.
    """
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = with_sources() | {"PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", IMPORTS]
        for _ in range(1 + rounds):
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            found.append([float(seconds) for seconds in done.stdout.split()[-2:]])
    medians = [round(statistics.median(each), 3) for each in zip(*found[1:], strict=True)]
    return dict(zip(("transformers", "with moe_ops"), medians, strict=True))


def with_sources() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def run(
    name: str, home: Path, compilers: Compilers, arguments: argparse.Namespace, **files: str
) -> dict[str, Any]:
    """One case in a process of its own. Raises RuntimeError if it fails."""
    print(f"  {name}", file=sys.stderr, flush=True)
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in with_sources().items() if k != "TRITON_CACHE_DIR"}
    environment |= compilers.environment | {
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "PYTHONUSERBASE": site.getuserbase(),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        # else each process on a CPU preprocesses a header
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "DG_JIT_CACHE_DIR": str(home / ".deep_gemm"),
        "MOE_OPS_CACHE": str(home / ".cache/moe_ops"),
    }
    command = [sys.executable, __file__, "--case", "--layers", str(arguments.layers)]
    command += ["--experts", arguments.experts] + ["--dry-run"] * arguments.dry_run
    for option, path in files.items():
        command += [f"--{option}", path]
    compilers.forget()
    command += ["--begin", repr(time.time())]
    left = arguments.until - time.perf_counter()
    if left < 0:
        raise RuntimeError("the limit was reached")
    options: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE}
    options["timeout"] = None if math.isinf(left) else left
    try:
        done = subprocess.run(command, env=environment, **options)
    except subprocess.TimeoutExpired:
        raise RuntimeError("it was ended at the limit") from None
    if done.returncode:
        raise RuntimeError(f"the process ended with {done.returncode}")
    row = {"case": name, **json.loads(done.stdout.splitlines()[-1])}
    row["compilers"] = compilers.counts()
    print(f"    in all: {row['seconds']} s, {row['compilers']}", file=sys.stderr, flush=True)
    return row


def whole(folder: str, target: Path) -> str:
    """The bundle whose parts are in a folder, or a file itself."""
    if Path(folder).is_file():
        return folder
    parts = sorted(Path(folder).glob("cold_start.warm.*"))
    if not parts:
        raise SystemExit(f"{folder} has no cold_start.warm.00")
    target.write_bytes(b"".join([part.read_bytes() for part in parts]))
    return str(target)


def export(bundle: str, folder: Path) -> None:
    data = Path(bundle).read_bytes()
    for number, start in enumerate(range(0, len(data), PART_BYTES)):
        part = folder / f"cold_start.warm.{number:02}"
        part.write_bytes(data[start : start + PART_BYTES])


def verdicts(result: dict[str, Any]) -> list[str]:
    """What was found beside what is wanted."""
    best: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        if row["case"] not in best or row["seconds"] < best[row["case"]]["seconds"]:
            best[row["case"]] = row
    lines = [f"the bundle has {result['bundle_bytes'] / 2**20:.1f} MiB, wanted <= {MOST_MIB}"]
    if found := best.get("bundle"):
        started = sum(found["compilers"].values()) + found["compiled_by_triton"]
        lines.append(f"with it {started} compilers ran, wanted 0 {found['refused']}")
        for name, most in (("nothing cached", MOST), ("warm folders", 1.0)):
            if name in best:
                ratio = found["seconds"] / best[name]["seconds"]
                lines.append(f"it takes {ratio:.2f} times {name}, wanted <= {most}")
    tokens = {tuple(row["tokens"]) for row in result["rows"]}
    lines.append("tokens are the same" if len(tokens) < 2 else f"tokens differ: {tokens}")
    if of_imports := result.get("imports"):
        more = of_imports["with moe_ops"] - of_imports["transformers"]
        lines.append(f"importing moe_ops takes {more:.2f} s more, wanted <= {MOST_IMPORT}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1, help="of the last two cases, in turns")
    parser.add_argument(
        "--experts", default="moe_ops", help="or grouped_mm, which needs no bundle"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder")
    parser.add_argument("--export", action="store_true", help="keep the bundle there, in parts")
    parser.add_argument("--bundle", help="a folder with the parts of another machine's bundle")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(case(arguments)))
        return
    arguments.until = time.perf_counter() + arguments.limit - 10
    sys.path.insert(0, str(ROOT))
    from records import describe_run

    command = ["python", "benchmarks/cold_start.py", *sys.argv[1:]]
    facts = describe_run(command, arguments.dry_run)
    rows: list[dict[str, Any]] = []
    result = {"run": facts, "layers": arguments.layers, "bundle_bytes": 0, "rows": rows}
    gpu = facts["machine"].get("gpu", "CPU").replace(" ", "_")
    arguments.results.mkdir(parents=True, exist_ok=True)
    where = "elsewhere_" if arguments.bundle else ""
    target = arguments.results / f"cold_start_{where}{gpu}.json"

    def keep(row: dict[str, Any], bundle: str) -> None:
        rows.append(row)
        result["bundle_bytes"] = Path(bundle).stat().st_size
        target.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        compilers = Compilers(root / "compilers")
        bundle = str(root / "model.warm")
        try:
            if arguments.bundle:
                bundle = whole(arguments.bundle, root / "model.warm")
                first = Path(arguments.bundle) / f"cold_start_{gpu}.json"
                if first.exists():
                    made_by = json.loads(first.read_text())
                    result["made_by"] = {name: made_by[name] for name in ("run", "rows")}
            else:
                keep(run(CASES[0], root / "first", compilers, arguments, save=bundle), bundle)
                if arguments.export:
                    export(bundle, arguments.results)
            for number in range(arguments.rounds):
                home = root / f"bundle{number}"
                keep(run(CASES[1], home, compilers, arguments, bundle=bundle), bundle)
                shutil.rmtree(home)
                if not arguments.bundle:
                    keep(run(CASES[2], root / "first", compilers, arguments), bundle)
            result["imports"] = imports(1 if arguments.dry_run else 3)
            target.write_text(json.dumps(result, indent=1) + "\n")
        except RuntimeError as error:
            print(f"stopped: {error}", flush=True)
    print(f"{'case':16} {'seconds':>8}  compilers")
    for row in rows:
        print(f"{row['case']:16} {row['seconds']:8.1f}  {row['compilers']}")
    print("\n".join(verdicts(result)), target, sep="\n")
    if "imports" not in result:
        sys.exit(1)


if __name__ == "__main__":
    main()
