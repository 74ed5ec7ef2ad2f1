"""The calls that `moe_ops.self_check` makes: shapes, random inputs, and the error allowed.

M tokens, K hidden size, I intermediate size, E experts, top_k experts per token.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import activations
from moe_ops.meta.workspace import round_up
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Problem
from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.selfcheck import reference

DTYPE = torch.bfloat16  # which every backend takes
ACTIVATION = "silu"


class Sizes(NamedTuple):
    """Sizes of a call; K and I grow to a multiple that the backend and the scheme take."""

    M: int
    E: int
    top_k: int
    K: int
    I: int
    multiples: tuple[int, ...]  # to try in turn


# The first two share their weights and most constants of kernels. The last one has several tiles
# of rows per expert, and sizes that fill no tile where the backend takes such.
SHAPES = (
    Sizes(33, 5, 2, 256, 128, (128,)),
    Sizes(1, 5, 2, 256, 128, (128,)),
    Sizes(200, 5, 3, 264, 136, (8, 128)),
)


class Case(NamedTuple):
    """One call. ``known_scale``: nvfp4's global scale of activations is known beforehand."""

    scheme: str
    shape: Sizes
    multiple: int
    bias: bool
    known_scale: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """K and I."""
        multiple = math.lcm(self.multiple, _columns(get_scheme(self.scheme)))
        return round_up(self.shape.K, multiple), round_up(self.shape.I, multiple)

    @property
    def problem(self) -> Problem:
        """The Problem of a case, with weights in their natural layout."""
        K, I = self.sizes
        return Problem(
            kind="experts",
            num_experts=self.shape.E,
            hidden_size=K,
            intermediate_size=I,
            num_rows=2 * I,
            top_k=self.shape.top_k,
            dtype=DTYPE,
            scheme=self.scheme,
            options=Options(activations.resolve(ACTIVATION)),
            has_bias=self.bias,
        )

    def __str__(self) -> str:
        K, I = self.sizes
        bias = ", biases" if self.bias else ""
        return f"M={self.shape.M} E={self.shape.E} top_k={self.shape.top_k} K={K} I={I}{bias}"


class Given(NamedTuple):
    """Arguments of `fused_experts` on a CPU."""

    x: Tensor
    w13: Any
    w2: Any
    topk_weights: Tensor
    topk_ids: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None


def _columns(scheme: QuantScheme) -> int:
    """The number of which the columns of a scheme's weights must be a multiple."""
    found = 1 if scheme.weight is None else scheme.weight.whole_columns
    for desc in (scheme.weight, scheme.activation):
        if desc is not None:
            found = math.lcm(found, desc.format.columns_together)
    return found


def allowed_error(scheme: str, device_type: str) -> float:
    """The largest relative error of the norm that counts as agreement.

    Four independent roundings to bfloat16 (gate and up, the activation's output, an expert's
    output, the layer's output) of at most half a unit each, 2^-8, add up to twice that. Where
    activations are quantized, a sum that differs in its last bits makes some of them the next
    code: on a CPU, which adds in fp32, at most one e4m3 element in a thousand, 2e-3. Tensor cores
    add e4m3 products with some 14 bits, which makes it one in a hundred, 1.5e-2. Codes with fewer
    bits of mantissa lie farther apart in proportion. A wrong scale is off by 2e-2 at least.
    """
    rounding = 2 * 2.0**-8
    activation = get_scheme(scheme).activation
    if activation is None:
        return rounding
    if device_type == "cpu":
        return rounding + 2e-3
    return rounding + 1.5e-2 * 2.0 ** (3 - (activation.format.mantissa or 3))


