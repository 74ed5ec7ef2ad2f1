"""Models whose experts are in host memory: the text of the same model with its experts in place,
at every budget, and what is refused.
"""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

import moe_ops
import moe_ops.integrations.transformers as integration
from moe_ops.integrations.transformers import budget, hook, moving, quantizer
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.budget import Budget, Demand
from moe_ops.schemes import SCHEMES
from tests.integrations.transformers.checkpoints import (
    E,
    gpt_oss,
    load,
    mixtral,
    qwen,
    replace_stacks,
    requantize,
    save_plain,
    set_config,
)
from tests.integrations.transformers.test_families import FAMILIES, build, outputs
from tests.integrations.transformers.test_models import IDS, logits
from tests.support.paths import ROOT
from tests.support.writers import WRITERS, gpt_oss_blocks

CPU = torch.device("cpu")


def deepseek():
    torch.manual_seed(0)
    return build("deepseek_v3", 2)


MODELS = {"qwen3_moe": qwen, "mixtral": lambda: mixtral(2), "deepseek_v3": deepseek}
MODELS["gpt_oss"] = gpt_oss


def least(model):
    """The smallest gpu_memory that a model takes, by its own sizes."""
    return rest(model) + sum(demand.top_k * demand.slot_bytes for demand in demands(model))


def rest(model):
    experts = {id(p) for x in layers_of.find(model) for p in x.held().values()}
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.nbytes for t in tensors if id(t) not in experts)


def demands(model):
    found = []
    for layer in layers_of.find(model):
        count = sum(p.nbytes for p in layer.held().values())
        num_experts = layer.natural_weight(layer.weights[0]).shape[0]
        config = model.config.get_text_config()
        names = ("num_experts_per_tok", "top_k_experts", "moe_topk")
        top_k = next(filter(None, [getattr(config, name, None) for name in names]))
        found.append(Demand(layer.name, num_experts, top_k, -(-count // num_experts)))
    return found


def text(model, ids=IDS, **options):
    greedy = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    return model.generate(ids, **greedy, **options).tolist()


# --- the budget ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "count"),
    [
        *((7, 7), ("12GiB", 12 * 2**30), ("12GB", 12 * 10**9), ("1.5 gib", 3 * 2**29)),
        *(("100 MB", 10**8), ("3kB", 3000), ("5B", 5), ("auto", "auto")),
    ],
)
def test_a_budget_is_bytes_or_text(given, count):
    assert integration.MoeOpsConfig(gpu_memory=given).gpu_memory == count


@pytest.mark.parametrize(
    "given",
    [
        *(0, -1, True, 1.5, "", "GiB", "12", "12iB", "12GiBs", "-1GB", "0GB", "AUTO ", b"1GB"),
        *("1e3GB", "nan", float("nan"), "inf GB", "9" * 400 + "GB"),
    ],
)
def test_what_is_no_budget(given):
    with pytest.raises(ValueError, match=r'gpu_memory must be .*"12GiB".*got '):
        integration.MoeOpsConfig(gpu_memory=given)


def test_slots_are_equal_shares():
    """Against the definition: no layer could have one more of its equal share, which grows by what
    layers leave that have slots for all their experts.
    """
    rng = torch.Generator().manual_seed(0)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=rng))

    for _ in range(300):
        layers = [Demand(str(i), draw(4, 40), draw(1, 5), draw(1, 50)) for i in range(draw(1, 6))]
        other, extra = draw(0, 1000), draw(0, 4000)
        need = other + sum(layer.top_k * layer.slot_bytes for layer in layers)
        found = budget.slots(layers, other, need + extra)
        more = [
            (count - layer.top_k) * layer.slot_bytes
            for layer, count in zip(layers, found, strict=True)
        ]
        assert sum(more) <= extra
        pairs = [*zip(layers, found, strict=True)]
        assert all(layer.top_k <= count <= layer.num_experts for layer, count in pairs)
        short = [
            (layer, used)
            for layer, used, n in zip(layers, more, found, strict=True)
            if n < layer.num_experts
        ]
        share = (extra - (sum(more) - sum(used for _, used in short))) // max(1, len(short))
        for layer, used in short:
            assert used <= share < used + layer.slot_bytes
        with pytest.raises(ValueError, match=f"at least {need} bytes.* 1 bytes are missing"):
            budget.slots(layers, other, need - 1)


