"""What others do with bf16 experts in host memory, for benchmarks/residency.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.bench.layers import transformers_experts
from moe_ops.bench.shapes import Shape

OFFLOADED_LAYERS = 2  # of transformers, whose layers take long

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden states, router weights, ids


class Peer(NamedTuple):
    """Layers of an implementation, (layers, 2) int64 of experts found and brought, and whether its
    calls can be captured in a CUDA graph."""

    layers: Sequence[Layer]
    counters: Callable[[], Tensor] | None
    captured: bool


def accelerate_offload(
    plain: Sequence[tuple[Tensor, Tensor]],  # w13 (E, 2I, K), w2 (E, K, I) of each layer
    shape: Shape,
    slots: int,
    device: torch.device,
) -> Peer:
    """transformers' experts under the hooks with which accelerate keeps a module on a CPU: it
    copies a layer's weights to the GPU for each call, from memory that is not pinned."""
    import accelerate

    layers = []
    for w13, w2 in plain[:OFFLOADED_LAYERS]:
        experts: Any = transformers_experts(shape, w13.clone(), w2.clone(), "grouped_mm")
        accelerate.cpu_offload(experts, execution_device=device)

        def layer(x: Tensor, router: Tensor, ids: Tensor, experts: Any = experts) -> Tensor:
            return experts(x, ids.long(), router.to(x.dtype))

        layers.append(layer)
    return Peer(layers, None, False)


def freetoken(
    plain: Sequence[tuple[Tensor, Tensor]],
    shape: Shape,
    slots: int,
    device: torch.device,
) -> Peer:
    """FreeToken's cache of slots, one for all layers and as large as ours together, over the same
    pinned rows, and its kernels of decoding.

    Its extension for pinned memory is built for another torch; what is asked of it here, the
    address at which a GPU reads pinned memory, is the host's on Linux.
    """
    from freetoken.kernel import pinned
    from freetoken.moe.fused import fused_experts_decode_impl
    from freetoken.moe.offload_cache import OffloadMoeCache

    pinned._host_ptr_identity = lambda: True
    cache = OffloadMoeCache(
        num_layers=len(plain),
        num_experts=shape.num_experts,
        cache_size=slots * len(plain),
        device=device,
    )
    cache.collect_stats = True
    cache.set_bank_sources({"gate_up": [w[0] for w in plain], "down": [w[1] for w in plain]})

    def layer(number: int, x: Tensor, router: Tensor, ids: Tensor) -> Tensor:
        in_slots = ids.clone()  # which are written in their place
        cache.ensure_experts(number, in_slots)
        cache.copy_missing()
        views = cache.pool_bank_views(number)
        return fused_experts_decode_impl(x, *views, router, in_slots)

    def counters() -> Tensor:
        active, missing = cache.lru_stats[:, 0], cache.lru_stats[:, 1]
        return torch.stack([active - missing, missing], 1)

    layers = [
        lambda x, router, ids, number=number: layer(number, x, router, ids)
        for number in range(len(plain))
    ]
    return Peer(layers, counters, True)


PEERS: dict[str, Callable[..., Peer]] = {
    "accelerate cpu_offload": accelerate_offload,
    "FreeToken": freetoken,
}
