"""What one step of a layer costs on several GPUs: a model of bytes, products and steps.

E experts, K hidden size, I intermediate size, R GPUs, T tokens of each GPU, P (token, expert)
pairs of one GPU.

Experts of a GPU:  us = norm(weights + rows, products) + activations + CHAIN_US
    weights = bytes of its experts that are hit / memory bandwidth
    rows = bytes of pairs that products read and write / memory bandwidth
    products = 6 K I (P + PADDED_ROWS per expert that is hit) / (PRODUCTS * peak)
    activations = bytes that the steps between products read and write / memory bandwidth
    norm(a, b) = (a ** OVERLAP + b ** OVERLAP) ** (1 / OVERLAP)
Kernels overlap what they multiply with what they read and write in part: that of infinity would be
all of it, that of 1 nothing.
Where the package has a measured table of the GPU and shape, the whole is multiplied by measured /
modelled of a whole layer with as many pairs.

A collective:  us = COLLECTIVE_US + max(time over NVLink, bytes over the network / rate)

The constants and where they were measured stand beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ops.checks import check_size
from moe_ops.meta.symmetric import rows_later
from moe_ops.parallel import wire
from moe_ops.parallel.placement import AnyPlacement, Placement
from moe_ops.parallel.replicas import ReplicatedPlacement
from moe_ops.schemes import get_scheme
from moe_ops.tables import lookup

# Part of a square product's rate that grouped products reach, and OVERLAP, by the formula above
# fitted to what one and two H100s took with 512 tokens and more, of Qwen3 and DeepSeek-V3
# (benchmarks/results/expert_parallel_NVIDIA_H100_80GB_HBM3_x2.json). Plain weights have their own.
PRODUCTS, PRODUCTS_OF_PLAIN, OVERLAP = 0.8, 0.9, 2.5
# The same of fp8_block with fewer rows an expert than FEW_ROWS, a tile of deep_gemm (the same file
# and that of the H200).
PRODUCTS_OF_FEW, FEW_ROWS = 0.46, 128
# Rows of tiles of 64 that hold no pair: half a tile of each expert.
PADDED_ROWS = 32
# Launches and tails of a layer's kernels: what one token takes beyond the bytes of its weights
# (benchmarks/results/experts_NVIDIA_H200.json).
CHAIN_US = 8.0
# One collective in a CUDA graph, with the padding around it: what dispatch and combine take at one
# token on two H100s (benchmarks/results/expert_parallel_NVIDIA_H100_80GB_HBM3_x2.json).
COLLECTIVE_US = 15.0
# Parts of a copy between two GPUs that NCCL reaches with small messages, and with large ones,
# which take LARGE_US more, fitted to gathers of 0.3 to 118 MB (the same file). Not measured on
# more GPUs.
NCCL_SMALL, NCCL, LARGE_US = 0.18, 0.60, 13.0
# The part that `symmetric_memory` reaches, which writes into the other GPU's memory: what 17 and
# 34 MB take beyond one token (benchmarks/results/expert_parallel_NVIDIA_H200_x2.json). While
# outputs travel, those of a token's experts are read and added up; and many rows are copied to
# their experts on arrival, behind their routing. The longer of both is what counts.
PUSH_US, PUSH = 5.2, 0.82
# Part of a network's line rate that collectives reach. An assumption: not measured.
NETWORK = 0.8


@dataclass(frozen=True)
class Gpu:
    """Rates of one GPU. Peaks are those of a large copy and of a square product.

    Args:
        memory_tb_s, bf16_tflop_s: 8-bit products are taken to run at twice the latter.
        link_gb_s: one copy to another GPU of the host.
        network_gb_s: line rate of the network of one GPU, to other hosts.
    """

    name: str
    memory_tb_s: float
    bf16_tflop_s: float
    link_gb_s: float
    network_gb_s: float


# H100: measured (expert_parallel_NVIDIA_H100_80GB_HBM3_x2.json). H200: memory and products
# (benchmarks/cases.py) and links (expert_parallel_NVIDIA_H200_x2.json) were measured.
# The network is one adapter of 400 Gb/s a GPU, as such hosts have; not measured.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("NVIDIA H100 80GB HBM3", 3.014, 724.4, 386.4, 50.0),
        Gpu("NVIDIA H200", 4.3, 790.0, 386.3, 50.0),
    )
}


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and the scheme of its weights, "" for bf16.

    Raises:
        ValueError: a size that is no integer or below 1, top_k above num_experts, or a scheme that
            is unknown or cannot quantize weights of these sizes.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    scheme: str = ""

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden_size", "intermediate_size", "top_k"):
            check_size(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k must be in 1..num_experts={self.num_experts}, got {self.top_k}"
            )
        if self.scheme:
            scheme = get_scheme(self.scheme)
            object.__setattr__(self, "scheme", scheme.name)
            K, I = self.hidden_size, self.intermediate_size
            for name, N, columns in (("hidden_size", 2 * I, K), ("intermediate_size", K, I)):
                if reason := scheme.why_not_shape(N, columns):
                    raise ValueError(
                        f"{name} must suit scheme {scheme.name!r}, got {columns}: a weight cannot "
                        f"be quantized so, {reason}"
                    )

    @property
    def expert_bytes(self) -> float:
        """Of the three matrices of one expert, with scales."""
        return 3 * self.hidden_size * self.intermediate_size * _bits(self.scheme, weight=True) / 8

    @property
    def multiplies_8_bits(self) -> bool:
        return bool(self.scheme) and get_scheme(self.scheme).activation is not None

    def row_bytes(self, quantized: bool) -> float:
        """Of a token that travels to experts: its row, and ids and weights of 4 bytes."""
        bits = _bits(self.scheme, weight=False) if quantized and self.scheme else 16.0
        return self.hidden_size * bits / 8 + 8 * self.top_k

    @property
    def pair_bytes(self) -> tuple[float, float]:
        """That products read and write, and the steps between them: the row, gate and up, what the
        activation makes of them, and the output. What products of 8 bits read has 8. Those of
        plain weights end with the activation: nothing else sees gate and up.
        """
        K, I = self.hidden_size, self.intermediate_size
        if not self.scheme:
            return 2 * (2 * K + 2 * I), 2 * 2 * K
        read = 1 if self.multiplies_8_bits else 2
        passed = read * (K + I) + 2 * (2 * I + K)
        return passed, passed


def _bits(scheme: str, weight: bool) -> float:
    """Of one element, and its part of the scales of groups."""
    if not scheme:
        return 16.0
    found = get_scheme(scheme)
    desc = found.weight if weight else found.activation
    if desc is None:
        return 16.0
    group = max(desc.group.rows, 1) * desc.group.cols
    scale = 0.0 if desc.group.cols < 1 else (8 if desc.is_mx or desc.global_scale else 32) / group
    return desc.format.bits + scale


# --- load ----------------------------------------------------------------------------------------


def zipf(num_experts: int, exponent: float) -> list[float]:
    """Shares of the experts where the n-th most chosen has n ** -exponent of the first's; 0: all
    alike. The order of experts is one of no meaning, so that neighbours are not chosen alike.
    """
    shares = [(n + 1) ** -exponent for n in range(num_experts)]
    step = next(
        s
        for s in range(int(num_experts * 0.618) + 1, 2 * num_experts + 2)
        if math.gcd(s, num_experts) == 1
    )
    total = sum(shares)
    mixed = [0.0] * num_experts
    for n, share in enumerate(shares):
        mixed[n * step % num_experts] = share / total
    return mixed


@dataclass(frozen=True)
class Load:
    """What one GPU's experts are asked for: pairs, and how many of its experts are hit."""

    pairs: float
    hit: float


