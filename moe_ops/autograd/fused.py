"""The functional pair on GPUs with grouped products: torch's for plain weights, our own for those
of 4 to 8 bits, with kernels of this package between them. Imported at first launch only. Values
are those of portable.py: of plain weights rounded less often, of quantized ones rounded to bf16
where that code computes in fp32.

A step takes nine products' worth of arithmetic and, beside them, passes over rows: tokens are
copied to the rows of their pairs, one kernel goes back through activation and router weights, and
one sums the rows of a token. Biases are added, and router weights multiplied, where a kernel reads
those rows anyway; the gradients of biases are sums over the rows of an expert.

Adapters make rows narrow, and then wide again where the rows of the product that they adapt lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.autograd.adapters import UNADAPTED, Adapters, LowRank
from moe_ops.backends.cutlass import products as native
from moe_ops.backends.torch import grouped_mm as products
from moe_ops.kernels import launch
from moe_ops.kernels.configs import block_bound
from moe_ops.kernels.gemm.operands import activated
from moe_ops.kernels.launch import Launch, run
from moe_ops.kernels.mixed_gemm.operands import operand
from moe_ops.kernels.permute.combine import combine_rows
from moe_ops.kernels.permute.layout import Layout, index_parts
from moe_ops.kernels.permute.place import place
from moe_ops.kernels.permute.rows import Routing, sorted_rows
from moe_ops.kernels.permute.sort import group_blocks
from moe_ops.kernels.training import low_rank, packed
from moe_ops.kernels.training.rows import activate, derive, scatter, zero_empty
from moe_ops.kernels.training.sums import add_dot, dot, sum_rows
from moe_ops.ops.call import ExpertsCall, Weight
from moe_ops.schemes import get_scheme

_ROWS = torch.contiguous_format


class _Step:
    """What forward and backward pass share."""

    def __init__(self, call: ExpertsCall):
        self.call, self.x = call, call.hidden_states
        self.S, self.top_k = call.topk_ids.numel(), call.topk_ids.shape[1]
        logical = get_scheme(call.w13.scheme).logical_shape
        self.E, self.N, self.K = logical(*call.w13.data.shape)
        self.I = logical(*call.w2.data.shape)[2]
        a = call.activation
        self.activation = activated(a.name, a.alpha, a.beta, a.limit)
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

    def gathered(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """x (M, K) as rows of its pairs, times weights (M, top_k) if there are any."""
        y = self.rows(self.K)
        self.run(scatter(x, y, weights, self.layout, self.top_k))
        return y

    def inputs(self) -> Tensor:
        """The rows that w13 multiplies."""
        return self.gathered(self.x, self.of_input)

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

    def product(
        self, rows: Tensor, weight: Weight, adapter: _Adapter | None, transpose: bool = False
    ) -> Tensor:
        """rows times weight[e]^T, or weight[e], and what adapts it."""
        y = self.multiply(rows, weight, transpose)
        if adapter is not None:
            adapter.add(y, rows, transpose)
        return y

    def multiply(self, rows: Tensor, weight: Weight, transpose: bool = False) -> Tensor:
        if weight.scheme:
            return self.multiply_packed(rows, weight, transpose)
        w, ends = weight.data, self.layout.groups
        y = native.multiply(rows, w, ends, transpose)
        if y is not None:
            return y
        if not rows.is_cuda:
            return products.grouped_mm(rows, w, ends, transpose=transpose)
        return F.grouped_mm(rows, w if transpose else w.transpose(1, 2), offs=ends)

    def multiply_packed(self, rows: Tensor, weight: Weight, transpose: bool) -> Tensor:
        scale, zero, global_scale, channel_scale = weight.scales
        assert scale is not None
        parts = (weight.data, scale, zero, global_scale, channel_scale)
        w = operand("weight", *parts, weight.scheme, self.gpu)
        y = self.rows(w.K if transpose else w.N)
        if not rows.is_cuda:  # rows of no expert are zeros, as those of grouped_mm
            y.zero_()
        self.run(packed.multiply(y, rows, w, self.blocks(packed.BLOCK_M), transpose, self.gpu))
        return y

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """a^T b for the rows of each expert."""
        out = native.outer(a, b, self.layout.groups)
        if out is not None:
            return out
        if not a.is_cuda:
            return products.grouped_outer(a, b, self.layout.groups)
        out = F.grouped_mm(a.t(), b, offs=self.layout.groups)
        self.run(zero_empty(out, self.layout))
        return out

    def summed(self, y: Tensor, weights: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """(M, K): the sums of the rows of each token, plus biases, times weights."""
        out = torch.empty_like(self.x, memory_format=_ROWS)
        self.run(combine_rows(out, y, weights, self.layout, self.top_k, bias))
        return out

    def sum_of_experts(self, rows: Tensor, factors: Tensor | None, bias: Tensor | None) -> Tensor:
        """The gradient of a bias (E, columns): the sum of each expert's rows, times factors."""
        assert bias is not None
        out = torch.empty_like(bias)
        self.run(sum_rows(out, rows, factors, self.layout))
        return out


