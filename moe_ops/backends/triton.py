"""Backend `triton`: plain bf16, fp16 and fp32 weights on any CUDA GPU from SM80 on.

Four launches a layer: route (or none for one token), GEMM1 with the activation in its epilogue, GEMM2
times the router weight, combine. Nothing is permuted, allocated or read by the host. On a machine without
a GPU the kernels run under Triton's interpreter if TRITON_INTERPRET=1 was set before this import.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activations import NO_LIMIT, Activation
from moe_ops.kernels import triton_tiles
from moe_ops.kernels.triton_tiles import GROUP, SMALLEST_TILE, block_bound
from moe_ops.library import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs, register
from moe_ops.meta.workspace import carve, cdiv
from moe_ops.problem import Buffer, Machine, Problem, Workspaces

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COMBINE_COLUMNS = 512
_compiled: dict[tuple, tuple] = {}  # specialisation -> its compiled kernels; filled by warm calls


def available() -> str | None:
    """None, or why Triton cannot be imported here."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; a CUDA build of torch brings it, or pip install triton"
    return None


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty means it can."""
    reasons = []
    if machine.device_type != "cuda" and not (machine.device_type == "cpu" and INTERPRETED):
        reasons.append(f"triton needs a CUDA device, got {machine.device_type}")
    elif machine.device_type == "cuda" and machine.capability < (8, 0):
        major, minor = machine.capability
        reasons.append(f"triton needs compute capability 8.0 or higher, got {major}.{minor}")
    if problem.scheme:
        reasons.append(f"triton runs plain weights only so far, got scheme {problem.scheme!r}")
    if problem.layout:
        reasons.append(f"triton takes weights in their natural layout, got {problem.layout!r}")
    if problem.dtype not in _DTYPES:
        reasons.append(f"triton takes bfloat16, float16 or float32, got {problem.dtype}")
    return reasons


def workspace_shapes(M, problem: Problem) -> Workspaces:
    """workspace13 holds the activation's output h (rows, I) in the input's dtype, workspace2 the weighted
    rows y (M * top_k, K) in fp32, the index workspace the table of blocks (.., 4) and the sort order.

    M is T for batched_experts and S for grouped_linear, which writes `out` at once and needs no rows.
    """
    experts = problem.num_experts
    if problem.kind == "experts":
        pairs = M * problem.top_k
        h, y = (pairs, problem.intermediate_size), (pairs, problem.hidden_size)
        index = 4 * block_bound(pairs, experts, SMALLEST_TILE) + pairs
    elif problem.kind == "batched_experts":
        h, y = (experts * M, problem.intermediate_size), (0,)
        index = 4 * experts * cdiv(M, SMALLEST_TILE)
    else:
        h = y = (0,)
        index = 4 * block_bound(M, experts + 1, SMALLEST_TILE)
    return Workspaces(
        Buffer(h, problem.dtype), Buffer(y, torch.float32), Buffer((index,), torch.int32)
    )


class _Launch(NamedTuple):
    """One kernel launch: arguments in the order of the kernel's parameters, constants last."""

    kernel: str
    grid: tuple[int, int, int]
    args: tuple
    warps: int = 4


@cache
def _kernels() -> dict:
    from moe_ops.kernels import triton_experts, triton_routing

    return {
        "route": triton_routing.moe_ops_route,
        "group_blocks": triton_routing.moe_ops_group_blocks,
        "gemm1": triton_experts.moe_ops_gemm1,
        "gemm2": triton_experts.moe_ops_gemm2,
        "combine": triton_experts.moe_ops_combine,
    }


@cache
def _shared_memory(device: int) -> int:
    """Bytes of shared memory one block may use; an H200's under the interpreter."""
    if device < 0:
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _run(launches: list[_Launch], key: tuple, device: int) -> None:
    """Launch in order. `key` holds everything that a kernel is specialised on.

    Kernels are kept compiled and launched as such: a call never compiles by accident, which capture could
    not survive, and Triton's own look-up on every launch is left out.
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
            "shapes, dtypes and strides outside of torch.cuda.graph(...), then capture"
        )
    functions = _kernels()
    compiled = tuple(
        functions[launch.kernel][launch.grid](*launch.args, num_warps=launch.warps)
        for launch in launches
    )
    if not INTERPRETED:
        _compiled[key] = compiled


def _typed(workspace: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`size` elements of `dtype` in the workspace; the tiered op hands out bytes, others what was asked for."""
    return workspace if workspace.dtype == dtype else carve(workspace, (size,), dtype)


