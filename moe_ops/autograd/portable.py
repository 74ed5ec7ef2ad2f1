"""The functional pair in plain torch, for any device and any call, with what adapts the products
of experts (lora.py) or nothing. training.py defines h and the index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops import activations
from moe_ops.autograd import experts as composition
from moe_ops.autograd.adapters import UNADAPTED, Adapters, LowRank
from moe_ops.backends.torch import grouped_mm as products
from moe_ops.numerics import Scales, permute
from moe_ops.ops.call import ExpertsCall
from moe_ops.planning import bind
from moe_ops.schemes import get_scheme


def forward(call: ExpertsCall, adapters: Adapters) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """out, h, u and index."""
    pairs = permute.sort_pairs(call.topk_ids, call.w13.data.shape[0], call.expert_map)
    rows = composition.gemm1_input(call, pairs)
    h, u = _first(call, rows, adapters, pairs)
    if call.batch_invariant and adapters == UNADAPTED:
        out = of_inference(call)
    else:
        hidden = _activated(call, _ActivationInput(call, h, pairs))
        out = composition.combined(_product_of(call), hidden, call, pairs, adapters.w2)
    places = torch.where(pairs.valid.flatten(), pairs.inverse, -1)
    return out, h, u, torch.cat((pairs.offsets, places.to(torch.int32)))


def _first(
    call: ExpertsCall, rows: Tensor, adapters: Adapters, pairs: permute.Pairs
) -> tuple[Tensor, Tensor | None]:
    """h and u, in the dtype that products have."""
    adapter, multiply = adapters.w13, _product_of(call)
    u = None if adapter is None else composition.narrowed(multiply, rows, adapter, pairs)
    return composition.product(multiply, rows, call.w13, pairs, None, adapter, u), u


def of_inference(call: ExpertsCall) -> Tensor:
    """The output that the call has without gradients, by what computes it there: its bits are
    those of a batch-invariant inference, at the price of a first product for h beside it.
    """
    inference = call._replace(needs_grad=False)
    with torch.no_grad():
        return bind.run(inference, "auto")


def _activated(call: ExpertsCall, inputs: _ActivationInput) -> Tensor:
    """(S, I): the activation's output, in h's dtype."""
    h = inputs.h
    if call.batch_invariant:
        S, N = h.shape
        hidden = h.new_empty(S, N // 2 if call.activation.gated else N)
        activations.apply_by_blocks(inputs.of(slice(None)), call.activation, hidden)
        return hidden

    def activate(rows: slice) -> list[Tensor]:
        return [activations.formula(inputs.of(rows), call.activation).to(h.dtype)]

    (hidden,) = _over_rows(activate, h)
    return hidden


def kept_dtype(call: ExpertsCall) -> torch.dtype:
    """Of h: that of hidden_states, but fp32 where a scheme quantizes activations."""
    quantizes = any([get_scheme(w.scheme).activation is not None for w in (call.w13, call.w2)])
    return torch.float32 if quantizes else call.hidden_states.dtype


def _multiply(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *scales_and_bias: Any,
    batch_invariant: bool = False,
) -> Tensor:
    *scales, bias, scheme, transpose = scales_and_bias
    return products.grouped_mm(
        x,
        weight,
        offsets,
        scales=Scales(*scales) if scheme else None,
        scheme=scheme,
        bias=bias,
        transpose=transpose,
        batch_invariant=batch_invariant,
    )


def _product_of(call: ExpertsCall) -> Callable[..., Tensor]:
    """`_multiply` as the forward pass of a call needs it."""
    return functools.partial(_multiply, batch_invariant=call.batch_invariant)


class _ActivationInput:
    """(S, N): h plus the bias of each row's expert, fp32 or fp64."""

    def __init__(self, call: ExpertsCall, h: Tensor, pairs: permute.Pairs):
        self.h, self.bias, self.experts = h, call.w13_bias, pairs.experts

    def of(self, rows: slice) -> Tensor:
        x = self.h[rows].to(_wide(self.h))
        if self.bias is not None:
            x = x + _of_experts(self.bias, self.experts[rows], x.dtype)
        return x


# Elements of h that a CPU takes at a time through the activation: what is between then stays in
# its caches, and is not new memory each time.
ELEMENTS_AT_ONCE = 1 << 18


