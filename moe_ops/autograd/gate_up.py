"""w13 from gate and up rows that are stored otherwise, in the same pass over memory that casts
master weights: `moe_ops::gate_up`.

Dimensions: E local experts, F intermediate size, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.environment import INTERPRETED
from moe_ops.kernels import launch
from moe_ops.kernels.launch import Lazy, run
from moe_ops.ops.library import TORCH_DEVICES, register_function

_kernel = Lazy("moe_ops.kernels.rows.gate_up:gate_up")


def _parts(w13: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up rows of w13 (E, 2F, D)."""
    gate, up = w13.chunk(2, 1)
    return gate, up


def _has_kernel(first: Tensor, second: Tensor | None) -> bool:
    """Whether Triton runs where these are, which casts rows at the rate of a copy: torch copies
    them to strided places an element at a time.
    """
    there = (first.is_cuda and environment.TRITON != "") or INTERPRETED
    floats = all([t is None or t.dtype != torch.float64 for t in (first, second)])
    return there and floats and first.numel() > 0


def _launch(w13: Tensor, gate: Tensor, up: Tensor | None, joins: bool) -> None:
    with torch.cuda.device_of(w13):
        device = w13.get_device()
        run([_kernel(w13, gate, up, joins)], device, launch.gpu(device))


def _gate_up(gate: Tensor, up: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = _gate_up_fake(gate, up, dtype)
    if _has_kernel(gate, up):
        _launch(out, gate.contiguous(), None if up is None else up.contiguous(), True)
        return out
    sources = gate.unbind(2) if up is None else (gate, up)
    for part, source in zip(_parts(out), sources, strict=True):
        part.copy_(source)
    return out


def _gate_up_fake(gate: Tensor, up: Tensor | None, dtype: torch.dtype) -> Tensor:
    E, F = gate.shape[:2]
    return gate.new_empty(E, 2 * F, gate.shape[-1], dtype=dtype)


def _of_gate_up(grad: Tensor, interleaved: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    made = _of_gate_up_fake(grad, interleaved, dtype)
    if _has_kernel(grad, None):
        _launch(grad.contiguous(), made[0], None if interleaved else made[1], False)
        return made
    to = made[0].unbind(2) if interleaved else made
    for part, source in zip(to, _parts(grad), strict=True):
        part.copy_(source)
    return made


def _of_gate_up_fake(grad: Tensor, interleaved: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    E, N, D = grad.shape
    F = N // 2
    if interleaved:
        return grad.new_empty(E, F, 2, D, dtype=dtype), grad.new_empty(0, dtype=dtype)
    return tuple([grad.new_empty(E, F, D, dtype=dtype) for _ in range(2)])  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    gate, up, _ = inputs
    ctx.interleaved, ctx.dtype = up is None, gate.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple:
    of_gate, of_up = backward(grad, ctx.interleaved, ctx.dtype)
    return of_gate, None if ctx.interleaved else of_up, None


def _save_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    grad, ctx.interleaved, _ = inputs
    ctx.dtype = grad.dtype


def _backward_of_backward(ctx: Any, of_gate: Tensor, of_up: Tensor) -> tuple:
    return gate_up(of_gate, None if ctx.interleaved else of_up, ctx.dtype), None, None


backward = register_function(
    "gate_up_backward",
    "(Tensor grad, bool interleaved, ScalarType dtype) -> (Tensor, Tensor)",
    _of_gate_up,
    _of_gate_up_fake,
    (_backward_of_backward, _save_backward),
    devices=TORCH_DEVICES,
    one_by_one=True,
)

# (E, 2F, D): the rows of gate (E, F, D), then those of up; or of gate alone (E, F, 2, D), where
# they take turns
gate_up = register_function(
    "gate_up",
    "(Tensor gate, Tensor? up, ScalarType dtype) -> Tensor",
    _gate_up,
    _gate_up_fake,
    (_backward, _save),
    devices=TORCH_DEVICES,
    one_by_one=True,
)
