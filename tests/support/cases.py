"""Inputs of the value tests: unit-scale data, distinct router weights, every kind of expert id;
and poison.

Dimensions as everywhere: M tokens, K hidden size, I intermediate size, N rows of w13, E local
experts.
"""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moe_ops
from moe_ops.activations import Activation
from moe_ops.backends.triton.relayout import lay_out
from moe_ops.meta.scales import TRITON_E2M1
from moe_ops.ops import memory
from moe_ops.planning import bind
from moe_ops.schemes import get_scheme
from tests.support import oracle

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# Four independent roundings to the dtype (gate_up, hidden, expert output, output) of at most half
# a unit each, 2^-8 and 2^-11, add up to twice that in the norm; in fp32 the order of sums adds its
# share.
TOLERANCE = {FP64: 1e-13, FP32: 5e-6, BF16: 2 * 2.0**-8, FP16: 2 * 2.0**-11}
# Quantized like the oracle's, activations differ where the last bit of fp32 chose the e4m3
# neighbour, 2^-4
# away: at most one in a thousand elements. Another scale, or none, is off by 2e-2 and more.
QUANTIZED = 2e-3
# A tensor core adds e4m3 products with some 14 bits: 2^-13 of the sum, a hundredth of the way to
# the e4m3 neighbour, so one activation in a hundred becomes its neighbour.
QUANTIZED_ON_TENSOR_CORES = 1.5e-2
# of hidden_states and of the activation's output. 0.01 would not do: 1 / 0.01 is halfway between
# two e4m3 values but for the last bit of fp32, and 16-bit data hold many ones.
STATIC_SCALES = (0.0113, 0.0171)
LIMITED = [  # every formula with a limit, so low that values of unit scale reach it
    Activation("silu", limit=0.7),
    Activation("swigluoai", alpha=0.9, beta=0.4, limit=0.8),
    Activation("swigluoai_uninterleave", alpha=1.3, beta=0.0, limit=0.6),
    Activation("swiglustep", limit=0.3),
    Activation("situ", beta=0.8, limit=0.7),
    Activation("powlu", alpha=1.5, limit=0.6),
]


