"""Expert weights of a checkpoint, stacked and quantized as its files hold them.

    checkpoint = Checkpoint(folder)
    w13 = checkpoint.expert_weight("model.layers.0.mlp.experts", ("gate_proj", "up_proj"))
    w2 = checkpoint.expert_weight("model.layers.0.mlp.experts", ("down_proj",))

Dimensions: E experts, N rows, K columns; I rows of gate and of up.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.integrations.checkpoints import files, floats, reading
from moe_ops.integrations.checkpoints.common import (
    FLOATS,
    VALUES_ONLY,
    require,
    shape_of,
    shown,
)
from moe_ops.integrations.checkpoints.compressed_tensors import check_transforms
from moe_ops.integrations.checkpoints.configs import config_for
from moe_ops.integrations.checkpoints.formats import (
    ALIASES,
    FACTORS,
    ROLES,
    Format,
    Matrix,
    format_of,
)
from moe_ops.integrations.checkpoints.reading import Piece
from moe_ops.integrations.checkpoints.stacks import Parts, Stack, kept
from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.tensors import from_quantized, quantize

Source = dict[str, str]  # role -> name of a tensor in the files
BIAS = "bias"  # no part of a weight
LOADING = "loading experts"
_BESIDE = 2**26  # bytes of what is converted at a time
# fp8 with a scale for a matrix -> the same values and activations with one for each row
BY_ROWS = {
    "fp8_tensor": "fp8_channel_tensor",
    "fp8_tensor_static": "fp8_channel_tensor_static",
    "fp8_w8a16:tensor": "fp8_w8a16:channel",
}
_ELEMENTS = ("weight", "weight_packed", "qweight", "blocks", "_weight_qdata")


@dataclass(frozen=True)
class Weight:
    """Where one expert weight (E, N, K) comes from, checked against the files' headers."""

    name: str
    sources: tuple[tuple[Source, ...], ...]  # [projection][expert]; one "expert" if stacked
    format: Format | None  # None for plain weights
    scheme: str  # "" for plain weights
    shape: tuple[int, int, int]
    stacked: bool  # the files hold (E, N, K), not E matrices
    columns_first: bool = False  # a stack lies as (E, K, N)
    values_only: bool = False  # it is read for its values: activations stay as they are
    in_turn: bool = False  # rows of the projections take turns, of each expert by itself
    ids: range | None = None  # read these experts alone; None: all

    @property
    def experts(self) -> range:
        """Ids of the experts that are read, in their order."""
        return range(self.shape[0]) if self.ids is None else self.ids

    def of(self, ids: range) -> Weight:
        """The same weight, of which these experts alone are read.

        Raises:
            ValueError: they are no range of ids, or none, or some that the weight does not have.
        """
        count = self.shape[0]
        if not isinstance(ids, range) or not ids or min(ids) < 0 or max(ids) >= count:
            raise ValueError(
                f"expert_ids must be a range of ids in 0..{count - 1}, the experts of "
                f"{self.name}, got {ids!r}"
            )
        return replace(self, ids=ids)


