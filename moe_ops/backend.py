"""The names that a backend is written with: all that a package with a backend of its own needs
beside `moe_ops`.

docs/add_a_backend.md builds one from them. They are those that backends of this package use.

- `register` defines the operators of a `Backend`; `moe_ops.register_backend` takes its result. The
  facts of a backend are records: `Library`, `Takes`, `Exchanges`, and a `Claim` to be faster than
  others.
- The functions of a backend get a `Problem` and a `Machine`, and return `Workspaces` of `Buffer`s,
  computed by `cdiv`, `round_up`, `maximum` and `minimum`.
- Launchers get `ExpertsArgs`, `BatchedExpertsArgs` or `GroupedLinearArgs`, each with `Options`.
  `chunks` and `batched_chunks` cut them into the parts that bounded workspaces have room for,
  `carve` makes tensors of a workspace, and `local_ids` maps ids to the experts of this device.
- A `Lazy` names a launcher whose module the first call imports, a `Relayout` a layout of weights
  that `moe_ops.prepare` makes, a `Shortcut` a way past the launcher.
- `activations` has the `Activation` of an operator's options, and applies it in torch.
- An `Adapts` among what a backend takes runs `AdaptedArgs`: experts whose tokens have the adapters
  of a `TokenAdapters`.
- For calls with an exchange between ranks: `has_own_rows`, `sends_quantized`, `gathered`, and with
  Triton the kernels `sum_ranks` and `push_own_rows`.
"""

from __future__ import annotations

import importlib
from typing import Any

from moe_ops import activations
from moe_ops.activations import Activation
from moe_ops.kernels.launch import Lazy
from moe_ops.meta.workspace import carve, cdiv, maximum, minimum, round_up
from moe_ops.numerics.permute import local_ids
from moe_ops.ops.args import (
    AdaptedArgs,
    BatchedExpertsArgs,
    ExpertsArgs,
    GroupedLinearArgs,
    TokenAdapters,
)
from moe_ops.ops.backend import Adapts, Backend, Claim, Exchanges, Library, Shortcut, Takes
from moe_ops.ops.chunks import batched_chunks, chunks
from moe_ops.ops.exchange import gathered, has_own_rows, sends_quantized
from moe_ops.ops.library import register
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Buffer, Machine, Problem, Workspaces
from moe_ops.ops.relayout import Relayout

_WITH_TRITON = {
    "sum_ranks": "moe_ops.kernels.comm.push",
    "push_own_rows": "moe_ops.kernels.rows.push_scatter",
}

__all__ = [
    "Activation",
    "AdaptedArgs",
    "Adapts",
    "Backend",
    "BatchedExpertsArgs",
    "Buffer",
    "Claim",
    "Exchanges",
    "ExpertsArgs",
    "GroupedLinearArgs",
    "Lazy",
    "Library",
    "Machine",
    "Options",
    "Problem",
    "Relayout",
    "Shortcut",
    "Takes",
    "TokenAdapters",
    "Workspaces",
    "activations",
    "batched_chunks",
    "carve",
    "cdiv",
    "chunks",
    "gathered",
    "has_own_rows",
    "local_ids",
    "maximum",
    "minimum",
    "push_own_rows",  # noqa: F822
    "register",
    "round_up",
    "sends_quantized",
    "sum_ranks",  # noqa: F822
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TRITON:
        return getattr(importlib.import_module(_WITH_TRITON[name]), name)
    raise AttributeError(f"module 'moe_ops.backend' has no attribute {name!r}")
