"""MoELayer: values against an fp64 oracle and transformers' blocks, counters, loss, sharding,
tracing."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import moe_ops
from moe_ops.nn.config import MoEConfig
from moe_ops.nn.layer import MoELayer
from moe_ops.nn.load import load_balancing_loss, tokens_per_expert
from moe_ops.parallel.config import ParallelConfig
from tests.support.cases import poisoned_memory
from tests.support.fake_cuda import fake_gpu

H, I, E, TOP_K = 32, 16, 8, 3

LAYERS = {
    "plain": {},
    "biases": {"router_bias": True, "expert_bias": True},
    "shared": {"shared_expert_intermediate_size": 24},
    "shared_gated": {"shared_expert_intermediate_size": 24, "shared_expert_gate": True},
    "scaled": {"routed_scaling_factor": 2.5, "residual_scale": 0.4},
    "deepseek_v3": {
        "routing_method": "deepseek_v3",
        "num_expert_groups": 4,
        "topk_groups": 2,
        "correction_bias": True,
        "routed_scaling_factor": 1.5,
        "shared_expert_intermediate_size": 8,
    },
    "sigmoid_scoring": {"routing_method": "default", "scoring": "sigmoid"},
    "llama4": {"routing_method": "llama4", "top_k": 1, "router_weight_on_input": True},
    "not_gated": {"activation": "relu2_no_mul", "shared_expert_intermediate_size": 8},
    "gelu": {"activation": "gelu_tanh", "shared_expert_intermediate_size": 8},
    "interleaved": {"activation": "swigluoai", "shared_expert_intermediate_size": 8},
}


def make_layer(**options):
    options = {"top_k": TOP_K} | options
    layer = MoELayer(H, I, E, **options)
    with torch.no_grad():
        for _, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.is_floating_point():  # activations of unit scale, distinct everywhere
                tensor.normal_().div_(math.sqrt(tensor.shape[-1]) if tensor.ndim > 1 else 1)
    return layer.eval()


def activate(name, rows):
    half = rows.shape[-1] // 2
    gate, up = rows[..., :half], rows[..., half:]
    if name == "silu":
        return gate * torch.sigmoid(gate) * up
    if name == "gelu_tanh":
        c = math.sqrt(2 / math.pi)
        return 0.5 * gate * (1 + torch.tanh(c * (gate + 0.044715 * gate**3))) * up
    if name == "relu2_no_mul":
        return rows.clamp_min(0) ** 2
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def oracle(layer, x, residual=None):
    """The layer in fp64, token by token."""
    w = {name: tensor.detach().double() for name, tensor in layer.state_dict().items()}
    name = layer.activation.name
    w13_name = "gate_up_proj" if name != "relu2_no_mul" else "up_proj"
    rows = x.detach().double().reshape(-1, H)
    outputs, all_ids = [], []
    for token in rows:
        logits = w["gate.weight"] @ token + w.get("gate.bias", 0)
        scores = torch.softmax(logits, 0)
        if layer.routing_method in ("deepseek_v3", "llama4") or layer.scoring == "sigmoid":
            scores = torch.sigmoid(logits)
        key = scores + w.get("gate.e_score_correction_bias", 0)
        if layer.num_expert_groups:
            groups = key.view(layer.num_expert_groups, -1)
            order = groups.topk(2).values.sum(-1).topk(layer.topk_groups).indices
            closed = torch.ones(layer.num_expert_groups, dtype=torch.bool)
            closed[order] = False
            key = groups.masked_fill(closed[:, None], -math.inf).flatten()
        ids = key.topk(layer.top_k).indices
        weights = scores[ids]
        if layer.routing_method in ("renormalize", "deepseek_v3"):
            weights = weights / weights.sum()
        out = torch.zeros(H, dtype=torch.float64)
        for weight, e in zip(weights * layer.routed_scaling_factor, ids, strict=True):
            value = token * weight if layer.router_weight_on_input else token
            hidden = w[f"experts.{w13_name}"][e] @ value
            if f"experts.{w13_name}_bias" in w:
                hidden = hidden + w[f"experts.{w13_name}_bias"][e]
            if name == "swigluoai":
                hidden = torch.cat((hidden[::2], hidden[1::2]))
            value = w["experts.down_proj"][e] @ activate(name, hidden)
            if "experts.down_proj_bias" in w:
                value = value + w["experts.down_proj_bias"][e]
            out += value if layer.router_weight_on_input else weight * value
        if "shared_expert.up_proj.weight" in w:
            hidden = w["shared_expert.up_proj.weight"] @ token
            if "shared_expert.gate_proj.weight" in w:
                hidden = torch.cat((w["shared_expert.gate_proj.weight"] @ token, hidden))
            shared = w["shared_expert.down_proj.weight"] @ activate(name, hidden)
            if "shared_expert_gate.weight" in w:
                shared = shared * torch.sigmoid(w["shared_expert_gate.weight"] @ token)
            out = out + shared
        outputs.append(out * layer.residual_scale)
        all_ids.append(ids)
    result = torch.stack(outputs).reshape(x.shape)
    if residual is not None:
        result = result + residual.double()
    return result, torch.stack(all_ids)


@pytest.mark.parametrize("name", LAYERS)
def test_values(name):
    layer = make_layer(**LAYERS[name])
    x, residual = torch.randn(2, 5, H), torch.randn(2, 5, H)
    for given in (None, residual):
        expected, _ = oracle(layer, x, given)
        with torch.no_grad():
            got = layer(x, given)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_bf16_within_its_rounding():
    # logits in bf16 would now and then (4 times in 200) choose another expert than the oracle's
    options = LAYERS["shared_gated"] | {"router_logits_dtype": torch.float32}
    layer = make_layer(**options).bfloat16()
    x = torch.randn(16, H).bfloat16()
    expected, _ = oracle(layer, x)
    with torch.no_grad():
        got = layer(x)
    assert got.dtype == torch.bfloat16
    error = (got.double() - expected).norm() / expected.norm()
    assert error < 0.01  # some bf16 roundings of 2^-9 each


def test_gradients():
    """Of the gate, the shared expert and the input, through output and loss, against fp64."""
    layer = make_layer(shared_expert_intermediate_size=24, shared_expert_gate=True)
    x, upstream = torch.randn(6, H, requires_grad=True), torch.randn(6, H)
    out, loss = layer(x, return_aux_loss=True)
    ((out * upstream).sum() + 0.1 * loss).backward()

    reference = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    scores = torch.softmax(x64 @ reference["gate.weight"].T, -1)
    weights, ids = scores.topk(TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    hidden = torch.einsum("mh,enh->men", x64, reference["experts.gate_up_proj"])
    experts = torch.einsum(
        "mei,ehi->meh", activate("silu", hidden), reference["experts.down_proj"]
    )
    dense = torch.zeros_like(scores).scatter(1, ids, weights)
    out64 = torch.einsum("me,meh->mh", dense, experts)
    hidden = torch.cat(
        [x64 @ reference[f"shared_expert.{n}_proj.weight"].T for n in ("gate", "up")], -1
    )
    shared = activate("silu", hidden) @ reference["shared_expert.down_proj.weight"].T
    out64 = out64 + torch.sigmoid(x64 @ reference["shared_expert_gate.weight"].T) * shared
    fraction = F.one_hot(ids, E).sum((0, 1)) / 6
    loss64 = E * (fraction * scores.mean(0)).sum()
    ((out64 * upstream.double()).sum() + 0.1 * loss64).backward()
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), reference[name].grad, rtol=1e-4, atol=1e-5, msg=name
        )


def hf_config(**fields):
    return SimpleNamespace(
        hidden_size=H,
        moe_intermediate_size=I,
        intermediate_size=I,
        num_experts=E,
        num_local_experts=E,
        num_experts_per_tok=TOP_K,
        hidden_act="silu",
        norm_topk_prob=True,
        router_jitter_noise=0.0,
        _experts_implementation="eager",
        **fields,
    )


BLOCKS = [
    ("mixtral", "MixtralSparseMoeBlock", {}, {}),
    ("qwen3_moe", "Qwen3MoeSparseMoeBlock", {}, {}),
    (
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        {"shared_expert_intermediate_size": 24},
        {"shared_expert_intermediate_size": 24, "shared_expert_gate": True},
    ),
    (
        "deepseek_v3",
        "DeepseekV3MoE",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
        {
            "routing_method": "deepseek_v3",
            "num_expert_groups": 4,
            "topk_groups": 2,
            "correction_bias": True,
            "routed_scaling_factor": 2.5,
            "shared_expert_intermediate_size": 2 * I,
        },
    ),
]


@pytest.mark.parametrize(("family", "name", "fields", "options"), BLOCKS)
def test_loads_and_equals_the_block_of_transformers(family, name, fields, options):
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    block = getattr(module, name)(hf_config(**fields)).eval()
    for tensor in block.state_dict().values():
        tensor.normal_(std=0.3)
    layer = MoELayer(H, I, E, TOP_K, **options).eval()
    state = {
        key.replace("shared_experts.", "shared_expert."): t
        for key, t in block.state_dict().items()
    }
    if family != "deepseek_v3":
        assert state.keys() == block.state_dict().keys()
    layer.load_state_dict(state)  # strict: every name matches
    x = torch.randn(2, 7, H)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), block(x), rtol=1e-4, atol=1e-4)


def test_state_dict_names():
    everything = {**LAYERS["shared_gated"], **LAYERS["biases"], "correction_bias": True}
    layer = make_layer(routing_method="default", **everything)
    assert set(layer.state_dict()) == {
        "gate.weight",
        "gate.bias",
        "gate.e_score_correction_bias",
        "experts.gate_up_proj",
        "experts.gate_up_proj_bias",
        "experts.down_proj",
        "experts.down_proj_bias",
        "shared_expert.gate_proj.weight",
        "shared_expert.up_proj.weight",
        "shared_expert.down_proj.weight",
        "shared_expert_gate.weight",
    }
    not_gated = MoELayer(H, I, E, TOP_K, activation="silu_no_mul", expert_bias=True)
    assert {"experts.up_proj", "experts.up_proj_bias"} < set(not_gated.state_dict())
    assert not_gated.experts.up_proj.shape == (E, I, H)
    assert all(parameter.std() > 0 for parameter in MoELayer(H, I, E, TOP_K).parameters())


def test_load_is_counted_in_training_and_on_request():
    layer = make_layer(routed_scaling_factor=2.0)
    x = torch.randn(10, H)
    _, ids = oracle(layer, x)
    counts = torch.bincount(ids.flatten(), minlength=E)
    layer(x)
    assert layer.expert_load.sum() == 0
    layer.train()
    layer(x)
    layer(x)
    assert torch.equal(layer.expert_load, 2 * counts)
    layer.eval()
    layer.track_load = True
    layer(x)
    assert torch.equal(layer.expert_load, 3 * counts)
    assert layer.bfloat16().expert_load.dtype == torch.int64


@pytest.mark.sweep
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_counts_tokens_once(use_reentrant, compiled):
    """Also where operators behind the layer save tensors, so that it runs again to its end."""
    layer = make_layer().train()
    norm = nn.LayerNorm(H)

    def block(x):
        out, loss = layer(x, return_aux_loss=True)
        return torch.sigmoid(norm(out)) * loss

    def step(x):
        return checkpoint(block, x, use_reentrant=use_reentrant)

    x = torch.randn(10, H, requires_grad=True)
    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    step(x).sum().backward()
    _, ids = oracle(layer, x)
    assert torch.equal(layer.expert_load, torch.bincount(ids.flatten(), minlength=E))
    block(x)  # the next forward counts again
    assert layer.expert_load.sum() == 2 * 10 * TOP_K


def test_ids_out_of_range_are_not_counted():
    ids = torch.tensor([[0, 3], [-1, 3], [4, 2], [1000, -7]], dtype=torch.int32)
    assert tokens_per_expert(ids, 4).tolist() == [1, 0, 1, 2]
    assert tokens_per_expert(ids[:0], 4).tolist() == [0, 0, 0, 0]


def test_balancing_loss_equals_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layer = make_layer()
    x = torch.randn(40, H)
    _, loss = layer(x, return_aux_loss=True)
    logits = x @ layer.gate.weight.T
    expected = modeling.load_balancing_loss_func((logits,), E, TOP_K)
    torch.testing.assert_close(loss, expected)


def test_balancing_loss_of_known_routings():
    even = torch.full((E, E), 1 / E)
    assert load_balancing_loss(even, torch.arange(E)[:, None]).item() == pytest.approx(1.0)
    one_expert = F.one_hot(torch.zeros(6, dtype=torch.int64), E).float()
    collapsed = load_balancing_loss(one_expert, torch.zeros(6, 1, dtype=torch.int32))
    assert collapsed.item() == pytest.approx(E)
    assert load_balancing_loss(even[:0], torch.zeros(0, 2, dtype=torch.int32)).item() == 0.0


def test_no_tokens():
    layer = make_layer(**LAYERS["shared_gated"]).train()
    out, loss = layer(torch.zeros(0, H), return_aux_loss=True)
    assert out.shape == (0, H)
    assert loss.item() == 0.0
    assert layer.expert_load.sum() == 0


@pytest.mark.sweep
@pytest.mark.parametrize("mark", ["dynamic", "unbacked"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["shared_gated", "deepseek_v3", "llama4"])
@pytest.mark.slow
def test_one_graph_for_every_number_of_tokens(name, training, mark):
    layer = make_layer(**LAYERS[name]).train(training)
    eager = make_layer(**LAYERS[name]).train(training)
    eager.load_state_dict(layer.state_dict())
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for rows in (4, 2, 19):
        x, residual = torch.randn(rows, H), torch.randn(rows, H)
        for tensor in (x, residual):
            if mark == "dynamic":
                torch._dynamo.mark_dynamic(tensor, 0)
            else:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
        with torch.set_grad_enabled(training):
            got, loss = compiled(x, residual, return_aux_loss=True)
            expected, expected_loss = eager(x, residual, return_aux_loss=True)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(loss, expected_loss)
    assert counter.frame_count == 1
    assert torch.equal(layer.expert_load, eager.expert_load)
    assert (layer.expert_load.sum() > 0) == training
    torch._dynamo.reset()


@pytest.mark.slow
def test_training_step_through_aot_autograd():
    layer = make_layer(shared_expert_intermediate_size=8).train()
    eager = make_layer(shared_expert_intermediate_size=8).train()
    eager.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, H)
    for run in (torch.compile(layer, backend="aot_eager", fullgraph=True), eager):
        out, loss = run(x, return_aux_loss=True)
        (out.square().sum() + loss).backward()
    for ours, theirs in zip(layer.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert torch.equal(layer.expert_load, eager.expert_load)
    torch._dynamo.reset()


def test_export_keeps_the_counters_on_the_device():
    layer = make_layer(track_load=True)
    x = torch.randn(6, H)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes={"hidden_states": {0: tokens}})
        exported = program.module()
        other = torch.randn(17, H)
        torch.testing.assert_close(
            exported(other), oracle(layer, other)[0].float(), atol=1e-5, rtol=1e-5
        )
    assert exported.expert_load.sum() == 17 * TOP_K


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"activation": "relu2_no_mul", "expert_bias": True}])
def test_quantize_replaces_both_weights_of_the_experts(options):
    x = torch.randn(5, H)
    layer = make_layer(**options)
    gate, names = layer.gate.weight, (layer.experts.w13_name, "down_proj")
    reference = copy.deepcopy(layer)
    for name in names:
        weight = moe_ops.quantize(getattr(layer.experts, name), "int8_w8a16")
        getattr(reference.experts, name).data.copy_(weight.dequantize())
    plain = layer(x)
    assert layer.quantize("int8_w8a16") is layer and layer.gate.weight is gate
    for name in names:
        weight = layer.experts.get_parameter(name)
        assert weight.scheme == "int8_w8a16:channel" and not weight.requires_grad
    got, want = layer(x), oracle(reference, x)[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert 1e-4 < (got - plain).norm() / plain.norm() < 0.03

    state = {name: t.clone() for name, t in layer.state_dict().items()}
    for fresh, assign in (
        (make_layer(**options).quantize("int8_w8a16"), False),
        (make_layer(**options).requires_grad_(False), True),
        (MoELayer(H, I, E, TOP_K, device="meta", **options).eval().quantize("int8_w8a16"), True),
    ):
        fresh.load_state_dict(state, assign=assign)
        assert torch.equal(fresh(x), got)


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        ("int8", {}, "scheme must be one of .*'int8_w8a16'"),
        ("", {}, "scheme must be one that quantizes weights"),
        ("fp8_tensor_static", {}, "activation_scale must be given"),
        ("int4_w4a16:g32", {}, "experts.down_proj .*its 16 columns must be a multiple of 32"),
        ("fp8_block", {"down_proj": math.nan}, "experts.down_proj must be finite"),
        ("fp8_block", {"down_proj": "quantized"}, "experts.down_proj must be a plain tensor"),
        ("fp8_block", {"down_proj": "parametrized"}, "experts.down_proj must be a parameter"),
    ],
)
def test_quantize_refuses_before_anything_changes(scheme, changes, message):
    layer = make_layer()
    for name, change in changes.items():
        weight = getattr(layer.experts, name)
        if change == "quantized":
            setattr(layer.experts, name, nn.Parameter(moe_ops.quantize(weight, scheme), False))
        elif change == "parametrized":
            nn.utils.parametrize.register_parametrization(layer.experts, name, nn.Identity())
        else:
            weight.data[1, 0, 0] = change
    before = dict(layer.named_parameters())
    with pytest.raises(ValueError, match=message):
        layer.quantize(scheme)
    after = dict(layer.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)


@pytest.mark.slow
def test_quantized_experts():
    import moe_ops

    layer = make_layer(**LAYERS["shared_gated"])
    weights = {
        name: getattr(layer.experts, name).detach() for name in ("gate_up_proj", "down_proj")
    }
    reference = make_layer(**LAYERS["shared_gated"])
    reference.load_state_dict(layer.state_dict())
    for name, weight in weights.items():
        quantized = moe_ops.quantize(weight, "fp8_w8a16:channel")
        setattr(layer.experts, name, nn.Parameter(quantized, requires_grad=False))
        getattr(reference.experts, name).data.copy_(quantized.dequantize())
    assert f"top_k={layer.top_k}, backend={layer.backend}" in repr(layer)
    assert "gate_up_proj and down_proj in fp8_w8a16:channel" in repr(layer)
    x = torch.randn(9, H)
    expected, _ = oracle(reference, x)
    with torch.no_grad():
        got = layer(x)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled, got)
    loaded = make_layer(**LAYERS["shared_gated"]).requires_grad_(False)
    loaded.load_state_dict(layer.state_dict(), assign=True)
    with torch.no_grad():
        assert torch.equal(loaded(x), got)
    torch._dynamo.reset()


def config(**fields):
    sizes = {"num_experts": E, "experts_per_token": TOP_K, "hidden_dim": H, "intermediate_size": I}
    return MoEConfig(**({"in_dtype": torch.float32} | sizes | fields))


def test_from_config():
    layer = MoELayer.from_config(
        config(activation="gelu", routing_method="default", has_bias=True, moe_backend="torch"),
        shared_expert_intermediate_size=8,
    )
    assert layer.activation.name == "gelu"
    assert layer.routing_method == "default"
    assert layer.backend == "torch"
    assert layer.top_k == TOP_K
    assert layer.experts.gate_up_proj.shape == (E, 2 * I, H)
    assert layer.experts.down_proj_bias.shape == (E, H)
    assert layer.shared_expert.up_proj.out_features == 8
    half = MoELayer.from_config(config(in_dtype=torch.bfloat16, router_logits_dtype=torch.float32))
    assert half.experts.down_proj.dtype == half.gate.weight.dtype == torch.bfloat16
    assert half.gate(torch.randn(2, H).bfloat16()).dtype == torch.float32

    def last_experts(logits, top_k):
        ids = torch.arange(E - top_k, E).expand(logits.shape[0], top_k)
        return logits.gather(1, ids), ids

    custom = MoELayer.from_config(config(routing_method="custom"), routing_method=last_experts)
    custom(torch.randn(4, H))
    assert custom.expert_load.tolist() == [0] * (E - TOP_K) + [4] * TOP_K


@pytest.mark.parametrize("name", ["plain", "shared_gated"])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_shards_add_up_to_the_whole(expert_parallel, name):
    """With a shared expert, too, of which each device holds its columns; one gets the residual;
    loss and load are the same everywhere."""
    size = 3 if expert_parallel else 2
    shared = LAYERS[name]
    whole = make_layer(**shared, track_load=True)
    x, residual = torch.randn(11, H), torch.randn(11, H)
    total = torch.zeros(11, H)
    with torch.no_grad():
        _, loss = whole(x, return_aux_loss=True)
    for rank in range(size):
        parallel = ParallelConfig.make(
            tp_size=size, tp_rank=rank, enable_expert_parallel=expert_parallel
        )
        moe = config(parallel=parallel)
        layer = MoELayer.from_config(moe, **shared, track_load=True).eval()
        state = whole.state_dict()
        if shared:
            columns = slice(rank * 24 // size, (rank + 1) * 24 // size)
            for part in ("gate", "up"):
                key = f"shared_expert.{part}_proj.weight"
                state[key] = state[key][columns]
            key = "shared_expert.down_proj.weight"
            state[key] = state[key][:, columns]
        if expert_parallel:
            start = (0, 3, 6)[rank]
            local = slice(start, start + moe.num_local_experts)
            state["experts.gate_up_proj"] = state["experts.gate_up_proj"][local]
            state["experts.down_proj"] = state["experts.down_proj"][local]
        else:
            width = I // size
            columns = slice(rank * width, (rank + 1) * width)
            gate, up = state["experts.gate_up_proj"].chunk(2, 1)
            state["experts.gate_up_proj"] = torch.cat((gate[:, columns], up[:, columns]), 1)
            state["experts.down_proj"] = state["experts.down_proj"][:, :, columns]
        layer.load_state_dict(state)
        with torch.no_grad():
            share, its_loss = layer(x, residual if rank == 0 else None, return_aux_loss=True)
        total += share
        assert torch.equal(its_loss, loss)
        assert torch.equal(layer.expert_load, whole.expert_load)
    want, _ = oracle(whole, x, residual)
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5)


def test_the_router_is_one_operator_on_a_gpu():
    """Without gradients."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "moe_ops":
                names.append(func._opname)
            return func(*args, **(kwargs or {}))

    names = []
    with fake_gpu(), torch.device("cuda"):
        layer = MoELayer(H, I, E, TOP_K, dtype=torch.bfloat16).eval()
        x = torch.empty(5, H, dtype=torch.bfloat16)
        with Names(), torch.no_grad():
            layer(x)
    assert names[0] == "route_tokens" and "route" not in names


