"""The fp64 layer of the package against the tests' own, and the same limits of error."""

from __future__ import annotations

import pytest
import torch

from moe_ops.schemes import SCHEMES
from moe_ops.selfcheck import reference
from moe_ops.selfcheck.cases import Case, Sizes, allowed_error, compare, inputs
from tests.support import cases, oracle


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda name: name or "plain")
def test_reference_is_the_oracle(scheme):
    for M, bias in ((1, False), (9, True)):
        given = inputs(Case(scheme, Sizes(M, 3, 2, 64, 32, (1,)), 1, bias))
        biases = {"w13_bias": given.w13_bias, "w2_bias": given.w2_bias}
        want = oracle.experts(*given[:5], **biases)
        # where the last bit of fp32 decides, activations are quantized to other codes
        within = 1e-6 if oracle.ACTIVATIONS[scheme] is None else cases.QUANTIZED
        assert oracle.relative_error(reference.experts(*given), want) <= within


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_agrees_is_what_the_tests_allow(device):
    for scheme in SCHEMES:
        assert allowed_error(scheme, device) == cases.tolerance(cases.BF16, scheme, device)


def test_inputs_hold_every_kind_of_id():
    for M in (1, 33):
        given = inputs(Case("", Sizes(M, 5, 2, 64, 32, (1,)), 1, False))
        ids = given.topk_ids
        assert not (ids == 1).any()  # an expert without tokens
        assert ((ids < 0) | (ids >= 5)).any() == (M > 1)
        nowhere = torch.isnan(given.x).any(1)
        assert nowhere.any() == (M > 1) and not nowhere.all()
        weights = given.topk_weights[~nowhere].flatten()
        assert len(set(weights.tolist())) == weights.numel()


def test_a_result_is_compared_in_every_respect():
    given = inputs(Case("", Sizes(9, 3, 2, 64, 32, (1,)), 1, False))
    want = reference.experts(*given)
    nowhere = torch.isnan(given.x).any(1)
    assert compare(want.bfloat16(), given, want).error < 2**-8
    assert compare(want.bfloat16(), given, want).wrong == ""
    assert abs(compare(want * 1.03, given, want).error - 0.03) < 1e-6
    assert "not finite" in compare(torch.where(want == 0, torch.inf, want), given, want).wrong
    small = torch.where(nowhere[:, None], 1e-30, want)
    assert compare(small, given, want).wrong == "tokens without an expert are not zero"
    assert "has shape (9, 63)" in compare(want[:, 1:], given, want).wrong
