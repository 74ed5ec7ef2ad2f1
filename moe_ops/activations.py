"""Activation: one table of names, formulas and gate layouts.

g is the gate half and u the up half of a gated activation's input; L is `limit`. All math is fp32
with a single rounding to the input's dtype at the end.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.checks import check_one_of

NO_LIMIT = 3.0e38  # finite stand-in for "no limit": AOTInductor cannot serialise inf
# HAS_LIMIT of kernels whose alpha, beta and limit are pointers to one for each expert
BY_EXPERT = 2

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
            situ u as it is. A tensor (E,) has one for each expert of the call, those of
            its weights; it is copied.

    Attributes:
        by_expert: (3, E) fp32, alpha, beta and limit of each expert, if one was a tensor, else
            None. Where it is not None the numbers alpha, beta and limit are not read.

    Raises:
        ValueError: unknown name, a parameter the formula does not have, alpha or beta that is not
            finite in fp32, or a limit, situ's beta or powlu's alpha that is not positive (values
            of tensors are not checked on GPUs); tensors of other shapes or of unequal ones, or
            one that requires a gradient.
    """

    name: str
    alpha: float
    beta: float
    limit: float
    by_expert: Tensor | None = field(init=False, repr=False)  # no default: torch 2.11 passes it

    def __init__(
        self,
        name: str,
        alpha: float | Tensor | None = None,
        beta: float | Tensor | None = None,
        limit: float | Tensor | None = None,
    ):
        check_one_of("activation", name, NAMES)
        given = dict(zip(PARAMETERS, (alpha, beta, limit), strict=True))
        defaults = dict(zip(PARAMETERS, _DEFAULTS.get(name, (None, None, None)), strict=True))
        unused = {"alpha": 1.0, "beta": 0.0, "limit": NO_LIMIT}
        object.__setattr__(self, "name", name)
        tensors: dict[str, Tensor] = {}
        value: Any
        for i, (what, value) in enumerate(given.items()):
            default = defaults[what]
            if value is not None and default is None:
                takers = ", ".join([n for n, of in _DEFAULTS.items() if of[i] is not None])
                raise ValueError(f"activation {name!r} takes no {what}; {takers} do")
            positive = what == "limit" or name in ("situ", "powlu")
            if isinstance(value, Tensor) and value.requires_grad:
                raise ValueError(f"{what} has no gradient: give {what}.detach()")
            if isinstance(value, Tensor) and value.ndim:
                tensors[what] = _checked(what, value, positive)
                value = None
            if value is None:
                value = unused[what] if default is None else default
            elif positive and not value > 0:
                raise ValueError(f"{what} must be positive, got {value}")
            if what == "limit":
                value = min(value, NO_LIMIT)
            elif not abs(value) <= NO_LIMIT:
                raise ValueError(f"{what} must be a finite number of fp32, got {value}")
            object.__setattr__(self, what, float(value))
        object.__setattr__(self, "by_expert", self._stacked(tensors) if tensors else None)

    def _stacked(self, tensors: dict[str, Tensor]) -> Tensor:
        """(3, E): all parameters, those that are numbers for every expert."""
        shapes = {what: tuple(t.shape) for what, t in tensors.items()}
        if len({*shapes.values()}) > 1 or len({t.device for t in tensors.values()}) > 1:
            of = ", ".join([f"{what} {shape}" for what, shape in shapes.items()])
            raise ValueError(f"tensors must have one shape (E,) and one device, got {of}")
        like = next(iter(tensors.values())).to(torch.float32)
        found = [
            tensors[what] if what in tensors else torch.full_like(like, getattr(self, what))
            for what in PARAMETERS
        ]
        return torch.stack([t.to(torch.float32).clamp(max=NO_LIMIT) for t in found])

    def __hash__(self) -> int:
        return hash(self.name)  # a fifth of the time that all fields take: calls are looked up so

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Activation) or self.by_expert is not other.by_expert:
            return False
        mine, others = [(a.name, a.alpha, a.beta, a.limit) for a in (self, other)]
        return mine == others

    @property
    def by_name(self) -> Activation:
        """The same without `by_expert`: what is static of it."""
        if self.by_expert is None:
            return self
        return from_op(self.name, self.alpha, self.beta, self.limit)

    def renamed(self, name: str) -> Activation:
        """The same parameters under another name, of the same formula on rows in another order."""
        found = Activation(name)
        for what in (*PARAMETERS, "by_expert"):
            object.__setattr__(found, what, getattr(self, what))
        return found

    @property
    def gated(self) -> bool:
        """Whether the input has two halves (N = 2I)."""
        return self.name in _GATED

    @property
    def interleaved(self) -> bool:
        """Whether gate and up rows alternate instead of lying in two halves."""
        return self.name == "swigluoai"


