"""Router of few tokens: logits and choice of experts in two launches; of many: torch's product and one launch.

M tokens, K hidden size, E = G * S experts. The weight is cut into pieces of SPAN columns and BLOCK_E rows, one
program each, so that all of it is in flight at once: at M = 1 a router is a wait for memory. The second kernel
adds the pieces in a fixed order, rounds once as a linear layer does, and chooses on the rounded logits.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.router import topk
from moe_ops.kernels.triton_launch import Launch, gpu, pointers, run
from moe_ops.kernels.triton_routing import start_dependent, wait
from moe_ops.meta.router import PROGRAM_TOKENS, max_tokens, router_tiles, router_workspace
from moe_ops.meta.workspace import cdiv


@triton.jit(do_not_specialize=["M"])
def moe_ops_router_sums(
    sums_ptr,  # (SPLITS, M, E) fp32, written
    hidden_ptr,  # (M, K)
    weight_ptr,  # (E, K)
    M,
    stride_hm,
    stride_hk,
    stride_we,
    stride_wk,
    E: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,  # of one program, a power of two
    BLOCK_E: tl.constexpr,
    SPAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Products of SPAN columns, for BLOCK_E experts and TOKENS tokens. No tensor cores: few tokens leave them no
    work, and fp32 weights need no other kernel."""
    start_dependent(DEPENDENT)
    split = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    k = split * SPAN + tl.arange(0, SPAN)
    place = weight_ptr + e.to(tl.int64)[:, None] * stride_we + k.to(tl.int64)[None, :] * stride_wk
    in_piece = (e < E)[:, None] & (k < K)[None, :]
    w = tl.load(place, mask=in_piece, other=0.0).to(tl.float32)
    columns = k.to(tl.int64)[None, :] * stride_hk
    first = tl.program_id(2) * TOKENS
    column = first + tl.arange(0, TOKENS)[None, :]
    sums = tl.zeros((BLOCK_E, TOKENS), tl.float32)
    for m in tl.static_range(TOKENS):
        # a pointer for each row of the piece: one for all rows would pass through shared memory
        token = (first + tl.full((BLOCK_E,), m, tl.int64))[:, None]
        row = hidden_ptr + token * stride_hm + columns
        x = tl.load(row, mask=in_piece & (token < M), other=0.0).to(tl.float32)
        sums = tl.where(column == first + m, tl.sum(w * x, 1)[:, None], sums)
    place = sums_ptr + (split * M + column) * E + e[:, None]
    tl.store(place, sums, mask=(e < E)[:, None] & (column < M))


