"""The table of docs/models.md: what holds of each family of transformers' models when it is run.

    python -m tests.integrations.transformers.model_table            # say whether it is up to date
    python -m tests.integrations.transformers.model_table --write    # bring it up to date

A family is a tiny model of one layer in fp32 on the CPU. An entry of the table is a comparison of
values that held; only routers are as families.toml declares them, which tests of them compare.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_ops.integrations import transformers as integration
from moe_ops.integrations.transformers import families, hook
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.schemes import get_scheme
from tests.integrations.transformers.test_families import FAMILIES, build, relative
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs" / "models.md"
MARKS = "<!-- made by tests/integrations/transformers/model_table.py -->\n", "<!-- end -->\n"
# schemes of one kind, of those whose groups fit 32 columns, and how far results may be from those
# of a model whose weights were rounded alike: activations are rounded too where a scheme says so
KINDS = {
    "16-bit activations": (
        ("fp8_w8a16:channel", "int8_w8a16:channel", "int4_w4a16:g32", "mxfp4_w4a16"),
        1e-4,
    ),
    "8-bit activations": (("fp8_channel", "fp8_block", "int8_w8a8", "mxfp4_mxfp8"), 0.15),
    "4-bit activations": (("mxfp4", "nvfp4"), 0.7),
}
HEADER = ("family", "calls", *KINDS, "gradients", "expert parallel", "router")


def output(layer: Layer, inputs: tuple[Tensor, ...]) -> Tensor:
    return hook._first(layer.module(*inputs))


def probe(model: nn.Module) -> tuple[Layer, tuple[Tensor, ...]]:
    """A layer and the inputs that its check takes, of unit scale."""
    layer = layers_of.find(model)[0]
    return layer, hook.probe(layer)


def fits(model: nn.Module, scheme: str) -> bool:
    """Whether the tiny weights have whole groups of this scheme."""
    layer = layers_of.find(model)[0]
    shapes = [layer.natural_weight(name).shape[-2:] for name in layer.weights]
    return not any(get_scheme(scheme).why_not_shape(*shape) for shape in shapes)


def runs_scheme(model: nn.Module, scheme: str, tolerance: float) -> bool:
    """Whether results are those of weights rounded alike, and not those of plain weights."""
    layer, inputs = probe(model)
    plain = output(layer, inputs)
    quantized, rounded = copy.deepcopy(model), copy.deepcopy(model)
    integration.quantize(quantized, scheme)
    for name, p in quantized.named_parameters():
        if getattr(p, "scheme", None):
            target, values = rounded.get_parameter(name), p.dequantize(torch.float32)
            target.data[: values.numel() // target[0].numel()] = values.reshape(
                -1, *target.shape[1:]
            )
    got = output(layers_of.find(quantized)[0], inputs)
    want = output(layers_of.find(rounded)[0], inputs)
    return relative(got, want) < tolerance and relative(got, plain) > 1e-4


def has_gradients(model: nn.Module) -> bool:
    """Whether the gradients of input and weights are those of the family's own forward."""
    layer, inputs = probe(copy.deepcopy(model))
    weights = [getattr(layer.owner, name).requires_grad_() for name in layer.weights]
    wanted = [inputs[0].requires_grad_(), *weights]

    def gradients(run: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(run().square().sum(), wanted)

    got = gradients(lambda: output(layer, inputs))
    want = gradients(lambda: hook._first(hook._own_forward(layer, inputs)))
    return all(relative(g, w) < 1e-3 for g, w in zip(got, want, strict=True))


def runs_parallel(model: nn.Module) -> bool:
    """Whether two devices with half of the experts each add up to the layer, each given the ids
    that transformers' routers give it: its own count stands for experts of others."""
    layer, inputs = probe(model)
    if not layer.on_hook or layer.module is not layer.owner:
        return False
    x, ids, weights = inputs
    count = layer.owner.num_experts
    total = torch.zeros_like(output(layer, inputs))
    for start, end in ((0, count // 2), (count // 2, count)):
        half = copy.deepcopy(layer.owner)
        for p in half.parameters():
            if p.shape[0] == count:
                p.data = p.data[start:end].contiguous()
        half.num_experts = end - start
        here = (ids >= start) & (ids < end)
        local = torch.where(here, ids - start, end - start)
        total += hook._first(half(x, local, torch.where(here, weights, 0)))
    return relative(total, output(layer, inputs)) < 1e-4


@torch.no_grad()
def row(family: str) -> tuple[str, ...]:
    """The family's line of the table."""
    model = build(family, 1)
    report = integration.attach(model)
    calls = ", ".join(dict.fromkeys([one.path for one in report.layers]))
    kinds = []
    for schemes, tolerance in KINDS.values():
        tried = [scheme for scheme in schemes if fits(model, scheme)]
        held = [scheme for scheme in tried if runs_scheme(model, scheme, tolerance)]
        kinds.append("yes" if held == tried else ", ".join(held) or "no")
    holds = [has_gradients(model), runs_parallel(model)]
    held = ["yes" if one else "no" for one in holds]
    return (f"`{family}`", calls, *kinds, *held, routers_of(family))


def routers_of(family: str) -> str:
    """What the routers of a family compute that `fuse_routers` takes, as methods of `route`."""
    rules = [families.ROUTERS[name] for name in families.FAMILIES[family].get("routers", {})]
    methods = [m for r in rules for m in (r.method, r.normalized, *r.methods.values()) if m]
    return ", ".join([f"`{m}`" for m in dict.fromkeys(methods)]) or "its own"


def table() -> str:
    """The lines of the table, for all families of the installed transformers."""
    rows = [HEADER, ("---",) * len(HEADER), *[row(family) for family in sorted(FAMILIES)]]
    return "".join([f"| {' | '.join(cells)} |\n" for cells in rows])


def rows_of(text: str) -> dict[str, str]:
    """Family -> its line in the document."""
    return {name: line for line, name in re.findall(r"^(\| `(\w+)` .*)$", text, re.M)}


def main() -> None:
    before = DOCUMENT.read_text()
    head, rest = before.split(MARKS[0])
    after = head + MARKS[0] + table() + MARKS[1] + rest.split(MARKS[1])[1]
    if "--write" in sys.argv:
        DOCUMENT.write_text(after)
    elif before != after:
        sys.exit(f"{DOCUMENT} is out of date; --write makes it anew")


if __name__ == "__main__":
    main()
