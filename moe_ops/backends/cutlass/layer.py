"""The expert layer around the grouped GEMMs of csrc/cutlass. Imported at first launch only.

Pairs are sorted by expert, without padding between experts. Tokens are quantized and copied to
their rows; GEMM with w13; activation and quantization; GEMM with w2; weighted sum. The host reads
no device memory: one kernel writes the addresses and sizes that the GEMMs read. Where all rows
share a dynamic scale, the largest magnitude is found before each quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.backends.cutlass import groups, library, operands, plain
from moe_ops.backends.cutlass.grouped import Grouped, Weights
from moe_ops.backends.cutlass.library import Gemms
from moe_ops.backends.cutlass.schemes import (
    BLOCKS,
    GROUPS,
    INT4,
    PLAIN,
    ROWS,
    kind_of,
    one_scale,
    scale_rows,
)
from moe_ops.kernels import launch
from moe_ops.kernels.activation import activated
from moe_ops.kernels.comm.push import sum_ranks
from moe_ops.kernels.launch import Gpu, Launch, run
from moe_ops.kernels.place.layout import Layout, index_parts
from moe_ops.kernels.place.place import place, place_batches
from moe_ops.kernels.rows.activate import activate
from moe_ops.kernels.rows.combine import combine_rows
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.scatter import scatter
from moe_ops.kernels.rows.shared import amax_of
from moe_ops.meta.workspace import carve
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.chunks import batched_chunks, chunks
from moe_ops.ops.exchange import gathered

E4M3 = torch.float8_e4m3fn


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_experts`."""
    if a.topk_ids.numel() == 0:
        return
    of_kind = {PLAIN: plain.experts, GROUPS: groups.experts}.get(kind_of(a.scheme) or "")
    if of_kind is not None:
        of_kind(a)
    else:
        a = gathered(a)
        _run(a, a.topk_ids.numel(), a.global_experts, chunks(a), _Pairs)


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_batched_experts`."""
    E, T, _ = a.hidden_states.shape
    if T:
        _run(a, E * T, E, batched_chunks(a), _Batches)


class Whole(NamedTuple):
    """What the parts of a call share."""

    kind: str
    gemms: Gemms
    kernel: str
    gpu: Gpu
    device: int
    # largest magnitudes over all rows, from which one dynamic scale follows, or None
    x: Tensor | None  # (NUM_PARTIALS,) fp32
    h: Tensor | None  # (1,) fp32


def _run(
    a: Any, num_rows: int, num_experts: int, parts: list[Any], layer_of: Callable[..., _Layer]
) -> None:
    """Run the parts of a call, one after the other. Where all rows share one dynamic scale of h,
    that is known once the first GEMM has run for all of them.
    """
    whole = _whole(a, num_rows, num_experts)
    layers = [layer_of(part, whole) for part in parts]
    if whole.h is not None:
        for layer in layers:
            layer.first()
            layer.find_largest()
    for layer in layers:
        if whole.h is None or len(layers) > 1:  # else the first GEMM has run already
            layer.first()
        layer.second()


def _whole(a: ExpertsArgs | BatchedExpertsArgs, num_rows: int, num_experts: int) -> Whole:
    """What the parts of a call share, which has so many rows of so many experts. Raises ValueError
    for what kernels need and plans cannot check.
    """
    kind = kind_of(a.scheme)
    assert kind is not None
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        if kind == ROWS and name in ("w13", "w2") and getattr(a, name).dtype != E4M3:
            raise ValueError(f"{name} must have dtype {E4M3}, got {getattr(a, name).dtype}")
        if not getattr(a, name).is_contiguous():
            raise ValueError(f"{name} must be contiguous for cutlass; make it so once")
    library.check_addresses(a)
    device = a.hidden_states.get_device()
    gemms, gpu = library.gemms(device, may_build=not a.tiers), launch.gpu(device)
    many = num_rows, num_experts
    kernel = library.kernel_of(a.scheme, gemms.architecture, a.out.dtype, *many)
    x, h = None, None
    if one_scale(a.scheme):
        found = library.shared(a.index_workspace)
        x, h = [
            whole if known is None else None
            for known, whole in ((a.a13_scale, found.x), (a.a2_scale, found.h))
        ]
        if x is not None and a.hidden_states_scale is None:
            run([amax_of(a, found, gpu)], device, gpu)  # and h becomes zero
        elif h is not None:
            h.zero_()
    return Whole(kind, gemms, kernel, gpu, device, x, h)


def _flat(scale: Tensor | None) -> Tensor | None:
    """A known scale as kernels take it."""
    if scale is None:
        return None
    scale = scale.reshape(-1)
    return scale if scale.is_contiguous() else scale.contiguous()


class _Layer:
    """A layer, or a chunk of it, in two halves: through the first GEMM, and the rest."""

    def __init__(
        self,
        a: ExpertsArgs | BatchedExpertsArgs,
        num_rows: int,
        layout: Layout,
        R: int,  # rows that each expert has room for; 0: those of all follow one another
        start: int,  # of what is free in the index workspace
        y: Tensor,  # (rows, K)
        whole: Whole,
    ):
        self.a, self.whole, self.layout, self.y, self.num_rows = a, whole, layout, y, num_rows
        N, K = a.w13.shape[1], a.out.shape[-1]
        self.activation = activated(a.activation, a.alpha, a.beta, a.limit)
        I = N // 2 if self.activation.GATED else N  # noqa: E741
        self.grouped = Grouped(a, whole.gemms, whole.kernel, start)
        arrived = a.hidden_states_scale
        self.x = self._operand(0, K, a.a13_scale, whole.x, a.w13_global_scale, arrived)
        self.h = self._operand(1, I, a.a2_scale, whole.h, a.w2_global_scale)
        self.gate_up = carve(a.workspace2, (num_rows, N), a.out.dtype)
        w13, w2 = a.w13_scale, a.w2_scale
        assert w13 is not None and w2 is not None
        weights = Weights(a.w13, w13), Weights(a.w2, w2)
        if whole.kind == INT4:
            of_rows = a.w13_channel_scale, a.w2_channel_scale
            assert of_rows[0] is not None and of_rows[1] is not None
            weights = Weights(a.w13, of_rows[0], w13), Weights(a.w2, of_rows[1], w2)
        first, second = (self.x, weights[0], self.gate_up), (self.h, weights[1], y)
        self.setup = self.grouped.setup(layout, R, first, second, whole.gpu)

    before: list[Launch]  # place the rows
    weights_before: Tensor | None = None  # that multiply x before it is quantized
    weights_after: Tensor | None = None  # that multiply the first GEMM's output
    top_k = 1

    def _operand(
        self,
        which: int,  # 0 of the first GEMM, 1 of the second
        columns: int,
        known: Tensor | None,
        largest: Tensor | None,
        w_global: Tensor | None,
        arrived: Tensor | None = None,  # scales of rows that arrive quantized
    ) -> Operand:
        """The rows at the start of workspace13, with their scales behind them."""
        a, known, buffer = self.a, _flat(known), self.a.workspace13
        if self.whole.kind != BLOCKS:
            return operands.rows_in(buffer, self.num_rows, columns, known, largest, arrived)
        assert isinstance(a, ExpertsArgs)
        M, top_k = a.topk_ids.shape
        of_scales = scale_rows(M, top_k, a.w13.shape[0])
        return operands.tiles_in(
            buffer, self.num_rows, of_scales, columns, a.scheme,
            known, largest, w_global, self.grouped.alphas[which],
        )  # fmt: skip

    def first(self) -> None:
        """Quantize the rows, and run the first GEMM."""
        a, gpu = self.a, self.whole.gpu
        scale = None if self.x.scale is None else a.hidden_states_scale
        scattered = scatter(
            a.hidden_states, self.x, self.layout, self.top_k, gpu, scale, self.weights_before
        )
        run([*self.before, self.setup, scattered], self.whole.device, gpu)
        self.grouped.run(0)

    def find_largest(self) -> None:
        """Raise the largest magnitude of h that all rows share."""
        self._activate(raises=True)

    def _activate(self, raises: bool = False) -> None:
        gpu, divisors = self.whole.gpu, self.a.w13_global_scale
        launched = activate(
            *(self.h, self.activation, self.gate_up, self.layout, gpu, self.weights_after),
            divisors=None if divisors is None or divisors.dim() == 1 else divisors,
            raises=raises,
        )
        run([launched], self.whole.device, gpu)

    def second(self) -> None:
        """Activate, run the second GEMM, and write the output."""
        self._activate()
        self.grouped.run(1)
        run(self.after(), self.whole.device, self.whole.gpu)

    def after(self) -> list[Launch]:
        """What follows the second GEMM."""
        raise NotImplementedError


class _Pairs(_Layer):
    """Tokens, whose pairs are sorted by expert."""

    def __init__(self, a: ExpertsArgs, whole: Whole):
        num_rows, K = a.topk_ids.numel(), a.out.shape[1]
        E, index = a.w13.shape[0], a.index_workspace
        self.before, layout = place(a.topk_ids, a.expert_map, index, E, num_rows, 1, whole.gpu)
        y = carve(a.workspace2, (num_rows, K), a.out.dtype)
        start = index_parts(num_rows, E).end
        super().__init__(a, num_rows, layout, 0, start, y, whole)
        self.top_k = a.topk_ids.shape[1]
        self.weights_on_output: Tensor | None = a.topk_weights
        if a.router_weight_on_input:
            self.weights_on_output = None
            if a.hidden_states_scale is None:
                self.weights_before = a.topk_weights
            else:
                self.weights_after = a.topk_weights

    def after(self) -> list[Launch]:
        assert isinstance(self.a, ExpertsArgs)
        if self.a.exchange:
            return [sum_ranks(self.a, self.y, self.layout.rows)]
        out, weights = self.a.out, self.weights_on_output
        return [combine_rows(out, self.y, weights, self.layout, self.top_k)]


class _Batches(_Layer):
    """Batches (E, T, ..), whose rows stay where they are."""

    def __init__(self, a: BatchedExpertsArgs, whole: Whole):
        E, T, K = a.out.shape
        first, layout = place_batches(a, T, whole.gpu)
        self.before = [first]
        self.in_place = a.out.is_contiguous() and library.aligned(a.out)
        where = a.out if self.in_place else carve(a.workspace2, (E, T, K), a.out.dtype)
        super().__init__(a, E * T, layout, T, E, where.view(E * T, K), whole)

    def after(self) -> list[Launch]:
        if self.in_place:
            return []
        out = self.a.out
        return [combine_rows(out, self.y.view(out.shape), None, self.layout, 1)]
