"""fuse_routers: the same routing as the model's own routers, in the same dtypes, in every
setting."""

import ast
import copy
import functools
import pickle
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from torch import nn

import moe_ops.integrations.transformers as integration
from moe_ops.integrations.transformers import routers
from moe_ops.integrations.transformers.families import NOT_COVERED, ROUTERS, Router
from tests.integrations.transformers.test_families import FAMILIES, build, outputs, relative
from tests.routing.test_route import make_router

IDS = torch.tensor([[27, 54, 47, 78, 38], [4, 29, 33, 45, 61]])
# one family for each rule, and settings that choose between formulas
SETTINGS = [
    ("mixtral", {}, "renormalize"),
    ("qwen3_moe", {"norm_topk_prob": True}, "renormalize"),
    ("qwen2_moe", {"norm_topk_prob": False}, "default"),
    ("lara_mini", {"norm_topk_prob": True}, "renormalize"),
    ("lara_mini", {"norm_topk_prob": False}, "default"),
    ("qwen3_vl_moe", {}, "renormalize"),
    ("granitemoe_swa", {}, "renormalize"),
    ("gpt_oss", {}, "renormalize"),
    ("openai_privacy_filter", {}, "renormalize"),
    ("jamba", {}, "default"),
    ("cohere2_moe", {"expert_selection_fn": "softmax"}, "renormalize"),
    ("flint", {}, "sigmoid_renormalize"),
    ("deepseek_v2", {"topk_method": "greedy"}, "default"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "num_group": 3}, "grouped_softmax"),
    ("deepseek_v3", {"num_group": 3, "topk_group": 2}, "deepseek_v3"),
    ("glm4_moe", {"norm_topk_prob": False}, "sigmoid"),
    ("beam", {}, "deepseek_v3"),
    ("hy_v3", {}, "deepseek_v3"),
    ("minimax_m2", {}, "deepseek_v3"),
    ("minimax_m3_vl", {}, "deepseek_v3"),
    ("afmoe", {}, "deepseek_v3"),
    ("axk2", {"num_group": None}, "deepseek_v3"),
    ("axk2", {"norm_topk_prob": False}, "sigmoid"),
    ("deepseek_v4", {}, "sqrtsoftplus"),
    ("inkling2", {}, "deepseek_v3"),
    ("ernie4_5_moe", {}, "renormalize_naive"),
    ("gemma4", {}, "renormalize"),
    ("hunyuan_v1_moe", {}, "renormalize"),
    ("laguna", {}, "deepseek_v3"),
    ("longcat_flash", {}, "default"),
    ("mistral4", {"norm_topk_prob": False}, "default"),
    ("mistral_large4", {"num_group": 3, "topk_group": 2}, "renormalize_naive"),
]
# these round their scores to a narrower dtype before they compare them, or take fp32 alone
FP32_ONLY = {"deepseek_v4": "it rounds its scores", "mistral4": "it rounds its scores"}
FP32_ONLY["inkling2"] = "the same dtype"


def routers_of(model):
    return [m for m in model.modules() if routers.router_of(m) is not None]


def recorded(module):
    """A list that grows by (inputs, outputs) with each call of a module."""
    calls = []
    module.register_forward_hook(lambda _, inputs, output: calls.append((inputs, output)))
    return calls


def returns_no_logits(router):
    """As longcat_flash's in transformers 5.17 and 5.18."""
    with torch.no_grad():
        return len(router(torch.zeros(1, router.hidden_dim))) == 2


def by_expert(weights, ids, num_experts):
    return torch.zeros(ids.shape[0], num_experts).scatter(1, ids, weights.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "fields", "method"), SETTINGS)