@functools.cache  # the first two shapes have the same; `forget` drops them
def _weights(
    scheme: str,
    E: int,
    K: int,
    I: int,
    known_scale: bool,
) -> tuple[Any, Any]:
    """w13 and w2, which give outputs of unit scale."""
    from moe_ops.tensors import quantize

    rng = torch.Generator("cpu").manual_seed(1)
    found = []
    # the largest magnitude that known scales of activations have room for
    for rows, columns, largest in ((2 * I, K, 5.06), (K, I, 7.66)):
        plain = torch.randn(E, rows, columns, generator=rng, device="cpu", dtype=torch.float32)
        weight: Any = (plain * columns**-0.5).to(DTYPE)
        if scheme:
            desc, scale = get_scheme(scheme).activation, None
            if desc is not None and (known_scale or (desc.static and not desc.global_scale)):
                scale = largest / desc.format.max / (448.0 if desc.global_scale else 1.0)
            weight = quantize(weight, scheme, activation_scale=scale)
        found.append(weight)
    return found[0], found[1]


def inputs(case: Case) -> Given:
    """Unit-scale data and router weights of which no two are near each other.

    Expert 1 has no tokens. Of more than one token, the ids of some name no expert, and the first
    token has only such ids: its hidden state and router weights are NaN.
    """
    (M, E, top_k, *_), (K, I) = case.shape, case.sizes
    rng = torch.Generator("cpu").manual_seed(2)

    def normal(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=rng, device="cpu", dtype=torch.float32)
        return drawn.to(DTYPE)

    few = (0, E) if M == 1 else (-1, E + 2)
    ids = torch.randint(*few, (M, top_k), generator=rng, device="cpu", dtype=torch.int32)
    ids = torch.where(ids == 1, 0, ids)
    weights = (torch.arange(M * top_k, device="cpu", dtype=torch.float32) * 0.618034) % 1 + 0.25
    x, weights = normal(M, K), weights.view(M, top_k)
    if M > 1:
        ids[0] = torch.tensor([-1, E, 2**31 - 1][:top_k], dtype=torch.int32)
        x[nowhere(ids, E)] = math.nan
        weights[nowhere(ids, E)] = math.nan
    w13_bias, w2_bias = (normal(E, 2 * I), normal(E, K)) if case.bias else (None, None)
    return Given(
        x, *_weights(case.scheme, E, K, I, case.known_scale), weights, ids, w13_bias, w2_bias
    )


def nowhere(topk_ids: Tensor, num_experts: int) -> Tensor:
    """(M,) bool: the tokens none of whose ids names an expert."""
    return ((topk_ids < 0) | (topk_ids >= num_experts)).all(1)


class Checked(NamedTuple):
    """A result, compared."""

    error: float  # relative, of the norms; NaN where the result is not finite
    wrong: str  # what is wrong beside the error, "" if nothing


def compare(out: Tensor, given: Given, expected: Tensor) -> Checked:
    """Compare a result (M, K) with the fp64 one."""
    out = out.double()
    if out.shape != expected.shape:
        return Checked(math.nan, f"has shape {tuple(out.shape)}, not {tuple(expected.shape)}")
    error = float((out - expected).norm() / expected.norm().clamp(min=1e-30))
    if not torch.isfinite(out).all():
        return Checked(math.nan, "holds values that are not finite")
    if (out[nowhere(given.topk_ids, given.w13.shape[0])] != 0).any():
        return Checked(error, "tokens without an expert are not zero")
    return Checked(error, "")


@functools.lru_cache(maxsize=4)
def expected(case: Case) -> tuple[Given, Tensor]:
    """The inputs of a case and its fp64 result."""
    given = inputs(case)
    return given, reference.experts(*given)


def check(out: Tensor, case: Case, allowed: float) -> Checked:
    """Compare a result with the fp64 layer. Libraries return their first product in 16 bits, which
    makes some activations the next code: of schemes that quantize them a result may also agree
    with the layer whose first product is rounded so.
    """
    given, exact = expected(case)
    checked = compare(out, given, exact)
    if checked.error > allowed and get_scheme(case.scheme).activation is not None:
        rounded = compare(out, given, reference.experts(*given, rounded=DTYPE))
        checked = min(checked, rounded, key=lambda c: c.error)
    return checked


def forget() -> None:
    """Free the memory of all inputs."""
    _weights.cache_clear()
    expected.cache_clear()
