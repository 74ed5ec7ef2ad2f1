"""DeepGEMM's formats of SM100 and SM120, which were not run on hardware: scales as packed
exponents.

Their layouts are held to the library's own Python functions bit for bit, calls to its signatures
(both where sgl-deep-gemm is installed, which needs no GPU), and layers to the oracle through
products in plain torch: so on any GPU the kernels around them do run.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops import backends
from moe_ops.activations import Activation
from moe_ops.backends.deep_gemm import backend as backend_module
from moe_ops.backends.deep_gemm import layer
from moe_ops.backends.deep_gemm import relayout as layout
from moe_ops.kernels import launch
from moe_ops.kernels.place import layout as layouts
from moe_ops.kernels.rows import scatter as scatter_module
from moe_ops.meta.scales import DEEP_GEMM_UE8M0
from moe_ops.numerics import quantize_activation
from moe_ops.ops import relayout
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.planning import machine as machines
from tests.backends.deep_gemm.test_layer import forget, rounded_first_product
from tests.support import fake_deep_gemm, oracle
from tests.support.cases import BF16, Case, assert_matches, poisoned_memory, tolerance
from tests.support.fake_cuda import Recorder, fake_gpu
from tests.support.places import devices

INSTALLED = importlib.machinery.PathFinder.find_spec("deep_gemm")
installed = pytest.mark.skipif(INSTALLED is None, reason="sgl-deep-gemm is not installed")
SCHEMES = {"fp8_block": "deep_gemm", "fp8_block:ue8m0": "deep_gemm"}
SCHEMES |= {"mxfp8": "deep_gemm", "mxfp4_w4a8": "deep_gemm_fp4"}
schemes = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(autouse=True)
def sm100(monkeypatch):
    """Weights are laid out as for SM100, and products are those of plain torch."""
    fake_deep_gemm.install(monkeypatch)
    monkeypatch.setattr(layout, "_multiplies_exponents", lambda device: True)
    forget()
    yield
    monkeypatch.undo()
    forget()


def planning(device: str):
    """Calls on any GPU are planned as on SM100."""
    return machines.pretend(GPUS[10]) if device == "cuda" else contextlib.nullcontext()


@pytest.fixture
def reference(monkeypatch):
    """The library's deep_gemm/utils, which are plain torch but for one size."""
    package = types.ModuleType("deep_gemm_reference")
    package.__path__ = list(INSTALLED.submodule_search_locations)
    aligned = types.SimpleNamespace(get_tma_aligned_size=lambda rows, size: -(-rows // 4) * 4)
    package._C = aligned
    monkeypatch.setitem(sys.modules, "deep_gemm_reference", package)
    for name in ("math", "layout", "dist", ""):
        monkeypatch.delitem(sys.modules, f"deep_gemm_reference.utils.{name}".rstrip("."), False)
    return importlib.import_module("deep_gemm_reference.utils")


# --- weights -------------------------------------------------------------------------------------


@installed
@pytest.mark.parametrize("groups", [1, 4, 6, 16])
def test_packed_exponents_are_the_library_s(reference, groups):
    exponents = torch.randint(1, 255, (3, 128, groups), dtype=torch.uint8)
    scales = (exponents.int() << 23).view(torch.float32)
    ours = layout.pack_exponents(exponents)
    expected = reference.layout._pack_fp32_into_ue8m0_fallback(scales)
    argument = ours.view(-1).view(ours.shape).transpose(1, 2)
    assert torch.equal(argument, expected) and argument.stride() == expected.stride()
    assert torch.equal(layout.unpack_exponents(ours, groups), exponents)
    if groups % 4 == 0:
        assert torch.equal(argument[0], reference.math.pack_ue8m0_to_int(scales[0]))


@installed
def test_requantized_blocks_are_the_library_s(reference):
    w = moe_ops.quantize(torch.randn(2, 256, 384) * 3, "fp8_block")
    prepared = moe_ops.prepare(w, "deep_gemm")
    assert prepared.weight_layout == DEEP_GEMM_UE8M0 and prepared.shape == w.shape
    back = relayout.natural(prepared)
    for e in range(2):
        q, scale = reference.math.per_block_cast_to_fp8(w[e].dequantize(torch.float32), True)
        assert torch.equal(prepared.qdata[e].view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(back.scale[e], scale)
        rows = scale.repeat_interleave(128, 0)
        expected = reference.layout._pack_fp32_into_ue8m0_fallback(rows)
        assert torch.equal(prepared.scale[e].T, expected)
    # twice rounded: half a unit of e4m3 each, of either scale
    assert_matches(back.dequantize(), w.dequantize().double(), 2 * 2.0**-4)


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4_w4a8", "mxfp4_w4a8:ceil"])
def test_exponents_of_mx_weights_stay(scheme):
    w = moe_ops.quantize(torch.randn(2, 128, 256), scheme)
    prepared = moe_ops.prepare(w, SCHEMES[scheme.split(":")[0]])
    assert prepared.scale.shape == (2, 2, 128) and prepared.scale.dtype == torch.int32
    assert torch.equal((prepared.scale[1, 1, 5:6].view(torch.uint8)), w.scale[1, 5, 4:8])
    back = relayout.natural(prepared)
    assert torch.equal(back.scale, w.scale) and back.qdata is w.qdata
    assert torch.equal(prepared.dequantize(), w.dequantize())
    assert torch.equal(prepared[1].dequantize(), w[1].dequantize())


@schemes
def test_sizes_that_128_does_not_divide_are_refused(scheme):
    w = moe_ops.quantize(torch.randn(1, 64, 256), scheme)
    with pytest.raises(ValueError, match="rows and columns that 128 divides .* got \\(64, 256\\)"):
        moe_ops.prepare(w, SCHEMES[scheme])


def test_natural_weights_stay_so_elsewhere(monkeypatch):
    monkeypatch.undo()
    w = moe_ops.quantize(torch.randn(1, 128, 128), "fp8_block")
    assert moe_ops.prepare(w, "deep_gemm") is w


# --- activations ---------------------------------------------------------------------------------


@devices
@installed
@pytest.mark.parametrize("scheme, width", [("mxfp8", 32), ("fp8_block", 128)])
@pytest.mark.parametrize("K", [128, 640])
def test_quantized_rows_are_the_library_s(reference, scheme, width, K, device):
    M, R = 3, 128
    x = torch.randn(M, K).to(BF16).to(device)
    rows = torch.tensor([70, -1, 5], dtype=torch.int32, device=device)
    form = layer.format_of(scheme, DEEP_GEMM_UE8M0)
    size = R * backend_module._row_bytes(K)
    buffer = torch.full((size,), 255, dtype=torch.uint8, device=device)
    y, index = layer.rows_in(buffer, (R, K), form), x.get_device()
    gpu = launch.gpu(index)
    launch.run([scatter_module.scatter(x, y, layouts.Layout(rows, rows, R), 1, gpu)], index, gpu)
    q, scale = reference.math.per_token_cast_to_fp8(x, True, gran_k=width)
    words = reference.layout._pack_fp32_into_ue8m0_fallback(scale)
    for m, row in ((0, 70), (2, 5)):
        assert torch.equal(y.data[row].view(torch.uint8), q[m].view(torch.uint8))
        assert torch.equal(y.scale[row], words[m])
    untouched = [row for row in range(R) if row not in (70, 5)]
    assert (y.data.view(torch.uint8)[untouched] == 255).all()
    assert (y.scale[untouched] == -1).all()
    assert y.scale.stride() == (1, R)


def test_weights_with_scales_that_are_powers_of_two_keep_their_elements():
    w = moe_ops.quantize(torch.randn(2, 256, 384), "fp8_block:ue8m0")
    prepared = moe_ops.prepare(w, "deep_gemm")
    assert prepared.weight_layout == DEEP_GEMM_UE8M0 and prepared.qdata is w.qdata
    assert torch.equal(prepared.dequantize(), w.dequantize())
    back = moe_ops.prepare(prepared, "torch")
    assert torch.equal(back.scale, w.scale) and back.qdata is w.qdata


# --- layers --------------------------------------------------------------------------------------


def powers_of_two(rows, scheme, static=None):
    """Activations in e4m3 by 128 columns, with scales that are powers of two."""
    scale = oracle._by_groups(rows, 128, lambda amax: oracle.power_of_two(amax, "e4m3", "ceil"))
    return oracle.e4m3(rows / scale) * scale


def prepared_case(device: str, scheme: str, **options) -> tuple[Case, torch.Tensor]:
    """A case with weights laid out, and what the oracle says of them."""
    case = Case(device, BF16, scheme, **{"K": 256, "I": 128, **options})
    natural, backend = case.args, SCHEMES[scheme]
    laid_out = [moe_ops.prepare(w, backend) for w in natural[1:3]]
    case.args = [natural[0], *[relayout.natural(w) for w in laid_out], *natural[3:]]
    quantize = oracle.quantized_activation if scheme == "mxfp8" else powers_of_two
    with rounded_first_product(), mock.patch.object(oracle, "quantized_activation", quantize):
        expected = case.reference()
    case.args[1:3] = laid_out
    return case, expected


@devices
@schemes
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"K": 640, "activation": "swiglustep", "M": 3},
        {"M": 20, "top_k": 1, "on_input": True},  # before rows have scales
    ],
    ids=str,
)
def test_layers(device, scheme, options):
    case, expected = prepared_case(device, scheme, **options)
    with planning(device):
        out = case.run(SCHEMES[scheme])
    assert_matches(out, expected, tolerance(BF16, "fp8_block", device))
    assert (out[case.nowhere] == 0).all()


