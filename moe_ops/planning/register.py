"""register_backend(): somebody else's backend, beside our own."""

from __future__ import annotations

from moe_ops import backends
from moe_ops.ops.backend import Backend
from moe_ops.planning import auto, bind, machine


def register_backend(backend: Backend) -> None:
    """Add a backend of another package: "auto" considers it, and `backend=` takes its name, from
    the next call on.

    Compiled functions that plan with `backend="auto"` plan again. Where nothing was measured it is
    preferred to "torch" and to backends that would emulate a scheme which it runs natively; its
    `claim` may say more. docs/add_a_backend.md shows a whole one.

    Args:
        backend: what `moe_ops.backend.register` returned.

    Raises:
        ValueError: it is no Backend, its name is taken, or it says that it is differentiable.
    """
    if not isinstance(backend, Backend):
        raise ValueError(
            "backend must be a Backend, as moe_ops.backend.register returns it, got "
            f"{type(backend).__name__}"
        )
    if backend.name in ("auto", *backends.list_backends()):
        raise ValueError(f"backend must have a name that is not taken, got {backend.name!r}")
    if backend.takes.differentiable:
        raise ValueError(
            f"backend must not be differentiable, got {backend.name!r}: gradients run on torch's "
            "products, so a call that names it would silently run elsewhere. Leave it out "
            "of its `takes`; calls that record gradients take backend='auto' or 'torch'"
        )
    *before, last = backends.BACKENDS  # the last one is "torch", which runs everything
    replace_backends((*before, backend, last))


def replace_backends(new: tuple[Backend, ...]) -> None:
    """Let these be all backends, in this order, and forget what was known of the others."""
    backends.BACKENDS = new
    for module in (machine, auto, bind):
        module.forget()
