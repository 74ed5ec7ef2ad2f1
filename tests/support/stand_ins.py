"""Products that add and activate like those of csrc/cutlass, by those of torch, also in fp32."""

import torch

from moe_ops import activations
from moe_ops.backends.cutlass.schemes import ACTIVATIONS
from moe_ops.ops.products import Products
from moe_ops.planning.training import PORTABLE


def stand_ins(ran: list[str]) -> Products:
    """The products; `ran` gets a word for each that did more than multiply."""

    def multiply(rows, weight, ends, transpose=False, low=None, spare=0):
        assert spare == 0
        y = PORTABLE.multiply(rows, weight, ends, transpose=transpose)
        if low is not None:
            ran.append("low")
            y += PORTABLE.multiply(*low, ends, transpose=transpose)
        return y

    def outer(a, b, ends, spare=0):
        if spare:
            ran.append(f"spare {spare}")
        return PORTABLE.outer(a, b, ends)

    def activate_into(
        out, rows, weight, ends, activation, bias=None, gate_up=None, low=None, up=None
    ):
        ran.append("activated" if up is None else "pair")
        if up is not None:
            weight = torch.cat((weight, up), 1)
        gate_up.copy_(multiply(rows, weight, ends, low=low))
        experts = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
        x = gate_up if bias is None else gate_up + bias[experts.clamp(max=len(bias) - 1)]
        apart = activation.ACTIVATION == "swigluoai" and not activation.INTERLEAVED
        name = activation.ACTIVATION + "_uninterleave" * apart
        out.copy_(activations.formula(x, activations.resolve(name)))

    none = {"adds": True, "pairs": True, "spare": lambda *_: 0}
    return Products("stand-ins", multiply, outer, activate_into, ACTIVATIONS, **none)
