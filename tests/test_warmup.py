"""moe_ops.warmup: what it runs, that later calls find all compiled, and where it refuses."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops import MoELayer, backends
from moe_ops import environment as environment_module
from moe_ops.backend import Library, Takes
from moe_ops.kernels import launch as launches
from moe_ops.ops.problem import Machine
from moe_ops.planning import bind
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans_module
from moe_ops.tuning.backends import laid_out
from tests.support.cases import BF16, FP32, TOLERANCE, assert_matches, tolerance

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are compiled")


def layer_of(backend="auto", *, dtype=FP32, device="cpu", scheme="", K=64, I=64, **options):
    torch.manual_seed(0)
    layer = MoELayer(K, I, 4, 2, backend=backend, dtype=dtype, device=device, **options)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(layer.experts, name)
        weight.data.normal_(std=weight.shape[-1] ** -0.5)
        if scheme:
            quantized = moe_ops.quantize(weight.data, scheme)
            setattr(layer.experts, name, nn.Parameter(quantized, requires_grad=False))
    return layer.requires_grad_(False).eval()


def called(report):
    """Name -> (layers it stands for, numbers of tokens) of a report."""
    return {w.name: (w.alike, [call.num_tokens for call in w.calls]) for w in report.layers}


# --- what runs -----------------------------------------------------------------------------------


def test_layers_that_are_alike_run_once():
    model = nn.Sequential(layer_of(), layer_of(), layer_of(I=32), layer_of(), layer_of("torch"))
    model.append(layer_of(activation="gelu")).append(layer_of(scheme="fp8_block"))
    model.append(layer_of(scheme="fp8_block"))
    report = moe_ops.warmup(model, [5, 1, 5])
    assert called(report) == {
        "0": (3, [1, 5]),
        "2": (1, [1, 5]),
        "4": (1, [1, 5]),
        "5": (1, [1, 5]),
        "6": (2, [1, 5]),
    }
    assert all(call.backends == ("torch",) for w in report.layers for call in w.calls)
    assert report.seconds == sum(call.seconds for w in report.layers for call in w.calls) > 0
    lines = str(report).splitlines()
    assert lines[0] == "0 and 2 like it" and lines[1].startswith("  M = 1: torch, 0.")
    assert lines[-1].endswith(" s in all") and "2" in lines


def test_strides_and_alignment_make_layers_differ():
    """Kernels are specialised on both."""
    model = nn.Sequential(layer_of(), layer_of(), layer_of())
    down = model[1].experts.down_proj
    turned = down.data.transpose(1, 2).contiguous().transpose(1, 2)
    model[1].experts.down_proj = nn.Parameter(turned, requires_grad=False)
    room = torch.empty(down.numel() + 1)
    odd = room[1:].view(down.shape).copy_(model[2].experts.down_proj)
    model[2].experts.down_proj = nn.Parameter(odd, requires_grad=False)
    assert called(moe_ops.warmup(model, [2])) == {str(i): (1, [2]) for i in range(3)}


def test_nothing_but_caches_changes():
    layer = layer_of(track_load=True).train()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    random = torch.get_rng_state()
    moe_ops.warmup(layer, (3,))
    assert torch.equal(torch.get_rng_state(), random)
    assert layer.expert_load.sum() == 0, "tokens of a warm-up are nobody's"
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_a_function_makes_the_calls():
    w13, w2 = torch.randn(3, 16, 8), torch.randn(3, 8, 8)
    sizes = []

    def call(M):
        sizes.append(M)
        ids = torch.zeros(M, 2, dtype=torch.int32)
        moe_ops.fused_experts(torch.randn(M, 8), w13, w2, torch.ones(M, 2), ids)
        return moe_ops.grouped_linear(torch.randn(M, 8), w13, torch.tensor([M, M, M]).int())

    report = moe_ops.warmup(call, (1, 8), show_progress=False)
    assert sizes == [8, 1]
    assert called(report) == {"call": (1, [1, 8])}
    assert report.layers[0].calls[0].backends == ("torch",)


def test_dtype_of_the_hidden_states():
    """A layer in fp32 that runs under autocast."""
    layer, seen = layer_of(), []
    layer.gate.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    moe_ops.warmup(layer, [2])
    moe_ops.warmup(layer_of(dtype=BF16, scheme="fp8_channel"), [2])
    with torch.autocast("cpu", torch.bfloat16):
        moe_ops.warmup(layer, [2], dtype=BF16)
    assert seen == [FP32, BF16]


# --- tiers and what backends tune ----------------------------------------------------------------


def test_every_tier_that_is_reached_is_tuned_and_run(monkeypatch):
    """Inside of the backend's `warm`, and once more as later calls run."""
    torch_backend = backends.named("torch")
    log, inside = [], []

    def backend(name):
        @contextlib.contextmanager
        def warm(rows):
            inside.append(name)
            log.append(f"{name} tunes {rows}")
            yield
            inside.pop()

        def launch(args):
            log.append(f"{name} runs {args.out.shape[0]}{' tuning' if inside else ''}")
            torch_backend.launch["experts"](args)

        return dataclasses.replace(
            torch_backend,
            name=name,
            launch={"experts": launch},
            library=Library(warm=warm),
            takes=Takes(),
        )

    few, many = backend("few"), backend("many")
    monkeypatch.setattr(backends, "BACKENDS", (few, many, torch_backend))
    monkeypatch.setattr(plans_module, "_measured", lambda *_: ((2, "few"), (-1, "many")))
    bind.forget()
    layer = layer_of()
    with machines.pretend(Machine("cpu", available=("few", "many", "torch"))):
        report = moe_ops.warmup(layer, (1, 2, 3))
        assert [call.backends for call in report.layers[0].calls] == [
            ("few",),
            ("few",),
            ("many",),
        ]
        assert log == [
            *("many tunes 3", "many runs 3 tuning", "many runs 3"),
            *("few tunes 2", "few runs 2 tuning", "few runs 2"),
            *("few tunes 1", "few runs 1 tuning", "few runs 1"),
        ]
        log.clear()
        layer(torch.randn(3, 64))
    assert log == ["many runs 3"], "nothing is tuned in a forward"
    bind.forget()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["", "fp8_block", "int4_w4a16:g32"])