def test_hooks_of_the_gate_see_and_change_the_logits():
    layer = make_layer().requires_grad_(False)
    x = torch.randn(6, H)
    want = layer(x)
    seen = []
    handle = layer.gate.register_forward_hook(lambda _, inputs, logits: seen.append(logits))
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(seen[0], x @ layer.gate.weight.T)
    handle.remove()
    handle = layer.gate.register_forward_hook(lambda _, inputs, logits: -logits)
    flipped = layer(x)
    handle.remove()
    layer.gate.weight.neg_()
    torch.testing.assert_close(layer(x), flipped)
    assert not torch.allclose(flipped, want)
    layer.gate.forward = lambda x: x @ -layer.gate.weight.T  # as accelerate replaces it
    torch.testing.assert_close(layer(x), want)


@pytest.mark.parametrize("built", ["from_config", "explicit map", "context"])
@pytest.mark.parametrize("materialized", ["to_empty", "assign"])
def test_buffers_survive_the_meta_device(built, materialized):
    """They are in no state dict: whatever memory held would choose the experts."""
    parallel = ParallelConfig.make(tp_size=2, tp_rank=1, enable_expert_parallel=True)
    table = torch.tensor([-1, 0, -1, 3, 2, -1, 1, -1], dtype=torch.int32)
    if built == "from_config":
        build = lambda **device: MoELayer.from_config(config(parallel=parallel), **device)
    else:
        options = {"expert_map": table, "num_local_experts": 4}
        build = lambda **device: MoELayer(H, I, E, TOP_K, **options, **device)
    good = build().eval()
    assert set(good.state_dict()) == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    if built == "context":
        with torch.device("meta"):
            layer = build()
    else:
        layer = build(device="meta")
    assert layer.expert_map.is_meta and layer.expert_load.is_meta
    model = nn.Sequential(layer)
    if materialized == "to_empty":
        with poisoned_memory():
            model.to_empty(device="cpu")
    state = {f"0.{name}": tensor for name, tensor in good.state_dict().items()}
    model.load_state_dict(state, assign=materialized == "assign")
    assert torch.equal(layer.expert_map, good.expert_map)
    assert layer.expert_map.dtype == torch.int32
    assert layer.expert_load.tolist() == [0] * E
    x = torch.randn(5, H)
    with torch.no_grad():
        assert torch.equal(layer.eval()(x), good(x))
    assert torch.equal(table, torch.tensor([-1, 0, -1, 3, 2, -1, 1, -1], dtype=torch.int32))


