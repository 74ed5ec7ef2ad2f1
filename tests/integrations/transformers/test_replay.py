"""record_routing and replay_routing: the experts of one forward pass in another."""

import concurrent.futures
import contextlib
import copy

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import moe_ops.integrations.transformers as integration
from tests.integrations.transformers.test_families import build, outputs
from tests.integrations.transformers.test_fuse_routers import (
    FP32_ONLY,
    IDS,
    SETTINGS,
    returns_no_logits,
    routers_of,
)


@contextlib.contextmanager
def returned(routers):
    """What each call of each router returns."""
    calls = []
    handles = [r.register_forward_hook(lambda _, __, out: calls.append(out)) for r in routers]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "fields", "method"), SETTINGS)
def test_every_family_of_routers(family, fields, method):
    """What was chosen gets the same weights again; other experts are taken as they are given."""
    model = build(family, 1)
    routers = routers_of(model)
    if not routers or (family == "longcat_flash" and returns_no_logits(*routers)):
        pytest.skip(f"transformers {transformers.__version__} routes {family} elsewhere")
    for name, value in fields.items():
        setattr(routers[0], name, value)
    before = dict(vars(routers[0]))
    with returned(routers) as own:
        want = outputs(model, IDS)
    with integration.record_routing(model, IDS.numel()) as record:
        assert torch.equal(outputs(model, IDS), want)
    (ids,) = record.ids()
    assert record.names == tuple(n for n, m in model.named_modules() if m is routers[0])
    assert torch.equal(ids, own[0][2].reshape(ids.shape).int())
    with integration.replay_routing(model, [ids]), returned(routers) as replayed:
        torch.testing.assert_close(outputs(model, IDS), want, rtol=1e-4, atol=1e-5)
    for got, expected in zip(replayed[0], own[0], strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    others = torch.stack((ids[:, 0], (ids[:, 0] + 1) % 6), 1)
    with integration.replay_routing(model, [others]), returned(routers) as replayed:
        logits = model(input_ids=IDS, use_cache=False)
        assert not torch.equal(logits[0], want)
    assert torch.equal(replayed[0][2].reshape(others.shape), others.long())
    weights = replayed[0][1]
    (gradient,) = torch.autograd.grad(
        weights.float().square().sum(), list(routers[0].parameters())[:1]
    )
    assert gradient.isfinite().all() and gradient.any()
    assert dict(vars(routers[0])) == before, "the router is as it was"
    assert torch.equal(outputs(model, IDS), want)


def test_a_dtype_without_a_formula_is_refused():
    for family, message in FP32_ONLY.items():
        model = build(family, 1).bfloat16()
        ids = [torch.zeros(IDS.numel(), 2, dtype=torch.int32)]
        with pytest.raises(ValueError, match=message), integration.replay_routing(model, ids):
            pass


def generate(model, tokens=4):
    ids = IDS[:, :3]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )


@pytest.mark.parametrize("attached", [False, True])
def test_a_generation_replayed_as_whole_sequences(attached):
    model = build("qwen3_moe", 2)
    if attached:
        integration.attach(model)
        integration.fuse_routers(model)
    routers = routers_of(model)
    with integration.record_routing(model, 64) as record, returned(routers) as calls:
        sequences = generate(model)
    assert len(calls) == 2 * 4
    ids = record.sequences(2, 3)
    assert [t.shape for t in ids] == [(2 * 6, 2)] * 2
    for layer in range(2):  # tokens of the prompt, then one of each sequence a step
        first, *steps = [ids.reshape(-1, 2) for _, _, ids in calls[layer::2]]
        for b in range(2):
            rows = [*first[3 * b : 3 * b + 3], *[step[b] for step in steps]]
            assert torch.equal(ids[layer].view(2, 6, 2)[b], torch.stack(rows).int())
    whole = sequences[:, :-1]
    with integration.replay_routing(model, ids), returned(routers) as replayed:
        logits = model(input_ids=whole, use_cache=False).logits
    for got, want in zip(replayed, ids, strict=True):
        assert torch.equal(got[2].reshape(want.shape).int(), want)
    torch.testing.assert_close(logits, model(input_ids=whole, use_cache=False).logits)
    logits.float().square().mean().backward()
    assert all(router.weight.grad.any() for router in routers)
    # a number of prompts in the place of that of sequences, and a prompt that came in two calls
    for wrong in ((5, 1), (1, 3), (1, 6), (2, 2), (3, 2)):
        with pytest.raises(ValueError, match="got calls of 6, 2, 2, 2 tokens"):
            record.sequences(*wrong)
    record.clear()
    with pytest.raises(ValueError, match="got calls of no tokens"):
        record.sequences(2, 3)
    with integration.record_routing(model, 64) as record, torch.no_grad():
        for part in (whole[:, :2], whole[:, 2:]):
            model(input_ids=part, use_cache=False)
        with pytest.raises(ValueError, match="got calls of 4, 8 tokens"):
            record.sequences(2, 6)
        kept = record.ids()
        before = [ids.clone() for ids in kept]
        record.clear()
        model(input_ids=whole.flip(1), use_cache=False)
    assert all(torch.equal(ids, old) for ids, old in zip(kept, before, strict=True))


