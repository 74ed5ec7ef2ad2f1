"""The expert layer in fp64, on a CPU: what `moe_ops.self_check` holds every backend to.

It shares no code with any backend. Weights have the values that they store, and activations are
quantized by `moe_ops.numerics.quantize_activation`, which defines what a scheme means.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import numerics
from moe_ops.schemes import get_scheme


def experts(
    x: Tensor,  # (M, K)
    w13: Any,  # (E, 2I, K), plain or an ExpertTensor
    w2: Any,  # (E, K, I)
    topk_weights: Tensor,  # (M, top_k)
    topk_ids: Tensor,  # (M, top_k)
    w13_bias: Tensor | None = None,  # (E, 2I)
    w2_bias: Tensor | None = None,  # (E, K)
    *,
    rounded: torch.dtype = torch.float64,
) -> Tensor:
    """fp64 (M, K) of a layer with the activation silu; ids outside [0, E) contribute nothing. The
    first product is rounded to the dtype `rounded`.
    """
    here = (topk_ids >= 0) & (topk_ids < w13.shape[0])
    token, choice = here.nonzero().unbind(1)
    expert = topk_ids[token, choice].long()
    gate_up = _product(x[token], w13, w13_bias, expert).to(rounded).double()
    gate, up = gate_up.chunk(2, 1)
    y = _product(gate / (1 + torch.exp(-gate)) * up, w2, w2_bias, expert)
    weighted = y * topk_weights[token, choice].double().unsqueeze(1)
    return torch.zeros(x.shape, dtype=torch.float64).index_add_(0, token, weighted)


def _product(rows: Tensor, weight: Any, bias: Tensor | None, expert: Tensor) -> Tensor:
    """rows (S, K) through the weights of their experts (S,)."""
    rows = _as_multiplied(rows, weight, expert)
    values = weight.dequantize(torch.float64) if _scheme(weight) else weight.double()
    out = rows.new_zeros(rows.shape[0], values.shape[1])
    for e in range(values.shape[0]):
        out[expert == e] = rows[expert == e] @ values[e].t()
    return out if bias is None else out + bias.double()[expert]


def _as_multiplied(rows: Tensor, weight: Any, expert: Tensor) -> Tensor:
    """The fp64 values of rows (S, K) after the scheme has quantized them."""
    scheme = _scheme(weight)
    if get_scheme(scheme).activation is None:
        return rows.double()
    known = numerics.static_scale_of_rows(weight.activation_scale, expert)
    quantized = numerics.quantize_activation(rows.float(), scheme, known)
    return numerics.activation_values(quantized, scheme).double()


def _scheme(weight: Any) -> str:
    return getattr(weight, "scheme", "")
