"""The expert layer around the grouped GEMMs of csrc/cutlass. Imported at first launch only.

Pairs are sorted by expert, without padding between experts. Tokens are quantized and copied to
their rows; GEMM with w13; activation and quantization; GEMM with w2; weighted sum. The host reads
no device memory: one kernel writes the addresses and sizes that the GEMMs read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.cutlass import blockscaled, library
from moe_ops.backends.cutlass.library import ARRAYS, Gemms, GroupedGemm
from moe_ops.backends.cutlass.rows import Operand, activate, scatter
from moe_ops.backends.cutlass.schemes import BLOCK_SCALED
from moe_ops.backends.cutlass.setup import Gemm, setup
from moe_ops.kernels import launch
from moe_ops.kernels.gemm.operands import activated
from moe_ops.kernels.launch import Gpu, Launch, run
from moe_ops.kernels.permute.combine import combine_rows
from moe_ops.kernels.permute.layout import Layout, index_parts
from moe_ops.kernels.permute.place import place, place_batches
from moe_ops.kernels.quantize.scales import Shared
from moe_ops.kernels.quantize.shared import amax_of
from moe_ops.meta.workspace import carve, round_up
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.chunks import batched_chunks, chunks


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_experts`."""
    if a.scheme in BLOCK_SCALED:
        blockscaled.experts(a)
    elif a.topk_ids.numel():
        _run(a, chunks(a), _Pairs)


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_batched_experts`."""
    if a.hidden_states.shape[1]:
        _run(a, batched_chunks(a), _Batches)


def _run(a: Any, parts: list[Any], layer_of: Callable[..., _Layer]) -> None:
    """Run the parts of a call, one after the other. Where all rows share one dynamic scale, that
    of h is known once the first GEMM has run for all of them.
    """
    gemms, device, shared = _gemms(a), a.hidden_states.get_device(), None
    gpu = launch.gpu(device)
    if library.one_scale(a.scheme):
        shared = library.shared(a.index_workspace)
        if a.hidden_states_scale is None:
            run([amax_of(a, shared, gpu)], device, gpu)
        else:
            shared.h.zero_()
        for part in parts:
            layer = layer_of(part, gemms, gpu, shared)
            layer.first()
            layer.find_largest()
        if len(parts) == 1:
            layer.second()
            return
    for part in parts:
        layer = layer_of(part, gemms, gpu, shared)
        layer.first()
        layer.second()


def _gemms(a: ExpertsArgs | BatchedExpertsArgs) -> Gemms:
    """The kernels of a device. Raises ValueError for what they need and plans cannot check."""
    for name, tensor in (("w13", a.w13), ("w2", a.w2)):
        if tensor.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} must have dtype torch.float8_e4m3fn, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for cutlass; make it so once")
    library.check_addresses(a)
    return library.gemms(a.hidden_states.get_device(), may_build=not a.tiers)


def rows_in(buffer: Tensor, rows: int, columns: int, known: Tensor | None, scales: str) -> Operand:
    """The operand (rows, columns) at the start of a workspace, with the scales that are written
    behind it.
    """
    size = round_up(rows * columns, 128)
    everything = carve(buffer, (size + 4 * rows,), torch.uint8)
    data = everything[: rows * columns].view(torch.float8_e4m3fn).view(rows, columns)
    scale = everything[size:].view(torch.float32)
    if scales == "tensor":
        return Operand(data, scale[:1], known, scales)
    return Operand(data, scale if known is None else None, known, scales)


def _known(scale: Tensor | None) -> tuple[Tensor | None, str]:
    """A known scale as kernels take it, and which SCALES of rows.py that is."""
    if scale is None:
        return None, "token"
    scale = scale.reshape(-1)
    if not scale.is_contiguous():
        scale = scale.contiguous()
    return scale, "known" if scale.numel() == 1 else "experts"


class _Layer:
    """A layer, or a chunk of it, in two halves: through the first GEMM, and the rest."""

    def __init__(
        self,
        a: ExpertsArgs | BatchedExpertsArgs,
        rows: int,
        layout: Layout,
        R: int,  # rows that each expert has room for; 0: those of all follow one another
        start: int,  # of what is free in the index workspace
        y: Tensor,  # (rows, K)
        gemms: Gemms,
        gpu: Gpu,
        shared: Shared | None,
    ):
        self.a, self.gpu, self.layout, self.shared, self.y = a, gpu, layout, shared, y
        self.device, N = a.hidden_states.get_device(), a.w13.shape[1]
        self.activation = activated(a.activation, a.alpha, a.beta, a.limit)
        I = N // 2 if self.activation.GATED else N  # noqa: E741
        known, scales = _known(a.a13_scale)
        of_h = _known(a.a2_scale)
        if shared is not None:
            known, scales, of_h = shared.x, "tensor", (shared.h, "tensor")
        arrived = a.hidden_states_scale
        if arrived is not None:
            one = arrived.numel() == 1 and arrived.ndim < 2
            known, scales = arrived.reshape(-1) if one else None, "given"
        self.x = rows_in(a.workspace13, rows, a.hidden_states.shape[-1], known, scales)
        self.h = rows_in(a.workspace13, rows, I, *of_h)
        self.gate_up = carve(a.workspace2, (rows, N), a.out.dtype)
        self.both = _Both(a, gemms, layout, R, start, (self.x, self.gate_up), (self.h, y), gpu)

    before: list[Launch]  # place the rows
    weights_before: Tensor | None = None  # that multiply x before it is quantized
    weights_after: Tensor | None = None  # that multiply the first GEMM's output
    top_k = 1

    def first(self) -> None:
        """Quantize the rows, and run the first GEMM."""
        a, gpu = self.a, self.gpu
        rows = scatter(
            a.hidden_states, a.hidden_states_scale, self.x, self.layout, self.top_k,
            self.weights_before, gpu,
        )  # fmt: skip
        run([*self.before, self.both.setup, rows], self.device, gpu)
        self.both.run(0)

    def find_largest(self) -> None:
        """Raise the largest magnitude of h that all rows share."""
        self._activate(self.h._replace(scales="amax"))

    def _activate(self, h: Operand) -> None:
        launched = activate(
            self.activation, h, self.gate_up, self.layout, self.weights_after, self.gpu
        )
        run([launched], self.device, self.gpu)

    def second(self) -> None:
        """Activate, run the second GEMM, and write the output."""
        self._activate(self.h)
        self.both.run(1)
        run(self.after(), self.device, self.gpu)

    def after(self) -> list[Launch]:
        """What follows the second GEMM."""
        raise NotImplementedError


class _Pairs(_Layer):
    """Tokens, whose pairs are sorted by expert."""

    def __init__(self, a: ExpertsArgs, gemms: Gemms, gpu: Gpu, shared: Shared | None):
        rows, (E, _, K) = a.topk_ids.numel(), a.w13.shape
        self.before, layout = place(a, rows, 1, gpu)
        y = carve(a.workspace2, (rows, K), a.out.dtype)
        super().__init__(a, rows, layout, 0, index_parts(rows, E).end, y, gemms, gpu, shared)
        self.top_k = a.topk_ids.shape[1]
        self.weights_on_output: Tensor | None = a.topk_weights
        if a.router_weight_on_input:
            self.weights_on_output = None
            if a.hidden_states_scale is None:
                self.weights_before = a.topk_weights
            else:
                self.weights_after = a.topk_weights

    def after(self) -> list[Launch]:
        out, weights = self.a.out, self.weights_on_output
        return [combine_rows(out, self.y, weights, self.layout, self.top_k)]


class _Batches(_Layer):
    """Batches (E, T, ..), whose rows stay where they are."""

    def __init__(self, a: BatchedExpertsArgs, gemms: Gemms, gpu: Gpu, shared: Shared | None):
        E, T, K = a.out.shape
        first, layout = place_batches(a, T, gpu)
        self.before = [first]
        self.in_place = a.out.is_contiguous() and library.aligned(a.out)
        where = a.out if self.in_place else carve(a.workspace2, (E, T, K), a.out.dtype)
        y = where.view(E * T, K)
        super().__init__(a, E * T, layout, T, E, y, gemms, gpu, shared)

    def after(self) -> list[Launch]:
        if self.in_place:
            return []
        out = self.a.out
        return [combine_rows(out, self.y.view(out.shape), None, self.layout, 1)]


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
        self.gemms, self.kernel, self.E = gemms, library.kernel_of(a.out.dtype), E
        self.stream = library.stream_of(a.out.get_device())
        self.operands = (first[0], a.w13_scale), (second[0], a.w2_scale)
        self.setup = setup(
            self.arrays,
            self.sizes,
            layout.groups,
            R,
            _gemm(first[0], a.w13, first[1], a.w13_scale),
            _gemm(second[0], a.w2, second[1], a.w2_scale),
            gpu,
        )

    def run(self, which: int) -> None:
        """Launch the first (0) or the second (1) on the arrays that the setup kernel wrote."""
        (x, w_scale), E = self.operands[which], self.E
        start = self.arrays.data_ptr() + which * 8 * len(ARRAYS) * E
        vectors = (x.of_gemm[1] < 0, w_scale is not None and w_scale.numel() > E)
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
        self.gemms.run(self.kernel, gemm)


def _gemm(x: Operand, w: Tensor, d: Tensor, w_scale: Tensor | None) -> Gemm:
    """The operands of a GEMM as the setup kernel takes them."""
    assert w_scale is not None
    E, N, _ = w.shape
    scale, step = x.of_gemm
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