def test_equals_the_routers_of_the_model(family, fields, method, dtype):
    """In a whole model, with its own inputs: the same tuple with the same dtypes."""
    model = build(family, 1).to(dtype)
    if not routers_of(model):
        pytest.skip(f"transformers {transformers.__version__} routes {family} elsewhere")
    for router in routers_of(model):
        for name, value in fields.items():
            assert hasattr(router, name), name
            setattr(router, name, value)
        for name, tensor in (*router.named_buffers(), *router.named_parameters()):
            if "weight" not in name:
                tensor.data.normal_(generator=torch.Generator().manual_seed(5))
    if dtype == torch.bfloat16 and family in FP32_ONLY:
        with pytest.raises(ValueError, match=FP32_ONLY[family]):
            integration.fuse_routers(model)
        return
    if family == "longcat_flash" and returns_no_logits(*routers_of(model)):
        with pytest.raises(ValueError, match="its own forward returns"):
            integration.fuse_routers(model)
        return
    report = integration.fuse_routers(model)
    (line,) = report.routers
    assert line.method == method and "differs from its own forward by" in line.check
    (router,) = routers_of(model)
    calls = recorded(router)
    outputs(model, IDS)
    ((inputs, (logits, weights, ids)),) = calls
    with torch.no_grad():
        theirs = type(router).forward(router, *inputs)
    assert [t.dtype for t in theirs] == [logits.dtype, weights.dtype, ids.dtype]
    assert torch.equal(logits, theirs[0])
    E = logits.shape[1]
    mine, wanted = by_expert(weights, ids, E), by_expert(*theirs[1:], E)
    decided = ((mine != 0) == (wanted != 0)).all(1)  # rounded logits may tie
    assert decided.all() if dtype == torch.float32 else decided.float().mean() >= 0.7
    rtol = 1e-5 if weights.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(mine[decided], wanted[decided], rtol=rtol, atol=1e-7)


def sources() -> dict[str, str]:
    """Normalised source of the forward of every class of transformers that is named like a
    router, by class."""
    found = {}
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        text = path.read_text()
        if not re.search(r"^class \w*(Router|Gat)\w*\(", text, re.M):
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef) or not re.search(r"Router|Gat", node.name):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    method.returns = None
                    for argument in method.args.args:
                        argument.annotation = None
                    if isinstance(method.body[0], ast.Expr):  # its docstring
                        del method.body[0]
                    found[node.name] = ast.unparse(method)
    return found


@pytest.mark.slow
def test_every_router_with_a_known_formula_is_listed():
    """Classes of one rule share their source, or are named here; no other class has such a
    source."""
    written_otherwise = {"BeamTopKRouter", "AriaTextTopKRouter", "GptOssTopKRouter"}
    written_otherwise |= {"MiniMaxM3VLTopKRouter", "Step3p7TopKRouter", "GraniteMoeSWATopKRouter"}
    found = sources()
    rules = {}
    for name, router in ROUTERS.items():
        if name in found and name not in written_otherwise:
            rules.setdefault(id(router), {})[name] = found[name]
    for listed in rules.values():
        assert len(set(listed.values())) == 1, f"several formulas: {sorted(listed)}"
    known = {found[name] for name in ROUTERS if name in found}
    assert not {name for name, source in found.items() if source in known} - ROUTERS.keys()
    assert len(ROUTERS.keys() & found.keys()) >= 35


@pytest.mark.slow
def test_every_router_has_a_rule_or_a_reason():
    """What chooses experts in transformers runs through route_tokens, or it is said why not."""
    chooses = {name for name, source in sources().items() if "top" in source}
    routers_there = {name for name in chooses if re.search(r"(Router|Gate|TopKGating)$", name)}
    assert not routers_there - ROUTERS.keys() - NOT_COVERED.keys()
    assert not ROUTERS.keys() & NOT_COVERED.keys()
    assert len(routers_there & ROUTERS.keys()) >= 45


def test_a_router_that_is_not_covered_says_why():
    with pytest.raises(ValueError, match="none of moe_ops: its bias is added to the logits"):
        integration.fuse_routers(build("kolibri1", 1))


def test_gradients_of_scales_beside_the_linear_layer():
    """Gemma's router has learned scales; its own forward runs where these alone want gradients."""
    model = build("gemma4", 1)
    integration.fuse_routers(model)
    (router,) = routers_of(model)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is router.per_expert_scale)
    x = torch.randn(3, router.hidden_size)
    router(x)[1].square().sum().backward()
    assert router.per_expert_scale.grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family", ["mixtral", "hy_v3"])
