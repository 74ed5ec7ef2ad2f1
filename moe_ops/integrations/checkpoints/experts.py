"""Expert weights of a checkpoint, stacked and quantized as its files hold them.

    checkpoint = Checkpoint(folder)
    w13 = checkpoint.expert_weight("model.layers.0.mlp.experts", ("gate_proj", "up_proj"))
    w2 = checkpoint.expert_weight("model.layers.0.mlp.experts", ("down_proj",))

Dimensions: E experts, N rows, K columns; I rows of gate and of up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_ops.integrations.checkpoints import bitsandbytes, files
from moe_ops.integrations.checkpoints.common import (
    FLOATS,
    VALUES_ONLY,
    Config,
    Matrix,
    require,
    shape_of,
    shown,
)
from moe_ops.integrations.checkpoints.compressed_tensors import check_transforms
from moe_ops.integrations.checkpoints.configs import config_for
from moe_ops.integrations.checkpoints.formats import FACTORS, ROLES, Format, format_of
from moe_ops.integrations.checkpoints.gguf import GgufFiles, is_gguf
from moe_ops.integrations.checkpoints.json_files import parse_object
from moe_ops.integrations.checkpoints.loading import Loader
from moe_ops.integrations.checkpoints.weights import (
    BIAS,
    Matrices,
    Source,
    Sources,
    Weight,
    elements_of,
    module_of,
    require_one_dtype,
    role_of,
)
from moe_ops.schemes import QuantScheme


class Checkpoint:
    """A checkpoint of safetensors files, or a GGUF file.

    Args:
        path: its folder, whose ``model.safetensors.index.json`` says which files and tensors
            count; an index; or one of its files or a list of them. A ``.gguf`` file, of one that
            is split any part.
        quantization_config: what config.json says of the quantization, as a dict; read from the
            folder by default. {}: nothing, so that the tensors' names, dtypes and shapes alone
            tell.

    Raises:
        ValueError: there are no files, one is missing or damaged, or two hold the same tensor.
    """

    def __init__(self, path: Any, quantization_config: dict[str, Any] | None = None):
        self.files = GgufFiles(path) if is_gguf(path) else files.TensorFiles(path)
        folder = self.files.files[0].parent
        self._count = files.number_of_experts(folder) if self.files.is_whole else None
        self._said_in = ""
        if quantization_config is None and is_gguf(path):
            quantization_config = {}
        elif quantization_config is None:
            quantization_config, file = files.quantization_config(folder)
            self._said_in = f"{file}: "
        if not isinstance(quantization_config, dict):
            raise ValueError(f"quantization_config must be a dict, got {quantization_config!r}")
        self.config = quantization_config
        self.others: dict[str, tuple[str, ...]] = {}  # matrix -> its names in the model
        self._configs: dict[
            tuple[str, ...], dict[str, Any]
        ] = {}  # method, names -> a matrix's part

    def expert_weight(
        self,
        experts: str,
        projections: tuple[str, ...] = ("gate_proj", "up_proj"),
        scheme: str | QuantScheme | None = None,
        *,
        expert_ids: range | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """One weight of a layer's experts, as `moe_ops.fused_experts` takes it.

        Args:
            experts: what the names of its tensors begin with, e.g. "model.layers.0.mlp.experts",
                in a GGUF file "blk.0".
            projections: what follows the expert's number, in the order in which their rows are
                stacked: ("gate_proj", "up_proj") for w13, ("down_proj",) for w2; or one name of a
                stacked weight, e.g. ("gate_up_proj",) for ``gate_up_proj_blocks``. In a GGUF
                file ("ffn_gate_exps", "ffn_up_exps") and ("ffn_down_exps",).
            scheme: of a plain checkpoint, how to quantize it (None: not at all). Of a quantized
                one, the scheme its weights are used with, e.g. "nvfp4_w4a16" instead of "nvfp4".
            expert_ids: which experts to read, such as `Placement.experts_of(rank)`, in their
                order; None: all. Of the others the files' headers are checked, and nothing is read
                but static scales of activations, of which all experts share the largest.
            device: where the weight is made.

        Returns:
            (E, N, K), with expert_ids of those E = len(expert_ids): an ExpertTensor or a plain
            tensor. Biases (``up_proj.bias``, ``gate_up_proj_bias``) are not part of it.

        Raises:
            ValueError: tensors are missing, contradict each other or the quantization_config, or
                are not finite; one beside the weight, or a field of the configuration, is of no
                known use; or expert_ids are no range, or of experts that are not there. The
                message names tensor and file.
        """
        if isinstance(projections, str):
            raise ValueError(f"projections must be a tuple of names, got {projections!r}")
        weight = self.find(experts, projections)
        weight = weight if expert_ids is None else weight.of(expert_ids)
        return self.load(weight, scheme, device=device)

    def find(self, experts: str, projections: tuple[str, ...]) -> Weight:
        """Where a weight is; arguments and errors as for `expert_weight`."""
        name = f"{experts}.{'+'.join(projections)}"
        found = Sources(name, len(projections))
        for tensor in (*self.files.entries, *self.files.unknown):
            if not tensor.startswith(f"{experts}."):
                continue
            for i, projection in enumerate(projections):
                match = re.fullmatch(
                    rf"(?:(\d+)\.)?{re.escape(projection)}(?:(\.)(.+)|_([^.]+))?",
                    tensor.removeprefix(f"{experts}."),
                )
                if match is None:
                    continue
                number, _, text, joined = match.groups()
                whole = f"weight_{joined}"  # "scale" of gate_up_proj_scale
                role = whole if whole in ROLES else role_of(text or joined or "")
                role = role or text or joined
                if role != BIAS:
                    found.add(i, None if number is None else int(number), role, tensor)
        joined = f"{experts}.gate_up_proj_scale_inv"
        if projections == ("gate_proj", "up_proj") and joined in self.files.entries:
            found.add(0, None, "weight_scale_inv", joined)
        found.share_scales(self.files.entries)
        sources, count = found.matrices(), len(found.single[0])
        if self._count and experts.endswith(".experts") and 0 < count < self._count:
            raise ValueError(
                f"{name} must have {self._count} experts, as "
                f"{self.files.files[0].parent / 'config.json'} says, got experts 0 to "
                f"{count - 1}; download the files of the others"
            )
        return self.plan(name, sources)

    def plan(
        self,
        name: str,
        sources: Matrices,
        *,
        columns_first: bool = False,
        joined: int = 0,
        values_only: bool = False,
        in_turn: bool = False,
    ) -> Weight:
        """Check one weight against the files' headers: nothing of its data is read.

        Args:
            name: for messages.
            sources: `[projection][expert]`, as in `Weight`.
            columns_first: the model's stack is (E, K, N), and so are plain weights and those of
                formats that leave it so.
            joined: a plain matrix holds this many experts, one after the other: (E * N, K) or,
                with columns_first, (E * K, N).
            values_only: it will be dequantized, so that what the configuration says of
                activations does not matter.
            in_turn: rows of the projections take turns, the first of gate before the first of up.
        """
        matrices = [
            [self._describe(source, values_only) for source in projection]
            for projection in sources
        ]
        form, first = matrices[0][0]
        rows, shared = 0, first.scheme.startswith("fp8_block")
        for projection, described in zip(sources, matrices, strict=True):
            own = described[0][1].rows
            for source, (found, matrix) in zip(projection, described, strict=True):
                if (found, matrix.scheme, matrix.columns) != (form, first.scheme, first.columns):
                    raise ValueError(
                        f"{self._where(source)} must be stored like {self._where(sources[0][0])}, "
                        f"{_storage(first)}, got {_storage(matrix)}"
                    )
                if (matrix.rows, matrix.batch) != (own, first.batch):
                    raise ValueError(
                        f"{self._where(source)} must have {own} rows like the other experts', got "
                        f"{matrix.rows}"
                    )
            rows += own
            if shared and in_turn:
                raise ValueError(
                    f"{self._where(projection[0])} must not have scales that 128 rows share: in "
                    f"{name} the rows of gate and up take turns"
                )
            if shared and len(sources) > 1 and own % 128:
                raise ValueError(
                    f"{self._where(projection[0])} must have a multiple of 128 rows to be "
                    f"stacked with another projection, because 128 rows share a scale, got {own}"
                )
        if first.scheme.startswith(("int4", "int8_w8a16")):  # which keep their scales' dtype
            require_one_dtype(sources, self.files.entries, "scales", "weight_scale")
        joined = joined if form is None and not first.batch else 0
        if joined and rows % joined:
            raise ValueError(
                f"{self._where(sources[0][0])} must have a multiple of {joined} rows, one block "
                f"for each expert, got {rows}"
            )
        stacked = bool(first.batch) or joined > 0
        columns_first = columns_first and stacked and (form is None or first.as_model)
        count = first.batch[0] if first.batch else joined or len(sources[0])
        shape = (count, rows // joined if joined else rows, first.columns)
        if columns_first:
            shape = (shape[0], shape[2], shape[1])
        if values_only:  # `matrix` multiplies by the factors
            (source,), *_ = sources
            sources = (({role: t for role, t in source.items() if role != FACTORS},),)
        return Weight(
            name, sources, form, first.scheme, shape, stacked, columns_first, values_only, in_turn
        )

    def load(
        self,
        weight: Weight,
        scheme: str | QuantScheme | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read a weight that `find` or `plan` returned; ``dtype`` is that of the values it stands
        for.
        """
        return self.loader(weight).load(scheme, device, dtype)

    def loader(self, weight: Weight) -> Loader:
        """The Loader of a weight that `find` or `plan` returned."""
        form, alone = weight.format, weight.values_only
        return Loader(self.files, weight, lambda source: self._config(form, source, alone))

    def _describe(self, source: Source, values_only: bool) -> tuple[Format | None, Matrix]:
        for tensor in source.values():
            if tensor in self.files.unknown:
                raise ValueError(
                    f"{tensor} in {self.files.unknown[tensor]} must have a dtype that torch has"
                )
        entries = {role: self.files.entries[tensor] for role, tensor in source.items()}
        factors = entries.pop(FACTORS) if values_only and FACTORS in entries else None
        form = format_of(entries, self._where(source))
        try:
            if form is None:
                self._said(check_transforms)
                dims = () if values_only and len(entries["weight"].shape) > 1 else (2, 3)
                *batch, rows, columns = shape_of(entries, "weight", *dims)
                return None, Matrix("", rows, columns, tuple(batch))
            matrix = form.describe(entries, self._config(form, source, values_only))
            if 0 in (*matrix.batch, matrix.rows, matrix.columns):
                raise ValueError(
                    f"weight must have elements, got {matrix.rows} rows and {matrix.columns} "
                    "columns"
                )
            if factors is not None:
                require({FACTORS: factors}, FACTORS, (matrix.columns,), *FLOATS)
            return form, matrix
        except ValueError as error:
            raise ValueError(f"{self._where(source)}: {error}") from error

    def _config(self, form: Format | None, source: Source, values_only: bool) -> Config:
        config: Config = {}
        if form is not None and form.state:
            config = self._state(source[form.state])
        elif form is not None and not form.tells:
            role, tensor = next(iter(source.items()))
            module = module_of(tensor, role)
            key = (form.method, module, *self.others.get(module, ()))
            if key not in self._configs:  # asked for again when the matrix is read
                self._configs[key] = self._said(config_for, *key[1:], method=form.method)
            config = self._configs[key]
            said = config.get("quant_method")
            if said is not None and form.methods and str(said).lower() not in form.methods:
                raise ValueError(
                    f"{self._said_in}quant_method must be {' or '.join(map(repr, form.methods))} "
                    f"beside tensors of {form.name}, got {shown(said)}; the configuration is of "
                    "other files"
                )
        return config | {VALUES_ONLY: True} if values_only else config

    def _state(self, tensor: str) -> Config:
        """What a tensor of JSON says of its matrix."""
        key = ("", tensor)
        if key not in self._configs:
            where = str(self.files.entries[tensor])
            text = self.files.read(tensor).flatten().view(torch.uint8).numpy().tobytes()
            try:
                found = parse_object(text, where, unique=True)
                self._configs[key] = bitsandbytes.check_state(found)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        return self._configs[key]

    def _said(self, function: Callable, *arguments: str, **options: str) -> Any:
        """The result of a function of the quantization_config; its errors name the file."""
        try:
            return function(self.config, *arguments, **options)
        except ValueError as error:
            raise ValueError(f"{self._said_in}{error}") from error

    def _where(self, source: Source) -> str:
        """The tensor that holds the elements, and its file."""
        return str(elements_of(source, self.files.entries))

    def matrix(self, name: str, source: Source, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        """The values of one quantized matrix (N, K) outside the experts, in ``dtype``."""
        weight = self.plan(name, ((source,),), values_only=True)
        if FACTORS not in source:
            return self.load(weight, device=device, dtype=dtype).dequantize()[0]
        factors = self.files.read(source[FACTORS], device).to(torch.float32)
        if not factors.isfinite().all():
            raise ValueError(f"{self.files.entries[source[FACTORS]]} must be finite")
        values = self.load(weight, device=device, dtype=torch.float32).dequantize()[0]
        return values.mul_(factors).to(dtype)


def _storage(matrix: Matrix) -> str:
    return f"{matrix.scheme or 'plain'} with {matrix.columns} columns"
