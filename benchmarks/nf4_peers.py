"""Products of rows and experts frozen in nf4 by other libraries, for qlora_nf4.py and
nf4_layers.py, between rows that are sorted and summed as in unsloth-zoo. qlora_nf4.py says what
they are.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from training_cases import Inputs, Layer

NF4 = "nf4_w4a16:g64"
FILES = {
    "unsloth": "unsloth_zoo/temporary_patches/moe_nf4_grouped.py",
    "dequantize": "bitsandbytes/backends/triton/kernels_4bit.py",
    "grouped-nf4-gemm": "nf4_qlora.py",
}
Multiply = Callable[[Tensor, Tensor], Tensor]  # rows, offsets


class Gather(torch.autograd.Function):
    """The tokens of sorted pairs; gradients are sums in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Rows in another order, whose inverse is known."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return grads[0][ctx.saved_tensors[0]], None, None


class Dequantized(torch.autograd.Function):
    """Rows times weights that are decoded in either pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, offsets: Tensor, decode: Callable[[], Tensor]) -> Tensor:
        ctx.save_for_backward(offsets)
        ctx.decode = decode
        return F.grouped_mm(rows, decode().transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (offsets,) = ctx.saved_tensors
        return F.grouped_mm(grads[0], ctx.decode(), offs=offsets), None, None


def activated(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def weighted(y: Tensor, weights: Tensor) -> Tensor:
    return (y.unflatten(0, weights.shape) * weights.unsqueeze(-1)).sum(1)


def packed_as_bitsandbytes(weight: Any) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """(codes, absmax, shape), flat."""
    codes = (weight.qdata << 4) | (weight.qdata >> 4)
    return codes.flatten(), weight.scale.flatten(), tuple(weight.shape)


def by_unsloth(module: ModuleType, weight: Any) -> Multiply:
    packed, absmax, (E, N, K) = packed_as_bitsandbytes(weight)
    levels = torch.tensor(module_levels(), device=packed.device)
    spec = {
        **dict.fromkeys(("absmax", "absmax2", "code2", "offset"), absmax),
        **{"packed": packed, "code": levels, "K": K, "N": N, "kn_layout": False},
        **{"blocksize": 64, "blocksize2": 1, "nested": False, "w_dtype": 1, "num_experts": E},
    }
    return lambda rows, offsets: module.nf4_grouped_mm(rows, offsets, spec)


def by_dequantizing(module: ModuleType, weight: Any) -> Multiply:
    packed, absmax, shape = packed_as_bitsandbytes(weight)

    def decode() -> Tensor:
        out = torch.empty(shape, dtype=torch.bfloat16, device=packed.device)
        module.dequantize_4bit_impl(packed, absmax, 64, "nf4", out.dtype, out)
        return out

    return lambda rows, offsets: Dequantized.apply(rows, offsets, decode)


def module_levels() -> tuple[float, ...]:
    from moe_ops.schemes import ELEMENT_FORMATS

    return ELEMENT_FORMATS["nf4"].levels


def by_grouped_nf4(module: ModuleType, weight: Any) -> Multiply:
    codes, absmax, (E, N, K) = packed_as_bitsandbytes(weight)
    packed, absmax = codes.view(E, N, K // 2), absmax.view(E, N, K // 64)

    def multiply(rows: Tensor, offsets: Tensor) -> Tensor:
        sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        used = [e for e in range(E) if sizes[e]]  # sizes are to be positive
        of_used = [sizes[e] for e in used]
        return module.gemm_4bit_grouped_train(rows, packed, absmax, of_used, used)

    return multiply


PEERS = {
    "unsloth": by_unsloth,
    "dequantize": by_dequantizing,
    "grouped-nf4-gemm": by_grouped_nf4,
}


def peer(name: str, module: ModuleType, inputs: Inputs) -> Layer:
    """A layer by a peer's products, whose rows are sorted, gathered and summed as in unsloth-zoo;
    what is between products is compiled.
    """
    first, second = [PEERS[name](module, w) for w in (inputs.w13, inputs.w2)]
    activate, combine = torch.compile(activated), torch.compile(weighted)
    E = inputs.w13.shape[0]

    def adapted(rows: Tensor, y: Tensor, offsets: Tensor, a: Any, b: Any, scale: float) -> Tensor:
        u = F.grouped_mm(rows, a.transpose(1, 2), offs=offsets)
        return y + F.grouped_mm(u, b.transpose(1, 2), offs=offsets) * scale

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        offsets = torch.histc(flat.float(), E, 0, E - 1).cumsum(0).int()
        rows = Gather.apply(x, order, inverse, ids.shape[1])
        h, lora = first(rows, offsets), inputs.adapter
        if lora is not None:
            h = adapted(rows, h, offsets, lora.a13, lora.b13, lora.scale)
        hidden = activate(h)
        y = second(hidden, offsets)
        if lora is not None:
            y = adapted(hidden, y, offsets, lora.a2, lora.b2, lora.scale)
        return combine(Permute.apply(y, inverse, order), weights)

    return layer


def load_peers(folder: str | None) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """Modules of peers by name, and what they come from or why they are missing."""
    modules: dict[str, ModuleType] = {}
    told: dict[str, str] = {}
    place = Path(tempfile.mkdtemp(prefix="peers_"))  # Triton reads sources
    archives = sorted(Path(folder).iterdir()) if folder else []
    for name, file in FILES.items():
        told[name] = f"no archive with {file}"
        for archive in filter(zipfile.is_zipfile, archives):
            with zipfile.ZipFile(archive) as opened:
                if file not in opened.namelist():
                    continue
                path = Path(opened.extract(file, place))
                if path.parent == place:  # it imports its neighbours
                    opened.extractall(place)
                    sys.path.append(str(place))
                spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except Exception as error:
                told[name] = f"{type(error).__name__}: {error}"
                continue
            modules[name], told[name] = module, archive.name
    return modules, told
