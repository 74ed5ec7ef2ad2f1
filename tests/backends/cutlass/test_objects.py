"""The compiled kernels, asked on the host: layouts of weights and scales, where these are, and how
much workspace kernels need. What they compute is not run.

Nothing is compiled here: `make native-check` does that first, and says by MOE_OPS_TEST_OBJECTS
where the objects are. Otherwise those that are built are asked.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os

import pytest
import torch

import moe_ops
from moe_ops import environment
from moe_ops.backends.cutlass import library, products, schemes
from moe_ops.backends.cutlass.schemes import BLOCKS, INT4, ROWS
from moe_ops.backends.cutlass.setup import Gemm, setup
from moe_ops.csrc import build
from moe_ops.kernels.launch import INTERPRETED, gpu, run
from moe_ops.numerics.swizzle import swizzle, unswizzle
from tests.support.cases import garbage

ARCHITECTURES = ("sm_100a", "sm_120a")  # of scales of blocks
DTYPES = (torch.bfloat16, torch.float16)
FORMATS = {f.name: f for f in schemes.BLOCK_SCALED.values()}
# (rows of x, rows of the weight, columns): the last is padded both ways, in both operands
SHAPES = [(128, 256, 512), (40, 128, 1024), (300, 200, 1184)]

pytestmark = pytest.mark.slow
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)
formats = pytest.mark.parametrize("name", FORMATS)
shapes = pytest.mark.parametrize("m, n, k", SHAPES)


@functools.cache
def loaded(architecture: str) -> ctypes.CDLL:
    """The object, if it is built."""
    named = json.loads(os.environ.get("MOE_OPS_TEST_OBJECTS", "{}"))
    path = named.get(architecture) or build.installed(architecture, environment.cache_folder())
    if path is None:
        pytest.skip(f"the kernels for {architecture} are not built: make native-check")
    return ctypes.CDLL(str(path))


def function_of(architecture: str, kernel: str, suffix: str, result=ctypes.c_int):
    found = getattr(loaded(architecture), f"{kernel}_{suffix}", None)
    if found is None:
        pytest.skip(f"the object for {architecture} was built without {kernel}")
    found.restype = result
    return found


def function(architecture: str, name: str, suffix: str, result=ctypes.c_int):
    kernel = f"moe_ops_{architecture.removesuffix('a').replace('_', '')}_{name}_bf16"
    return function_of(architecture, kernel, suffix, result)


def kernels(architecture: str) -> dict[str, str]:
    """Every kernel that is chosen for a family of GPUs, and its kind."""
    capability = {name: c for c, name in library.ARCHITECTURES.items()}[architecture]
    found = {}
    for scheme in (*schemes.SCHEMES_OF_ROWS, schemes.INT4_SCHEME, *schemes.BLOCK_SCALED):
        kind = schemes.kind_of(scheme)
        if capability in schemes.CAPABILITIES[kind]:
            for dtype in DTYPES[: 1 if kind == BLOCKS else 2]:
                for rows in (1, 100, 300, 600, 10**6):
                    found[library.kernel_of(scheme, architecture, dtype, rows, 8)] = kind
    return found


@pytest.mark.parametrize("architecture", build.FILES)
def test_every_kernel_that_is_chosen_is_there(architecture):
    """With as much workspace and shared memory as there is, whatever the number of experts and on
    the GPUs with the most multiprocessors.
    """
    found = kernels(architecture)
    assert len(found) == (10 if architecture == "sm_90a" else 3)
    most = 99 * 1024 if architecture == "sm_120a" else 227 * 1024
    sm_counts = {"sm_90a": (78, 132, 160), "sm_100a": (148, 160), "sm_120a": (170, 188, 192)}
    for kernel, kind in found.items():
        assert function_of(architecture, kernel, "run")
        assert 0 < function_of(architecture, kernel, "shared_memory")() <= most
        workspace = function_of(architecture, kernel, "workspace", ctypes.c_size_t)
        for sm_count in sm_counts[architecture]:
            gemm = library.GroupedGemm(sm_count=sm_count, group_size=128)
            asked = set()
            for gemm.groups in (1, 8, 256):
                asked.add(workspace(ctypes.byref(gemm)))
            size = asked.pop()
            assert not asked and size <= schemes.DESCRIPTOR_BYTES[kind]
            if sm_count == 132:
                assert size == {ROWS: 512, INT4: 640}[kind] * 132


@pytest.mark.parametrize("architecture", build.FILES)
def test_the_struct_is_that_of_python(architecture):
    object_ = loaded(architecture)
    assert object_.moe_ops_cutlass_abi() == build.ABI
    assert object_.moe_ops_cutlass_struct_bytes() == ctypes.sizeof(library.GroupedGemm)


def test_products_of_bf16_rows_are_there():
    for kind in ("x_wt", "x_w", "outer"):
        assert function_of("sm_90a", f"moe_ops_sm90_product_{kind}", "run")
    assert 0 < function_of("sm_90a", "moe_ops_sm90_product", "shared_memory")() <= 227 * 1024
    size = loaded("sm_90a").moe_ops_cutlass_product_bytes()
    assert size == ctypes.sizeof(products.GroupedProduct)


@architectures
@formats
@shapes
def test_scales_are_where_the_kernels_read_them(architecture, name, m, n, k):
    """Every scale of the swizzled tensor, padding included, of both operands."""
    group = FORMATS[name].group
    for rows, suffix in ((m, "a_scale_offset"), (n, "b_scale_offset")):
        offset = function(architecture, name, suffix, ctypes.c_int64)
        numbers = torch.arange(rows * (k // group), dtype=torch.int64).view(rows, k // group)
        order = [swizzle((numbers >> shift & 255).to(torch.uint8)) for shift in (0, 8, 16)]
        found = sum(
            part.long().flatten() << shift for part, shift in zip(order, (0, 8, 16), strict=True)
        )
        for row in range(0, rows, 7):
            for column in range(k // group):
                at = offset(m, n, k, row, column * group)
                assert found[at] == numbers[row, column]
        assert torch.equal(unswizzle(order[0], *numbers.shape), (numbers & 255).to(torch.uint8))


def written(counts: list[int], sizes: tuple, kind: str, **of_gemm) -> tuple:
    """(numbers (2, NUMBERS, E), layouts, sizes (2, E, 3)) that the setup kernel writes for two
    GEMMs of (n, k).
    """
    E, ends = len(counts), torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    numbers = garbage(torch.empty(2, schemes.NUMBERS, E, dtype=torch.int64))
    layouts = garbage(torch.empty(20 * E, dtype=torch.int32))
    problems = garbage(torch.empty(2, E, 3, dtype=torch.int32))
    some = torch.zeros(64, dtype=torch.uint8)
    gemms = [
        Gemm(
            **{name: some for name in ("x", "w", "d", "x_scale", "w_scale")},
            alpha=some.view(torch.float32),
            tables=some,
            **{"N": n, "K": k, "d_bytes": 2, "x_scale_step": -1, "w_scale_bytes": 4 * n},
            **{name: size(k) for name, size in of_gemm.items()},
        )
        for n, k in sizes
    ]
    run([setup(numbers, layouts, problems, ends, 0, *gemms, kind, gpu(-1))], -1, gpu(-1))
    return numbers, layouts, problems


interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="the setup kernel runs under Triton's interpreter"
)


@architectures
@formats
@interpreted
def test_the_setup_kernel_writes_their_layouts(architecture, name):
    """Byte for byte, for experts with the rows of all shapes, and one without."""
    format, layouts_of = FORMATS[name], function(architecture, name, "layouts")
    counts = [m for m, _, _ in SHAPES] + [0, 1]
    for both in zip(SHAPES, SHAPES[1:] + SHAPES[:1], strict=True):
        sizes = tuple([(n, k) for _, n, k in both])
        _, layouts, problems = written(
            counts, sizes, BLOCKS, x_bytes=format.row_bytes, w_bytes=format.row_bytes,
            columns=format.scale_columns,
        )  # fmt: skip
        layouts = layouts.view(2, 2, len(counts), schemes.LAYOUT_WORDS)
        for which, (n, k) in enumerate(sizes):
            for e, m in enumerate(counts):
                assert problems[which, e].tolist() == [m, n, k]
                wanted = torch.empty(2, schemes.LAYOUT_WORDS, dtype=torch.int32)
                size = layouts_of(
                    m, n, k,
                    *(ctypes.c_void_p(wanted[i].data_ptr()) for i in (0, 1)),
                )  # fmt: skip
                assert size == 4 * schemes.LAYOUT_WORDS
                assert torch.equal(layouts[which, :, e], wanted)


# --- int4 ----------------------------------------------------------------------------------------


OF_WEIGHTS = [(256, 128), (128, 640), (1536, 256), (80, 384)]  # (rows, columns)
tiles = pytest.mark.parametrize("tile", [tile for _, tile in library.INT4_TILES])


@tiles
@pytest.mark.parametrize("name", ["bf16", "f16"])
@interpreted
def test_the_setup_kernel_writes_layouts_of_int4(tile, name):
    layout = function_of("sm_90a", f"moe_ops_sm90_int4_{name}_{tile}", "layout")
    counts = [5, 0, 130]
    for sizes in (OF_WEIGHTS[:2], OF_WEIGHTS[2:]):
        numbers, layouts, problems = written(
            counts, sizes, INT4, x_bytes=int, w_bytes=lambda k: k // 2, columns=lambda k: 0
        )
        for which, (n, k) in enumerate(sizes):
            wanted = torch.empty(3, dtype=torch.int32)
            assert layout(n, k, ctypes.c_void_p(wanted.data_ptr())) == 12
            of_gemm = layouts[which * 10 * len(counts) :][: 3 * len(counts)]
            assert torch.equal(of_gemm.view(-1, 3), wanted.expand(len(counts), 3))
            assert problems[which].tolist() == [[n, m, k] for m in counts]
            strides = numbers[which, len(schemes.ARRAYS) :].reshape(-1, 2)
            assert strides.tolist() == [[n, 0]] * len(counts)


@tiles
def test_int4_weights_are_where_the_kernels_read_them(tile):
    """Every weight of the prepared tensor."""
    offset = function_of(
        "sm_90a", f"moe_ops_sm90_int4_bf16_{tile}", "weight_offset", ctypes.c_int64
    )
    for rows, columns in OF_WEIGHTS:
        found = torch.empty(rows, columns, dtype=torch.int64)
        for row in range(rows):
            for column in range(columns):
                found[row, column] = offset(rows, columns, row, column)
        place = prepared_places(rows, columns)
        assert torch.equal(found, place)


def prepared_places(rows: int, columns: int) -> torch.Tensor:
    """Where `prepare` puts each weight, in nibbles: found from five tensors of codes, each of
    which has some digits of a weight's number.
    """
    numbers = torch.arange(rows * columns).view(1, rows, columns)
    in_memory = torch.zeros(rows * columns, dtype=torch.int64)
    for digit in range(5):
        codes = (numbers >> 4 * digit & 15).to(torch.uint8)
        weight = moe_ops.from_quantized(
            "int4_w4a8",
            codes[..., ::2] | codes[..., 1::2] << 4,
            torch.ones(1, rows, columns // 128).to(torch.float8_e4m3fn),
            channel_scale=torch.ones(1, rows, 1),
        )
        data = moe_ops.prepare(weight, "cutlass").qdata.view(-1)
        nibbles = torch.stack((data & 15, data >> 4), 1).flatten().long()
        # back from the encoding: positive numbers are 8 - number
        number = torch.where(nibbles > 7, nibbles - 16, (8 - nibbles) % 8)
        in_memory += number + 8 << 4 * digit
    place = torch.empty_like(in_memory)
    place[in_memory] = torch.arange(rows * columns)
    return place.view(rows, columns)
