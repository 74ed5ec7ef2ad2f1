"""What each quantization scheme costs: bytes, a layer's error, a trained model's perplexity.

For every scheme it quantizes one expert layer of unit-scale random data and compares its output
with the bf16 layer's, then quantizes the experts of the tiny model beside this file and measures
perplexity on held-out text. It prints a table and draws both.

    python examples/quantize_and_compare.py --plot quantization.png
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from common import check, expert_bytes, scheme_names, table, title
from tiny_moe.model import held_out, load, perplexity

import moe_ops
import moe_ops.integrations.transformers as moe_transformers
from moe_ops.schemes import SCHEMES, QuantDesc

E, TOP_K, K, I, M = 8, 2, 512, 256, 64
# Perplexity may grow by this: 1 % with 8 bits, 5 % with weights of fewer, 10 % where activations
# have fewer too.
ALLOWED = {8: 0.01, 4: 0.05}
ALLOWED_ACTIVATIONS = 0.10


class Row(NamedTuple):
    """What was measured of one scheme."""

    scheme: str
    bits: float  # stored for each weight, scales included
    error: float  # of the layer's output, relative to its norm
    perplexity: float


def weight_bits(scheme: str) -> int:
    """Bits of a weight's element."""
    desc = SCHEMES[scheme].weight
    return 16 if desc is None else desc.format.bits


def activation_text(desc: QuantDesc | None) -> str:
    """The activations' number format, as the table shows it."""
    if desc is None:
        return "bf16"
    if desc.is_mx:
        return {"e4m3": "mxfp8", "e2m1": "mxfp4"}.get(desc.dtype, f"mxfp6 {desc.dtype}")
    return "nvfp4" if desc.global_scale else desc.dtype


class Layer:
    """One expert layer of unit-scale data in bf16, and its output."""

    def __init__(self, device: str):
        g = torch.Generator().manual_seed(0)

        def normal(*shape, scale=1.0):
            return (torch.randn(shape, generator=g) * scale).to(device, torch.bfloat16)

        self.x = normal(M, K)
        self.w13, self.w2 = normal(E, 2 * I, K, scale=K**-0.5), normal(E, K, I, scale=I**-0.5)
        scores = torch.randn(M, E, generator=g).to(device)
        self.routing = moe_ops.route(scores, TOP_K)
        self.out = self.run(self.w13, self.w2)

    def run(self, w13, w2) -> torch.Tensor:
        return moe_ops.fused_experts(self.x, w13, w2, *self.routing).double()

    def measure(self, scheme: str) -> tuple[float, float]:
        """(bits per weight, relative error) of a scheme."""
        w13, w2 = (moe_ops.quantize(w, scheme) for w in (self.w13, self.w2))
        size = w13.nbytes + w2.nbytes
        error = (self.run(w13, w2) - self.out).norm() / self.out.norm()
        return 8 * size / (w13.numel() + w2.numel()), error.item()


def measure(schemes: list[str], device: str, text: bytes) -> list[Row]:
    """One row for bf16, and one for every scheme."""
    layer = Layer(device)
    rows = []
    for scheme in ["", *schemes]:
        model = load("moe_ops", torch.bfloat16, device)
        if scheme:
            moe_transformers.quantize(model, scheme)
        value = perplexity(model, text)
        size, count = expert_bytes(model)
        bits, error = layer.measure(scheme) if scheme else (8 * size / count, 0.0)
        rows.append(Row(scheme, bits, error, value))
    return rows


def check_perplexity(row: Row, reference: float) -> None:
    scheme = SCHEMES[row.scheme]
    small = scheme.activation is not None and scheme.activation.format.bits < 8
    allowed = ALLOWED_ACTIVATIONS if small else ALLOWED[8 if weight_bits(row.scheme) == 8 else 4]
    grown = row.perplexity / reference - 1
    check(grown <= allowed, f"{row.scheme}: perplexity {grown:+.2%}, allowed {allowed:.0%}")


def draw(rows: list[Row], path: str) -> None:
    """Bars of the layer's error and of the growth of perplexity, one scheme a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reference, *rows = rows
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 1.2 + 0.24 * len(rows)), sharey=True)
    names = [f"{row.scheme}   {row.bits:.2f} bits" for row in rows]
    colors = {8: "#4878a8", 6: "#6aa56e", 4: "#d1885c"}
    for axis, values, label in (
        (axes[0], [row.error for row in rows], "error of a layer's output, relative"),
        (
            axes[1],
            [100 * (row.perplexity / reference.perplexity - 1) for row in rows],
            "growth of the trained model's perplexity, %",
        ),
    ):
        axis.barh(names, values, color=[colors[weight_bits(row.scheme)] for row in rows])
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
        axis.margins(y=0.01)
    axes[0].invert_yaxis()
    axes[0].tick_params(labelsize=8)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=c) for c in colors.values()]
    axes[1].legend(
        handles, [f"{bits}-bit weights" for bits in colors], loc="upper right", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"\n  drawn to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # static activation scales need calibration data, which nothing here has
    every = ",".join(name for name in SCHEMES if name and not name.endswith("_static"))
    parser.add_argument(
        "--schemes", type=scheme_names, default=every, help="comma-separated; default: all"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--perplexity-bytes", type=int, default=65536, help="at most 65536")
    parser.add_argument("--plot", help="file to draw to")
    args = parser.parse_args()

    text = held_out(args.perplexity_bytes)
    title(f"one layer of unit-scale data, and the tiny model on {len(text)} bytes of text")
    rows = measure(args.schemes, args.device, text)
    reference = rows[0].perplexity
    headers = ("scheme", "activations", "bits/weight", "layer error", "perplexity", "against bf16")
    table(
        headers,
        [
            (
                row.scheme or "bf16",
                activation_text(SCHEMES[row.scheme].activation),
                f"{row.bits:.2f}",
                f"{row.error:.4f}" if row.scheme else "",
                f"{row.perplexity:.4f}",
                f"{row.perplexity / reference - 1:+.2%}" if row.scheme else "",
            )
            for row in rows
        ],
    )
    title("claims")
    for row in rows[1:]:
        check_perplexity(row, reference)
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
