"""attach: every layer reported, and models that stay as they were."""

import copy
import pickle
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import nn

import moe_ops
import moe_ops.integrations.transformers as integration
from moe_ops.integrations.transformers import activations
from moe_ops.planning import bind
from tests.integrations.transformers.test_families import FAMILIES, Calls, build, relative
from tests.integrations.transformers.test_models import IDS, experts_of, logits, switches

# --- attach -------------------------------------------------------------------------------------


def test_attach_reports_each_layer():
    model = build("gpt_oss", 2)
    report = integration.attach(model, backend="torch")
    assert [layer.name for layer in report.layers] == [
        f"model.layers.{i}.mlp.experts" for i in (0, 1)
    ]
    for layer in report.layers:
        assert layer.family == "GptOssExperts"
        assert layer.activation == f"swigluoai with limit {experts_of(model).limit:g}"
        assert layer.runs == "torch"
        assert "differs from its own forward by" in layer.check
    assert str(report).count("\n") == 1

    own = integration.attach(build("inkling2", 1)).layers[0]
    assert "own gate" in own.activation
    assert own.runs == "torch_grouped_linear"


def test_attach_with_recompute_keeps_inputs_alone():
    """Of each layer of experts, beside what the router and attention keep."""
    kept = {}
    for recompute in (False, True):
        model = build("mixtral", 1)
        integration.attach(model, "torch", recompute=recompute)
        ids = torch.arange(12).view(1, 12)
        rows = 12 * model.config.num_experts_per_tok
        width = experts_of(model).gate_up_proj.shape[1]
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=shapes: to.append(tuple(t.shape)) or t, lambda t: t
        ):
            out = model(ids).logits
        kept[recompute] = (rows, width) in shapes
        out.sum().backward()
        assert experts_of(model).gate_up_proj.grad.norm() > 0
    assert kept == {False: True, True: False}


def test_attach_bounds_workspaces():
    model = build("mixtral", 1)
    own = logits(model)
    owner = experts_of(model)
    x = torch.randn(30, owner.gate_up_proj.shape[2])
    w13, w2 = owner.gate_up_proj, owner.down_proj
    ids = torch.zeros(30, model.config.num_experts_per_tok, dtype=torch.int64)
    most = moe_ops.explain(x, w13, w2, ids, backend="torch").num_bytes(16)
    integration.attach(model, "torch", max_workspace_bytes=most)
    plans = []
    make_plan = bind.make_plan
    with mock.patch.object(
        bind, "make_plan", lambda *call: plans.append(make_plan(*call)) or plans[-1]
    ):
        assert relative(logits(model), own) < 1e-5
    assert [plan.max_workspace_bytes for plan in plans] == [most]
    for wrong in (0, "1 GiB"):
        with pytest.raises(ValueError, match="max_workspace_bytes must be"):
            integration.attach(build("mixtral", 1), max_workspace_bytes=wrong)
    with pytest.raises(ValueError, match="max_workspace_bytes must be at least .* for a chunk"):
        integration.attach(build("mixtral", 1), max_workspace_bytes=7)


def test_attach_refuses_what_it_cannot_serve():
    dense = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=9,
    )
    with pytest.raises(ValueError, match="must contain MoE layers, got LlamaForCausalLM"):
        integration.attach(transformers.LlamaForCausalLM(dense))
    switch = transformers.SwitchTransformersConfig(
        d_model=16, d_ff=16, num_layers=2, num_heads=2, num_experts=2, vocab_size=9
    )
    with pytest.raises(ValueError, match="use_experts_implementation.*SwitchTransformers"):
        integration.attach(transformers.SwitchTransformersModel(switch))
    for call in (integration.attach, lambda model: integration.quantize(model, "fp8_channel")):
        for what, kind in (("x", "str"), (None, "NoneType")):
            with pytest.raises(ValueError, match=f"model must be a torch.nn.Module, got {kind}"):
                call(what)
        own = torch.nn.Sequential(moe_ops.MoELayer(32, 32, num_experts=2, top_k=1))
        for ours, name in ((own, "0"), (own[0], "model")):
            with pytest.raises(ValueError, match=rf"got {name} \(MoELayer\).*layer.quantize\(sch"):
                call(ours)
    with pytest.raises(ValueError, match="backend must be one of auto, .*got 'cuda'"):
        integration.attach(build("mixtral", 1), backend="cuda")


