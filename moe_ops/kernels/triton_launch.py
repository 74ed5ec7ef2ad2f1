"""Launching the Triton kernels: compiled once per specialisation, started by their compiled form after that."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEPENDENT_CAPABILITY = (9, 0)  # a kernel can start while the one before it ends
NATIVE_CAPABILITY = (8, 9)  # e4m3 products and conversions
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_compiled: dict[tuple, tuple] = {}  # specialisation -> its compiled kernels; filled by warm calls


class Launch(NamedTuple):
    """One kernel launch: arguments in the order of the kernel's parameters, constants last."""

    kernel: str
    grid: tuple[int, int, int]
    args: tuple
    warps: int = 4
    registers: int | None = None  # of a thread at most


class Gpu(NamedTuple):
    """What tiles and kernels depend on."""

    shared_memory: int  # bytes one block may use
    native: bool  # has e4m3 products and conversions
    dependent: bool  # kernels wait for the one before them themselves
    name: str = ""  # by which measured tables are found


@cache
def gpu(device: int) -> Gpu:
    """Facts of a CUDA device; under the interpreter (-1) an H200's memory, and e4m3 by arithmetic."""
    if device < 0:
        return Gpu(227 * 1024, False, False)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    memory = properties.shared_memory_per_block_optin
    native, dependent = capability >= NATIVE_CAPABILITY, capability >= DEPENDENT_CAPABILITY
    return Gpu(memory, native, dependent, properties.name)


@cache
def _kernels() -> dict:
    from moe_ops.backends.deep_gemm import permute, rows
    from moe_ops.backends.flashinfer import inputs
    from moe_ops.kernels import (
        gluon_packed_launch,
        triton_emulated,
        triton_experts,
        triton_fp8,
        triton_large,
        triton_packed,
        triton_routing,
        triton_vector,
        triton_vector_packed,
    )
    from moe_ops.kernels.router import fused

    return {
        "router_sums": fused.moe_ops_router_sums,
        "router_choice": fused.moe_ops_router_choice,
        "route": triton_routing.moe_ops_route,
        "group_blocks": triton_routing.moe_ops_group_blocks,
        "quantize": triton_fp8.moe_ops_quantize,
        "route_quantize": triton_fp8.moe_ops_route_quantize,
        "amax": triton_fp8.moe_ops_amax,
        "fake_quantize": triton_emulated.moe_ops_fake_quantize,
        "gemm1": triton_experts.moe_ops_gemm1,
        "gemm2": triton_experts.moe_ops_gemm2,
        "large_gemm1": triton_large.moe_ops_large_gemm1,
        "large_gemm2": triton_large.moe_ops_large_gemm2,
        "packed_gemm1": triton_packed.moe_ops_packed_gemm1,
        "packed_gemm2": triton_packed.moe_ops_packed_gemm2,
        "vector_gemm1": triton_vector.moe_ops_vector_gemm1,
        "vector_gemm2": triton_vector.moe_ops_vector_gemm2,
        "vector_packed_gemm1": triton_vector_packed.moe_ops_vector_packed_gemm1,
        "vector_packed_gemm2": triton_vector_packed.moe_ops_vector_packed_gemm2,
        **gluon_packed_launch.kernels(),
        "combine": triton_experts.moe_ops_combine,
        "flashinfer_route": inputs.moe_ops_flashinfer_route,
        "flashinfer_rows": inputs.moe_ops_flashinfer_rows,
        "flashinfer_biases": inputs.moe_ops_flashinfer_biases,
        "deep_gemm_count": permute.moe_ops_deep_gemm_count,
        "deep_gemm_place": permute.moe_ops_deep_gemm_place,
        "deep_gemm_batches": permute.moe_ops_deep_gemm_batches,
        "deep_gemm_scatter": rows.moe_ops_deep_gemm_scatter,
        "deep_gemm_activate": rows.moe_ops_deep_gemm_activate,
        "deep_gemm_combine": rows.moe_ops_deep_gemm_combine,
    }


# Kernels that come first and wait before they do anything. What ran before the call knows nothing of us; at its end they
# are launched already: 0.7 to 1.1 us less a layer on an H200, 5 % for one token of Qwen3. (Not worth it, at 0.9 us more, for
# one token of packed weights, whose second kernel then starts later.) They wait for their direct predecessor alone: a
# foreign kernel that was launched early, too, must itself have waited for what it leaves behind, as such kernels must.
EARLY = ("route", "route_quantize", "arrange", "vector_gemm1")


def run(launches: list[Launch], key: tuple, device: int, dependent: bool) -> None:
    """Launch in order. `key` holds everything that a kernel is specialised on.

    `dependent`: kernels were told by their constant DEPENDENT to wait for the one before them.

    Kernels are kept compiled and launched as such: a call never compiles by accident, which capture could
    not survive, and Triton's own look-up on every launch is left out.

    Raises:
        RuntimeError: a CUDA graph is being captured and the specialisation was never run before.
    """
    compiled = _compiled.get(key)
    if compiled is not None:
        from triton.runtime import driver

        stream = driver.active.get_current_stream(device)
        for kernel, launch in zip(compiled, launches, strict=True):
            kernel[launch.grid](*launch.args, stream=stream)
        return
    if device >= 0 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "moe_ops backend 'triton' has no compiled kernel for this call and cannot compile one while a "
            "CUDA graph is captured; warm up first: call the same function once with tensors of these "
            "shapes, dtypes and strides outside of torch.cuda.graph(...), or use moe_ops.warmup, then capture"
        )
    functions = _kernels()
    compiled = ()
    for launch in launches:
        early = dependent and (bool(compiled) or launch.kernel in EARLY)
        options: dict[str, Any] = {"launch_pdl": True} if early else {}
        if launch.registers is not None:
            options["maxnreg"] = launch.registers
        kernel = functions[launch.kernel][launch.grid]
        compiled += (kernel(*launch.args, num_warps=launch.warps, **options),)
    if not INTERPRETED:
        _compiled[key] = compiled


def pointers(*tensors: Tensor | None) -> tuple:
    """What kernels are specialised on in their pointers: dtypes, and alignment unless all have 16 bytes."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    if bits % 16 == 0:
        return dtypes
    return dtypes + tuple([0 if tensor is None else tensor.data_ptr() % 16 for tensor in tensors])
