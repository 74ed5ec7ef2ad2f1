"""The static flags of a call, and how operators carry them: as one text."""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from moe_ops.activations import Activation, from_op


class Options(NamedTuple):
    """What a call is asked for, and how: all that is no tensor, and that no tensor tells. A Call
    has what its user said, a Problem the same as constants, the arguments of an operator that of
    its plan.
    """

    activation: Activation = None  # type: ignore[assignment]  # grouped_linear has none
    router_weight_on_input: bool = False
    atomic_sums: bool = False  # kernels may add in any order: deterministic=False
    needs_grad: bool = False
    recompute: bool = False  # the first product is computed again in the backward pass
    max_workspace_bytes: int | None = None  # None: the machine's default
    out_dtype: torch.dtype | None = None  # None: that of the input, or bf16 if it is quantized
    batch_invariant: bool = False  # a token's row has the same bits in every batch
    exchange: str = ""  # adds up the outputs of all ranks (ops/exchange.py)
    # of a plan
    tiers_text: str = ""  # of the operator `auto`: `text_of_tiers`
    chunk_rows: int = 0  # rows that the workspaces have room for (ops/chunks.py); 0: for all


_FIELDS = Options._fields  # for traced code


def encode(scheme: str, layout: str, options: Options) -> str:
    """The `options` argument of an op: a Python dict as it prints."""
    parts = [f"'scheme': {scheme!r}, 'layout': {layout!r}"]
    value: Any
    for name, value in zip(_FIELDS, options, strict=True):
        if name == "activation" and value is not None:
            # constants, also where dynamic=True makes symbols of them
            alpha, beta, limit = [
                float(guard_scalar(x)) for x in (value.alpha, value.beta, value.limit)
            ]
            parts.append(f"'{name}': ({value.name!r}, {alpha!r}, {beta!r}, {limit!r})")
        elif name == "out_dtype" and value is not None:
            parts.append(f"'{name}': '{str(value).removeprefix('torch.')}'")
        else:
            parts.append(f"'{name}': {value!r}")
    return "{" + ", ".join(parts) + "}"


@functools.lru_cache(maxsize=4096)
def decode(text: str) -> tuple[str, str, Options]:
    """Scheme, layout and options of such a text.

    Raises:
        ValueError: it is no dict of these.
    """
    try:
        given = ast.literal_eval(text)
        if set(given) != {"scheme", "layout", *_FIELDS}:
            raise ValueError
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        names = ", ".join(["scheme", "layout", *_FIELDS])
        raise ValueError(f"options must be a dict of {names}; got {text}") from None
    scheme, layout = given.pop("scheme"), given.pop("layout")
    if given["activation"] is not None:
        name, *numbers = given["activation"]
        # Kernels are compiled for a whole number as for a constant: 1 and 1.702 would not be told
        # apart.
        given["activation"] = from_op(name, *map(float, numbers))
    if given["out_dtype"] is not None:
        given["out_dtype"] = getattr(torch, given["out_dtype"])
    return scheme, layout, Options(**given)


def text_of_tiers(tiers: tuple[tuple[int, str], ...]) -> str:
    """Tiers (largest M, name of a backend), -1 for no bound: "4:torch,-1:triton"."""
    return ",".join([f"{limit}:{name}" for limit, name in tiers])


def tiers_of_text(text: str) -> tuple[tuple[int, str], ...]:
    """The tiers of such a text."""
    pairs = [tier.split(":") for tier in text.split(",")]
    return tuple([(int(limit), name) for limit, name in pairs])
