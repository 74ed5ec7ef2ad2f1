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
    """Sends the tokens of all ranks of a group to their experts, and the outputs back.

    Between `dispatch` and `combine` each rank runs its own experts on the tokens that arrived:
    `fused_experts(..., expert_map=...)`, which adds nothing for experts held elsewhere. All ranks
    call both, equally often and in the same order. A dispatcher holds no tensors and no process
    group, so that layers with one can be copied and saved.

    Attributes:
        name: what `ParallelConfig.all2all_backend` calls it, or "all_reduce".
        max_num_tokens: T, the most tokens that one rank passes in one call.

    Optional attributes: with `send_quantized` True, or None (on GPUs only), the method
    `dispatch_quantized(q, scale, topk_ids, topk_weights)` of `AllGatherReduceScatter`. For
    `batch_invariant` its method `combine_by_tree(out, num_tokens)`. With an `exchange`, as in
    `SymmetricMemory`, layers call `combine` only where gradients are recorded; with
    `sends_rows_later` true they also call `dispatch` only there, or if no backend that sends rows
    may run (`moe_ops.parallel.wire.pays_later`). They pass `exchange_quantized` instead of
    `exchange` if there is one and tokens may travel quantized.
    """

    name: ClassVar[str]

    @property
    def max_num_tokens(self) -> int: ...

    @staticmethod
    def why_not(parallel: ParallelConfig) -> list[str]:
        """All reasons why this dispatcher cannot serve a deployment; empty if it can."""

    def dispatch(
        self,
        x: Tensor,  # (M, K)
        topk_ids: Tensor,  # (M, top_k)
        topk_weights: Tensor,  # (M, top_k)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x, topk_ids, topk_weights) of all tokens that may choose this rank's experts, with
        global expert ids; -1 in rows without a token.
        """

    def combine(
        self,
        out: Tensor,
        num_tokens: int,
    ) -> Tensor:  # (num_tokens, K)
        """The sums over the experts of all ranks for this rank's tokens. `out` has the outputs of
        this rank's experts for the rows that `dispatch` returned; num_tokens is M.
        """


DISPATCHERS: dict[str, Any] = {
    kind.name: kind for kind in (AllGatherReduceScatter, AllToAll, SymmetricMemory)
}
_FIRST = ("group_name", "group_size", "max_num_tokens")  # fields that every kind begins with


def register_dispatcher(kind: Any) -> None:
    """Register a dispatcher of your own, such as an adapter of DeepEP, under its name.

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
    """The dispatcher of a deployment: if devices have tokens of their own, the one that
    `parallel.all2all_backend` names; if all have the same tokens, `AllReduce`.

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
