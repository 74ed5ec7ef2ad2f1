"""An MoE layer exported with torch.export and compiled ahead of time with AOTInductor.

The number of tokens M stays dynamic in both. The package AOTInductor writes holds compiled code
and calls the same moe_ops operator, so the process that loads it needs moe_ops, not the model's
source.

    python examples/export_layer.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from common import check, max_error, scheme_name, title
from compile_layer import Layer, oracle

import moe_ops


def layer_with(scheme: str, device: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """(the layer with its experts in `scheme`, the same layer with the dequantized weights)."""
    torch.manual_seed(0)
    layer = Layer(experts=8, hidden=256, intermediate=128, top_k=2).requires_grad_(False)
    plain = Layer(experts=8, hidden=256, intermediate=128, top_k=2).requires_grad_(False)
    plain.load_state_dict(layer.state_dict())
    if scheme:
        for name in ("w13", "w2"):
            weight = moe_ops.quantize(getattr(layer, name), scheme)
            setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
            getattr(plain, name).copy_(weight.dequantize())
    return layer.to(device), plain.to(device)


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """The largest relative error over a list of results."""
    return max(max_error(a, b) for a, b in zip(got, want, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--schemes",
        nargs="*",
        type=scheme_name,
        default=["", "fp8_block"],
        help='"" is float32, one layer each',
    )
    args = parser.parse_args()

    tokens = torch.export.Dim("M", min=1, max=4096)
    for scheme in args.schemes:
        title(f"experts in {scheme or 'float32'}")
        layer, plain = layer_with(scheme, args.device)
        # Quantized schemes round the activations too, which the fp64 oracle does not.
        tolerance = 0.1 if scheme else 1e-5
        example = (torch.randn(8, 256, device=args.device),)
        inputs = [torch.randn(m, 256, device=args.device) for m in (1, 5, 300)]
        eager = [layer(x) for x in inputs]
        error = worst(eager, [oracle([plain], x) for x in inputs])
        check(error < tolerance, f"eager is near the fp64 oracle, relative error {error:.1e}")

        for strict in (True, False):
            exported = torch.export.export(
                layer, example, dynamic_shapes=({0: tokens},), strict=strict
            )
            error = worst([exported.module()(x) for x in inputs], eager)
            name = "strict" if strict else "non-strict"
            check(error < 1e-5, f"{name} export equals eager, relative error {error:.1e}")
            nodes = [n for n in exported.graph.nodes if "moe_ops" in str(n.target)]
            check(len(nodes) == 1, f"{name} export holds {nodes[0].target}")

        with tempfile.TemporaryDirectory() as folder:
            path = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(Path(folder) / "layer.pt2")
            )
            size = Path(path).stat().st_size
            loaded = torch._inductor.aoti_load_package(path)
            error = worst([loaded(x) for x in inputs], eager)
            check(error < 1e-5, f"AOTInductor package ({size} bytes), relative error {error:.1e}")


if __name__ == "__main__":
    main()
