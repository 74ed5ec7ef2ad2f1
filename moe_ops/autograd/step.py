"""One pass of a training step, forward or backward: the sequence of its operations, and their
implementation in plain torch, for any device and any call. `fused.FusedStep` replaces operations
on the rows between products by kernels.

With s the router weight of a pair, a its activation and dO the gradient of its token's output:
da = s * (dO @ w2), ds = <dO @ w2, a>, dw2 = dO^T @ (s * a). So dO is gathered and nothing of width
K is stored (SonicMoE, arXiv 2512.14080, section 3).

A forward pass keeps h (S, N), the product with w13 and its adapter, without the bias, which
readers of h add in fp32; u (S, r), the narrow rows of an adapter of w13; and the int32 index (E +
S,): for each expert the row after its last pair, then for each pair its row, or -1 if its expert
is not local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import activations, numerics
from moe_ops.autograd.adapters import UNADAPTED, Adapters, LowRank
from moe_ops.numerics import Scales, permute
from moe_ops.ops.call import ExpertsCall, GroupedCall, Weight
from moe_ops.ops.products import Products
from moe_ops.planning import bind
from moe_ops.planning.training import PORTABLE
from moe_ops.schemes import get_scheme

# Elements of h that a CPU takes through the activation at a time, so that intermediate results
# stay in its caches and in the same memory.
ELEMENTS_AT_ONCE = 1 << 18


class Needs(NamedTuple):
    """The gradients that are needed. Those of a and b of an adapter are needed together."""

    x: bool
    w13: bool
    w2: bool
    weights: bool
    b13: bool
    b2: bool
    adapter13: bool = False
    adapter2: bool = False


class Derived(NamedTuple):
    """Results of the backward pass through the activation and the router weights, as needed."""

    dh: Tensor | None  # (S, N), the gradient of h
    scaled: Tensor | None  # (S, I), the router weight times the activation's output
    dweights: Tensor | None  # (M, top_k), the gradient of router weights of the output
    factors: Tensor | None  # router weight of the output for each row


class Adapter:
    """The adapter of one product in one pass: scale * rows a[e]^T b[e]^T. With `transpose` the
    rows are the gradient of the product, and are multiplied by b first.
    """

    def __init__(self, of: LowRank, tokens: Tensor | None = None, outputs: Tensor | None = None):
        self.of = of
        # read in the place of their copies, which are rows, or with `transpose` gradients
        self.tokens = tokens, outputs
        self.found: list[Tensor | None] = [None, None]  # rows and gradients made narrow

    def matrices(self, transpose: bool) -> tuple[Tensor, Tensor]:
        """(the matrix that makes rows narrow, the one that makes them wide)."""
        a, b, _ = self.of
        return (b, a) if transpose else (a, b)

    def needs_rows(self, transpose: bool) -> bool:
        """Whether it reads rows of pairs instead of the tokens that they are copies of."""
        return self.tokens[transpose] is None


def quantized(call: ExpertsCall | GroupedCall) -> bool:
    """Whether a weight is quantized, so that plain torch computes both products in fp32."""
    return bool(call.w13.scheme or call.w2.scheme)


def kept_dtype(call: ExpertsCall | GroupedCall) -> torch.dtype:
    """Dtype of h: that of hidden_states, or fp32 if a scheme quantizes activations."""
    if not quantized(call):
        return call.hidden_states.dtype
    quantizes = any([get_scheme(w.scheme).activation is not None for w in (call.w13, call.w2)])
    return torch.float32 if quantizes else call.hidden_states.dtype


def of_inference(call: ExpertsCall) -> Tensor:
    """The output of the call without gradients, computed by inference, so that it has the bits of
    batch-invariant inference. The price is a second product with w13, for h.
    """
    with torch.no_grad():
        return bind.run(call._replace(options=call.options._replace(needs_grad=False)), "auto")


class Step:
    """One pass over a call with its adapters."""

    pairs: permute.Pairs
    grad: Tensor  # (M, K), of the output

    def __init__(
        self, call: ExpertsCall, adapters: Adapters = UNADAPTED, products: Products = PORTABLE
    ):
        self.call, self.adapters, self.products = call, adapters, products
        self.x = call.hidden_states
        self.kept = kept_dtype(call)
        self.dtype = self.product_dtype()
        # router weights multiply the rows of the input, or those of the output
        self.of_input = call.topk_weights if call.options.router_weight_on_input else None
        self.of_output = None if call.options.router_weight_on_input else call.topk_weights
        self.invariant = call.options.batch_invariant  # of products on CPUs
        self.known: Tensor | None = None  # rows that w13 multiplies, where h is computed again
        self.first: Adapter | None = None
        self.second: Adapter | None = None

    # --- the sequence ----------------------------------------------------------------------------

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """out (M, K), h, u and index."""
        index = self.place()
        if self.call.options.batch_invariant and self.adapters == UNADAPTED:
            return of_inference(self.call), self.h_of(self.inputs()), None, index
        self.adapt()
        h, hidden = self.h_and_activated()
        out = self.output(hidden)
        return out, h, None if self.first is None else self.first.found[False], index

    def backward(
        self,
        grad: Tensor,  # (M, K)
        h: Tensor | None,
        u: Tensor | None,
        index: Tensor,
        needs: Needs,
    ) -> list[Tensor | None]:
        """The needed gradients of hidden_states, w13, w2, topk_weights, w13_bias, w2_bias, a13,
        b13, a2 and b2, else None. `h` and `u` are None if they are to be computed again.
        """
        call = self.call
        of_output = needs.weights and not call.options.router_weight_on_input
        of_input = needs.weights and call.options.router_weight_on_input
        needs_dh = needs.x or of_input or needs.w13 or needs.b13 or needs.adapter13
        needs_dhidden = needs_dh or of_output
        self.grad = grad
        self.read(index)
        self.adapt(grad)
        first, second = self.first, self.second
        found: list[Tensor | None] = [None] * 10
        dout = dhidden = None
        if h is None:
            self.known = self.inputs()
            h = self.h_of(self.known)
            u = None if first is None else first.found[False]
        h = self.as_kept(h)
        if first is not None and u is not None:
            first.found[False] = self.as_kept(u).to(self.dtype)
        self.invariant = False
        of_second = needs.adapter2 and second is not None and second.needs_rows(True)
        if needs_dhidden or needs.w2 or needs.b2 or of_second:
            dout = self.gradient_rows(narrow=needs_dhidden)
        if needs_dhidden:
            assert dout is not None
            dhidden = self.multiply(dout, call.w2, second, transpose=True)
        needs_factors = needs.b2 and not call.options.router_weight_on_input
        wanted = needs_dh, needs.w2 or needs.adapter2, of_output, needs_factors
        dh, scaled, dweights, factors = self.derive(h, dhidden, dout, *wanted)
        del dhidden
        if needs.w2:
            assert dout is not None and scaled is not None
            found[2] = self.outer(dout, scaled).to(call.w2.data.dtype)
        if needs.adapter2:
            assert second is not None
            found[8:] = self.gradients_of(second, scaled, dout)
        if needs.b2:
            assert dout is not None and call.w2_bias is not None
            found[5] = self.sum_of_experts(dout, factors, call.w2_bias)
        del dout, scaled, second
        self.second = None  # and the rows that it made narrow
        if needs.b13:
            assert dh is not None and call.w13_bias is not None
            found[4] = self.sum_of_experts(dh, None, call.w13_bias)
        if dweights is not None:
            found[3] = dweights.to(call.topk_weights.dtype)
        if dh is not None:
            self.through_w13(found, needs, dh)
        return found

    def through_w13(self, found: list[Tensor | None], needs: Needs, dh: Tensor) -> None:
        """Compute the gradients that depend on dh, the gradient of h."""
        x, self.known = self.known, None
        first, of_input = self.first, needs.weights and self.of_input is not None
        of_first = needs.adapter13 and first is not None and first.needs_rows(False)
        if x is None and (needs.w13 or of_first):
            x = self.inputs()
        if needs.w13:
            assert x is not None
            found[1] = self.outer(dh, x).to(self.call.w13.data.dtype)
        if needs.adapter13:
            assert first is not None
            found[6:8] = self.gradients_of(first, x, dh)
        del x
        if needs.x or of_input:
            drows = self.multiply(dh, self.call.w13, first, transpose=True)
            if of_input:
                found[3] = self.dot(drows).to(self.call.topk_weights.dtype)
            if needs.x:
                found[0] = self.summed(drows)

    def narrowed(self, adapter: Adapter, rows: Tensor | None, transpose: bool = False) -> Tensor:
        """(S, r): rows times the first matrix of an adapter, scaled; computed once."""
        u = adapter.found[transpose]
        if u is None:
            u = adapter.found[transpose] = self.narrow(adapter, rows, transpose)
        return u

    def gradients_of(
        self, adapter: Adapter, rows: Tensor | None, grad: Tensor | None
    ) -> list[Tensor]:
        """Gradients of a and b, from the input of the product and the gradient of its output."""
        u, du = self.narrowed(adapter, rows), self.narrowed(adapter, grad, True)
        a = self.outer_narrow(adapter, rows, du, False)
        return [a, self.outer_narrow(adapter, grad, u, True)]

    # --- rows, in plain torch --------------------------------------------------------------------

    def product_dtype(self) -> torch.dtype:
        """Dtype of the rows that are multiplied, and of the products."""
        return torch.float32 if quantized(self.call) else self.x.dtype

    def as_kept(self, t: Tensor) -> Tensor:
        """h or u in the precision of a backward pass, whether it was kept or computed again."""
        return t.to(self.kept).to(self.dtype)

    def adapt(self, outputs: Tensor | None = None) -> None:
        """Prepare the adapters; `outputs` is the gradient of the layer's output."""
        self.first, self.second = [None if of is None else Adapter(of) for of in self.adapters]

    def place(self) -> Tensor:
        """Sort the pairs; returns the index."""
        call = self.call
        self.pairs = permute.sort_pairs(call.topk_ids, call.w13.data.shape[0], call.expert_map)
        places = torch.where(self.pairs.valid.flatten(), self.pairs.inverse, -1)
        return torch.cat((self.pairs.offsets, places.to(torch.int32)))

    def read(self, index: Tensor) -> None:
        """Restore the sorted pairs from an index."""
        E = self.call.w13.data.shape[0]
        S = index.shape[0] - E
        offsets, rows = index[:E], index[E:].long()
        pair = torch.arange(S, device=index.device)
        valid = rows >= 0
        # rows past the last pair belong to no pair: they get the token of the first one, and are
        # never counted
        order = rows.new_zeros(S + 1).scatter_(0, torch.where(valid, rows, S), pair)[:S]
        experts = torch.searchsorted(offsets, pair, right=True)
        valid = valid.view(-1, self.call.top_k)
        self.pairs = permute.Pairs(order, rows.clamp(min=0), experts, offsets, valid)

    def inputs(self) -> Tensor:
        """(S, K): the rows that w13 multiplies, with router weights and rounding of the scheme."""
        call, pairs, w13 = self.call, self.pairs, self.call.w13
        # router weights scale the input in fp32, before it is quantized
        rows = self.x.to(torch.float32) if quantized(call) else self.x
        if self.of_input is not None:
            rows = permute.weigh_inputs(rows, self.of_input, pairs)
        # each pair has the scale of its expert where these differ
        by_pair = w13.activation_scale is not None and w13.activation_scale.numel() > 1
        if w13.scheme and not by_pair:
            rows = straight_through(rows, w13.scheme, w13.activation_scale, pairs.valid.any(1))
        rows = permute.gather_tokens(rows, pairs)
        return self.rounded(rows, w13) if by_pair else rows

    def rounded(self, rows: Tensor, weight: Weight) -> Tensor:
        """Rows rounded as the scheme of a weight quantizes activations."""
        if not weight.scheme:
            return rows
        scale = numerics.static_scale_of_rows(weight.activation_scale, self.pairs.experts)
        valid = self.pairs.experts < weight.data.shape[0]
        return straight_through(rows, weight.scheme, scale, valid)

    def gradient_rows(self, narrow: bool) -> Tensor:
        """(S, K): the gradient of the output as rows of its pairs."""
        return permute.gather_tokens(self.grad.to(self.dtype), self.pairs)

    def multiply(
        self,
        rows: Tensor,
        weight: Weight,
        adapter: Adapter | None = None,
        transpose: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Rows times the weight of their expert, plus its adapter."""
        y = self.products.multiply(
            *(rows, weight.data, self.pairs.offsets),
            scales=Scales._make(weight.scales) if weight.scheme else None,
            scheme=weight.scheme,
            bias=bias,
            transpose=transpose,
            batch_invariant=self.invariant,
        )
        if adapter is None:
            return y
        u = self.narrowed(adapter, rows, transpose)
        return y + self.multiply_plain(u, adapter.matrices(transpose)[1], transpose)

    def multiply_plain(self, rows: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
        """Rows times the matrix of their expert."""
        return self.multiply(rows, Weight(matrix.to(rows.dtype)), transpose=transpose)

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """a^T b for the rows of each expert."""
        return self.products.outer(a, b, self.pairs.offsets)

    def narrow(self, adapter: Adapter, rows: Tensor | None, transpose: bool) -> Tensor:
        """(S, r): rows times the first matrix of an adapter, scaled."""
        assert rows is not None
        matrix = adapter.matrices(transpose)[0]
        return self.multiply_plain(rows, matrix, transpose) * adapter.of.scale

    def outer_narrow(
        self, adapter: Adapter, wide: Tensor | None, narrow: Tensor, transpose: bool
    ) -> Tensor:
        """The gradient of an adapter's a from wide rows, or with `transpose` of its b."""
        assert wide is not None
        if transpose:
            return self.outer(wide, narrow).to(adapter.of.b.dtype)
        return self.outer(narrow, wide).to(adapter.of.a.dtype)

    def h_of(self, rows: Tensor) -> Tensor:
        """h, of the rows that w13 multiplies."""
        return self.multiply(rows, self.call.w13, self.first)

    def h_and_activated(self) -> tuple[Tensor, Tensor]:
        """h, and the rows that w2 multiplies."""
        h = self.h_of(self.inputs())
        return h, self.activated(h)

    def activation_of(self, rows: slice) -> activations.AnyActivation:
        """The activation of some rows."""
        call = self.call
        of = call.options.activation, call.activation_by_expert
        return activations.of_rows(*of, self.pairs.experts[rows])

    def activated(self, h: Tensor) -> Tensor:
        """(S, I): the rows that w2 multiplies."""
        if self.invariant:
            act, every = self.call.options.activation, slice(None)
            hidden = h.new_empty(h.shape[0], h.shape[1] // 2 if act.gated else h.shape[1])
            x = self.activation_input(h, every)
            activations.apply_by_blocks(x, self.activation_of(every), hidden)
        else:

            def activate(rows: slice) -> list[Tensor]:
                x = self.activation_input(h, rows)
                return [activations.formula(x, self.activation_of(rows)).to(h.dtype)]

            (hidden,) = over_rows(activate, h)
        return self.rounded(hidden, self.call.w2)

    def activation_input(self, h: Tensor, rows: slice) -> Tensor:
        """h plus the bias of each row's expert, fp32 or fp64."""
        x = h[rows].to(wide(h))
        bias = self.call.w13_bias
        return x if bias is None else x + self.of_experts(bias, rows, x.dtype)

    def of_experts(self, bias: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
        """The bias of each row's expert; for rows past the last one that of the last expert."""
        experts = self.pairs.experts[rows].clamp(max=bias.shape[0] - 1)
        return bias.to(dtype).index_select(0, experts)

    def output(self, hidden: Tensor) -> Tensor:
        """(M, K): the layer's output."""
        call = self.call
        y = self.multiply(hidden, call.w2, self.second, bias=call.w2_bias)
        weights = torch.ones_like(call.topk_weights) if self.of_output is None else self.of_output
        ids = call.topk_ids if call.options.batch_invariant else None
        dtype = call.output()[1]
        return permute.combine(y, weights, self.pairs, dtype, ids, call.global_experts)

    def derive(
        self,
        h: Tensor,
        dhidden: Tensor | None,
        dout: Tensor | None,
        needs_dh: bool,
        needs_scaled: bool,
        needs_dweights: bool,
        needs_factors: bool,
    ) -> Derived:
        """Back through the activation and router weights of the output."""
        call, s = self.call, None
        if self.of_output is not None:
            s = self.of_output.to(wide(h)).flatten().index_select(0, self.pairs.order).unsqueeze(1)

        def weighed(t: Tensor, rows: slice) -> Tensor:
            return t if s is None else s[rows] * t

        def derive(rows: slice) -> list[Tensor]:
            x, found = self.activation_input(h, rows), []
            act = self.activation_of(rows)
            da = None if dhidden is None else dhidden[rows].to(x.dtype)
            if needs_dweights or needs_scaled:
                hidden = activations.formula(x, act).to(h.dtype)
                hidden = self.rounded(hidden, call.w2).to(x.dtype)
                if needs_dweights:
                    assert da is not None
                    found.append((da * hidden).sum(1))
                if needs_scaled:
                    found.append(weighed(hidden, rows).to(h.dtype))
            if needs_dh:
                assert da is not None
                found.append(activations.derivative(x, weighed(da, rows), act).to(h.dtype))
            return found

        derived: list[Tensor] = []
        if call.w2.scheme:  # it may round all rows of its activations by one scale
            derived = derive(slice(None))
        elif needs_dh or needs_scaled or needs_dweights:
            derived = over_rows(derive, h)
        dh = derived.pop() if needs_dh else None
        scaled = derived.pop() if needs_scaled else None
        dweights = None
        if needs_dweights:
            (ds,) = derived
            if call.w2_bias is not None:
                assert dout is not None
                biases = self.of_experts(call.w2_bias, slice(None), wide(h))
                ds = ds + (dout.to(wide(h)) * biases).sum(1)
            by_pair = ds.index_select(0, self.pairs.inverse).view(self.pairs.valid.shape)
            dweights = torch.where(self.pairs.valid, by_pair, 0)
        return Derived(dh, scaled, dweights, s if needs_factors else None)

    def sum_of_experts(self, rows: Tensor, factors: Tensor | None, bias: Tensor) -> Tensor:
        """The gradient of a bias (E, columns): the sum of each expert's rows, times factors. A
        product sums in a fixed order; index_add would not.
        """
        if factors is None:
            factors = rows.new_ones(rows.shape[0], 1)
        columns = factors.to(rows.dtype).expand(-1, 8).contiguous()
        return self.outer(rows, columns)[..., 0].contiguous().to(bias.dtype)

    def dot(self, drows: Tensor) -> Tensor:
        """(M, 1): the gradient of router weights of the input, from that of the rows of pairs."""
        x = torch.where(self.pairs.valid, self.x.to(wide(drows)), 0)
        return (self.by_pair(drows).squeeze(1) * x).sum(1, keepdim=True)

    def summed(self, drows: Tensor) -> Tensor:
        """(M, K): the gradient of hidden_states, from that of the rows of pairs."""
        by_pair = self.by_pair(drows)
        if self.of_input is not None:
            by_pair = by_pair * self.of_input.to(by_pair.dtype).unsqueeze(-1)
            by_pair = torch.where(self.pairs.valid.unsqueeze(-1), by_pair, 0)
        return by_pair.sum(1).to(self.x.dtype)

    def by_pair(self, rows: Tensor) -> Tensor:
        """(M, top_k, K): the row of each pair, zeros for pairs whose expert is not here."""
        valid = self.pairs.valid
        found = rows.index_select(0, self.pairs.inverse).unflatten(0, valid.shape)
        return torch.where(valid.unsqueeze(-1), found.to(wide(rows)), 0)


def straight_through(
    x: Tensor, scheme: str, static_scale: Tensor | None, rows_valid: Tensor
) -> Tensor:
    """x as a scheme quantizes activations, whose gradient is that of x."""
    rounded = numerics.fake_quantize_activation(x.detach(), scheme, static_scale, rows_valid)
    x = x.to(torch.float32)
    return x + (rounded - x).detach()


def over_rows(compute: Callable[[slice], list[Tensor]], h: Tensor) -> list[Tensor]:
    """`compute` applied to all rows of h; on a CPU to a few at a time."""
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


def wide(t: Tensor) -> torch.dtype:
    """fp32, or fp64 beside fp64: what sums over few rows are computed in."""
    return t.dtype if t.dtype == torch.float64 else torch.float32