@ON_CPU
def test_later_calls_find_every_kernel(scheme, monkeypatch):
    """As on a GPU kernels are kept by what they were specialised on; none may be missing
    afterwards."""
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "_compiled", {})
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: None))
    monkeypatch.setattr("triton.runtime.driver", driver)
    start, compiled = launches._start, []

    class Compiled:
        """What a first launch returns; runs the same kernel."""

        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *args, stream: self.kernel.function[grid](*args)

    def compile_and_start(launch, first, gpu):
        compiled.append(launch.kernel.name)
        start(launch, first, gpu)
        return Compiled(launch.kernel)

    monkeypatch.setattr(launches, "_start", compile_and_start)
    counts = (1, 2, 70)
    layer = layer_of("triton", scheme=scheme)
    moe_ops.warmup(layer, counts)
    assert compiled
    compiled.clear()
    for M in counts:
        x = torch.randn(M, 64)
        got = layer(x)
        layer.backend = "torch"
        assert_matches(got, layer(x), tolerance(FP32, scheme))
        layer.backend = "triton"
    assert compiled == []
    other = layer_of("triton", scheme=scheme, K=96)
    other(torch.randn(2, 96))
    assert compiled, "the count sees kernels that were not warmed"


# --- transformers --------------------------------------------------------------------------------


@pytest.fixture
def integration():
    pytest.importorskip("transformers")
    import moe_ops.integrations.transformers as module

    return module


