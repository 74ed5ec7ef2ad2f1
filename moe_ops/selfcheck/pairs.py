"""A scheme on a backend: what the backend takes of it, and what its results are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops import backends as backends_module
from moe_ops.experts import explain, fused_experts
from moe_ops.ops import relayout
from moe_ops.ops.backend import Backend
from moe_ops.ops.problem import Machine
from moe_ops.planning import machine as machines
from moe_ops.planning import plan as plans
from moe_ops.schemes import get_scheme
from moe_ops.selfcheck import cases
from moe_ops.selfcheck.cases import SHAPES, Case, Sizes
from moe_ops.selfcheck.report import AGREES, DIFFERS, NOT_RUN, RAISED, REFUSED, Row


@dataclass
class Pair:
    """A scheme on a backend, and what came of it."""

    scheme: str
    backend: Backend
    prepared: bool
    taken: dict[Sizes, list[Case]]  # calls that the backend says it takes, the one to make first
    reason: str = ""  # why there are none, or why one was refused after all
    verdict: str = ""
    errors: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    allowed: float | None = None
    detail: str = ""
    unfinished: str = ""  # why nothing is known of a call that did not end

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run; not after a call that raised, either."""
        ran = len(self.token_counts) == len(self.taken)
        return ran or bool(self.reason) or self.verdict == RAISED

    def run(self, shape: Sizes, device: torch.device) -> None:
        """Make the first call of a shape that is not refused after all, for its tensors."""
        for case in self.taken[shape]:
            try:
                arguments = self._arguments(cases.expected(case)[0], device)
                explain(**{k: v for k, v in arguments.items() if k != "topk_weights"})
            except (ValueError, ImportError) as error:
                self.reason = _first_line(error)
            except Exception as error:
                return self._note_raised(error, case)
            else:
                return self._call(arguments, case, device)

    def _call(self, arguments: dict[str, Any], case: Case, device: torch.device) -> None:
        """Make a call and compare its result."""
        self.allowed = cases.allowed_error(self.scheme, device.type)
        self.token_counts.append(case.shape.M)
        try:
            with torch.no_grad(), _FilledWithNaN():
                out = fused_experts(**arguments)
            out = out.cpu()  # what a GPU raises, it raises here
        except Exception as error:  # a backend may raise anything
            return self._note_raised(error, case)
        checked = cases.check(out, case, self.allowed)
        self.errors.append(checked.error)
        if checked.wrong or not checked.error <= self.allowed:
            self._note(DIFFERS, f"{checked.wrong or f'error {checked.error:.1e}'} at {case}")
        elif not self.verdict:
            self.verdict = AGREES

    def _arguments(self, given: cases.Given, device: torch.device) -> dict[str, Any]:
        """The arguments of `fused_experts`, on the device: copies, which a backend may spoil."""
        from moe_ops.tensors import prepare

        values = given._asdict()
        weights = [values.pop(name).to(device) for name in ("w13", "w2")]
        name = self.backend.name
        if self.prepared:
            activations = (cases.ACTIVATION, None)
            weights = [
                prepare(weight, name, activation=activation)
                for weight, activation in zip(weights, activations, strict=True)
            ]
        copies = {k: None if v is None else v.to(device, copy=True) for k, v in values.items()}
        x = copies.pop("x")
        named = {"hidden_states": x, "w13": weights[0], "w2": weights[1], **copies}
        return {**named, "activation": cases.ACTIVATION, "backend": name}

    def _note_raised(self, error: Exception, case: Case) -> None:
        self._note(RAISED, f"{type(error).__name__}: {_first_line(error)} (at {case})")

    def _note(self, verdict: str, detail: str) -> None:
        """The outcome of several calls: the first that raised, else the first that differs."""
        if self.verdict != RAISED and (verdict == RAISED or self.verdict != DIFFERS):
            self.verdict, self.detail = verdict, detail

    def row(self, lost: str) -> Row:
        """What to report; `lost`: why calls were left out, if not for want of time."""
        verdict, detail = self.verdict, self.detail
        if not verdict:
            verdict = REFUSED if self.reason else NOT_RUN
            detail = self.reason or self.unfinished or lost or "out of time"
        elif self.unfinished and verdict == AGREES:
            detail = f"but a call {self.unfinished}"
        # max() would drop a NaN
        error = math.nan if any(map(math.isnan, self.errors)) else max(self.errors, default=None)
        counts = tuple(sorted(self.token_counts))
        return Row(
            self.scheme,
            self.backend.name,
            self.prepared,
            verdict,
            error,
            self.allowed if self.token_counts else None,
            counts,
            detail,
        )


def all_pairs(device: torch.device, names: list[str] | None, schemes: list[str]) -> list[Pair]:
    """All pairs, one scheme after the other, so that backends share its fp64 results."""
    here = machines.machine(device)
    found: list[Pair] = []
    for scheme, backend in product(schemes, backends_module.BACKENDS):
        if names is None or backend.name in names:
            found += pairs_of(scheme, backend, here, names is not None)
    return found


def pairs_of(scheme: str, backend: Backend, here: Machine, named: bool) -> Iterator[Pair]:
    """The pair of weights as they are and that of prepared ones, of those that are taken; one with
    a reason if neither is.
    """
    refusals: list[list[str]] = []
    taken: dict[bool, dict[Sizes, list[Case]]] = {False: {}, True: {}}
    for shape, bias in product(SHAPES, (True, False)):
        for multiple in shape.multiples:
            case = Case(scheme, shape, multiple, bias)
            for problem in relayout.variants(case.problem, backend.name):
                reasons = plans.why_not(backend, problem, here, named)
                prepared = problem.layout != ""
                refusals.append(reasons)
                if not reasons:
                    activation = get_scheme(scheme).activation
                    known = prepared and activation is not None and activation.global_scale
                    case = case._replace(known_scale=known)
                    if case not in (others := taken[prepared].setdefault(shape, [])):
                        others.append(case)
    for prepared, calls in taken.items():
        if calls:
            yield Pair(scheme, backend, prepared, calls)
    if not any(taken.values()):
        # as few reasons as there are, of the weights' layout and sizes that fit best
        yield Pair(scheme, backend, False, {}, "; ".join(sorted(refusals, key=len)[0]))


class _FilledWithNaN(TorchDispatchMode):
    """What is allocated around an operator holds NaN, so that a result that was not written, or
    that lies where that of another backend lay, does not agree.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATES and isinstance(out, Tensor):
            out.fill_(math.nan if out.is_floating_point() else -1 if out.dtype.is_signed else 255)
        return out


_aten = torch.ops.aten
_ALLOCATES = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
