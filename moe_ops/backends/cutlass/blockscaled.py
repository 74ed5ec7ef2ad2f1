"""The expert layer around the block-scaled GEMMs of csrc/cutlass: nvfp4, mxfp4 and mxfp8 on SM100
and SM120. Imported at first launch only. Not run on hardware: the kernels around the GEMMs are
tested under Triton's interpreter, the GEMMs' layouts on the host.

As in layer.py: pairs are sorted by expert; tokens are quantized into their rows; GEMM with w13;
activation and quantization; GEMM with w2; weighted sum. Where all rows share a dynamic global
scale (nvfp4 without an activation_scale), the largest magnitude is found before each quantization.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.backends.cutlass import library
from moe_ops.backends.cutlass.blocks import Gemm, Operand, activate, scatter, setup
from moe_ops.backends.cutlass.library import Gemms, GroupedGemm
from moe_ops.backends.cutlass.schemes import (
    ARRAYS,
    BLOCK_SCALED,
    DESCRIPTOR_BYTES,
    LAYOUT_WORDS,
    parts,
    scale_rows,
)
from moe_ops.kernels import launch
from moe_ops.kernels.gemm.operands import activated
from moe_ops.kernels.launch import Gpu, run
from moe_ops.kernels.permute.combine import combine_rows
from moe_ops.kernels.permute.layout import Layout, index_parts
from moe_ops.kernels.permute.place import place
from moe_ops.kernels.permute.rows import NO_ROUTER_WEIGHTS, route_pairs, router_weights
from moe_ops.kernels.quantize.e4m3_int8 import Valid, amax
from moe_ops.kernels.quantize.scales import rows_of
from moe_ops.meta.workspace import carve, round_up
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.chunks import chunks


class Magnitudes(NamedTuple):
    """Largest magnitudes over all tokens of a call, from which global scales follow."""

    x: Tensor | None  # (NUM_PARTIALS,) fp32
    h: Tensor | None  # (1,) fp32


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::cutlass_experts` for a scheme of `BLOCK_SCALED`."""
    if not a.topk_ids.numel():
        return
    device = a.hidden_states.get_device()
    library.check_addresses(a)
    gemms, gpu = library.gemms(device, may_build=not a.tiers), launch.gpu(device)
    for name in ("w13", "w2", "w13_scale", "w2_scale"):
        tensor = getattr(a, name)
        if tensor is None or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for cutlass; make it so once")
    all_parts = chunks(a)
    found = _magnitudes(a, device, gpu)
    layers = [Layer(part, found, gemms, device, gpu) for part in all_parts]
    if found.h is not None:
        for layer in layers:
            layer.first_gemm()
            layer.find_magnitude()
    for layer in layers:
        if found.h is None or len(layers) > 1:  # else GEMM1 has run already
            layer.first_gemm()
        layer.second_gemm()


def _magnitudes(a: ExpertsArgs, device: int, gpu: Gpu) -> Magnitudes:
    """The Magnitudes of a call: that of x is found here, that of h becomes zero."""
    if BLOCK_SCALED[a.scheme].name != "nvfp4":
        return Magnitudes(None, None)
    of_x, of_h = library.shared(a.index_workspace)
    if a.a13_scale is None:
        routing = route_pairs(
            a.index_workspace, a.topk_ids, a.expert_map, a.w13.shape[0], a.topk_ids.numel(), True
        )
        on_input = NO_ROUTER_WEIGHTS
        if a.router_weight_on_input:
            on_input = router_weights(a.topk_weights)
        M, K = a.hidden_states.shape
        valid = Valid("pairs", routing, on_input)
        run([amax(rows_of(a.hidden_states), M, M, K, of_x, valid, of_h, gpu)], device, gpu)
    elif a.a2_scale is None:
        of_h.zero_()
    return Magnitudes(of_x if a.a13_scale is None else None, of_h if a.a2_scale is None else None)


def _known(scale: Tensor | None, found: Tensor | None) -> tuple[Tensor | None, str]:
    """What the global scale of rows follows from, and which WHOLE of blocks.py that is."""
    if scale is None:
        return found, "" if found is None else "amax"
    scale = scale.reshape(-1)
    if not scale.is_contiguous():
        scale = scale.contiguous()
    return scale, "known" if scale.numel() == 1 else "experts"


