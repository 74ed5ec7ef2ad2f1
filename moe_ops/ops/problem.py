"""The inputs of a plan: the static facts of a call (`Problem`) and of where it runs (`Machine`).

Dimensions used throughout the package: M tokens, K hidden size, I intermediate size, N rows of w13
(2I for gated activations, I otherwise), E local experts, top_k experts per token, S = M * top_k
pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from moe_ops.environment import TRITON
from moe_ops.ops.options import Options
from moe_ops.schemes import schemes_of_layer


@dataclass(frozen=True)
class Problem:
    """Static facts of a call. The number of tokens is not one: no plan depends on it."""

    kind: str  # "experts", "batched_experts" or "grouped_linear"
    num_experts: int  # E
    hidden_size: int  # K: columns of the first weight
    intermediate_size: int  # I; for grouped_linear 0
    num_rows: int  # N: rows of w13 (or of the single weight of grouped_linear)
    top_k: int  # 0 where there is no routing (batched_experts, grouped_linear)
    dtype: torch.dtype  # of the output, and of hidden_states unless they arrive quantized
    # quantization scheme of the weights, "" for plain ones; `schemes.layer_scheme` of w13 and w2
    scheme: str = ""
    layout: str = ""  # prepared layout of the weights, "" for the natural one
    options: Options = Options()
    has_bias: bool = False
    activation_by_expert: bool = False  # its parameters differ by expert
    mapped_experts: int = 0  # global experts of an expert_map; 0: there is none
    contiguous_weights: bool = True
    transposed_weights: bool = False  # plain weights, one or both stored transposed
    # hidden_states arrive quantized by the scheme, or are quantized before they travel
    quantized_input: bool = False
    global_rows: tuple[str, ...] = ()  # weights with a global scale per row: "w13", "w2"

    def replace(self, **changes: Any) -> Problem:
        """A copy with other facts or other options."""
        flags = {name: changes.pop(name) for name in Options._fields if name in changes}
        return replace(self, **changes, options=self.options._replace(**flags))

    @property
    def schemes(self) -> tuple[str, str]:
        """The schemes of w13 (or of the single weight of grouped_linear) and of w2."""
        return schemes_of_layer(self.scheme)

    @property
    def routed_experts(self) -> int:
        """Global experts, over which the pairs spread. Each of the E local experts gets as many of
        them as in a layer of so many experts, whose row of measured tables applies.
        """
        return self.mapped_experts or self.num_experts


@dataclass(frozen=True)
class Machine:
    """The device of a call. Tests build it by hand, and so plan for any GPU on a CPU."""

    device_type: str  # "cpu", "cuda", ...
    capability: tuple[int, int] = (0, 0)  # of an NVIDIA GPU, (0, 0) elsewhere
    gpu_name: str = ""
    available: tuple[str, ...] = ()  # names of the backends whose libraries are installed
    triton: str = TRITON  # version of Triton, "" where there is none
    gfx: str = ""  # architecture of an AMD GPU, such as "gfx942", which torch calls "cuda", too
    total_memory: int = 0  # bytes of the GPU, not those that are free; 0: not known

    @property
    def architecture(self) -> str:
        """The compile target: "SM90", "gfx942", or the type of another device."""
        if self.device_type != "cuda":
            return self.device_type
        return self.gfx or f"SM{self.capability[0]}{self.capability[1]}"


class Buffer(NamedTuple):
    """Shape and dtype of one workspace; entries of `shape` are int or SymInt."""

    shape: tuple
    dtype: torch.dtype


class Workspaces(NamedTuple):
    """The three scratch buffers of an op call. Their contents are undefined before and after."""

    workspace13: Buffer
    workspace2: Buffer
    index: Buffer  # type: ignore[assignment]  # shadows tuple.index. int32: sort order, offsets, counters
