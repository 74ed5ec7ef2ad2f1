"""Checkpoints in the layouts of those who invented them, written without any code of moe_ops.

Each writer makes one matrix from random integers and scales: the tensors of its file, by what
follows the matrix's name, and the values they stand for, in float64, from the format's definition:

- GPTQ (AutoGPTQ's QuantLinear): value = (q - z) * s; eight (or four) q of neighbouring columns in
an int32
  of qweight (K/8, N), lowest bits first; qzeros (K/g, N/8) holds z - 1 modulo 16, "gptq_v2" z
  itself.
- AWQ (AutoAWQ's WQLinear_GEMM): value = (q - z) * s; qweight (K, N/8): bits 4i of a word hold the
  neighbour 0, 2, 4, 6, 1, 3, 5, 7 [i]; qzeros likewise.
- compressed-tensors: int32 words of signed values plus 8 along the columns; zero points along the
rows.
- NVFP4: value = e2m1 * s / global (compressed-tensors) or e2m1 * s * weight_scale_2 (ModelOpt).
- gpt-oss MXFP4: blocks (E, N, G, 16) of pairs, the even column in the low nibble; value = e2m1 *
2**(s-127).
- fine-grained fp8: value = e4m3 * weight_scale_inv of the 128 x 128 block.
- MLX: codes in uint32 words along the columns, lowest bits first; value = code * scales + biases.
"""

import copy

import numpy as np
import torch

from tests.support.oracle import code_values

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


class Writer:
    """Random matrices of one format; the same seed gives the same ones."""

    config: dict = {}
    weight_only = ""  # the scheme with plain activations, if the default rounds them
    factor = 1.0  # of scales for a whole matrix; projections of one expert share it

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.config = copy.deepcopy(type(self).config)  # of a copy, too, which tests change

    def scales(self, *shape):
        return (0.5 + self.rng.random(shape)) * 0.01

    def matrix(self, n, k):
        """(tensors by suffix, values (n, k) float64)"""
        raise NotImplementedError


def words(codes, bits, axis, order=None):
    """int32 of 32 / bits neighbours along an axis; ``order``: which of them lies in the i-th
    bits."""
    count = 32 // bits
    codes = np.moveaxis(codes.astype(np.uint64), axis, -1)
    codes = codes.reshape(*codes.shape[:-1], -1, count)
    out = np.zeros(codes.shape[:-1], np.uint64)
    for i in range(count):
        out |= codes[..., order[i] if order else i] << np.uint64(bits * i)
    return torch.from_numpy(np.moveaxis(out.astype(np.uint32).view(np.int32), -1, axis).copy())


def pairs(codes):
    """uint8 of two neighbours, the even column in the low nibble."""
    return torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8))


def double(tensor):
    return tensor.double().numpy()


