"""How the router of few tokens is split over programs. Arithmetic only, int or SymInt alike.

M tokens, K hidden size, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moe_ops.meta.workspace import cdiv, minimum

MAX_TOKENS = 16  # more run through torch's product, as do more than LARGE_TOKENS of large routers
# On an H200, 8 tokens of a router of 256 x 7168 took 12.2 us, 10.2 through torch's product; one 6.8. At 128 x 2048,
# 16 tokens took 6.4, and 8.0 through torch.
LARGE_TOKENS = 4
_LARGE = 1 << 20  # elements of the weight
PROGRAM_TOKENS = 8  # rows that one program multiplies its piece of the weight with
_PROGRAMS = 128  # to start at least, about one for each multiprocessor
_MIN_SPAN = 256  # 8 columns, or 16 bytes, for each lane of a warp
_MAX_PIECE = 16384  # elements; 64 for each of 256 threads


class RouterTiles(NamedTuple):
    """One program sums `span` columns of `experts` rows of the weight."""

    experts: int
    span: int
    splits: int  # programs that share a row; their sums are added in this order by the next kernel
    warps: int


def router_tiles(E: int, K: int) -> RouterTiles:
    """The pieces of a router's weight (E, K).

    More splits put more of the weight in flight at once, and give the next kernel more to add.
    """
    experts = 8 if E <= 128 else 16
    wanted = min(max(K * cdiv(E, experts) // _PROGRAMS, cdiv(K, 16)), cdiv(K, 8))
    span = _MIN_SPAN
    while span < wanted and span * experts < _MAX_PIECE:
        span *= 2
    warps = 4 if experts * span <= 4096 else 8
    return RouterTiles(experts, span, cdiv(K, span), warps)


def max_tokens(E: int, K: int) -> int:
    """Tokens up to which the two kernels run."""
    return MAX_TOKENS if E * K < _LARGE else LARGE_TOKENS


def router_workspace(M: Any, E: int, K: int) -> tuple[Any]:
    """Shape of the fp32 workspace: (splits, M, E) sums where M is small, nothing is read of it else."""
    return (router_tiles(E, K).splits * E * minimum(M, max_tokens(E, K)),)
