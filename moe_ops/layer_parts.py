"""Path that saved files hold, of objects that were pickled whole."""

from moe_ops.nn.modules import Experts, Gate, SharedExpert

__all__ = ["Experts", "Gate", "SharedExpert"]
