"""Backends `deep_gemm` and `deep_gemm_fp4`: DeepGEMM's grouped GEMMs between three fused kernels
of our own (layer.py).

`deep_gemm` runs bf16; fp8_block and fp8_block:ue8m0; mxfp8 on SM100. From SM100 on all scales are
powers of two, so that those of fp8_block are rounded up to them once, when it is prepared.
`deep_gemm_fp4` runs mxfp4 weights x e4m3 activations from SM100 on, which are quantized by 128
columns with scales that are powers of two. What needs SM100 or SM120 was not run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from moe_ops import environment
from moe_ops.backend import (
    Backend,
    Buffer,
    Exchanges,
    Lazy,
    Library,
    Machine,
    Problem,
    Takes,
    Workspaces,
    register,
    round_up,
)
from moe_ops.backends.deep_gemm import library
from moe_ops.backends.deep_gemm.relayout import RELAYOUTS, RELAYOUTS_FP4
from moe_ops.environment import INTERPRETED
from moe_ops.kernels.place.layout import index_parts
from moe_ops.meta.scales import DEEP_GEMM_UE8M0
from moe_ops.meta.workspace import padded_rows

_BLOCK = ("fp8_block", "fp8_block:ue8m0")
_MAJORS = {"": (9, 10, 12), **dict.fromkeys(_BLOCK, (9, 10, 12)), "mxfp8": (10,)}  # by scheme
_BACK = "moe_ops.prepare(weight, 'torch') brings it back"
_FP4_SCHEMES = ("mxfp4_w4a8", "mxfp4_w4a8:round", "mxfp4_w4a8:ceil")
_FP4_ACTIVATIONS = ("silu", "swiglustep")
_OTHERS = "use backend='triton' or 'auto'"
DISTRIBUTION = "sgl-deep-gemm"
TESTED = ("0.1.5", "0.1.5")  # the oldest and the newest version that the tests ran with


def available() -> str | None:
    """None, or what to install."""
    missing = environment.why_not_installed("deep_gemm", DISTRIBUTION, TESTED[0])
    return missing or _why_not_loaded() or _why_incomplete() or environment.why_no_triton()


def _why_incomplete() -> str | None:
    """A module that the installed wheel imports and that is missing, as after --no-deps."""
    missing = environment.missing_requirement(DISTRIBUTION)
    if missing is None:
        return None
    return f"{DISTRIBUTION} needs {missing}, which is not installed; pip install '{missing}'"


def _why_not_loaded() -> str | None:
    """Why torch lacks what the installed wheel was linked against. From 0.2 on, wheels need
    `c10::cuda::CUDAErrorLogCapture`, which torch 2.11 to 2.13 do not have; one that is loaded
    nevertheless ends the process at the first CUDA error check. 0.1.6 and 0.1.7 load on torch
    2.11, but on an H200 every GEMM of theirs ended with "Assertion error: dim == 2 or dim == 3",
    whatever the tensors.
    """
    found = environment.version(DISTRIBUTION) or ""
    if environment.release(found) < (0, 2):
        newer = environment.newer_than_tested(DISTRIBUTION, TESTED[1])
        if newer is None or environment.release(torch.__version__) >= (2, 12):
            return None
        return (
            f"{DISTRIBUTION} {found} takes no tensor of torch {torch.__version__}; "
            f"pip install '{DISTRIBUTION}>={TESTED[0]},<0.1.6'"
        )
    header = Path(torch.__file__).parent / "include" / "c10" / "cuda" / "CUDAException.h"
    if not header.exists() or "CUDAErrorLogCapture" in header.read_text():
        return None
    return (
        f"{DISTRIBUTION} {found} is built for a newer torch than {torch.__version__}; "
        f"pip install '{DISTRIBUTION}>={TESTED[0]},<0.2'"
    )


def _reasons(name: str, p: Problem, machine: Machine, majors: tuple[int, ...]) -> list[str]:
    """Reasons why backend `name`, for GPUs of these major versions, cannot run a problem."""
    found = []
    if machine.device_type != "cuda" and not (machine.device_type == "cpu" and INTERPRETED):
        found.append(f"{name} needs a CUDA device, got {machine.device_type}")
    elif machine.gfx:
        found.append(f"{name} needs an NVIDIA GPU, got {machine.gfx}")
    elif machine.device_type == "cuda" and machine.capability[0] not in majors:
        known = ", ".join([f"{major}.x" for major in majors])
        major, minor = machine.capability
        found.append(
            f"{name} runs {p.scheme or 'plain weights'} on compute capability {known}, "
            f"got {major}.{minor}"
        )
    if p.dtype != torch.bfloat16:
        found.append(f"{name} takes bfloat16 hidden_states, got {p.dtype}; {_OTHERS}")
    for size_name, size in (("K", p.hidden_size), ("I", p.intermediate_size)):
        if size % library.ALIGNMENT:
            found.append(f"{name} needs {size_name} to be a multiple of 128, got {size}")
    if not p.contiguous_weights:
        found.append(
            f"{name} needs contiguous weights and scales; call .contiguous() on them once"
        )
    if p.has_bias:
        found.append(f"{name} takes no bias; {_OTHERS}")
    return found


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty if it can."""
    scheme, layout = problem.scheme, problem.layout
    if scheme not in _MAJORS:
        return [f"deep_gemm has no kernel for scheme {scheme!r}"]
    reasons = _reasons("deep_gemm", problem, machine, _MAJORS[scheme])
    major = machine.capability[0]
    if layout not in ("", DEEP_GEMM_UE8M0):
        reasons.append(f"deep_gemm takes weights in their natural layout, got {layout!r}; {_BACK}")
    elif layout and major == 9:
        reasons.append(
            f"deep_gemm takes natural weights below 10.0, got layout {layout!r}; {_BACK}"
        )
    elif not layout and (scheme == "mxfp8" or (scheme and major >= 10)):
        # from SM100 on, tensor cores take scales that are exponents, not fp32
        reasons.append(
            "deep_gemm needs weights laid out for it: call moe_ops.prepare(weight, 'deep_gemm') "
            "on each once, on the GPU that is to run them"
        )
    if problem.quantized_input and scheme == "fp8_block" and layout:
        reasons.append(
            f"deep_gemm takes no input that arrives quantized for {scheme!r} in layout "
            f"{layout!r}: there its scales are powers of two; pass it unquantized"
        )
    return reasons


