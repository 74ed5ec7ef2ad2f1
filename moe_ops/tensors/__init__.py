"""Quantized expert weights: tensor subclasses, and the functions that make them.

Importing this package imports torchao; ``import moe_ops`` alone does not.
"""

from moe_ops import environment

with environment.importing_torchao():
    from moe_ops.tensors.base import ExpertTensor

from moe_ops.tensors.checks import check_quantizable
from moe_ops.tensors.formats import (
    Float8ExpertTensor,
    Int4ExpertTensor,
    Int8ExpertTensor,
    LevelsExpertTensor,
    MXExpertTensor,
    NVFP4ExpertTensor,
    PackedIntExpertTensor,
    PlainExpertTensor,
)
from moe_ops.tensors.quantize import from_quantized, prepare, quantize
from moe_ops.tensors.serialization import flatten, unflatten

__all__ = [
    "ExpertTensor",
    "Float8ExpertTensor",
    "Int4ExpertTensor",
    "Int8ExpertTensor",
    "LevelsExpertTensor",
    "MXExpertTensor",
    "NVFP4ExpertTensor",
    "PackedIntExpertTensor",
    "PlainExpertTensor",
    "check_quantizable",
    "flatten",
    "from_quantized",
    "prepare",
    "quantize",
    "unflatten",
]
