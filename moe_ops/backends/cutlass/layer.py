"""The expert layer around the grouped GEMMs of csrc/cutlass. Imported at first launch only.

Pairs are sorted by expert, without padding between experts. Tokens are quantized and copied to
their rows; GEMM with w13; activation and quantization; GEMM with w2; weighted sum. The host reads
no device memory: one kernel writes the addresses and sizes that the GEMMs read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends.cutlass import library
from moe_ops.backends.cutlass.library import ARRAYS, Gemms, GroupedGemm
from moe_ops.backends.cutlass.rows import Operand, activate, scatter
from moe_ops.backends.cutlass.setup import Gemm, setup
from moe_ops.kernels import launch
from moe_ops.kernels.gemm.operands import activated
from moe_ops.kernels.launch import Gpu, run
from moe_ops.kernels.permute.combine import combine_rows
from moe_ops.kernels.permute.layout import Layout, index_parts
from moe_ops.kernels.permute.place import place, place_batches
from moe_ops.meta.workspace import carve, round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.chunks import batched_chunks, chunks


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_experts`."""
    if a.topk_ids.numel() == 0:
        return
    gemms = _gemms(a)
    for part in chunks(a):
        _experts(part, gemms)


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_batched_experts`."""
    if a.hidden_states.shape[1] == 0:
        return
    gemms = _gemms(a)
    for part in batched_chunks(a):
        _batched_experts(part, gemms)


def _gemms(a: ExpertsArgs | BatchedExpertsArgs) -> Gemms:
    """The kernels of a device. Raises ValueError for what they need and plans cannot check."""
    for name, tensor in (("w13", a.w13), ("w2", a.w2)):
        if tensor.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} must have dtype torch.float8_e4m3fn, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for cutlass; make it so once")
    return library.gemms(a.hidden_states.get_device())


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


def _input(a: ExpertsArgs | BatchedExpertsArgs, rows: int, workspace: Tensor) -> Operand:
    """The first GEMM's operand (rows, K), quantized as the call says or as it arrives."""
    known, scales = _known(a.a13_scale)
    arrived = a.hidden_states_scale
    if arrived is not None:
        one = arrived.numel() == 1 and arrived.ndim < 2
        known, scales = arrived.reshape(-1) if one else None, "given"
    return rows_in(workspace, rows, a.hidden_states.shape[-1], known, scales)


def _experts(a: ExpertsArgs, gemms: Gemms) -> None:
    """A layer, or a chunk of its tokens."""
    x, arrived, (M, top_k) = a.hidden_states, a.hidden_states_scale, a.topk_ids.shape
    (E, N, K), rows, device, dtype = a.w13.shape, M * top_k, x.get_device(), a.out.dtype
    gpu, activation = launch.gpu(device), activated(a.activation, a.alpha, a.beta, a.limit)
    I = N // 2 if activation.GATED else N  # noqa: E741
    permuted = _input(a, rows, a.workspace13)
    h = rows_in(a.workspace13, rows, I, *_known(a.a2_scale))
    gate_up = carve(a.workspace2, (rows, N), dtype)
    y = carve(a.workspace2, (rows, K), dtype)

    weights = a.topk_weights
    on_input, on_output = (weights, None) if a.router_weight_on_input else (None, weights)
    before, after = (on_input, None) if arrived is None else (None, on_input)
    launches, layout = place(a, rows, 1, gpu)
    start = index_parts(rows, E).end
    both = _Both(a, gemms, layout, 0, start, (permuted, gate_up), (h, y), gpu)
    launches += (both.setup, scatter(x, arrived, permuted, layout, top_k, before, gpu))
    run(launches, device, gpu)
    both.run(0)
    run([activate(activation, h, gate_up, layout, after, gpu)], device, gpu)
    both.run(1)
    run([combine_rows(a.out, y, on_output, layout, top_k)], device, gpu)


def _batched_experts(a: BatchedExpertsArgs, gemms: Gemms) -> None:
    """Batches of rows, or a chunk of experts."""
    x, arrived, (E, T, K) = a.hidden_states, a.hidden_states_scale, a.hidden_states.shape
    N, rows, device, dtype = a.w13.shape[1], E * T, x.get_device(), a.out.dtype
    gpu, activation = launch.gpu(device), activated(a.activation, a.alpha, a.beta, a.limit)
    I = N // 2 if activation.GATED else N  # noqa: E741
    permuted = _input(a, rows, a.workspace13)
    h = rows_in(a.workspace13, rows, I, *_known(a.a2_scale))
    gate_up = carve(a.workspace2, (rows, N), dtype)
    in_place = a.out.is_contiguous()
    y = a.out.view(rows, K) if in_place else carve(a.workspace2, (rows, K), dtype)

    first, layout = place_batches(a, T, gpu)
    both = _Both(a, gemms, layout, T, E, (permuted, gate_up), (h, y), gpu)
    run([first, both.setup, scatter(x, arrived, permuted, layout, 1, None, gpu)], device, gpu)
    both.run(0)
    run([activate(activation, h, gate_up, layout, None, gpu)], device, gpu)
    both.run(1)
    if not in_place:
        run([combine_rows(a.out, y.view(E, T, K), None, layout, 1)], device, gpu)


class _Both:
    """The two GEMMs of a layer: the launch that sets them up, then each of them."""

    def __init__(
        self,
        a: ExpertsArgs | BatchedExpertsArgs,
        gemms: Gemms,
        layout: Layout,
        R: int,  # rows that each expert has room for; 0: those of all follow one another
        start: int,  # of what is free in the index workspace
        first: tuple[Operand, Tensor],  # input and output of each
        second: tuple[Operand, Tensor],
        gpu: Gpu,
    ):
        E, index = a.w13.shape[0], a.index_workspace
        at = library.parts(start, E)
        self.arrays = index[at.arrays : at.sizes].view(torch.int64)[: 2 * len(ARRAYS) * E]
        self.sizes = index[at.sizes : at.sizes + 6 * E]
        self.descriptors = index[at.descriptors : at.end]
        self.gemms, self.config, self.E = gemms, library.choose(a.out.dtype), E
        self.stream = library.stream_of(a.out.get_device())
        self.operands = (first[0], a.w13_scale), (second[0], a.w2_scale)
        self.setup = setup(
            self.arrays,
            self.sizes,
            layout.groups,
            R,
            _gemm(first[0], a.w13, first[1], a.w13_scale),
            _gemm(second[0], a.w2, second[1], a.w2_scale),
            self.config.swapped,
            gpu,
        )

    def run(self, which: int) -> None:
        """Launch the first (0) or the second (1) on the arrays that the setup kernel wrote."""
        (x, w_scale), E = self.operands[which], self.E
        start = self.arrays.data_ptr() + which * 8 * len(ARRAYS) * E
        vectors = (x.known is None, w_scale is not None and w_scale.numel() > E)
        if self.config.swapped:
            vectors = vectors[::-1]
        gemm = GroupedGemm(
            groups=E,
            sm_count=self.gemms.sm_count,
            problem_sizes=self.sizes.data_ptr() + which * 12 * E,
            row_scale_is_vector=vectors[0],
            column_scale_is_vector=vectors[1],
            workspace=self.descriptors.data_ptr() + which * library.DESCRIPTOR_BYTES,
            workspace_bytes=library.DESCRIPTOR_BYTES,
            stream=self.stream,
            **{name: start + 8 * E * i for i, name in enumerate(ARRAYS)},
        )
        self.gemms.run(self.config.name, gemm)


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
