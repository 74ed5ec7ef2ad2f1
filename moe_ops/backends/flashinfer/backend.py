"""Backend `flashinfer`: FlashInfer's CUTLASS layer (cutlass_fused_moe) on SM90, SM100 and SM120.

Before the library's own kernels one small kernel of ours brings ids and router weights into the
form it reads, applies `expert_map` and marks ids that mean "not here" with -1, which it skips;
another copies, weighs or quantizes the input's rows where that is needed. The library allocates
its own workspace on every call, from torch's caching allocator: inside a captured graph, from the
graph's pool. Gated activations need w13 laid out with up rows before gate rows:
`moe_ops.prepare(w13, "flashinfer", activation=...)`, `moe_ops.prepare(w2, "flashinfer")`.

`expert_map` covers expert parallelism, so the library's own ranks stay 1 of 1; shards of tensor
parallelism are weights of a smaller I.

Its gelu is the exact one, and gelu_tanh runs on it too: they differ by at most 5e-4 an element, by
2e-4 in the norm of normally distributed ones, of which bf16 rounds away 1.7e-3 and fp16 2.1e-4.

Which of its kernels run is measured by `moe_ops.warmup` alone (library.py). SM90 is tested by
tests/test_flashinfer_gpu.py; on SM100 and SM120 nothing was run: what is said of them follows the
library's sources.
"""

from __future__ import annotations

from functools import cache

import torch

from moe_ops import environment
from moe_ops.activations import rows_before
from moe_ops.backends.flashinfer import library
from moe_ops.backends.flashinfer.relayout import RELAYOUTS
from moe_ops.backends.flashinfer.schemes import ACTIVATIONS, ALL, OTHERS, SCHEMES
from moe_ops.kernels.launch import Lazy
from moe_ops.meta.workspace import round_up
from moe_ops.ops.library import register
from moe_ops.ops.problem import Buffer, Machine, Problem, Workspaces


@cache
def available() -> str | None:
    """None, or why the library cannot be used here."""
    missing = environment.why_not_installed("flashinfer", "flashinfer-python", library.VERSION)
    return missing or environment.why_no_triton()


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty means it can."""
    p, reasons = problem, []
    of = f"scheme {p.scheme!r}" if p.scheme else "plain weights"
    scheme = SCHEMES.get(p.scheme)
    major, minor = machine.capability
    if machine.device_type != "cuda":
        reasons.append(f"flashinfer needs a CUDA device, got {machine.device_type}")
    elif (major, 0) not in ALL:
        reasons.append(f"flashinfer needs SM90, SM100 or SM120, got SM{major}{minor}")
    elif scheme is not None and (major, 0) not in scheme.gpus:
        wanted = " or ".join([f"SM{a}{b}" for a, b in scheme.gpus])
        reasons.append(
            f"flashinfer runs {p.scheme or 'plain weights'} on {wanted}, got SM{major}{minor}"
        )
    act = p.activation
    if act is not None and act.name not in ACTIVATIONS:
        reasons.append(f"flashinfer has no activation {act.name!r}")
    if not p.contiguous_weights:
        reasons.append("flashinfer needs contiguous weights and scales; call .contiguous() once")
    if scheme is None:
        reasons.append(OTHERS.get(p.scheme, f"flashinfer has no kernel for {of}"))
        return reasons
    if p.dtype not in scheme.dtypes:
        names = " or ".join([str(d).removeprefix("torch.") for d in scheme.dtypes])
        reasons.append(f"flashinfer takes {names} for {of}, got {p.dtype}")
    if p.hidden_size % scheme.multiple or p.intermediate_size % scheme.multiple:
        reasons.append(
            f"flashinfer needs K and I to be multiples of {scheme.multiple} for {of}, got "
            f"{p.hidden_size} and {p.intermediate_size}"
        )
    order = rows_before(act)
    wanted = scheme.layout + (f":{order}" if order else "")
    if p.layout != wanted:
        argument = f", activation={act.name!r}" if act is not None and act.gated else ""
        reasons.append(
            f"flashinfer takes weights in layout {wanted!r}, got {p.layout!r}: once call "
            f"moe_ops.prepare(w13, 'flashinfer'{argument}) and moe_ops.prepare(w2, 'flashinfer')"
        )
    return reasons


def workspace_shapes(M: int, problem: Problem) -> Workspaces:
    """workspace13 holds the input's rows where they are not read as they come, (M, K); workspace2
    the router's weights (M, top_k) and the layer's constants in fp32, the scales of quantized
    rows, and biases in the output's dtype; the index workspace local ids (M, top_k). The library's
    own workspace is not among them: it allocates that.
    """
    p = problem
    pairs = M * p.top_k
    floats = (
        round_up(pairs, 32)
        + 7 * round_up(p.num_experts, 32)
        + round_up(M * p.hidden_size, 4096) // 128
    )
    if p.has_bias:
        floats = floats + round_up(p.num_experts * p.num_rows, 64) // 2
        floats = floats + round_up(p.num_experts * p.hidden_size, 64) // 2
    return Workspaces(
        Buffer((M, p.hidden_size), p.dtype),
        Buffer((floats,), torch.float32),
        Buffer((pairs,), torch.int32),
    )


BACKEND = register(
    "flashinfer",
    available=available,
    supports=supports,
    workspace_shapes=workspace_shapes,
    launch={"experts": Lazy("moe_ops.backends.flashinfer.layer:experts")},
    devices=("CUDA",),
    native_schemes=tuple(SCHEMES),
    native_capability=(9, 0),
    warm=library.warm,
    relayouts=RELAYOUTS,
    distribution="flashinfer-python",
)
