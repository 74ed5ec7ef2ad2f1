"""What each parameter of a model is read from, decided from the headers of a checkpoint alone, and
its reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import core_model_loading as loading
from transformers.modeling_utils import PreTrainedModel

from moe_ops.integrations.checkpoints import files, ggml
from moe_ops.integrations.checkpoints.common import FLOATS
from moe_ops.integrations.checkpoints.configs import gate_and_up_are_halves
from moe_ops.integrations.checkpoints.experts import Checkpoint
from moe_ops.integrations.checkpoints.headers import Entry
from moe_ops.integrations.checkpoints.json_files import parse_object
from moe_ops.integrations.checkpoints.stacks import join_rows
from moe_ops.integrations.checkpoints.weights import (
    BIAS,
    BY_ROWS,
    Matrices,
    Source,
    Sources,
    Weight,
    add_tensor,
    module_of,
    scheme_for,
)
from moe_ops.integrations.transformers import conversions
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.config import METHOD, MoeOpsConfig
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.integrations.transformers.leftovers import Leftovers, matches
from moe_ops.integrations.transformers.sizes import element_bytes, quantized_bytes
from moe_ops.schemes import get_scheme
from moe_ops.tensors import sharding, unflatten
from moe_ops.tensors.checks import check_groups

Tensors = dict[str, tuple[int, str]]  # tensor -> (projection, role)


class Assignment:
    """The sources of a model's parameters that are quantized, or will be.

    Args:
        model: while transformers loads it.
        checkpoint: what it is loaded from.
        scheme: that plain experts are quantized to, or quantized ones used with; None: their own.
        own_names: `save_pretrained` wrote quantized experts, under the model's own names.
        whole: the checkpoint is a GGUF file, which holds all of a model.
        plain: plain experts may stay so without a scheme.

    Attributes:
        layers: of each parameter of experts its layer and its name there.
        weights: experts that the checkpoint has plain or in the format of others.
        stored: experts that `save_pretrained` wrote.
        matrices: what is no expert, and becomes plain.
        biases: of experts one by one, or of gate and up apart, [projection][expert].
        ours: tensors of all these, but for one of each parameter, by which transformers asks for
            it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        scheme: str | None,
        own_names: bool,
        whole: bool = False,
        plain: bool = False,
    ) -> None:
        self.model, self.checkpoint, self.scheme = model, checkpoint, scheme
        self.own_names, self.plain, self._whole = own_names, plain, whole
        self.files = checkpoint.files
        self.layers: dict[str, tuple[Layer, str]] = {
            layer.parameter_name(name): (layer, name)
            for layer in layers_of.find(model)
            for name in layer.weights
        }
        self.weights: dict[str, Weight] = {}
        self.stored: dict[str, Source] = {}
        self.matrices: dict[str, Source] = {}
        self.biases: dict[str, Matrices] = {}
        self.ours: set[str] = set()
        self._leftovers = Leftovers(model, self.files, self.layers, whole)

    @classmethod
    def of_files(cls, model: PreTrainedModel, paths: Sequence, config: MoeOpsConfig) -> Assignment:
        """That of a model and the files that transformers found for it.

        Raises:
            ValueError: files beside those of the index, or plain experts where config.json says
                that we have quantized them; or as `Checkpoint`.
        """
        _check_index(Path(paths[0]), model.config._name_or_path)
        said, _ = files.quantization_config(Path(paths[0]).parent)
        ours = said.get("quant_method") == METHOD
        checkpoint = Checkpoint(list(paths), {} if ours else None)
        stored = any(name.endswith(".qdata") for name in checkpoint.files.entries)
        if ours and not stored and config.of_file:
            raise ValueError(
                "the checkpoint's experts must be quantized, as the quantization_config of its "
                "config.json says, got plain ones: a plain model was saved with the configuration "
                "of a quantized one. Remove quantization_config and experts_implementation from "
                "config.json to load it plain, or pass quantization_config=MoeOpsConfig(scheme) "
                "to quantize it"
            )
        for entry in checkpoint.files.repeated:
            raise ValueError(
                f"{entry} must not be there, because the index has it in another file and "
                "transformers reads both; remove the one that is out of date"
            )
        plain = config.gpu_memory is not None
        return cls(model, checkpoint, config.scheme, ours and stored, plain=plain)

    def assign(self, known: list) -> list:
        """Decide what every parameter is read from, and check that it can be.

        Returns:
            transformers' conversions, ``known``, with readers in the place of those of experts.
        """
        if self.own_names:
            entries = self.files.entries
            same = all(name in entries or f"{name}.qdata" in entries for name in self.layers)
            # the text model of a composite one has others
            renamings = [t for t in known if isinstance(t, loading.WeightRenaming)]
            known = [] if same else renamings
        kept, table = conversions.own_readers(known, self.layers, self.checkpoint)
        self._assign(kept, table)
        return kept

    def _assign(self, transforms: list, table: conversions.Table) -> None:
        renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        found: dict[str, Tensors] = {}
        foreign: set[str] = set()
        modules: dict[str, bool] = {}  # that tensors were found for, and whether we read them
        claimed: set[str] = set()  # parameters that something is read for
        unclaimed: dict[str, str] = {}  # tensor -> its name in the model
        tensors = [*self.files.entries, *self.files.unknown]
        taken: dict[str, tuple[str, str | None]] = {}  # by our readers, of any expert
        for tensor in sorted(tensors, key=conversions.natural_order):
            key = conversions.any_expert(tensor)
            target, pattern = taken.get(key) or conversions.rename(
                tensor, renamings, converters, prefix, state
            )
            if pattern in table and conversions.expert_number(target) is None:
                taken[key] = target, pattern
            claimed.update(_targets_of(target, pattern, converters))
            if tensor in self.files.unknown:
                unclaimed[tensor] = target
            elif target in state and pattern in table:
                projection, role = found.setdefault(target, {})[tensor] = table[pattern]
                module = module_of(tensor, role)
                modules[module] = True
                if role != BIAS:
                    names = conversions.names_of(tensor, target, projection)
                    self.checkpoint.others[module] = names
            elif target in state:
                self._leftovers.check_plain(tensor, state[target])
                foreign.add(target)
                modules.setdefault(tensor.removesuffix(".weight"), False)
            elif pattern in table:
                self._leftovers.check_unclaimed(tensor, renamings, converters)
            else:
                unclaimed[tensor] = target
        ignored = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        spare = {t: target for t, target in unclaimed.items() if not matches(ignored, t)}
        self._leftovers.check_companions(modules, spare)
        self._leftovers.check_all_taken(spare)
        missing = state.keys() - claimed - self.layers.keys()
        self._leftovers.check_missing(missing, unclaimed, spare)
        for target, sources in found.items():
            smallest = min(sources, key=lambda tensor: self.files.entries[tensor].bytes)
            self.ours |= sources.keys() - {smallest}
            if target in self.layers:
                self._assign_experts(target, sources)
            elif all(role == BIAS for _, role in sources.values()):
                self._assign_biases(target, state[target], sources)
            else:
                self._assign_matrix(target, state[target], sources)
        self._give_rows_scales()
        for target in self.layers:
            if target not in found and target not in foreign:
                raise ValueError(self._leftovers.no_tensor(target, unclaimed))
        quantized = self.stored or self.matrices or any(w.scheme for w in self.weights.values())
        if self.scheme is None and not quantized and not self.plain:
            raise ValueError(
                "scheme must be given to quantize a plain checkpoint, got None; leave "
                "quantization_config out to load it plain"
            )

    @property
    def quantized_to(self) -> str:
        """The scheme that plain experts will have; "" if they stay plain, or there are none."""
        plain = any(weight.format is None for weight in self.weights.values())
        return self.scheme if plain and self.scheme else ""

    # --- the parameters -------------------------------------------------------------------------

    def _assign_matrix(self, target: str, parameter: Tensor, tensors: Tensors) -> None:
        """A matrix that will be plain."""
        source: Source = {}
        for tensor, (_, role) in tensors.items():
            add_tensor(source, role, tensor, target)
        self.matrices[target] = source
        weight = self.checkpoint.plan(target, ((source,),), values_only=True)
        shape = weight.shape[1:]
        if weight.format and shape != tuple(parameter.shape):
            raise ValueError(
                f"{target} must have shape {tuple(parameter.shape)}, got {shape} from "
                f"{self._first(source)}"
            )

    def _assign_experts(self, target: str, tensors: Tensors) -> None:
        if any(role in conversions.STORED for _, role in tensors.values()):
            self._assign_stored(target, {role: tensor for tensor, (_, role) in tensors.items()})
            return
        for tensor in [tensor for tensor, (_, role) in tensors.items() if role == BIAS]:
            self._leftovers.check_zero(tensor, "experts")
        matrices = {tensor: said for tensor, said in tensors.items() if said[1] != BIAS}
        found = _sources(target, matrices, 1 + max(p for p, _ in tensors.values()))
        found.share_scales(self.files.entries)
        layer, name = self.layers[target]
        parameter, expected = getattr(layer.owner, name), tuple(layer.natural_weight(name).shape)
        if sharding.is_sharded(parameter):
            expected = (parameter.shape[0], *expected[1:])
        sources = found.matrices()
        if layer.real is not None:
            sources = tuple(projection[: expected[0]] for projection in sources)
        columns_first = not self._whole and layer.columns_first(name)
        weight = self.checkpoint.plan(
            target,
            sources,
            columns_first=columns_first,
            joined=expected[0] if parameter.dim() == 2 else 0,
            in_turn=len(sources) > 1 and self._in_turn(target, any(found.stacked)),
        )
        refused = weight.format.turned if weight.format and columns_first else ""
        if refused and weight.stacked and not weight.columns_first:
            entry = self.files.entries[sources[0][0]["weight"]]
            raise ValueError(f"{entry} {refused.format(entry.dtype)}")
        if weight.shape != expected:
            raise ValueError(
                f"{target} must have shape {expected} as (experts, rows, columns), got "
                f"{weight.shape} from {self.files.entries[next(iter(tensors))]}"
            )
        scheme = scheme_for(weight, self.scheme)
        if scheme and weight.format is None:
            check_scheme_fits(target, scheme, weight.shape)
        self.weights[target] = weight

    def _give_rows_scales(self) -> None:
        """Use fp8 with a scale for each row in layers where gate and up have different ones."""
        layers: dict[str, list[str]] = {}
        for target in self.weights:
            layers.setdefault(target.rpartition(".")[0], []).append(target)
        for targets in layers.values():
            fp8 = [w for w in map(self.weights.get, targets) if w and w.scheme in BY_ROWS]
            if not any(self.checkpoint.loader(weight).scales_differ() for weight in fp8):
                continue
            for target in targets:
                weight = self.weights[target]
                weight = replace(weight, scheme=BY_ROWS.get(weight.scheme, weight.scheme))
                scheme_for(weight, self.scheme)
                self.weights[target] = weight

    def _in_turn(self, target: str, stacked: bool) -> bool:
        """Whether rows of gate and up of a parameter take turns, and files have both apart: in
        stacks, which are what their names say, or of each expert by itself.
        """
        owner = target.rpartition(".")[0]
        if getattr(self.model.get_submodule(owner), "is_concatenated", True):
            return False
        if stacked:
            return True
        try:
            return not gate_and_up_are_halves(self.checkpoint.config)
        except ValueError as error:
            raise ValueError(f"{target}: {error}") from error

    def _assign_biases(self, target: str, parameter: Tensor, tensors: Tensors) -> None:
        """Biases of experts one by one, or of gate and up apart, of which the model has a stack
        (E, rows).
        """
        name = target.rpartition(".")[2].removesuffix("_bias")
        projections = conversions.projections_of(name)
        found = _sources(target, tensors, len(projections))
        sources = found.matrices()
        E, rows = parameter.shape
        batch = (E,) if any(found.stacked) else ()
        expected = (*batch, rows // len(sources))
        for source in (source for projection in sources for source in projection):
            entry = self.files.entries[source[BIAS]]
            count = len(sources[0]) if not batch else E
            if entry.shape != expected or entry.dtype not in FLOATS or count != E:
                raise ValueError(
                    f"{entry} must be a floating-point bias of shape {expected}, one of {E} "
                    f"experts, got {entry.dtype} {entry.shape} of {count}"
                )
        self.biases[target] = sources

    def _assign_stored(self, target: str, source: Source) -> None:
        """A weight that `save_pretrained` wrote."""
        key, where = _metadata_key(source), self._first(source)
        for role, tensor in source.items():
            if role not in conversions.STORED:
                raise ValueError(
                    f"{self.files.entries[tensor]} must be absent: {target} is stored quantized, "
                    f"in {where}"
                )
        attributes = self.files.metadata.get(key)
        if attributes is None:
            raise ValueError(
                f"metadata of {where} must have {key!r}, which says how {target} is stored"
            )
        said = parse_object(attributes.encode(), f"metadata {key!r} in {where.file}")
        if self.scheme not in (None, said.get("scheme")):
            raise ValueError(
                f"scheme must be {said.get('scheme')!r}, in which {target} is quantized already, "
                f"got {self.scheme!r}; leave scheme out"
            )
        self.stored[target] = source

    def _first(self, source: Source) -> Entry:
        return self.files.entries[next(iter(source.values()))]

    # --- reading --------------------------------------------------------------------------------

    def read(self, target: str, device: torch.device | str) -> Tensor:
        """A parameter; of experts (E, N, K), those that this process holds."""
        if target in self.layers:
            return self._experts(target, device)
        dtype = self.model.get_parameter(target).dtype
        if target in self.biases:
            return self._biases(target, device).to(dtype)
        source = self.matrices[target]
        if source.keys() == {"weight"} and not self._first(source).blocks:
            return self.files.read(source["weight"], device).to(dtype)
        return self.checkpoint.matrix(target, source, dtype, device)

    def _experts(self, target: str, device: torch.device | str) -> Tensor:
        layer, name = self.layers[target]
        ids, parameter = layer.experts(name), getattr(layer.owner, name)
        if target not in self.stored:
            planned = self.weights[target]
            planned = planned if ids is None else planned.of(ids)
            return self.checkpoint.load(planned, self.scheme, device=device, dtype=parameter.dtype)
        source, count = self.stored[target], parameter.shape[0]
        tensors = {}
        for tensor in source.values():
            per_expert = self.files.entries[tensor].shape[:1] == (count,)
            pieces = (count, ids) if per_expert and ids is not None else ()
            tensors[tensor] = self.files.read(tensor, device, *pieces)
        key, file = _metadata_key(source), self._first(source).file
        try:
            (weight,) = unflatten(tensors, {key: self.files.metadata[key]}).values()
        except ValueError as error:
            raise ValueError(f"{error}, in {file}") from error
        expected = layer.natural_weight(name).shape
        if weight.shape != expected:
            raise ValueError(
                f"{target} must have shape {tuple(expected)} as (experts, rows, columns), got "
                f"{tuple(weight.shape)} from {file}"
            )
        return weight.to(parameter.dtype)

    def _biases(self, target: str, device: torch.device | str) -> Tensor:
        sources = self.biases[target]
        biases = [[self.files.read(source[BIAS], device) for source in p] for p in sources]
        stacked = biases[0][0].dim() == 2
        in_turn = len(sources) > 1 and self._in_turn(target, stacked)
        experts = zip(*[p[0] if stacked else p for p in biases], strict=True)
        return torch.stack([join_rows([*e], in_turn) for e in experts])

    def element_bytes(self, target: str, parameter: Tensor) -> float:
        """Bytes that an element of a parameter will take."""
        if target in self.stored:
            entries = [self.files.entries[tensor] for tensor in self.stored[target].values()]
            return sum([entry.bytes for entry in entries]) / parameter.numel()
        weight = self.weights.get(target)
        scheme = self.scheme or (weight.scheme if weight else "")
        if target not in self.layers or not scheme:
            return element_bytes(parameter)
        layer, name = self.layers[target]
        local = layer.natural_weight(name)
        dtype = local.dtype
        source = weight.sources[0][0] if weight else {}
        for role in source.keys() & {"weight", "weight_scale", "scales"}:
            entry = self.files.entries[source[role]]  # scales get their dtype from files
            dtype = entry.dtype if entry.dtype in FLOATS else dtype
            dtype = ggml.SCALE_DTYPE if entry.blocks else dtype
        return quantized_bytes(scheme, local.shape, dtype) / layer.weight(name).numel()


def _sources(target: str, tensors: Tensors, count: int) -> Sources:
    """The tensors of a parameter that is made of ``count`` projections."""
    found = Sources(target, count)
    for tensor, (projection, role) in tensors.items():
        found.add(projection, conversions.expert_number(tensor), role, tensor)
    return found


def _targets_of(target: str, pattern: str | None, converters: list) -> list[str]:
    """The parameters that a converter makes of a tensor, of which ``target`` is the first."""
    for converter in converters if pattern is not None else ():
        first, *others = converter.target_patterns
        if others and pattern in converter.source_patterns:
            return [target, *(target.replace(first, other) for other in others)]
    return [target]


def check_scheme_fits(name: str, scheme: str, shape: tuple[int, int, int]) -> None:
    """Raise ValueError, naming the weight, unless plain weights (E, N, K) can be given this
    scheme.
    """
    found = get_scheme(scheme)
    if found.activation is not None and found.activation.static:
        raise ValueError(
            f"scheme must not have static activation scales, got {scheme!r}: no plain checkpoint "
            "carries them"
        )
    check_groups(name, shape, found)


def _metadata_key(source: Source) -> str:
    """Where the metadata of our own files describe the weight of these tensors."""
    role, tensor = next(iter(source.items()))
    return "moe_ops:" + tensor.removesuffix(f".{role}")


def _check_index(file: Path, path: str) -> None:
    """Raise ValueError if transformers chose a file that the folder's index does not name, or
    follows an index out of the folder ``path``.
    """
    index = file.parent / files.INDEX
    if path and (Path(path) / files.INDEX).is_file():
        files.read_index(Path(path) / files.INDEX)
    if file.name == "model.safetensors" and index.is_file():
        named = set(files.read_index(index).values())
        if file not in named:
            raise ValueError(
                f"{file} must be named by {index}, got one that names {min(named).name} and "
                "others; remove the one of the two that is out of date"
            )
