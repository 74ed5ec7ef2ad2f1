"""Quantized weights in files that hold plain tensors only, such as safetensors.

    tensors, metadata = flatten(model.state_dict())
    safetensors.torch.save_file(tensors, path, metadata)

    with safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        model.requires_grad_(False)  # a plain model: assigned parameters keep its requires_grad
        model.load_state_dict(unflatten(tensors, file.metadata()), assign=True)

``torch.save`` and ``torch.load(weights_only=True)`` need no flattening, only an ``import moe_ops``
before the load. To train the rest of the model, call ``requires_grad_(False)`` on the parameters
of the experts alone.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from moe_ops.meta.scales import TRANSPOSED
from moe_ops.schemes import get_scheme
from moe_ops.tensors.base import ExpertTensor
from moe_ops.tensors.checks import HIGH_PRECISION, checked_activation_scale, checked_parts
from moe_ops.tensors.formats import (
    Float8ExpertTensor,
    Int4ExpertTensor,
    Int8ExpertTensor,
    LevelsExpertTensor,
    MXExpertTensor,
    NVFP4ExpertTensor,
    PackedIntExpertTensor,
    PlainExpertTensor,
)

_CLASSES: dict[str, type[ExpertTensor]] = {
    cls.__name__: cls
    for cls in (
        Float8ExpertTensor,
        Int8ExpertTensor,
        Int4ExpertTensor,
        PackedIntExpertTensor,
        LevelsExpertTensor,
        MXExpertTensor,
        NVFP4ExpertTensor,
        PlainExpertTensor,
    )
}
_PREFIX = "moe_ops:"


def class_named(name: str) -> type[ExpertTensor]:
    """The class of a name in a file. Raises ValueError unless it is one of ours."""
    if name not in _CLASSES:
        raise ValueError(
            f"class of a quantized weight must be one of {list(_CLASSES)}, got {name!r}"
        )
    return _CLASSES[name]


def flatten(state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Replace each ExpertTensor ``name`` by plain contiguous tensors "name.qdata", "name.scale",
    ...

    Returns:
        The tensors, others unchanged, and a metadata entry "moe_ops:name" for each ExpertTensor:
        JSON with its class, scheme, weight_layout and dtype.

    Raises:
        ValueError: if a new name is taken.
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, value in state_dict.items():
        parts = {name: value}
        if isinstance(value, ExpertTensor):
            data_names, attributes = value.__tensor_flatten__()
            parts = {f"{name}.{part}": getattr(value, part).contiguous() for part in data_names}
            attributes = {k: str(v).removeprefix("torch.") for k, v in attributes.items()}
            metadata[_PREFIX + name] = json.dumps({"class": type(value).__name__, **attributes})
        for part, tensor in parts.items():
            if part in tensors:
                raise ValueError(
                    f"state_dict must not have the name {part!r} twice once flattened"
                )
            tensors[part] = tensor
    return tensors, metadata


def _attributes(key: str, text: str) -> dict[str, Any]:
    """Attributes of a weight from metadata; ValueError, naming the key, if they are damaged."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"metadata {key!r} must be JSON, got a damaged one: {error}") from error
    names = {"class", *ExpertTensor.tensor_attribute_names}
    if not isinstance(said, dict) or said.keys() != names or not _all_texts(said):
        raise ValueError(
            f"metadata {key!r} must be an object of the strings {sorted(names)}, got {text[:200]}"
        )
    dtype = getattr(torch, said["dtype"], None)
    if dtype not in HIGH_PRECISION:
        raise ValueError(
            f"dtype of metadata {key!r} must be one of {HIGH_PRECISION}, got "
            f"{said['dtype'][:80]!r}"
        )
    return said | {"dtype": dtype}


def _all_texts(said: dict) -> bool:
    return all(isinstance(value, str) for value in said.values())


def _checked(name: str, parts: dict[str, Tensor], attributes: dict) -> dict[str, Tensor]:
    """The parts, as `from_quantized` takes those of all experts in their natural layout;
    ValueError, naming the weight, else.
    """
    dims, layout = parts["qdata"].dim(), attributes["weight_layout"]
    if layout in ("", TRANSPOSED) and dims not in (2, 3):
        raise ValueError(
            f"{name}: qdata must have 2 or 3 dimensions, got shape {tuple(parts['qdata'].shape)}"
        )
    if layout:
        return parts
    if dims == 2:  # of one expert
        own = {part: t for part, t in parts.items() if part != "activation_scale"}
        one = _checked(name, {part: t.unsqueeze(0) for part, t in own.items()}, attributes)
        return parts | {part: one[part].squeeze(0) for part in own}
    scheme = get_scheme(attributes["scheme"])
    try:
        of_activations = checked_activation_scale(
            parts.get("activation_scale"), scheme, parts["qdata"].device, len(parts["qdata"])
        )
        found = checked_parts(scheme, parts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return found if of_activations is None else found | {"activation_scale": of_activations}


def unflatten(tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> dict[str, Tensor]:
    """The inverse of ``flatten``; metadata entries of others are ignored.

    Raises:
        ValueError: if the metadata are damaged or name a class that is not ours, or a tensor is
            missing, or if they say nothing of a weight's elements; if the tensors of a weight are
            not what ``from_quantized`` takes.
    """
    state_dict = dict(tensors)
    for key, text in (metadata or {}).items():
        if not key.startswith(_PREFIX):
            continue
        name = key.removeprefix(_PREFIX)
        attributes = _attributes(key, text)
        cls = class_named(attributes.pop("class"))
        parts: dict = {}
        for part in (*cls.tensor_data_names, *cls.optional_tensor_data_names):
            if f"{name}.{part}" in state_dict:
                parts[part] = state_dict.pop(f"{name}.{part}")
            elif part in cls.tensor_data_names:
                raise ValueError(
                    f"tensors must have {name + '.' + part!r}, which the metadata name"
                )
        checked: dict[str, Any] = {**_checked(name, parts, attributes), **attributes}
        state_dict[name] = cls(**checked)
    for key in state_dict:
        if key.endswith(".qdata"):
            raise ValueError(
                f"metadata must say what {key!r} belongs to, as `flatten` wrote it beside the "
                "tensors; pass those of the same file: safetensors.safe_open(path, "
                "'pt').metadata()"
            )
    return state_dict
