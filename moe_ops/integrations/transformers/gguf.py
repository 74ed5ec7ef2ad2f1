"""GGUF files in `from_pretrained`.

model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file="model.gguf", quantization_config=MoeOpsConfig()
)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import cached_file

from moe_ops.integrations.checkpoints.experts import Checkpoint
from moe_ops.integrations.checkpoints.gguf import GgufFiles, parts_of
from moe_ops.integrations.transformers.gguf_config import config_of
from moe_ops.integrations.transformers.gguf_names import name_tensors

_OF_THE_HUB = [
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
]
# what transformers itself takes out of a call for the model's configuration
_OF_THE_MODEL = ("dtype", "torch_dtype", "attn_implementation", "experts_implementation")


def _files(path: Any, kwargs: dict[str, Any]) -> list[str]:
    """The files that a call of `from_pretrained` names: those in its folder, those that are there
    by their name alone, or those on the Hub.
    """
    hub = {name: kwargs[name] for name in _OF_THE_HUB if name in kwargs}
    parts = parts_of(os.fspath(kwargs["gguf_file"]))
    folder = os.path.join(path or "", kwargs.get("subfolder") or "")
    found = [next(filter(os.path.isfile, (os.path.join(folder, p), p)), None) for p in parts]
    return [f or cached_file(path, p, **hub) for f, p in zip(found, parts, strict=True)]


def _config(files: GgufFiles, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """The configuration that a call gives, itself or where it lies, else that of the files, in
    which a call may change fields, as `use_cache=False` does; takes these out of ``kwargs``.
    """
    given = kwargs.pop("config", None)
    if isinstance(given, PreTrainedConfig):
        return given
    named = isinstance(given, str | os.PathLike)
    config = AutoConfig.from_pretrained(given) if named else config_of(files)
    for name in [n for n in kwargs if n not in _OF_THE_MODEL and hasattr(config, n)]:
        setattr(config, name, kwargs.pop(name))
    return config


def load(original: Callable, cls: type, path: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A model of transformers from a GGUF file, whose `from_pretrained` is ``original``."""
    checkpoint = Checkpoint(_files(path, kwargs))
    assert isinstance(checkpoint.files, GgufFiles)
    kwargs["config"] = _config(checkpoint.files, kwargs)
    given = copy.copy(kwargs["quantization_config"])
    state = name_tensors(checkpoint)
    given.gguf = checkpoint
    gone = (*_OF_THE_HUB, "gguf_file", "quantization_config")
    kwargs = {name: value for name, value in kwargs.items() if name not in gone}
    # with a state_dict it asks for no path, and does not take the file for one of its own
    loaded = original(cls, None, *args, state_dict=state, quantization_config=given, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    model.name_or_path = model.config._name_or_path = str(path)
    return loaded


def choose(original: Callable, cls: type, path: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """An auto class's `from_pretrained`: it takes the model's class from the configuration."""
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        kwargs["config"] = _config(GgufFiles(_files(path, kwargs)), kwargs)
    return original(cls, path, *args, **kwargs)
