"""The paths that a training step takes: each test that asks for `where` runs on all of them."""

import pytest

from moe_ops.backends.cutlass import products as native
from moe_ops.environment import INTERPRETED
from moe_ops.planning import training as planning
from tests.support.cases import BF16, FP16, FP32
from tests.support.places import ON_GPU

PLACES = [
    ("plain", "cpu", FP32),
    ("plain", "cpu", BF16),
    *[pytest.param(("plain", "cuda", dtype), marks=ON_GPU) for dtype in (BF16, FP16, FP32)],
    pytest.param(("torch's products", "cuda", BF16), marks=ON_GPU),
]
KERNELS = [
    pytest.param(
        ("kernels", "cpu", FP32),
        marks=pytest.mark.skipif(not INTERPRETED, reason="plain torch runs here"),
    ),
    pytest.param(("kernels", "cuda", BF16), marks=ON_GPU),
]


def name_of(place: tuple) -> str:
    return "-".join(map(str, place)).replace("torch.", "")


# for tests of kernels alone
kernels = pytest.mark.parametrize("where", KERNELS, ids=name_of, indirect=True)
on_gpu = pytest.mark.parametrize("where", KERNELS[1:], ids=name_of, indirect=True)


@pytest.fixture(params=PLACES + KERNELS, ids=name_of)
def where(request, monkeypatch):
    """Device and dtype, on the path that is asked for: each call must take it."""
    path, device, dtype = request.param
    asked, why_not = [], planning.why_not_kernels

    def noted(*args):
        asked.append(why_not(*args))
        return "the test says so" if path == "plain" else asked[-1]

    monkeypatch.setattr(planning, "why_not_kernels", noted)
    monkeypatch.setattr(planning, "INTERPRETED", INTERPRETED)
    if path == "torch's products":  # as on a GPU without the object of csrc/cutlass
        monkeypatch.setattr(native, "kernels", lambda _: None)
    yield device, dtype
    if path != "plain":
        assert set(asked) == {None} or request.node.callspec.params.get("only") == []
