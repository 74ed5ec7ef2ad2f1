"""The families of transformers' models, as families.toml has them: a row for each, all that is
particular to one, by the names of its classes and of their attributes.

Experts on transformers' experts hook say themselves how their weights lie (`is_transposed`,
`is_concatenated`, `has_gate`, `has_bias`) and run as all others do: most rows name a router alone.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

HfModule = Any  # an nn.Module of transformers, whose class alone knows its attributes
_T = TypeVar("_T")


@dataclass(frozen=True)
class Gate:
    """The function between the two projections of a class of experts."""

    name: str = ""  # of the Activation; "": act_fn(gate) * up
    alpha: str = ""  # attributes that hold these parameters
    limit: str = ""
    of_silu: bool = False  # where act_fn is SiLU; with another it is none of moe_ops


@dataclass(frozen=True)
class Router:
    """The formula of a router, in the words of `moe_ops.route`.

    Dtypes are "float32", or that of the "input" or of the "weight".
    """

    method: str = ""
    normalized: str = ""  # the method where norm_topk_prob is true
    choice: str = ""  # attribute whose value, or the class of it, chooses one of `methods`
    methods: dict[str, str] = field(default_factory=dict)
    logits: str = "float32"  # in which the linear layer computes
    weights: str = "float32"  # of the routing weights returned
    returned: str = ""  # of the logits returned, if it is another
    bias: str = ""  # attribute that steers the choice
    takes_bias: bool = False  # it is an argument of the forward
    scale: str = ""  # attribute that multiplies the weights
    averages: bool = False  # the weights are divided by top_k
    groups: bool = False  # chooses from the best of num_group groups, if there are several
    sums_two: bool = False  # without a bias, too, a group is worth its two best scores
    flattens: bool = True  # takes (..., H)
    linear: str = ""  # attribute: its linear layer, if it is not one itself
    top_k: str = "top_k"
    float32_only: bool = False  # scores of other dtypes are rounded before they are compared
    at_most: tuple[str, float] = ("", 0)  # attribute with which it is none of `route` above this
    absent: str = ""  # attribute with which it is none of `route`
    norm: str = ""  # attributes: what the linear layer's input runs through
    factors: tuple[str, ...] = ()  # and is multiplied by
    expert_scale: str = ""  # attribute (E,) that multiplies the weights
    probabilities: bool = False  # returns the softmax of the logits in their place


@dataclass(frozen=True)
class Experts:
    """How a class of experts keeps its weights and is called."""

    form: str = ""  # one of `forwards.FORMS`; "": it goes through transformers' experts hook
    weights: tuple[str, ...] = ("gate_up_proj", "down_proj")  # parameters of the owner
    owner: str = ""  # attribute: the module that owns the experts; "": the module itself
    columns_first: tuple[str, ...] = ()  # weights kept as (E, columns, rows)
    routes: bool = False  # the module is the whole block, fed with hidden states alone
    joined: str = ""  # weights are (E * rows, columns); the attribute that is E
    real: str = ""  # attribute: experts from this one on are identities without weights


@dataclass(frozen=True)
class Mxfp4:
    """Blocks that transformers puts in where it loads MXFP4 by kernels of its own."""

    family: str
    block: str  # "module:class" of the ordinary block


_DATA = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))
FAMILIES: dict[str, dict[str, Any]] = _DATA["families"]


def _of_classes(what: str) -> dict[str, Any]:
    """One field of all families, by class."""
    return {name: said for row in FAMILIES.values() for name, said in row.get(what, {}).items()}


def _made(kind: type[_T], table: dict[str, dict[str, Any]]) -> dict[str, _T]:
    """The rows of a table, whose lists are tuples."""
    rows = {name: row.items() for name, row in table.items()}
    return {
        name: kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row})
        for name, row in rows.items()
    }


_FORMULAS = _made(Router, _DATA["formulas"])
ROUTERS = {name: _FORMULAS[formula] for name, formula in _of_classes("routers").items()}
NOT_COVERED: dict[str, str] = _of_classes("not_covered")  # routers, and why `route` is not theirs
GATES = _made(Gate, _of_classes("gates"))
OUTSIDE = _made(Experts, _of_classes("outside"))
MXFP4 = {  # by the class of their experts
    row["mxfp4"]["experts"]: Mxfp4(name, row["mxfp4"]["block"])
    for name, row in FAMILIES.items()
    if "mxfp4" in row
}


def qualname_of(method: Any) -> str:
    """The name of a method of transformers, with that of the class it was written for; "" for
    others: what overrides one is never mistaken for it.
    """
    ours = getattr(method, "__module__", "").startswith("transformers.")
    return method.__qualname__ if ours else ""


def outside_of(module: HfModule) -> Experts | None:
    """The row of experts that bypass the hook, by the name of their class or of a base class of
    transformers.
    """
    for cls in type(module).__mro__:
        if cls.__module__.startswith("transformers."):
            return OUTSIDE.get(cls.__name__)
    return None
