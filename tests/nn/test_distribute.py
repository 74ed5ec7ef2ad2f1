"""distribute() in one process, as one rank of a group in which nothing is sent; what ranks compute
together is tested in tests/parallel.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moe_ops
from moe_ops.nn.distribute import distribute
from tests.parallel.conftest import world  # noqa: F401 - a fixture

E, H, I = 5, 32, 64


@pytest.fixture
def mesh(world, monkeypatch):  # noqa: F811
    world(1, 2)

    def alike(gathered, mine, group):
        gathered[:] = [mine] * len(gathered)

    monkeypatch.setattr(dist, "all_gather_object", alike)
    return lambda name="dp": init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


def layer(**options):
    return moe_ops.MoELayer(H, I, E, 2, **options)


def test_a_layer_on_the_meta_device_gets_its_values_later(mesh):
    whole = layer(expert_bias=True)
    spread = distribute(layer(expert_bias=True, device="meta"), mesh(), max_num_tokens=7)
    assert spread.experts.down_proj.is_meta and spread.dispatcher.max_num_tokens == 7
    state = distribute(whole, mesh()).state_dict()
    spread.to_empty(device="cpu").load_state_dict(state)
    assert spread.expert_map.tolist() == [-1, -1, -1, 0, 1]
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        assert len(getattr(spread.experts, name)) == 2


def test_what_required_gradients_still_does(mesh):
    model = nn.ModuleDict({"a": layer(), "b": layer()})
    model["a"].experts.down_proj.requires_grad_(False)
    whole = {name: w.detach().clone() for name, w in model.named_parameters()}
    assert distribute(model, mesh()) is model
    for name, weight in model.named_parameters():
        share = whole[name][3:] if "experts" in name else whole[name]
        assert torch.equal(weight, share), name
        assert weight.requires_grad == (name != "a.experts.down_proj")
    assert "layer" not in model["a"].dispatcher.label and "a" in model["a"].dispatcher.label


def with_lora():
    model = layer()
    model.add_lora(2)
    return model


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda: nn.Linear(2, 2), {}, "model must contain MoELayers, got Linear"),
        (with_lora, {}, "layer '' must have no adapters"),
        (lambda: layer(batch_invariant=True), {}, "batch_invariant must be False"),
        (lambda: moe_ops.MoELayer(H, I, 1, 1), {}, "layer '' must have at least one expert"),
        (
            lambda: layer(expert_bias=True),
            {"enable_expert_parallel": False},
            "layer '' must have no biases",
        ),
        (layer, {"max_num_tokens": 0}, "max_num_tokens"),
        (layer, {"all2all_backend": "mori"}, "all2all_backend must be one of"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(make, options, said, mesh):
    model = make()
    before = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        distribute(model, mesh(), **options)
    assert before == {name: id(p) for name, p in model.named_parameters()}
    assert getattr(model, "dispatcher", None) is None


def test_redundant_experts_are_made_with_a_layer(mesh):
    whole = layer()
    with pytest.raises(ValueError, match="^enable_eplb must be left out of distribute, got True"):
        distribute(whole, mesh(), enable_eplb=True)
    assert whole.dispatcher is None
