"""Cases of the training benchmark: their inputs, the fp64 reference, and memory of a step.

M tokens, K hidden size, I intermediate size, E experts. w13 is (E, 2I, K) and w2 (E, K, I).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cases
import torch
from harness import relative_error
from torch import Tensor

import moe_ops
from moe_ops.bench.shapes import Shape

SHAPES = cases.SHAPES | {"olmoe": Shape(64, 8, 2048, 1024)}
# Experts with biases, whose weights are stored (E, K, 2I) and (E, I, K), gate and up interleaved.
BIASED = ("gptoss20", "gptoss120")
# schemes of the frozen weights that are adapted, by what is trained
ADAPTED = {"lora": "", "qlora_int4": "int4_w4a16:g128", "qlora_mxfp4": "mxfp4_w4a16"}
TRAINS = ("full", "frozen", *ADAPTED)
RANK = 16
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # x, w13, w2, weights, ids


@dataclass(frozen=True)
class Case:
    shape: str
    trains: str  # one of TRAINS
    num_tokens: int
    scheme: str = ""  # of the weights

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def biased(self) -> bool:
        return self.shape in BIASED

    def flops(self, step: bool) -> float:
        """Of the forward pass, or of a step: three times as many, two with frozen weights. Those
        of adapters are left aside.
        """
        sizes = self.sizes
        product = 3 * sizes.hidden_size * sizes.intermediate_size
        times = (3 if self.trains == "full" else 2) if step else 1
        return 2.0 * self.num_tokens * sizes.top_k * product * times


@dataclass
class Inputs:
    """What a layer takes, and the gradient of its output."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    weights: Tensor
    ids: Tensor
    grad: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    adapter: moe_ops.LoRA | None = None

    def merged(self, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """Weights with what adapts them."""
        if self.adapter is None:
            return w13, w2
        a13, b13, a2, b2, scale = self.adapter
        assert a13 is not None and b13 is not None and a2 is not None and b2 is not None
        first = torch.baddbmm(w13, b13, a13, alpha=scale)
        return first, torch.baddbmm(w2, b2, a2, alpha=scale)

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.x, self.w13, self.w2, self.weights, self.ids

    @property
    def trained(self) -> dict[str, Tensor]:
        names = ("x", "w13", "w2", "weights", "b13", "b2")
        named = {name: getattr(self, name) for name in names}
        if self.adapter is not None:
            named |= {f"lora_{k}": t for k, t in self.adapter._asdict().items() if k != "scale"}
        return {name: t for name, t in named.items() if t is not None and t.requires_grad}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Random, of unit scale; routing is uniform."""
    sizes, M = case.sizes, case.num_tokens
    E, K, I = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size
    rng = torch.Generator(device).manual_seed(case.num_tokens)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=rng, device=device) * scale).to(torch.bfloat16)

    scores = torch.randn(M, E, generator=rng, device=device).softmax(1)
    weights, ids = scores.topk(sizes.top_k)
    weights = (weights / weights.sum(1, keepdim=True)).to(torch.bfloat16)
    full, b13, b2, adapter = case.trains == "full", None, None, None
    w13, w2 = [random(*size, scale=size[-1] ** -0.5) for size in ((E, 2 * I, K), (E, K, I))]
    if case.biased:
        w13, w2 = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2)]
        b13, b2 = [random(E, n).requires_grad_(full) for n in (2 * I, K)]
    if case.scheme:
        w13, w2 = [moe_ops.quantize(w, case.scheme) for w in (w13, w2)]
    w13, w2 = [torch.nn.Parameter(w, requires_grad=full) for w in (w13, w2)]
    if case.trains in ADAPTED:
        sizes_of = ((RANK, K), (2 * I, RANK), (RANK, I), (K, RANK))
        matrices = [random(E, *size, scale=size[-1] ** -0.5) for size in sizes_of]
        adapter = moe_ops.LoRA(*[t.requires_grad_() for t in matrices], 2.0)
    x, grad = random(M, K).requires_grad_(), random(M, K)
    return Inputs(x, w13, w2, weights.requires_grad_(), ids, grad, b13, b2, adapter)


def gradients(layer: Layer, inputs: Inputs) -> dict[str, Tensor]:
    trained = inputs.trained
    found = torch.autograd.grad(layer(*inputs.args), list(trained.values()), inputs.grad)
    return dict(zip(trained, found, strict=True))


# --- the fp64 reference --------------------------------------------------------------------------


def _activated(h: Tensor, biased: bool) -> Tensor:
    """silu(gate) * up, or what gpt-oss computes."""
    if not biased:
        gate, up = h.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    gate, up = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def _reference(inputs: Inputs) -> Layer:
    """One expert after the other."""

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        w13, w2 = inputs.merged(w13, w2)
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            rows, slot = torch.where(ids == e)
            h = x[rows] @ w13[e].T
            if inputs.b13 is not None:
                h = h + inputs.b13[e]
            y = _activated(h, inputs.b13 is not None) @ w2[e].T
            if inputs.b2 is not None:
                y = y + inputs.b2[e]
            out = out.index_add(0, rows, y * weights[rows, slot, None])
        return out

    return layer


def _wide(t: Tensor) -> Tensor:
    """fp64 of numbers."""
    if isinstance(t, moe_ops.ExpertTensor):
        return t.dequantize(torch.float32).double()
    wide = t.detach().double() if t.is_floating_point() else t
    return wide.requires_grad_(t.requires_grad)


def expected_gradients(inputs: Inputs) -> dict[str, Tensor]:
    """In fp64, of the same numbers."""
    adapter = inputs.adapter
    if adapter is not None:
        wide_matrices = [None if t is None else _wide(t) for t in adapter[:4]]
        adapter = moe_ops.LoRA(*wide_matrices, adapter.scale)
    b13, b2 = [None if b is None else _wide(b) for b in (inputs.b13, inputs.b2)]
    args = [_wide(t) for t in inputs.args]
    wide = Inputs(*args, inputs.grad.double(), b13, b2, adapter)
    return gradients(_reference(wide), wide)


def error_of(layer: Layer, inputs: Inputs, expected: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient against fp64."""
    found = gradients(layer, inputs)
    errors = [relative_error(found[name], expected[name]) for name in expected]
    return max(errors) if all(e == e for e in errors) else float("nan")


# --- memory --------------------------------------------------------------------------------------


def _stored(t: Tensor) -> list[Tensor]:
    """The tensors that hold it: those of a quantized weight are its elements and scales."""
    if not isinstance(t, moe_ops.ExpertTensor):
        return [t]
    return [part for part in vars(t).values() if isinstance(part, Tensor)]


def kept_bytes(layer: Layer, inputs: Inputs) -> int:
    """Bytes that wait for the backward pass, without those of inputs."""
    given = (*inputs.args, *inputs.trained.values())
    parts = [part for t in given for part in _stored(t)]
    known = {t.untyped_storage().data_ptr() for t in parts}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(*inputs.args)
    del out
    return sum(kept.values())


def peak_bytes(layer: Layer, inputs: Inputs) -> int | None:
    """The most that a step allocates."""
    if inputs.x.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(layer, inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
