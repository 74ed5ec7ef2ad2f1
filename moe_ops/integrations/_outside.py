"""Path that saved files hold, of objects that were pickled whole."""

from moe_ops.integrations.transformers.families import (
    _dbrx_experts,
    _dbrx_glu,
    _llama4_block,
    _llama4_experts,
    _longcat_experts,
)

__all__ = ["_dbrx_experts", "_dbrx_glu", "_llama4_block", "_llama4_experts", "_longcat_experts"]
