"""Backend `flashinfer`: FlashInfer's CUTLASS layer (cutlass_fused_moe) on SM90, SM100 and SM120.

Before the library's kernels, a small kernel of ours converts ids and router weights to the form
that the library reads, applies `expert_map`, and marks ids of experts that are not here with -1,
which the library skips. Another copies, weighs, pads or quantizes rows of the input, if needed.
4-bit weights are padded by `prepare` to sizes that 128 divides. The library allocates its own
workspace on every call from torch's caching allocator, and inside a captured graph from the
graph's pool. Gated activations need w13 with up rows before gate rows:
`moe_ops.prepare(w13, "flashinfer", activation=...)`, `moe_ops.prepare(w2, "flashinfer")`.

`expert_map` covers expert parallelism, so that the library's own ranks stay 1 of 1. Shards of
tensor parallelism are weights of a smaller I.

Of known activation scales that differ by expert, hidden_states have the largest, because a token
is quantized once, and the activation's output has that of its expert.

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
from moe_ops.backend import (
    Backend,
    Buffer,
    Lazy,
    Library,
    Machine,
    Problem,
    Takes,
    Workspaces,
    register,
    round_up,
)
from moe_ops.backends.flashinfer import binding, library
from moe_ops.backends.flashinfer.relayout import MIXED, RELAYOUTS
from moe_ops.backends.flashinfer.schemes import ACTIVATIONS, ALL, OTHERS, SCHEMES
from moe_ops.meta.scales import base_layout


@cache
def available() -> str | None:
    """None, or why the library cannot be used here."""
    return binding.why_not() or environment.why_no_triton()


@environment.constant
def _reads_mixed_order() -> bool:
    return binding.binding().mixed_order


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty if it can."""
    p, reasons = problem, []
    of = f"scheme {p.scheme!r}" if p.scheme else "plain weights"
    scheme = SCHEMES.get(p.scheme)
    major, minor = machine.capability
    if machine.device_type != "cuda":
        reasons.append(f"flashinfer needs a CUDA device, got {machine.device_type}")
    elif machine.gfx:
        reasons.append(f"flashinfer needs an NVIDIA GPU, got {machine.gfx}")
    elif (major, 0) not in ALL:
        reasons.append(f"flashinfer needs SM90, SM100 or SM120, got SM{major}{minor}")
    elif scheme is not None and (major, 0) not in scheme.gpus:
        wanted = " or ".join([f"SM{a}{b}" for a, b in scheme.gpus])
        reasons.append(
            f"flashinfer runs {p.scheme or 'plain weights'} on {wanted}, got SM{major}{minor}"
        )
    act = p.options.activation
    if act is not None and act.name not in ACTIVATIONS:
        reasons.append(f"flashinfer has no activation {act.name!r}")
    if not p.contiguous_weights:
        reasons.append("flashinfer needs contiguous weights and scales; call .contiguous() once")
    if scheme is None:
        reasons.append(OTHERS.get(p.scheme, f"flashinfer has no kernel for {of}"))
        return reasons
    if scheme.layout == MIXED and not _reads_mixed_order():
        reasons.append(
            f"{p.scheme} runs with flashinfer-python {binding.TESTED[1]}: the one that is "
            "installed reads 4-bit weights in another order than moe_ops.prepare makes"
        )
    if p.dtype not in scheme.dtypes:
        names = " or ".join([str(d).removeprefix("torch.") for d in scheme.dtypes])
        reasons.append(f"flashinfer takes {names} for {of}, got {p.dtype}")
    whole = not (p.hidden_size % scheme.multiple or p.intermediate_size % scheme.multiple)
    if not whole and not scheme.layout:
        reasons.append(
            f"flashinfer needs K and I to be multiples of {scheme.multiple} for {of}, got "
            f"{p.hidden_size} and {p.intermediate_size}"
        )
    if p.global_rows:
        reasons.append(
            "flashinfer takes weights with a global scale for each expert, got one for each row "
            f"of {' and '.join(p.global_rows)}; use another backend"
        )
    if p.quantized_input and p.options.router_weight_on_input:
        reasons.append(
            "flashinfer cannot multiply an input that arrives quantized by router weights; pass "
            "it unquantized, or weigh it before it is quantized"
        )
    if p.scheme == "fp8_block" and p.options.router_weight_on_input:
        reasons.append(
            "flashinfer quantizes the input of fp8_block by itself, and could only be given the "
            "product with the router weights rounded to 16 bits before"
        )
    order = rows_before(act)
    wanted = scheme.layout + (f":{order}" if order else "")
    if base_layout(p.layout) != wanted:
        argument = f", activation={act.name!r}" if act is not None and act.gated else ""
        reasons.append(
            f"flashinfer takes weights in layout {wanted!r}, got {p.layout!r}: once call "
            f"moe_ops.prepare(w13, 'flashinfer'{argument}) and moe_ops.prepare(w2, 'flashinfer')"
        )
    return reasons


