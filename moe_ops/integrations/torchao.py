"""torchao's `quantize_` on experts.

    from torchao.quantization import quantize_
    from moe_ops.integrations.torchao import ExpertsConfig, is_experts

    quantize_(model, ExpertsConfig("int4_w4a16"), filter_fn=is_experts)

The filter is needed: torchao's default one shows a configuration nothing but nn.Linear modules.
Experts are those of `moe_ops.MoELayer` and, where transformers is there, of its models, which are
attached (`moe_ops.integrations.transformers.attach`) when they are quantized.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from moe_ops import environment
from moe_ops.nn.modules import Experts
from moe_ops.schemes import get_scheme

with environment.importing_torchao():
    from torchao.core.config import AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler

__all__ = ["ExpertsConfig", "is_experts"]


@dataclass
class ExpertsConfig(AOBaseConfig):
    """Quantize the weights of experts to a scheme of moe_ops.

    Beside the filter `is_experts` it can stand in torchao's FqnToConfig, for modules of experts or
    single parameters: ``FqnToConfig({r"re:.*experts": ExpertsConfig("fp8_block")})``.

    Args:
        scheme: a name as for `moe_ops.quantize`, e.g. "int4_w4a16".

    Raises:
        ValueError: an unknown scheme, or one that does not quantize weights. `quantize_` raises it
            for modules that hold no experts, and for weights that are quantized already or not
            finite, before anything of that module is changed.
    """

    scheme: str

    def __post_init__(self) -> None:
        scheme = get_scheme(self.scheme)
        _ = scheme.quantized_weight  # raises for plain weights
        self.scheme = scheme.name


def is_experts(module: nn.Module, name: str = "") -> bool:
    """Whether `ExpertsConfig` can quantize a module's experts; a filter for `quantize_`."""
    if isinstance(module, Experts):
        return True
    integration = _transformers(module)
    return integration is not None and integration.is_experts(module)


@register_quantize_module_handler(ExpertsConfig)
def _quantize_experts(
    module: nn.Module, config: ExpertsConfig, *, parameter_name: str | None = None
) -> nn.Module:
    if not is_experts(module):
        raise ValueError(
            f"ExpertsConfig must be given modules of experts, got {type(module).__name__}; call "
            "quantize_(model, config, filter_fn=moe_ops.integrations.torchao.is_experts)"
        )
    if not isinstance(module, Experts):
        integration = _transformers(module)
        assert integration is not None
        integration.quantize_weights(module, config.scheme, parameter_name)
        return module
    module.quantize(config.scheme, only=parameter_name or "")
    return module


def _transformers(module: nn.Module) -> ModuleType | None:
    """Our transformers integration, where a module can be one of its models' parts."""
    if "transformers" not in sys.modules:
        return None
    from moe_ops.integrations import transformers

    return transformers
