"""The kernels of one token (kernels/gemm/gemv.py) against fp64: interpreted on a CPU, compiled on
a GPU."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch

from moe_ops.choose.plain import choose_gemv
from moe_ops.choose.table import LayerSizes, override
from moe_ops.kernels import launch
from moe_ops.kernels.configs import GEMV, GemmConfig, LayerConfig
from moe_ops.kernels.launch import INTERPRETED, gpu
from tests.support import cases
from tests.support.cases import BF16, FP32, Case, assert_matches, tolerance
from tests.support.places import everywhere

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from moe_ops.kernels.gemm import gemv

IDS = torch.tensor([[2, 0]])
SIZES = {"M": 1, "E": 4, "top_k": 2, "K": 144, "I": 80, "ids": IDS}
SCHEMES = ["", "fp8_block"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The kernels that a test launched."""
    found: list[str] = []
    run = launch.run

    def spy(launches, *rest):
        found.extend(one.kernel.name for one in launches)
        return run(launches, *rest)

    monkeypatch.setattr(launch, "run", spy)
    return found


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"bias": True, "expert_map": True, "top_k": 3, "ids": torch.tensor([[1, 4, 2]])},
        {"activation": "swigluoai", "bias": True},
        {"activation": "relu2_no_mul", "bias": True},
        {"on_input": True, "top_k": 1, "ids": IDS[:, :1]},
        {"top_k": 3, "ids": torch.tensor([[-1, 2, 9]]), "bias": True},  # two experts are elsewhere
        {
            "top_k": 3,
            "ids": torch.tensor([[2, 2, 0]]),
            "ids_dtype": torch.int64,
            "weights_dtype": BF16,
        },
    ],
    ids=str,
)
def test_values(where, scheme, how, kernels):
    Case(*where, scheme, **{**SIZES, **how}).check("triton")
    assert kernels == ["moe_ops_gemv1", "moe_ops_gemv2"]


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_expert_is_here(where, scheme, kernels):
    case = Case(
        *where,
        scheme,
        **{**SIZES, "top_k": 3, "ids": torch.tensor([[-1, 4, 2**31 - 1]])},
        bias=True,
    )
    assert (case.run("triton") == 0).all()
    assert kernels == ["moe_ops_gemv1", "moe_ops_gemv2"]


def layer_config(gemm1: GemmConfig, gemm2: GemmConfig, scheme: str) -> LayerConfig:
    return LayerConfig(gemm1, gemm2, 1, 64, GEMV, direct=True, h_in_fp32=bool(scheme))


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "first, second",
    [
        (GemmConfig(1, 256, 1, 2), GemmConfig(16, 128, 1, 4)),
        (GemmConfig(8, 128, 3, 4), GemmConfig(2, 128, 3, 8)),
    ],
    ids=str,
)
def test_every_kind_of_tile(where, scheme, first, second):
    """One step and several, the last one partly past the end, with and without stages."""
    case = Case(*where, scheme, **SIZES)
    with override(layer_config(first, second, scheme)):
        case.check("triton")


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("I", [1168, 2064])
def test_long_sums_of_the_second_product(where, scheme, I):
    """With configs that the sizes chose: one step of up to 2048 columns, and several. GEMM1 has
    many rows for the interpreter.
    """
    case = Case(*where, scheme, **{**SIZES, "K": 48, "I": I, "top_k": 1, "ids": IDS[:, :1]})
    layer = LayerSizes(case.args[4].numel(), 3, 48, I, gpu(-1))
    base = choose_gemv(layer, bool(scheme), where[1].itemsize)
    with override(base._replace(gemm1=GemmConfig(16, 128, 1, 4))):
        case.check("triton")


def poisoned(w, expert: int) -> None:
    """NaN in all of an expert's weights, or in their scales."""
    (w.scale if getattr(w, "scheme", "") else w)[expert] = math.nan


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nan_stays_where_it_is(where, scheme):
    """NaN of experts that nobody chose, the first among them, of the routing weight of one
    elsewhere, and in x."""
    case = Case(*where, scheme, **{**SIZES, "top_k": 3, "ids": torch.tensor([[2, -1, 3]])})
    expected = case.reference()
    case.args[3][0, 1] = math.nan
    for w, expert in itertools.product(case.args[1:3], (0, 1)):
        poisoned(w, expert)
    assert_matches(case.run("triton"), expected, tolerance(where[1], scheme, where[0]))
    case.args[0][0, 3] = math.nan
    assert case.run("triton").isnan().all()


