"""The names of `ParallelConfig.all2all_backend`, and the library of each."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Adapted(NamedTuple):
    """The library of a dispatcher that moe_ops runs by an adapter of somebody else's.

    Args:
        module: what Python imports.
        source: where it comes from.
    """

    module: str
    source: str


_DEEP_EP = Adapted("deep_ep", "https://github.com/deepseek-ai/DeepEP")
_FLASHINFER = Adapted("flashinfer", "pip install flashinfer-python")
_MORI = Adapted("mori", "https://github.com/ROCm/mori")
# what moe_ops runs itself, and what it has no adapter for
OWN = ("allgather_reducescatter", "all_to_all", "symmetric_memory")
LIBRARIES = {
    "deepep_high_throughput": _DEEP_EP,
    "deepep_low_latency": _DEEP_EP,
    "deepep_v2": _DEEP_EP,
    "flashinfer_all2allv": _FLASHINFER,  # the older name of two_sided
    "flashinfer_nvlink_one_sided": _FLASHINFER,
    "flashinfer_nvlink_two_sided": _FLASHINFER,
    "mori": _MORI,  # either of the next two
    "mori_high_throughput": _MORI,
    "mori_low_latency": _MORI,
    "nixl_ep": Adapted("nixl_ep", "https://github.com/ai-dynamo/nixl"),
}
NAMES = ("naive", *OWN, *LIBRARIES)
# those whose rows arrive as a padded block for each local expert
BATCHED = ("deepep_low_latency", "nixl_ep")


def why_no_dispatcher(name: str) -> list[str]:
    """Every reason why moe_ops does not run a backend of these names that is not its own."""
    library = LIBRARIES.get(name)
    if library is None:
        return ["it names no exchange of moe_ops"]
    reasons = ["moe_ops has no adapter for it"]
    if importlib.util.find_spec(library.module) is None:
        reasons.append(f"its library {library.module} is not installed ({library.source})")
    return reasons
