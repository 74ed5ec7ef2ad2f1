"""Backend `flashinfer`: FlashInfer's CUTLASS layer (cutlass_fused_moe) on SM90, SM100 and SM120.

Before the library's kernels, a small kernel of ours converts ids and router weights to the form
that the library reads, applies `expert_map`, and marks ids of experts that are not here with -1,
which the library skips. Another copies, weighs or quantizes rows of the input, if needed. The
library allocates its own workspace on every call from torch's caching allocator, and inside a
captured graph from the graph's pool. Gated activations need w13 with up rows before gate rows:
`moe_ops.prepare(w13, "flashinfer", activation=...)`, `moe_ops.prepare(w2, "flashinfer")`.

`expert_map` covers expert parallelism, so that the library's own ranks stay 1 of 1. Shards of
tensor parallelism are weights of a smaller I.

The library's gelu is the exact one, and gelu_tanh runs on it too: they differ by at most 5e-4 an
element, and by 2e-4 in the norm for normally distributed inputs, where rounding to bf16 is 1.7e-3
and to fp16 2.1e-4.

Which of its kernels run is measured by `moe_ops.warmup` alone (library.py). SM90 is tested by
tests/backends/flashinfer/test_gpu.py. Nothing was run on SM100 and SM120: statements about them
follow the library's sources.
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
    """Reasons why this backend cannot run the problem; empty if it can."""
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
    if p.quantized_input and p.router_weight_on_input:
        reasons.append(
            "flashinfer cannot multiply an input that arrives quantized by router weights; pass "
            "it unquantized, or weigh it before it is quantized"
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
    """Shapes of the workspaces. workspace13 holds copies of the input's rows (M, K), unless they
    are read in place; workspace2 the router's weights (M, top_k) and the layer's constants in
    fp32, the scales of quantized rows, and biases in the output's dtype; the index workspace local
    ids (M, top_k). The library allocates its own workspace.
    """
    p = problem
    pairs = M * p.top_k
    floats = (
        round_up(pairs, 32)
        + 7 * round_up(p.num_experts, 32)
        + round_up(M * p.hidden_size, 4096) // 128
    )
    if p.quantized_input:  # scales of groups that are not contiguous, and the one of all rows
        floats = floats + round_up(M * p.hidden_size, 4096) // 64 + 32
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
    quantized_input=("nvfp4", *[name for name, scheme in SCHEMES.items() if scheme.input]),
)