def supports_fp4(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty if it can."""
    if problem.scheme not in _FP4_SCHEMES:
        of = f"scheme {problem.scheme!r}" if problem.scheme else "plain weights"
        return [f"deep_gemm_fp4 has no kernel for {of}"]
    reasons = _reasons("deep_gemm_fp4", problem, machine, (10, 12))
    if problem.layout != DEEP_GEMM_UE8M0:
        reasons.append(
            "deep_gemm_fp4 needs weights laid out for it: call moe_ops.prepare(weight, "
            "'deep_gemm_fp4') on each once"
        )
    activation = problem.options.activation
    if activation is not None and activation.name not in _FP4_ACTIVATIONS:
        known = ", ".join(_FP4_ACTIVATIONS)
        reasons.append(f"deep_gemm_fp4 has activations {known}, got {activation.name}")
    return reasons


def workspace_shapes(M: int, problem: Problem) -> Workspaces:
    """Shapes of the workspaces. For pairs, in the contiguous layout, workspace13 holds permuted x
    (rows, K), then the activation's output h (rows, I); workspace2 holds gate and up (rows, N),
    then the products with w2 (rows, K). For batches, in the masked layout, whose experts have M
    rows rounded up to 128, it is the other way round. If activations are quantized, x and h are
    e4m3, followed by fp32 scales of 128 columns; the others are bf16. The index workspace:
    library.py.
    """
    p = problem
    E, N, K, I = p.num_experts, p.num_rows, p.hidden_size, p.intermediate_size
    if p.kind == "experts":
        rows = padded_rows(M, p.top_k, E, library.ALIGNMENT)
        index = index_parts(M * p.top_k, E).end
    else:
        rows = E * round_up(M, library.ALIGNMENT)
        index = E
    inputs = Buffer((rows, max(K, I)), torch.bfloat16)
    if p.scheme:
        inputs = Buffer((rows, _row_bytes(max(K, I))), torch.uint8)
    products = Buffer((rows, max(N, K)), torch.bfloat16)
    buffers = (inputs, products) if p.kind == "experts" else (products, inputs)
    return Workspaces(*buffers, Buffer((index,), torch.int32))


def _row_bytes(columns: int) -> int:
    """Bytes of a row of e4m3 data and its scales: an fp32 or four exponents for 128 columns."""
    return columns + columns // 128 * 4


_LAUNCH: dict[str, Callable] = {
    "experts": Lazy("moe_ops.backends.deep_gemm.layer:experts"),
    "batched_experts": Lazy("moe_ops.backends.deep_gemm.layer:batched_experts"),
}
_LIBRARY = Library(
    available=available,
    distribution=DISTRIBUTION,
    newest_tested=TESTED[1],
    interpreted=INTERPRETED,
)
BACKEND = register(
    Backend(
        "deep_gemm",
        supports=supports,
        workspace_shapes=workspace_shapes,
        launch=_LAUNCH,
        devices=("CUDA",),
        library=_LIBRARY,
        takes=Takes(
            native_schemes=(*_BLOCK, "mxfp8"),
            native_capability=(9, 0),
            quantized_input=("fp8_block", "mxfp8"),
            chunked=True,
        ),
        exchanges=Exchanges(adds_ranks=True, sends_rows=("", *_BLOCK)),
        relayouts=RELAYOUTS,
    )
)
FP4 = register(
    Backend(
        "deep_gemm_fp4",
        supports=supports_fp4,
        workspace_shapes=workspace_shapes,
        launch=_LAUNCH,
        devices=("CUDA",),
        library=_LIBRARY,
        takes=Takes(native_schemes=_FP4_SCHEMES, native_capability=(10, 0), chunked=True),
        exchanges=Exchanges(adds_ranks=True),
        relayouts=RELAYOUTS_FP4,
    )
)
