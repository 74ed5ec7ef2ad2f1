"""Dispatchers: tokens to the ranks that hold their experts, and the experts' outputs back.

Dimensions: M tokens of this rank, K hidden size, top_k experts per token, R ranks of the
expert-parallel group, T = max_num_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops.checks import check_rank, check_size
from moe_ops.parallel.config import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Dispatcher(Protocol):
    """How the tokens of all ranks of an expert-parallel group reach the experts.

    Between `dispatch` and `combine` each rank runs its own experts on what arrived:
    `fused_experts(..., expert_map=...)`, which adds nothing for experts that are elsewhere.
    All ranks call both, equally often and in the same order. A dispatcher holds no tensors and no
    process group, so a layer that has one can be copied and saved.

    Attributes:
        name: what `ParallelConfig.all2all_backend` calls it.
        max_num_tokens: T, the most tokens that one rank passes in one call.
    """

    name: ClassVar[str]

    @property
    def max_num_tokens(self) -> int: ...

    @staticmethod
    def why_not(parallel: ParallelConfig) -> list[str]:
        """Every reason why this dispatcher cannot serve such a deployment; none: it can."""

    def dispatch(
        self,
        x: Tensor,  # (M, K)
        topk_ids: Tensor,  # (M, top_k)
        topk_weights: Tensor,  # (M, top_k)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same three of all tokens that this rank's experts may be asked for, with global
        expert ids; -1 where there is no token.
        """

    def combine(
        self,
        out: Tensor,
        num_tokens: int,
    ) -> Tensor:  # (num_tokens, K)
        """The sums over all ranks' experts for this rank's tokens, from the outputs of this rank's
        experts for what `dispatch` returned. num_tokens is M.
        """


