"""What every backend is held to: expert layers written out once more, in fp64, from the formulas
alone.

Nothing here comes from moe_ops: activations, e4m3 rounding and the quantization of activations are
spelled anew. Everything is differentiable; rounding counts as the identity (straight-through).

M tokens, S pairs, E local experts, N rows of w13 (2I gated, I not), K hidden size, I intermediate
size.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

E4M3_MAX = 448.0
_INF = float("inf")
# (alpha, beta, limit) where nothing is said
DEFAULTS = {
    "swigluoai": (1.702, 1.0, 7.0),
    "swigluoai_uninterleave": (1.702, 1.0, 7.0),
    "swiglustep": (None, None, 7.0),
    "situ": (None, 4.0, 25.0),
    "powlu": (2.5, None, None),
}
# number format -> (bits of exponent, bits of mantissa, largest magnitude); OCP's, with the usual
# bias
# number formats of which each code has a number of its own: bitsandbytes' and ggml's
LEVELS = {
    "nf4": "bf800000 bf3239b1 bf066b30 beca32a0 be91a24d be3d353f bdba7871 00000000 "
    "3da2faff 3e24cae3 3e7c04dd 3ead033a 3ee1a4b8 3f1007ab 3f3913b3 3f800000",
    "fp4": "00000000 3baaaaab 3f2aaaab 3f800000 3eaaaaab 3f000000 3e2aaaab 3e800000 "
    "80000000 bbaaaaab bf2aaaab bf800000 beaaaaab bf000000 be2aaaab be800000",
    "iq4": "c2fe0000 c2d00000 c2a60000 c2820000 c2440000 c20c0000 c1b00000 c1200000 "
    "3f800000 41500000 41c80000 42180000 42540000 428a0000 42b20000 42e20000",
}
FORMATS = {"e4m3": (4, 3, 448.0), "e3m2": (3, 2, 28.0), "e2m3": (2, 3, 7.5), "e2m1": (2, 1, 6.0)}
# scheme -> (format of activations, what shares one scale of them); rules of power-of-two scales by
# name
ACTIVATIONS: dict[str, tuple[str, str] | None] = {
    "": None,
    "fp8_tensor": ("e4m3", "tensor"),
    "fp8_tensor_static": ("e4m3", "static"),
    "fp8_channel": ("e4m3", "token"),
    "fp8_channel_tensor": ("e4m3", "tensor"),
    "fp8_channel_tensor_static": ("e4m3", "static"),
    "fp8_block": ("e4m3", "128"),
    "fp8_block:ue8m0": ("e4m3", "128 power of two"),
    "fp8_w8a16:tensor": None,
    "fp8_w8a16:channel": None,
    "fp8_w8a16:block": None,
    "int8_w8a8": ("int8", "token"),
    "int8_w8a8_tensor": ("int8", "tensor"),
    "int8_w8a8_static": ("int8", "static"),
    **{
        f"{bits}:{group}{zero_point}": None
        for bits in ("int8_w8a16", "int4_w4a16")
        for group in ("channel", "g32", "g64", "g128")
        for zero_point in ("", ":zp", ":min")
    },
    "int4_w4a16:g32:super:min": None,
    "int6_w6a16:g16": None,
    "int6_w6a16:g16:super": None,
    "int5_w5a16:g32": None,
    "int5_w5a16:g32:min": None,
    "int5_w5a16:g32:super:min": None,
    "iq4_w4a16:g32": None,
    "iq4_w4a16:g32:super": None,
    **{f"{fmt}_w4a16:{group}": None for fmt in ("nf4", "fp4") for group in ("g64", "g32")},
    "int4_w4a8": ("e4m3", "token"),
    **{f"mxfp4_w4a16{rule}": None for rule in ("", ":round", ":ceil")},
    **{f"mxfp4_w4a8{rule}": ("e4m3", "128") for rule in ("", ":round", ":ceil")},
    **{f"mxfp4_mxfp8{rule}": ("e4m3", "mx ceil") for rule in ("", ":round", ":ceil")},
    "mxfp4": ("e2m1", "mx ocp"),
    "mxfp4:round": ("e2m1", "mx round"),
    "mxfp4:ceil": ("e2m1", "mx ceil"),
    **{f"mxfp6_{f}": (f, "mx ocp") for f in ("e3m2", "e2m3")},
    **{f"mxfp6_{f}:mxfp4": ("e2m1", "mx ocp") for f in ("e3m2", "e2m3")},
    **{f"mxfp6_{f}:mxfp8": ("e4m3", "mx ceil") for f in ("e3m2", "e2m3")},
    **{f"mxfp6_{f}_w6a16": None for f in ("e3m2", "e2m3")},
    **{f"mxfp4_mxfp6_{f}": (f, "mx ocp") for f in ("e3m2", "e2m3")},
    "mxfp8": ("e4m3", "mx ceil"),
    "nvfp4": ("e2m1", "nv"),
    "nvfp4_w4a16": None,
}


def schemes_of(scheme: str) -> tuple[str, str]:
    """Of w13 and of w2, in "int4_w4a16:g64+plain" two."""
    names = ["" if name == "plain" else name for name in scheme.split("+")]
    return names[0], names[-1]


def weight_format(scheme: str) -> str:
    """The number format of a scheme's weights."""
    if scheme.startswith("mxfp6"):
        return scheme[6:10]
    start = scheme.split("_")[0].split(":")[0]
    return {"fp8": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}.get(start, start)


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
    I = v.shape[-1] // 2
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
    if name == "relu2":
        return torch.where(g > 0, g, 0) ** 2 * u
    if name == "situ":
        half = u if math.isinf(limit) else limit * torch.tanh(u / limit)
        return beta * torch.tanh(g / beta) * sigmoid(g) * half
    if name == "powlu":
        power = torch.where(g > 0, g, 1) ** (alpha / (torch.where(g > 0, g, 1) ** 0.5 + 1))
        return above(torch.where(g > 0, power, g) * sigmoid(g), limit) * within(u, limit)
    assert name in ("swigluoai", "swigluoai_uninterleave"), name
    g = above(g, limit)
    return g * sigmoid(alpha * g) * (within(u, limit) + beta)


