"""FlashInfer's CUTLASS layer: loading its module, and the choice of its kernels. The library is
imported at the first launch.

The compiled module is called directly, instead of `flashinfer.fused_moe.cutlass_fused_moe`: that
function asks the library's autotuner every time, which tunes if its context is active anywhere in
the process, and may choose kernels that add bf16 outputs with atomics, in any order and with a
rounding for each expert of a token. Here a call runs the tactic that `moe_ops.warmup` measured for
it in this process, or else the library's default, and kernels that add with atomics only if
`deterministic` is False.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from moe_ops import environment
from moe_ops.backends.flashinfer.binding import DISTRIBUTION, TESTED, binding

# Tactics of GEMM1 and GEMM2, each counted from 0; -1 is the library's default. The module also
# accepts GEMM2's counted from GEMM1's last on, but only numbers past GEMM2's own count: all others
# it takes as counted from 0.
Tactics = tuple[int, int]
DEFAULT: Tactics = (-1, -1)
_REPLAYS, _CALLS = 5, 4  # timed runs of a captured graph, and calls in it


class Kernels(NamedTuple):
    """The module's family of kernels that runs a call: the arguments of its `init`."""

    input: torch.dtype
    weight: torch.dtype
    output: torch.dtype
    fp8_block: bool = False  # use_deepseek_fp8_block_scale
    w4_groups: bool = False  # use_w4_group_scaling
    mxfp8: bool = False  # use_mxfp8_act_scaling
    packed: bool = False  # use_packed_weights


def architecture(capability: tuple[int, int]) -> str:
    """The module for a GPU, or "" if this backend uses none for it."""
    if capability[0] == 10:
        return "103" if capability[1] == 3 else "100"
    return {(9, 0): "90", (12, 0): "120", (12, 1): "120"}.get(capability, "")


@cache
def module(arch: str) -> Any:
    """The library's compiled module. If none is prebuilt, the first use builds it, and warns."""
    import flashinfer.jit.fused_moe as jit
    from flashinfer.jit import env

    spec = getattr(jit, f"gen_cutlass_fused_moe_sm{arch}_module")()
    if not spec.is_compiled:
        warnings.warn(
            f"FlashInfer's fused-MoE module for sm{arch} is not built on this machine: building "
            "it now, once, takes some 24 minutes on 16 cores. The wheel flashinfer-jit-cache "
            "brings it built, and moe_ops.warmup builds it ahead of the first step",
            stacklevel=2,
        )
    loaded = spec.build_and_load()
    # fp8_block kernels are compiled by nvcc at first use, from these headers
    loaded.set_deepgemm_jit_include_dirs(
        [str(env.FLASHINFER_CSRC_DIR / "nv_internal" / "tensorrt_llm")]
    )
    return loaded


@cache
def runner(device: int, kernels: Kernels) -> Any:
    """The module's object for a family of kernels on a device."""
    return module(architecture(environment.capability(device))).init(*kernels, *binding().init)


_warm: set[tuple] = set()


def check_warm(key: tuple) -> None:
    """Raise RuntimeError while a CUDA graph is captured, unless a call like this one was made."""
    if key in _warm:
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "moe_ops backend 'flashinfer' has not run this call yet and cannot load or compile "
            "its kernels while a CUDA graph is captured; warm up first: call the same function "
            "once with tensors of these shapes and dtypes outside of torch.cuda.graph(...), or "
            "use moe_ops.warmup, then capture"
        )


def mark_warm(key: tuple) -> None:
    """Record that a call like this one was made."""
    _warm.add(key)


# --- tactics -------------------------------------------------------------------------------------

_found: dict[tuple, Tactics] = {}
_local = threading.local()


def tactics(key: tuple) -> Tactics:
    """The tactics measured for calls with this key, or DEFAULT."""
    return _found.get(key, DEFAULT)


@contextmanager
def warm(_rows: int) -> Iterator[None]:
    """Let calls of this thread measure tactics that were not measured; `moe_ops.warmup`
    enters it.
    """
    before = tuning()
    _local.tuning = True
    try:
        yield
    finally:
        _local.tuning = before


def tuning() -> bool:
    """Whether this thread is inside of `warm`."""
    return getattr(_local, "tuning", False)


@cache
def numbered(device: int) -> bool:
    """Whether `candidates` knows the numbers of tactics on a device; if not, the default runs.
    They are those of the tested versions.
    """
    tested = environment.newer_than_tested(DISTRIBUTION, TESTED[1]) is None
    return tested and environment.capability(device) == (9, 0)


def tune(key: tuple, of: Any, call: Callable[[Tactics], None], deterministic: bool) -> None:
    """Measure the tactics of a call, unless they are known.

    Args:
        of: the `runner` that `call` runs with given tactics.
    """
    if key in _found:
        return
    counts = of.get_gemm1_tactic_count(), of.get_gemm2_tactic_count()
    best, least = DEFAULT, _seconds(call, DEFAULT)
    for position, ids in enumerate(candidates(*counts, deterministic)):
        for id_ in ids:
            tried = (id_, best[1]) if position == 0 else (best[0], id_)
            # occupancies are counted over both
            if of.get_tactic_occupancy(position * counts[0] + id_) > 0:
                time = _seconds(call, tried)
                best, least = (tried, time) if time < least else (best, least)
    _found[key] = best


def candidates(first: int, second: int, deterministic: bool) -> tuple[list[int], list[int]]:
    """Tactics to try, out of `first` of GEMM1 and `second` of GEMM2.

    For n tile shapes GEMM1 has n tactics, then n with swapped operands. A GEMM2 that can add to
    the output has n tactics, n that add with atomics, and then both again with swapped operands.
    The tactics of older GPUs, which follow, are left out.
    """
    n = (second - first) // 2
    if n <= 0:  # none adds to the output
        return list(range(first)), list(range(second))
    plain = [*range(n), *range(2 * n, 3 * n)]
    return list(range(min(2 * n, first))), plain if deterministic else list(range(4 * n))


def _seconds(call: Callable[[Tactics], None], tried: Tactics) -> float:
    """Seconds of a call on the device, infinite for tactics that cannot run it."""
    start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    # A graph, because short calls take longer to launch than to run. Not torch.cuda.graph, which
    # collects garbage each time.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        call(tried)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            try:
                for _ in range(_CALLS):
                    call(tried)
            finally:
                graph.capture_end()
    except Exception:  # the module's foreign-function interface raises any kind
        return float("inf")
    graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / _REPLAYS / _CALLS
