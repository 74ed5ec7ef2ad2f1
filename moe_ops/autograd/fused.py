"""The functional pair on GPUs with grouped products: for plain weights those of backend cutlass
where its object is built, else torch's; our own for those of 4 to 8 bits. Kernels of this package
are between them. Imported at first launch only. Values
are those of portable.py: of plain weights rounded less often, of quantized ones rounded to bf16
where that code computes in fp32.

A step takes nine products' worth of arithmetic and, beside them, passes over rows: tokens are
copied to the rows of their pairs, one kernel goes back through activation and router weights, and
one sums the rows of a token. Biases are added, and router weights multiplied, where a kernel reads
those rows anyway; the gradients of biases are sums over the rows of an expert.

Where the scheme of frozen experts quantizes activations, too, tokens and the rows that w2
multiplies are rounded as it says, and h is fp32; gradients take the rounding for the identity.

Adapters make rows narrow, and then wide again. The copy of tokens makes them narrow on its way,
other rows a kernel of its own; a product makes them wide and adds them to its sums, in steps
behind those of its weight. Torch's products add nothing: a kernel does it behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.autograd import portable
from moe_ops.autograd.adapters import UNADAPTED, Adapters
from moe_ops.autograd.fused_adapters import Adapter, of_products
from moe_ops.backends.cutlass import products as native
from moe_ops.backends.torch import grouped_mm as products
from moe_ops.kernels import launch
from moe_ops.kernels.configs import block_bound
from moe_ops.kernels.gemm.operands import activated
from moe_ops.kernels.launch import Launch, Lazy, run
from moe_ops.kernels.mixed_gemm import configs
from moe_ops.kernels.mixed_gemm.operands import operand
from moe_ops.kernels.place.layout import Layout, index_parts
from moe_ops.kernels.place.place import place
from moe_ops.kernels.place.routing import Routing, sorted_rows
from moe_ops.kernels.place.sort import group_blocks
from moe_ops.kernels.rows.combine import combine_rows
from moe_ops.kernels.training import low_rank, packed
from moe_ops.kernels.training.frozen import frozen
from moe_ops.kernels.training.rounding import round_rows
from moe_ops.kernels.training.rows import Gradients, activate, derive, scatter, zero_empty
from moe_ops.kernels.training.sums import add_dot, dot, sum_rows
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.schemes import get_scheme

# where Triton compiles Gluon
_sm90_packed = Lazy("moe_ops.kernels.training.sm90_packed:multiply")
_ROWS = torch.contiguous_format
# Pairs from which on products leave multiprocessors to kernels that copy or sum rows beside them,
# and columns of h up to which they do: beside products of more, such kernels are short.
SPARE_FROM, SPARE_UP_TO = 65536, 4096


class _Step:
    """What forward and backward pass share."""

    def __init__(self, call: ExpertsCall):
        self.call, self.x = call, call.hidden_states
        self.S, self.top_k = call.topk_ids.numel(), call.topk_ids.shape[1]
        self.E, self.N, self.K = get_scheme(call.w13.scheme).logical_shape(*call.w13.data.shape)
        self.I = get_scheme(call.w2.scheme).logical_shape(*call.w2.data.shape)[2]
        a = call.activation
        self.activation = activated(a.name, a.alpha, a.beta, a.limit)
        how = frozen(call.w13.scheme)
        self.rounding = None if how is None or how.elements is None else how
        self.h_dtype = portable.kept_dtype(call)
        self.device = self.x.get_device()
        self.gpu = launch.gpu(self.device)
        self.b13, self.b2 = [
            None if b is None else b.contiguous() for b in (call.w13_bias, call.w2_bias)
        ]
        # router weights multiply the rows of the input, or those of the output
        self.of_input: Tensor | None = None
        self.of_output: Tensor | None = None
        if call.router_weight_on_input:
            self.of_input = call.topk_weights
        else:
            self.of_output = call.topk_weights
        self.layout: Layout
        self.tables: dict[int, Routing] = {}

    def run(self, *launches: Launch) -> None:
        run(launches, self.device, self.gpu)

    def rows(self, columns: int) -> Tensor:
        return self.x.new_empty(self.S, columns)

    def place(self) -> Tensor:
        """Sort the pairs; returns the index."""
        at = index_parts(self.S, self.E)
        whole = self.x.new_empty(at.end, dtype=torch.int32)
        ids, expert_map = self.call.topk_ids, self.call.expert_map
        launches, self.layout = place(ids, expert_map, whole, self.E, self.S, 1, self.gpu)
        self.run(*launches)
        return torch.cat((self.layout.groups, whole[at.rows : at.rows + self.S]))

    def read(self, index: Tensor) -> None:
        """The layout of an index."""
        self.layout = Layout(index[self.E :], index[: self.E], self.S)

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
            self.run(scatter(x, y, weights, self.layout, self.top_k, into is not None))
        else:
            adapter.narrow(x, transpose, self.order, weights, y)
        return y

    @functools.cached_property
    def tokens(self) -> Tensor:
        """hidden_states as the scheme rounds them, then also times router weights of the input."""
        if self.rounding is None:
            return self.x
        return self.rounded(self.x, self.call.w13, self.of_input)

    def rounded(self, x: Tensor, weight: Weight, factors: Tensor | None = None) -> Tensor:
        """Rows x, times factors, as the scheme of a weight quantizes what it multiplies."""
        assert self.rounding is not None
        out = self.x.new_empty(x.shape)
        self.run(round_rows(self.rounding, out, x, factors, weight.activation_scale))
        return out

    def inputs(self, adapter: Adapter | None = None, into: Tensor | None = None) -> Tensor:
        """The rows that w13 multiplies."""
        weights = self.of_input if self.rounding is None else None
        return self.gathered(self.tokens, weights, adapter, into=into)

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

    def multiply(
        self,
        rows: Tensor,
        weight: Weight,
        transpose: bool = False,
        adapter: Adapter | None = None,
        dtype: torch.dtype | None = None,  # of the product with a quantized weight
        spare: int = 0,
    ) -> Tensor:
        """Rows times the weight of their expert, and what adapts it."""
        low = None if adapter is None else adapter.added(rows, transpose)
        if weight.scheme:
            return self.multiply_packed(rows, weight, transpose, low, dtype or rows.dtype)
        w, ends = weight.data, self.layout.groups
        y = native.multiply(rows, w, ends, transpose, low, spare)
        if y is not None:
            return y
        if rows.is_cuda:
            y = F.grouped_mm(rows, w if transpose else w.transpose(1, 2), offs=ends)
        else:
            y = products.grouped_mm(rows, w, ends, transpose=transpose)
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
        scale, zero, global_scale, channel_scale = weight.scales
        assert scale is not None
        parts = (weight.data, scale, zero, global_scale, channel_scale)
        how = frozen(weight.scheme)
        assert how is not None
        w = operand("weight", *parts, how.weight, self.gpu)
        y = rows.new_empty(self.S, w.K if transpose else w.N, dtype=dtype)
        if not rows.is_cuda:  # rows of no expert are zeros, as those of grouped_mm
            y.zero_()
        blocks, one = self.blocks(packed.BLOCK_M), None
        if configs.on_sm90(self.device) and dtype == rows.dtype:
            one = _sm90_packed(y, rows, w, blocks, transpose, low)
        self.run(one or packed.multiply(y, rows, w, blocks, transpose, self.gpu, low))
        return y

    def outer(self, a: Tensor, b: Tensor, spare: int = 0) -> Tensor:
        """a^T b for the rows of each expert."""
        out = native.outer(a, b, self.layout.groups, spare)
        if out is not None:
            return out
        if not a.is_cuda:
            return products.grouped_outer(a, b, self.layout.groups)
        out = F.grouped_mm(a.t(), b, offs=self.layout.groups)
        self.run(zero_empty(out, self.layout))
        return out

    def activated(self, h: Tensor) -> Tensor:
        """The rows that w2 multiplies."""
        out = h.new_empty(self.S, self.I)
        self.run(activate(self.activation, out, h, self.b13, self.layout))
        return out if self.rounding is None else self.rounded(out, self.call.w2)

    def first(self, rows: Tensor, adapter: Adapter | None) -> Tensor:
        """h."""
        return self.multiply(rows, self.call.w13, adapter=adapter, dtype=self.h_dtype)

    def gate_up_and_activated(self, adapter: Adapter | None) -> tuple[Tensor, Tensor]:
        """h, and the rows that w2 multiplies."""
        w13, of = self.call.w13, self.activation
        rows = self.inputs(adapter)
        fused = not w13.scheme and w13.data.is_contiguous() and of.GATED and not of.INTERLEAVED
        if not fused or native.kernels(self.device) is None or self.x.dtype != torch.bfloat16:
            h = self.first(rows, adapter)
            return h, self.activated(h)
        h, out = self.rows(self.N), self.rows(self.I)
        low = None if adapter is None else adapter.added(rows, False)
        ends = self.layout.groups
        native.activate_into(out, rows, w13.data, ends, of, self.b13, h, low)
        return h, out

    def derive(self, to: Gradients, h: Tensor, dhidden: Tensor | None) -> None:
        """Back through the activation and router weights of the output."""
        hidden = None
        if self.rounding is not None and (to.scaled is not None or to.dweights is not None):
            hidden = self.activated(h)
        args = self.activation, to, h, self.b13, hidden, dhidden, self.of_output
        self.run(derive(*args, self.I, self.top_k, self.layout))

    def summed(
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

    def sums(self) -> Tensor:
        return torch.empty_like(self.x, memory_format=_ROWS)

    @functools.cached_property
    def spare(self) -> int:
        """Multiprocessors that products leave to kernels that copy or sum rows beside them.

        It pays from many pairs on, where copies are a part of the step: docs/kernels/training.md.
        """
        gemms = native.kernels(self.device)
        if gemms is None or self.x.dtype != torch.bfloat16:
            return 0
        many = self.S >= SPARE_FROM and self.N <= SPARE_UP_TO
        return gemms.sm_count // 44 * 2 if many else 0  # 6 of 132, whole clusters of two

    def gradients_of_x_and_w13(
        self, dh: Tensor, x: Tensor | None, of_input: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Of hidden_states and of w13. Tokens are copied to rows x, where there are none, and rows
        of their gradients summed beside products.

        What a kernel writes beside a product is allocated before it: later it could be memory that
        the product reads and that was given back since, or filled by a kernel between the two.
        """
        tokens = self.rows(self.K) if x is None else None
        beside = 0 if x is not None else self.spare
        drows = self.multiply(dh, self.call.w13, transpose=True, spare=beside)
        if x is None:
            x = self.inputs(into=tokens)
        if of_input is not None:
            self.run(dot(of_input, self.call.hidden_states, drows, self.layout, self.top_k))
        dx = self.sums()
        dw13 = self.outer(dh, x, self.spare)
        return self.summed(drows, self.of_input, into=dx), dw13

    def sum_of_experts(self, rows: Tensor, factors: Tensor | None, bias: Tensor | None) -> Tensor:
        """The gradient of a bias (E, columns): the sum of each expert's rows, times factors."""
        assert bias is not None
        out = torch.empty_like(bias)
        self.run(sum_rows(out, rows, factors, self.layout))
        return out


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, on the device of its call's hidden_states: kernels are launched on the current
    one.
    """

    @functools.wraps(function)
    def run_on_device(call: ExpertsCall, *args: Any) -> Any:
        with torch.cuda.device_of(call.hidden_states):
            return function(call, *args)

    return run_on_device


@on_device
def forward(
    call: ExpertsCall, adapters: Adapters = UNADAPTED
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(out, h, u, index), as training.py and lora.py define them. A batch-invariant call has no
    adapters here, and takes `out` from inference's kernels.
    """
    step = _Step(call)
    index = step.place()
    if call.batch_invariant:
        return portable.of_inference(call), step.first(step.inputs(), None), None, index
    first, second = of_products(step, adapters)
    h, hidden = step.gate_up_and_activated(first)
    y = step.multiply(hidden, call.w2, adapter=second)
    u = None if first is None else first.found[False]
    return step.summed(y, step.of_output, step.b2), h, u, index


