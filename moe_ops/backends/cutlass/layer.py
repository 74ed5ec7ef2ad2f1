"""The expert layer around the grouped GEMMs of csrc/cutlass. Imported at first launch only.

Pairs are sorted by expert, without padding between experts. Tokens are quantized and copied to
their rows; GEMM with w13; activation and quantization; GEMM with w2; weighted sum. The host reads
no device memory: one kernel writes the addresses and sizes that the GEMMs read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends.cutlass import blockscaled, library
from moe_ops.backends.cutlass.library import ARRAYS, Config, Gemms, GroupedGemm
from moe_ops.backends.cutlass.rows import Operand, activate, scatter
from moe_ops.backends.cutlass.schemes import BLOCK_SCALED
from moe_ops.backends.cutlass.setup import Gemm, setup
from moe_ops.kernels import launch
from moe_ops.kernels.gemm.operands import activated
from moe_ops.kernels.launch import Gpu, run
from moe_ops.kernels.permute.combine import combine_rows
from moe_ops.kernels.permute.layout import index_parts
from moe_ops.kernels.permute.place import place
from moe_ops.meta.workspace import carve, round_up
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.chunks import chunks


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_experts`."""
    M, top_k = a.topk_ids.shape
    if M == 0:
        return
    if a.scheme in BLOCK_SCALED:
        return blockscaled.experts(a)
    device = a.hidden_states.get_device()
    gemms = library.gemms(device)
    for name, tensor in (("w13", a.w13), ("w2", a.w2)):
        if tensor.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} must have dtype torch.float8_e4m3fn, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for cutlass; make it so once")
    config = library.choose(M * top_k, a.w13.shape[0], a.out.dtype)
    gpu = launch.gpu(device)
    for part in chunks(a):
        _experts(part, gemms, config, gpu, device)


def rows_in(
    buffer: Tensor,
    rows: int,
    columns: int,
    known: Tensor | None,
    scales: str,
) -> Operand:
    """The operand (rows, columns) at the start of a workspace, with a scale for each row behind it
    if none is known.
    """
    size = round_up(rows * columns, 128)
    everything = carve(buffer, (size + 4 * rows,), torch.uint8)
    data = everything[: rows * columns].view(torch.float8_e4m3fn).view(rows, columns)
    scale = everything[size:].view(torch.float32) if known is None else None
    return Operand(data, scale, known, scales)


def _known(scale: Tensor | None) -> tuple[Tensor | None, str]:
    """A known scale as kernels take it, and which SCALES of rows.py that is."""
    if scale is None:
        return None, "token"
    scale = scale.reshape(-1)
    if not scale.is_contiguous():
        scale = scale.contiguous()
    return scale, "known" if scale.numel() == 1 else "experts"


def _experts(a: ExpertsArgs, gemms: Gemms, config: Config, gpu: Gpu, device: int) -> None:
    """A layer, or a chunk of its tokens."""
    (M, top_k), (E, N, _) = a.topk_ids.shape, a.w13.shape
    rows, K, dtype = M * top_k, a.hidden_states.shape[1], a.out.dtype
    I = N // 2 if activated(a.activation, a.alpha, a.beta, a.limit).GATED else N  # noqa: E741
    arrived = a.hidden_states_scale
    known, scales = _known(a.a13_scale)
    if arrived is not None:
        scales = "given"
        known = arrived.reshape(-1) if arrived.numel() == 1 and arrived.ndim < 2 else None
    x = rows_in(a.workspace13, rows, K, known, scales)
    h = rows_in(a.workspace13, rows, I, *_known(a.a2_scale))
    gate_up = carve(a.workspace2, (rows, N), dtype)
    y = carve(a.workspace2, (rows, K), dtype)

    on_input, on_output = (
        (a.topk_weights, None) if a.router_weight_on_input else (None, a.topk_weights)
    )
    before, after = (on_input, None) if arrived is None else (None, on_input)
    launches, layout = place(a, rows, 1, gpu)
    index, at = a.index_workspace, library.parts(index_parts(rows, E).end, E)
    arrays = index[at.arrays : at.sizes].view(torch.int64)[: 2 * len(ARRAYS) * E]
    sizes = index[at.sizes : at.sizes + 6 * E]
    launches.append(
        setup(
            arrays,
            sizes,
            layout.groups,
            0,
            _gemm(x, a.w13, gate_up, a.w13_scale),
            _gemm(h, a.w2, y, a.w2_scale),
            config.swapped,
            gpu,
        )
    )
    launches.append(scatter(a, x, layout, before, gpu))
    run(launches, device, gpu)

    stream = library.stream_of(device)
    common = (gemms, config, arrays, sizes, index[at.descriptors : at.end], E, stream)
    _run(*common, 0, x, a.w13_scale)
    run([activate(a, h, gate_up, layout, after, gpu)], device, gpu)
    _run(*common, 1, h, a.w2_scale)
    run([combine_rows(a.out, y, on_output, layout, top_k)], device, gpu)


def _gemm(x: Operand, w: Tensor, d: Tensor, w_scale: Tensor | None) -> Gemm:
    """The operands of a GEMM as the setup kernel takes them."""
    assert w_scale is not None
    E, N, _ = w.shape
    scale, step = (x.scale, -1) if x.known is None else (x.known, min(x.known.numel() - 1, 1))
    return Gemm(
        x=x.data.view(torch.uint8),
        w=w.view(torch.uint8),
        d=d,
        x_scale=scale,
        w_scale=w_scale,
        N=N,
        K=x.data.shape[1],
        w_bytes=w.shape[2] * w.itemsize,
        d_bytes=d.itemsize,
        x_scale_step=step,
        w_scale_step=w_scale.numel() // E,
    )


def _run(
    gemms: Gemms,
    config: Config,
    arrays: Tensor,
    sizes: Tensor,
    descriptors: Tensor,
    E: int,
    stream: int,
    which: int,  # 0 of GEMM1, 1 of GEMM2
    x: Operand,
    w_scale: Tensor | None,
) -> None:
    """Launch a GEMM on the arrays that the setup kernel wrote."""
    start = arrays.data_ptr() + which * 8 * len(ARRAYS) * E
    addresses = {name: start + 8 * E * i for i, name in enumerate(ARRAYS)}
    vectors = (x.known is None, w_scale is not None and w_scale.numel() > E)
    if config.swapped:
        vectors = vectors[::-1]
    gemms.run(
        config.name,
        GroupedGemm(
            groups=E,
            sm_count=gemms.sm_count,
            problem_sizes=sizes.data_ptr() + which * 12 * E,
            row_scale_is_vector=vectors[0],
            column_scale_is_vector=vectors[1],
            workspace=descriptors.data_ptr() + which * library.DESCRIPTOR_BYTES,
            workspace_bytes=library.DESCRIPTOR_BYTES,
            stream=stream,
            **addresses,
        ),
    )
