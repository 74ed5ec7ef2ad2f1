"""Programmatic dependent launch: when a kernel lets the next one start, and when it waits for the
one before.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def gdc_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start once all programs are here; it waits before it reads what this one
    writes.

    A GEMM written in Triton executes it after its main loop: programs that started earlier would
    hold shared memory while they wait. Those of mixed_gemm/sm90_wgmma.py execute it first: what
    starts early fills its ring buffer with weights before it waits.
    """
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended and its writes are visible.

    Every program of every kernel waits before it ends (of those without work, one), and lets the
    next kernel start only then (kernels that read nothing of their predecessor excepted). So once
    a kernel runs, all kernels before its direct predecessor have ended. After the GEMMs of
    mixed_gemm/sm90_wgmma.py, which let the next kernel start at once, that holds once it has
    waited; the index, which they read before, was complete when the first of them started. For
    few pairs they read ids instead, which are older than the layer, and the order only after their
    main loop: `permute_tokens` writes it together with the rows that they wait for.
    """
    if PDL:
        cuda.gdc_wait()
