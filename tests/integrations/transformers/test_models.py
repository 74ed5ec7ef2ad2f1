"""transformers models on moe_ops: generation, training, quantization, and living with other
libraries."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")


from tests.integrations.transformers.test_families import Calls, build, relative

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


@pytest.mark.sweep
@pytest.mark.slow
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


@pytest.mark.slow
def test_training_step_compiles_whole():
    torch._dynamo.reset()
    model = model_of("qwen3_moe")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (model, compiled):
        model.zero_grad()
        run(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert any(".gate." in name for name in grads[0])
    for name, grad in grads[0].items():
        assert relative(grads[1][name], grad) < 1e-5, name


def test_autocast_follows_linear():
    eager, ours = build("mixtral", 1), model_of("mixtral")
    with torch.autocast("cpu", torch.bfloat16):
        want, got = logits(eager), logits(ours)
    assert got.dtype == want.dtype
    assert relative(got, want) < 5e-2


def switches(model):
    """All that says how a model's experts run."""
    state = []
    for name, module in model.named_modules():
        if hasattr(module, "config"):
            state.append((name, module.config._experts_implementation))
        for key in ("forward", "_old_forward", "_moe_ops_backend"):
            state.append((name, key, vars(module).get(key)))
    return state


def test_deepcopy_of_a_model_on_the_hook():
    model = model_of("gpt_oss")
    want = logits(model)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(logits(clone), want)
