"""The arithmetic of quantization on plain tensors, the one meaning every kernel is held to.

Scales come from the largest magnitude of their group by the rules in scaling.py; elements are x /
scale in fp32, clamped and rounded to nearest even (elements.py). Values are the products of
elements and scales in fp32, with one rounding at the end. A group of zeros stays zero. Everything
is vectorised, traceable, and free of host synchronisation.
"""

from moe_ops.numerics.activations import fake_quantize_activation, quantize_activation
from moe_ops.numerics.weights import Scales, dequantize_weight, quantize_experts, quantize_weight

__all__ = [
    "Scales",
    "dequantize_weight",
    "fake_quantize_activation",
    "quantize_activation",
    "quantize_experts",
    "quantize_weight",
]