@triton.jit(do_not_specialize=["M"])
def moe_ops_router_choice(
    weights_ptr,  # (M, TOP_K), written
    ids_ptr,  # (M, TOP_K), written
    logits_ptr,  # (M, E), written
    sums_ptr,  # (SPLITS, M, E) fp32
    router_bias_ptr,  # (E,) or absent
    bias_ptr,  # (E,) or absent
    M,
    stride_router_bias,
    stride_bias,
    scaling_factor,
    SPLITS: tl.constexpr,
    HAS_ROUTER_BIAS: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    TOP_K: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Logits, weights and ids of one token."""
    row = tl.program_id(0)
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_S)[None, :]
    expert = group * S + member
    is_expert = (group < G) & (member < S)
    total = tl.zeros((BLOCK_G, BLOCK_S), tl.float32)
    if HAS_ROUTER_BIAS:  # written before the kernel in front of this one began
        place = router_bias_ptr + expert * stride_router_bias
        linear_bias = tl.load(place, mask=is_expert, other=0.0).to(tl.float32)
    wait(DEPENDENT)
    for split in tl.static_range(SPLITS):
        place = sums_ptr + (split * M + row) * (G * S) + expert
        total += tl.load(place, mask=is_expert, other=0.0)
    if HAS_ROUTER_BIAS:
        total += linear_bias
    logits = total.to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * (G * S) + expert, logits, mask=is_expert)
    weights, ids = topk.choose(
        logits, bias_ptr, stride_bias, scaling_factor, G, S, TOP_K, TOPK_GROUPS, HAS_BIAS, SCORING,
        RENORMALIZE, BLOCK_G, BLOCK_S, BLOCK_K,
    )  # fmt: skip
    slot = tl.arange(0, BLOCK_K)
    tl.store(weights_ptr + row * TOP_K + slot, weights, mask=slot < TOP_K)
    tl.store(ids_ptr + row * TOP_K + slot, ids, mask=slot < TOP_K)


def launch(
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
        RuntimeError: a CUDA graph is being captured and this configuration was never launched before.
    """
    M = hidden_states.shape[0]
    if M == 0:
        return
    choice = (scoring, renormalize, num_expert_groups, topk_groups)
    few = max_tokens(*router_weight.shape)
    if few < M:
        with torch.no_grad():
            _linear(router_logits, hidden_states, router_weight, router_bias)
        topk.launch(
            topk_weights, topk_ids, router_logits, correction_bias, *choice, scaling_factor
        )
        return
    device = hidden_states.get_device()
    with torch.cuda.device(device) if device >= 0 else nullcontext():
        _few_tokens(
            (topk_weights, topk_ids, router_logits, workspace, router_bias, correction_bias),
            hidden_states,
            router_weight,
            choice,
            scaling_factor,
            device,
        )


def _few_tokens(
    tensors: tuple[Tensor | None, ...],  # in the order of moe_ops_router_choice's parameters
    hidden_states: Tensor,
    router_weight: Tensor,
    choice: tuple[str, bool, int, int],
    scaling_factor: float,
    device: int,
) -> None:
    topk_weights, topk_ids, router_logits, workspace, router_bias, correction_bias = tensors
    M = hidden_states.shape[0]
    E, K = router_weight.shape
    (size,) = router_workspace(M, E, K)
    if workspace.numel() < size:  # type: ignore[union-attr]
        raise ValueError(
            f"workspace must have {size} elements for M={M}, E={E}, K={K}, got {workspace.numel()}; "  # type: ignore[union-attr]
            "moe_ops.route_tokens allocates it"
        )
    tiles = router_tiles(E, K)
    dependent = gpu(device).dependent
    constants = topk.choose_constants(E, topk_ids.shape[1], correction_bias is not None, *choice)
    tokens = min(triton.next_power_of_2(M), PROGRAM_TOKENS)
    # the one row of one token may have any stride
    strides = (hidden_states.stride(0) if M > 1 else 0, hidden_states.stride(1))
    strides += router_weight.stride()
    bias_strides = tuple([0 if b is None else b.stride(0) for b in (router_bias, correction_bias)])
    launches = [
        Launch(
            "router_sums",
            (tiles.splits, cdiv(E, tiles.experts), cdiv(M, tokens)),
            (workspace, hidden_states, router_weight, M, *strides)
            + (E, K, tokens, tiles.experts, tiles.span, dependent),
            tiles.warps,
        ),
        Launch(
            "router_choice",
            (M, 1, 1),
            (*tensors, M, *bias_strides, float(scaling_factor), tiles.splits)
            + (router_bias is not None, *constants.values(), dependent),
            topk.choose_warps(constants),
        ),
    ]
    key = ("router", device, tiles, E, K, tokens, strides, bias_strides, *constants.values())
    key += pointers(*tensors, hidden_states, router_weight)
    run(launches, key, device, dependent)


def _linear(
    router_logits: Tensor, hidden_states: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """hidden_states @ weight.T + bias into router_logits, computed in their dtype."""
    dtype = router_logits.dtype
    same = hidden_states.dtype == weight.dtype
    if same and dtype == torch.float32 != weight.dtype and hidden_states.is_cuda:
        # products of 16-bit numbers are exact in fp32: nothing is gained by converting before
        torch.mm(hidden_states, weight.t(), out_dtype=dtype, out=router_logits)
        if bias is not None:
            router_logits += bias
        return
    x, w = hidden_states.to(dtype), weight.to(dtype)
    if bias is None:
        torch.mm(x, w.t(), out=router_logits)
    else:
        torch.addmm(bias.to(dtype), x, w.t(), out=router_logits)
