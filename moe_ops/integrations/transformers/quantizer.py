"""Quantized experts in `from_pretrained` and `save_pretrained`.

transformers decides which tensors of a checkpoint belong to which parameter, and where it goes.
The tensors themselves are read by `Checkpoint`, one expert at a time: transformers' own way would
hold a layer's experts in bf16 several times over, and would convert the integers of quantized
checkpoints to the dtype of the parameter they are meant for.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from moe_ops.integrations.checkpoints import files
from moe_ops.integrations.checkpoints.common import FLOATS
from moe_ops.integrations.checkpoints.configs import gate_and_up_are_halves
from moe_ops.integrations.checkpoints.experts import (
    BIAS,
    BY_ROWS,
    Checkpoint,
    Source,
    Weight,
    add_tensor,
    experts_of,
    join_rows,
    module_of,
    scheme_for,
)
from moe_ops.integrations.checkpoints.formats import FACTORS, ROLES, why_refused
from moe_ops.integrations.checkpoints.headers import Entry
from moe_ops.integrations.checkpoints.json_files import parse_object
from moe_ops.integrations.transformers import conversions
from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers.config import METHOD, MoeOpsConfig
from moe_ops.integrations.transformers.hook import attach_layers
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.integrations.transformers.sizes import element_bytes, quantized_bytes
from moe_ops.meta.scales import TRANSPOSED
from moe_ops.ops.relayout import natural as in_natural_layout
from moe_ops.schemes import get_scheme
from moe_ops.tensors import ExpertTensor, check_quantizable, flatten, quantize, sharding, unflatten
from moe_ops.tensors.checks import check_groups

# of attention's cache, or of its products: no weight depends on them
_OF_THE_CACHE = {f"{of}_{what}" for of in "qkv" for what in ("scale", "zero_point", "bias")}
_OF_THE_CACHE |= {"output_scale", "output_zero_point"}
_SCALES = {*ROLES, FACTORS} - {"weight"}


@auto.register_quantizer(METHOD)
class MoeOpsQuantizer(HfQuantizer):
    """Loads and saves models whose experts are ExpertTensors."""

    requires_calibration = False
    is_trainable = True  # adapters: the experts themselves receive no gradients
    is_compileable = True

    def __init__(
        self,
        quantization_config: MoeOpsConfig,
        beside: HfQuantizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(quantization_config, **kwargs)
        self.beside = beside  # that of the model's other layers, which was there before
        if beside is not None:
            self.is_trainable, self.is_compileable = beside.is_trainable, beside.is_compileable
        # False makes transformers ask for one tensor after the other; threads would read ahead
        self.pre_quantized = False
        self._model: PreTrainedModel | None = None
        self._own_names = False  # whether save_pretrained wrote quantized experts
        self._checkpoint: Checkpoint | None = None
        self._layers: dict[str, tuple[Layer, str]] = {}  # parameter -> its layer and weight
        self._weights: dict[str, Weight] = {}
        self._matrices: dict[str, Source] = {}
        self._stored: dict[str, Source] = {}
        self._biases: dict[str, tuple[tuple[Source, ...], ...]] = {}  # [projection][expert]

    def __deepcopy__(self, memo: dict) -> MoeOpsQuantizer:
        return self  # it has no state once a model is loaded

    @property
    def _opened(self) -> Checkpoint:
        """The checkpoint that is being loaded."""
        assert self._checkpoint is not None
        return self._checkpoint

    # --- before loading: what belongs where ---------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called with the map that was given, and with the one that transformers infers."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map must not have 'disk', got one, or too little memory for an inferred "
                "one: offload to 'cpu' instead, and give it more by max_memory"
            )

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Any = None,
        **kwargs: Any,
    ) -> None:
        if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
            raise ValueError(
                f"quantized experts are loaded from safetensors files, got {checkpoint_files}; "
                "convert the checkpoint, or load it plain and call "
                "moe_ops.integrations.transformers.quantize"
            )
        _check_index(Path(checkpoint_files[0]), model.config._name_or_path)
        config, _ = files.quantization_config(Path(checkpoint_files[0]).parent)
        ours = config.get("quant_method") == METHOD
        self._checkpoint = Checkpoint(list(checkpoint_files), {} if ours else None)
        stored = any(name.endswith(".qdata") for name in self._opened.files.entries)
        if ours and not stored and self.quantization_config.of_file:
            raise ValueError(
                "the checkpoint's experts must be quantized, as the quantization_config of its "
                "config.json says, got plain ones: a plain model was saved with the configuration "
                "of a quantized one. Remove quantization_config and experts_implementation from "
                "config.json to load it plain, or pass quantization_config=MoeOpsConfig(scheme) "
                "to quantize it"
            )
        self._own_names = ours and stored
        for entry in self._checkpoint.files.repeated:
            raise ValueError(
                f"{entry} must not be there, because the index has it in another file and "
                "transformers reads both; remove the one that is out of date"
            )
        self._layers = {
            layer.parameter_name(name): (layer, name)
            for layer in layers_of.find(model)
            for name in layer.weights
        }
        self._model = model

    def update_weight_conversions(
        self, weight_conversions: list, model: PreTrainedModel | None = None
    ) -> list:
        """Replace the conversions of expert weights, and check the whole checkpoint's headers."""
        model = self._model if model is None else model
        known = weight_conversions
        if self._own_names:  # we save under the model's own names
            entries = self._opened.files.entries
            same = all(name in entries or f"{name}.qdata" in entries for name in self._layers)
            # the text model of a composite one has others
            renamings = [t for t in known if isinstance(t, loading.WeightRenaming)]
            known = [] if same else renamings
        kept, table = conversions.own_readers(known, self._layers, self._opened)
        self._assign(model, kept, table)
        return kept

    def _assign(self, model: Any, transforms: list, table: conversions.Table) -> None:
        """Decide from the headers what every parameter is read from, and check that it can be."""
        renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        state = model.state_dict()
        found: dict[str, dict[str, tuple[int, str]]] = {}
        foreign: set[str] = set()
        modules: dict[str, bool] = {}  # that tensors were found for, and whether we read them
        claimed: set[str] = set()  # parameters that something is read for
        unclaimed: dict[str, str] = {}  # tensor -> its name in the model
        tensors = [*self._opened.files.entries, *self._opened.files.unknown]
        for tensor in sorted(tensors, key=loading.dot_natural_key):
            target, pattern = conversions.rename(
                tensor, renamings, converters, model.base_model_prefix, state
            )
            claimed.update(_targets_of(target, pattern, converters))
            if tensor in self._opened.files.unknown:
                unclaimed[tensor] = target
            elif target in state and pattern in table:
                projection, role = found.setdefault(target, {})[tensor] = table[pattern]
                module = module_of(tensor, role)
                modules[module] = True
                if role != BIAS:
                    names = conversions.names_of(tensor, target, projection)
                    self._opened.others[module] = names
            elif target in state:
                self._check_plain(tensor, state[target])
                foreign.add(target)
                modules.setdefault(tensor.removesuffix(".weight"), False)
            elif pattern in table:
                self._check_unclaimed(tensor, renamings, converters)
            else:
                unclaimed[tensor] = target
        self._check_companions(model, modules, unclaimed)
        self._check_missing(model, state.keys() - claimed - self._layers.keys(), unclaimed)
        for target, sources in found.items():
            if target in self._layers:
                self._assign_weight(target, sources)
            elif all(role == BIAS for _, role in sources.values()):
                self._assign_biases(target, state[target], sources)
            else:
                source: Source = {}
                for tensor, (_, role) in sources.items():
                    add_tensor(source, role, tensor, target)
                self._matrices[target] = source
                self._check_shape(target, state[target], source)
        self._give_rows_scales()
        for target in self._layers:
            if target not in found and target not in foreign:
                raise ValueError(self._no_tensor(target, unclaimed))
        quantized = self._stored or self._matrices or any(w.scheme for w in self._weights.values())
        if self.quantization_config.scheme is None and not quantized:
            raise ValueError(
                "scheme must be given to quantize a plain checkpoint, got None; leave "
                "quantization_config out to load it plain"
            )

    def _check_shape(self, target: str, parameter: Tensor, source: Source) -> None:
        """Check a matrix that will be plain against its headers and the model."""
        weight = self._opened.plan(target, ((source,),), values_only=True)
        shape = weight.shape[1:]
        if weight.format and shape != tuple(parameter.shape):
            entry = self._opened.files.entries[next(iter(source.values()))]
            raise ValueError(
                f"{target} must have shape {tuple(parameter.shape)}, got {shape} from {entry}"
            )

    def _check_plain(self, tensor: str, parameter: Tensor) -> None:
        """Raise for a quantized tensor whose scales have names that nobody taught us."""
        entry = self._opened.files.entries[tensor]
        if parameter.is_floating_point() and entry.dtype not in FLOATS:
            raise ValueError(
                f"{entry} must be a plain weight or have scales of a known name beside it, got "
                f"{entry.dtype}"
            )

    def _check_companions(
        self, model: Any, modules: dict[str, bool], unclaimed: dict[str, str]
    ) -> None:
        """Raise for tensors that nobody would read although a weight depends on them."""
        entries, unknown = self._opened.files.entries, self._opened.files.unknown
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        owners = tuple({target.rpartition(".")[0] + "." for target in self._layers})
        for tensor, target in unclaimed.items():
            names = [m.span() for m in re.finditer(r"[.]|_(?!.*[.])", tensor)]
            beside = next(((i, j) for i, j in names if tensor[:i] in modules), None)
            role = tensor[beside[1] :] if beside else tensor.rpartition(".")[2]
            in_experts = target.startswith(owners)
            ours = in_experts or (beside and modules[tensor[: beside[0]]])
            if any(re.search(pattern, tensor) for pattern in ignored):
                continue
            if ours and role == BIAS and tensor in entries:
                self._check_zero(tensor, "matrices of this name")
            elif not in_experts and role in _OF_THE_CACHE:
                continue
            elif ours or (beside and role in _SCALES):
                where = entries.get(tensor) or f"{tensor} in {unknown[tensor]}"
                raise ValueError(f"{where} must be absent: {why_refused(role)}")

    def _check_missing(self, model: Any, missing: set[str], unclaimed: dict[str, str]) -> None:
        """Raise if the checkpoint lacks a parameter beside experts, such as a router or biases;
        or any, and has tensors in its module, or anywhere in the same backbone, that nobody takes:
        transformers would leave it random.
        """
        prefix = model.base_model_prefix
        backbone = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        tied = {*(getattr(model, "all_tied_weights_keys", None) or ())}
        left = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        spare = {
            tensor: target
            for tensor, target in unclaimed.items()
            if not any(re.search(pattern, tensor) for pattern in left)
        }
        blocks = tuple({target.rsplit(".", 2)[0] + "." for target in self._layers})
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name in sorted(missing - tied):
            if any(re.search(pattern, name) for pattern in ignored):
                continue
            if name.startswith(blocks) and name in parameters:
                raise ValueError(self._no_tensor(name, unclaimed))
            module = name.rpartition(".")[0] + "."
            beside = (t for t, target in spare.items() if target.startswith(module))
            within = (t for t, target in spare.items() if target.startswith(backbone))
            found = next(beside, next(within, None) if name.startswith(backbone) else None)
            if found is not None:
                raise ValueError(self._no_tensor(name, {found: module}))

    def _no_tensor(self, target: str, unclaimed: dict[str, str]) -> str:
        """What a parameter without tensors is refused with."""
        files, owner = self._opened.files, target.rpartition(".")[0] + "."
        found = next((t for t, name in unclaimed.items() if name.startswith(owner)), None)
        if found is None:
            return f"{target} must be in the checkpoint, got no tensor for it"
        where = files.entries.get(found) or f"{found} in {files.unknown[found]}"
        return (
            f"{target} must be in the checkpoint under a name that moe_ops or transformers knows, "
            f"got {where}, which no parameter takes; write the values under the names of the "
            "model's own checkpoints, or load the plain checkpoint and quantize it"
        )

    def _check_unclaimed(self, tensor: str, renamings: list, converters: list) -> None:
        """Raise for a tensor of experts that transformers would join or split by its own
        conversions.
        """
        others = [c for c in converters if not isinstance(c, conversions.OwnReader)]
        target, pattern = loading.rename_source_key(tensor, renamings, others)
        if pattern is None:
            return
        entry = self._opened.files.entries[tensor]
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

    def _assign_weight(self, target: str, tensors: dict[str, tuple[int, str]]) -> None:
        if any(role in conversions.STORED for _, role in tensors.values()):
            self._assign_stored(target, {role: tensor for tensor, (_, role) in tensors.items()})
            return
        count = 1 + max(projection for projection, _ in tensors.values())
        stacked: list[Source] = [{} for _ in range(count)]
        single: list[dict[int, Source]] = [{} for _ in range(count)]
        for tensor, (projection, role) in tensors.items():
            if role == BIAS:
                self._check_zero(tensor, "experts")
                continue
            number = conversions.expert_number(tensor)
            if number is None:
                source = stacked[projection]
            else:
                source = single[projection].setdefault(number, {})
            add_tensor(source, role, tensor, target)
        self._opened.share_scales(target, stacked, single)
        layer, name = self._layers[target]
        expected = tuple(layer.natural_weight(name).shape)
        if sharding.is_sharded(parameter := getattr(layer.owner, name)):
            expected = (parameter.shape[0], *expected[1:])
        sources = experts_of(target, stacked, single)
        if layer.real is not None:
            sources = tuple(projection[: expected[0]] for projection in sources)
        joined = expected[0] if getattr(layer.owner, name).dim() == 2 else 0
        columns_first = layer.columns_first(name)
        in_turn = len(sources) > 1 and self._in_turn(target, any(stacked))
        weight = self._opened.plan(
            target, sources, columns_first=columns_first, joined=joined, in_turn=in_turn
        )
        form, stack = weight.format, weight.stacked and columns_first
        known = weight.columns_first or (form is not None and form.rows_first)
        if form and stack and not known and "weight" in sources[0][0]:
            _check_orientation(self._opened.files.entries[sources[0][0]["weight"]], form.name)
        if weight.shape != expected:
            raise ValueError(
                f"{target} must have shape {expected} as (experts, rows, columns), got "
                f"{weight.shape} from {self._opened.files.entries[next(iter(tensors))]}"
            )
        scheme = scheme_for(weight, self.quantization_config.scheme)
        if scheme and weight.format is None:
            check_scheme_fits(target, scheme, weight.shape)
        self._weights[target] = weight

    def _give_rows_scales(self) -> None:
        """Use fp8 with a scale for each row in layers where gate and up have different ones."""
        layers: dict[str, list[str]] = {}
        for target in self._weights:
            layers.setdefault(target.rpartition(".")[0], []).append(target)
        for targets in layers.values():
            weights = [self._weights[target] for target in targets]
            fp8 = [weight for weight in weights if weight.scheme in BY_ROWS]
            if any(self._opened.scales_differ(weight) for weight in fp8):
                for target in targets:
                    weight = self._weights[target]
                    weight = replace(weight, scheme=BY_ROWS.get(weight.scheme, weight.scheme))
                    scheme_for(weight, self.quantization_config.scheme)
                    self._weights[target] = weight

    def _in_turn(self, target: str, stacked: bool) -> bool:
        """Whether rows of gate and up of a parameter take turns, and files have both apart: in
        stacks, which are what their names say, or of each expert by itself.
        """
        owner = target.rpartition(".")[0]
        assert self._model is not None
        if getattr(self._model.get_submodule(owner), "is_concatenated", True):
            return False
        if stacked:
            return True
        try:
            return not gate_and_up_are_halves(self._opened.config)
        except ValueError as error:
            raise ValueError(f"{target}: {error}") from error

    def _assign_biases(
        self, target: str, parameter: Tensor, tensors: dict[str, tuple[int, str]]
    ) -> None:
        """Biases of experts one by one, or of gate and up apart, of which the model has a stack
        (E, rows).
        """
        name = target.rpartition(".")[2].removesuffix("_bias")
        stacked: list[Source] = [{} for _ in conversions.projections_of(name)]
        single: list[dict[int, Source]] = [{} for _ in stacked]
        for tensor, (projection, _) in tensors.items():
            number = conversions.expert_number(tensor)
            own = single[projection]
            source = stacked[projection] if number is None else own.setdefault(number, {})
            add_tensor(source, BIAS, tensor, target)
        sources = experts_of(target, stacked, single)
        E, rows = parameter.shape
        batch = (E,) if any(stacked) else ()
        expected = (*batch, rows // len(sources))
        for source in (source for projection in sources for source in projection):
            entry = self._opened.files.entries[source[BIAS]]
            count = len(sources[0]) if not batch else E
            if entry.shape != expected or entry.dtype not in FLOATS or count != E:
                raise ValueError(
                    f"{entry} must be a floating-point bias of shape {expected}, one of {E} "
                    f"experts, got {entry.dtype} {entry.shape} of {count}"
                )
        self._biases[target] = sources

    def _check_zero(self, tensor: str, owner: str) -> None:
        if self._opened.files.read(tensor).any():
            raise ValueError(
                f"{self._opened.files.entries[tensor]} must be zero: the model's {owner} have no "
                "bias"
            )

    def _assign_stored(self, target: str, source: Source) -> None:
        """A weight that `save_pretrained` wrote."""
        key = _metadata_key(source)
        attributes = self._opened.files.metadata.get(key)
        entries = self._opened.files.entries
        where = entries[next(iter(source.values()))]
        for role, tensor in source.items():
            if role not in conversions.STORED:
                raise ValueError(
                    f"{entries[tensor]} must be absent: {target} is stored quantized, in {where}"
                )
        if attributes is None:
            raise ValueError(
                f"metadata of {where} must have {key!r}, which says how {target} is stored"
            )
        said = parse_object(attributes.encode(), f"metadata {key!r} in {where.file}")
        stored, wanted = said.get("scheme"), self.quantization_config.scheme
        if wanted not in (None, stored):
            raise ValueError(
                f"scheme must be {stored!r}, in which {target} is quantized already, got "
                f"{wanted!r}; leave scheme out"
            )
        self._stored[target] = source

    # --- while loading ------------------------------------------------------------------------

    def place(self, model: nn.Module, target: str, tensors: dict[str, Any]) -> None:
        """Read a parameter and set it. ``tensors``: what transformers would call to read each
        itself.
        """
        entries = self._opened.files.entries  # without those that the index does not name
        module, name = model.get_submodule(target.rpartition(".")[0]), target.rpartition(".")[2]
        old = getattr(module, name)
        if sharding.is_sharded(old):
            device = old.device_mesh.device_type
        else:
            smallest = min(tensors.keys() & entries.keys(), key=lambda n: entries[n].bytes)
            device = tensors[smallest]().device  # transformers' device map, applied
        if target in self._layers:
            self._layers[target][0].set_weight(name, self._read_weight(target, device))
        else:
            value = self._read_matrix(model, target, device)
            if sharding.is_sharded(old):
                from transformers.distributed.sharding_utils import DtensorShardOperation

                value = DtensorShardOperation(old).shard_tensor(value)
            setattr(module, name, nn.Parameter(sharding.sharded_like(value, old)))
        getattr(module, name)._is_hf_initialized = True

    def _read_weight(self, target: str, device: torch.device | str) -> Tensor:
        """A weight, of the experts that this process holds."""
        layer, name = self._layers[target]
        ids, count = layer.experts(name), getattr(layer.owner, name).shape[0]
        dtype = getattr(layer.owner, name).dtype
        if target in self._stored:
            source, stored = self._stored[target], self._opened.files
            tensors = {}
            for tensor in source.values():
                per_expert = stored.entries[tensor].shape[:1] == (count,)
                pieces = (count, ids) if per_expert and ids is not None else ()
                tensors[tensor] = stored.read(tensor, device, *pieces)
            key = _metadata_key(source)
            metadata = {key: stored.metadata[key]}
            file = stored.entries[next(iter(source.values()))].file
            try:
                (weight,) = unflatten(tensors, metadata).values()
            except ValueError as error:
                raise ValueError(f"{error}, in {file}") from error
            expected = layer.natural_weight(name).shape
            if weight.shape != expected:
                raise ValueError(
                    f"{target} must have shape {tuple(expected)} as (experts, rows, columns), got "
                    f"{tuple(weight.shape)} from {file}"
                )
            return weight.to(dtype)
        scheme = self.quantization_config.scheme
        planned = self._weights[target]
        planned = planned if ids is None else planned.of(ids)
        return self._opened.load(planned, scheme, device=device, dtype=dtype)

    def _read_matrix(self, model: nn.Module, target: str, device: torch.device | str) -> Tensor:
        dtype = model.get_parameter(target).dtype
        if target in self._biases:
            sources = self._biases[target]
            read = self._opened.files.read
            biases = [[read(source[BIAS], device) for source in p] for p in sources]
            stacked = biases[0][0].dim() == 2
            in_turn = len(sources) > 1 and self._in_turn(target, stacked)
            experts = zip(*[p[0] if stacked else p for p in biases], strict=True)
            return torch.stack([join_rows([*e], in_turn) for e in experts]).to(dtype)
        source = self._matrices[target]
        if source.keys() == {"weight"}:
            return self._opened.files.read(source["weight"], device).to(dtype)
        return self._opened.matrix(target, source, dtype, device)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """True for experts that one of transformers' own conversions puts together."""
        in_hand = param_name in self._weights or param_name in self._stored
        return param_name in self._layers and not in_hand and bool(self.quantization_config.scheme)

    def get_quantize_ops(self) -> _QuantizeConverted:
        return _QuantizeConverted(self)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of one element, for transformers' device maps."""
        if param_name in self._stored:
            entries = [self._opened.files.entries[t] for t in self._stored[param_name].values()]
            return sum([entry.bytes for entry in entries]) / param.numel()
        weight = self._weights.get(param_name)
        scheme = self.quantization_config.scheme or (weight.scheme if weight else "")
        if param_name not in self._layers or not scheme:
            return element_bytes(param)
        layer, name = self._layers[param_name]
        local = layer.natural_weight(name)
        return quantized_bytes(scheme, local.shape, local.dtype) / layer.weight(name).numel()

    # --- after loading, and saving ------------------------------------------------------------

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        for state in (
            *(self._layers, self._weights, self._matrices, self._stored),
            self._biases,
        ):
            state.clear()
        self._checkpoint = self._model = None
        layers = layers_of.find(model)
        if any(isinstance(x.weight(name), ExpertTensor) for x in layers for name in x.weights):
            mark_quantized(model, self.quantization_config)
        else:  # they were plain beside quantized matrices, which are plain now
            self.remove_quantization_config(model)
        attach_layers(model, {"backend": self.quantization_config.backend})
        return model

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        if self.beside is not None and not getattr(model, "_hf_peft_config_loaded", False):
            method = self.beside.quantization_config.quant_method
            raise ValueError(
                "only the experts of a model must be quantized to save it, got one whose other "
                f"layers were quantized by {getattr(method, 'value', method)!r} while it was "
                "loaded; save it before its experts are quantized, and quantize them after each "
                "load"
            )
        state = model.state_dict()
        for name, t in list(state.items()):  # those of plain tensors are left to transformers
            if sharding.is_sharded(t) and isinstance(t.to_local(), ExpertTensor):
                whole = sharding.gathered(t)  # by all ranks; one writes
                if model.should_save_on_this_rank(True):
                    state[name] = whole.cpu()
                else:
                    del state[name]
        return flatten_natural(state)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        if self.beside is not None:
            model = self.beside._dequantize(model, dtype)
        if isinstance(dtype, str):  # as a configuration has it once it was saved
            dtype = getattr(torch, dtype)
        done: dict[int, nn.Parameter] = {}
        for layer in layers_of.find(model):
            for name in layer.weights:
                if isinstance(layer.weight(name), ExpertTensor):
                    layer.replace(name, lambda weight: weight.dequantize(dtype), done)
        vars(model.config).pop("experts_implementation", None)  # as `mark_quantized` set it
        for module in model.modules():  # and of its backbone, which transformers leaves
            if module is model or not isinstance(module, PreTrainedModel):
                continue
            if isinstance(getattr(module, "hf_quantizer", None), MoeOpsQuantizer):
                for name in _MARKS:
                    vars(module).pop(name, None)
                for name in ("quantization_config", "experts_implementation"):
                    vars(module.config).pop(name, None)
        return model


class _QuantizeConverted(loading.ConversionOps):
    """Quantizes experts that one of transformers' own conversions put together."""

    def __init__(self, quantizer: MoeOpsQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: Any,
        target_patterns: Any,
        full_layer_name: str = "",
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        (value,) = input_dict.values()
        value = value[0] if isinstance(value, list) else value
        layer, name = self.quantizer._layers[full_layer_name]
        old = getattr(layer.owner, name)
        value = sharding.sharded_like(value, old)  # of this process's experts alone
        setattr(layer.owner, name, nn.Parameter(value, requires_grad=False))
        natural = layer.natural_weight(name).contiguous()
        check_quantizable(full_layer_name, natural)
        scheme = self.quantizer.quantization_config.scheme
        layer.set_weight(name, quantize(natural, scheme))
        # transformers puts it into the DTensor
        return {full_layer_name: nn.Parameter(layer.weight(name), requires_grad=False)}


_MARKS = ("hf_quantizer", "is_quantized", "quantization_method", "_weight_conversions")


def _check_orientation(entry: Entry, form: str) -> None:
    """Raise for a stack of which shapes cannot tell whether its columns come first."""
    if form == "modelopt mxfp4":
        raise ValueError(
            f"{entry} must not be a stack of ModelOpt's MXFP4 for a model that keeps columns "
            "before rows: its groups lie along the rows; load the plain checkpoint with "
            "MoeOpsConfig(scheme)"
        )
    if entry.dtype != torch.uint8:
        raise ValueError(
            f"{entry} must hold experts one by one, pairs of e2m1, or in ModelOpt's files e4m3 "
            f"with a scale for each expert or for all, got a stack of {entry.dtype} for a model "
            "that keeps columns before rows: of others nothing says which of the two the file "
            "has; load the plain checkpoint with MoeOpsConfig(scheme)"
        )


def _targets_of(target: str, pattern: str | None, converters: list) -> list[str]:
    """The parameters that a converter makes of a tensor, of which ``target`` is the first."""
    for converter in converters if pattern is not None else ():
        first, *others = converter.target_patterns
        if others and pattern in converter.source_patterns:
            return [target, *(target.replace(first, other) for other in others)]
    return [target]


def mark_quantized(model: nn.Module, config: MoeOpsConfig, keep: bool = False) -> None:
    """Make `save_pretrained` write the experts as they are: that of the model, of one inside of a
    wrapper of PEFT or of torch.compile, and of its backbone, which shares its configuration.
    `keep`: not where that is done already.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = getattr(models[0], "hf_quantizer", None) if models else None
    if isinstance(before, MoeOpsQuantizer):
        if keep:
            return
        before = before.beside
    for module in models:
        if module.config is not models[0].config:
            continue
        module.hf_quantizer = MoeOpsQuantizer(config, before)
        module.is_quantized = True
        module.quantization_method = METHOD
        # the tensors keep the model's names: conversions would take quantized weights apart as if
        # plain
        module._weight_conversions = []
    if models:
        models[0].config.quantization_config = config
        # In config.json: where nobody imported this package, transformers would skip a
        # quant_method that it does not know, and leave the experts random. It raises for this
        # name.
        models[0].config.experts_implementation = METHOD


def flatten_natural(state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`flatten` of quantized weights in their natural layout; those that layers share once for
    each, as transformers would not know the names of their parts.
    """
    natural, seen = dict(state_dict), set[int]()
    for name, t in state_dict.items():
        if isinstance(t, ExpertTensor):
            transposed = t.weight_layout == TRANSPOSED
            weight: Any = t.transpose(-2, -1) if transposed else in_natural_layout(t)
            address = weight.qdata.data_ptr()
            natural[name] = weight.clone() if address in seen else weight
            seen.add(address)
    return flatten(natural)


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


def _metadata_key(source: Source) -> str:
    """Where the metadata of our own files describe the weight of these tensors."""
    role, tensor = next(iter(source.items()))
    return "moe_ops:" + tensor.removesuffix(f".{role}")