def test_layers_alike_get_equal_slots():
    layers = [Demand(str(i), 128, 8, 1000) for i in range(7)]
    for extra in range(0, 9000, 7):
        assert len(set(budget.slots(layers, 11, 11 + 7 * 8000 + extra))) == 1


def test_auto_leaves_room_for_the_cache(monkeypatch):
    config = qwen().config
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * gib, 12 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: gib)
    config.dtype = torch.bfloat16
    chosen = budget.choose(torch.device("cuda", 0), config)
    cache = budget.CACHE_TOKENS * 2 * 2 * 2 * 64 * 2  # k and v, layers, heads, columns, bytes
    assert chosen.gpu_memory == 11 * gib - cache - gib
    assert "8192 tokens" in chosen.why and "cuda:0" in chosen.why
    with pytest.raises(ValueError, match='on cpu, got "auto"'):
        integration.offload(qwen(), "auto", device="cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib // 2, 12 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: gib)
    with pytest.raises(ValueError, match="leaves nothing"):
        budget.choose(torch.device("cuda", 0), config)


def test_the_cache_is_counted_as_it_will_be():
    """Against the caches that transformers fills."""
    for name, make in MODELS.items():
        model = make()
        with torch.no_grad():
            cache = model(IDS, use_cache=True).past_key_values
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        count = sum(t.nbytes for pair in layers for t in pair) // IDS.shape[0]
        model.config.dtype = torch.float32
        assert budget.cache_bytes(budget.text_config(model), IDS.shape[1]) == count, name


def test_the_report_states_the_formula():
    layers = (Demand("a", 128, 8, 9_000_000), Demand("b", 64, 4, 1_000_000))
    layers += (Demand("c", 8, 2, 5_000_000),)  # which has slots for all
    plan = Budget(layers, (20, 16, 8), 2_000_000, 10**9, CPU)
    report = integration.ResidencyReport(plan, True, 50e9)
    assert plan.host_bytes == 128 * 9_000_000 + 64 * 1_000_000
    assert plan.bank_bytes == 20 * 9_000_000 + 16 * 1_000_000 + 8 * 5_000_000
    for rate in (0, 0.5, 0.9, 1):
        missed = (1 - rate) * (8 * 9_000_000 + 4 * 1_000_000)
        assert report.expected_ms(rate) == pytest.approx(1e3 * missed / 50e9)
    said = str(report)
    assert "50 GB/s" in said and "1.52 ms at 0%" in said and "0 ms at 100%" in said
    assert "a: slots for 20 of 128 experts, 180 MB of 1.15 GB" in said
    unknown = integration.ResidencyReport(plan, True)
    assert unknown.expected_ms(0.5) is None and "not measured" in str(unknown)


# --- the same text ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_text_is_that_of_the_model_with_experts_in_place(name):
    want, model = MODELS[name](), MODELS[name]()
    integration.attach(want)
    report = integration.offload(model, least(model), device="cpu")
    assert report.budget.slots == tuple(demand.top_k for demand in demands(want))
    same(name, logits(model), logits(want))
    integration.residency_stats(model)
    assert text(model, IDS[:1]) == text(want, IDS[:1])
    stats = integration.residency_stats(model)
    (size,) = {demand.slot_bytes for demand in demands(want)}
    assert stats.hits > 0 and stats.bytes == stats.misses * size
    # seven tokens after the prompt, of two experts in each of two layers, which fit the slots
    assert stats.hits + stats.misses == 7 * 2 * 2
    assert integration.residency_stats(model) == (0, 0, 0)
    shapes = [one.model.layers[0].mlp.experts.gate_up_proj.shape for one in (model, want)]
    assert shapes[0] == shapes[1]


def same(name, got, want):
    """To the bit, but where stacks are kept (E, columns, rows), whose products on a CPU add up in
    another order.
    """
    if name in ("aria", "gpt_oss", "llama4", "openai_privacy_filter"):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got, want)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8_w8a16", "int4_w4a16:g64", "fp8_block", "mxfp4_w4a16"])
