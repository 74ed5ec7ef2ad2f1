"""Quantized experts in `from_pretrained` and `save_pretrained`.

transformers decides which tensors of a checkpoint belong to which parameter, and where it goes.
The tensors themselves are read by `Checkpoint`, some experts at a time: transformers' own way
would hold a layer's experts in bf16 several times over, and would convert the integers of
quantized checkpoints to the dtype of the parameter they are meant for.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import core_model_loading as loading
from transformers import modeling_utils
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from moe_ops.integrations.transformers import layers as layers_of
from moe_ops.integrations.transformers import moving
from moe_ops.integrations.transformers.budget import Budget, plan
from moe_ops.integrations.transformers.config import METHOD, MoeOpsConfig
from moe_ops.integrations.transformers.hook import attach_layers
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.integrations.transformers.sizes import element_bytes
from moe_ops.meta.scales import TRANSPOSED
from moe_ops.ops.relayout import natural as in_natural_layout
from moe_ops.residency.experts import device_of_slots
from moe_ops.tensors import ExpertTensor, check_quantizable, flatten, quantize, sharding

if TYPE_CHECKING:
    from moe_ops.integrations.transformers.assignment import Assignment


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
        self._assignment: Assignment | None = None  # while a model is loaded
        self._device: torch.device | None = None  # of slots, where experts are in host memory

    def __deepcopy__(self, memo: dict) -> MoeOpsQuantizer:
        return self  # it has no state once a model is loaded

    @property
    def _assigned(self) -> Assignment:
        assert self._assignment is not None
        return self._assignment

    # --- before loading: what belongs where ---------------------------------------------------

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called with the map that was given, and with the one that transformers infers."""
        if self.quantization_config.gpu_memory is not None:
            devices = {*device_map.values()} if isinstance(device_map, dict) else {device_map}
            if len(devices) > 1 or "disk" in devices or isinstance(device_map, str):
                raise ValueError(
                    "device_map must be one device, or None, beside gpu_memory, which says "
                    f"what is where, got {device_map!r}; leave it out"
                )
            self._device = device_of_slots(*devices)
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                "device_map must not have 'disk', got one, or too little memory for an inferred "
                "one: offload to 'cpu' instead, and give it more by max_memory"
            )

    def update_device_map(self, device_map: Any) -> Any:
        """Experts that will be in host memory are read there, and the rest before it moves."""
        return device_map if self._device is None else None

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        checkpoint_files: Any = None,
        **kwargs: Any,
    ) -> None:
        config: Any = self.quantization_config
        gguf, config.gguf = config.gguf, None
        safetensors = checkpoint_files and str(checkpoint_files[0]).endswith(".safetensors")
        if gguf is None and not safetensors:
            raise ValueError(
                f"quantized experts are loaded from safetensors files, got {checkpoint_files}; "
                "convert the checkpoint, or load it plain and call "
                "moe_ops.integrations.transformers.quantize"
            )
        # what reads checkpoints is not imported where none is read
        from moe_ops.integrations.transformers.assignment import Assignment

        if gguf is not None:
            self._assignment = Assignment(
                model, gguf, config.scheme, False, whole=True, plain=True
            )
        else:
            self._assignment = Assignment.of_files(model, checkpoint_files, config)

    def update_weight_conversions(
        self, weight_conversions: list, model: PreTrainedModel | None = None
    ) -> list:
        """Replace the conversions of expert weights, and check the whole checkpoint's headers."""
        conversions = self._assigned.assign(weight_conversions)
        if self._device is not None:
            moving.check_scheme(self._assigned.quantized_to)
            self._budget(self._assigned.model, self._device).check_host(loaded=False)
        return conversions

    def _budget(self, model: nn.Module, device: torch.device) -> Budget:
        """That of a model which is loaded, or while it is."""
        gpu_memory, assigned = self.quantization_config.gpu_memory, self._assignment
        assert gpu_memory is not None

        def bytes_of(layer: Layer, name: str) -> float:
            if assigned is None:
                return layer.weight(name).nbytes
            target, parameter = layer.parameter_name(name), getattr(layer.owner, name)
            return assigned.element_bytes(target, parameter) * parameter.numel()

        layers = layers_of.find(model)
        for layer in layers:
            moving.check(layer, loaded=assigned is None)
        return plan(model, layers, gpu_memory, device, bytes_of)

    # --- while loading ------------------------------------------------------------------------

    def place(self, model: nn.Module, target: str, tensors: dict[str, Any]) -> None:
        """Read a parameter and set it. ``tensors``: what transformers would call to read each
        itself.
        """
        entries = self._assigned.files.entries  # without those that the index does not name
        module, name = model.get_submodule(target.rpartition(".")[0]), target.rpartition(".")[2]
        old = getattr(module, name)
        if sharding.is_sharded(old):
            device = old.device_mesh.device_type
        else:
            smallest = min(tensors.keys() & entries.keys(), key=lambda n: entries[n].bytes)
            device = tensors[smallest]().device  # transformers' device map, applied
        value = self._assigned.read(target, device)
        if target in self._assigned.layers:
            self._assigned.layers[target][0].set_weight(name, value)
        else:
            if sharding.is_sharded(old):
                from transformers.distributed.sharding_utils import DtensorShardOperation

                value = DtensorShardOperation(old).shard_tensor(value)
            setattr(module, name, nn.Parameter(sharding.sharded_like(value, old)))
        getattr(module, name)._is_hf_initialized = True

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """True for experts that one of transformers' own conversions puts together."""
        assigned = self._assigned
        in_hand = param_name in assigned.weights or param_name in assigned.stored
        return param_name in assigned.layers and not in_hand and bool(assigned.scheme)

    def get_quantize_ops(self) -> _QuantizeConverted:
        return _QuantizeConverted(self._assigned)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of one element, for transformers' device maps."""
        if self._assignment is None:
            return element_bytes(param)
        return self._assignment.element_bytes(param_name, param)

    # --- after loading, and saving ------------------------------------------------------------

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        self._assignment = None
        layers = layers_of.find(model)
        if any(isinstance(x.weight(name), ExpertTensor) for x in layers for name in x.weights):
            mark_quantized(model, self.quantization_config)
        else:  # they were plain beside quantized matrices, which are plain now
            self.remove_quantization_config(model)
        if self._device is not None:
            attach_layers(model)  # by what runs where the weights are now
            moving.move(model, layers, self._budget(model, self._device))
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
        return flatten_natural(state_with_whole_experts(model))

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

    def __init__(self, assigned: Assignment) -> None:
        self.assigned = assigned

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
        layer, name = self.assigned.layers[full_layer_name]
        old = getattr(layer.owner, name)
        value = sharding.sharded_like(value, old)  # of this process's experts alone
        setattr(layer.owner, name, nn.Parameter(value, requires_grad=False))
        natural = layer.natural_weight(name).contiguous()
        check_quantizable(full_layer_name, natural)
        assert self.assigned.scheme is not None
        layer.set_weight(name, quantize(natural, self.assigned.scheme))
        # transformers puts it into the DTensor
        return {full_layer_name: nn.Parameter(layer.weight(name), requires_grad=False)}


