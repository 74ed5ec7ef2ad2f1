"""A training step of one expert layer: moe_ops against transformers, Liger and SonicMoE.

    python benchmarks/training.py [--shapes qwen3 mixtral] [--tokens 1024 8192 32768]
                                 [--trains full frozen lora] [--schemes int4_w4a16 mxfp4_w4a16]
                                 [--only moe_ops transformers]
                                  [--rounds 20] [--write] [--dry-run]

Every implementation gets the same bf16 weights, tokens, routing and gradient of the output.
Timed in turn, by events around one eager or compiled call, medians in ms: `infer` is the forward
pass under torch.no_grad(), `forward` the one that records gradients, `step` forward and backward
pass. `full` trains the weights, `frozen` passes gradients through them to tokens and router
weights. `--schemes` adds frozen weights that are quantized, which moe_ops alone takes. `lora`
trains adapters of rank 16 over frozen weights, and `qlora_int4` and `qlora_mxfp4` over weights of
4 bits; transformers' adapters are added to the weights, as PEFT adds them. `kept` are the bytes
that wait for the backward pass beside inputs and weights, `peak` the most that a step allocates.
`error` is the largest relative error of a gradient against fp64, over the first tokens' rows and
an expert's weights, if there are at most 1024 tokens.

The floor is the FLOPs of its products over the measured rate of a large bf16 product.
``--write`` keeps the numbers in benchmarks/results/training_<GPU>.json, and a plot beside it.
``--dry-run`` runs a tiny shape on this machine, to see that everything works.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from cases import SHAPES
from harness import (
    RESULTS,
    format_table,
    gpu_limits,
    interleaved_ms,
    machine_facts,
    relative_error,
    versions,
    write_json,
)
from torch import Tensor

import moe_ops
from moe_ops import environment
from moe_ops.bench.layers import per_expert_loop, transformers_experts
from moe_ops.bench.shapes import Shape
from moe_ops.schemes import OTHER_NAMES, SCHEMES, get_scheme

# schemes of the frozen weights that are adapted, by what is trained
ADAPTED = {"lora": "", "qlora_int4": "int4_w4a16:g128", "qlora_mxfp4": "mxfp4_w4a16"}
TRAINS = ("full", "frozen", *ADAPTED)
RANK = 16
QUANTIZED = [name for name in (*SCHEMES, *OTHER_NAMES) if get_scheme(name).weight is not None]
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
MAX_CHECKED_TOKENS = 1024
# gradients come from products of bf16 numbers, each rounded: some 2^-8 each
MAX_ERROR = 0.03

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # as per_expert_loop
Maker = Callable[[Shape, "Inputs"], Layer]


@dataclass(frozen=True)
class Case:
    shape: str
    trains: str  # one of TRAINS
    num_tokens: int
    scheme: str = ""  # of the weights

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    def flops(self, step: bool) -> float:
        """Of the forward pass, or of a step: three times as many, two with frozen weights. Those
        of adapters are left aside.
        """
        sizes = self.sizes
        product = 3 * sizes.hidden_size * sizes.intermediate_size
        times = (3 if self.trains == "full" else 2) if step else 1
        return 2.0 * self.num_tokens * sizes.top_k * product * times


# --- implementations -----------------------------------------------------------------------------


def ours(recompute: bool = False) -> Maker:
    def make(shape: Shape, inputs: Inputs) -> Layer:
        def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            return moe_ops.fused_experts(
                *(x, w13, w2, weights, ids), recompute=recompute, adapters=inputs.adapter
            )

        return layer

    return make


def transformers_layer(shape: Shape, inputs: Inputs) -> Layer:
    module: Any = transformers_experts(shape, inputs.w13, inputs.w2, "grouped_mm")
    module.gate_up_proj, module.down_proj = inputs.w13, inputs.w2

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return module(x, ids, weights)

    def adapted(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        w13, w2 = inputs.merged(w13, w2)  # as PEFT's ParamWrapper
        named = {"gate_up_proj": w13, "down_proj": w2}
        return torch.func.functional_call(module, named, (x, ids, weights))

    return layer if inputs.adapter is None else adapted


def liger(shape: Shape, inputs: Inputs) -> Layer:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return LigerFusedMoEFunction.apply(x, w13, w2, ids, weights)

    return layer


def sonic_moe(shape: Shape, inputs: Inputs) -> Layer:
    """SonicMoE with its default tile: its search takes minutes a shape."""
    import quack.gemm_interface as interface
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    default = interface.AutotuneConfig(config=interface.default_config(torch.device("cuda")))
    for value in vars(interface).values():
        if hasattr(value, "configs"):
            value.configs = [default]
    E = shape.num_experts

    def layer(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        tokens = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        out = moe_general_routing_inputs(
            *(x, weights.flatten(), tokens.repeat_interleave(ids.shape[1]), ids.flatten().int()),
            *(w13.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, E),
            torch.cuda.current_stream().cuda_stream,
            *(ActivationType.SWIGLU, not torch.is_grad_enabled(), True),
        )
        return out[0] if isinstance(out, tuple) else out

    return layer


def compiled(make: Maker) -> Maker:
    def make_compiled(shape: Shape, inputs: Inputs) -> Layer:
        torch._dynamo.reset()
        return torch.compile(make(shape, inputs), fullgraph=True, dynamic=False)

    return make_compiled


IMPLEMENTATIONS: dict[str, Maker] = {
    "moe_ops": ours(),
    "moe_ops recompute": ours(recompute=True),
    "moe_ops compiled": compiled(ours()),
    "transformers": transformers_layer,
    "transformers compiled": compiled(transformers_layer),
    "liger": liger,
    "sonicmoe": sonic_moe,
}


# --- one cell ------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """What a layer takes, and the gradient of its output."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    weights: Tensor
    ids: Tensor
    grad: Tensor
    adapter: moe_ops.LoRA | None = None

    def merged(self, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """Weights with what adapts them."""
        if self.adapter is None:
            return w13, w2
        a13, b13, a2, b2, scale = self.adapter
        assert a13 is not None and b13 is not None and a2 is not None and b2 is not None
        first = torch.baddbmm(w13, b13, a13, alpha=scale)
        return first, torch.baddbmm(w2, b2, a2, alpha=scale)

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.x, self.w13, self.w2, self.weights, self.ids

    @property
    def trained(self) -> dict[str, Tensor]:
        named = {"x": self.x, "w13": self.w13, "w2": self.w2, "weights": self.weights}
        if self.adapter is not None:
            named |= {k: v for k, v in self.adapter._asdict().items() if k != "scale"}
        return {name: t for name, t in named.items() if t.requires_grad}


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Random, of unit scale; routing is uniform."""
    sizes, M = case.sizes, case.num_tokens
    E, K, I = sizes.num_experts, sizes.hidden_size, sizes.intermediate_size  # noqa: E741
    rng = torch.Generator(device).manual_seed(case.num_tokens)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=rng, device=device) * scale).to(torch.bfloat16)

    scores = torch.randn(M, E, generator=rng, device=device).softmax(1)
    weights, ids = scores.topk(sizes.top_k)
    weights = (weights / weights.sum(1, keepdim=True)).to(torch.bfloat16)
    full = case.trains == "full"
    w13, w2 = [random(*size, scale=size[-1] ** -0.5) for size in ((E, 2 * I, K), (E, K, I))]
    if case.scheme:
        w13, w2 = [moe_ops.quantize(w, case.scheme) for w in (w13, w2)]
    w13, w2 = [torch.nn.Parameter(w, requires_grad=full) for w in (w13, w2)]
    adapter = None
    if case.trains in ADAPTED:
        sizes_of = ((RANK, K), (2 * I, RANK), (RANK, I), (K, RANK))
        matrices = [random(E, *size, scale=size[-1] ** -0.5) for size in sizes_of]
        adapter = moe_ops.LoRA(*[t.requires_grad_() for t in matrices], 2.0)
    return Inputs(
        random(M, K).requires_grad_(),
        w13,
        w2,
        weights.requires_grad_(),
        ids,
        random(M, K),
        adapter,
    )


def gradients(layer: Layer, inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(*inputs.args), list(inputs.trained.values()), inputs.grad)


def _wide(t: Tensor) -> Tensor:
    """fp64 of numbers."""
    if isinstance(t, moe_ops.ExpertTensor):
        return t.dequantize(torch.float32).double()
    return t.detach().double() if t.is_floating_point() else t


def error_of(layer: Layer, inputs: Inputs) -> float:
    """The largest relative error of a gradient against fp64."""
    found = dict(zip(inputs.trained, gradients(layer, inputs), strict=True))
    adapter = inputs.adapter
    if adapter is not None:
        matrices = [_wide(t).requires_grad_() for t in adapter[:4] if t is not None]
        adapter = moe_ops.LoRA(*matrices, adapter.scale)
    wide = Inputs(*[_wide(t) for t in inputs.args], inputs.grad.double(), adapter)
    for name in inputs.trained:
        if name in vars(wide):
            getattr(wide, name).requires_grad_()

    def reference(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return per_expert_loop(x, *wide.merged(w13, w2), weights, ids)

    expected = dict(zip(wide.trained, gradients(reference, wide), strict=True))
    errors = [relative_error(found[name], expected[name]) for name in found]
    return max(errors) if all([e == e for e in errors]) else float("nan")


def _stored(t: Tensor) -> list[Tensor]:
    """The tensors that hold it: those of a quantized weight are its elements and scales."""
    if not isinstance(t, moe_ops.ExpertTensor):
        return [t]
    return [part for part in vars(t).values() if isinstance(part, Tensor)]


def kept_bytes(layer: Layer, inputs: Inputs) -> int:
    """Bytes that wait for the backward pass, without those of inputs."""
    given = (*inputs.args, *inputs.trained.values())
    parts = [part for t in given for part in _stored(t)]
    known = {t.untyped_storage().data_ptr() for t in parts}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(*inputs.args)
    del out
    return sum(kept.values())


def peak_bytes(layer: Layer, inputs: Inputs) -> int | None:
    if inputs.x.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(layer, inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def times_ms(calls: dict[str, Callable[[], object]], rounds: int, cuda: bool) -> dict[str, float]:
    """Medians, calls in turn."""
    if not cuda:
        timed = {name: (lambda _, call=call: call()) for name, call in calls.items()}
        return {n: statistics.median(t) for n, t in interleaved_ms(timed, rounds, 1).items()}
    events: dict[str, list] = {name: [] for name in calls}
    for step in range(-3, rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)  # 0.2 ms, in which the host gets ahead
            begin.record()
            call()
            end.record()
            if step >= 0:
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        n: statistics.median([b.elapsed_time(e) for b, e in pairs]) for n, pairs in events.items()
    }


def takes(name: str, case: Case) -> bool:
    """Whether an implementation takes the weights of a case, and adapters of them."""
    if case.scheme:
        return name.startswith("moe_ops")
    return case.trains not in ADAPTED or name.startswith(("moe_ops", "transformers"))


def run_case(case: Case, only: list[str], rounds: int, device: torch.device) -> list[dict]:
    """A row of numbers for each implementation, or the reason why it has none."""
    inputs, rows, calls = make_inputs(case, device), [], {}
    for name in only:
        if not takes(name, case):
            continue
        row: dict[str, Any] = {**asdict(case), "implementation": name}
        rows.append(row)
        try:
            layer = IMPLEMENTATIONS[name](case.sizes, inputs)
            if case.num_tokens <= MAX_CHECKED_TOKENS:
                row["error"] = error_of(layer, inputs)
                if not row["error"] < MAX_ERROR:
                    raise ValueError(f"its gradients are wrong: relative error {row['error']:.3g}")
            row["kept_bytes"] = kept_bytes(layer, inputs)
            row["peak_bytes"] = peak_bytes(layer, inputs)

            def infer(layer: Layer = layer) -> Tensor:
                with torch.no_grad():
                    return layer(*inputs.args)

            infer()
        except Exception as error:  # a peer may fail in any way
            row["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        calls |= {
            f"{name}/infer": infer,
            f"{name}/forward": lambda layer=layer: layer(*inputs.args),
            f"{name}/step": lambda layer=layer: gradients(layer, inputs),
        }
    found = times_ms(calls, rounds, device.type == "cuda")
    for row in rows:
        for what in ("infer", "forward", "step"):
            key = f"{row['implementation']}/{what}"
            if key in found:
                row[f"{what}_ms"] = round(found[key], 4)
    return rows


# --- results -------------------------------------------------------------------------------------


def show(case: Case, rows: list[dict], flops_per_s: float | None) -> None:
    title = " ".join([*filter(None, (case.shape, case.trains, case.scheme))])
    title += f" T={case.num_tokens}"
    if flops_per_s:
        title += f", floor of a step {case.flops(True) / flops_per_s * 1e3:.3f} ms"
    print(title)
    header = ("", "infer ms", "forward ms", "step ms", "kept MiB", "peak MiB", "error")
    cells = []
    for row in rows:
        if "reason" in row:
            print(f"  {row['implementation']}: {row['reason']}")
            continue
        peak = row["peak_bytes"]
        cells.append(
            (
                row["implementation"],
                *[f"{row[f'{what}_ms']:.3f}" for what in ("infer", "forward", "step")],
                f"{row['kept_bytes'] / 2**20:.0f}",
                "" if peak is None else f"{peak / 2**20:.0f}",
                f"{row['error']:.1e}" if "error" in row else "",
            )
        )
    print(format_table(header, cells), flush=True)


def plot(rows: list[dict], path: Any) -> None:
    """TFLOP/s of a step over tokens, a panel for each shape and for what is trained."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(row["shape"], row["trains"], row["scheme"]) for row in rows})
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5 * len(panels), 4), squeeze=False, sharey=True
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        for name in IMPLEMENTATIONS:
            points = [
                (
                    row["num_tokens"],
                    Case(*panel[:2], row["num_tokens"]).flops(True) / row["step_ms"] / 1e9,
                )
                for row in rows
                if (*panel, name)
                == (row["shape"], row["trains"], row["scheme"], row["implementation"])
                and "step_ms" in row
            ]
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axis.set(title=" ".join(panel), xlabel="tokens", xscale="log")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("TFLOP/s of a training step")
    axes[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3", "mixtral"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--trains", nargs="+", choices=TRAINS, default=TRAINS[:3])
    parser.add_argument("--schemes", nargs="+", choices=QUANTIZED, default=[], metavar="SCHEME")
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=[*IMPLEMENTATIONS])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if given.dry_run:
        given.shapes, given.tokens, given.rounds = ["tiny"], [64], 2
    elif not torch.cuda.is_available():
        raise SystemExit("training.py needs a GPU; --dry-run does not")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = gpu_limits() if device.type == "cuda" else {}
    rate = limits["bf16_matmul_tflop_s"] * 1e12 if limits else None
    rows: list[dict] = []
    trained = [(t, ADAPTED.get(t, "")) for t in given.trains]
    trained += [("frozen", scheme) for scheme in given.schemes]
    cases = [Case(s, t, m, q) for s in given.shapes for t, q in trained for m in given.tokens]
    for case in environment.progress_bar(cases, "training"):
        found = run_case(case, given.only, given.rounds, device)
        show(case, found, rate)
        rows += found
        if given.write:  # a run that is cut short keeps what it has
            gpu = machine_facts().get("gpu", "cpu").replace(" ", "_")
            content = {
                "machine": machine_facts(),
                "limits": limits,
                "versions": versions(
                    *("torch", "triton", "transformers", "liger-kernel", "sonic-moe"),
                    "quack-kernels",
                ),
                "command": "python " + " ".join(sys.argv),
                "rows": rows,
            }
            write_json(f"training_{gpu}", content)
            plot(rows, RESULTS / f"training_{gpu}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
