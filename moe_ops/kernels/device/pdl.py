"""Programmatic dependent launch (PDL): where a kernel lets the next one start, and where it waits
for the one before.
"""

import triton
import triton.language as tl

try:
    from triton.language.extra import cuda
except ImportError:  # Triton without its NVIDIA backend, where PDL is always False
    cuda = None


@triton.jit
def gdc_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start once all programs of this one have executed this. The next kernel
    executes gdc_wait before it reads what this one writes.

    GEMMs written in Triton execute it after their mainloop, because programs that start earlier
    would hold shared memory while they wait. The GEMMs of mixed_gemm/sm90_wgmma.py, and the kernel
    that rounds h to e4m3 between them, execute it first: their dependents prefetch weights into
    shared memory before they wait. So do the kernels of gemm/pair_adapters.py that make rows
    narrow, of which one is between the GEMMs, and GEMM1 of mixed_gemm/sm90_mma.py, which is the
    first of its call and never launched early.
    """
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait until the kernel before this one has ended and its writes are visible.

    In every kernel, every program executes gdc_wait before it ends (of programs without work, one
    does, and of all with gdc_wait_at_the_end), and executes gdc_launch_dependents only after it
    (except in kernels that read nothing of their predecessor). So while a kernel runs, all kernels
    before its direct predecessor have ended.

    Where kernels of mixed_gemm/sm90_wgmma.py and gemm/pair_adapters.py execute
    gdc_launch_dependents first, this holds only after gdc_wait. The GEMMs read the table of blocks
    before gdc_wait: it was complete when GEMM1 started. For few pairs they instead read ids, which
    are older than the layer, for their first tile, and the table and the order only after
    gdc_wait, or after what the producer copies then has come: `permute_tokens` writes them
    together with the rows. Tiles taken are counted after gdc_wait alone.
    """
    if PDL:
        cuda.gdc_wait()


@triton.jit
def gdc_wait_at_the_end(BESIDE: tl.constexpr):
    """Of a kernel with two axes that runs beside the one before it: its last program waits, so
    that it ends after that one. Others would keep their place from programs that have work to do.

    It reads nothing that the one before writes, and writes nothing that that one uses. That one
    was itself launched after all before it had ended, so that what is older is there.
    """
    if BESIDE:
        last = tl.program_id(0) == tl.num_programs(0) - 1
        if last & (tl.program_id(1) == tl.num_programs(1) - 1):
            cuda.gdc_wait()