def _over_rows(compute: Callable[[slice], list[Tensor]], h: Tensor) -> list[Tensor]:
    """What `compute` gives of rows of h, for all of them; on a CPU of a few at a time."""
    S, step = h.shape[0], max(1, ELEMENTS_AT_ONCE // max(1, h.shape[1]))
    if h.device.type != "cpu" or step >= S:
        return compute(slice(None))
    found: list[Tensor] = []
    for start in range(0, S, step):
        rows = slice(start, start + step)
        parts = compute(rows)
        if not found:
            found = [part.new_empty(S, *part.shape[1:]) for part in parts]
        for whole, part in zip(found, parts, strict=True):
            whole[rows] = part
    return found


def _of_experts(bias: Tensor, experts: Tensor, dtype: torch.dtype) -> Tensor:
    """(S, columns): the bias of each row's expert; behind the last expert's rows that one's."""
    return bias.to(dtype).index_select(0, experts.clamp(max=bias.shape[0] - 1))


def _wide(h: Tensor) -> torch.dtype:
    return h.dtype if h.dtype == torch.float64 else torch.float32


def backward(
    call: ExpertsCall,
    grad: Tensor,
    h: Tensor | None,
    u: Tensor | None,
    index: Tensor,
    needs: list[bool],
    adapters: Adapters,
) -> list[Tensor | None]:
    """The gradients, and behind them those of a13, b13, a2 and b2; `h` and `u` are None if they
    are computed again.

    With s the router weight of a pair, a its activation and dO the gradient of its token's output:
    da = s * (dO @ w2), ds = <dO @ w2, a>, dw2 = dO^T @ (s * a). So dO is gathered and nothing of
    width K is stored (SonicMoE, arXiv 2512.14080, section 3).
    """
    needs_x, needs_w13, needs_w2, needs_weights, needs_b13, needs_b2 = needs[:6]
    needs_adapters = any(needs[6:8]), any(needs[8:])  # a and b of a pair come together
    pairs = _pairs(call, index)
    on_input = call.router_weight_on_input
    rows = None
    if h is None or needs_w13 or needs_adapters[0]:
        rows = composition.gemm1_input(call, pairs)
    if h is None:
        assert rows is not None
        h, u = _first(call, rows, adapters, pairs)
        h, u = h.to(kept_dtype(call)), None if u is None else u.to(kept_dtype(call))
    if composition.quantized(call):
        h = h.to(torch.float32)  # the dtype of products then
    wide = _wide(h)
    weights = call.topk_weights.to(wide).flatten().index_select(0, pairs.order).unsqueeze(1)
    s = torch.ones_like(weights) if on_input else weights
    if u is not None:
        u = u.to(h.dtype)
    inputs = _ActivationInput(call, h, pairs)
    dx = dw13 = dw2 = dweights = db13 = db2 = None
    of_adapters: list[Tensor | None] = [None] * 4

    of_output = needs_weights and not on_input
    through = needs_x or (needs_weights and on_input)
    needs_dh = through or needs_w13 or needs_b13 or needs_adapters[0]
    needs_hidden = needs_w2 or needs_adapters[1]
    dout = permute.gather_tokens(grad.to(h.dtype), pairs)
    da: Tensor | None = None
    if needs_dh or of_output:
        da = composition.product(
            _multiply, dout, call.w2, pairs, None, adapters.w2, transpose=True
        )

    def derive(rows: slice) -> list[Tensor]:
        """Of what is needed: <da, a> of each row, s a, and dh."""
        x, found = inputs.of(rows), []
        da_rows = None if da is None else da[rows].to(wide)
        if of_output or needs_hidden:
            hidden = activations.formula(x, call.activation).to(h.dtype)
            hidden = composition.gemm2_input(call, pairs, hidden).to(wide)
            if of_output:
                assert da_rows is not None
                found.append((da_rows * hidden).sum(1))
            if needs_hidden:
                found.append((s[rows] * hidden).to(h.dtype))
        if needs_dh:
            assert da_rows is not None
            found.append(activations.derivative(x, s[rows] * da_rows, call.activation).to(h.dtype))
        return found

    derived: list[Tensor] = []
    if call.w2.scheme:  # it may round all rows of its activations by one scale
        derived = derive(slice(None))
    elif of_output or needs_hidden or needs_dh:
        derived = _over_rows(derive, h)
    dh = derived.pop() if needs_dh else None
    weighed = derived.pop() if needs_hidden else None
    da = None
    if of_output:
        (ds,) = derived
        if call.w2_bias is not None:
            biases = _of_experts(call.w2_bias, pairs.experts, wide)
            ds = ds + (dout.to(wide) * biases).sum(1)
        dweights = _by_pair(ds, pairs).to(call.topk_weights.dtype)
    if needs_w2:
        assert weighed is not None
        dw2 = products.grouped_outer(dout, weighed, pairs.offsets).to(call.w2.data.dtype)
    if needs_adapters[1]:
        assert adapters.w2 is not None and weighed is not None
        v = composition.narrowed(_multiply, weighed, adapters.w2, pairs)
        of_adapters[2:] = _of_adapter(weighed, dout, v, adapters.w2, pairs)
    if needs_b2:
        assert call.w2_bias is not None
        db2 = _sum_of_rows(dout, s, pairs).to(call.w2_bias.dtype)
    if dh is not None:
        if needs_w13:
            assert rows is not None
            dw13 = products.grouped_outer(dh, rows, pairs.offsets).to(call.w13.data.dtype)
        if needs_b13:
            assert call.w13_bias is not None
            db13 = _sum_of_rows(dh, torch.ones_like(s), pairs).to(call.w13_bias.dtype)
        if needs_adapters[0]:
            assert rows is not None and adapters.w13 is not None and u is not None
            of_adapters[:2] = _of_adapter(rows, dh, u, adapters.w13, pairs)
        if through:
            drows = composition.product(
                _multiply, dh, call.w13, pairs, None, adapters.w13, transpose=True
            )
            by_pair = drows.index_select(0, pairs.inverse).unflatten(0, pairs.valid.shape)
            by_pair = torch.where(pairs.valid.unsqueeze(-1), by_pair.to(wide), 0)
            if needs_weights and on_input:
                x = torch.where(pairs.valid, call.hidden_states.to(wide), 0)
                dweights = (by_pair.squeeze(1) * x).sum(1, keepdim=True)
                dweights = dweights.to(call.topk_weights.dtype)
            if on_input:
                by_pair = by_pair * call.topk_weights.to(wide).unsqueeze(-1)
                by_pair = torch.where(pairs.valid.unsqueeze(-1), by_pair, 0)
            if needs_x:
                dx = by_pair.sum(1).to(call.hidden_states.dtype)
    return [dx, dw13, dw2, dweights, db13, db2, *of_adapters][: len(needs)]


def _of_adapter(
    rows: Tensor, grad: Tensor, u: Tensor, adapter: LowRank, pairs: permute.Pairs
) -> tuple[Tensor, Tensor]:
    """Gradients of a and b, from the rows that the product takes and the gradient of those that
    it returns; `u` are the rows made narrow.
    """
    du = composition.narrowed(_multiply, grad, adapter, pairs, transpose=True)
    da = products.grouped_outer(du, rows, pairs.offsets).to(adapter.a.dtype)
    return da, products.grouped_outer(grad, u, pairs.offsets).to(adapter.b.dtype)


def _pairs(call: ExpertsCall, index: Tensor) -> permute.Pairs:
    """The sorted pairs of the index that the forward pass returned."""
    S, E = call.topk_ids.numel(), call.w13.data.shape[0]
    offsets, rows = index[:E], index[E:].long()
    pair = torch.arange(S, device=index.device)
    valid = rows >= 0
    # rows behind the last are those of no pair: they have the first one's token, and count nowhere
    order = rows.new_zeros(S + 1).scatter_(0, torch.where(valid, rows, S), pair)[:S]
    experts = torch.searchsorted(offsets, pair, right=True)
    return permute.Pairs(
        order,
        rows.clamp(min=0),
        experts,
        offsets,
        valid.view(call.topk_ids.shape),
    )


def _by_pair(values: Tensor, pairs: permute.Pairs) -> Tensor:
    """Values of sorted rows (S,) as those of pairs (M, top_k): 0 where the expert is not here."""
    found = values.index_select(0, pairs.inverse).view(pairs.valid.shape)
    return torch.where(pairs.valid, found, 0)


def _sum_of_rows(rows: Tensor, factor: Tensor, pairs: permute.Pairs) -> Tensor:
    """(E, N): the sum of factor (S, 1) times each expert's rows (S, N). A product sums in a fixed
    order; index_add would not.
    """
    factors = factor.to(rows.dtype).expand(-1, 8).contiguous()
    return products.grouped_outer(rows, factors, pairs.offsets)[..., 0].contiguous()
