"""Experts with gradients as two functional operators: `moe_ops::experts_forward` returns what
`moe_ops::experts_backward` needs beside the inputs, the first product h and the order of the
pairs. All else is computed again.

Functional, because autograd refuses operators that write their arguments, and selective
checkpointing of one loses what it wrote. A compiler that partitions forward from backward keeps
what these two say: hidden_states, h and the index.

Both are here in plain torch, for any device and any call, and in fused.py for plain bf16 weights
on GPUs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from moe_ops import activations, environment
from moe_ops.autograd import experts as composition
from moe_ops.autograd.adapters import UNADAPTED, Adapters, LowRank
from moe_ops.backends.torch import grouped_mm as products
from moe_ops.environment import INTERPRETED
from moe_ops.kernels.launch import Lazy
from moe_ops.meta import flops
from moe_ops.numerics import Scales, permute
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.ops.library import TORCH_DEVICES, options_of, register_function, text_of
from moe_ops.ops.memory import addressable
from moe_ops.schemes import get_scheme

_INPUTS = (
    "Tensor hidden_states, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, "
    "Tensor?[] scales, Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map, str options"
)
# of the inputs, those that may get gradients, and their places
_GRADIENTS = (0, 1, 2, 3, 6, 7)  # hidden_states, w13, w2, topk_weights, w13_bias, w2_bias


class Options(NamedTuple):
    """What the operators' `options` say."""

    scheme: str
    activation: str
    alpha: float
    beta: float
    limit: float
    router_weight_on_input: bool
    recompute: bool  # h is computed again in the backward pass


class Inputs(NamedTuple):
    """The inputs of both operators."""

    call: ExpertsCall
    recompute: bool

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """E, N, K, I and top_k."""
        call = self.call
        E, N, K = get_scheme(call.w13.scheme).logical_shape(*call.w13.data.shape)
        I = get_scheme(call.w2.scheme).logical_shape(*call.w2.data.shape)[2]  # noqa: E741
        return E, N, K, I, call.topk_ids.shape[1]


def _inputs(values: tuple) -> Inputs:
    x, w13, w2, topk_weights, topk_ids, scales, b13, b2, expert_map, text = values
    o = options_of(text, Options)
    slots = len(scales) // 2
    none = [None] * (5 - slots)
    first = Weight._make((w13, *scales[:slots], *none, o.scheme, ""))
    second = Weight._make((w2, *scales[slots:], *none, o.scheme, ""))
    activation = activations.from_op(o.activation, o.alpha, o.beta, o.limit)
    call = ExpertsCall(
        *(x, first, second, topk_weights, topk_ids, b13, b2, expert_map, activation),
        *(o.router_weight_on_input, True, True),
    )
    return Inputs(call, o.recompute)


# --- where it runs -------------------------------------------------------------------------------


_fused_forward = Lazy("moe_ops.autograd.fused:forward")
_fused_backward = Lazy("moe_ops.autograd.fused:backward")
_MULTIPLE = 8  # of sizes: rows of 16-bit numbers begin at multiples of 16 bytes


def why_not_fused(call: ExpertsCall) -> str | None:
    """Why a call runs in plain torch; None if it runs here."""
    x, w13, w2 = call.hidden_states, call.w13.data, call.w2.data
    if call.w13.scheme:
        return "its weights are quantized"
    if call.w13_bias is not None or call.w2_bias is not None:
        return "it has biases"
    if call.router_weight_on_input:
        return "router weights multiply its input"
    if not call.topk_ids.numel():
        return "it has no tokens"
    if x.device.type != "cuda":
        return None if INTERPRETED and x.dtype == torch.float32 else "it is not on a CUDA device"
    plain = all([type(t) is Tensor or type(t) is torch.nn.Parameter for t in (w13, w2)])
    if not plain or not addressable((w13, w2)):
        return "its weights have no addresses"
    if x.dtype != torch.bfloat16 or environment.capability(x.device) < (9, 0):
        return "torch's grouped product takes bf16 on compute capability 9.0 or newer"
    for t in (w13, w2):
        if not t.is_contiguous() or t.data_ptr() % 16:
            return "its weights are not contiguous, or begin askew"
    if any([size % _MULTIPLE for size in (*w13.shape[1:], *w2.shape[1:])]):
        return f"its sizes are no multiples of {_MULTIPLE}"
    return None


# --- forward -------------------------------------------------------------------------------------