class Checkpoint:
    """A checkpoint of safetensors files.

    Args:
        path: its folder, whose ``model.safetensors.index.json`` says which files and tensors
            count; an index; or one of its files or a list of them.
        quantization_config: what config.json says of the quantization, as a dict; read from the
            folder by default. {}: nothing, so that the tensors' names, dtypes and shapes alone
            tell.

    Raises:
        ValueError: there are no files, one is missing or damaged, or two hold the same tensor.
    """

    def __init__(self, path: Any, quantization_config: dict[str, Any] | None = None):
        self.files = files.TensorFiles(path)
        folder = self.files.files[0].parent
        self._count = files.number_of_experts(folder) if self.files.is_whole else None
        self._said_in = ""
        if quantization_config is None:
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
            experts: what the names of its tensors begin with, e.g. "model.layers.0.mlp.experts".
            projections: what follows the expert's number, in the order in which their rows are
                stacked: ("gate_proj", "up_proj") for w13, ("down_proj",) for w2; or one name of a
                stacked weight, e.g. ("gate_up_proj",) for ``gate_up_proj_blocks``.
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
        weight = self.find(experts, projections)
        weight = weight if expert_ids is None else weight.of(expert_ids)
        return self.load(weight, scheme, device=device)

    def find(self, experts: str, projections: tuple[str, ...]) -> Weight:
        """Where a weight is; arguments and errors as for `expert_weight`."""
        name = f"{experts}.{'+'.join(projections)}"
        stacked: list[Source] = [{} for _ in projections]
        single: list[dict[int, Source]] = [{} for _ in projections]
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
                if role == BIAS:
                    continue
                source = stacked[i] if number is None else single[i].setdefault(int(number), {})
                add_tensor(source, role, tensor, name)
        joined = f"{experts}.gate_up_proj_scale_inv"
        if projections == ("gate_proj", "up_proj") and joined in self.files.entries:
            add_tensor(stacked[0], "weight_scale_inv", joined, name)
        self.share_scales(name, stacked, single)
        sources = experts_of(name, stacked, single)
        routed = experts.endswith(".experts") and single[0]
        if self._count and routed and len(routed) < self._count:
            raise ValueError(
                f"{name} must have {self._count} experts, as "
                f"{self.files.files[0].parent / 'config.json'} says, got experts 0 to "
                f"{len(single[0]) - 1}; download the files of the others"
            )
        return self.plan(name, sources)

    def plan(
        self,
        name: str,
        sources: tuple,
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
        rows = 0
        for projection, described in zip(sources, matrices, strict=True):
            for source, (found, matrix) in zip(projection, described, strict=True):
                if (found, matrix.scheme, matrix.columns) != (form, first.scheme, first.columns):
                    raise ValueError(
                        f"{self._where(source)} must be stored like {self._where(sources[0][0])}, "
                        f"{_storage(first)}, got {_storage(matrix)}"
                    )
                if (matrix.rows, matrix.batch) != (described[0][1].rows, first.batch):
                    raise ValueError(
                        f"{self._where(source)} must have {described[0][1].rows} rows like the "
                        f"other experts', got {matrix.rows}"
                    )
            rows += described[0][1].rows
            if in_turn and first.scheme.startswith("fp8_block"):
                raise ValueError(
                    f"{self._where(projection[0])} must not have scales that 128 rows share: in "
                    f"{name} the rows of gate and up take turns"
                )
            if (
                len(sources) > 1
                and first.scheme.startswith("fp8_block")
                and described[0][1].rows % 128
            ):
                raise ValueError(
                    f"{self._where(projection[0])} must have a multiple of 128 rows to be "
                    "stacked with another projection, because 128 rows share a scale, got "
                    f"{described[0][1].rows}"
                )
        if first.scheme.startswith(("int4", "int8_w8a16")):  # which keep their scales' dtype
            self._require_one_dtype(sources, "scales", "weight_scale")
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
        name = scheme_for(weight, scheme)
        if not name:
            self._require_one_dtype(weight.sources, "weight")
        parts = self._parts(weight, name, device)
        if not name:
            return parts["plain"] if dtype is None else parts["plain"].to(dtype)
        activation = get_scheme(name).activation
        if activation is not None and (activation.static or activation.global_scale):
            parts |= self._activation_scale(weight, device)
        try:
            tensor = from_quantized(name, **parts)
        except ValueError as error:
            self._check_finite(weight)
            raise ValueError(
                f"{weight.name} of {self._where(weight.sources[0][0])}: {error}"
            ) from error
        return tensor if dtype is None else tensor.to(dtype)

    def _parts(self, weight: Weight, scheme: str, device: Any) -> Parts:
        """The tensors (E, ...) of a weight, by name; "plain" is one without a scheme."""
        quantizing = scheme and weight.format is None
        if not weight.stacked and not quantizing:
            return {n: t.to(device) for n, t in self._single(weight, scheme).items()}
        if weight.format is not None:
            return self._stack(weight, scheme, device)
        stack = Stack(len(weight.experts), weight.in_turn)
        rows = self._rows(weight, device)
        each = (
            self._quantized(weight, scheme, rows)
            if quantizing
            else ({"plain": matrix.unsqueeze(0)} for matrix in rows)
        )
        for e, parts in enumerate(environment.progress_bar(each, LOADING, stack.count)):
            stack.put(slice(e, e + 1), [parts])
        return stack.tensors

    def _single(self, weight: Weight, scheme: str) -> Parts:
        """Experts that lie one by one, some of them at a time, on the CPU. What needs no
        conversion, as the first expert shows, is read into its place.
        """
        experts = [tuple([projection[e] for projection in weight.sources]) for e in weight.experts]
        stored = [self._stored(weight, expert) for expert in experts]
        stack = Stack(len(experts), weight.in_turn)
        by_rows = self._scale_of_rows(weight, scheme)
        # of each projection: role -> name of what needs no conversion
        unchanged: list[dict[str, str]] = [{} for _ in weight.sources]
        begin = 0
        while begin < len(experts):
            places: list[Parts] = [{} for _ in unchanged]
            most = 1
            if begin:
                if stored[begin] == stored[0]:
                    places = _roles(stack.places(slice(begin, None)), unchanged)
                most = _at_a_time(stored[begin], places)
            alike = itertools.takewhile(stored[begin].__eq__, stored[begin : begin + most])
            some = slice(begin, begin + len([*alike]))
            sources = [*zip(*experts[some], strict=True)]  # of each projection
            tensors = self._read_alike(sources, places)
            converted = [
                self._convert(weight, *read) for read in zip(sources, tensors, strict=True)
            ]
            if not begin:
                unchanged = [kept(*pair) for pair in zip(tensors, converted, strict=True)]
            parts = [_by_rows(p, by_rows) for p in converted]
            stack.put(some, self._checked(parts, experts[some]))
            begin = some.stop
        return stack.tensors

    def _stored(self, weight: Weight, expert: tuple[Source, ...]) -> list:
        """How an expert is stored: those that are stored alike can be converted together."""
        entries = self.files.entries
        return [
            (
                {
                    role: (entries[tensor].dtype, entries[tensor].shape)
                    for role, tensor in source.items()
                    if role != FACTORS
                },
                weight.format and self._config(weight.format, source, weight.values_only),
            )
            for source in expert
        ]

    def _read_alike(self, sources: list[tuple[Source, ...]], places: list[Parts]) -> list[Parts]:
        """The tensors (C, ...) of C matrices of each projection, by role, in these places if they
        have some.
        """
        tensors: list[Parts] = [{} for _ in sources]
        pieces: list[Piece] = []
        for found, matrices, place in zip(tensors, sources, places, strict=True):
            for role, tensor in matrices[0].items():
                if role == FACTORS:
                    continue
                entry = self.files.entries[tensor]
                shape = (len(matrices), *entry.shape)
                if role in place:
                    found[role] = place[role][: shape[0]].view(entry.dtype).view(shape)
                else:
                    found[role] = reading.empty(shape, entry.dtype)
                pieces += self.files.pieces((source[role] for source in matrices), found[role])
        reading.read_pieces(pieces)
        return tensors

    def _stack(self, weight: Weight, scheme: str, device: Any) -> Parts:
        """The quantized matrices of a stack."""
        by_rows = self._scale_of_rows(weight, scheme)
        first = tuple(projection[0] for projection in weight.sources)
        count, parts = len(weight.experts), []
        for source in first:
            found = self._convert(weight, (source,), self._read(source, device, weight))
            found = {n: t if t.dim() else t.expand(count) for n, t in found.items()}
            if weight.columns_first:
                found["qdata"] = found["qdata"].mT
            parts.append(_by_rows(found, by_rows))
        stack = Stack(count, weight.in_turn)
        stack.put(slice(0, count), self._checked(parts, [first]))
        return stack.tensors

    def _scale_of_rows(self, weight: Weight, scheme: str) -> str:
        """Which scale each row gets, also where the files have one for a matrix; "" for none."""
        desc = get_scheme(scheme).weight
        if desc is not None and desc.group.is_row:
            return "scale"
        differ = desc is not None and desc.global_scale and self.scales_differ(weight)
        return "global_scale" if differ else ""

    def scales_differ(self, weight: Weight) -> bool:
        """Whether projections of any expert, read or not, have different scales for the whole of a
        matrix, of fp8 or NVFP4; nothing but the scales is read.
        """
        roles = ("weight_scale",) if weight.scheme in BY_ROWS else floats.GLOBAL_SCALES
        role = next((role for role in roles if role in weight.sources[0][0]), None)
        if role is None or len(weight.sources) == 1:
            return False
        experts = [*zip(*weight.sources, strict=True)]
        scales = iter(self.files.read_all(source[role] for expert in experts for source in expert))
        for first, *others in zip(*[scales] * len(weight.sources), strict=True):
            if any(not torch.equal(other.float(), first.float()) for other in others):
                return True
        return False

    def _activation_scale(self, weight: Weight, device: Any) -> dict[str, Tensor]:
        """One for all experts, read or not: the largest any of them saw."""
        found = [
            (source, role)
            for projection in weight.sources
            for source in projection
            for role in source.keys() & set(floats.ACTIVATION_SCALES)
        ]
        values = self.files.read_all(source[role] for source, role in found)
        scales = []
        for (source, role), value in zip(found, values, strict=True):
            scale = floats.activation_scale(role, value)
            if not scale.isfinite():
                raise ValueError(
                    f"{self._where(source)}: activation scale must be finite, got NaN or Inf"
                )
            scales.append(scale)
        return {"activation_scale": torch.stack(scales).amax().to(device)} if scales else {}

    def _rows(self, weight: Weight, device: Any) -> Iterator[Tensor]:
        """The plain (N, K) matrices of a weight, one expert at a time."""
        if weight.stacked:
            stacks = [
                self._read(projection[0], device, weight)["weight"]
                for projection in weight.sources
            ]
            stacks = [t.view(len(weight.experts), -1, t.shape[-1]) for t in stacks]  # if joined
            for parts in zip(*stacks, strict=True):
                rows = parts[0] if len(parts) == 1 else torch.cat(parts)
                yield rows.T if weight.columns_first else rows
            return
        for e in weight.experts:
            yield join_rows(
                [self._read(p[e], device)["weight"] for p in weight.sources], weight.in_turn
            )

    def _quantized(
        self, weight: Weight, scheme: str, matrices: Iterable[Tensor]
    ) -> Iterator[Parts]:
        """Plain matrices of a weight, quantized one by one."""
        for e, rows in zip(weight.experts, matrices, strict=True):
            source = weight.sources[0][0 if weight.stacked else e]
            try:
                tensor = quantize(rows.unsqueeze(0), scheme)
            except ValueError as error:
                raise ValueError(f"{self._where(source)}, expert {e}: {error}") from error
            yield {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}

    def _convert(self, weight: Weight, sources: Sequence[Source], tensors: Parts) -> Parts:
        """What the tensors of a matrix, or of a stack, become; several matrices are stacked."""
        if weight.format is None:
            return {"plain": tensors["weight"]}
        try:
            return weight.format.convert(
                tensors, self._config(weight.format, sources[0], weight.values_only)
            )
        except ValueError as error:
            for i, source in enumerate(sources if len(sources) > 1 else ()):
                self._convert(weight, (source,), {r: t[i] for r, t in tensors.items()})
            raise ValueError(f"{self._where(sources[0])}: {error}") from error

    def _check_finite(self, weight: Weight) -> None:
        """Raise for the first matrix whose scales are not all finite; plain weights have none."""
        matrices = [projection[e] for projection in weight.sources for e in range(len(projection))]
        for source in matrices if weight.format else ():
            for name, t in self._convert(weight, (source,), self._read(source, "cpu")).items():
                if name == "qdata" or not t.dtype.is_floating_point:
                    continue
                if not t.float().isfinite().all():
                    raise ValueError(
                        f"{self._where(source)}: {name.replace('_', ' ')} must be finite, got "
                        "NaN or Inf"
                    )

    def _checked(
        self, projections: list[Parts], experts: Sequence[tuple[Source, ...]]
    ) -> list[Parts]:
        """The matrices of these experts, or of a stack, by projection, if those that become one
        agree in the numbers that it has once.
        """
        for name, t in projections[0].items():
            if t.dim() > 1:
                continue
            numbers = torch.stack([parts[name] for parts in projections], -1)
            differ = (numbers != numbers[:, :1]).any(1).nonzero()
            if len(differ):
                e = int(differ[0])
                source = experts[min(e, len(experts) - 1)][0]
                values = ", ".join(f"{number:.9g}" for number in numbers[e].tolist())
                raise ValueError(
                    f"{self._where(source)} must have the {name.replace('_', ' ')} of the "
                    "other projections of its expert, because both are one matrix here, got "
                    f"{values}; quantize again with one scale for gate and up, or for fp8 give a "
                    "scheme with a scale for each row, such as 'fp8_channel_tensor_static'"
                )
        return projections

    def share_scales(
        self, name: str, stacked: list[Source], single: list[dict[int, Source]]
    ) -> None:
        """Give each expert its part of the stacked scales of fine-grained fp8.

        transformers saves the elements of such experts one by one, ``experts.3.up_proj.weight``,
        and the scales as its model has them: ``experts.gate_up_proj_scale_inv``, one block for
        128 rows, those of gate before those of up.
        """
        count, entries = len(single[0]), self.files.entries
        weights = [
            [entries.get(p.get(e, {}).get("weight", "")) for e in range(count)] for p in single
        ]
        found = [[w for w in projection if w and len(w.shape) == 2] for projection in weights]
        complete = all(len(p) == len(f) == count > 0 for p, f in zip(single, found, strict=True))
        if not complete or [*stacked[0]] != ["weight_scale_inv"] or any(stacked[1:]):
            return
        entry = entries[stacked[0].pop("weight_scale_inv")]
        rows = [-(-projection[0].shape[0] // 128) for projection in found]
        want = (count, sum(rows), -(-found[0][0].shape[1] // 128))
        if entry.shape != want:
            raise ValueError(
                f"{entry} must have the scales of {name}, whose experts are stored one by one, "
                f"with shape {want}, got {entry.shape}"
            )
        begin = entry.begin
        for e in range(count):
            for projection, blocks in zip(single, rows, strict=True):
                part = replace(
                    entry, name=f"{entry.name}[{e}]", shape=(blocks, want[2]), begin=begin
                )
                key = f"{begin} of {entry}"  # the name of no tensor
                entries[key] = part
                add_tensor(projection[e], "weight_scale_inv", key, name)
                begin += part.bytes

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

    def _require_one_dtype(self, sources: tuple, *roles: str) -> None:
        """Raise ValueError where tensors would be rounded to the dtype of the first expert's."""
        entries, first = self.files.entries, sources[0][0]
        for source in (source for projection in sources for source in projection):
            for role in source.keys() & set(roles):
                entry, like = entries[source[role]], entries[first[role]]
                if entry.dtype != like.dtype:
                    raise ValueError(
                        f"{entry} must be {like.dtype} like {like}, because the experts become "
                        f"one tensor, got {entry.dtype}"
                    )

    def _config(self, form: Format, source: Source, values_only: bool) -> dict[str, Any]:
        config: dict[str, Any] = {}
        if not form.tells:
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

    def _said(self, function: Callable, *arguments: str, **options: str) -> Any:
        """What a function finds in the quantization_config; its errors name the file."""
        try:
            return function(self.config, *arguments, **options)
        except ValueError as error:
            raise ValueError(f"{self._said_in}{error}") from error

    def _read(self, source: Source, device: Any, weight: Weight | None = None) -> Parts:
        """The tensors of a matrix; of the weight's experts, if it is a stack."""
        source = {role: tensor for role, tensor in source.items() if role != FACTORS}
        if weight is None or not weight.stacked or weight.ids is None:
            return {role: self.files.read(tensor, device) for role, tensor in source.items()}
        E, found = weight.shape[0], {}
        for role, tensor in source.items():
            # a plain weight may have the experts' rows behind one another
            shape = self.files.entries[tensor].shape
            cut = weight.format is None or (shape[:1] == (E,) and role != "weight_shape")
            pieces = (E, weight.ids) if cut else ()
            found[role] = self.files.read(tensor, device, *pieces)
        return found

    def _where(self, source: Source) -> str:
        """The tensor that holds the elements, and its file."""
        elements = [role for role in _ELEMENTS if role in source]
        return str(
            self.files.entries[source[elements[0]] if elements else next(iter(source.values()))]
        )

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


def _by_rows(parts: Parts, name: str) -> Parts:
    """Matrices (C, N, K) with a scale of this name for each row, if each has one for all."""
    if not name or parts[name].dim() > 1:
        return parts
    count, rows = parts["qdata"].shape[:2]
    return parts | {name: parts[name].view(-1, 1, 1).expand(count, rows, 1)}


def _roles(places: list[Parts], unchanged: list[dict[str, str]]) -> list[Parts]:
    """Where tensors of each role can be read, of each projection: places whose rows follow each
    other.
    """
    return [
        {role: parts[name] for role, name in names.items() if parts[name][0].is_contiguous()}
        for parts, names in zip(places, unchanged, strict=True)
    ]


def _at_a_time(stored: list, places: list[Parts]) -> int:
    """How many experts that are stored so are read at a time: those that fill _BESIDE bytes of
    memory beside the weight.
    """
    count = sum(
        math.prod(shape) * dtype.itemsize
        for (tensors, _), into in zip(stored, places, strict=True)
        for role, (dtype, shape) in tensors.items()
        if role not in into
    )
    return max(1, _BESIDE // max(1, count))


def join_rows(parts: list[Tensor], in_turn: bool) -> Tensor:
    """The rows of an expert's projections, one after the other or in turn."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts, 1).flatten(0, 1) if in_turn else torch.cat(parts)


def _storage(matrix: Matrix) -> str:
    return f"{matrix.scheme or 'plain'} with {matrix.columns} columns"


def role_of(text: str) -> str:
    """The role at the end of a tensor's name: "" is "weight", "scale_inv" "weight_scale_inv"."""
    if text in ("", "weight"):
        return "weight"
    if text in ROLES or text in ALIASES:
        return ALIASES.get(text, text)
    return f"weight_{text}" if f"weight_{text}" in ROLES else ""


def add_tensor(source: Source, role: str, tensor: str, name: str) -> None:
    """Add a tensor to those of one matrix of the weight ``name``, or raise ValueError."""
    if role in source:
        raise ValueError(
            f"{tensor} must not be beside {source[role]}, because both are the {role} of {name}"
        )
    source[role] = tensor


def module_of(tensor: str, role: str) -> str:
    """The matrix that a tensor of this role belongs to: its name without what names the role."""
    texts = [role, role.removeprefix("weight_"), *(a for a, r in ALIASES.items() if r == role)]
    for end in (separator + text for text in texts for separator in "._"):
        if tensor.endswith(end):
            return tensor.removesuffix(end)
    return tensor


def experts_of(name: str, stacked: list[Source], single: list[dict[int, Source]]) -> tuple:
    """[projection][expert] of the tensors found for a weight.

    Raises:
        ValueError: some experts are missing, or there are stacks beside single ones.
    """
    if any(stacked) and any(single):
        one = next(iter(next(filter(None, stacked)).values()))
        raise ValueError(
            f"{name} must be stored as stacks or expert by expert, got both, one of them {one}"
        )
    if all(stacked):
        return tuple((source,) for source in stacked)
    numbers = sorted(set().union(*single))
    if not numbers:
        raise ValueError(f"{name} must be in the checkpoint, got no tensor of its name")
    for projection in single:
        missing = sorted(set(range(numbers[-1] + 1)) - set(projection))
        if missing:
            raise ValueError(
                f"{name} must have all projections of experts 0 to {numbers[-1]}, got none of "
                f"experts {missing[:8]} for one of them"
            )
    return tuple(tuple(projection[e] for e in numbers) for projection in single)


def scheme_for(weight: Weight, scheme: str | QuantScheme | None) -> str:
    """The scheme a weight gets: its own, or the one asked for where its storage is the same.

    Raises:
        ValueError: it is quantized already, in another format.
    """
    if scheme is None:
        return weight.scheme
    wanted = get_scheme(scheme)
    if not weight.scheme:
        return wanted.name
    own = get_scheme(weight.scheme).quantized_weight
    asked = wanted.quantized_weight
    by_rows = get_scheme(BY_ROWS.get(weight.scheme, weight.scheme)).quantized_weight
    stored = [vars(found) | {"scale_rule": ""} for found in (own, by_rows)]
    if vars(asked) | {"scale_rule": ""} not in stored:
        raise ValueError(
            f"scheme must be one whose weights are stored as those of {weight.scheme!r}, in which "
            f"{weight.name} is quantized already, got {wanted.name!r}; leave scheme out"
        )
    return wanted.name
