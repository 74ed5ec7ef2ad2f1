"""Exchanges: communication between ranks inside of the operator of the experts, which sends tokens
to the ranks of their experts and adds up the outputs. `Options.exchange` names an exchange, and
`parallel` opens it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.backend import Exchanges


class Opened(Protocol):
    """An open exchange of tokens and outputs (R * T, K), T of each of R ranks."""

    @property
    def arrivals(self) -> Any:
        """The mailbox (`kernels.comm.mailbox`) into which ranks write tokens, unquantized or
        quantized (`sends_quantized`).
        """

    @property
    def mailbox(self) -> Any:
        """The mailbox into which ranks write outputs."""

    @property
    def spins(self) -> int:
        """Polls of another rank's flag before a kernel gives up."""

    def gather(self, x: Tensor) -> Tensor:
        """The tokens (R * T, K) of all ranks; this rank's are x (M, K)."""

    def gather_quantized(self, x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
        """As `gather`, but quantized before they travel: rows, and scales (R * T, groups)."""

    def add(self) -> None:
        """Write the sums over all ranks for this rank's tokens into the first T rows."""


QUANTIZED = "quantized "  # prefix of the names of exchanges that send tokens quantized

_open: Callable[[str, Tensor, int], Opened] | None = None


def register_opener(function: Callable[[str, Tensor, int], Opened]) -> None:
    """Register what opens an exchange: (its name, out, rows of hidden_states) -> Opened."""
    global _open
    _open = function


def opened(args: ExpertsArgs) -> Opened:
    """The exchange of a call.

    Raises:
        ValueError: no dispatcher has an exchange of this name; or there are not T rows per rank,
            or more than T of this rank.
        RuntimeError: the dispatchers are not imported, in a process that runs an exported program.
    """
    name = args.options.exchange
    if _open is None:
        raise RuntimeError(
            f"exchange {name!r} needs moe_ops.parallel.symmetric_memory: import it first"
        )
    return _open(name, args.out, args.hidden_states.shape[0])


def has_own_rows(args: ExpertsArgs) -> bool:
    """Whether hidden_states are this rank's tokens, which the operator has to send."""
    return bool(args.options.exchange) and args.hidden_states.shape[0] != args.topk_ids.shape[0]


def sends_quantized(exchange: str) -> bool:
    """Whether this rank's tokens are quantized by the scheme before they travel. The bits are
    those that the rank of their experts would have made.
    """
    return exchange.startswith(QUANTIZED)


def gathered(args: ExpertsArgs) -> ExpertsArgs:
    """The arguments with the tokens of all ranks."""
    if not has_own_rows(args):
        return args
    exchange, x = opened(args), args.hidden_states
    if args.hidden_states_scale is not None:
        raise ValueError(
            "hidden_states must have the rows of all ranks where they arrive quantized, got "
            f"{x.shape[0]} rows: send them by the dispatcher's dispatch_quantized"
        )
    if sends_quantized(args.options.exchange):
        x, scale = exchange.gather_quantized(x, args.w13_scheme)
        return args._replace(hidden_states=x, hidden_states_scale=scale)
    return args._replace(hidden_states=exchange.gather(x))


def over_ranks(launch: Callable[[ExpertsArgs], None], does: Exchanges) -> Callable:
    """`launch`, extended to calls with an exchange. What the launcher does not do itself, send
    tokens or add up outputs, runs before or after it; calls in chunks do both so.
    """
    sends, adds = bool(does.sends_rows), does.adds_ranks

    def run(args: ExpertsArgs) -> None:
        if not args.options.exchange:
            return launch(args)
        # plans of such calls size workspaces for quantized rows
        if sends_quantized(args.options.exchange) and not has_own_rows(args):
            raise ValueError(
                "hidden_states must be this rank's tokens alone with an exchange that quantizes "
                f"them, got {args.hidden_states.shape[0]} rows, as many as topk_ids has: call "
                "`dispatch_routing` in a group of several ranks, or pass the dispatcher's "
                "`exchange`"
            )
        whole = not 0 < args.options.chunk_rows < args.topk_ids.shape[0]
        if not (sends and whole and args.hidden_states_scale is None):
            args = gathered(args)
        if adds and whole:
            return launch(args)
        exchange = opened(args)
        launch(args._replace(options=args.options._replace(exchange="")))
        exchange.add()

    return run
