"""PEFT's adapters on expert parameters through moe_ops, against its own forward and gradients."""

import concurrent.futures
import contextlib
import copy
import importlib
import math
import pickle
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import moe_ops
import moe_ops.integrations.transformers as integration
from tests.integrations.transformers.test_families import Calls, build, outputs, relative

IDS = torch.tensor([[27, 54, 47, 78, 38], [4, 29, 33, 45, 61]])
W13, W2 = "experts.gate_up_proj", "experts.down_proj"
BOTH = ["lora_experts_forward", "lora_experts_backward"]


def adapted(
    family="qwen3_moe", parameters=(W13, W2), prepare=None, dtype=torch.float64, **options
):
    """A model of one layer with a random adapter."""
    model = build(family, 1).to(dtype)
    if prepare is not None:
        prepare(model)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return peft.get_peft_model(model, config(parameters, **options))


def config(parameters=(W13, W2), **options):
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "target_modules": []} | options
    return peft.LoraConfig(target_parameters=list(parameters), **options)


def add_adapter(model, name, **options):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model.add_adapter(name, config(**options))


def step(model) -> tuple[torch.Tensor, dict]:
    """The result, and the gradients of all that is trained."""
    for p in model.parameters():
        p.grad = None
    out = model(input_ids=IDS, use_cache=False)
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    rng = torch.Generator().manual_seed(3)
    out.backward(torch.randn(out.shape, generator=rng).to(out.dtype))
    named = {n.removeprefix("_orig_mod."): p.grad for n, p in model.named_parameters()}
    return out.detach(), {n: grad for n, grad in named.items() if grad is not None}


def check(model, reference, within=1e-12, operators=BOTH) -> dict:
    """What a model computes, by these operators, is what the reference does."""
    calls = Calls()
    with contextlib.nullcontext() if operators is None else calls:
        out, grads = step(model)
    assert operators is None or calls.names == operators
    want, wanted = step(reference)
    assert relative(out, want) < within
    assert grads.keys() == wanted.keys()
    for name, grad in grads.items():
        assert relative(grad, wanted[name]) < 10 * within, name
    return grads


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "afmoe", "gemma4"])
def test_adapters_of_a_router_that_was_fused_before(family):
    """Those of the linear layer inside of it, which PEFT replaces."""
    model = build(family, 1).to(torch.float32)
    integration.fuse_routers(model)
    names = {"hunyuan_v1_moe": "wg", "afmoe": "router.gate", "gemma4": "router.proj"}
    lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=[names[family]])
    model = peft.get_peft_model(model, lora)
    with torch.no_grad():
        got = outputs(model, IDS)
        with model.disable_adapter():
            without = outputs(model, IDS)
        integration.unfuse_routers(model)
        want = outputs(model, IDS)
    assert relative(got, want) < 1e-6 < 1e-3 < relative(got, without)


def test_adapters_of_experts_beside_a_block():
    """llama4's keep PEFT's own sum, in whichever order PEFT and moe_ops come."""
    names = ("experts.gate_up_proj", "experts.down_proj")
    first, second = (adapted("llama4", names, dtype=torch.float32) for _ in range(2))
    want = outputs(first, IDS)
    integration.attach(first)
    assert relative(outputs(first, IDS), want) < 1e-5
    with pytest.raises(ValueError, match="must carry no adapter"):
        integration.quantize(second, "int8_w8a16")


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_warmup_with_adapters(family):
    model = adapted(family, dtype=torch.float32)
    integration.attach(model)
    report = moe_ops.warmup(model, token_counts=(1, 3))
    assert "experts" not in str(report).split(":")[0].rpartition(".")[2]


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        pytest.param("gpt_oss", marks=pytest.mark.slow),  # transposed, biases, interleaved
        pytest.param("deepseek_v3", marks=pytest.mark.slow),  # a shared expert
    ],
)
def test_values_and_gradients(family):
    model, reference = adapted(family), adapted(family)
    report = integration.attach(model)
    assert report.layers[0].path == "fused_experts with adapters"
    assert len(check(model, reference)) == 4


