"""Products of csrc/cutlass in the steps of a layer. Imported at first launch only.

Pairs are sorted by expert, without padding between experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.backends.cutlass import library, operands, products
from moe_ops.backends.cutlass.grouped import Grouped, Weights
from moe_ops.backends.cutlass.products import Scaled
from moe_ops.backends.cutlass.schemes import (
    BLOCKS,
    GROUPS,
    INT4,
    PLAIN,
    ROWS,
    ends_products,
    kind_of,
    one_scale,
    scale_rows,
)
from moe_ops.kernels import launch
from moe_ops.kernels.launch import Launch, run
from moe_ops.kernels.place.layout import Layout, index_parts
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.scales import Shared
from moe_ops.meta.workspace import carve
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs
from moe_ops.ops.call import stored_transposed
from moe_ops.ops.chunks import batched_chunks, chunks
from moe_ops.ops.exchange import gathered
from moe_ops.pipeline.gathered import amax_of
from moe_ops.pipeline.layer import (
    AnyArgs,
    BatchSteps,
    PairSteps,
    Steps,
    activation_of,
    contiguous,
    run_steps,
)

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_experts`."""
    if a.topk_ids.numel() == 0:
        return
    kind = _check(a)
    gemms = library.gemms(a.hidden_states.get_device(), may_build=not a.options.tiers_text)
    if kind in (PLAIN, GROUPS):
        of_kind = PlainProducts if kind == PLAIN else GroupsProducts
        return run_steps([PairSteps(part, of_kind(part)) for part in chunks(a)])
    a, pairs = gathered(a), a.topk_ids.numel()
    kernel = library.kernel_of(a.scheme, gemms.architecture, a.out.dtype, pairs, a.global_experts)
    shared, layers = _shared(a), []
    for part in chunks(a):
        size, (K, E) = part.topk_ids.numel(), (a.out.shape[1], a.w13.shape[0])
        y = carve(part.workspace2, (size, K), a.out.dtype)
        start = index_parts(size, E).end
        multiplied = SetUpProducts(part, Grouped(part, gemms, kernel, start), 0, y, shared)
        arrived = a.hidden_states_scale is not None
        layers.append(PairSteps(part, multiplied, weighs_after=arrived))
    _run(a, layers, shared)


