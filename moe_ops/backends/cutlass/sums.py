"""The last step of a layer: weighted sums of the rows of pairs, over ranks, too, in calls with an
exchange. Imported at first launch only.
"""

from __future__ import annotations

from torch import Tensor

from moe_ops.kernels.comm.push import sum_ranks
from moe_ops.kernels.launch import Gpu, run
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.rows.combine import combine_rows, expert_blocks
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.exchange import opened


def add_up(
    a: ExpertsArgs,
    y: Tensor,  # (S, K): rows of pairs
    layout: Layout,
    gpu: Gpu,
) -> None:
    """Write `a.out`: for each token the sum of its rows, plus biases of w2, times router weights
    unless these were on the input.
    """
    device = a.out.get_device()
    if a.exchange and a.w2_bias is None:
        run([sum_ranks(a, y, layout.rows)], device, gpu)
        return
    bias = None if a.w2_bias is None else a.w2_bias.contiguous()
    weights = None if a.router_weight_on_input else a.topk_weights
    top_k = a.topk_ids.shape[1]
    run([combine_rows(a.out, y, weights, layout, top_k, bias, expert_blocks(a))], device, gpu)
    if a.exchange:
        opened(a).add()
