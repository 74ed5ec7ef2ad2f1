"""Random calls of the public functions, and what each may answer: the fp64 oracle's values, or an
error of a known class that names an argument.

A call is drawn as an `Example`: names and numbers alone, from which `run` makes the tensors. Sizes
include 0; tensors come with strides, offsets and the states that torch keeps lazily (negated,
zeros, freed); a `flaw` replaces one argument by a bad one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import moe_ops
from moe_ops.activations import NAMES, Activation
from tests.support import oracle
from tests.support.cases import BF16, FP16, FP32, FP64, STATIC_SCALES, TOLERANCE, fitting

ERRORS = (ValueError, TypeError, NotImplementedError, ImportError, RuntimeError)
DTYPES = (FP32, BF16, FP16, FP64)
SIZES = (1, 2, 3, 5, 8, 16, 17, 24, 33, 64)
LAYOUTS = ("plain", "plain", "plain", "transposed", "offset", "gaps", "expanded", "reversed")
STATES = ("plain",) * 9 + ("negated", "zeros", "freed", "grad", "parameter")
# an activation rounded the other way is off by a step of its format; small tensors show it whole
STEPS = {"e4m3": 2.0**-3, "int8": 2.0**-6, "e2m1": 0.5, "e3m2": 2.0**-2, "e2m3": 2.0**-2}
SCHEMES = tuple(oracle.ACTIVATIONS)
FLAWS: dict[str, Callable[[Any], Any]] = {
    "none": lambda t: None,
    "list": lambda t: t.tolist() if isinstance(t, Tensor) and not hasattr(t, "scheme") else [t],
    "integer": lambda t: 3,
    "text": lambda t: "no such thing",
    "nan": lambda t: math.nan,
    "rank": lambda t: t.unsqueeze(0),
    "flat": lambda t: t.reshape(-1),
    "scalar": lambda t: t.new_zeros(()),
    "longer": lambda t: torch.cat((t, t), 0),
    "wider": lambda t: torch.cat((t, t), -1),
    "shorter": lambda t: t[:-1],
    "narrower": lambda t: t[..., :-1],
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[..., :0],
    "float64": lambda t: t.double(),
    "float32": lambda t: t.float(),
    "float16": lambda t: t.half(),
    "int64": lambda t: t.long(),
    "int16": lambda t: t.short(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "e4m3": lambda t: t.to(torch.float8_e4m3fn),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "swapped": lambda t: t.transpose(0, -1),
    "numpy": lambda t: t.float().numpy(),
}
ARGUMENTS = {
    "fused_experts": (
        "hidden_states w13 w2 topk_weights topk_ids activation w13_bias w2_bias expert_map "
        "router_weight_on_input backend"
    ),
    "batched_experts": (
        "hidden_states w13 w2 expert_num_tokens activation w13_bias w2_bias backend"
    ),
    "grouped_linear": "x weight offsets bias backend",
    "route": (
        "router_logits top_k method num_expert_groups topk_groups correction_bias scaling_factor "
        "scoring"
    ),
    "route_tokens": "hidden_states router_weight router_bias top_k",
    "quantize": "weight scheme activation_scale",
    "layer": "hidden_states residual",
}
NAMED_TOO = {"layer": {"w13", "w2"}}  # what a call passes on
FUNCTIONS = ("fused_experts",) * 6 + ("grouped_linear",) * 3 + tuple(ARGUMENTS)


@dataclass(frozen=True)
class Example:
    """One call, by names and numbers."""

    function: str
    M: int
    E: int
    top_k: int
    K: int
    I: int
    dtype: torch.dtype
    scheme: str
    activation: str
    backend: str
    seed: int
    bias: bool
    expert_map: bool
    on_input: bool
    ids_dtype: torch.dtype
    weights_dtype: torch.dtype
    no_grad: bool
    method: str
    layouts: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    flaw: tuple[str, str] | None = None  # an argument, and what is wrong with it


@st.composite
def examples(draw: Callable, triton: bool = True) -> Example:
    def one_of(values):
        return draw(st.sampled_from(values))

    function = one_of(FUNCTIONS)
    names = tuple(ARGUMENTS[function].split())
    tensors = names[:5] if function == "fused_experts" else names[:4]
    tensors += ("w13_bias", "w2_bias", "expert_map")
    has_weights = function in ("fused_experts", "batched_experts", "grouped_linear", "quantize")
    scheme = one_of(SCHEMES) if has_weights and draw(st.integers(0, 2)) == 0 else ""
    if scheme and function in ("fused_experts", "batched_experts") and draw(st.booleans()):
        # another one of w2, or plain weights in one of the two places
        scheme = "+".join(draw(st.permutations([scheme, one_of(("plain", *SCHEMES))])))
    flawed = draw(st.integers(0, 3)) == 0
    sizes = SIZES if draw(st.integers(0, 15)) else (*SIZES, 0)
    return Example(
        function=function,
        M=one_of((0, 1, 2, 3, 4, 7, 20)),
        E=draw(st.integers(1, 6)),
        top_k=draw(st.integers(1, 3)),
        K=one_of(sizes),
        I=one_of(sizes),
        dtype=one_of(DTYPES),
        scheme=scheme,
        activation=one_of(NAMES),
        # kernels under Triton's interpreter take a hundred times as long as all the rest
        backend="triton" if triton and draw(RARE) else one_of(("torch", "auto")),
        seed=draw(st.integers(0, 2**16)),
        bias=draw(st.booleans()),
        expert_map=draw(st.booleans()),
        on_input=draw(st.integers(0, 3)) == 0,
        ids_dtype=one_of((torch.int32, torch.int64)),
        weights_dtype=one_of((FP32, BF16, FP16, FP64)),
        no_grad=draw(st.booleans()),
        method=one_of(METHODS),
        layouts={name: one_of(LAYOUTS) for name in tensors},
        states={name: one_of(STATES) for name in tensors},
        flaw=(one_of(names), one_of(tuple(FLAWS))) if flawed else None,
    )


RARE = st.integers(0, 199).map(lambda i: i == 77)
METHODS = ("default", "renormalize", "sigmoid", "topk", "llama4", "sqrtsoftplus", "custom", "nope")


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values with other strides, and with NaN or the lowest integer around them."""
    if t.ndim == 0 or layout == "plain":
        return t
    if layout == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return t[:1].expand(t.shape) if t.shape[0] else t
    if layout == "reversed":  # dimensions in memory in the other order
        order = tuple(range(t.ndim))[::-1]
        return t.permute(order).contiguous().permute(order)
    poison = math.nan if t.is_floating_point() else torch.iinfo(t.dtype).min
    if layout == "offset":
        memory = torch.full((t.numel() + 3,), poison, dtype=t.dtype)
        return memory[3:].view(t.shape).copy_(t)
    memory = torch.full([2 * size + 1 for size in t.shape], poison, dtype=t.dtype)
    return memory[tuple(slice(1, None, 2) for _ in t.shape)].copy_(t)


