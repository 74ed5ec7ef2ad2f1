"""Whole layers on a CPU, by csrc/cpu/experts.cpp, against fp64."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops import activations, schemes
from moe_ops.backends.torch import layer
from moe_ops.numerics import elements

BF16 = torch.bfloat16
# sums are fp32; h and the output are rounded to bf16, by 2^-9 of a number at most
TOLERANCE = 3.5e-3
CPU_FACTS = Path("/proc/cpuinfo")
ROWS_OF_TILES = 8  # an expert, from which every format takes tiles
SCHEMES = (
    *("", "int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g32", "int4_w4a16:g128:zp"),
    *("int4_w4a16:g32:zp", "mxfp4_w4a16", "nvfp4_w4a16", "int8_w8a16:channel"),
    *("nf4_w4a16:g64", "fp4_w4a16:g32", "iq4_w4a16:g32", "iq4_w4a16:g32:super"),
    *("int4_w4a16:g32:min", "int4_w4a16:g32:super:min", "custom:int4,1x16,int8,min"),
    *("int5_w5a16:g32", "int5_w5a16:g32:min", "int5_w5a16:g32:super:min", "int6_w6a16:g16"),
    *("int6_w6a16:g16:super", "int8_w8a16:g32", "int8_w8a16:g64:min", "int8_w8a16:g32:zp"),
    *("fp8_w8a16:channel", "fp8_w8a16:tensor", "fp8_w8a16:block"),
)
RUN = layer.run
pytestmark = pytest.mark.skipif(layer.kernels() is None, reason="not built, or no AVX2")


# instructions, and whether weights of 4 bits become bf16 (1), bytes (0) or what is faster (-1)
FORMS = {
    "amx": (1024, -1),
    "avx512": (512, -1),
    "avx512_bytes": (512, 0),
    "avx512_bf16": (512, 1),
    "avx2": (2, -1),
}


def use(form):
    library, (widest, as_bf16) = layer.kernels(), FORMS[form]
    library.moe_ops_cpu_experts_as_bf16(as_bf16)
    moe_ops.planning.bind.forget()  # shortcuts, up to so many rows
    return library.moe_ops_cpu_experts_avx(widest) == widest


@pytest.fixture(autouse=True, params=FORMS)
def avx(request) -> Iterator[str]:
    """Every form of the kernels that this processor runs."""
    try:
        if not use(request.param):
            pytest.skip("this processor lacks it")
        yield request.param
    finally:
        layer.kernels().moe_ops_cpu_experts_as_bf16(-1)
        layer.kernels().moe_ops_cpu_experts_avx(layer.WIDEST)


@pytest.fixture(autouse=True)
def native(monkeypatch) -> Iterator[list]:
    """The calls that ran here, with NaN in memory that was not written before."""
    calls: list = []
    threads = torch.get_num_threads()
    monkeypatch.setattr(layer, "run", lambda a, form: (calls.append(a), RUN(a, form)))
    torch.use_deterministic_algorithms(True)  # fills what torch.empty makes
    yield calls
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(E, K, I, scheme, seed=0):
    """w13 and w2 as a call takes them, and in fp64."""
    w13 = (normal(E, 2 * I, K, seed=seed) / K**0.5).to(BF16)
    w2 = (normal(E, K, I, seed=seed + 1) / I**0.5).to(BF16)
    if not scheme:
        return w13, w2, w13.double(), w2.double()
    w13, w2 = moe_ops.quantize(w13, scheme), moe_ops.quantize(w2, scheme)
    return w13, w2, *[w.dequantize(torch.float32).double() for w in (w13, w2)]


def routing(M, E, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(M, E, generator=generator).topk(top_k).indices
    return ids, torch.rand(M, top_k, generator=generator) + 0.5


def expected(x, w13, w2, router, ids, activation="silu", b13=None, b2=None):
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for e in range(w13.shape[0]):
        token, which = (ids == e).nonzero(as_tuple=True)
        gate_up = x[token].double() @ w13[e].T
        if b13 is not None:
            gate_up += b13[e].double()
        h = activations.formula(gate_up, activations.resolve(activation))
        y = h @ w2[e].T + (0 if b2 is None else b2[e].double())
        out.index_add_(0, token, y * router[token, which].double()[:, None])
    return out


def error(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()


def run(x, w13, w2, router, ids, **options):
    """The layer. Where AMX is in use, of so many copies of the tokens that experts have the rows
    from which every format takes tiles.
    """
    M, copies = x.shape[0], 1
    if layer.kernels().moe_ops_cpu_experts_in_use() == 1024:
        expert_map = options.get("expert_map")
        experts = max(w2.shape[0], 0 if expert_map is None else expert_map.shape[0])
        copies = -(-ROWS_OF_TILES * experts // ids.numel())
    x, router, ids = [t.repeat(copies, 1) if copies > 1 else t for t in (x, router, ids)]
    out = moe_ops.fused_experts(x, w13, w2, router, ids, backend="torch", **options)
    return out[-M:]


# K and I with a whole last step of 128 columns, and with 32, 64 and 96 of one
@pytest.mark.parametrize(("K", "I"), [(256, 128), (320, 224), (96, 160), (512, 256)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(native, scheme, K, I):
    try:
        w13, w2, exact13, exact2 = weights(5, K, I, scheme)
    except ValueError as reason:
        pytest.skip(str(reason))  # columns are no multiple of a group's
    most = 5 * layer.MOST_ROWS_OF_BF16[layer.kernels().moe_ops_cpu_experts_in_use()]
    # 1 to 8 rows an expert, some more, and rows in parts
    for M, threads in ((1, 1), (3, 2), (7, 1), (20, 2), (70, 1)):
        if not scheme and most < 2 * M:
            continue
        torch.set_num_threads(threads)
        x, (ids, router) = normal(M, K, seed=M).to(BF16), routing(M, 5, 2, seed=M)
        out = run(x, w13, w2, router, ids)
        assert error(out, expected(x, exact13, exact2, router, ids)) < TOLERANCE, (M, threads)
    assert native and "emulated" not in str(moe_ops.explain(x, w13, w2, ids))


@pytest.mark.parametrize(
    ("of_w13", "of_w2"),
    [
        ("q4_k", "q6_k"),
        ("q5_0", "q8_0"),
        ("iq4_w4a16:g32", "q5_1"),
        ("mxfp4_w4a16", ""),
        ("", "int4_w4a16:g128"),
        ("fp8_w8a16:block", "nf4"),
    ],
)
def test_two_schemes(native, of_w13, of_w2):
    """Each weight has its decoder, and h the type that the second one takes."""
    (w13, _, exact13, _), (_, w2, _, exact2) = [
        weights(5, 512, 256, scheme) for scheme in (of_w13, of_w2)
    ]
    for M, threads in ((1, 1), (7, 2), (40, 1)):
        torch.set_num_threads(threads)
        x, (ids, router) = normal(M, 512, seed=M).to(BF16), routing(M, 5, 2, seed=M)
        out = run(x, w13, w2, router, ids)
        assert error(out, expected(x, exact13, exact2, router, ids)) < TOLERANCE, (M, threads)
    assert len(native) == 3 and "emulated" not in str(moe_ops.explain(x, w13, w2, ids))


@pytest.mark.parametrize("size", [30, 300])
@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "mxfp4_w4a16", "int8_w8a16:channel"])
def test_tokens_of_very_different_size(native, scheme, size):
    """One number in 128 is `size` times the others and meets weights of zero: these are rounded to
    2^-16 of it. Tokens without such a number lose nothing.
    """
    w13, w2 = normal(3, 256, 256, seed=0) / 16, normal(3, 256, 128, seed=1) / 11
    w13[:, :, ::128] = 0
    w13, w2 = [moe_ops.quantize(w.to(BF16), scheme) for w in (w13, w2)]
    exact = [w.dequantize(torch.float32).double() for w in (w13, w2)]
    x, (ids, router) = normal(12, 256, seed=2), routing(12, 3, 2)
    x[:6, ::128] = size * (1 + x[:6, ::128].abs())
    x = x.to(BF16)
    out, reference = run(x, w13, w2, router, ids), expected(x, *exact, router, ids)
    assert error(out[6:], reference[6:]) < TOLERANCE
    most = x[:6, ::128].abs().max().item()
    assert error(out[:6], reference[:6]) < TOLERANCE + most * 2**-16
    assert native


@pytest.mark.parametrize(("K", "I"), [(256, 128), (320, 224), (96, 160)])
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_block:ue8m0", "fp8_channel", "int8_w8a8"])
def test_quantized_activations_are_those_of_plain_torch(native, monkeypatch, scheme, K, I):
    """Both quantize alike, so that they differ by the rounding of the output alone."""
    w13, w2, *_ = weights(5, K, I, scheme)
    for M in (1, 6, 40):
        x, (ids, router) = normal(M, K, seed=M).to(BF16), routing(M, 5, 2, seed=M)
        # magnitudes mixed inside each group: quotients below e4m3's least normal number, too
        x *= torch.logspace(-4, 1, K)[
            torch.randperm(K, generator=torch.Generator().manual_seed(M))
        ]
        x[-1, : K // 2] = 0
        if M == 40:
            x[3], x[4, 1], x[5] = 0, math.nan, 1e-38
        outs = [run(x, w13, w2, router, ids).double()]
        with monkeypatch.context() as patch:
            patch.setattr(layer, "form_of", lambda a: None)
            outs.append(run(x, w13, w2, router, ids).double())
        assert torch.equal(outs[0].isnan(), outs[1].isnan())
        assert error(*[out.nan_to_num() for out in outs]) < 3e-3, M
    assert len(native) == 3


@pytest.mark.parametrize("count", range(1, 20))
def test_every_number_of_rows(native, count):
    w13, w2, exact13, exact2 = weights(2, 128, 128, "mxfp4_w4a16")
    x, router = normal(count, 128, seed=count).to(BF16), torch.full((count, 1), 0.7)
    ids = torch.ones(count, 1, dtype=torch.int64)
    reference = expected(x, exact13, exact2, router, ids)
    assert error(run(x, w13, w2, router, ids), reference) < TOLERANCE
    assert native


@pytest.mark.parametrize("bias", [None, torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(
    "activation",
    [
        *layer.ACTIVATIONS,
        moe_ops.Activation("silu", limit=0.5),
        moe_ops.Activation("situ", beta=0.8, limit=0.7),
        moe_ops.Activation("powlu", alpha=1.5, limit=0.6),
    ],
    ids=str,
)
def test_activations_and_biases(native, activation, bias):
    w13, w2, exact13, exact2 = weights(4, 128, 96, "mxfp4_w4a16")
    x, (ids, router) = normal(9, 128, seed=3).to(BF16), routing(9, 4, 2)
    b13 = b2 = None
    if bias is not None:
        b13, b2 = normal(4, 192, seed=4).to(bias), normal(4, 128, seed=5).to(bias)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = run(x, w13, w2, router, ids, activation=activation, w13_bias=b13, w2_bias=b2)
        reference = expected(x, exact13, exact2, router, ids, activation, b13, b2)
        assert error(out, reference) < TOLERANCE
    assert native


@pytest.mark.parametrize("name", ["silu", "swigluoai", "situ", "powlu"])
def test_activations_that_differ_by_expert(native, name):
    w13, w2, exact13, exact2 = weights(4, 128, 96, "int8_w8a16:channel")
    x, (ids, router) = normal(9, 128, seed=3).to(BF16), routing(9, 4, 2)
    of = {"limit": torch.tensor([0.5, math.inf, 1.2, 0.8])}
    if name in ("powlu", "swigluoai"):
        of["alpha"] = torch.tensor([1.9, 0.7, 2.2, 1.1])
    activation = moe_ops.Activation(name, **of)
    reference = 0
    for e in range(4):
        alone = moe_ops.Activation(name, **{what: of[what][e].item() for what in of})
        mine = torch.where(ids == e, ids, -1)
        reference = reference + expected(x, exact13, exact2, router, mine, alone)
    torch.use_deterministic_algorithms(False)
    for _ in range(2):  # by the launcher, and past it
        out = run(x, w13, w2, router, ids, activation=activation)
        assert error(out, reference) < TOLERANCE
    assert native and "emulated" not in str(
        moe_ops.explain(x, w13, w2, ids, activation=activation)
    )


@pytest.mark.parametrize(
    "activation", [*layer.ACTIVATIONS, moe_ops.Activation("situ", limit=math.inf)], ids=str
)
def test_gates_of_every_size(native, activation):
    """Each output is the activation of one gate and one up column."""
    sizes = torch.logspace(-30, 2, 97)
    g, u = torch.cat((sizes, -sizes, torch.zeros(1))), torch.tensor([-30.0, -1e-3, 0.2, 9.0])
    x = torch.stack((g[:, None].expand(-1, 4), u.expand(len(g), -1)), -1).reshape(-1, 8).to(BF16)
    w13, w2, columns = torch.zeros(1, 64, 32), torch.zeros(1, 32, 32), torch.arange(8)
    of = activations.resolve(activation)
    w13[0, columns if of.interleaved else columns // 2 + columns % 2 * 32, columns] = 1
    w2[0, columns, columns] = 1
    w13, w2 = [moe_ops.quantize(w.to(BF16), "fp8_w8a16:tensor") for w in (w13, w2)]
    x, ids = torch.nn.functional.pad(x, (0, 24)), torch.zeros(len(x), 1, dtype=torch.int64)
    out = run(x, w13, w2, torch.ones(len(x), 1), ids, activation=activation)
    want = activations.formula(x.double() @ w13.dequantize().double()[0].T, of)
    lost = 1e-15 * (x[:, :8:2] * x[:, 1:8:2]).abs()  # by torch's gelu_tanh in fp64
    assert ((out - want).abs()[:, :4] <= 2.0**-7 * want.abs()[:, :4] + lost + 1e-36).all()
    assert native and (want[:, :4] != 0).any(0).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "scheme",
    [
        *("int4_w4a16:g64:zp", "int4_w4a16:g128", "int8_w8a16:channel", "int4_w4a16:g32:min"),
        *("int8_w8a16:g32", "int8_w8a16:g64:zp", "int5_w5a16:g32:min", "int6_w6a16:g16"),
    ],
)
def test_scales_of_any_type(native, scheme, dtype):
    x, (ids, router) = normal(5, 256, seed=3).to(BF16), routing(5, 4, 2)
    w13 = moe_ops.quantize((normal(4, 256, 256, seed=0) / 16).to(dtype), scheme)
    w2 = moe_ops.quantize((normal(4, 256, 128, seed=1) / 12).to(dtype), scheme)
    assert w13.scale.dtype == dtype
    reference = expected(
        *(x, w13.dequantize(torch.float32).double(), w2.dequantize(torch.float32).double()),
        *(router, ids),
    )
    assert error(run(x, w13, w2, router, ids), reference) < TOLERANCE
    assert native


def test_the_number_of_threads_changes_no_bit(native):
    w13, w2, *_ = weights(6, 384, 160, "int4_w4a16:g32")
    x, (ids, router) = normal(33, 384, seed=3).to(BF16), routing(33, 6, 3)
    outs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outs.append(run(x, w13, w2, router, ids))
    assert all(torch.equal(out, outs[0]) for out in outs) and len(native) == 3


@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "mxfp4_w4a16", "fp8_w8a16:channel"])
def test_batch_invariant_rows_are_those_of_one_token(native, scheme):
    """Though a batch has the rows from which tiles are faster."""
    w13, w2, *_ = weights(3, 256, 128, scheme)
    x, (ids, router) = normal(24, 256, seed=3).to(BF16), routing(24, 3, 2)
    options = {"backend": "torch", "batch_invariant": True}
    out = moe_ops.fused_experts(x, w13, w2, router, ids, **options)
    for m in range(0, 24, 5):
        alone = [t[m : m + 1] for t in (router, ids)]
        row = moe_ops.fused_experts(x[m : m + 1], w13, w2, *alone, **options)
        assert torch.equal(out[m : m + 1], row), m
    assert len(native) == 6


@pytest.mark.parametrize("scheme", ["int4_w4a16:g128", "int4_w4a16:g32:zp", "nvfp4_w4a16"])
def test_rows_of_4_bits_that_become_bf16(avx, scheme):
    """On processors that are not Intel's those of calls with many rows an expert."""
    if avx != "avx512" or not CPU_FACTS.exists():
        pytest.skip("what is chosen depends on the processor with AVX-512 alone")
    w13, w2, *_ = weights(3, 256, 128, scheme)
    x, (ids, router) = normal(24, 256, seed=3).to(BF16), routing(24, 3, 2)
    is_intel = "GenuineIntel" in CPU_FACTS.read_text()
    for M in (1, 24):
        outs = {}
        for form in ("avx512", "avx512_bytes", "avx512_bf16"):
            use(form)
            outs[form] = moe_ops.fused_experts(x[:M], w13, w2, router[:M], ids[:M])
        assert not torch.equal(outs["avx512_bytes"], outs["avx512_bf16"])
        chosen = "avx512_bytes" if M == 1 or is_intel else "avx512_bf16"
        assert torch.equal(outs["avx512"], outs[chosen])


