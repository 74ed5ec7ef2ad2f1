"""Backend `deep_gemm_fp4`: mxfp4 weights x e4m3 activations by DeepGEMM, from SM100 on. Not run on hardware.

Activations are quantized by 128 columns with scales that are powers of two. The layer is that of backend `deep_gemm`.
"""

from __future__ import annotations

from moe_ops.kernels import deep_gemm_experts as experts
from moe_ops.kernels.triton_launch import INTERPRETED
from moe_ops.library import register
from moe_ops.meta.scales import DEEP_GEMM_UE8M0
from moe_ops.problem import Machine, Problem

_SCHEMES = ("mxfp4_w4a8", "mxfp4_w4a8:round", "mxfp4_w4a8:ceil")
_ACTIVATIONS = ("silu", "swiglustep")


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty means it can."""
    if problem.scheme not in _SCHEMES:
        of = f"scheme {problem.scheme!r}" if problem.scheme else "plain weights"
        return [f"deep_gemm_fp4 has no kernel for {of}"]
    reasons = experts.reasons("deep_gemm_fp4", problem, machine, (10, 12))
    if problem.layout != DEEP_GEMM_UE8M0:
        reasons.append(
            "deep_gemm_fp4 needs weights laid out for it: call moe_ops.prepare(weight, "
            "'deep_gemm_fp4') on each once"
        )
    if problem.activation is not None and problem.activation.name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        reasons.append(f"deep_gemm_fp4 has activations {known}, got {problem.activation.name}")
    return reasons


BACKEND = register(
    "deep_gemm_fp4",
    available=experts.available,
    supports=supports,
    workspace_shapes=experts.workspace_shapes,
    launch={
        "experts": experts.launch_experts,
        "batched_experts": experts.launch_batched_experts,
    },
    devices=("CUDA",),
    native_schemes=_SCHEMES,
    native_capability=(10, 0),
    interpreted=INTERPRETED,
)
