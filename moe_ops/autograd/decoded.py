"""Frozen quantized weights of a training step, written in 16 bits a few experts at a time.

Products that decode a weight do so once for each tile of rows. Here each number is decoded once a
pass, and products of plain weights read it, most of it from the L2 cache. The next experts are
decoded beside the product of those before, on multiprocessors that it leaves (`SPARE`) or is done
with. So there are two buffers of at most `BYTES`, whatever the size of the weight.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_ops.kernels.launch import Gpu, Launch, Lazy
from moe_ops.kernels.mixed_gemm.operands import MixedOperand, operand
from moe_ops.kernels.rows.frozen import frozen
from moe_ops.ops.call import Weight

BYTES = 64 << 20
SPARE = 8  # an even number: products take whole clusters of two
_dequantize = Lazy("moe_ops.kernels.mixed_gemm.dequantize:dequantize")
_why_not = Lazy("moe_ops.kernels.mixed_gemm.dequantize:why_not")


def operand_of(weight: Weight, gpu: Gpu, experts: slice = slice(None)) -> MixedOperand:
    """The operand of some experts of a frozen weight."""
    how = frozen(weight.scheme)
    assert how is not None
    scale, zero, global_scale, channel_scale = [
        None if t is None else t[experts] for t in weight.scales
    ]
    assert scale is not None
    parts = weight.data[experts], scale, zero, global_scale, channel_scale
    return operand("weight", *parts, how.weight, gpu)


def why_not(weight: Weight, gpu: Gpu) -> str | None:
    """Why a weight is not written in 16 bits; None if it can be."""
    return _why_not(operand_of(weight, gpu))


def in_parts(
    weight: Weight,
    size: tuple[int, ...],  # (E, N, K)
    like: Tensor,
    gpu: Gpu,
    run: Callable[[Launch], None],
    multiply: Callable[[Tensor, slice, int], None],
) -> None:
    """Call `multiply` with the numbers (experts, N, K) of some experts in the dtype of `like`, the
    slice of these experts, and the multiprocessors that it must leave, until all had their turn.
    """
    E, N, K = size
    count = min(E, max(1, BYTES // (N * K * like.element_size())))
    parts = [slice(e, min(e + count, E)) for e in range(0, E, count)]
    buffers = like.new_empty(min(2, len(parts)), count, N, K)

    def decode(turn: int) -> Tensor:
        part = parts[turn]
        numbers = buffers[turn % 2, : part.stop - part.start]
        beside = turn > 0 and gpu.pdl
        run(_dequantize(numbers, operand_of(weight, gpu, part), beside))
        return numbers

    numbers = decode(0)
    for turn, part in enumerate(parts):
        last = turn + 1 == len(parts)
        multiply(numbers, part, 0 if last else SPARE)
        if not last:
            numbers = decode(turn + 1)
