"""The layer of e4m3 experts with scales of blocks and of groups: products of csrc/cutlass between
kernels of our own. Imported at first launch only.

Pairs are sorted by expert, without padding between experts. Tokens are quantized and copied to
their rows; the product with w13 ends with the activation and its quantization; the product with w2
and a weighted sum follow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends.cutlass import library, products
from moe_ops.backends.cutlass.products import Scaled
from moe_ops.backends.cutlass.schemes import grouped_bytes
from moe_ops.backends.cutlass.sums import add_up
from moe_ops.kernels import launch
from moe_ops.kernels.activation import activated
from moe_ops.kernels.launch import run
from moe_ops.kernels.place.place import place
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.push_scatter import push_own_rows, why_not
from moe_ops.kernels.rows.scatter import scatter
from moe_ops.meta.workspace import carve, cdiv, round_up
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.chunks import chunks
from moe_ops.ops.exchange import gathered


def experts(a: ExpertsArgs) -> None:
    """Launch a layer of scheme fp8_block or fp8_block:ue8m0.

    Raises ValueError for what kernels need and plans cannot check.
    """
    for name, dtype in (
        *(("w13", torch.float8_e4m3fn), ("w2", torch.float8_e4m3fn)),
        *(("w13_scale", torch.float32), ("w2_scale", torch.float32)),
    ):
        tensor = getattr(a, name)
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for cutlass; make it so once")
    library.check_addresses(a, ("w13", "w2"))
    library.gemms(a.hidden_states.get_device(), may_build=not a.tiers)
    for part in chunks(a):
        _run(part)


def _rows(buffer: Tensor, rows: int, columns: int) -> Scaled:
    """e4m3 rows in a workspace, and their scales."""
    whole = carve(buffer, (grouped_bytes(rows, columns),), torch.uint8)
    data = whole[: rows * columns].view(torch.float8_e4m3fn).view(rows, columns)
    scale = whole[round_up(rows * columns, 128) :].view(torch.float32)
    return Scaled(data, scale.view(cdiv(columns, 128), rows))


def _run(a: ExpertsArgs) -> None:
    (S, top_k), device = (a.topk_ids.numel(), a.topk_ids.shape[1]), a.out.get_device()
    gpu = launch.gpu(device)
    E, K, I = a.w2.shape  # noqa: E741
    on_input = a.topk_weights if a.router_weight_on_input else None
    before, layout = place(a.topk_ids, a.expert_map, a.index_workspace, E, S, 1, gpu)
    activation = activated(a.activation, a.alpha, a.beta, a.limit)
    rows, h = _rows(a.workspace13, S, K), _rows(a.workspace2, S, I)
    y = carve(a.workspace13, (S, K), torch.bfloat16)
    powers = a.scheme.endswith(":ue8m0")
    copied = Operand(*rows, "powers" if powers else "fp32")
    if a.router_weight_on_input or why_not(K, copied):
        a = gathered(a)
    copies = push_own_rows(a, copied, layout, gpu)
    if copies is None:
        quantized = a.hidden_states_scale
        copies = scatter(a.hidden_states, copied, layout, top_k, gpu, quantized, on_input)
    run([*before, copies], device, gpu)
    bias = None if a.w13_bias is None else a.w13_bias.contiguous()
    assert a.w13_scale is not None and a.w2_scale is not None
    w13, w2 = Scaled(a.w13, a.w13_scale), Scaled(a.w2, a.w2_scale)
    products.activate_blocks_into(h, rows, w13, layout.groups, activation, powers, bias)
    products.multiply_blocks_into(y, h, w2, layout.groups)
    add_up(a, y, layout, gpu)
