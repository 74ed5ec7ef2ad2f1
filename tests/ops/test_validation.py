"""Bad arguments: the exact sentence, in eager and inside the error of
torch.compile(fullgraph=True)."""

import pytest
import torch

import moe_ops
from moe_ops import backends, checks
from moe_ops.activations import NAMES
from moe_ops.ops.problem import Machine
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from tests.support.cases import BF16, Case

ENDS = torch.tensor([1, 2, 3, 3], dtype=torch.int32)
EXPERTS = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
BATCHED = ("hidden_states", "w13", "w2", "expert_num_tokens")
LINEAR = ("x", "weight", "offsets")
POSITIONAL = {
    moe_ops.fused_experts: EXPERTS,
    moe_ops.batched_experts: BATCHED,
    moe_ops.grouped_linear: LINEAR,
}


def good_arguments(function, scheme="", activation="silu") -> dict:
    """M = 7 (3 a block), E = 4, top_k = 2, K = 48, I = 24."""
    case = Case(scheme=scheme, activation=activation, bias=True)
    named = dict(zip(EXPERTS, case.args, strict=True)) | case.options
    named["hidden_states"] = named["hidden_states"].nan_to_num()
    if function is moe_ops.fused_experts:
        return named
    if function is moe_ops.batched_experts:
        del named["topk_weights"], named["topk_ids"]
        return named | {"hidden_states": torch.randn(4, 3, 48), "expert_num_tokens": ENDS}
    bias = {"bias": named["w13_bias"]}
    return {"x": named["hidden_states"], "weight": named["w13"], "offsets": ENDS} | bias


def call(function, sentence_case, compiled=False):
    """Call with the good arguments but for the case's changes: values, or functions of the good
    ones."""
    changes = dict(sentence_case)
    built = {k: changes.pop(k) for k in ("scheme",) if k in changes}
    if changes.get("activation") == "relu2_no_mul":
        built["activation"] = "relu2_no_mul"
    named = good_arguments(function, **built)
    for name, change in changes.items():
        named[name] = change(named[name]) if callable(change) else change
    positional = [named.pop(name) for name in POSITIONAL[function]]
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="eager")
    return function(*positional, **named)


def meta(t):
    return t.to("meta")


def leaf(t):
    return t.clone().requires_grad_()


def integer(t):
    return t.long()


def with_scale(*shape):
    """A quantized weight whose scale has another shape."""
    return lambda w: w._replace(scale=torch.ones(shape))


def quantized(scheme):
    def change(w):
        return moe_ops.quantize(w.dequantize() if getattr(w, "scheme", "") else w, scheme)

    return change


def laid_out(w):
    return w._replace(weight_layout="other")