def test_ids_out_of_range_and_an_expert_map(native):
    w13, w2, exact13, exact2 = weights(3, 128, 128, "nvfp4_w4a16")
    x, router = normal(6, 128, seed=3).to(BF16), torch.rand(6, 2) + 0.5
    ids = torch.tensor([[0, 7], [-1, 2], [5, 5], [1, 4], [3, -9], [2, 10**12]])
    out = run(x, w13, w2, router, ids)
    assert error(out, expected(x, exact13, exact2, router, ids)) < TOLERANCE
    assert (out[2] == 0).all()

    expert_map = torch.tensor([2, -1, 0, 1, 99, -5])  # 99 is no expert here
    local = torch.tensor([[2, -1], [-1, 0], [-1, -1], [-1, -1], [1, -1], [0, -1]])
    out = run(x, w13, w2, router, ids, expert_map=expert_map)
    assert error(out, expected(x, exact13, exact2, router, local)) < TOLERANCE
    assert len(native) == 2


def test_no_pair_has_an_expert(native):
    w13, w2, *_ = weights(3, 128, 128, "int8_w8a16:channel")
    x, ids = normal(4, 128, seed=3).to(BF16), torch.full((4, 2), -1)
    assert (run(x, w13, w2, torch.ones(4, 2), ids) == 0).all() and native


