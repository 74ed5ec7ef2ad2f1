"""Tracing CUDA code on a machine without CUDA: fake tensors, a pretended GPU, and a model of
transformers.

Run as a program it compiles one model and prints what stands in its graphs; see
tests/matrix/test_fake_cuda.py for why that needs a process of its own:

    python tests/support/fake_cuda.py PATH_OF_THE_BUILT_noop_guard
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import sys
from collections.abc import Iterator

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moe_ops import backends
from moe_ops.ops.problem import Machine
from moe_ops.planning import machine as machines

H200 = Machine("cuda", (9, 0), "NVIDIA H200", backends.list_backends())


@contextlib.contextmanager
def fake_gpu(machine: Machine = H200) -> Iterator[FakeTensorMode]:
    """Tensors made inside are fake, so that they may lie on "cuda"; calls are planned for
    `machine`."""
    with machines.pretend(machine), FakeTensorMode(shape_env=ShapeEnv()) as mode:
        yield mode


class Recorder:
    """A torch.compile backend that keeps the graphs AOTAutograd makes and runs them as they
    are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, _inputs):
        self.graphs.append(graph)
        return make_boxed_func(graph.forward)

    def calls(self) -> list[tuple[torch._ops.OpOverload, dict]]:
        """The moe_ops calls of the one graph, with their arguments by name; tensors are fake
        ones."""
        (graph,) = self.graphs
        found = []
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            op, kwargs = node.target, dict(node.kwargs)
            if str(op).startswith("auto_functionalized"):  # bases of written arguments apart
                op, bases = node.args[0], kwargs.pop("_all_bases")
                for name in [name for name in kwargs if name.endswith("_base_index")]:
                    kwargs[name[1 : -len("_base_index")]] = bases[kwargs.pop(name)]
            if getattr(op, "namespace", None) == "moe_ops":
                found.append((op, torch.fx.node.map_arg(kwargs, lambda n: n.meta["val"])))
        return found


def compile_qwen3_moe(num_layers: int) -> dict:
    """What stands in the graph of a Qwen3-MoE in bf16 whose routers and experts run on moe_ops."""
    import transformers

    import moe_ops.integrations.transformers  # noqa: F401  registers the implementation
    from moe_ops.integrations.transformers import forwards, routers

    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch._dynamo.reset()
    recorder = Recorder()
    with fake_gpu(), torch.no_grad():
        with torch.device("cuda"):  # not while the model is traced: Dynamo would trace this too
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, experts_implementation="moe_ops"
            )
            ids = torch.empty(2, 5, dtype=torch.int64)
        for module in model.modules():  # as fuse_routers does, but for its check
            if (router := routers.router_of(module)) is not None:
                forwards.set_forward(module, functools.partial(routers.router_forward, router))
        torch._dynamo.mark_dynamic(ids, 1)
        compiled = torch.compile(model.eval(), fullgraph=True, backend=recorder.backend)
        logits = compiled(input_ids=ids, use_cache=False).logits
    calls = recorder.calls()
    experts = [kwargs for op, kwargs in calls if "experts" in op.name()]
    (graph,) = recorder.graphs
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return {
        "shape": list(logits.shape),
        "device": logits.device.type,
        "ops": [op.name() for op, _ in calls],
        "rows_are_symbols": [type(kwargs["out"].shape[0]) is torch.SymInt for kwargs in experts],
        "dtypes": [str(kwargs["w13"].dtype) for kwargs in experts],
        "router_dtypes": sorted({str(kwargs["topk_weights"].dtype) for kwargs in experts}),
        "routed_by_torch": [name for name in targets if "topk" in name or "sort" in name],
    }


if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])
    print(json.dumps(compile_qwen3_moe(2)))