def zeros(*shape, dtype=torch.int32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


RANK = "{} must have shape {}, got a {}-D tensor"
FLOAT = "{} must be a floating-point tensor, got torch.int64"
INT = "{} must be int32 or int64, got {}; convert it with .to()"
DEVICE = "{} must be on cpu, got meta; move it with .to()"
W2 = "w2 must have shape (E, K, I) = (4, 48, 24) for w13 {} and the {} activation {}, got {}"
DTYPE = (
    "{} must have dtype torch.float32 like {}, got {}; convert one of them, run under "
    "torch.autocast, or wrap quantized data with moe_ops.from_quantized"
)
BARE = (
    "{} must have dtype torch.float32 like {}, got {}; wrap it with its scales: "
    "moe_ops.from_quantized(scheme, {}, scale)"
)
NO_BACKWARD = "has no backward: wrap the call in torch.no_grad() or use backend='auto' or 'torch'"

# what is wrong -> (changes, sentence)
FUSED = {
    "hidden_states 1-D": (
        {"hidden_states": lambda t: t[0]},
        RANK.format("hidden_states", "(M, K)", 1) + "; one row becomes hidden_states.unsqueeze(0)",
    ),
    "hidden_states 3-D": (
        {"hidden_states": lambda t: t[None]},
        RANK.format("hidden_states", "(M, K)", 3)
        + "; flatten its leading dimensions: hidden_states.flatten(0, 1)",
    ),
    "topk_ids 1-D": (
        {"topk_ids": lambda t: t[:, 0]},
        RANK.format("topk_ids", "(M, top_k)", 1) + "; where top_k is 1 pass topk_ids.unsqueeze(1)",
    ),
    "topk_weights 3-D": (
        {"topk_weights": lambda t: t[..., None]},
        RANK.format("topk_weights", "(M, top_k)", 3)
        + "; flatten its leading dimensions: topk_weights.flatten(0, 1)",
    ),
    "w13 2-D": (
        {"w13": lambda t: t[0]},
        RANK.format("w13", "(E, N, K)", 2) + "; that of one expert becomes w13.unsqueeze(0)",
    ),
    "w2 4-D": ({"w2": lambda t: t[None]}, RANK.format("w2", "(E, N, K)", 4)),
    "K": (
        {"hidden_states": lambda t: t[:, :40]},
        "w13 must have shape (E, N, 40) for hidden_states (M, 40), got (4, 48, 48)",
    ),
    "w13 transposed": (
        {"w13": lambda t: t[:, :40].mT, "w2": lambda t: t[..., :20]},
        "w13 must have shape (E, N, 48) for hidden_states (M, 48), got (4, 48, 40); it is "
        "transposed: pass w13.transpose(1, 2)",
    ),
    "w13 and w2 swapped": (
        {"w13": lambda t: t[..., :24], "w2": lambda t: t.repeat(1, 1, 2)},
        "w13 must have shape (E, N, 48) for hidden_states (M, 48), got (4, 48, 24); w13 and w2 "
        "are swapped",
    ),
    "w13 without gate": (
        {"w13": lambda t: t[:, :24]},
        "w2 must have shape (E, K, I) = (4, 48, 12) for w13 (4, 24, 48) and the gated activation "
        "silu, got (4, 48, 24); w13 has one projection's rows: give gate and up, "
        "torch.cat((gate, up), 1), or an activation without a gate, such as 'silu_no_mul'",
    ),
    "w13 with a gate that nothing reads": (
        {"w13": lambda t: t.repeat(1, 2, 1), "activation": "relu2_no_mul"},
        "activation relu2_no_mul, got (4, 48, 24); w13 has gate and up rows: give a gated "
        "activation, such as 'silu'",
    ),
    "no experts": (
        {"w13": lambda t: t[:0]},
        "w13 must hold at least one expert, got shape (0, 48, 48)",
    ),
    "odd N": (
        {"w13": lambda t: t[:, :47]},
        "w13 must have an even number of rows for silu, got 47",
    ),
    "w2 transposed": (
        {"w2": lambda t: t.mT},
        W2.format((4, 48, 48), "gated", "silu", (4, 24, 48))
        + "; it is transposed: pass w2.transpose(1, 2)",
    ),
    "w2 quantized transposed": (
        {
            "scheme": "fp8_channel",
            "w2": lambda w: moe_ops.quantize(w.dequantize().mT, "fp8_channel"),
        },
        W2.format((4, 48, 48), "gated", "silu", (4, 24, 48))
        + "; it was quantized transposed: quantize w2.dequantize().transpose(1, 2)",
    ),
    "w2 narrow": (
        {"w2": lambda t: t[..., :12], "activation": "relu2_no_mul"},
        W2.format((4, 24, 48), "not gated", "relu2_no_mul", (4, 48, 12)),
    ),
    "w2 experts": (
        {"w2": lambda t: t[:3]},
        W2.format((4, 48, 48), "gated", "silu", (3, 48, 24)),
    ),
    "top_k differs": (
        {"topk_weights": lambda t: t[:, :1]},
        "topk_weights must have shape (M, 2) like topk_ids, got (M, 1)",
    ),
    "top_k 0": (
        {"topk_weights": lambda t: t[:, :0], "topk_ids": lambda t: t[:, :0]},
        "topk_ids must have shape (M, top_k) with top_k >= 1, got (M, 0)",
    ),
    "rows of topk_ids": (
        {"topk_ids": lambda t: t[:5]},
        "topk_ids must have one row per row of hidden_states, 7, got 5",
    ),
    "rows of topk_weights": (
        {"topk_weights": lambda t: t[:3]},
        "topk_weights must have one row per row of hidden_states, 7, got 3",
    ),
    "rows while gradients are recorded": (
        {"hidden_states": leaf, "topk_ids": lambda t: t[:5]},
        "topk_ids must have one row per row of hidden_states, 7, got 5",
    ),
    "w13_bias": (
        {"w13_bias": lambda t: t[:, :-1]},
        "w13_bias must have shape (4, 48), got (4, 47)",
    ),
    "w2_bias": ({"w2_bias": lambda t: t[0]}, "w2_bias must have shape (4, 48), got (48,)"),
    "expert_map 2-D": (
        {"expert_map": zeros(2, 3)},
        "expert_map must have shape (global E,), got (2, 3)",
    ),
    "expert_map empty": (
        {"expert_map": zeros(0)},
        "expert_map must have shape (global E,), got (0,)",
    ),
    "weight on input, top_k 2": (
        {"router_weight_on_input": True},
        "router_weight_on_input must be False unless top_k is 1, got top_k 2: an input shared by "
        "several experts cannot carry their different weights",
    ),
    "hidden_states integer": ({"hidden_states": integer}, FLOAT.format("hidden_states")),
    "topk_weights integer": (
        {"topk_weights": lambda t: t.nan_to_num().long()},
        FLOAT.format("topk_weights"),
    ),
    "w13_bias integer": ({"w13_bias": integer}, FLOAT.format("w13_bias")),
    "topk_ids float": (
        {"topk_ids": lambda t: t.float()},
        "topk_ids must be int32 or int64, got torch.float32; pass the second tensor that "
        "moe_ops.route returns, the first are weights",
    ),
    "topk_ids int8": (
        {"topk_ids": lambda t: t.to(torch.int8)},
        INT.format("topk_ids", "torch.int8"),
    ),
    "topk_weights and topk_ids swapped": (
        {"topk_ids": lambda t: t.float(), "topk_weights": lambda t: t.nan_to_num().long()},
        "topk_ids must be int32 or int64, got torch.float32; topk_weights and topk_ids are "
        "swapped",
    ),
    "expert_map int8": (
        {"expert_map": zeros(4, dtype=torch.int8)},
        INT.format("expert_map", "torch.int8"),
    ),
    "w13 bf16": (
        {"w13": lambda t: t.to(BF16)},
        DTYPE.format("w13", "hidden_states", "torch.bfloat16"),
    ),
    "w2 bare e4m3": (
        {"w2": lambda t: t.to(torch.float8_e4m3fn)},
        BARE.format("w2", "hidden_states", "torch.float8_e4m3fn", "w2"),
    ),
    **{
        f"{name} elsewhere": ({name: meta}, DEVICE.format(name))
        for name in ("w13", "w2", "topk_weights", "topk_ids", "w13_bias", "w2_bias")
    },
    "expert_map elsewhere": (
        {"expert_map": zeros(4, device="meta")},
        DEVICE.format("expert_map"),
    ),
    "scale elsewhere": (
        {"scheme": "fp8_channel", "w13": lambda w: w._replace(scale=w.scale.to("meta"))},
        DEVICE.format("w13's scale"),
    ),
    "activation_scale elsewhere": (
        {
            "scheme": "fp8_tensor_static",
            "w2": lambda w: w._replace(activation_scale=w.activation_scale.to("meta")),
        },
        DEVICE.format("w2's activation_scale"),
    ),
    **{
        f"{name} without activation_scale": (
            {"scheme": "fp8_tensor_static", name: lambda w: w._replace(activation_scale=None)},
            f"{name} must have an activation_scale for scheme fp8_tensor_static, got None; "
            "moe_ops.quantize and moe_ops.from_quantized make weights that fit their scheme",
        )
        for name in ("w13", "w2")
    },
    "activation_scale of a scheme that takes none": (
        {
            "scheme": "fp8_channel",
            "w13": lambda w: w._replace(activation_scale=torch.tensor(0.1)),
        },
        "w13 must have no activation_scale for scheme fp8_channel, got one; ",
    ),
    "scale of a tensor": (
        {"scheme": "fp8_tensor", "w13": with_scale(3)},
        "w13's scale must have shape (4,) for scheme fp8_tensor, got (3,)",
    ),
    "scale of blocks": (
        {"scheme": "fp8_block", "w2": with_scale(4, 1, 2)},
        "w2's scale must have shape (4, 1, 1) for scheme fp8_block, got (4, 1, 2)",
    ),
    "two schemes in a layout": (
        {
            "scheme": "fp8_channel",
            "w13": laid_out,
            "w2": lambda w: laid_out(quantized("fp8_tensor")(w)),
        },
        "w13 and w2 must have their natural layout where their schemes differ, got scheme "
        "fp8_channel and scheme fp8_tensor in layouts other and other; moe_ops.prepare(weight, "
        "'torch')",
    ),
    "two layouts": (
        {"scheme": "fp8_channel", "w2": laid_out},
        "w2 must have the layout of w13, none, got other; prepare both for one backend",
    ),
    "unknown layout": (
        {"scheme": "fp8_channel", "w13": laid_out, "w2": laid_out, "backend": "torch"},
        "backend 'torch' cannot run this call: takes weights in their natural layout, "
        "got layout 'other'; moe_ops.prepare(weight, 'torch') brings it back",
    ),
    "no backend at all": (
        {"scheme": "fp8_channel", "w13": laid_out, "w2": laid_out},
        "torch: takes weights in their natural layout, got layout 'other'",
    ),
    "activation": (
        {"activation": "swish"},
        f"activation must be one of {', '.join(NAMES)}, got 'swish'",
    ),
    "activation in a list": (
        {"activation": ["silu"]},
        f"activation must be one of {', '.join(NAMES)}, got ['silu']",
    ),
    "misspelt activation": (
        {"activation": "Sillu"},
        "relu2_no_mul, got 'Sillu'; did you mean 'silu' or 'situ'?",
    ),
    "backend": (
        {"backend": "vllm"},
        f"backend must be one of {', '.join(('auto', *backends.list_backends()))}, got 'vllm'",
    ),
    "misspelt backend": ({"backend": "deepgemm"}, "'deepgemm'; did you mean 'deep_gemm' or"),
    "triton records no gradients": (
        {"backend": "triton", "hidden_states": leaf},
        NO_BACKWARD,
    ),
    "triton in fp64": (
        {
            "backend": "triton",
            **dict.fromkeys(("hidden_states", "w13", "w2"), lambda t: t.double()),
        },
        "backend 'triton' cannot run this call: ",
    ),
}
OTHERS = {
    "x 3-D": ({"x": lambda t: t[None]}, RANK.format("x", "(S, K)", 3)),
    "x integer": ({"x": integer}, FLOAT.format("x")),
    "weight 2-D": ({"weight": lambda t: t[0]}, RANK.format("weight", "(E, N, K)", 2)),
    "weight transposed": (
        {"weight": lambda t: t[:, :40].mT, "bias": lambda t: t[:, :40]},
        "weight must have shape (E, N, 48) for x, got (4, 48, 40); it is transposed: pass "
        "weight.transpose(1, 2)",
    ),
    "weight K": (
        {"x": lambda t: t[:, :8]},
        "weight must have shape (E, N, 8) for x, got (4, 48, 48)",
    ),
    "weight bf16": (
        {"weight": lambda t: t.to(BF16)},
        DTYPE.format("weight", "x", "torch.bfloat16"),
    ),
    "weight scale": (
        {"scheme": "fp8_tensor", "weight": with_scale(3)},
        "weight's scale must have shape (4,) for scheme fp8_tensor, got (3,)",
    ),
    "weight elsewhere": ({"weight": meta}, DEVICE.format("weight")),
    "offsets shape": (
        {"offsets": lambda t: t[1:]},
        "offsets must have shape (4,), the end row of each expert, got (3,)",
    ),
    "offsets int64": (
        {"offsets": integer},
        "offsets must be int32, got torch.int64; convert it with .to()",
    ),
    "offsets elsewhere": ({"offsets": meta}, DEVICE.format("offsets")),
    "bias": ({"bias": lambda t: t[:, :3]}, "bias must have shape (4, 48), got (4, 3)"),
    "bias elsewhere": ({"bias": meta}, DEVICE.format("bias")),
    "linear triton records no gradients": ({"backend": "triton", "weight": leaf}, NO_BACKWARD),
}
BLOCKS = {
    "blocks 2-D": (
        {"hidden_states": lambda t: t[0]},
        RANK.format("hidden_states", "(E, T, K)", 2),
    ),
    "number of blocks": (
        {"hidden_states": lambda t: t[:3]},
        "hidden_states must have shape (E, T, K) with E=4 experts as in w13, got 3 blocks",
    ),
    "counts shape": (
        {"expert_num_tokens": lambda t: t[1:]},
        "expert_num_tokens must have shape (4,), got (3,)",
    ),
    "counts float": (
        {"expert_num_tokens": lambda t: t.float()},
        INT.format("expert_num_tokens", "torch.float32"),
    ),
    "counts elsewhere": ({"expert_num_tokens": meta}, DEVICE.format("expert_num_tokens")),
    "blocks w2": (
        {"w2": lambda t: t[..., 1:]},
        W2.format((4, 48, 48), "gated", "silu", (4, 48, 23)),
    ),
    "blocks w13_bias": (
        {"w13_bias": lambda t: t[1:]},
        "w13_bias must have shape (4, 48), got (3, 48)",
    ),
    "blocks record no gradients": (
        {"w2": leaf},
        "batched_experts has no backward: wrap the call in torch.no_grad() or use fused_experts, "
        "which has one",
    ),
}
TABLE = [
    pytest.param(function, changes, sentence, id=name)
    for function, rows in (
        (moe_ops.fused_experts, FUSED),
        (moe_ops.grouped_linear, OTHERS),
        (moe_ops.batched_experts, BLOCKS),
    )
    for name, (changes, sentence) in rows.items()
]


def everything_said(error: BaseException) -> str:
    """The messages of an error and of all it was raised from."""
    said = []
    while error is not None:
        said.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(said)


@pytest.mark.parametrize("function, changes, sentence", TABLE)
def test_sentence(function, changes, sentence):
    for _ in range(2):  # a call that failed is not remembered as a good one
        with pytest.raises(ValueError) as caught:
            call(function, changes)
        assert sentence in str(caught.value)


@pytest.mark.sweep
@pytest.mark.parametrize("function, changes, sentence", TABLE)
def test_sentence_while_compiling(function, changes, sentence):
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
        call(function, changes, compiled=True)
    assert sentence in everything_said(caught.value).replace("\\'", "'")


def test_weights_that_would_not_fit_transposed_either_are_not_called_so():
    """As many rows as hidden_states has columns may be chance."""
    for function, changes in (
        (moe_ops.fused_experts, {"w13": lambda t: t[..., :40]}),
        (moe_ops.grouped_linear, {"weight": lambda t: t[..., :40]}),
    ):
        with pytest.raises(ValueError, match=r"must have shape \(E, N, 48\) .* \(4, 48, 40\)$"):
            call(function, changes)
    both = {"w13": lambda t: t[:, :40].mT, "w2": lambda t: t[..., :20].mT}
    with pytest.raises(ValueError, match=r"it is transposed: pass w13\.transpose\(1, 2\)$"):
        call(moe_ops.fused_experts, both)


@pytest.mark.slow
def test_sentence_of_a_dynamic_row_count():
    """Row counts that are symbols when traced: real numbers stand in the sentence all the same."""
    torch._dynamo.reset()
    compiled = torch.compile(
        moe_ops.fused_experts, fullgraph=True, backend="aot_eager", dynamic=True
    )
    good = good_arguments(moe_ops.fused_experts)
    positional = [good.pop(name) for name in EXPERTS]
    compiled(*positional, **good)
    positional[4] = positional[4][:5]
    with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException)) as caught:
        compiled(*positional, **good)
    sentence = "topk_ids must have one row per row of hidden_states, 7, got 5"
    assert sentence in everything_said(caught.value)


