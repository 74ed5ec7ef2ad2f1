"""Path that saved files hold, of objects that were pickled whole."""

from moe_ops.nn.layer import MoELayer, _fill_buffers

__all__ = ["MoELayer", "_fill_buffers"]
