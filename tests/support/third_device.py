"""A device that is neither a CPU nor CUDA, made of CPU memory: the library takes the way there
that it takes on XPU, MPS and other devices of torch, and values can be compared.

Tensors say that they lie on "privateuseone", which torch has for devices that come as extensions.
What stays untried is what only a real device shows: that its torch has every operator used. A
process that has the device cannot be without it again, so run it as a program; it prints, for each
call, the largest difference from the CPU:

    python tests/support/third_device.py
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import moe_ops
from moe_ops import backends
from moe_ops.planning.auto import AUTO

NAME = "privateuseone"


class Elsewhere(Tensor):
    """A tensor on the device; `on_cpu` holds its values, which views of it share."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> Elsewhere:
        size = (data.shape, data.stride(), data.storage_offset())
        made = Tensor._make_wrapper_subclass(cls, *size, dtype=data.dtype, device=NAME)
        made.on_cpu = data
        return made

    def __repr__(self) -> str:
        return f"Elsewhere({self.on_cpu})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """An operator of this library by what it registered for the device, others on the CPU."""
        kwargs = kwargs or {}
        if func.namespace == "moe_ops":
            for backend in (*backends.BACKENDS, AUTO):
                for known in backend.operators.values():
                    if known.op is func:
                        with Created():  # a mode is off while it handles a call
                            return known.kernels["privateuse1"](*args)
        mine = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Elsewhere)]

        def unwrap(t: Any) -> Any:
            if isinstance(t, Elsewhere):
                return t.on_cpu
            return torch.device("cpu") if isinstance(t, torch.device) else t

        def wrap(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            same = [one for one in mine if one.on_cpu is t]  # written in place
            return same[0] if same else Elsewhere(t)

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))


class Created(TorchFunctionMode):
    """Context in which tensors that torch.empty and the like make on the device are
    `Elsewhere`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == NAME:
            return Elsewhere(func(*args, **kwargs | {"device": "cpu"}))
        if func is Tensor.tolist:  # which subclasses do not have
            return args[0].on_cpu.tolist() if isinstance(args[0], Elsewhere) else func(*args)
        return func(*args, **kwargs)


def _empty(size: list[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return Elsewhere(torch.empty(size, dtype=dtype, device="cpu"))


def differences() -> dict[str, float]:
    """By call: the largest difference from the CPU, over the largest value there."""
    _setup_privateuseone_for_python_backend()
    # what torch makes by itself, for a number among tensors
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    rng = torch.Generator().manual_seed(0)
    M, E, top_k, K, I = 7, 6, 2, 64, 32
    x = torch.randn(M, K, generator=rng)
    w13 = torch.randn(E, 2 * I, K, generator=rng) / 8
    w2 = torch.randn(E, K, I, generator=rng) / 6
    b13, b2 = torch.randn(E, 2 * I, generator=rng), torch.randn(E, K, generator=rng)
    ids = torch.randint(-1, E + 1, (M, top_k), generator=rng)
    router = torch.rand(M, top_k, generator=rng)
    rows = torch.randn(E, M, K, generator=rng)
    counts = torch.tensor([0, 7, 3, 1, 0, 5], dtype=torch.int32)
    sizes = list(enumerate(counts.tolist()))  # rows past them are undefined
    offsets = torch.tensor([0, 2, 2, 5, 6, 6], dtype=torch.int32)

    def layer(scheme: str, dtype: torch.dtype, *t: Tensor) -> Tensor:
        x, w13, w2, router, ids, b13, b2 = t
        weights = [w.to(dtype) for w in (w13, w2)]
        weights = [moe_ops.quantize(w, scheme) for w in weights] if scheme else weights
        biases = {"w13_bias": b13.to(dtype), "w2_bias": b2.to(dtype)}
        return moe_ops.fused_experts(x.to(dtype), *weights, router, ids, **biases)

    both = (x, w13, w2, router, ids, b13, b2)
    calls: dict[str, Any] = {
        f"{scheme or dtype}": (lambda *t, s=scheme, d=dtype: layer(s, d, *t), both)
        for scheme, dtype in [
            *[("", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)],
            *[(s, torch.bfloat16) for s in ("int8_w8a8", "fp8_channel", "int4_w4a16:g32")],
        ]
    }
    calls["batched_experts"] = (
        lambda *t: torch.cat([moe_ops.batched_experts(*t)[e, :n] for e, n in sizes]),
        (rows, w13, w2, counts),
    )
    calls["grouped_linear"] = (
        lambda x, w, offsets, bias: moe_ops.grouped_linear(x, w, offsets, bias=bias),
        (x, w13, offsets, b13),
    )
    calls["route"] = (lambda t: moe_ops.route(t, top_k)[0], (torch.randn(M, E, generator=rng),))
    calls["route_tokens"] = (
        lambda t, w: moe_ops.route_tokens(t, w, top_k)[1],
        (x, torch.randn(E, K, generator=rng)),
    )
    found = {}
    for name, (call, tensors) in calls.items():
        with torch.no_grad():
            want = call(*tensors)
            with Created():
                got = call(*[Elsewhere(t) for t in tensors])
        assert got.device.type == NAME
        error = (got.on_cpu.float() - want.float()).abs().max() / want.float().abs().max()
        found[name] = float(error)
    return found


if __name__ == "__main__":
    print(json.dumps(differences()))