def amid_nan(t: torch.Tensor) -> torch.Tensor:
    """The same values between NaN, rows 16 bytes further apart."""
    E, rows, columns = t.shape
    wide = t.new_empty(E + 2, rows + 2, columns + 2 * (16 // t.element_size()))
    wide.view(torch.uint8).fill_(255)
    part = wide[1:-1, 1:-1, 16 // t.element_size() : -(16 // t.element_size())]
    return part.copy_(t)


@everywhere
@pytest.mark.parametrize("scheme", SCHEMES)
def test_strides(where, scheme, kernels):
    """A token whose columns lie apart, and weights and scales that are parts of others; three
    groups, in a step of four."""
    case = Case(*where, scheme, **{**SIZES, "K": 272, "I": 272})
    x, w13, w2, weights, ids = case.args
    wide = cases.garbage(x.new_empty(1, 3 * x.shape[1]))
    wide[:, ::3] = x
    if scheme:
        w13, w2 = [w._replace(qdata=amid_nan(w.qdata), scale=amid_nan(w.scale)) for w in (w13, w2)]
    else:
        w13, w2 = amid_nan(w13), amid_nan(w2)
    case.args = [wide[:, ::3], w13, w2, weights, ids]
    gemm = GemmConfig(8, 512, 1, 4)
    with override(layer_config(gemm, gemm, scheme)):
        case.check("triton")
    assert kernels == ["moe_ops_gemv1", "moe_ops_gemv2"]


def off_by(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values so many elements behind where an allocation starts."""
    memory = t.new_empty(t.numel() + elements)
    return memory[elements:].view(t.shape).copy_(t)


def steps_of(t: torch.Tensor, columns: int) -> torch.Tensor:
    """The same values in rows so many columns longer."""
    return t.new_empty(*t.shape[:2], t.shape[2] + columns)[..., : t.shape[2]].copy_(t)


@pytest.mark.parametrize("spoil", [lambda t: off_by(t, 1), lambda t: steps_of(t, 1)])
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_out_of_16_byte_step_take_other_kernels(scheme, which, spoil, kernels):
    case = Case("cpu", FP32, scheme, **SIZES)
    w = case.args[which]
    case.args[which] = w._replace(qdata=spoil(w.qdata)) if scheme else spoil(w)
    case.check("triton")
    assert not any("gemv" in kernel for kernel in kernels)


@pytest.mark.parametrize(
    "sizes, scheme",
    [
        ({"K": 136}, ""),
        ({"I": 72}, ""),
        ({}, "fp8_channel"),
        ({"M": 2, "ids": None}, ""),
        (
            {"E": 1, "top_k": 3, "ids": torch.zeros(1, 3).int()},
            "fp8_block",
        ),  # no room for h in fp32
    ],
)
def test_other_layers_take_other_kernels(sizes, scheme, kernels):
    Case("cpu", FP32, scheme, **{**SIZES, **sizes}).check("triton")
    assert not any("gemv" in kernel for kernel in kernels)


# --- the assembly of e4m3 products, which no interpreter runs ------------------------------------


def eight_products(words: list[int], x: list[torch.Tensor]) -> float:
    """What the assembly of `eight_products` computes of two words of e4m3 and four pairs of
    fp16."""
    source = Path(gemv.__file__).read_text()
    (code,) = re.findall(r'def eight_products.*?"""\{(.*?)\}"""', source, re.S)

    def e4m3_pair(bits):
        return torch.tensor([bits & 255, bits >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)

    does = {
        "cvt.rn.f16x2.e4m3x2": lambda a: e4m3_pair(a).half(),
        "mul.rn.f16x2": lambda a, b: (a.double() * b.double()).half(),
        "fma.rn.f16x2": lambda a, b, c: (a.double() * b.double() + c.double()).half(),
        "cvt.f32.f16": lambda a: a.float(),
        "add.f32": lambda a, b: a + b,
    }
    values: dict = dict(zip(("$1", "$2", "$3", "$4", "$5", "$6"), (*words, *x), strict=True))
    for statement in filter(None, map(str.strip, code.split(";"))):
        if statement.startswith(".reg"):
            continue
        if found := re.fullmatch(r"mov\.b32 \{(\w+), (\w+)\}, (\S+)", statement):
            low, high, whole = found.groups()
            whole = values[whole]
            parts = (whole & 0xFFFF, whole >> 16) if isinstance(whole, int) else tuple(whole)
            values[low], values[high] = parts
        else:
            operation, operands = statement.split(None, 1)
            target, *sources = operands.replace(" ", "").split(",")
            values[target] = does[operation](*[values[s] for s in sources])
    return float(values["$0"])


def test_e4m3_products_in_fp16():
    """Each of eight places, then sums of all: products are exact, sums of four round to 11
    bits."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 0x7F, (64, 2, 8), generator=generator).to(torch.uint8)
    codes[:8, 0] = torch.diag(torch.full((8,), 0x3A, dtype=torch.uint8))
    codes |= torch.randint(0, 2, codes.shape, generator=generator).to(torch.uint8) << 7
    for w, x in codes:
        words = [int.from_bytes(bytes(w[i : i + 4].tolist()), "little") for i in (0, 4)]
        w, x = w.view(torch.float8_e4m3fn).double(), x.view(torch.float8_e4m3fn).double()
        pairs = list((x / 64).half().view(4, 2))
        assert torch.equal(torch.cat(pairs).double() * 64, x)
        products = w * x / 64
        found = eight_products(words, pairs)
        assert abs(found - products.sum()) <= 4 * 2.0**-11 * products.abs().sum()


@triton.jit
def store_packed(out_ptr, x_ptr):
    parts = gemv.pack_fp16x2(tl.load(x_ptr + tl.arange(0, 32)), 32)
    for i in tl.static_range(4):
        tl.store(out_ptr + i * 4 + tl.arange(0, 4), parts[i])


@pytest.mark.skipif(not INTERPRETED, reason="needs triton's interpreter")
def test_pack_fp16x2():
    x = torch.arange(32) - 15.0
    out = torch.empty(4, 4, dtype=torch.int32)
    store_packed[(1,)](out, x)
    assert torch.equal(out.T.contiguous().view(torch.float16).flatten() * 64, x.half())
