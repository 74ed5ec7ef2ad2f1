"""The dispatcher in which ranks write tokens and outputs into each other's memory.

Dimensions: M tokens of this rank, K hidden size, top_k experts per token, R ranks of the group,
T = max_num_tokens.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from moe_ops.checks import check_size
from moe_ops.kernels import launch
from moe_ops.kernels.comm.mailbox import Mailbox, has_flags
from moe_ops.kernels.launch import Lazy
from moe_ops.meta.symmetric import SymmetricLayout, packed_bytes, rows_later
from moe_ops.ops.exchange import QUANTIZED, register_opener, sends_quantized
from moe_ops.ops.library import register_function
from moe_ops.parallel import stand_in
from moe_ops.parallel.dispatchers import PaddedDispatcher
from moe_ops.parallel.mailboxes import mailbox_of
from moe_ops.parallel.wire import quantize_for

_PUSH_ROWS = Lazy("moe_ops.kernels.comm.push:push_rows")
_PUSH_SUMS = Lazy("moe_ops.kernels.comm.push:push_sums")
# a look at a flag in a GPU's own memory takes about half a microsecond; at rows it counts as two
_SPINS_A_SECOND = 2_000_000


class Exchange(NamedTuple):
    """The arguments of a dispatcher's operators, which exchanges carry in their names."""

    group: str
    size: int
    max_num_tokens: int
    timeout: int
    label: str

    def mailbox(self, kind: str, device: torch.device, row_bytes: int, top_k: int = 0) -> Mailbox:
        layout = SymmetricLayout(self.size, self.max_num_tokens, row_bytes, top_k)
        return mailbox_of(self.group, device, kind, layout, self.label)


def _words(rows: Tensor) -> Tensor:
    """Rows as integers, of 32 bits if they fill those, for kernels that copy them."""
    if not rows.is_contiguous() or rows.stride(1) != 1:  # one column may have any stride
        rows = rows.new_empty(rows.shape).copy_(rows)
    found = rows.view(torch.uint8)
    return found.view(torch.int32) if found.shape[1] % 4 == 0 else found


def packed_rows(q: Tensor, scale: Tensor) -> Tensor:
    """(M, K) e4m3 followed by fp32 scales (M, K / 128), as int32 (M, words): K is a multiple
    of 128.
    """
    parts = [
        part.contiguous()
        .view(-1)
        .view(torch.uint8)
        .view(part.shape[0], part.itemsize * part.shape[1])
        for part in (q, scale)
    ]  # flat at first: one column may have any stride
    return torch.cat(parts, 1).view(torch.int32)


def _spins(timeout: int) -> int:
    return min(timeout * _SPINS_A_SECOND, 2**31 - 1)


def _push(
    kernel: Lazy, on_cpu: Callable, tensors: Sequence, mailbox: Mailbox, told: Exchange
) -> None:
    """Run a kernel of kernels/comm/push, or what stands in for it on CPUs."""
    device = tensors[0].device
    if device.type == "cuda":
        launched = kernel(*tensors, mailbox, _spins(told.timeout))
        launch.run([launched], device.index, launch.gpu(device.index))
        return
    try:
        on_cpu(*tensors, mailbox, told.timeout)
    except stand_in.Late as error:
        raise RuntimeError(
            f"{told.label} could not exchange tokens with the other ranks: one of them ended, or "
            "did not call the layer within the timeout of the dispatcher. The first error in the "
            f"logs of all ranks says more. Here: {error}"
        ) from error


def _gather(
    x: Tensor, topk_ids: Tensor | None, topk_weights: Tensor | None, *told: Any
) -> list[Tensor]:
    """The operator of `Dispatch`, whose schema names what it is told: an `Exchange`."""
    exchange = Exchange(*told)
    # rows without flags leave a mailbox as they found it, others do not
    kind = "packed tokens" if has_flags(x.dtype) else "tokens"
    top_k = 0 if topk_ids is None else topk_ids.shape[1]
    mailbox = exchange.mailbox(kind, x.device, x.shape[1] * x.itemsize, top_k)
    outs = _gathered(x, topk_ids, topk_weights, *told)
    routed = [None if t is None else t.contiguous() for t in (topk_ids, topk_weights)]
    tensors = (*outs, None, None)[:3] + (x.contiguous(), *routed)
    _push(_PUSH_ROWS, stand_in.push_rows, tensors, mailbox, exchange)
    return outs


