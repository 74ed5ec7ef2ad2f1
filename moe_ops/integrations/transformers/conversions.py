"""Which tensors of a checkpoint make up a parameter, as transformers' own conversions tell.

A family's conversion from ``experts.*.gate_proj.weight`` and ``experts.*.up_proj.weight`` to
``experts.gate_up_proj`` names the projections and their order. The readers made of it match all
names that quantized checkpoints put in the place of "weight".
"""

from __future__ import annotations

import copy
import re
from typing import Any

from transformers import core_model_loading as loading

from moe_ops.integrations.checkpoints.experts import Checkpoint
from moe_ops.integrations.checkpoints.formats import ALIASES, FACTORS, ROLES, format_of
from moe_ops.integrations.checkpoints.weights import BIAS
from moe_ops.integrations.transformers.layers import Layer
from moe_ops.tensors import ExpertTensor

# what `flatten` adds to the name of a quantized weight
STORED = tuple(sorted({*ExpertTensor.tensor_data_names, *ExpertTensor.optional_tensor_data_names}))
_COMPANIONS = tuple(role for role in ROLES if role != "weight")
_OF_WEIGHT = tuple(role for role in ROLES if role.startswith("weight."))
_START = r"(?<![a-zA-Z0-9_])"  # of a name's part: experts, but not shared_experts
_EXPERT = re.compile(r"experts\.(\d+)\.")
_NUMBER = re.compile(r"(\d+)")
_MLX_EXPERTS = _START + r"switch_mlp(?=[.])"  # MLX's name of experts

Table = dict[str, tuple[int, str]]  # source pattern -> (projection, role)


