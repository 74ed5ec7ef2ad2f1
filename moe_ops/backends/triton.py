"""Backend `triton`: plain bf16, fp16 and fp32 weights on any CUDA GPU from SM80 on.

Four launches a layer: route (or none for one token), GEMM1 with the activation in its epilogue, GEMM2,
the weighted sum. Nothing is permuted, allocated or read by the host. On a machine without
a GPU the kernels run under Triton's interpreter if TRITON_INTERPRET=1 was set before this import.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.activations import NO_LIMIT, Activation
from moe_ops.kernels import triton_tiles
from moe_ops.kernels.triton_tiles import GROUP, SMALLEST_TILE, Tile, block_bound
from moe_ops.library import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs, register
from moe_ops.meta.workspace import carve, cdiv
from moe_ops.problem import Buffer, Machine, Problem, Workspaces

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COMBINE_COLUMNS = 512
_blocks = lru_cache(maxsize=8192)(block_bound)  # spares two sym_min of 0.8 us a call
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
    """workspace13 holds the activation's output h (rows, I) in the input's dtype, workspace2 its
    product y (M * top_k, K) with w2 in fp32, the index workspace the table of blocks (.., 4) and the sort order.

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


class _Rows(NamedTuple):
    """How the blocks of a GEMM find their rows (kernels/triton_experts.py), and how large blocks are."""

    name: str  # constant ROWS
    has_map: bool
    tokens: int
    args: tuple  # index, ids, map; num_blocks, E, num_ids, top_k; strides of ids (2) and map

    @property
    def blocks(self) -> int:
        return self.args[3]


def _sorted_rows(index: Tensor, blocks: int, experts: int, tokens: int) -> _Rows:
    """Rows of an input that is sorted by expert already."""
    args = (index, None, None, blocks, experts, 0, 1, 0, 0, 0)
    return _Rows("plain", False, tokens, args)