def test_rows_are_checked_again_when_an_unbacked_graph_runs():
    """Traced without knowing the row counts, the op itself compares them before anything runs."""
    torch._dynamo.reset()
    compiled = torch.compile(moe_ops.fused_experts, fullgraph=True, backend="aot_eager")
    good = good_arguments(moe_ops.fused_experts)
    positional = [good.pop(name) for name in EXPERTS]

    def marked(rows):
        fresh = [t.clone() for t in positional]
        fresh[4] = fresh[4][:rows].clone()
        for t in (fresh[0], *fresh[3:]):
            torch._dynamo.decorators.mark_unbacked(t, 0)
        return fresh

    compiled(*marked(7), **good)
    with pytest.raises((ValueError, RuntimeError, AssertionError)) as caught:
        compiled(*marked(5), **good)
    assert "5" in everything_said(caught.value) and "7" in everything_said(caught.value)


@pytest.mark.parametrize(
    "function", [moe_ops.fused_experts, moe_ops.batched_experts, moe_ops.grouped_linear]
)
def test_every_argument_that_is_no_tensor_is_named(function):
    good = good_arguments(function)
    for name in [name for name, value in good.items() if isinstance(value, torch.Tensor)]:
        for bad, kind in (([1.0], "list"), (good[name].float().numpy(), "ndarray"), ("x", "str")):
            with pytest.raises(ValueError, match=f"{name} must be a torch.Tensor, got {kind}"):
                function(**{**good, name: bad})
        if "bias" not in name and name != "expert_map":
            with pytest.raises(ValueError, match=f"{name} must be a torch.Tensor, got NoneType"):
                function(**{**good, name: None})


