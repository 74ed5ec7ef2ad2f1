"""Fused router: scores, choice of groups, top-k and weights, one launch for all of them.

M tokens, E = G * S experts in G groups of S (G = 1 without groups), TOP_K experts per token. A
program routes one token and holds its row as (BLOCK_G, BLOCK_S), padded to powers of two: several
rows a program spread each row over warps, and every reduction through shared memory.
`moe_ops.routing` states the formulas; what is here must give the same ids and, up to rounding,
the same weights.
"""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # finfo(float32).min, -_LOWEST is its max
_TAKEN = tl.constexpr(-(2**31))  # below every ordered key

_WARM: set[tuple] = set()


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
    """All elements along one axis: a whole warp then reduces at once."""
    return tl.reshape(x, [x.numel])


@triton.jit
def _score(x, row_max, row_scale, SCORING: tl.constexpr):
    """Scores of finite logits; zero for the lowest finite number, which stands for none."""
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
    bias_ptr,  # (E,)
    stride_bias,
    scaling_factor,
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
):
    """(weights, ids), each (BLOCK_K,), of one token; entries from TOP_K on mean nothing."""
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

    # Every scoring grows with its logit, so without a bias the logits themselves choose: the ids
    # do not depend on how exp rounds.
    key = x
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * stride_bias, mask=is_expert, other=0.0)
        biased = _score(x, row_max, row_scale, SCORING) + bias.to(tl.float32)
        key = tl.where((x > _LOWEST) & (biased > _LOWEST), biased, _LOWEST)  # NaN is not greater
    key = tl.where(is_expert, key, float("-inf"))

    if TOPK_GROUPS < G:
        group_score = tl.max(key, 1)
        if HAS_BIAS and S > 1:
            is_first = key == group_score[:, None]
            first = tl.min(tl.where(is_first, member, BLOCK_S), 1)
            group_score += tl.max(tl.where(member == first[:, None], float("-inf"), key), 1)
        groups = _ordered(group_score)
        index = tl.arange(0, BLOCK_G)
        for _ in range(TOPK_GROUPS):
            best = tl.max(groups, 0)
            lowest = tl.min(tl.where(groups == best, index, BLOCK_G), 0)
            groups = tl.where(index == lowest, _TAKEN, groups)
        key = tl.where((groups == _TAKEN)[:, None], key, float("-inf"))

    # Two reductions of 32 bits, the second for the lower index among equals: a warp has one instruction
    # for each, where a pair of both in 64 bits takes ten shuffles.
    ordered = _ordered(key)
    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), dtype=tl.int32)
    chosen = tl.full((BLOCK_K,), _LOWEST, dtype=tl.float32)
    for k in range(TOP_K):
        best = tl.max(_flat(ordered), 0)
        winner = tl.min(_flat(tl.where(ordered == best, expert, G * S)), 0)
        # Without a bias the key is the logit. With one it is summed out of the row, which does not hold up
        # the next maximum, as reading the row again would hold up the weights.
        if HAS_BIAS:
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


_RUNTIME = (
    "weights_ptr",
    "ids_ptr",
    "logits_ptr",
    "bias_ptr",
    "stride_m",
    "stride_e",
    "stride_bias",
)


# Not specialised on its run-time arguments: one binary a configuration, so that whether a launch
# would compile is known before it (see launch).
@triton.jit(do_not_specialize=_RUNTIME)
def _route_kernel(
    weights_ptr,  # (M, TOP_K), contiguous
    ids_ptr,  # (M, TOP_K), contiguous
    logits_ptr,  # (M, E)
    bias_ptr,  # (E,)
    stride_m,
    stride_e,
    stride_bias,
    scaling_factor,
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
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    member = tl.arange(0, BLOCK_S)[None, :]
    is_expert = (group < G) & (member < S)
    place = logits_ptr + row * stride_m + (group * S + member) * stride_e
    logits = tl.load(place, mask=is_expert, other=0.0)
    weights, ids = choose(
        logits, bias_ptr, stride_bias, scaling_factor, G, S, TOP_K, TOPK_GROUPS, HAS_BIAS, SCORING,
        RENORMALIZE, BLOCK_G, BLOCK_S, BLOCK_K,
    )  # fmt: skip
    slot = tl.arange(0, BLOCK_K)
    tl.store(weights_ptr + row * TOP_K + slot, weights, mask=slot < TOP_K)
    tl.store(ids_ptr + row * TOP_K + slot, ids, mask=slot < TOP_K)


def choose_constants(
    num_experts: int,
    top_k: int,
    has_bias: bool,
    scoring: str,
    renormalize: bool,
    num_expert_groups: int,
    topk_groups: int,
) -> dict[str, Any]:
    """The constants of `choose`, in the order of its parameters."""
    group_size = num_experts // num_expert_groups
    return {
        "G": num_expert_groups,
        "S": group_size,
        "TOP_K": top_k,
        "TOPK_GROUPS": topk_groups,
        "HAS_BIAS": has_bias,
        "SCORING": scoring,
        "RENORMALIZE": renormalize,
        "BLOCK_G": triton.next_power_of_2(num_expert_groups),
        "BLOCK_S": triton.next_power_of_2(group_size),
        "BLOCK_K": triton.next_power_of_2(top_k),
    }


def choose_warps(constants: dict[str, Any]) -> int:
    """One warp a row needs no barrier and no shared memory; long rows need more lanes."""
    return 1 if constants["BLOCK_G"] * constants["BLOCK_S"] <= 256 else 4


def launch(
    topk_weights: torch.Tensor,  # (M, top_k), contiguous, written
    topk_ids: torch.Tensor,  # (M, top_k) int32 or int64, contiguous, written
    router_logits: torch.Tensor,  # (M, E), any strides
    correction_bias: torch.Tensor | None,  # (E,)
    scoring: str,
    renormalize: bool,
    num_expert_groups: int,
    topk_groups: int,
    scaling_factor: float,
) -> None:
    """Route M tokens in one launch; see `moe_ops.route` for the meaning of the arguments.

    Raises:
        RuntimeError: a CUDA graph is being captured and this configuration was never launched
            before, so that it would have to be compiled during the capture.
    """
    num_tokens, num_experts = router_logits.shape
    if num_tokens == 0:
        return
    bias = router_logits if correction_bias is None else correction_bias
    constants = choose_constants(
        num_experts,
        topk_ids.shape[1],
        correction_bias is not None,
        scoring,
        renormalize,
        num_expert_groups,
        topk_groups,
    )
    dtypes = tuple([t.dtype for t in (router_logits, bias, topk_weights, topk_ids)])
    key = (router_logits.device, dtypes, *constants.values())
    on_cuda = router_logits.is_cuda
    if on_cuda and key not in _WARM and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "route must have run once with these arguments before a CUDA graph captures it, got "
            f"a first call with E={num_experts}, top_k={topk_ids.shape[1]}; call it once on the "
            "same shapes, dtypes and device, then capture"
        )
    with torch.cuda.device(router_logits.device) if on_cuda else nullcontext():
        _route_kernel[(num_tokens,)](
            topk_weights,
            topk_ids,
            router_logits,
            bias,
            router_logits.stride(0),
            router_logits.stride(1),
            bias.stride(0),
            scaling_factor,
            **constants,
            num_warps=choose_warps(constants),
        )
    _WARM.add(key)
