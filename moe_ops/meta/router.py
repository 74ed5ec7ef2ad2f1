"""How the router of few tokens is split over programs. Arithmetic only, on int or SymInt.

M tokens, K hidden size, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moe_ops.meta.workspace import cdiv, minimum

MAX_TOKENS = 16  # more use torch's product, as do more than LARGE_TOKENS of large routers
# Large routers are faster by torch's product from fewer tokens on than small ones.
LARGE_TOKENS = 4
_LARGE = 1 << 20  # elements of the weight
PROGRAM_TOKENS = 8  # tokens with which one program multiplies its tile of the weight
_PROGRAMS = 128  # at least so many programs, about one for each multiprocessor
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

    With more splits, more of the weight is in flight at once, and the next kernel has more to add.
    """
    block_e = 8 if E <= 128 else 16
    wanted = min(max(K * cdiv(E, block_e) // _PROGRAMS, cdiv(K, 16)), cdiv(K, 8))
    block_k = _MIN_BLOCK_K
    while block_k < wanted and block_k * block_e < _MAX_TILE:
        block_k *= 2
    num_warps = 4 if block_e * block_k <= 4096 else 8
    return RouterTiles(block_e, block_k, cdiv(K, block_k), num_warps)


def max_tokens(E: int, K: int) -> int:
    """Tokens up to which the two kernels run, instead of torch's product."""
    return MAX_TOKENS if E * K < _LARGE else LARGE_TOKENS


def router_workspace(M: Any, E: int, K: int) -> tuple[Any]:
    """Shape of the fp32 workspace: (split_k, M, E) sums if M is small; for other M it is never
    read.
    """
    return (router_tiles(E, K).split_k * E * minimum(M, max_tokens(E, K)),)
