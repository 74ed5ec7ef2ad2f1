"""Path that saved files hold, of objects that were pickled whole."""

from moe_ops.nn.config import MoEConfig
from moe_ops.parallel.config import ParallelConfig
from moe_ops.routing.methods import RoutingMethod

__all__ = ["MoEConfig", "ParallelConfig", "RoutingMethod"]