def test_nan_stays_with_its_token(native):
    w13, w2, *_ = weights(3, 128, 128, "fp8_w8a16:block")
    x, (ids, router) = normal(6, 128, seed=3).to(BF16), routing(6, 3, 2)
    clean = run(x, w13, w2, router, ids)
    x[2, 5] = math.nan
    out = run(x, w13, w2, router, ids)
    others = torch.arange(6) != 2
    assert out[2].isnan().all() and torch.equal(out[others], clean[others])
    assert len(native) == 2


def test_nan_of_a_weight_shows(native):
    w13, w2, *_ = weights(2, 128, 128, "fp8_w8a16:channel")
    w2.qdata.view(torch.uint8)[1, 17, 3] = 0x7F
    x, ids = normal(2, 128, seed=3).to(BF16), torch.tensor([[0], [1]])
    out = run(x, w13, w2, torch.ones(2, 1), ids)
    assert out[1, 17].isnan() and out.isnan().sum() == 1 and native


@pytest.mark.parametrize(
    "scheme",
    [
        *("int4_w4a16:g32:zp", "mxfp4_w4a16", "nvfp4_w4a16", "fp8_w8a16:block", "int8_w8a16"),
        *("nf4_w4a16:g32", "fp4_w4a16:g64", "iq4_w4a16:g32"),
        *("int8_w8a16:g32", "int5_w5a16:g32", "int6_w6a16:g16"),
    ],
)
def test_every_code(native, scheme):
    """Row r of w2 holds code r in column r % 128 and zeros elsewhere, so that its output is that
    code's alone."""
    w13 = moe_ops.quantize((normal(1, 256, 256, seed=7) / 16).to(BF16), scheme)
    w2 = moe_ops.quantize(normal(1, 256, 128, seed=9).to(BF16), scheme)
    zero_points = getattr(w2, "zero_point", None)
    fmt = schemes.get_scheme(scheme).quantized_weight.format
    codes = torch.full((256, 128), 0 if fmt.is_float else int(fmt.middle), dtype=torch.uint8)
    if zero_points is not None:
        codes = zero_points[0].repeat_interleave(32, 1)
    rows = torch.arange(256)
    codes[rows, rows % 128] = (rows % 2**fmt.bits).to(torch.uint8)
    if fmt.name == "e4m3":
        codes = torch.where((codes & 0x7F) == 0x7F, 0, codes)  # without NaN
    w2.qdata.view(torch.uint8)[0] = elements.pack(codes, fmt)
    x, ids = normal(1, 256, seed=3).to(BF16), torch.zeros(1, 1, dtype=torch.int64)
    out = run(x, w13, w2, torch.ones(1, 1), ids)[0].double()
    exact = [w.dequantize(torch.float32).double() for w in (w13, w2)]
    reference = expected(x, *exact, torch.ones(1, 1), ids)[0]
    # h and the output are rounded; h may be whole numbers under its largest one
    tiny = 2.0**-16 * reference.abs().amax()
    assert ((out - reference).abs() <= 2.0**-6 * reference.abs() + tiny).all()
    assert (reference != 0).sum() > 200
    assert native