@dataclass(frozen=True)
class AllGatherReduceScatter:
    """Every rank gets the tokens of all ranks; a reduce-scatter adds up the outputs.

    All shapes are static: a rank sends T rows whatever M is, those without a token with expert ids
    -1, so nothing is read on the host. Gradients of x, of the router weights and of the outputs
    flow. Every call moves R * T rows to each rank and back, also those that no expert there needs:
    meant for few ranks, or many experts per token.

    Args:
        group_name: of the expert-parallel process group (`group.group_name`).
        group_size: R.
        max_num_tokens: T.
        reduce_dtype: torch.float32, torch.bfloat16 or torch.float16, in which outputs travel and
            are added. Each rank's output has been rounded once to the tokens' dtype before; in
            fp32 their sum is rounded once more, however many ranks there are. Gradients of x are
            added in it, too; those of router weights in fp32.

    Raises:
        ValueError: a size that is no integer or below 1, or another reduce_dtype.
    """

    name: ClassVar[str] = "allgather_reducescatter"

    group_name: str
    group_size: int
    max_num_tokens: int
    reduce_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_size("group_size", self.group_size)
        check_size("max_num_tokens", self.max_num_tokens)
        if self.reduce_dtype not in _REDUCE_DTYPES:
            raise ValueError(
                "reduce_dtype must be torch.float32, torch.bfloat16 or torch.float16, got "
                f"{self.reduce_dtype}"
            )

    @staticmethod
    def why_not(parallel: ParallelConfig) -> list[str]:
        """Every reason why this dispatcher cannot serve such a deployment; none: it can."""
        reasons = []
        if not parallel.use_ep:
            reasons.append(
                "use_ep is False; pass enable_expert_parallel=True and more than one device"
            )
        elif parallel.num_dispatchers != parallel.ep_size:
            reasons.append(
                f"{parallel.ep_size} devices hold experts, but {parallel.num_dispatchers} of them "
                "have tokens of their own; spread tokens over all by dp_size, or by sp_size "
                "within tensor-parallel groups"
            )
        if parallel.enable_eplb:
            reasons.append("enable_eplb is True; a replicated expert would be counted twice")
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
                from rank to rank.
            topk_ids: (M, top_k) int32 or int64 global expert ids; any that name no expert, such as
                -1, choose none.
            topk_weights: (M, top_k), any float dtype.

        Returns:
            x (R * T, K) in its dtype, topk_ids (R * T, top_k) int32 and topk_weights (R * T,
            top_k) fp32.

        Raises:
            ValueError: a tensor of another rank, number of rows or dtype, or M above
                max_num_tokens.
        """
        check_rank("x", x, "(M, K)")
        check_rank("topk_ids", topk_ids, "(M, top_k)")
        check_rank("topk_weights", topk_weights, "(M, top_k)")
        M = x.shape[0]
        if guard_or_false(self.max_num_tokens < M):
            raise ValueError(
                f"x must have at most max_num_tokens={self.max_num_tokens} rows, got {M}; pass "
                "them in several calls, or construct all ranks with a larger max_num_tokens"
            )
        for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if guard_or_false(tensor.shape[0] != M):
                raise ValueError(
                    f"{name} must have as many rows as x, M={M}, got {tensor.shape[0]}"
                )
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
        # one dtype on the wire for all ranks; int64 ids that int32 lacks must not wrap to others
        ids = topk_ids.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
        return (
            self._gather(self._padded(x, 0), self.reduce_dtype),
            self._gather(self._padded(ids, -1), torch.float32),
            self._gather(self._padded(topk_weights.to(torch.float32), 0), torch.float32),
        )

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
        check_rank("out", out, "(R * T, K)")
        rows = self.group_size * self.max_num_tokens
        if guard_or_false(out.shape[0] != rows):
            raise ValueError(
                f"out must have the {rows} rows that dispatch returned, got {out.shape[0]}"
            )
        group = self.group_size, self.group_name, self.reduce_dtype
        return _ReduceScatter.apply(out, *group)[:num_tokens]

    def _padded(self, rows: Tensor, value: int) -> Tensor:  # (M, ...) -> (T, ...)
        missing = self.max_num_tokens - rows.shape[0]
        # not cat, of which a graph for M < T could not serve M = T, an empty second part
        return torch.nn.functional.pad(rows, (0, 0, 0, missing), value=value)

    def _gather(self, rows: Tensor, reduce_dtype: torch.dtype) -> Tensor:  # -> (R * T, ...)
        return _AllGather.apply(rows, self.group_size, self.group_name, reduce_dtype)


DISPATCHERS = {AllGatherReduceScatter.name: AllGatherReduceScatter}


def make_dispatcher(
    parallel: ParallelConfig,
    group: ProcessGroup,
    *,
    max_num_tokens: int,
    reduce_dtype: torch.dtype = torch.float32,
) -> Dispatcher:
    """The dispatcher that `parallel.all2all_backend` names, on a process group.

    Args:
        parallel: the deployment; its ep_size and ep_rank are those of the group.
        group: the ranks that hold experts, in the order of ep_rank.
        max_num_tokens, reduce_dtype: as in `AllGatherReduceScatter`.

    Raises:
        ValueError: a name without a dispatcher here, a deployment that it cannot serve, with every
            reason, a group of other ranks, or a bad max_num_tokens or reduce_dtype.
    """
    name = parallel.all2all_backend
    if name not in DISPATCHERS:
        raise ValueError(
            f"all2all_backend must be one of {', '.join(DISPATCHERS)} for a layer that "
            f"communicates, got {name!r}; dispatch and combine yourself with any other"
        )
    dispatcher = DISPATCHERS[name]
    if reasons := dispatcher.why_not(parallel):
        raise ValueError(f"{name} cannot serve this ParallelConfig: " + "; ".join(reasons))
    size, rank = group.size(), group.rank()
    if (size, rank) != (parallel.ep_size, parallel.ep_rank):
        raise ValueError(
            f"group must have ep_size={parallel.ep_size} ranks with this process as ep_rank="
            f"{parallel.ep_rank}, got {size} ranks with it as {rank}; pass the group of all "
            "devices of the deployment"
        )
    return dispatcher(group.group_name, size, max_num_tokens, reduce_dtype)


class _AllGather(torch.autograd.Function):
    """(T, ...) -> (R * T, ...); gradients are added in `reduce_dtype`.

    torch's own formulas would add gradients of 16 bits in 16 bits. Each of this pair is the
    other's backward, so that gradients of gradients exist.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, size: int, name: str, reduce_dtype: torch.dtype) -> Tensor:
        ctx.group = size, name, reduce_dtype
        op = torch.ops._c10d_functional
        return op.wait_tensor(op.all_gather_into_tensor(rows.contiguous(), size, name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _ReduceScatter.apply(grads[0], *ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    """(R * T, ...) -> (T, ...), summed in `reduce_dtype` and returned in the input's dtype."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, size: int, name: str, reduce_dtype: torch.dtype) -> Tensor:
        ctx.group = size, name, reduce_dtype
        op = torch.ops._c10d_functional
        sent = rows.to(reduce_dtype).contiguous()
        received = op.wait_tensor(op.reduce_scatter_tensor(sent, "sum", size, name))
        return received.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllGather.apply(grads[0], *ctx.group), None, None, None