@pytest.mark.slow
def test_experts_without_a_gate_half():
    names = ("experts.up_proj", W2)
    model, reference = [adapted("nemotron_h", names, dtype=torch.float32) for _ in range(2)]
    integration.attach(model)
    assert len(check(model, reference, within=2e-6)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["inkling2", "muse_spark"])
def test_a_gate_of_the_modules_own(family):
    """The adapters' products stand beside the two grouped products."""
    model, reference = [adapted(family, dtype=torch.float32) for _ in range(2)]
    report = integration.attach(model)
    assert report.layers[0].path.endswith("gate with adapters")
    assert len(check(model, reference, within=2e-6, operators=None)) == 4


@pytest.mark.parametrize("parameters", [(W13,), (W2,), (W2, W13)])
def test_which_parameters(parameters):
    model, reference = adapted(parameters=parameters), adapted(parameters=parameters)
    integration.attach(model)
    assert len(check(model, reference)) == 2 * len(parameters)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {W13: 5}, "alpha_pattern": {W13: 2, W2: 7}},
        {"r": 1},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_ranks_and_scales(options):
    model, reference = adapted(**options), adapted(**options)
    scales = {m.parameter_name: m.scaling["default"] for m in model.modules()
              if hasattr(m, "parameter_name")}  # fmt: skip
    if "use_rslora" in options:
        assert scales["down_proj"] == 5 / 3**0.5
    if "alpha_pattern" in options:
        assert scales == {"gate_up_proj": 2 / 5, "down_proj": 7 / 3}
    integration.attach(model)
    check(model, reference)


def test_dropout_is_refused_as_peft_refuses_it():
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        adapted(lora_dropout=0.1)


@pytest.mark.slow
def test_several_adapters_add_up():
    """Of other ranks; one of them alone; and none."""
    model, reference = adapted(), adapted()
    for one in (model, reference):
        add_adapter(one, "other", r=2)
    integration.attach(model)
    for names in (["default", "other"], ["other"], ["default"]):
        for one in (model, reference):
            one.base_model.set_adapter(names)
        assert len(check(model, reference)) == 4 * len(names)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def test_disabled_merged_and_unmerged():
    model, reference = adapted(), adapted()
    plain = logits_of(build("qwen3_moe", 1).double())
    integration.attach(model)
    want = logits_of(reference)
    assert relative(want, plain) > 0.01
    with Calls() as calls:
        assert relative(logits_of(model), want) < 1e-12
    assert calls.names == ["lora_experts_forward"]
    with model.disable_adapter(), Calls() as calls:
        assert relative(logits_of(model), plain) < 1e-12
    assert calls.names == ["torch_experts"]
    model.merge_adapter()
    with Calls() as calls:
        assert relative(logits_of(model), want) < 1e-12
    assert calls.names == ["torch_experts"]
    model.unmerge_adapter()
    check(model, reference)
    model.merge_adapter()
    with model.disable_adapter():  # this unmerges
        assert relative(logits_of(model), plain) < 1e-12
    assert relative(logits_of(model), want) < 1e-12
    merged = model.merge_and_unload()
    with Calls() as calls:
        assert relative(logits_of(merged), want) < 1e-12
    assert calls.names == ["torch_experts"]


def test_saved_and_loaded(tmp_path):
    model = adapted()
    integration.attach(model)
    want, _ = step(model)
    model.save_pretrained(tmp_path)
    reference = adapted()
    reference.save_pretrained(tmp_path / "reference")
    ours, theirs = [
        peft.utils.load_peft_weights(str(path), device="cpu")
        for path in (tmp_path, tmp_path / "reference")
    ]
    assert ours.keys() == theirs.keys() and len(ours) == 4
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    base = build("qwen3_moe", 1).double()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    loaded = loaded.double()
    integration.attach(loaded)
    with Calls() as calls:
        assert relative(step(loaded)[0], want) < 1e-6  # saved in fp32
    assert calls.names == BOTH


