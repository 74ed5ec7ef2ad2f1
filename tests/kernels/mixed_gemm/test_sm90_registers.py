"""The order and values of decoded weights in registers (kernels/mixed_gemm/sm90_registers.py): its
own steps, on numbers in place of a GPU's registers."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.kernels.mixed_gemm.test_decode import MASK, execute
from tests.support.cases import BF16

pytest.importorskip("triton.experimental.gluon")

from moe_ops.kernels.mixed_gemm import levels, sm90_registers

WEIGHT = torch.randint(0, 16, (64, 128), generator=torch.Generator().manual_seed(0))


class Block:
    """A tensor with the methods of Gluon's, whose data are integers as wide as they need be."""

    def __init__(self, data: torch.Tensor):
        self.data, self.shape = data, tuple(data.shape)

    def reshape(self, shape):
        return Block(self.data.reshape(shape))

    def permute(self, order):
        return Block(self.data.permute(order))

    def broadcast_to(self, shape):
        return Block(self.data.expand(shape))

    def split(self):
        return Block(self.data[..., 0]), Block(self.data[..., 1])

    def load(self, _layout):
        return self

    def to(self, dtype, bitcast=False):
        data = self.data
        if dtype == torch.int16:
            data = (data & 0xFFFF) - (data & 0x8000) * 2
        return Block(data.to(torch.int16).view(BF16).double() if bitcast else data)

    def __rshift__(self, bits):
        return Block(self.data >> bits)

    def __lshift__(self, bits):
        return Block(self.data << bits & MASK)

    def __and__(self, bits):
        return Block(self.data & bits)

    def __or__(self, other):
        return Block(self.data | other.data)

    def __mul__(self, other):
        return Block(self.data * getattr(other, "value", other))

    def __add__(self, other):
        return Block(self.data + getattr(other, "value", other) & MASK)


def in_bf16(words: torch.Tensor) -> torch.Tensor:
    """The numbers of both halves of words, (.., 2)."""
    halves = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1)
    return (halves - (halves & 0x8000) * 2).to(torch.int16).view(BF16).double()


def in_words(numbers: torch.Tensor) -> torch.Tensor:
    """`in_bf16` of numbers, which are rounded, the other way round."""
    halves = numbers.to(BF16).view(torch.int16).long() & 0xFFFF
    return halves[..., 0] | halves[..., 1] << 16


def fma_words(a, b, c):
    return Block(in_words(in_bf16(a.data) * in_bf16(b.data) + in_bf16(c.data)))


def assembly(text, constraints, inputs, **_):
    inputs = torch.broadcast_tensors(*[one.data for one in inputs])
    rows = zip(*[one.flatten().tolist() for one in inputs], strict=True)
    found = torch.tensor(
        [execute(getattr(text, "value", text), constraints, *row) for row in rows]
    )
    return tuple(Block(one.reshape(inputs[0].shape)) for one in found.T)


def words_of_levels(name: str):
    """Stands in for the look-ups, which have tests of their own."""

    def look_up(words, _tables, whole, PURE):
        bits = torch.tensor(levels.TABLES.value[name].bits).long() & 0xFFFF
        codes = torch.stack([words.data >> 4 * i & 15 for i in range(8)], -1)
        assert not whole
        return [Block(bits[codes[..., i]] | bits[codes[..., i + 1]] << 16) for i in (0, 2, 4, 6)]

    return look_up


def decoded(
    name: str, scale: torch.Tensor, zero: torch.Tensor | None, place: int | None
) -> torch.Tensor:
    """(128, 64): what the tensor cores multiply, in the order of y's columns. `place`: where a
    table of pairs is, if there is one."""
    groups = scale.shape[1]
    gl = SimpleNamespace(
        int32=torch.int64,
        int16=torch.int16,
        bfloat16=BF16,
        float32=torch.float32,
        int8=torch.int8,
        join=lambda a, b: Block(torch.stack([a.data, b.data], -1)),
        expand_dims=lambda t, axis: Block(t.data.unsqueeze(axis)),
        convert_layout=lambda t, *_, **__: t,
        static_assert=lambda condition: None,
        inline_asm_elementwise=assembly,
    )
    whole = {f.__name__: f.fn for f in vars(sm90_registers).values() if hasattr(f, "fn")}
    with ExitStack() as stack:
        values = whole | {"gl": gl, "fma_words": fma_words, "INT4_SHIFT": 2.0**64}
        look_up = words_of_levels(name)
        if place is None:
            values["words_of_levels"] = look_up
        else:
            values["level_pairs"] = lambda words, _, tables: look_up(words, tables, False, False)
        layouts = ("code_layout", "pair_layout", "pair_scale_layout")
        values |= dict.fromkeys(layouts, lambda *_: None)
        stack.enter_context(mock.patch.multiple(sm90_registers, **values))
        data = WEIGHT[:, ::2] | WEIGHT[:, 1::2] << 4  # bytes, of which `ldmatrix` takes two
        first, second = whole["load_codes"](Block(data[:, ::2] | data[:, 1::2] << 8))
        at_once = scale.dtype == BF16 and zero is None
        high, low, third = whole["prepared_scales"](
            scale, zero, None, "weight", zero is not None, at_once
        )

        def pairs(of):
            one = whole["in_thread_order"](Block(of.double())).data.reshape(groups, 32, 2)
            return whole["load_pairs"](Block(in_words(one)), groups)

        lows = (None, None) if scale.dtype == BF16 else pairs(low)
        thirds = (None, None) if zero is None else pairs(third)
        halves = [
            whole["decode_rows"](
                *(first, second, pairs(high), lows, thirds, None, place, odd, name, "weight"),
                *(zero is not None, at_once, None),
            )
            for odd in (False, True)
        ]
        return whole["in_order"](*halves).data


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["int4", "int4 zero", "nf4", "nf4 table"])
def test_decoded_weights(name, dtype, groups):
    """Each is the weight of its row and column, rounded to bf16."""
    g = torch.Generator().manual_seed(groups)
    scale = (torch.rand(64, groups, generator=g) + 0.5).to(dtype)
    place = 0x400 if name.endswith("table") else None
    name, zeros = name.split()[0], name.endswith("zero")
    zero = torch.randint(0, 16, (64, groups), generator=g) if zeros else None
    found = decoded(name, scale, zero, place)
    if name == "nf4":
        bits = torch.tensor(levels.TABLES.value[name].bits, dtype=torch.int32) << 16
        exact = bits.view(torch.float32).double()[WEIGHT]  # in units
    else:
        found *= sm90_registers.shift(name, "weight")
        exact = WEIGHT.double() - (8 if zero is None else zero.repeat_interleave(128 // groups, 1))
    exact = exact * scale.double().repeat_interleave(128 // groups, 1)
    off = (found - exact.T).abs()
    assert (off <= exact.T.abs() * 2.0**-8 * (1 if dtype == BF16 else 1.01)).all()
    near = exact.T.to(BF16).double()
    assert (found != near).double().mean() <= (0 if dtype == BF16 else 0.01)


def test_low_rank_operands():
    """Columns of an adapter's matrix are where those of the weight are."""
    matrix = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    gl = SimpleNamespace(
        convert_layout=lambda t, *_, **__: t,
        join=lambda a, b: Block(torch.stack([a.data, b.data], -1)),
    )
    with mock.patch.multiple(sm90_registers, gl=gl, low_rank_layout=lambda _: None):
        halves = sm90_registers.low_rank_operands.fn(Block(matrix), None)
        assert torch.equal(sm90_registers.in_order.fn(*halves).data, matrix.T)
