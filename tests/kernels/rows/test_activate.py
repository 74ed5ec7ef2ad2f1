"""Units of 128 columns that are activated in front of a second product know no expert."""

from __future__ import annotations

import pytest
import torch

from moe_ops.activations import Activation, formula
from moe_ops.kernels.activation import activated_by_expert
from moe_ops.kernels.launch import gpu, run
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.rows.operand import Operand
from tests.support import oracle

kernels = pytest.importorskip("moe_ops.kernels.rows.activate")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
R, I = 16, 128  # rows of two experts


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("by_expert", [False, True])
def test_parameters_by_expert_do_not_compile(masked, by_expert):
    act = Activation("swigluoai", limit=torch.tensor([1.0, 2.0]) if by_expert else 1.5)
    numbers = None if act.by_expert is None else act.by_expert.to(DEVICE)
    x = torch.randn(2 * R, 2 * I).to(torch.bfloat16)
    data = torch.full((2 * R, I), torch.nan, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.full((2 if masked else 1, 1, R if masked else 2 * R), torch.nan, device=DEVICE)
    rows = None if masked else torch.arange(2 * R, dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([R, R if masked else 2 * R], dtype=torch.int32, device=DEVICE)
    layout, device = Layout(rows, ends, scale.shape[2]), data.get_device()
    of, h = gpu(device), Operand(data, scale, "fp32")
    launch = kernels.activate(h, activated_by_expert(act, numbers), x.to(DEVICE), layout, of)
    if by_expert:
        with pytest.raises(Exception, match="parameters by expert"):
            run([launch], device, of)
        return
    run([launch], device, of)
    y = data.double() * scale.reshape(-1, 1)
    assert oracle.relative_error(y.cpu(), formula(x.double(), act)) < 2**-5
