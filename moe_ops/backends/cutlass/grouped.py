"""The two grouped GEMMs of a layer: the arrays over experts that they read, the launch that writes
these, and calls of the kernels. Imported at first launch only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.backends.cutlass import library
from moe_ops.backends.cutlass.library import Gemms, GroupedGemm
from moe_ops.backends.cutlass.operands import scales_of_gemm
from moe_ops.backends.cutlass.schemes import (
    ARRAYS,
    BLOCK_SCALED,
    BLOCKS,
    DESCRIPTOR_BYTES,
    INT4,
    INT4_GROUP,
    LAYOUT_WORDS,
    NUMBERS,
    ROWS,
    kind_of,
    parts,
)
from moe_ops.backends.cutlass.setup import Gemm, setup
from moe_ops.kernels.launch import Gpu, Launch
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.rows.operand import Operand
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs

_COMMON = {"d": "d", "stride_d": "stride_d"}
_X_AS_A = {**_COMMON, "a": "x", "b": "w", "stride_a": "stride_x", "stride_b": "stride_w"}
# fields of the struct and the arrays that they point to. Operands of INT4 are exchanged, and its
# stride_a are layouts.
_FIELDS = {
    ROWS: {**_X_AS_A, "row_scale": "x_scale", "column_scale": "w_scale"},
    INT4: {
        **_COMMON,
        **{"a": "w", "b": "x", "stride_b": "stride_x"},
        **{"row_scale": "w_scale", "column_scale": "x_scale", "a_scale": "tables"},
    },
    BLOCKS: {**_X_AS_A, "a_scale": "x_scale", "b_scale": "w_scale"},
}


class Weights(NamedTuple):
    """w13 or w2."""

    data: Tensor  # (E, N, bytes of a row)
    scale: Tensor  # fp32 of rows or experts, or scales of blocks
    tables: Tensor | None = None  # of INT4: (E, K / 128, N, 8) e4m3


class Grouped:
    """Two GEMMs: x with w13, and h with w2."""

    def __init__(
        self,
        a: ExpertsArgs | BatchedExpertsArgs,
        gemms: Gemms,
        kernel: str,
        start: int,  # of what is free in the index workspace
    ):
        kind = kind_of(a.scheme)
        assert kind is not None
        E, index = a.w13.shape[0], a.index_workspace
        at = parts(start, E, kind)
        self.gemms, self.kernel, self.kind, self.E = gemms, kernel, kind, E
        self.numbers = index[at.arrays : at.layouts].view(torch.int64)[: 2 * NUMBERS * E]
        self.layouts = index[at.layouts : at.layouts + 4 * LAYOUT_WORDS * E]
        self.sizes = index[at.sizes : at.sizes + 6 * E]
        self.alphas = index[at.alphas : at.descriptors].view(torch.float32)[: 2 * E].view(2, E)
        self.descriptors = index[at.descriptors : at.shared].data_ptr()
        self.group = BLOCK_SCALED[a.scheme].group if kind == BLOCKS else INT4_GROUP
        self.stream = library.stream_of(a.out.get_device())

    def setup(
        self,
        layout: Layout,
        R: int,  # rows that each expert has room for; 0: those of all follow one another
        first: tuple[Operand, Weights, Tensor],  # x, w, d of each
        second: tuple[Operand, Weights, Tensor],
        gpu: Gpu,
    ) -> Launch:
        """Write the arrays. Before a GEMM runs, that must have been launched."""
        self.operands = first, second
        layouts = None if self.kind == ROWS else self.layouts
        return setup(
            self.numbers, layouts, self.sizes, layout.groups, R, _gemm(*first), _gemm(*second),
            self.kind, gpu,
        )  # fmt: skip

    def run(self, which: int) -> None:
        """Launch the first (0) or the second (1) on the arrays that the setup kernel wrote."""
        E, kind, (x, w, _) = self.E, self.kind, self.operands[which]
        start = self.numbers.data_ptr() + which * 8 * NUMBERS * E
        layouts = self.layouts.data_ptr() + which * 8 * LAYOUT_WORDS * E
        address = {name: start + 8 * E * i for i, name in enumerate(ARRAYS)}
        gemm = GroupedGemm(
            groups=E,
            sm_count=self.gemms.sm_count,
            problem_sizes=self.sizes.data_ptr() + which * 12 * E,
            group_size=self.group,
            workspace=self.descriptors + which * DESCRIPTOR_BYTES[kind],
            workspace_bytes=DESCRIPTOR_BYTES[kind],
            stream=self.stream,
            **{field: address[name] for field, name in _FIELDS[kind].items()},
        )
        if kind == BLOCKS:
            gemm.a_scale_layout, gemm.b_scale_layout = layouts, layouts + 4 * LAYOUT_WORDS * E
            if x.blocks is not None and x.blocks.alpha is not None:
                gemm.alpha = address["alpha"]
        else:
            of_rows, of_weights = scales_of_gemm(x)[1] < 0, w.scale.numel() > E
            if kind == INT4:
                of_rows, of_weights = of_weights, of_rows
                gemm.stride_a = layouts
                gemm.a_scale_layout = start + 8 * E * len(ARRAYS)
            gemm.row_scale_is_vector, gemm.column_scale_is_vector = of_rows, of_weights
        self.gemms.run(self.kernel, gemm)


def _gemm(x: Operand, w: Weights, d: Tensor) -> Gemm:
    """The operands of a GEMM as the setup kernel takes them."""
    E, N, _ = w.data.shape
    scale, step = scales_of_gemm(x)
    blocks = x.blocks
    w_scale = w.scale if w.scale.dtype == torch.float32 else w.scale.view(torch.uint8)
    return Gemm(
        x=x.data.view(torch.uint8),
        w=w.data.view(torch.uint8),
        d=d,
        x_scale=scale,
        w_scale=w_scale,
        alpha=None if blocks is None else blocks.alpha,
        tables=None if w.tables is None else w.tables.view(torch.uint8),
        N=N,
        K=x.columns,
        x_bytes=x.data.shape[1],
        w_bytes=w.data.shape[2] * w.data.itemsize,
        d_bytes=d.itemsize,
        x_scale_step=step,
        w_scale_bytes=w_scale.numel() // E * w_scale.itemsize,
        columns=0 if blocks is None else blocks.scale_columns,
    )