def test_how_a_tensor_is_made_of_something_else():
    one, linear = torch.ones(3, 2), torch.nn.Linear(2, 3)
    layer = moe_ops.MoELayer(4, 2, num_experts=3, top_k=1)
    for bad, remedy in (
        ([one, one], "pass torch.stack(tuple(w13))"),
        (torch.nn.ParameterList([one, one]), "pass torch.stack(tuple(w13))"),
        ((one, one.long()), "pass one of them"),
        ([one, one[:1]], "pass one of them"),
        ([linear, linear], "pass torch.stack([one.weight for one in w13])"),
        (torch.nn.ModuleList([linear]), "pass torch.stack([one.weight for one in w13])"),
        (linear, "pass a parameter of it, such as w13.weight"),
        (layer, "pass a parameter of it, such as w13.experts.gate_up_proj"),
        (one.numpy(), "pass torch.as_tensor(w13)"),
        (one.tolist(), "pass torch.as_tensor(w13)"),
        (None, "it cannot be left out"),
    ):
        with pytest.raises(ValueError) as caught:
            moe_ops.fused_experts(one, bad, one, one, one)
        kind = type(bad).__name__
        assert str(caught.value) == f"w13 must be a torch.Tensor, got {kind}; {remedy}"
        if "stack" in remedy:
            made = eval(remedy.removeprefix("pass "), {"torch": torch, "w13": bad})
            assert made.shape == (len(bad), 3, 2)
    with pytest.raises(ValueError, match=r"layer.quantize\(scheme\), .*transformers.quantize\("):
        moe_ops.quantize(layer, "fp8_block")
    with pytest.raises(ValueError, match="x must be a torch.Tensor, got list"):
        moe_ops.quantize_activation([1.0], "fp8_block")