@pytest.mark.parametrize("code", [0x80, 0xB0, 0x7F, 0x01], ids=hex)
def test_any_code_of_a_block_scale(native, code):
    """A negative scale of nvfp4, a zero with a sign, NaN, and the least number."""
    w13, w2, *_ = weights(1, 128, 128, "nvfp4_w4a16")
    w2.scale.view(torch.uint8)[0, 5, 3] = code
    x, ids = normal(1, 128, seed=3).to(BF16), torch.zeros(1, 1, dtype=torch.int64)
    exact = [w.dequantize(torch.float32).double() for w in (w13, w2)]
    reference, out = (
        expected(x, *exact, torch.ones(1, 1), ids),
        run(x, w13, w2, torch.ones(1, 1), ids),
    )
    assert torch.equal(out.isnan(), reference.isnan())
    assert error(out.nan_to_num(), reference.nan_to_num()) < TOLERANCE
    assert native


def test_nan_of_an_exponent_shows(native):
    w13, w2, *_ = weights(1, 128, 128, "mxfp4_w4a16")
    w2.scale[0, 7, 1] = 255
    x, ids = normal(1, 128, seed=3).to(BF16), torch.zeros(1, 1, dtype=torch.int64)
    out = run(x, w13, w2, torch.ones(1, 1), ids)
    assert out[0, 7].isnan() and out.isnan().sum() == 1 and native


