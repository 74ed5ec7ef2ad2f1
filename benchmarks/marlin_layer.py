"""vLLM 0.26's experts on Marlin as a peer of experts.py: weights of 4 and 8 bits beside bf16
activations. A whole layer of its compiled operators, called in the order in which vLLM's
fused_marlin_moe calls them: align the pairs, product, activation, product (which multiplies by the
router weights), sum.

Operators come from the folder of vllm_cutlass.py. Weights are brought into Marlin's order here:
vLLM does it by a kernel, with the same result. The wheel has these kernels for SM80 and SM120, and
PTX that a driver compiles for SM90.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm_cutlass
from cases import Cell, RoutingSet, Weights
from torch import Tensor

from moe_ops.schemes import get_scheme

SCHEMES = (
    *("int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g32"),
    *("int4_w4a16:g128:zp", "int4_w4a16:g64:zp", "int4_w4a16:g32:zp"),
    *("mxfp4_w4a16", "nvfp4_w4a16", "fp8_w8a16:channel", "int8_w8a16:channel"),
)
# vllm.scalar_type's ids of its formats of weights
UINT4, UINT4B8, UINT8B128 = 1125899906843648, 1125899907892224, 1125899923621888
E4M3, E2M1 = 2814749767172868, 562949953487106
BLOCK_SIZES = (8, 16, 32, 48, 64)  # rows of one expert in a block
BLOCKS_PER_SM = 4  # at most so many programs a multiprocessor share the workspace of locks
ACTIVATIONS = {"silu": "silu_and_mul", "swigluoai": "swigluoai_and_mul"}

# Eight consecutive numbers of an int32 go to two registers of two bf16 pairs by these places.
INTERLEAVED = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
OF_GROUPS = [i + 8 * j for i in range(8) for j in range(8)]
OF_ROWS = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def weight_order(bits: int, device: torch.device) -> Tensor:
    """Which of the 1024 elements of four tiles of 16 x 16 stands where: thread after thread of a
    warp, of each tile the eight elements that mma.sync takes from it."""
    order = []
    for thread in range(32):
        of_tile = [
            16 * row + thread // 4 + 8 * block
            for block in (0, 1)
            for row in (thread % 4 * 2 + offset for offset in (0, 1, 8, 9))
        ]
        order += [place + 256 * tile for tile in range(4) for place in of_tile]
    words = torch.tensor(order, device=device).view(-1, len(INTERLEAVED[bits]))
    return words[:, INTERLEAVED[bits]].reshape(-1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """int32 whose bits from the lowest on are neighbours of the last dimension."""
    words = codes.unflatten(-1, (-1, 32 // bits))
    packed = torch.zeros(words.shape[:-1], dtype=torch.int32, device=codes.device)
    for i in range(words.shape[-1]):
        packed |= words[..., i].int() << bits * i
    return packed


def repack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes (N, K) of one expert in Marlin's order, (K / 16, N * bits / 2) int32."""
    N, K = codes.shape
    tiles = codes.t().reshape(K // 16, 16, N // 16, 16).permute(0, 2, 1, 3).reshape(-1, 1024)
    tiles = tiles[:, weight_order(bits, codes.device)]
    return pack(tiles.view(K // 16, N * 16), bits)


def reordered(rows: Tensor, order: list[int]) -> Tensor:
    """Numbers (..., N) of N rows in the order in which a thread has columns of its result."""
    return rows.unflatten(-1, (-1, len(order)))[..., order].flatten(-2).contiguous()


def unpacked(qdata: Tensor) -> Tensor:
    """uint8 (N, K / 2) with two codes a byte, the low half first, as (N, K)."""
    return torch.stack((qdata & 15, qdata >> 4), -1).flatten(-2)


def nvfp4_scales(scale: Tensor) -> tuple[Tensor, float]:
    """Positive e4m3 scales (..., N) as five bits of exponent and three of mantissa whose highest
    bit is set, and the power of two by which they grew."""
    largest = float(scale.float().max()) * 2**7
    growth = 1.0 if largest >= 448 * 2**7 else 2.0 ** math.floor(math.log2(448 * 2**7 / largest))
    scaled = (scale.float() * growth).half() * 2**7
    scaled[scaled < 2] = 0
    bits = (scaled.view(torch.int16) << 1).view(torch.uint8)[..., 1::2]
    return bits.contiguous().view(torch.float8_e4m3fn), growth


@dataclass(frozen=True)
class Operand:
    """A weight (E, N, K) as the operator takes it."""

    N: int
    K: int
    packed: Tensor
    scales: Tensor
    global_scale: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    type_id: int

    def product(
        self, out: Tensor, x: Tensor, top_k: int, aligned: Aligned, router: Tensor, weighted: bool
    ) -> None:
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            x, out, self.packed, self.bias, self.scales, None, self.global_scale, self.zeros, None,
            None, aligned.locks, aligned.pairs, aligned.experts, aligned.count, router,
            aligned.block_size, top_k, weighted, self.type_id, x.shape[0], self.N, self.K, True,
            False, True, False, -1, -1, -1,
        )  # fmt: skip


def operand(
    weight: Any, bias: Tensor | None, rows: int, columns: int, interleaved: bool
) -> Operand:
    """An ExpertTensor (E, N, K), padded to `rows` and `columns` by weights that are zero. Gate and
    up rows are two halves if rows are padded and not `interleaved`."""
    E, N, K = weight.shape
    desc = get_scheme(weight.scheme).weight
    assert desc is not None
    bits, name = desc.format.bits, desc.dtype
    halves = 1 if interleaved or rows == N else 2
    more = (rows - N) // halves

    def padded(t: Tensor, fill: int, new_columns: int) -> Tensor:
        """(E, N, columns) -> (E, rows, new_columns)."""
        t = t.unflatten(1, (halves, -1))
        t = torch.nn.functional.pad(t, (0, new_columns - t.shape[-1], 0, more), value=fill)
        return t.flatten(1, 2)

    zero = weight.zero_point
    fill = 8 if name == "int4" and zero is None else 128 if name == "int8" else 0
    packed = torch.empty(
        E, columns // 16, rows * bits // 2, dtype=torch.int32, device=weight.device
    )
    for e in range(E):
        codes = weight.qdata[e : e + 1].view(torch.uint8)
        codes = unpacked(codes) if bits == 4 else codes ^ 128 if name == "int8" else codes
        packed[e] = repack(padded(codes, fill, columns)[0], bits)

    group = desc.group.cols
    groups = columns // group if group > 0 else 1
    scale = weight.scale
    of_bytes = scale.view(torch.uint8) if scale.itemsize == 1 else scale.to(torch.bfloat16)
    scales = padded(of_bytes.view(E, N, -1), 0, groups).transpose(1, 2)  # (E, groups, rows)
    scales = reordered(scales, OF_ROWS if groups == 1 else OF_GROUPS)
    global_scale = None
    type_id = {"int8": UINT8B128, "e4m3": E4M3, "e2m1": E2M1}.get(name, UINT4B8)
    if name == "e4m3":  # the exponent of a weight stays as it is
        scales = scales * 2.0 ** (2**7 - 2**3)
    elif name == "e2m1":
        scales = reordered(scales, [0, 2, 1, 3])
        if weight.global_scale is None:
            scales = scales.view(torch.float8_e8m0fnu)
        else:
            scales, growth = nvfp4_scales(scales.view(torch.float8_e4m3fn))
            global_scale = 2.0 ** (2**7 - 2 - 7) / growth / weight.global_scale
    zeros = None
    if zero is not None:
        type_id = UINT4
        zeros = reordered(padded(zero.view(E, N, -1), 0, groups).transpose(1, 2), OF_GROUPS)
        zeros = pack(reordered(zeros, list(INTERLEAVED[4])), 4)
    if bias is not None:
        bias = reordered(padded(bias[..., None], 0, 1)[..., 0], OF_ROWS)
    return Operand(rows, columns, packed, scales, global_scale, zeros, bias, type_id)


@dataclass(frozen=True)
class Aligned:
    """Pairs by expert, those of each expert filled up to whole blocks."""

    block_size: int
    pairs: Tensor
    experts: Tensor  # of each block
    count: Tensor  # (1,) pairs, with those that fill up
    locks: Tensor


def align(ids: Tensor, E: int, block_size: int, locks: Tensor) -> Aligned:
    most = ids.numel() + E * (block_size - 1)
    if ids.numel() < E:
        most = min(ids.numel() * block_size, most)

    def ints(n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=ids.device)

    aligned = Aligned(block_size, ints(most), ints(-(-most // block_size)), ints(1), locks)
    torch.ops._moe_C.moe_align_block_size(
        ids, E, block_size, aligned.pairs, aligned.experts, aligned.count, None
    )
    return aligned


def make(weights: Weights) -> Callable[[Cell], Callable[[int], Tensor]]:
    """The layer on weights of one scheme: a builder whose calls run on one routing set."""
    vllm_cutlass.load()
    shape = weights.shape
    if shape.ep_size > 1:
        raise ValueError("runs all experts on one GPU here")
    if shape.bias and weights.scheme == "nvfp4_w4a16":
        raise ValueError("multiplies biases by the global scale of nvfp4, too")
    E, top_k, K = shape.num_experts, shape.top_k, shape.hidden_size
    multiple = 128 if K % 128 else 64  # what its tiles of 64 x 128 and 128 x 64 leave
    I = -(-shape.intermediate_size // multiple) * multiple
    interleaved = shape.activation == "swigluoai"
    first = operand(weights.w13, weights.w13_bias, 2 * I, K, interleaved)
    second = operand(weights.w2, weights.w2_bias, K, I, True)
    activate = getattr(torch.ops._C, ACTIVATIONS[shape.activation])
    device = weights.plain13.device
    count = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
    locks = torch.zeros(count * BLOCKS_PER_SM, dtype=torch.int32, device=device)

    def build(cell: Cell) -> Callable[[int], Tensor]:
        x = cell.hidden_states
        M = x.shape[0]
        rows = M * top_k
        fitting = (size for size in BLOCK_SIZES if rows / E / size < 0.9)
        block_size = next(fitting, BLOCK_SIZES[-1])

        def call(which: int) -> Tensor:
            routing: RoutingSet = cell.sets[which]
            # vLLM keeps these in two workspaces, where the results of both products overlap
            space = torch.empty(rows * max(2 * I, K), dtype=x.dtype, device=device)
            gate_up, y = space[: rows * 2 * I].view(rows, -1), space[: rows * K].view(rows, -1)
            h, out = x.new_empty(rows, I), torch.empty_like(x)
            aligned = align(routing.ids, E, block_size, locks)
            first.product(gate_up, x, top_k, aligned, routing.weights, False)
            activate(h, gate_up)
            second.product(y, h, 1, aligned, routing.weights, True)
            torch.ops._moe_C.moe_sum(y.view(M, top_k, K), out, None, None)
            return out

        return call

    return build