def workspace_shapes(M: int, problem: Problem) -> Workspaces:
    """Shapes of the workspaces. workspace13 holds copies of the input's rows (M, K), unless they
    are read in place, and if weights are padded, padded rows and the padded output; workspace2 the
    router's weights (M, top_k) and the layer's constants in fp32, the scales of quantized rows,
    and biases in the output's dtype; the index workspace local ids (M, top_k). The library
    allocates its own workspace.
    """
    p = problem
    pairs, K, N = M * p.top_k, p.hidden_size, p.num_rows
    copies = 1  # of the rows, and of the output if it is padded too
    if SCHEMES[p.scheme].layout:
        K = round_up(K, 128)
        N = N // p.intermediate_size * round_up(p.intermediate_size, 128)
        copies = 1 if p.hidden_size == K else 2
    floats = round_up(pairs, 32) + 8 * round_up(p.num_experts, 32) + round_up(M * K, 4096) // 128
    if p.quantized_input:  # scales of groups that are copied, and the one of all rows
        floats = floats + round_up(M * K, 4096) // 64 + 32
    if p.has_bias:
        floats = floats + round_up(p.num_experts * N, 64) // 2
        floats = floats + round_up(p.num_experts * K, 64) // 2
    return Workspaces(
        Buffer((copies * M, K), p.dtype),
        Buffer((floats,), torch.float32),
        Buffer((pairs,), torch.int32),
    )


def library_bytes(M: int, problem: Problem) -> int:
    """Bytes that the library allocates for M tokens, from above: getWorkspaceDeviceBufferSizes in
    its sources, without what does not grow with M.
    """
    p, pairs = problem, M * problem.top_k
    widest = max(p.hidden_size, p.intermediate_size)
    of_pair = 2 * widest + 2 * max(p.num_rows, p.hidden_size)  # inputs and outputs of a GEMM
    of_pair += widest // 8 + 16  # scales of e2m1 and e8m0, and indices
    if p.scheme == "fp8_block":
        of_pair += widest * 5 // 4  # rows quantized to e4m3, and scales
    return pairs * of_pair + 4 * p.num_experts * M


BACKEND = register(
    Backend(
        "flashinfer",
        supports=supports,
        workspace_shapes=workspace_shapes,
        launch={"experts": Lazy("moe_ops.backends.flashinfer.layer:experts")},
        devices=("CUDA",),
        library=Library(
            available=available,
            distribution=binding.DISTRIBUTION,
            newest_tested=binding.TESTED[1],
            warm=library.warm,
            own_bytes=library_bytes,
        ),
        takes=Takes(
            native_schemes=tuple(SCHEMES),
            native_capability=(9, 0),
            quantized_input=("nvfp4", *[n for n, scheme in SCHEMES.items() if scheme.input]),
            chunked=True,
        ),
        relayouts=RELAYOUTS,
    )
)
