"""The static flags of a call, and the text in which ops carry them."""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from moe_ops.activations import Activation, from_op


class Options(NamedTuple):
    """The static flags of a call. A Call has them as given, a Problem as constants, and the
    arguments of an op as its plan set them.
    """

    activation: Activation = None  # type: ignore[assignment]  # grouped_linear has none
    router_weight_on_input: bool = False
    atomic_sums: bool = False  # deterministic=False: kernels may add in any order
    needs_grad: bool = False
    recompute: bool = False  # the first product is computed again in the backward pass
    max_workspace_bytes: int | None = None  # None: the machine's default
    out_dtype: torch.dtype | None = None  # None: that of the input, or bf16 if it is quantized
    batch_invariant: bool = False  # a token's row has the same bits in every batch
    exchange: str = ""  # name of an exchange between ranks (ops/exchange.py)
    # experts whose weights are at hand at a time, in the rows that expert_map names; 0: all
    slots: int = 0
    resident: str = ""  # name of experts whose weights are no arguments (ops/resident.py)
    # set by the plan
    tiers_text: str = ""  # for the ops of "auto" and of resident experts: `text_of_tiers`
    chunk_rows: int = 0  # rows that the workspaces have room for (ops/chunks.py); 0: for all


_FIELDS = Options._fields  # for traced code


def encode(scheme: str, layout: str, options: Options) -> str:
    """The `options` argument of an op: the repr of a dict."""
    parts = [f"'scheme': {scheme!r}, 'layout': {layout!r}"]
    value: Any
    for name, value in zip(_FIELDS, options, strict=True):
        if name == "activation" and value is not None:
            # as constants, also under dynamic=True, which makes symbols of numbers
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
    """The inverse of `encode`: scheme, layout and options.

    Raises:
        ValueError: the text is not a dict of exactly these keys.
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
        # as floats: Triton would specialize on an int 1, and reuse that kernel for 1.702
        given["activation"] = from_op(name, *map(float, numbers))
    if given["out_dtype"] is not None:
        given["out_dtype"] = getattr(torch, given["out_dtype"])
    return scheme, layout, Options(**given)


def text_of_tiers(tiers: tuple[tuple[int, str], ...]) -> str:
    """Tiers (largest M, name of a backend) as text, -1 for no bound: "4:torch,-1:triton"."""
    return ",".join([f"{limit}:{name}" for limit, name in tiers])


def tiers_of_text(text: str) -> tuple[tuple[int, str], ...]:
    """The inverse of `text_of_tiers`."""
    pairs = [tier.split(":") for tier in text.split(",")]
    return tuple([(int(limit), name) for limit, name in pairs])
