"""The ops that pick a tier from the real M and call the launcher of that backend: that of plans
with several tiers, that of tokens with adapters, and that of resident experts, which finds the
weights first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from moe_ops import backends
from moe_ops.backends.torch.backend import workspace_shapes
from moe_ops.ops import library
from moe_ops.ops.args import AdaptedArgs, ResidentArgs
from moe_ops.ops.backend import Backend
from moe_ops.ops.options import tiers_of_text
from moe_ops.ops.resident import resident_of


def _parse(text: str) -> tuple[tuple[int, Backend], ...]:
    return tuple([(limit, backends.named(name)) for limit, name in tiers_of_text(text)])


_parse_tiers = functools.lru_cache(maxsize=256)(_parse)


def forget() -> None:
    """Parse tiers anew after the backends changed.

    Into a new cache, because another thread may still add to the old one.
    """
    global _parse_tiers
    _parse_tiers = functools.lru_cache(maxsize=256)(_parse)


def _launch_auto(kind: str, rows_of: int) -> Callable[[Any], None]:
    """Launcher of the tiered op; `rows_of` is the dimension of the output that is M."""

    def launch(args: Any) -> None:
        _of_rows(_parse_tiers(args.options.tiers_text), args[0].shape[rows_of]).launch[kind](args)

    return launch


def _of_rows(tiers: tuple[tuple[int, Backend], ...], rows: int) -> Backend:
    """The backend of the tier that contains `rows`."""
    for limit, backend in tiers:
        if limit < 0 or rows <= limit:
            return backend
    raise AssertionError(f"tiers {tiers} do not reach M={rows}")


_ROWS_OF = {"experts": 0, "batched_experts": 1, "grouped_linear": 0}


AUTO = library.register(
    Backend(
        "auto",
        supports=lambda problem, machine: [],
        workspace_shapes=workspace_shapes,
        launch={kind: _launch_auto(kind, rows_of) for kind, rows_of in _ROWS_OF.items()},
        devices=library.TORCH_DEVICES,
    )
)


def _launch_resident(args: ResidentArgs) -> None:
    backend = _of_rows(_parse_tiers(args.options.tiers_text), args.out.shape[0])
    resident_of(args.options.resident).run(args, backend)


RESIDENT = library.operator(
    "resident_experts", library.RESIDENT, _launch_resident, library.TORCH_DEVICES
)


def _launch_adapted(args: AdaptedArgs) -> None:
    if args.out.shape[0] == 0:
        return
    adapts = _of_rows(_parse_tiers(args.options.tiers_text), args.out.shape[0]).takes.adapts
    assert adapts is not None, args.options.tiers_text
    adapts.run(args)


ADAPTED = library.operator(
    "adapted_experts", library.ADAPTED, _launch_adapted, library.TORCH_DEVICES
)


def served_by(op: Any, values: Sequence[Any]) -> tuple[Backend, int] | None:
    """The backend that runs an operator with these arguments, and the number of rows.

    None for operators that belong to no backend: those of routers and of training.
    """
    for one, kind in ((RESIDENT, library.RESIDENT), (ADAPTED, library.ADAPTED)):
        if op == one.op:
            text, rows = kind.unpack(values).options.tiers_text, values[0].shape[0]
            return _of_rows(_parse_tiers(text), rows), rows
    for backend in (*backends.BACKENDS, AUTO):
        for name, known in backend.operators.items():
            if known.op == op:
                rows = values[0].shape[_ROWS_OF[name]]
                if backend is AUTO:
                    backend = _of_rows(
                        _parse_tiers(library.KINDS[name].unpack(values).options.tiers_text), rows
                    )
                return backend, rows
    return None
