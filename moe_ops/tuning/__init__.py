"""Measured tables, read and written; `python -m moe_ops.tuning` measures what is in them."""

from moe_ops.tables.lookup import (
    MARGIN,
    backend_times,
    crossovers,
    layer_config,
    look_up,
    path_of,
    tables,
)
from moe_ops.tables.record import measured_backends, measured_tokens, record, record_backends

__all__ = [
    "MARGIN",
    "backend_times",
    "crossovers",
    "layer_config",
    "look_up",
    "measured_backends",
    "measured_tokens",
    "path_of",
    "record",
    "record_backends",
    "tables",
]