class GPTQ(Writer):
    def __init__(self, seed=0, bits=4, group=128, sym=False, version="gptq"):
        super().__init__(seed)
        self.bits, self.group, self.sym, self.version = bits, group, sym, version
        self.config = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "sym": sym,
            "desc_act": False,
            "checkpoint_format": version,
        }

    def matrix(self, n, k):
        top = 2**self.bits
        group = k if self.group == -1 else self.group
        q = self.rng.integers(0, top, (n, k))
        z = self.rng.integers(0, top, (n, k // group))
        z = np.full_like(z, top // 2) if self.sym else z
        s = torch.from_numpy(self.scales(n, k // group)).half()
        values = (q - z.repeat(group, 1)) * double(s).repeat(group, 1)
        stored = (z - 1) % top if self.version == "gptq" else z
        tensors = {
            "qweight": words(q.T, self.bits, 0),
            "qzeros": words(stored.T, self.bits, 1),
            "scales": s.T.contiguous(),
            "g_idx": torch.arange(k, dtype=torch.int32) // group,
        }
        return tensors, values


class AWQWriter(Writer):
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}

    def matrix(self, n, k):
        q = self.rng.integers(0, 16, (n, k))
        z = self.rng.integers(0, 16, (n, k // 64))
        s = torch.from_numpy(self.scales(n, k // 64)).half()
        values = (q - z.repeat(64, 1)) * double(s).repeat(64, 1)
        tensors = {
            "qweight": words(q.T, 4, 1, AWQ),
            "qzeros": words(z.T, 4, 1, AWQ),
            "scales": s.T.contiguous(),
        }
        return tensors, values


def compressed(form, weights, activations=None):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


class Packed(Writer):
    """compressed-tensors' pack-quantized."""

    def __init__(self, seed=0, symmetric=True, bits=4, group=32):
        super().__init__(seed)
        self.symmetric, self.bits, self.group = symmetric, bits, group
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
        weights |= {"symmetric": symmetric, "actorder": None}
        self.config = compressed("pack-quantized", weights)

    def matrix(self, n, k):
        half = 2 ** (self.bits - 1)
        q = self.rng.integers(-half, half, (n, k))
        z = self.rng.integers(-half, half, (n, k // self.group)) * (not self.symmetric)
        s = torch.from_numpy(self.scales(n, k // self.group)).bfloat16()
        values = (q - z.repeat(self.group, 1)) * double(s).repeat(self.group, 1)
        tensors = {
            "weight_packed": words(q + half, self.bits, 1),
            "weight_scale": s,
            "weight_shape": torch.tensor([n, k]),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = words(z + half, self.bits, 0)
        return tensors, values


_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def e4m3(rng, n, k):
    return torch.from_numpy(rng.standard_normal((n, k)) * 40).float().to(torch.float8_e4m3fn)


class ChannelFP8(Writer):
    """compressed-tensors' float-quantized with a scale a channel and a token."""

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = compressed("float-quantized", weights, _DYNAMIC)
    weight_only = "fp8_w8a16:channel"

    def matrix(self, n, k):
        q = e4m3(self.rng, n, k)
        s = torch.from_numpy(self.scales(n, 1) / 10).bfloat16()
        return {"weight": q, "weight_scale": s}, double(q) * double(s)


class Int8(Writer):
    """compressed-tensors' int-quantized with a scale a channel and a token."""

    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config = compressed("int-quantized", weights, _DYNAMIC | {"type": "int"})

    def matrix(self, n, k):
        q = torch.from_numpy(self.rng.integers(-127, 128, (n, k)).astype(np.int8))
        s = torch.from_numpy(self.scales(n, 1) / 10).bfloat16()
        return {"weight": q, "weight_scale": s}, double(q) * double(s)


class BlockFP8(Writer):
    """Fine-grained fp8; ``e8m0``: with scales that are powers of two."""

    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config["activation_scheme"] = "dynamic"
    weight_only = "fp8_w8a16:block"

    def __init__(self, seed=0, e8m0=False):
        super().__init__(seed)
        self.e8m0 = e8m0

    def matrix(self, n, k):
        q = e4m3(self.rng, n, k)
        s = torch.from_numpy(self.scales(-(-n // 128), -(-k // 128)) / 10).float()
        if self.e8m0:
            s = s.log2().round().exp2().to(torch.float8_e8m0fnu)
        scale = double(s.float()).repeat(128, 0)[:n].repeat(128, 1)[:, :k]
        return {"weight": q, "weight_scale_inv": s}, double(q) * scale


class DeepSeekFP4(Writer):
    """DeepSeek-V4's experts: pairs of e2m1 in int8, e8m0 scales for each 32 of a row, named
    "scale"."""

    config = BlockFP8.config
    weight_only = "mxfp4_w4a16"

    def matrix(self, n, k):
        codes, exponents = mxfp4(self.rng, n, k)
        scale = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
        tensors = {"weight": pairs(codes).view(torch.int8), "scale": scale}
        return tensors, E2M1[codes] * 2.0 ** (exponents.astype(int) - 127).repeat(32, 1)


class MXFP8(Writer):
    """e4m3 with e8m0 scales for each 32 of a row, stored as bytes."""

    config = BlockFP8.config | {"weight_block_size": [1, 32]}

    def matrix(self, n, k):
        q = e4m3(self.rng, n, k)
        exponents = self.rng.integers(112, 116, (n, k // 32)).astype(np.uint8)
        values = double(q) * 2.0 ** (exponents.astype(int) - 127).repeat(32, 1)
        return {"weight": q, "weight_scale_inv": torch.from_numpy(exponents)}, values


class NVFP4(Writer):
    """compressed-tensors' nvfp4-pack-quantized; ``modelopt``: ModelOpt's."""

    weight_only = "nvfp4_w4a16"

    def __init__(self, seed=0, modelopt=False):
        super().__init__(seed)
        self.modelopt = modelopt
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        acts = weights | {"dynamic": "local"}
        self.config = compressed("nvfp4-pack-quantized", weights, acts)
        if modelopt:
            self.config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}

    def matrix(self, n, k):
        codes = self.rng.integers(0, 16, (n, k))
        s = torch.from_numpy(self.rng.integers(20, 448, (n, k // 16))).float()
        s = s.to(torch.float8_e4m3fn)
        values = E2M1[codes] * double(s).repeat(16, 1)
        if self.modelopt:
            scale2 = torch.tensor(2.0**-15 * 1.37 * self.factor)
            act = torch.tensor(0.004 * self.factor)
            tensors = {"weight": pairs(codes), "weight_scale": s}
            tensors |= {"weight_scale_2": scale2, "input_scale": act}
            return tensors, values * scale2.double().item()
        scale2 = torch.tensor([21345.0 / self.factor])
        act = torch.tensor([260.0 / self.factor])
        tensors = {"weight_packed": pairs(codes), "weight_scale": s}
        tensors |= {"weight_global_scale": scale2, "input_global_scale": act}
        return tensors, values / scale2.double().item()


class MXFP4Packed(Writer):
    """compressed-tensors' mxfp4-pack-quantized, weights alone."""

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    config = compressed("mxfp4-pack-quantized", weights)

    def matrix(self, n, k):
        codes, exponents = mxfp4(self.rng, n, k)
        tensors = {"weight_packed": pairs(codes), "weight_scale": torch.from_numpy(exponents)}
        return tensors, E2M1[codes] * 2.0 ** (exponents.astype(int) - 127).repeat(32, 1)


class MLX(Writer):
    """mlx-lm's files: a stack for each projection of the experts, and no quant_method."""

    def __init__(self, seed=0, bits=4, group=64, mode="affine", dtype=torch.bfloat16):
        super().__init__(seed)
        self.bits, self.group, self.mode, self.dtype = bits, group, mode, dtype
        self.config = {"group_size": group, "bits": bits, "mode": mode}

    def matrix(self, *shape):
        q = self.rng.integers(0, 2**self.bits, shape)
        q = q & 0xBF if self.mode == "mxfp8" else q  # no NaN
        groups = (*shape[:-1], shape[-1] // self.group)
        tensors = {"weight": words(q, self.bits, -1).view(torch.uint32)}
        if self.mode == "affine":  # scales of either sign, as the tool finds them
            s = torch.from_numpy(self.scales(*groups) * self.rng.choice([-1, 1], groups))
            s = s.to(self.dtype)
            b = (torch.from_numpy(self.rng.standard_normal(groups)) * 0.01 - s * 7).to(self.dtype)
            tensors |= {"scales": s, "biases": b}
            s, b = (double(t).repeat(self.group, -1) for t in (s, b))
            return tensors, q * s + b
        elements = np.array(E2M1 if self.bits == 4 else code_values("e4m3"))[q]
        if self.mode == "nvfp4":
            s = torch.from_numpy(self.scales(*groups) * 1000).to(torch.float8_e4m3fn)
            tensors["scales"] = s.view(torch.uint8)
            return tensors, elements * double(s.float()).repeat(16, -1)
        s = self.rng.integers(118, 123, groups).astype(np.uint8)
        tensors["scales"] = torch.from_numpy(s)
        return tensors, elements * 2.0 ** (s.astype(int) - 127).repeat(32, -1)


def mxfp4(rng, *shape):
    """Codes (..., k) and e8m0 exponents (..., k/32)."""
    exponents = rng.integers(118, 123, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    return rng.integers(0, 16, shape), exponents


def gpt_oss_blocks(rng, experts, n, k):
    """((blocks, scales), values (experts, n, k))"""
    codes, exponents = mxfp4(rng, experts, n, k)
    blocks = pairs(codes).unflatten(-1, (-1, 16)).contiguous()
    values = E2M1[codes] * 2.0 ** (exponents.astype(int) - 127).repeat(32, -1)
    return (blocks, torch.from_numpy(exponents)), values


WRITERS = {
    "gptq4": GPTQ(),
    "gptq4_sym": GPTQ(sym=True, group=32),
    "gptq4_v2": GPTQ(version="gptq_v2", group=-1),
    "gptq8": GPTQ(bits=8, group=64),
    "awq": AWQWriter(),
    "ct_int4": Packed(),
    "ct_int4_zp": Packed(symmetric=False, group=128),
    "ct_int8_packed": Packed(bits=8),
    "ct_int8": Int8(),
    "ct_fp8": ChannelFP8(),
    "ct_nvfp4": NVFP4(),
    "ct_mxfp4": MXFP4Packed(),
    "modelopt_nvfp4": NVFP4(modelopt=True),
    "fp8_block": BlockFP8(),
    "fp8_block_e8m0": BlockFP8(e8m0=True),
    "deepseek_fp4": DeepSeekFP4(),
    "mxfp8": MXFP8(),
}
