"""Schemes that the library runs, by GPU, dtype and layout, and its numbers of activations."""

from __future__ import annotations

from typing import NamedTuple

import torch

# FlashInfer's ActivationType
_GELU, _SILU, _SWIGLU, _GEGLU, _RELU2, _SWIGLUSTEP = 0, 2, 3, 4, 6, 7
ACTIVATIONS = {
    "silu": _SWIGLU,  # with alpha, beta or limit: the library's SwigluBias
    "swigluoai": _SWIGLU,
    "swigluoai_uninterleave": _SWIGLU,
    "swiglustep": _SWIGLUSTEP,
    "gelu": _GEGLU,
    "gelu_tanh": _GEGLU,
    "silu_no_mul": _SILU,
    "gelu_no_mul": _GELU,
    "gelu_tanh_no_mul": _GELU,
    "relu2_no_mul": _RELU2,
}
_HALF = (torch.bfloat16, torch.float16)
ALL = ((9, 0), (10, 0), (12, 0))
_BLACKWELL = ((10, 0), (12, 0))
_RULES = ("", ":round", ":ceil")


class Scheme(NamedTuple):
    """How the library runs a scheme."""

    gpus: tuple[tuple[int, int], ...]  # compute capabilities; a minor number of 0 stands for all
    dtypes: tuple[torch.dtype, ...]
    multiple: int  # K and I must be multiples of it; `prepare` pads those that have a layout
    layout: str = ""  # of weights, except for the order of rows
    input: str = ""  # to what the input's rows are quantized before the library's kernels
    factors: str = ""  # how factors follow from scales of weights and activations (inputs.py)


SCHEMES = {
    "": Scheme(ALL, _HALF, 8),
    "fp8_tensor_static": Scheme(ALL, _HALF, 16, "", "e4m3", "product"),
    "fp8_block": Scheme(((9, 0),), (torch.bfloat16,), 128),
    **{
        f"mxfp4_w4a16{rule}": Scheme(((9, 0),), _HALF[:1], 128, "flashinfer_mixed")
        for rule in _RULES
    },
    "nvfp4": Scheme(_BLACKWELL, _HALF, 128, "flashinfer_swizzled", "", "quotient"),
    **{
        f"mxfp4_mxfp8{rule}": Scheme(_BLACKWELL, _HALF, 128, "flashinfer_swizzled", "mxfp8", "one")
        for rule in _RULES
    },
}

OTHERS = {
    "int4_w4a8": (
        "flashinfer's int4 kernels multiply activations by one scale known beforehand; those of "
        "int4_w4a8 have one for each token, from the data; use backend='triton' or 'torch'"
    ),
    **{
        f"mxfp4{rule}": (
            "flashinfer's expert layer has no product of mxfp4 weights and mxfp4 activations, but "
            "with activations in mxfp8 (from SM100 on) or 16 bits (SM90): weights of schemes "
            "'mxfp4_mxfp8' and 'mxfp4_w4a16' are stored alike"
        )
        for rule in _RULES
    },
}
