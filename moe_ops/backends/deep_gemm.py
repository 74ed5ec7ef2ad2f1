"""Backend `deep_gemm`: DeepGEMM's grouped products between three fused kernels of our own (kernels/deep_gemm_experts.py).

bf16; fp8_block, from SM100 on with scales that are powers of two; mxfp8 on SM100. What needs SM100 or SM120 was not run
on hardware.
"""

from __future__ import annotations

from moe_ops.kernels import deep_gemm_experts as experts
from moe_ops.kernels.triton_launch import INTERPRETED
from moe_ops.library import register
from moe_ops.meta.scales import DEEP_GEMM_UE8M0
from moe_ops.problem import Machine, Problem

_MAJORS = {"": (9, 10, 12), "fp8_block": (9, 10, 12), "mxfp8": (10,)}  # by scheme
_BACK = "moe_ops.prepare(weight, 'torch') brings it back"


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty means it can."""
    scheme, layout = problem.scheme, problem.layout
    if scheme not in _MAJORS:
        return [f"deep_gemm has no kernel for scheme {scheme!r}"]
    reasons = experts.reasons("deep_gemm", problem, machine, _MAJORS[scheme])
    major = machine.capability[0]
    if layout not in ("", DEEP_GEMM_UE8M0):
        reasons.append(f"deep_gemm takes weights in their natural layout, got {layout!r}; {_BACK}")
    elif layout and major == 9:
        reasons.append(
            f"deep_gemm takes natural weights below 10.0, got layout {layout!r}; {_BACK}"
        )
    elif not layout and (scheme == "mxfp8" or (scheme and major >= 10)):
        # tensor cores from SM100 on multiply by exponents, not by fp32 scales
        reasons.append(
            "deep_gemm needs weights laid out for it: call moe_ops.prepare(weight, 'deep_gemm') on each once, "
            "on the GPU that is to run them"
        )
    return reasons


BACKEND = register(
    "deep_gemm",
    available=experts.available,
    supports=supports,
    workspace_shapes=experts.workspace_shapes,
    launch={
        "experts": experts.launch_experts,
        "batched_experts": experts.launch_batched_experts,
    },
    devices=("CUDA",),
    native_schemes=("fp8_block", "mxfp8"),
    native_capability=(9, 0),
    interpreted=INTERPRETED,
)
