"""The dispatchers: one that gathers tokens and reduces outputs, one that sends outputs to the
ranks of their tokens, and one for tokens that all ranks have.

Dimensions: M tokens of this rank, K hidden size, top_k experts per token, R ranks of the group,
T = max_num_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops.checks import check_ids, check_rank, check_size
from moe_ops.parallel.collectives import AllGather, Ranks, ReduceScatter, Replicate, Sum
from moe_ops.parallel.config import ParallelConfig

_REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, None)


@dataclass(frozen=True)
class _Dispatcher:
    """Fields and checks that all dispatchers share."""

    name: ClassVar[str]
    all_to_all: ClassVar[bool] = False

    group_name: str
    group_size: int
    max_num_tokens: int
    reduce_dtype: torch.dtype | None = None
    label: str = field(default="a MoE layer", kw_only=True)

    def __post_init__(self) -> None:
        check_size("group_size", self.group_size)
        check_size("max_num_tokens", self.max_num_tokens)
        if self.reduce_dtype not in _REDUCE_DTYPES:
            raise ValueError(
                "reduce_dtype must be torch.float32, torch.bfloat16, torch.float16 or None, got "
                f"{self.reduce_dtype}"
            )

    @property
    def _ranks(self) -> Ranks:
        reduce_dtype = self.reduce_dtype
        if reduce_dtype is None and self.group_size > 2:
            reduce_dtype = torch.float32
        return Ranks(self.group_name, self.group_size, self.all_to_all, reduce_dtype, self.label)

    def _check(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Raise, before anything is sent, unless these are M <= T rows each."""
        check_rank("x", x, "(M, K)")
        check_rank("topk_ids", topk_ids, "(M, top_k)")
        check_rank("topk_weights", topk_weights, "(M, top_k)")
        M = x.shape[0]
        if guard_or_false(self.max_num_tokens < M):
            most, got = "", "more"
            if not torch.compiler.is_compiling():  # where they may have no numbers
                most, got = f"={self.max_num_tokens}", str(M)
            raise ValueError(
                f"x must have at most max_num_tokens{most} rows, got {got}; pass them in several "
                "calls, or construct all ranks with a larger max_num_tokens"
            )
        # of a size that is not known while tracing
        torch._check(self.max_num_tokens >= M, lambda: "x must have at most max_num_tokens rows")
        for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if guard_or_false(tensor.shape[0] != M):
                raise ValueError(
                    f"{name} must have as many rows as x, M={M}, got {tensor.shape[0]}"
                )
        check_ids("topk_ids", topk_ids, topk_weights)


