"""What every backend is held to: expert layers written out once more, in fp64, from the formulas alone.

Nothing here comes from moe_ops: activations, e4m3 rounding and the quantization of activations are
spelled anew. Everything is differentiable; rounding counts as the identity (straight-through).

M tokens, S pairs, E local experts, N rows of w13 (2I gated, I not), K hidden size, I intermediate size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E4M3_MAX = 448.0
_INF = float("inf")
# (alpha, beta, limit) where nothing is said
DEFAULTS = {
    "swigluoai": (1.702, 1.0, 7.0),
    "swigluoai_uninterleave": (1.702, 1.0, 7.0),
    "swiglustep": (None, None, 7.0),
}
# what shares one activation scale, per scheme
SCALES = {
    "": None,
    "fp8_tensor": "tensor",
    "fp8_tensor_static": "static",
    "fp8_channel": "token",
    "fp8_block": "group",
    "fp8_w8a16:tensor": None,
    "fp8_w8a16:channel": None,
    "fp8_w8a16:block": None,
}


def activation(v: Tensor, name: str, alpha=None, beta=None, limit=None) -> Tensor:
    """(..., N) -> (..., I)."""
    given = (alpha, beta, limit)
    defaults = DEFAULTS.get(name, (None, None, None))
    alpha, beta, limit = [d if g is None else g for g, d in zip(given, defaults, strict=True)]
    limit = _INF if limit is None else limit

    def sigmoid(t):
        return 1 / (1 + torch.exp(-t))

    def gelu(t):
        return t * (1 + torch.erf(t / math.sqrt(2))) / 2

    def gelu_tanh(t):
        return t / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3)))

    def above(t, most):  # min(t, most)
        return torch.where(t > most, most, t)

    def within(t, most):
        return torch.where(t < -most, -most, above(t, most))

    alone = {
        "silu_no_mul": lambda t: t * sigmoid(t),
        "gelu_no_mul": gelu,
        "gelu_tanh_no_mul": gelu_tanh,
        "relu2_no_mul": lambda t: torch.where(t > 0, t, 0) ** 2,
    }
    if name in alone:
        return alone[name](v)
    I = v.shape[-1] // 2  # noqa: E741
    g, u = (v[..., ::2], v[..., 1::2]) if name == "swigluoai" else (v[..., :I], v[..., I:])
    if name == "silu":
        g = above(g, limit)
        return g * sigmoid(g) * within(u, limit)
    if name == "gelu":
        return gelu(g) * u
    if name == "gelu_tanh":
        return gelu_tanh(g) * u
    if name == "swiglustep":
        return above(g * sigmoid(g), limit) * within(u, limit)
    assert name in ("swigluoai", "swigluoai_uninterleave"), name
    g = above(g, limit)
    return g * sigmoid(alpha * g) * (within(u, limit) + beta)


def e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 value, ties to even: 3 mantissa bits, least exponent -6, largest magnitude 448."""
    x = x.clamp(-E4M3_MAX, E4M3_MAX)
    exponent = torch.floor(torch.log2(x.abs().clamp(min=2.0**-20))).clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return torch.round(x / step) * step


def _over_max(amax):
    # A GPU divides by a Python number through its reciprocal, which breaks the ties that 16-bit data have.
    return amax / torch.full_like(amax, E4M3_MAX)


def quantized_activation(rows: Tensor, scheme: str, static_scale: Tensor | None = None) -> Tensor:
    """Rows (S, K) as the scheme's GEMM sees them; every row counts for a scale shared by all."""
    shared = SCALES[scheme]
    if shared is None or rows.numel() == 0:
        return rows
    x = rows.detach()
    if shared == "static":
        scale = static_scale.double()
    elif shared == "tensor":
        scale = x.abs().max() / E4M3_MAX
    elif shared == "token":
        scale = _over_max(x.abs().amax(1, keepdim=True))
    else:
        parts = [p.abs().amax(1, keepdim=True).expand_as(p) for p in x.split(128, 1)]
        scale = _over_max(torch.cat(parts, 1))
    scale = torch.where(torch.as_tensor(scale) == 0, 1.0, scale)
    return rows + (e4m3(x / scale) * scale - x)