def in_state(t: Tensor, state: str) -> Tensor:
    if state == "negated" and t.dtype != torch.bool:
        return torch._neg_view(t.neg())
    if state == "zeros":
        return torch._efficientzerotensor(t.shape, dtype=t.dtype)
    if state == "freed":
        t = t.clone()
        t.untyped_storage().resize_(0)
        return t
    if state == "grad" and t.is_floating_point():
        return t.detach().requires_grad_()
    if state == "parameter" and t.is_floating_point():
        return torch.nn.Parameter(t.detach(), requires_grad=False)
    return t


def arguments_of(e: Example) -> tuple[dict, dict]:
    """(what the oracle gets, what the library gets), by name: of equal values."""
    g = torch.Generator().manual_seed(e.seed)
    act = Activation(e.activation)
    K, I = e.K, e.I
    if e.scheme:
        K, I = fitting(max(K, 1), e.scheme), fitting(max(I, 1), e.scheme)
    N = 2 * I if act.gated else I

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * scale).to(e.dtype)

    first, second = oracle.schemes_of(e.scheme)

    def weight(n: int, k: int, static: float, scheme: str) -> Tensor:
        w = normal(e.E, n, k, scale=max(k, 1) ** -0.5)
        if not scheme or e.dtype == FP64 or 0 in w.shape:
            return w
        scale = static if scheme.endswith("_static") else None
        return moe_ops.quantize(w, scheme, activation_scale=scale)

    options: dict[str, Any] = {"backend": e.backend}
    values: dict[str, Any]
    if e.function in ("fused_experts", "layer", "batched_experts"):
        values = {
            "w13": weight(N, K, STATIC_SCALES[0], first),
            "w2": weight(K, I, STATIC_SCALES[1], second),
        }
        options["activation"] = e.activation
        if e.bias:
            values |= {"w13_bias": normal(e.E, N), "w2_bias": normal(e.E, K)}
    if e.function == "fused_experts":
        top_k = 1 if e.on_input else e.top_k
        ids = torch.randint(-2, e.E + 3, (e.M, top_k), generator=g)
        far = torch.rand(ids.shape, generator=g) < 0.1
        ids = torch.where(far, torch.iinfo(e.ids_dtype).max, ids).to(e.ids_dtype)
        if e.expert_map:
            table = torch.randint(-1, e.E + 1, (e.E + 2,), generator=g)
            values["expert_map"] = table.to(e.ids_dtype)
        weights = torch.rand(ids.shape, generator=g) + 0.25
        values |= {"topk_weights": weights.to(e.weights_dtype), "topk_ids": ids}
        values["hidden_states"] = normal(e.M, K)
        if e.on_input:
            options["router_weight_on_input"] = True
    elif e.function == "batched_experts":
        counts = torch.randint(-1, e.M + 3, (e.E,), generator=g)
        values |= {"hidden_states": normal(e.E, e.M, K), "expert_num_tokens": counts}
    elif e.function == "grouped_linear":
        ends = torch.randint(-1, e.M + 3, (e.E,), generator=g).sort().values
        values = {"x": normal(e.M, K), "weight": weight(I, K, STATIC_SCALES[0], first)}
        values["offsets"] = ends.to(torch.int32)
        if e.bias:
            values["bias"] = normal(e.E, I)
    elif e.function == "route":
        options = {"top_k": e.top_k, "method": e.method}
        values = {"router_logits": normal(e.M, e.E)}
        if e.bias and e.method == "sqrtsoftplus":
            values["correction_bias"] = normal(e.E)
    elif e.function == "route_tokens":
        options = {"top_k": e.top_k}
        values = {"hidden_states": normal(e.M, K), "router_weight": normal(e.E, K)}
        if e.bias:
            values["router_bias"] = normal(e.E)
    elif e.function == "quantize":
        options = {"scheme": e.scheme or "int8_w8a16"}
        if options["scheme"].endswith("_static"):
            options["activation_scale"] = 0.1
        values = {"weight": normal(e.E, N, fitting(max(K, 1), options["scheme"]))}
    else:
        values = {"hidden_states": normal(e.M, K)}
        options = {}
    wanted, given = dict(values), dict(values)
    for name, t in values.items():
        if getattr(t, "scheme", None) is not None:
            continue
        t = laid_out(t, e.layouts.get(name, "plain"))
        state = e.states.get(name, "plain")
        given[name] = in_state(t, state)
        wanted[name] = torch.zeros_like(t) if state == "zeros" else t
    return wanted | options, given | options


