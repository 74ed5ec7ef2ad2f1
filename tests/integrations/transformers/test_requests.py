"""Adapters by request in continuous batching, against generation with one adapter at a time."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import moe_ops.integrations.transformers as moe_transformers
from moe_ops.integrations.transformers import padding
from tests.integrations.transformers.test_padding import built, model_of

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NEW = 4
ADAPTERS = ("first", "second", "__base__", None, "first")


def adapted(modules=(), attached=True):
    """A model with two adapters of other ranks, and with effects that tokens show."""
    torch.manual_seed(3)
    model = None
    for name, rank in (("first", 2), ("second", 3)):
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=100 * rank,
            target_modules=list(modules),
            target_parameters=EXPERTS,
            init_lora_weights=False,
        )
        if model is None:
            model = peft.get_peft_model(model_of("qwen3_moe"), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    if attached:
        moe_transformers.attach(model)
    return model.eval()


def manager_of(model, most: int = 32):
    """Of batches so small that prompts are split, whose parts have no new token."""
    config = transformers.ContinuousBatchingConfig(
        num_blocks=32, block_size=16, max_batch_tokens=most, max_requests_per_batch=8
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    return model.get_base_model().init_continuous_batching(greedy, config)


def results_of(manager, requests, padded: bool):
    manager.batch_processor = manager._create_batch_processor()
    manager.batch_processor.model_runner.pad_inputs = padded
    names = []
    for prompt, adapter in requests:
        named = {} if adapter is None else {"adapter": adapter}
        names.append(manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1, **named))
    manager.start()
    try:
        found = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=300)
            assert result is not None, manager.background_thread_status.fatal_error
            if result.is_finished():
                found[result.request_id] = result
    finally:
        manager.stop()
    return [found[name] for name in names]


def alone(model, prompt, adapter):
    """One request, with one adapter by itself."""
    model.set_adapter(adapter if adapter in ("first", "second") else "first")
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    model.get_base_model().set_attn_implementation("sdpa")
    if adapter in ("first", "second"):
        out = model.generate(input_ids=ids, **options)
    else:
        with model.disable_adapter():
            out = model.generate(input_ids=ids, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_each_request_has_its_adapter(padded):
    """Prompts are the same, so that a cache that were shared would show."""
    model = adapted()
    rng = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, 300, (40,), generator=rng).tolist()
    want = {name: alone(model, prompt, name) for name in dict.fromkeys(ADAPTERS)}
    assert len({tuple(tokens) for tokens in want.values()}) == 3
    model.get_base_model().set_attn_implementation("paged|sdpa")
    manager = manager_of(model)
    assert moe_transformers.adapters_by_request(manager) == ("first", "second")
    requests = [(prompt, name) for name in (*ADAPTERS, "third")]
    *found, unknown = results_of(manager, requests, padded)
    for result, name in zip(found, ADAPTERS, strict=True):
        assert result.error is None, result.error
        assert result.generated_tokens == want[name], name
    assert "adapter must be among first, second and __base__, got 'third'" in unknown.error
    # a manager of which it is not asked has the active adapter for all, as PEFT says
    model.set_adapter("second")
    (result,) = results_of(manager_of(model), [(prompt, None)], False)
    assert result.error is None and result.generated_tokens == want["second"]
    assert padding.batch_in(model.get_base_model()).adapters is None


@pytest.mark.slow
@torch.no_grad()
def test_layers_that_are_compiled():
    """Each has the adapters of its own wrappers, and those of the tokens of each batch."""
    model = adapted()
    moe_transformers.adapters_by_request(manager_of(model))
    batch, names = padding.batch_in(model.get_base_model()), {0: "first", 1: "second"}
    row, x = batch.adapters[1], torch.randn(1, 6, 64)
    torch._dynamo.reset()
    try:
        for layer in model.get_base_model().model.layers:
            want = {}
            for place, name in names.items():
                model.set_adapter(name)
                want[place] = layer.mlp(x)[0]
            with model.disable_adapter():
                want[-1] = layer.mlp(x)[0]
            compiled = torch.compile(layer.mlp, backend="eager")
            for slots in ([0, -1, 1], [1, 0, -1]):
                arguments = torch.full((row + 1, 3), -1, dtype=torch.int32)
                arguments[row] = torch.tensor(slots)
                batch.begin(torch.tensor([0, 2, 3, 6], dtype=torch.int32), 6, arguments)
                found = compiled(x)[0].split([2, 1, 3])
                batch.end()
                parts = [want[slot].split([2, 1, 3])[i] for i, slot in enumerate(slots)]
                torch.testing.assert_close(found, tuple(parts), rtol=1e-4, atol=1e-3)
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_refusals():
    moe_transformers.attach(plain := model_of("qwen3_moe"))
    greedy = transformers.GenerationConfig(eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(
        num_blocks=8, block_size=16, max_batch_tokens=32, max_requests_per_batch=4
    )
    ask = moe_transformers.adapters_by_request
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM without; add some with LoraConfig"):
        ask(plain.init_continuous_batching(greedy, config))
    with pytest.raises(ValueError, match=r"experts alone, got some on model.layers.0.self_attn"):
        ask(manager_of(adapted(modules=["q_proj"])))
    with pytest.raises(ValueError, match=r"call attach\(model\) first"):
        ask(manager_of(adapted(attached=False)))
    kept = peft.LoraConfig(r=2, target_parameters=EXPERTS, modules_to_save=["lm_head"])
    moe_transformers.attach(model := peft.get_peft_model(model_of("qwen3_moe"), kept))
    with pytest.raises(ValueError, match="experts alone, got some on lm_head"):
        ask(manager_of(model))
    model = adapted()
    with model.disable_adapter(), pytest.raises(ValueError, match="merged or disabled"):
        ask(manager_of(model))
    manager = manager_of(model)
    manager.batch_processor = manager._create_batch_processor()
    with pytest.raises(ValueError, match="must not be warmed up or started"):
        ask(manager)
    assert built("qwen3_moe") is not model


def test_one_manager_at_a_time(monkeypatch):
    manager = manager_of(model := adapted())
    moe_transformers.adapters_by_request(manager)
    batch = padding.batch_in(model.get_base_model())
    monkeypatch.setattr(manager, "is_running", lambda: True)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match=r"call its stop\(\)"):
        patched.setattr(type(manager), "__init__", lambda *_, **__: pytest.fail("it was made"))
        manager_of(model)
    assert batch.adapters is not None
    monkeypatch.setattr(manager, "is_running", lambda: False)
    manager_of(model)
    assert batch.adapters is None


def test_asked_twice():
    """It is refused before anything is done, and the requests that name adapters still may."""
    earlier, manager = manager_of(model := adapted()), manager_of(model)
    ask = moe_transformers.adapters_by_request
    names = ask(manager)
    batch = padding.batch_in(model.get_base_model())
    before = batch.adapters, list(manager.logit_processor.logits_processor)
    with pytest.raises(ValueError, match="must be given once, got one whose requests name"):
        ask(manager)
    with pytest.raises(ValueError, match=r"an earlier one .*; stop that one and call init_cont"):
        ask(earlier)
    assert (batch.adapters, list(manager.logit_processor.logits_processor)) == before
    assert not earlier.logit_processor.logits_processor
    manager.logit_processor.check_kwargs({"adapter": names[1]})
    assert ask(manager_of(model)) == names
    with pytest.raises(ValueError, match="name no adapters any more; add requests to the last"):
        manager.logit_processor.check_kwargs({})
