"""Rows quantized before they travel to the ranks of their experts, by one kernel."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from moe_ops.kernels import launch
from moe_ops.kernels.launch import run
from moe_ops.kernels.place.routing import NO_ROUTER_WEIGHTS
from moe_ops.kernels.rows.e4m3_int8 import GROUPS, Quantized, quantize
from moe_ops.kernels.rows.scales import rows_of, scales
from moe_ops.meta.workspace import cdiv


def quantize_rows(
    q: Tensor,  # (M, K) e4m3 or int8, contiguous, written
    scale: Tensor,  # (M, ceil(K / 128)), or (M, 1): largest magnitudes; written
    x: Tensor,  # (M, K), any strides
    scheme: str,
) -> None:
    """Quantize rows as the triton backend does, with a scale of each 128 columns or of the row.

    Of one scale a row its largest magnitude is written, of which the scale is a part.

    Raises:
        RuntimeError: a CUDA graph is being captured and this was never launched before.
    """
    M, K = x.shape
    if M == 0:
        return
    device = x.get_device()
    gpu = launch.gpu(device)
    how = scales(scheme)
    by_group = how.x == "group"
    to = Quantized(
        q=q if gpu.native or q.dtype == torch.int8 else q.view(torch.uint8),
        scale=scale,
        scale_stride_m=scale.stride(0),
        scale_stride_g=scale.stride(1),
        zero=None,
        rows=M,
        T=M,
        zeros=0,
        K=K,
        BY_GROUP=by_group,
        GROUPS=GROUPS,
        NATIVE=gpu.native,
        INT8=q.dtype == torch.int8,
        POWERS=how.powers,
    )
    parts = cdiv(K, GROUPS * 128) if by_group else 1
    launches = [quantize(to, rows_of(x), NO_ROUTER_WEIGHTS, parts, gpu)]
    with torch.cuda.device(device) if device >= 0 else nullcontext():
        run(launches, device, gpu)
