"""Padding of continuous batching: experts and records leave it out, under graphs and compiled.

Batches are padded on a CPU by `pad_inputs`, or since they are compiled; values are those of
unbatched greedy generation.
"""

from __future__ import annotations

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import moe_ops

transformers = pytest.importorskip("transformers")
import moe_ops.integrations.transformers as moe_transformers
from moe_ops.integrations.transformers import activations, padding

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "eos_token_id": None,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
NEW = 4
LENGTHS = (3, 17, 8)


@functools.cache
def built(family: str):
    torch.manual_seed(0)
    if family == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=6)
        model = transformers.MixtralForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=32)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
    return model.eval()


def model_of(family: str):
    model = copy.deepcopy(built(family))
    model.set_attn_implementation("paged|sdpa")
    return model


def prompts(lengths=LENGTHS):
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(1, 300, (n,), generator=rng).tolist() for n in lengths]


def want_of(family: str, device: str = "cpu", lengths=LENGTHS):
    model = copy.deepcopy(built(family)).to(device)
    model.set_experts_implementation("eager")
    found = []
    for prompt in prompts(lengths):
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        found.append(out[0, len(prompt) :].tolist())
    return found


def batched(model, padded: bool = True, compile_config=None, record=None, lengths=LENGTHS):
    """Greedy tokens of all prompts, in batches that are padded to multiples of 64."""
    config = transformers.ContinuousBatchingConfig(
        num_blocks=8,
        block_size=16,
        max_batch_tokens=64,
        max_requests_per_batch=4,
        varlen_compile_config=compile_config,
        use_cuda_graph=model.device.type == "cuda",
    )
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(greedy, config)
    if model.device.type == "cuda":
        manager.warmup()
        record.clear()
    else:
        manager.batch_processor = manager._create_batch_processor()
        manager.batch_processor.model_runner.pad_inputs = padded
        if padded and compile_config is None:
            padding.leave_out_padding(model)  # no graphs here, for which this would be done
    names = manager.add_requests(prompts(lengths), max_new_tokens=NEW)
    manager.start()
    try:
        found = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=300)
            assert result is not None, manager.background_thread_status.fatal_error
            assert result.error is None, result.error
            if result.is_finished():
                found[result.request_id] = result.generated_tokens
    finally:
        manager.stop()
    return [found[name] for name in names]


@pytest.fixture
def calls(monkeypatch):
    """The ids that reach the experts."""
    found, own = [], activations.fused_experts

    def fused_experts(x, w13, w2, weights, ids, **options):
        found.append(ids.clone())
        return own(x, w13, w2, weights, ids, **options)

    monkeypatch.setattr(activations, "fused_experts", fused_experts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_padding_reaches_no_expert(family, calls):
    model = model_of(family)
    moe_transformers.attach(model)
    calls.clear()
    assert batched(model) == want_of(family)
    assert all(ids.shape[0] == 64 for ids in calls)
    tokens = [int((ids >= 0).all(1).sum()) for ids in calls]
    assert all(bool((ids[n:] == -1).all()) for ids, n in zip(calls, tokens, strict=True))
    layers = SIZES["num_hidden_layers"]
    assert sum(tokens) == layers * (sum(LENGTHS) + len(LENGTHS) * (NEW - 1))
    calls.clear()  # of other forwards nothing is left out
    model.set_attn_implementation("sdpa")
    model(torch.arange(64)[None])
    assert all(bool((ids >= 0).all()) for ids in calls) and len(calls) == layers


@pytest.mark.slow
def test_managers_in_two_threads(monkeypatch):
    """Each leaves out its own padding: forwards wait for one another in every layer."""
    model, barrier, rows = model_of("qwen3_moe"), threading.Barrier(2, timeout=60), {}
    moe_transformers.attach(model)
    own = activations.fused_experts

    def fused_experts(x, w13, w2, weights, ids, **options):
        barrier.wait()
        rows.setdefault(threading.get_ident(), []).append(int((ids >= 0).all(1).sum()))
        return own(x, w13, w2, weights, ids, **options)

    monkeypatch.setattr(activations, "fused_experts", fused_experts)
    both = LENGTHS, (20, 9)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda lengths: batched(model, lengths=lengths), both))
    assert found == [want_of("qwen3_moe", lengths=lengths) for lengths in both]
    steps = [[sum(lengths), *[len(lengths)] * (NEW - 1)] for lengths in both]
    layers = SIZES["num_hidden_layers"]
    want = [[n for n in of for _ in range(layers)] for of in steps]
    assert sorted(rows.values()) == sorted(want)


