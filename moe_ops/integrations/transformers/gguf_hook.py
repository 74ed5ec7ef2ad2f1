"""Lets `from_pretrained` read GGUF files where a MoeOpsConfig is given; what reads them is not
imported before one is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import auto_factory, modeling_auto

from moe_ops.integrations.transformers.config import MoeOpsConfig


def _with_gguf(original: Callable, auto: bool) -> Any:
    """A `from_pretrained`, of an auto class or of a model, that also takes a MoeOpsConfig beside a
    GGUF file, which transformers refuses.
    """

    @functools.wraps(original)
    def from_pretrained(
        cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        path = pretrained_model_name_or_path  # which callers may give by name
        given = isinstance(kwargs.get("quantization_config"), MoeOpsConfig)
        if given and kwargs.get("gguf_file") is not None:
            from moe_ops.integrations.transformers import gguf

            return (gguf.choose if auto else gguf.load)(original, cls, path, args, kwargs)
        return original(cls, path, *args, **kwargs)

    return classmethod(from_pretrained)


def register() -> None:
    """Let `from_pretrained` of models and of auto classes read GGUF files for a MoeOpsConfig."""
    autos = [c for c in vars(modeling_auto).values() if isinstance(c, type)]
    autos = [c for c in autos if issubclass(c, auto_factory._BaseAutoModelClass)]
    for cls in (PreTrainedModel, *autos):
        if "from_pretrained" in vars(cls):
            original = cls.from_pretrained.__func__
            cls.from_pretrained = _with_gguf(original, cls is not PreTrainedModel)