@devices
@pytest.mark.parametrize("on_input", [False, True])
def test_what_arrives_quantized_is_packed(device, on_input):
    """e8m0 scales of rows that arrive become words of four; router weights multiply products."""
    options = {"top_k": 1, "on_input": True} if on_input else {}
    case = Case(device, BF16, "mxfp8", K=640, I=128, **options)
    x, w13, w2, weights, ids = case.args
    x[case.nowhere] = 0
    arrived = quantize_activation(x, "mxfp8")
    laid_out = [moe_ops.prepare(w, "deep_gemm") for w in (w13, w2)]
    options = {**case.options, "hidden_states_scale": arrived.scale}
    with planning(device), poisoned_memory():
        out = moe_ops.fused_experts(
            arrived.q, *laid_out, weights, ids, **options, backend="deep_gemm"
        )
        if not on_input:
            inside = moe_ops.fused_experts(
                x, *laid_out, weights, ids, **case.options, backend="deep_gemm"
            )
            assert torch.equal(out, inside)
    options["out_dtype"] = BF16
    want = moe_ops.fused_experts(arrived.q, *case.args[1:], **options, backend="torch")
    # the library rounds the first product to bf16, which moves one activation in a hundred
    assert_matches(out, want.double(), tolerance(BF16, "fp8_block", "cuda"))


