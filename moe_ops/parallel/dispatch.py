"""Dispatchers: tokens to the ranks that hold their experts, and the experts' outputs back.

Dimensions: M tokens of this rank, K hidden size, top_k experts per token, R ranks of the
expert-parallel group, T = max_num_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops.checks import check_rank, check_size
from moe_ops.parallel.collectives import AllGather, Ranks, ReduceScatter
from moe_ops.parallel.config import ParallelConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REDUCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, None)


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
class _PaddedDispatcher:
    """Every rank gets the tokens of all ranks, T rows of each, and returns one row for each.

    All shapes are static: a rank sends T rows whatever M is, those without a token with expert ids
    -1, so nothing is read on the host. No counts are known before a call, so each rank must have
    room for T rows of every other: rows stay in their place, since to pack those that a rank needs
    would save no bytes. Gradients of x, of the router weights and of the outputs flow.
    """

    name: ClassVar[str]
    all_to_all: ClassVar[bool]

    group_name: str
    group_size: int
    max_num_tokens: int
    label: str = field(default="a MoE layer", kw_only=True)

    def __post_init__(self) -> None:
        check_size("group_size", self.group_size)
        check_size("max_num_tokens", self.max_num_tokens)

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

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        return None

    @property
    def _ranks(self) -> Ranks:
        return Ranks(
            self.group_name, self.group_size, self.all_to_all, self._reduce_dtype, self.label
        )

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
        torch._check(self.max_num_tokens >= M)  # of a size that is not known while tracing
        for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if guard_or_false(tensor.shape[0] != M):
                raise ValueError(
                    f"{name} must have as many rows as x, M={M}, got {tensor.shape[0]}"
                )
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
        # one dtype on the wire for all ranks; int64 ids that int32 lacks must not wrap to others
        ids = topk_ids.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
        return AllGather.apply(
            self._ranks,
            self._padded(x, 0),
            self._padded(ids, -1),
            self._padded(topk_weights.to(torch.float32), 0),
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
        return ReduceScatter.apply(self._ranks, out)[:num_tokens]

    def _padded(self, rows: Tensor, value: int) -> Tensor:  # (M, ...) -> (T, ...)
        missing = self.max_num_tokens - rows.shape[0]
        # not cat, of which a graph for M < T could not serve M = T, an empty second part
        return torch.nn.functional.pad(rows, (0, 0, 0, missing), value=value)


@dataclass(frozen=True)
class AllGatherReduceScatter(_PaddedDispatcher):
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

    Raises:
        ValueError: a size that is no integer or below 1, or another reduce_dtype.
    """

    name: ClassVar[str] = "allgather_reducescatter"
    all_to_all: ClassVar[bool] = False

    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduce_dtype not in _REDUCE_DTYPES:
            raise ValueError(
                "reduce_dtype must be torch.float32, torch.bfloat16, torch.float16 or None, got "
                f"{self.reduce_dtype}"
            )

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        if self.reduce_dtype is None and self.group_size > 2:
            return torch.float32
        return self.reduce_dtype


@dataclass(frozen=True)
class AllToAll(_PaddedDispatcher):
    """Every rank gets the tokens of all ranks, and sends each its outputs, which that adds up.

    Outputs travel in the tokens' dtype, half the bytes of a reduce-scatter in fp32, one row for
    each token and rank. The rank that sent the token adds them in fp32 in the order of ranks and
    rounds the sum once, so the bits do not depend on how a library of collectives adds. Gradients
    of tokens take the same way.

    Args:
        group_name: of the expert-parallel process group (`group.group_name`).
        group_size: R.
        max_num_tokens: T.
        label: as in `AllGatherReduceScatter`.

    Raises:
        ValueError: a size that is no integer or below 1.
    """

    name: ClassVar[str] = "all_to_all"
    all_to_all: ClassVar[bool] = True


DISPATCHERS = {kind.name: kind for kind in (AllGatherReduceScatter, AllToAll)}


def make_dispatcher(
    parallel: ParallelConfig,
    group: ProcessGroup,
    *,
    max_num_tokens: int,
    **options: Any,
) -> Dispatcher:
    """The dispatcher that `parallel.all2all_backend` names, on a process group.

    Args:
        parallel: the deployment; its ep_size and ep_rank are those of the group.
        group: the ranks that hold experts, in the order of ep_rank.
        max_num_tokens: T, the most tokens that one rank passes in one call.
        options: label, and what that dispatcher alone takes: `reduce_dtype` of
            `AllGatherReduceScatter`.

    Raises:
        ValueError: a name without a dispatcher here, a deployment that it cannot serve, with every
            reason, a group of other ranks, an option that it does not have, or a bad
            max_num_tokens or option.
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
    known = [field.name for field in fields(dispatcher)[3:]]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{option} must be left out with {name}, whose options are {', '.join(known)}"
            )
    return dispatcher(group.group_name, size, max_num_tokens, **options)
