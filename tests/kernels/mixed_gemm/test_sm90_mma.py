"""One token in two launches on SM90: the order of columns and rows, and which layers it takes.
Bits are compared on a GPU (tests/backends/triton/test_batch_invariance.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from tests.kernels.mixed_gemm.test_decode import run
from tests.support.cases import BF16, FP32, Case

pytest.importorskip("triton.experimental.gluon")

from moe_ops.choose import candidates, mixed
from moe_ops.choose.table import LayerSizes
from moe_ops.kernels.configs import SM90_MMA, GemmConfig
from moe_ops.kernels.launch import Gpu
from moe_ops.kernels.mixed_gemm import configs, sm90_decode, sm90_mainloop, sm90_mma
from moe_ops.kernels.mixed_gemm.operands import MixedOperand, operand
from moe_ops.meta.scales import TRITON_E2M1
from moe_ops.meta.workspace import cdiv
from moe_ops.schemes import get_scheme
from tests.kernels.mixed_gemm.test_sm90_decode import SOURCE, in_pairs
from tests.kernels.mixed_gemm.test_sm90_wgmma import INT4_NUMBERS, ON_GPU, WHY_NO_GLUON

GPU = Gpu(227 * 1024, True, True)
E2M1 = (("mxfp4", torch.uint8), ("nvfp4", torch.float8_e4m3fn))


def of_words(code, constraints, tensors, pack, **_):
    """Instructions of `operand_words`, and the two bf16 of each word, which `right_operands` has
    twice side by side.
    """
    assert constraints == "=r,r,r"
    if code.startswith("prmt.b32 $0, $1, $2, "):
        assert pack == 1
        halves = torch.stack(tensors, -1).contiguous().view(torch.int16)
        low, high = {"0x5410;": (0, 2), "0x7632;": (1, 3)}[code.split()[-1]]
        return halves[..., (low, high)].contiguous().view(torch.int32)[..., 0]
    assert (code, pack) == ("mov.b32 $0, $1;", 2)
    return tensors[0][..., :1].contiguous().view(BF16)


@pytest.mark.parametrize("chunk", [64, 128])
def test_product_of_a_chunk(chunk):
    """Bytes of two warps' rows through the kernel's own steps, times a row of x for each warp."""
    warps = 2
    g = torch.Generator().manual_seed(chunk)
    codes = torch.randint(0, 16, (16 * warps, chunk), generator=g)
    x = torch.randint(-4, 5, (warps, chunk), generator=g).to(BF16)
    tile = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    numbers = in_pairs(*INT4_NUMBERS)
    found = [
        run("decode_int4", word & 0xFFFFFFFF, *numbers, source=SOURCE)
        for word in tile.view(torch.int32).flatten().tolist()
    ]
    pairs = torch.tensor(found, dtype=torch.float64).view(16 * warps, chunk // 8, 2, 4)
    with (
        mock.patch.object(sm90_mma.gl, "convert_layout", lambda t, layout, assert_trivial: t),
        mock.patch.object(sm90_mma.gl, "expand_dims", torch.unsqueeze),
        mock.patch.object(sm90_mma.gl, "inline_asm_elementwise", of_words),
        mock.patch.object(sm90_mma.gl, "join", lambda a, b: torch.stack((a, b), -1)),
        mock.patch.object(torch.Tensor, "split", lambda t: t.unbind(-1)),
        mock.patch.object(torch.Tensor, "type", mock.Mock()),
    ):
        words = sm90_mma.operand_words.fn(x.view(torch.int32))
        rows = sm90_mma.right_operands.fn(words, None)
        weights = [
            sm90_mma.left_operand.fn(pairs[:, :, i].reshape(16 * warps, chunk // 2), None)
            for i in (0, 1)
        ]
    sums = sum(w @ operand.double() for w, operand in zip(weights, rows, strict=True))
    each = (codes.view(warps, 16, chunk) - 8).double() @ x.double()[:, :, None]
    assert torch.equal(sums * sm90_mainloop.INT4_SHIFT.value, each.expand(warps, 16, 8))


@pytest.mark.parametrize("chunk", [64, 128])
def test_threads_hold_the_columns_that_their_weights_meet(chunk):
    """A lane's bytes of a chunk are of the pairs of columns that it has of x."""
    words = sm90_decode.weight_layout(16, chunk // 2, 1, False, False)
    x = sm90_mma.pair_layout(chunk, 1)
    bytes_of = [base[1] for base in words.lane_bases]
    pairs_of = [base[1] for base in x.lane_bases]
    assert bytes_of[:2] == pairs_of[:2] and not any(bytes_of[2:] + pairs_of[2:])
    columns = {1 << i for i in range(chunk.bit_length() - 4)}  # a byte is a pair of columns
    assert {base[1] for base in words.reg_bases} - {0} == columns
    assert {base[1] for base in x.reg_bases} - {0} == columns


@pytest.mark.parametrize("warps", [1, 2, 8, 16])
def test_warps_copy_their_own_rows_of_x(warps):
    """No barrier of the program is between copies and reads."""
    for chunk in (64, 128):
        copied = sm90_mma.copy_layout(warps, chunk // 2, warps)
        assert (copied.threads_per_warp[0], copied.warps_per_cta) == (1, [warps, 1])
        read = sm90_mma.pair_layout(chunk, warps)
        rows = [base[0] for base in read.warp_bases]
        assert rows == [1 << i for i in range(warps.bit_length() - 1)]
        assert not any(base[0] for base in read.lane_bases + read.reg_bases)


@pytest.mark.parametrize(
    "tile, rows",
    [
        ((1536, 128, 6, 8, 4), 8 * 16),  # gptoss120
        ((3584, 128, 4, 8, 2), 8 * 32),  # mixtral
        ((1536, 128, 12, 8, 4), 8),  # all weights are asked for at once
        ((1536, 128, 3, 8, 8), 8),
        ((1792, 128, 2, 16, 2), 16),
        ((8192, 128, 8, 8, 1), 8),  # 128 KB
        ((2048, 128, 6, 8, 2), 8 * 32),  # three rounds of six chunks are more than 16
    ],
)
def test_where_all_of_h_is_brought_at_once(tile, rows):
    assert sm90_mma.rows_of_h(*tile) == rows


@pytest.mark.parametrize("top_k, I", [(1, 8192), (2, 8192), (2, 14336), (4, 2880), (4, 4096)])
def test_all_of_h_has_the_chunks_of_all_rounds(top_k, I):
    """Whatever config a search tries: those past the row's end are zeros, too."""
    base = mixed.choose_token(LayerSizes(top_k, 8, 2880, I, GPU, top_k), 128, 32)
    slots, whole = configs.token_slots(top_k), 0
    ((_, twos),) = candidates.token_space(base, top_k, 2880, I, 32)
    for block_n, _, depth, warps in {two.gemm2 for two in (base, *twos)}:
        parts = 16 * warps // block_n
        chunks = cdiv(cdiv(I, 128), parts)
        rows = sm90_mma.rows_of_h(chunks * 128, 128, min(depth, chunks), warps, slots)
        if rows > warps:
            whole += 1
            assert rows // warps >= cdiv(chunks, depth) * depth
    assert whole


def weight(scheme: str, K: int, scales: torch.dtype = BF16, layout: str = "") -> MixedOperand:
    found = get_scheme(scheme)
    data = torch.zeros(found.qdata_shape(1, 64, K), dtype=torch.uint8)
    scale = torch.zeros(found.scale_shapes(1, 64, K, layout)["scale"], dtype=scales)
    return operand("w", data, scale, None, None, None, scheme, GPU, layout)


def has_bits(w13: MixedOperand, w2: MixedOperand, top_k: int, shift: int = 0) -> bool:
    x = torch.zeros(shift + w13.K, dtype=BF16)[None, shift:]
    runs = sm90_mma.why_not(x, w13, w2, top_k) is None
    return runs and configs.in_segments(w13, w2, top_k) is not None


def test_layers_that_one_token_takes_under_batch_invariant():
    """Those like the ones whose bits were compared on a GPU (docs/kernels/mixed_gemm.md)."""
    int4 = {K: weight("int4_w4a16:g128", K) for K in (512, 4096)}
    for top_k in (1, 5, 16):
        assert has_bits(int4[4096], int4[512], top_k) and has_bits(int4[512], int4[4096], top_k)
    assert not has_bits(int4[512], int4[512], 17)
    assert has_bits(int4[512], int4[512], 1, 2) and not has_bits(int4[512], int4[512], 1, 1)
    assert has_bits(weight("int4_w4a16:g64", 1088, FP32), int4[512], 1)
    assert not has_bits(int4[512], weight("int4_w4a8", 512, torch.float8_e4m3fn), 1)
    mxfp4 = {K: weight("mxfp4_w4a16", K, torch.uint8) for K in (512, 576)}
    assert has_bits(mxfp4[512], mxfp4[512], 1) and not has_bits(mxfp4[512], mxfp4[576], 1)
    # whose scales are of several rows side by side
    prepared = weight("mxfp4_w4a16", 512, torch.uint8, TRITON_E2M1)
    assert not has_bits(mxfp4[512], prepared, 1)


@pytest.mark.parametrize("scheme, scales", [("int4_w4a16:g128", BF16), ("int4_w4a16:g64", FP32)])
@pytest.mark.parametrize(
    "K, parts", [(128, 1), (384, 1), (768, 1), (2048, 1), (2304, 2), (4096, 2)]
)
@pytest.mark.parametrize("top_k", [1, 6, 8, 9, 16])
def test_rows_under_batch_invariant_are_summed_in_segments(scheme, scales, K, parts, top_k):
    """In as many by a token's warps as by the kernels for many rows, whose K tiles divide them."""
    w = weight(scheme, K, scales)
    assert w.segments == 1 and configs.in_segments(w, w, 17) is None
    found = configs.in_segments(w, w, top_k)
    assert found is not None
    assert [one.segments for one in found] == [parts, parts if top_k <= 8 else 1]
    token = mixed.token_of_any_batch(top_k, *[one.segments for one in found])
    for one, gemm in zip(found, (token.gemm1, token.gemm2), strict=True):
        tile = sm90_mma._tile_of(one, gemm)
        assert (tile.SPLIT, tile.K_PART * one.segments, tile.TWO) == (one.segments, K, False)
    for rows in (1, 8, 100, 300, 1000, 10000):
        layer = LayerSizes(rows, w.E, K, K, GPU)
        many = mixed.wgmma_for_any_batch(layer, *found)
        for one, gemm in zip(found, (many.gemm1, many.gemm2), strict=True):
            assert K // one.segments % one.block_k(gemm) == 0 and many.split_k == 1
            if many.block_m == 64:  # registers for two sums
                assert gemm.num_warps == (4 if one.segments > 1 else 8)
    forced = GemmConfig(128, 256, 2, 4)  # whatever config is forced on them
    assert parts == 1 or K // parts % found[0].block_k(forced) == 0
    assert found[1].segments == 1 or configs.split_k_of(found[1], forced, 3, 8) == 1


@pytest.mark.parametrize("columns", range(64, 8192, 64))
def test_warps_share_all_columns_of_a_row(columns):
    """Parts begin at whole groups, and the last one ends with the row; no warp's are all others'
    too."""
    for group in (16, 32, 128):
        if columns % group:
            continue
        chunk = 128 if columns >= 128 else 64
        for most in (1, 4, 16):
            parts = configs.parts_of_row(columns, chunk, group, most)
            assert 1 <= parts <= most
            if parts == 1:
                continue
            part = -(-columns // (chunk * parts)) * chunk
            starts = [min(i * part, columns - part) for i in range(parts)]
            assert all(start >= 0 and start % max(group, 64) == 0 for start in starts)
            assert starts[-1] + part == columns and (parts - 1) * part < columns


def test_which_token_these_kernels_serve():
    """Prepared e2m1, and int4 with scales of whole chunks in rows that are not too long; with the
    configs that were measured."""
    taken = [weight("int4_w4a16:g128", 512)]
    taken += [weight(f"{name}_w4a16", 512, dtype, TRITON_E2M1) for name, dtype in E2M1]
    found = [mixed.token_facts(w, w) for w in taken]
    assert found == [(128, 128), (128, 32), (128, 16)]
    others = [weight("int4_w4a16:g32", 512), weight("int4_w4a16:g128", 512, FP32)]
    others += [weight("mxfp4_w4a16", 512, torch.uint8), weight("int4_w4a16:g128", 4224)]
    assert not any(mixed.token_facts(w, w) for w in others)
    for sizes, expected in {
        (8, 2048, 768, 128, 128): ((16, 8, 2), (128, 3, 16)),
        (2, 4096, 14336, 128, 128): ((16, 8, 4), (32, 4, 8)),
        (4, 2880, 2880, 128, 32): ((16, 6, 4), (64, 6, 8)),
        # no tuning table has these
        (6, 5120, 1536, 128, 128): ((16, 5, 8), (128, 4, 8)),
        (6, 2048, 1408, 128, 128): ((16, 8, 2), (128, 3, 16)),
        (1, 5120, 8192, 128, 128): ((16, 5, 8), (16, 4, 8)),
        (8, 7168, 2048, 128, 128): ((16, 7, 8), (128, 4, 8)),
        (8, 4096, 1536, 128, 128): ((16, 8, 4), (128, 4, 8)),
        (2, 4096, 3072, 128, 128): ((16, 8, 4), (32, 6, 8)),
        (10, 2048, 512, 128, 128): ((16, 8, 2), (256, 4, 16)),
        (2, 4096, 6400, 128, 128): ((16, 8, 4), (32, 2, 16)),
        (4, 3072, 1024, 128, 128): ((16, 6, 4), (64, 4, 8)),
    }.items():
        top_k, K, I, *scales = sizes
        found = mixed.choose_token(LayerSizes(top_k, 8, K, I, GPU, top_k), *scales)
        gemms = [(g.block_n, g.num_stages, g.num_warps) for g in (found.gemm1, found.gemm2)]
        assert found.kernel == SM90_MMA and tuple(gemms) == expected


@pytest.mark.parametrize(
    "top_k, K, I, group", [(8, 2048, 768, 128), (1, 2880, 2880, 32), (6, 5120, 1536, 128)]
)
def test_search_tries_parts_that_rows_have(top_k, K, I, group):
    """And as many warps of GEMM2 as slots and parts."""
    base = mixed.choose_token(LayerSizes(top_k, 8, K, I, GPU, top_k), 128, group)
    ((ones, twos),) = candidates.token_space(base, top_k, K, I, group)
    assert base.gemm1 in [one.gemm1 for one in ones] and base.gemm2 in [t.gemm2 for t in twos]
    slots = configs.token_slots(top_k)
    for gemms, columns, rows in (
        ([one.gemm1 for one in ones], K, 16),
        ([two.gemm2 for two in twos], I, 16 * slots),
    ):
        assert len(gemms) == len(set(gemms)) > 3
        for block_n, block_k, _, warps in gemms:
            parts = 16 * warps // rows
            assert (block_n, block_k) == (rows, 128) and warps <= 16
            assert configs.parts_of_row(columns, 128, group, parts) == parts


COMPILE = """
import re
from tools import compile_kernels as c
for I in (8192, 14336):  # GEMM2's rows are longer than its buffers; then all of h is there at once
    call = c.Call((8, 2, 512 if I == 8192 else 4096, I), 1, "int4_w4a16:g128")
    found = [one for one in c.compile_call(call, c.gpu_of(90), 90) if "token" in one.name]
    assert len(found) == 2
    for one in found:
        text = one.binary.asm["ptx"]
        ptx = text.split("cp.async.commit_group")[-1]
        waits = re.findall(r"cp.async.wait_group\\s+(\\d+)", ptx[: ptx.index("st.shared")])
        assert waits and waits[-1] == "0", one.name
        # memory that a warp has read is written again after a barrier alone
        read = False
        for step in re.findall(r"ld\\.shared|bar\\.sync|cp\\.async\\.c[ag]", text):
            assert not (read and step.startswith("cp")), one.name
            read = step.startswith("ld") or (read and step != "bar.sync")
"""


@pytest.mark.slow
@pytest.mark.skipif(WHY_NO_GLUON is not None, reason=str(WHY_NO_GLUON))
def test_no_copy_is_under_way_when_sums_take_its_memory():
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env=variables)


@pytest.mark.parametrize(
    "scheme, options",
    [
        pytest.param(*case, marks=ON_GPU)
        for case in (
            ("int4_w4a16:g128", {"K": 2176, "I": 896, "top_k": 8}),
            ("int4_w4a16:g128:zp", {"K": 2048, "I": 1920, "top_k": 1, "on_input": True}),
            ("int4_w4a16:g128", {"K": 1024, "I": 1024, "top_k": 3, "bias": True}),
            ("mxfp4_w4a16", {"K": 2880, "I": 320, "top_k": 4, "bias": True}),
            ("mxfp4_w4a16", {"K": 5120, "I": 1536, "top_k": 6}),
            ("nvfp4_w4a16", {"K": 4096, "I": 2880, "top_k": 2, "expert_map": True}),
            # all of h at once, in rounds of six and of five chunks
            ("mxfp4_w4a16", {"K": 2880, "I": 2880, "top_k": 4, "bias": True}),
            ("int4_w4a16:g128", {"K": 2176, "I": 5120, "top_k": 2, "expert_map": True}),
        )
    ],
)
def test_values_of_one_token(scheme, options):
    """Rows that several warps share, with parts that overlap, longer than what threads ask for."""
    case = Case("cuda", BF16, scheme, "swigluoai", M=1, E=16, **options)
    with mock.patch.object(sm90_mma, "launches", wraps=sm90_mma.launches) as used:
        case.check("triton")
    assert used.called