@pytest.mark.parametrize("build", [qwen, mixtral])
def test_loading_to_host_memory(build, scheme, tmp_path):
    """At several budgets, of checkpoints that are quantized while they are read, or were."""
    save_plain(build(), tmp_path / "plain")
    want = load(tmp_path / "plain", scheme)
    want.save_pretrained(tmp_path / "quantized")
    layers, other = demands(want), rest(want)
    for folder, given in (("plain", scheme), ("quantized", None)):
        for slots in (2, 3, E):
            size = other + sum(slots * demand.slot_bytes for demand in layers)
            config = integration.MoeOpsConfig(given, gpu_memory=size)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / folder, dtype=torch.float32, quantization_config=config
            )
            report = integration.residency_report(model)
            assert report.budget.slots == (slots,) * len(layers)
            assert report.budget.rest == other
            assert torch.equal(logits(model), logits(want))
            assert text(model) == text(want)


def test_a_plain_checkpoint_stays_plain(tmp_path):
    save_plain(qwen(), tmp_path)
    want = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="moe_ops"
    )
    model = from_pretrained(tmp_path, least(want))
    assert torch.equal(logits(model), logits(want))
    assert model.config._experts_implementation == "moe_ops"
    assert getattr(model.config, "quantization_config", None) is None
    assert not hasattr(model, "hf_device_map") and not hasattr(model, "hf_quantizer")
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_named_backend_is_asked_where_the_slots_are(tmp_path, monkeypatch):
    save_plain(qwen(), tmp_path)
    names = []
    asked = hook.attach_layers

    def attach_layers(model, options=None):
        devices = {layer.resident is None for layer in layers_of.find(model)}
        names.append(((options or {}).get("backend"), devices))
        return asked(model, options or {})

    monkeypatch.setattr(quantizer, "attach_layers", attach_layers)
    size = least(qwen().bfloat16()) + 2**12
    config = integration.MoeOpsConfig(backend="torch", gpu_memory=size)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=config
    )
    assert names == [(None, {True}), ("torch", {False})]
    assert "backend torch" in repr(model.model.layers[0].mlp.experts)
    assert logits(model).isfinite().all()
    config = integration.MoeOpsConfig(backend="deep_gemm", gpu_memory=size)
    with pytest.raises(ValueError, match="deep_gemm"):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, quantization_config=config
        )


def from_pretrained(folder, gpu_memory, scheme=None, **options):
    config = integration.MoeOpsConfig(scheme, gpu_memory=gpu_memory)
    options = {"dtype": torch.bfloat16} | options
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, **options
    )


@pytest.mark.sweep
@pytest.mark.parametrize("form", WRITERS)
def test_quantized_checkpoints_of_others(form, tmp_path):
    """The budget before they are read is that after it: by the least that it may be."""
    requantize(tmp_path, copy.deepcopy(WRITERS[form]), qwen())
    want = load(tmp_path)
    model = from_pretrained(tmp_path, least(want), dtype=torch.float32)
    assert integration.residency_report(model).budget.slots == (2, 2)
    assert torch.equal(logits(model), logits(want))
    assert text(model, IDS[:1]) == text(want, IDS[:1])


def test_gpt_oss_in_mxfp4(tmp_path):
    """Transposed stacks with biases, from transformers' own files."""
    import numpy as np

    rng = np.random.default_rng(1)

    def parts(weight):
        (blocks, scales), values = gpt_oss_blocks(rng, E, weight.shape[2], weight.shape[1])
        return {"_blocks": blocks, "_scales": scales}, torch.from_numpy(values).float().mT

    replace_stacks(tmp_path, gpt_oss(), parts)
    set_config(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    want = load(tmp_path)
    model = from_pretrained(tmp_path, least(want), dtype=torch.float32)
    assert integration.residency_report(model).budget.slots == (2, 2)
    assert torch.equal(logits(model), logits(want))
    assert text(model) == text(want)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    want, model = build(family, 1), build(family, 1)
    integration.attach(want)
    if family in ("dbrx", "inkling2", "inkling2_loop", "muse_spark"):
        with pytest.raises(ValueError, match="must be one fused_experts call"):
            integration.offload(model, 10**9, device="cpu")
        return
    integration.offload(model, least(model), device="cpu")
    same(family, outputs(model, IDS), outputs(want, IDS))
    same(family, outputs(model, IDS[:1, :1]), outputs(want, IDS[:1, :1]))
    assert integration.residency_stats(model).misses > 0


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_generation(name):
    """As many graphs, and the tokens of the compiled model with its experts in place."""
    want, model = MODELS[name](), MODELS[name]()
    integration.attach(want)
    integration.offload(model, least(model), device="cpu")
    found, graphs = [], []
    for one in (want, model):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        config = transformers.CompileConfig(
            backend="aot_eager", fullgraph=True, dynamic=False, mode=None
        )
        config._compile_all_devices = True  # else nothing compiles on a CPU
        found.append(text(one, cache_implementation="static", compile_config=config))
        counters = torch._dynamo.utils.counters
        assert not counters["graph_break"]
        graphs.append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1] and graphs[0] == graphs[1] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, "int4_w4a16:g64"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_compiled_generation_on_a_gpu(name, scheme):
    """Captured in CUDA graphs, with an eager prompt of more pairs than slots before them."""
    make = MODELS[name]
    models = [make().bfloat16() for _ in range(2)]
    for model in models:
        if scheme and name != "deepseek_v3":  # which is too narrow for groups
            integration.quantize(model, scheme)
        else:
            integration.attach(model)
    want, model = models
    report = integration.offload(model, least(model), device="cuda")
    assert report.pinned and report.link_rate > 1e9
    assert {p.device.type for n, p in model.named_parameters() if "experts" in n} >= {"cpu"}
    want.cuda()
    ids = IDS.cuda()
    assert torch.equal(logits(model, ids), logits(want, ids))
    found = []
    for one in (want, model):
        torch._dynamo.reset()
        config = transformers.CompileConfig(fullgraph=True, mode="reduce-overhead")
        options = {"cache_implementation": "static", "compile_config": config}
        found.append([text(one, ids[:1], **options) for _ in range(3)])
    assert found[0] == found[1]
    assert integration.residency_stats(model).misses > 0


