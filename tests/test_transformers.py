"""transformers models on moe_ops: generation, training, quantization, and living with other libraries."""

import copy
import inspect
import io
import pickle
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_families import FAMILIES, Calls, build, relative  # noqa: E402
from torch import nn  # noqa: E402
from transformers.integrations import finegrained_fp8  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

import moe_ops  # noqa: E402
import moe_ops.integrations.transformers as integration  # noqa: E402
from moe_ops.integrations.transformers import activations  # noqa: E402
from moe_ops.ops import relayout as relayout_module  # noqa: E402

IDS = torch.tensor([[27, 54, 47, 78, 38], [4, 29, 33, 45, 61]])


def model_of(family, implementation="moe_ops", layers=1):
    model = build(family, layers)
    model.set_experts_implementation(implementation)
    return model


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def experts_of(model):
    return next(m for m in model.modules() if hasattr(m, "is_transposed"))


def routing(rows, num_experts, top_k=2):
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(rows)])
    return ids, torch.rand(rows, top_k) + 0.1


# --- choosing the implementation ----------------------------------------------------------------


def test_every_way_to_choose_it(tmp_path):
    model = build("qwen3_moe", 1)
    want = logits(model)
    config = copy.deepcopy(model.config)
    fresh = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="moe_ops")
    fresh.load_state_dict(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moe_ops"
    )
    model.set_experts_implementation("moe_ops")
    for chosen in (fresh.eval(), loaded.eval(), model):
        with Calls() as calls:
            assert relative(logits(chosen), want) < 1e-5
        assert calls.names == ["torch_experts"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_compiled_generation_gives_eager_tokens(family):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, ours = build(family, 1), model_of(family)
    options = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}
    want = eager.generate(IDS, **options)
    compile_config = transformers.CompileConfig(
        backend="aot_eager", fullgraph=True, dynamic=False, mode=None
    )
    compile_config._compile_all_devices = True  # else nothing compiles on a CPU
    got = ours.generate(
        IDS, **options, cache_implementation="static", compile_config=compile_config
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert got.tolist() == want.tolist()
    assert len(set(got[:, IDS.shape[1] :].flatten().tolist())) > 2  # not one token repeated


# --- routing that expert parallelism delivers ---------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "muse_spark"])
def test_sentinel_ids_contribute_zero_even_over_nan(family):
    module = experts_of(build(family, 1))
    module.config._experts_implementation = "moe_ops"
    num_experts = module.down_proj.shape[0]
    x = torch.randn(6, 32)
    ids, weights = routing(6, num_experts)
    with torch.no_grad():
        want = module(x, ids, weights)
        half = module(x, ids[:, :1], weights[:, :1])
        ids[3, 1], weights[3, 1] = num_experts, 0.0
        ids[4], weights[4], x[4] = num_experts, 0.0, float("nan")
        before = ids.clone()
        got = module(x, ids, weights)
    assert torch.equal(ids, before)
    assert torch.equal(got[4], torch.zeros(32))
    assert relative(got[3], half[3]) < 1e-5
    rest = [0, 1, 2, 5]
    assert relative(got[rest], want[rest]) < 1e-6


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "muse_spark", "nemotron_h"])
def test_training_gradients_equal_eager(family):
    models = [build(family, 1), build(family, 1)]
    models[1].config._experts_implementation = "moe_ops"
    for model in models:
        out = model(input_ids=IDS, use_cache=False)
        out = out.logits if hasattr(out, "logits") else out.last_hidden_state
        rng = torch.Generator().manual_seed(3)
        (out * torch.randn(out.shape, generator=rng)).sum().backward()
    compared = 0
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if a.grad is not None and a.grad.abs().max() > 1e-6:
            assert relative(b.grad, a.grad) < 1e-4, name
            compared += "experts" in name
    assert compared >= 2


def test_training_step_compiles_whole():
    torch._dynamo.reset()
    model = model_of("qwen3_moe")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (model, compiled):
        model.zero_grad()
        run(input_ids=IDS, use_cache=False).logits.square().sum().backward()
        grads.append(experts_of(model).gate_up_proj.grad.clone())
    assert relative(grads[1], grads[0]) < 1e-5


