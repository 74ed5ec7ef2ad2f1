"""A stack of MoE layers whose first step is captured in a CUDA graph, after moe_ops.warmup.

Warm-up compiles, loads and tunes for every number of tokens that steps will have, once for layers
that are alike. On a GPU each size is then captured at once and replayed while the routing changes;
on a CPU, where nothing can be captured, the same sizes run eagerly.

    python examples/warmup_and_capture.py
"""

from __future__ import annotations

import argparse
import time

import torch
from common import check, max_error, title
from torch import Tensor, nn

import moe_ops


def build(layers: int, device: str, dtype: torch.dtype) -> nn.Sequential:
    """Layers of 8 experts; every second one holds e4m3 weights."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for index in range(layers):
        layer = moe_ops.MoELayer(256, 128, 8, 2, dtype=dtype, device=device)
        for parameter in layer.parameters():
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        if index % 2:
            for name in ("gate_up_proj", "down_proj"):
                weight = moe_ops.quantize(getattr(layer.experts, name).data, "fp8_block")
                setattr(layer.experts, name, nn.Parameter(weight, requires_grad=False))
        model.append(layer)
    return model.requires_grad_(False).eval()


def exact(model: nn.Sequential, x: Tensor) -> Tensor:
    """The model's result by the `torch` backend, which all others are held to."""
    for layer in model:
        layer.backend = "torch"
    y = model(x)
    for layer in model:
        layer.backend = "auto"
    return y


def step_of(model: nn.Sequential, x: Tensor):
    """A function that recomputes `y` from what `x` holds, and `y`: one captured graph, or an eager
    call."""
    if x.device.type == "cpu":
        y = torch.empty_like(x)
        return lambda: y.copy_(model(x)), y
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    return graph.replay, y


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    model = build(args.layers, args.device, dtype)

    title("warm-up")
    start = time.perf_counter()
    report = moe_ops.warmup(model, args.tokens)
    seconds = time.perf_counter() - start
    print(report)
    names = [layer.name for layer in report.layers]
    check(
        names == ["0", "1"][: args.layers],
        f"{len(names)} of {args.layers} layers ran: others are like them",
    )
    again = moe_ops.warmup(model, args.tokens)
    check(
        again.layers[0].name == "0",
        f"again it takes {again.seconds:.2f} s, before {seconds:.2f} s",
    )

    title("the first step" if args.device == "cpu" else "the first step, captured")
    # rounding may move a token to another expert in the layers behind it, so one layer is compared
    # at a time
    for tokens in args.tokens:
        for kind, layer in zip(("plain", "fp8_block"), model, strict=False):
            one = nn.Sequential(layer)
            x = torch.randn(tokens, 256, device=args.device, dtype=dtype)
            step, y = step_of(one, x)
            worst = 0.0
            for _ in range(3):  # every time other tokens, so other experts
                x.normal_()
                step()
                worst = max(worst, max_error(y, exact(one, x)))
            check(worst < 5e-2, f"M = {tokens}, {kind}: within {worst:.1e} of the torch backend")
    x = torch.randn(args.tokens[-1], 256, device=args.device, dtype=dtype)
    step, y = step_of(model, x)
    step()
    check(bool(y.isfinite().all()), f"all {args.layers} layers in one step")


if __name__ == "__main__":
    main()
