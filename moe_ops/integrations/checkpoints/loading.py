"""Reading a weight that was described and checked: its matrices, in the tensors of a scheme.

Dimensions: E experts, C of them that are converted at a time, N rows, K columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.integrations.checkpoints import floats, reading
from moe_ops.integrations.checkpoints.common import Config
from moe_ops.integrations.checkpoints.files import TensorFiles
from moe_ops.integrations.checkpoints.reading import Piece
from moe_ops.integrations.checkpoints.stacks import Parts, Stack, join_rows, kept
from moe_ops.integrations.checkpoints.weights import (
    BY_ROWS,
    Source,
    Weight,
    elements_of,
    require_one_dtype,
    scheme_for,
)
from moe_ops.schemes import QuantScheme, get_scheme
from moe_ops.tensors import from_quantized, quantize

LOADING = "loading experts"
_BESIDE = 2**26  # bytes of what is converted at a time


class Loader:
    """Reads one weight.

    Args:
        files: that hold its tensors.
        weight: checked against their headers.
        config_of: what the configuration says of one of its matrices.
    """

    def __init__(self, files: TensorFiles, weight: Weight, config_of: Callable[[Source], Config]):
        self.files, self.weight, self._config_of = files, weight, config_of

    def load(
        self,
        scheme: str | QuantScheme | None,
        device: torch.device | str,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """The weight; arguments as for `Checkpoint.load`."""
        weight = self.weight
        name = scheme_for(weight, scheme)
        if not name:
            require_one_dtype(weight.sources, self.files.entries, "weight")
        parts = self._parts(name, device)
        if not name:
            return parts["plain"] if dtype is None else parts["plain"].to(dtype)
        activation = get_scheme(name).activation
        if activation is not None and (activation.static or activation.global_scale):
            parts |= self._activation_scale(device)
        try:
            tensor = from_quantized(name, **parts)
        except ValueError as error:
            self._check_finite()
            raise ValueError(
                f"{weight.name} of {self._where(weight.sources[0][0])}: {error}"
            ) from error
        return tensor if dtype is None else tensor.to(dtype)

    def _parts(self, scheme: str, device: Any) -> Parts:
        """The tensors (E, ...) of a weight, by name; "plain" is one without a scheme."""
        weight = self.weight
        quantizing = scheme and weight.format is None
        if not weight.stacked and not quantizing:
            return {n: t.to(device) for n, t in self._single(scheme).items()}
        if weight.format is not None:
            return self._stack(scheme, device)
        stack = Stack(len(weight.experts), weight.in_turn)
        rows = self._rows(device)
        each = (
            self._quantized(scheme, rows)
            if quantizing
            else ({"plain": matrix.unsqueeze(0)} for matrix in rows)
        )
        for e, parts in enumerate(environment.progress_bar(each, LOADING, stack.count)):
            stack.put(slice(e, e + 1), [parts])
        return stack.tensors

    def _single(self, scheme: str) -> Parts:
        """Experts that lie one by one, some of them at a time, on the CPU. What needs no
        conversion, as the first expert shows, is read into its place.
        """
        weight = self.weight
        experts = [tuple([projection[e] for projection in weight.sources]) for e in weight.experts]
        stored = [self._stored(expert) for expert in experts]
        stack = Stack(len(experts), weight.in_turn)
        by_rows = self._scale_of_rows(scheme)
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
            converted = [self._convert(*read) for read in zip(sources, tensors, strict=True)]
            if not begin:
                unchanged = [kept(*pair) for pair in zip(tensors, converted, strict=True)]
            parts = [_by_rows(p, by_rows) for p in converted]
            stack.put(some, self._checked(parts, experts[some]))
            begin = some.stop
            del tensors, converted, parts  # before more is read
        return stack.tensors

    def _stored(self, expert: tuple[Source, ...]) -> list:
        """Key of how an expert is stored: experts with equal keys can be converted together."""
        entries = self.files.entries
        return [
            (
                {role: (entries[t].dtype, entries[t].shape) for role, t in source.items()},
                self._config_of(source),
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
                entry = self.files.entries[tensor]
                shape = (len(matrices), *entry.shape)
                if role in place:
                    found[role] = place[role][: shape[0]].view(entry.dtype).view(shape)
                else:
                    found[role] = reading.empty(shape, entry.dtype)
                pieces += self.files.pieces((source[role] for source in matrices), found[role])
        reading.read_pieces(pieces)
        return tensors

    def _stack(self, scheme: str, device: Any) -> Parts:
        """The quantized matrices of a stack."""
        by_rows = self._scale_of_rows(scheme)
        weight = self.weight
        first = tuple(projection[0] for projection in weight.sources)
        count, parts = len(weight.experts), []
        for source in first:
            found = self._convert((source,), self._of_stack(source, device))
            found = {n: t if t.dim() else t.expand(count) for n, t in found.items()}
            if weight.ids is not None and len(found["qdata"]) == weight.shape[0] != count:
                ids = torch.tensor(weight.ids, device=found["qdata"].device)
                found = {n: t[ids] for n, t in found.items()}
            if weight.columns_first:
                found["qdata"] = found["qdata"].mT
            parts.append(_by_rows(found, by_rows))
        stack = Stack(count, weight.in_turn)
        stack.put(slice(0, count), self._checked(parts, [first]))
        return stack.tensors

    def _scale_of_rows(self, scheme: str) -> str:
        """Which scale each row gets, also where the files have one for a matrix; "" for none."""
        desc = get_scheme(scheme).weight
        if desc is not None and desc.group.is_row:
            return "scale"
        differ = desc is not None and desc.global_scale and self.scales_differ()
        return "global_scale" if differ else ""

    def scales_differ(self) -> bool:
        """Whether projections of any expert, read or not, have different scales for the whole of a
        matrix, of fp8 or NVFP4; nothing but the scales is read.
        """
        weight = self.weight
        roles = ("weight_scale",) if weight.scheme in BY_ROWS else floats.GLOBAL_SCALES
        firsts = [projection[0] for projection in weight.sources]
        role = next((role for role in roles if any(role in first for first in firsts)), None)
        if role is None or len(weight.sources) == 1:
            return False
        if any(role not in first for first in firsts):  # of GGUF, where a missing one is 1
            return True
        experts = [*zip(*weight.sources, strict=True)]
        scales = iter(self.files.read_all(source[role] for expert in experts for source in expert))
        for first, *others in zip(*[scales] * len(weight.sources), strict=True):
            if any(not torch.equal(other.float(), first.float()) for other in others):
                return True
        return False

    def _activation_scale(self, device: Any) -> dict[str, Tensor]:
        """One for all experts, read or not: the largest any of them saw."""
        found = [
            (source, role)
            for projection in self.weight.sources
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

    def _rows(self, device: Any) -> Iterator[Tensor]:
        """The plain (N, K) matrices of a weight, one expert at a time."""
        weight = self.weight
        if weight.stacked:
            stacks = [
                self._of_stack(projection[0], device)["weight"] for projection in weight.sources
            ]
            stacks = [t.view(len(weight.experts), -1, t.shape[-1]) for t in stacks]  # if joined
            for parts in zip(*stacks, strict=True):
                rows = join_rows([*parts], weight.in_turn)
                yield rows.T if weight.columns_first else rows
            return
        for e in weight.experts:
            yield join_rows(
                [self._read(p[e], device)["weight"] for p in weight.sources], weight.in_turn
            )

    def _quantized(self, scheme: str, matrices: Iterable[Tensor]) -> Iterator[Parts]:
        """Plain matrices of a weight, quantized one by one."""
        weight = self.weight
        for e, rows in zip(weight.experts, matrices, strict=True):
            source = weight.sources[0][0 if weight.stacked else e]
            try:
                tensor = quantize(rows.unsqueeze(0), scheme)
            except ValueError as error:
                raise ValueError(f"{self._where(source)}, expert {e}: {error}") from error
            yield {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}

    def _convert(self, sources: Sequence[Source], tensors: Parts) -> Parts:
        """The converted tensors of a matrix, or of a stack; several matrices are stacked."""
        if self.weight.format is None:
            return {"plain": tensors["weight"]}
        try:
            return self.weight.format.convert(tensors, self._config_of(sources[0]))
        except ValueError as error:
            for i, source in enumerate(sources if len(sources) > 1 else ()):
                self._convert((source,), {r: t[i] for r, t in tensors.items()})
            raise ValueError(f"{self._where(sources[0])}: {error}") from error

    def _check_finite(self) -> None:
        """Raise for the first matrix whose scales are not all finite; plain weights have none."""
        matrices = [source for projection in self.weight.sources for source in projection]
        for source in matrices if self.weight.format else ():
            for name, t in self._convert((source,), self._read(source, "cpu")).items():
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
            first = numbers[:, :1]  # NaN is found later
            differ = ((numbers != first) & ~(numbers.isnan() & first.isnan())).any(1).nonzero()
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

    def _read(self, source: Source, device: Any) -> Parts:
        return {role: self.files.read(tensor, device) for role, tensor in source.items()}

    def _of_stack(self, source: Source, device: Any) -> Parts:
        """The tensors of a stack, of the weight's experts alone."""
        weight, found = self.weight, {}
        for role, tensor in source.items():
            # a plain weight may have the rows of the experts after one another
            per_expert = self.files.entries[tensor].shape[:1] == weight.shape[:1]
            whole = weight.format is not None and weight.format.state != ""
            cut = weight.format is None or (per_expert and role != "weight_shape" and not whole)
            pieces = (weight.shape[0], weight.ids) if cut and weight.ids is not None else ()
            found[role] = self.files.read(tensor, device, *pieces)
        return found

    def _where(self, source: Source) -> str:
        return str(elements_of(source, self.files.entries))


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
