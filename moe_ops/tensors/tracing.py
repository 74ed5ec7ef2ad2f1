"""Graphs of torch.compile read the tensors of a quantized weight from the weight.

To Dynamo `weight.scale` is an input of the graph for itself, and compilers do not know that it is
a part of another input, the weight: where one of them is written, the other keeps what was there
before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moe_ops.ops.library import part


class _Input(NamedTuple):
    """A plain tensor that is an input of a graph, or a tensor, by name, of a weight that is."""

    node: Node
    name: str
    tensor: Tensor  # that the graph was traced with
    written: bool  # by the graph, of a weight


def watch() -> None:
    """Have `read_from_weights` change the graph that Dynamo is making now."""
    from torch._dynamo.symbolic_convert import tls

    tx = getattr(tls, "current_tx", None)
    if tx is not None and read_from_weights not in tx.output.register_finalizer_fns:
        tx.output.add_graph_finalizer(read_from_weights)


def read_from_weights(module: GraphModule) -> None:
    """Read a weight's tensors that are inputs for themselves, too, from the weight.

    Raises ValueError where a weight is written that shares memory with other inputs, or is
    assigned another tensor.
    """
    _refuse_assigned()
    nodes = module.graph.find_nodes(op="placeholder")
    inputs = [found for node in nodes for found in _inputs(node)]
    parts = {id(found.tensor): found for found in inputs if found.name}
    for found in parts.values():
        if found.written:
            _refuse_views(found, inputs)
    replaced = [found for found in inputs if not found.name and id(found.tensor) in parts]
    with module.graph.inserting_after(nodes[-1] if nodes else None):
        for node, _, tensor, _ in replaced:
            read = module.graph.call_function(part, parts[id(tensor)][:2])
            read.meta["example_value"] = node.meta["example_value"]
            node.replace_all_uses_with(read)
    for found in replaced:
        module.graph.erase_node(found.node)
    module.recompile()


def _refuse_assigned() -> None:
    """Raise where the code assigns a tensor of a weight: Dynamo does it when the graph has run,
    in which operators on the weight have the tensor of before.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    for variable, assigned in effects.store_attr_mutations.items():
        cls: Any = variable.python_type() if variable.source is not None else None
        if "weight_layout" in getattr(cls, "tensor_attribute_names", ()):
            own = {*cls.tensor_data_names, *cls.optional_tensor_data_names}
            if found := sorted(own & assigned.keys()):
                raise ValueError(
                    f"{found[0]} of a quantized weight must not be assigned by compiled code: "
                    "write it by copy_, or assign it outside"
                )


def _inputs(node: Node) -> Iterator[_Input]:
    argument = node.meta.get("grapharg")
    given: Any = None if argument is None else argument.example
    traced = node.meta.get("example_value")
    if hasattr(given, "weight_layout"):
        for name in given.__tensor_flatten__()[0]:
            yield _Input(node, name, getattr(given, name), getattr(traced, name)._version > 0)
    elif isinstance(given, Tensor):
        yield _Input(node, "", given, False)


def _refuse_views(written: _Input, inputs: list[_Input]) -> None:
    """Raise where another input has memory of a weight's tensor: compilers know which of their
    plain inputs share memory, and of no others.
    """
    mine = _place(written.tensor)
    for other in inputs:
        read_from_it = other.tensor is written.tensor and not other.name
        if other.node is written.node or read_from_it or other.tensor.layout != torch.strided:
            continue
        place = _place(other.tensor)
        if mine[0] == place[0] and mine[1] < place[2] and place[1] < mine[2]:
            raise ValueError(
                "a quantized weight that compiled code writes must be its only input with this "
                f"memory, got {written.node.name} and {other.node.name}: take views of the weight "
                "in the function that is compiled, or write it outside"
            )


def _place(t: Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and where in it the tensor begins and ends."""
    begin = int(t.storage_offset()) * t.element_size()
    last = sum([(size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)])
    end = begin + (last + 1) * t.element_size() if t.numel() else begin
    return t.untyped_storage()._cdata, begin, end