def test_autocast_follows_linear():
    eager, ours = build("mixtral", 1), model_of("mixtral")
    with torch.autocast("cpu", torch.bfloat16):
        want, got = logits(eager), logits(ours)
    assert got.dtype == want.dtype
    assert relative(got, want) < 5e-2


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
    with pytest.raises(ValueError, match="backend must be one of auto, .*got 'cuda'"):
        integration.attach(build("mixtral", 1), backend="cuda")


def test_attach_notices_a_layer_that_computes_something_else(monkeypatch):
    model = build("mixtral", 1)
    monkeypatch.setitem(
        activations._GATES, "_default_apply_gate", lambda module: moe_ops.Activation("gelu")
    )
    with pytest.raises(RuntimeError, match="mlp.experts differs from its own forward by"):
        integration.attach(model)
    experts = experts_of(model)
    experts.forward = lambda x, ids, weights: x
    with pytest.raises(RuntimeError, match="did not call moe_ops"):
        integration.attach(model)


def switches(model):
    """All that says how a model's experts run."""
    state = []
    for name, module in model.named_modules():
        if hasattr(module, "config"):
            state.append((name, module.config._experts_implementation))
        for key in ("forward", "_old_forward", "_moe_ops_backend"):
            state.append((name, key, vars(module).get(key)))
    return state


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


