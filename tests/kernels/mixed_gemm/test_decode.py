"""The inline assembly of the mixed GEMM, run on numbers: neither Triton's interpreter nor a
CPU runs it.

Each function must be elementwise: what comes of byte i is element i, whatever thread and row it is
from.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

import moe_ops
from tests.support import oracle

KERNELS = Path(moe_ops.__file__).parent / "kernels"
MASK = 0xFFFFFFFF


def halves(register: int) -> list[float]:
    """The two bf16 numbers in a register, the lower one first."""
    bits = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32) << 16
    return bits.view(torch.float32).tolist()


def fma(*registers: int) -> int:
    result = 0
    for i, (a, b, c) in enumerate(zip(*map(halves, registers), strict=True)):
        rounded = torch.tensor(a * b + c, dtype=torch.float64).float().to(torch.bfloat16)
        result |= (int(rounded.view(torch.int16)) & 0xFFFF) << 16 * i
    return result


def single(register: int) -> float:
    """The fp32 number in a register."""
    return float(torch.tensor([register], dtype=torch.uint32).view(torch.float32))


def register(number: float) -> int:
    """The bits of a number, rounded to fp32."""
    return int(torch.tensor([number]).view(torch.uint32))


def fma_f32(a: int, b: int, c: int) -> int:
    return register(single(a) * single(b) + single(c))


def to_bf16x2(upper: int, lower: int) -> int:
    numbers = torch.tensor([single(lower), single(upper)]).to(torch.bfloat16)
    return int(numbers.view(torch.uint32))


def prmt(a: int, b: int, selector: int) -> int:
    """The highest bit of a selector asks for the sign of a byte, eight times."""
    source = (a | b << 32).to_bytes(8, "little")
    chosen = [(source[selector >> 4 * i & 7], selector >> 4 * i & 8) for i in range(4)]
    return int.from_bytes(bytes(255 * (b >> 7) if sign else b for b, sign in chosen), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    assert table in (0xEA, 0xE4)
    return a & b | c if table == 0xEA else a & c | b & ~c


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "shf.l.wrap.b32": lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": fma,
    "fma.rn.f32": fma_f32,
    "cvt.rn.bf16x2.f32": to_bf16x2,
}


def run_registers(name: str, *inputs: int, source: str, **memory: dict[int, int]) -> list[int]:
    """What the assembly in function `name` writes, for one register of each input."""
    body = (KERNELS / source).read_text().split(f"def {name}(")[1].split(".jit\n")[0]
    found = re.search(r'"""(\{.*?\})""",\s*"(.*?)"', body, re.S)
    return execute(*found.groups(), *inputs, **memory)


def execute(
    assembly: str, constraints: str, *inputs: int, memory: dict[int, int] | None = None
) -> list[int]:
    """What assembly writes, for one register of each input, with words of memory by address."""
    code, outputs = assembly.strip("{}"), constraints.count("=")
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for statement in filter(None, map(str.strip, code.split(";"))):
        if not statement.startswith(".reg"):
            operation, operands = statement.split(None, 1)
            target, *sources = [operand.strip() for operand in operands.split(",")]
            if operation == "st.shared.b32":
                memory[sum(map(value, target.strip("[]").split("+")))] = value(*sources)
            elif operation == "ld.shared.b32":
                registers[target] = memory[value(sources[0].strip("[]"))]
            else:
                registers[target] = INSTRUCTIONS[operation](*map(value, sources)) & MASK
    return [registers[f"${i}"] for i in range(outputs)]


def run(name: str, *inputs: int, source: str = "mixed_gemm/decode.py") -> list[float]:
    """The numbers that the assembly in function `name` writes, for one register of each input."""
    return [n for r in run_registers(name, *inputs, source=source) for n in halves(r)]


def words(count: int = 200) -> list[int]:
    """Registers in which every byte occurs in every place."""
    everything = [b * 0x01010101 for b in range(256)]
    return everything + [random.Random(i).getrandbits(32) for i in range(count)]


def nibbles(word: int) -> list[int]:
    data = word.to_bytes(4, "little")
    return [b & 15 for b in data] + [b >> 4 for b in data]


E2M1 = oracle.code_values("e2m1")
E4M3 = oracle.code_values("e4m3")
SOURCE = (KERNELS / "mixed_gemm/decode.py").read_text()
ABOVE = int(re.search(r"ABOVE = tl.constexpr\((\w+)\)", SOURCE)[1], 16)


def test_int4():
    for word in words():
        assert run("int4_pair", word) == [n - 8 for n in nibbles(word)]


@pytest.mark.parametrize("zero", range(16))
def test_int4_with_zero_point(zero):
    offsets = (0xC300 + zero) * 0x00010001  # -128 - zero, twice
    for word in words(64)[zero % 7 :: 7]:
        found = run("int4_pair_zero", word, offsets, offsets)
        assert found == [n - zero for n in nibbles(word)]


@pytest.mark.parametrize("high, run", [(high, run) for high in (1, 2) for run in range(4 // high)])
def test_planes(high, run):
    """Low bits of a run beside bytes that hold the high bits of other runs, too."""
    pytest.importorskip("triton")
    from moe_ops.kernels.mixed_gemm.decode import plane_assembly

    def codes(low: int, above: int) -> list[int]:
        places = (2 * run * high, (2 * run + 1) * high)
        found = [above >> place + 8 * i & 2**high - 1 for place in places for i in range(4)]
        return [n + 16 * h for n, h in zip(nibbles(low), found, strict=True)]

    for middle in (0, 8 << high):
        assembly = plane_assembly(high, run, middle)
        for low, above in zip(words(), reversed(words()), strict=True):
            registers = execute(assembly, "=&r,=&r,=&r,=&r,r,r", low, above)
            found = [n for register in registers for n in halves(register)]
            assert found == [code - middle for code in codes(low, above)]


def test_int4_with_minimum():
    """Rounded once, but for a rounding of 2^-12 of the scale, where neighbours have other scales
    and minima, which bf16 does not hold.
    """
    g = torch.Generator().manual_seed(0)
    for word in words(64)[::3]:
        s, m = torch.rand(4, generator=g) + 0.5, torch.randn(4, generator=g) * 8
        found = run("int4_pair_minimum", word, *minimum_operands(s, m))
        assert_rounded_once(found, nibbles(word), s.repeat(2), m.repeat(2))


def minimum_operands(s: torch.Tensor, m: torch.Tensor) -> list[int]:
    """Registers of scales, and of what stands for minima beside them."""
    return [register(float(n)) for t in (s, m - 128 * s, m - 2048 * s) for n in t]


def assert_rounded_once(found: list[float], codes: list[int], s, m) -> None:
    """Numbers are codes times s plus m, within a rounding to bf16 and 2^-12 of s."""
    want = torch.tensor(codes) * s.double() + m.double()
    half_a_step = 2.0 ** (want.abs().log2().floor() - 8)
    assert ((torch.tensor(found) - want).abs() <= half_a_step + s * 2.0**-12).all()


def scale_above(code: int) -> int:
    """The bf16 bits of `scale_above` of an e4m3 code, as an integer."""
    bits = int(torch.tensor(E4M3[code]).to(torch.bfloat16).view(torch.int16))
    bits |= (ABOVE >> (bits >> 2 & 28)) & 15
    scale = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16) * 64
    return int(scale.view(torch.int16)) & 0xFFFF


def test_int4_rounded_to_e4m3():
    """With every scale, also below e4m3's least normal number, where neighbours in a register may
    have other scales.
    """
    least, most = E4M3.index(0.0), E4M3.index(56.0)
    for code in [*range(least, most + 1), *range(128 + least, 128 + most + 1)]:
        own = [code, most, (code * 7 + 3) % most, code]
        halves_of = [scale_above(c) for c in own]
        pairs = [halves_of[0] | halves_of[1] << 16, halves_of[2] | halves_of[3] << 16]
        for word in (0x76543210, 0xFEDCBA98, 0x89ABCDEF, 0x01234567):
            found = run("int4_pair_e4m3", word, *pairs)
            products = [(n - 8) * E4M3[c] for n, c in zip(nibbles(word), own * 2, strict=True)]
            assert found == oracle.e4m3(torch.tensor(products).double()).tolist()


def test_other_additions_to_a_scale_round_wrong():
    """The numbers that ABOVE may hold are those that its comment lists."""
    for mantissa, right in enumerate([(0, 8), (5, 9), (4, 5), (7, 15), (0, 8), (5, 10), (6, 9)]):
        c = torch.arange(1, 9).double()
        want = oracle.e4m3(c * (8 + mantissa))
        for more in range(16):
            rounded = (c * (8 + mantissa + more / 16)).to(torch.bfloat16)
            cut = (rounded.view(torch.int16) & -16).view(torch.bfloat16)
            assert torch.equal(cut.double(), want) == (right[0] <= more <= right[1])


@pytest.mark.parametrize("exponent", [-93, -1, 0, 32])
def test_e2m1_with_e8m0_scales(exponent):
    """Every byte has a scale of its own: which bytes of which groups are together is the layout's
    choice.
    """
    first = (127 + exponent) * 0x00800080 + 0x2F002F00  # as `scale_bf16x2` has it
    assert halves(first) == [2.0 ** (94 + exponent)] * 2
    second = first + 0x00800080
    mixed = first & 0xFFFF | second & 0xFFFF0000
    for scales in ((first, first), (first, second), (mixed, second), (second, mixed)):
        factors = [2.0**-126 * scale for register in scales for scale in halves(register)]
        for word in words(50):
            found = run("e2m1_pair", word, *scales)
            expected = [E2M1[n] * f for n, f in zip(nibbles(word), factors * 2, strict=True)]
            assert found == expected


@pytest.mark.slow
def test_e2m1_with_e4m3_scales():
    for code in range(127):  # positive numbers: those a scale can be
        scale = run("scale_bf16x2", code * 0x00100010)
        assert scale == [E4M3[code] * 2.0**118] * 2
        (bits,) = torch.tensor(scale[:1]).to(torch.bfloat16).view(torch.int16).tolist()
        for word in words(4)[code % 16 :: 16]:
            found = run("e2m1_pair", word, bits * 0x00010001, bits * 0x00010001)
            assert found == [E2M1[n] * E4M3[code] * 2.0**-8 for n in nibbles(word)]


def test_int8():
    for word in words():
        expected = [b - 256 * (b > 127) for b in word.to_bytes(4, "little")]
        assert run("int8_value", word) == expected


def test_e4m3():
    for word in words():
        expected = [E4M3[b] for b in word.to_bytes(4, "little")]
        pairs = zip(run("e4m3_value", word), expected, strict=True)
        assert all(found == value or value != value for found, value in pairs)
