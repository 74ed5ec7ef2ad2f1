"""The whole router, from hidden states to weights and ids. For few tokens one kernel computes
logits and another chooses experts; for many, torch's matrix product replaces the first. Imported
at first launch only.

M tokens, K hidden size, E = G * S experts. Each program multiplies a tile of BLOCK_K columns and
BLOCK_E rows of the weight, so that the whole weight is in flight at once: at M = 1, memory latency
is what a router costs. The second kernel adds the partial sums in a fixed order, rounds once like
a linear layer, and chooses experts by the rounded logits.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels import launch
from moe_ops.kernels.device.pdl import gdc_launch_dependents, gdc_wait
from moe_ops.kernels.launch import (
    Constant,
    Launch,
    Pointer,
    Runtime,
    RuntimeFloat,
    Specialized,
    arguments,
    kernel,
    run,
)
from moe_ops.kernels.router import topk
from moe_ops.kernels.router.topk import Selection, selection
from moe_ops.meta.router import PROGRAM_TOKENS, max_tokens, router_tiles, router_workspace
from moe_ops.meta.workspace import cdiv


@arguments
class Sums:
    sums: Pointer  # (SPLIT_K, M, E) fp32, written
    x: Pointer  # (M, K)
    w: Pointer  # (E, K)
    M: Runtime
    x_stride_m: Specialized
    x_stride_k: Specialized
    w_stride_e: Specialized
    w_stride_k: Specialized
    E: Constant
    K: Constant
    BLOCK_M: Constant  # tokens of a program, a power of two
    BLOCK_E: Constant
    BLOCK_K: Constant
    PDL: Constant


@triton.jit
def _load(ptrs, mask, WHOLE: tl.constexpr):
    """Numbers as fp32, zero unless `mask`; in WHOLE tiles the mask is all true. Loads without one
    all begin before anything is computed, and the rows of a thread share those of x. With masks,
    under Triton 3.9, the x of a thread's second row is loaded once the first row's weights are
    there.
    """
    if WHOLE:
        return tl.load(ptrs).to(tl.float32)
    else:
        return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@kernel(Sums, waits=False)
def moe_ops_router_sums(
    sums_ptr,
    x_ptr,
    w_ptr,
    M,
    x_stride_m,
    x_stride_k,
    w_stride_e,
    w_stride_k,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial sums over BLOCK_K columns, for BLOCK_E experts and BLOCK_M tokens. Without tensor
    cores: few tokens would leave them mostly idle, and so one kernel serves fp32 weights too.
    """
    gdc_launch_dependents(PDL)
    split = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + e.to(tl.int64)[:, None] * w_stride_e + k.to(tl.int64)[None, :] * w_stride_k
    in_row = (k < K)[None, :]
    w = _load(w_ptrs, (e < E)[:, None] & in_row, E % BLOCK_E == 0 and K % BLOCK_K == 0)
    columns = k.to(tl.int64)[None, :] * x_stride_k
    first = tl.program_id(2) * BLOCK_M
    column = first + tl.arange(0, BLOCK_M)[None, :]
    sums = tl.zeros((BLOCK_E, BLOCK_M), tl.float32)
    for m in tl.static_range(BLOCK_M):
        # a pointer for each row of the tile: one for all rows would go through shared memory
        token = (tl.minimum(first + m, M - 1) + tl.zeros((BLOCK_E,), tl.int64))[:, None]
        x = _load(x_ptr + token * x_stride_m + columns, in_row, K % BLOCK_K == 0)
        sums = tl.where(column == first + m, tl.sum(w * x, 1)[:, None], sums)
    sum_ptrs = sums_ptr + (split * M + column) * E + e[:, None]
    tl.store(sum_ptrs, sums, mask=(e < E)[:, None] & (column < M))


@arguments
class Choice:
    weights: Pointer  # (M, TOP_K), written
    ids: Pointer  # (M, TOP_K), written
    logits: Pointer  # (M, E), written
    sums: Pointer  # (SPLIT_K, M, E) fp32
    router_bias: Pointer  # (E,) bias of the linear layer, or None
    bias: Pointer  # (E,) bias of the choice, or None
    M: Runtime
    router_bias_stride: Specialized
    bias_stride: Specialized
    scaling_factor: RuntimeFloat
    SPLIT_K: Constant
    selection: Selection
    PDL: Constant