def loads(
    layer: Layer,
    shares: Sequence[float],
    placement: AnyPlacement,
    num_tokens: int,
) -> list[Load]:
    """Expected load of each GPU, of num_tokens tokens in all.

    Args:
        shares: (E,) of all pairs, each expert's share. No token chooses an expert twice, so that
            none has more than 1 / top_k: what is above goes to the others.
        placement: where the experts are; replicas have equal parts.

    Raises:
        ValueError: another number of shares than experts.
    """
    if len(shares) != layer.num_experts:
        raise ValueError(
            f"shares must have num_experts={layer.num_experts} entries, got {len(shares)}"
        )
    parts = chosen(shares, layer.top_k)
    counts = [1] * layer.num_experts
    if isinstance(placement, ReplicatedPlacement):
        counts = [len(ids) for ids in placement.replicas()]
    found = []
    for rank in range(placement.ep_size):
        each = [parts[e] / counts[e] for e in placement.experts_of(rank)]
        hit = sum(1 - (1 - p) ** num_tokens for p in each)
        found.append(Load(num_tokens * sum(each), hit))
    return found


def chosen(shares: Sequence[float], top_k: int) -> list[float]:
    """The part of all tokens that choose each expert: at most 1, and top_k in all.

    Raises:
        ValueError: shares that are negative or all 0.
    """
    total = sum(shares)
    if not total > 0 or min(shares) < 0:
        raise ValueError("shares must not be negative, nor all be 0")
    full: set[int] = set()
    while True:
        rest = sum(s for e, s in enumerate(shares) if e not in full)
        left = top_k - len(full)
        if rest <= 0:  # experts that nobody asks for fill up what is left
            others = [e for e in range(len(shares)) if e not in full]
            return [1.0 if e in full else left / len(others) for e in range(len(shares))]
        parts = [1.0 if e in full else left * s / rest for e, s in enumerate(shares)]
        above = {e for e, part in enumerate(parts) if part > 1}
        if not above:
            return parts
        full |= above


