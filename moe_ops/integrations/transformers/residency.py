"""What a model with experts in host memory holds where, and how often calls found their experts on
the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.budget import Budget, Demand
from moe_ops.integrations.transformers.sizes import size_text
from moe_ops.residency import experts
from moe_ops.residency.experts import ResidencyStats, ResidentExperts

BUDGET = "_moe_ops_budget"  # attribute of the model that was given one
HIT_RATES = (0.0, 0.5, 0.9, 1.0)
_LINK_BYTES = 2**24  # of a copy that measures the link
_LINK_COPIES = 8


@dataclass(frozen=True)
class ResidencyReport:
    """Where the parts of a model are; str() has one line for each layer.

    Attributes:
        budget: demands and slots by layer, and the budget that they were made from.
        pinned: whether the experts' host memory is pinned.
        link_rate: bytes a second from there to the GPU; None: not measured, as on a CPU.
    """

    budget: Budget
    pinned: bool
    link_rate: float | None = None

    def miss_bytes(self, hit_rate: float) -> float:
        """Bytes that a token brings over the link where this share of its experts has slots."""
        pairs = zip(self.budget.layers, self.budget.slots, strict=True)
        missing = [a.top_k * a.slot_bytes for a, count in pairs if count < a.num_experts]
        return (1 - hit_rate) * sum(missing)

    def expected_ms(self, hit_rate: float) -> float | None:
        """Milliseconds that these bytes take at the link's rate, in addition to what a token takes
        in a model that holds its experts itself; None where the rate was not measured.
        """
        return 1e3 * self.miss_bytes(hit_rate) / self.link_rate if self.link_rate else None

    def __str__(self) -> str:
        budget = self.budget
        kind = "pinned" if self.pinned else "not pinned"
        lines = [
            f"experts in host memory: {size_text(budget.host_bytes)}, {kind}",
            f"on {budget.device}: {size_text(budget.bank_bytes)} in slots and "
            f"{size_text(budget.rest)} for the rest of the model, of "
            f"{size_text(budget.gpu_memory)}",
        ]
        if budget.why:
            lines.append(f'gpu_memory="auto": {budget.why}')
        lines.append(self._link())
        for layer, count in zip(budget.layers, budget.slots, strict=True):
            lines.append(_line(layer, count))
        return "\n".join(lines)

    def _link(self) -> str:
        if self.link_rate is None:
            sizes = [f"{size_text(round(self.miss_bytes(r)))} at {r:.0%}" for r in HIT_RATES[:-1]]
            return f"link: not measured; a token's misses by hit rate: {', '.join(sizes)}"
        times = [f"{self.expected_ms(r):.3g} ms at {r:.0%}" for r in HIT_RATES]
        return (
            f"link: {self.link_rate / 1e9:.3g} GB/s; a token's misses by hit rate, beside the "
            f"time of its products: {', '.join(times)}"
        )


def _line(layer: Demand, count: int) -> str:
    return (
        f"{layer.name}: slots for {count} of {layer.num_experts} experts, "
        f"{size_text(count * layer.slot_bytes)} of {size_text(layer.bytes)}"
    )


def budget_of(model: nn.Module) -> Budget:
    """The budget of a model, also of one inside of a wrapper.

    Raises:
        ValueError: it has no experts in host memory.
    """
    for module in model.modules():
        budget = vars(module).get(BUDGET)
        if budget is not None:
            return budget
    raise ValueError(
        f"model must have experts in host memory, got {type(model).__name__} without; load it "
        "with MoeOpsConfig(gpu_memory=...), or call moe_ops.integrations.transformers.offload"
    )


def residency_report(model: nn.Module) -> ResidencyReport:
    """Where the parts of a model with experts in host memory are, and what a token costs. On a GPU
    copies of 16 MiB measure the link.

    Raises:
        ValueError: it has no experts in host memory.
    """
    budget = budget_of(model)
    residents = _residents(model)
    pinned = all([resident.pinned for resident in residents])
    rate = _link_rate(residents[0].rows["w13"], budget.device) if residents else None
    return ResidencyReport(budget, pinned, rate)


def residency_stats(model: nn.Module) -> ResidencyStats:
    """Hits, misses and copied bytes of a model with experts in host memory since the last call of
    this function. The GPU counts them; they are read, and it is waited for, here alone.

    Raises:
        ValueError: it has no experts in host memory.
    """
    budget_of(model)
    return experts.residency_stats(model) if _residents(model) else ResidencyStats(0, 0, 0)


def _residents(model: nn.Module) -> list[ResidentExperts]:
    """Of the layers that have fewer slots than experts."""
    found = [layer.resident for layer in layers_of.find(model)]
    return [resident for resident in found if resident is not None]


def _link_rate(rows: Tensor, device: torch.device) -> float | None:
    """Bytes a second from host memory, of which these are rows, to a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    host = getattr(rows, "qdata", rows).view(-1).view(torch.uint8)[:_LINK_BYTES]
    copy = torch.empty_like(host, device=device)
    begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.cuda.device(device):
        copy.copy_(host, non_blocking=True)
        begin.record()
        for _ in range(_LINK_COPIES):
            copy.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
    return 1e3 * _LINK_COPIES * host.nbytes / begin.elapsed_time(end)