def freed(given: dict) -> bool:
    """Whether an argument has lost its values."""
    plain = [t for t in given.values() if type(t) in (Tensor, torch.nn.Parameter)]
    plain = [t for t in plain if t.layout == torch.strided and not t.is_meta and t.numel()]
    return any(t.untyped_storage().nbytes() == 0 for t in plain)


def allowed_error(e: Example, error: BaseException) -> bool:
    """Whether an error is of a known class and names an argument."""
    if not isinstance(error, ERRORS):
        return False
    names = {*ARGUMENTS[e.function].split(), e.function} | NAMED_TOO.get(e.function, set())
    return bool(names & {*re.findall(r"\w+", str(error))})


def tolerance(e: Example, dtype: torch.dtype) -> float:
    within = 8 * TOLERANCE[FP32 if dtype == FP64 and e.scheme else dtype]
    rounded = filter(None, [oracle.ACTIVATIONS[name] for name in oracle.schemes_of(e.scheme)])
    return within + 2 * max([STEPS[one[0]] for one in rounded], default=0.0)


def check_close(e: Example, out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape, (out.shape, expected.shape)
    if not out.numel():
        return
    assert out.isfinite().all(), "not finite"
    if not expected.isfinite().all():  # the oracle divides by the amax of tokens that are all 0
        assert e.scheme, "the oracle's values are not finite"
        return
    floor = 0.25 * expected.numel() ** 0.5
    error = oracle.relative_error(out, expected, floor)
    within = tolerance(e, out.dtype)
    assert error <= within, f"relative error {error:.2e}, allowed {within:.2e}"


def run(e: Example) -> str:
    """Make the call. Returns "value" or "error"; AssertionError for a wrong answer."""
    wanted, given = arguments_of(e)
    if e.flaw is not None:
        name, what = e.flaw
        try:
            given[name] = FLAWS[what](wanted.get(name))  # torch itself crashes on freed ones
        except Exception:  # the flaw has no meaning for this argument
            given[name] = None
    with torch.set_grad_enabled(not e.no_grad):
        try:
            out = CALLS[e.function](e, given)
        except AssertionError:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            assert allowed_error(e, error), f"{type(error).__name__}: {error}"
            assert e.flaw or freed(given) or may_refuse(e, given, error), (
                f"a good call raised {type(error).__name__}: {error}"
            )
            return "error"
        if e.flaw is not None:  # what is no flaw after all must be computed as it is given
            wanted[e.flaw[0]] = given[e.flaw[0]]
        assert not freed(given), "values that were freed gave a result"
        EXPECTED[e.function](e, out, wanted)
    return "value"


def may_refuse(e: Example, given: dict, error: BaseException) -> bool:
    """Whether an error of a call without flaws is one that the documentation states."""
    text = str(error)
    if 0 in (e.K, e.I):  # sizes of 0 are computed or refused
        return True
    if e.function in ("route", "route_tokens"):
        return e.top_k > e.E or e.method in ("custom", "nope") or "method" in text
    if e.function == "batched_experts" and "no backward" in text:
        return True
    if e.dtype == FP64 and e.function == "quantize":
        return "got torch.float64" in text
    if e.backend == "triton":
        return "backend 'triton' cannot run this call" in text
    return bool(e.scheme) and e.dtype == FP64 and "dtype" in text


def call_function(e: Example, given: dict) -> Any:
    return getattr(moe_ops, e.function)(**given)


def call_layer(e: Example, given: dict) -> Any:
    torch.manual_seed(e.seed)
    if not e.K or not e.I:
        raise ValueError("hidden_states of width 0")
    sizes = {"num_experts": e.E, "top_k": min(e.top_k, e.E)}
    layer = moe_ops.MoELayer(
        e.K, e.I, sizes["num_experts"], sizes["top_k"], activation=e.activation, dtype=e.dtype
    )
    given["layer"] = layer
    return layer(**{k: v for k, v in given.items() if k != "layer"})


CALLS = {name: call_function for name in ARGUMENTS} | {"layer": call_layer}


def oracle_arguments(wanted: dict) -> dict:
    return {k: v for k, v in wanted.items() if k != "backend"}


def expect_experts(e: Example, out: Tensor, wanted: dict) -> None:
    wanted.setdefault("activation", "silu")
    check_close(e, out, oracle.experts(**oracle_arguments(wanted)))


def expect_batched(e: Example, out: Tensor, wanted: dict) -> None:
    wanted = oracle_arguments(wanted)
    expected = oracle.batched(counts=wanted.pop("expert_num_tokens"), **wanted)
    inside = ~expected.isnan()
    check_close(e, out[inside], expected[inside])


def expect_linear(e: Example, out: Tensor, wanted: dict) -> None:
    wanted = oracle_arguments(wanted)
    offsets = wanted["offsets"]
    if bool((offsets.diff() < 0).any()):
        return
    x, bias = wanted["x"], wanted.get("bias")
    end = int(offsets.clamp(min=0)[-1])
    expected = oracle.grouped_linear(x, wanted["weight"], offsets.clamp(min=0), bias=bias)
    check_close(e, out, expected)
    assert (out[end:] == 0).all()


def expect_route(e: Example, out: tuple, wanted: dict) -> None:
    weights, ids = out[-2:]
    experts = wanted["router_weight" if "router_weight" in wanted else "router_logits"]
    count = experts.shape[0 if "router_weight" in wanted else 1]
    assert weights.dtype == FP32 and ids.dtype == torch.int32 and weights.shape == ids.shape
    if ids.is_meta:  # without rows nothing else is refused there
        return
    assert ((ids >= 0) & (ids < count)).all()
    ordered = ids.sort(1).values
    assert (ordered.diff(dim=1) > 0).all(), "an expert was chosen twice"


def expect_quantized(e: Example, out: Tensor, wanted: dict) -> None:
    weight = wanted["weight"]
    assert out.shape == weight.shape and out.is_meta == weight.is_meta
    if out.is_meta:
        return
    got, expected = out.dequantize(FP32), oracle.weight(out).float()
    if moe_ops.schemes.get_scheme(out.scheme).quantized_weight.minimum:  # rounded twice
        assert (got - expected).abs().max() <= 2**-22 * expected.abs().max()
    else:
        assert torch.equal(got, expected)


def expect_layer(e: Example, out: Tensor, wanted: dict) -> None:
    x = wanted["hidden_states"]
    assert out.shape == x.shape and out.isfinite().all()


EXPECTED = {
    "fused_experts": expect_experts,
    "batched_experts": expect_batched,
    "grouped_linear": expect_linear,
    "route": expect_route,
    "route_tokens": expect_route,
    "quantize": expect_quantized,
    "layer": expect_layer,
}