def test_compiles_whole(family):
    torch._dynamo.reset()
    model = build(family, 1)
    want = outputs(model, IDS)
    integration.fuse_routers(model)
    model.set_experts_implementation("moe_ops")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert relative(outputs(compiled, IDS), want) < 1e-5
    torch._dynamo.reset()


def test_gradients_take_the_own_forward(monkeypatch):
    models = [build("qwen3_moe", 1), build("qwen3_moe", 1)]
    integration.fuse_routers(models[1])
    monkeypatch.setattr(routers, "fused_router", None)  # calling it would fail
    monkeypatch.setattr(routers, "router_linear", None)
    for model in models:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    for (name, a), b in pairs:
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    assert routers_of(models[1])[0].weight.grad.abs().max() > 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(*[model(input_ids=IDS).logits for model in models])


def test_router_logits_and_auxiliary_loss():
    model = build("mixtral", 2)

    def run():
        with torch.no_grad():
            return model(input_ids=IDS, labels=IDS, output_router_logits=True, use_cache=False)

    want = run()
    integration.fuse_routers(model)
    got = run()
    assert len(got.router_logits) == 2
    for a, b in zip(got.router_logits, want.router_logits, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(got.aux_loss, want.aux_loss)


def test_undone_copied_and_pickled():
    model = build("gpt_oss", 2)
    before = [set(vars(module)) for module in model.modules()]
    integration.fuse_routers(model)
    assert str(integration.fuse_routers(model)).count("route_tokens, renormalize") == 2
    want = outputs(model, IDS)
    clones = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.zero_()  # a clone that still called into its original would notice
    for clone in clones:
        assert all(map(routers._is_fused, routers_of(clone)))
        assert torch.equal(outputs(clone, IDS), want)
    integration.unfuse_routers(model)
    assert [set(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("fuse_first", [True, False])
def test_accelerate_offload(fuse_first):
    accelerate = pytest.importorskip("accelerate")
    model = build("deepseek_v3", 1)
    want = outputs(model, IDS)
    if fuse_first:
        integration.fuse_routers(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    if not fuse_first:
        (line,) = integration.fuse_routers(model).routers
        assert line.method == "deepseek_v3" and "not loaded" in line.check
    assert relative(outputs(model, IDS), want) < 1e-5
    (router,) = routers_of(model)
    assert routers._is_fused(router)
    integration.unfuse_routers(model)
    assert not routers._is_fused(router)
    assert relative(outputs(model, IDS), want) < 1e-5


# ---- what is left as it is


def small_router():
    return make_router("mixtral", "MixtralTopKRouter", {})


def reason(router):
    with pytest.raises(
        ValueError, match="must contain routers that moe_ops.route_tokens"
    ) as error:
        integration.fuse_routers(nn.ModuleDict({"gate": router}))
    assert "forward" not in vars(router) or not routers._is_fused(router)
    return str(error.value)


def test_overridden_and_replaced_forwards_stay():
    router = small_router()

    class Doubled(type(router)):
        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return logits, 2 * weights, ids

    Doubled.__name__ = "DoubledRouter"
    router.__class__ = Doubled
    assert "gate (DoubledRouter): left as it is; its formula is none of moe_ops" in reason(router)
    router = small_router()
    router.forward = functools.partial(lambda self, x: x, router)
    assert "its forward is replaced by something else" in reason(router)


def test_replaced_forwards_below_hooks_stay():
    hooks = pytest.importorskip("accelerate.hooks")
    router = small_router()
    router.forward = functools.partial(lambda self, x: x, router)
    hooks.add_hook_to_module(router, hooks.ModelHook())
    assert "its forward is replaced by something else" in reason(router)
    router = small_router()  # one whose hook is gone is as good as new
    hooks.add_hook_to_module(router, hooks.ModelHook())
    hooks.remove_hook_from_module(router)
    integration.fuse_routers(nn.ModuleDict({"gate": router}))
    assert routers._is_fused(router)


def test_a_router_that_cannot_be_checked_leaves_the_others_whole():
    model = nn.ModuleDict(
        {
            "a": small_router(),
            "b": make_router("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}),
        }
    )
    del model["b"].norm_topk_prob
    report = integration.fuse_routers(model)
    assert [bool(line.method) for line in report.routers] == [True, False]
    assert "AttributeError" in report.routers[1].check


@pytest.mark.parametrize("autocast", [False, True])
def test_a_wrong_rule_is_noticed_under_autocast_too(monkeypatch, autocast):
    wrong = Router("sigmoid_renormalize", logits="input")
    monkeypatch.setitem(ROUTERS, "MixtralTopKRouter", wrong)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert "it differs from moe_ops" in reason(small_router())


def test_meta_devices_and_names_of_arguments():
    router = make_router("hy_v3", "HYV3TopKRouter", {"router_scaling_factor": 1.5})
    bias = torch.zeros(router.weight.shape[0])
    x = torch.randn(3, router.weight.shape[1])
    with torch.no_grad():
        want = router(x, bias)
        integration.fuse_routers(nn.ModuleDict({"gate": router}))
        got = router(x, e_score_correction_bias=bias)
        torch.testing.assert_close(got[0], want[0])
        dense = [by_expert(*output[1:], router.weight.shape[0]) for output in (got, want)]
        torch.testing.assert_close(*dense)
        router.to("meta")
        assert router(x.to("meta"), bias.to("meta"))[2].shape == want[2].shape


def test_a_router_that_computes_something_else_is_noticed(monkeypatch):
    for wrong, message in (
        (Router("default", logits="input"), "it differs from moe_ops.route_tokens by"),
        (Router("sigmoid_renormalize", logits="input"), "it differs from moe_ops"),
        (Router("renormalize", logits="input", weights="input"), "its own forward returns"),
        (Router("default", at_most=("top_k", 0)), "its settings make a formula that is none of"),
    ):
        monkeypatch.setitem(ROUTERS, "MixtralTopKRouter", wrong)
        assert message in reason(small_router().to(torch.bfloat16))
    biased = Router("renormalize_naive", logits="input", bias="biases")
    monkeypatch.setitem(ROUTERS, "MixtralTopKRouter", biased)
    router = small_router()
    router.biases = 9.0 * torch.arange(router.weight.shape[0])
    assert "it chooses other experts" in reason(router)


def test_weights_that_are_no_plain_tensors_stay():
    router = small_router()
    router.weight = nn.Parameter(router.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert "its weight is a Parameter of torch.float8_e4m3fn" in reason(router)
    router = small_router()
    nn.utils.parametrize.register_parametrization(router, "weight", nn.Identity())
    assert "its weight carries an adapter" in reason(router)


def test_models_without_routers():
    for model in (nn.Linear(2, 2), build("llama4", 1)):
        with pytest.raises(ValueError, match="must contain routers that moe_ops"):
            integration.fuse_routers(model)
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, got str"):
        integration.fuse_routers("x")


def test_settings_that_route_refuses_are_reported():
    """top_k above the experts of the groups kept: the module chooses experts it has masked."""
    groups = {"n_group": 8, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
    router = make_router("deepseek_v3", "DeepseekV3TopkRouter", groups)
    assert "top_k must be at most the 2 experts" in reason(router)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_reduce_overhead(family):
    """Decoding sizes under inductor's CUDA graphs, against the model's own routers."""
    torch._dynamo.reset()
    model = build(family, 2).cuda()
    own = copy.deepcopy(model)
    integration.fuse_routers(model)
    model.set_experts_implementation("moe_ops")
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        ids = torch.randint(0, 90, (2, 1), generator=torch.Generator().manual_seed(seed)).cuda()
        assert relative(outputs(compiled, ids).clone(), outputs(own, ids)) < 1e-4
    torch._dynamo.reset()


assert {family for family, *_ in SETTINGS} <= set(FAMILIES)