def nearest(x: Tensor, fmt: str) -> Tensor:
    """Nearest value of a number format, ties to even, saturating; of levels ties to the lower."""
    if fmt in LEVELS:
        levels = torch.tensor(sorted(code_values(fmt)), dtype=torch.float64)
        above = x.double().unsqueeze(-1) > ((levels[1:] + levels[:-1]) / 2).float().double()
        return levels[above.sum(-1)]
    if fmt == "int8":
        return torch.round(x).clamp(-128, 127)
    exponents, mantissa, largest = FORMATS[fmt]
    least = 2 - 2 ** (exponents - 1)  # exponent of the least normal number
    x = x.double().clamp(-largest, largest)
    exponent = torch.frexp(x.abs().clamp(min=2.0**-20)).exponent.long() - 1
    # a power of two from its bits: 2.0**exponent is an ulp off for some on a GPU, where ties then
    # round either way
    step = (exponent.clamp(min=least) - mantissa + 1023 << 52).view(torch.float64)
    return torch.round(x / step) * step


def e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 value, ties to even: 3 mantissa bits, least exponent -6, largest magnitude
    448."""
    return nearest(x, "e4m3")


def code_values(fmt: str) -> list[float]:
    """What each code of a floating-point format, or of one of levels, stands for."""
    if fmt in LEVELS:
        return [struct.unpack(">f", bytes.fromhex(bits))[0] for bits in LEVELS[fmt].split()]
    exponents, mantissa, _ = FORMATS[fmt]
    bias, values = 2 ** (exponents - 1) - 1, []
    for code in range(2 ** (exponents + mantissa)):
        e, m = divmod(code, 2**mantissa)
        fraction = m / 2**mantissa
        values.append((1 + fraction) * 2.0 ** (e - bias) if e else fraction * 2.0 ** (1 - bias))
    if fmt == "e4m3":
        values[-1] = math.nan
    return values + [-v for v in values]


def codes(qdata: Tensor, bits: int) -> Tensor:
    """int64 codes (..., K) of packed bytes: bit i of a row is bit i % 8 of its byte i // 8."""
    bytes_ = qdata.view(torch.uint8)
    flat = torch.stack([(bytes_ >> i) & 1 for i in range(8)], -1).flatten(-2)
    grouped = flat.unflatten(-1, (-1, bits))
    return sum(grouped[..., i] << i for i in range(bits)).long()


