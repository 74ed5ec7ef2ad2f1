"""self_check(): run every backend and scheme that says that it can run here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from moe_ops import backends as backends_module
from moe_ops import environment
from moe_ops.checks import device_named
from moe_ops.schemes import SCHEMES, QuantScheme, get_scheme
from moe_ops.selfcheck import cases
from moe_ops.selfcheck.cases import SHAPES, Sizes
from moe_ops.selfcheck.pairs import Pair, all_pairs
from moe_ops.selfcheck.report import NOT_RUN, RAISED, Row, SelfCheck, from_json, machine_line

SECONDS = 90.0  # after which no call starts
GRACE = 20.0  # seconds more that the last call may take: in all less than two minutes


def self_check(
    device: torch.device | str | None = None,
    *,
    backends: str | Iterable[str] | None = None,
    schemes: str | QuantScheme | Iterable[str | QuantScheme] | None = None,
    progress: bool = True,
    seconds: float = SECONDS,
) -> SelfCheck:
    """Run every backend and scheme that says that it can run on this machine, and compare each
    result with an expert layer in fp64. Print what it returns to paste it into a bug report.

    Each pair of a scheme and a backend runs `fused_experts` in bfloat16 with the activation silu,
    once for each of three shapes: 33 tokens, one token, and 200 tokens with sizes that are no
    multiples of 128 where the backend takes such, with biases where the backend takes them, and
    with weights prepared for it where it wants them so (as they are and prepared, where it takes
    both). Every pair runs at the first shape before any runs at the next one. The fp64 layer runs
    on a CPU from the same quantized weights and with activations quantized in the same way. Memory
    that a call allocates for its result is filled with NaN before.

    Args:
        device: where to run; None for the GPU if there is one, else another accelerator that torch
            finds, else the CPU.
        backends: names of those to run; None for all that "auto" may choose here. One that is
            named also runs in an interpreter, and builds its kernels where it has to.
        schemes: names of schemes, "plain" or "" for weights that are not quantized; None for all.
        progress: a progress bar on a terminal.
        seconds: after so many no further call starts, and 20 s later none is waited for; those
            that are left count as "not run". Libraries that build kernels at first use may need
            more, once.

    Returns:
        A SelfCheck: `rows`, one of each scheme and backend; `ok`, whether nothing differs; str()
        is the table.

    Raises:
        ValueError: a device, backend or scheme that does not exist.
    """
    start = time.perf_counter()
    where = _checked_device(device)
    chosen = None if backends is None else [backends] if type(backends) is str else list(backends)
    for name in chosen or ():
        if name == "auto":
            raise ValueError("backends must name single backends, got 'auto'")
        backends_module.check_backend("backends", name)
    pairs = all_pairs(where, chosen, _checked_schemes(schemes))
    lost = _Calls(pairs, where, progress, start + seconds).finish()
    rows = {(row.scheme, row.backend, row.prepared): row for row in [p.row(lost) for p in pairs]}
    if lost:
        left = seconds - (time.perf_counter() - start)
        rows |= _in_other_processes([pair for pair in pairs if not pair.done], where, left)
    order = {name: index for index, name in enumerate(SCHEMES)}
    found = sorted(rows.values(), key=lambda row: order.get(row.scheme, len(order)))
    return SelfCheck(machine_line(where), tuple(found), time.perf_counter() - start)


class _Calls(threading.Thread):
    """Makes the calls of all pairs, in a thread that is abandoned if one does not end: a library
    may build its kernels for minutes, and a kernel that was never run may hang.
    """

    def __init__(self, pairs: list[Pair], device: torch.device, progress: bool, deadline: float):
        super().__init__(daemon=True)
        # Backends of many schemes come first, scheme by scheme, so that they share its fp64
        # results. Those of few often build kernels at their first call: one after the other.
        taken = [pair for pair in pairs if pair.taken]
        count = Counter([pair.backend.name for pair in taken])
        many = [name for name, n in count.items() if 2 * n >= max(count.values())]
        last = [name for name in backends_module.list_backends() if name not in many]
        ranks = dict.fromkeys(many, 0) | {name: rank for rank, name in enumerate(last, 1)}
        taken.sort(key=lambda pair: ranks[pair.backend.name])
        self.calls = [(pair, shape) for shape in SHAPES for pair in taken if shape in pair.taken]
        self.device, self.progress, self.deadline = device, progress, deadline
        self.lost = ""  # why no more calls can be made, "" if they can
        self.current: tuple[Pair, Sizes] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # of this thread
            bar = environment.progress_bar(self.calls, "checking") if self.progress else self.calls
            for pair, shape in bar:
                if time.perf_counter() > self.deadline or self.lost:
                    return
                self.current = (pair, shape)
                pair.run(shape, self.device)
                self.current = None
                if pair.verdict == RAISED:
                    self.lost = _why_lost(self.device, pair)
        except BaseException as error:  # raised again by `finish`
            self.error = error
        finally:
            cases.forget()

    def finish(self) -> str:
        """Wait for the calls; returns why no more can be made, "" if they can."""
        self.start()
        try:
            self.join(max(self.deadline + GRACE - time.perf_counter(), 0))
        finally:
            self.deadline = 0.0  # where it was interrupted, too
        if self.error is not None:
            raise self.error
        if self.is_alive() and self.current is not None:
            pair, shape = self.current
            where = f"at M={shape.M}"
            pair.unfinished = f"did not end in time: it builds its kernels, or hangs ({where})"
        return self.lost


# what another process runs: its argument holds those of `self_check`
_CHECK = """
import json, sys
from moe_ops.selfcheck import check, report
print(json.dumps(report.to_json(check.self_check(**json.loads(sys.argv[1])))))
"""


def _in_other_processes(
    pairs: list[Pair], device: torch.device, seconds: float
) -> dict[tuple[str, str, bool], Row]:
    """Rows of pairs that were left when this process lost the GPU: a process for each backend.
    There, too, a kernel may be wrong; those after it run in one more.
    """
    found = {}
    start = time.perf_counter()
    for name in dict.fromkeys([pair.backend.name for pair in pairs]):
        left = seconds - (time.perf_counter() - start)
        if left <= 0:
            break
        schemes = [pair.scheme for pair in pairs if pair.backend.name == name]
        options = {"device": str(device), "backends": name, "seconds": left}
        options["schemes"] = list(dict.fromkeys(schemes))
        command = [sys.executable, "-c", _CHECK, json.dumps(options)]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        # a backend that was registered in this process alone is not there: its rows stay
        text = answer.stdout[answer.stdout.find("{") :]
        for row in from_json(text) if text.startswith("{") else ():
            if row.verdict != NOT_RUN:
                found[row.scheme, row.backend, row.prepared] = row
    return found


def _why_lost(device: torch.device, pair: Pair) -> str:
    """Why nothing more can run on a GPU after an illegal access; "" if it still can."""
    if device.type != "cuda":
        return ""
    try:
        torch.zeros(1, device=device).item()
    except Exception:  # any call raises what the kernel before it did
        scheme = pair.scheme or "plain weights"
        return f"this process lost the GPU in {scheme} on {pair.backend.name}"
    return ""


def _checked_schemes(schemes: Any) -> list[str]:
    """Full names, in families: the first of each, then its variants, which a machine that is out
    of time leaves out.
    """
    if schemes is None:
        first = {name.split(":")[0]: name for name in reversed(SCHEMES)}
        return sorted(SCHEMES, key=lambda name: first[name.split(":")[0]] != name)
    given = [schemes] if isinstance(schemes, (str, QuantScheme)) else schemes
    names = ["" if name == "plain" else get_scheme(name).name for name in given]
    return list(dict.fromkeys(names))


def _checked_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = "cuda" if torch.cuda.is_available() else found or "cpu"
    return device_named("device", device, "use 'cpu'")
