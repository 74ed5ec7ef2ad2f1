"""Products of sorted rows with packed weights against fp64 products of the same weights,
interpreted on a CPU and compiled on a GPU (`-m gpu`)."""

from __future__ import annotations

import ctypes
import math
import mmap
import re
import sys

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.environment import INTERPRETED
from moe_ops.kernels.configs import block_bound
from moe_ops.kernels.launch import gpu, run
from moe_ops.kernels.mixed_gemm.operands import operand
from moe_ops.kernels.place.routing import sorted_rows
from moe_ops.kernels.place.sort import group_blocks
from moe_ops.kernels.rows.frozen import frozen
from moe_ops.ops.call import Weight, take_apart
from moe_ops.schemes import SCHEMES
from tests.support import oracle
from tests.support.cases import BF16, FP16, FP32, fitting
from tests.support.places import ON_GPU

pytest.importorskip("triton")

from moe_ops.kernels.mixed_gemm import packed

ON_CPU = pytest.mark.skipif(not INTERPRETED, reason="with a GPU kernels are compiled")
# A device and the dtype of rows. The interpreter cuts bf16 off where it should round.
everywhere = pytest.mark.parametrize(
    "where",
    [pytest.param(("cpu", FP16), marks=ON_CPU), pytest.param(("cuda", BF16), marks=ON_GPU)],
    ids=("interpreted", "gpu"),
)
both_ways = pytest.mark.parametrize("transpose", [False, True], ids=("rows", "columns"))
FORMATS = [
    name
    for name in SCHEMES
    if SCHEMES[name].weight_only and frozen(name) and not re.search(":(round|ceil)", name)
]
ENDS = (5, 5, 40, 41)  # one expert without rows, one with several blocks, and rows of no expert
S = 47
HELD = 1e4


@pytest.fixture(autouse=True)
def several_tiles(request, monkeypatch):
    """Small tiles, so that small sizes have many of them, if it is an interpreter that runs."""
    if INTERPRETED:
        for name in ("BLOCK_M", "BLOCK_OUT", "STEP"):
            monkeypatch.setattr(packed, name, 16 if name == "BLOCK_M" else 32)


def quantized(scheme: str, N: int, K: int, dtype=FP16) -> Weight:
    g = torch.Generator().manual_seed(N * K)
    w = (torch.randn(len(ENDS), N, K, generator=g) * K**-0.5).to(dtype)
    return take_apart(moe_ops.quantize(w, scheme))


def on(weight: Weight, device: str) -> Weight:
    return Weight(*[t.to(device) if isinstance(t, Tensor) else t for t in weight])


