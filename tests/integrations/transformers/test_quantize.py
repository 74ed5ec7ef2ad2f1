"""Quantized models of transformers: prepared, replaced in place, saved and loaded."""

import copy
import inspect
import io
import json
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

import moe_ops
import moe_ops.integrations.transformers as integration
from moe_ops.integrations.transformers import activations, hook, sizes
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.ops import relayout as relayout_module
from tests.house.test_documents import run_python
from tests.integrations.transformers.test_families import FAMILIES, build, relative
from tests.integrations.transformers.test_models import (
    IDS,
    experts_of,
    logits,
    model_of,
    routing,
    switches,
)
from tests.support import oracle


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


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_prepared_weights(family, monkeypatch):
    """Those of modules that keep (E, columns, rows), too, in whose place they lie as (E, rows,
    columns)."""
    pytest.importorskip("triton")
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    monkeypatch.setitem(FAMILIES, family, lambda n: sizes)
    (relayout,) = relayout_module.RELAYOUTS["triton"]
    monkeypatch.setitem(relayout_module.RELAYOUTS, "triton", (relayout._replace(on=None),))
    model = model_of(family).to(torch.bfloat16)
    integration.quantize(model, "mxfp4_w4a16")
    want = logits(model, IDS[:1, :1])
    prepare_experts(model)
    monkeypatch.setattr(activations, "options_of", lambda module: {"backend": "triton"})
    assert relative(logits(model, IDS[:1, :1]), want) < 2e-2
    with pytest.raises(ValueError, match="experts.gate_up_proj must be a plain tensor"):
        integration.quantize(model, "fp8_block")


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


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4", "dbrx"])
def test_the_report_of_quantize_is_of_the_quantized_layers(family, monkeypatch):
    """Error against the module's own forward in fp64 with dequantized weights, on the tokens that
    `quantize` called it with; bytes and operators of the quantized weights, too."""
    model = build(family, 2)
    own = copy.deepcopy(model).double()
    layers = [layer.module for layer in layers_of.find(model)]
    calls = {}
    for layer in layers:
        layer.register_forward_hook(lambda m, given, _: calls.setdefault(m, []).append(given))
    monkeypatch.setattr(hook, "plan_text", lambda layer: str(layer.weight(layer.weights[0]).dtype))
    plain_bytes = sum(
        layer.weight(n).nbytes for layer in layers_of.find(own) for n in layer.weights
    )
    report = integration.quantize(model, "int4_w4a16:g32")

    rounded = copy.deepcopy(own)
    for layer, target in zip(layers_of.find(model), layers_of.find(rounded), strict=True):
        for name in layer.weights:
            values = layer.weight(name).dequantize(torch.float64)
            target.owner.get_parameter(name).data.copy_(values.reshape(target.weight(name).shape))
    for line, layer, plain, quantized in zip(
        report.layers, layers, layers_of.find(own), layers_of.find(rounded), strict=True
    ):
        first, *_, last = calls[layer]
        assert all(torch.equal(a, b) for a, b in zip(first, last, strict=True))
        given = [t.double() if t.is_floating_point() else t for t in last]
        with torch.no_grad():
            want, got = (hook._first(of.module(*given)) for of in (plain, quantized))
        error = ((got - want).norm() / want.norm()).item()
        assert line.error == pytest.approx(error, rel=1e-3) and error > 1e-2
        assert line.check.endswith(f", before quantizing; error {error:.2g} after")

    weights = [layer.weight(n) for layer in layers_of.find(model) for n in layer.weights]
    parts = [getattr(w, n) for w in weights for n in w.__tensor_flatten__()[0]]
    assert report.bytes_after == sum(t.numel() * t.element_size() for t in parts)
    assert report.bytes_before == plain_bytes // 2  # fp32
    text = f"{sizes.size_text(report.bytes_before)} -> {sizes.size_text(report.bytes_after)}"
    assert str(report).startswith(f"experts quantized to int4_w4a16:g32: {text}, error 0.")


