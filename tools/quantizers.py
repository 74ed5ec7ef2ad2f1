"""Runs today's quantizing tools over all families of experts, and says which files load right.

    python -m tools.quantizers             run what no result is there for, and print the table
    python -m tools.quantizers --tool gptqmodel --family mixtral --scheme w4g32 --again
    python -m tools.quantizers --write     also make results and docs/checkpoints.md anew

Each tool lives in an environment of its own under --cache, set up on its first use: some GB, and
minutes. Every cell (tool, family, scheme) is a tiny random model on the CPU, quantized in a
process of its own, loaded through moe_ops, and compared with values by the tool's formulas
(`compare`); then loaded by transformers and the tool's library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tools import writers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quantizers.json"
DOCUMENT = ROOT / "docs" / "checkpoints.md"
MARKS = "<!-- made by tools/quantizers.py -->\n", "<!-- end -->\n"
SOME = (
    *("deepseek_v3", "glm4_moe", "gpt_oss", "llama4"),
    *("mixtral", "nemotron_h", "qwen2_moe", "qwen3_moe"),
)
TRANSFORMERS = "transformers==5.24.0"


@dataclass(frozen=True)
class Tool:
    """A tool: what to install, and the schemes of moe_ops in whose way its schemes round
    activations ("": not at all).
    """

    title: str
    requirements: tuple[str, ...]
    everywhere: dict[str, str]  # over all families
    some: dict[str, str] = field(default_factory=dict)  # over SOME
    runs: str = ""  # the function of `writers`, if its name is another
    over: tuple[str, ...] = ()  # installed over what the tool asks for

    def schemes(self) -> dict[str, str]:
        return self.everywhere | self.some


LLM_COMPRESSOR = {
    "W4A16": "",
    "W8A8": "int8_w8a8",
    "FP8": "fp8_channel_tensor_static",
    "NVFP4": "nvfp4",
}
TOOLS = {
    "llmcompressor": Tool(
        "llm-compressor 0.14.0.1",
        ("llmcompressor==0.14.0.1", "transformers==5.17.0"),
        LLM_COMPRESSOR,
        {
            "W4A16_ASYM": "",
            "W8A16": "",
            "W4AFP8": "int4_w4a8",
            "FP8_DYNAMIC": "fp8_channel",
            "FP8_BLOCK": "fp8_block",
            "NVFP4A16": "",
            "MXFP4": "mxfp4",
            "MXFP4A16": "",
            "MXFP8": "mxfp8",
        },
    ),
    # families that the transformers of its pin does not have, or reads otherwise
    "llmcompressor_next": Tool(
        "llm-compressor 0.14.0.1 with transformers 5.24",
        ("llmcompressor==0.14.0.1",),
        LLM_COMPRESSOR,
        runs="llmcompressor",
        over=(TRANSFORMERS,),
    ),
    "autoround": Tool(
        "AutoRound 0.16.1",
        ("auto-round==0.16.1", "compressed-tensors==0.19.0", TRANSFORMERS),
        {"W4A16": ""},
        {
            "W8A16": "",
            "W4A16@auto_gptq": "",
            "W4A16@auto_awq": "",
            "MXFP4": "mxfp4",
            "MXFP8": "mxfp8",
            "NVFP4": "nvfp4",
            "FP8_BLOCK": "fp8_block",
            "MXFP4@llm_compressor": "mxfp4",
            "NVFP4@llm_compressor": "nvfp4",
        },
    ),
    "gptqmodel": Tool(
        "GPTQModel 7.7.0",
        ("gptqmodel==7.7.0", TRANSFORMERS),
        {"w4g32": ""},
        {"w4g128": "", "w8g32": ""},
    ),
    "modelopt": Tool(
        "ModelOpt 0.47.0",
        ("nvidia-modelopt==0.47.0", TRANSFORMERS, "accelerate", "datasets", "requests"),
        {"NVFP4_DEFAULT_CFG": "nvfp4", "FP8_DEFAULT_CFG": "fp8_channel_tensor_static"},
        {
            "NVFP4_MLP_WEIGHT_ONLY_CFG": "",
            "NVFP4_AWQ_LITE_CFG": "nvfp4",
            "W4A8_NVFP4_FP8_CFG": "",
            "FP8_PER_CHANNEL_PER_TOKEN_CFG": "fp8_channel",
            "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": "",
            "MXFP4_DEFAULT_CFG": "",
            "MXFP4_MLP_WEIGHT_ONLY_CFG": "",
            "MXFP8_DEFAULT_CFG": "mxfp8",
            "INT8_WEIGHT_ONLY_CFG": "",
            "INT8_DEFAULT_CFG": "int8_w8a8_static",
            "INT8_SMOOTHQUANT_CFG": "int8_w8a8_static",
            "INT4_AWQ_CFG": "",
        },
    ),
    "torchao": Tool(
        "torchao 0.18.0",
        ("torchao==0.18.0", TRANSFORMERS, "accelerate"),
        {},
        {"Int8WeightOnlyConfig": "", "Float8WeightOnlyConfig": ""},
    ),
    "transformers": Tool(
        "transformers 5.24.0", (TRANSFORMERS, "accelerate"), {}, {"FP8": "fp8_block"}
    ),
    "mlx": Tool(
        "mlx-lm 0.32.2",
        ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2", TRANSFORMERS),
        {},
        {"affine4g64": "", "affine8g64": "", "mxfp4": ""},
    ),
}


def python_of(tool: str, cache: Path) -> Path:
    """The interpreter of a tool's environment, which is made if it is not there."""
    folder = cache / "venvs" / tool
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        print(f"setting up {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, "torch==2.13.0"], check=True)  # before a tool asks for another
        subprocess.run([*install, *TOOLS[tool].requirements], check=True)
        if TOOLS[tool].over:
            subprocess.run([*install, "--no-deps", *TOOLS[tool].over], check=True)
        ready.touch()
    return python


def families() -> list[str]:
    from tests.integrations.transformers.test_families import FAMILIES

    return sorted(FAMILIES)


def cells_of(tool: str, arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """(family, scheme) that a call asks for."""
    found = []
    for scheme in TOOLS[tool].schemes():
        over = families() if scheme in TOOLS[tool].everywhere else SOME
        found += [(family, scheme) for family in over]
    return [
        (family, scheme)
        for family, scheme in found
        if arguments.family in (None, family) and arguments.scheme in (None, scheme)
    ]


def write_plain(wanted: list[str], cache: Path) -> None:
    for family in wanted:
        if not (cache / "plain" / family / "config.json").exists():
            code = f"from tools import plain; plain.main({family!r}, {str(cache / 'plain')!r})"
            subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)


def run(tool: str, arguments: argparse.Namespace) -> None:
    """Make the cells of a tool that have no result."""
    cache, out = arguments.cache, arguments.cache / "out" / tool
    cells, again = cells_of(tool, arguments), arguments.again
    if tool == "llmcompressor_next":  # what the other one wrote stands
        first = cache / "out" / "llmcompressor"
        cells = [c for c in cells if not (first / f"{c[0]}-{c[1]}" / "config.json").exists()]
    stem = {cell: out / f"{cell[0]}-{cell[1]}" for cell in cells}

    def lacking(end: str) -> list[tuple[str, str]]:
        return [c for c in cells if again or not Path(f"{stem[c]}{end}").exists()]

    def call(python: Path | str, *command: str | Path, names: list[str]) -> None:
        limit = str(arguments.timeout)
        where = [str(cache / "plain"), str(out)]
        where = [limit, *where] if command[-1] in writers.TOOLS else [*where, limit]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([python, *command, *where, *names], cwd=ROOT, env=environment, check=True)

    todo = [c for c in lacking("") if again or not Path(f"{stem[c]}.error").exists()]
    if todo:
        write_plain(sorted({family for family, _ in todo}), cache)
        script = ROOT / "tools" / "writers.py"
        names = [f"{family}:{scheme}" for family, scheme in todo]
        call(python_of(tool, cache), script, TOOLS[tool].runs or tool, names=names)
    todo = [c for c in lacking(".json") if stem[c].exists()]
    if todo:
        expected = TOOLS[tool].schemes()
        names = [f"{family}:{scheme}={expected[scheme]}" for family, scheme in todo]
        call(sys.executable, "-m", "tools.compare", names=names)
    todo = [c for c in lacking(".alone.json") if stem[c].exists()]
    if todo:
        names = [f"{family}:{scheme}" for family, scheme in todo]
        script = ROOT / "tools" / "compare.py"
        call(python_of(tool, cache), script, "--alone", names=names)


def short(why: str) -> str:
    """The first line of a message, without the type of the error."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    return (
        lines[-1][:300] if lines and "Class validation" in lines[0] else (lines or [""])[0][:300]
    )


def collect(cache: Path) -> dict:
    """tool -> scheme -> family -> what became of the cell."""
    found: dict = {}
    for tool, one in TOOLS.items():
        out = cache / "out" / tool
        for scheme in one.schemes():
            for family in families() if scheme in one.everywhere else SOME:
                stem = out / f"{family}-{scheme}"
                error, result = Path(f"{stem}.error"), Path(f"{stem}.json")
                if result.exists() and stem.exists():
                    said = json.loads(result.read_text())
                    cell = {k: v for k, v in said.items() if k in ("status", "schemes")}
                    if "why" in said:
                        cell["why"] = short(said["why"])
                    alone = Path(f"{stem}.alone.json")
                    if alone.exists():
                        cell["alone"] = json.loads(alone.read_text())["status"]
                elif error.exists():
                    cell = {"status": "not written", "why": short(error.read_text())}
                else:
                    continue
                found.setdefault(tool, {}).setdefault(scheme, {})[family] = cell
    first, second = found.get("llmcompressor", {}), found.pop("llmcompressor_next", {})
    for scheme, cells in second.items():
        for family, cell in cells.items():
            old = first.get(scheme, {}).get(family, {"status": "not written"})
            if old["status"] in ("not written", "failed") or cell["status"] == "right":
                first.setdefault(scheme, {})[family] = cell | {"transformers": "5.24.0"}
    return found


def names(which: list[str], most: int = 6) -> str:
    more = f" and {len(which) - most} more" if len(which) > most else ""
    return ", ".join(f"`{name}`" for name in which[:most]) + more


def table(results: dict) -> str:
    """The lines of docs/checkpoints.md."""
    lines = [
        "| tool | scheme | written | right | as | refused or wrong | transformers alone |\n",
        "|---|---|---|---|---|---|---|\n",
    ]
    for tool, schemes in results.items():
        for scheme, cells in schemes.items():
            written = {f: c for f, c in cells.items() if c["status"] != "not written"}
            if not written:
                continue
            right = [f for f, c in written.items() if c["status"] == "right"]
            others = [f for f in written if f not in right]
            kinds = sorted({kind for f in right for kind in written[f].get("schemes", ())})
            alone = [c.get("alone") for c in written.values() if c.get("alone")]
            counts = [f"{alone.count(s)} {s}" for s in ("right", "wrong", "refused") if s in alone]
            row = (
                TOOLS[tool].title,
                f"`{scheme}`",
                f"{len(written)} of {len(cells)}",
                str(len(right)),
                ", ".join(f"`{kind}`" for kind in kinds),
                names(others),
                ", ".join(counts),
            )
            lines.append(f"| {' | '.join(row)} |\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "quantizers")
    parser.add_argument("--tool", choices=TOOLS)
    parser.add_argument("--family")
    parser.add_argument("--scheme")
    parser.add_argument("--again", action="store_true", help="also where a result is there")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a cell")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--write", action="store_true", help="write results and the document")
    arguments = parser.parse_args()
    for tool in [arguments.tool] if arguments.tool else TOOLS:
        if not arguments.table:
            run(tool, arguments)
    results = collect(arguments.cache)
    print(table(results))
    for tool, schemes in results.items():
        for scheme, cells in schemes.items():
            for family, cell in cells.items():
                if cell["status"] in ("wrong", "refused", "failed"):
                    print(f"{tool} {scheme} {family}: {cell['status']}: {cell.get('why')}")
    if arguments.write:
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        head, rest = DOCUMENT.read_text().split(MARKS[0])
        text = head + MARKS[0] + table(results) + MARKS[1] + rest.split(MARKS[1])[1]
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
