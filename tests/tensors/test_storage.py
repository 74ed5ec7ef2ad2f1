"""Quantized weights moved, copied, saved, loaded and compiled."""

import copy
import io
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_ops.nn.layer import MoELayer
from moe_ops.tensors import (
    Float8ExpertTensor,
    flatten,
    quantize,
    unflatten,
)
from tests.tensors.test_e4m3 import QUANTIZED, E, K, N, make, same, sample, schemes


class Experts(nn.Module):
    """Multiplies by experts the way eager model code does."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        gate, up = F.linear(x, self.weight[1]).chunk(2, -1)
        return gate * up + x @ self.weight.dequantize()[2, :128].t()


@schemes
def test_moves_and_copies(scheme):
    q = make(scheme)
    assert same(q.clone(), q) and q.clone().qdata.data_ptr() != q.qdata.data_ptr()
    assert same(q.detach(), q) and q.detach().qdata.data_ptr() == q.qdata.data_ptr()
    assert same(copy.deepcopy(q), q)
    parameter = copy.deepcopy(nn.Parameter(q, requires_grad=False))
    assert isinstance(parameter, nn.Parameter) and same(parameter, nn.Parameter(q, False))
    half = q.to(torch.float16)
    assert half.dtype == torch.float16 and half.qdata.dtype == torch.float8_e4m3fn
    assert torch.equal(half.dequantize(torch.float32), q.dequantize(torch.float32))
    assert half.scale.dtype == torch.float32 and q.float().dtype == torch.float32
    assert q.to(torch.bfloat16) is q and q.to("cpu") is q
    half.qdata.zero_()
    assert q.dequantize().any()
    with pytest.raises(ValueError, match="dtype of quantized weights"):
        q.to(torch.float64)
    meta = q.to("meta", torch.float32)
    assert meta.device.type == "meta" == meta.scale.device.type and meta.dtype == torch.float32
    empty = torch.empty_like(meta, device="cpu")
    assert empty.scheme == scheme and empty.qdata.shape == q.shape and empty.dtype == torch.float32
    assert type(q)(q, requires_grad=False) is q
    other = make(scheme, seed=1)
    target = q.to(torch.float32)
    target.copy_(other)
    assert same(target.to(torch.bfloat16), other) and target.dtype == torch.float32
    with pytest.raises(ValueError, match="moe_ops.quantize"):
        target.copy_(sample(E, N, K))
    with pytest.raises(ValueError, match="plain tensor"):
        sample(E, N, K).copy_(q)
    for wrong in (make(scheme, E, N, 128), make("fp8_w8a16:channel"), q[:2], q.mT):
        with pytest.raises(ValueError, match="quantized alike"):
            target.copy_(wrong)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_torch_save_and_state_dict(scheme):
    first, second = Experts(make(scheme)), Experts(make(scheme, seed=1))
    file = io.BytesIO()
    torch.save({"state": first.state_dict(), "view": first.weight.mT[:2]}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same(loaded["state"]["weight"], first.weight.detach())
    assert same(loaded["view"], first.weight.mT[:2])
    for assign in (False, True):
        module = copy.deepcopy(second)
        before = module.weight
        module.load_state_dict(loaded["state"], assign=assign)
        assert isinstance(module.weight, nn.Parameter) and (module.weight is before) != assign
        assert same(module.weight.detach(), first.weight.detach())
    plain = Experts(sample(E, N, K))
    with pytest.raises(RuntimeError, match="must be quantized alike"):
        plain.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match="moe_ops.quantize"):
        first.load_state_dict(plain.state_dict())
    plain.load_state_dict(first.state_dict(), assign=True)
    assert same(plain.weight.detach(), first.weight.detach())


@pytest.mark.slow
def test_a_fresh_process_loads_after_importing_moe_ops(tmp_path):
    """With weights_only, without torchao until then; what was set on a parameter stays."""
    parameter = nn.Parameter(make("fp8_tensor_static"), requires_grad=False)
    parameter.shard_id = 3
    state = {"w": make("fp8_block").mT, "p": parameter, "plain": sample(3)}
    torch.save(state, tmp_path / "state.pt")
    code = (
        "import sys, torch, moe_ops\n"
        "assert 'torchao' not in sys.modules\n"
        f"state = torch.load({str(tmp_path / 'state.pt')!r}, weights_only=True)\n"
        "assert isinstance(state['w'], moe_ops.Float8ExpertTensor)\n"
        "torch.save(state, sys.argv[1])"
    )
    again = tmp_path / "again.pt"
    subprocess.run([sys.executable, "-c", code, again], check=True, cwd=sys.path[0] or ".")
    for weights_only in (True, False):
        loaded = torch.load(again, weights_only=weights_only)
        assert same(loaded["w"], state["w"]) and same(loaded["p"], parameter)
        assert isinstance(loaded["p"], nn.Parameter) and not isinstance(loaded["w"], nn.Parameter)
        assert loaded["p"].shard_id == 3 and not loaded["p"].requires_grad
    on_meta = torch.load(again, weights_only=True, map_location="meta")["w"]
    assert on_meta.device.type == "meta" and on_meta.stride() == state["w"].stride()


class Plain(nn.Module):
    """Experts as a model declares them, trainable, beside a parameter that stays so."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(sample(E, N, K))
        self.norm = nn.Parameter(torch.ones(N, dtype=torch.bfloat16))


