"""Fused top-k router: scores, choice of groups, top-k and weights in one launch. Imported at first
launch only.

M tokens, E = G * S experts in G groups of S (G = 1 without groups), TOP_K experts per token. A
program routes one token, whose row it holds as (BLOCK_G, BLOCK_S), padded to powers of two. With
several rows a program, each row would be spread over warps, and every reduction would go through
shared memory. `moe_ops.routing` has the formulas; the kernel must give the same ids and, up to
rounding, the same weights.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels import launch
from moe_ops.kernels.device.loads import load_along_rows
from moe_ops.kernels.launch import (
    Address,
    Constant,
    Launch,
    NotCompiledError,
    Runtime,
    RuntimeFloat,
    arguments,
    kernel,
    run,
    unprefixed,
)

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # finfo(float32).min, -_LOWEST is its max
_TAKEN = tl.constexpr(-(2**31))  # below every ordered key


@triton.jit
def _finite(x, mask):
    """x with NaN, -inf and masked entries at the lowest finite number, +inf at the highest."""
    x = x.to(tl.float32)
    return tl.where(mask & (x == x) & (x > _LOWEST), tl.minimum(x, -_LOWEST), _LOWEST)


@triton.jit
def _ordered(key):
    """int32 ordered like the fp32 key, -0.0 as 0.0; key must not be NaN."""
    bits = tl.where(key == 0.0, 0.0, key).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(ordered):
    """The key that `_ordered` was given."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _flat(x):
    """All elements along one axis, so that a whole warp reduces them at once."""
    return tl.reshape(x, [x.numel])


@triton.jit
def _load_groups(ptrs, mask):
    """Numbers (BLOCK_G, BLOCK_S). Neighbouring threads hold members of different groups, which
    takes fewer shuffles where each group is reduced.
    """
    return load_along_rows(ptrs.trans(), mask.trans(), 0.0).trans()


@triton.jit
def _score(x, row_max, row_scale, SCORING: tl.constexpr):
    """Scores of finite logits; zero for the lowest finite number, which stands for no
    candidate.
    """
    if SCORING == "softmax":
        score = tl.exp(x - row_max) * row_scale
    elif SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-x))
    elif SCORING == "sqrtsoftplus":
        # log1p(y) = log(u) * y / (u - 1) with u = 1 + y keeps its precision for small y
        y = tl.exp(tl.minimum(x, 20.0))
        u = 1.0 + y
        log1p = tl.where(u == 1.0, y, tl.log(u) * y / tl.where(u == 1.0, 1.0, u - 1.0))
        score = tl.sqrt(tl.where(x > 20.0, x, log1p))
    else:
        score = x
    return tl.where(x > _LOWEST, score, 0.0)


@triton.jit
def choose(
    logits,  # (BLOCK_G, BLOCK_S), any float dtype
    bias,  # (BLOCK_G, BLOCK_S), or None
    scaling_factor,
    G: tl.constexpr,
    S: tl.constexpr,
    TOP_K: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):
    """(weights, ids), each (BLOCK_TOP_K,), of one token. Entries from TOP_K on are undefined."""
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_S)[None, :]
    expert = group * S + member
    is_expert = (group < G) & (member < S)
    x = _finite(logits, is_expert)

    row_max = tl.max(_flat(x), 0)
    row_scale = row_max
    if SCORING == "softmax":
        total = tl.sum(_flat(tl.where(x > _LOWEST, tl.exp(x - row_max), 0.0)), 0)
        row_scale = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)

    # Every scoring is monotonic, so that without a bias the logits themselves choose, and the ids
    # do not depend on how exp rounds.
    key = x
    if bias is not None:
        biased = _score(x, row_max, row_scale, SCORING) + bias.to(tl.float32)
        key = tl.where((x > _LOWEST) & (biased > _LOWEST), biased, _LOWEST)  # NaN is not greater
    key = tl.where(is_expert, key, float("-inf"))

    if TOPK_GROUPS < G:
        group_score = tl.max(key, 1)
        if bias is not None and S > 1:
            is_first = key == group_score[:, None]
            first = tl.min(tl.where(is_first, member, BLOCK_S), 1)
            second = tl.max(tl.where(member == first[:, None], float("-inf"), key), 1)
            group_score += tl.where(second > _LOWEST, second, 0.0)
        groups = _ordered(group_score)
        index = tl.arange(0, BLOCK_G)
        for _ in range(TOPK_GROUPS):
            best = tl.max(groups, 0)
            lowest = tl.min(tl.where(groups == best, index, BLOCK_G), 0)
            groups = tl.where(index == lowest, _TAKEN, groups)
        key = tl.where((groups == _TAKEN)[:, None], key, float("-inf"))

    # Two reductions of 32 bits, of which the second finds the lowest index among equals. A warp
    # has an instruction for each; one reduction of 64 bits for both would take ten shuffles.
    ordered = _ordered(key)
    slot = tl.arange(0, BLOCK_TOP_K)
    ids = tl.zeros((BLOCK_TOP_K,), dtype=tl.int32)
    chosen = tl.full((BLOCK_TOP_K,), _LOWEST, dtype=tl.float32)
    for k in range(TOP_K):
        best = tl.max(_flat(ordered), 0)
        winner = tl.min(_flat(tl.where(ordered == best, expert, G * S)), 0)
        # Without a bias the key is the logit. With one, the logit is found by a sum over the row,
        # which does not delay the next maximum; loading it again would delay the weights.
        if bias is not None:
            logit = tl.sum(_flat(tl.where(is_expert & (expert == winner), x, 0.0)), 0)
        else:
            logit = _unordered(best)
        ids = tl.where(slot == k, winner, ids)
        chosen = tl.where(slot == k, logit, chosen)
        ordered = tl.where(is_expert & (expert == winner), _TAKEN, ordered)

    weights = _score(chosen, row_max, row_scale, SCORING)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    return weights * scaling_factor, ids


