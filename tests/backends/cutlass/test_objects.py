"""The compiled kernels, asked on the host: layouts of scales, where scales are, and how much
workspace they need. What they compute is not run.

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

from moe_ops import environment
from moe_ops.backends.cutlass import blocks, library, schemes
from moe_ops.backends.cutlass.blocks import Gemm
from moe_ops.csrc import build
from moe_ops.kernels.launch import INTERPRETED, gpu, run
from moe_ops.numerics.swizzle import swizzle, unswizzle
from tests.support.cases import garbage

ARCHITECTURES = ("sm_100a", "sm_120a")
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


def function(architecture: str, name: str, suffix: str, result=ctypes.c_int):
    kernel = f"moe_ops_{architecture.removesuffix('a').replace('_', '')}_{name}_bf16"
    found = getattr(loaded(architecture), f"{kernel}_{suffix}", None)
    if found is None:
        pytest.skip(f"the object for {architecture} was built without {kernel}")
    found.restype = result
    return found


@pytest.mark.parametrize("architecture", build.FILES)
def test_the_struct_is_that_of_python(architecture):
    object_ = loaded(architecture)
    assert object_.moe_ops_cutlass_abi() == build.ABI
    assert object_.moe_ops_cutlass_struct_bytes() == ctypes.sizeof(library.GroupedGemm)


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


@architectures
@formats
@pytest.mark.skipif(not INTERPRETED, reason="the setup kernel runs under Triton's interpreter")
def test_the_setup_kernel_writes_their_layouts(architecture, name):
    """Byte for byte, for experts with the rows of all shapes, and one without."""
    format, layouts_of = FORMATS[name], function(architecture, name, "layouts")
    counts = [m for m, _, _ in SHAPES] + [0, 1]
    E, ends = len(counts), torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    for (_, n1, k1), (_, n2, k2) in zip(SHAPES, SHAPES[1:] + SHAPES[:1], strict=True):
        arrays = garbage(torch.empty(2 * len(schemes.ARRAYS) * E, dtype=torch.int64))
        layouts = garbage(torch.empty(2, 2, E, schemes.LAYOUT_WORDS, dtype=torch.int32))
        sizes = garbage(torch.empty(2, E, 3, dtype=torch.int32))
        some = torch.zeros(64, dtype=torch.uint8)
        gemms = [
            Gemm(
                x=some,
                w=some,
                d=some,
                x_scale=some,
                w_scale=some,
                alpha=some.view(torch.float32),
                N=n,
                K=k,
                row_bytes=format.row_bytes(k),
                d_bytes=2,
                columns=format.scale_columns(k),
            )
            for n, k in ((n1, k1), (n2, k2))
        ]
        run([blocks.setup(arrays, layouts.view(-1), sizes, ends, *gemms, gpu(-1))], -1, gpu(-1))
        for which, (n, k) in enumerate(((n1, k1), (n2, k2))):
            for e, m in enumerate(counts):
                assert sizes[which, e].tolist() == [m, n, k]
                wanted = torch.empty(2, schemes.LAYOUT_WORDS, dtype=torch.int32)
                size = layouts_of(
                    m, n, k,
                    *(ctypes.c_void_p(wanted[i].data_ptr()) for i in (0, 1)),
                )  # fmt: skip
                assert size == 4 * schemes.LAYOUT_WORDS
                assert torch.equal(layouts[which, :, e], wanted)


@architectures
@formats
def test_descriptors_have_room(architecture, name):
    """Whatever the number of experts, on the GPUs with the most multiprocessors."""
    workspace = function(architecture, name, "workspace", ctypes.c_size_t)
    for sm_count in (148, 160) if architecture == "sm_100a" else (170, 188, 192):
        asked = {
            workspace(ctypes.byref(library.GroupedGemm(groups=E, sm_count=sm_count)))
            for E in (1, 8, 256)
        }
        assert len(asked) == 1 and asked.pop() <= schemes.DESCRIPTOR_BYTES


@architectures
@formats
def test_shared_memory_is_what_gpus_have(architecture, name):
    most = 227 * 1024 if architecture == "sm_100a" else 99 * 1024
    assert 0 < function(architecture, name, "shared_memory")() <= most