def _pointers(*tensors: Tensor | None) -> tuple:
    """What kernels are specialised on in their pointers: dtypes, and alignment unless all have 16 bytes."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
    if bits % 16 == 0:
        return dtypes
    return dtypes + tuple([0 if tensor is None else tensor.data_ptr() % 16 for tensor in tensors])


def _check_dtype(name: str, weight: Tensor, dtype: torch.dtype) -> None:
    if weight.dtype != dtype:
        raise ValueError(
            f"{name} must have the input's dtype {dtype}, got {weight.dtype}; convert one with .to()"
        )


def _strides(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if bias is None else bias.stride()


@cache
def _activation(name: str) -> tuple[str, bool, bool]:
    """(function, gated, interleaved) of a name: the constants that GEMM1 is compiled for."""
    activation = Activation(name)
    function = name.removesuffix("_no_mul").removesuffix("_uninterleave")
    return function, activation.gated, activation.interleaved


def _launch_experts(a: ExpertsArgs) -> None:
    x, w13, w2, ids, weights, out = a.hidden_states, a.w13, a.w2, a.topk_ids, a.topk_weights, a.out
    M, top_k = ids.shape
    if M == 0:
        return
    E, K, I = w2.shape  # noqa: E741
    dtype, device = x.dtype, x.get_device()
    _check_dtype("w13", w13, dtype)
    _check_dtype("w2", w2, dtype)
    pairs = M * top_k
    tiles = triton_tiles.choose(pairs, E, K, I, dtype.itemsize, M == 1, _shared_memory(device))
    tokens, gemm1, gemm2 = tiles.tokens, tiles.gemm1, tiles.gemm2
    blocks = pairs if tiles.direct else block_bound(pairs, E, tokens)
    rows = "direct" if tiles.direct else "sorted"
    function, gated, interleaved = _activation(a.activation)
    columns = gemm1.rows // 2 if gated else gemm1.rows  # of h, per tile
    h, y = _typed(a.workspace13, pairs * I, dtype), _typed(a.workspace2, pairs * K, torch.float32)
    index, expert_map = a.index_workspace, a.expert_map
    has_map, on_input, limited = (
        expert_map is not None,
        a.router_weight_on_input,
        a.limit < NO_LIMIT,
    )
    num_ids, stride_map = (expert_map.shape[0], expert_map.stride(0)) if has_map else (E, 0)
    routing = (index, ids, expert_map)
    id_strides = (*ids.stride(), stride_map)
    counts = (blocks, E, num_ids, top_k)
    launches = []
    if not tiles.direct:
        padded = max(16, 1 << (E - 1).bit_length())
        sizes = (pairs, E, num_ids, blocks, top_k)
        constants = (padded, tokens, tiles.chunk, has_map)
        warps = 4 if tiles.chunk <= 1024 else 8
        launches.append(
            _Launch("route", (E, 1, 1), (*routing, *sizes, *id_strides, *constants), warps)
        )
    launches += (
        _Launch(
            "gemm1",
            (blocks * cdiv(I, columns), 1, 1),
            (
                h,
                x,
                w13,
                a.w13_bias,
                weights,
                *routing,
                *counts,
                K,
                I,
                *id_strides,
                *weights.stride(),
            )
            + (0, *x.stride(), *w13.stride(), *_strides(a.w13_bias), a.alpha, a.beta, a.limit)
            + (
                rows,
                has_map,
                a.w13_bias is not None,
                on_input,
                function,
                gated,
                interleaved,
                limited,
            )
            + (K % gemm1.k == 0, I % columns == 0, GROUP, tokens, *gemm1[:3]),
            gemm1.warps,
        ),
        _Launch(
            "gemm2",
            (blocks * cdiv(K, gemm2.rows), 1, 1),
            (y, h, w2, a.w2_bias, weights, *routing, *counts, I, K, *id_strides, *weights.stride())
            + (I, 1, *w2.stride(), *_strides(a.w2_bias), 0, K, 1)
            + (rows, has_map, a.w2_bias is not None, not on_input, False)
            + (I % gemm2.k == 0, K % gemm2.rows == 0, GROUP, tokens, *gemm2[:3]),
            gemm2.warps,
        ),
        _Launch(
            "combine",
            (M, cdiv(K, _COMBINE_COLUMNS), 1),
            (out, y, ids, expert_map, E, num_ids, K, *id_strides, *out.stride())
            + (top_k, has_map, _COMBINE_COLUMNS),
        ),
    )
    pointers = _pointers(
        x, w13, w2, weights, ids, out, h, y, index, expert_map, a.w13_bias, a.w2_bias
    )
    strides = (
        x.stride(),
        w13.stride(),
        w2.stride(),
        out.stride(),
        _strides(a.w13_bias),
        _strides(a.w2_bias),
    )
    key = (device, tiles, E, K, I, top_k, a.activation, limited, on_input, pointers, strides)
    _run(launches, key, device)


def _launch_batched_experts(a: BatchedExpertsArgs) -> None:
    x, w13, w2, sizes, out = a.hidden_states, a.w13, a.w2, a.expert_num_tokens, a.out
    E, T, K = x.shape
    if T == 0:
        return
    I = w2.shape[2]  # noqa: E741
    dtype, device = x.dtype, x.get_device()
    _check_dtype("w13", w13, dtype)
    _check_dtype("w2", w2, dtype)
    tiles = triton_tiles.choose(E * T, E, K, I, dtype.itemsize, False, _shared_memory(device))
    tokens, gemm1, gemm2 = tiles.tokens, tiles.gemm1, tiles.gemm2
    blocks = E * cdiv(T, tokens)
    function, gated, interleaved = _activation(a.activation)
    columns = gemm1.rows // 2 if gated else gemm1.rows
    limited = a.limit < NO_LIMIT
    h, index = _typed(a.workspace13, E * T * I, dtype), a.index_workspace
    # Rows are numbered e * T + t throughout; what (e, t) is off by from that times the row stride is the
    # expert's own term, zero for a contiguous tensor whatever T is.
    x_strides = (x.stride(0) - T * x.stride(1), x.stride(1), x.stride(2))
    out_strides = (out.stride(0) - T * out.stride(1), out.stride(1), out.stride(2))
    unused = (
        None,
        index,
        None,
        None,
        blocks,
        E,
        0,
        1,
    )  # router weights; ids, their map and counts
    launches = [
        _group_blocks(index, sizes, E * T, T, E, blocks, E, tokens, True),
        _Launch(
            "gemm1",
            (blocks * cdiv(I, columns), 1, 1),
            (h, x, w13, a.w13_bias, *unused, K, I, 0, 0, 0, 0, 0)
            + (*x_strides, *w13.stride(), *_strides(a.w13_bias), a.alpha, a.beta, a.limit)
            + (
                "plain",
                False,
                a.w13_bias is not None,
                False,
                function,
                gated,
                interleaved,
                limited,
            )
            + (K % gemm1.k == 0, I % columns == 0, GROUP, tokens, *gemm1[:3]),
            gemm1.warps,
        ),
        _Launch(
            "gemm2",
            (blocks * cdiv(K, gemm2.rows), 1, 1),
            (out, h, w2, a.w2_bias, *unused, I, K, 0, 0, 0, 0, 0)
            + (I, 1, *w2.stride(), *_strides(a.w2_bias), *out_strides)
            + ("plain", False, a.w2_bias is not None, False, False)
            + (I % gemm2.k == 0, K % gemm2.rows == 0, GROUP, tokens, *gemm2[:3]),
            gemm2.warps,
        ),
    ]
    pointers = _pointers(x, w13, w2, sizes, out, h, index, a.w13_bias, a.w2_bias)
    strides = (
        x_strides,
        w13.stride(),
        w2.stride(),
        out_strides,
        _strides(a.w13_bias),
        _strides(a.w2_bias),
    )
    key = (device, "batched", tiles, E, K, I, a.activation, limited, pointers, strides)
    _run(launches, key, device)


def _launch_grouped_linear(a: GroupedLinearArgs) -> None:
    x, weight, offsets, out = a.x, a.weight, a.offsets, a.out
    S, K = x.shape
    if S == 0:
        return
    E, N, _ = weight.shape
    dtype, device = x.dtype, x.get_device()
    _check_dtype("weight", weight, dtype)
    tiles = triton_tiles.choose(S, E, K, K, dtype.itemsize, False, _shared_memory(device))
    tokens, gemm = tiles.tokens, tiles.gemm2
    blocks = block_bound(S, E + 1, tokens)  # the rows past the last group are a group of zeros
    index = a.index_workspace
    launches = [
        _group_blocks(index, offsets, S, 0, E, blocks, E + 1, tokens, False),
        _Launch(
            "gemm2",
            (blocks * cdiv(N, gemm.rows), 1, 1),
            (out, x, weight, a.bias, None, index, None, None, blocks, E, 0, 1, K, N, 0, 0, 0, 0, 0)
            + (*x.stride(), *weight.stride(), *_strides(a.bias), 0, *out.stride())
            + ("plain", False, a.bias is not None, False, True)
            + (K % gemm.k == 0, N % gemm.rows == 0, GROUP, tokens, *gemm[:3]),
            gemm.warps,
        ),
    ]
    pointers = _pointers(x, weight, offsets, out, index, a.bias)
    strides = (x.stride(), weight.stride(), out.stride(), _strides(a.bias))
    _run(launches, (device, "grouped", tiles, E, K, N, pointers, strides), device)


def _group_blocks(
    index: Tensor,
    sizes: Tensor,
    S: int,
    T: int,
    E: int,
    blocks: int,
    groups: int,
    tile: int,
    batched: bool,
) -> _Launch:
    padded = max(16, 1 << E.bit_length())
    args = (index, sizes, S, T, E, blocks, sizes.stride(0), padded, tile, 128, batched)
    return _Launch("group_blocks", (groups, 1, 1), args)


BACKEND = register(
    "triton",
    available=available,
    supports=supports,
    workspace_shapes=workspace_shapes,
    launch={
        "experts": _launch_experts,
        "batched_experts": _launch_batched_experts,
        "grouped_linear": _launch_grouped_linear,
    },
    devices=("CPU", "CUDA") if INTERPRETED else ("CUDA",),
)