def plain_layer(device="cpu"):
    return MoELayer(K, 128, E, 2, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("fresh", [Plain, plain_layer, lambda: plain_layer("meta")])
def test_quantized_state_loads_into_a_fresh_plain_module(fresh, whole):
    """By the remedy that the errors name, for the model or for the experts' parameters alone."""
    quantized = Plain() if fresh is Plain else plain_layer()
    experts = [name for name, p in quantized.named_parameters() if p.dim() == 3]
    for name in experts:
        holder, _, last = name.rpartition(".")
        q = quantize(quantized.get_parameter(name).detach(), "fp8_block")
        setattr(quantized.get_submodule(holder), last, nn.Parameter(q, requires_grad=False))
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    remedy = r"requires_grad_\(False\) .*experts' parameters"
    model = fresh()
    if next(model.parameters()).device.type != "meta":
        with pytest.raises(RuntimeError, match=rf"quantized alike.*{remedy}.*assign=True"):
            model.load_state_dict(state)
    with pytest.raises((RuntimeError, ValueError), match=rf"assign=True\) call {remedy}"):
        fresh().load_state_dict(state, assign=True)
    if whole:
        model.requires_grad_(False)
    else:
        for name in experts:
            model.get_parameter(name).requires_grad_(False)
    model.load_state_dict(state, assign=True)
    for name, p in quantized.named_parameters():
        got = model.get_parameter(name)
        assert isinstance(got, nn.Parameter)
        assert got.requires_grad == (not whole and name not in experts)
        if name in experts:
            assert same(got.detach(), p.detach())
        else:
            assert torch.equal(got, p)
    if fresh is not Plain:
        x = sample(4, K)
        assert torch.equal(model.eval()(x), quantized.eval()(x))


def test_modules_move():
    module = Experts(make("fp8_block"))
    want = module.weight.dequantize(torch.float32)
    x = sample(2, K)
    module.to(torch.float32)
    assert isinstance(module.weight, nn.Parameter) and module.weight.dtype == torch.float32
    assert module(x.float()).dtype == torch.float32
    assert torch.equal(module.weight.dequantize(), want)
    module.requires_grad_(False)
    state = module.state_dict()
    module.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(module.weight.dequantize(), want)


def test_accelerate_rebuilds_parameters():
    modeling = pytest.importorskip("accelerate.utils.modeling")
    module = Experts(make("fp8_block"))
    value = module.weight.detach()
    modeling.set_module_tensor_to_device(module, "weight", "meta")
    assert module.weight.device.type == "meta"
    modeling.set_module_tensor_to_device(module, "weight", "cpu", value=value)
    assert same(module.weight.detach(), value)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_safetensors_round_trip(scheme, tmp_path):
    files = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    state = {
        "layer.w13": nn.Parameter(make(scheme), requires_grad=False),
        "layer.w2": make(scheme, seed=1).mT.to(torch.float16),
        "norm": sample(7),
    }
    tensors, metadata = flatten(state)
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in tensors.values())
    assert {"layer.w13.qdata", "layer.w13.scale", "norm"} <= set(tensors)
    save_file(tensors, tmp_path / "x.safetensors", {**metadata, "format": "pt"})
    with files.safe_open(tmp_path / "x.safetensors", "pt") as file:
        loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        got = unflatten(loaded, file.metadata())
    assert set(got) == set(state) and torch.equal(got["norm"], state["norm"])
    assert same(got["layer.w13"], state["layer.w13"].detach())
    assert same(got["layer.w2"], state["layer.w2"])
    assert unflatten({"a": tensors["norm"]}, None) == {"a": tensors["norm"]}


