"""Values of quantized matrices by the formulas of the formats, in fp64, without moe_ops."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Parts = dict[str, Tensor]  # role -> tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each of eight nibbles, from the lowest
ROLES = {
    *("weight", "weight_packed", "weight_shape", "weight_scale", "weight_scale_2"),
    *("weight_scale_inv", "weight_global_scale", "weight_zero_point"),
    *("input_scale", "input_global_scale", "qweight", "qzeros", "scales", "g_idx", "biases"),
    *("pre_quant_scale", "_weight_qdata", "_weight_scale", "_weight_zero_point"),
}
_STACK = re.compile(
    r"(.*experts\.)_?(gate_up_proj|down_proj|gate_proj|up_proj)_?"
    r"(weight_scale_2|weight_scale|scale_inv|weight_scale_inv|input_scale|qdata|scale|zero_point|)$"
)


def codes(words: Tensor, bits: int, dim: int) -> Tensor:
    """Codes of 32-bit words along a dimension, from the lowest bits."""
    wide = words.to(torch.int64) & 0xFFFFFFFF
    dim %= wide.dim()
    parts = [(wide >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def fp4(octets: Tensor, dim: int = -1) -> Tensor:
    """Pairs of e2m1 along a dimension, the low nibble first."""
    table = torch.cat((E2M1, -E2M1))
    dim, wide = dim % octets.dim(), octets.view(torch.uint8).long()
    return torch.stack((table[wide & 15], table[wide >> 4]), dim + 1).flatten(dim, dim + 1)


def e8m0(exponents: Tensor) -> Tensor:
    return torch.exp2(exponents.view(torch.uint8).double() - 127)


def spread(scale: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """A scale for each of equal parts of a matrix, repeated to its shape."""
    for dim, size in enumerate(shape):
        if scale.shape[dim] not in (1, size):
            scale = scale.repeat_interleave(-(-size // scale.shape[dim]), dim)
            scale = scale.narrow(dim, 0, size)
    return scale


def blocks(scale: Tensor, shape: torch.Size, size: int = 128) -> Tensor:
    """A scale for each block of 128 x 128, of which those at the ends may be smaller."""
    wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return wide[: shape[0], : shape[1]]


def matrix(parts: Parts, config: dict[str, Any]) -> Tensor:
    """(N, K) in fp64 of one matrix's tensors."""
    if "qweight" in parts:
        return _gptq_or_awq(parts, config)
    packed = parts.get("weight_packed")
    if packed is not None and packed.dtype == torch.int32:
        rows, columns = parts["weight_shape"].tolist()
        bits = packed.shape[1] * 32 // columns
        found = codes(packed, bits, 1)[:, :columns] - 2 ** (bits - 1)
        if "weight_zero_point" in parts:
            zero = codes(parts["weight_zero_point"], bits, 0)[:rows] - 2 ** (bits - 1)
            found = found - spread(zero, found.shape)
        return found.double() * spread(parts["weight_scale"].double(), found.shape)
    if packed is not None:
        values, scale = fp4(packed), parts["weight_scale"]
        if "weight_global_scale" in parts:
            whole = parts["weight_global_scale"].double()
            return values * spread(scale.double(), values.shape) / whole
        return values * spread(e8m0(scale), values.shape)
    if "_weight_qdata" in parts:
        values = parts["_weight_qdata"].double()
        return values * spread(parts["_weight_scale"].double(), values.shape)
    weight = parts["weight"]
    if "biases" in parts:
        bits = config["bits"]
        values = codes(weight, bits, -1).double()
        scale, least = (spread(parts[n].double(), values.shape) for n in ("scales", "biases"))
        return values * scale + least
    if "scales" in parts:  # MLX's mxfp4
        values = fp4(weight.contiguous().view(torch.uint8))
        return values * spread(e8m0(parts["scales"]), values.shape)
    if weight.dtype == torch.uint8:
        values, scale = fp4(weight), parts["weight_scale"]
        if "weight_scale_2" in parts:
            return values * spread(scale.double(), values.shape) * parts["weight_scale_2"].double()
        return values * spread(e8m0(scale), values.shape)
    if "weight_scale_inv" in parts:
        return weight.double() * blocks(parts["weight_scale_inv"].double(), weight.shape)
    if "weight_scale" in parts:
        return _scaled(weight, parts)
    return weight.double()


