"""Registers the integrations that other libraries must know of before anybody asks for them, as
soon as those libraries are imported.

`import moe_ops` calls `register`, and imports no other library by it.
"""

from __future__ import annotations

import sys
import warnings

from moe_ops import environment

_MODELS, _QUANTIZERS = "transformers.modeling_utils", "transformers.quantizers"


def register() -> None:
    """Make the experts implementation and the quant_method "moe_ops" known to transformers once
    its models, or its quantizers, are imported; at once where they are.
    """
    environment.when_imported(_MODELS, _register_with_transformers)
    environment.when_imported(_QUANTIZERS, _quantizers_imported)


def _quantizers_imported() -> None:
    """Models import quantizers first, and are waited for then."""
    if _MODELS not in sys.modules:
        _register_with_transformers()


def _register_with_transformers() -> None:
    try:
        import moe_ops.integrations.transformers  # noqa: F401
    except Exception as error:  # whoever imports transformers need not care
        warnings.warn(
            f"moe_ops is not registered with transformers {environment.version('transformers')}, "
            f"whose models do not know experts_implementation='moe_ops': {error}; moe_ops needs "
            "transformers 5.17 or newer",
            RuntimeWarning,
            stacklevel=2,
        )
