"""Every transformers family with experts, at tiny random size: same outputs, dispatched, one
graph."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops.integrations.transformers as integration
from moe_ops.integrations.transformers import families

# Sizes by configuration field; a family takes the fields it has.
SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "pad_token_id"), 0),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "bos_token_id"), 1),
    "swiglu_limit": 0.5,  # low enough to clip unit-scale data
    "index_n_heads": 2,
    "index_topk": 8,
    "eos_token_id": 2,
    "sliding_window": 16,
    "vocab_size": 96,
    "unpadded_vocab_size": 90,
    "max_position_embeddings": 64,
}


def _full(layers):
    return {"layer_types": ["full_attention"] * layers}


def _mrope(**more):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], **more}
    return {"rope_parameters": rope}


_INKLING = {
    **{"rel_extent": 8, "d_rel": 4, "sliding_window_size": 16, "swa_head_dim": 8},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
}
_QSA = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16},
    **{"indexer_compress_ratio": 4, "hc_lowrank": 8},
}

# What a family needs beyond SMALL, given the number of layers.
ON_HOOK = {
    "afmoe": lambda n: {},
    "aria": lambda n: {},
    "axk1": lambda n: {},
    "axk2": lambda n: {},
    "bailing_hybrid": _full,
    "beam": lambda n: {},
    "cohere2_moe": lambda n: {},
    "deepseek_ocr2": lambda n: {},
    "deepseek_v2": lambda n: {},
    "deepseek_v3": lambda n: {},
    "deepseek_v32": lambda n: {},
    "deepseek_v4": lambda n: {
        "mlp_layer_types": ["moe"] * n,
        "layer_types": ["sliding_attention"] * n,
        **{"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 8},
        **{"head_dim": 16, "partial_rotary_factor": 0.5},
    },
    "diffusion_gemma": lambda n: {"global_head_dim": 8},
    "dots1": lambda n: {},
    "dots3_note": lambda n: {
        **_full(n),
        **{"use_dsa": False, "shared_experts_intermediate_size": 32},
    },
    "ernie4_5_moe": lambda n: {"moe_layer_start_index": 0},
    "ernie4_5_vl_moe": lambda n: {"moe_intermediate_size": [32, 32], **_mrope()},
    "exaone_moe": lambda n: {},
    "flex_olmo": lambda n: {},
    "flint": lambda n: {"mlp_only_layers": []},
    "gemma4": lambda n: {
        **{"enable_moe_block": True, "global_head_dim": 8},
        **{"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
    },
    "glm4_moe": lambda n: {},
    "glm4_moe_lite": lambda n: {},
    "glm4v_moe": lambda n: {"head_dim": 8, **_mrope(partial_rotary_factor=1.0)},
    "glm5_next": lambda n: {
        **_full(n),
        **{"index_topk": 16, "index_kpool": 4, "qk_rope_head_dim": 0},
        **{"linear_head_dim": 8, "linear_num_heads": 4},
    },
    "glm_moe_dsa": lambda n: {},
    "gpt_oss": lambda n: {},
    "granitemoe": lambda n: {},
    "granitemoe_swa": lambda n: {},
    "granitemoehybrid": lambda n: {"layer_types": ["attention"] * n, "mamba_n_heads": 4},
    "granitemoeshared": lambda n: {},
    "hunyuan_v1_moe": lambda n: {},
    "hy_v3": lambda n: {},
    "hy_v4": lambda n: {},
    "hy_v4_vl": lambda n: _mrope(),
    "inkling": lambda n: _INKLING,
    "inkling2": lambda n: _INKLING,
    "inkling2_loop": lambda n: {
        **_INKLING,
        **{"n_layers_per_attn_res_block": 1, "loop_num_passes": 2},
        **{"loop_layer_index_start": 1, "loop_layer_index_end": n},
    },
    "jamba": lambda n: {
        **{"expert_layer_period": 1, "expert_layer_offset": 0},
        **{"attn_layer_period": 1, "attn_layer_offset": 0},
    },
    "kimi_linear": lambda n: {**_full(n), "linear_head_dim": 8, "linear_num_heads": 4},
    "kolibri1": lambda n: {},
    "laguna": lambda n: {},
    "lara_mini": _full,
    "lfm2_moe": _full,
    "mellum": lambda n: {},
    "mimo_v2_flash": lambda n: {"head_dim": 24, "num_key_value_heads": 2},
    "minimax": lambda n: {},
    "minimax_m2": lambda n: {},
    "minimax_m3_vl": lambda n: {
        **{"dense_intermediate_size": 32, "shared_intermediate_size": 32, "rotary_dim": 8},
        "swiglu_alpha": 1.3,
    },
    "mistral4": lambda n: {},
    "mistral_large4": lambda n: {},
    "mixtral": lambda n: {},
    "muse_spark": lambda n: {"moe_hidden_size": 32},
    "nemotron_h": lambda n: {
        "layer_types": ["full_attention", "moe"] * n,
        **{"moe_shared_expert_intermediate_size": 32, "moe_latent_size": 16, "n_groups": 2},
    },
    "olmoe": lambda n: {},
    "openai_privacy_filter": lambda n: {},
    "phimoe": lambda n: {},
    "qwen2_moe": lambda n: {},
    "qwen3_5_moe": _full,
    "qwen3_moe": lambda n: {},
    "qwen3_next": _full,
    "qwen3_omni_moe": lambda n: {},
    "qwen3_vl_moe": lambda n: {},
    "qwen4_exp": lambda n: {**_full(n), **_QSA},
    "solar_open": lambda n: {},
    "unlimited_ocr": lambda n: {},
    "zaya": lambda n: {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
OUTSIDE = {
    "llama4": lambda n: {
        **{"moe_layers": list(range(n)), "num_experts_per_tok": 1},
        **{"intermediate_size_mlp": 32, "attention_chunk_size": 16},
    },
    "dbrx": lambda n: {
        **{"d_model": 32, "n_heads": 4, "n_layers": n, "max_seq_len": 64},
        "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "longcat_flash": lambda n: {"num_layers": n, "ffn_hidden_size": 32, "zero_expert_num": 2},
    "step3p7": lambda n: {**_full(n), "share_expert_dim": 32, "swiglu_limits": [0.5, 0.0][:n]},
}
FAMILIES = ON_HOOK | OUTSIDE

# The forward does not trace whole with any experts implementation; the test proves it with
# grouped_mm.
OWN_GRAPH_BREAKS = {"qwen4_exp": "its attention branches on a count of selected key blocks"}

SOME_FP32 = {"inkling2", "inkling2_loop"}  # in bf16 the forward insists on fp32 for some weights

GATE_OF_ITS_OWN = {"inkling2", "inkling2_loop", "muse_spark"}


def model_class(family: str):
    """The family's text model, with a language-model head if there is one."""
    name = f"transformers.models.{family}.modeling_{family}"
    try:
        module = importlib.import_module(name)
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family in ON_HOOK and "@use_experts_implementation" not in inspect.getsource(module):
        pytest.skip(f"transformers {transformers.__version__} keeps {family} off its experts hook")
    classes = [
        c
        for _, c in inspect.getmembers(module, inspect.isclass)
        if issubclass(c, transformers.PreTrainedModel) and c.__module__ == name
    ]
    for suffix in ("ForCausalLM", "ForTokenClassification", "TextModel"):
        for c in classes:
            if c.__name__.endswith(suffix):
                if "text_config" in inspect.signature(c.config_class.__init__).parameters:
                    version = transformers.__version__  # mistral_large4 in 5.22
                    pytest.skip(f"transformers {version} builds no text model of {family} alone")
                return c
    raise AssertionError(f"{family} has no text model")