def _scaled(weight: Tensor, parts: Parts) -> Tensor:
    scale = parts["weight_scale"]
    if scale.dtype == torch.uint8:
        return weight.double() * spread(e8m0(scale), weight.shape)
    scale = scale.double()
    values = weight.double()
    if "weight_zero_point" in parts:
        values = values - parts["weight_zero_point"].double()
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0]
    if scale.numel() == 1:
        return values * scale.reshape(())
    per_block = tuple(-(-size // 128) for size in weight.shape)
    if scale.shape == per_block and scale.shape[0] != weight.shape[0]:
        return values * blocks(scale, weight.shape)
    if scale.dim() == 2 and scale.shape[1] > 1:
        return values * spread(scale, weight.shape)
    return values * scale.reshape(-1, 1)


def _gptq_or_awq(parts: Parts, config: dict[str, Any]) -> Tensor:
    words, scale = parts["qweight"], parts["scales"].double()
    if words.shape[1] != scale.shape[1]:  # AWQ packs columns

        def unpack(t: Tensor) -> Tensor:
            order = [AWQ_ORDER.index(i) for i in range(8)]
            return codes(t, 4, 1).unflatten(1, (-1, 8))[..., order].flatten(1)

        found, zero = unpack(words), unpack(parts["qzeros"])
    else:
        bits = config.get("bits", 4)
        found, zero = codes(words, bits, 0), codes(parts["qzeros"], bits, 1)
        if config.get("checkpoint_format", config.get("format")) != "gptq_v2":
            zero = (zero + 1) % 2**bits
    count = found.shape[0]
    group = parts.get("g_idx", torch.arange(count) // (count // scale.shape[0])).long()
    return ((found - zero[group]).double() * scale[group]).T


def stack(parts: Parts) -> Tensor:
    """A stack of experts as the file orients it, in fp64."""
    weight = parts[""] if "" in parts else parts["qdata"]
    scale = next((parts[n] for n in ("weight_scale", "scale", "scale_inv") if n in parts), None)
    if scale is None:
        return weight.double()
    if weight.dtype == torch.uint8 and "weight_scale_2" in parts:  # pairs along dimension 1
        along = 2 if scale.shape[1] == weight.shape[1] else 1
        values = fp4(weight, along)
        whole = parts["weight_scale_2"].double().reshape(-1, 1, 1)
        return values * spread(scale.double(), values.shape) * whole
    if weight.dtype == torch.uint8:
        values = fp4(weight)
        return values * spread(e8m0(scale), values.shape)
    values = weight.double()
    scale = scale.double()
    while scale.dim() < 3:
        scale = scale.unsqueeze(-1)
    return values * spread(scale, values.shape)


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of a folder, and what its config.json says of the quantization."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    config = json.loads((folder / "config.json").read_text())
    said = config.get("quantization_config") or config.get("quantization") or {}
    return tensors, said


def values(folder: Path) -> tuple[dict[str, Tensor], set[str]]:
    """Plain numbers by name, and the names of those that were quantized; scales of activations
    are left out.
    """
    tensors, config = read(folder)
    matrices: dict[str, Parts] = {}
    stacks: dict[str, Parts] = {}
    found: dict[str, Tensor] = {}
    for name, t in tensors.items():
        match = _STACK.match(name)
        base, _, role = name.rpartition(".")
        if match:
            stacks.setdefault(match[1] + match[2], {})[match[3]] = t
        elif role in ROLES:
            matrices.setdefault(base, {})[role] = t
        elif not re.search(r"[kqv]_(scale|bias_quant)$", name):
            found[name] = t.double() if t.is_floating_point() else t
    quantized = set()
    for base, parts in stacks.items():
        if "" in parts or "qdata" in parts:
            found[base] = stack(parts)
            if len(parts) > 1:
                quantized.add(base)
            continue
        for name, one in matrices.items():  # transformers' own: elements by expert
            match = re.fullmatch(re.escape(base.rpartition(".")[0]) + r"\.(\d+)\.(\w+)", name)
            down = base.endswith("down_proj")
            if match is None or down != (match[2] in ("down_proj", "w2")):
                continue
            of = parts["scale_inv"][int(match[1])]
            rows = of.shape[0] // (1 if down else 2)
            first = down or match[2] in ("gate_proj", "w1")
            one["weight_scale_inv"] = of[:rows] if first else of[-rows:]
    for base, parts in matrices.items():
        weight = parts.get("weight")
        if set(parts) <= {"input_scale", "input_global_scale"}:
            continue  # beside a matrix of another name
        if set(parts) <= {"weight", "input_scale"} and weight is not None:
            found[f"{base}.weight"] = weight.double()
            continue
        if weight is not None and weight.dim() == 3:  # MLX's switch_mlp
            pieces = [{n: t[e] for n, t in parts.items()} for e in range(weight.shape[0])]
            said = config.get(base, config)
            found[base] = torch.stack([matrix(piece, said) for piece in pieces])
        else:
            factors = parts.pop("pre_quant_scale", torch.ones(()))  # of its input
            found[f"{base}.weight"] = matrix(parts, config.get(base) or config) * factors.double()
        quantized.add(base if base in found else f"{base}.weight")
    return found, quantized
