"""register_backend(): add a backend from outside of the package."""

from __future__ import annotations

from moe_ops import backends
from moe_ops.ops.backend import Backend
from moe_ops.planning import auto, bind, machine


def register_backend(backend: Backend) -> None:
    """Add a backend of another package. From the next call on "auto" considers it, and `backend=`
    takes its name.

    Compiled functions that plan with `backend="auto"` are planned anew. Where nothing was measured
    it is preferred to "torch", and to backends that emulate a scheme which it runs natively; its
    `claim` may put it before others. docs/add_a_backend.md has a complete example.

    Args:
        backend: the result of `moe_ops.backend.register`.

    Raises:
        ValueError: it is not a Backend, its name is taken, or it claims to be differentiable.
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
    """Replace all backends by these, in this order, and forget plans and facts of the old ones."""
    backends.BACKENDS = new
    for module in (machine, auto, bind):
        module.forget()
