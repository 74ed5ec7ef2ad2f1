"""Cases of the expert-layer benchmark: shapes, routing sets, weights, floors, and the fp64 oracle.

M tokens, K hidden size, I intermediate size, E experts held here, top_k experts a token.
w13 is (E, 2I, K), gate rows first; w2 is (E, K, I).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import gguf_blocks
import torch
from torch import Tensor

import moe_ops
from moe_ops import activations, numerics
from moe_ops.bench.layers import quantized
from moe_ops.bench.shapes import SHAPES as MODEL_SHAPES
from moe_ops.bench.shapes import Shape
from moe_ops.schemes import SUPER_BLOCK, get_scheme


@dataclass(frozen=True)
class Experts(Shape):
    """A shape, the activation of its layer, and whether both products have biases."""

    activation: str = "silu"
    bias: bool = False


SHAPES = {name: Experts(*astuple(shape)) for name, shape in MODEL_SHAPES.items()} | {
    "gptoss20_bias": Experts(32, 4, 2880, 2880, activation="swigluoai", bias=True),
    "gptoss120_bias": Experts(128, 4, 2880, 2880, activation="swigluoai", bias=True),
    "kimik3_situ": Experts(896, 16, 3584, 1536, activation="situ"),
    "tiny": Experts(8, 2, 256, 256),  # --dry-run only
    "tiny_ep": Experts(4, 2, 128, 256, ep_size=2),  # --dry-run only
    "tiny_bias": Experts(8, 2, 256, 128, activation="swigluoai", bias=True),  # --dry-run only
}
SCHEMES = (
    *("", "fp8_block", "fp8_channel", "fp8_tensor", "fp8_tensor_static", "int8_w8a8", "int4_w4a8"),
    *("fp8_w8a16:channel", "int8_w8a16:channel"),
    *("int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g128:zp", "int4_w4a16:g64:zp"),
    *("int4_w4a16:g32", "int4_w4a16:g32:zp"),
    *("mxfp4_w4a16", "nvfp4_w4a16"),
    # of GGUF's types Q4_K, Q5_K, Q6_K, IQ4_XS, IQ4_NL and Q8_0, and bitsandbytes' two
    *("int4_w4a16:g32:super:min", "int5_w5a16:g32:super:min", "int6_w6a16:g16:super"),
    *("iq4_w4a16:g32:super", "iq4_w4a16:g32", "int8_w8a16:g32", "nf4_w4a16:g64", "fp4_w4a16:g64"),
)
TOKENS = (1, 8, 32, 64, 256, 1024, 4096)
ROUTINGS = ("uniform", "zipf")
ZIPF_EXPONENT = 1.1
# Static scales of the activations before w13 and w2, where a scheme has them: over 448, about the
# largest magnitudes of unit-scale hidden states and of silu(gate) * up in the largest cell.
STATIC_SCALES = (6 / 448, 24 / 448)
# Above this many tokens, errors are taken over SAMPLED_TOKENS of them.
MAX_CHECKED_TOKENS, SAMPLED_TOKENS = 1024, 256


class Limits(NamedTuple):
    """What a GPU can do at best: bytes a second, FLOPs a second in bf16 and in fp8."""

    bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float


# Measured with torch 2.11: a large copy moves 4.25 to 4.27 TB/s and a read-only stream 4.42 to
# 4.54, so a kernel can pass this floor by 4 %; a square bf16 matrix product runs at 790 TFLOP/s.
H200 = Limits(4.3e12, 790e12, 1580e12)


@dataclass(frozen=True)
class Case:
    """One cell of the table: a shape of SHAPES in a scheme ("" is plain bf16) on M tokens."""

    shape: str
    scheme: str
    num_tokens: int
    routing: str = "uniform"

    @property
    def layer(self) -> Experts:
        return SHAPES[self.shape]

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert's w13 and w2 as they are stored. Scales, zero points and minima of
        groups of a row's columns count, which are 3 to 13 % of those bytes; others (at most
        0.1 %) are left out."""
        K, I = self.layer.hidden_size, self.layer.intermediate_size
        desc = get_scheme(self.scheme).weight
        elements = 3 * K * I
        if desc is None:
            return 2 * elements
        total = elements * desc.format.bits // 8
        if desc.whole_groups:
            size = 2 if desc.scale_dtype is None else desc.scale_dtype.itemsize
            size = 4 if _of_bitsandbytes(self.scheme) else size
            total += elements // desc.group.cols * (size * (1 + desc.minimum) + desc.zero_point)
            total += elements // SUPER_BLOCK * 2 * desc.super_width
        return total

    @property
    def multiplies_8_bits(self) -> bool:
        """Whether both operands of the products have 8 bits, which doubles their rate."""
        return get_scheme(self.scheme).activation is not None

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one token in one expert."""
        return 6 * self.layer.hidden_size * self.layer.intermediate_size


def _of_bitsandbytes(scheme: str) -> bool:
    """Whether scales are fp32, as bitsandbytes has them; other scales have the weights' dtype."""
    return scheme.startswith(("nf4", "fp4"))


