"""Activation: one table of names, formulas and gate layouts.

g is the gate half and u the up half of a gated activation's input; L is `limit`. All math is fp32
with a single rounding to the input's dtype at the end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.checks import check_one_of

NO_LIMIT = 3.0e38  # finite stand-in for "no limit": AOTInductor cannot serialise inf

_GATED = (
    *("silu", "gelu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave", "swiglustep"),
    *("relu2", "situ", "powlu"),
)
_NOT_GATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
NAMES = _GATED + _NOT_GATED
PARAMETERS = ("alpha", "beta", "limit")
_DEFAULTS: dict[str, tuple[float | None, float | None, float | None]] = {
    # of PARAMETERS; None where the formula has no such number
    "silu": (None, None, NO_LIMIT),
    "swigluoai": (1.702, 1.0, 7.0),
    "swigluoai_uninterleave": (1.702, 1.0, 7.0),
    "swiglustep": (None, None, 7.0),
    "situ": (None, 4.0, 25.0),
    "powlu": (2.5, None, NO_LIMIT),
}


@dataclass(frozen=True, init=False)
class Activation:
    """The function between the two expert GEMMs.

    | name | formula |
    |---|---|
    | silu | silu(min(g, L)) * clamp(u, -L, L) |
    | gelu, gelu_tanh | gelu(g) * u, exact (erf) or tanh approximation |
    | swigluoai | as swigluoai_uninterleave, of rows interleaved gate, up, gate, up |
    | swigluoai_uninterleave | g * sigmoid(alpha * g) * (u + beta) of min(g, L), clamp(u, -L, L) |
    | swiglustep | min(silu(g), L) * clamp(u, -L, L) |
    | relu2 | relu(g)^2 * u |
    | situ | beta * tanh(g / beta) * sigmoid(g) * L * tanh(u / L) |
    | powlu | min(p(g) * sigmoid(g), L) * clamp(u, -L, L), p(g) = g^(alpha / (sqrt(g) + 1)) for
      g > 0, else g |
    | silu_no_mul, gelu_no_mul, gelu_tanh_no_mul | f(x), not gated |
    | relu2_no_mul | relu(x)^2, not gated |

    Args:
        name: one of the names above.
        alpha, beta, limit: parameters where the formula has them; None takes the name's default
            (1.702, 1.0, 7.0 for swigluoai, limit 7.0 for swiglustep, beta 4.0 and limit 25.0 for
            situ, alpha 2.5 for powlu, no limit for silu and powlu). math.inf is no limit, for
            situ u as it is.

    Raises:
        ValueError: unknown name, a parameter the formula does not have, alpha or beta that is not
            finite in fp32, or a limit, situ's beta or powlu's alpha that is not positive.
    """

    name: str
    alpha: float
    beta: float
    limit: float

    def __init__(
        self,
        name: str,
        alpha: float | None = None,
        beta: float | None = None,
        limit: float | None = None,
    ):
        check_one_of("activation", name, NAMES)
        given = dict(zip(PARAMETERS, (alpha, beta, limit), strict=True))
        defaults = dict(zip(PARAMETERS, _DEFAULTS.get(name, (None, None, None)), strict=True))
        unused = {"alpha": 1.0, "beta": 0.0, "limit": NO_LIMIT}
        object.__setattr__(self, "name", name)
        for i, (what, value) in enumerate(given.items()):
            default = defaults[what]
            if value is not None and default is None:
                takers = ", ".join([n for n, of in _DEFAULTS.items() if of[i] is not None])
                raise ValueError(f"activation {name!r} takes no {what}; {takers} do")
            if value is None:
                value = unused[what] if default is None else default
            elif (what == "limit" or name in ("situ", "powlu")) and not value > 0:
                raise ValueError(f"{what} must be positive, got {value}")
            if what == "limit":
                value = min(value, NO_LIMIT)
            elif not abs(value) <= NO_LIMIT:
                raise ValueError(f"{what} must be a finite number of fp32, got {value}")
            object.__setattr__(self, what, float(value))

    def __hash__(self) -> int:
        return hash(self.name)  # a fifth of the time that all fields take: calls are looked up so

    @property
    def gated(self) -> bool:
        """Whether the input has two halves (N = 2I)."""
        return self.name in _GATED

    @property
    def interleaved(self) -> bool:
        """Whether gate and up rows alternate instead of lying in two halves."""
        return self.name == "swigluoai"


@functools.lru_cache(maxsize=64)
def from_op(name: str, alpha: float, beta: float, limit: float) -> Activation:
    """The Activation an op call carries as four scalars."""
    activation = Activation(name)
    for field, value in (("alpha", alpha), ("beta", beta), ("limit", limit)):
        object.__setattr__(activation, field, value)
    return activation


_PLAIN = {name: Activation(name) for name in NAMES}


def resolve(activation: str | Activation) -> Activation:
    """The Activation of a name; an Activation is returned unchanged."""
    if isinstance(activation, Activation):
        return activation
    # kept, since making it costs a call time
    known = _PLAIN.get(activation) if isinstance(activation, str) else None
    return Activation(activation) if known is None else known


def apply(gate_up: Tensor, activation: Activation) -> Tensor:
    """Apply an activation to the output of the first GEMM.

    Args:
        gate_up: (..., N) any float dtype; never written.

    Returns:
        (..., I) in gate_up's dtype: fp32 math (fp64 for fp64), one rounding.
    """
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.to(torch.float32)
    return formula(wide, activation).to(gate_up.dtype)


def formula(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x (..., N) in x's own dtype, (..., I)."""
    name, limit = activation.name, activation.limit
    if not activation.gated:
        if name == "silu_no_mul":
            return F.silu(x)
        if name == "relu2_no_mul":
            return F.relu(x).square()
        return _gelu(name, x)
    if activation.interleaved:
        g, u = x[..., 0::2], x[..., 1::2]
    else:
        g, u = x.chunk(2, dim=-1)
    if name in ("gelu", "gelu_tanh"):
        return _gelu(name, g) * u
    if name == "relu2":
        return F.relu(g).square() * u
    if name == "situ":
        factor = u if limit == NO_LIMIT else limit * torch.tanh(u / limit)
        return activation.beta * torch.tanh(g / activation.beta) * torch.sigmoid(g) * factor
    if name == "powlu":
        return (_power(g, activation.alpha)[0] * torch.sigmoid(g)).clamp(max=limit) * u.clamp(
            -limit, limit
        )
    if name == "swiglustep":
        return F.silu(g).clamp(max=limit) * u.clamp(-limit, limit)
    if limit < NO_LIMIT:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if name == "silu":
        return F.silu(g) * u
    return g * torch.sigmoid(activation.alpha * g) * (u + activation.beta)


