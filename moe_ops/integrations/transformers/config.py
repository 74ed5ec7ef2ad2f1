"""The `quantization_config` of `from_pretrained`, which transformers knows as "moe_ops"."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from transformers.quantizers import auto
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_ops.backends import check_backend
from moe_ops.integrations.transformers.budget import parse
from moe_ops.schemes import QuantScheme, get_scheme

METHOD = "moe_ops"


@auto.register_quantization_config(METHOD)
class MoeOpsConfig(QuantizationConfigMixin):
    """The `quantization_config` of `from_pretrained` for experts that moe_ops runs.

    Args:
        scheme: how to quantize the experts of a plain checkpoint, e.g. "int4_w4a16"; None for a
            checkpoint that is quantized already, whose weights are then used as they are (or
            another scheme with the same weights, e.g. "nvfp4_w4a16" for an NVFP4 checkpoint).
        backend: for every expert call, as in `moe_ops.fused_experts`.
        gpu_memory: keep the experts in host memory, and load as many of them to slots on the GPU
            as these bytes of weights allow, beside the rest of the model: a number, a text such as
            "12GiB", or "auto", as in `moe_ops.integrations.transformers.offload`; None: experts
            go where the rest goes. device_map may name the GPU. It is a fact of the machine, and
            is not saved with the model.

    Raises:
        ValueError: an unknown scheme or backend, a scheme that does not quantize weights, or a
            gpu_memory that is none.
    """

    of_file = False  # whether nobody gave it to from_pretrained
    gguf: Any = None  # while a GGUF file is loaded: its Checkpoint

    def __init__(
        self,
        scheme: str | QuantScheme | None = None,
        backend: str = "auto",
        quant_method: str = METHOD,
        *,
        gpu_memory: int | str | None = None,
    ):
        if quant_method != METHOD:
            raise ValueError(f"quant_method must be {METHOD!r}, got {quant_method!r}")
        if scheme is not None:
            scheme = get_scheme(scheme)
            _ = scheme.quantized_weight  # raises for plain weights
        check_backend("backend", backend)
        self.quant_method = METHOD
        self.scheme = None if scheme is None else scheme.name
        self.backend = backend
        self.gpu_memory = None if gpu_memory is None else parse(gpu_memory)

    @classmethod
    def from_dict(cls, config_dict: dict, *args: Any, **kwargs: Any) -> Any:
        """As transformers calls it with what config.json says."""
        unknown = sorted(map(str, config_dict.keys() - {"scheme", "backend", "quant_method"}))
        if unknown:
            raise ValueError(
                "quantization_config of moe_ops must have scheme, backend and quant_method alone, "
                f"got {', '.join(unknown)}; was it saved by a newer version?"
            )
        return super().from_dict(config_dict, *args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        gone = ("of_file", "gguf", "gpu_memory")
        return {name: value for name, value in super().to_dict().items() if name not in gone}


class _ModelOptConfig(MoeOpsConfig):
    """Lets `from_pretrained` read ModelOpt's checkpoints, which transformers does not know,
    unasked.
    """

    @classmethod
    def from_dict(
        cls, config_dict: dict, return_unused_kwargs: bool = False, **kwargs: Any
    ) -> MoeOpsConfig:
        return MoeOpsConfig()


if "modelopt" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
    auto.register_quantization_config("modelopt")(_ModelOptConfig)


def _merge_quantization_configs(original: Callable) -> Any:
    """Let a MoeOpsConfig read other quantizers' checkpoints, which transformers refuses to mix."""

    def merge_quantization_configs(
        cls: type, quantization_config: Any, quantization_config_from_args: Any
    ) -> Any:
        given = quantization_config_from_args
        if not isinstance(given, MoeOpsConfig):
            found = original(quantization_config, given)
            if not isinstance(found, MoeOpsConfig):
                return found
        found = copy.copy(found if given is None else given)
        found.of_file = given is None
        return found

    return classmethod(merge_quantization_configs)


def _supports_quant_method(original: Callable) -> Any:
    """Leave a configuration that does not name its method, as MLX's do not, to
    `merge_quantization_configs`, where transformers refuses it likewise, and a MoeOpsConfig does
    not.
    """

    def supports_quant_method(quantization_config_dict: Any) -> bool:
        named = ("quant_method", "load_in_8bit", "load_in_4bit")
        if not any(quantization_config_dict.get(name) for name in named):
            return True
        return original(quantization_config_dict)

    return staticmethod(supports_quant_method)


auto.AutoHfQuantizer.supports_quant_method = _supports_quant_method(
    auto.AutoHfQuantizer.supports_quant_method
)
auto.AutoHfQuantizer.merge_quantization_configs = _merge_quantization_configs(
    auto.AutoHfQuantizer.merge_quantization_configs
)
