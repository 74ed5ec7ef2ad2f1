"""Path that saved files hold, of objects that were pickled whole."""

from moe_ops.integrations.transformers.hook import AttachReport, LayerReport

__all__ = ["AttachReport", "LayerReport"]
