"""One expert layer on a CPU, beside llama.cpp's: the same layer as a graph of ggml, whose three
products are `mul_mat_id`.

    python benchmarks/cpu_ggml.py --ggml FOLDER [--tokens 1 8 64] [--rounds 60] [--threads 2]
                                  [--avx 512] [--write]

FOLDER holds libggml-base.so and libggml-cpu.so, as llama-cpp-python has them (`llama_cpp/lib`), or
built from the sources that it brings for the instruction set to compare. A graph takes fp32 tokens
and gives their fp32 sums: gate, up, SwiGLU, down, the router's weights, the sum over experts; it
is built once and computed as often as it is timed. Repacked weights are what llama.cpp makes of
them when it loads a model on a CPU. ggml multiplies weights of 4 and 8 bits by tokens that it
quantizes to 8 bits, 32 columns a scale, so the error stands beside every time; it is that against
the bf16 weights, the weights' own included. Of q8_0, q4_k and q6_k moe_ops multiplies the numbers
of ggml's own blocks, and the errors of both products against these weights stand beside it.
Layers, routing and times are those of cpu_quantized.py; ours and ggml's calls run in turns in one
process, those of each interleaved.
``--write`` keeps the times in benchmarks/results/cpu_ggml_AVX512.json (or AMX, AVX2).
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_quantized import (
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    NUM_LAYERS,
    TOP_K,
    make_inputs,
    make_layers,
)
from harness import (
    INSTRUCTIONS,
    format_table,
    interleaved_ms,
    machine_facts,
    read_bandwidth_gb_s,
    relative_error,
    summary,
    use_cpu_kernels,
    write_json,
)
from torch import Tensor

import moe_ops
from moe_ops.bench.layers import per_expert_loop
from moe_ops.integrations.checkpoints import ggml as blocks_of_ggml

SCHEMES = ("", "int4_w4a16:g128", "int4_w4a16:g32", "mxfp4_w4a16", "int8_w8a16:channel")
F32, I32 = 0, 26  # of ggml_type
TYPES = {"bf16": 30, "q4_0": 2, "q8_0": 8, "mxfp4": 39, "q4_k": 12, "q6_k": 14}
REPACKED = ("q4_0", "mxfp4", "q4_k")  # those that have another layout on x86-64
SHARED = ("q8_0", "q4_k", "q6_k")  # whose blocks moe_ops reads

# Each library has threads of its own, which spin behind a call, by libgomp's default for 4 ms: so
# long calls that follow the other library's are not timed.
SPINNING = 6e-3  # seconds

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_bytes = ctypes.c_size_t


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = [("mem_size", _bytes), ("mem_buffer", _pointer), ("no_alloc", ctypes.c_bool)]


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_pointer, [InitParams]),
    "ggml_new_tensor_2d": (_pointer, [_pointer, _int, _size, _size]),
    "ggml_new_tensor_3d": (_pointer, [_pointer, _int, _size, _size, _size]),
    "ggml_mul_mat_id": (_pointer, [_pointer] * 4),
    "ggml_swiglu_split": (_pointer, [_pointer] * 3),
    "ggml_mul": (_pointer, [_pointer] * 3),
    "ggml_add": (_pointer, [_pointer] * 3),
    "ggml_view_2d": (_pointer, [_pointer, _pointer, _size, _size, _bytes, _bytes]),
    "ggml_new_graph": (_pointer, [_pointer]),
    "ggml_build_forward_expand": (None, [_pointer, _pointer]),
    "ggml_quantize_chunk": (_bytes, [_int, _pointer, _pointer, _size, _size, _size, _pointer]),
    "ggml_row_size": (_bytes, [_int, _size]),
    "ggml_get_data": (_pointer, [_pointer]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_pointer]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_pointer, [_pointer, _pointer]),
    "ggml_backend_tensor_set": (None, [_pointer, _pointer, _bytes, _bytes]),
    "ggml_backend_graph_compute": (_int, [_pointer, _pointer]),
    "ggml_backend_reg_get_proc_address": (_pointer, [_pointer, ctypes.c_char_p]),
    "ggml_backend_reg_dev_get": (_pointer, [_pointer, _bytes]),
    "ggml_backend_cpu_buffer_type": (_pointer, []),
    "ggml_backend_cpu_init": (_pointer, []),
    "ggml_backend_cpu_set_n_threads": (None, [_pointer, _int]),
    "ggml_backend_cpu_reg": (_pointer, []),
}


class Ggml:
    """The functions used here, and a backend of so many threads."""

    def __init__(self, folder: Path, threads: int) -> None:
        libraries = [
            ctypes.CDLL(str(folder / f"libggml-{part}.so"), ctypes.RTLD_GLOBAL)
            for part in ("base", "cpu")
        ]
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(next(of for of in libraries if hasattr(of, name)), name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, threads)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self) -> int:
        """Room for a graph's tensors, whose data lies elsewhere."""
        return self.init(InitParams(1 << 20, None, True))

    def repacked(self) -> int:
        """The buffer type whose weights are repacked."""
        registry = self.backend_cpu_reg()
        found = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(_pointer), _pointer)(found)
        types = extra(self.backend_reg_dev_get(registry, 0))
        for number in range(8):
            if not types[number]:
                break
            if self.backend_buft_name(types[number]) == b"CPU_REPACK":
                return types[number]
        raise SystemExit("this build of ggml repacks nothing")

    def quantized(self, of_type: int, values: Tensor) -> Tensor:
        """Of (E, N, K), the bytes of a tensor."""
        E, N, K = values.shape
        data = torch.empty(E * N * self.row_size(of_type, K), dtype=torch.uint8)
        source = values.float().contiguous()
        self.quantize_chunk(of_type, source.data_ptr(), data.data_ptr(), 0, E * N, K, None)
        return data