def test_a_model_of_transformers(integration):
    from tests.integrations.transformers.test_families import build

    model = build("qwen3_moe", 3).to(BF16)
    with pytest.raises(ValueError, match="attach first"):
        moe_ops.warmup(model, [1])
    model.set_experts_implementation("moe_ops")
    report = moe_ops.warmup(model, [1, 6])
    assert called(report) == {"model.layers.0.mlp": (3, [1, 6])}
    seen = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(
        lambda module, args: seen.append([(t.dtype, t.shape[1:], t.stride()) for t in args])
    )
    moe_ops.warmup(model.model.layers[0].mlp, [14])
    with torch.no_grad():
        model(input_ids=torch.ones(2, 7, dtype=torch.int64), use_cache=False)
    assert seen[0] == seen[1], "experts see what the model's own forward hands them"
    integration.quantize(model, "fp8_channel")
    assert called(moe_ops.warmup(model, [2])) == {"model.layers.0.mlp": (3, [2])}


def test_bare_fp8_experts_without_a_block(integration):
    """Called by themselves, in each dtype that a router may weigh them in."""
    from tests.integrations.transformers.test_quantize import fp8_experts

    experts, seen = fp8_experts(), []
    experts.register_parameter("other", nn.Parameter(torch.zeros(1, dtype=BF16)))
    del experts.gate_up_proj_scale_inv, experts.down_proj_scale_inv
    for name in ("gate_up_proj", "down_proj"):
        E, N, K = getattr(experts, name).shape
        scale = torch.ones(E, -(-N // 128), K // 128, dtype=torch.float8_e8m0fnu)
        setattr(experts, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
    experts.register_forward_pre_hook(
        lambda module, args: seen.append([(t.dtype, *t.shape) for t in args])
    )
    report = moe_ops.warmup(experts, [4])
    assert called(report) == {"FP8Experts": (1, [4])}
    x, ids = (BF16, 4, 256), (torch.int64, 4, 2)
    assert seen == [[x, ids, (BF16, 4, 2)], [x, ids, (FP32, 4, 2)]]


@pytest.mark.parametrize(
    "family, name",
    [
        ("gemma4", "model.layers.0.experts"),  # experts stand in the decoder layer
        ("nemotron_h", "model.layers.1.mixer"),  # and are narrower than their block
        ("llama4", "model.layers.0.feed_forward"),
        ("dbrx", "transformer.blocks.0.ffn"),
    ],
)
def test_families_whose_blocks_are_built_otherwise(integration, family, name):
    from tests.integrations.transformers.test_families import build

    model = build(family, 2)
    integration.attach(model)
    report = moe_ops.warmup(model, [1, 3])
    assert called(report) == {name: (2, [1, 3])}
    assert all(call.backends == ("torch",) for call in report.layers[0].calls)


# --- where it refuses ----------------------------------------------------------------------------


def test_bad_arguments():
    layer = layer_of()
    for counts in ([0], [-1], [2.0], [True], ["4"], 0, None):
        with pytest.raises(ValueError, match="token_counts must be positive integers, got"):
            moe_ops.warmup(layer, counts)
    with pytest.raises(ValueError, match="token_counts must hold at least one"):
        moe_ops.warmup(layer, [])
    with pytest.raises(ValueError, match="must be a torch.nn.Module or a function .* got int"):
        moe_ops.warmup(3, [1])
    with pytest.raises(ValueError, match="expert layers that run through moe_ops, got Linear"):
        moe_ops.warmup(nn.Linear(2, 2), [1])
    with pytest.raises(ValueError, match="got the class MoELayer; pass an instance of it"):
        moe_ops.warmup(moe_ops.MoELayer, [1])
    for dtype in ("bfloat16", torch.int32):
        with pytest.raises(ValueError, match="dtype must be None or a floating torch.dtype, got"):
            moe_ops.warmup(layer, [1], dtype=dtype)
    with pytest.raises(ValueError, match="weights loaded, got MoELayer with weights on the meta"):
        moe_ops.warmup(layer_of().to("meta"), [1])


def test_not_while_tracing():
    layer = layer_of()

    def step(x):
        moe_ops.warmup(layer, [1])
        return x + 1

    with pytest.raises(Exception, match="must run before torch.compile traces"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="real tensors, got a call that is traced"):
        make_fx(step)(torch.ones(2))
    with FakeTensorMode(), pytest.raises(RuntimeError, match="real tensors"):
        moe_ops.warmup(layer, [1])


def test_not_while_capturing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must not be called while a CUDA graph is captured"):
        moe_ops.warmup(layer_of(), [1])


# --- threads and caches --------------------------------------------------------------------------


def test_threads_take_turns():
    layers = [layer_of(), layer_of(I=32)]
    running, most, failed = [], [], []

    def call(M):
        running.append(M)
        most.append(len(running))
        moe_ops.warmup(layers[M % 2], (1, M))  # a warm-up may call another
        running.pop()

    def work():
        try:
            report = moe_ops.warmup(call, (2, 3))
            assert called(report) == {"call": (1, [2, 3])}
        except Exception as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert max(most) == 1


def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_OPS_CACHE", str(tmp_path))
    assert environment_module.cache_folder() == tmp_path
    monkeypatch.delenv("MOE_OPS_CACHE")
    assert environment_module.cache_folder() == Path.home() / ".cache" / "moe_ops"


# --- on a GPU ------------------------------------------------------------------------------------


def captured(function, *args):
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = function(*args)
    return graph, out


@pytest.mark.parametrize("backend", ["auto", *backends.list_backends()])
@pytest.mark.parametrize("scheme", ["", "fp8_block", "fp8_channel", "int4_w4a16:g128"])
@pytest.mark.parametrize("M", [1, 3, 64, 500])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_capture_is_the_first_call(device, backend, scheme, M, monkeypatch):
    """Sizes that no other test has, and kernels of Triton forgotten: nothing else can have warmed
    them."""
    monkeypatch.setattr(launches, "_compiled", {})
    K, I = 640, 384
    layer = layer_of(backend, dtype=BF16, device=device, scheme=scheme, K=K, I=I)
    experts = layer.experts
    weights = [experts.gate_up_proj.data, experts.down_proj.data]
    x = torch.randn(M, K, device=device, dtype=BF16)
    try:
        if backend != "auto":
            ids = torch.zeros(M, 2, dtype=torch.int32, device=device)
            experts.gate_up_proj, experts.down_proj = (
                nn.Parameter(weight, requires_grad=False)
                for weight in laid_out(backend, *weights, x, ids)
            )
    except (ValueError, ImportError) as error:
        pytest.skip(str(error)[:200])
    report = moe_ops.warmup(layer, [M])
    if backend != "auto":
        assert report.layers[0].calls[0].backends == (backend,)
    graph, out = captured(layer, x)
    x.copy_(torch.randn_like(x))  # other experts
    graph.replay()
    routing = moe_ops.route(layer.gate(x), layer.top_k, layer.routing_method)
    wide = weights if scheme else [weight.float() for weight in weights]
    expected = moe_ops.fused_experts(x.float(), *wide, *routing, backend="torch")
    assert_matches(out, expected, tolerance(BF16, scheme, device))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_a_transformers_model_is_captured_at_once(device, integration):
    from tests.integrations.transformers.test_families import build

    model = build("qwen3_moe", 2).to(device, BF16)
    model.set_experts_implementation("moe_ops")
    integration.fuse_routers(model)
    block = model.model.layers[1].mlp
    moe_ops.warmup(model, [4])
    x = torch.randn(2, 2, 32, device=device, dtype=BF16)
    graph, out = captured(block, x)
    graph.replay()
    torch.cuda.synchronize()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        assert_matches(out, block(x), 2 * TOLERANCE[BF16])


SECOND_PROCESS = """
import torch, moe_ops
layer = moe_ops.MoELayer(768, 512, 8, 2, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
print(moe_ops.warmup(layer, [1, 16, 256]).seconds)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_second_process_compiles_nothing(tmp_path):
    folders = {"TRITON_CACHE_DIR": "triton", "MOE_OPS_CACHE": "moe_ops", "DG_JIT_CACHE_DIR": "dg"}
    environment = os.environ | {k: str(tmp_path / v) for k, v in folders.items()}

    def run():
        command = [sys.executable, "-c", SECOND_PROCESS]
        answer = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert answer.returncode == 0, answer.stderr
        return {path for path in tmp_path.rglob("*") if path.is_file()}

    first = run()
    assert first and run() == first
