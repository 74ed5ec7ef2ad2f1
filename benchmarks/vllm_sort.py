"""The sort in front of vLLM's Triton layer, which its table of times (peers.VLLM_US) leaves out.

    python benchmarks/vllm_sort.py [--shapes qwen3 mixtral dsv3 gptoss20] [--tokens 1 8 64]
                                   [--results FOLDER]

Needs vLLM's compiled operators, vllm/_moe_C*.so of a version for this torch, in a folder of that
name on PYTHONPATH; the package itself is not imported. A CUDA graph sorts every routing set of a
cell of experts.py; replays are timed as there. vLLM sorts nothing where four times the pairs are
no more than the experts: those cells are left out. Times go to FOLDER/vllm_sort_<GPU>.json, and
`experts.py --report` adds them to the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path

import torch
from cases import SHAPES, Case, Shape, make_sets
from harness import RESULTS, capture, interleaved_replays_us, machine_facts, versions
from torch import Tensor

BLOCK = (
    16  # rows that vLLM's tuned tiles have for few tokens; the sort's time hardly depends on it
)


def path_of(folder: Path, gpu: str) -> Path:
    """The file of a GPU's times."""
    return folder / f"vllm_sort_{gpu.replace(' ', '_')}.json"


def read(folder: Path, gpu: str) -> dict[tuple[str, int], float]:
    """(shape, M) -> microseconds, of the cells in which vLLM sorts; empty where it was not
    measured."""
    path = path_of(folder, gpu)
    if not path.exists():
        return {}
    return {
        (row["shape"], row["num_tokens"]): row["us"]
        for row in json.loads(path.read_text())["rows"]
    }


def sorts(shape: Shape, num_tokens: int) -> bool:
    """Whether vLLM 0.26 sorts the pairs of so many tokens (fused_moe.py,
    naive_block_assignment)."""
    return num_tokens * shape.top_k * 4 > shape.num_experts


def load() -> Path:
    """Load vLLM's operators of mixture-of-experts layers."""
    spec = importlib.util.find_spec("vllm")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for path in sorted(Path(folder).glob("_moe_C*.so")):
            torch.ops.load_library(path)
            return path
    sys.exit("vllm/_moe_C*.so must be on PYTHONPATH, found none; unpack it from vLLM's wheel")


def sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """vLLM's moe_align_block_size: number of rows (1,), and the pairs by expert, each expert's
    padded to BLOCK."""
    size = ids.numel() + num_experts * (BLOCK - 1)
    size = min(size, ids.numel() * BLOCK) if ids.numel() < num_experts else size
    sorted_ids, experts, total = [
        torch.empty(count, dtype=torch.int32, device=ids.device)
        for count in (size, -(-size // BLOCK), 1)
    ]
    torch.ops._moe_C.moe_align_block_size(
        ids, num_experts, BLOCK, sorted_ids, experts, total, None
    )
    return total, sorted_ids


def check(total: Tensor, sorted_ids: Tensor, ids: Tensor) -> None:
    """Raise unless the sort holds every pair once, each expert's in blocks of their own."""
    flat = ids.view(-1).cpu()
    blocks = sorted_ids[: int(total)].cpu().view(-1, BLOCK)
    padding = blocks >= flat.numel()
    if sorted(blocks[~padding].tolist()) != list(range(flat.numel())):
        raise RuntimeError("the sort must hold every pair once")
    experts = flat[blocks.masked_fill(padding, 0).long()].masked_fill(padding, -1)
    if ((experts != experts.amax(1, keepdim=True)) & ~padding).any():
        raise RuntimeError("a block must hold the pairs of one expert")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = ["qwen3", "mixtral", "dsv3", "gptoss20"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=shapes)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64, 256, 1024, 4096])
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("the sort is a GPU's; none found, nothing measured")
    library = load()
    rows = []
    for name in arguments.shapes:
        for M in arguments.tokens:
            shape, case = SHAPES[name], Case(name, "", M, "uniform")
            if not sorts(shape, M):
                continue
            sets = [routing.ids.cuda() for routing in make_sets(case, 50 << 20)]
            for ids in sets[:2]:
                check(*sort(ids, shape.num_experts), ids)

            def call(which: int, sets=sets, E: int = shape.num_experts) -> Tensor:
                return sort(sets[which], E)[0]

            graph, _ = capture(call, len(sets))
            times = interleaved_replays_us({"sort": graph}, arguments.replays, len(sets))
            us = statistics.median(times["sort"])
            rows.append({"shape": name, "num_tokens": M, "us": round(us, 3)})
            print(f"{name} M={M}: {us:.2f} us", flush=True)
    facts = machine_facts() | {"library": library.name, "versions": versions("torch")}
    path = path_of(arguments.results, torch.cuda.get_device_name())
    path.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
