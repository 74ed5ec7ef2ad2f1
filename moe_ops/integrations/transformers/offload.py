"""offload(): the experts of a model in host memory, with slots for some of them on a GPU."""

from __future__ import annotations

import torch
from torch import nn

from moe_ops.integrations.transformers import budget, moving
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.attach import attach
from moe_ops.integrations.transformers.residency import ResidencyReport
from moe_ops.integrations.transformers.warmup import runs_here
from moe_ops.residency.experts import device_of_slots


def offload(
    model: nn.Module,
    gpu_memory: int | str = budget.AUTO,
    *,
    device: torch.device | str | int | None = None,
) -> ResidencyReport:
    """Keep the experts of a model in pinned host memory, and run them from slots on a GPU, where
    the rest of the model goes; attach the model if it is not yet.

    Each layer gets slots for as many experts as the budget allows. A call copies the chosen
    experts that have no slot into those that were not used for longest, on the GPU's own decision:
    a forward is one graph, `generate` compiles with a static cache, and outputs have the bits of
    the model that holds its experts itself and runs them by the same backend. `parameters()` and
    the state dict go on having all experts, which are those in host memory, without gradients.

    Args:
        model: as for `attach`, in CPU memory, quantized or not.
        gpu_memory: bytes of weights on the GPU, rest and slots: a number, a text such as "12GiB",
            or "auto": what is free there, less room for a key-value cache of 8192 tokens and
            for activations. A key-value cache and activations come on top of a given number.
        device: of rest and slots; None: the current GPU, without one the CPU, which then has slots
            beside the experts and copies between them.

    Returns:
        What is where, and what the link costs a token.

    Raises:
        ValueError: a device that is none; a gpu_memory that is none, or has no room for the rest
            of the model and top_k slots in each layer; too little host memory for one layer more;
            no MoE layer, or one whose forward is not one `fused_experts` call; weights that are
            not in CPU memory, are spread over processes, carry adapters, or are in host memory
            already; or accelerate's hooks.
        RuntimeError: as `attach`.

    After an error the model is as it was, but for being attached.
    """
    gpu_memory = budget.parse(gpu_memory)
    layers = layers_of.find(model)
    for layer in layers:
        moving.check(layer)
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise ValueError(
                f"model must have no hooks of accelerate, got one on {name or 'the model'}; load "
                "it without device_map, or call accelerate.hooks.remove_hook_from_module(model, "
                "recurse=True)"
            )
    target = device_of_slots(device)
    plan = budget.plan(model, layers, gpu_memory, target, lambda x, name: x.weight(name).nbytes)
    plan.check_host(loaded=True)
    if not all(map(runs_here, layers)):
        attach(model)
    return moving.move(model, layers, plan)