def test_buffers_keep_what_was_written_to_them():
    """Experts that were placed anew, and counts, outlive every move."""
    table = torch.tensor([0, 1, -1, -1, 2, -1, 3, -1], dtype=torch.int32)
    layer = MoELayer(H, I, E, TOP_K, expert_map=table, num_local_experts=4)
    layer.expert_map.copy_(table.flip(0))
    layer.expert_load.copy_(torch.arange(E))
    moves = [lambda m: m.bfloat16(), lambda m: m.share_memory(), copy.deepcopy]
    moves += [lambda m: m.to("meta").to_empty(device="cpu"), lambda m: m.to_empty(device="cpu")]
    moves.append(lambda m: copy.deepcopy(m.to("meta")).to_empty(device="cpu"))
    for move in moves:
        with poisoned_memory():
            layer = move(layer)
        assert torch.equal(layer.expert_map, table.flip(0))
        assert torch.equal(layer.expert_load, torch.arange(E))


def test_expert_map_of_a_fake_layer():
    """FakeTensorMode has no values to look at: layers are built there to see sizes."""
    parallel = ParallelConfig.make(tp_size=2, tp_rank=1, enable_expert_parallel=True)
    with FakeTensorMode():
        layer = MoELayer.from_config(config(parallel=parallel))
        assert layer(torch.randn(3, H)).shape == (3, H)