def prepare_experts(model):
    experts = experts_of(model)
    for name in ("gate_up_proj", "down_proj"):
        weight = activations.rows_first(getattr(experts, name).data, experts)
        weight = nn.Parameter(moe_ops.prepare(weight, "triton"), requires_grad=False)
        setattr(experts, name, weight)
    return experts


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16"])
def test_prepared_weights_in_a_compiled_model(family, scheme, monkeypatch):
    """Whole graphs, recorded as CUDA graphs: one token, some, and more rows than a block has."""
    sizes = {"hidden_size": 192, "intermediate_size": 320}
    monkeypatch.setitem(FAMILIES, family, lambda n: sizes)
    model = model_of(family).to("cuda", torch.bfloat16)
    integration.quantize(model, scheme)
    inputs = [IDS[:1, :1].cuda(), IDS.cuda(), IDS.cuda().repeat(40, 1)]
    expected = [logits(model, ids) for ids in inputs]
    assert prepare_experts(model).down_proj.weight_layout == "triton_e2m1"
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)
    for _ in range(3):
        for ids, want in zip(inputs, expected, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            assert relative(logits(model, ids), want) < 2e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_prepared_weights(family, monkeypatch):
    """Those of modules that keep (E, columns, rows), too, in whose place they lie as (E, rows, columns)."""
    pytest.importorskip("triton")
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    monkeypatch.setitem(FAMILIES, family, lambda n: sizes)
    (relayout,) = relayout_module.RELAYOUTS["triton"]
    monkeypatch.setitem(relayout_module.RELAYOUTS, "triton", (relayout._replace(on=None),))
    model = model_of(family).to(torch.bfloat16)
    integration.quantize(model, "mxfp4_w4a16")
    want = logits(model, IDS[:1, :1])
    prepare_experts(model)
    monkeypatch.setattr(activations, "backend_of", lambda module: "triton")
    assert relative(logits(model, IDS[:1, :1]), want) < 2e-2
    with pytest.raises(ValueError, match="experts.gate_up_proj must be a plain tensor"):
        integration.quantize(model, "fp8_block")


def test_deepcopy_of_a_model_on_the_hook():
    model = model_of("gpt_oss")
    want = logits(model)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(logits(clone), want)


# --- quantize -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4", "dbrx", "longcat_flash"])
def test_quantize_replaces_the_weights_in_place(family):
    """Against the same model with its weights rounded to the scheme: only activations differ."""
    model = build(family, 1)
    rounded = copy.deepcopy(model)
    plain = logits(model)
    integration.quantize(model, "fp8_w8a16:channel")
    weights = {n: p for n, p in model.named_parameters() if getattr(p, "scheme", None)}
    assert len(weights) == (3 if family == "dbrx" else 2)
    for name, p in weights.items():
        assert not p.requires_grad
        target = rounded.get_parameter(name)
        values = p.dequantize(torch.float32)
        if family == "longcat_flash" and values.shape != target.shape:
            target = target[: values.shape[0]]
        target.data.copy_(values.reshape(target.shape))
        # stored as (E, rows, columns), whichever way the model shows it
        inner = p.qdata if p.qdata.is_contiguous() else p.qdata.transpose(1, 2)
        assert inner.is_contiguous()
    got, want = logits(model), logits(rounded)
    assert relative(got, want) < 1e-5
    assert relative(got, plain) > 1e-3  # it is quantized


def test_quantized_model_compiles_copies_and_saves():
    torch._dynamo.reset()
    model = build("gpt_oss", 1)
    integration.quantize(model, "fp8_channel")
    want = logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative(logits(compiled), want) < 1e-5
    assert torch.equal(logits(copy.deepcopy(model)), want)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = build("gpt_oss", 1)
    integration.quantize(again, "fp8_channel")
    with torch.no_grad():
        for p in again.parameters():
            p.zero_() if not getattr(p, "scheme", None) else p.scale.zero_()
    again.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(logits(again), want)


def test_quantize_refuses():
    model = build("mixtral", 1)
    integration.quantize(model, "fp8_channel")
    with pytest.raises(ValueError, match="gate_up_proj must be a plain tensor.*quantized already"):
        integration.quantize(model, "fp8_channel")
    model = build("mixtral", 1)
    experts = model.model.layers[0].mlp.experts
    ready = moe_ops.prepare(experts.gate_up_proj.data, "flashinfer", activation="silu")
    experts.gate_up_proj = torch.nn.Parameter(ready, requires_grad=False)
    with pytest.raises(ValueError, match="natural layout, got ':up_gate'; .*'torch'\\) first"):
        integration.quantize(model, "fp8_channel")
    with torch.device("meta"):
        empty = build("mixtral", 1)
    with pytest.raises(ValueError, match="must be loaded, got the meta device"):
        integration.quantize(empty, "fp8_channel")
    with pytest.raises(ValueError, match="int3"):
        integration.quantize(build("mixtral", 1), "int3")


@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "dbrx", "longcat_flash"])
def test_quantize_that_fails_leaves_the_model_as_it_was(family):
    """The last weight of two layers is not finite, which the message says; mended, it is quantized."""
    model = build(family, 2)
    before, names = switches(model), [n for n, p in model.named_parameters() if p.dim() == 3]
    if family == "dbrx":
        names = [n for n, _ in model.named_parameters() if n.endswith((".w1", ".v1", ".w2"))]
    weight = model.get_parameter(names[-1])
    where = (-1,) * weight.dim()
    kept = weight[where].item()
    tensors = {name: p for name, p in model.named_parameters()}
    with torch.no_grad():
        weight[where] = float("nan")
    expert = weight.shape[0] - 1
    if family == "dbrx":
        expert = model.config.ffn_config.moe_num_experts - 1
    message = rf"{re.escape(names[-1])} must be finite, got NaN or Inf in experts \[{expert}\]"
    with pytest.raises(ValueError, match=message):
        integration.quantize(model, "fp8_channel")
    with torch.no_grad():
        weight[where] = kept
    with pytest.raises(ValueError, match="scheme must be one of .*got 'fp9'"):
        integration.quantize(model, "fp9")
    with pytest.raises(ValueError, match="scheme must be one that quantizes weights"):
        integration.quantize(model, "")
    with pytest.raises(
        ValueError, match="'fp8_tensor_static'.*use 'fp8_tensor'.*activation_scale="
    ):
        integration.quantize(model, "fp8_tensor_static")
    double = model.get_parameter(names[-1]).double()
    owner, _, last = names[-1].rpartition(".")
    setattr(model.get_submodule(owner), last, nn.Parameter(double))
    with pytest.raises(ValueError, match=rf"{re.escape(names[-1])} must be bfloat16, .*float64"):
        integration.quantize(model, "fp8_channel")
    setattr(model.get_submodule(owner), last, weight)
    assert switches(model) == before
    assert all(model.get_parameter(name) is p for name, p in tensors.items())
    integration.quantize(model, "fp8_channel")
    assert all(model.get_parameter(name).scheme == "fp8_channel" for name in names)


def test_saving_a_quantized_model_with_tied_embeddings(tmp_path):
    """save_pretrained keeps them; what cannot take quantized weights apart says so."""
    files = pytest.importorskip("safetensors.torch")
    config = copy.deepcopy(build("mixtral", 1).config)
    config.tie_word_embeddings = True
    model = transformers.MixtralForCausalLM(config).eval()
    integration.quantize(model, "fp8_channel")
    for save in (
        lambda: files.save_model(model, tmp_path / "model.safetensors"),
        lambda: files.save_file(model.state_dict(), tmp_path / "state.safetensors"),
    ):
        with pytest.raises(RuntimeError, match="data pointer on an invalid python storage"):
            save()
    model.save_pretrained(tmp_path)
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert relative(logits(loaded), logits(model)) < 1e-6


