"""docs/from_vllm.md: every name of vLLM's configurations has a row, and the rows are true."""

import itertools
import re

import pytest

import moe_ops
import moe_ops.parallel.dispatch
from moe_ops import activations
from moe_ops.nn.config import MoEConfig
from moe_ops.parallel import all2all
from moe_ops.parallel.config import ParallelConfig
from moe_ops.routing.methods import RoutingMethod
from moe_ops.schemes import GroupShape, get_scheme
from tests.support import vllm_names
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


def test_every_name_has_a_row():
    assert set(QUANTIZATION) == {*vllm_names.QUANTIZATION, *vllm_names.PREDICATES}
    assert set(PARALLEL) == {*vllm_names.PARALLEL, *vllm_names.PARALLEL_PREDICATES}
    assert set(LAYER) - {"tp_size", "dp_size", "ep_size"} == set(vllm_names.LAYER)
    words = set(re.findall(r"\w+", TEXT))
    for name in (*vllm_names.BUILDERS, *vllm_names.TENSORS):
        assert name in words, f"docs/from_vllm.md lacks {name}"


def test_every_scheme_it_names_exists():
    configs = TEXT[TEXT.index("## Quantization configs") : TEXT.index("`FusedMoEQuantDesc`")]
    rows = [line for line in configs.splitlines() if line.startswith("|")]
    named = re.findall(r'`"([a-z0-9_:]+)"`', "\n".join([row.split(" | ")[1] for row in rows[2:]]))
    assert len(named) > 20
    for name in named:
        get_scheme(name)


@pytest.mark.parametrize("name", vllm_names.PREDICATES)
def test_predicates_of_schemes_agree(name):
    code, seen = expression(QUANTIZATION[name]), set()
    for scheme_name, config in vllm_names.CONFIGS.items():
        scheme = get_scheme(scheme_name)
        w, a = scheme.weight, scheme.activation
        if name == "is_per_tensor" and a is not None and (a.is_mx or a.global_scale):
            continue  # the row says that they differ
        got = bool(eval(code, {"w": w, "a": a, "scheme": scheme}))
        assert got == vllm_names.PREDICATES[name](config), scheme_name
        seen.add(got)
    assert seen == {True, False}


def test_values_of_schemes_agree():
    formats = {"fp8": "e4m3", "fp8 of its own": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1"}
    formats |= {"nvfp4": "e2m1", "mxfp6_e3m2": "e3m2", "mxfp6_e2m3": "e2m3"}
    shapes = {"token": (5, 1), (128, 128): (5, 2), "tensor": ()}
    for scheme_name, config in vllm_names.CONFIGS.items():
        scheme = get_scheme(scheme_name)
        names = {"w": scheme.weight, "a": scheme.activation, "scheme": scheme}
        names |= {"E": 3, "M": 5, "N": 7, "K": 256}

        def of(name, names=names):
            return eval(expression(QUANTIZATION[name]), names)

        assert of("quant_dtype") == (config.a and formats.get(config.a, config.a))
        assert of("weight_quant_dtype") == formats.get(config.w, config.w)
        assert of("ocp_mx_scheme") == scheme_name
        assert of("config_name") == scheme.config_name
        if config.a_shape in shapes and scheme.activation.group != GroupShape(1, 32):
            if scheme.activation.global_scale:
                continue
            shape = shapes[config.a_shape]
            assert of("scale_shape") == shape
            assert of("batched_scale_shape") == (3, *shape)


def parallels():
    """Every kind of deployment, as the last of its devices sees it."""
    for ep, tp, dp, pcp, sp, backend in itertools.product(
        (False, True), (1, 2), (1, 2), (1, 2), (1, 2), all2all.NAMES
    ):
        yield ParallelConfig.make(
            tp_size=tp,
            dp_size=dp,
            pcp_size=pcp,
            sp_size=sp,
            enable_expert_parallel=ep,
            all2all_backend=backend,
        )


@pytest.mark.parametrize("name", vllm_names.PARALLEL_PREDICATES)
def test_predicates_of_parallel_configs_agree(name):
    right = PARALLEL[name]
    code = f"parallel.{name}" if right.startswith("the same") else expression(right)
    seen = set()
    for parallel in parallels():
        got = eval(code, {"parallel": parallel})
        assert got == vllm_names.PARALLEL_PREDICATES[name](parallel), parallel
        seen.add(got)
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
    for name in vllm_names.ACTIVATIONS:
        assert f'`"{name}"`' in rows["MoEActivation"]
        assert name in activations.NAMES
    routing = {name.rpartition(".")[2]: right for name, right in rows.items()}
    for name in vllm_names.ROUTING:
        for method in re.findall(r'"(\w+)"', routing[name]):
            assert RoutingMethod(method)
