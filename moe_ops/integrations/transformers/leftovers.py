"""Tensors of a checkpoint that no parameter of a model takes, and parameters without tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from transformers import core_model_loading as loading
from transformers.modeling_utils import PreTrainedModel

from moe_ops.integrations.checkpoints.common import FLOATS
from moe_ops.integrations.checkpoints.files import TensorFiles
from moe_ops.integrations.checkpoints.formats import FACTORS, ROLES, why_refused
from moe_ops.integrations.checkpoints.weights import BIAS
from moe_ops.integrations.transformers import conversions
from moe_ops.integrations.transformers.layers import Layer

# of attention's cache, or of its products: no weight depends on them
_OF_THE_CACHE = {f"{of}_{what}" for of in "qkv" for what in ("scale", "zero_point", "bias")}
_OF_THE_CACHE |= {"output_scale", "output_zero_point"}
_SCALES = {*ROLES, FACTORS} - {"weight"}


@dataclass(frozen=True)
class Leftovers:
    """What is left over where a model is loaded from files. Each check raises ValueError.

    Attributes:
        model: while transformers loads it.
        files: of the checkpoint.
        layers: of each parameter of experts its layer and its name there.
        whole: the files hold all of a model.
    """

    model: PreTrainedModel
    files: TensorFiles
    layers: dict[str, tuple[Layer, str]]
    whole: bool

    def check_plain(self, tensor: str, parameter: Tensor) -> None:
        """Raise for a quantized tensor whose scales have names that nobody taught us."""
        entry = self.files.entries[tensor]
        if parameter.is_floating_point() and entry.dtype not in FLOATS:
            raise ValueError(
                f"{entry} must be a plain weight or have scales of a known name beside it, got "
                f"{entry.dtype}"
            )
        if self.whole and entry.shape != tuple(parameter.shape):
            raise ValueError(
                f"{entry} must have shape {tuple(parameter.shape)}, got {entry.shape}"
            )

    def check_unclaimed(self, tensor: str, renamings: list, converters: list) -> None:
        """Raise for a tensor of experts that transformers would join or split by its own
        conversions.
        """
        others = [c for c in converters if not isinstance(c, conversions.OwnReader)]
        target, pattern = loading.rename_source_key(tensor, renamings, others)
        if pattern is None:
            return
        entry = self.files.entries[tensor]
        if entry.dtype in FLOATS:
            raise ValueError(
                f"{entry} cannot be quantized while it is read, because transformers converts it "
                f"to {target}; load the checkpoint without quantization_config, and call "
                "moe_ops.integrations.transformers.quantize"
            )
        raise ValueError(
            f"{entry} must not be quantized: transformers converts it to {target}, which only "
            "plain weights can be"
        )

    def check_companions(self, modules: dict[str, bool], spare: dict[str, str]) -> None:
        """Raise for tensors that nobody would read although a weight depends on them."""
        owners = tuple({target.rpartition(".")[0] + "." for target in self.layers})
        for tensor, target in spare.items():
            names = [m.span() for m in re.finditer(r"[.]|_(?!.*[.])", tensor)]
            beside = next(((i, j) for i, j in names if tensor[:i] in modules), None)
            role = tensor[beside[1] :] if beside else tensor.rpartition(".")[2]
            in_experts = target.startswith(owners)
            ours = in_experts or (beside and modules[tensor[: beside[0]]])
            if ours and role == BIAS and tensor in self.files.entries:
                self.check_zero(tensor, "matrices of this name")
            elif not in_experts and role in _OF_THE_CACHE:
                continue
            elif ours or (beside and role in _SCALES):
                raise ValueError(f"{self.where(tensor)} must be absent: {why_refused(role)}")

    def check_all_taken(self, spare: dict[str, str]) -> None:
        """Raise for a tensor of a GGUF file that no parameter takes, other than a bias of zeros:
        the model has fewer layers, or no such bias. A backbone has no head, and leaves that of the
        file out.
        """
        has_head = self.model.get_output_embeddings() is not None
        for tensor in spare if self.whole else ():
            if tensor.endswith(f".{BIAS}") and (has_head or not tensor.startswith("lm_head.")):
                self.check_zero(tensor, "parameters of this name")
            elif tensor.startswith("model.layers."):
                raise ValueError(
                    f"{self.where(tensor)} must belong to a layer of the model, got none that "
                    f"has {tensor} in a model of "
                    f"{getattr(self.model.config, 'num_hidden_layers', None)} layers, as the "
                    "file's fields or the given config say"
                )

    def check_missing(
        self, missing: set[str], unclaimed: dict[str, str], spare: dict[str, str]
    ) -> None:
        """Raise if the checkpoint lacks a parameter beside experts, such as a router or biases;
        or any, and has tensors in its module, or anywhere in the same backbone, that nobody takes:
        transformers would leave it random.
        """
        model, prefix = self.model, self.model.base_model_prefix
        backbone = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        tied = {*(getattr(model, "all_tied_weights_keys", None) or ())}
        blocks = tuple({target.rsplit(".", 2)[0] + "." for target in self.layers})
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name in sorted(missing - tied):
            if matches(ignored, name):
                continue
            if self.whole or (name.startswith(blocks) and name in parameters):
                raise ValueError(self.no_tensor(name, unclaimed))
            module = name.rpartition(".")[0] + "."
            beside = (t for t, target in spare.items() if target.startswith(module))
            within = (t for t, target in spare.items() if target.startswith(backbone))
            found = next(beside, next(within, None) if name.startswith(backbone) else None)
            if found is not None:
                raise ValueError(self.no_tensor(name, {found: module}))

    def no_tensor(self, target: str, unclaimed: dict[str, str]) -> str:
        """The error for a parameter without tensors."""
        owner = target.rpartition(".")[0] + "."
        found = next((t for t, name in unclaimed.items() if name.startswith(owner)), None)
        if found is None:
            where = f" in {self.files.files[0]}" if self.whole else ""
            return f"{target} must be in the checkpoint, got no tensor for it{where}"
        return (
            f"{target} must be in the checkpoint under a name that moe_ops or transformers knows, "
            f"got {self.where(found)}, which no parameter takes; write the values under the "
            "names of the model's own checkpoints, or load the plain checkpoint and quantize it"
        )

    def where(self, tensor: str) -> str:
        entry = self.files.entries.get(tensor)
        return f"{tensor} in {self.files.unknown[tensor]}" if entry is None else str(entry)

    def check_zero(self, tensor: str, owner: str) -> None:
        if self.files.read(tensor).any():
            raise ValueError(
                f"{self.files.entries[tensor]} must be zero: the model's {owner} have no bias"
            )


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns is found in a name."""
    return any(re.search(pattern, name) for pattern in patterns)