@pytest.mark.parametrize("fails", [4, 5])
def test_a_layer_that_fails_is_reported_and_the_whole_model_quantized(fails, monkeypatch):
    model = build("mixtral", 2)
    real, count = hook.call, iter(range(9))

    def call(layer, inputs):  # two checks; then of each layer plain, quantized
        if next(count) == fails:
            raise RuntimeError("no memory")
        return real(layer, inputs)

    monkeypatch.setattr(hook, "call", call)
    report = integration.quantize(model, "fp8_channel")
    first, second = report.layers
    assert first.error > 1e-3 and second.error is None
    assert second.check.endswith("; error not measured: the layer fails: no memory")
    for layer in layers_of.find(model):
        assert layer.weight("gate_up_proj").scheme == "fp8_channel"
    assert model.config.quantization_config.scheme == "fp8_channel"


@pytest.mark.slow
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
    """The last weight of two layers is not finite, which the message says; mended, it is
    quantized."""
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


def test_a_saved_model_says_how_to_load_it(tmp_path):
    """In a README.md, whose code runs; one that is there stays, and a plain model gets none."""
    model = model_of("qwen3_moe")
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "README.md").exists()
    integration.quantize(model, "fp8_channel")
    model.save_pretrained(tmp_path / "saved")
    text = (tmp_path / "saved" / "README.md").read_text()
    assert "experts in `fp8_channel`" in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found = {}
    exec(code.replace("path/to/this/folder", str(tmp_path / "saved")), found)
    assert relative(logits(found["model"]), logits(model)) < 1e-5
    for mine in (tmp_path / "saved" / "README.md", tmp_path / "other" / "README.md"):
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mine")
        model.save_pretrained(mine.parent, max_shard_size="10KB")
        assert mine.read_text() == "mine"
    for options in ({"is_main_process": False}, (False, model.state_dict())):
        named, more = (options, ()) if isinstance(options, dict) else ({}, options)
        model.save_pretrained(tmp_path / "rank", *more, **named)
        assert not (tmp_path / "rank" / "README.md").exists()


def test_saving_a_quantized_model_with_tied_embeddings(tmp_path):
    """save_pretrained keeps them."""
    files = pytest.importorskip("safetensors.torch")
    config = copy.deepcopy(build("mixtral", 1).config)
    config.tie_word_embeddings = True
    model = transformers.MixtralForCausalLM(config).eval()
    integration.quantize(model, "fp8_channel")
    with pytest.raises(ValueError, match=r"saved by save_pretrained"):
        files.save_model(model, tmp_path / "model.safetensors")
    model.save_pretrained(tmp_path)
    loaded = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert relative(logits(loaded), logits(model)) < 1e-6


def test_experts_that_two_layers_share_stay_shared(tmp_path):
    """Through quantize and dequantize; their error is measured in both layers."""
    model = build("mixtral", 3)
    first, second, third = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    alone = copy.deepcopy(model)
    for name in ("gate_up_proj", "down_proj"):  # the same values, shared by nobody
        weight = getattr(second, name).detach().clone()
        setattr(alone.model.layers[1].mlp.experts, name, nn.Parameter(weight))
    reports = [integration.quantize(m, "int8_w8a16:channel") for m in (model, alone)]
    for name in ("gate_up_proj", "down_proj"):
        assert getattr(first, name) is getattr(second, name) is not getattr(third, name)
        assert getattr(first, name).scheme == "int8_w8a16:channel"
    assert torch.equal(logits(model), logits(alone))
    errors = [[layer.error for layer in report.layers] for report in reports]
    assert errors[0] == errors[1] and all(0 < error < 0.1 for error in errors[0])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert relative(logits(again), logits(model)) < 1e-6
    model.dequantize(), alone.dequantize()
    assert first.down_proj is second.down_proj is not third.down_proj
    assert type(first.down_proj) is nn.Parameter and torch.equal(logits(model), logits(alone))