def batched_experts(a: BatchedExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_batched_experts`."""
    E, T, K = a.out.shape
    if T == 0:
        return
    _check(a)
    gemms = library.gemms(a.hidden_states.get_device(), may_build=not a.options.tiers_text)
    kernel = library.kernel_of(a.scheme, gemms.architecture, a.out.dtype, E * T, E)
    shared, layers = _shared(a), []
    for part in batched_chunks(a):
        out, E = part.out, part.out.shape[0]
        in_place = out.is_contiguous() and library.aligned(out)
        y = out if in_place else carve(part.workspace2, (E, T, K), out.dtype)
        grouped = Grouped(part, gemms, kernel, E)
        multiplied = SetUpProducts(part, grouped, T, y.view(E * T, K), shared)
        layers.append(BatchSteps(part, multiplied, T, y_in_place=in_place))
    _run(a, layers, shared)


def _check(a: AnyArgs) -> str:
    """The kind of a call. Raises ValueError for what kernels need and plans cannot check."""
    kind = kind_of(a.scheme)
    assert kind is not None
    dtypes = {GROUPS: (E4M3, torch.float32), ROWS: (E4M3, None)}.get(kind, (None, None))
    for name in ("w13", "w2") if kind == PLAIN else ("w13", "w2", "w13_scale", "w2_scale"):
        tensor, dtype = getattr(a, name), dtypes[name.endswith("_scale")]
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
        if kind == PLAIN and not (tensor.is_contiguous() or stored_transposed(tensor)):
            raise ValueError(
                f"{name} must be contiguous, or stored (E, K, N), for cutlass; make it so once"
            )
        if kind != PLAIN and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for cutlass; make it so once")
    if kind == GROUPS:
        library.check_addresses(a, ("w13", "w2"))
    else:
        library.check_addresses(a)
    return kind


class PlainProducts:
    """Products in bf16. The first ends with the activation, if there is such a kernel and the
    weights are contiguous.
    """

    def __init__(self, a: ExpertsArgs):
        self.a, self.activation = a, activation_of(a)
        S, (_, N, K), I = a.topk_ids.numel(), a.w13.shape, a.w2.shape[2]
        fused = ends_products(a.options.activation)
        fused = fused and a.w13.is_contiguous() and a.w2.is_contiguous()
        self.x = Operand(carve(a.workspace13, (S, K), BF16))
        self.gate_up = None if fused else carve(a.workspace2, (S, N), BF16)
        self.h = Operand(carve(a.workspace2 if fused else a.workspace13, (S, I), BF16))
        self.y = self.x.data if fused else carve(a.workspace2, (S, K), BF16)

    def prepare(self, layout: Layout) -> list[Launch]:
        return []

    def first(self, layout: Layout) -> None:
        x, h, a = self.x.data, self.h.data, self.a
        if self.gate_up is not None:
            products.multiply_into(self.gate_up, x, a.w13, layout.groups)
        else:
            bias = contiguous(a.w13_bias)
            products.activate_into(h, x, a.w13, layout.groups, self.activation, bias)

    def second(self, layout: Layout) -> None:
        products.multiply_into(self.y, self.h.data, self.a.w2, layout.groups)


class GroupsProducts:
    """Products of e4m3 weights with scales of blocks and rows with scales of groups. The first one
    activates and quantizes.
    """

    gate_up: Tensor | None = None

    def __init__(self, a: ExpertsArgs):
        self.a, (S, (_, K, I)) = a, (a.topk_ids.numel(), a.w2.shape)
        assert a.w13_scale is not None and a.w2_scale is not None
        self.weights = Scaled(a.w13, a.w13_scale), Scaled(a.w2, a.w2_scale)
        self.powers = a.scheme.endswith(":ue8m0")
        self.x = operands.groups_in(a.workspace13, S, K, self.powers)
        self.h = operands.groups_in(a.workspace2, S, I, self.powers)
        self.y = carve(a.workspace13, (S, K), BF16)

    def prepare(self, layout: Layout) -> list[Launch]:
        return []

    def first(self, layout: Layout) -> None:
        a = self.a
        rows = _scaled(self.h), _scaled(self.x), self.weights[0], layout.groups
        how = activation_of(a), self.powers, contiguous(a.w13_bias)
        products.activate_blocks_into(*rows, *how)

    def second(self, layout: Layout) -> None:
        products.multiply_blocks_into(self.y, _scaled(self.h), self.weights[1], layout.groups)


def _scaled(rows: Operand) -> Scaled:
    assert rows.scale is not None
    return Scaled(rows.data, rows.scale)


class SetUpProducts:
    """Products that read arrays over experts, which one kernel writes: of rows with one scale
    each, or with scales in tiles.
    """

    def __init__(
        self,
        a: AnyArgs,
        grouped: Grouped,
        R: int,  # rows that each expert has room for; 0: those of all follow one another
        y: Tensor,  # (rows, K)
        shared: Shared | None,
    ):
        self.a, self.grouped, self.R, self.y = a, grouped, R, y
        N, K = a.w13.shape[1], a.out.shape[-1]
        I = N // 2 if activation_of(a).GATED else N
        of_x = a.a13_scale, None if shared is None else shared.x, a.w13_global_scale
        of_h = a.a2_scale, None if shared is None else shared.h, a.w2_global_scale
        self.x = self._operand(0, K, *of_x, a.hidden_states_scale)
        self.h = self._operand(1, I, *of_h)
        self.gate_up = carve(a.workspace2, (y.shape[0], N), a.out.dtype)

    def _operand(
        self,
        which: int,  # 0 of the first product, 1 of the second
        columns: int,
        known: Tensor | None,
        largest: Tensor | None,
        w_global: Tensor | None,
        arrived: Tensor | None = None,  # scales of rows that arrive quantized
    ) -> Operand:
        """The rows at the start of workspace13, followed by their scales."""
        a, known, rows = self.a, _flat(known), self.y.shape[0]
        largest = None if known is not None else largest
        if self.grouped.kind != BLOCKS:
            return operands.rows_in(a.workspace13, rows, columns, known, largest, arrived)
        assert isinstance(a, ExpertsArgs)
        of_scales = scale_rows(a.topk_ids.shape[0], a.topk_ids.shape[1], a.w13.shape[0])
        return operands.tiles_in(
            a.workspace13, rows, of_scales, columns, a.scheme,
            known, largest, w_global, self.grouped.alphas[which],
        )  # fmt: skip

    def prepare(self, layout: Layout) -> list[Launch]:
        a = self.a
        w13, w2 = a.w13_scale, a.w2_scale
        assert w13 is not None and w2 is not None
        weights = Weights(a.w13, w13), Weights(a.w2, w2)
        if self.grouped.kind == INT4:
            of_rows = a.w13_channel_scale, a.w2_channel_scale
            assert of_rows[0] is not None and of_rows[1] is not None
            weights = Weights(a.w13, of_rows[0], w13), Weights(a.w2, of_rows[1], w2)
        first, second = (self.x, weights[0], self.gate_up), (self.h, weights[1], self.y)
        gpu = launch.gpu(a.out.get_device())
        return [self.grouped.setup(layout, self.R, first, second, gpu)]

    def first(self, layout: Layout) -> None:
        self.grouped.run(0)

    def second(self, layout: Layout) -> None:
        self.grouped.run(1)


def _shared(a: AnyArgs) -> Shared | None:
    """Largest magnitudes from which one dynamic scale of all rows follows; that of x is known."""
    if not one_scale(a.scheme):
        return None
    found, device = library.shared(a.index_workspace), a.hidden_states.get_device()
    if a.a13_scale is None and a.hidden_states_scale is None:
        gpu = launch.gpu(device)
        run([amax_of(a, found, gpu)], device, gpu)  # and that of h becomes zero
    elif a.a2_scale is None:
        found.h.zero_()
    return found


def _run(a: AnyArgs, layers: Sequence[Steps], shared: Shared | None) -> None:
    run_steps(layers, shares_scale=shared is not None and a.a2_scale is None)


def _flat(scale: Tensor | None) -> Tensor | None:
    """A known scale as kernels take it."""
    if scale is None:
        return None
    scale = scale.reshape(-1)
    return scale if scale.is_contiguous() else scale.contiguous()