def test_router_logits_dtype_holds_under_autocast():
    layer = make_layer(router_logits_dtype=torch.float32)
    x = torch.randn(3, H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = layer.gate(x)
        out = layer(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x @ layer.gate.weight.T)
    assert out.dtype == torch.bfloat16  # as torch.nn.functional.linear


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"top_k": 9}, r"top_k must be in 1..E=8, got 9"),
        ({"activation": "swish"}, "activation must be one of"),
        ({"hidden_size": 32.0}, "hidden_size must be an integer, got 32.0"),
        ({"num_experts": "8"}, "num_experts must be an integer, got '8'"),
        ({"top_k": 2.0}, "top_k must be an integer, got 2.0"),
        ({"backend": "cutlas"}, "backend must be one of auto, .*got 'cutlas'"),
        ({"routing_method": "best"}, "must be one of default, renormalize, .*got 'best'"),
        ({"routing_method": "unspecified"}, "method must be a callable .*got 'unspecified'"),
        ({"routing_method": "default", "scoring": "tanh"}, "scoring must be one of .*got 'tanh'"),
        ({"scoring": "sigmoid"}, "scoring must be 'softmax' or None for method 'renormalize'"),
        ({"routing_method": "llama4", "top_k": 2}, "top_k must be 1 for method 'llama4', got 2"),
        ({"router_weight_on_input": True}, "router_weight_on_input must be False .*got top_k 3"),
        ({"routing_method": "deepseek_v3"}, "correction_bias must be given for .*'deepseek_v3'"),
        ({"correction_bias": True}, "correction_bias must not be given for method 'renormalize'"),
        (
            {"routing_method": "default", "num_expert_groups": 3, "topk_groups": 1},
            "num_expert_groups must divide E=8, got 3",
        ),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor must be a number, got '2'"),
        ({"residual_scale": None}, "residual_scale must be a number, got None"),
        (
            {"shared_expert_intermediate_size": -8},
            "shared_expert_intermediate_size must be at least 0, got -8",
        ),
        ({"shared_expert_gate": True}, "shared_expert_gate must be False"),
        ({"num_local_experts": 4}, "must be given together"),
        (
            {"num_local_experts": 4, "expert_map": torch.zeros(4, dtype=torch.int32)},
            r"expert_map must have shape \(E=8,\), got \(4,\)",
        ),
        (
            {"num_local_experts": 4, "expert_map": [0] * 8},
            "expert_map must be a torch.Tensor, got list",
        ),
        (
            {"num_local_experts": 4, "expert_map": torch.zeros(8, device="meta")},
            "expert_map must hold values, got a tensor on the meta device; create it with",
        ),
        (
            {"num_local_experts": 2, "expert_map": torch.arange(8)},
            "expert_map must hold local ids below num_local_experts=2, .*got ids from 0 to 7",
        ),
        (
            {"num_local_experts": 8, "expert_map": torch.arange(8) - 2},
            "expert_map must hold .*got ids from -2 to 5",
        ),
        (
            {"num_local_experts": 8, "expert_map": torch.arange(8.0)},
            "expert_map must be int32 or int64, got torch.float32",
        ),
        (
            {"num_local_experts": 0, "expert_map": torch.full((8,), -1)},
            "num_local_experts must be at least 1, got 0",
        ),
    ],
)
def test_bad_arguments(options, message):
    sizes = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": TOP_K}
    with pytest.raises(ValueError, match=message):
        MoELayer(**(sizes | options))