@pytest.mark.slow
def test_the_record_has_the_tokens_alone():
    """Those of unpadded batches, in their order."""
    records = []
    for padded in (True, False):
        model = model_of("qwen3_moe")
        moe_transformers.attach(model)
        moe_transformers.fuse_routers(model)
        with moe_transformers.record_routing(model, 100) as record:
            assert batched(model, padded) == want_of("qwen3_moe")
        records.append(record.ids())
    for padded, plain in zip(*records, strict=True):
        assert padded.shape[0] == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
        assert torch.equal(padded, plain)


@pytest.mark.slow
def test_experts_of_others_get_all_ids():
    """They read a weight by any id."""
    model = model_of("qwen3_moe")
    model.set_experts_implementation("grouped_mm")
    assert batched(model) == want_of("qwen3_moe")


def test_a_forward_that_fails_leaves_nothing_behind(calls):
    model = model_of("qwen3_moe")
    moe_transformers.attach(model)
    padding.leave_out_padding(model)
    padding.leave_out_padding(model)  # once is enough
    assert len(model._forward_pre_hooks) == 1
    lengths = torch.tensor([0, 2, 2], dtype=torch.int32)
    with pytest.raises(AttributeError):  # of what is no cache
        model(input_ids=torch.arange(4)[None], cu_seq_lens_q=lengths, cache=1)
    calls.clear()
    moe_ops.warmup(model, [4], show_progress=False)  # calls layers by themselves
    assert calls and all(bool((ids >= 0).all()) for ids in calls)
    copied = copy.deepcopy(model)
    batch, other = [next(iter(m._forward_pre_hooks.values())).args[0] for m in (model, copied)]
    assert batch is not other
    assert getattr(copied.model.layers[0].mlp.gate, padding.ATTRIBUTE) is other


@pytest.mark.parametrize("layers", [True, False])
def test_a_part_that_is_compiled_finds_the_forward(layers):
    """Layers of a model that is not compiled, and what runs uncompiled within one that is."""
    batch = padding.Batch()

    def tokens_of(ids):
        forward = batch.of(ids.shape[0])
        return torch.zeros_like(ids) if forward is None else forward.tokens[:, 0].int()

    def begin(lengths):
        batch.begin(lengths, 4, None)

    torch._dynamo.reset()
    compiled = torch.compile(tokens_of if layers else begin, backend="eager", fullgraph=True)
    found, began = (compiled, begin) if layers else (tokens_of, compiled)
    ids = torch.arange(4, dtype=torch.int32)
    try:
        for tokens in (2, 3):
            began(torch.tensor([0, tokens], dtype=torch.int32))
            assert found(ids).tolist() == [1] * tokens + [0] * (4 - tokens)
            batch.end()
            assert found(ids).tolist() == [0] * 4
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_compiled():
    """Hooks are traced: the same values from as many graphs as without them."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([node for node in graph.graph.nodes if node.target is torch.where])
        return graph.forward

    for family in ("moe_ops", "grouped_mm"):
        model = model_of("qwen3_moe")
        model.set_experts_implementation(family)
        config = transformers.CompileConfig(mode=None, fullgraph=False, dynamic=True)
        config.backend = backend
        torch._dynamo.reset()
        try:
            assert batched(model, compile_config=config) == want_of("qwen3_moe")
        finally:
            torch._dynamo.reset()
    ours, others = graphs[: len(graphs) // 2], graphs[len(graphs) // 2 :]
    assert len(ours) == len(others)
    assert sum(map(len, ours)) > sum(map(len, others))  # layers may share a graph


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs():
    """Captured, the number of tokens is that of each replay, and so is what is recorded."""
    model = model_of("qwen3_moe").to("cuda")
    moe_transformers.attach(model)
    moe_transformers.fuse_routers(model)
    moe_ops.warmup(model, [64], show_progress=False)
    tokens = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    with moe_transformers.record_routing(model, 200) as record:
        assert batched(model, record=record) == want_of("qwen3_moe", "cuda")
    assert padding.batch_in(model) is not None
    assert [ids.shape[0] for ids in record.ids()] == [tokens] * SIZES["num_hidden_layers"]