def build(family: str, layers: int):
    """A tiny model with eager experts whose every layer passes unit-scale data through its
    experts."""
    cls = model_class(family)
    known = inspect.signature(cls.config_class.__init__).parameters
    sizes = SMALL | {"num_hidden_layers": layers, "mlp_layer_types": ["sparse"] * layers}
    config = cls.config_class(
        **({k: v for k, v in sizes.items() if k in known} | FAMILIES[family](layers))
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)  # vectors keep transformers' own initialisation
        model = cls(config).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:  # each row of a matrix keeps the scale of what it multiplies
                fan_in = 1 if name.endswith("bias") else p.shape[-1]
                p.copy_(torch.randn(p.shape, generator=rng) / fan_in**0.5)
    return model


def outputs(model, ids, **more):
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=False, **more)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


class Calls(TorchDispatchMode):
    """Names of the moe_ops operators that ran, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe_ops":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def switch(model, family: str):
    if family in OUTSIDE:
        return integration.attach(model)
    model.set_experts_implementation("moe_ops")
    return None


def experts(model):
    """Modules called with (hidden states, expert ids, router weights); llama4's take no
    routing."""
    outside = {"Llama4TextExperts", *families.OUTSIDE} - {"Llama4TextMoe"}
    return [
        m for m in model.modules() if hasattr(m, "is_transposed") or type(m).__name__ in outside
    ]


class Routing:
    """Records the routing of a model's first run and repeats it in the second.

    In bf16 two right implementations differ by a rounding, and where two experts are almost tied
    the next layer's router may then choose another one, which moves the result by far more.
    """

    def __init__(self, model, family):
        self.seen, self.mode = [], "record"
        for module in model.modules():
            if family == "llama4" and type(module).__name__ == "Llama4Router":
                module.register_forward_hook(lambda m, args, out: self.step(out))
        if family != "llama4":
            for module in experts(model):
                module.register_forward_pre_hook(lambda m, args: (args[0], *self.step(args[1:])))

    def step(self, routing):
        assert len(routing) == 2
        if self.mode == "repeat":
            return self.seen.pop(0)
        if self.mode == "record":
            self.seen.append(routing)
        return routing


def _names(key, name):
    """Whether transformers takes a key of `_keep_in_fp32_modules_strict` to mean this
    parameter."""
    return re.search(rf"(^|\.){key}($|\.)", name)


def relative(got, want):
    got, want = got.double(), want.double()
    return ((got - want).abs().max() / want.abs().max()).item()


def test_every_family_on_the_hook_is_listed():
    models = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if "@use_experts_implementation" in path.read_text()
    }
    assert len(found) >= 50 and found <= set(ON_HOOK)
    assert FAMILIES.keys() < families.FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    model = build(family, layers=2)
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(2))
    # every other token goes to the experts for images, of which this family has a set of its own
    more = {"moe_mm_token_type_ids": ids % 2} if family == "ernie4_5_vl_moe" else {}
    want = outputs(model, ids, **more)
    assert want.isfinite().all()

    switch(model, family)
    modules = experts(model)
    runs = []  # inkling2_loop runs a layer more than once
    for module in modules:
        module.register_forward_hook(lambda m, args, out: runs.append(m))
    with Calls() as calls:
        got = outputs(model, ids, **more)
    assert set(runs) == set(modules) != set()
    if family == "dbrx":
        assert calls.names == ["torch_grouped_linear"] * 3 * len(runs)
    elif family in GATE_OF_ITS_OWN:
        assert calls.names == ["torch_grouped_linear"] * 2 * len(runs)
    else:
        assert calls.names == ["torch_experts"] * len(runs)
    assert relative(got, want) < 1e-3

    low = build(family, layers=2)
    keys = low._keep_in_fp32_modules_strict if family in SOME_FP32 else ()
    keep = [p for n, p in low.named_parameters() if any(_names(key, n) for key in keys)]
    values = [p.detach().clone() for p in keep]
    low.to(torch.bfloat16)
    for p, value in zip(keep, values, strict=True):
        p.data = value
    routing = Routing(low, family)
    want_low = outputs(low, ids, **more)
    routing.mode = "off"  # attach makes calls of its own
    switch(low, family)
    routing.mode = "repeat"
    assert relative(outputs(low, ids, **more), want_low) < 5e-2
    assert routing.seen == []

    # the comparison means something: the experts move the result far beyond both tolerances
    with torch.no_grad():
        for module in modules:
            for p in module.parameters():
                p.zero_()
    assert relative(outputs(model, ids, **more), want) > 0.2


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_fullgraph(family):
    torch._dynamo.reset()
    model = build(family, layers=1)
    ids = torch.randint(3, 90, (1, 5), generator=torch.Generator().manual_seed(2))
    switch(model, family)
    want = outputs(model, ids)

    def compiled():
        return outputs(torch.compile(model, backend="eager", fullgraph=True), ids)

    if family not in OWN_GRAPH_BREAKS:
        assert relative(compiled(), want) < 1e-5
        return
    with pytest.raises(Exception, match="guard on data-dependent"):
        compiled()
    torch._dynamo.reset()
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(Exception, match="guard on data-dependent"):
        compiled()