# --- FP8 checkpoints ----------------------------------------------------------------------------


def fp8_experts(**options):
    """An FP8Experts module as transformers builds it for Qwen3-MoE, with random weights."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=3, num_experts_per_tok=2
    )
    config._experts_implementation = "moe_ops"
    # a class of its own: the decorator changes the class it is given
    cls = use_experts_implementation(
        experts_class=type("FP8Experts", (finegrained_fp8.FP8Experts,), {}),
        experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS,
    )
    module = cls(config=config, **({"block_size": (128, 128)} | options))
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(module, name)
            if weight.dtype == torch.float8_e4m3fn:
                weight.copy_((torch.randn(weight.shape, generator=rng) * 100).to(weight.dtype))
                scale = getattr(module, f"{name}_scale_inv")
                values = torch.rand(scale.shape, generator=rng) + 0.5
                scale.copy_((values / 100 / weight.shape[-1] ** 0.5).to(scale.dtype))
    return module


def dequantized(module, name):
    scale = getattr(module, f"{name}_scale_inv").float()
    scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return getattr(module, name).float() * scale


def test_fp8_experts_equal_their_dequantized_eager():
    """The oracle multiplies dequantized weights with activations rounded per 1 x 128 group."""
    module = fp8_experts()
    x = torch.randn(7, 256)
    ids, weights = routing(7, 3)
    with torch.no_grad():
        got = module(x, ids, weights)
        w13, w2 = dequantized(module, "gate_up_proj"), dequantized(module, "down_proj")

        def through(rows, weight):  # activations round to e4m3 with one scale per 128 columns
            groups = rows.double().unflatten(-1, (-1, 128))
            scale = groups.abs().amax(-1, keepdim=True) / 448
            rows = (groups / scale).to(torch.float32).to(torch.float8_e4m3fn).double() * scale
            return rows.flatten(-2) @ weight.double().T

        want = torch.zeros(7, 256, dtype=torch.float64)
        for m in range(7):
            for e, weight in zip(ids[m].tolist(), weights[m].double(), strict=True):
                gate, up = through(x[m], w13[e]).chunk(2)
                hidden = (torch.nn.functional.silu(gate) * up).float()
                want[m] += weight * through(hidden, w2[e])
    assert want.abs().mean() > 0.1
    # elements on the edge between two e4m3 values may round the other way: one step is 2^-3
    assert relative(got, want) < 2e-2
    assert (got - want).abs().mean() < 2e-3 * want.abs().mean()

    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert relative(compiled(x, ids, weights), got) < 1e-5
    x.requires_grad_()
    module(x, ids, weights).sum().backward()
    assert x.grad.abs().max() > 0


def test_fp8_experts_with_power_of_two_scales():
    module = fp8_experts(scale_fmt="ue8m0")
    plain = fp8_experts()
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(plain, f"{name}_scale_inv").copy_(getattr(module, f"{name}_scale_inv").float())
        x = torch.randn(4, 256)
        ids, weights = routing(4, 3)
        assert torch.equal(module(x, ids, weights), plain(x, ids, weights))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_dtype": "fp4"}, "must be float8_e4m3fn, got FP4 packed in int8"),
        ({"block_size": (64, 64)}, r"weight_block_size must be \(128, 128\).*got \(64, 64\)"),
        ({"activation_scheme": "static"}, "activation_scheme must be 'dynamic', got 'static'"),
    ],
)
def test_fp8_experts_refused(options, message):
    if not options.keys() <= inspect.signature(finegrained_fp8.FP8Experts).parameters.keys():
        pytest.skip(f"transformers {transformers.__version__} has no such FP8Experts")
    module = fp8_experts(**options)
    ids, weights = routing(2, 3)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        module(torch.randn(2, 256), ids, weights)
    with pytest.raises(ValueError, match=message):
        integration.attach(nn.ModuleDict({"experts": module}))


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


def test_documented_code_runs():
    text = (Path(__file__).parent.parent / "docs" / "transformers.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "docs/transformers.md", "exec"), {})
