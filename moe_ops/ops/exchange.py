"""How the ranks of a group send tokens to the operator that runs their experts, and add up what
it returns, inside of it: `Options.exchange` names it, and `parallel` opens what it names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.backend import Exchanges


class Opened(Protocol):
    """An exchange of tokens and of outputs (R * T, K), of T tokens of each of R ranks."""

    @property
    def arrivals(self) -> Any:
        """Into which ranks write tokens (`kernels.comm.mailbox`), as they are or quantized
        (`sends_quantized`).
        """

    @property
    def mailbox(self) -> Any:
        """Into which ranks write outputs."""

    @property
    def spins(self) -> int:
        """Looks after which another rank is given up."""

    def gather(self, x: Tensor) -> Tensor:
        """The tokens (R * T, K) of all ranks, of which this one has x (M, K)."""

    def gather_quantized(self, x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
        """The same, quantized before they travel: rows, and scales (R * T, groups)."""

    def add(self) -> None:
        """Let the first T rows be the sums over all ranks of this one's tokens."""


QUANTIZED = "quantized "  # how exchanges begin that send tokens quantized

_open: Callable[[str, Tensor, int], Opened] | None = None


def register_opener(function: Callable[[str, Tensor, int], Opened]) -> None:
    """Open exchanges by this function of an exchange's name, the outputs, and the rows of
    hidden_states.
    """
    global _open
    _open = function


def opened(args: ExpertsArgs) -> Opened:
    """The exchange of a call.

    Raises:
        ValueError: the name is none of a dispatcher's, or there are not T rows of each rank, or
            more than T of this one.
        RuntimeError: dispatchers were not loaded, in a process that runs an exported program.
    """
    name = args.options.exchange
    if _open is None:
        raise RuntimeError(
            f"exchange {name!r} needs moe_ops.parallel.symmetric_memory: import it first"
        )
    return _open(name, args.out, args.hidden_states.shape[0])


def has_own_rows(args: ExpertsArgs) -> bool:
    """Whether hidden_states are this rank's tokens, which are still to be sent."""
    return bool(args.options.exchange) and args.hidden_states.shape[0] != args.topk_ids.shape[0]


def sends_quantized(exchange: str) -> bool:
    """Whether this rank's tokens travel as the scheme quantizes them, with the bits that their
    experts would have made of them: to their experts they arrive quantized.
    """
    return exchange.startswith(QUANTIZED)


def gathered(args: ExpertsArgs) -> ExpertsArgs:
    """The same with the tokens of all ranks."""
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
    """A launcher that also serves calls with an exchange. What it does not do by itself, send
    tokens or add up outputs, is a step before or behind it; and both are if they run in chunks.
    """
    sends, adds = bool(does.sends_rows), does.adds_ranks

    def run(args: ExpertsArgs) -> None:
        if not args.options.exchange:
            return launch(args)
        # Plans of such calls take it that a backend without `sends_rows` gets quantized rows, and
        # size its workspaces so.
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
