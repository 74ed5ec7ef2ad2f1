"""Quantization schemes: how expert weights and the activations that meet them are quantized.

A named scheme is one row of `table`. A scheme of one's own is any legal pair of descriptions, and
its name spells them out: "custom:e4m3,1xall,f32:e4m3,allxall,f32". The full name is what travels
through operator arguments, tuning files and quantized tensors; ``get_scheme`` turns a name into
the scheme, in any process.
"""

from moe_ops.schemes.descriptions import (
    PER_BLOCK,
    PER_COLUMN,
    PER_MX_BLOCK,
    PER_NV_BLOCK,
    PER_ROW,
    PER_TENSOR,
    PER_TOKEN_GROUP,
    SCALE_RULES,
    SUPER_BLOCK,
    GroupShape,
    QuantDesc,
)
from moe_ops.schemes.elements import ELEMENT_FORMATS, ElementFormat
from moe_ops.schemes.names import get_scheme, layer_scheme, schemes_of_layer
from moe_ops.schemes.scheme import QuantScheme
from moe_ops.schemes.table import GGUF_TYPES, OTHER_NAMES, SCHEMES

__all__ = [
    "ELEMENT_FORMATS",
    "GGUF_TYPES",
    "OTHER_NAMES",
    "PER_BLOCK",
    "PER_COLUMN",
    "PER_MX_BLOCK",
    "PER_NV_BLOCK",
    "PER_ROW",
    "PER_TENSOR",
    "PER_TOKEN_GROUP",
    "SCALE_RULES",
    "SCHEMES",
    "SUPER_BLOCK",
    "ElementFormat",
    "GroupShape",
    "QuantDesc",
    "QuantScheme",
    "get_scheme",
    "layer_scheme",
    "schemes_of_layer",
]