# --- times, in us --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertTime:
    weights: float
    rows: float  # that products read and write
    products: float
    activations: float
    factor: float  # measured / modelled; 1 where nothing was measured

    @property
    def us(self) -> float:
        parts = self.weights + self.rows, self.products
        busy = sum([part**OVERLAP for part in parts]) ** (1 / OVERLAP)
        return (busy + self.activations + CHAIN_US) * self.factor


def expert_time(gpu: Gpu, layer: Layer, load: Load, rows: float) -> ExpertTime:
    """Of one GPU's experts on `rows` tokens that are there, of which `load` says what they ask."""
    return _modelled(gpu, layer, load, rows, _factor(gpu, layer, load))


def _modelled(gpu: Gpu, layer: Layer, load: Load, rows: float, factor: float) -> ExpertTime:
    per_us = gpu.memory_tb_s * 1e6
    few = layer.scheme == "fp8_block" and load.pairs < FEW_ROWS * load.hit
    rate = gpu.bf16_tflop_s * 1e6 * (2 if layer.multiplies_8_bits else 1)
    of_many = PRODUCTS if layer.scheme else PRODUCTS_OF_PLAIN
    rate *= PRODUCTS_OF_FEW if few else of_many
    flops = 6 * layer.hidden_size * layer.intermediate_size
    rows_of_products, others = [load.pairs * size / per_us for size in layer.pair_bytes]
    return ExpertTime(
        weights=load.hit * layer.expert_bytes / per_us,
        rows=rows_of_products,
        products=flops * (load.pairs + PADDED_ROWS * load.hit) / rate,
        activations=others + rows * layer.hidden_size * 2 / per_us,
        factor=factor,
    )


def _factor(gpu: Gpu, layer: Layer, load: Load) -> float:
    """Measured / modelled time of a whole layer with as many pairs for each expert that is hit,
    from the table of the GPU; outside of what was measured that at its end.
    """
    sizes = (layer.num_experts, layer.hidden_size, layer.intermediate_size, layer.top_k)
    times = lookup.backend_times(gpu.name, *sizes, layer.scheme, "bfloat16")
    if not times:
        return 1.0
    points = []
    uniform = [1 / layer.num_experts] * layer.num_experts
    whole = Placement(layer.num_experts, 1)
    for M, us in times:
        (all_,) = loads(layer, uniform, whole, M)
        modelled = _modelled(gpu, layer, all_, M, 1.0).us
        points.append((all_.pairs / all_.hit, min(us.values()) / modelled))
    pairs = load.pairs / load.hit if load.hit else 0.0
    for (low, first), (high, second) in zip(points, points[1:], strict=False):
        if low <= pairs <= high:
            part = math.log(pairs / low) / math.log(high / low)
            return first + part * (second - first)
    return points[0][1] if pairs < points[0][0] else points[-1][1]