@pytest.mark.parametrize(
    "scheme", ["int4_w4a16:g32", "mxfp4_w4a16", "fp8_channel", "nf4_w4a16:g32"]
)
def test_quantized_weights(scheme):
    """Against PEFT on the dequantized weights, which it adds its product to."""
    rounded = moe_ops.schemes.get_scheme(scheme).activation is not None

    def quantized(model):
        integration.quantize(model.float(), scheme)

    def dequantized(model):
        quantized(model)
        model.dequantize()
        model.double()

    model = adapted(prepare=quantized)
    reference = adapted(prepare=dequantized)
    reference.set_experts_implementation("eager")
    integration.attach(model)
    # e4m3 activations are off by up to 2^-4
    grads = check(model, reference, within=0.05 if rounded else 2e-6)
    assert len(grads) == 4


@pytest.mark.slow
def test_a_model_trains_over_nf4():
    """The loss falls, and nothing else than adapters gets gradients or moves."""
    model = adapted(
        prepare=lambda model: integration.quantize(model.float(), "nf4_w4a16:g32"),
        dtype=torch.float32,
        init_lora_weights=True,
        r=4,
    )
    integration.attach(model)
    frozen = {
        name: t.clone()
        for name, p in model.named_parameters()
        if not p.requires_grad
        for t in ([p.qdata, p.scale] if isinstance(p, moe_ops.ExpertTensor) else [p])
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for _ in range(12):
        with Calls() as calls:
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
        assert calls.names == BOTH
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all("lora" in n for n, p in model.named_parameters() if p.requires_grad)
    for name, p in model.named_parameters():
        if name in frozen:
            last = p.scale if isinstance(p, moe_ops.ExpertTensor) else p
            assert p.grad is None and torch.equal(last, frozen[name])


@pytest.mark.parametrize(
    "family, scheme, merged",
    [
        ("qwen3_moe", "nf4_w4a16:g32", None),
        ("qwen3_moe", "nf4_w4a16:g32", "int8_w8a16:channel"),
        ("gpt_oss", "int4_w4a16:g32", None),  # (E, columns, rows)
    ],
)
def test_merged_into_quantized_weights(family, scheme, merged):
    """Each weight is the sum, quantized; the report says what that loses."""
    model = adapted(family, prepare=lambda m: integration.quantize(m.float(), scheme))
    integration.attach(model)
    add_adapter(model, "other", r=2)
    model.base_model.set_adapter(["default", "other"])
    owner = experts_of(model)
    wanted = {}
    for wrapper in [m for m in model.modules() if hasattr(m, "parameter_name")]:
        weight = getattr(owner, wrapper.parameter_name).detach().dequantize(torch.float64)
        change = sum(
            wrapper.get_delta_weight(name).detach().double() for name in ("default", "other")
        )
        wanted[wrapper.parameter_name] = (weight + change, change)
    report = integration.merge_adapters(model, merged)
    assert len(report.weights) == 2 and str(report).count("of what the adapters add") == 2
    for said in report.weights:
        name = said.name.rpartition(".")[2]
        total, change = wanted[name]
        weight = getattr(owner, name).detach()
        assert weight.scheme == said.scheme == (merged or scheme)
        assert weight.shape == total.shape and weight.dtype == torch.float32
        turned = owner.is_transposed
        plain = (total.mT if turned else total).contiguous().float()
        again = moe_ops.quantize(plain, merged or scheme).dequantize().double()
        off = (weight.dequantize().double().mT if turned else weight.dequantize().double()) - again
        assert off.norm() < 0.01 * total.norm()  # a weight at a midpoint may go either way
        lost = (weight.dequantize().double() - total).norm()
        assert abs(said.error - lost / total.norm()) < 1e-5
        assert abs(said.change_error - lost / change.norm()) < 1e-4
        assert said.error < (0.02 if merged else 0.15)
    with Calls() as calls:
        got = logits_of(model)
    assert calls.names == ["torch_experts"]  # without adapters
    with pytest.warns(UserWarning, match="already merged"):
        unloaded = model.merge_and_unload()
    assert not [n for n, _ in unloaded.named_parameters() if "lora" in n]
    assert torch.equal(logits_of(unloaded), got)


@pytest.mark.parametrize("parameters", [(W2,), (W13, W2)])
def test_a_model_with_merged_adapters_is_saved(parameters, tmp_path):
    """Also where one weight of a layer had an adapter, and the other keeps its scheme."""
    model = adapted(
        parameters=parameters, prepare=lambda m: integration.quantize(m.float(), "nf4_w4a16:g32")
    )
    integration.merge_adapters(model, "int8_w8a16:channel")
    with pytest.warns(UserWarning, match="already merged"):
        model = model.merge_and_unload()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    whole = "int8_w8a16:channel" if len(parameters) == 2 else None
    assert again.config.quantization_config.scheme == whole
    for name in ("gate_up_proj", "down_proj"):
        weights = [getattr(experts_of(m), name).detach().dequantize() for m in (again, model)]
        assert torch.equal(*weights)


def test_merged_adapters_that_add_nothing():
    """Then nothing that was learned is lost, however far the weight moves."""
    model = adapted(prepare=lambda m: integration.quantize(m.float(), "nf4_w4a16:g32"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    report = integration.merge_adapters(model, "int4_w4a16:channel")
    assert str(report).count("the adapters add nothing") == 2
    assert all(math.isnan(w.change_error) and 0.01 < w.error < 1 for w in report.weights)


def test_merged_adapters_are_not_taken_out():
    """PEFT would forget them before it fails to subtract them, and they would count twice."""
    model = adapted(prepare=lambda m: integration.quantize(m.float(), "nf4_w4a16:g32"))
    integration.attach(model)
    integration.merge_adapters(model)
    want = logits_of(model)
    with pytest.raises(ValueError, match="_proj must have no merged adapter"):
        model.unmerge_adapter()
    with model.disable_adapter(), pytest.raises(ValueError, match="load the model and its adap"):
        logits_of(model)
    assert torch.equal(logits_of(model), want)


def test_what_is_not_merged():
    with pytest.raises(ValueError, match="must have active adapters on quantized experts"):
        integration.merge_adapters(adapted())
    model = adapted(prepare=lambda m: integration.quantize(m.float(), "nf4_w4a16:g32"))
    before = experts_of(model).down_proj.qdata.clone()
    for scheme, message in (
        ("int4_w4a16:g128", "cannot have scheme .*multiple of 128"),
        ("fp8_tensor_static", "static activation scales"),
        ("nf5", "scheme must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            integration.merge_adapters(model, scheme)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n)[0] = torch.nan
    with pytest.raises(ValueError, match="adapter 'default' of .* must be finite"):
        integration.merge_adapters(model)
    assert torch.equal(experts_of(model).down_proj.qdata, before)


@pytest.mark.slow
def test_adapters_on_attention_too_compile_whole():
    torch._dynamo.reset()
    options = {"target_modules": ["q_proj", "v_proj"]}
    model, reference = adapted(**options), adapted(**options)
    integration.attach(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert len(check(compiled, reference, operators=None)) == 8


def test_fp32_adapters_of_a_bf16_model():
    """As PEFT keeps them; gradients stay fp32. Against the same model in fp64."""
    model = adapted(dtype=torch.bfloat16)
    matrices = [p for n, p in model.named_parameters() if "lora" in n]
    assert len(matrices) == 4 and all(p.dtype == torch.float32 for p in matrices)
    reference = adapted(dtype=torch.bfloat16).double()
    integration.attach(model)
    with Calls() as calls:
        out, grads = step(model)
    assert calls.names == BOTH and out.dtype == torch.bfloat16
    want, wanted = step(reference)
    assert relative(out, want) < 0.02  # all of the model rounds to bf16
    for name, grad in grads.items():
        assert grad.dtype == torch.float32 and relative(grad, wanted[name]) < 0.02


@pytest.mark.slow
def test_several_adapters_compile_whole():
    torch._dynamo.reset()
    model, reference = adapted(), adapted()
    for one in (model, reference):
        add_adapter(one, "other", r=2)
        one.base_model.set_adapter(["default", "other"])
    integration.attach(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = kept_by(model)
    assert len(check(compiled, reference, operators=None)) == 8
    assert kept_by(model) == before


@pytest.mark.slow
def test_one_graph_for_every_number_of_tokens():
    torch._dynamo.reset()
    model, reference = adapted(), adapted()
    integration.attach(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    rng = torch.Generator().manual_seed(0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (16, 8, 100, 512):
            ids = torch.randint(0, 96, (1, length), generator=rng)
            found = []
            for one in (compiled, reference):
                out = one(input_ids=ids, use_cache=False).logits
                weight = next(p for n, p in one.named_parameters() if "lora_A" in n)
                found.append((out.detach(), *torch.autograd.grad(out.square().mean(), [weight])))
            for got, want in zip(*found, strict=True):
                assert relative(got, want) < 1e-10


@pytest.mark.slow
def test_another_implementation_takes_pefts_own_way():
    """Also after attach: nothing is lost by a switch, or by an error in attach."""
    model, reference = adapted(), adapted()
    integration.attach(model)
    model.set_experts_implementation("eager")
    check(model, reference, operators=[])
    model.set_experts_implementation("moe_ops")
    check(model, reference)


@pytest.mark.slow
def test_copies_and_pickles():
    model, reference = adapted(), adapted()
    integration.attach(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():  # of the copy, whose wrappers must not call those of the original
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.zero_()
        check(twin, reference)
        with torch.no_grad():
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                p.copy_(q)


@pytest.mark.slow
def test_checkpointed_layers():
    model, reference = adapted(), adapted()
    integration.attach(model, recompute=True)
    for one in (model, reference):
        one.enable_input_require_grads()
        one.gradient_checkpointing_enable({"use_reentrant": False})
        one.train()
    check(model, reference, operators=None)


def experts_of(model):
    return next(m for m in model.modules() if hasattr(m, "is_transposed"))


def kept_by(model) -> list[set]:
    """What attributes all modules have."""
    return [set(vars(module)) for module in model.modules()]


def test_an_error_leaves_no_adapter_behind():
    model = adapted()
    integration.attach(model)
    want, before = logits_of(model), kept_by(model)
    wrapper = next(m for m in model.modules() if hasattr(m, "parameter_name"))
    with pytest.raises(ValueError, match="hidden_states"):
        wrapper(torch.zeros(2, 3, 5), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2))
    assert kept_by(model) == before
    assert torch.equal(logits_of(model), want)


def test_threads():
    """Two calls that are in the experts at once have each its own adapters."""
    model, reference = adapted(), adapted()
    integration.attach(model)
    want = logits_of(reference)
    both = threading.Barrier(2, timeout=60)

    def hook(*_):
        both.wait()

    handle = experts_of(model).register_forward_pre_hook(hook)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(logits_of, [model, model]))
    handle.remove()
    for got in (*results, logits_of(model)):
        assert relative(got, want) < 1e-12


def test_replicas_of_data_parallel(monkeypatch):
    """Each with its own copy of the adapters: of another model here, to see which it takes."""
    model, other = adapted(), adapted()
    integration.attach(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.25)
    want = [logits_of(one) for one in (adapted(), other)]
    replicate = importlib.import_module("torch.nn.parallel.replicate")

    def broadcast(tensors, devices, detach):
        if any(isinstance(t, torch.nn.Parameter) for t in tensors):
            return [[p.detach() for p in one.parameters()] for one in (model, other)]
        return [tensors, tensors]

    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", broadcast)
    for replica, expected in zip(replicate.replicate(model, [0, 1]), want, strict=True):
        assert relative(logits_of(replica), expected) < 1e-12
    assert relative(logits_of(model), want[0]) < 1e-12


def test_experts_that_are_recomputed_alone():
    """By autograd, when PEFT's wrappers have returned."""
    model, reference = adapted(), adapted()
    integration.attach(model)
    experts = experts_of(model)
    forward = experts.forward
    experts.forward = lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, **kwargs
    )
    assert len(check(model, reference, operators=None)) == 4


def test_expert_parallelism_is_refused():
    model = adapted()
    experts_of(model)._is_expert_parallel = True
    with pytest.raises(ValueError, match="must hold all experts .* got expert parallel"):
        integration.attach(model)
    with Calls() as calls:
        logits_of(model)
    assert calls.names == []


# --- batches whose rows have different adapters --------------------------------------------------


def mixed(family="qwen3_moe", dtype=torch.float64, prepare=None, **options):
    """An attached model with two adapters of different ranks and scales, in evaluation."""
    model = adapted(family, dtype=dtype, prepare=prepare, **options)
    add_adapter(model, "other", r=5, lora_alpha=2)
    integration.attach(model)
    return model.eval()


@torch.no_grad()
def rows_alone(model, names, ids) -> torch.Tensor:
    """The logits of each row in a batch of its own, with its adapter active."""
    found = []
    for name, row in zip(names, ids, strict=True):
        if name == "__base__":
            with model.disable_adapter():
                found.append(outputs(model, row[None]))
        else:
            model.set_adapter(name)
            found.append(outputs(model, row[None]))
    model.set_adapter("default")
    return torch.cat(found)


NAMES = ["other", "__base__", "default", "other"]
ROWS = torch.cat((IDS, IDS.flip(0)))


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@torch.no_grad()
def test_rows_of_a_batch_have_different_adapters(family):
    model = mixed(family)
    with Calls() as calls:
        got = model(input_ids=ROWS, use_cache=False, adapter_names=NAMES).logits
    assert calls.names == ["adapted_experts"]
    want = rows_alone(model, NAMES, ROWS)
    assert relative(got, want) < 1e-10
    model.set_adapter("other")  # active ones have no part in a mixed batch
    again = model(input_ids=ROWS, use_cache=False, adapter_names=NAMES).logits
    assert relative(again, got) < 1e-12
    assert relative(outputs(model, ROWS[:1]), want[:1]) < 1e-10  # and a plain call is as before


@torch.no_grad()
def test_rows_have_adapters_over_quantized_experts_and_of_attention():
    def prepare(model):
        integration.quantize(model, "int8_w8a16")

    options = {"target_modules": ["q_proj"]}
    model = adapted(dtype=torch.float32, prepare=prepare, **options)
    add_adapter(model, "other", r=5, lora_alpha=2, **options)
    integration.attach(model)
    model.eval()
    got = model(input_ids=ROWS, use_cache=False, adapter_names=NAMES).logits
    assert relative(got, rows_alone(model, NAMES, ROWS)) < 1e-5


@torch.no_grad()
def test_a_stack_follows_its_adapters():
    model = mixed()
    model(input_ids=ROWS, use_cache=False, adapter_names=NAMES)
    for name, p in model.named_parameters():
        if "lora_B.other" in name:
            p.mul_(-2)
    got = model(input_ids=ROWS, use_cache=False, adapter_names=NAMES).logits
    assert relative(got, rows_alone(model, NAMES, ROWS)) < 1e-10
    add_adapter(model, "third", r=7)
    names = ["third", *NAMES[1:]]
    got = model(input_ids=ROWS, use_cache=False, adapter_names=names).logits
    assert relative(got, rows_alone(model, names, ROWS)) < 1e-10


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_of_a_mixed_batch(beams):
    model = mixed(dtype=torch.float32)
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    got = model.generate(input_ids=ROWS, adapter_names=NAMES, **options)
    for name, row, found in zip(NAMES, ROWS, got, strict=True):
        off = name == "__base__"
        model.set_adapter("default" if off else name)
        with model.disable_adapter() if off else contextlib.nullcontext():
            assert torch.equal(model.generate(input_ids=row[None], **options)[0], found)


@torch.no_grad()
def test_refused_mixtures():
    model = mixed()
    with pytest.raises(ValueError, match="one name for each row of the batch"):
        model(input_ids=ROWS[:1], use_cache=False, adapter_names=NAMES[:3])
    model = mixed()
    with pytest.raises(ValueError, match="non-existing adapter"):
        model(input_ids=ROWS, use_cache=False, adapter_names=["none"] * 4)
    model.merge_adapter()
    with pytest.raises(ValueError, match="adapter_names must be left out while adapters are"):
        model(input_ids=ROWS, use_cache=False, adapter_names=NAMES)


def test_a_mixture_records_no_gradients():
    model = mixed()
    with pytest.raises(ValueError, match="where gradients are recorded"):
        model.get_input_embeddings().weight.requires_grad_()
        model(input_ids=ROWS, use_cache=False, adapter_names=NAMES)
