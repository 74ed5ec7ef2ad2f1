"""Dispatcher: tokens to the ranks that hold their experts, and the experts' outputs back.

Dimensions: M tokens of this rank, K hidden size, top_k experts per token, T = max_num_tokens.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from moe_ops.checks import check_type
from moe_ops.parallel import all2all
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.dispatchers import (
    AllGatherReduceScatter,
    AllReduce,
    AllToAll,
    num_devices,
)
from moe_ops.parallel.symmetric_memory import SymmetricMemory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Dispatcher(Protocol):
    """How the tokens of all ranks of a group reach the experts, and the outputs come back.

    Between `dispatch` and `combine` each rank runs its own experts on what arrived:
    `fused_experts(..., expert_map=...)`, which adds nothing for experts that are elsewhere.
    All ranks call both, equally often and in the same order. A dispatcher holds no tensors and no
    process group, so a layer that has one can be copied and saved.

    Attributes:
        name: what `ParallelConfig.all2all_backend` calls it, or "all_reduce".
        max_num_tokens: T, the most tokens that one rank passes in one call.

    One whose attribute `send_quantized` is True, or None for GPUs alone, also has
    `dispatch_quantized(q, scale, topk_ids, topk_weights)`, as `AllGatherReduceScatter` has it. One
    that serves layers under `batch_invariant` has its `combine_by_tree(out, num_tokens)`. Of one
    with an `exchange`, as `SymmetricMemory` has it, layers use `combine` where gradients are
    recorded alone, and where its `sends_rows_later` is true, so they do `dispatch`, unless no
    backend may run that sends rows (`moe_ops.parallel.wire.pays_later`). They name its
    `exchange_quantized` there if it has one and tokens may travel quantized.
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


DISPATCHERS: dict[str, Any] = {
    kind.name: kind for kind in (AllGatherReduceScatter, AllToAll, SymmetricMemory)
}
_FIRST = ("group_name", "group_size", "max_num_tokens")  # fields that every kind begins with


def register_dispatcher(kind: Any) -> None:
    """Let layers run an exchange of your own, such as an adapter of DeepEP, by its name.

    Args:
        kind: a frozen dataclass of `Dispatcher`'s form whose fields begin with group_name,
            group_size and max_num_tokens; the others are options of `make_dispatcher`. Its name is
            one of `moe_ops.parallel.all2all.LIBRARIES`, so that configurations can have it.

    Raises:
        ValueError: no such class, or a name that is another's.
    """
    first = tuple(f.name for f in fields(kind)[:3]) if is_dataclass(kind) else ()
    lacks = [a for a in ("name", "why_not", "dispatch", "combine") if not hasattr(kind, a)]
    if not isinstance(kind, type) or first != _FIRST or lacks:
        raise ValueError(
            f"kind must be a dataclass with {', '.join(_FIRST)} as its first fields and with "
            f"name, why_not, dispatch and combine, got {kind!r}"
        )
    name = kind.name  # type: ignore[attr-defined]
    if name not in all2all.LIBRARIES or DISPATCHERS.get(name, kind) is not kind:
        raise ValueError(
            f"kind must have a name of {', '.join(all2all.LIBRARIES)} that no other has, got "
            f"{name!r}"
        )
    DISPATCHERS[name] = kind


def make_dispatcher(
    parallel: ParallelConfig,
    group: ProcessGroup,
    *,
    max_num_tokens: int,
    **options: Any,
) -> Dispatcher:
    """The dispatcher of a deployment, on a process group: where devices have tokens of their own,
    the one that `parallel.all2all_backend` names; where all have the same, `AllReduce`.

    Args:
        parallel: the deployment; its devices are those of the group.
        group: the ranks that hold experts, in the order of ep_rank, or of tp_rank without experts
            that are whole.
        max_num_tokens: T, the most tokens that one rank passes in one call.
        options: reduce_dtype, label and send_quantized of the dispatcher.

    Raises:
        ValueError: a name without a dispatcher here, a deployment that it cannot serve, with every
            reason, a group of other ranks, an option that it does not have, or a bad
            max_num_tokens or option.
    """
    check_type("parallel", parallel, ParallelConfig)
    name = parallel.all2all_backend if parallel.num_dispatchers > 1 else AllReduce.name
    kinds = {**DISPATCHERS, AllReduce.name: AllReduce}
    if name not in kinds:
        reasons = "; ".join(all2all.why_no_dispatcher(name))
        raise ValueError(
            f"all2all_backend must be one of {', '.join(DISPATCHERS)} for a layer that "
            f"communicates, got {name!r}: {reasons}. Choose one of those, give an adapter of "
            "yours to moe_ops.parallel.dispatch.register_dispatcher, or make the layer without a "
            "group and send its tokens yourself"
        )
    kind = kinds[name]
    if reasons := kind.why_not(parallel):
        raise ValueError(f"{name} cannot serve this ParallelConfig: " + "; ".join(reasons))
    size, rank = group.size(), group.rank()
    which = "ep" if parallel.use_ep else "tp"
    wanted = num_devices(parallel), getattr(parallel, f"{which}_rank")
    if (size, rank) != wanted:
        raise ValueError(
            f"group must have {which}_size={wanted[0]} ranks with this process as {which}_rank="
            f"{wanted[1]}, got {size} ranks with it as {rank}; pass the group of all devices of "
            "the deployment"
        )
    known = [field.name for field in fields(kind)[3:] if field.init]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{option} must be left out with {name}, whose options are {', '.join(known)}"
            )
    return kind(group.group_name, size, max_num_tokens, **options)