def _checked(what: str, value: Tensor, positive: bool) -> Tensor:
    """A parameter with one number for each expert."""
    if value.ndim != 1 or not value.dtype.is_floating_point:
        raise ValueError(
            f"{what} must be a number, or a floating-point tensor (E,) with one for each expert, "
            f"got {value.dtype} of shape {tuple(value.shape)}"
        )
    if value.device.type == "cpu" and not torch.compiler.is_compiling():
        if positive and not bool((value > 0).all()):
            raise ValueError(f"{what} must be positive, got {value.tolist()}")
        if what != "limit" and not bool((value.abs() <= NO_LIMIT).all()):
            raise ValueError(f"{what} must be finite numbers of fp32, got {value.tolist()}")
    return value


@dataclass(frozen=True)
class RowActivation:
    """An activation whose parameters differ by row, for `formula` and `derivative`."""

    of: Activation
    alpha: Tensor  # (rows, 1)
    beta: Tensor
    limit: Tensor

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def gated(self) -> bool:
        return self.of.gated

    @property
    def interleaved(self) -> bool:
        return self.of.interleaved

    def at(self, rows: Tensor | slice) -> RowActivation:
        """That of some of the rows."""
        return RowActivation(self.of, self.alpha[rows], self.beta[rows], self.limit[rows])


AnyActivation = Activation | RowActivation


def of_rows(of: Activation, by_expert: Tensor | None, experts: Tensor) -> AnyActivation:
    """The activation of rows whose experts are given, of an expert that is not there anything.

    Args:
        by_expert: (3, E), or None where all experts have the parameters of `of`.
        experts: (rows,) int64.
    """
    if by_expert is None:
        return of
    numbers = by_expert.index_select(1, experts.clamp(0, by_expert.shape[1] - 1))
    return RowActivation(of, *numbers.unsqueeze(-1))


@functools.lru_cache(maxsize=64)
def from_op(name: str, alpha: float, beta: float, limit: float) -> Activation:
    """The Activation an op call carries as four scalars."""
    activation = Activation(name)
    for what, value in zip(PARAMETERS, (alpha, beta, limit), strict=True):
        object.__setattr__(activation, what, value)
    return activation


_PLAIN = {name: Activation(name) for name in NAMES}


def resolve(activation: str | Activation) -> Activation:
    """The Activation of a name; an Activation is returned unchanged."""
    if isinstance(activation, Activation):
        return activation
    # kept, since making it costs a call time
    known = _PLAIN.get(activation) if isinstance(activation, str) else None
    return Activation(activation) if known is None else known


def resolve_numbers(activation: str | Activation) -> Activation:
    """As `resolve`, for functions whose activations have the same parameters for all experts.

    Raises:
        ValueError: they differ by expert.
    """
    found = resolve(activation)
    if found.by_expert is not None:
        raise ValueError(
            "activation must have alpha, beta and limit as numbers, got a tensor with one for "
            "each expert, which fused_experts takes"
        )
    return found


def apply(gate_up: Tensor, activation: AnyActivation) -> Tensor:
    """Apply an activation to the output of the first GEMM.

    Args:
        gate_up: (..., N) any float dtype; never written.

    Returns:
        (..., I) in gate_up's dtype: fp32 math (fp64 for fp64), one rounding.
    """
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.to(torch.float32)
    return formula(wide, activation).to(gate_up.dtype)


def formula(x: Tensor, activation: AnyActivation) -> Tensor:
    """The activation of x (..., N) in x's own dtype, (..., I)."""
    name, limit = activation.name, cast(Any, activation.limit)
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
        factor, _ = _bounded(u, limit)
        return activation.beta * torch.tanh(g / activation.beta) * torch.sigmoid(g) * factor
    if name in ("powlu", "swiglustep"):
        one = F.silu(g) if name == "swiglustep" else _power(g, activation.alpha)[0] * g.sigmoid()
        return one.clamp(max=limit) * u.clamp(-limit, limit) if _limits(limit) else one * u
    if _limits(limit):
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if name == "silu":
        return F.silu(g) * u
    return g * torch.sigmoid(activation.alpha * g) * (u + activation.beta)


