"""The functional pair on GPUs with grouped products: torch's for plain weights, our own for those
of 4 to 8 bits, with kernels of this package between them. Imported at first launch only. Values
are those of the portable code in training.py: of plain weights rounded less often, of quantized
ones rounded to bf16 where that code computes in fp32.

A step takes nine products' worth of arithmetic and, beside them, passes over rows: tokens are
copied to the rows of their pairs, one kernel goes back through activation and router weights, and
one sums the rows of a token. Biases are added, and router weights multiplied, where a kernel reads
those rows anyway; the gradients of biases are sums over the rows of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.backends.torch import grouped_mm as products
from moe_ops.kernels import launch
from moe_ops.kernels.gemm.operands import activated
from moe_ops.kernels.launch import Launch, run
from moe_ops.kernels.mixed_gemm.operands import operand
from moe_ops.kernels.permute.combine import combine_rows
from moe_ops.kernels.permute.layout import Layout, index_parts
from moe_ops.kernels.permute.place import place
from moe_ops.kernels.permute.rows import Routing, sorted_rows
from moe_ops.kernels.training import packed
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
        self.blocks: Routing | None = None  # of the rows, for products with packed weights

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

    def multiply(self, rows: Tensor, weight: Weight, transpose: bool = False) -> Tensor:
        if weight.scheme:
            return self.multiply_packed(rows, weight, transpose)
        w, ends = weight.data, self.layout.groups
        if not rows.is_cuda:
            return products.grouped_mm(rows, w, ends, transpose=transpose)
        return F.grouped_mm(rows, w if transpose else w.transpose(1, 2), offs=ends)

    def multiply_packed(self, rows: Tensor, weight: Weight, transpose: bool) -> Tensor:
        if self.blocks is None:
            count = packed.num_blocks(self.S, self.E)
            index = rows.new_empty(4 * count, dtype=torch.int32)
            self.blocks = sorted_rows(index, self.E, count)
            self.run(packed.find_blocks(self.blocks, self.layout.groups, self.S, self.gpu))
        scale, zero, global_scale, channel_scale = weight.scales
        assert scale is not None
        parts = (weight.data, scale, zero, global_scale, channel_scale)
        w = operand("weight", *parts, weight.scheme, self.gpu)
        y = self.rows(w.K if transpose else w.N)
        self.run(packed.multiply(y, rows, w, self.blocks, transpose, self.gpu))
        return y

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """a^T b for the rows of each expert."""
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
def forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor]:
    """(out, h, index), as training.py defines them."""
    step = _Step(call)
    index = step.place()
    h = step.multiply(step.inputs(), call.w13)
    hidden = step.rows(step.I)
    step.run(activate(step.activation, hidden, h, step.b13, step.layout))
    y = step.multiply(hidden, call.w2)
    return step.summed(y, step.of_output, step.b2), h, index


@on_device
def backward(
    call: ExpertsCall, grad: Tensor, h: Tensor | None, index: Tensor, needs: list[bool]
) -> list[Tensor | None]:
    """The gradients that are needed, as training.py defines them; `h` is None if it is computed
    again.
    """
    needs_x, needs_w13, needs_w2, needs_weights, needs_b13, needs_b2 = needs
    step = _Step(call)
    step.read(index)
    layout, top_k = step.layout, step.top_k
    found: list[Any] = [None] * 6
    x = None
    if h is None:
        x = step.inputs()
        h = step.multiply(x, call.w13)
    dout = step.gathered(grad)
    dhidden = step.multiply(dout, call.w2, transpose=True)
    dh, hidden = step.rows(step.N), step.rows(step.I) if needs_w2 else None
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
    if hidden is not None:
        found[2] = step.outer(dout, hidden)
    if needs_b2:
        found[5] = step.sum_of_experts(dout, factors, step.b2)
    del dout, dhidden, hidden
    if needs_b13:
        found[4] = step.sum_of_experts(dh, None, step.b13)
    if needs_w13:
        found[1] = step.outer(dh, step.inputs() if x is None else x)
    of_input = dweights if step.of_input is not None else None
    if needs_x or of_input is not None:
        drows = step.multiply(dh, call.w13, transpose=True)
        if of_input is not None:
            step.run(dot(of_input, call.hidden_states, drows, layout, top_k))
        if needs_x:
            found[0] = step.summed(drows, step.of_input)
    if dweights is not None:
        found[3] = dweights.to(call.topk_weights.dtype)
    return found
