"""Compile the kernels around FlashInfer's for a GPU, without one, and print their names: see
tests/backends/flashinfer/test_layer.py.

python tests/support/compile_flashinfer.py ARCH
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from compile_kernels import Call, Compiled, _Driver, _empty, _weight
from triton.runtime import driver

from moe_ops.activations import Activation, rows_before
from moe_ops.backends.flashinfer import (
    backend,
    layer,
    library,
    schemes,
)
from moe_ops.kernels import launch
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Problem

CALLS = (  # scheme, top_k, bias and expert_map, router_weight_on_input, activation, ids
    ("", 8, True, False, "silu", torch.int64),
    ("", 1, False, True, "relu2_no_mul", torch.int32),
    ("fp8_tensor_static", 3, False, False, "silu", torch.int32),
    ("mxfp4_mxfp8", 1, True, True, "swigluoai", torch.int32),
    ("nvfp4", 10, False, False, "silu", torch.int32),
)


def compiled(
    arch: int, scheme: str, top_k: int, more: bool, on_input: bool, name: str, ids
) -> list[Compiled]:
    """The kernels that one call launches."""
    M, E, K, I = 70, 16, 256, 128
    activation = Activation(name)
    N = 2 * I if activation.gated else I
    order = rows_before(activation)
    layout = schemes.SCHEMES[scheme].layout + (f":{order}" if order else "")
    options = Options(activation, on_input)
    problem = Problem(
        *("experts", E, K, I, N, top_k, torch.bfloat16, scheme, layout, options), has_bias=more
    )
    f = dict.fromkeys(ExpertsArgs._fields)
    for weight, size in (("w13", (N, K)), ("w2", (K, I))):
        f[weight], parts = _weight(Call((E, top_k, K, I), M, scheme), scheme, *size)
        f |= {f"{weight}_{part}": tensor for part, tensor in parts.items()}
    f["out"] = f["hidden_states"] = _empty(M, K, dtype=torch.bfloat16)
    f["topk_weights"] = _empty(M, top_k, dtype=torch.float32)
    f["topk_ids"] = _empty(M, top_k, dtype=ids)
    f["a13_scale"] = f["a2_scale"] = _empty(dtype=torch.float32)
    if more:
        f["w13_bias"] = _empty(E, N, dtype=torch.float32)
        f["expert_map"] = _empty(40, dtype=torch.int32)
    for buffer, shape in zip(
        ("workspace13", "workspace2", "index_workspace"),
        backend.workspace_shapes(M, problem),
        strict=True,
    ):
        f[buffer] = _empty(*shape.shape, dtype=shape.dtype)
    f |= {"scheme": scheme, "layout": layout, "options": options}
    gpu = launch.Gpu(227 * 1024, True, True)
    found, before = [], driver._active

    def compile_one(one: launch.Launch, _first: bool, _gpu: launch.Gpu):
        options = {"grid": one.grid, "num_warps": one.num_warps}
        binary = one.kernel.function.warmup(*one.args, **options)
        found.append(Compiled(one.kernel.name, {}, one.num_warps, binary))
        return binary

    driver.set_active(_Driver(arch))
    try:
        with (
            mock.patch.object(launch, "gpu", lambda device: gpu),
            mock.patch.object(launch, "_compiled", {}),
            mock.patch.object(launch, "_start", compile_one),
            mock.patch.object(library, "runner", lambda *_: mock.MagicMock()),
        ):
            layer.experts(ExpertsArgs(**f))
    finally:
        driver._active = before
    return found


if __name__ == "__main__":
    for call in CALLS:
        for kernel in compiled(int(sys.argv[1]), *call):
            print(kernel.name)