class _Adapter:
    """What adapts one product, in one pass: scale * rows a[e]^T b[e]^T. With `transpose` rows are
    the gradient of what the product returns, and go through b first.

    Where rows are those of tokens (`tokens`, or `outputs` for transposed ones), each token is read
    where it is, through the pair of each row: copied rows are top_k times as many.
    """

    def __init__(
        self,
        step: _Step,
        of: LowRank,
        tokens: Tensor | None = None,
        outputs: Tensor | None = None,
        u: Tensor | None = None,  # rows made narrow, where they are known
    ):
        self.step, self.of = step, of
        self.tokens = tokens, outputs
        self.found: list[Tensor | None] = [u, None]

    def source(self, rows: Tensor | None, transpose: bool) -> tuple[Tensor, Tensor | None]:
        """The wide rows, and if those of tokens stand for them, the pair of each."""
        tokens = self.tokens[transpose]
        if tokens is not None:
            return tokens, self.step.order
        assert rows is not None
        return rows, None

    def narrowed(self, rows: Tensor | None, transpose: bool = False) -> Tensor:
        """(S, r): rows through the first matrix, scaled."""
        u = self.found[transpose]
        if u is None:
            a, b, scale = self.of
            # zeros where rows have no expert: u of the forward pass is returned
            u = self.found[transpose] = self.step.x.new_zeros(self.step.S, a.shape[1])
            x, pairs = self.source(rows, transpose)
            blocks, top_k = self.step.blocks(low_rank.BLOCK_M), self.step.top_k
            matrix = b if transpose else a
            args = (u, x, matrix, not transpose, scale, blocks, pairs, top_k)
            self.step.run(low_rank.narrow(*args))
        return u

    def add(self, y: Tensor, rows: Tensor, transpose: bool) -> None:
        """Add it to the product y of these rows."""
        u, matrix = self.narrowed(rows, transpose), self.of.a if transpose else self.of.b
        blocks = self.step.blocks(low_rank.BLOCK_M)
        self.step.run(low_rank.widen(y, u, matrix, transpose, blocks))

    def gradients(self, rows: Tensor | None, grad: Tensor) -> list[Tensor]:
        """Of a and b: du^T rows and grad^T u."""
        u, du = self.narrowed(rows), self.narrowed(grad, True)
        found = [torch.empty_like(self.of.a), torch.empty_like(self.of.b)]
        for out, wide, narrow, transpose in zip(
            found, (rows, grad), (du, u), (False, True), strict=True
        ):
            x, pairs = self.source(wide, transpose)
            args = (out, not transpose, x, narrow, self.step.layout, pairs, self.step.top_k)
            self.step.run(low_rank.outer(*args))
        return found


def _of_products(
    step: _Step, adapters: Adapters, grad: Tensor | None = None, u: Tensor | None = None
) -> tuple[_Adapter | None, _Adapter | None]:
    """What adapts both products; `grad` is the gradient of the output, `u` what the first one
    makes narrow, where it is known.
    """
    first, second = adapters
    tokens = step.x if step.of_input is None else None
    return (
        None if first is None else _Adapter(step, first, tokens=tokens, u=u),
        None if second is None else _Adapter(step, second, outputs=grad),
    )


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
    """(out, h, u, index), as training.py and lora.py define them."""
    step = _Step(call)
    index = step.place()
    first, second = _of_products(step, adapters)
    h = step.product(step.inputs(), call.w13, first)
    hidden = step.rows(step.I)
    step.run(activate(step.activation, hidden, h, step.b13, step.layout))
    y = step.product(hidden, call.w2, second)
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
    step = _Step(call)
    step.read(index)
    layout, top_k = step.layout, step.top_k
    first, second = _of_products(step, adapters, grad, u)
    first_trained, second_trained = any(needs[6:8]), any(needs[8:])  # a and b come together
    found: list[Any] = [None] * len(needs)
    x = None
    if h is None:
        x = step.inputs()
        h = step.product(x, call.w13, first)
    dout = step.gathered(grad)
    dhidden = step.product(dout, call.w2, second, transpose=True)
    dh, hidden = step.rows(step.N), step.rows(step.I) if needs_w2 or second_trained else None
    dweights = factors = None
    if needs_weights:
        dweights = torch.empty_like(call.topk_weights, dtype=torch.float32, memory_format=_ROWS)
    if needs_b2 and step.of_output is not None:
        factors = torch.empty(step.S, dtype=torch.float32, device=dh.device)
    ds = dweights if step.of_output is not None else None
    step.run(
        derive(
            step.activation,
            dx=dh,
            scaled=hidden,
            dweights=ds,
            factors=factors,
            x=h,
            bias=step.b13,
            dh=dhidden,
            weights=step.of_output,
            layout=layout,
            top_k=top_k,
        )
    )
    if ds is not None and step.b2 is not None:
        step.run(add_dot(ds, grad, step.b2, layout, top_k))
    if needs_w2:
        assert hidden is not None
        found[2] = step.outer(dout, hidden)
    if second_trained:
        assert second is not None
        found[8:] = second.gradients(hidden, dout)
    if needs_b2:
        found[5] = step.sum_of_experts(dout, factors, step.b2)
    del dout, dhidden, hidden
    if needs_b13:
        found[4] = step.sum_of_experts(dh, None, step.b13)
    if x is None and (needs_w13 or (first_trained and step.of_input is not None)):
        x = step.inputs()
    if needs_w13:
        assert x is not None
        found[1] = step.outer(dh, x)
    if first_trained:
        assert first is not None
        found[6:8] = first.gradients(x, dh)
    del x
    of_input = dweights if step.of_input is not None else None
    if needs_x or of_input is not None:
        drows = step.product(dh, call.w13, first, transpose=True)
        if of_input is not None:
            step.run(dot(of_input, call.hidden_states, drows, layout, top_k))
        if needs_x:
            found[0] = step.summed(drows, step.of_input)
    if dweights is not None:
        found[3] = dweights.to(call.topk_weights.dtype)
    return found