def test_files_of_plain_tensors_are_refused_by_name(tmp_path):
    files, layer = pytest.importorskip("safetensors.torch"), Experts(make("fp8_block"))
    for save in (
        lambda: files.save_file(layer.state_dict(), tmp_path / "w.safetensors"),
        lambda: files.save_model(layer, tmp_path / "w.safetensors"),
        lambda: files.save(layer.state_dict()),
    ):
        with pytest.raises(
            ValueError, match=r"Float8ExpertTensor must be .*flatten\(state_dict\)"
        ):
            save()
    assert not list(tmp_path.iterdir())
    with pytest.raises(NotImplementedError, match=r"numpy .*call it on weight.dequantize\(\)"):
        layer.weight.numpy()


def test_safetensors_refuses_what_it_cannot_restore():
    q = make("fp8_block")
    with pytest.raises(ValueError, match=r"'w\.scale' twice"):
        flatten({"w": q, "w.scale": q.scale})
    tensors, metadata = flatten({"w": q})
    with pytest.raises(ValueError, match=r"w\.qdata"):
        unflatten({"w.scale": tensors["w.scale"]}, metadata)
    said = json.loads(metadata["moe_ops:w"])
    with pytest.raises(ValueError, match="must be one of .*got 'os.system'"):
        unflatten(tensors, {"moe_ops:w": json.dumps(said | {"class": "os.system"})})
    for damaged in (
        *("{", "[" * 100_000, "5", "[]", "{}", said | {"x": ""}, said | {"scheme": 5}),
        *(said | {"dtype": "nn"}, said | {"dtype": "int8"}, said | {"weight_layout": None}),
        *({name: value for name, value in said.items() if name != gone} for gone in said),
    ):
        text = damaged if isinstance(damaged, str) else json.dumps(damaged)
        with pytest.raises(ValueError, match="metadata 'moe_ops:w' must be"):
            unflatten(tensors, {"moe_ops:w": text})
    with pytest.raises(
        ValueError, match=r"w: qdata must have 2 or 3 dimensions, got shape \(\d+,\)"
    ):
        unflatten(tensors | {"w.qdata": q.qdata.view(-1)}, metadata)
    tensors, metadata = flatten({"w": q[0]})
    assert same(unflatten(tensors, metadata)["w"], q[0])
    with pytest.raises(ValueError, match="w: scale must have shape"):
        unflatten(tensors | {"w.scale": q.scale[0, :1]}, metadata)
    tensors, metadata = flatten({"w": q})
    for nothing in (None, {}, {"format": "pt"}):
        with pytest.raises(ValueError, match="metadata must say what 'w.qdata' belongs to"):
            unflatten(tensors, nothing)


@pytest.mark.sweep
@schemes
def test_compile_and_export(scheme):
    module, x = Experts(make(scheme)), sample(4, K)
    want = module(x)
    backend = "inductor" if scheme == "fp8_block" else "aot_eager"
    got = torch.compile(module, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
    with torch.inference_mode():
        got = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(got, want)
    for strict in (False, True):
        program = torch.export.export(module, (x,), strict=strict)
        assert torch.equal(program.module()(x), want)


def test_compile_cache_key():
    def key(t):
        return t._stable_hash_for_caching()

    q = make("fp8_block")
    assert key(q) == key(make("fp8_block", seed=1)) == key(copy.deepcopy(q))
    others = [
        q.to(torch.float16),
        make("fp8_w8a16:block"),
        make("fp8_channel"),
        q[:2],
        q.mT,
        q[1:][:2],
        q.to("meta"),
        make("fp8_block", E, N, 301),
        make("fp8_tensor_static"),
    ]
    keys = {key(t) for t in (q, *others)}
    assert len(keys) == len(others) + 1


def test_distributed_wrappers_can_take_it_apart():
    q = make("fp8_tensor_static")
    names, attributes = q.__tensor_flatten__()
    assert names == ["qdata", "scale", "activation_scale"]
    parts = {name: getattr(q, name) for name in names}
    assert same(Float8ExpertTensor.__tensor_unflatten__(parts, attributes, q.shape, q.stride()), q)
    assert all(type(t) is torch.Tensor for t in parts.values())


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_gpu_round_trip(scheme):
    q = make(scheme)
    gpu = q.to("cuda")
    assert gpu.device.type == "cuda" == gpu.scale.device.type
    assert torch.equal(gpu.dequantize().cpu(), q.dequantize()) and same(gpu.cpu(), q)
    x = sample(4, K)
    got = F.linear(x.cuda(), gpu[1]).cpu()
    torch.testing.assert_close(got, F.linear(x, q[1]), rtol=2e-2, atol=0.5)
    module = Experts(q).cuda()
    want = module(x.cuda())
    torch._dynamo.reset()  # one code object, more schemes than it may be compiled for
    got = torch.compile(module, fullgraph=True)(x.cuda())
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
