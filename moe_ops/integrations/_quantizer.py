"""Path that saved files hold, of objects that were pickled whole."""

from moe_ops.integrations.transformers.quantizer import MoeOpsQuantizer

__all__ = ["MoeOpsQuantizer"]