@unprefixed
class Selection(NamedTuple):
    """How experts are chosen from a row of logits."""

    G: Constant
    S: Constant
    TOP_K: Constant
    TOPK_GROUPS: Constant
    SCORING: Constant
    RENORMALIZE: Constant
    BLOCK_G: Constant  # powers of two, at least G, S and TOP_K
    BLOCK_S: Constant
    BLOCK_TOP_K: Constant

    @property
    def num_warps(self) -> int:
        """One warp a row needs no barrier and no shared memory; long rows need more lanes."""
        return 1 if self.BLOCK_G * self.BLOCK_S <= 256 else 4


@lru_cache(maxsize=256)
def selection(
    num_experts: int,
    top_k: int,
    scoring: str,
    renormalize: bool,
    num_expert_groups: int,
    topk_groups: int,
) -> Selection:
    """The Selection of a router."""
    group_size = num_experts // num_expert_groups
    return Selection(
        G=num_expert_groups,
        S=group_size,
        TOP_K=top_k,
        TOPK_GROUPS=topk_groups,
        SCORING=scoring,
        RENORMALIZE=renormalize,
        BLOCK_G=triton.next_power_of_2(num_expert_groups),
        BLOCK_S=triton.next_power_of_2(group_size),
        BLOCK_TOP_K=triton.next_power_of_2(top_k),
    )


# Addresses: one binary a router, for logits of any alignment and strides.
@arguments
class Topk:
    weights: Address  # (M, TOP_K), contiguous, written
    ids: Address  # (M, TOP_K), contiguous, written
    logits: Address  # (M, E)
    bias: Address  # (E,), or None
    logits_stride_m: Runtime
    logits_stride_e: Runtime
    bias_stride: Runtime
    scaling_factor: RuntimeFloat
    selection: Selection


@kernel(Topk)
def moe_ops_router_topk(
    weights_ptr,
    ids_ptr,
    logits_ptr,
    bias_ptr,
    logits_stride_m,
    logits_stride_e,
    bias_stride,
    scaling_factor,
    G: tl.constexpr,
    S: tl.constexpr,
    TOP_K: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):
    """Weights and ids of one token."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_S)[None, :]
    is_expert = (group < G) & (member < S)
    expert = group * S + member
    logits = _load_groups(logits_ptr + row * logits_stride_m + expert * logits_stride_e, is_expert)
    bias = None
    if bias_ptr is not None:
        bias = _load_groups(bias_ptr + expert * bias_stride, is_expert)
    weights, ids = choose(
        logits, bias, scaling_factor, G, S, TOP_K, TOPK_GROUPS, SCORING,
        RENORMALIZE, BLOCK_G, BLOCK_S, BLOCK_TOP_K,
    )  # fmt: skip
    slot = tl.arange(0, BLOCK_TOP_K)
    tl.store(weights_ptr + row * TOP_K + slot, weights, mask=slot < TOP_K)
    tl.store(ids_ptr + row * TOP_K + slot, ids, mask=slot < TOP_K)


def route(
    topk_weights: Tensor,  # (M, top_k), contiguous, written
    topk_ids: Tensor,  # (M, top_k) int32 or int64, contiguous, written
    router_logits: Tensor,  # (M, E), any strides
    correction_bias: Tensor | None,  # (E,)
    scoring: str,
    renormalize: bool,
    num_expert_groups: int,
    topk_groups: int,
    scaling_factor: float,
) -> None:
    """Route M tokens in one launch; see `moe_ops.route` for the meaning of the arguments.

    Raises:
        RuntimeError: a CUDA graph is being captured and this router was never launched before, so
            that it would have to be compiled during the capture.
    """
    M, E = router_logits.shape
    if M == 0:
        return
    chosen = selection(E, topk_ids.shape[1], scoring, renormalize, num_expert_groups, topk_groups)
    args = Topk(
        weights=topk_weights,
        ids=topk_ids,
        logits=router_logits,
        bias=correction_bias,
        logits_stride_m=router_logits.stride(0),
        logits_stride_e=router_logits.stride(1),
        bias_stride=0 if correction_bias is None else correction_bias.stride(0),
        scaling_factor=scaling_factor,
        selection=chosen,
    )
    device = router_logits.get_device()
    with torch.cuda.device(device) if device >= 0 else nullcontext():
        one = Launch(moe_ops_router_topk, (M, 1, 1), args, chosen.num_warps)
        try:
            run([one], device, launch.gpu(device))
        except NotCompiledError:
            raise RuntimeError(
                "route must have run once with these arguments before a CUDA graph captures it, "
                f"got a first call with E={E}, top_k={topk_ids.shape[1]}; call it once on the "
                "same shapes, dtypes and device, then capture"
            ) from None