def test_attach_notices_a_layer_that_computes_something_else(monkeypatch):
    model = build("mixtral", 1)
    monkeypatch.setattr(activations, "_plain", lambda module: moe_ops.Activation("gelu"))
    with pytest.raises(RuntimeError, match="mlp.experts differs from its own forward by"):
        integration.attach(model)
    experts = experts_of(model)
    experts.forward = lambda x, ids, weights: x
    with pytest.raises(RuntimeError, match="did not call moe_ops"):
        integration.attach(model)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4", "dbrx"])
def test_attach_that_fails_leaves_the_model_as_it_was(family, attached):
    """The first layer passes its check, the second does not."""
    model = build(family, 2)
    name = {"llama4": "act_fn", "dbrx": "activation_fn"}.get(family)
    if attached:
        integration.attach(model, backend="torch")
    before, want = switches(model), logits(model)
    if name is None:
        broken = [m for m in model.modules() if hasattr(m, "is_transposed")][1]
        broken.forward = lambda x, ids, weights: x
    else:
        broken = [m for m in model.modules() if hasattr(m, name)][-1]
        kept = getattr(broken, name)
        setattr(broken, name, nn.Mish())
    with pytest.raises((RuntimeError, ValueError), match="did not call moe_ops|the activation of"):
        integration.attach(model)
    if name is None:
        assert broken.forward(1, 2, 3) == 1  # a replacement of the user's stays
        del broken.forward
    else:
        setattr(broken, name, kept)
    assert switches(model) == before
    with Calls() as calls:
        assert torch.equal(logits(model), want)
    assert bool(calls.names) == attached
    report = integration.attach(model)
    assert all("differs from its own forward by" in layer.check for layer in report.layers)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4", "dbrx", "longcat_flash"])
def test_shapes_that_quantize_keeps(family):
    """All but the two that its documentation names."""
    model = build(family, 1)
    before = {name: tuple(p.shape) for name, p in model.named_parameters()}
    integration.quantize(model, "fp8_w8a16:channel")
    changed = {}
    for name, p in model.named_parameters():
        if tuple(p.shape) != before[name]:
            changed[name.rpartition(".")[2]] = (before[name], tuple(p.shape))
    if family == "dbrx":
        config = model.config
        shape = (config.ffn_config.moe_num_experts, config.ffn_config.ffn_hidden_size)
        wide = (*shape, config.d_model)
        assert changed == dict.fromkeys(("w1", "v1", "w2"), ((wide[0] * wide[1], wide[2]), wide))
    elif family == "longcat_flash":
        experts = next(m for m in model.modules() if hasattr(m, "num_routed_experts"))
        (old, new) = changed.pop("gate_up_proj")
        assert not changed
        assert (old[0], new[0]) == (experts.total_experts, experts.num_routed_experts)
        assert old[1:] == new[1:]
    else:
        assert not changed


def test_a_gate_that_was_overridden_is_not_taken_for_the_original():
    model = build("mixtral", 1)
    experts = experts_of(model)

    class Doubled(type(experts)):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.tanh(gate) * up

    experts.__class__ = Doubled
    model.set_experts_implementation("grouped_mm")
    want = logits(model)
    model.set_experts_implementation("moe_ops")
    assert relative(logits(model), want) < 1e-5


@pytest.mark.parametrize("family", ["llama4", "dbrx", "longcat_flash", "step3p7"])
def test_attached_model_survives_copy_and_pickle(family):
    model = build(family, 1)
    integration.attach(model)

    def run(m):
        with torch.no_grad():
            out = m(input_ids=IDS, use_cache=False)
        return out.logits if hasattr(out, "logits") else out.last_hidden_state

    want = run(model)
    clones = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # a clone that still called into its original would notice
    for clone in clones:
        with Calls() as calls:
            assert torch.equal(run(clone), want)
        assert calls.names


def test_llama4_with_several_experts_per_token():
    sizes = FAMILIES["llama4"]
    try:
        FAMILIES["llama4"] = lambda n: sizes(n) | {"num_experts_per_tok": 2}
        model = build("llama4", 1)
    finally:
        FAMILIES["llama4"] = sizes
    want = logits(model)
    integration.attach(model)
    assert relative(logits(model), want) < 1e-5
