"""Configs of an expert layer's kernels, which `moe_ops.choose` chooses.

Workspace sizes never depend on the config: h and y have one row per pair with every config (in the
mixed GEMM, y of few pairs has more rows, for SPLIT_K), and the table of blocks is sized for the
smallest BLOCK_M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_ops.meta.workspace import cdiv, minimum
from moe_ops.schemes import ELEMENT_FORMATS

GROUP_M = 16  # blocks that use one weight tile in turn, while it is in L2
MOST_SHARES = 8  # programs that share the columns of a sum of an adapter
PAIR_BUCKETS = (64, 512)  # up to so many pairs, every program reads the ids of all
SMALLEST_BLOCK_M = 16  # tokens: the fewest of a tensor-core instruction of the kernels in `gemm`
SM80_MMA, SM90_TMA, SM90_WGMMA, GEMV = "sm80_mma", "sm90_tma", "sm90_wgmma", "gemv"
SM90_MMA = "sm90_mma"  # one token
SM90_PACKED = "sm90_packed"  # many rows an expert
# number formats of weights that the kernels of `mixed_gemm` decode; sm80_mma.py and packed.py all
LEVELS = tuple([one.name for one in ELEMENT_FORMATS.values() if one.levels])  # a table of 16
# levels that are whole numbers of seven bits, of codes below 8 not above 0 and of others not below
WHOLE_LEVELS = tuple(
    [
        name
        for name in LEVELS
        if all([int(x) == x < 128 for x in ELEMENT_FORMATS[name].levels[8:]])
        and all([0 <= -x == -int(x) < 128 for x in ELEMENT_FORMATS[name].levels[:8]])
    ]
)
DECODED = ("int4", "int5", "int6", "int8", "e2m1", "e3m2", "e2m3", "e4m3", *LEVELS)


class GemmConfig(NamedTuple):
    """Tile sizes BLOCK_N and BLOCK_K, pipeline stages and warps of one GEMM."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int

    def stage_bytes(self, block_m: int, bits: int, x_size: int) -> int:
        """Bytes of shared memory of a stage: of weights of so many bits, and of `block_m` rows of
        an input of `x_size` bytes an element.
        """
        return self.block_n * self.block_k * bits // 8 + block_m * self.block_k * x_size


class LayerConfig(NamedTuple):
    """Everything about a layer's launches that depends on the number of rows. Calls with equal
    configs run the same compiled kernels, so that warming up one of them warms up all.
    """

    gemm1: GemmConfig
    gemm2: GemmConfig
    block_m: int  # rows of a block
    sort_chunk: int  # pairs that the sorting kernel handles at a time
    kernel: str = SM80_MMA  # the kernel file of the GEMMs: in `gemm` or `mixed_gemm`
    direct: bool = False  # block b is pair b, and no sorting kernel runs
    quantize_x: bool = False  # a kernel of its own quantizes x, not GEMM1
    h_in_fp32: bool = False  # h is fp32, and GEMM2 quantizes it, not GEMM1
    split_m: int = 1  # programs of GEMM2 that share a block's rows (sm90_tma)
    split_k: int = 1  # programs of GEMM2 that share a tile's reduction (sm90_wgmma)


def block_bound(rows: Any, groups: int, block_m: int) -> Any:
    """Upper bound of the blocks of `block_m` rows that `rows` rows in `groups` groups need. int or
    SymInt.

    A group of c > 0 rows needs ceil(c / block_m) <= (c + block_m - 1) / block_m, and at most
    min(rows, groups) groups have rows. The bound falls as block_m grows.
    """
    return minimum(rows, (rows + minimum(rows, groups) * (block_m - 1)) // block_m)


def pairs_here(pairs: int, experts: int, routed: int) -> int:
    """As many of the pairs as come to `experts` of `routed` experts that are chosen alike: those
    here, of experts that are on several devices. `routed` 0: all are here.
    """
    return cdiv(pairs * experts, routed) if routed else pairs


def pair_bucket(pairs: int) -> int:
    """The least of PAIR_BUCKETS that is >= `pairs`, 0 if there is none."""
    return next((most for most in PAIR_BUCKETS if pairs <= most), 0)


def sort_chunk(rows: int) -> int:
    """Pairs that the sorting kernel handles at a time: the fastest of few sizes on an H200, so
    that few kernels are compiled.
    """
    if rows <= 512:
        return 64 if rows <= 64 else 256
    return 1024 if rows <= 4096 else 2048 if rows <= 16384 else 4096


def fields_of(config: LayerConfig) -> dict[str, Any]:
    """A config as a row of a table: its kernel, its tile sizes, and all other fields that differ
    from their defaults.

    `sort_chunk` is left out, because it follows from M alone.
    """
    fields: dict[str, Any] = {"kernel": config.kernel, "block_m": config.block_m}
    fields |= {"gemm1": config.gemm1._asdict(), "gemm2": config.gemm2._asdict()}
    defaults = LayerConfig._field_defaults
    return fields | {
        name: value
        for name, value in config._asdict().items()
        if name in defaults and name not in fields and value != defaults[name]
    }


def config_of(fields: Mapping[str, Any], sort_chunk: int) -> LayerConfig:
    """The config that `fields_of` wrote."""
    gemms = {name: GemmConfig(**fields[name]) for name in ("gemm1", "gemm2")}
    return LayerConfig(**{**fields, **gemms}, sort_chunk=sort_chunk)