def test_what_is_no_tensor():
    good = torch.ones(2)
    for accepted in (good, torch.nn.Parameter(good)):
        checks.check_tensor("w2", accepted)
    for bad, kind in (("x", "str"), ([good], "list"), (None, "NoneType"), (1.0, "float")):
        with pytest.raises(ValueError, match=f"w2 must be a torch.Tensor, got {kind}"):
            checks.check_tensor("w2", bad)
    named = good_arguments(moe_ops.fused_experts)
    hidden_states, w13, w2, _, ids = [named.pop(name) for name in EXPERTS]
    for bad in (ids.tolist(), None):
        with pytest.raises(ValueError, match="topk_ids must be a torch.Tensor, got"):
            moe_ops.explain(hidden_states, w13, w2, bad, **named)
    with pytest.raises(ValueError, match="the second tensor that moe_ops.route returns"):
        moe_ops.explain(hidden_states, w13, w2, ids.float(), **named)
    with pytest.raises(ValueError, match="hidden_states must be a torch.Tensor, got str"):
        moe_ops.explain("x", w13, w2, ids, **named)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("expert_map", [None, ENDS])
def test_ids_never_raise(dtype, expert_map):
    """Routing is data: whatever it holds, the call runs, and what names no expert adds nothing."""
    good = good_arguments(moe_ops.fused_experts)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[least, most], [-1, 4], [most - 1, -(2**30)]] * 2 + [[2**30, 5]])
    good |= {"topk_ids": ids.to(dtype), "expert_map": expert_map}
    out = moe_ops.fused_experts(*[good.pop(name) for name in EXPERTS], **good)
    assert (out == 0).all()