def test_warm_up_runs_from_slots():
    model = qwen()
    integration.offload(model, least(model), device="cpu")
    report = moe_ops.warmup(model, (1, 3))
    assert [call.num_tokens for call in report.layers[0].calls] == [1, 3]
    assert integration.residency_stats(model).misses > 0


# --- saving, loading, moving, copying -----------------------------------------------------------


def test_files_are_those_of_the_model_with_experts_in_place(tmp_path):
    from safetensors.torch import load_file

    for scheme in (None, "int4_w4a16:g64"):
        want, model = qwen().bfloat16(), qwen().bfloat16()
        for one in (want, model):
            if scheme:
                integration.quantize(one, scheme)
            else:
                integration.attach(one)
        integration.offload(model, least(model), device="cpu")
        state = model.state_dict()
        for name, t in want.state_dict().items():
            same = t.dequantize(), state[name].dequantize()
            assert torch.equal(*same) if hasattr(t, "scheme") else torch.equal(t, state[name])
        assert [*state] == [*want.state_dict()]
        folders = [tmp_path / f"{scheme}{i}" for i in range(2)]
        for one, folder in zip((want, model), folders, strict=True):
            one.save_pretrained(folder)
        texts = [json.loads((folder / "config.json").read_text()) for folder in folders]
        assert texts[0] == texts[1] and "gpu_memory" not in str(texts[1])
        tensors = [load_file(folder / "model.safetensors") for folder in folders]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(t, tensors[1][name]) for name, t in tensors[0].items())


def test_a_state_dict_that_is_loaded_is_what_runs():
    want, model = qwen(), qwen()
    integration.attach(want)
    integration.offload(model, least(model), device="cpu")
    before = logits(model)  # slots have old rows
    state = {
        name: t + torch.randn(t.shape) if "experts" in name else t
        for name, t in want.state_dict().items()
    }
    for one in (want, model):
        one.load_state_dict(state)
    assert torch.equal(logits(model), logits(want)) and not torch.equal(logits(model), before)


def test_it_stays_where_its_slots_are():
    model = qwen()
    integration.offload(model, least(model), device="cpu")
    want = logits(model)
    first = model.model.layers[0].mlp.experts.gate_up_proj.data_ptr()
    assert model.to("cpu") is model and model.cpu().float().to(torch.float32) is model
    for change in (
        lambda: model.half(),
        lambda: model.to(torch.bfloat16),
        lambda: model.to("meta"),
        lambda: torch.nn.Sequential(model).to(torch.bfloat16),
    ):
        with pytest.raises(ValueError, match=r"must stay on cpu in torch\.float32, where"):
            change()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="to be copied or pickled"):
            copied(model)
    assert model.model.layers[0].mlp.experts.gate_up_proj.data_ptr() == first
    assert torch.equal(logits(model), want)


