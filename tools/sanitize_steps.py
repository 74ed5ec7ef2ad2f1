"""Training steps at small sizes, which sanitize_kernels.py runs under compute-sanitizer: weights,
biases, packed weights and adapters, experts that no token picks, and pairs of no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from compile_kernels import kernel_names
from harness import relative_error
from torch import Tensor

import moe_ops
from moe_ops import Activation
from moe_ops.autograd import fused, gate_up
from moe_ops.backends.cutlass import products as native_products
from moe_ops.bench.layers import quantized
from moe_ops.kernels import launch
from moe_ops.planning import training as planning

E, TOP_K = 5, 2
SIZES = 224, 160  # K, I
# scheme, rank of adapters or 0, and what a layer has beside its weights. Sizes are no multiples of
# tiles, and an expert has more rows than a block.
STEPS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("", 0, {}),
    ("", 0, {"bias": True, "activation": "swigluoai"}),
    ("", 0, {"bias": True, "on_input": True, "activation": "relu2_no_mul"}),
    ("int4_w4a16:g32:zp", 0, {"bias": True}),
    ("mxfp6_e2m3_w6a16", 0, {}),
    ("fp8_block", 0, {"bias": True}),
    ("", 0, {"sorted": True}),
    ("", 0, {"sorted": True, "bias": True, "activation": "swigluoai"}),
    ("", 0, {"sorted": True, "pair": True}),  # copied for torch's products, else read in place
    ("", 5, {"activation": "swigluoai"}),
    ("", 16, {"bias": True}),
    ("", 70, {"on_input": True, "activation": "relu2_no_mul"}),  # more ranks than a program takes
    ("int4_w4a16:g32", 16, {}),
    ("int4_w4a16:g64:zp", 16, {"of whole tiles": True}),  # for the kernel of SM90
    ("mxfp4_w4a16", 0, {"of whole tiles": True}),
)
WHOLE_TILES = 256, 128  # K, I
TOKENS = (1, 300)
# of gradients, between products in bf16 and in fp32 for packed weights
MAX_ERROR = 0.05


def launched(names: list[str]) -> Callable[..., None]:
    """What stands for kernels.launch.run in a training step, and notes which kernels it runs."""

    def run(launches: Any, device: int, gpu: Any) -> None:
        names.extend([one.kernel.name for one in launches])
        launch.run(launches, device, gpu)

    return run


def steps(
    device: str, dtype: torch.dtype, packed: bool, compared: bool
) -> Iterator[tuple[str, list[Tensor], list[Tensor]]]:
    """(call, its result and gradients, those of plain torch if they are compared) of training
    steps, with or without those of packed weights.
    """
    rng = torch.Generator(device).manual_seed(2)

    def random(*size: int) -> Tensor:
        t = torch.randn(*size, generator=rng, device=device) * size[-1] ** -0.5
        return t.to(dtype).requires_grad_()

    for scheme, rank, has in STEPS:
        if scheme and not packed:
            continue
        K, I = WHOLE_TILES if has.get("of whole tiles") else SIZES
        of = Activation(has.get("activation", "silu"))
        N = 2 * I if of.gated else I
        top_k = 1 if has.get("on_input") else TOP_K
        weights: list[Any] = [random(E, N, K), random(E, K, I)]
        if scheme:
            weights = [quantized(w.detach(), scheme, None) for w in weights]
        pairs = ((rank, K), (N, rank), (rank, I), (K, rank))
        matrices: list[Any] = [random(E, *size) for size in pairs] if rank else []
        adapter = moe_ops.LoRA._make((*matrices, 0.5)) if matrices else None
        biases = [random(E, size) for size in (N, K)] if has.get("bias") else [None, None]
        for M in TOKENS:
            x, grad = random(M, K), torch.randn(M, K, generator=rng, device=device).to(dtype)
            router = torch.rand(M, top_k, generator=rng, device=device).requires_grad_()
            # none picks the last expert; of the first token, where more follow, none is here
            ids = torch.rand(M, E - 1, generator=rng, device=device).topk(top_k).indices
            ids[: M // 2, -1] = 0
            if M > 1:
                ids[0] = E
            routed = [] if has.get("sorted") else [router]
            given = [x, *routed, *([] if scheme else weights), *biases, *matrices]
            leaves = [t for t in given if t is not None]
            found: list[list[Tensor]] = []
            for plain in (False, True) if compared else (False,):
                with ExitStack() as stack:
                    if plain:
                        stack.enter_context(mock.patch.object(planning, "why_not_kernels", _plain))
                    options = {
                        "activation": of,
                        "w13_bias": biases[0],
                        "w2_bias": biases[1],
                        "adapters": adapter,
                    }
                    if has.get("sorted"):  # with rows of no expert behind
                        counts = torch.bincount(ids[M // 3 :, 0], minlength=E)[:E]
                        first = weights[0]
                        if has.get("pair"):
                            first = [half.contiguous() for half in first.chunk(2, 1)]
                        out = moe_ops.grouped_experts(x, first, weights[1], counts, **options)
                    else:
                        on_input = bool(has.get("on_input"))
                        out = moe_ops.fused_experts(
                            *(x, *weights, router, ids),
                            router_weight_on_input=on_input,
                            **options,
                        )
                    found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
            name = " ".join([scheme or "plain", f"rank {rank}", *map(str, has)])
            yield f"{name} M={M}", found[0], found[-1]


def _plain(*call: Any) -> str:
    return "this is what the kernels are compared with"


def run_steps(
    device: str, dtype: torch.dtype = torch.bfloat16, compared: bool = True
) -> tuple[list[str], list[str], list[str]]:
    """Run the steps: their names, the kernels that they launched, and what was wrong. Without
    comparison nothing runs but they.
    """
    calls: list[str] = []
    kernels: list[str] = []
    wrong: list[str] = []
    # those of csrc/cutlass, where they are there, and torch's products with what follows them
    products = [native_products.kernels]
    if device != "cpu" and native_products.kernels(torch.cuda.current_device()) is not None:
        products.append(lambda _: None)
    for native in products:  # those of packed weights are the same with both
        first = native is products[0]
        with (
            mock.patch.object(fused, "run", launched(kernels)),
            mock.patch.object(gate_up, "run", launched(kernels)),
            mock.patch.object(native_products, "kernels", native),
        ):
            for call, found, expected in steps(device, dtype, first, compared):
                calls.append(call)
                for i, (a, b) in enumerate(zip(found, expected, strict=True) if compared else ()):
                    far = relative_error(a, b.double())
                    if not far <= MAX_ERROR:  # NaN, too
                        wrong.append(f"{call}: relative error {far:.3g} of result {i}")
    missing = sorted(training_kernels() - set(kernels))
    wrong += [f"{name} is never launched" for name in missing]
    return calls, sorted(set(kernels)), wrong


def training_kernels() -> set[str]:
    """All kernels of training steps alone."""
    return {name for name in kernel_names() if name.startswith("moe_ops_train")}
