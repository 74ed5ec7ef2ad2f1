"""How the ranks of a group add up what their experts return, inside of the operator that runs
them: `ExpertsArgs.exchange` names it, and `parallel` opens what it names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from moe_ops.ops.args import ExpertsArgs


class Opened(Protocol):
    """An exchange of outputs (R * T, K), of T tokens of each of R ranks."""

    @property
    def mailbox(self) -> Any:
        """Into which ranks write (`kernels.comm.mailbox`)."""

    @property
    def spins(self) -> int:
        """Looks at a flag after which another rank is given up."""

    def add(self) -> None:
        """Let the first T rows be the sums over all ranks of this one's tokens."""


_open: Callable[[str, Tensor], Opened] | None = None


def register_opener(function: Callable[[str, Tensor], Opened]) -> None:
    """Open exchanges by this function of an exchange's name and the outputs."""
    global _open
    _open = function


def opened(args: ExpertsArgs) -> Opened:
    """The exchange of a call."""
    assert _open is not None, args.exchange  # who names one has loaded `parallel`
    return _open(args.exchange, args.out)


def adding_ranks(launch: Callable[[ExpertsArgs], None], itself: bool) -> Callable:
    """A launcher that also serves calls with an exchange: by itself, unless they run in chunks, or
    by a step behind it.
    """

    def run(args: ExpertsArgs) -> None:
        if not args.exchange or (itself and not 0 < args.chunk_rows < args.topk_ids.shape[0]):
            return launch(args)
        launch(args._replace(exchange=""))
        opened(args).add()

    return run