def test_gradients_are_refused():
    model = qwen()
    integration.offload(model, least(model), device="cpu")
    assert not model.model.layers[0].mlp.experts.gate_up_proj.requires_grad
    with pytest.raises(ValueError, match="no_grad|gradient"):
        model(IDS)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="gradient"):
        model.model.layers[0].mlp.experts(*inputs(model))
    assert logits(model).isfinite().all()


def inputs(model):
    ids = torch.tensor([[0, 1], [2, 3]])
    return torch.randn(2, model.config.hidden_size), ids, torch.tensor([[0.3, 0.7], [0.6, 0.2]])


def test_adapters_of_the_rest():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    models = []
    for offloaded in (False, True):
        model = qwen()
        integration.attach(model)
        if offloaded:
            integration.offload(model, least(model), device="cpu")
        torch.manual_seed(3)
        models.append(peft.get_peft_model(model, lora).eval())
    assert torch.equal(*map(logits, models))
    assert not torch.equal(logits(models[0]), logits(qwen()))
    assert torch.equal(*[logits(model, IDS[:1, :1]) for model in models])
    assert integration.residency_stats(models[1]).misses > 0
    with pytest.raises(ValueError, match="must stay on cpu"):
        models[1].half()


def test_adapters_of_experts_are_refused():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj"])
    with pytest.raises(ValueError, match="must carry no adapter, got one; merge it"):
        adapted = peft.get_peft_model(qwen(), lora)
        integration.offload(adapted, 10**9, device="cpu")
    model = qwen()
    integration.offload(model, least(model), device="cpu")
    adapted = peft.get_peft_model(model, lora)
    with pytest.raises(ValueError, match="adapter"):
        logits(adapted)
    with pytest.raises(ValueError, match="adapter"):
        integration.attach(adapted)


# --- what is refused ----------------------------------------------------------------------------


def test_a_budget_below_the_least(tmp_path):
    save_plain(qwen(), tmp_path)
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    size = least(want)
    with pytest.raises(ValueError, match=f"at least {size} bytes.* 1 bytes are missing"):
        from_pretrained(tmp_path, size - 1)
    with pytest.raises(ValueError, match=f"at least {size} bytes"):
        integration.offload(want, size - 1, device="cpu")
    assert from_pretrained(tmp_path, size) is not None


def test_too_little_host_memory_is_said_before_a_byte_is_read(tmp_path, monkeypatch):
    save_plain(qwen(), tmp_path)
    sizes = demands(qwen().bfloat16())
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    size, total = least(plain), sum(p.nbytes for p in plain.parameters())
    slots = sum(demand.top_k * demand.slot_bytes for demand in sizes)
    need = total + sum(b.nbytes for b in plain.buffers()) + sizes[0].bytes + slots
    read = []
    monkeypatch.setattr(budget.environment, "available_host_memory", lambda: need - 1000)
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.safe_open", lambda *a, **k: read.append(a))
        patch.setattr(
            "moe_ops.integrations.checkpoints.files.TensorFiles.read",
            lambda *a, **k: read.append(a),
        )
        with pytest.raises(ValueError, match=r"host memory must have room .* 1 kB are missing"):
            from_pretrained(tmp_path, size)
    assert not read
    monkeypatch.setattr(budget.environment, "available_host_memory", lambda: need)
    model = from_pretrained(tmp_path, size)
    monkeypatch.setattr(budget.environment, "available_host_memory", lambda: 1000)
    with pytest.raises(ValueError, match="for one layer that is moved"):
        integration.offload(plain, size, device="cpu")
    monkeypatch.setattr(budget.environment, "available_host_memory", lambda: None)  # not a Linux
    assert torch.equal(logits(model), logits(from_pretrained(tmp_path, size)))


@pytest.mark.parametrize("device_map", ["auto", {"model": "cpu", "lm_head": 0}, {"": "disk"}])
def test_other_device_maps(device_map, tmp_path):
    save_plain(qwen(), tmp_path)
    with pytest.raises(ValueError, match="device_map must be one device, or None, beside gpu_mem"):
        from_pretrained(tmp_path, 10**9, device_map=device_map)
    assert from_pretrained(tmp_path, 10**9, device_map="cpu") is not None
    with pytest.raises(ValueError, match="device must be a GPU of CUDA, or the CPU, got 'xpu'"):
        integration.offload(qwen(), 10**9, device="xpu")
    with pytest.raises(ValueError, match="device must exist on this machine, got 'cuda:99'"):
        integration.offload(qwen(), 10**9, device=99)


