"""What a backend says of itself: functions, and three records of facts with defaults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from moe_ops import environment
from moe_ops.ops.problem import Machine, Problem, Workspaces
from moe_ops.ops.relayout import Relayout
from moe_ops.schemes import get_scheme, schemes_of_layer


def _nothing(*_: Any) -> None:
    """Of a library that is always there, and built."""


def _not_shown(problem: Problem, machine: Machine) -> list[str]:
    """Of a backend that says nothing about batch invariance."""
    return ["not shown to be batch invariant"]


class Shortcut(NamedTuple):
    """What runs calls that differ from one in values, addresses, rows and their strides alone, at
    most so many rows: (call, M, addresses of all tensors of the op's arguments that are given, in
    order) -> out. The dispatcher would take their tensors to the kernel as they are.
    """

    most_rows: int
    run: Callable[[Any, int, Sequence[int]], Tensor]


class Claim(NamedTuple):
    """From how many rows an expert, on average, "auto" takes a backend where it was not timed, in
    the place of all that are registered before it.
    """

    since: int
    # rows from which the last one of those is faster again, if that one has a claim, too
    until: int | None = None


class Operator(NamedTuple):
    """What `register` makes of a launcher."""

    op: Any  # the registered operator
    kernels: dict[str, Callable]  # device type -> what the dispatcher calls there


@dataclass(frozen=True)
class Library:
    """What a backend calls, and whether that is there."""

    available: Callable[[], str | None] = _nothing  # None, or why not and what to install
    distribution: str = ""  # what pip calls it
    newest_tested: str = ""  # the newest version of the distribution that tests ran with
    interpreted: bool = False  # on a CPU: by an interpreter, for tests; never chosen by "auto"
    # why "auto" leaves the backend out on a machine where a call that names it would first build
    # it, for minutes; None where it is built
    unbuilt: Callable[[Machine], str | None] = _nothing
    # kernels that it must do without for a problem, and why: `explain` says so
    missing_kernels: Callable[[Problem, Machine], list[str]] = lambda problem, machine: []
    # what `moe_ops.warmup` enters around a call of so many rows: there a library may tune, and
    # save what it found below `environment.cache_folder()`
    warm: Callable[[int], AbstractContextManager] | None = None
    # bytes that it allocates by itself for so many rows, beside the workspaces
    own_bytes: Callable[[int, Problem], int] = lambda rows, problem: 0

    @property
    def untested_version(self) -> str | None:
        """What to say of a distribution that is newer than tested; None of others."""
        if not (self.distribution and self.newest_tested):
            return None
        return environment.newer_than_tested(self.distribution, self.newest_tested)


@dataclass(frozen=True)
class Takes:
    """Which calls a backend takes, beside what `supports` says of each, and how it runs them."""

    native_schemes: tuple[str, ...] = ()  # run without dequantizing to a wider product
    native_capability: tuple[int, int] = (0, 0)  # least one that multiplies fp8 activations
    # whether kernels here decode a scheme that is not in `native_schemes` as they multiply
    decodes: Callable[[Problem, Machine], bool] | None = None
    quantized_input: tuple[str, ...] = ()  # schemes of which the input may arrive quantized
    # whether `supports` is asked about layers whose w13 and w2 have different schemes; else they
    # are refused
    two_schemes: bool = False
    # its launchers run calls of more than `Options.chunk_rows` rows in chunks (ops/chunks.py);
    # only then are its workspaces bounded
    chunked: bool = False
    # reasons why a token's row may depend on its batch under `Options.batch_invariant`, or differ
    # from that of another backend that takes the problem; empty: never
    depends_on_batch: Callable[[Problem, Machine], list[str]] = _not_shown
    differentiable: bool = False  # of "torch" alone, whose products all gradients run on

    def native(self, scheme: str, machine: Machine) -> bool:
        """Whether products on `machine` are those of the scheme's own formats, not emulated; of a
        layer's two schemes, of both.
        """
        return all([self._native(one, machine) for one in schemes_of_layer(scheme)])

    def _native(self, scheme: str, machine: Machine) -> bool:
        if not scheme:
            return True
        if scheme not in self.native_schemes:
            return False
        activation = get_scheme(scheme).activation
        if activation is None or activation.dtype == "int8":  # any tensor core multiplies int8
            return True
        return not machine.capability < self.native_capability  # Dynamo of torch 2.11 has no >=

    def emulates(self, problem: Problem, machine: Machine) -> bool:
        """Whether a call on `machine` multiplies dequantized copies of its operands."""
        decodes = self.decodes is not None and self.decodes(problem, machine)
        return not (decodes or self.native(problem.scheme, machine))


@dataclass(frozen=True)
class Exchanges:
    """What a launcher of experts does itself of calls with an exchange (ops/exchange.py)."""

    adds_ranks: bool = False  # its last kernel adds up the outputs of ranks
    # schemes of which, in their natural layout, it takes this rank's tokens, which it sends to the
    # others (`has_own_rows`)
    sends_rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """A way to run the operators; `ops.library.register` defines them."""

    name: str
    supports: Callable[[Problem, Machine], list[str]]  # reasons why not; empty means yes
    workspace_shapes: Callable[[int, Problem], Workspaces]  # first argument: M (or T, or S)
    # `Problem.kind` -> function of one argument tuple; imports its library when first called
    launch: dict[str, Callable]
    # dispatch keys that have a kernel ("CPU", "CUDA"). Fakes serve every other purpose, so that a
    # missing kernel is an error and not a silent use of the fake.
    devices: tuple[str, ...]
    library: Library = Library()
    takes: Takes = Takes()
    exchanges: Exchanges = Exchanges()
    relayouts: tuple[Relayout, ...] = ()  # what `prepare` can do for it
    claim: Callable[[Problem], Claim | None] | None = None  # None: the row of tables/claims.json
    # the shortcut past its launcher of calls like that of an argument tuple, which has no
    # workspaces, if there is one: tensors of the same types, sizes but M, and strides (of those
    # with M, of columns of stride 1)
    shortcut: Callable[[Any], Shortcut | None] | None = None
    operators: dict[str, Operator] = field(default_factory=dict)  # by kind; `register` makes them
