"""How the router of few tokens is split over programs. Arithmetic only, int or SymInt alike.

M tokens, K hidden size, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moe_ops.meta.workspace import cdiv, minimum

MAX_TOKENS = 16  # more run through torch's product, as do more than LARGE_TOKENS of large routers
# On an H200, 8 tokens of a router of 256 x 7168 took 12.2 us, 10.2 through torch's product; one
# 6.8. At 128 x 2048, 16 tokens took 6.4, and 8.0 through torch.
LARGE_TOKENS = 4
_LARGE = 1 << 20  # elements of the weight
PROGRAM_TOKENS = 8  # rows that one program multiplies its tile of the weight with
_PROGRAMS = 128  # to start at least, about one for each multiprocessor
_MIN_BLOCK_K = 256  # 8 columns, or 16 bytes, for each lane of a warp
_MAX_TILE = 16384  # elements; 64 for each of 256 threads


class RouterTiles(NamedTuple):
    """One program sums `block_k` columns of `block_e` rows of the weight."""

    block_e: int
    block_k: int
    split_k: int  # programs that share a row; the next kernel adds their sums in this order
    num_warps: int


def router_tiles(E: int, K: int) -> RouterTiles:
    """The tiles of a router's weight (E, K).

    More splits put more of the weight in flight at once, and give the next kernel more to add.
    """
    block_e = 8 if E <= 128 else 16
    wanted = min(max(K * cdiv(E, block_e) // _PROGRAMS, cdiv(K, 16)), cdiv(K, 8))
    block_k = _MIN_BLOCK_K
    while block_k < wanted and block_k * block_e < _MAX_TILE:
        block_k *= 2
    num_warps = 4 if block_e * block_k <= 4096 else 8
    return RouterTiles(block_e, block_k, cdiv(K, block_k), num_warps)


def max_tokens(E: int, K: int) -> int:
    """Tokens up to which the two kernels run."""
    return MAX_TOKENS if E * K < _LARGE else LARGE_TOKENS


def router_workspace(M: Any, E: int, K: int) -> tuple[Any]:
    """Shape of the fp32 workspace: (split_k, M, E) sums where M is small, else never read."""
    return (router_tiles(E, K).split_k * E * minimum(M, max_tokens(E, K)),)
