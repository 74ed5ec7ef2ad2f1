"""SonicMoE's layer (sonic-moe 0.1.2 on quack-kernels 0.4), for training.py and experts.py.

Its grouped products are tuned over some twenty tiles, each of which takes seconds to compile; here
over those of TILES that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases import Cell, Weights
from torch import Tensor

# rows and columns of a tile, and whether two of them take turns; the first is its default
TILES = (
    (128, 192, True),
    (128, 256, False),
    (256, 128, False),
    (256, 192, False),
    (128, 128, True),
)

Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of x, w13, w2, router weights


def layer_of(ids: Tensor, num_experts: int, tiles: tuple[tuple[int, int, bool], ...]) -> Layer:
    """A layer for ids (M, top_k) of weights w13 (E, 2I, K), gate rows first, and w2 (E, K, I).

    It takes the ids as int32, and each one's token: both are made here, outside of what is timed.
    """
    import quack.gemm_interface as interface
    from quack.gemm_config import GemmConfig
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    M, top_k = ids.shape
    tokens = torch.arange(M, dtype=torch.int32, device=ids.device).repeat_interleave(top_k)
    experts = ids.flatten().int()
    tuned: list[Any] = [v for v in vars(interface).values() if hasattr(v, "configs")]
    configs = [
        interface.AutotuneConfig(
            config=GemmConfig(
                tile_m=rows,
                tile_n=columns,
                pingpong=pingpong,
                cluster_m=2,
                cluster_n=1,
                is_dynamic_persistent=False,
            )
        )
        for rows, columns, pingpong in tiles
    ]

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor) -> Tensor:
        for function in tuned:  # layers with other tiles share them
            function.configs = configs
        out = moe_general_routing_inputs(
            *(x, weights.flatten(), tokens, experts),
            *(w13.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, num_experts),
            torch.cuda.current_stream().cuda_stream,
            *(ActivationType.SWIGLU, not torch.is_grad_enabled(), True),
        )
        return out[0]

    return layer


def make(weights: Weights) -> Callable[[Cell], Callable[[int], Tensor]]:
    """A layer for experts.py: its call on each routing set of a cell, with the default tile."""
    shape = weights.shape
    if shape.ep_size > 1:
        raise ValueError("does not leave out experts held elsewhere")

    def build(cell: Cell) -> Callable[[int], Tensor]:
        layers = [layer_of(r.ids, shape.num_experts, TILES[:1]) for r in cell.sets]
        x, w13, w2 = cell.hidden_states, weights.w13, weights.w2
        return lambda which: layers[which](x, w13, w2, cell.sets[which].weights)

    return build
