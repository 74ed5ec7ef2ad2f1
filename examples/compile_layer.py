"""A stack of MoE layers compiled into one graph that serves every number of tokens.

`moe_ops.fused_experts` is plain Python over one registered operator, and the workspaces that
operator needs are allocated in the traced code. So torch.compile(fullgraph=True) gives one graph
whose size does not depend on M, and Inductor hands the first layer's workspaces to the next one.

    python examples/compile_layer.py
"""

from __future__ import annotations

import argparse
import re

import torch
from common import check, max_error, table, title

import moe_ops

TOKENS = (2, 1, 7, 64, 333, 4096)


class Layer(torch.nn.Module):
    """Router, experts and residual: hidden states (M, K) -> (M, K)."""

    def __init__(self, experts: int, hidden: int, intermediate: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = torch.nn.Parameter(torch.randn(experts, hidden) / hidden**0.5)
        self.w13 = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5)
        self.w2 = torch.nn.Parameter(torch.randn(experts, hidden, intermediate) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = moe_ops.route(x @ self.router.T, self.top_k)
        return x + moe_ops.fused_experts(x, self.w13, self.w2, weights, ids)


def oracle(layers: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The same layers in fp64 with every expert computed for every token."""
    x = x.double()
    for layer in layers:
        router, w13, w2 = layer.router.double(), layer.w13.double(), layer.w2.double()
        logits, ids = (x @ router.T).topk(layer.top_k, dim=-1)
        gate, up = torch.einsum("mk,enk->men", x, w13).chunk(2, dim=-1)
        every = torch.einsum("mei,eki->mek", torch.nn.functional.silu(gate) * up, w2)
        chosen = every.gather(1, ids[..., None].expand(-1, -1, x.shape[1]))
        x = x + (logits.softmax(-1)[..., None] * chosen).sum(1)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[Layer(8, 128, 64, 2) for _ in range(args.layers)])
    layers = layers.to(args.device).requires_grad_(False)

    title(f"{args.layers} layers, torch.compile(fullgraph=True), M marked unbacked")
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    source = ""
    for tokens in TOKENS:
        x = torch.randn(tokens, 128, device=args.device)
        if not source:  # the first call compiles; the graph may assume nothing about M
            torch._dynamo.decorators.mark_unbacked(x, 0)
            got, (source,) = run_and_get_code(compiled, x)
        else:
            got = compiled(x)
        want = oracle(layers, x)
        error = max_error(got, want)
        check(error < 1e-5, f"M = {tokens:4d} equals the fp64 oracle, relative error {error:.1e}")
    check(counter.frame_count == 1, f"{counter.frame_count} graph served M = {sorted(TOKENS)}")

    title("where the buffers of each call come from, in the code Inductor generated")
    calls = re.findall(r"torch\.ops\.moe_ops\.\w+_experts\.default\(([^)]*)\)", source)
    reused = dict(re.findall(r"(\w+) = (\w+); del \w+  # reuse", source))
    buffers = [[name.strip() for name in call.split(",")[:4]] for call in calls]
    rows = [
        [f"{name} was {reused[name]}" if name in reused else name for name in row]
        for row in buffers
    ]
    table(
        ("layer", "out", "workspace13", "workspace2", "index_workspace"),
        [(index, *row) for index, row in enumerate(rows)],
    )
    check(len(calls) == args.layers, f"{len(calls)} calls of one registered operator")
    names = [name for row in buffers for name in row]
    for index, name in enumerate(names):
        while name in reused:
            name = reused[name]
        names[index] = name
    allocations = len(set(names))
    claim = f"the {len(names)} buffers of {len(calls)} calls share {allocations} allocations"
    check(allocations <= 6, claim)
    check("aten.clone" not in source and "aten.copy_" not in source, "none is cloned or copied")


if __name__ == "__main__":
    main()