def rows_of(columns: int, dtype) -> Tensor:
    """Unit-scale rows; those of no expert hold NaN."""
    x = torch.randn(S, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    x[ENDS[-1] :] = math.nan
    return x


def multiply(x: Tensor, weight: Weight, transpose: bool, ends=ENDS) -> Tensor:
    """The kernel's product, over memory that held HELD."""
    device = x.get_device()
    facts = gpu(device)
    scale, *others = weight.scales
    w = operand("weight", weight.data, scale, *others, weight.scheme, facts)
    y = x.new_full((S, w.K if transpose else w.N), HELD, dtype=FP32)
    groups = torch.tensor(ends, dtype=torch.int32, device=x.device)
    count = block_bound(S, len(ends) + 1, packed.BLOCK_M)
    routing = sorted_rows(groups.new_full((4 * count,), -77), len(ends), count)
    run([group_blocks(routing, groups, S, 0, packed.BLOCK_M, facts)], device, facts)
    run([packed.multiply(y, x, w, routing, transpose, facts)], device, facts)
    return y


def expected(x: Tensor, weight: Weight, transpose: bool) -> Tensor:
    """fp64, of the weights' values rounded to the dtype of the rows: before a global scale divides
    them, which leaves them exact.
    """
    scale, zero, global_scale, channel_scale = weight.scales
    assert scale is not None and (channel_scale is None or ":super" in weight.scheme)
    values = oracle.dequantized(weight.data, scale, weight.scheme, zero, None, channel_scale)
    values = values.to(x.dtype).double()
    if global_scale is not None:
        values /= global_scale.double().view(len(values), -1, 1)
    y = []
    for values_e, start, end in zip(values, (0, *ENDS), ENDS, strict=False):
        y.append(x[start:end].double() @ (values_e if transpose else values_e.T))
    return torch.cat(y)


def check(where: tuple, columns: int, weight: Weight, transpose: bool, within=2e-5) -> None:
    device, dtype = where
    x = rows_of(columns, dtype)
    y = multiply(x.to(device), on(weight, device), transpose).cpu()
    used = ENDS[-1]
    assert (y[used:] == HELD).all()  # rows of no expert, NaN in x, are not written
    error = oracle.relative_error(y[:used], expected(x, weight, transpose))
    assert error <= within, f"relative error {error:.2e}, allowed {within:.2e}"


@everywhere
@both_ways
def test_global_scales_of_rows(where, transpose):
    """The product over rows divides its input by them, which is rounded again."""
    weight = quantized("nvfp4_w4a16", 72, 144)
    assert weight.global_scale is not None
    steps = torch.rand(len(ENDS), 72, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    weight = weight._replace(global_scale=weight.global_scale[:, None, None] * steps)
    rounding = 2.0**-8 if where[1] == BF16 else 2.0**-11
    check(where, 72 if transpose else 144, weight, transpose, rounding if transpose else 2e-5)


@everywhere
@both_ways
@pytest.mark.parametrize("scheme", FORMATS)
def test_formats(where, transpose, scheme):
    """Every weight-only scheme, several groups a row. Beside 16-bit rows the products are those of
    weights rounded to their dtype: exact ones would be off by 1e-4 and 1e-3. Scales of more bits
    go into bf16 weights as two bf16 numbers, so that one weight of 2^8 rounds to its other
    neighbour: a root mean square of 2^-4 times 2^-8, over the square root of 3. Scales in two
    levels have 18 bits, of which two bf16 numbers hold 16: four times as many weights round so.
    Levels of a table are multiplied by scales in bf16, and rounded once more.
    """
    N, K = 136 if "block" in scheme else 40, fitting(136, scheme)
    weight = quantized(scheme, N, K)
    (device, dtype), scale = where, weight.scales[0]
    short = device == "cuda" and dtype == BF16 and scale.dtype in (FP16, FP32, torch.int8)
    within = 2.0 ** (-11 if scale.dtype == torch.int8 else -12) / 3**0.5
    if scheme.startswith(("iq4", "nf4", "fp4")):
        within = 2.0**-8
    check(where, N if transpose else K, weight, transpose, within if short else 2e-5)


@pytest.mark.parametrize(
    "where",
    [pytest.param(("cpu", FP32), marks=ON_CPU), pytest.param(("cuda", FP16), marks=ON_GPU)],
    ids=("interpreted", "gpu"),
)
@both_ways
@pytest.mark.parametrize("scheme", ["int4_w4a16:g32:zp", "mxfp4_w4a16", "fp8_w8a16:channel"])
def test_rows_of_other_dtypes(where, transpose, scheme):
    check(where, 40 if transpose else 64, quantized(scheme, 40, 64), transpose)


@everywhere
@both_ways
@pytest.mark.parametrize("scales", [BF16, FP16, FP32])
@pytest.mark.parametrize("scheme", ["int4_w4a16:g32", "int8_w8a16:channel:zp"])
def test_dtypes_of_scales(where, transpose, scales, scheme):
    """Products of elements and scales are rounded once. Beside bf16 rows, scales of other dtypes
    become two numbers of bf16, so that ties may go the other way.
    """
    weight = quantized(scheme, 40, 96, scales)
    assert weight.scale is not None and weight.scale.dtype == scales
    apart = where[1] == BF16 != scales
    check(where, 40 if transpose else 96, weight, transpose, 2e-4 if apart else 2e-5)


@everywhere
@both_ways
@pytest.mark.parametrize("N, K", [(8, 40), (24, 64), (64, 96), (136, 72)])
def test_sizes(where, transpose, N, K):
    """Sizes below a tile, of whole tiles, and that end within one."""
    weight = quantized("int4_w4a16:channel:zp", N, K)
    check(where, N if transpose else K, weight, transpose)


@everywhere
@both_ways
@pytest.mark.parametrize("scheme", ["int4_w4a16:g32", "nvfp4_w4a16"])
def test_strided_weights(where, transpose, scheme):
    """A slice of an expert's rows, as sharding leaves it."""
    whole = quantized(scheme, 96, 64)
    assert whole.scale is not None
    weight = whole._replace(data=whole.data[:, 24:64], scale=whole.scale[:, 24:64])
    check(where, 40 if transpose else 64, weight, transpose)


@everywhere
@both_ways
def test_nan_stays_in_its_row(where, transpose):
    device, dtype = where
    weight = on(quantized("int4_w4a16:g32", 40, 64), device)
    x = rows_of(40 if transpose else 64, dtype).to(device)
    clean = multiply(x, weight, transpose)
    x[7] = math.nan  # of an expert that has others
    spoiled = multiply(x, weight, transpose)
    others = (torch.arange(S) != 7) & (torch.arange(S) < ENDS[-1])
    assert spoiled[7].isnan().all() and not clean[7].isnan().any()
    assert torch.equal(clean.cpu()[others], spoiled.cpu()[others])


@everywhere
@both_ways
def test_no_expert_has_rows(where, transpose):
    device, dtype = where
    weight, x = on(quantized("mxfp4_w4a16", 32, 32), device), rows_of(32, dtype).to(device)
    assert (multiply(x, weight, transpose, ends=(0, 0, 0, 0)) == HELD).all()


@everywhere
@both_ways
def test_an_expert_whose_scales_are_nan_spoils_no_other(where, transpose):
    """Tiles that end past its neighbour's rows."""
    device, dtype = where
    weight = quantized("int4_w4a16:g32", 40, 64)
    assert weight.scale is not None
    scale = weight.scale.clone()
    scale[3] = math.nan
    x = rows_of(40 if transpose else 64, dtype).to(device)
    spoiled = multiply(x, on(weight._replace(scale=scale), device), transpose)
    clean = multiply(x, on(weight, device), transpose)
    assert torch.equal(spoiled[: ENDS[2]], clean[: ENDS[2]])
    assert spoiled[ENDS[2] : ENDS[3]].isnan().all()


def before_a_protected_page(t: Tensor) -> Tensor:
    """The same bytes, behind which nothing may be read."""
    pages = -(-t.numel() // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 16) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(start + pages * mmap.PAGESIZE, 16 * mmap.PAGESIZE, 0) == 0  # PROT_NONE
    offset = pages * mmap.PAGESIZE - t.numel()
    found = torch.frombuffer(memory, dtype=torch.uint8, count=t.numel(), offset=offset)
    return found.view(t.shape).copy_(t)


@pytest.mark.skipif(not INTERPRETED or sys.platform != "linux", reason="protects memory of a CPU")
@both_ways
@pytest.mark.parametrize("scheme", [n for n in FORMATS if n.startswith(("mxfp", "int5", "int6"))])
def test_nothing_is_read_behind_a_weight(transpose, scheme):
    """Rows that no tile divides: a read behind the last one ends the process."""
    N, K = 40, fitting(136, scheme)
    weight = quantized(scheme, N, K)
    weight = weight._replace(data=before_a_protected_page(weight.data.view(torch.uint8)))
    check(("cpu", FP32), N if transpose else K, weight, transpose)