@dataclass(frozen=True)
class PaddedDispatcher(_Dispatcher):
    """Every rank gets the tokens of all ranks, T rows of each, and returns one row for each.

    All shapes are static: a rank sends T rows whatever M is, those without a token with expert ids
    -1, so nothing is read on the host. No counts are known before a call, so each rank must have
    room for T rows of every other: rows stay in their place, since to pack those that a rank needs
    would save no bytes. Gradients of x, of the router weights and of the outputs flow.

    A rank holds some of the experts, or with tensor parallelism its columns of all of them.
    """

    send_quantized: bool | None = field(default=None, kw_only=True)

    @staticmethod
    def why_not(parallel: ParallelConfig) -> list[str]:
        """Every reason why this dispatcher cannot serve such a deployment; none: it can."""
        reasons, devices = _why_not_at_all(parallel), num_devices(parallel)
        if parallel.num_dispatchers != devices:
            reasons.append(
                f"{devices} devices hold experts, but {parallel.num_dispatchers} of them "
                "have tokens of their own; spread tokens over all by dp_size, or by sp_size "
                "within tensor-parallel groups"
            )
        return reasons

    def dispatch(
        self,
        x: Tensor,  # (M, K)
        topk_ids: Tensor,  # (M, top_k)
        topk_weights: Tensor,  # (M, top_k)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of all ranks, in the order of ranks.

        Args:
            x: (M, K) bf16, fp16 or fp32, of one dtype and K on all ranks; M may be 0, and differ
                from rank to rank. It requires gradients on all ranks or on none, and so do
                topk_weights.
            topk_ids: (M, top_k) int32 or int64 global expert ids; any that name no expert, such as
                -1, choose none.
            topk_weights: (M, top_k), any float dtype.

        Returns:
            x (R * T, K) in its dtype, topk_ids (R * T, top_k) int32 and topk_weights (R * T,
            top_k) fp32.

        Raises:
            ValueError: a tensor of another rank, number of rows or dtype, or M above
                max_num_tokens; nothing was sent then.
        """
        self._check(x, topk_ids, topk_weights)
        return AllGather.apply(
            self._ranks, self._padded(x, 0), *self._routing(topk_ids, topk_weights)
        )

    def dispatch_quantized(
        self,
        q: Tensor,  # (M, K), or fewer columns of packed elements
        scale: Tensor,  # (M, groups), or () of all rows
        topk_ids: Tensor,  # (M, top_k)
        topk_weights: Tensor,  # (M, top_k)
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`dispatch` of rows that are quantized, which `fused_experts` takes with their scales.

        Args:
            q, scale: of `moe_ops.quantize_activation`; one scale of all rows is known to all
                ranks, and stays as it is. No gradients flow to them.
            topk_ids, topk_weights: as in `dispatch`.

        Returns:
            q (R * T, ...) and scale (R * T, groups) in their dtypes, topk_ids and topk_weights as
            from `dispatch`. Rows without a token are zeros.

        Raises:
            ValueError: as `dispatch`.
        """
        self._check(q, topk_ids, topk_weights)
        of_rows = [scale] if scale.dim() == 2 else []
        # e4m3 has no padding of its own
        rows = [
            self._padded(part.view(torch.uint8) if part.itemsize == 1 else part, 0)
            for part in (q, *of_rows)
        ]
        q_, *scales, ids, weights = AllGather.apply(
            self._ranks, *rows, *self._routing(topk_ids, topk_weights)
        )
        found = scales[0].view(scale.dtype) if scales else scale
        return q_.view(q.dtype), found, ids, weights

    def _routing(self, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Both as they travel, padded."""
        ids = topk_ids
        if ids.dtype != torch.int32:  # those that int32 lacks must not wrap to others
            ids = ids.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
        return self._padded(ids, -1), self._padded(topk_weights.to(torch.float32), 0)

    def combine(
        self,
        out: Tensor,  # (R * T, K)
        num_tokens: int,
    ) -> Tensor:  # (num_tokens, K)
        """Add up the outputs of all ranks' experts.

        Args:
            out: (R * T, K) of the rows that `dispatch` returned.
            num_tokens: M.

        Returns:
            (M, K) in out's dtype.

        Raises:
            ValueError: another number of rows than R * T.
        """
        self._check_outputs(out)
        return ReduceScatter.apply(self._ranks, out)[:num_tokens]

    def combine_by_tree(
        self,
        out: Tensor,  # (R * T, K)
        num_tokens: int,
    ) -> Tensor:  # (num_tokens, K)
        """`combine` of fp32 sums over each rank's blocks of experts (`moe_ops.meta.blocks`). They
        travel as they are, and are added by a binary tree of ranks; nothing is rounded.
        """
        self._check_outputs(out)
        return ReduceScatter.apply(self._ranks._replace(by_tree=True), out)[:num_tokens]

    def _check_outputs(self, out: Tensor) -> None:
        """Raise unless these are the R * T rows that `dispatch` returned."""
        check_rank("out", out, "(R * T, K)")
        rows = self.group_size * self.max_num_tokens
        if guard_or_false(out.shape[0] != rows):
            raise ValueError(
                f"out must have the {rows} rows that dispatch returned, got {out.shape[0]}"
            )

    def _padded(self, rows: Tensor, value: int) -> Tensor:  # (M, ...) -> (T, ...)
        missing = self.max_num_tokens - rows.shape[0]
        if not torch.compiler.is_compiling() and missing == 0:  # padding would copy them
            return rows
        # not cat, of which a graph for M < T could not serve M = T, an empty second part
        return torch.nn.functional.pad(rows, (0, 0, 0, missing), value=value)


@dataclass(frozen=True)
class AllGatherReduceScatter(PaddedDispatcher):
    """Every rank gets the tokens of all ranks; a reduce-scatter adds up the outputs.

    Every call moves R * T rows to each rank and back, also those that no expert there needs:
    meant for few ranks, or many experts per token.

    Args:
        group_name: of the expert-parallel process group (`group.group_name`).
        group_size: R.
        max_num_tokens: T.
        reduce_dtype: torch.float32, torch.bfloat16 or torch.float16, in which outputs of 16 bits
            travel and are added; those of fp32 stay in it. Each rank's output has been rounded
            once to the tokens' dtype before; in fp32 their sum is rounded once more, however many
            ranks there are. Gradients of x are added in it, too. None: the tokens' dtype for two
            ranks, of which the sum is rounded once either way, else fp32.
        label: what errors call the layer.
        send_quantized: a `MoELayer` quantizes rows before they travel, as its experts would, with
            schemes that allow it (`moe_ops.parallel.wire`); False: it sends them as they are.
            None: on GPUs it quantizes; the fast kernels of CPUs take rows that are not.

    Raises:
        ValueError: a size that is no integer or below 1, or another reduce_dtype.
    """

    name: ClassVar[str] = "allgather_reducescatter"


@dataclass(frozen=True)
class AllToAll(PaddedDispatcher):
    """Every rank gets the tokens of all ranks, and sends each its outputs, which that adds up.

    Outputs travel in the tokens' dtype, half the bytes of a reduce-scatter in fp32, one row for
    each token and rank. The rank that sent the token adds them in fp32 in a fixed order and
    rounds the sum once, so the bits do not depend on how a library of collectives adds. Gradients
    of tokens take the same way.

    Args:
        group_name: of the expert-parallel process group (`group.group_name`).
        group_size: R.
        max_num_tokens: T.
        label, send_quantized: as in `AllGatherReduceScatter`.

    Raises:
        ValueError: a size that is no integer or below 1.
    """

    name: ClassVar[str] = "all_to_all"
    all_to_all: ClassVar[bool] = True

    reduce_dtype: None = field(default=None, init=False)  # always fp32


@dataclass(frozen=True)
class AllReduce(_Dispatcher):
    """Every rank has the same tokens, and some of the experts or some columns of all; an
    all-reduce adds up the outputs.

    For tensor parallelism, and for expert parallelism where no device has tokens of its own.
    Nothing is sent before the experts run. Gradients of x and of the router weights are added over
    the ranks, as each knows those of its own experts; that of the output is each rank's own, as
    all compute the same from it.

    Args:
        group_name, group_size, reduce_dtype, label: as in `AllGatherReduceScatter`.
        max_num_tokens: T, the most tokens of a call.

    Raises:
        ValueError: a size that is no integer or below 1, or another reduce_dtype.
    """

    name: ClassVar[str] = "all_reduce"

    @staticmethod
    def why_not(parallel: ParallelConfig) -> list[str]:
        """Every reason why this dispatcher cannot serve such a deployment; none: it can."""
        reasons = _why_not_at_all(parallel)
        if parallel.num_dispatchers > 1:
            reasons.append(
                f"{parallel.num_dispatchers} devices have tokens of their own, which others lack; "
                f"{AllGatherReduceScatter.name} and {AllToAll.name} send them"
            )
        return reasons

    def dispatch(
        self,
        x: Tensor,  # (M, K)
        topk_ids: Tensor,  # (M, top_k)
        topk_weights: Tensor,  # (M, top_k)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same three.

        Args:
            x, topk_ids, topk_weights: as in `AllGatherReduceScatter.dispatch`, with the same
                values on all ranks.

        Raises:
            ValueError: as there.
        """
        self._check(x, topk_ids, topk_weights)
        return (
            Replicate.apply(self._ranks, x),
            topk_ids,
            Replicate.apply(self._ranks, topk_weights),
        )

    def combine(
        self,
        out: Tensor,  # (M, K)
        num_tokens: int,
    ) -> Tensor:  # (M, K)
        """Add up the outputs of all ranks' experts: (M, K) in out's dtype.

        Raises:
            ValueError: another number of rows than num_tokens.
        """
        self._check_outputs(out, num_tokens)
        return Sum.apply(self._ranks, out)

    def combine_by_tree(
        self,
        out: Tensor,  # (M, K)
        num_tokens: int,
    ) -> Tensor:  # (M, K)
        """As `AllGatherReduceScatter.combine_by_tree`; every rank gets the rows of all others."""
        self._check_outputs(out, num_tokens)
        return Sum.apply(self._ranks._replace(by_tree=True), out)

    def _check_outputs(self, out: Tensor, num_tokens: int) -> None:
        check_rank("out", out, "(M, K)")
        if guard_or_false(out.shape[0] != num_tokens):
            raise ValueError(f"out must have M={num_tokens} rows, got {out.shape[0]}")


def num_devices(parallel: ParallelConfig) -> int:
    """Over which the layer is spread; one of the sizes is 1."""
    return parallel.ep_size * parallel.tp_size


def _why_not_at_all(parallel: ParallelConfig) -> list[str]:
    if num_devices(parallel) == 1:
        return ["it has one device; pass the sizes of more, or leave the group out"]
    return []