# Vector loops of torch compute the last elements of what a thread gets by other formulas than
# whole vectors. Rows of a multiple of so many columns are whole vectors, and blocks of at most so
# many elements are computed by one thread.
_COLUMNS_OF_VECTORS, _ELEMENTS_OF_A_THREAD = 64, 1 << 14


def apply_by_blocks(gate_up: Tensor, activation: AnyActivation, out: Tensor) -> None:
    """out (S, I) = `apply`(gate_up (S, N)), with the same bits of a row among any number of
    others. For CPUs, where `apply` may round the last columns of some rows differently.

    All blocks, and so all calls of torch, have one shape.
    """
    S, I = out.shape
    rows = 1 if I % _COLUMNS_OF_VECTORS else max(1, _ELEMENTS_OF_A_THREAD // max(1, I))
    wide = torch.promote_types(out.dtype, torch.float32)
    block = torch.zeros(rows, gate_up.shape[1], dtype=wide, device=gate_up.device)
    for i in range(0, S, rows):
        count, act = min(rows, S - i), activation
        if isinstance(activation, RowActivation):
            act = activation.at(torch.arange(i, i + rows, device=out.device).clamp(max=S - 1))
        block[:count] = gate_up[i : i + count]  # the other rows are left from the block before
        out[i : i + count] = formula(block, act)[:count]


def derivative(x: Tensor, grad: Tensor, activation: AnyActivation) -> Tensor:
    """The gradient of x (..., N) from that of `formula`'s result (..., I), both fp32 or fp64.

    As for torch.clamp, gradients pass at the limit itself but not beyond it. At infinities they
    are those of autograd through `formula`, or infinite where it adds infinities of both signs.
    """
    name, limit = activation.name, cast(Any, activation.limit)
    if not activation.gated:
        if name == "relu2_no_mul":
            return torch.where(x <= 0, 0, 2 * F.relu(x) * grad)
        return _derivative_of_one(name.removesuffix("_no_mul"), x, grad)
    if activation.interleaved:
        g, u = x[..., 0::2], x[..., 1::2]
    else:
        g, u = x.chunk(2, dim=-1)
    limited = _limits(limit)
    clamped_u = u.clamp(-limit, limit) if limited else u
    if name == "situ":
        tanh, sigmoid = torch.tanh(g / activation.beta), torch.sigmoid(g)
        factor, slope = _bounded(u, limit)
        one = activation.beta * tanh * sigmoid
        dg = grad * factor * ((1 - tanh.square()) * sigmoid + one * (1 - sigmoid))
        return torch.cat((dg, grad * one * (1 - slope.square())), -1)
    if name == "relu2":
        one = F.relu(g)
        dg = torch.where(g <= 0, 0, grad * u * 2 * one)
        return torch.cat((dg, grad * one.square()), -1)
    if name == "powlu":
        (power, slope), sigmoid = _power(g, activation.alpha), torch.sigmoid(g)
        one = power * sigmoid
        dg = grad * clamped_u * (slope + power * (1 - sigmoid)) * sigmoid
        if limited:
            dg, one = torch.where(one > limit, 0, dg), one.clamp(max=limit)
        du = grad * one
    elif name in ("swigluoai", "swigluoai_uninterleave"):
        clamped_g = g.clamp(max=limit) if limited else g
        sigmoid = torch.sigmoid(activation.alpha * clamped_g)
        slope = sigmoid * (1 + activation.alpha * clamped_g * (1 - sigmoid))
        dg, du = grad * (clamped_u + activation.beta) * slope, grad * clamped_g * sigmoid
    elif name == "swiglustep":
        silu = F.silu(g)
        dg = grad * clamped_u
        if limited:
            dg, silu = torch.where(silu <= limit, dg, 0), silu.clamp(max=limit)
        dg, du = _derivative_of_one("silu", g, dg), grad * silu
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


def _limits(limit: float | Tensor) -> bool:
    """Whether there may be a limit: NO_LIMIT of some rows leaves them as they are."""
    return isinstance(limit, Tensor) or limit < NO_LIMIT


def _bounded(u: Tensor, limit: float | Tensor) -> tuple[Tensor, Tensor]:
    """(L tanh(u / L), tanh(u / L)) of situ; u and 0 without a limit."""
    if not _limits(limit):
        return u, torch.zeros_like(u)
    slope = torch.tanh(u / limit)
    if isinstance(limit, Tensor):
        none = limit >= NO_LIMIT
        slope = torch.where(none, 0, slope)
        return torch.where(none, u, limit * slope), slope
    return limit * slope, slope


def _power(g: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
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
