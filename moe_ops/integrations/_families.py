"""Path that saved files hold, of objects that were pickled whole."""

from moe_ops.integrations.transformers.activations import experts_forward

__all__ = ["experts_forward"]