def dequantized(qdata: Tensor, scale: Tensor) -> Tensor:
    """(E, N, K) e4m3 elements times the scale of their expert, row or 128x128 block."""
    E, N, K = qdata.shape
    scale = scale.double()
    if scale.ndim == 1:
        scale = scale.view(E, 1, 1)
    elif scale.shape[1] != N or scale.shape[2] != 1:
        scale = scale.repeat_interleave(128, 1)[:, :N].repeat_interleave(128, 2)[..., :K]
    return qdata.to(torch.float32).double() * scale


def weight(w: Tensor) -> Tensor:
    """The fp64 values of a plain or quantized weight."""
    return dequantized(w.qdata, w.scale) if getattr(w, "scheme", "") else w.double()


def _linear(rows, w, bias, experts):
    """rows (S, K) through the weights of their experts (S,)."""
    y = torch.einsum("sk,snk->sn", rows, w[experts])
    return y if bias is None else y + bias.double()[experts]


def _expert_rows(rows, experts, w13, w2, act, w13_bias, w2_bias):
    """Both products and the activation between them for rows (S, K) of known experts (S,)."""
    scheme = getattr(w13, "scheme", "")
    rows = quantized_activation(rows, scheme, getattr(w13, "activation_scale", None))
    gate_up = _linear(rows, weight(w13), w13_bias, experts)
    hidden = activation(gate_up, **act)
    hidden = quantized_activation(hidden, scheme, getattr(w2, "activation_scale", None))
    return _linear(hidden, weight(w2), w2_bias, experts)


def local_pairs(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> list:
    """[(m, j, local expert)] of the pairs whose expert is here."""
    pairs = []
    table = None if expert_map is None else expert_map.tolist()
    for m, row in enumerate(topk_ids.tolist()):
        for j, e in enumerate(row):
            if table is not None:
                e = table[e] if 0 <= e < len(table) else -1
            if 0 <= e < num_experts:
                pairs.append((m, j, e))
    return pairs


def experts(
    hidden_states,
    w13,
    w2,
    topk_weights,
    topk_ids,
    *,
    activation="silu",
    w13_bias=None,
    w2_bias=None,
    expert_map=None,
    router_weight_on_input=False,
) -> Tensor:
    """`moe_ops.fused_experts` in fp64; `activation` is a name or a dict of name, alpha, beta, limit."""
    act = {"name": activation} if isinstance(activation, str) else activation
    pairs = local_pairs(topk_ids, w13.shape[0], expert_map)
    out = torch.zeros(hidden_states.shape, dtype=torch.float64, device=hidden_states.device)
    if not pairs:
        return out
    m, j, e = torch.tensor(pairs, device=out.device).T
    rows, scale = hidden_states.double()[m], topk_weights.double()[m, j].unsqueeze(1)
    if router_weight_on_input:
        rows = rows * scale
    y = _expert_rows(rows, e, w13, w2, act, w13_bias, w2_bias)
    return out.index_add(0, m, y if router_weight_on_input else y * scale)


def batched(hidden_states, w13, w2, counts, *, activation="silu", w13_bias=None, w2_bias=None):
    """`moe_ops.batched_experts` in fp64, NaN in the rows past each count."""
    act = {"name": activation} if isinstance(activation, str) else activation
    E, T, _ = hidden_states.shape
    out = torch.full(hidden_states.shape, math.nan, dtype=torch.float64)
    out = out.to(hidden_states.device)
    inside = torch.arange(T) < counts.cpu().unsqueeze(1)  # (E, T)
    e, t = [index.to(out.device) for index in inside.nonzero().T]
    if e.numel():
        rows = hidden_states.double()[e, t]
        out[e, t] = _expert_rows(rows, e, w13, w2, act, w13_bias, w2_bias)
    return out


def grouped_linear(x, weight_, offsets, *, bias=None) -> Tensor:
    """`moe_ops.grouped_linear` in fp64."""
    S, N = x.shape[0], weight_.shape[1]
    rows = torch.arange(min(S, int(offsets[-1])), device=x.device)
    e = torch.searchsorted(offsets, rows, right=True)
    scheme = getattr(weight_, "scheme", "")
    inside = quantized_activation(
        x[: rows.shape[0]].double(), scheme, getattr(weight_, "activation_scale", None)
    )
    y = _linear(inside, weight(weight_), bias, e)
    return torch.cat((y, y.new_zeros(S - rows.shape[0], N)))


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """||actual - expected|| / max(||expected||, floor), Frobenius."""
    expected = expected.detach().double()
    size = expected.norm().clamp(min=max(floor, 1e-30))
    return float((actual.detach().double() - expected).norm() / size)
