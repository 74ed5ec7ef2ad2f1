"""Passes of a training step on GPUs: grouped products, with kernels for the rows between them.
Imported at first launch only. Values are those of `Step`: for plain weights rounded less often,
for quantized ones rounded to bf16 where `Step` computes in fp32.

Besides its grouped products a step passes over rows: one kernel copies tokens to the rows of their
pairs, one goes back through activation and router weights, and one sums the rows of a token.
Biases are added, and router weights multiplied, by kernels that read those rows anyway. The
gradient of a bias is the sum over the rows of an expert.

If the scheme of frozen experts quantizes activations, tokens and the rows that w2 multiplies are
rounded by it, and h is fp32. Gradients take the rounding for the identity.

An adapter makes rows narrow, (S, r), and then wide again. The kernel that copies tokens makes them
narrow on the way; for other rows there is a kernel. Some products make the rows wide themselves,
in steps of the reduction after those of the weight; after the others a kernel adds them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moe_ops.autograd.adapters import Adapters
from moe_ops.autograd.step import Adapter, Derived, Needs, Step
from moe_ops.kernels import launch
from moe_ops.kernels.activation import activated_by_expert
from moe_ops.kernels.configs import block_bound
from moe_ops.kernels.gemm import low_rank
from moe_ops.kernels.launch import Launch, Lazy, run
from moe_ops.kernels.mixed_gemm import configs, packed
from moe_ops.kernels.mixed_gemm.operands import operand
from moe_ops.kernels.place.layout import Layout, index_parts
from moe_ops.kernels.place.place import place
from moe_ops.kernels.place.routing import Routing, sorted_rows
from moe_ops.kernels.place.sort import group_blocks
from moe_ops.kernels.rows.activate import activate
from moe_ops.kernels.rows.combine import combine_rows
from moe_ops.kernels.rows.derive import Gradients, derive, zero_empty
from moe_ops.kernels.rows.emulated import round_rows
from moe_ops.kernels.rows.frozen import frozen
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.scatter import scatter
from moe_ops.kernels.rows.sums import dot, sum_rows
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.ops.products import Products
from moe_ops.schemes import get_scheme

# where Triton compiles Gluon
_sm90_packed = Lazy("moe_ops.kernels.mixed_gemm.sm90_packed:multiply")
_sm90_registers = Lazy("moe_ops.kernels.mixed_gemm.sm90_registers:multiply")
_ROWS = torch.contiguous_format


class FusedStep(Step):
    """One pass of a call whose plan (`planning.training`) has kernels."""

    layout: Layout

    def __init__(self, call: ExpertsCall, adapters: Adapters, products: Products):
        super().__init__(call, adapters, products)
        self.top_k = call.top_k
        self.S = self.x.shape[0] * self.top_k
        self.E, self.N, self.K = get_scheme(call.w13.scheme).logical_shape(*call.w13.data.shape)
        self.I = get_scheme(call.w2.scheme).logical_shape(*call.w2.data.shape)[2]
        of = call.options.activation, call.activation_by_expert
        self.activation = activated_by_expert(*of)
        how = frozen(call.w13.scheme) if call.w13.scheme else None
        self.rounding = None if how is None else how.rounding
        self.device = self.x.get_device()
        self.gpu = launch.gpu(self.device)
        self.b13, self.b2 = [
            None if b is None else b.contiguous() for b in (call.w13_bias, call.w2_bias)
        ]
        self.tables: dict[int, Routing] = {}

    def product_dtype(self) -> torch.dtype:
        return self.x.dtype

    def as_kept(self, t: Tensor) -> Tensor:
        return t

    def run(self, *launches: Launch) -> None:
        run(launches, self.device, self.gpu)

    def rows(self, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """(S, columns), which its caller fills."""
        return self.x.new_empty(self.S, columns, dtype=dtype)

    # --- where rows are --------------------------------------------------------------------------

    def place(self) -> Tensor:
        at = index_parts(self.S, self.E)
        whole = self.x.new_empty(at.end, dtype=torch.int32)
        ids, expert_map = self.call.topk_ids, self.call.expert_map
        launches, self.layout = place(ids, expert_map, whole, self.E, self.S, 1, self.gpu)
        self.run(*launches)
        return torch.cat((self.layout.groups, whole[at.rows : at.rows + self.S]))

    def read(self, index: Tensor) -> None:
        self.layout = Layout(index[self.E :], index[: self.E], self.S)

    def blocks(self, block_m: int) -> Routing:
        """Blocks of at most block_m rows of an expert, found once a pass."""
        if block_m not in self.tables:
            count = block_bound(self.S, self.E + 1, block_m)  # rows of no expert are one more
            index = self.x.new_empty(4 * count, dtype=torch.int32)
            self.tables[block_m] = table = sorted_rows(index, self.E, count)
            self.run(group_blocks(table, self.layout.groups, self.S, 0, block_m, self.gpu))
        return self.tables[block_m]

    @functools.cached_property
    def order(self) -> Tensor:
        """(S,): the pair of each row; of rows of no pair anything."""
        pairs = self.x.new_empty(self.S, dtype=torch.int32)
        self.run(low_rank.order(pairs, self.layout))
        return pairs

    # --- rows that are multiplied ----------------------------------------------------------------

    def gathered(
        self,
        x: Tensor,
        weights: Tensor | None = None,
        adapter: Adapter | None = None,
        transpose: bool = False,
        into: Tensor | None = None,
    ) -> Tensor:
        """x (M, K) as rows of its pairs, times weights (M, top_k) if there are any. On its way it
        is made narrow for an adapter. With `into`, where they go, beside the kernel before.
        """
        y = self.rows(self.K) if into is None else into
        if adapter is None or adapter.found[transpose] is not None:
            of = x, Operand(y), self.layout, self.top_k, self.gpu
            self.run(scatter(*of, weights=weights, beside=into is not None))
        else:
            adapter.found[transpose] = self.narrow_from(adapter, transpose, x, True, weights, y)
        return y

    @functools.cached_property
    def tokens(self) -> Tensor:
        """hidden_states as the scheme rounds them, then also times router weights of the input."""
        if self.rounding is None:
            return self.x
        return self.rounded(self.x, self.call.w13, self.of_input)

    def rounded(self, rows: Tensor, weight: Weight, factors: Tensor | None = None) -> Tensor:
        """Rows, times factors, as the scheme of a weight quantizes what it multiplies."""
        assert self.rounding is not None
        out = self.x.new_empty(rows.shape)
        of = self.rounding, out, rows, factors, weight.activation_scale
        self.run(round_rows(*of, self.gpu))
        return out

    def inputs(self, into: Tensor | None = None) -> Tensor:
        weights = self.of_input if self.rounding is None else None
        return self.gathered(self.tokens, weights, self.first, into=into)

    def gradient_rows(self, narrow: bool) -> Tensor:
        return self.gathered(self.grad, None, self.second if narrow else None, True)

    def activated(self, h: Tensor) -> Tensor:
        out = h.new_empty(self.S, self.I)
        of = Operand(out), self.activation, h, self.layout, self.gpu
        self.run(activate(*of, bias=self.b13, in_order=True))
        return out if self.rounding is None else self.rounded(out, self.call.w2)

    # --- products --------------------------------------------------------------------------------

    def multiply(
        self,
        rows: Tensor,
        weight: Weight,
        adapter: Adapter | None = None,
        transpose: bool = False,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,  # of the product with a quantized weight
        spare: int = 0,
    ) -> Tensor:
        assert bias is None  # whoever reads the product adds it
        low = None
        if adapter is not None:
            low = self.narrowed(adapter, rows, transpose), adapter.matrices(transpose)[1]
        if weight.scheme:
            return self.multiply_packed(rows, weight, transpose, low, dtype or rows.dtype)
        more: dict[str, Any] = {} if self.products.spare is None else {"spare": spare}
        if low is not None and self.products.adds:
            more["low"], low = low, None
        y = self.products.multiply(
            rows, weight.data, self.layout.groups, transpose=transpose, **more
        )
        if low is not None:
            self.run(low_rank.widen(y, *low, transpose, self.blocks(low_rank.BLOCK_M)))
        return y

    def multiply_packed(
        self,
        rows: Tensor,
        weight: Weight,
        transpose: bool,
        low: tuple[Tensor, Tensor] | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """`multiply` with a quantized weight, as it is stored."""
        scale, zero, global_scale, channel_scale = weight.scales
        assert scale is not None
        parts = (weight.data, scale, zero, global_scale, channel_scale)
        how = frozen(weight.scheme)
        assert how is not None
        w = operand("weight", *parts, how.weight, self.gpu)
        y = self.rows(w.K if transpose else w.N, dtype)
        if not rows.is_cuda:  # rows of no expert are zeros, as those of plain products
            y.zero_()
        blocks, one = self.blocks(packed.BLOCK_M), None
        if configs.on_sm90(self.device) and dtype == rows.dtype:
            if transpose:
                one = _sm90_registers(y, rows, w, blocks, low)
            one = one or _sm90_packed(y, rows, w, blocks, transpose, low)
        self.run(one or packed.multiply(y, rows, w, blocks, transpose, self.gpu, low))
        return y

    def outer(self, a: Tensor, b: Tensor, spare: int = 0) -> Tensor:
        more = {} if self.products.spare is None else {"spare": spare}
        out = self.products.outer(a, b, self.layout.groups, **more)
        if not self.products.zeroes:
            self.run(zero_empty(out, self.layout))
        return out

    def h_of(self, rows: Tensor) -> Tensor:
        return self.multiply(rows, self.call.w13, self.first, dtype=self.kept)

    def h_and_activated(self) -> tuple[Tensor, Tensor]:
        w13, of = self.call.w13, self.activation
        rows, activate = self.inputs(), self.products.activate_into
        fused = not w13.scheme and w13.data.is_contiguous() and of.GATED and not of.INTERLEAVED
        fused = fused and of.ACTIVATION in self.products.activations
        if not fused or activate is None or self.call.activation_by_expert is not None:
            h = self.h_of(rows)
            del rows
            return h, self.activated(h)
        h, out = self.rows(self.N), self.rows(self.I)
        low = None
        if self.first is not None:
            low = self.narrowed(self.first, rows), self.first.of.b
        activate(out, rows, w13.data, self.layout.groups, of, self.b13, h, low)
        return h, out

    def output(self, hidden: Tensor) -> Tensor:
        y = self.multiply(hidden, self.call.w2, self.second)
        return self.combined(y, self.of_output, self.b2)

    # --- what adapts products --------------------------------------------------------------------

    def adapt(self, outputs: Tensor | None = None) -> None:
        """Where rows are those of tokens, each token is read where it is, through the pair of each
        row: copied rows are top_k times as many.
        """
        first, second = self.adapters
        if first is not None:
            self.first = Adapter(first, self.tokens if self.of_input is None else None)
        if second is not None:
            self.second = Adapter(second, outputs=outputs)

    def source(self, adapter: Adapter, rows: Tensor | None, transpose: bool) -> tuple:
        """The wide rows, and if those of tokens stand for them, the pair of each."""
        tokens = adapter.tokens[transpose]
        return (rows, None) if tokens is None else (tokens, self.order)

    def narrow(self, adapter: Adapter, rows: Tensor | None, transpose: bool) -> Tensor:
        x, pairs = self.source(adapter, rows, transpose)
        return self.narrow_from(adapter, transpose, x, pairs is not None)

    def narrow_from(
        self,
        adapter: Adapter,
        transpose: bool,
        x: Tensor,
        are_tokens: bool,
        weights: Tensor | None = None,
        copy: Tensor | None = None,
    ) -> Tensor:
        """(S, r): rows x, or tokens times weights if there are any, which `copy` gets as rows."""
        u, matrix = self.rows(adapter.of.a.shape[1]), adapter.matrices(transpose)[0]
        blocks, order = self.blocks(low_rank.BLOCK_M), self.order if are_tokens else None
        args = (u, x, matrix, not transpose, adapter.of.scale, blocks, order, self.top_k)
        self.run(low_rank.narrow(*args, weights, copy))
        return u

    def outer_narrow(
        self, adapter: Adapter, wide: Tensor | None, narrow: Tensor, transpose: bool
    ) -> Tensor:
        out = torch.empty_like(adapter.of.b if transpose else adapter.of.a)
        x, pairs = self.source(adapter, wide, transpose)
        args = (out, not transpose, x, narrow, self.layout, pairs, self.top_k)
        self.run(low_rank.outer(*args))
        return out

    # --- gradients -------------------------------------------------------------------------------

    def backward(self, grad: Tensor, *args: Any) -> list[Tensor | None]:
        return super().backward(grad.to(self.x.dtype), *args)

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
        found = Derived(
            self.rows(self.N) if needs_dh else None,
            self.rows(self.I) if needs_scaled else None,
            self.of_pairs() if needs_dweights else None,
            self.x.new_empty(self.S, dtype=torch.float32) if needs_factors else None,
        )
        if all([t is None for t in found]):
            return found
        hidden = None
        if self.rounding is not None and (needs_scaled or needs_dweights):
            hidden = self.activated(h)
        to = Gradients(found.dh, None, *found[1:])
        args = self.activation, to, h, self.b13, hidden, dhidden, self.of_output
        self.run(derive(*args, self.I, self.top_k, self.layout))
        if found.dweights is not None and self.b2 is not None:
            self.run(dot(found.dweights, self.grad, self.layout, self.top_k, bias=self.b2))
        return found

    def of_pairs(self) -> Tensor:
        """(M, top_k) fp32, which its caller fills."""
        weights = self.call.topk_weights
        return torch.empty_like(weights, dtype=torch.float32, memory_format=_ROWS)

    def sum_of_experts(self, rows: Tensor, factors: Tensor | None, bias: Tensor) -> Tensor:
        out = torch.empty_like(bias, memory_format=_ROWS)
        self.run(sum_rows(out, rows, factors, self.layout))
        return out

    def dot(self, drows: Tensor) -> Tensor:
        out = self.of_pairs()
        self.run(dot(out, self.x, self.layout, self.top_k, y=drows))
        return out

    def combined(
        self,
        y: Tensor,
        weights: Tensor | None,
        bias: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor:
        """(M, K): the sums of the rows of each token, plus biases, times weights. `into` as in
        `gathered`.
        """
        out = self.sums() if into is None else into
        beside = into is not None
        self.run(combine_rows(out, y, weights, self.layout, self.top_k, bias, beside=beside))
        return out

    def summed(self, drows: Tensor) -> Tensor:
        return self.combined(drows, self.of_input)

    def sums(self) -> Tensor:
        """(M, K), which its caller fills."""
        return torch.empty_like(self.x, memory_format=_ROWS)

    @functools.cached_property
    def spare(self) -> int:
        """Multiprocessors that products leave to concurrent kernels, which copy or sum rows."""
        of = self.products.spare
        return 0 if of is None else of(self.device, self.S, self.N)

    def through_w13(self, found: list[Tensor | None], needs: Needs, dh: Tensor) -> None:
        """Tokens are copied to rows x, where there are none, and rows of their gradients summed
        beside products, where these leave multiprocessors to such kernels.

        What a kernel writes beside a product is allocated before it: later it could be memory that
        the product reads and that was given back since, or filled by a kernel between the two.
        """
        beside = needs.x and needs.w13 and self.first is None and self.spare
        if not beside:
            return super().through_w13(found, needs, dh)
        x, self.known = self.known, None
        tokens = self.rows(self.K) if x is None else None
        spare = self.spare if x is None else 0
        drows = self.multiply(dh, self.call.w13, transpose=True, spare=spare)
        if x is None:
            x = self.inputs(into=tokens)
        if needs.weights and self.of_input is not None:
            found[3] = self.dot(drows).to(self.call.topk_weights.dtype)
        dx = self.sums()
        found[1] = self.outer(dh, x, self.spare)
        found[0] = self.combined(drows, self.of_input, into=dx)