class _Unused(loading.ConversionOps):
    """Stands where a WeightConverter must have an operation; `OwnReader` runs none."""

    def convert(
        self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> Any:
        raise NotImplementedError

    @property
    def reverse_op(self) -> _Unused:
        return self


class OwnReader(loading.WeightConverter):
    """Collects the names of a parameter's tensors and lets our quantizer read them."""

    __slots__ = ("tensors",)

    def __init__(self, source_patterns: list[str], target: str):
        super().__init__(source_patterns, [target], [_Unused()])
        self.tensors: list[tuple[str, Any]] = []

    def __deepcopy__(self, memo: dict) -> OwnReader:
        """transformers copies it for each tensor, and keeps one copy for each parameter."""
        reader = copy.copy(self)
        reader.tensors = []
        return reader

    def add_tensor(
        self, target_key: str, source_key: str, source_pattern: str, future: Any
    ) -> None:
        self.tensors.append((source_key, future))

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict:
        tensors, self.tensors = self.tensors, []
        hf_quantizer.place(model, layer_name, dict(tensors))
        loading_info.missing_keys.discard(layer_name)
        return {}


def own_readers(
    transforms: list, layers: dict[str, tuple[Layer, str]], checkpoint: Checkpoint
) -> tuple[list, Table]:
    """transformers' conversions with those of quantizable weights replaced by readers of ours."""
    table: Table = {}
    own: list[Any] = [loading.WeightRenaming(_MLX_EXPERTS, "experts")]
    leaves = {".".join(name.split(".")[-2:]): layer for name, (layer, _) in layers.items()}
    kept, covered = [], set()
    for transform in transforms:
        leaf = next((leaf for leaf in leaves if _is_stack_of_experts(transform, leaf)), None)
        if leaf is None:
            kept.append(transform)
            continue
        covered.add(leaf)
        if {base.rpartition(".")[2] for base in _bases(transform)} <= {"w1", "w2", "w3"}:
            own += _readers_of(leaf, table, single=True)  # the names that quantizers give them
        reader = _reader(_bases(transform), transform.target_patterns[0], table)
        reader.scope_prefix = transform.scope_prefix
        reader.base_model_prefix = transform.base_model_prefix
        own.append(reader)
    for leaf, layer in leaves.items():
        converted = any(_converts_to(transform, leaf) for transform in kept)
        biased = hasattr(layer.owner, leaf.rpartition(".")[2] + "_bias")
        own.append(_stacked_reader(leaf, table, plain=not converted))
        own += _readers_of(leaf, table, single=False, biased=biased)
        if leaf not in covered:
            own += _readers_of(leaf, table, single=True, biased=biased)
    own += _matrix_readers(checkpoint, [*own, *kept], table)
    return [*own, *kept], table


def rename(
    tensor: str, renamings: list, converters: list, prefix: str, state: dict[str, Any]
) -> tuple[str, str | None]:
    """What the model calls a tensor, and the pattern of the conversion that takes it, if one does.

    As when transformers loads: a tensor that has a parameter's name already keeps it where a
    renaming would lead to none.
    """
    target, pattern = loading.rename_source_key(tensor, renamings, converters, prefix, state)
    if target not in state and tensor in state:
        return loading.rename_source_key(tensor, [], [], prefix, state)
    return target, pattern


def natural_order(tensor: str) -> list[Any]:
    """A key that sorts names by the numbers in them."""
    return [int(part) if i % 2 else part for i, part in enumerate(_NUMBER.split(tensor))]


def any_expert(tensor: str) -> str:
    """A name with "*" for the expert's number: our readers take a tensor of each expert alike."""
    return _EXPERT.sub("experts.*.", tensor)


def expert_number(tensor: str) -> int | None:
    """The expert of a tensor's name; None if it holds all of them."""
    match = _EXPERT.search(tensor)
    return None if match is None else int(match.group(1))


def names_of(tensor: str, target: str, projection: int) -> tuple[str, ...]:
    """What the model calls the matrix of a tensor that is read for its parameter ``target``.

    Experts that a file has one by one, the model has stacked. Libraries that quantize them take
    the stack apart first, and call the matrices by the file's or by the usual names.
    """
    number = expert_number(tensor)
    if number is None:
        return (target.removesuffix(".weight"),)
    owner, _, leaf = target.rpartition(".")
    own = tensor[[*_EXPERT.finditer(tensor)][-1].end() :].rpartition(".")[0]
    return f"{owner}.{number}.{projections_of(leaf)[projection]}", f"{owner}.{number}.{own}"


def projections_of(leaf: str) -> tuple[str, ...]:
    """The usual names of the matrices that a parameter of experts has joined."""
    return {"gate_up_proj": ("gate_proj", "up_proj")}.get(leaf, (leaf,))


def _is_stack_of_experts(transform: Any, leaf: str) -> bool:
    """Whether a conversion stacks experts, or joins stacks along the rows, and nothing else."""
    if not _converts_to(transform, leaf) or len(transform.target_patterns) > 1:
        return False
    if not all(source.endswith(".weight") for source in transform.source_patterns):
        return False
    steps = [(type(op).__name__, op.dim) for op in transform.operations if hasattr(op, "dim")]
    stack, join = ("MergeModulelist", 0), ("Concatenate", 1)
    known = ([stack], [stack, join], [join])
    return len(steps) == len(transform.operations) and steps in known


def _converts_to(transform: Any, leaf: str) -> bool:
    if not isinstance(transform, loading.WeightConverter):
        return False
    end = _START + re.escape(leaf) + "$"
    return any(re.search(end, target) for target in transform.target_patterns)


def _bases(transform: loading.WeightConverter) -> list[str]:
    """The patterns of a conversion's projections, without what follows the projection's name."""
    return [source.removesuffix(".weight") for source in transform.source_patterns]


def _reader(
    bases: list[str],
    target: str,
    table: Table,
    roles: tuple[str, ...] = (*ROLES, BIAS),
    aliases: tuple[str, ...] = tuple(ALIASES),
) -> OwnReader:
    # a bias: GPTQ writes one for each matrix, of zeros where the model has none
    patterns = []
    for projection, base in enumerate(bases):
        for role in (*roles, *aliases):
            pattern = rf"{base}.{role}$"
            table[pattern] = (projection, ALIASES.get(role, role))
            patterns.append(pattern)
    return OwnReader(patterns, target)


def _stacked_reader(leaf: str, table: Table, plain: bool) -> OwnReader:
    """``experts.gate_up_proj`` (if plain), ``experts.gate_up_proj_blocks``,
    ``experts.gate_up_proj.qdata``.
    """
    names = {"": "weight"} if plain else {}
    names |= {"_" + role.removeprefix("weight_"): role for role in _COMPANIONS}
    names |= {"_" + role: role for role in _COMPANIONS if role.startswith("weight_")}
    names |= {rf"\.{role}": role for role in STORED}
    names |= {rf"\.{text}": role for text, role in ALIASES.items() if role in _OF_WEIGHT}
    patterns = {rf"{_START}{leaf}{text}$": role for text, role in names.items()}
    table.update({pattern: (0, role) for pattern, role in patterns.items()})
    return OwnReader(list(patterns), leaf)


def _readers_of(leaf: str, table: Table, *, single: bool, biased: bool = False) -> list[OwnReader]:
    """A stack for each projection, as MLX has them; or experts one by one (`single`), in families
    whose own checkpoints hold them stacked. With their biases, if the model has some.
    """
    module, _, name = leaf.rpartition(".")
    number = ".*" if single else ""
    bases = [f"{_START}{module}{number}.{p}" for p in projections_of(name)]
    if not biased:
        return [_reader(bases, leaf, table)]
    return [_reader(bases, leaf, table, ROLES), _reader(bases, f"{leaf}_bias", table, (BIAS,), ())]


def _matrix_readers(checkpoint: Checkpoint, transforms: list, table: Table) -> list[OwnReader]:
    """Readers of the quantized matrices that are no experts."""
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    experts = [t for t in transforms if isinstance(t, OwnReader)]
    modules: dict[str, dict[str, str]] = {}  # role -> tensor
    for tensor in checkpoint.files.entries:
        module, role = _module_and_role(tensor)
        if role in ROLES or role == FACTORS:
            modules.setdefault(module, {})[role] = tensor
    readers: dict[str, dict[str, str]] = {}  # end of a parameter's name -> pattern -> role
    taken: set[str] = set()  # by the readers of experts
    for module, tensors in modules.items():
        if any_expert(module) in taken:
            continue
        entries = {r: checkpoint.files.entries[t] for r, t in tensors.items() if r != FACTORS}
        alone = entries.keys() == {"weight"} and not entries["weight"].blocks
        if alone or not _is_quantized(entries):
            continue
        target, pattern = loading.rename_source_key(f"{module}.weight", renamings, experts)
        if pattern is not None:
            taken.add(any_expert(module))
            continue
        for role, tensor in tensors.items():
            # renamings may be of "router.layer.weight" alone, and leave its scales as they are
            found, _ = loading.rename_source_key(tensor, renamings, [])
            end, source = _ends(target, found)
            readers.setdefault(end, {})[rf"{_START}{re.escape(source)}$"] = role
    for patterns in readers.values():
        table.update({pattern: (0, role) for pattern, role in patterns.items()})
    return [OwnReader(list(patterns), end) for end, patterns in sorted(readers.items())]


def _module_and_role(tensor: str) -> tuple[str, str]:
    """The matrix that a tensor's name begins with, and its role there."""
    for role in _OF_WEIGHT:
        if tensor.endswith(f".{role}"):
            return tensor.removesuffix(f".{role}"), role
    module, _, text = tensor.rpartition(".")
    return module, ALIASES.get(text, text)


def _ends(target: str, found: str) -> tuple[str, str]:
    """The last three parts of a parameter's name, "mlp.gate.weight", or those in which the name
    of a tensor differs from it, and what the tensor's name has there.
    """
    parts, others = target.split("."), found.split(".")
    same = [a == b for a, b in zip(parts, others, strict=False)]
    start = min(max(len(parts) - 3, 0), [*same, False].index(False))
    return ".".join(parts[start:]), ".".join(others[start:])


def _is_quantized(entries: dict) -> bool:
    try:
        return format_of(entries, "") is not None
    except ValueError:
        return False
