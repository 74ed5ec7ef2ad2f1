"""torchtitan's experts on moe_ops, beside its own."""

from dataclasses import dataclass

import pytest
import torch

from tests.support.oracle import relative_error

pytest.importorskip("torchtitan")
pytest.importorskip("triton")

from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

E, D, F = 4, 64, 32


def build(override: str = ""):
    """Routed experts, with an override."""
    cfg = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=2),
    )
    if override:
        name = f"moe_ops.integrations.torchtitan.{override}"
        apply_overrides(OverrideConfig(imports=[name]), cfg)
    return cfg.build().inner_experts


@pytest.mark.parametrize("override", ["grouped_experts", "fused_grouped_experts"])
def test_experts_of_an_override(override):
    """The output, the gradients, and the checkpoint are the stock ones."""
    g = torch.Generator().manual_seed(0)
    stock, ours = build(), build(override)
    state = {
        name: torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5
        for name, p in stock.named_parameters()
    }
    for module in (stock, ours):
        module.load_state_dict(state)
    counts = torch.tensor([5, 0, 9, 2])
    x, grad = torch.randn(16, D, generator=g), torch.randn(16, D, generator=g)
    found = []
    for module in (stock, ours):
        rows = x.clone().requires_grad_()
        out = module(rows, counts)
        out.backward(grad)
        found.append((out, rows.grad, module))
    (want, dx, _), (out, dx_of_ours, _) = found
    assert out.dtype == torch.float32
    assert relative_error(out, want) < 0.01 and relative_error(dx_of_ours, dx) < 0.01
    of_stock = {name: p.grad for name, p in stock.named_parameters()}
    of_ours = {name: p.grad for name, p in ours.named_parameters()}
    if "w13" in of_ours:
        of_ours["w1_EFD"], of_ours["w3_EFD"] = of_ours.pop("w13").unbind(2)
    for name, gradient in of_stock.items():
        assert of_ours[name].dtype == torch.float32
        assert relative_error(of_ours[name], gradient) < 0.01, name
    saved = ours.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)


def test_other_experts_are_left_alone():
    """Configurations that derive from the stock one have a formula of their own."""

    class Other(GroupedExperts):
        @dataclass(kw_only=True, slots=True)
        class Config(GroupedExperts.Config):
            pass

    cfg = RoutedExperts.Config(
        inner_experts=Other.Config(dim=D, hidden_dim=F, num_experts=E),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=2),
    )
    name = "moe_ops.integrations.torchtitan.grouped_experts"
    apply_overrides(OverrideConfig(imports=[name]), cfg)
    assert type(cfg.inner_experts) is Other.Config