def _leave_out_what_is_ours() -> None:
    """Patch transformers' loop over the tensors of a checkpoint, which matches the name of each
    with all conversions: give it one tensor of each parameter that our quantizer reads. A version
    that has no such function loops over all of them, and the model is the same.
    """
    name = "convert_and_load_state_dict_in_model"
    load = getattr(modeling_utils, name, None)
    if load is None:
        return

    @functools.wraps(load)
    def without_ours(*args: Any, **kwargs: Any) -> Any:
        quantizer = getattr(kwargs.get("load_config"), "hf_quantizer", None)
        assigned = quantizer._assignment if isinstance(quantizer, MoeOpsQuantizer) else None
        if assigned is not None and "state_dict" in kwargs:
            tensors = kwargs["state_dict"].items()
            kwargs["state_dict"] = {n: t for n, t in tensors if n not in assigned.ours}
        return load(*args, **kwargs)

    setattr(modeling_utils, name, without_ours)


_leave_out_what_is_ours()

_MARKS = ("hf_quantizer", "is_quantized", "quantization_method", "_weight_conversions")


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


def natural_rows(weight: ExpertTensor) -> Any:
    """A quantized weight as (E, rows, columns) in the natural layout."""
    transposed = weight.weight_layout == TRANSPOSED
    return weight.transpose(-2, -1) if transposed else in_natural_layout(weight)


def state_with_whole_experts(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict, in which quantized weights that are sharded are whole on the rank that
    writes, and absent from the others. Sharded plain tensors are left to transformers.
    """
    state = model.state_dict()
    for name, t in list(state.items()):
        if sharding.is_sharded(t) and isinstance(t.to_local(), ExpertTensor):
            whole = sharding.gathered(t)  # by all ranks
            if model.should_save_on_this_rank(True):
                state[name] = whole.cpu()
            else:
                del state[name]
    return state


def flatten_natural(state_dict: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """`flatten` of quantized weights in their natural layout; those that layers share once for
    each, as transformers would not know the names of their parts.
    """
    natural, seen = dict(state_dict), set[int]()
    for name, t in state_dict.items():
        if isinstance(t, ExpertTensor):
            weight = natural_rows(t)
            address = weight.qdata.data_ptr()
            natural[name] = weight.clone() if address in seen else weight
            seen.add(address)
    return flatten(natural)