def fitting(size: int, scheme: str) -> int:
    """The least size that is not smaller and that the scheme's groups, or bytes, divide; of two
    schemes, both."""
    first, second = oracle.schemes_of(scheme)
    while first != second and size != fitting(fitting(size, first), second):
        size = fitting(fitting(size, first), second)
    scheme = first
    multiple = 2 if oracle.weight_format(scheme) == "int4" else 1
    if ":super" in scheme:
        multiple = 256
    elif ":g" in scheme:
        multiple = int(scheme.split(":")[1][1:])
    elif scheme == "int4_w4a8":
        multiple = 128
    elif scheme.startswith(("mx", "nv")):
        multiple = 32 if scheme.startswith("mx") else 16
    return -(-size // multiple) * multiple


# Levels of nf4 are looked up in bf16, at most 0.19 % off, where products are not in fp32.
LEVELS_IN_BF16 = 1e-3


def tolerance(dtype: torch.dtype, scheme: str = "", device: str = "cpu") -> float:
    first, second = oracle.schemes_of(scheme)
    if first != second:
        return max(tolerance(dtype, one, device) for one in (first, second))
    if oracle.ACTIVATIONS[scheme] is None:
        looked_up = device != "cpu" and dtype == FP16 and scheme.startswith("nf4")
        return TOLERANCE[dtype] + LEVELS_IN_BF16 * looked_up
    if device == "cpu":
        return TOLERANCE[dtype] + QUANTIZED
    # neighbours of fewer bits are farther off: in mxfp6_e3m2 one of 128 activations of a token was
    # seen to be another
    bits = get_scheme(scheme).activation.format.mantissa or 3
    return TOLERANCE[dtype] + QUANTIZED_ON_TENSOR_CORES * 2.0 ** (3 - bits)


def prepared(weight):
    """An e2m1 weight as backend "triton" wants it on SM90, whatever its device and dtype."""
    return weight._replace(**lay_out(weight), weight_layout=TRITON_E2M1)


def with_global_rows(weight, seed: int = 0):
    """An nvfp4 weight with a global scale for each row, no two alike: other values."""
    g = torch.Generator().manual_seed(seed)
    steps = torch.rand(*weight.shape[:2], 1, generator=g).to(weight.device) * 1.5 + 0.5
    return weight._replace(global_scale=weight.global_scale[:, None, None] * steps)


def garbage(tensor: Tensor) -> Tensor:
    """Fill with NaN, with integers that make no address, and with bytes that are NaN in every
    float."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):  # traced: nothing to fill
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.fill_(math.nan)
    lowest = torch.iinfo(tensor.dtype).min
    return tensor.fill_(255 if tensor.dtype == torch.uint8 else max(lowest, -(2**30)))


@contextmanager
def poisoned_memory():
    """Whatever an eager call allocates by empty, new_empty or empty_like holds garbage."""
    new_empty, empty_like, empty = torch.Tensor.new_empty, torch.empty_like, torch.empty

    def poisoned_empty(*args, **options):  # torch's compiler allocates by it too: that is let be
        if torch.compiler.is_compiling():
            return empty(*args, **options)
        ours = sys._getframe(1).f_globals["__name__"].startswith("moe_ops")
        return garbage(empty(*args, **options)) if ours else empty(*args, **options)

    bind.forget()  # shortcuts that have an allocator
    with (
        mock.patch.object(torch.Tensor, "new_empty", lambda *a, **k: garbage(new_empty(*a, **k))),
        mock.patch.object(torch, "empty", poisoned_empty),
        mock.patch.dict(memory.EMPTY_STRIDED, clear=True),
        mock.patch.object(torch, "empty_like", lambda *a, **k: garbage(empty_like(*a, **k))),
    ):
        yield


def router_weights(M: int, top_k: int) -> Tensor:
    """(M, top_k) in [0.25, 1.25), no two near each other."""
    return ((torch.arange(M * top_k) * 0.618034) % 1.0 + 0.25).view(M, top_k)


class Case:
    """One `fused_experts` call. K and I grow to what the scheme's groups divide. `args` and
    `options` are its arguments; `nowhere` marks rows without experts. Schemes of w13 and w2 that
    differ are given as "int4_w4a16:g64+plain".

    Expert 1 of more than two has no tokens. From M = 4 on, row 0 repeats one expert, row 1 has
    only ids that name none and holds NaN in hidden_states and topk_weights, row 2 mixes both
    kinds.
    """

    def __init__(
        self,
        device="cpu",
        dtype=FP32,
        scheme="",
        activation="silu",
        *,
        M=7,
        E=4,
        top_k=2,
        K=48,
        I=24,
        ids=None,
        ids_dtype=torch.int32,
        weights_dtype=FP32,
        bias=False,
        expert_map=False,
        on_input=False,
        seed=0,
    ):
        g = torch.Generator().manual_seed(seed)
        act = activation if isinstance(activation, Activation) else Activation(activation)
        K, I = fitting(K, scheme), fitting(I, scheme)
        N = 2 * I if act.gated else I
        self.device, self.dtype, self.scheme = device, dtype, scheme

        def normal(*shape, scale=1.0, to=dtype):
            return (torch.randn(shape, generator=g) * scale).to(to).to(device)

        x = normal(M, K)
        w13, w2 = normal(E, N, K, scale=K**-0.5), normal(E, K, I, scale=I**-0.5)
        given = zip((w13, w2), oracle.schemes_of(scheme), STATIC_SCALES, strict=True)
        w13, w2 = [
            moe_ops.quantize(w, of, activation_scale=scale if of.endswith("_static") else None)
            if of
            else w
            for w, of, scale in given
        ]
        self.options = {"activation": activation}
        if bias:
            self.options |= {"w13_bias": normal(E, N), "w2_bias": normal(E, K)}
        num_ids = E
        if expert_map:  # of E + 3 global experts, one entry out of range, some held elsewhere
            num_ids = E + 3
            table = [-1, *range(E - 1, -1, -1), E + 5, -1]
            self.options["expert_map"] = torch.tensor(table, dtype=ids_dtype, device=device)
        if on_input:
            self.options["router_weight_on_input"] = True
        if ids is None:
            ids = torch.randint(-1, num_ids + 1, (M, top_k), generator=g)
            ids = torch.where(ids == 1, 2 if E > 2 else 0, ids)
            if M >= 4:
                far = [-1, num_ids, 2**31 - 1, -(2**31)]
                ids[0] = 0 if not expert_map else 1
                ids[1] = torch.tensor([far[j % 4] for j in range(top_k)])
                ids[2, -1] = -7
        weights = router_weights(M, top_k).to(weights_dtype)
        if ids_dtype == torch.int64:  # ids that are valid only if their upper half is dropped
            ids = torch.where(ids < 0, ids - 2**32, ids)
        ids, weights = ids.to(ids_dtype).to(device), weights.to(device)
        pairs = oracle.local_pairs(ids, E, self.options.get("expert_map"))
        here = {m for m, _, _ in pairs}
        self.nowhere = torch.tensor([m not in here for m in range(M)], dtype=torch.bool)
        self.nowhere = self.nowhere.to(device)
        x[self.nowhere] = math.nan
        weights[self.nowhere] = math.nan
        self.args = [x, w13, w2, weights, ids]

    def args_for(self, backend="auto") -> list:
        """`args` with the weights in the layout that a backend reads, if they can be laid out
        so."""
        x, w13, w2, weights, ids = self.args
        if "+" in self.scheme:  # layers of two schemes run as they are
            return self.args
        try:
            w13 = moe_ops.prepare(w13, backend, activation=self.options["activation"])
            return [x, w13, moe_ops.prepare(w2, backend), weights, ids]
        except ValueError:
            return self.args

    def run(self, backend="auto", poison=True) -> Tensor:
        """The library's answer, out of memory that held garbage."""
        args = self.args_for(backend)
        if not poison:
            return moe_ops.fused_experts(*args, **self.options, backend=backend)
        with poisoned_memory():
            return moe_ops.fused_experts(*args, **self.options, backend=backend)

    def reference(self) -> Tensor:
        act = self.options["activation"]
        if isinstance(act, Activation):
            act = {"name": act.name, "alpha": act.alpha, "beta": act.beta, "limit": act.limit}
        return oracle.experts(*self.args, **{**self.options, "activation": act})

    def check(self, backend="auto", floor: float = 0.0) -> Tensor:
        """Compare with the oracle; the rows of tokens without experts are exactly zero."""
        out = self.run(backend)
        within = tolerance(self.dtype, self.scheme, self.device)
        name = getattr(self.options["activation"], "name", self.options["activation"])
        steep = name.startswith(("relu2", "powlu"))  # a power of about 2: doubles relative errors
        assert_matches(out, self.reference(), within * (2 if steep else 1), floor)
        assert out.dtype == self.dtype and (out[self.nowhere] == 0).all()
        return out


def assert_matches(out: Tensor, expected: Tensor, within: float, floor: float = 0.0) -> None:
    """Relative error of the norms at most `within`; norms under `floor` count as `floor`."""
    assert out.shape == expected.shape
    assert torch.isfinite(out).all()
    error = oracle.relative_error(out, expected, floor)
    assert error <= within, f"relative error {error:.2e}, allowed {within:.2e}"


def check_batched(device: str, dtype: torch.dtype, scheme: str, **sizes: int) -> None:
    """Three batches on Triton, one of them empty, whose rows behind their counts hold NaN."""
    counts = torch.tensor([9, 0, 4], dtype=torch.int32, device=device)
    case = Case(device, dtype, scheme, E=3, **sizes)
    x = torch.randn(3, 9, case.args[0].shape[1], generator=torch.Generator().manual_seed(3))
    x = x.to(dtype).to(device)
    x[torch.arange(9, device=device) >= counts[:, None]] = math.nan
    inside = ~torch.isnan(x[..., 0])
    with poisoned_memory():
        out = moe_ops.batched_experts(x, *case.args[1:3], counts, backend="triton")
    expected = oracle.batched(x, *case.args[1:3], counts)
    assert_matches(out[inside], expected[inside], tolerance(dtype, scheme, device))


def refill(case: Case, seed: int) -> None:
    """New tokens and new routing, in place."""
    g = torch.Generator().manual_seed(seed)
    x, w13, _, weights, ids = case.args
    x.copy_(torch.randn(x.shape, generator=g))
    ids.copy_(torch.randint(-1, w13.shape[0] + 1, ids.shape, generator=g))
    weights.copy_(router_weights(*weights.shape).flip(0))


def measured_tiers(*tiers: tuple[int, str]) -> list[dict]:
    """Rows of a measured table, as `python -m moe_ops.tuning --backends` writes them, that make
    these tiers."""
    names = sorted({name for _, name in tiers})
    fastest = {1: tiers[0][1]}
    for i, (limit, name) in enumerate(tiers):
        if limit > 0:
            fastest[limit] = name
            if i + 1 < len(tiers):
                fastest[limit + 1] = tiers[i + 1][1]
    return [
        {"num_tokens": M, "us": {name: 1.0 if name == best else 2.0 for name in names}}
        for M, best in sorted(fastest.items())
    ]


class Largest(TorchDispatchMode):
    """The most elements, of 16 bits and more, that any operator returned but for views."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if torch.is_tensor(t) and t.itemsize > 1 and not func.is_view:
                self.elements = max(self.elements, t.numel())
        return found