def _strides(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if bias is None else bias.stride()


@cache
def _activation(name: str) -> tuple[str, bool, bool]:
    """(function, gated, interleaved) of a name: the constants that GEMM1 is compiled for."""
    activation = Activation(name)
    function = name.removesuffix("_no_mul").removesuffix("_uninterleave")
    return function, activation.gated, activation.interleaved


def _gemm1(
    a: ExpertsArgs | BatchedExpertsArgs,
    rows: _Rows,
    tile: Tile,
    h: Tensor,
    x_strides: tuple,  # of an expert (beyond its rows), a row, a column
    input_weights: Tensor | None = None,  # router weights to scale the input by
) -> _Launch:
    _, K, I = a.w2.shape  # noqa: E741
    function, gated, interleaved = _activation(a.activation)
    columns = tile.rows // 2 if gated else tile.rows  # of h
    args = (h, a.hidden_states, a.w13, a.w13_bias, *rows.args)
    args += (input_weights, *_strides(input_weights), K, I, *x_strides, *a.w13.stride())
    args += (*_strides(a.w13_bias), a.alpha, a.beta, a.limit)
    args += (rows.name, rows.has_map, a.w13_bias is not None, input_weights is not None)
    args += (function, gated, interleaved, a.limit < NO_LIMIT)
    args += (K % tile.k == 0, I % columns == 0, GROUP, rows.tokens, *tile[:3])
    return _Launch("gemm1", (rows.blocks * cdiv(I, columns), 1, 1), args, tile.warps)


def _gemm2(
    y: Tensor,
    x: Tensor,
    w: Tensor,  # (E, N, K)
    bias: Tensor | None,
    rows: _Rows,
    tile: Tile,
    x_strides: tuple,  # of a row, a column
    y_strides: tuple,  # of an expert (beyond its rows), a row, a column
    zero_tail: bool = False,
) -> _Launch:
    _, N, K = w.shape
    args = (y, x, w, bias, *rows.args, K, N, *x_strides, *w.stride(), *_strides(bias), *y_strides)
    args += (rows.name, rows.has_map, bias is not None, zero_tail)
    args += (K % tile.k == 0, N % tile.rows == 0, GROUP, rows.tokens, *tile[:3])
    return _Launch("gemm2", (rows.blocks * cdiv(N, tile.rows), 1, 1), args, tile.warps)


def _launch_experts(a: ExpertsArgs) -> None:
    x, ids, weights, out = a.hidden_states, a.topk_ids, a.topk_weights, a.out
    M, top_k = ids.shape
    if M == 0:
        return
    E, K, I = a.w2.shape  # noqa: E741
    dtype, device = x.dtype, x.get_device()
    _check_dtype("w13", a.w13, dtype)
    _check_dtype("w2", a.w2, dtype)
    pairs = M * top_k
    tiles = triton_tiles.choose(pairs, E, K, I, dtype.itemsize, M == 1, _shared_memory(device))
    blocks = pairs if tiles.direct else _blocks(pairs, E, tiles.tokens)
    h, y = _typed(a.workspace13, pairs * I, dtype), _typed(a.workspace2, pairs * K, torch.float32)
    index, expert_map, on_input = a.index_workspace, a.expert_map, a.router_weight_on_input
    has_map = expert_map is not None
    num_ids, map_stride = (expert_map.shape[0], expert_map.stride(0)) if has_map else (E, 0)
    strides = (*ids.stride(), map_stride)
    rows = _Rows(
        "direct" if tiles.direct else "sorted",
        has_map,
        tiles.tokens,
        (index, ids, expert_map, blocks, E, num_ids, top_k, *strides),
    )
    launches = [] if tiles.direct else [_route(rows, pairs, tiles.chunk)]
    input_weights = weights if on_input else None
    launches += (
        _gemm1(a, rows, tiles.gemm1, h, (0, *x.stride()), input_weights),
        _gemm2(y, h, a.w2, a.w2_bias, rows, tiles.gemm2, (I, 1), (0, K, 1)),
        _Launch(
            "combine",
            (M, cdiv(K, _COMBINE_COLUMNS), 1),
            (out, y, weights, ids, expert_map, E, num_ids, K, *strides, *weights.stride())
            + (*out.stride(), top_k, has_map, not on_input, _COMBINE_COLUMNS),
        ),
    )
    key = (device, tiles, E, top_k, x.stride(), out.stride(), on_input, _layer_key(a))
    _run(launches, (key, _pointers(x, weights, ids, out, h, y, index, expert_map)), device)


def _launch_batched_experts(a: BatchedExpertsArgs) -> None:
    x, out = a.hidden_states, a.out
    E, T, K = x.shape
    if T == 0:
        return
    I = a.w2.shape[2]  # noqa: E741
    dtype, device = x.dtype, x.get_device()
    _check_dtype("w13", a.w13, dtype)
    _check_dtype("w2", a.w2, dtype)
    tiles = triton_tiles.choose(E * T, E, K, I, dtype.itemsize, False, _shared_memory(device))
    h, index = _typed(a.workspace13, E * T * I, dtype), a.index_workspace
    rows = _sorted_rows(index, E * cdiv(T, tiles.tokens), E, tiles.tokens)
    # Rows are numbered e * T + t throughout; what (e, t) is off by from that times the row stride is
    # the expert's own term, zero for a contiguous tensor whatever T is.
    x_strides = (x.stride(0) - T * x.stride(1), x.stride(1), x.stride(2))
    out_strides = (out.stride(0) - T * out.stride(1), out.stride(1), out.stride(2))
    launches = [
        _group_blocks(rows, a.expert_num_tokens, E, E * T, T),
        _gemm1(a, rows, tiles.gemm1, h, x_strides),
        _gemm2(out, h, a.w2, a.w2_bias, rows, tiles.gemm2, (I, 1), out_strides),
    ]
    key = (device, "batched", tiles, E, x_strides, out_strides, _layer_key(a))
    _run(launches, (key, _pointers(x, a.expert_num_tokens, out, h, index)), device)


def _launch_grouped_linear(a: GroupedLinearArgs) -> None:
    x, weight, out, index = a.x, a.weight, a.out, a.index_workspace
    S, K = x.shape
    if S == 0:
        return
    E, device = weight.shape[0], x.get_device()
    _check_dtype("weight", weight, x.dtype)
    shared_memory = _shared_memory(device)
    tiles = triton_tiles.choose(S, E, K, K, x.dtype.itemsize, False, shared_memory)
    # The rows past the last group are one more group, of zeros.
    rows = _sorted_rows(index, _blocks(S, E + 1, tiles.tokens), E, tiles.tokens)
    launches = [
        _group_blocks(rows, a.offsets, E + 1, S, 0),
        _gemm2(
            out,
            x,
            weight,
            a.bias,
            rows,
            tiles.gemm2,
            x.stride(),
            (0, *out.stride()),
            zero_tail=True,
        ),
    ]
    key = (device, "grouped", tiles, weight.shape, x.stride(), out.stride(), weight.stride())
    pointers = _pointers(x, weight, a.offsets, out, index, a.bias)
    _run(launches, (key, pointers, _strides(a.bias)), device)


def _layer_key(a: ExpertsArgs | BatchedExpertsArgs) -> tuple:
    """The part of a specialisation that weights and activation decide."""
    w13, w2, b13, b2 = a.w13, a.w2, a.w13_bias, a.w2_bias
    strides = (w2.shape, w13.stride(), w2.stride(), _strides(b13), _strides(b2))
    return (a.activation, a.limit < NO_LIMIT, strides, _pointers(w13, w2, b13, b2))


def _route(rows: _Rows, pairs: int, chunk: int) -> _Launch:
    index, ids, expert_map, blocks, experts, num_ids, top_k, *strides = rows.args
    padded = max(16, 1 << (experts - 1).bit_length())
    args = (index, ids, expert_map, pairs, experts, num_ids, blocks, top_k, *strides)
    args += (padded, rows.tokens, chunk, rows.has_map)
    return _Launch("route", (experts, 1, 1), args, 4 if chunk <= 1024 else 8)


def _group_blocks(rows: _Rows, sizes: Tensor, groups: int, S: int, T: int) -> _Launch:
    """`groups` programs; T > 0 for batches of T rows whose counts `sizes` holds, else its end rows."""
    index, experts = rows.args[0], rows.args[4]
    padded = max(16, 1 << experts.bit_length())
    args = (index, sizes, S, T, experts, rows.blocks, sizes.stride(0))
    return _Launch("group_blocks", (groups, 1, 1), (*args, padded, rows.tokens, 128, T > 0))


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
    devices=("CUDA",),
    interpreted=INTERPRETED,
)
