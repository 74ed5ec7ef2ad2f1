"""The CPU kernels: the grouped product and the weighted sum against fp64, at every tail they
have."""

import ctypes
import math
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import moe_ops
from moe_ops.backends.torch import cpu, grouped_mm
from tests.support import oracle

BF16, FP32 = torch.bfloat16, torch.float32
# one rounding of the fp32 sum, half a unit; fp32 adds the order of the sum
TOLERANCE = {FP32: 2e-6, BF16: 2.0**-8}
pytestmark = pytest.mark.skipif(cpu.why_not() is not None, reason=str(cpu.why_not()))


@pytest.fixture(autouse=True, params=[512, 2], ids=["avx512", "avx2"])
def avx(request):
    """Every form of the kernels that this processor runs."""
    library = ctypes.CDLL(str(cpu._LIBRARY))
    try:
        if library.moe_ops_cpu_avx(request.param) != request.param:
            pytest.skip("this processor lacks it")
        yield
    finally:
        library.moe_ops_cpu_avx(512)


dtypes = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


def normal(*shape, dtype=FP32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(t):
    """The values of a matrix (.., rows, cols) inside a larger one full of NaN."""
    *lead, rows, cols = t.shape
    wide = torch.full((*lead, rows + 1, cols + 5), math.nan, dtype=t.dtype)
    return wide[..., 1:, 3 : cols + 3].copy_(t)


def product(x, weight, offsets, bias=None):
    """The kernel's (S, N) out of NaN, and the number of rows it was to write."""
    assert cpu.can_multiply(x, weight, bias)
    out = torch.full((x.shape[0], weight.shape[1]), math.nan, dtype=x.dtype)
    cpu.grouped_mm(x, weight, offsets, bias, out)
    written = min(int(offsets[-1]), x.shape[0])
    assert (out[written:] == 0).all()
    return out[:written]


def check(x, weight, offsets, bias=None):
    out = product(x, weight, offsets, bias)
    expected = oracle.grouped_linear(x, weight, offsets, bias=bias)[: out.shape[0]]
    assert out.isfinite().all()
    # row by row: an error in one tile must not drown in the others
    error = (out.double() - expected).norm(dim=1)
    assert (error <= TOLERANCE[x.dtype] * expected.norm(dim=1).clamp(min=1)).all()
    return out


def ends(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("K", [1, 15, 16, 31, 32, 33, 63, 64, 100])
@pytest.mark.parametrize("N", [1, 3, 4, 7, 8, 12, 63, 64, 65, 70, 133])
def test_tails_of_both_dimensions(dtype, N, K, with_bias):
    counts = [1, 0, 2, 7]
    x, weight = normal(10, K, dtype=dtype), normal(4, N, K, dtype=dtype, seed=1)
    check(x, weight, ends(counts), normal(4, N, dtype=dtype, seed=2) if with_bias else None)


@dtypes
def test_every_number_of_rows(dtype):
    """0 to 13 rows an expert: all the row tiles (of 6, 4, 2, 1 or 3, 2, 1) and their sums."""
    counts = list(range(14))
    x, weight = normal(sum(counts), 40, dtype=dtype), normal(14, 21, 40, dtype=dtype, seed=1)
    check(x, weight, ends(counts), normal(14, 21, dtype=dtype, seed=2))


@dtypes
def test_strided_rows_and_weights(dtype):
    counts = [3, 6, 1]
    x, weight = normal(10, 50, dtype=dtype), normal(3, 20, 50, dtype=dtype, seed=1)
    out = check(strided(x), strided(weight), ends(counts))
    assert torch.equal(out, check(x, weight, ends(counts)))
    every_other = normal(6, 20, 50, dtype=dtype, seed=3)[::2]
    check(x, every_other, ends(counts))


@dtypes
def test_ends_past_the_rows_are_cut(dtype):
    x, weight = normal(5, 32, dtype=dtype), normal(3, 8, 32, dtype=dtype, seed=1)
    out = check(x, weight, torch.tensor([2, 9, 1 << 30], dtype=torch.int32))
    assert out.shape[0] == 5
    below, zero = [torch.tensor([first, 2, 5], dtype=torch.int32) for first in (-4, 0)]
    assert torch.equal(product(x, weight, below), check(x, weight, zero))
    strided_ends = torch.tensor([1, 9, 3, 9, 4, 9], dtype=torch.int32)[::2]
    assert check(x, weight, strided_ends).shape[0] == 4


@dtypes
def test_threads_do_not_change_a_bit(dtype):
    counts = [5, 0, 9, 2, 8, 1, 3, 4] * 3
    x, weight = normal(sum(counts), 96, dtype=dtype), normal(24, 200, 96, dtype=dtype, seed=1)
    y, rows = normal(3000, 96, dtype=dtype), torch.arange(3000).view(1000, 3)
    weights = normal(1000, 3, seed=2)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = torch.empty(1000, 96, dtype=dtype)
            cpu.combine(y, weights, rows, out)
            results.append((product(x, weight, ends(counts)), out))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@dtypes
@pytest.mark.parametrize("N", [3, 16])
def test_nan_and_infinity_propagate(dtype, N):
    x, weight = normal(4, 37, dtype=dtype).abs(), normal(1, N, 37, dtype=dtype, seed=1).abs()
    x[0, 36], x[1, 0], x[2, 5] = math.nan, math.inf, -math.inf
    out = product(x, weight, torch.tensor([4], dtype=torch.int32))
    assert out[0].isnan().all() and (out[1] == math.inf).all() and (out[2] == -math.inf).all()
    assert out[3].isfinite().all()
    large = torch.full((1, 32), 3e38).to(dtype)
    sums = product(large, torch.ones(1, N, 32, dtype=dtype), torch.tensor([1], dtype=torch.int32))
    assert (sums == math.inf).all()


@dtypes
def test_rounds_to_nearest_even(dtype):
    """1 + 2^-8 lies between two bf16 values: the even one; a bit above it, the upper one."""
    x = torch.zeros(2, 40, dtype=dtype)
    x[:, 0], x[:, 1], x[1, 35] = 1, 2.0**-8, 2.0**-16
    for N in (1, 4):  # both ways a tile is stored
        out = product(x, torch.ones(1, N, 40, dtype=dtype), torch.tensor([2], dtype=torch.int32))
        exact = torch.tensor([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-16])
        assert torch.equal(out, exact.to(dtype)[:, None].expand(2, N))


@dtypes
@pytest.mark.parametrize("K", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("weights_dtype", [BF16, FP32, torch.float64])
def test_combine(dtype, K, top_k, weights_dtype):
    """Pairs without a row contribute nothing, whatever their weight holds."""
    M = 9
    y = normal(M * top_k, K, dtype=dtype)
    rows = torch.randperm(M * top_k, generator=torch.Generator().manual_seed(1)).view(M, top_k)
    weights = normal(M, top_k, seed=2).to(weights_dtype)
    rows[2], rows[5, -1] = -1, -1
    weights[rows < 0] = math.nan
    y[-1] = math.nan
    rows[rows == M * top_k - 1] = -1
    out = torch.full((M, K), math.nan, dtype=dtype)
    cpu.combine(y, weights.t().contiguous().t(), rows.t().contiguous().t(), out)
    picked = torch.where((rows >= 0)[..., None], y[rows.clamp(min=0)].double(), 0)
    expected = (torch.where(rows >= 0, weights.double(), 0)[..., None] * picked).sum(1)
    assert (out[2] == 0).all()
    error = (out.double() - expected).abs()
    half_unit = 2.0**-8 if dtype == BF16 else 2.0**-24
    terms = (torch.where(rows >= 0, weights.double(), 0).abs()[..., None] * picked.abs()).sum(1)
    assert (error <= 1.001 * half_unit * expected.abs() + 4 * 2.0**-24 * terms).all()


@dtypes
def test_who_takes_what(dtype):
    x, weight, bias = (normal(*s, dtype=dtype) for s in ((6, 32), (2, 8, 32), (2, 8)))
    assert cpu.can_multiply(x, weight, bias)
    assert not cpu.can_multiply(x, weight.mT.contiguous().mT, bias)
    assert not cpu.can_multiply(x.t().contiguous().t(), weight, bias)
    assert not cpu.can_multiply(x, weight, bias.to(torch.float16))
    assert not cpu.can_multiply(x, weight, bias.t().contiguous().t())
    assert not cpu.can_multiply(x.half(), weight.half(), None)
    y, out = normal(6, 8, dtype=dtype), normal(3, 8, dtype=dtype)
    assert cpu.can_combine(y, out)
    assert not cpu.can_combine(y, out.half())
    assert not cpu.can_combine(y, normal(8, 3, dtype=dtype).t())
    assert not cpu.can_combine(y.to("meta"), out.to("meta"))


@dtypes
@pytest.mark.parametrize("transposed", [False, True])
def test_fallback_and_kernel_agree(dtype, transposed, monkeypatch):
    """A transposed weight goes to the library's products; both zero the rows past the end."""
    x, weight = normal(12, 48, dtype=dtype), normal(3, 20, 48, dtype=dtype, seed=1)
    if transposed:
        weight = weight.mT.contiguous().mT
    calls = []
    kernel = cpu.grouped_mm
    monkeypatch.setattr(cpu, "grouped_mm", lambda *a: calls.append(1) or kernel(*a))
    offsets = ends([4, 0, 6])
    bias = normal(3, 20, dtype=dtype, seed=2)
    out = grouped_mm.grouped_mm(
        x, weight, offsets, bias=bias, out=torch.full((12, 20), math.nan, dtype=dtype)
    )
    assert len(calls) == (not transposed)
    expected = oracle.grouped_linear(x, weight, offsets, bias=bias)
    assert oracle.relative_error(out, expected) <= TOLERANCE[dtype]
    assert (out[10:] == 0).all()


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None,
    reason="needs x86-64 and a C++ compiler",
)
def test_the_source_compiles(tmp_path):
    """An installation whose source did not compile would go on without the kernels, in silence."""
    source = Path(moe_ops.__file__).parent / "csrc/cpu/grouped_mm.cpp"
    library = tmp_path / "kernels.so"
    flags = ["-O0", "-std=c++20", "-shared", "-fPIC", "-fopenmp"]
    subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True)
    exported = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True).stdout
    assert "moe_ops_cpu_grouped_mm_" in exported


def test_a_library_for_whole_layers_alone_is_loaded(monkeypatch):
    """As it is built for aarch64: without the products of this file."""
    built = SimpleNamespace(moe_ops_cpu_avx=lambda most: 0, moe_ops_cpu_sources=lambda: b"")
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda path: built)
    assert cpu.library.__wrapped__() is built
    monkeypatch.setattr(cpu, "library", lambda: built)
    assert cpu._kernels.__wrapped__() == {}