@kernel(Choice)
def moe_ops_router_choice(
    weights_ptr,
    ids_ptr,
    logits_ptr,
    sums_ptr,
    router_bias_ptr,
    bias_ptr,
    M,
    router_bias_stride,
    bias_stride,
    scaling_factor,
    SPLIT_K: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    TOP_K: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits, weights and ids of one token."""
    row = tl.program_id(0)
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_S)[None, :]
    expert = group * S + member
    is_expert = (group < G) & (member < S)
    total = tl.zeros((BLOCK_G, BLOCK_S), tl.float32)
    if router_bias_ptr is not None:  # no kernel of the call writes it: loaded before gdc_wait
        bias_ptrs = router_bias_ptr + expert * router_bias_stride
        linear_bias = tl.load(bias_ptrs, mask=is_expert, other=0.0).to(tl.float32)
    gdc_wait(PDL)
    for split in tl.static_range(SPLIT_K):
        sum_ptrs = sums_ptr + (split * M + row) * (G * S) + expert
        total += tl.load(sum_ptrs, mask=is_expert, other=0.0)
    if router_bias_ptr is not None:
        total += linear_bias
    logits = total.to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * (G * S) + expert, logits, mask=is_expert)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * bias_stride, mask=is_expert, other=0.0)
    weights, ids = topk.choose(
        logits, bias, scaling_factor, G, S, TOP_K, TOPK_GROUPS, SCORING,
        RENORMALIZE, BLOCK_G, BLOCK_S, BLOCK_TOP_K,
    )  # fmt: skip
    slot = tl.arange(0, BLOCK_TOP_K)
    tl.store(weights_ptr + row * TOP_K + slot, weights, mask=slot < TOP_K)
    tl.store(ids_ptr + row * TOP_K + slot, ids, mask=slot < TOP_K)


def route_tokens(
    router_logits: Tensor,  # (M, E), contiguous, written
    topk_weights: Tensor,  # (M, top_k), contiguous, written
    topk_ids: Tensor,  # (M, top_k) int32 or int64, contiguous, written
    workspace: Tensor,  # fp32, of `router_workspace`, written
    hidden_states: Tensor,  # (M, K), any strides
    router_weight: Tensor,  # (E, K), any strides
    router_bias: Tensor | None,  # (E,)
    correction_bias: Tensor | None,  # (E,)
    scoring: str,
    renormalize: bool,
    num_expert_groups: int,
    topk_groups: int,
    scaling_factor: float,
) -> None:
    """The whole router of M tokens; see `moe_ops.route_tokens`.

    Raises:
        RuntimeError: a CUDA graph is being captured and this router was never launched before.
    """
    M = hidden_states.shape[0]
    if M == 0:
        return
    E, K = router_weight.shape
    method = (scoring, renormalize, num_expert_groups, topk_groups)
    if max_tokens(E, K) < M:
        with torch.no_grad():
            _linear(router_logits, hidden_states, router_weight, router_bias)
        topk.route(topk_weights, topk_ids, router_logits, correction_bias, *method, scaling_factor)
        return
    (size,) = router_workspace(M, E, K)
    if workspace.numel() < size:
        raise ValueError(
            f"workspace must have {size} elements for M={M}, E={E}, K={K}, got "
            f"{workspace.numel()}; moe_ops.route_tokens allocates it"
        )
    device = hidden_states.get_device()
    gpu, tiles = launch.gpu(device), router_tiles(E, K)
    chosen = selection(E, topk_ids.shape[1], *method)
    block_m = min(triton.next_power_of_2(M), PROGRAM_TOKENS)
    sums = Sums(
        sums=workspace,
        x=hidden_states,
        w=router_weight,
        M=M,
        # the row of a single token may have any stride
        x_stride_m=hidden_states.stride(0) if M > 1 else 0,
        x_stride_k=hidden_states.stride(1),
        w_stride_e=router_weight.stride(0),
        w_stride_k=router_weight.stride(1),
        E=E,
        K=K,
        BLOCK_M=block_m,
        BLOCK_E=tiles.block_e,
        BLOCK_K=tiles.block_k,
        PDL=gpu.pdl,
    )
    choice = Choice(
        weights=topk_weights,
        ids=topk_ids,
        logits=router_logits,
        sums=workspace,
        router_bias=router_bias,
        bias=correction_bias,
        M=M,
        router_bias_stride=0 if router_bias is None else router_bias.stride(0),
        bias_stride=0 if correction_bias is None else correction_bias.stride(0),
        scaling_factor=float(scaling_factor),
        SPLIT_K=tiles.split_k,
        selection=chosen,
        PDL=gpu.pdl,
    )
    grid = (tiles.split_k, cdiv(E, tiles.block_e), cdiv(M, block_m))
    launches = [
        Launch(moe_ops_router_sums, grid, sums, tiles.num_warps),
        Launch(moe_ops_router_choice, (M, 1, 1), choice, chosen.num_warps),
    ]
    with torch.cuda.device(device) if device >= 0 else nullcontext():
        run(launches, device, gpu)


def _linear(
    router_logits: Tensor, hidden_states: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """hidden_states @ weight.T + bias into router_logits, computed in their dtype."""
    dtype = router_logits.dtype
    same = hidden_states.dtype == weight.dtype
    is_nvidia = hidden_states.is_cuda and torch.version.hip is None
    if same and dtype == torch.float32 != weight.dtype and is_nvidia:
        # products of 16-bit numbers are exact in fp32, so that operands need no conversion
        torch.mm(hidden_states, weight.t(), out_dtype=dtype, out=router_logits)
        if bias is not None:
            router_logits += bias
        return
    x, w = hidden_states.to(dtype), weight.to(dtype)
    if bias is None:
        torch.mm(x, w.t(), out=router_logits)
    else:
        torch.addmm(bias.to(dtype), x, w.t(), out=router_logits)
