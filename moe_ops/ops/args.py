"""The arguments of the ops: one NamedTuple per family, from whose fields its schema is made."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from moe_ops.meta.blocks import num_blocks
from moe_ops.ops.options import Options
from moe_ops.schemes import schemes_of_layer

Scale = Annotated[Tensor | None, "scale"]


class ExpertsArgs(NamedTuple):
    """Arguments of `moe_ops::<backend>_experts`."""

    out: Tensor  # (M, K), written
    workspace13: Tensor  # written
    workspace2: Tensor  # written
    index_workspace: Tensor  # int32, written
    hidden_states: Tensor  # (M, K); fewer columns where quantized elements share bytes
    w13: Tensor  # (E, N, K), gate rows first, then up; fewer columns where elements share bytes
    w2: Tensor  # (E, K, I)
    topk_weights: Tensor  # (M, top_k), any float dtype
    topk_ids: Tensor  # (M, top_k), int32 or int64
    w13_scale: Scale
    w13_zero_point: Scale
    w13_global_scale: Scale
    w13_channel_scale: Scale
    a13_scale: Scale  # static scale of hidden_states
    w2_scale: Scale
    w2_zero_point: Scale
    w2_global_scale: Scale
    w2_channel_scale: Scale
    a2_scale: Scale  # static scale of the activation's output
    hidden_states_scale: Scale  # scales of hidden_states that arrive quantized
    hidden_states_global_scale: Scale
    # (3, E) fp32: alpha, beta and limit of each expert's activation, or None: those of options
    activation_by_expert: Scale
    w13_bias: Tensor | None  # (E, N)
    w2_bias: Tensor | None  # (E, K)
    # (global E,) integer: global id -> local id or -1; with slots (E,) id -> row of weights or -1
    expert_map: Tensor | None
    scheme: str  # `schemes.layer_scheme` of w13 and w2
    layout: str
    options: Options

    @property
    def w13_scheme(self) -> str:
        """Scheme of w13, and of hidden_states that arrive quantized."""
        return schemes_of_layer(self.scheme)[0]

    @property
    def w2_scheme(self) -> str:
        return schemes_of_layer(self.scheme)[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of unquantized hidden_states, or of `out`, which may otherwise be wider."""
        arrived = self.hidden_states_scale is not None
        return (self.out if arrived else self.hidden_states).dtype

    @property
    def global_experts(self) -> int:
        """Number of experts that topk_ids choose from."""
        return (self.w2 if self.expert_map is None else self.expert_map).shape[0]

    @property
    def num_experts(self) -> int:
        """Experts of the layer here, of which with slots not all weights are at hand."""
        return self.global_experts if self.options.slots else self.w2.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks of experts that are summed separately (meta/blocks.py)."""
        return num_blocks(self.global_experts) if self.options.batch_invariant else 1


class TokenAdapters(NamedTuple):
    """A stack of n low-rank adapters, and the adapter of each token. For token m with i =
    adapter_ids[m], scales[i] * b13[i, e] @ a13[i, e] is added to w13[e], and likewise to w2[e];
    nothing where i is no number of an adapter.
    """

    a13: Tensor | None  # (n, E, r, K), in the dtype of hidden_states
    b13: Tensor | None  # (n, E, N, r)
    a2: Tensor | None  # (n, E, r, I); the rank may be another one
    b2: Tensor | None  # (n, E, K, r)
    scales: Tensor  # (n,) fp32
    ids: Tensor  # (M,) int32 or int64

    @property
    def ranks(self) -> tuple[int, int]:
        """Ranks of the pairs of w13 and of w2; 0 where there is none."""
        first, second = [0 if a is None else a.shape[2] for a in (self.a13, self.a2)]
        return first, second


class AdaptedArgs(NamedTuple):
    """Arguments of `moe_ops::adapted_experts`: those of ExpertsArgs, and of TokenAdapters."""

    out: Tensor  # (M, K), written
    workspace13: Tensor  # written
    workspace2: Tensor  # written
    index_workspace: Tensor  # int32, written
    adapter_workspace: Tensor  # fp32, written
    hidden_states: Tensor  # (M, K)
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13_scale: Scale
    w13_zero_point: Scale
    w13_global_scale: Scale
    w13_channel_scale: Scale
    a13_scale: Scale
    w2_scale: Scale
    w2_zero_point: Scale
    w2_global_scale: Scale
    w2_channel_scale: Scale
    a2_scale: Scale
    hidden_states_scale: Scale  # always None
    hidden_states_global_scale: Scale  # likewise
    activation_by_expert: Scale
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None
    a13: Tensor | None
    b13: Tensor | None
    a2: Tensor | None
    b2: Tensor | None
    adapter_scales: Tensor
    adapter_ids: Tensor
    scheme: str
    layout: str
    options: Options

    @property
    def experts(self) -> ExpertsArgs:
        """The arguments of the layer without adapters."""
        return ExpertsArgs._make([getattr(self, name) for name in ExpertsArgs._fields])

    @property
    def adapters(self) -> TokenAdapters:
        return TokenAdapters(
            self.a13, self.b13, self.a2, self.b2, self.adapter_scales, self.adapter_ids
        )


class ResidentArgs(NamedTuple):
    """Arguments of `moe_ops::resident_experts`, which finds the weights by `options.resident`."""

    out: Tensor  # (M, K), written
    workspace13: Tensor  # written
    workspace2: Tensor  # written
    index_workspace: Tensor  # int32, written
    hidden_states: Tensor  # (M, K); fewer columns where quantized elements share bytes
    topk_weights: Tensor  # (M, top_k), any float dtype
    topk_ids: Tensor  # (M, top_k), int32 or int64
    hidden_states_scale: Scale
    hidden_states_global_scale: Scale
    scheme: str
    layout: str
    options: Options


class BatchedExpertsArgs(NamedTuple):
    """Arguments of `moe_ops::<backend>_batched_experts`."""

    out: Tensor  # (E, T, K), written in the rows before each expert's count
    workspace13: Tensor  # written
    workspace2: Tensor  # written
    index_workspace: Tensor  # int32, written
    hidden_states: Tensor  # (E, T, K)
    w13: Tensor  # (E, N, K)
    w2: Tensor  # (E, K, I)
    expert_num_tokens: Tensor  # (E,) int32 or int64
    w13_scale: Scale
    w13_zero_point: Scale
    w13_global_scale: Scale
    w13_channel_scale: Scale
    a13_scale: Scale
    w2_scale: Scale
    w2_zero_point: Scale
    w2_global_scale: Scale
    w2_channel_scale: Scale
    a2_scale: Scale
    hidden_states_scale: Scale
    hidden_states_global_scale: Scale
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    scheme: str
    layout: str
    options: Options  # chunk_rows are rows E * T

    @property
    def w13_scheme(self) -> str:
        """As in ExpertsArgs."""
        return schemes_of_layer(self.scheme)[0]

    @property
    def w2_scheme(self) -> str:
        return schemes_of_layer(self.scheme)[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values of hidden_states."""
        return self.out.dtype


class GroupedLinearArgs(NamedTuple):
    """Arguments of `moe_ops::<backend>_grouped_linear`."""

    out: Tensor  # (S, N), written; rows past offsets[-1] become zero
    workspace13: Tensor  # written
    workspace2: Tensor  # written
    index_workspace: Tensor  # int32, written
    x: Tensor  # (S, K), rows sorted by expert
    weight: Tensor  # (E, N, K)
    offsets: Tensor  # (E,) int32, cumulative end row of each expert
    weight_scale: Scale
    weight_zero_point: Scale
    weight_global_scale: Scale
    weight_channel_scale: Scale
    activation_scale: Scale
    x_scale: Scale
    x_global_scale: Scale
    bias: Tensor | None  # (E, N)
    scheme: str
    layout: str
    options: Options
