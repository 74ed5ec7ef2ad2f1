"""Weights of a checkpoint before they are read: the tensors that make them up, whose names say
their roles, and the schemes that they can have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_ops.integrations.checkpoints.formats import ALIASES, ROLES, Format
from moe_ops.integrations.checkpoints.headers import Entry
from moe_ops.schemes import QuantScheme, get_scheme

Source = dict[str, str]  # role -> name of a tensor in the files
Entries = dict[str, Entry]
Matrices = tuple[tuple[Source, ...], ...]  # [projection][expert]; one "expert" if stacked
BIAS = "bias"  # no part of a weight
# fp8 with a scale for a matrix -> the same values and activations with one for each row
BY_ROWS = {
    "fp8_tensor": "fp8_channel_tensor",
    "fp8_tensor_static": "fp8_channel_tensor_static",
    "fp8_w8a16:tensor": "fp8_w8a16:channel",
}
_ELEMENTS = ("weight", "weight_packed", "qweight", "blocks", "_weight_qdata")


class Sources:
    """The tensors found for a weight, by projection: those of stacks, or of experts one by one.

    Args:
        name: of the weight, for messages.
        count: projections.
    """

    def __init__(self, name: str, count: int):
        self.name = name
        self.stacked: list[Source] = [{} for _ in range(count)]
        self.single: list[dict[int, Source]] = [{} for _ in range(count)]

    def add(self, projection: int, expert: int | None, role: str, tensor: str) -> None:
        """Add a tensor; of no expert, if it is of a stack. ValueError if one has its role."""
        own = self.single[projection]
        source = self.stacked[projection] if expert is None else own.setdefault(expert, {})
        add_tensor(source, role, tensor, self.name)

    def share_scales(self, entries: Entries) -> None:
        """Give each expert its part of the stacked scales of fine-grained fp8.

        transformers saves the elements of such experts one by one, ``experts.3.up_proj.weight``,
        and the scales as its model has them: ``experts.gate_up_proj_scale_inv``, one block for
        128 rows, those of gate before those of up.
        """
        count, stacked = len(self.single[0]), self.stacked
        weights = [
            [entries.get(p.get(e, {}).get("weight", "")) for e in range(count)]
            for p in self.single
        ]
        found = [[w for w in projection if w and len(w.shape) == 2] for projection in weights]
        pairs = zip(self.single, found, strict=True)
        complete = all(len(p) == len(f) == count > 0 for p, f in pairs)
        if not complete or [*stacked[0]] != ["weight_scale_inv"] or any(stacked[1:]):
            return
        entry = entries[stacked[0].pop("weight_scale_inv")]
        rows = [-(-projection[0].shape[0] // 128) for projection in found]
        want = (count, sum(rows), -(-found[0][0].shape[1] // 128))
        if entry.shape != want:
            raise ValueError(
                f"{entry} must have the scales of {self.name}, whose experts are stored one by "
                f"one, with shape {want}, got {entry.shape}"
            )
        begin = entry.begin
        for e in range(count):
            for i, blocks in enumerate(rows):
                part = replace(
                    entry, name=f"{entry.name}[{e}]", shape=(blocks, want[2]), begin=begin
                )
                key = f"{begin} of {entry}"  # the name of no tensor
                entries[key] = part
                self.add(i, e, "weight_scale_inv", key)
                begin += part.bytes

    def matrices(self) -> Matrices:
        """The matrices of the weight.

        Raises:
            ValueError: some experts are missing, or there are stacks beside single ones.
        """
        if any(self.stacked) and any(self.single):
            one = next(iter(next(filter(None, self.stacked)).values()))
            raise ValueError(
                f"{self.name} must be stored as stacks or expert by expert, got both, one of them "
                f"{one}"
            )
        if all(self.stacked):
            return tuple((source,) for source in self.stacked)
        numbers = sorted(set().union(*self.single))
        if not numbers:
            raise ValueError(f"{self.name} must be in the checkpoint, got no tensor of its name")
        for projection in self.single:
            missing = sorted(set(range(numbers[-1] + 1)) - set(projection))
            if missing:
                raise ValueError(
                    f"{self.name} must have all projections of experts 0 to {numbers[-1]}, got "
                    f"none of experts {missing[:8]} for one of them"
                )
        return tuple(tuple(projection[e] for e in numbers) for projection in self.single)


def add_tensor(source: Source, role: str, tensor: str, name: str) -> None:
    """Add a tensor to those of one matrix of the weight ``name``, or raise ValueError."""
    if role in source:
        raise ValueError(
            f"{tensor} must not be beside {source[role]}, because both are the {role} of {name}"
        )
    source[role] = tensor


def role_of(text: str) -> str:
    """The role at the end of a tensor's name: "" is "weight", "scale_inv" "weight_scale_inv"."""
    if text in ("", "weight"):
        return "weight"
    if text in ROLES or text in ALIASES:
        return ALIASES.get(text, text)
    return f"weight_{text}" if f"weight_{text}" in ROLES else ""


def module_of(tensor: str, role: str) -> str:
    """The matrix that a tensor of this role belongs to: its name without what names the role."""
    texts = [role, role.removeprefix("weight_"), *(a for a, r in ALIASES.items() if r == role)]
    for end in (separator + text for text in texts for separator in "._"):
        if tensor.endswith(end):
            return tensor.removesuffix(end)
    return tensor


def elements_of(source: Source, entries: Entries) -> Entry:
    """The tensor that holds the elements of a matrix."""
    found = [source[role] for role in _ELEMENTS if role in source]
    return entries[found[0] if found else next(iter(source.values()))]


def require_one_dtype(matrices: Matrices, entries: Entries, *roles: str) -> None:
    """Raise ValueError where tensors would be rounded to the dtype of the first expert's."""
    first = matrices[0][0]
    for source in (source for projection in matrices for source in projection):
        for role in source.keys() & set(roles):
            entry, like = entries[source[role]], entries[first[role]]
            if entry.dtype != like.dtype:
                raise ValueError(
                    f"{entry} must be {like.dtype} like {like}, because the experts become one "
                    f"tensor, got {entry.dtype}"
                )


@dataclass(frozen=True)
class Weight:
    """The sources of one expert weight (E, N, K), checked against the files' headers."""

    name: str
    sources: Matrices
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