@on_device
def backward(
    call: ExpertsCall,
    grad: Tensor,
    h: Tensor | None,
    u: Tensor | None,
    index: Tensor,
    needs: list[bool],
    adapters: Adapters = UNADAPTED,
) -> list[Tensor | None]:
    """The gradients that are needed, as training.py defines them, and with adapters those of a13,
    b13, a2 and b2 behind them; `h` and `u` are None if they are computed again.
    """
    needs_x, needs_w13, needs_w2, needs_weights, needs_b13, needs_b2 = needs[:6]
    grad = grad.to(call.hidden_states.dtype)
    step = _Step(call)
    step.read(index)
    layout, top_k = step.layout, step.top_k
    first, second = of_products(step, adapters, grad, u)
    first_trained, second_trained = any(needs[6:8]), any(needs[8:])  # a and b come together
    dweights = ds = of_input = dout = dhidden = factors = None
    if needs_weights:
        dweights = torch.empty_like(call.topk_weights, dtype=torch.float32, memory_format=_ROWS)
        ds, of_input = (dweights, None) if step.of_input is None else (None, dweights)
    if needs_b2 and step.of_output is not None:
        factors = torch.empty(step.S, dtype=torch.float32, device=call.hidden_states.device)
    through_w13 = needs_x or of_input is not None
    needs_dh = through_w13 or needs_w13 or needs_b13 or first_trained
    needs_hidden = needs_w2 or second_trained
    found: list[Any] = [None] * len(needs)
    x = None
    if h is None:
        x = step.inputs(first)
        h = step.first(x, first)
    through_w2 = needs_dh or ds is not None
    if through_w2 or needs_w2 or needs_b2:
        dout = step.gathered(grad, None, second if through_w2 else None, True)
    if through_w2:
        assert dout is not None
        dhidden = step.multiply(dout, call.w2, transpose=True, adapter=second)
    to = Gradients(
        step.rows(step.N) if needs_dh else None,
        step.rows(step.I) if needs_hidden else None,
        ds,
        factors,
    )
    if any([t is not None for t in to]):
        step.derive(to, h, dhidden)
    del dhidden
    if ds is not None and step.b2 is not None:
        step.run(add_dot(ds, grad, step.b2, layout, top_k))
    if needs_w2:
        assert dout is not None and to.scaled is not None
        found[2] = step.outer(dout, to.scaled)
    if second_trained:
        assert second is not None
        found[8:] = second.gradients(to.scaled, grad)
    if needs_b2:
        assert dout is not None
        found[5] = step.sum_of_experts(dout, factors, step.b2)
    dh = to.dx
    del dout, to
    if needs_b13:
        assert dh is not None
        found[4] = step.sum_of_experts(dh, None, step.b13)
    if needs_x and needs_w13 and first is None and step.spare:
        assert dh is not None
        found[0], found[1] = step.gradients_of_x_and_w13(dh, x, of_input)
    else:
        if x is None and (needs_w13 or (first_trained and step.of_input is not None)):
            x = step.inputs()
        if needs_w13:
            assert x is not None and dh is not None
            found[1] = step.outer(dh, x)
        if first_trained:
            assert first is not None and dh is not None
            found[6:8] = first.gradients(x, dh)
        del x
        if through_w13:
            assert dh is not None
            drows = step.multiply(dh, call.w13, transpose=True, adapter=first)
            if of_input is not None:
                step.run(dot(of_input, call.hidden_states, drows, layout, top_k))
            if needs_x:
                found[0] = step.summed(drows, step.of_input)
    if dweights is not None:
        found[3] = dweights.to(call.topk_weights.dtype)
    return found
