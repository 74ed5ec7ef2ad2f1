"""`Backend`: the functions of a backend, and three records of facts about it."""

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
    """For a library that is always installed and built."""


def _not_shown(problem: Problem, machine: Machine) -> list[str]:
    """For a backend that states nothing about batch invariance."""
    return ["not shown to be batch invariant"]


class Shortcut(NamedTuple):
    """A way past the launcher for calls that differ only in values, addresses, the number of rows
    and the strides of rows.
    """

    most_rows: int  # calls with more take the launcher
    # (call, M, addresses of the tensors among the op's arguments, in order) -> out
    run: Callable[[Any, int, Sequence[int]], Tensor]


class Claim(NamedTuple):
    """The average rows per expert at which "auto" prefers a backend that was not timed to all that
    are registered before it.
    """

    since: int  # from so many rows on
    # to fewer than so many, if the backend before it has a claim too; None: to any number
    until: int | None = None


class Operator(NamedTuple):
    """A registered operator, as `register` makes it from a launcher."""

    op: Any
    kernels: dict[str, Callable]  # device type -> kernel, which the dispatcher also calls


@dataclass(frozen=True)
class Library:
    """The library that a backend calls, and its state on this machine."""

    available: Callable[[], str | None] = _nothing  # None, or why not and what to install
    distribution: str = ""  # its name for pip
    newest_tested: str = ""  # newest version of the distribution with which tests ran
    interpreted: bool = False  # on a CPU it runs in an interpreter: only when named
    # None where it is built; else why "auto" leaves it out: a call that names it would first
    # build it, for minutes
    unbuilt: Callable[[Machine], str | None] = _nothing
    # kernels that cannot run for a problem, with reasons, for `explain`
    missing_kernels: Callable[[Problem, Machine], list[str]] = lambda problem, machine: []
    # context manager that `moe_ops.warmup` enters around a call of so many rows. The library may
    # tune in it, and save results under `environment.cache_folder()`.
    warm: Callable[[int], AbstractContextManager] | None = None
    # bytes that the library itself allocates for so many rows, in addition to the workspaces
    own_bytes: Callable[[int, Problem], int] = lambda rows, problem: 0

    @property
    def untested_version(self) -> str | None:
        """Note on a distribution that is newer than the tested ones, else None."""
        if not (self.distribution and self.newest_tested):
            return None
        return environment.newer_than_tested(self.distribution, self.newest_tested)


class Adapts(NamedTuple):
    """How a backend runs experts whose tokens have adapters."""

    run: Callable[[Any], None]  # the launcher, of AdaptedArgs
    # fp32 elements of `adapter_workspace`: (M, problem, ranks of the pairs of w13 and of w2)
    elements: Callable[[Any, Problem, tuple[int, int]], Any] = lambda M, problem, ranks: 0
    # reasons why it does not, in addition to those of the problem without adapters
    supports: Callable[[Problem, Machine], list[str]] = lambda problem, machine: []


@dataclass(frozen=True)
class Takes:
    """The calls that a backend takes, in addition to what `supports` says of each problem."""

    native_schemes: tuple[str, ...] = ()  # multiplied in their own formats, not dequantized
    native_capability: tuple[int, int] = (0, 0)  # the lowest that multiplies fp8 activations
    # whether kernels decode a scheme outside of `native_schemes` while they multiply
    decodes: Callable[[Problem, Machine], bool] | None = None
    quantized_input: tuple[str, ...] = ()  # schemes whose input may arrive quantized
    # whether w13 and w2 may have two schemes; `supports` is asked about these layers then
    two_schemes: bool = False
    # whether launchers run more than `Options.chunk_rows` rows in chunks (ops/chunks.py);
    # otherwise workspaces are not bounded
    chunked: bool = False
    # types of devices on which it runs resident experts, in slots (ops/resident.py)
    resident_on: tuple[str, ...] = ()
    # runs the arguments of experts in passes over subsets of them, as
    # `pipeline.gathered.run_in_passes`; without passes, as its launcher, those of `Options.slots`
    passes: Callable[..., None] | None = None
    adapts: Adapts | None = None  # None: its tokens have no adapters
    activation_by_expert: bool = False  # whether alpha, beta and limit may differ by expert
    # reasons why, under `Options.batch_invariant`, the bits of a token's row may depend on its
    # batch, or differ from those of another backend that takes the problem; empty if they do not
    depends_on_batch: Callable[[Problem, Machine], list[str]] = _not_shown
    differentiable: bool = False  # for "torch" alone: all gradients run on its products

    def native(self, scheme: str, machine: Machine) -> bool:
        """Whether products on `machine` are in the formats of the scheme, and not emulated. Both
        must be for a layer of two schemes.
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
    """The parts of an exchange (ops/exchange.py) that a launcher of experts does itself."""

    adds_ranks: bool = False  # its last kernel adds up the outputs of the ranks
    # schemes, in their natural layout, for which it takes this rank's tokens and sends them to
    # the other ranks (`has_own_rows`)
    sends_rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """One implementation of the operators, which `ops.library.register` defines."""

    name: str
    supports: Callable[[Problem, Machine], list[str]]  # reasons why not; empty if it can run
    workspace_shapes: Callable[[int, Problem], Workspaces]  # first argument: M (or T, or S)
    # `Problem.kind` -> launcher of one argument tuple, which imports its library at the first call
    launch: dict[str, Callable]
    # dispatch keys with a kernel ("CPU", "CUDA"). On other devices a call is an error: the fake is
    # registered for fake tensors alone.
    devices: tuple[str, ...]
    library: Library = Library()
    takes: Takes = Takes()
    exchanges: Exchanges = Exchanges()
    relayouts: tuple[Relayout, ...] = ()  # the layouts that `prepare` can make for it
    claim: Callable[[Problem], Claim | None] | None = None  # None: the row of tables/claims.json
    # The shortcut, if there is one, for calls like that of an argument tuple (without workspaces):
    # tensors of the same types, dtypes and sizes but M; the same strides but those of rows.
    shortcut: Callable[[Any], Shortcut | None] | None = None
    operators: dict[str, Operator] = field(default_factory=dict)  # by kind, from `register`