def planes(qdata: Tensor, high: int) -> Tensor:
    """int64 codes (..., K) of int5 and int6, with 1 and 2 high bits: those of column c by its
    bytes in the layout.
    """
    K = qdata.shape[-1] * 8 // (4 + high)
    unit = math.gcd(K, 128)
    run = unit * high // 8  # bytes
    c = torch.arange(K, device=qdata.device)
    within, first = c % unit // 2, c // unit * (unit // 2 + run)
    low = qdata[..., first + within].long() >> 4 * (c % 2) & 15
    place = high * (2 * (within // run) + c % 2)
    above = qdata[..., first + unit // 2 + within % run].long() >> place
    return low + 16 * (above & (2**high - 1))


def stored(qdata: Tensor, fmt: str) -> Tensor:
    """The fp64 values (..., K) of stored elements; of int4, int5 and int6 their codes, from 0."""
    if fmt == "int8":
        return qdata.double()
    if fmt.startswith("int"):
        bits = int(fmt[3:])
        return (codes(qdata, 4) if bits == 4 else planes(qdata, bits - 4)).double()
    table = torch.tensor(code_values(fmt), dtype=torch.float64, device=qdata.device)
    return table[codes(qdata, 4 if fmt in LEVELS else 1 + sum(FORMATS[fmt][:2]))]


def _over(amax, divisor: float):
    # A GPU divides by a Python number through its reciprocal, which breaks the ties that 16-bit
    # data have.
    return (amax / torch.full_like(amax, divisor)).float().double()


def power_of_two(amax: Tensor, fmt: str, rule: str) -> Tensor:
    """fp64 scales of groups of these largest magnitudes by a rule of the MX formats."""
    largest, mantissa = FORMATS[fmt][2], FORMATS[fmt][1]
    amax = amax.double()
    if rule == "ceil":
        amax = amax.clamp(min=1e-4) if fmt == "e2m1" else amax
        exponent = torch.ceil(torch.log2(amax / largest))
    else:
        exponent = torch.floor(torch.log2(amax))
        if rule == "round":  # as if amax were rounded to the format's mantissa first
            exponent = exponent + (amax / 2.0**exponent >= 2 - 2.0 ** (-mantissa - 1))
        exponent = exponent - math.floor(math.log2(largest))
    return 2.0 ** exponent.clamp(-127, 127)


def _by_groups(x: Tensor, size: int, scale_of) -> Tensor:
    """Scales of the elements of rows (S, K), from the largest magnitudes of groups along K."""
    parts = [scale_of(p.abs().amax(1, keepdim=True)).expand_as(p) for p in x.split(size, 1)]
    return torch.cat(parts, 1)


def quantized_activation(rows: Tensor, scheme: str, static_scale: Tensor | None = None) -> Tensor:
    """Rows (S, K) as the scheme's GEMM sees them; every row counts for a scale shared by all."""
    if ACTIVATIONS[scheme] is None or rows.numel() == 0:
        return rows
    fmt, shared = ACTIVATIONS[scheme]
    largest = 127.0 if fmt == "int8" else FORMATS[fmt][2]
    x = rows.detach()
    if shared == "static":  # one, or one of each row
        scale = static_scale.double()
    elif shared == "tensor":
        scale = _over(x.abs().max(), largest)
    elif shared == "token":
        scale = _over(x.abs().amax(1, keepdim=True), largest)
    elif shared == "128":
        scale = _by_groups(x, 128, lambda amax: _over(amax, largest))
    elif shared == "128 power of two":
        scale = _by_groups(
            x, 128, lambda amax: 2.0 ** torch.ceil(torch.log2(_over(amax.clamp(min=1e-30), 448.0)))
        )
    elif shared == "nv":
        whole = E4M3_MAX * 6 / x.abs().max() if static_scale is None else 1 / static_scale
        whole = whole.float()
        scale = _by_groups(x, 16, lambda amax: e4m3((whole * _over(amax, 6.0).float()).double()))
        scale = scale / whole.double()
    else:
        scale = _by_groups(x, 32, lambda amax: power_of_two(amax, fmt, shared[3:]))
    scale = torch.where(scale == 0, 1.0, scale)
    # divisor and quotient are fp32 numbers: their last bits decide what is halfway between two
    # codes
    quotient = (x / scale.float().double()).float().double()
    return rows + (nearest(quotient, fmt) * scale - x)


def dequantized(
    qdata: Tensor,
    scale: Tensor,
    scheme: str = "fp8_block",
    zero_point: Tensor | None = None,
    global_scale: Tensor | None = None,
    channel_scale: Tensor | None = None,
) -> Tensor:
    """The fp64 values of stored weights (E, N, K): elements times the scale of their expert, row,
    group or 128x128 block. int4 times such a scale is rounded to e4m3 before a scale of the row
    multiplies it."""
    fmt = weight_format(scheme)
    elements = stored(qdata, fmt)
    E, N, K = elements.shape
    if scheme.startswith("mx"):
        scale = 2.0 ** (scale.double() - 127)

    def spread(t: Tensor) -> Tensor:
        t = t.to(torch.float32).double() if t.dtype != torch.float64 else t
        if t.ndim == 1:
            return t.view(E, 1, 1)
        if "block" in scheme:
            return t.repeat_interleave(128, 1)[:, :N].repeat_interleave(128, 2)[..., :K]
        return t.repeat_interleave(K // t.shape[2], 2)

    if ":super" in scheme:
        scale, zero_point = one_level(scale, zero_point, channel_scale)
        channel_scale = None
    if scheme.endswith(":min"):  # the value of the least element, 0 of int4 and -128 of int8
        elements = elements + (128 if fmt == "int8" else 0)
        return elements * spread(scale) + spread(zero_point)
    if zero_point is not None:
        elements = elements - spread(zero_point)
    elif fmt.startswith("int") and fmt != "int8":
        elements = elements - 2 ** (int(fmt[3:]) - 1)
    values = elements * spread(scale)
    if fmt == "int4" and channel_scale is not None:
        values = e4m3(values)
    values = values if channel_scale is None else values * channel_scale.double()
    return values if global_scale is None else values / spread(global_scale)


def one_level(
    scale: Tensor, minimum: Tensor | None, above: Tensor
) -> tuple[Tensor, Tensor | None]:
    """fp64 scales and minima of their codes (E, N, groups) and the fp16 numbers above those of 256
    columns: pairs where there are minima."""
    each = scale.shape[2] * (1 if minimum is None else 2) // above.shape[2]
    pairs = above.double().unflatten(2, (-1, 1 if minimum is None else 2))
    of_scale, *of_minimum = [
        pairs[..., i].repeat_interleave(each, 2) for i in range(pairs.shape[3])
    ]
    return scale.double() * of_scale, minimum.double() * of_minimum[0] if of_minimum else None


def weight(w: Tensor) -> Tensor:
    """The fp64 values of a plain or quantized weight."""
    if not getattr(w, "scheme", ""):
        return w.double()
    return dequantized(w.qdata, w.scale, w.scheme, w.zero_point, w.global_scale, w.channel_scale)


def static_scale(w: Tensor, experts: Tensor) -> Tensor | None:
    """The known scale of activations, or (S, 1) that of each row's expert."""
    scale = getattr(w, "activation_scale", None)
    return scale if scale is None or scale.numel() == 1 else scale[experts].unsqueeze(1)


def _linear(rows, w, bias, experts):
    """rows (S, K) through the weights of their experts (S,)."""
    y = rows.new_zeros(len(rows), w.shape[1])
    for e in experts.unique().tolist():  # (weights of each row would take gigabytes)
        here = (experts == e).nonzero().flatten()
        y = y.index_add(0, here, rows[here] @ w[e].T)
    return y if bias is None else y + bias.double()[experts]


def _expert_rows(
    rows, experts, w13, w2, act, w13_bias, w2_bias, rounded=torch.float64, weights=torch.float64
):
    """Both products and the activation between them for rows (S, K) of known experts (S,)."""
    scheme = getattr(w13, "scheme", "")
    rows = quantized_activation(rows, scheme, static_scale(w13, experts))
    gate_up = _linear(rows, weight(w13).to(weights).double(), w13_bias, experts)
    hidden = activation(gate_up, **act).to(rounded).double()
    scheme = getattr(w2, "scheme", "")
    hidden = quantized_activation(hidden, scheme, static_scale(w2, experts))
    return _linear(hidden, weight(w2).to(weights).double(), w2_bias, experts)


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
    rounded=torch.float64,
    weights=torch.float64,
) -> Tensor:
    """`moe_ops.fused_experts` in fp64; `activation` is a name or a dict of name, alpha, beta,
    limit.

    Or with the activation's results and the layer's rounded once to the dtype `rounded`, and
    weights to `weights`.
    """
    act = {"name": activation} if isinstance(activation, str) else activation
    pairs = local_pairs(topk_ids, w13.shape[0], expert_map)
    out = torch.zeros(hidden_states.shape, dtype=torch.float64, device=hidden_states.device)
    if not pairs:
        return out
    m, j, e = torch.tensor(pairs, device=out.device).T
    rows, scale = hidden_states.double()[m], topk_weights.double()[m, j].unsqueeze(1)
    if router_weight_on_input:
        rows = rows * scale
        # as of quotients, last bits decide what is halfway
        if getattr(w13, "scheme", "") or getattr(w2, "scheme", ""):
            rows = rows.float().double()
    y = _expert_rows(rows, e, w13, w2, act, w13_bias, w2_bias, rounded, weights)
    out = out.index_add(0, m, y if router_weight_on_input else y * scale)
    return out.to(rounded).double()


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


def grouped(hidden_states, w13, w2, counts, *, activation="silu", w13_bias=None, w2_bias=None):
    """`moe_ops.grouped_experts` in fp64, zeros in the rows past those of experts."""
    act = {"name": activation} if isinstance(activation, str) else activation
    R, device = hidden_states.shape[0], hidden_states.device
    e = torch.repeat_interleave(torch.arange(counts.numel()), counts.cpu().clamp(min=0))[:R]
    e = e.to(device)
    rows = hidden_states[: e.numel()].double()
    out = torch.zeros(hidden_states.shape, dtype=torch.float64, device=device)
    if not e.numel():
        return out
    inside = _expert_rows(rows, e, w13, w2, act, w13_bias, w2_bias)
    return torch.cat((inside, out[e.numel() :]))


def grouped_linear(x, weight_, offsets, *, bias=None) -> Tensor:
    """`moe_ops.grouped_linear` in fp64."""
    S, N = x.shape[0], weight_.shape[1]
    rows = torch.arange(min(S, int(offsets[-1])), device=x.device)
    e = torch.searchsorted(offsets, rows, right=True)
    scheme = getattr(weight_, "scheme", "")
    inside = quantized_activation(x[: rows.shape[0]].double(), scheme, static_scale(weight_, e))
    y = _linear(inside, weight(weight_), bias, e)
    return torch.cat((y, y.new_zeros(S - rows.shape[0], N)))


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """||actual - expected|| / max(||expected||, floor), Frobenius."""
    expected = expected.detach().double()
    size = expected.norm().clamp(min=max(floor, 1e-30))
    return float((actual.detach().double() - expected).norm() / size)