def test_schemes_that_cannot_have_slots(tmp_path):
    """All others can, as loading says before a byte is read, and as their weights say."""
    save_plain(qwen(), tmp_path)
    refused = []
    for scheme in SCHEMES:
        if not scheme or "static" in scheme:
            continue
        try:
            moving.check_scheme(scheme)
        except ValueError:
            refused.append(scheme)
            with pytest.raises(ValueError, match="must have no scale that all tokens share"):
                from_pretrained(tmp_path, 10**9, scheme)
    assert refused == ["fp8_tensor", "fp8_channel_tensor", "int8_w8a8_tensor", "nvfp4"]
    for scheme in refused:
        model = qwen()
        integration.quantize(model, scheme)
        with pytest.raises(ValueError, match="all tokens share a scale"):
            integration.offload(model, least(model), device="cpu")
        assert logits(model).isfinite().all()


def test_models_that_cannot_be_offloaded():
    meta = qwen().to("meta")
    twice, hooked = qwen(), qwen()
    integration.offload(twice, least(twice), device="cpu")
    hooked.model.layers[1]._hf_hook = object()
    for model, message in (
        (meta, "gate_up_proj must be in CPU memory, got meta"),
        (twice, "mlp.experts must hold its experts itself, got one"),
        (hooked, "hooks of accelerate, got one on model.layers.1"),
        (build("dbrx", 1), "must be one fused_experts call"),
        (torch.nn.Linear(2, 2), "must contain MoE layers"),
    ):
        with pytest.raises(ValueError, match=message):
            integration.offload(model, 10**9, device="cpu")
    with pytest.raises(ValueError, match="must be quantized before it is in host memory"):
        integration.quantize(twice, "int8_w8a16")
    for function in (integration.residency_report, integration.residency_stats):
        with pytest.raises(ValueError, match="must have experts in host memory, got Qwen3Moe"):
            function(qwen())


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    model = qwen()
    integration.attach(model)
    want, made = logits(model), []
    real = moving.ResidentExperts

    def fails(*args, **options):
        made.append(args)
        if len(made) == 2:
            raise MemoryError("no more pinned memory")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(moving, "ResidentExperts", fails)
        with pytest.raises(MemoryError, match="pinned"):
            integration.offload(model, least(model), device="cpu")
    assert torch.equal(logits(model), want)
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(
        logits(copy.deepcopy(model).half().float()), logits(copy.deepcopy(model).half().float())
    )
    integration.offload(model, least(model), device="cpu")
    assert torch.equal(logits(model), want)


# --- memory -------------------------------------------------------------------------------------

_PEAK = """
import json, sys, threading, time
from pathlib import Path
import torch
import transformers
from moe_ops.integrations.transformers import MoeOpsConfig, residency_report

def private():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def load(folder):
    config = MoeOpsConfig(scheme, gpu_memory=int(sys.argv[2]))
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16)

scheme = sys.argv[3] or None
load(sys.argv[4])  # imports, and what a first call keeps
start = peak = private()
running = True
def sample():
    global peak
    while running:
        peak = max(peak, private())
        time.sleep(0.002)
thread = threading.Thread(target=sample, daemon=True)
thread.start()
model = load(sys.argv[1])
running = False
thread.join()
budget = residency_report(model).budget
whole = budget.host_bytes + budget.rest + budget.bank_bytes
print(json.dumps([peak - start, private() - start, whole, budget.layers[0].bytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "int8_w8a16"])
def test_loading_peaks_at_the_model_and_one_layer(scheme, tmp_path):
    from tests.integrations.transformers.checkpoints import tiny

    sizes = {"intermediate_size": 64, "moe_intermediate_size": 384, "num_experts": 16}
    model = tiny("Qwen3Moe", num_hidden_layers=6, **sizes | {"hidden_size": 1024}).bfloat16()
    model.save_pretrained(tmp_path / "large")
    qwen().bfloat16().save_pretrained(tmp_path / "small")
    size = least(model) + 2**12  # buffers that bfloat16() narrowed
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "large"), str(size), scheme]
    command.append(str(tmp_path / "small"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert answer.returncode == 0, answer.stderr
    peak, after, whole, layer = json.loads(answer.stdout.splitlines()[-1])
    # of reading, and of allocators; a layer is rounded to int8 in fp32
    room = 24 * 2**20 + (4 * layer if scheme else 0)
    assert peak < whole + layer + room, (peak, whole, layer)
    assert after < whole + room, (after, whole)
