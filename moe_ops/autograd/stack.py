"""Many adapters at once: a stack of them, of which each token of a call has one or none.

Dimensions: n adapters, E local experts, K hidden size, I intermediate size, N rows of w13, r rank,
M tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.autograd.adapters import LoRA
from moe_ops.checks import check_number, check_size, check_tensor, static_size
from moe_ops.ops.args import TokenAdapters
from moe_ops.ops.call import ExpertsCall
from moe_ops.planning import adapted
from moe_ops.schemes import get_scheme

_IDS = (torch.int32, torch.int64)
_LETTERS = {
    "a13": "(n, E, r, K)",
    "b13": "(n, E, N, r)",
    "a2": "(n, E, r, I)",
    "b2": "(n, E, K, r)",
}


class LoRAStack(NamedTuple):
    """n low-rank adapters of experts, for calls in which each token has one of them or none.

    For a token of adapter i results are as if scales[i] * b13[i, e] @ a13[i, e] were added to
    w13[e] and scales[i] * b2[i, e] @ a2[i, e] to w2[e]. An adapter of a lower rank than r has
    zeros behind its own. A pair of None leaves its weight unadapted; the pairs may have different
    ranks. All are values of one graph: `put` writes another adapter in the place of one, also
    between replays of a CUDA graph.

    All matrices together have n * E * (r * (K + N) + r * (I + K)) elements: 8
    adapters of rank 16 of 128 experts of 2048 x 768 take 210 MB a layer in bf16.

        stack = LoRAStack.of([one, other], slots=8)
        out = fused_experts(x, w13, w2, weights, ids, adapters=stack, adapter_ids=of_tokens)
    """

    a13: Tensor | None  # (n, E, r, K), in the dtype of hidden_states
    b13: Tensor | None  # (n, E, N, r)
    a2: Tensor | None  # (n, E, r, I)
    b2: Tensor | None  # (n, E, K, r)
    scales: Tensor  # (n,) fp32

    @classmethod
    def of(
        cls,
        adapters: Iterable[LoRA | None],
        *,
        slots: int | None = None,
        rank: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> LoRAStack:
        """A stack of copies of these adapters, which must adapt the same weights of one layer.

        Args:
            adapters: at least one; None leaves a slot empty.
            slots: n, for adapters that come later; None: as many as are given.
            rank: r; None: the largest of those that are given, of each pair its own.
            dtype: that of hidden_states; None: that of the first adapter.

        Raises:
            ValueError: no adapter is given, or more than slots, or one has a larger rank, or
                matrices of other sizes than the first, or adapts other weights.
        """
        given = list(adapters)
        known = [one for one in given if one is not None]
        for one in known:
            if not isinstance(one, LoRA):
                raise ValueError(
                    f"adapters must be moe_ops.LoRA, got {type(one).__name__}; name its fields: "
                    "LoRA(a13=.., b13=.., a2=.., b2=.., scale=..)"
                )
        if all([t is None for one in known for t in one[:4]]):
            raise ValueError(
                "adapters must hold at least one LoRA with matrices, whose sizes the stack takes, "
                "got none; give one of zeros"
            )
        n = len(given) if slots is None else slots
        check_size("slots", n)
        if rank is not None:
            check_size("rank", rank)
        if n < len(given):
            raise ValueError(f"slots must be at least {len(given)}, one for each adapter, got {n}")
        matrices: dict[str, Tensor | None] = dict.fromkeys(_LETTERS)
        for name in _LETTERS:
            of_all = [t for one in known if (t := getattr(one, name)) is not None]
            if of_all:
                at, like = _rank_at(name) - 1, of_all[0].detach()
                size = list(like.shape)
                size[at] = max([t.shape[at] for t in of_all]) if rank is None else rank
                matrices[name] = like.new_zeros(n, *size, dtype=dtype or like.dtype)
        device = next(t.device for t in matrices.values() if t is not None)
        scales = torch.zeros(n, dtype=torch.float32, device=device)
        stack = cls(**matrices, scales=scales)
        for slot, adapter in enumerate(given):
            if adapter is not None:
                stack.put(slot, adapter)
        return stack

    def put(self, slot: int, adapter: LoRA | None) -> None:
        """Copy an adapter to a slot, in the place of what was there; None empties it.

        Raises:
            ValueError: there is no such slot, or the adapter's matrices do not fit; the message
                names it. Nothing is written then.
        """
        n = self.scales.shape[0]
        if not 0 <= slot < n:
            raise ValueError(f"slot must be in 0..{n - 1}, got {slot}")
        if adapter is None:
            self._write(slot, LoRA(None, None, None, None, 0.0))
            return
        check_number("adapter.scale", adapter.scale)
        for name in _LETTERS:
            self._check_fits(name, adapter)
        self._write(slot, adapter)

    def _check_fits(self, name: str, adapter: LoRA) -> None:
        mine, given = getattr(self, name), getattr(adapter, name)
        if mine is None and given is None:
            return
        if mine is None or given is None:
            raise ValueError(
                f"adapter.{name} must be {'None' if mine is None else 'a tensor'}, because all "
                f"adapters of a stack adapt the same weights, got "
                f"{'a tensor' if mine is None else 'None'}; give zeros for one of them"
            )
        check_tensor(f"adapter.{name}", given)
        room, at = tuple(mine.shape[1:]), _rank_at(name) - 1
        found = tuple(given.shape)
        others = [i for i in range(3) if i != at]
        if len(found) != 3 or any([found[i] != room[i] for i in others]):
            raise ValueError(
                f"adapter.{name} must have shape {_LETTERS[name].replace('n, ', '')} of at most "
                f"{room}, got {found}; it is the adapter of another layer"
            )
        partner = getattr(adapter, ("b" if name[0] == "a" else "a") + name[1:])
        if name[0] == "b" and isinstance(partner, Tensor) and partner.shape[1] != found[at]:
            raise ValueError(
                f"adapter.{name} must have the rank of its partner, {partner.shape[1]}, got "
                f"{found[at]}"
            )
        if found[at] > room[at]:
            raise ValueError(
                f"adapter.{name} must have a rank of at most {room[at]}, got {found[at]}; make "
                f"the stack with rank={found[at]}"
            )

    @torch.no_grad()
    def _write(self, slot: int, adapter: LoRA) -> None:
        for name in _LETTERS:
            mine, given = getattr(self, name), getattr(adapter, name)
            if mine is None:
                continue
            room = mine[slot].zero_()
            if given is not None:
                dim = _rank_at(name) - 1
                room.narrow(dim, 0, given.shape[dim]).copy_(given)
        self.scales[slot] = adapter.scale


def _rank_at(name: str) -> int:
    """The dimension of a stacked matrix that is the rank."""
    return 2 if name[0] == "a" else 3


def of_tokens(
    stack: Any,
    adapter_ids: Any,
    call: ExpertsCall,
    num_rows: int,
    intermediate_size: int,
) -> TokenAdapters:
    """The adapters of a call's tokens, checked.

    Raises:
        ValueError: a matrix does not fit the weights, or a tensor has another dtype or device than
            it must, or one is missing; the message names it.
    """
    x = call.hidden_states
    if not isinstance(stack, LoRAStack):
        raise ValueError(
            f"adapters must be a moe_ops.LoRAStack beside adapter_ids, got {type(stack).__name__}"
            "; LoRAStack.of(adapters) makes one"
        )
    if adapter_ids is None:
        raise ValueError(
            "adapter_ids must be given beside a LoRAStack: the number of each token's adapter, "
            "(M,), -1 for none, got None"
        )
    check_tensor("adapter_ids", adapter_ids)
    if adapter_ids.ndim != 1 or adapter_ids.dtype not in _IDS:
        raise ValueError(
            f"adapter_ids must have shape (M,) and dtype int32 or int64, got "
            f"{adapter_ids.ndim}-D {adapter_ids.dtype}"
        )
    if stack.scales.ndim != 1 or not stack.scales.is_contiguous():
        raise ValueError(
            "adapters.scales must have shape (n,) and be contiguous, each adapter its own, got "
            f"shape {tuple(stack.scales.shape)} with strides {stack.scales.stride()}; pass "
            ".contiguous()"
        )
    counts = (stack.scales.shape[0], call.w13.data.shape[0], x.shape[1])
    n, E, K = [static_size(size) for size in counts]
    sizes = {
        "a13": (n, E, None, K),
        "b13": (n, E, num_rows, None),
        "a2": (n, E, None, intermediate_size),
        "b2": (n, E, K, None),
    }
    for name, size in sizes.items():
        _check_matrix(name, getattr(stack, name), size, x)
    for a, b in (("a13", "b13"), ("a2", "b2")):
        of_a, of_b = getattr(stack, a), getattr(stack, b)
        if (of_a is None) != (of_b is None):
            missing = a if of_a is None else b
            raise ValueError(
                f"adapters.{missing} must be a tensor {_LETTERS[missing]}, got None: of a pair a "
                "and b give both, or neither"
            )
        if of_a is not None and static_size(of_a.shape[2]) != static_size(of_b.shape[3]):
            raise ValueError(
                f"adapters.{b} must have the rank of {a}, {of_a.shape[2]}, got {of_b.shape[3]}"
            )
    if stack.scales.dtype != torch.float32:
        raise ValueError(f"adapters.scales must have dtype float32, got {stack.scales.dtype}")
    for name, t in (("adapters.scales", stack.scales), ("adapter_ids", adapter_ids)):
        if t.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, got {t.device}; move it with .to()")
    return TokenAdapters(*stack, adapter_ids)


def _check_matrix(name: str, t: Any, size: tuple, x: Tensor) -> None:
    if t is None:
        return
    check_tensor(f"adapters.{name}", t)
    if hasattr(t, "device_mesh"):
        raise ValueError(f"adapters.{name} must be a plain tensor, got a DTensor; pass to_local()")
    found = tuple([static_size(s) for s in t.shape])
    fits = len(found) == 4 and all(
        [want in (None, s) for want, s in zip(size, found, strict=True)]
    )
    if not fits or 0 in found:
        text = ", ".join(["r" if s is None else str(s) for s in size])
        raise ValueError(
            f"adapters.{name} must have shape {_LETTERS[name]} = ({text}), got {found}; it is the "
            "stack of another layer"
        )
    if t.dtype != x.dtype:
        raise ValueError(
            f"adapters.{name} must have the dtype of hidden_states, {x.dtype}, got {t.dtype}; "
            f"LoRAStack.of(adapters, dtype={x.dtype}) makes such a stack"
        )
    if t.device != x.device:
        raise ValueError(
            f"adapters.{name} must be on {x.device}, got {t.device}; move it with .to()"
        )
    if not t.is_contiguous():
        raise ValueError(f"adapters.{name} must be contiguous; pass .contiguous()")


def run(
    call: ExpertsCall,
    stack: Any,
    adapter_ids: Any,
    backend: str,
    gradients: Sequence[Tensor | None],  # the tensors that may ask for them
) -> Tensor:
    """fused_experts whose tokens have adapters of a stack.

    Raises:
        ValueError: as `of_tokens`; or gradients are recorded, or the call is one that adapters of
            tokens are not added to.
    """
    options = call.options
    _, N, _ = get_scheme(call.w13.scheme).logical_shape(*call.w13.data.shape)
    _, _, I = get_scheme(call.w2.scheme).logical_shape(*call.w2.data.shape)
    adapters = of_tokens(stack, adapter_ids, call, N, I)
    recorded = [t for t in (*gradients, *stack) if t is not None and t.requires_grad]
    if torch.is_grad_enabled() and recorded:
        raise ValueError(
            "adapters must be a LoRA, or several, where gradients are recorded, got a LoRAStack, "
            "which has none: wrap the call in torch.no_grad(), or train one adapter at a time"
        )
    if call.hidden_states_scale is not None:
        raise ValueError(
            "hidden_states must not arrive quantized (hidden_states_scale must be None) where "
            "adapters are given: pass hidden_states unquantized"
        )
    if options.exchange:
        raise ValueError(
            "exchange must be left out where tokens have adapters, which do not travel with them: "
            "send tokens by a dispatcher without it, and adapter_ids likewise"
        )
    if options.batch_invariant:
        raise ValueError(
            "batch_invariant must be False for tokens with adapters of a stack, got True: their "
            "products are not shown to keep it; merge an adapter into the weights"
        )
    return adapted.run(call, adapters, backend)