class RoutingSet(NamedTuple):
    """A routing of M tokens: weights (M, top_k) fp32 that sum to about 1, ids (M, top_k) int32."""

    weights: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Weights:
    """The weights of one shape: bf16, and in the scheme (the same tensors where there is none);
    biases are bf16. Of ggml's types the blocks too, whose numbers those of the scheme are."""

    shape: Experts
    scheme: str
    plain13: Tensor  # (E, 2I, K)
    plain2: Tensor  # (E, K, I)
    w13: Any
    w2: Any
    w13_bias: Tensor | None = None  # (E, 2I)
    w2_bias: Tensor | None = None  # (E, K)
    blocks13: Tensor | None = None  # (E, 2I, bytes of a row)
    blocks2: Tensor | None = None  # (E, K, bytes of a row)


@dataclass(frozen=True)
class Cell:
    """A case with its data: hidden states (M, K) and the routing sets."""

    case: Case
    weights: Weights
    hidden_states: Tensor
    sets: tuple[RoutingSet, ...]


def make_plain_weights(shape: Experts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random bf16 w13 and w2, scaled so that unit inputs give near-unit outputs.

    Drawn in bf16, expert by expert: no fp32 copy exists at any time.
    """
    generator = torch.Generator(device).manual_seed(0)
    E, K, I = shape.num_experts, shape.hidden_size, shape.intermediate_size
    w13 = torch.empty(E, 2 * I, K, dtype=torch.bfloat16, device=device)
    w2 = torch.empty(E, K, I, dtype=torch.bfloat16, device=device)
    for e in range(E):
        w13[e].normal_(0, 1 / math.sqrt(K), generator=generator)
        w2[e].normal_(0, 1 / math.sqrt(I), generator=generator)
    return w13, w2


def make_biases(shape: Experts, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Random bf16 biases of w13 and w2, of a third of what the products are; None for a layer
    without."""
    if not shape.bias:
        return None, None
    generator = torch.Generator(device).manual_seed(1)
    rows = (2 * shape.intermediate_size, shape.hidden_size)
    w13_bias, w2_bias = (
        torch.randn(shape.num_experts, n, generator=generator, device=device) / 3 for n in rows
    )
    return w13_bias.to(torch.bfloat16), w2_bias.to(torch.bfloat16)


def make_weights(
    shape: Experts, scheme: str, plain13: Tensor, plain2: Tensor, known_scales: bool = False
) -> Weights:
    """The weights in `scheme`, quantized some experts at a time; with static scales of the
    activations where the scheme has them always, or where it may and `known_scales`."""
    biases = make_biases(shape, plain13.device)
    if not scheme:
        return Weights(shape, scheme, plain13, plain2, plain13, plain2, *biases)
    if scheme in gguf_blocks.TYPES:
        blocks = [gguf_blocks.blocks_of(w, scheme) for w in (plain13, plain2)]
        read = [gguf_blocks.read(each, scheme) for each in blocks]
        return Weights(shape, scheme, plain13, plain2, *read, *biases, *blocks)
    activation = get_scheme(scheme).activation
    static = known_scales or (activation is not None and activation.static)
    scales = STATIC_SCALES if static else (None, None)
    dtype = torch.float32 if _of_bitsandbytes(scheme) else plain13.dtype
    w13, w2 = (
        quantized(w.to(dtype), scheme, scale)
        for w, scale in zip((plain13, plain2), scales, strict=True)
    )
    return Weights(shape, scheme, plain13, plain2, w13, w2, *biases)


def make_sets(case: Case, l2_bytes: int) -> tuple[RoutingSet, ...]:
    """Distinct random routings, in CPU memory; the same for every scheme and in every run.

    Uniform: each token picks top_k distinct experts, all equally likely. Zipf: expert of rank r is
    picked with probability proportional to r**-1.1; ranks are dealt anew for each set, else hot
    experts would stay in cache. Few tokens get more sets, since their cost varies more; the sets
    together touch more than twice `l2_bytes` of weights. The last set, whose result is checked,
    has the most (token, expert) pairs here.
    """
    seed = zlib.crc32(f"{case.shape} {case.routing} {case.num_tokens}".encode())
    generator = torch.Generator().manual_seed(seed)
    count = 32 if case.num_tokens <= 8 else 16 if case.num_tokens <= 64 else 8
    sets: list[RoutingSet] = []
    touched = 0
    while len(sets) < count or (touched <= 2 * l2_bytes and len(sets) < 256):
        sets.append(_make_set(case, generator))
        touched += _hit(case, sets[-1]) * case.bytes_per_expert
    return tuple(sorted(sets, key=lambda routing: _pairs(case, routing)))


def _make_set(case: Case, generator: torch.Generator) -> RoutingSet:
    shape, M = case.layer, case.num_tokens
    total = shape.num_experts * shape.ep_size
    log_probability = torch.zeros(total)
    if case.routing == "zipf":
        rank = torch.randperm(total, generator=generator) + 1
        log_probability = -ZIPF_EXPONENT * rank.log()
    # The top-k of log p + Gumbel noise is a draw of k without replacement.
    noise = -torch.empty(M, total).exponential_(generator=generator).log()
    ids = (log_probability + noise).topk(shape.top_k, dim=-1).indices.to(torch.int32)
    weights = torch.randn(M, shape.top_k, generator=generator).softmax(-1)
    # Exact in bf16, so that implementations that take bf16 weights solve the same problem.
    return RoutingSet(weights.to(torch.bfloat16).float(), ids)


def _hit(case: Case, routing: RoutingSet) -> int:
    """Number of experts held here that at least one token picks."""
    local = routing.ids[routing.ids < case.layer.num_experts]
    return int(local.unique().numel())


def _pairs(case: Case, routing: RoutingSet) -> int:
    """Number of (token, expert) pairs whose expert is held here."""
    return int((routing.ids < case.layer.num_experts).sum())


def floor_us(case: Case, sets: tuple[RoutingSet, ...], limits: Limits) -> float:
    """Mean over the sets of max(bytes of the experts hit / bandwidth, FLOPs / peak), in us."""
    rate = limits.fp8_flops_per_s if case.multiplies_8_bits else limits.bf16_flops_per_s
    times = [
        max(
            _hit(case, routing) * case.bytes_per_expert / limits.bytes_per_s,
            _pairs(case, routing) * case.flops_per_pair / rate,
        )
        for routing in sets
    ]
    return sum(times) / len(times) * 1e6


def make_cell(case: Case, weights: Weights, sets: tuple[RoutingSet, ...]) -> Cell:
    """Unit-scale hidden states, and the sets on the weights' device."""
    device = weights.plain13.device
    generator = torch.Generator(device).manual_seed(case.num_tokens)
    size = (case.num_tokens, case.layer.hidden_size)
    x = torch.randn(size, generator=generator, device=device).to(torch.bfloat16)
    return Cell(
        case,
        weights,
        x,
        tuple(RoutingSet(s.weights.to(device), s.ids.to(device)) for s in sets),
    )


def checked_tokens(num_tokens: int, at_most: int | None = None) -> Tensor:
    """The tokens whose results are compared with the oracle, of which there may be a limit."""
    if at_most is None:
        at_most = num_tokens if num_tokens <= MAX_CHECKED_TOKENS else SAMPLED_TOKENS
    return torch.linspace(0, num_tokens - 1, min(at_most, num_tokens)).long()


def oracle(
    cell: Cell,
    which: int,
    tokens: Tensor,
    dequantized_weights: bool = False,
    quantized_activations: bool = False,
) -> Tensor:
    """Rows `tokens` of the layer's result on set `which`, (len(tokens), K) fp64; products are in
    fp64.

    Args:
        dequantized_weights: the weights that the scheme makes of the bf16 ones, not those
            themselves.
        quantized_activations: round activations as the scheme does. One whose activations share
            one scale needs all tokens for it.
    """
    shape, scheme, weights = cell.case.layer, cell.case.scheme, cell.weights
    tokens = tokens.to(cell.hidden_states.device)
    x = cell.hidden_states[tokens]
    ids, router = cell.sets[which].ids[tokens], cell.sets[which].weights[tokens]
    valid = ids < shape.num_experts
    row, slot = torch.where(valid)
    x = x.double()
    if quantized_activations:
        x = numerics.fake_quantize_activation(
            x.float(), scheme, known_scale(weights.w13), rows_valid=valid.any(1)
        ).double()
    h = x.new_empty(row.numel(), shape.intermediate_size)
    groups = list(_groups(ids[row, slot], shape.num_experts))
    activation = activations.resolve(shape.activation)
    for e, pairs in groups:
        w13 = _matrix(weights.w13 if dequantized_weights else weights.plain13, e)
        gate_up = x[row[pairs]] @ w13.T
        if weights.w13_bias is not None:
            gate_up += weights.w13_bias[e].double()
        h[pairs] = activations.formula(gate_up, activation)
    if quantized_activations:
        known = known_scale(weights.w2)
        h = numerics.fake_quantize_activation(h.float(), scheme, known).double()
    out = torch.zeros_like(x)
    for e, pairs in groups:
        y = h[pairs] @ _matrix(weights.w2 if dequantized_weights else weights.plain2, e).T
        if weights.w2_bias is not None:
            y += weights.w2_bias[e].double()
        out.index_add_(0, row[pairs], y * router[row[pairs], slot[pairs], None].double())
    return out


def known_scale(weight: Any) -> Tensor | None:
    """The static scale of the activations that meet a weight, None where there is none."""
    return getattr(weight, "activation_scale", None)


def _groups(experts: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, indices of its pairs) for every expert that has any."""
    counts = torch.bincount(experts, minlength=num_experts).tolist()
    parts = experts.argsort(stable=True).split(counts)
    return ((e, part) for e, part in enumerate(parts) if part.numel())


def _matrix(weight: Any, expert: int) -> Tensor:
    """One expert's matrix in fp64, dequantized where it is quantized."""
    if not isinstance(weight, moe_ops.ExpertTensor):
        return weight[expert].double()
    return weight[expert].dequantize(torch.float32).double()
