"""What every scheme must survive: one graph, CUDA graphs replayed over other routing, generation
of a trained model."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import moe_ops
from moe_ops.backends.triton.backend import WITH_KERNELS
from moe_ops.kernels.launch import INTERPRETED
from moe_ops.schemes import SCHEMES
from tests.support import cases, oracle
from tests.support.cases import (
    BF16,
    FP16,
    FP32,
    Case,
    assert_matches,
    poisoned_memory,
    tolerance,
)
from tests.support.paths import EXAMPLES

CUDA = torch.cuda.is_available()
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device"))
QUANTIZED = [name for name in SCHEMES if name]
OF_TRITON = [name for name in QUANTIZED if name in WITH_KERNELS]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def refill(case: Case, seed: int) -> None:
    """New tokens and new routing, in place; rows without an expert hold NaN."""
    cases.refill(case, seed)
    x, w13, *_, ids = case.args
    x[((ids < 0) | (ids >= w13.shape[0])).all(1)] = float("nan")


def check_one_graph(schemes: list[str], backend: str) -> None:
    """Layers of all schemes side by side in one graph, of any number of tokens, against the
    oracle."""
    cases = [Case("cpu", FP32, name, M=4, E=2, top_k=1, K=256, I=256) for name in schemes]
    counter = CompileCounterWithBackend("aot_eager")

    def layers(x, topk_weights, topk_ids):
        return [
            moe_ops.fused_experts(x, *case.args[1:3], topk_weights, topk_ids, backend=backend)
            for case in cases
        ]

    compiled = torch.compile(layers, fullgraph=True, backend=counter)
    for M in (4, 3):
        x, _, _, weights, ids = Case("cpu", FP32, M=M, E=2, top_k=1, K=256, I=256, seed=M).args
        for tensor in (x, weights, ids):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad(), poisoned_memory():
            outs = compiled(x, weights, ids)
        for case, out in zip(cases, outs, strict=True):
            case.args = [x, *case.args[1:3], weights, ids]
            assert_matches(out, case.reference(), tolerance(FP32, case.scheme))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_one_graph():
    """All but the rules of scales and sizes of groups, which no graph can tell apart."""
    alike = (":round", ":ceil", ":g32", ":g64", ":g128", ":g64:zp", ":g128:zp")
    alike += (":g64:min", ":g128:min")
    check_one_graph([name for name in QUANTIZED if not name.endswith(alike)], "auto")


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")
def test_one_graph_of_emulated_schemes():
    check_one_graph(["int4_w4a8", "mxfp4_w4a8", "mxfp6_e3m2:mxfp8", "nvfp4"], "triton")


@pytest.mark.parametrize("scheme", [pytest.param(name, marks=ON_GPU) for name in QUANTIZED])
def test_graphs_follow_tokens_and_routing(scheme):
    """Compiled in one graph, captured, and replayed over memory that holds NaN."""
    for M in (1, 9):
        case = Case("cuda", BF16, scheme, M=M, E=4, top_k=2, K=256, I=128, bias=True)

        def layer(*args, options=case.options):
            return moe_ops.fused_experts(*args, **options)

        compiled = torch.compile(layer, fullgraph=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(2):
                warm = compiled(*case.args)
        torch.cuda.current_stream().wait_stream(stream)
        assert_matches(warm, case.reference(), tolerance(BF16, scheme, "cuda"))
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            # what the graph allocates next lies where these were, and every replay fills them
            # first
            junk = [torch.full((1 << 19,), 255, dtype=torch.uint8, device="cuda") for _ in "1234"]
            junk.append(torch.full((1 << 25,), 255, dtype=torch.uint8, device="cuda"))
            del junk
            out = compiled(*case.args)
        for seed in range(3):
            refill(case, seed)
            out.fill_(float("nan"))
            graph.replay()
            assert_matches(out, case.reference(), tolerance(BF16, scheme, "cuda"))


ON_CPU_TOO = [
    pytest.param(
        "cpu", name, marks=pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")
    )
    for name in (
        "fp8_block",
        "int8_w8a8",
        "int8_w8a16:g64",
        "nf4_w4a16:g64",
        "iq4_w4a16:g32",
        "int4_w4a16:g64",
        "int4_w4a16:g32:zp",
        "int4_w4a16:g32:min",
        "int6_w6a16:g16",
        "int4_w4a16:g32:super:min",
        "mxfp4_w4a16",
    )
]


def scaled_in_16_bits(M: int, cuda: bool) -> tuple[str, ...]:
    """What names of schemes begin with whose weights are scaled in 16 bits beside M tokens, as
    docs/quantization.md says, beside those with minima and those of 5
    and 6 bits."""
    levels = ("iq4", "nf4", "fp4_w4a16")
    if not cuda:
        return ("int4_w4a16:g32", "iq4", "nf4_w4a16:g32", "fp4_w4a16:g32")
    if M == 1:
        return ("int4_w4a16:g32", "int4_w4a16:g128")
    if M < 150:
        return ("int4_w4a16:g", *levels)
    return ("int4_w4a16:g", "int8_w8a16", "fp8_w8a16", *levels)  # experts have many rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, scheme",
    [*ON_CPU_TOO, *[pytest.param("cuda", name, marks=ON_GPU) for name in OF_TRITON]],
)
def test_error_is_that_of_rounding_once(device, scheme):
    """At most 1.5 times what rounding to 16 bits once costs: of both results, and of weights where
    a kernel scales them in 16 bits."""
    cuda = device == "cuda"
    dtype = BF16 if cuda else FP16  # of bf16 triton's interpreter drops bits instead
    sizes = {"E": 4, "K": 512, "I": 384} if cuda else {"E": 3, "K": 128, "I": 128}
    for M in (1, 5, 24, 150) if cuda else (1, 12):
        case = Case(device, dtype, scheme, M=M, top_k=2, **sizes)
        exact = case.reference()
        others = scheme.endswith(":min") or scheme.startswith(("int5", "int6"))
        in_16_bits = others or scheme.startswith(scaled_in_16_bits(M, cuda))
        weights = dtype if in_16_bits else torch.float64
        rounded = oracle.experts(*case.args, **case.options, rounded=dtype, weights=weights)
        assert_matches(case.run("triton"), exact, 1.5 * oracle.relative_error(rounded, exact))


# no model has scales of the others, and rows of this one are 128 columns, half of what shares a
# scale of scales
GENERATED = [s for s in QUANTIZED if not (s.endswith("_static") or ":super" in s)]
ON_CPU = ("int4_w4a8", "nvfp4")  # each takes seconds to compile


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, scheme",
    [
        *[("cpu", name) for name in ON_CPU],
        *[pytest.param("cuda", name, marks=ON_GPU) for name in GENERATED],
    ],
)
def test_compiled_generation_gives_eager_tokens(device, scheme, monkeypatch):
    """The tiny trained model, quantized: the decode step compiled in one graph, on a GPU in CUDA
    graphs of Inductor's."""
    transformers = pytest.importorskip("transformers")
    import moe_ops.integrations.transformers as integration

    monkeypatch.syspath_prepend(str(EXAMPLES))
    from tiny_moe.model import encode, load

    try:
        model = load("moe_ops", FP32, device)
    finally:
        sys.modules.pop("tiny_moe.model", None)
    integration.quantize(model, scheme)
    ids = encode("class Queue:\n    def __init__(self, items=None):\n        self.", device)
    options = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
    options |= {"attention_mask": torch.ones_like(ids), "cache_implementation": "static"}
    want = model.generate(ids, **options, disable_compile=True)
    how = (
        {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "aot_eager", "mode": None}
    )
    config = transformers.CompileConfig(fullgraph=True, dynamic=False, **how)
    config._compile_all_devices = True  # else nothing compiles on a CPU
    torch._dynamo.utils.counters.clear()
    got = model.generate(ids, **options, compile_config=config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert got.tolist() == want.tolist()
    assert len(set(got[:, ids.shape[1] :].flatten().tolist())) > 2  # not one token repeated