def test_bad_configurations():
    expert_parallel = ParallelConfig.make(tp_size=2, enable_expert_parallel=True)
    with pytest.raises(ValueError, match="config must be a moe_ops.MoEConfig, got NoneType"):
        MoELayer.from_config(None)
    with pytest.raises(ValueError, match="must be a multiple of the . devices .* got 7; pad"):
        MoELayer.from_config(config(parallel=expert_parallel), shared_expert_intermediate_size=7)
    with pytest.raises(ValueError, match="has_bias must be False with tp_size=2"):
        MoELayer.from_config(config(parallel=ParallelConfig(tp_size=2), has_bias=True))
    replicas = ParallelConfig.make(tp_size=2, enable_expert_parallel=True, enable_eplb=True)
    with pytest.raises(ValueError, match="expert_map must be given for num_local_experts=5"):
        MoELayer.from_config(config(parallel=replicas, num_local_experts=5))


def test_bad_input():
    layer = make_layer()
    for x in (torch.randn(3, H + 1), torch.randn(H)):
        with pytest.raises(ValueError, match=r"hidden_states must have shape \(\.\.\., H=32\)"):
            layer(x)
    x = torch.randn(3, H)
    for bad, kind in ((None, "NoneType"), (x.tolist(), "list"), (x.numpy(), "ndarray")):
        with pytest.raises(ValueError, match=f"hidden_states must be a torch.Tensor, got {kind}"):
            layer(bad)
    with pytest.raises(
        ValueError, match="layer's dtype torch.float32, got torch.bfloat16; convert"
    ):
        layer(x.bfloat16())
    with pytest.raises(ValueError, match="residual must be a torch.Tensor, got float"):
        layer(x, 1.0)


def test_what_arrives_quantized_is_routed_by_the_caller():
    """The remedy of the error is what the layer would have computed."""
    layer = MoELayer(64, 32, 4, 2).requires_grad_(False)
    for name in ("gate_up_proj", "down_proj"):
        weight = moe_ops.quantize(getattr(layer.experts, name), "fp8_channel")
        setattr(layer.experts, name, torch.nn.Parameter(weight, requires_grad=False))
    x = torch.randn(5, 64)
    q, scale, *_ = moe_ops.quantize_activation(x, "fp8_channel")
    for arrived in (q, q.view(torch.int8), q.view(torch.uint8)[:, :32]):
        with pytest.raises(ValueError, match="^hidden_states must have 16 bits .*fused_experts"):
            layer(arrived)
    gate = layer.gate.weight, layer.top_k, layer.routing_method
    _, weights, ids = moe_ops.route_tokens(x, *gate)
    args = q, layer.experts.w13, layer.experts.down_proj, weights, ids
    out = moe_ops.fused_experts(*args, hidden_states_scale=scale, out_dtype=x.dtype)
    assert torch.equal(out, layer(x))