@pytest.mark.parametrize(
    "desc",
    [
        schemes.QuantDesc("e4m3", schemes.GroupShape(128, -1)),
        schemes.QuantDesc("int8", schemes.GroupShape(64, -1), scale_dtype=None),
        schemes.QuantDesc(
            *("e2m1", schemes.GroupShape(1, 64)),
            scale_dtype=torch.float8_e8m0fnu,
            scale_rule="ocp",
        ),
        schemes.QuantDesc(
            *("e2m1", schemes.GroupShape(1, 32)),
            scale_dtype=torch.float8_e4m3fn,
            global_scale=True,
        ),
        schemes.QuantDesc(
            *("int4", schemes.GroupShape(1, 32)),
            scale_dtype=torch.float8_e8m0fnu,
            scale_rule="ocp",
        ),
        schemes.QuantDesc(
            *("int4", schemes.GroupShape(1, 32)),
            scale_dtype=torch.float8_e4m3fn,
            global_scale=True,
        ),
    ],
    ids=str,
)
def test_other_schemes_of_ones_own_run_as_before(native, desc):
    scheme = schemes.QuantScheme("mine", desc, None)
    w13, w2, exact13, exact2 = weights(2, 128, 128, scheme)
    x, (ids, router) = normal(3, 128, seed=3).to(BF16), routing(3, 2, 1)
    out = run(x, w13, w2, router, ids)
    assert error(out, expected(x, exact13, exact2, router, ids)) < TOLERANCE
    assert not native


