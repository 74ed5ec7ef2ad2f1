"""Experts whose weights an operator finds at run time: calls have their shapes alone, and
`Options.resident` the name of what holds them, so that neither a bank of slots nor rows in host
memory are inputs of a graph. `moe_ops.residency` makes what is named.
"""

from __future__ import annotations

import itertools
import zlib
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moe_ops.ops.args import ResidentArgs
from moe_ops.ops.backend import Backend


class TensorFacts(NamedTuple):
    """What a call says of a tensor that is not at hand, in the tensor's words."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device  # on which kernels read it

    @property
    def requires_grad(self) -> bool:
        return False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def is_contiguous(self) -> bool:
        return True


def facts_of(tensor: Tensor | None, device: torch.device) -> Any:
    """The TensorFacts of a tensor that will be on `device`; None of None."""
    return None if tensor is None else TensorFacts(tuple(tensor.shape), tensor.dtype, device)


class ResidentWeight:
    """`w13` or `w2` of `ResidentExperts`: stands for (E, N, K) or (E, K, I) in `fused_experts`.

    Attributes:
        name: of the experts, by which operators find them.
        role: "w13" or "w2".
        slots: experts that are on the device at a time.
        weight: a `Weight` of TensorFacts; None where all experts are on the device.
        bias: TensorFacts, or None.
        whole, whole_bias: the tensors themselves where all experts are on the device, else None.
        shape, dtype, device, scheme: those of the weight that it stands for.
    """

    def __init__(
        self,
        name: str,
        role: str,
        like: Any,
        device: torch.device,
        slots: int,
        weight: Any = None,
        bias: Any = None,
        whole: Any = None,
        whole_bias: Tensor | None = None,
    ) -> None:
        self.name, self.role, self.slots = name, role, slots
        self.shape, self.dtype, self.device = tuple(like.shape), like.dtype, device
        self.scheme: str = getattr(like, "scheme", "")
        self.weight, self.bias, self.whole, self.whole_bias = weight, bias, whole, whole_bias

    def __repr__(self) -> str:
        return (
            f"ResidentWeight({self.name}.{self.role}, shape={self.shape}, "
            f"scheme={self.scheme!r}, dtype={self.dtype}, device={str(self.device)!r})"
        )


_BIAS = "ResidentExperts takes the bias when it is made, and brings its rows with the weights'"
_REMEDIES = {  # of arguments that calls of resident experts do not take
    "w13_bias": _BIAS,
    "w2_bias": _BIAS,
    "expert_map": "slots are found by one of their own; make ResidentExperts of all experts that "
    "ids name",
    "adapters": "merge them into the weights before ResidentExperts is made",
    "exchange": "expert parallelism needs the experts of each rank on its GPU",
}


def replace_resident(w13: Any, w2: Any, *refused: Any) -> tuple:
    """(name, slots, w13, w2, w13_bias, w2_bias) of a call's resident experts; where all are
    on the device the tensors, without a name. ``refused``: its arguments w13_bias, w2_bias,
    expert_map, adapters and exchange, None where they are not given.

    Raises:
        ValueError: the two are not of one `ResidentExperts`, or an argument is given that such
            calls do not take.
    """
    names = [getattr(w, "name", None) for w in (w13, w2)]
    if names[0] != names[1] or (w13.role, w2.role) != ("w13", "w2"):
        raise ValueError(
            "w13 and w2 must be those of one ResidentExperts, in this order, got "
            f"{w13 if isinstance(w13, ResidentWeight) else type(w13).__name__} and "
            f"{w2 if isinstance(w2, ResidentWeight) else type(w2).__name__}"
        )
    for (name, remedy), value in zip(_REMEDIES.items(), refused, strict=True):
        if value is not None:
            raise ValueError(f"{name} must be left out beside resident experts: {remedy}")
    if w13.whole is not None:
        return "", 0, w13.whole, w2.whole, w13.whole_bias, w2.whole_bias
    return names[0], w13.slots, w13, w2, w13.bias, w2.bias


class Resident(Protocol):
    """What a name stands for."""

    @property
    def products_of_pair(self) -> int:
        """Multiplications of a (token, expert) pair: the elements of an expert's two weights."""

    def run(self, args: ResidentArgs, backend: Backend) -> None:
        """Bring the experts of a call to where a backend reads them, and let it run the call."""


_residents: WeakValueDictionary[str, Resident] = WeakValueDictionary()
_numbers = itertools.count()


def name_resident(resident: Resident | None = None, facts: str = "") -> str:
    """A name for it, by which operators find it: the same in each process that has named as many
    before, if the facts are the same. So a program of another process never reads experts of other
    sizes. None of experts that are all on the device, which no operator looks for.
    """
    name = f"experts{next(_numbers)}-{zlib.crc32(facts.encode()):08x}"
    if resident is not None:
        _residents[name] = resident
    return name


def resident_of(name: str) -> Resident:
    """What has a name.

    Raises:
        RuntimeError: there is none in this process, or no longer.
    """
    found = _residents.get(name)
    if found is None:
        raise RuntimeError(
            f"resident must name ResidentExperts of this process that are still in use, got "
            f"{name!r}: keep the module alive as long as graphs that use it, and capture programs "
            "anew in another process"
        )
    return found
