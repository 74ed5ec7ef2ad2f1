"""transformers models on moe_ops living with accelerate and peft."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


import moe_ops.integrations.transformers as integration
from tests.integrations.transformers.test_families import Calls, build, relative
from tests.integrations.transformers.test_models import IDS, logits, model_of

# --- accelerate and PEFT ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "llama4", "dbrx"])
@pytest.mark.parametrize("attach_first", [True, False])
def test_accelerate_offload(family, attach_first):
    accelerate = pytest.importorskip("accelerate")
    model = build(family, 1)
    want = logits(model)
    if attach_first:
        integration.attach(model)
    # llama4's rotary table does not survive offloading, with or without moe_ops: its block alone
    part = model.model.layers[0].feed_forward if family == "llama4" else model
    accelerate.cpu_offload(part, torch.device("cpu"))
    assert next(part.parameters()).device.type == "meta"
    if not attach_first:
        report = integration.attach(model)
        assert all("not loaded" in layer.check for layer in report.layers)
    with Calls() as calls:
        got = logits(model)
    assert calls.names
    assert relative(got, want) < 1e-5


def test_accelerate_dispatch(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = model_of("qwen3_moe", layers=2)
    want = logits(model)
    devices = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    devices |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(
        model, devices, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    with Calls() as calls:
        assert relative(logits(model), want) < 1e-5
    assert calls.names == ["torch_experts"] * 2


def _train(model, steps=3):
    losses = []
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True])
def test_peft_lora_on_attention(quantized):
    peft = pytest.importorskip("peft")
    model = build("qwen3_moe", 1)
    if quantized:  # the experts pass the gradient on through their dequantized values
        integration.quantize(model, "fp8_channel")
    model.set_experts_implementation("moe_ops")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, lora)
    losses = _train(model)
    assert losses[-1] < losses[0]
    moved = [p for n, p in model.named_parameters() if "lora_B" in n]
    assert all(p.abs().max() > 0 for p in moved)


def test_peft_lora_on_expert_parameters():
    peft = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    grads = []
    for implementation in ("eager", "moe_ops"):
        torch.manual_seed(5)
        model = build("qwen3_moe", 1)
        model.set_experts_implementation(implementation)
        lora = peft.LoraConfig(
            r=4, target_modules=[], target_parameters=names, init_lora_weights=False
        )
        model = peft.get_peft_model(model, lora)
        with Calls() as calls:
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        assert any("grouped" in n or "experts" in n for n in calls.names) == (
            implementation == "moe_ops"
        )
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert len(grads[0]) == 4
    for name, grad in grads[0].items():
        assert relative(grads[1][name], grad) < 1e-4, name
    with pytest.raises(ValueError, match="must carry no adapter"):
        integration.quantize(model, "fp8_channel")
