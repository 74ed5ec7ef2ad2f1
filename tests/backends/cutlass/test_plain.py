"""Backend cutlass beside plain bf16 weights: its kernels under Triton's interpreter around
products in plain torch, and on a GPU the real ones.
"""

from __future__ import annotations

import math

import pytest
import torch

from moe_ops.activations import NAMES
from tests.backends.cutlass.test_layer import (
    check,
    devices,
    products,  # noqa: F401  (a fixture)
    rounded,
)
from tests.support.cases import BF16, FP16, Case, assert_matches, tolerance


def case_of(device: str, **options) -> Case:
    return Case(device, BF16, "", **{"M": 21, "E": 5, "top_k": 3, "K": 64, "I": 48, **options})


@devices
@pytest.mark.parametrize("K, I", [(64, 48), (8, 8), (136, 72), (264, 200)])
@pytest.mark.parametrize("bias", [False, True])
def test_values(device, K, I, bias, products):  # noqa: F811
    check(case_of(device, K=K, I=I, bias=bias))
    if products is not None:
        assert products.calls == [f"moe_ops_sm90_product_{name}" for name in ("activated", "x_wt")]


@devices
@pytest.mark.parametrize("activation", NAMES)
def test_activations(device, activation):
    check(case_of(device, activation=activation, bias=True))


@pytest.mark.slow
@devices
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
@pytest.mark.parametrize("transposed", [(1, 2), (1,), (2,)], ids=["both", "w13", "w2"])
def test_transposed_weights(device, activation, transposed):
    """Stored (E, K, N), as those of gpt-oss; contiguous ones before them have another plan."""
    case = case_of(device, M=40, K=72, I=136, bias=True, activation=activation)
    plain = check(case)
    for i in transposed:
        case.args[i] = case.args[i].mT.contiguous().mT
    out = check(case)
    assert_matches(out, plain.double(), 2 * tolerance(BF16, "", "cuda"))
    case.options["max_workspace_bytes"] = 80_000
    assert torch.equal(case.run("cutlass"), out)
    case.args[1] = torch.cat((case.args[1], case.args[1]), 2)[..., ::2]
    with pytest.raises(ValueError, match="cutlass needs contiguous weights"):
        case.run("cutlass")


@devices
@pytest.mark.parametrize(
    "options",
    [
        {"expert_map": True, "ids_dtype": torch.int64},
        {"E": 1, "top_k": 1},
        {"M": 2, "E": 17},  # most experts have no row
        {"M": 300, "E": 3, "top_k": 2, "ids": torch.arange(600).view(300, 2) % 2},
    ],
    ids=str,
)
def test_routing(device, options):
    check(case_of(device, **options))


@devices
def test_weights_on_the_input(device):
    """Weighed tokens are rounded once more, which the interpreter does towards zero."""
    case = case_of(device, top_k=1, on_input=True, bias=True)
    out, expected = case.run("cutlass"), rounded(BF16, case.reference)
    assert_matches(out, expected, 2 * tolerance(BF16, "", "cuda"))


@devices
def test_nan_stays_in_its_token(device):
    ids = torch.arange(63)[:, None] % 3
    case = case_of(device, M=63, E=3, top_k=1, ids=ids)
    clean = check(case)
    case.args[0][::7] = math.nan
    out = case.run("cutlass")
    keep = torch.arange(63, device=out.device) % 7 != 0
    assert torch.equal(out[keep], clean[keep]) and torch.isnan(out[~keep]).all()


@devices
def test_chunks(device):
    case = case_of(device, M=40)
    whole = check(case)
    case.options["max_workspace_bytes"] = 40_000
    assert torch.equal(case.run("cutlass"), whole)


@devices
def test_what_it_does_not_run(device):
    for case, reason in (
        (Case(device, FP16, "", K=64, I=48), "cutlass takes bfloat16 hidden_states with plain"),
        (case_of(device, I=44), "cutlass needs I to be a multiple of 8, got 44"),
    ):
        with pytest.raises(ValueError, match=reason):
            case.run("cutlass")