class Layer:
    """A layer, or a chunk of its tokens: buffers, and the launches between them."""

    def __init__(
        self, a: ExpertsArgs, found: Magnitudes, gemms: Gemms, device: int, gpu: Gpu
    ) -> None:
        self.a, self.found, self.gemms, self.device, self.gpu = a, found, gemms, device, gpu
        (self.M, self.top_k), (self.E, N, _) = a.topk_ids.shape, a.w13.shape
        self.rows, K, E = self.M * self.top_k, a.hidden_states.shape[1], self.E
        gated = activated(a.activation, a.alpha, a.beta, a.limit).GATED
        at = parts(index_parts(self.rows, E).end, E)
        index = a.index_workspace
        self.arrays = index[at.arrays : at.layouts].view(torch.int64)[: 2 * len(ARRAYS) * E]
        self.layouts = index[at.layouts : at.sizes][: 4 * LAYOUT_WORDS * E]
        self.sizes = index[at.sizes : at.alphas][: 6 * E]
        self.alphas = index[at.alphas : at.descriptors].view(torch.float32)[: 2 * E]
        self.descriptors = index[at.descriptors : at.shared]
        self.x = self._operand(0, K, a.a13_scale, found.x, a.w13_global_scale)
        self.h = self._operand(1, N // 2 if gated else N, a.a2_scale, found.h, a.w2_global_scale)
        self.gate_up = carve(a.workspace2, (self.rows, N), a.out.dtype)
        self.y = carve(a.workspace2, (self.rows, K), a.out.dtype)
        self.layout: Layout | None = None

    def _operand(
        self,
        which: int,  # 0 of GEMM1, 1 of GEMM2
        columns: int,
        scale: Tensor | None,
        found: Tensor | None,
        w_global: Tensor | None,
    ) -> Operand:
        """The rows at the start of workspace13, with their scales behind them."""
        format, rows = BLOCK_SCALED[self.a.scheme], self.rows
        padded, row_bytes = scale_rows(self.M, self.top_k, self.E), format.row_bytes(columns)
        size = format.operand_bytes(rows, padded, columns)
        everything = carve(self.a.workspace13, (size,), torch.uint8)
        known, whole = (None, "") if w_global is None else _known(scale, found)
        return Operand(
            data=everything[: rows * row_bytes].view(rows, row_bytes),
            scale=everything[round_up(rows * row_bytes, 128) :],
            columns=columns,
            alpha=None if w_global is None else self.alphas[which * self.E : (which + 1) * self.E],
            known=known,
            whole=whole,
            w_global=w_global,
            scheme=self.a.scheme,
        )

    def first_gemm(self) -> None:
        """Sort, quantize x, and multiply it with w13."""
        a, gpu = self.a, self.gpu
        launches, self.layout = place(a, self.rows, 1, gpu)
        g1 = _gemm(self.x, a.w13, a.w13_scale, self.gate_up)
        g2 = _gemm(self.h, a.w2, a.w2_scale, self.y)
        launches.append(
            setup(self.arrays, self.layouts, self.sizes, self.layout.groups, g1, g2, gpu)
        )
        on_input = a.topk_weights if a.router_weight_on_input else None
        launches.append(scatter(a, self.x, self.layout, on_input, gpu))
        run(launches, self.device, gpu)
        self._run(0, self.x)

    def find_magnitude(self) -> None:
        """Raise the largest magnitude of h to that of these tokens."""
        assert self.layout is not None and self.found.h is not None
        bits = self.found.h.view(torch.int32)
        launches = [activate(self.a, self.h, self.gate_up, self.layout, bits, self.gpu)]
        run(launches, self.device, self.gpu)

    def second_gemm(self) -> None:
        """Activate, quantize h, multiply it with w2, and add up."""
        a, gpu, layout = self.a, self.gpu, self.layout
        assert layout is not None
        run([activate(a, self.h, self.gate_up, layout, None, gpu)], self.device, gpu)
        self._run(1, self.h)
        on_output = None if a.router_weight_on_input else a.topk_weights
        launches = [combine_rows(a.out, self.y, on_output, layout, self.top_k)]
        run(launches, self.device, gpu)

    def _run(self, which: int, x: Operand) -> None:
        """Launch a GEMM on the arrays that the setup kernel wrote."""
        E, format = self.E, BLOCK_SCALED[self.a.scheme]
        start = self.arrays.data_ptr() + which * 8 * len(ARRAYS) * E
        addresses = {name: start + 8 * E * i for i, name in enumerate(ARRAYS)}
        if x.alpha is None:
            del addresses["alpha"]
        layouts = self.layouts.data_ptr() + which * 8 * LAYOUT_WORDS * E
        architecture = self.gemms.architecture.removesuffix("a").replace("_", "")
        self.gemms.run(
            f"moe_ops_{architecture}_{format.name}_bf16",
            GroupedGemm(
                groups=E,
                sm_count=self.gemms.sm_count,
                problem_sizes=self.sizes.data_ptr() + which * 12 * E,
                a_scale_layout=layouts,
                b_scale_layout=layouts + 4 * LAYOUT_WORDS * E,
                group_size=format.group,
                workspace=self.descriptors.data_ptr() + which * DESCRIPTOR_BYTES,
                workspace_bytes=DESCRIPTOR_BYTES,
                stream=library.stream_of(self.device),
                **addresses,
            ),
        )


def _gemm(x: Operand, w: Tensor, w_scale: Tensor | None, d: Tensor) -> Gemm:
    """The operands of a GEMM as the setup kernel takes them."""
    assert w_scale is not None
    return Gemm(
        x=x.data,
        w=w.view(torch.uint8),
        d=d,
        x_scale=x.scale,
        w_scale=w_scale.view(torch.uint8),
        alpha=x.alpha,
        N=w.shape[1],
        K=x.columns,
        row_bytes=x.data.shape[1],
        d_bytes=d.itemsize,
        columns=x.scale_columns,
    )
