"""The arguments of the installed FlashInfer's fused-MoE module, read from its sources.

The library builds the module from these sources, so that they are what it does. They are read, not
imported, and once: versions differ in the arguments of the module's functions, and in the order of
the elements of 4-bit weights that its SM90 kernels read.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import NamedTuple

from moe_ops import environment

DISTRIBUTION = "flashinfer-python"
TESTED = ("0.6.13", "0.6.13")  # the oldest and the newest version that the tests ran with
# arguments of `run_moe`, in the order of 0.6.13
_RUN = (
    *("output", "input", "token_selected_experts", "token_final_scales", "fc1_expert_weights"),
    *("fc1_expert_biases", "fc2_expert_weights", "fc2_expert_biases", "quant_scales", "input_sf"),
    *("swiglu_alpha", "swiglu_beta", "swiglu_limit", "swizzled_input_sf", "tp_size", "tp_rank"),
    *("ep_size", "ep_rank", "cluster_size", "cluster_rank", "enable_alltoall"),
    *("min_latency_mode", "profile_ids", "enable_pdl", "base_activation_type"),
)
_INIT = (
    *("activation_dtype", "weight_dtype", "output_dtype", "use_deepseek_fp8_block_scale"),
    *("use_w4_group_scaling", "use_mxfp8_act_scaling", "use_packed_weights"),
)
# later arguments of `init`, and what leaves the module as it was without them
_LATER = {"use_fused_finalize": True, "use_wfp4afp8_humming": False}
_MIXED_ORDER = "fp4x2_a = (fp4x2_a & 0x0FU) | fp4_temp_b;"  # of `interleave_e2m1` in relayout.py


class Binding(NamedTuple):
    """How the module differs from that of 0.6.13."""

    why_not: str = ""  # why it cannot be called
    init: tuple[bool, ...] = ()  # arguments of `init` after those of 0.6.13
    nones: tuple[None, ...] = ()  # optional tensors of `run_moe` after swiglu_limit
    mixed_order: bool = True  # its SM90 kernels read 4-bit weights in the order that we make


class Parameter(NamedTuple):
    name: str
    optional: bool  # its type is Optional
    default: bool


def parameters(source: str, function: str) -> list[Parameter]:
    """The parameters of a C++ function, of which `function` is what its definition begins with.

    Raises:
        ValueError: no such function.
    """
    declared, found, _ = source[source.index(function) + len(function) :].partition(") {")
    if not found:
        raise ValueError(f"{function} has no end")
    return [
        Parameter(text.partition("=")[0].split()[-1], "Optional<" in text, "=" in text)
        for text in declared.split(",")
    ]


def read(run_moe_and_init: str, mixed: str) -> Binding:
    """The Binding of the sources of the module and of its 4-bit weights."""
    run = parameters(run_moe_and_init, "void runMoe(")
    init = [p.name for p in parameters(run_moe_and_init, "Module init(")]
    names = [p.name for p in run]
    at = _RUN.index("swizzled_input_sf")
    more = names.index(_RUN[at]) - at if _RUN[at] in names else 0  # optional tensors before it
    new, end = run[at : at + more], run[len(_RUN) + more :]
    known = [*names[:at], *names[at + more : len(_RUN) + more]] == [*_RUN]
    if not known or not all([p.optional for p in new]) or not all([p.default for p in end]):
        return Binding(f"run_moe takes ({', '.join(names)})")
    later = init[len(_INIT) :]
    if init[: len(_INIT)] != [*_INIT] or not set(later) <= set(_LATER):
        return Binding(f"init takes ({', '.join(init)})")
    values = tuple([_LATER[name] for name in later])
    return Binding("", values, (None,) * len(new), _MIXED_ORDER in mixed)


@cache
def binding() -> Binding:
    """The Binding of the installed library. That of 0.6.13 where its sources are not found."""
    spec = importlib.util.find_spec("flashinfer")
    for folder in getattr(spec, "submodule_search_locations", None) or ():
        csrc = Path(folder) / "data" / "csrc"
        module = csrc / "fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu"
        gemms = csrc / "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm"
        try:
            return read(module.read_text(), (gemms / "moe_gemm_mixed_utils.cu").read_text())
        except (OSError, ValueError):  # no such files, or no such functions
            continue
    if environment.newer_than_tested(DISTRIBUTION, TESTED[1]):
        return Binding("the sources of its fused-MoE module are not where those of 0.6.13 are")
    return Binding()


def why_not() -> str | None:
    """None, or why the installed library cannot be called, and what to install."""
    reason = environment.why_not_installed("flashinfer", DISTRIBUTION, TESTED[0])
    if reason is None and binding().why_not:
        found = environment.version(DISTRIBUTION)
        reason = (
            f"{DISTRIBUTION} {found} has a fused-MoE module that moe_ops cannot call: "
            f"{binding().why_not}; pip install {DISTRIBUTION}=={TESTED[1]}"
        )
    return reason
