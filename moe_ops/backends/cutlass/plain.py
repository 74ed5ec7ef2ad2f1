"""The layer of plain bf16 experts: products of csrc/cutlass between kernels of our own. Imported
at first launch only.

Pairs are sorted by expert, without padding between experts. Tokens are copied to their rows; the
product with w13 ends with the activation, if that is gated and the weights are contiguous, else it
is a kernel of its own; the product with w2 and a weighted sum follow.
"""

from __future__ import annotations

import torch

from moe_ops.backends.cutlass import library, products
from moe_ops.backends.cutlass.sums import add_up
from moe_ops.kernels import launch
from moe_ops.kernels.activation import activated
from moe_ops.kernels.launch import run
from moe_ops.kernels.place.place import place
from moe_ops.kernels.rows.activate import activate
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.push_scatter import push_own_rows
from moe_ops.kernels.rows.scatter import scatter
from moe_ops.meta.workspace import carve
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.call import stored_transposed
from moe_ops.ops.chunks import chunks
from moe_ops.ops.exchange import gathered


def experts(a: ExpertsArgs) -> None:
    """Launch a layer of scheme ""."""
    for name in ("w13", "w2"):
        weight = getattr(a, name)
        if not (weight.is_contiguous() or stored_transposed(weight)):
            raise ValueError(
                f"{name} must be contiguous, or stored (E, K, N), for cutlass; make it so once"
            )
    library.check_addresses(a)
    library.gemms(a.hidden_states.get_device(), may_build=not a.tiers)
    for part in chunks(a):
        _run(part)


def _run(a: ExpertsArgs) -> None:
    if a.router_weight_on_input:
        a = gathered(a)
    x, (S, top_k) = a.hidden_states, (a.topk_ids.numel(), a.topk_ids.shape[1])
    device = x.get_device()
    gpu = launch.gpu(device)
    (E, N, K), I = a.w13.shape, a.w2.shape[2]  # noqa: E741
    on_input = a.topk_weights if a.router_weight_on_input else None
    before, layout = place(a.topk_ids, a.expert_map, a.index_workspace, E, S, 1, gpu)
    activation = activated(a.activation, a.alpha, a.beta, a.limit)
    bias = None if a.w13_bias is None else a.w13_bias.contiguous()
    rows = carve(a.workspace13, (S, K), torch.bfloat16)
    copies = push_own_rows(a, Operand(rows), layout, gpu)
    if copies is None:
        copies = scatter(x, Operand(rows), layout, top_k, gpu, weights=on_input)
    run([*before, copies], device, gpu)
    if activation.GATED and a.w13.is_contiguous() and a.w2.is_contiguous():
        h, y = carve(a.workspace2, (S, I), torch.bfloat16), rows
        products.activate_into(h, rows, a.w13, layout.groups, activation, bias)
    else:
        y = carve(a.workspace2, (S, N), torch.bfloat16)
        products.multiply_into(y, rows, a.w13, layout.groups)
        h = carve(a.workspace13, (S, I), torch.bfloat16)
        activates = activate(Operand(h), activation, y, layout, gpu, bias=bias, in_order=True)
        run([activates], device, gpu)
        y = carve(a.workspace2, (S, K), torch.bfloat16)
    products.multiply_into(y, h, a.w2, layout.groups)
    add_up(a, y, layout, gpu)
