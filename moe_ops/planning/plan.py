"""The plan of a call: which backend runs a problem at which number of tokens.

A plan is a function of static facts and never of M, so one captured graph serves every M. Plans
are made in traced code, where facts of the machine and rows of measured tables are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_ops import backends
from moe_ops.environment import constant
from moe_ops.meta.workspace import cdiv, maximum, minimum
from moe_ops.ops.backend import Backend, Claim, Operator
from moe_ops.ops.chunks import ALIGNMENT, experts_of_chunk
from moe_ops.ops.exchange import sends_quantized
from moe_ops.ops.options import encode, text_of_tiers
from moe_ops.ops.problem import Buffer, Machine, Problem, Workspaces
from moe_ops.ops.relayout import variants
from moe_ops.planning.auto import AUTO, RESIDENT
from moe_ops.schemes import get_scheme, layer_scheme
from moe_ops.tables import lookup

# Architectures on which tests ran. Code for others was compiled or traced, never run.
RUN_ON = ("cpu", "SM90")
# By default the workspaces of a call take at most 1 / SHARE_OF_MEMORY of a GPU's memory: 6.3 of an
# H200's 139 GiB.
SHARE_OF_MEMORY = 22
_MANY_ROWS = 1 << 20


@dataclass(frozen=True)
class Plan:
    """Tiers (largest M, backend) in ascending order, -1 for no bound, and the refused backends
    with their reasons.
    """

    problem: Problem
    machine: Machine
    tiers: tuple[tuple[int, Backend], ...]
    refused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    basis: str = ""  # of the tiers: "measured", "heuristic", or "" if only one backend could run
    gradients: str = ""  # how forward and backward pass run, if `explain` was asked for it

    @property
    def backend(self) -> str:
        """Name of the backend whose op runs: that of a single tier, else "auto"."""
        return self.tiers[0][1].name if len(self.tiers) == 1 else "auto"

    @property
    def op(self) -> Callable:
        """The registered op of this plan."""
        return self._operator.op

    @property
    def kernel(self) -> Callable | None:
        """The op's kernel for this plan's device, called past the dispatcher. None for devices
        without one, such as meta, where the dispatcher calls the fake.
        """
        return self._operator.kernels.get(self.machine.device_type)

    @property
    def _operator(self) -> Operator:
        if self.problem.options.resident:
            return RESIDENT
        backend = self.tiers[0][1] if len(self.tiers) == 1 else AUTO
        return backend.operators[self.problem.kind]

    @property
    def options(self) -> str:
        """The op's `options` argument: scheme, layout and all static flags, as one text."""
        p = self.problem
        return encode(p.scheme, p.layout, p.options._replace(tiers_text=self.tiers_text))

    @property
    def tiers_text(self) -> str:
        """The tiers in the form of the op's options; empty where one tier is the op's backend."""
        tiers = self.tiers if len(self.tiers) > 1 or self.problem.options.resident else ()
        return text_of_tiers(tuple([(limit, backend.name) for limit, backend in tiers]))

    @property
    def chunk_rows(self) -> int:
        """Rows that the workspaces have room for; calls with more run in chunks. 0: all rows."""
        return self.problem.options.chunk_rows

    @property
    def not_tested_note(self) -> str | None:
        """Warning for devices on which no test has run, else None."""
        return not_tested_note(self.machine.architecture)

    @property
    def max_workspace_bytes(self) -> int:
        """Bound of the workspaces in bytes: the caller's, else the machine's; 0 for no bound."""
        given = self.problem.options.max_workspace_bytes
        return self.machine.total_memory // SHARE_OF_MEMORY if given is None else given

    def num_bytes(self, M: int) -> int:
        """Bytes of scratch memory for M rows: workspaces plus what libraries allocate."""
        total = sum([_bytes(buffer) for buffer in self.workspace_shapes(M)])
        rows = min(M, self.chunk_rows) if self.chunk_rows else M
        more = [
            backend.library.own_bytes(rows if limit < 0 else min(rows, limit), self.problem)
            for limit, backend in self.tiers
        ]
        return total + max(more)

    def num_chunks(self, M: int) -> int:
        """Number of chunks in which a call with M rows runs."""
        if not self.chunk_rows or M == 0:
            return 1
        if self.problem.kind == "experts":
            return cdiv(M, self.chunk_rows)
        experts = self.problem.num_experts
        return cdiv(experts, experts_of_chunk(experts, M, self.chunk_rows))

    @property
    def differentiable(self) -> bool:
        """Whether all tiers have gradients."""
        return all([backend.takes.differentiable for _, backend in self.tiers])

    def workspace_shapes(self, M: int) -> Workspaces:
        """Shapes and dtypes of the workspaces for M tokens (batched_experts: T rows per expert;
        grouped_linear: S rows).
        """
        problem, rows = self.problem, M
        if self.chunk_rows and problem.kind == "experts":
            rows = minimum(M, self.chunk_rows)
        elif self.chunk_rows:
            experts = experts_of_chunk(problem.num_experts, M, self.chunk_rows)
            problem = replace(problem, num_experts=experts)
        if len(self.tiers) == 1:
            return self.tiers[0][1].workspace_shapes(rows, problem)
        sizes: list = [0, 0, 0]
        for limit, backend in self.tiers:
            most = rows if limit < 0 else minimum(rows, limit)
            buffers = backend.workspace_shapes(most, problem)
            sizes = [maximum(a, _bytes(b)) for a, b in zip(sizes, buffers, strict=True)]
        return Workspaces(
            Buffer((sizes[0],), torch.uint8),
            Buffer((sizes[1],), torch.uint8),
            Buffer(((sizes[2] + 3) // 4,), torch.int32),
        )

    def __str__(self) -> str:
        p, m = self.problem, self.machine
        where = m.gpu_name or m.device_type
        lines = [
            f"{p.kind}: E={p.num_experts} top_k={p.top_k} K={p.hidden_size} "
            f"I={p.intermediate_size} {_schemes_text(p)} {_name(p.dtype)} on {where}"
        ]
        if p.quantized_input:
            arrives = "the input arrives quantized: no pass quantizes it"
            travels = "tokens are quantized before they travel to other ranks"
            lines.append(f"  {travels if sends_quantized(p.options.exchange) else arrives}")
        if p.options.batch_invariant:
            lines.append("  batch invariant: a token's row has the same bits in every batch")
        if p.options.resident:
            lines.append("  experts in host memory: those of a call are brought to slots first")
        if self.not_tested_note:
            lines.append(f"  {self.not_tested_note}")
        if self.gradients:  # the operators of training take no workspaces
            lines.append(f"  forward and backward pass: {self.gradients}")
        else:
            lines += self._tiers_and_workspaces()
        for name, reasons in self.refused:
            lines.append(f"  not {name}: {'; '.join(reasons)}")
        return "\n".join(lines)

    def _tiers_and_workspaces(self) -> list[str]:
        m, lines, low = self.machine, [], 0
        for limit, backend in self.tiers:
            reach = f"M >= {low}" if limit < 0 else f"M in {low}..{limit}"
            how = " (emulated: operands dequantized, products in a wider type)"
            emulated = backend.takes.emulates(self.problem, m)
            lines.append(f"  {reach}: {backend.name}{how if emulated else ''}")
            low = limit + 1
        if self.basis == "measured":
            lines += self._times()
        elif self.basis and m.gpu_name:
            lines.append("  chosen by a heuristic: this problem was not measured on this GPU")
        for _, backend in self.tiers:
            for reason in backend.library.missing_kernels(self.problem, m):
                lines.append(f"  {backend.name} runs without some of its kernels: {reason}")
            if backend.library.untested_version:
                lines.append(f"  {backend.library.untested_version}")
        for M in (1, 64, 4096):
            parts = self.num_chunks(M)
            chunks = f" in {parts} chunks" if parts > 1 else ""
            lines.append(f"  workspace at M={M}: {self.num_bytes(M) / 2**20:.2f} MiB{chunks}")
        if self.chunk_rows:
            lines.append(
                f"  more than {self.chunk_rows} rows run in chunks, for a workspace of at most "
                f"{self.max_workspace_bytes / 2**20:.2f} MiB"
            )
        return lines

    def _times(self) -> list[str]:
        """Table of the measured times, microseconds per layer, by M and backend."""
        times = lookup.backend_times(*_table_key(self.problem, self.machine))
        names = [b.name for b in backends.BACKENDS if any(b.name in us for _, us in times)]
        others = [backend for _, backend in self.tiers if backend.name not in names]
        claimed = [b.name for b in others if _claim(b, self.problem) is not None]
        lines = ["  measured, us a layer:", "".join([f"  {name:>10}" for name in ("M", *names)])]
        for M, us in times:
            cells = [f"{us[name]:.1f}" if name in us else "-" for name in names]
            lines.append("".join([f"  {cell:>10}" for cell in (str(M), *cells)]))
        lines += [f"  {name} was not timed here: faster elsewhere" for name in claimed]
        return lines


def plan(problem: Problem, machine: Machine, backend: str = "auto") -> Plan:
    """Choose the backends of a problem.

    Args:
        backend: "auto", or the name of a backend, which runs the call or raises; a named backend
            never falls back to another.

    Raises:
        ValueError: the name is unknown, or no backend takes the problem; all reasons are listed.
        ImportError: the library of the named backend is not installed.
    """
    if _trains_invariantly(problem):  # inference computes the output of its forward pass
        plan(problem.replace(needs_grad=False), machine)
    if backend != "auto":
        chosen = backends.named(backend)
        reasons = _reasons(chosen, problem, machine)
        if reasons:
            missing = backend not in machine.available
            missing = missing and reasons[-1] == _why_not_available(backend)
            error = ImportError if missing else ValueError
            raise error(f"backend {backend!r} cannot run this call: {'; '.join(reasons)}")
        return _bounded(Plan(problem, machine, ((-1, chosen),)))
    accepted, refused = [], []
    for candidate in backends.BACKENDS:
        reasons = why_not(candidate, problem, machine)
        if reasons:
            refused.append((candidate.name, tuple(reasons)))
        else:
            accepted.append(candidate)
    native = [b.takes.native(problem.scheme, machine) for b in accepted]  # before emulation
    accepted = [
        b for want in (True, False) for b, is_ in zip(accepted, native, strict=True) if is_ == want
    ]
    if not accepted:
        why = " | ".join([f"{name}: {'; '.join(reasons)}" for name, reasons in refused])
        raise ValueError(f"no backend can run this call: {why}")
    tiers, basis = _measured_tiers(problem, machine, accepted), "measured"
    timed: tuple[str, ...] = ()
    if tiers:
        timed = _timed(*_table_key(problem, machine))
    else:
        tiers, basis = ((-1, accepted[0]),), "heuristic"
    for candidate in accepted if timed else accepted[1:]:
        if candidate.name not in timed:
            tiers = _claimed(problem, tiers, candidate)
    basis = basis if len(accepted) > 1 else ""
    return _bounded(Plan(problem, machine, tiers, tuple(refused), basis))


def _bounded(plan: Plan) -> Plan:
    """`plan` with the most rows a chunk that `max_workspace_bytes` has room for.

    Raises:
        ValueError: the caller's bound has no room for the smallest chunk.
    """
    problem, most = plan.problem, plan.max_workspace_bytes
    if not most or problem.kind == "grouped_linear" or problem.options.needs_grad:
        return plan
    if not all([backend.takes.chunked for _, backend in plan.tiers]):
        return plan
    whole = plan
    if problem.kind == "batched_experts":
        # A chunk holds all rows of some experts. Tiers depend on the rows of one expert, so a
        # chunk must fit whichever tier runs it.
        tiers = tuple([(-1, backend) for _, backend in plan.tiers])
        whole = replace(plan, problem=replace(problem, num_experts=1), tiers=tiers)
    # The bytes of many rows are linear in their number, which gives a first guess. Fewer rows may
    # need more than the line says: then the guess is lowered until it fits.
    first = whole.num_bytes(_MANY_ROWS)
    of_row = (whole.num_bytes(2 * _MANY_ROWS) - first) // _MANY_ROWS + 1
    rows = _MANY_ROWS + (most - first) // of_row
    while True:
        # rounded down to 4 significant bits, so that prompts of round lengths have few chunks
        step = max(1 << max(rows.bit_length() - 4, 0), ALIGNMENT)
        rows = max(rows // step * step, ALIGNMENT)
        needed = whole.num_bytes(rows)
        if needed <= most or (rows == ALIGNMENT and problem.options.max_workspace_bytes is None):
            return replace(plan, problem=problem.replace(chunk_rows=rows))
        if rows == ALIGNMENT:
            break
        rows = min(rows * most // needed, rows - 1)
    raise ValueError(
        f"max_workspace_bytes must be at least {needed} for backend {plan.backend!r}, which needs "
        f"them for a chunk of {rows} rows, got {most}"
    )


_Tiers = tuple[tuple[int, Backend], ...]


def _measured_tiers(problem: Problem, machine: Machine, accepted: Sequence[Backend]) -> _Tiers:
    """Tiers from the measured times of the accepted backends; () if nothing was measured."""
    tiers: list[tuple[int, Backend]] = []
    names = tuple([candidate.name for candidate in accepted])
    for limit, name in _measured(*_table_key(problem, machine), names):
        for candidate in accepted:
            if candidate.name == name:
                if tiers and tiers[-1][1] is candidate:
                    tiers.pop()
                # `+ 0`, because Dynamo cannot take the type of a constant that has a source
                tiers.append((limit + 0, candidate))
    if tiers:
        tiers[-1] = (-1, tiers[-1][1])
    return tuple(tiers)


def _claim(backend: Backend, problem: Problem) -> Claim | None:
    """Rows an expert from which a backend that was not timed counts as faster: its own claim, else
    the row of tables/claims.json. None without either.
    """
    if backend.claim is not None or problem.kind != "experts":
        return backend.claim(problem) if backend.claim is not None else None
    elements = problem.hidden_size * problem.intermediate_size
    row = _claim_in_table(backend.name, problem.scheme, elements)
    return None if row is None else Claim(*row)


def _claimed(problem: Problem, tiers: _Tiers, candidate: Backend) -> _Tiers:
    """`tiers` with an untimed backend in place of the others from `Claim.since` rows per expert
    on. From `Claim.until` on the others run again, if the last of them has a claim too.
    """
    claim, of_last = _claim(candidate, problem), _claim(tiers[-1][1], problem)
    if claim is None:
        return tiers
    end, after = -1, tiers[:0]
    if claim.until is not None and of_last is not None:
        until = max(claim.until, of_last.since)
        if until > claim.since:
            end = _fewer(problem, until)
            after = tuple([tier for tier in tiers if tier[0] < 0 or tier[0] > end])
    fewer = _fewer(problem, claim.since)
    kept: list[tuple[int, Backend]] = []
    for limit, backend in tiers:
        if limit < 0 or limit >= fewer:
            if fewer >= 0:
                kept.append((fewer, backend))
            break
        kept.append((limit, backend))
    if kept and kept[-1][1] is candidate:
        kept.pop()
    return (*kept, (end, candidate), *after)


def _fewer(problem: Problem, rows: int) -> int:
    """Largest M for which an expert has fewer than `rows` rows on average."""
    if problem.kind == "batched_experts":  # where M is T, the rows of one expert
        return rows - 1
    return (rows * problem.routed_experts - 1) // max(problem.top_k, 1)


def _table_key(problem: Problem, machine: Machine) -> tuple:
    """Key of a problem in the measured tables."""
    p = problem
    sizes = (p.routed_experts, p.hidden_size, p.intermediate_size, p.top_k)
    w13, w2 = [get_scheme(name).measured_as for name in p.schemes]
    return (machine.gpu_name, *sizes, layer_scheme(w13, w2), _name(p.dtype))


def why_not(
    backend: Backend, problem: Problem, machine: Machine, named: bool = False
) -> list[str]:
    """Reasons why "auto", or with `named` a call that names the backend, cannot run on it; empty
    if it can.
    """
    reasons = _reasons(backend, problem, machine)
    if named:
        return reasons
    if not reasons and backend.library.interpreted and machine.device_type == "cpu":
        reasons.append("runs in an interpreter on a CPU: only when named")
    if not reasons:
        missing = backend.library.unbuilt(machine)
        if missing is not None:
            reasons.append(missing)
    return reasons


def _reasons(backend: Backend, problem: Problem, machine: Machine) -> list[str]:
    if problem.kind not in backend.operators:
        return [f"has no {problem.kind}"]
    if backend.name in machine.available:
        return _refusals(backend, problem, machine)
    devices = backend.operators[problem.kind].kernels
    if machine.device_type not in devices:
        needed = " or ".join([device.upper() for device in devices])
        return [f"{backend.name} needs a {needed} device, got {machine.device_type}"]
    reasons = _refusals(backend, problem, machine)
    # installing it helps only if it would then take the problem, perhaps with prepared weights
    prepared = variants(problem, backend.name)
    if any([not _refusals(backend, variant, machine) for variant in prepared]):
        reasons.append(_why_not_available(backend.name))
    return reasons


def _refusals(backend: Backend, problem: Problem, machine: Machine) -> list[str]:
    """Reasons why a backend would not run a problem if its library were installed."""
    w13, w2 = problem.schemes
    if w13 != w2 and not backend.takes.two_schemes:
        return [f"runs w13 and w2 of one scheme, got {_schemes_text(problem)}"]
    reasons = [*backend.supports(problem, machine)]  # a copy, because reasons are added below
    if problem.quantized_input and w13 not in backend.takes.quantized_input:
        reasons.append(
            f"takes no input that arrives quantized for scheme {w13!r}: pass it "
            "unquantized, and of a dispatcher's exchanges `exchange`"
        )
    if problem.activation_by_expert and not backend.takes.activation_by_expert:
        reasons.append("takes one alpha, beta and limit for all experts, got a tensor")
    options = problem.options
    if options.resident and machine.device_type not in backend.takes.resident_on:
        where = " and ".join(backend.takes.resident_on)
        reasons.append(
            f"runs resident experts on {where} alone, got {machine.device_type}"
            if where
            else "does not run resident experts, which lie in slots"
        )
    if options.needs_grad and not backend.takes.differentiable:
        reasons.append(
            "has no backward: wrap the call in torch.no_grad() or use backend='auto' or 'torch'"
        )
    if options.max_workspace_bytes is not None and not backend.takes.chunked:
        reasons.append("cannot run in chunks: leave max_workspace_bytes out")
    if options.batch_invariant and not _trains_invariantly(problem):
        reasons += backend.takes.depends_on_batch(problem, machine)
    return reasons


def _trains_invariantly(problem: Problem) -> bool:
    options = problem.options
    return options.batch_invariant and options.needs_grad and problem.kind == "experts"


def not_tested_note(architecture: str) -> str | None:
    """Warning for an architecture (`Machine.architecture`) on which no test has run, else None."""
    if architecture in (*RUN_ON, "meta"):
        return None
    what = f"a GPU of {architecture}" if architecture[:2] in ("SM", "gf") else architecture
    return f"not run on hardware: nothing of this package was tested on {what}"


def _schemes_text(problem: Problem) -> str:
    """E.g. "fp8_block", or for two schemes "w13 int4_w4a16:g128, w2 plain"."""
    w13, w2 = [name or "plain" for name in problem.schemes]
    return w13 if w13 == w2 else f"w13 {w13}, w2 {w2}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(buffer: Buffer) -> int:
    size = buffer.dtype.itemsize
    for s in buffer.shape:
        size = size * s
    return (size + 127) // 128 * 128


@constant
def _measured(*key: Any) -> tuple[tuple[int, str], ...]:
    return lookup.look_up(*key)


@constant
def _claim_in_table(*key: Any) -> tuple[int, int | None] | None:
    return lookup.claim(*key)


@constant
def _timed(*key: Any) -> tuple[str, ...]:
    """Names of the backends that were timed for a problem."""
    return tuple(sorted({name for _, us in lookup.backend_times(*key) for name in us}))


@constant
def _why_not_available(name: str) -> str:
    return backends.named(name).library.available() or "is not available on this machine"