@devices
@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4_w4a8"])
def test_scales_that_are_no_powers_of_two_are_refused(device, scheme):
    case = Case(device, BF16, scheme, K=128, I=128)
    laid_out = [moe_ops.prepare(w, SCHEMES[scheme]) for w in case.args[1:3]]
    arrived = quantize_activation(case.args[0].nan_to_num(), scheme)
    with planning(device), pytest.raises(ValueError, match="takes no input that arrives quant"):
        moe_ops.fused_experts(
            *(arrived.q, *laid_out, *case.args[3:]),
            hidden_states_scale=arrived.scale,
            backend=SCHEMES[scheme],
        )


@devices
@schemes
@pytest.mark.slow
def test_batches(device, scheme, monkeypatch):
    """Two programs share what rows an expert has, whose scales fill more than a word of four."""
    monkeypatch.setattr(layouts, "MAX_PROGRAMS", 7)
    case = Case(device, BF16, scheme, K=640, I=640)
    laid_out = [moe_ops.prepare(w, SCHEMES[scheme]) for w in case.args[1:3]]
    x = torch.randn(4, 9, 640).to(BF16).to(device)
    counts = torch.tensor([2, 0, 9, 1], device=device)
    with poisoned_memory(), planning(device):
        out = moe_ops.batched_experts(x, *laid_out, counts, backend=SCHEMES[scheme])
    quantize = oracle.quantized_activation if scheme == "mxfp8" else powers_of_two
    with rounded_first_product(), mock.patch.object(oracle, "quantized_activation", quantize):
        expected = oracle.batched(x, *[relayout.natural(w) for w in laid_out], counts)
    here = ~expected.isnan()
    assert_matches(out[here], expected[here], tolerance(BF16, "fp8_block", device))


