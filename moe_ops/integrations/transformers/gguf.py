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


def _files(path: Any, kwargs: dict[str, Any]) -> list[str]:
    """The files that a call of `from_pretrained` names: those that are there, or on the Hub."""
    hub = {name: kwargs[name] for name in _OF_THE_HUB if name in kwargs}
    parts = parts_of(os.fspath(kwargs["gguf_file"]))
    return [part if os.path.isfile(part) else cached_file(path, part, **hub) for part in parts]


def load(original: Callable, cls: type, path: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A model of transformers from a GGUF file, whose `from_pretrained` is ``original``."""
    checkpoint = Checkpoint(_files(path, kwargs))
    assert isinstance(checkpoint.files, GgufFiles)
    if not isinstance(kwargs.get("config"), PreTrainedConfig):
        kwargs["config"] = config_of(checkpoint.files)
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
        kwargs["config"] = config_of(GgufFiles(_files(path, kwargs)))
    return original(cls, path, *args, **kwargs)