@pytest.mark.slow
def test_compiled_code_records_and_replays():
    """In one graph, whose calls write behind one another."""
    model = build("qwen3_moe", 1)
    integration.attach(model)
    block = model.model.layers[0].mlp
    compiled = torch.compile(copy.deepcopy(block), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = compiled(x)
        with integration.record_routing(compiled, 20) as record:
            for _ in range(2):
                torch.testing.assert_close(compiled(x), want)
            (ids,) = record.ids()
            record.clear()
            assert record.ids()[0].shape[0] == 0
    assert torch.equal(ids[:10], ids[10:])
    with integration.record_routing(block, 10) as eager, torch.no_grad():
        block(x)
    assert torch.equal(ids[:10], eager.ids()[0])
    others, found = (ids[:10] + 1) % 6, []
    for run in (compiled, block):
        with integration.replay_routing(run, [others]):
            out = run(x)
            found.append((out, *torch.autograd.grad(out.square().sum(), run.gate.weight)))
    assert not torch.allclose(found[0][0], want)
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), want)


def test_checkpoints_record_once():
    model = build("qwen3_moe", 1).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with integration.record_routing(model, 64) as record:
        model(input_ids=IDS, use_cache=False).logits.sum().backward()
    (ids,) = record.ids()
    assert ids.shape[0] == IDS.numel()


@pytest.mark.parametrize("family", ["mixtral", "hunyuan_v1_moe"])
def test_weights_that_accelerate_brings(family):
    """It keeps them elsewhere between calls; routers that were fused before run as their own."""
    accelerate = pytest.importorskip("accelerate")
    model = build(family, 2)
    want = outputs(model, IDS)
    with integration.record_routing(model, IDS.numel()) as record:
        outputs(model, IDS)
    ids = record.ids()
    integration.fuse_routers(model)
    accelerate.cpu_offload(model)
    assert any(p.is_meta for p in model.parameters())
    with integration.record_routing(model, IDS.numel()) as record:
        torch.testing.assert_close(outputs(model, IDS), want)
    assert all(torch.equal(a, b) for a, b in zip(record.ids(), ids, strict=True))


@pytest.mark.parametrize("replays", [False, True])
def test_blocks_of_two_threads_do_not_overlap(replays):
    """The end of one would take the other's forwards away, or leave them for good."""
    model = build("qwen3_moe", 1)
    want, before = outputs(model, IDS), set(vars(routers_of(model)[0]))
    ids = torch.zeros(IDS.numel(), 2, dtype=torch.int32)
    block = integration.record_routing(model, 64)
    if replays:
        block = integration.replay_routing(model, [ids])
    with concurrent.futures.ThreadPoolExecutor(1) as other, block:
        with pytest.raises(ValueError, match="must be in no block .* of another thread"):
            other.submit(integration.record_routing(model, 64).__enter__).result()
        with pytest.raises(ValueError, match="another thread|forward is replaced"):
            other.submit(integration.replay_routing(model, [ids]).__enter__).result()
        with integration.record_routing(model, 64):  # this thread's may lie in each other
            pass
    assert set(vars(routers_of(model)[0])) == before
    assert torch.equal(outputs(model, IDS), want)


def test_room_and_arguments():
    model = build("qwen3_moe", 2)
    with integration.record_routing(model, 7) as record:
        outputs(model, IDS)
    with pytest.raises(ValueError, match="max_tokens must be at least 10, .* got 7"):
        record.ids()
    for wrong in (0, 2.5, None):
        with pytest.raises(ValueError, match="max_tokens must be"):
            integration.record_routing(model, wrong).__enter__()
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got str"):
        integration.record_routing("qwen3", 4).__enter__()
    with pytest.raises(
        ValueError, match="model must contain routers that moe_ops knows, got none"
    ):
        integration.replay_routing(nn.Linear(2, 2), []).__enter__()
    ids = torch.zeros(10, 2, dtype=torch.int32)
    with pytest.raises(
        ValueError, match="ids must be one tensor for each of the 2 routers, got 1"
    ):
        integration.replay_routing(model, [ids]).__enter__()
    with pytest.raises(ValueError, match="ids must be one tensor .* got a Tensor"):
        integration.replay_routing(model, ids).__enter__()
    fewer = integration.replay_routing(model, [ids[:9]] * 2)
    with pytest.raises(ValueError, match="a row for each of the 10 tokens .* got 9"), fewer:
        outputs(model, IDS)
    assert "forward" not in vars(routers_of(model)[0]), "restored after an error"
    routers_of(model)[1].forward = lambda x: None
    with pytest.raises(ValueError, match="its forward is replaced by something else"):
        integration.replay_routing(model, [ids] * 2).__enter__()
    other = build("llama4", 1)
    with pytest.raises(ValueError, match="Llama4Router.*it returns a weight for every expert"):
        integration.record_routing(other, 4).__enter__()