def test_reasons_of_a_library_that_is_missing():
    """A backend's name is an ImportError with its remedy where its library is not installed."""
    good = good_arguments(moe_ops.fused_experts)
    positional = [good.pop(name) for name in EXPERTS]
    with (
        machines.pretend(Machine("cuda", (9, 0), "NVIDIA H200", ("torch",))),
        pytest.raises(ImportError, match="backend 'triton' cannot run this call: "),
    ):
        moe_ops.fused_experts(*positional, **good, backend="triton")


def test_named_backend_never_falls_back():
    good = good_arguments(moe_ops.fused_experts)
    positional = [good.pop(name) for name in EXPERTS]
    machine = Machine("cuda", (7, 5), "Tesla T4", ("triton", "torch"))
    with machines.pretend(machine):
        with pytest.raises(ValueError, match="triton needs compute capability 8.0 or higher"):
            moe_ops.fused_experts(*positional, **good, backend="triton")
        plan = moe_ops.explain(*positional[:3], positional[4], **good)
    assert plan.backend == "torch"
    assert "not triton: triton needs compute capability 8.0 or higher, got 7.5" in str(plan)


def unusual(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor in every layout that has no element for each stride."""
    rows = list(tensor)
    found = [tensor.to_sparse(), tensor.to_sparse_csr()]
    if tensor.dtype == torch.float32:
        found.append(tensor.to_mkldnn())
    if tensor.dim() > 1:
        for layout in (torch.strided, torch.jagged):
            found.append(torch.nested.nested_tensor(rows, layout=layout))
    return found


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("function", POSITIONAL)
def test_sparse_nested_and_mkldnn_tensors(function):
    """Each is refused by name, with what makes of it a tensor that is taken."""
    names = [*POSITIONAL[function], *("w13_bias", "w2_bias", "bias")]
    for name in names:
        good = good_arguments(function)
        if name not in good or good[name].dim() == 1:
            continue
        for tensor in unusual(good[name].float()):
            bind.forget()
            given = good | {name: tensor}
            nested = rf"a nested one; pass torch\.stack\(tuple\({name}\.unbind\(\)\)\)"
            dense = rf"layout torch\.\w+; pass {name}\.to_dense\(\)"
            with pytest.raises(ValueError, match=f"{name} must be a dense tensor, got "):
                function(*[given.pop(n) for n in POSITIONAL[function]], **given)
            if tensor.is_nested or tensor.layout == torch.sparse_coo:
                given = good | {name: tensor}
                with pytest.raises(ValueError, match=nested if tensor.is_nested else dense):
                    function(*[given.pop(n) for n in POSITIONAL[function]], **given)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_sparse_nested_and_mkldnn_weights_are_not_quantized():
    for weight in unusual(torch.randn(4, 8, 32)):
        for function in (
            lambda w: moe_ops.quantize(w, "fp8_tensor"),
            lambda w: moe_ops.prepare(w, "flashinfer"),
        ):
            with pytest.raises(ValueError, match="weight must be a dense tensor, got "):
                function(weight)
        with pytest.raises(ValueError, match="qdata must be a dense tensor, got "):
            moe_ops.from_quantized("fp8_tensor", weight, torch.ones(4))
        with pytest.raises(ValueError, match="scale must be a dense tensor, got "):
            qdata = torch.zeros(4, 8, 32, dtype=torch.float8_e4m3fn)
            moe_ops.from_quantized("fp8_tensor", qdata, weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", POSITIONAL)
@pytest.mark.parametrize("scheme", ["", "fp8_block"])
def test_jit_trace(function, scheme):
    """What it would keep is the plan of one shape; the error names what traces all."""
    good = good_arguments(function, scheme)
    positional = [good.pop(name) for name in POSITIONAL[function]]
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace, .*use torch\.export\.export or"):
        torch.jit.trace(
            lambda x: function(x, *positional[1:], **good), positional[0], check_trace=False
        )


@pytest.mark.parametrize("autocast", [False, True])
def test_quantized_data_without_scales_are_refused(autocast):
    """Also under autocast, which would cast e4m3 as if it were the values."""
    w13, w2 = [moe_ops.quantize(torch.randn(2, n, 128), "fp8_block") for n in (256, 128)]
    x, routing = torch.randn(3, 128), (torch.rand(3, 1), zeros(3, 1))
    remedy = r", got torch.float8_e4m3fn; wrap it with its scales: moe_ops.from_quantized\("
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(ValueError, match="w13 must have dtype .*" + remedy):
            moe_ops.fused_experts(x, w13.qdata, w2.qdata, *routing)
        with pytest.raises(ValueError, match="weight must have dtype .*" + remedy):
            moe_ops.grouped_linear(x, w13.qdata, zeros(2) + 3)
        with pytest.raises(ValueError, match="must be a floating-point tensor, got torch.float8"):
            moe_ops.fused_experts(x.to(torch.float8_e4m3fn), w13, w2, *routing)
