"""Path that saved files hold, of objects that were pickled whole."""

from moe_ops.integrations.transformers.config import MoeOpsConfig

__all__ = ["MoeOpsConfig"]
