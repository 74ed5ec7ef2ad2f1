"""The kernels of one token (kernels/triton_vector.py) against fp64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from moe_ops.backends import triton as backend
from moe_ops.kernels import triton_tiles
from moe_ops.kernels.triton_tiles import Tile, Tiles
from tests import cases
from tests.cases import BF16, FP32, Case, assert_matches, tolerance
from tests.test_triton_packed import everywhere

pytest.importorskip("triton")

IDS = torch.tensor([[2, 0, 3]])
SIZES = {"M": 1, "E": 4, "top_k": 3, "K": 144, "I": 80, "ids": IDS}
SCHEMES = ["", "fp8_block"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels that a test launched."""
    found: list[str] = []
    run = backend.run

    def spy(launches, *rest):
        found.extend(launch.kernel for launch in launches)
        return run(launches, *rest)

    monkeypatch.setattr(backend, "run", spy)
    return found


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"bias": True, "expert_map": True, "ids": torch.tensor([[1, 4, 2]])},
        {"activation": "swigluoai", "bias": True},
        {"activation": "relu2_no_mul", "bias": True},
        {"on_input": True, "top_k": 1, "ids": IDS[:, :1]},
        {"ids": torch.tensor([[-1, 2, 9]]), "bias": True},  # two experts are elsewhere
        {"ids": torch.tensor([[2, 2, 0]]), "ids_dtype": torch.int64, "weights_dtype": BF16},
    ],
    ids=str,
)
def test_values(where, scheme, how, kernels):
    Case(*where, scheme, **{**SIZES, **how}).check("triton")
    assert kernels == ["vector_gemm1", "vector_gemm2"]


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_expert_is_here(where, scheme, kernels):
    case = Case(*where, scheme, **{**SIZES, "ids": torch.tensor([[-1, 4, 2**31 - 1]])}, bias=True)
    assert (case.run("triton") == 0).all()
    assert kernels == ["vector_gemm1", "vector_gemm2"]


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("first", [Tile(1, 256, 1, 2), Tile(8, 128, 3, 4)], ids=str)
@pytest.mark.parametrize("second", [Tile(16, 128, 1, 4), Tile(2, 128, 3, 8)], ids=str)
def test_every_kind_of_tile(where, scheme, first, second):
    """Columns that tiles do not divide, one step and several, with and without stages."""
    case = Case(*where, scheme, **SIZES)
    tiles = Tiles(True, 1, first, second, 64, wide_h=True, vector=True)
    with triton_tiles.searching(tiles):
        case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_stays_where_it_is(where, scheme):
    """NaN of an expert that nobody chose, of the routing weight of one elsewhere, and in x."""
    case = Case(*where, scheme, **{**SIZES, "ids": torch.tensor([[2, -1, 3]])})
    case.args[3][0, 1] = math.nan
    if not scheme:
        case.args[1][1], case.args[2][1] = math.nan, math.nan
    out = case.run("triton")
    case.args[3][0, 1] = 0.0
    if not scheme:
        case.args[1][1], case.args[2][1] = 0.0, 0.0
    assert_matches(out, case.reference(), tolerance(where[1], scheme, where[0]))
    case.args[0][0, 3] = math.nan
    assert case.run("triton").isnan().all()


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
def test_strides(where, scheme, kernels):
    """A token whose columns lie apart, and weights that are a part of others."""
    case = Case(*where, scheme, **SIZES)
    x, w13, w2, weights, ids = case.args
    wide = cases.garbage(x.new_empty(1, 3 * x.shape[1]))
    wide[:, ::3] = x
    case.args = [wide[:, ::3], w13[:3], w2[:3], weights, ids.clamp(max=2)]
    case.check("triton")
    assert kernels == ["vector_gemm1", "vector_gemm2"]


@pytest.mark.parametrize(
    "sizes, scheme",
    [({"K": 136}, ""), ({"I": 72}, ""), ({}, "fp8_channel"), ({"M": 2, "ids": None}, "")],
)
def test_other_layers_take_other_kernels(sizes, scheme, kernels):
    Case("cpu", FP32, scheme, **{**SIZES, **sizes}).check("triton")
    assert not any("vector" in kernel for kernel in kernels)
