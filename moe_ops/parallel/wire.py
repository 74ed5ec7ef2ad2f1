"""Rows that travel to the ranks of their experts quantized, as the experts would quantize them.

M tokens of this rank, K hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import backends, environment
from moe_ops.kernels.launch import Lazy
from moe_ops.numerics import quantize_activation, scaling
from moe_ops.numerics.activations import QuantizedActivation
from moe_ops.ops.library import register_function
from moe_ops.schemes import QuantDesc, get_scheme

_LAUNCH = Lazy("moe_ops.kernels.rows.wire:quantize_rows")


def why_not_quantized(
    weight: Any,  # an ExpertTensor or a plain tensor
    columns: int,
    backend: str = "auto",
) -> str | None:
    """Why rows for experts with this w13 travel as they are; None: they travel quantized.

    A row on its own must say how it is quantized, or its scale be known everywhere: then its bits
    are those that its experts would have made of it.

    Args:
        weight: w13 of the experts.
        columns: K.
        backend: the one that runs the experts.
    """
    name = getattr(weight, "scheme", "")
    known = weight.activation_scale if name else None
    if reason := why_not_scheme(name, known is not None):
        return reason
    desc = get_scheme(name).activation
    assert desc is not None
    if known is not None and known.numel() != 1:
        return "each expert has a scale of activations of its own"
    if columns % desc.format.columns_together:
        return f"{columns} columns do not fill bytes"
    if weight.weight_layout:
        return f"weights in layout {weight.weight_layout!r} may take rows as they are alone"
    if backend != "auto" and name not in backends.named(backend).takes.quantized_input:
        return f"backend {backend!r} takes no quantized rows for scheme {name!r}"
    return None


def pays_later(scheme: str, layout: str = "", backend: str = "auto") -> bool:
    """Whether rows may travel while they are copied to experts with such weights.

    Decided by what is equal on all ranks, because all must send rows after their routing, or none.
    """
    found = backends.BACKENDS if backend == "auto" else (backends.named(backend),)
    return not layout and any([scheme in one.exchanges.sends_rows for one in found])


def quantizes_later(scheme: str, columns: int) -> bool:
    """Whether rows that travel after their routing are quantized: where a kernel makes one of
    quantizing, sending and copying (kernels/rows/push_scatter.py).
    """
    return scheme == "fp8_block" and columns % 128 == 0


def why_not_scheme(name: str, known: bool) -> str | None:
    """The reasons that follow from a scheme, None where there are none.

    Args:
        name: of the scheme.
        known: the weight has an activation_scale.
    """
    desc = get_scheme(name).activation if name else None
    if desc is None:
        return "the experts' scheme does not quantize activations"
    if desc.channel_scale:
        return "rows have scales of two kinds, which none of the experts' kernels takes"
    if not known and (desc.group.is_tensor or desc.global_scale):
        return "one scale of activations follows from all rows of the rank that has the experts"
    return None


def quantize_rows(x: Tensor, weight: Any) -> QuantizedActivation:  # x: (M, K)
    """Rows as `why_not_quantized` allows them; by one kernel for the schemes with one.

    Scales are (M, groups) or one for all rows. They have the bits of `quantize_activation`.
    """
    return quantize_for(x, weight.scheme, weight.activation_scale)


def quantize_for(
    x: Tensor,
    name: str,  # of the scheme
    known: Tensor | None = None,  # its activation_scale
) -> QuantizedActivation:
    """`quantize_rows` for any weight of a scheme."""
    desc = get_scheme(name).activation
    assert desc is not None
    if not (x.is_cuda and environment.TRITON and _has_kernel(desc)):
        return quantize_activation(x, name, known)
    q, scale = _OP(x, name)
    return QuantizedActivation(q, scale if desc.group.cols == 128 else scaling.plain(scale, desc))


def _has_kernel(desc: QuantDesc) -> bool:
    of_row = desc.group.is_row or (desc.group.rows, desc.group.cols) == (1, 128)
    return of_row and desc.dtype in ("e4m3", "int8") and not desc.static


def _buffers(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Outputs of the kernel: q (M, K), and scales or largest magnitudes (M, groups)."""
    desc = get_scheme(scheme).activation
    assert desc is not None
    M, K = x.shape
    groups = 1 if desc.group.is_row else -(-K // 128)
    return (
        x.new_empty((M, K), dtype=desc.storage_dtype),
        x.new_empty((M, groups), dtype=torch.float32),
    )


def _quantize(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    q, scale = _buffers(x, scheme)
    _LAUNCH(q, scale, x, scheme)
    return q, scale


_OP = register_function(
    "quantize_rows",
    "(Tensor x, str scheme) -> (Tensor, Tensor)",
    _quantize,
    _buffers,
)