def _forward(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    """out (M, K); h (S, N), or (0, N) if it is computed again, whose rows behind those of the last
    expert may hold anything; int32 index (E + S,): the row after each expert's last pair, then the
    row of each pair, or -1 if its expert is not here.
    """
    call, recompute = _inputs(values)
    if why_not_fused(call) is None:
        out, h, index = _fused_forward(call)
    else:
        pairs = permute.sort_pairs(call.topk_ids, call.w13.data.shape[0], call.expert_map)
        out, h, _ = composition.layer(call, pairs, _multiply)
        index = index_of(pairs)
    return out, h[:0].clone() if recompute else h, index


def index_of(pairs: permute.Pairs) -> Tensor:
    """The index of sorted pairs."""
    rows = torch.where(pairs.valid.flatten(), pairs.inverse, -1)
    return torch.cat((pairs.offsets, rows.to(torch.int32)))


def _multiply(x: Tensor, weight: Tensor, offsets: Tensor, *scales_and_bias: Any) -> Tensor:
    *scales, bias, scheme, transpose = scales_and_bias
    of = Scales(*scales) if scheme else None
    return products.grouped_mm(
        x, weight, offsets, scales=of, scheme=scheme, bias=bias, transpose=transpose
    )


def _forward_fake(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _inputs(values)
    call, (E, N, _, _, top_k) = inputs.call, inputs.sizes
    x = call.hidden_states
    S = x.shape[0] * top_k
    dtype = torch.float32 if call.w13.scheme else x.dtype
    h = x.new_empty((0 if inputs.recompute else S, N), dtype=dtype)
    out = x.new_empty(x.shape)
    return out, h, call.topk_ids.new_empty((E + S,), dtype=torch.int32)


# --- backward ------------------------------------------------------------------------------------


def _backward(grad: Tensor, h: Tensor, index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of hidden_states, w13, w2, topk_weights, w13_bias and w2_bias; (0,) for those that
    are not needed.
    """
    *values, needs = rest
    inputs = _inputs(tuple(values))
    if why_not_fused(inputs.call) is None:
        kept = None if inputs.recompute else h
        found = _fused_backward(inputs.call, grad, kept, index, needs)
        return tuple([h.new_empty(0) if t is None else t for t in found])
    return portable_backward(inputs, grad, h, index, needs)[:6]


def portable_backward(
    inputs: Inputs,
    grad: Tensor,
    h: Tensor,
    index: Tensor,
    needs: list[bool],
    adapters: Adapters = UNADAPTED,
    needs_adapters: tuple[bool, bool] = (False, False),  # those of w13, of w2
    u: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The gradients, and behind them those of a13, b13, a2 and b2, in plain torch.

    With s the router weight of a pair, a its activation and dO the gradient of its token's output:
    da = s * (dO @ w2), ds = <dO @ w2, a>, dw2 = dO^T @ (s * a). So dO is gathered and nothing of
    width K is stored (SonicMoE, arXiv 2512.14080, section 3).
    """
    call, (E, _, _, _, top_k) = inputs.call, inputs.sizes
    needs_x, needs_w13, needs_w2, needs_weights, needs_b13, needs_b2 = needs
    pairs = _pairs(call, index, E, top_k)
    on_input = call.router_weight_on_input
    rows = None
    if inputs.recompute or needs_w13 or needs_adapters[0]:
        rows = composition.gemm1_input(call, pairs)
    if inputs.recompute:
        assert rows is not None
        h = composition.product(_multiply, rows, call.w13, pairs, call.w13_bias, adapters.w13)
    wide = h.dtype if h.dtype == torch.float64 else torch.float32
    weights = call.topk_weights.to(wide).flatten().index_select(0, pairs.order).unsqueeze(1)
    s = torch.ones_like(weights) if on_input else weights
    x_wide = h.to(wide)
    # outputs may not share memory
    dx, dw13, dw2, dweights, db13, db2 = [h.new_empty(0) for _ in needs]
    of_adapters = [h.new_empty(0) for _ in range(4)]

    dout = permute.gather_tokens(grad.to(h.dtype), pairs)
    da = composition.product(_multiply, dout, call.w2, pairs, None, adapters.w2, None, True)
    da = da.to(wide)
    of_output = needs_weights and not on_input
    if of_output or needs_w2 or needs_adapters[1]:
        hidden = activations.formula(x_wide, call.activation).to(h.dtype)
        hidden = composition.gemm2_input(call, pairs, hidden).to(wide)
    if of_output:
        ds = (da * hidden).sum(1)
        if call.w2_bias is not None:
            bias = call.w2_bias.to(wide).index_select(0, pairs.experts.clamp(max=E - 1))
            ds = ds + (dout.to(wide) * bias).sum(1)
        dweights = _by_pair(ds, pairs).to(call.topk_weights.dtype)
    if needs_w2:
        dw2 = products.grouped_outer(dout, (s * hidden).to(h.dtype), pairs.offsets)
    if needs_adapters[1]:
        assert adapters.w2 is not None
        of_adapters[2:] = _of_adapter((s * hidden).to(h.dtype), dout, adapters.w2, pairs)
    if needs_b2:
        assert call.w2_bias is not None
        db2 = _sum_of_rows(dout, s, pairs).to(call.w2_bias.dtype)
    through = needs_x or (needs_weights and on_input)
    if through or needs_w13 or needs_b13 or needs_adapters[0]:
        dh = activations.derivative(x_wide, s * da, call.activation).to(h.dtype)
        if needs_w13:
            assert rows is not None
            dw13 = products.grouped_outer(dh, rows, pairs.offsets)
        if needs_b13:
            assert call.w13_bias is not None
            db13 = _sum_of_rows(dh, torch.ones_like(s), pairs).to(call.w13_bias.dtype)
        if needs_adapters[0]:
            assert rows is not None and adapters.w13 is not None
            of_adapters[:2] = _of_adapter(rows, dh, adapters.w13, pairs, u)
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
    return dx, dw13, dw2, dweights, db13, db2, *of_adapters


def _of_adapter(
    rows: Tensor,
    grad: Tensor,
    adapter: LowRank,
    pairs: permute.Pairs,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of a and b, from the rows that the product takes and the gradient of those that
    it returns; `u` are the rows through the rank, where they are known.
    """
    if u is None:
        u = composition.narrowed(_multiply, rows, adapter, pairs)
    du = composition.narrowed(_multiply, grad, adapter, pairs, transpose=True)
    da = products.grouped_outer(du, rows, pairs.offsets).to(adapter.a.dtype)
    return da, products.grouped_outer(grad, u, pairs.offsets).to(adapter.b.dtype)


def _pairs(call: ExpertsCall, index: Tensor, E: int, top_k: int) -> permute.Pairs:
    """The sorted pairs of the index that the forward pass returned."""
    S = call.topk_ids.numel()
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
        valid.unflatten(0, (call.topk_ids.shape[0], top_k)),
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


def _backward_fake(grad: Tensor, h: Tensor, index: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *values, needs = rest
    x, w13, w2, topk_weights, _, _, b13, b2, *_ = values
    like = (x, w13, w2, topk_weights, b13, b2)
    return tuple(
        [
            t.new_empty(t.shape) if need else h.new_empty(0)
            for t, need in zip(like, needs, strict=True)
        ]
    )


# --- the operators -------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    scales = tensors.pop(5)
    ctx.num_scales, ctx.no_gaps = len(scales), all([t is not None for t in scales])
    ctx.save_for_backward(*tensors, *output[1:], *scales)


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    tensors, scales = list(ctx.saved_tensors), []
    if ctx.num_scales:
        tensors, scales = tensors[: -ctx.num_scales], tensors[-ctx.num_scales :]
    *tensors, h, index = tensors
    tensors.insert(5, scales)
    needs = [bool(ctx.needs_input_grad[i]) for i in _GRADIENTS]
    found: list = [None] * 10
    if ctx.no_gaps:  # torch asks for as many gradients of a list as it has tensors
        found[5] = [None] * ctx.num_scales
    if grad is None:
        return tuple(found)
    if torch.is_grad_enabled():  # create_graph: derivatives of these gradients are asked for
        gradients = _differentiable(grad, (*tensors, ctx.options), needs)
    else:
        gradients = backward(grad, h, index, *tensors, ctx.options, needs)
    for i, need, gradient in zip(_GRADIENTS, needs, gradients, strict=True):
        found[i] = gradient if need else None
    return tuple(found)


def _differentiable(grad: Tensor, values: tuple, needs: list[bool]) -> list[Tensor | None]:
    """The gradients as a graph of torch operators."""
    wanted = [values[i] for i, need in zip(_GRADIENTS, needs, strict=True) if need]
    out = composition.fused_experts(_inputs(values).call)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needs]


forward = register_function(
    "experts_forward",
    f"({_INPUTS}) -> (Tensor out, Tensor h, Tensor index)",
    _forward,
    _forward_fake,
    (_gradients, _save),
    devices=TORCH_DEVICES,
    flops=flops.experts_forward,
)


backward = register_function(
    "experts_backward",
    f"(Tensor grad, Tensor h, Tensor index, {_INPUTS}, bool[6] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    devices=TORCH_DEVICES,
    flops=flops.experts_backward,
)


def fused_experts(call: ExpertsCall, recompute: bool) -> Tensor:
    """Differentiable experts, (M, K) in hidden_states' dtype. With `recompute` nothing is kept for
    the backward pass but the inputs and the order of the pairs.
    """
    composition.refuse_transforms()
    return forward(*op_values(call, recompute))[0]


def op_values(call: ExpertsCall, recompute: bool) -> tuple:
    """The inputs of both operators."""
    a = call.activation
    # constants, also where dynamic=True makes symbols of them
    numbers = [float(guard_scalar(x)) for x in (a.alpha, a.beta, a.limit)]
    values = (call.w13.scheme, a.name, *numbers, call.router_weight_on_input, recompute)
    return call.op_values(text_of(Options._fields, values))
