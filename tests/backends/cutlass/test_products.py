"""Products of bf16 rows sorted by expert: on a CPU those of plain torch, and on a GPU the kernels,
where they are built.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

import moe_ops
from moe_ops.activations import Activation
from moe_ops.backends.cutlass import library, products
from moe_ops.backends.cutlass.schemes import ACTIVATIONS
from moe_ops.kernels.activation import activated
from tests.autograd.test_gradients import call, cotangent, leaves
from tests.support import fake_cutlass, oracle
from tests.support.cases import BF16, FP16, FP32, Case
from tests.support.paths import ROOT
from tests.support.places import CUDA, devices

TILES = ROOT / "moe_ops/csrc/cutlass/sm90_tiles.cuh"
ROUNDING = {"rtol": 2**-8, "atol": 1e-2}  # to bf16, and sums in fp32 that nearly cancel
EQUAL = {"rtol": 0, "atol": 0, "equal_nan": True}
# rows of each expert: none, a part of a tile, exactly one, of several an odd and an even number
ROWS = {
    "one": [200],
    "none": [0, 0, 0],
    "few": [3, 0, 64, 65, 0, 1],
    "tiles": [128, 129, 256, 300, 0, 511],
    "many": [5 * e % 13 for e in range(70)],
    "long": [2500, 0, 130],  # more tiles than blocks take at a time
}
# (N, K): less than a tile, with tails, whole tiles, one narrow one and two; sums are along either
SIZES = ((8, 16), (264, 192), (832, 136))


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    if CUDA:
        if products.kernels(0) is None:
            pytest.skip("the kernels are not built, or not for this GPU")
        yield None
    else:
        yield fake_cutlass.install(monkeypatch)


def poisoned(size: tuple[int, ...], experts: torch.Tensor, which: int, device: str):
    """Rows of bf16, and the same in fp64: NaN are those of no expert and of every other one."""
    x = torch.randn(size, device=device, dtype=BF16)
    x[(experts < 0) | (experts % 2 == which)] = torch.nan
    return x, x.double()


def layout(rows: list[int], device: str, behind: int = 40):
    """(ends, the expert of each row): `behind` rows have none."""
    counts = torch.tensor(rows, device=device)
    experts = torch.arange(len(rows), device=device).repeat_interleave(counts)
    experts = torch.cat((experts, torch.full((behind,), -1, device=device)))
    return counts.cumsum(0).int(), experts


@devices
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("N, K", SIZES)
@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.parametrize("stored_transposed", (False, True))
def test_multiply(device, rows, N, K, transpose, stored_transposed):
    ends, experts = layout(rows, device)
    w = torch.randn(len(rows), N, K, device=device, dtype=BF16)
    if stored_transposed:
        w = w.mT.contiguous().mT
    for which in (0, 1):
        x, exact = poisoned((len(experts), N if transpose else K), experts, which, device)
        out = products.multiply(x, w, ends, transpose)
        assert out.shape == (len(x), K if transpose else N) and out.dtype == BF16
        for e in range(1 - which, len(rows), 2):
            mine = experts == e
            expected = exact[mine] @ (w[e] if transpose else w[e].mT).double()
            torch.testing.assert_close(out[mine].double(), expected, **ROUNDING)


def low_rank(E: int, S: int, rank: int, wide: int, transpose: bool, device: str):
    """Rows of the rank and matrices that make them wide, not at a multiple of 16 bytes."""
    size = (rank, wide) if transpose else (wide, rank)
    flat = torch.randn(1 + E * rank * wide, device=device, dtype=BF16)
    return torch.randn(S, rank, device=device, dtype=BF16), flat[1:].view(E, *size)


@devices
@pytest.mark.parametrize("rows", [ROWS["few"], ROWS["tiles"]], ids=["few", "tiles"])
@pytest.mark.parametrize("rank", (3, 16, 136))
@pytest.mark.parametrize("transpose", (False, True))
@pytest.mark.parametrize("stored_transposed", (False, True))
def test_multiply_adds(device, rows, rank, transpose, stored_transposed):
    """A product of a low rank, whose rows are NaN where those of the weight are."""
    (ends, experts), E, (N, K) = layout(rows, device), len(rows), SIZES[1]
    w = torch.randn(E, N, K, device=device, dtype=BF16)
    if stored_transposed:
        w = w.mT.contiguous().mT
    u, matrix = low_rank(E, len(experts), rank, K if transpose else N, transpose, device)
    for which in (0, 1):
        x, exact = poisoned((len(experts), N if transpose else K), experts, which, device)
        u[x[:, 0].isnan()] = torch.nan
        out = products.multiply(x, w, ends, transpose, (u, matrix))
        for e in range(1 - which, E, 2):
            mine = experts == e
            product = exact[mine] @ (w[e] if transpose else w[e].mT).double()
            more = u[mine].double() @ (matrix[e] if transpose else matrix[e].mT).double()
            torch.testing.assert_close(out[mine].double(), product + more, **ROUNDING)
        u = torch.randn_like(u)


@devices
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("M, N", [*SIZES, (192, 512)])
def test_outer(device, rows, M, N):
    ends, experts = layout(rows, device)
    for which in (0, 1):
        a, exact_a = poisoned((len(experts), M), experts, which, device)
        b, exact_b = poisoned((len(experts), N), experts, which, device)
        out = products.outer(a, b, ends)
        assert out.shape == (len(rows), M, N) and out.dtype == BF16
        for e, count in enumerate(rows):
            mine = experts == e
            if not count:
                assert (out[e] == 0).all()
            elif e % 2 != which:
                expected = exact_a[mine].mT @ exact_b[mine]
                torch.testing.assert_close(out[e].double(), expected, **ROUNDING)


# activation, dtype of the bias, and whether gate and up are written
ACTIVATED = {
    "silu": (Activation("silu"), None, True),
    "silu, limit": (Activation("silu", limit=0.7), BF16, True),
    "gelu": (Activation("gelu"), FP32, False),
    "gelu_tanh": (Activation("gelu_tanh"), None, False),
    "swigluoai": (Activation("swigluoai"), FP32, False),
    "swigluoai, rows": (Activation("swigluoai", alpha=1.3, limit=0.8), None, False),
    "swigluoai, halves": (Activation("swigluoai_uninterleave", beta=0.4), FP16, True),
    "swiglustep": (Activation("swiglustep", limit=0.9), FP16, True),
}
for name in ACTIVATIONS:
    ACTIVATED.setdefault(name, (Activation(name), BF16, True))


def test_numbers_of_activations_are_those_of_the_kernels():
    text, names = TILES.read_text(), [name.upper() for name in ACTIVATIONS]
    assert re.search(r"enum Activation \{ (.*) \}", text)[1].split(", ") == names
    assert sorted(re.findall(r"run\(cute::Int<(\w+)>", text)) == sorted(names)


# and the rank of what is added to the product
ADAPTED = {
    "silu, adapted": (Activation("silu"), BF16, True, 16),
    "swigluoai, adapted": (Activation("swigluoai_uninterleave"), None, True, 70),
}


@devices
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("I, K", [(8, 16), (136, 72), (384, 136)])
@pytest.mark.parametrize("options", (ACTIVATED | ADAPTED).values(), ids=ACTIVATED | ADAPTED)
def test_activated(device, rows, I, K, options):
    activation, of_bias, keeps, *ranks = options
    of = activated(activation)
    ends, experts = layout(rows, device)
    E, S = len(rows), len(experts)
    w = torch.randn(E, 2 * I, K, device=device, dtype=BF16) / K**0.5
    bias = None if of_bias is None else torch.randn(E, 2 * I, device=device, dtype=of_bias)
    low = None
    for which in (0, 1):
        x, exact = poisoned((S, K), experts, which, device)
        if ranks:
            low = low_rank(E, S, ranks[0], 2 * I, False, device)
            low[0].mul_(ranks[0] ** -0.5)[x[:, 0].isnan()] = torch.nan
        out = torch.full((S, I), torch.nan, device=device, dtype=BF16)
        gate_up = torch.full((S, 2 * I), torch.nan, device=device, dtype=BF16) if keeps else None
        products.activate_into(out, x, w, ends, of, bias, gate_up, low)
        assert out[experts < 0].isnan().all()
        if low is None and not of.INTERLEAVED:  # the same from two tensors
            again = torch.full_like(out, torch.nan)
            kept = None if gate_up is None else torch.full_like(gate_up, torch.nan)
            gate, up = [half.contiguous() for half in w.chunk(2, 1)]
            products.activate_into(again, x, gate, ends, of, bias, kept, up=up)
            torch.testing.assert_close((again, kept), (out, gate_up), **EQUAL)
        for e in range(1 - which, E, 2):
            mine = experts == e
            product = exact[mine] @ w[e].mT.double()
            if low is not None:
                product += low[0][mine].double() @ low[1][e].mT.double()
            if gate_up is not None:
                torch.testing.assert_close(gate_up[mine].double(), product, **ROUNDING)
            biased = product if bias is None else product + bias[e].double()
            numbers = activation.alpha, activation.beta, activation.limit
            expected = oracle.activation(biased, activation.name, *numbers)
            torch.testing.assert_close(out[mine].double(), expected, **ROUNDING)
        if gate_up is not None:
            assert gate_up[experts < 0].isnan().all()


@pytest.mark.parametrize(
    "status, reason",
    [
        (107, "its arguments are refused .CUTLASS status 7."),
        (200, "its workspace is too small"),
        (3098, "it cannot be set up on this GPU .CUDA error 98."),
        (4702, "it cannot be launched .CUDA error 702."),
    ],
)
def test_what_was_not_launched(status, reason):
    gemms = library.Gemms(SimpleNamespace(name_run=lambda gemm: status), 132)
    with pytest.raises(RuntimeError, match=f"name was not launched: {reason}"):
        gemms.run("name", library.GroupedGemm())


def few_multiprocessors(monkeypatch, count: int = 4) -> None:
    """Two clusters, so that each has many tiles, whole ones and halves, one after the other."""
    found = products.kernels
    few = {"sm_count": count}
    monkeypatch.setattr(products, "kernels", lambda device: found(device)._replace(**few))


@devices
@pytest.mark.parametrize("count", (1, 3))
def test_multiprocessors_without_a_pair(device, count, monkeypatch):
    few_multiprocessors(monkeypatch, count)
    test_multiply(device, ROWS["tiles"], 264, 72, False, False)


@devices
@pytest.mark.parametrize("rows", ("few", "tiles", "long"))
def test_many_tiles_of_many_steps(device, rows, monkeypatch):
    few_multiprocessors(monkeypatch)
    test_multiply(device, ROWS[rows], 768, 712, False, False)
    test_multiply(device, ROWS[rows], 712, 768, True, False)
    test_outer(device, ROWS[rows], 192, 512)
    for transpose, stored_transposed in ((False, False), (True, False), (False, True)):
        test_multiply_adds(device, ROWS[rows], 136, transpose, stored_transposed)
    # with biases in fp32 and fp16, and of a rank: what is in shared memory is another tile's next
    for name in ("silu", "swigluoai, rows", "gelu", "swigluoai, halves", *ADAPTED):
        test_activated(device, ROWS[rows], 384, 712, (ACTIVATED | ADAPTED)[name])


@devices
@pytest.mark.parametrize("K", (3072, 3080))
def test_narrow_tiles_of_few_steps_alone(device, K):
    """48 steps and 49; of a low rank, and of an expert beside ones with few, more than 48."""
    test_outer(device, [K, 0, 130, 1], 136, 832)
    rows = [300, 0, 60]  # two tiles that share columns, and some with half of the rows
    test_multiply(device, rows, 264, K, False, False)
    test_multiply(device, rows, K, 264, True, False)
    for name in ("swigluoai, rows", "swigluoai, adapted"):
        test_activated(device, rows, 136, K, (ACTIVATED | ADAPTED)[name])


@devices
def test_rows_of_no_expert_are_not_written(device, monkeypatch):
    ends, experts = layout([130, 7, 64], device)
    x = torch.randn(len(experts), 72, device=device, dtype=BF16)
    w = torch.randn(3, 264, 72, device=device, dtype=BF16)
    held = torch.full((len(x), 264), torch.nan, device=device, dtype=BF16)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_: held)
    assert products.multiply(x, w, ends) is held
    assert held[experts < 0].isnan().all() and not held[experts >= 0].isnan().any()


@pytest.mark.parametrize("threads", [1, 3])
@devices
def test_first_in_a_thread(device, threads):
    """A product is all that a new thread does, as that of autograd may where its first gradient
    is that of a product.
    """
    ends, _ = layout([130, 7, 64], device, behind=0)
    x = torch.randn(201, 72, device=device, dtype=BF16)
    w = torch.randn(3, 264, 72, device=device, dtype=BF16)
    want = products.multiply(x, w, ends)
    outs = [torch.full_like(want, torch.nan) for _ in range(threads)]
    if CUDA:
        torch.cuda.synchronize()
    at_once = Barrier(threads)  # no thread has the job of another

    def job(out):
        at_once.wait(60)
        products.multiply_into(out, x, w, ends)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(job, outs))
    if CUDA:
        torch.cuda.synchronize()
    assert all([torch.equal(out, want) for out in outs])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_captured_first_in_a_thread():
    ends, _ = layout([130, 7, 64], "cuda", behind=0)
    x = torch.randn(201, 72, device="cuda", dtype=BF16)
    w = torch.randn(3, 264, 72, device="cuda", dtype=BF16)
    want = products.multiply(x, w, ends)
    out, graph = torch.full_like(want, torch.nan), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()

    def capture():
        with torch.cuda.graph(graph):
            products.multiply_into(out, x, w, ends)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(capture).result()
    assert out.isnan().all()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_where_there_is_no_kernel(fake, monkeypatch):
    x = torch.randn(7, 16)
    assert not products.takes(x)  # fp32
    x = x.to(BF16)
    if not CUDA:
        monkeypatch.setitem(library._loaded, -1, library.Gemms(fake, 160, "sm_100a"))
    assert not products.takes(x)


@pytest.mark.parametrize("capability, built", [((9, 0), False), ((10, 0), True)])
def test_nothing_is_built_or_loaded_for_them(monkeypatch, capability, built):
    """Where the GPU is another one, or the object is not there."""
    library._is_built.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(library, "_unbuilt", lambda name: None if built else "not built")
    monkeypatch.setattr(library, "gemms", lambda *_, **__: pytest.fail("it was loaded"))
    assert products.kernels(7) is None
    library._is_built.cache_clear()


@pytest.mark.parametrize("capturing", [False, True])
def test_they_are_loaded_where_they_are_built(fake, monkeypatch, capturing):
    library._is_built.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(library, "_unbuilt", lambda name: None)
    gemms = library.Gemms(fake, 132)
    monkeypatch.setattr(library, "gemms", lambda device, may_build: gemms)
    assert products.kernels(7) is (None if capturing else gemms)
    library._is_built.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_step_runs_them(monkeypatch):
    ran = []
    launch = library.Gemms.run
    monkeypatch.setattr(
        library.Gemms, "run", lambda self, name, g: (ran.append(name), launch(self, name, g))
    )
    case = Case("cuda", BF16, M=64, E=8, top_k=2)
    given = leaves(case)
    out = call(moe_ops.fused_experts, case, given)
    torch.autograd.grad(out, list(given.values()), cotangent(case))
    names = [name.removeprefix("moe_ops_sm90_product_") for name in ran]
    assert names == ["activated", "x_wt", "x_w", "outer", "outer", "x_w"]
