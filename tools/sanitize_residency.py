"""Layers whose experts lie in host memory, at small sizes, which sanitize_kernels.py runs under
compute-sanitizer: calls that find experts and calls that miss them, passes over more experts than
slots, and prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import moe_ops
from moe_ops.bench.layers import quantized
from moe_ops.kernels import launch
from moe_ops.residency import bank

E, TOP_K, SLOTS = 8, 2, 3
SIZES = 256, 128  # K, I
SCHEMES = ("", "fp8_block", "int4_w4a16:g32:zp", "mxfp4_w4a16")
# tokens of calls, one after the other, and whether they count as a prompt
CALLS = ((1, False), (1, False), (7, False), (40, False), (40, True), (1, False))
KERNELS = {"moe_ops_admit_experts", "moe_ops_fetch_experts"}


def run_residency(device: str, compared: bool = True) -> tuple[list[str], list[str], list[str]]:
    """Run the calls: their names, the kernels that they launched, and where bits differ from those
    of the same layer with all experts on the device. Without comparison nothing runs but they.
    """
    calls: list[str] = []
    kernels: list[str] = []
    wrong: list[str] = []
    rng = torch.Generator(device).manual_seed(0)
    backend = "torch" if device == "cpu" else "triton"

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=rng, device=device)

    for scheme in SCHEMES:
        K, I = SIZES
        plain = [random(E, *size).to(torch.bfloat16) / 16 for size in ((2 * I, K), (K, I))]
        weights: list[Any] = [quantized(one, scheme, None) if scheme else one for one in plain]
        experts = moe_ops.ResidentExperts(*weights, slots=SLOTS)
        for M, prompt in CALLS:
            scores, ids = random(M, E).softmax(-1).topk(TOP_K)
            args = random(M, K).to(torch.bfloat16), scores, ids.int()
            rate = 0 if prompt else bank.FLOPS_OF_BYTE
            with (
                mock.patch.object(bank, "FLOPS_OF_BYTE", rate),
                mock.patch.object(launch, "run", _noting(kernels)),
            ):
                out = _layer(experts.w13, experts.w2, args, backend)
            calls.append(f"{scheme or 'plain'} M={M}{' prompt' if prompt else ''}")
            if compared and not torch.equal(out, _layer(*weights, args, backend)):
                wrong.append(f"{calls[-1]}: other bits than with all experts on the device")
    kernels = sorted(KERNELS.intersection(kernels))
    wrong += [f"{name} is never launched" for name in sorted(KERNELS.difference(kernels))]
    return calls, kernels, wrong


def _layer(w13: Any, w2: Any, args: tuple[torch.Tensor, ...], backend: str) -> torch.Tensor:
    x, scores, ids = args
    return moe_ops.fused_experts(x, w13, w2, scores, ids, backend=backend)


def _noting(names: list[str]) -> Callable[..., None]:
    """What stands for kernels.launch.run, and notes which kernels it runs."""
    launched = launch.run

    def run(launches: Any, device: int, gpu: Any) -> None:
        names.extend(one.kernel.name for one in launches)
        launched(launches, device, gpu)

    return run
