"""Lets `from_pretrained` read GGUF files where a MoeOpsConfig is given, and what moe_ops saved
where None is; what reads GGUF files is not imported before one is given.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import auto_factory, modeling_auto
from transformers.utils import cached_file

from moe_ops.integrations.transformers.config import METHOD, MoeOpsConfig


def _with_gguf(original: Callable, auto: bool) -> Any:
    """A `from_pretrained`, of an auto class or of a model, that also takes a MoeOpsConfig beside a
    GGUF file, which transformers refuses.
    """

    @functools.wraps(original)
    def from_pretrained(
        cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        path = pretrained_model_name_or_path  # which callers may give by name
        if auto and kwargs.get("quantization_config", path) is None and _saved_here(path, kwargs):
            # auto classes would put None into the model's own configuration, and its experts,
            # whose parameters have other names, would be random
            del kwargs["quantization_config"]
            warnings.warn(
                f"quantization_config=None is ignored: {path} was saved with quantized experts, "
                "and is loaded with them; leave the argument out",
                stacklevel=2,
            )
        given = isinstance(kwargs.get("quantization_config"), MoeOpsConfig)
        if given and kwargs.get("gguf_file") is not None:
            from moe_ops.integrations.transformers import gguf

            return (gguf.choose if auto else gguf.load)(original, cls, path, args, kwargs)
        return original(cls, path, *args, **kwargs)

    return classmethod(from_pretrained)


def _saved_here(path: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a folder, or a model of the Hub, says that moe_ops quantized it."""
    known = ("revision", "cache_dir", "token", "subfolder", "local_files_only")
    with suppress(Exception):  # transformers itself says what is wrong
        file = cached_file(path, "config.json", **{n: kwargs[n] for n in known if n in kwargs})
        from moe_ops.integrations.checkpoints.files import quantization_config

        return quantization_config(Path(file).parent)[0].get("quant_method") == METHOD
    return False


def register() -> None:
    """Let `from_pretrained` of models and of auto classes read GGUF files for a MoeOpsConfig."""
    autos = [c for c in vars(modeling_auto).values() if isinstance(c, type)]
    autos = [c for c in autos if issubclass(c, auto_factory._BaseAutoModelClass)]
    for cls in (PreTrainedModel, *autos):
        if "from_pretrained" in vars(cls):
            original = cls.from_pretrained.__func__
            cls.from_pretrained = _with_gguf(original, cls is not PreTrainedModel)
