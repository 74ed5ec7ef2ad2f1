"""The arithmetic of quantization on plain tensors. It defines the results of every kernel.

Scales follow from the largest magnitude of their group by the rules in scaling.py. Elements are
x / scale in fp32, clamped and rounded to nearest even (elements.py). Values are products of
elements and scales in fp32, with one rounding at the end. A group of zeros stays zero. Everything
is vectorised, traceable, and free of host synchronisation.
"""

from moe_ops.numerics.activations import (
    QuantizedActivation,
    activation_values,
    fake_quantize_activation,
    largest_magnitude,
    quantize_activation,
    static_scale_of_rows,
    static_scale_of_sorted,
)
from moe_ops.numerics.weights import Scales, dequantize_weight, quantize_experts, quantize_weight

__all__ = [
    "QuantizedActivation",
    "Scales",
    "activation_values",
    "dequantize_weight",
    "fake_quantize_activation",
    "largest_magnitude",
    "quantize_activation",
    "quantize_experts",
    "quantize_weight",
    "static_scale_of_rows",
    "static_scale_of_sorted",
]