class Layer:
    """Weights of a layer in one type."""

    def __init__(self, ggml: Ggml, of_type: int, values: list[Tensor], buffer: int) -> None:
        context = ggml.context()
        K, I, E = HIDDEN, INTERMEDIATE, NUM_EXPERTS
        shapes = [(K, I, E), (K, I, E), (I, K, E)]
        made = [ggml.new_tensor_3d(context, of_type, *shape) for shape in shapes]
        ggml.backend_alloc_ctx_tensors_from_buft(context, buffer)
        for tensor, data in zip(made, values, strict=True):
            ggml.backend_tensor_set(tensor, data.data_ptr(), 0, data.nbytes)
        self.gate, self.up, self.down = made


def read_blocks(name: str, data: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Our layers of the blocks of gate, up and down."""
    rows = (INTERMEDIATE, INTERMEDIATE, HIDDEN)
    gate, up, down = [b.view(NUM_EXPERTS, n, -1) for b, n in zip(data, rows, strict=True)]
    weights = []
    for blocks in (torch.cat((gate, up), 1), down):
        parts = blocks_of_ggml.convert(name.upper(), {"weight": blocks}, {})
        weights.append(moe_ops.from_quantized(name, **parts))
    w13, w2 = weights
    return [(w13.clone(), w2.clone()) for _ in range(NUM_LAYERS)]


def graph(ggml: Ggml, layer: Layer, x: Tensor, ids: Tensor, router: Tensor) -> tuple[int, Tensor]:
    """A graph of the layer, and where it writes (M, K) in fp32."""
    M, K = x.shape
    context = ggml.context()
    tokens = ggml.new_tensor_3d(context, F32, K, 1, M)
    experts = ggml.new_tensor_2d(context, I32, TOP_K, M)
    weights = ggml.new_tensor_3d(context, F32, 1, TOP_K, M)
    up = ggml.mul_mat_id(context, layer.up, tokens, experts)
    gate = ggml.mul_mat_id(context, layer.gate, tokens, experts)
    h = ggml.swiglu_split(context, gate, up)
    y = ggml.mul(context, ggml.mul_mat_id(context, layer.down, h, experts), weights)
    views = [ggml.view_2d(context, y, K, M, 4 * K * TOP_K, 4 * K * j) for j in range(TOP_K)]
    out = views[0]
    for view in views[1:]:
        out = ggml.add(context, out, view)
    made = ggml.new_graph(context)
    ggml.build_forward_expand(made, out)
    ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.backend_cpu_buffer_type())
    for tensor, value in ((tokens, x.float()), (experts, ids.int()), (weights, router.float())):
        value = value.contiguous()
        ggml.backend_tensor_set(tensor, value.data_ptr(), 0, value.nbytes)
    floats = (ctypes.c_float * (M * K)).from_address(ggml.get_data(out))
    return made, torch.frombuffer(floats, dtype=torch.float32).view(M, K)


def run_case(
    M: int, ours: dict[str, list], theirs: dict[str, list[Layer]], ggml: Ggml, rounds: int
) -> list[dict[str, Any]]:
    x, ids, router = make_inputs(M)
    graphs = {
        name: [graph(ggml, layers[i], x, ids[i], router) for i in range(NUM_LAYERS)]
        for name, layers in theirs.items()
    }

    def own(scheme: str) -> Callable[[int], Tensor]:
        return lambda i: moe_ops.fused_experts(x, *ours[scheme][i], router, ids[i])

    def of_ggml(name: str) -> Callable[[int], Tensor]:
        def call(i: int) -> Tensor:
            made, out = graphs[name][i]
            assert ggml.backend_graph_compute(ggml.backend, made) == 0
            return out

        return call

    calls = {f"moe_ops {scheme or 'bf16'}": own(scheme) for scheme in ours}
    calls |= {f"ggml {name}": of_ggml(name) for name in theirs}

    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(0, rounds, NUM_LAYERS):
        for library in ("moe_ops", "ggml"):
            of_library = {name: c for name, c in calls.items() if name.startswith(library)}
            end = time.perf_counter() + SPINNING
            while time.perf_counter() < end:
                of_library[f"{library} bf16"](0)
            for name, found in interleaved_ms(of_library, NUM_LAYERS, NUM_LAYERS).items():
                times[name] += found
    expected = {
        scheme: per_expert_loop(x.double(), *plain(ours[scheme][0]), router, ids[0])
        for scheme in ("", *SHARED)
    }
    rows = []
    for name, found in times.items():
        row = {"layer": name, "num_tokens": M, "ms": summary(found)}
        out, of = calls[name](0), name.split(",")[0].split()[1]
        row["error_against_bf16_weights"] = float(f"{relative_error(out, expected['']):.2e}")
        if of in SHARED:
            row["error_against_these_weights"] = float(f"{relative_error(out, expected[of]):.2e}")
        rows.append(row)
    return rows


def plain(weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Weights as the numbers that they stand for."""
    return [w.dequantize(torch.float32) if hasattr(w, "qdata") else w for w in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ggml", type=Path, required=True, help="the folder of its libraries")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=60, help="calls of each at one token")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        *("--avx",), type=int, choices=[1024, 512, 2], default=1024, help="our widest: 1024 is AMX"
    )
    parser.add_argument("--write", action="store_true", help="keep the times in results/")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    avx, gb_s = use_cpu_kernels(arguments.avx), read_bandwidth_gb_s()
    facts = machine_facts() | {"read_gb_s": round(gb_s, 1), "avx": avx}
    print(facts)
    ggml = Ggml(arguments.ggml, arguments.threads)
    ours = {scheme: make_layers(scheme) for scheme in SCHEMES}
    w13, w2 = ours[""][0]
    theirs: dict[str, list[Layer]] = {}
    for name, of_type in TYPES.items():
        values = [ggml.quantized(of_type, w) for w in (*w13.chunk(2, dim=1), w2)]
        if name in SHARED:
            ours[name] = read_blocks(name, values)
        buffers = {name: ggml.backend_cpu_buffer_type()}
        if name in REPACKED:
            buffers[f"{name}, repacked"] = ggml.repacked()
        for title, buffer in buffers.items():
            theirs[title] = [Layer(ggml, of_type, values, buffer) for _ in range(NUM_LAYERS)]
    rows: list[dict[str, Any]] = []
    for M in arguments.tokens:
        rounds = max(12, arguments.rounds if M <= 8 else arguments.rounds * 8 // M)
        rows += run_case(M, ours, theirs, ggml, rounds)
    table = [
        [
            *(row["layer"], row["num_tokens"]),
            f"{row['ms']['median']:.3f} [{row['ms']['min']:.3f}]",
            row["error_against_bf16_weights"],
            row.get("error_against_these_weights", ""),
        ]
        for row in rows
    ]
    print(format_table(["layer", "M", "median [least] ms", "error", "of products"], table))
    if arguments.write:
        print(write_json(f"cpu_ggml_{INSTRUCTIONS[avx]}", {"machine": facts, "rows": rows}))


if __name__ == "__main__":
    main()
