"""The steps of a layer of experts around two grouped products: rows are placed and moved to their
experts, multiplied with w13, activated, multiplied with w2, and summed. Imported at first launch
only.

A backend provides the products, and says which rows they read and write. A product with w13 may
end with the activation. The host reads no device memory: sizes follow from M, top_k and E.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from moe_ops.kernels import launch
from moe_ops.kernels.activation import Activated, activated
from moe_ops.kernels.comm.push import sum_ranks
from moe_ops.kernels.launch import Launch, run
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.place.place import place, place_batches
from moe_ops.kernels.rows.activate import activate
from moe_ops.kernels.rows.combine import combine_rows, expert_blocks
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.push_scatter import push_own_rows, why_not
from moe_ops.kernels.rows.scatter import scatter
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.exchange import gathered, opened

AnyArgs = ExpertsArgs | BatchedExpertsArgs


class LayerProducts(Protocol):
    """The two grouped products of a layer, or of a chunk of it, and the rows between which they
    stand, in its workspaces. A step reads what the step before it wrote: others may share memory.
    """

    @property
    def x(self) -> Operand:
        """(rows, K), which the product with w13 reads."""

    @property
    def gate_up(self) -> Tensor | None:
        """(rows, N), which it writes; None: it activates, and writes h."""

    @property
    def h(self) -> Operand:
        """(rows, I), which the product with w2 reads."""

    @property
    def y(self) -> Tensor:
        """(rows, K), which it writes."""

    def prepare(self, layout: Layout) -> list[Launch]:
        """Launches between those that place rows and the products."""

    def first(self, layout: Layout) -> None:
        """Launch the product with w13."""

    def second(self, layout: Layout) -> None:
        """Launch the product with w2."""


def activation_of(a: AnyArgs) -> Activated:
    """The activation of a call, as kernels take it."""
    return activated(a.options.activation)


def contiguous(t: Tensor | None) -> Tensor | None:
    """The tensor with rows that follow one another, or None."""
    return None if t is None else t.contiguous()


class Steps:
    """A layer, or a chunk of it, in two halves: through the product with w13, and the rest."""

    layout: Layout
    before: list[Launch]  # place the rows
    weights: Tensor | None = None  # (S, 1) that multiply the output of the product with w13
    sorted = False  # rows of pairs follow one another without padding

    def __init__(self, a: AnyArgs, products: LayerProducts):
        self.a, self.products = a, products
        self.device = a.out.get_device()
        self.gpu = launch.gpu(self.device)

    def run(self, *launches: Launch) -> None:
        if launches:
            run(launches, self.device, self.gpu)

    def moved(self) -> list[Launch]:
        """Launches that move rows to their experts."""
        raise NotImplementedError

    def first(self) -> None:
        """Move the rows, and multiply them with w13."""
        products = self.products
        moved = self.moved()
        self.run(*self.before, *products.prepare(self.layout), *moved)
        products.first(self.layout)

    def activate(self, raises: bool = False) -> None:
        """Activate the product with w13; or find the largest magnitude of that alone."""
        a, products = self.a, self.products
        if products.gate_up is None:
            return
        divisors = a.w13_global_scale  # of rows of w13, unless alpha has one of each expert
        launched = activate(
            *(products.h, activation_of(a), products.gate_up, self.layout, self.gpu),
            weights=self.weights,
            bias=contiguous(a.w13_bias),
            divisors=None if divisors is None or divisors.dim() == 1 else divisors,
            in_order=self.sorted and self.weights is None and not products.h.scales,
            raises=raises,
        )
        self.run(launched)

    def second(self) -> None:
        """Activate, multiply with w2, and write the output."""
        self.activate()
        self.products.second(self.layout)
        self.finish()

    def finish(self) -> None:
        """Write the output."""
        raise NotImplementedError


class PairSteps(Steps):
    """Tokens, whose pairs are sorted by expert."""

    a: ExpertsArgs

    def __init__(
        self,
        a: ExpertsArgs,
        products: LayerProducts,
        alignment: int = 1,  # of the first row of each expert
        size: int | None = None,  # rows that the products' operands have; None: one for each pair
        weighs_after: bool = False,
    ):
        """`weighs_after`: router weights that scale the input multiply the output of the product
        with w13 instead, which is linear in the input, so that they are applied in fp32 without
        rounding.
        """
        super().__init__(a, products)
        ids, E = a.topk_ids, a.w13.shape[0]
        size = ids.numel() if size is None else size
        self.sorted = alignment == 1
        self.before, self.layout = place(
            ids, a.expert_map, a.index_workspace, E, size, alignment, self.gpu
        )
        self.weights_before = self.weights_of_output = None
        if not a.options.router_weight_on_input:
            self.weights_of_output = a.topk_weights
        elif weighs_after:
            self.weights = a.topk_weights
        else:
            self.weights_before = a.topk_weights

    def moved(self) -> list[Launch]:
        a, x, layout = self.a, self.products.x, self.layout
        if a.options.router_weight_on_input or why_not(a.out.shape[1], x):
            a = gathered(a)
        copies = push_own_rows(a, x, layout, self.gpu)
        if copies is None:
            scale = None if x.scale is None else a.hidden_states_scale
            top_k, weights = a.topk_ids.shape[1], self.weights_before
            copies = scatter(a.hidden_states, x, layout, top_k, self.gpu, scale, weights)
        return [copies]

    def finish(self) -> None:
        """For each token the sum of its rows, plus biases of w2, times router weights unless these
        were on the input; over all ranks, too, in a call with an exchange.
        """
        a, y, layout = self.a, self.products.y, self.layout
        if a.options.exchange and a.w2_bias is None:
            return self.run(sum_ranks(a, y, layout.rows))
        of_experts = contiguous(a.w2_bias), expert_blocks(a)
        top_k = a.topk_ids.shape[1]
        self.run(combine_rows(a.out, y, self.weights_of_output, layout, top_k, *of_experts))
        if a.options.exchange:
            opened(a).add()


class BatchSteps(Steps):
    """Batches (E, T, ..), whose rows stay in their order. Each expert has room for R rows."""

    a: BatchedExpertsArgs

    def __init__(
        self,
        a: BatchedExpertsArgs,
        products: LayerProducts,
        R: int,
        x_in_place: bool = False,
        y_in_place: bool = False,
    ):
        """`x_in_place`: the products read hidden_states. `y_in_place`: they write out."""
        super().__init__(a, products)
        first, self.layout = place_batches(a, R, self.gpu)
        self.before, self.in_place = [first], (x_in_place, y_in_place)

    def moved(self) -> list[Launch]:
        a, x = self.a, self.products.x
        if self.in_place[0]:
            return []
        scale = None if x.scale is None else a.hidden_states_scale
        return [scatter(a.hidden_states, x, self.layout, 1, self.gpu, scale)]

    def finish(self) -> None:
        if not self.in_place[1]:
            self.run(combine_rows(self.a.out, self.products.y, None, self.layout, 1))


def run_steps(layers: Sequence[Steps], shares_scale: bool = False) -> None:
    """Run the chunks of a layer, one after the other.

    Args:
        shares_scale: all rows of h share one dynamic scale, which is known once the product with
            w13 has run for all chunks.
    """
    if shares_scale:
        for layer in layers:
            layer.first()
            layer.activate(raises=True)
    for layer in layers:
        if not shares_scale or len(layers) > 1:  # else the first product has run already
            layer.first()
        layer.second()