@dataclass(frozen=True)
class Step:
    """A step of one layer on one of the GPUs, the slowest: us of its parts, of dispatch and
    combine what does not run beside the experts' own steps.
    """

    dispatcher: str
    dispatch: float
    experts: ExpertTime
    combine: float
    num_bytes: float  # that reach one GPU, there and back
    network_bytes: float  # of them those from other hosts

    @property
    def us(self) -> float:
        return self.dispatch + self.experts.us + self.combine

    @property
    def bound(self) -> str:
        """What takes the longest of it."""
        times = {
            "weights": self.experts.weights * self.experts.factor,
            "products": self.experts.products * self.experts.factor,
            "activations": (self.experts.rows + self.experts.activations) * self.experts.factor,
            "transport": self.dispatch + self.combine,
        }
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True)
class Fleet:
    """R = hosts * gpus_per_host GPUs, all alike."""

    gpu: Gpu
    gpus_per_host: int
    hosts: int = 1

    def __post_init__(self) -> None:
        check_size("gpus_per_host", self.gpus_per_host)
        check_size("hosts", self.hosts)

    @property
    def size(self) -> int:
        return self.gpus_per_host * self.hosts

    def push_us(self, link: float) -> float:
        """Of a kernel that writes so many bytes into each GPU's memory from those of its host."""
        return PUSH_US + link / (self.gpu.link_gb_s * 1e3 * PUSH)

    def collective_us(self, link: float, network: float) -> float:
        """Of a collective that brings so many bytes to each GPU."""
        rate = self.gpu.link_gb_s * 1e3
        per_link = min(link / (rate * NCCL_SMALL), LARGE_US + link / (rate * NCCL))
        per_network = network / (self.gpu.network_gb_s * 1e3 * NETWORK)
        return COLLECTIVE_US + max(per_link, per_network)


def step(
    fleet: Fleet,
    layer: Layer,
    dispatcher: str,
    num_tokens: int,
    load: Load,
    quantized_wire: bool = False,
) -> Step:
    """One step of T = num_tokens tokens on each GPU, as the slowest of them has it.

    Args:
        dispatcher: "none" (one GPU), or one of `dispatchers_of`; "all_reduce" of R * T tokens that
            all GPUs have.
        load: of the GPU with the most to do.
        quantized_wire: rows travel to the experts as the scheme quantizes them.

    Raises:
        ValueError: an unknown dispatcher, or one that these GPUs cannot use.
    """
    R, H, T = fleet.size, fleet.hosts, num_tokens
    rows = R * T
    experts = expert_time(fleet.gpu, layer, load, rows)
    if dispatcher == "none":
        return Step(dispatcher, 0.0, experts, 0.0, 0.0, 0.0)
    if dispatcher not in dispatchers_of(fleet):
        names = ", ".join(dispatchers_of(fleet))
        raise ValueError(f"dispatcher must be none, {names}, got {dispatcher!r}")
    out = 2 * layer.hidden_size  # bytes of a row in the tokens' dtype
    wide = out if R == 2 else 2 * out  # added in fp32 by more than two
    sent = layer.row_bytes(quantized_wire)
    # Collectives that gather or add run along rings, which enter a host once for each GPU's part.
    gathered = sent * T * (R - 1), sent * T * (H - 1)
    added = 0.0
    if dispatcher == "allgather_reducescatter":
        back = wide * T * (R - 1), wide * T * (H - 1)
    elif dispatcher in ("all_to_all", "symmetric_memory"):
        back = out * T * (R - 1), out * T * (R - fleet.gpus_per_host)
        added = out * T * (R + 1) / (fleet.gpu.memory_tb_s * 1e6)
    else:
        gathered = 0.0, 0.0
        back = 2 * wide * T * (R - 1), 2 * wide * T * (H - 1)
    if dispatcher == "symmetric_memory":
        later = rows_later(R, T) and wire.pays_later(layer.scheme)
        packed = later and wire.quantizes_later(layer.scheme, layer.hidden_size)
        gathered = layer.row_bytes(packed) * T * (R - 1), 0.0  # else rows travel as they are
        per_us, routing = fleet.gpu.memory_tb_s * 1e6, 8 * layer.top_k * T * (R - 1)
        there, here = fleet.push_us(gathered[0]), fleet.push_us(back[0])
        # what experts take is counted with these
        if later:
            copied = load.pairs * (1 if layer.multiplies_8_bits else 2) * layer.hidden_size
            there = fleet.push_us(routing) + max(there - copied / per_us, 0.0)
        here = max(here - load.pairs * 2 * layer.hidden_size / per_us, 0.0)
        return Step(dispatcher, there, experts, here, gathered[0] + back[0], 0.0)
    there = fleet.collective_us(*gathered) if dispatcher != "all_reduce" else 0.0
    here = fleet.collective_us(*back) + added
    return Step(dispatcher, there, experts, here, gathered[0] + back[0], gathered[1] + back[1])


DISPATCHERS = ("allgather_reducescatter", "all_to_all", "symmetric_memory", "all_reduce")


def dispatchers_of(fleet: Fleet) -> tuple[str, ...]:
    """Those that the GPUs can use: `symmetric_memory` is for up to 16 of one host."""
    peers = fleet.hosts == 1 and fleet.size <= 16
    return tuple([name for name in DISPATCHERS if peers or name != "symmetric_memory"])