def test_a_default_device_changes_nothing(native):
    w13, w2, exact13, exact2 = weights(2, 128, 128, "mxfp4_w4a16")
    x, (ids, router) = normal(3, 128, seed=3).to(BF16), routing(3, 2, 1)
    with torch.device("meta"):
        out = run(x, w13, w2, router, ids)
    assert error(out, expected(x, exact13, exact2, router, ids)) < TOLERANCE
    assert native


@pytest.mark.parametrize(("K", "I"), [(128, 0), (0, 128)])
def test_no_columns(K, I):
    w13, w2 = torch.randn(3, 2 * I, K).to(BF16), torch.randn(3, K, I).to(BF16)
    x, ids = torch.randn(2, K).to(BF16), torch.tensor([[0], [2]])
    assert (run(x, w13, w2, torch.ones(2, 1), ids) == 0).all()


def test_large_numbers_of_an_expert_map_do_not_wrap(native):
    w13, w2, *_ = weights(3, 128, 128, "int8_w8a16:channel")
    x, ids = normal(5, 128, seed=3).to(BF16), torch.arange(5)[:, None]
    expert_map = torch.tensor([-(2**63), 2**32 + 1, 2**32, 2, -(2**32)])
    out = run(x, w13, w2, torch.ones(5, 1), ids, expert_map=expert_map)
    assert (out[[0, 1, 2, 4]] == 0).all() and (out[3] != 0).any() and native


