"""Weight-only layers of many rows an expert, which run on the products of training steps
(kernels/mixed_gemm/sm90_packed.py): when they do, what they launch, and values on a GPU."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops import environment
from moe_ops.choose import mixed as choose
from moe_ops.choose import table
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels import configs as kernel_configs
from moe_ops.kernels import launch
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm import configs
from tests.support import oracle
from tests.support.cases import BF16, FP16, Case

pytest.importorskip("triton")
WHY_NO_GLUON = environment.why_no_gluon(environment.TRITON)
if WHY_NO_GLUON is not None:
    pytest.skip(WHY_NO_GLUON, allow_module_level=True)

from moe_ops.backends.triton import mixed
from moe_ops.backends.triton.products import MixedLayer
from moe_ops.kernels.mixed_gemm import sm90_wgmma

SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not SM90, reason="needs SM90"))
RUN = launch.run
PRODUCT = "moe_ops_train_wgmma_packed"
SIZES = {"E": 4, "top_k": 2, "K": 128, "I": 64}


@pytest.mark.parametrize(
    "rows, I, bits, expected",
    [
        (63, 768, 8, False),
        (64, 14336, 8, True),
        (80, 768, 6, False),
        (81, 768, 5, True),
        (175, 768, 4, False),
        (176, 768, 4, True),  # 4096 tokens of Qwen3 give an expert 256
        (256, 2880, 4, False),
        (512, 2880, 4, True),
        (10**6, 14336, 4, False),
    ],
)
def test_from_how_many_rows_on(rows, I, bits, expected):
    assert (
        choose.many_rows(LayerSizes(rows * 8, 8, 4096, I, Gpu(227 << 10, True, True)), bits)
        == expected
    )


def launches_of(case: Case, **options) -> list:
    """All launches of a call, as SM90 would get them."""
    with (
        mock.patch.object(configs, "on_sm90", lambda _: True),
        mock.patch.object(launch, "run") as run,
    ):
        moe_ops.fused_experts(*case.args, **case.options, backend="triton", **options)
    return [one for call in run.call_args_list for one in call.args[0]]


@pytest.mark.parametrize("options", [{}, {"max_workspace_bytes": 60000}], ids=("whole", "chunks"))
@pytest.mark.parametrize("scheme", ["fp8_w8a16:channel", "int4_w4a16:g32"])
@pytest.mark.parametrize("sizes", [{"M": 2048, "E": 16}, {"M": 60, "E": 300}], ids=("many", "few"))
def test_workspaces_hold_what_kernels_read(scheme, options, sizes):
    """Also where experts outnumber the tokens of a chunk: blocks are as many as a table has."""
    case = Case("cpu", BF16, scheme, "silu", **SIZES | sizes)
    with mock.patch.object(choose, "many_rows", lambda *_: True):
        found = launches_of(case, **options)
    products = [one for one in found if one.kernel.name == PRODUCT]
    chunks = len(products) // 2
    assert len(found) == 7 * chunks and (chunks > 1) == bool(options)
    for one in found[::7]:
        named = one.named()
        assert named["counts_ptr"].numel() >= one.grid[0] * named["BLOCK_E"]
    for first, second in zip(products[::2], products[1::2], strict=True):
        rows, h, y = first.named()["x"], second.named()["x"], second.named()["y_ptr"]
        assert y.data_ptr() == rows.base.data_ptr() != h.base.data_ptr()
        assert first.named()["y_ptr"].data_ptr() == h.base.data_ptr()
        for named in (first.named(), second.named()):
            assert named["index_ptr"].numel() >= 4 * named["num_blocks"]
            assert first.grid[0] == named["num_blocks"]  # N and K are one tile


@pytest.mark.parametrize(
    "scheme, words", [("int5_w5a16:g32:super:min", 4), ("int6_w6a16:g16:super", 8)]
)
def test_planes_come_in_boxes_of_their_own(scheme, words):
    """Of 64 columns 32 bytes of low bits, and the high bits of their unit, of the same rows."""
    case = Case("cpu", BF16, scheme, "silu", E=2, top_k=1, M=256, K=256, I=256)
    with mock.patch.object(choose, "many_rows", lambda *_: True):
        found = [one for one in launches_of(case) if one.kernel.name == PRODUCT]
    assert len(found) == 2
    for named, rows in zip([one.named() for one in found], (64, 128), strict=True):  # by halves
        assert named["w"].base is named["w_high"].base and named["PACKED_STAGES"] == 2
        assert named["w"].block_shape == [rows, 8] and named["w_high"].block_shape == [rows, words]
        assert named["w_high"].layout.swizzle_byte_width == (32 if words == 8 else 0)


@pytest.mark.parametrize("chunks", [1, 2])
def test_passes_place_rows_once(chunks):
    """Each pass writes its blocks, whose experts are slots, and multiplies them."""
    case = Case("cpu", BF16, "int4_w4a16:g32", "silu", **SIZES | {"M": 60, "E": 16})
    experts = moe_ops.ResidentExperts(*case.args[1:3], slots=7, device="cpu")
    resident = Case("cpu", BF16, "int4_w4a16:g32", "silu", **SIZES | {"M": 60, "E": 16})
    resident.args[1:3] = experts.w13, experts.w2
    options = {} if chunks == 1 else {"max_workspace_bytes": 150000}
    with mock.patch.object(choose, "many_rows", lambda *_: True):
        found = [one.kernel.name for one in launches_of(resident, **options)]
    bring = ["moe_ops_admit_experts", "moe_ops_fetch_experts"]
    one_pass = [*bring, "moe_ops_group_blocks", PRODUCT, PRODUCT]
    placed = ["moe_ops_count_pairs", "moe_ops_place_pairs", "moe_ops_scatter"]
    assert found == [*placed, *one_pass * 3, "moe_ops_combine_rows"] * chunks


@pytest.mark.parametrize(
    "of, options",
    [
        ({"scheme": "fp8_w8a16:channel"}, {"batch_invariant": True}),
        ({"scheme": "int4_w4a8"}, {}),
        ({"scheme": "int8_w8a16:channel:zp"}, {}),
        ({"scheme": "fp8_w8a16:channel", "M": 100}, {}),
        ({"scheme": "fp8_w8a16:channel", "I": 96}, {}),
        ({"scheme": "int5_w5a16:g32", "I": 192}, {}),
        ({"scheme": "int6_w6a16:g16", "I": 192}, {}),
        ({"scheme": "fp8_w8a16:channel", "on_input": True, "top_k": 1}, {}),
        ({"scheme": "fp8_w8a16:channel", "dtype": FP16}, {}),
    ],
    ids=("invariant", "rounded", "zero", "few", "size", "int5", "int6", "on_input", "fp16"),
)
def test_who_does_not(of, options):
    """Among them: under `batch_invariant` the number of rows has no part in the instruction."""
    given = {"dtype": BF16, "activation": "silu", "M": 1024, **SIZES, **of}
    case = Case("cpu", given.pop("dtype"), given.pop("scheme"), **given)
    with mock.patch.object(sm90_wgmma, "why_not", lambda *_: "left out"):
        assert PRODUCT not in [one.kernel.name for one in launches_of(case, **options)]


@pytest.mark.parametrize("name", ["workspace13", "workspace2"])
def test_workspaces_begin_where_tma_reads(name):
    case = Case("cpu", BF16, "fp8_w8a16:channel", "silu", M=1024, **SIZES)
    runs, answers = mixed.runs_packed, []

    def shifted(a, *layer):
        where = torch.empty(getattr(a, name).numel() + 1)[1:]
        answers.append((runs(a, *layer), runs(a._replace(**{name: where}), *layer)))
        return False

    with mock.patch.object(mixed, "runs_packed", shifted):
        launches_of(case)
    assert answers == [(True, False)]


def test_too_many_experts():
    """From MAX_EXPERTS on, up to which counts were shown to fit workspace2."""
    case = Case("cpu", BF16, "fp8_w8a16:channel", "silu", M=1024, **SIZES)
    for most, expected in ((4, False), (5, True)):
        with mock.patch.object(mixed, "MAX_EXPERTS", most):
            names = [one.kernel.name for one in launches_of(case)]
        assert (PRODUCT in names) == expected


def test_a_table_does_not_choose_it():
    """A table has what was measured at the nearest M, where experts may have had more rows, in a
    layer without router weights on the input."""
    layer = LayerSizes(384, 8, 4096, 14336, Gpu(227 * 1024, True, True), 2)
    problem = (layer, BF16, "fp8_w8a16:block", 8)
    with mock.patch.object(choose, "measured", lambda *_: choose.MANY_ROWS):
        found = choose.for_experts(*problem, True, False)
    assert found.kernel == kernel_configs.SM90_WGMMA


def emulated(case: Case, launches: list, device: int, gpu: Gpu) -> None:
    """Run launches, but the products in torch, from the rows and blocks that they are given."""
    for one in launches:
        if one.kernel.name != PRODUCT:
            RUN([one], device, gpu)
            continue
        named = one.named()
        first = named["ACTIVATION"] != ""
        w, bias = case.args[1 if first else 2].dequantize().float(), named["bias_ptr"].float()
        x, y = named["x"].base, named["y_ptr"]
        done = torch.full_like(y, math.nan)  # x is read while y is written
        for e, begin, end, _ in named["index_ptr"][: 4 * named["num_blocks"]].view(-1, 4).tolist():
            if 0 <= e < named["E"]:
                h = x[begin : min(end, begin + 128)].float() @ w[e].T + bias[e]
                if first:
                    gate, up = h.chunk(2, dim=1)
                    h = torch.nn.functional.silu(gate) * up
                done[begin : begin + len(h)] = h.to(y.dtype)
        y.copy_(done)


@pytest.mark.skipif(not launch.INTERPRETED, reason="products run on the GPU below")
@pytest.mark.parametrize(
    "options", [{}, {"max_workspace_bytes": 1 << 16}], ids=("whole", "chunks")
)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_rows_and_sums(options, ids_dtype):
    """All but the products: counts, rows of x and y share a workspace of garbage; ids of none,
    experts elsewhere, strided inputs, and an expert of several blocks."""
    of = {"bias": True, "expert_map": True, "ids_dtype": ids_dtype}
    case = Case("cpu", BF16, "int8_w8a16:channel", "silu", **SIZES | {"M": 150}, **of)
    case.args[4][3:140] = case.args[4][0]  # more than a block of 128 rows
    case.nowhere[3:140] = False
    case.args[0], case.args[3] = case.args[0].nan_to_num(0.5), case.args[3].nan_to_num(0.5)
    case.args[0][case.nowhere] = math.nan
    for i in (0, 3, 4):
        case.args[i] = case.args[i].T.contiguous().T
    case.options |= options
    run = mock.Mock(side_effect=lambda *given: emulated(case, *given))
    with (
        mock.patch.object(configs, "on_sm90", lambda _: True),
        mock.patch.object(choose, "many_rows", lambda *_: True),
        mock.patch.object(launch, "run", run),
    ):
        out = case.run("triton")
    case.options = {k: v for k, v in case.options.items() if k not in options}
    assert oracle.relative_error(out, case.reference()) < 0.01
    assert (out[case.nowhere] == 0).all() and (run.call_count > 1) == bool(options)
    names = [one.kernel.name for call in run.call_args_list for one in call.args[0]]
    assert names.count(PRODUCT) == 2 * run.call_count


# --- on a GPU ------------------------------------------------------------------------------------

FORMATS = ["fp8_w8a16:tensor", "fp8_w8a16:channel", "fp8_w8a16:block", "int8_w8a16:channel"]
FORMATS += ["int8_w8a16:g32", "int8_w8a16:g128", "int4_w4a16:g32", "int4_w4a16:g128:zp"]
FORMATS += [
    "int4_w4a16:g32:min",
    "int4_w4a16:g32:super:min",
    "int5_w5a16:g32:super:min",
    "int6_w6a16:g16",
    "int6_w6a16:g16:super",
    "iq4_w4a16:g32:super",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
]


@pytest.mark.parametrize("scheme", [pytest.param(name, marks=ON_GPU) for name in FORMATS])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_values(scheme, activation):
    """Blocks that are full and not, and columns that no tile divides; experts that are elsewhere,
    ids of none, and biases."""
    sizes = {"M": 301, "E": 5, "top_k": 3, "K": 448, "I": 192, "bias": True, "expert_map": True}
    if scheme == "int6_w6a16:g16":  # whole units of planes
        sizes |= {"K": 384, "I": 128}
    case = Case("cuda", BF16, scheme, activation, **sizes)
    packed = MixedLayer.packed
    with (
        table.override(choose.MANY_ROWS) as seen,
        mock.patch.object(case, "args_for", lambda _: case.args),  # prepared weights do not run so
        mock.patch.object(MixedLayer, "packed", autospec=True, side_effect=packed) as used,
    ):
        case.check("triton")
    assert used.called and seen


@pytest.mark.parametrize("scheme", [pytest.param("fp8_w8a16:block", marks=ON_GPU)])
def test_nan_stays_with_its_token(scheme):
    case = Case("cuda", BF16, scheme, "silu", M=300, E=4, top_k=2, K=256, I=128)
    with table.override(choose.MANY_ROWS):
        clean = moe_ops.fused_experts(*case.args, backend="triton")
        case.args[0][7] = math.nan
        spoiled = moe_ops.fused_experts(*case.args, backend="triton")
    others = torch.arange(300) != 7
    assert spoiled[7].isnan().all() and torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("scheme", [pytest.param("int4_w4a16:g128", marks=ON_GPU)])
def test_the_order_of_blocks_leaves_bits_alone(scheme, monkeypatch):
    """Of sm90_wgmma.py, which takes four blocks, and all of them, at a time."""
    case = Case("cuda", BF16, scheme, "silu", M=1500, E=6, top_k=2, K=640, I=384)
    found = []
    for size in (1, 1 << 30):
        monkeypatch.setattr(configs, "GROUP_BYTES", size)
        sm90_wgmma._prepare.cache_clear()
        with mock.patch.object(choose, "many_rows", lambda *_: False):
            found.append(moe_ops.fused_experts(*case.args, backend="triton"))
        assert sm90_wgmma._prepare.cache_info().currsize  # it ran, with this order
    sm90_wgmma._prepare.cache_clear()
    assert torch.equal(*found)
    assert oracle.relative_error(found[0], case.reference()) < 0.02