@pytest.mark.filterwarnings("ignore")
def test_experts_beside_layers_of_another_quantizer(tmp_path):
    """They run; saving both is refused before anything is written, dequantizing does both or
    nothing.
    """
    torchao = pytest.importorskip("torchao.quantization")
    plain = build("mixtral", 1).bfloat16()
    plain.save_pretrained(tmp_path / "plain")
    other = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    options = {"quantization_config": other, "dtype": torch.bfloat16}
    model = type(plain).from_pretrained(tmp_path / "plain", **options)
    want = logits(model)
    integration.quantize(model, "int8_w8a16:channel")
    assert 0 < relative(logits(model), want) < 0.1
    with pytest.raises(ValueError, match="other layers were quantized by 'torchao' while it was"):
        model.save_pretrained(tmp_path / "both")
    assert not list((tmp_path / "both").iterdir())
    with pytest.raises(NotImplementedError, match="no implementation of `dequantize`"):
        model.dequantize()
    assert model.model.layers[0].mlp.experts.down_proj.scheme == "int8_w8a16:channel"


def test_a_number_of_experts_a_token_of_each_layer(tmp_path):
    """Hunyuan's moe_topk may be a list; the report plans for the layer's own."""
    config = build("hunyuan_v1_moe", 2).config
    config.moe_topk = [1, 3]
    torch.manual_seed(0)
    plain = transformers.HunYuanMoEV1ForCausalLM(config).eval()
    model = copy.deepcopy(plain)
    integration.attach(model)
    assert relative(logits(model), logits(plain)) < 1e-5
    assert [layer.top_k for layer in layers_of.find(model)] == [1, 3]
    assert layers_of.find(model.model.layers[0].mlp)[0].top_k == 3  # not known here: the most
    integration.quantize(model, "int8_w8a16:channel")
    assert 0 < relative(logits(model), logits(plain)) < 0.1
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    assert relative(logits(again), logits(model)) < 1e-6


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
                values = torch.randn(weight.shape, generator=rng) * 100
                weight.copy_(values.clamp(-448, 448).to(weight.dtype))  # NaN past it before 2.13
                scale = getattr(module, f"{name}_scale_inv")
                values = torch.rand(scale.shape, generator=rng) + 0.5
                scale.copy_((values / 100 / weight.shape[-1] ** 0.5).to(scale.dtype))
    return module


def dequantized(module, name):
    scale = getattr(module, f"{name}_scale_inv").float()
    scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return getattr(module, name).float() * scale


@pytest.mark.slow
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


@pytest.mark.parametrize("stored", ["e8m0", "fp32"])
def test_fp8_experts_with_power_of_two_scales(stored):
    """scale_fmt="ue8m0" also rounds scales of activations up to powers of two, whether the module
    stores e8m0 scales or the model's config says it of fp32 ones."""
    if stored == "e8m0":
        module = fp8_experts(scale_fmt="ue8m0")
    else:
        module = fp8_experts()
        module.config.quantization_config = {"quant_method": "fp8", "scale_fmt": "ue8m0"}
        with torch.no_grad():
            for name in ("gate_up_proj", "down_proj"):
                scale = getattr(module, f"{name}_scale_inv")
                scale.copy_(torch.exp2(scale.log2().ceil()))
    x = torch.randn(4, 256)
    ids, weights = routing(4, 3)
    w13, w2 = [
        moe_ops.from_quantized(
            "fp8_block:ue8m0",
            getattr(module, name).detach(),
            getattr(module, f"{name}_scale_inv").detach(),
        )
        for name in ("gate_up_proj", "down_proj")
    ]
    want = oracle.experts(x, w13, w2, weights, ids)
    with torch.no_grad():
        assert relative(module(x, ids, weights), want) < 3e-3
        # what activations with any scales give is off by their rounding
        others = [moe_ops.from_quantized("fp8_block", w.qdata, w.scale) for w in (w13, w2)]
        assert relative(oracle.experts(x, *others, weights, ids), want) > 1e-2


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


WITHOUT_IMPORT = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print("refused:", error)
else:
    print("loaded")