# Vector loops of torch compute the last elements of what a thread gets by other formulas than
# whole vectors. Rows of a multiple of so many columns are whole vectors, and blocks of at most so
# many elements are computed by one thread.
_COLUMNS_OF_VECTORS, _ELEMENTS_OF_A_THREAD = 64, 1 << 14


def apply_by_blocks(gate_up: Tensor, activation: Activation, out: Tensor) -> None:
    """out (S, I) = `apply`(gate_up (S, N)), with the same bits of a row among any number of
    others. For CPUs, where `apply` may round the last columns of some rows differently.

    All blocks, and so all calls of torch, have one shape.
    """
    S, I = out.shape  # noqa: E741
    rows = 1 if I % _COLUMNS_OF_VECTORS else max(1, _ELEMENTS_OF_A_THREAD // max(1, I))
    wide = torch.promote_types(out.dtype, torch.float32)
    block = torch.zeros(rows, gate_up.shape[1], dtype=wide, device=gate_up.device)
    for i in range(0, S, rows):
        count = min(rows, S - i)
        block[:count] = gate_up[i : i + count]  # the other rows are left from the block before
        out[i : i + count] = formula(block, activation)[:count]


def derivative(x: Tensor, grad: Tensor, activation: Activation) -> Tensor:
    """The gradient of x (..., N) from that of `formula`'s result (..., I), both fp32 or fp64.

    As for torch.clamp, gradients pass at the limit itself but not beyond it.
    """
    name, limit = activation.name, activation.limit
    if not activation.gated:
        if name == "relu2_no_mul":
            return 2 * F.relu(x) * grad
        return _derivative_of_one(name.removesuffix("_no_mul"), x, grad)
    if activation.interleaved:
        g, u = x[..., 0::2], x[..., 1::2]
    else:
        g, u = x.chunk(2, dim=-1)
    limited = limit < NO_LIMIT
    clamped_u = u.clamp(-limit, limit) if limited else u
    if name == "situ":
        tanh, sigmoid = torch.tanh(g / activation.beta), torch.sigmoid(g)
        slope = torch.tanh(u / limit) if limited else torch.zeros_like(u)
        factor = limit * slope if limited else u
        one = activation.beta * tanh * sigmoid
        dg = grad * factor * ((1 - tanh.square()) * sigmoid + one * (1 - sigmoid))
        return torch.cat((dg, grad * one * (1 - slope.square())), -1)
    if name == "relu2":
        one = F.relu(g)
        return torch.cat((grad * u * 2 * one, grad * one.square()), -1)
    if name == "powlu":
        (power, slope), sigmoid = _power(g, activation.alpha), torch.sigmoid(g)
        one = power * sigmoid
        dg = torch.where(one <= limit, grad * clamped_u * (slope + power * (1 - sigmoid)), 0)
        dg, du = dg * sigmoid, grad * one.clamp(max=limit)
    elif name in ("swigluoai", "swigluoai_uninterleave"):
        clamped_g = g.clamp(max=limit) if limited else g
        sigmoid = torch.sigmoid(activation.alpha * clamped_g)
        slope = sigmoid * (1 + activation.alpha * clamped_g * (1 - sigmoid))
        dg, du = grad * (clamped_u + activation.beta) * slope, grad * clamped_g * sigmoid
    elif name == "swiglustep":
        silu = F.silu(g)
        dg = _derivative_of_one("silu", g, grad * clamped_u * (silu <= limit))
        du = grad * silu.clamp(max=limit)
    else:
        clamped_g = g.clamp(max=limit) if limited else g
        one = F.silu(clamped_g) if name == "silu" else _gelu(name, clamped_g)
        dg, du = _derivative_of_one(name, clamped_g, grad * clamped_u), grad * one
    if limited:
        du = torch.where((u >= -limit) & (u <= limit), du, 0)
        if name not in ("swiglustep", "powlu"):
            dg = torch.where(g <= limit, dg, 0)
    if activation.interleaved:
        return torch.stack((dg, du), -1).flatten(-2)
    return torch.cat((dg, du), -1)


def _power(g: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """powlu's p(g), and its derivative."""
    positive = torch.where(g > 0, g, 1)
    root, log = positive.sqrt(), positive.log()
    exponent = alpha / (root + 1)
    slope = torch.exp((exponent - 1) * log) * (exponent - exponent * root * log / (2 * (root + 1)))
    return torch.where(g > 0, torch.exp(exponent * log), g), torch.where(g > 0, slope, 1)


def _gelu(name: str, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh" if name.startswith("gelu_tanh") else "none")


def _derivative_of_one(name: str, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of silu(x) or gelu(x)."""
    if name == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    approximate = "tanh" if name == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


# orders of w13's rows other than the natural one of its activation, by what they are made from
UP_GATE = "up_gate"  # up rows, then gate rows; made from gate rows, then up rows
UP_GATE_OF_PAIRS = "up_gate_of_pairs"  # the same, made from rows that alternate


def rows_before(activation: Activation | None) -> str:
    """The order of w13's rows before ``activation`` for backends that read up rows first."""
    if activation is None or not activation.gated:
        return ""
    return UP_GATE_OF_PAIRS if activation.interleaved else UP_GATE