def test_sums_of_many_columns(native):
    """Those of bytes would not fit 32 bits."""
    K = 135168  # 127 * 127 * K > 2 ** 31
    w13 = moe_ops.quantize(torch.full((1, 64, K), 2**-17, dtype=BF16), "int8_w8a16:channel")
    w2 = moe_ops.quantize(torch.full((1, K, 32), 2**-5, dtype=BF16), "int8_w8a16:channel")
    x, ids = torch.ones(8, K, dtype=BF16), torch.zeros(8, 1, dtype=torch.int64)
    out, gate = run(x, w13, w2, torch.ones(8, 1), ids), K * 2**-17
    expected = torch.full_like(out, gate**2 / (1 + math.exp(-gate)), dtype=torch.float64)
    assert error(out, expected) < TOLERANCE and native


def test_gate_far_below_zero_gives_nothing(native):
    w13, w2, *_ = weights(1, 128, 128, "")
    w13[0, :128], w13[0, 128:] = -1, 1
    x = torch.zeros(1, 128, dtype=BF16)
    for size in (1e2, 1e4, 1e30):
        x[0, 0] = size
        out = run(x, w13, w2, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64))
        assert (out == 0).all(), size
    assert native


def test_views_of_tokens_and_weights(native):
    w13, w2, exact13, exact2 = weights(5, 128, 128, "int4_w4a16:g64")
    wide = normal(8, 300, seed=3).to(BF16)  # as many as `run` copies none of
    x, (ids, router) = wide[:, 7:135], routing(8, 2, 2)
    out = run(x, w13[2:4], w2[2:4], router, ids.to(torch.int32))
    assert error(out, expected(x, exact13[2:4], exact2[2:4], router, ids)) < TOLERANCE
    assert native


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"K": 80},
        {"activation": "gelu"},
        {"scheme": "fp8_tensor"},
        {"scheme": "int4_w4a16:channel"},
    ],
    ids=str,
)
def test_the_rest_runs_as_before(native, change):
    K, scheme = change.get("K", 128), change.get("scheme", "int8_w8a16:channel")
    activation, dtype = change.get("activation", "silu"), change.get("dtype", BF16)
    w13, w2, exact13, exact2 = weights(3, K, 128, scheme)
    x, (ids, router) = normal(4, K, seed=3).to(dtype), routing(4, 3, 2)
    out = run(x, w13, w2, router, ids, activation=activation)
    loose = 0.06 if scheme == "fp8_tensor" else TOLERANCE  # its activations have three bits
    assert error(out, expected(x, exact13, exact2, router, ids, activation)) < loose
    assert not native
    assert "emulated" in str(moe_ops.explain(x, w13, w2, ids, activation=activation))