import moe_ops.integrations.transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.model.layers[0].mlp.experts.gate_up_proj.scheme)
"""


@pytest.mark.slow  # a fresh process imports transformers
def test_a_process_that_did_not_import_us_is_refused(tmp_path):
    """transformers would skip our quant_method with a warning, and leave the experts random."""
    model = model_of("mixtral")
    integration.quantize(model, "fp8_channel")
    model.save_pretrained(tmp_path)
    refused, scheme = run_python(WITHOUT_IMPORT, str(tmp_path)).splitlines()[-2:]
    assert refused.startswith('refused: Specified `experts_implementation="moe_ops"` is not')
    assert scheme == "fp8_channel"


def test_the_saved_configuration_needs_us_only_while_quantized(tmp_path):
    model = model_of("mixtral")
    integration.quantize(model, "fp8_channel")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["experts_implementation"] == "moe_ops"
    assert saved["quantization_config"]["quant_method"] == "moe_ops"
    again = type(model).from_pretrained(tmp_path)
    again.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == saved
    again.dequantize()
    again.model.half()  # as nothing quantized does
    again.save_pretrained(tmp_path)
    assert "experts_implementation" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["backbone", "compiled", "layers", "torchao", "adapters"])
def test_saved_however_it_was_quantized(way, tmp_path):
    model = model_of("mixtral")
    saved = model
    if way == "backbone":
        integration.quantize(model, "int8_w8a16")
        saved = model.model
    elif way == "compiled":
        integration.quantize(torch.compile(model, backend="eager"), "int8_w8a16")
    elif way == "layers":
        for layer in model.model.layers:
            integration.quantize_weights(layer.mlp.experts, "int8_w8a16")
        integration.attach(model)
    elif way == "torchao":
        torchao = pytest.importorskip("moe_ops.integrations.torchao")
        config = torchao.ExpertsConfig("int8_w8a16")
        pytest.importorskip("torchao.quantization").quantize_(model, config, torchao.is_experts)
        integration.attach(model)
    else:
        peft = pytest.importorskip("peft")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        integration.quantize(adapted, "int8_w8a16")
        saved = adapted.merge_and_unload()
    saved.save_pretrained(tmp_path)
    again = type(saved).from_pretrained(tmp_path)
    for name, t in saved.state_dict().items():
        other = again.state_dict()[name]
        if isinstance(t, moe_ops.ExpertTensor):
            assert isinstance(other, moe_ops.ExpertTensor) and t.scheme == other.scheme
            t, other = t.dequantize(), other.dequantize()
        assert torch.equal(t, other), name


def test_a_plain_model_with_the_configuration_of_a_quantized_one(tmp_path):
    """It is never quantized without being asked."""
    config = build("mixtral", 1).config
    first, second = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
    assert first.config is second.config
    integration.quantize(first, "int4_w4a16:g32")
    second.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got plain ones: a plain model was saved with"):
        type(second).from_pretrained(tmp_path)
    asked = integration.MoeOpsConfig("int8_w8a16")
    again = type(second).from_pretrained(tmp_path, quantization_config=asked)
    assert again.model.layers[0].mlp.experts.down_proj.scheme == "int8_w8a16:channel"
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["quantization_config"], saved["experts_implementation"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    for given in (
        integration.MoeOpsConfig.from_dict({"scheme": "int8_w8a16"}),
        {"quant_method": "moe_ops", "scheme": "int8_w8a16"},
        again.config.quantization_config,
    ):
        again = type(second).from_pretrained(tmp_path, quantization_config=given)
        assert again.model.layers[0].mlp.experts.down_proj.scheme == "int8_w8a16:channel"
    again = type(second).from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again), logits(second))


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_quantized_experts():
    """peft adds them to the dequantized weights in every forward; to merge them is refused, with
    what to do instead.
    """
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    results = []
    for scheme in (None, "fp8_channel"):
        model = model_of("qwen3_moe")
        integration.quantize(model, "fp8_channel")
        if scheme is None:
            model.dequantize()
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config)
        results.append(logits(adapted))
        if scheme is None:
            torch.testing.assert_close(logits(adapted.merge_and_unload()), results[0])
            continue
        for merge in (
            adapted.merge_adapter,
            adapted.merge_and_unload,
            lambda adapted=adapted: adapted.merge_and_unload(safe_merge=True),
        ):
            with pytest.raises(
                NotImplementedError, match=r"a quantized Float8ExpertTensor; merge adapters into"
            ):
                merge()
    assert relative(results[1], results[0]) < 0.05  # the activations are quantized, too