def _gathered(
    x: Tensor, topk_ids: Tensor | None, topk_weights: Tensor | None, *told: Any
) -> list[Tensor]:
    """Buffers that `_gather` writes."""
    exchange = Exchange(*told)
    rows = exchange.size * exchange.max_num_tokens
    outs = [x.new_empty(rows, x.shape[1])]
    if topk_ids is not None:
        shape = rows, topk_ids.shape[1]
        outs += [x.new_empty(shape, dtype=dtype) for dtype in (torch.int32, torch.float32)]
    return outs


def _reduce(x: Tensor, num_tokens: int, group: str, size: int, timeout: int, label: str) -> Tensor:
    exchange = Exchange(group, size, x.shape[0] // size, timeout, label)
    mailbox = exchange.mailbox("outputs", x.device, x.shape[1] * x.itemsize)
    out = _reduced(x, num_tokens)
    _push(_PUSH_SUMS, stand_in.push_sums, (out, x.contiguous()), mailbox, exchange)
    return out


def _reduced(x: Tensor, num_tokens: int, *_: Any) -> Tensor:
    return x.new_empty(num_tokens, x.shape[1])


@dataclass(frozen=True)
class _Opened:
    """The exchange that an operator of experts is told of: `moe_ops.ops.exchange.Opened`."""

    out: Tensor  # (R * T, K)
    told: Exchange
    quantized: bool  # tokens are, before they travel

    @property
    def arrivals(self) -> Mailbox:
        K, itemsize = self.out.shape[1], self.out.itemsize
        kind, row_bytes = "tokens", K * itemsize
        if self.quantized:
            kind, row_bytes = "packed tokens", packed_bytes(K)
        return self.told.mailbox(kind, self.out.device, row_bytes)

    @property
    def mailbox(self) -> Mailbox:
        row_bytes = self.out.shape[1] * self.out.itemsize
        return self.told.mailbox("outputs", self.out.device, row_bytes)

    @property
    def spins(self) -> int:
        return _spins(self.told.timeout)

    def gather(self, x: Tensor) -> Tensor:
        return _gather(x, None, None, *self.told)[0]

    def gather_quantized(self, x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
        sent, K = quantize_for(x, scheme), x.shape[1]
        packed = self.gather(packed_rows(sent.q, sent.scale))
        rows = packed.view(torch.uint8)[:, :K].view(sent.q.dtype)
        return rows, packed[:, K // 4 :].view(torch.float32)

    def add(self) -> None:
        group, size, T, timeout, label = self.told
        self.out[:T] = _reduce(self.out, T, group, size, timeout, label)


def _open(name: str, out: Tensor, num_rows: int) -> _Opened:
    """The exchange that `SymmetricMemory.exchange` names, of a call's outputs."""
    try:
        group, size, timeout, label = ast.literal_eval(name.removeprefix(QUANTIZED))
    except (ValueError, SyntaxError, TypeError):
        raise ValueError(
            "exchange must be a dispatcher's `SymmetricMemory.exchange` or `exchange_quantized`, "
            f"got {name!r}"
        ) from None
    rows = out.shape[0]
    if rows == 0 or rows % size:
        raise ValueError(
            f"topk_ids must have equally many rows of each of the {size} ranks, as the "
            f"dispatcher of this exchange sends them, got {rows}"
        )
    if rows // size < num_rows != rows:
        raise ValueError(
            f"hidden_states must have the {rows} rows of all ranks, or at most {rows // size} of "
            f"this one, got {num_rows}"
        )
    told = Exchange(group, size, rows // size, timeout, label)
    return _Opened(out, told, sends_quantized(name))


register_opener(_open)


_GATHER_OP = register_function(
    "symmetric_gather",
    "(Tensor x, Tensor? topk_ids, Tensor? topk_weights, str group, int size, int max_num_tokens, "
    "int timeout, str label) -> Tensor[]",
    _gather,
    _gathered,
)
_REDUCE_OP = register_function(
    "symmetric_reduce",
    "(Tensor x, SymInt num_tokens, str group, int size, int timeout, str label) -> Tensor",
    _reduce,
    _reduced,
)


class Dispatch(torch.autograd.Function):
    """Rows (M, ...) of all ranks, (R * T, ...), and the ids and weights of their experts if they
    are given, sent together: those from M on are zero, and name no expert.
    """

    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        x: Tensor,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.num_tokens = exchange, x.shape[0]
        outs = _GATHER_OP(x, topk_ids, topk_weights, *exchange)
        if topk_weights is not None:
            ctx.dtype = topk_weights.dtype
            ctx.mark_non_differentiable(outs[1])
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, _, weights = (*grads, None, None)[:3]
        if x is not None:
            needed = ctx.needs_input_grad[1]
            x = AddRanks.apply(ctx.exchange, x, ctx.num_tokens) if needed else None
        if weights is not None and not ctx.needs_input_grad[3]:
            weights = None
        if weights is not None:
            weights = AddRanks.apply(ctx.exchange, weights, ctx.num_tokens)
            if weights.dtype != ctx.dtype:  # a cast to its own loses gradients
                weights = weights.to(ctx.dtype)
        return None, x, None, weights


class AddRanks(torch.autograd.Function):
    """(R * T, K) -> (M, K), summed over ranks in fp32 and in their order, rounded once."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x: Tensor, num_tokens: int) -> Tensor:
        ctx.exchange = exchange
        group, size, _, timeout, label = exchange
        return _REDUCE_OP(x, num_tokens, group, size, timeout, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, Dispatch.apply(ctx.exchange, grads[0], None, None)[0], None


@dataclass(frozen=True)
class SymmetricMemory(PaddedDispatcher):
    """Every rank writes its tokens into the memory of all others, and its outputs into that of the
    ranks of their tokens, which add them up.

    One kernel each way, which sends rows and waits for those of the others: nothing is copied to a
    library's buffers, no host is asked, and a CUDA graph can hold both. Only the M tokens that a
    rank has travel. On GPUs a NaN of which all bits are ones, which is what buffers hold where
    nothing was sent, arrives without its sign. Outputs are added in fp32 in the order of ranks and
    rounded once: equal bits from run to run, those of `AllToAll`. Gradients take the same ways.

    For GPUs of one host with peer access, and up to 16 of them. The first call of a shape
    allocates buffers, together with all other ranks (`symmetric_memory_bytes` says how large), and
    cannot be captured. All layers of a group with the same max_num_tokens, hidden size, experts
    per token and dtype, whose tokens travel alike, share them, so their calls must be on one
    stream, in one order on all ranks. On CPUs processes of one host share memory in the same
    layout, for tests.

    Args:
        group_name: of the expert-parallel process group (`group.group_name`).
        group_size: R.
        max_num_tokens: T.
        timeout: seconds after which a rank that sends nothing is given up, about: a GPU counts its
            looks at what others send. A device assertion, which ends all work of the process on
            its GPU, then says so; on CPUs a RuntimeError.
        label: as in `AllGatherReduceScatter`.
        send_quantized: as there, but False unless it is given: a kernel that quantizes rows, and
            one that sends their scales, take longer than few tokens save, and of many as long.

    Attributes:
        exchange: what `fused_experts(exchange=...)` takes for calls that record no gradients, in
            the place of `combine`. Its weighted sum then writes into the memory of the other
            ranks, and the first M of the rows that it returns are the outputs of this rank's
            tokens.

    Raises:
        ValueError: a size or timeout that is no integer or below 1. By
            the first call on all ranks alike: devices that cannot serve it, with every reason.
    """

    name: ClassVar[str] = "symmetric_memory"

    reduce_dtype: None = field(default=None, init=False)  # always fp32
    timeout: int = field(default=60, kw_only=True)  # a float would be traced as a symbol
    send_quantized: bool | None = field(default=False, kw_only=True)
    # kept, since traced code cannot print integers that may be symbols
    exchange: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("timeout", self.timeout)
        told = self.group_name, self.group_size, self.timeout, self.label
        object.__setattr__(self, "exchange", repr(told))

    @property
    def exchange_quantized(self) -> str:
        """`exchange` for calls after `dispatch_routing` with fp8_block weights, whose tokens are
        quantized on their way (`moe_ops.parallel.wire.quantizes_later`): 1.03 bytes per column in
        place of 2, with the same bits. For more than one rank; all of them name the same one.
        """
        return QUANTIZED + self.exchange

    @property
    def _exchange(self) -> Exchange:
        return Exchange(
            self.group_name, self.group_size, self.max_num_tokens, self.timeout, self.label
        )

    def dispatch(
        self,
        x: Tensor,  # (M, K)
        topk_ids: Tensor,  # (M, top_k)
        topk_weights: Tensor,  # (M, top_k)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `AllGatherReduceScatter.dispatch`."""
        self._check(x, topk_ids, topk_weights)
        return Dispatch.apply(self._exchange, x, topk_ids, topk_weights)

    def dispatch_quantized(
        self,
        q: Tensor,  # (M, K), or fewer columns of packed elements
        scale: Tensor,  # (M, groups), or () of all rows
        topk_ids: Tensor,  # (M, top_k)
        topk_weights: Tensor,  # (M, top_k)
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `AllGatherReduceScatter.dispatch_quantized`."""
        self._check(q, topk_ids, topk_weights)
        out, ids, weights = _GATHER_OP(_words(q), topk_ids, topk_weights, *self._exchange)
        if scale.dim() == 2:
            (found,) = _GATHER_OP(_words(scale), None, None, *self._exchange)
            scale = found.view(scale.dtype)
        return out.view(q.dtype), scale, ids, weights

    @property
    def sends_rows_later(self) -> bool:
        """Whether it pays to call `dispatch_routing` in the place of `dispatch`, for experts whose
        backend sends rows itself (`moe_ops.parallel.wire.pays_later`). All ranks call the same.
        """
        return rows_later(self.group_size, self.max_num_tokens)

    def dispatch_routing(
        self,
        topk_ids: Tensor,  # (M, top_k)
        topk_weights: Tensor,  # (M, top_k)
    ) -> tuple[Tensor, Tensor]:
        """The routing of all ranks' tokens alone: `fused_experts(exchange=...)`, called with this
        rank's own tokens, sends them while it copies those that it has to their experts.

        Args:
            topk_ids, topk_weights: as in `dispatch`. No gradients flow to them.

        Returns:
            topk_ids int32 and topk_weights fp32, (R * T, top_k), as `dispatch` returns them.

        Raises:
            ValueError: as in `dispatch`.
        """
        weights = topk_weights.float()
        self._check(weights, topk_ids, weights)
        # rows that nobody reads: the smallest there are
        _, ids, weights = _GATHER_OP(weights, topk_ids, weights, *self._exchange)
        return ids, weights

    def combine(
        self,
        out: Tensor,  # (R * T, K)
        num_tokens: int,
    ) -> Tensor:  # (num_tokens, K)
        """As `AllGatherReduceScatter.combine`.

        Raises:
            ValueError: out as there; num_tokens above max_num_tokens, whose rows no rank sends.
        """
        self._check_outputs(out)
        if guard_or_false(num_tokens > self.max_num_tokens):
            raise ValueError(
                f"num_tokens must be at most max_num_tokens={self.max_num_tokens}, got "
                f"{num_tokens}: pass what this rank has dispatched"
            )
        torch._check(num_tokens <= self.max_num_tokens, lambda: "num_tokens is too large")
        return AddRanks.apply(self._exchange, out, num_tokens)