@pytest.mark.parametrize("scheme", ["", "int4_w4a16:g64:zp", "nvfp4_w4a16", "fp8_block"])
def test_calls_like_one_before_go_past_the_launcher(native, scheme):
    """Whatever differs in values, addresses, rows and their strides; with the same bits."""
    layers = [weights(5, 128, 128, scheme, seed) for seed in (0, 2)]
    wide = normal(7, 300, seed=4).to(BF16)
    ids, router = [t.repeat(1, 2) for t in routing(7, 5, 2)]
    calls = [
        (wide[:M, at : at + 128], *layer_[:2], router[:M, :2], ids[:M, :2])
        for M, at, layer_ in ((2, 7, layers[0]), (1, 100, layers[1]), (7, 0, layers[0]))
    ]
    calls.append((*[t.contiguous() for t in (calls[2][0],)], *calls[2][1:]))
    long_way = [moe_ops.fused_experts(*call) for call in calls]
    assert len(native) == 4
    moe_ops.planning.bind.forget()
    torch.use_deterministic_algorithms(False)
    for call, want in zip(calls, long_way, strict=True):
        assert torch.equal(moe_ops.fused_experts(*call), want)
    assert len(native) == 5
    x, w13, w2, router, ids = calls[2]
    exact = layers[0][2:]
    for of_router in (torch.float16, BF16, torch.float64):  # the last one is converted each time
        for of_ids in (torch.int32, torch.int64):
            given = router.to(of_router), ids.to(of_ids)
            for _ in range(2):
                out = moe_ops.fused_experts(x, w13, w2, *given)
            tolerance = 0.08 if scheme == "fp8_block" else TOLERANCE
            assert error(out, expected(x, *exact, given[0], ids)) < tolerance
    assert len(native) == 5 + 4 + 4
    with pytest.raises(ValueError, match="topk_ids must have one row per row of hidden_states"):
        moe_ops.fused_experts(x, w13, w2, router, ids[:3])
    w2.copy_(layers[1][1])
    other = moe_ops.fused_experts(x, w13, w2, router, ids)
    assert torch.equal(other, moe_ops.fused_experts(x, w13, layers[1][1], router, ids))
    assert not torch.equal(other, long_way[2]) and len(native) == 13


def test_ids_of_other_widths_are_not_read(native):
    """An op that is called by itself may get them."""
    w13, w2, *_ = weights(2, 64, 64, "int8_w8a16:channel")
    ids, router = routing(3, 2, 2)
    moe_ops.fused_experts(normal(3, 64, seed=4).to(BF16), w13, w2, router, ids)
    (a,) = native
    assert layer.form_of(a) is not None
    for dtype in (torch.uint8, torch.int16):
        assert layer.form_of(a._replace(topk_ids=ids.to(dtype))) is None


def test_few_rows_after_many_go_past_the_launcher(native, monkeypatch):
    """bf16 weights, which many rows meet elsewhere."""
    w13, w2, *exact = weights(2, 64, 64, "")
    x, (ids, router) = normal(128, 64, seed=4).to(BF16), routing(128, 2, 2)
    torch.use_deterministic_algorithms(False)
    moe_ops.planning.bind.forget()
    for M in (128, 2, 128):
        out = moe_ops.fused_experts(x[:M], w13, w2, router[:M], ids[:M])
        assert error(out, expected(x[:M], *exact, router[:M], ids[:M])) < 2 * TOLERANCE
    launched, launch = [], layer._launch
    monkeypatch.setattr(layer, "_launch", lambda *a: (launched.append(a), launch(*a)))
    moe_ops.fused_experts(x[:2], w13, w2, router[:2], ids[:2])
    assert launched and not native


def test_no_copy_of_a_weight_is_made(native):
    w13, w2, *_ = weights(16, 512, 512, "int4_w4a16:g128")
    x, (ids, router) = normal(2, 512, seed=3).to(BF16), routing(2, 16, 2)
    scratch = []
    empty = torch.empty

    def spy(*args, **kwargs):
        found = empty(*args, **kwargs)
        scratch.append(found.nbytes)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.torch, "empty", spy)
        moe_ops.fused_experts(x, w13, w2, router, ids, backend="torch")
    # tokens, pairs of h, sums: some 30 KB, where a bf16 copy of one expert's w13 is 1 MB
    assert native and max(scratch) < 100_000
