"""docs/from_vllm.md: what its rows name exists here, and their code runs."""

import re

import pytest

import moe_ops
import moe_ops.parallel.dispatch
from moe_ops import activations
from moe_ops.nn.config import MoEConfig
from moe_ops.parallel.config import ParallelConfig
from moe_ops.routing.methods import RoutingMethod
from moe_ops.schemes import SCHEMES, get_scheme
from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "from_vllm.md").read_text()
CODE = re.compile(r"`([^`]+)`")


def table(head: str) -> dict[str, str]:
    """vLLM's name -> our side of its row, of the tables whose first column is headed so."""
    found: dict[str, str] = {}
    for block in re.findall(
        rf"^\| {re.escape(head)} \| here \|\n\|---\|---\|\n((?:\|.*\n)+)", TEXT, re.M
    ):
        for line in block.splitlines():
            left, right = line.strip("| ").split(" | ")
            for name in CODE.findall(left):
                assert name not in found, f"{name} has two rows"
                found[name] = right
    return found


def expression(right: str) -> str:
    """The code that our side begins with."""
    found = re.match(r"`([^`]+)`", right)
    assert found is not None, right
    return found.group(1)


QUANTIZATION = table("`FusedMoEQuantConfig`")
PARALLEL = table("`FusedMoEParallelConfig`")
LAYER = table("`FusedMoEConfig`")


def test_every_scheme_it_names_exists():
    configs = TEXT[TEXT.index("## Quantization configs") : TEXT.index("`FusedMoEQuantDesc`")]
    rows = [line for line in configs.splitlines() if line.startswith("|")]
    named = re.findall(r'`"([a-z0-9_:]+)"`', "\n".join([row.split(" | ")[1] for row in rows[2:]]))
    assert len(named) > 20
    for name in named:
        get_scheme(name)


PREDICATES = [
    name
    for name, right in QUANTIZATION.items()
    if name.startswith(("is_", "use_", "per_")) and right.startswith("`")
]


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates_of_schemes_tell_them_apart(name):
    code, seen = expression(QUANTIZATION[name]), set()
    for scheme in filter(lambda scheme: scheme.weight is not None, SCHEMES.values()):
        seen.add(bool(eval(code, {"w": scheme.weight, "a": scheme.activation, "scheme": scheme})))
    assert seen == {True, False}


def test_what_is_called_the_same_is():
    parallel = ParallelConfig()
    layer = MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=8, intermediate_size=8)
    for rows, ours in ((PARALLEL, parallel), (LAYER, layer)):
        for name, right in rows.items():
            assert right.startswith(("the same", "not here: ", "`")), f"{name}: {right}"
            assert hasattr(ours, name) or not right.startswith("the same"), name
            if right.startswith("not here"):
                assert not hasattr(ours, name), name


def test_names_of_ours_exist():
    names = {
        "moe_ops": moe_ops,
        "ParallelConfig": ParallelConfig,
        "Activation": activations.Activation,
    }
    names["parallel"] = ParallelConfig()
    names["layer"] = MoEConfig(
        num_experts=4, experts_per_token=2, hidden_dim=8, intermediate_size=8
    )
    for rows in (PARALLEL, LAYER):
        for right in rows.values():
            for code in CODE.findall(right):
                if re.match(r"(?:parallel|layer|moe_ops|ParallelConfig)\b", code):
                    eval(code.split("(")[0], names)


def test_activations_and_routing_methods_exist():
    rows = table("elsewhere")
    for name in re.findall(r'`"(\w+)"`', rows["MoEActivation"]):
        assert name in activations.NAMES
    routing = [
        right for name, right in rows.items() if name.startswith(("RoutingMethodType.", "."))
    ]
    assert len(routing) > 10
    for right in routing:
        for method in re.findall(r'"(\w+)"', right):
            assert RoutingMethod(method)
