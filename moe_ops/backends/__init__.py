"""The backends: one package each, and one line here.

Order is preference where nothing was measured, among those that run a scheme natively and among
the others.
"""

# isort: off
import moe_ops.backends.triton.backend
import moe_ops.backends.deep_gemm.backend
import moe_ops.backends.flashinfer.backend
import moe_ops.backends.cutlass.backend
import moe_ops.backends.torch.backend  # noqa: F401

# isort: on
from moe_ops.checks import check_one_of
from moe_ops.ops import library
from moe_ops.ops.backend import Backend

BACKENDS: tuple[Backend, ...] = library.registered()


def named(name: str) -> Backend:
    """The backend of a name, which must not be "auto"."""
    for candidate in BACKENDS:
        if candidate.name == name:
            return candidate
    check_backend("backend", name)
    raise AssertionError(f"{name!r} is no single backend")


def check_backend(argument: str, name: str) -> None:
    """Raise ValueError, naming the argument, unless `name` is "auto" or that of a backend."""
    check_one_of(argument, name, ("auto", *list_backends()))


def list_backends() -> tuple[str, ...]:
    """Names of all backends, installed or not, in order of preference."""
    return tuple([backend.name for backend in BACKENDS])


def distributions() -> tuple[str, ...]:
    """Distributions (names for pip) of the libraries of all backends."""
    names = [b.library.distribution for b in BACKENDS if b.library.distribution]
    return tuple(dict.fromkeys(names))
