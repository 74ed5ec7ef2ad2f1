"""FlashInfer's CUTLASS layer: loading its module, and the choice of its kernels. The library is
imported at the first launch.

The compiled module is called directly, instead of `flashinfer.fused_moe.cutlass_fused_moe`, for
two reasons. That function calls the library's autotuner every time, which tunes if its context is
active anywhere in the process. And the autotuner may choose kernels that add bf16 outputs with
atomics, in any order and with a rounding for each expert of a token. Here a call runs the tactic
that `moe_ops.warmup` measured for it, or else the library's default, and kernels that sum with
atomics only if `deterministic` is False.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
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
_LONG = 2e-3  # seconds of a call that is timed without a graph


class Kernels(NamedTuple):
    """The module's family of kernels that runs a call: the arguments of its `init`."""

    input: torch.dtype
    weight: torch.dtype
    output: torch.dtype
    fp8_block: bool = False  # use_deepseek_fp8_block_scale
    w4_groups: bool = False  # use_w4_group_scaling
    mxfp8: bool = False  # use_mxfp8_act_scaling
    packed: bool = False  # use_packed_weights


class Key(NamedTuple):
    """Key of measured tactics."""

    scheme: str
    dtype: str
    shape: tuple[int, int, int, int]  # E, K, I, top_k
    activation: str
    deterministic: bool
    rows: int  # the least power of two >= M


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
_lock = threading.Lock()


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


# --- tactics --------------------------------------------------------------------------------


def key_of(
    scheme: str, dtype: torch.dtype, shape: tuple, activation: str, deterministic: bool, M: int
) -> Key:
    rows = 1 << max(M - 1, 0).bit_length()
    return Key(scheme, str(dtype).removeprefix("torch."), shape, activation, deterministic, rows)


_found: dict[str, dict[Key, Tactics]] = {}  # by GPU name
_local = threading.local()


def tactics(gpu: str, key: Key) -> Tactics:
    """The tactics measured for a call on a GPU of this name, or DEFAULT."""
    return _table(gpu).get(key, DEFAULT)


def _table(gpu: str) -> dict[Key, Tactics]:
    """The tactics of a GPU, read from disk at the first call."""
    table = _found.get(gpu)
    if table is None:
        with _lock:
            table = _found.get(gpu)
            if table is None:
                table = _found[gpu] = load(tactics_path(), gpu)
    return table


def tactics_path() -> Path:
    """The file to which `moe_ops.warmup` writes measured tactics."""
    return environment.cache_folder() / f"flashinfer-{TESTED[1]}.json"


def load(path: Path, gpu: str) -> dict[Key, Tactics]:
    """The tactics of a GPU in a file that `save` wrote; none if the file is absent or damaged."""
    try:
        stored = json.loads(path.read_text()).get(gpu, {})
        return {
            Key(*ast.literal_eval(key)): (int(first), int(second))
            for key, (first, second) in stored.items()
        }
    except (OSError, ValueError, SyntaxError, TypeError, AttributeError):
        return {}


def save(path: Path, gpu: str, table: dict[Key, Tactics]) -> None:
    """Add the tactics of a GPU to a file, which is replaced atomically."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        stored = {}
    if not isinstance(stored, dict):
        stored = {}
    merged = load(path, gpu) | table
    stored[gpu] = {str(tuple(key)): list(value) for key, value in sorted(merged.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        json.dump(stored, file, indent=1)
    os.replace(name, path)


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


def tune(gpu: str, key: Key, of: Any, call: Callable[[Tactics], None]) -> None:
    """Measure the tactics of a call, unless they are known, and save them.

    Args:
        of: the `runner` that `call` runs with given tactics.
    """
    table = _table(gpu)
    if key in table:
        return
    counts = of.get_gemm1_tactic_count(), of.get_gemm2_tactic_count()
    best = DEFAULT
    for position, ids in enumerate(candidates(*counts, key.deterministic)):
        least, before = _seconds(call, best), position * counts[0]
        for id_ in ids:
            tried = (id_, best[1]) if position == 0 else (best[0], id_)
            # occupancies are counted over both
            if (
                of.get_tactic_occupancy(before + id_) > 0
                and (time := _seconds(call, tried)) < least
            ):
                least, best = time, tried
    with _lock:
        table[key] = best
        save(tactics_path(), gpu, table)


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
    try:
        call(tried)
        torch.cuda.synchronize()
        return _timed(call, tried)
    except Exception:  # the module's foreign-function interface raises any kind
        return float("inf")


def _timed(call: Callable[[Tactics], None], tried: Tactics) -> float:
    start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def timed(run: Callable[[], object], times: int) -> float:
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    once = timed(lambda: call(tried), 1)
    if once > _LONG:
        return once
    # A graph, because short calls take longer to launch than to run. Not torch.cuda.graph, which
    # collects garbage each time.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for _ in range(_CALLS):
                call(tried)
        finally:
            graph.capture_end()
    graph.replay()
    return timed(graph.replay, _REPLAYS) / _CALLS