@devices
@installed
@pytest.mark.parametrize("scheme", ["", *SCHEMES])
def test_calls_fit_the_library_s_signatures(device, scheme, monkeypatch):
    text = (Path(INSTALLED.submodule_search_locations[0]) / "__init__.py").read_text()
    defined = {n.name: n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
    module, called = fake_deep_gemm.module(), []

    def checked(name, function):
        source = f"def {name}({ast.unparse(defined[name].args)}): pass"
        scope: dict = {}
        exec(source, {}, scope)
        signature = inspect.signature(scope[name])

        def call(*args, **options):
            bound = signature.bind(*args, **options).arguments
            parameters = inspect.signature(function).parameters
            called.append(name)
            return function(**{key: bound[key] for key in bound if key in parameters})

        return call

    for name in [name for name in vars(module) if name.startswith("m_grouped")]:
        monkeypatch.setattr(module, name, checked(name, getattr(module, name)))
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    forget()
    case, backend = Case(device, BF16, scheme, K=128, I=128, M=3), SCHEMES.get(scheme, "deep_gemm")
    if scheme:
        case.args[1:3] = [moe_ops.prepare(w, backend) for w in case.args[1:3]]
    x = torch.randn(4, 2, 128).to(BF16).to(device)
    counts = torch.tensor([2, 0, 1, 1], device=device)
    with planning(device):
        case.run(backend)
        moe_ops.batched_experts(x, *case.args[1:3], counts, backend=backend)
    kind = "fp8_fp4" if scheme else "bf16"
    contiguous, masked = [f"m_grouped_{kind}_gemm_nt_{name}" for name in ("contiguous", "masked")]
    assert called == [contiguous] * 2 + [masked] * 2


# --- plans ---------------------------------------------------------------------------------------

GPUS = {
    major: Machine("cuda", (major, 0), f"SM{major}0", backends.list_backends())
    for major in (8, 9, 10, 12)
}
PROBLEM = Problem(
    *("experts", 4, 256, 128, 256, 2, BF16),
    layout=DEEP_GEMM_UE8M0,
    options=Options(Activation("silu")),
)
PREPARE = "laid out for it: call moe_ops.prepare"


def backend_of(scheme: str):
    return backend_module.FP4 if scheme.startswith("mxfp4") else backend_module.BACKEND


@pytest.mark.parametrize("scheme, layout_, majors", [
    ("", "", (9, 10, 12)),
    ("fp8_block", "", (9,)),
    ("fp8_block", DEEP_GEMM_UE8M0, (10, 12)),
    ("mxfp8", DEEP_GEMM_UE8M0, (10,)),
    ("mxfp4_w4a8:ceil", DEEP_GEMM_UE8M0, (10, 12)),
])  # fmt: skip
def test_which_gpus(scheme, layout_, majors):
    backend = backend_module.FP4 if scheme.startswith("mxfp4") else backend_module.BACKEND
    problem = dataclasses.replace(PROBLEM, scheme=scheme, layout=layout_)
    for major, machine in GPUS.items():
        reasons = backend.supports(problem, machine)
        assert (not reasons) == (major in majors), (major, reasons)


@pytest.mark.parametrize("major, scheme, changes, reason", [
    (9, "mxfp8", {}, "deep_gemm runs mxfp8 on compute capability 10.x, got 9.0"),
    (9, "fp8_block", {}, "deep_gemm takes natural weights below 10.0, got layout "
                         "'deep_gemm_ue8m0'; "
     "moe_ops.prepare(weight, 'torch') brings it back"),
    (10, "fp8_block", {"layout": ""}, PREPARE),
    (10, "mxfp8", {"layout": ""}, PREPARE),
    (12, "mxfp4_w4a8", {"layout": ""}, PREPARE),
    (8, "mxfp4_w4a8", {}, "deep_gemm_fp4 runs mxfp4_w4a8 on compute capability 10.x, "
                          "12.x, got 8.0"),
    (10, "mxfp4_w4a8", {"activation": Activation("gelu")}, "has activations silu, swiglustep, "
                                                           "got gelu"),
    (10, "mxfp4", {}, "deep_gemm_fp4 has no kernel for scheme 'mxfp4'"),
])  # fmt: skip
def test_reasons(major, scheme, changes, reason):
    backend = backend_module.FP4 if scheme.startswith("mxfp4") else backend_module.BACKEND
    problem = PROBLEM.replace(scheme=scheme, **changes)
    assert any(reason in given for given in backend.supports(problem, GPUS[major]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4_w4a8"])
def test_traces_for_sm100(scheme):
    torch._dynamo.reset()
    recorder, backend = Recorder(), SCHEMES[scheme]
    weights = [torch.zeros(4, 256, 128), torch.zeros(4, 128, 128)]
    weights = [moe_ops.prepare(moe_ops.quantize(w, scheme), backend) for w in weights]
    with fake_gpu(GPUS[10]), torch.device("cuda"):
        w13, w2 = [
            type(w)(
                *[torch.empty(t.shape, dtype=t.dtype) for t in (w.qdata, w.scale)],
                *(w.scheme, w.weight_layout),
            )
            for w in weights
        ]
        tensors = (torch.empty(7, 128, dtype=BF16), torch.empty(7, 2))
        tensors += (torch.empty(7, 2, dtype=torch.int32),)
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        torch.compile(
            lambda x, w, ids: moe_ops.fused_experts(x, w13, w2, w, ids, backend=backend),
            fullgraph=True,
            backend=recorder.backend,
        )(*tensors)
    ((op, args),) = recorder.calls()
    assert op.name() == f"moe_ops::{backend}_experts"
    assert f"'layout': '{DEEP_GEMM_UE8M0}'" in args["options"]
