"""Compile the Triton kernels of a backend without a GPU and print what came out.

    python tools/compile_kernels.py [--arch 90] [--gpu "NVIDIA H200"] [--shape qwen3]
                                         [--M 1 64] [--backend deep_gemm]

The backend's launch code runs on tensors without storage, and every kernel that it would launch
is compiled with the same arguments. Printed: registers, spilled bytes, shared memory, occupancy
(blocks a multiprocessor), tensor-core shapes, and asynchronous copies (`cp.async` by width:
weights stream with 16 bytes). Needs triton, not a GPU; TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moe_ops import backends, environment, kernels
from moe_ops.activations import Activation
from moe_ops.autograd.adapters import UNADAPTED, Adapters, LowRank
from moe_ops.autograd.fused import FusedStep
from moe_ops.autograd.grouped_fused import GroupedFusedStep, PairStep
from moe_ops.autograd.step import Needs
from moe_ops.backends.cutlass import library as cutlass
from moe_ops.backends.deep_gemm import library as deep_gemm
from moe_ops.kernels import launch
from moe_ops.kernels.comm import push
from moe_ops.kernels.comm.mailbox import PROGRAMS, Mailbox
from moe_ops.kernels.launch import Gpu, Launch
from moe_ops.kernels.mixed_gemm import configs as mixed_configs
from moe_ops.kernels.place.layout import Layout
from moe_ops.kernels.residency.admit import admit
from moe_ops.kernels.residency.fetch import fetch
from moe_ops.kernels.residency.table import table_of
from moe_ops.kernels.router import fused, topk
from moe_ops.kernels.rows.gate_up import gate_up
from moe_ops.kernels.rows.operand import Operand
from moe_ops.kernels.rows.push_scatter import push_scatter
from moe_ops.meta.router import router_workspace
from moe_ops.meta.scales import DEEP_GEMM_UE8M0, TRITON_E2M1
from moe_ops.meta.symmetric import SymmetricLayout, packed_bytes
from moe_ops.ops import library
from moe_ops.ops.call import ExpertsCall, GroupedCall, Weight
from moe_ops.ops.options import Options
from moe_ops.ops.problem import Machine, Problem
from moe_ops.ops.products import Products
from moe_ops.schemes import SCHEMES, get_scheme, schemes_of_layer

Arch = int | str  # 90 for an NVIDIA GPU of compute capability 9.0, "gfx942" for one of AMD
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# a block's static and dynamic shared memory at most (CUDA C programming guide, table of compute
# capabilities; AMD CDNA 3 instruction set architecture, local data share)
SHARED_MEMORY: dict[Arch, int] = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
    "gfx942": 64 * 1024,
}
# of an A100, A40, RTX 4090, H200, B200, RTX 5090 and MI300X
MULTIPROCESSORS: dict[Arch, int] = {
    **{80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170},
    "gfx942": 304,
}
SHAPES = {  # E, top_k, K, I
    "qwen3": (128, 8, 2048, 768),
    "mixtral": (8, 2, 4096, 14336),
    "dsv3": (256, 8, 7168, 2048),
    "gptoss20": (32, 4, 2880, 2880),
    "odd": (4, 2, 130, 70),
}


@dataclass(frozen=True)
class Call:
    """One call of the backend. `kind` is as in `Problem`; for the other two M is T and S."""

    shape: tuple[int, int, int, int]  # E, top_k, K, I
    M: int
    scheme: str = ""  # or two, as in "int4_w4a16:g128+plain"
    dtype: torch.dtype = torch.bfloat16
    kind: str = "experts"
    activation: str = "silu"
    bias: bool = False
    expert_map: bool = False
    transposed: bool = False  # weights stored (E, K, N)
    ids: torch.dtype = torch.int32
    router: torch.dtype = torch.float32
    backend: str = "triton"  # or another one, for what runs around its products
    layout: str = ""  # of quantized weights: DEEP_GEMM_UE8M0 or TRITON_E2M1
    arrives: bool = False  # the input arrives quantized
    batch_invariant: bool = False
    global_rows: bool = False  # each row of w13 has a global scale
    rank: int = 0  # of eight adapters, of which each token has one; 0: tokens have none
    by_expert: bool = False  # each expert has its own parameters of the activation


@dataclass(frozen=True)
class RouterCall:
    """One call of `moe_ops::route_tokens`, of as many tokens as its own kernels serve."""

    shape: tuple[int, int, int]  # E, top_k, K
    M: int
    dtype: torch.dtype = torch.bfloat16
    logits: torch.dtype = torch.bfloat16
    weights: torch.dtype = torch.float32  # of topk_weights
    ids: torch.dtype = torch.int64
    bias: bool = False  # of the linear layer
    choice: tuple[str, bool, int, int] = ("softmax", True, 1, 1)  # scoring, renormalize, groups
    correction_bias: bool = False


@dataclass(frozen=True)
class TrainingCall:
    """Forward and backward pass of a layer whose experts train, whose quantized experts are
    frozen, or whose frozen experts have adapters of a rank."""

    shape: tuple[int, int, int, int]  # E, top_k, K, I
    M: int
    activation: str = "silu"
    bias: bool = False
    on_input: bool = False  # router weights multiply the input; top_k is 1
    scheme: str = ""
    rank: int = 0
    global_rows: bool = False
    by_expert: bool = False  # each expert has its own parameters of the activation


@dataclass(frozen=True)
class ExchangeCall:
    """Dispatch and combine through peers' memory."""

    ranks: int
    max_num_tokens: int
    K: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    ids: torch.dtype = torch.int64


@dataclass(frozen=True)
class SlotsCall:
    """Experts that are brought into slots."""

    experts: int
    slots: int
    pieces: int  # tensors of an expert
    ids: torch.dtype | None = torch.int64  # None: of a further pass


class Compiled(NamedTuple):
    """A kernel as a call starts it."""

    name: str  # in profilers
    constants: dict[str, Any]
    warps: int
    binary: Any  # triton's CompiledKernel; None where launches are only listed
    registers: int | None = None  # of a thread at most, where the launch sets it
    grid: tuple[int, ...] = ()


AnyCall = Call | RouterCall | TrainingCall | ExchangeCall | SlotsCall


class _Driver:
    """Stands in for Triton's: a GPU that can be compiled for."""

    def __init__(self, arch: Arch):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        if isinstance(self.arch, str):
            return GPUTarget("hip", self.arch, 64)
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> Arch:
        return self.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


class _Recorder:
    """Stands in for a kernel: lists what it is launched with, and compiles it."""

    def __init__(self, function: Any, found: list[Compiled], compiles: bool):
        self.function, self.found, self.compiles = function, found, compiles

    def __getitem__(self, grid: tuple):
        def compile_(*args: Any, **options: Any):
            values = zip(self.function.params, args, strict=True)
            constants = {p.name: value for p, value in values if p.is_constexpr}
            name, binary = self.function.__name__, None
            if self.compiles:
                try:
                    binary = self.function.warmup(*args, grid=grid, **options)
                except Exception as error:
                    error.add_note(f"{name} {constants}")
                    raise
            warps, registers = options["num_warps"], options.get("maxnreg")
            self.found.append(Compiled(name, constants, warps, binary, registers, grid))
            return binary

        return compile_


def machine_of(arch: Arch, *backends: str) -> Machine:
    """A machine with a GPU of this architecture and these backends."""
    facts = {"available": backends, "triton": triton.__version__}
    if isinstance(arch, str):
        return Machine("cuda", gfx=arch, **facts)
    return Machine("cuda", (arch // 10, arch % 10), **facts)


def gpu_of(arch: Arch, name: str = "") -> Gpu:
    """A GPU of this architecture; `name` finds the configs measured on it."""
    capability = machine_of(arch).capability
    native, pdl = capability >= launch.NATIVE_CAPABILITY, capability >= launch.PDL_CAPABILITY
    return Gpu(SHARED_MEMORY[arch], native, pdl, name, MULTIPROCESSORS[arch])


class _Forgetful(dict):
    """What remembers no kernel: a call that launches one twice asks for it twice."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _NoGemms(cutlass.Gemms):
    """Products of backend cutlass that are not run."""

    def run(self, kernel: str, gemm: cutlass.GroupedGemm) -> None:
        pass


@contextmanager
def _compiling(gpu: Gpu, arch: Arch, compiles: bool = True) -> Iterator[list[Compiled]]:
    """Kernels that are launched are compiled for `arch` and listed, none is started."""
    found: list[Compiled] = []
    start = launch._start

    def compile_one(one: Launch, first: bool, gpu: Gpu) -> Any:
        kernel: Any = SimpleNamespace(
            arguments=one.kernel.arguments,
            function=_Recorder(one.kernel.function, found, compiles),
            pdl_first=one.kernel.pdl_first,
            waits=one.kernel.waits,
            asserts=one.kernel.asserts,
        )
        return start(one._replace(kernel=kernel), first, gpu)

    before = driver._active
    sm90 = arch == 90 and environment.why_no_gluon(environment.TRITON) is None
    driver.set_active(_Driver(arch))
    try:
        with (
            mock.patch.object(launch, "_start", compile_one),
            mock.patch.object(launch, "_compiled", _Forgetful()),
            mock.patch.object(launch, "gpu", lambda device: gpu),
            mock.patch.object(deep_gemm, "alignment", lambda: deep_gemm.ALIGNMENT),
            mock.patch.object(deep_gemm, "grouped_gemm", lambda *_: None),
            mock.patch.object(deep_gemm, "masked_gemm", lambda *_: None),
            mock.patch.dict(cutlass._loaded, {-1: _NoGemms(None, 132)}),
            mock.patch.object(mixed_configs, "on_sm90", lambda _: sm90),
        ):
            yield found
    finally:
        driver._active = before


def kernel_names() -> list[str]:
    """All kernels, by the names they have in profilers."""
    names = []
    for package in (kernels, backends):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            values = vars(importlib.import_module(module.name)).values()
            names += [value.name for value in values if isinstance(value, launch.Kernel)]
    return list(dict.fromkeys(names))


def _empty(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _weight(
    call: Call, name: str, rows: int, columns: int, global_rows: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """A weight (E, rows, columns) of a scheme as it is stored, and the tensors that belong to
    it."""
    E = call.shape[0]
    scheme = get_scheme(name)
    desc = scheme.weight
    dtype = call.dtype if desc is None else desc.storage_dtype
    if call.transposed:
        data = _empty(E, columns, rows, dtype=dtype).transpose(1, 2)
    else:
        data = _empty(*scheme.qdata_shape(E, rows, columns), dtype=dtype)
    if desc is None:
        return data, {}
    if call.layout == DEEP_GEMM_UE8M0:
        words = (E, -(-columns // desc.group.cols // 4), rows)
        return data, {"scale": _empty(*words, dtype=torch.int32)}
    of_scale = torch.uint8 if desc.is_mx else desc.scale_dtype or call.dtype
    of_zero = torch.int8 if desc.dtype == "int8" else torch.uint8
    dtypes = {
        "scale": of_scale,
        "zero_point": of_scale if desc.minimum else of_zero,
        "channel_scale": torch.float16 if desc.two_levels else torch.float32,
    }
    shapes = scheme.scale_shapes(E, rows, columns, call.layout, global_rows=global_rows)
    return data, {
        name: _empty(*shape, dtype=dtypes.get(name, torch.float32))
        for name, shape in shapes.items()
        if shape is not None
    }


def _arriving(call: Call, rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Activations (.., K) as the scheme quantizes them: elements, scales, global scale."""
    desc, K = get_scheme(call.scheme).activation, call.shape[2]
    assert desc is not None, call
    shape = () if desc.group.is_tensor else (*rows, desc.scale_shape(1, K)[1])
    dtype = torch.uint8 if desc.is_mx else desc.scale_dtype
    assert dtype is not None, call
    return (
        _empty(*rows, K * desc.format.bits // 8, dtype=desc.storage_dtype),
        _empty(*shape, dtype=dtype),
        _empty(dtype=torch.float32) if desc.global_scale else None,
    )


def problem_of(call: Call) -> Problem:
    """What the call's backend is asked about."""
    E, top_k, K, I = call.shape
    activation = Activation(call.activation)
    linear = call.kind == "grouped_linear"
    return Problem(
        call.kind,
        E,
        K,
        0 if linear else I,
        2 * I if activation.gated else I,
        top_k if call.kind == "experts" else 0,
        call.dtype,
        call.scheme,
        call.layout,
        Options(None if linear else activation, batch_invariant=call.batch_invariant),
        has_bias=call.bias,
        activation_by_expert=call.by_expert,
        mapped_experts=2 * E if call.expert_map else 0,
        quantized_input=call.arrives,
        global_rows=("w13",) if call.global_rows else (),
    )


def refused(call: AnyCall, arch: Arch) -> list[str]:
    """Why the call's backend does not take it on a GPU of `arch`, as `explain` says it."""
    if isinstance(call, (RouterCall, SlotsCall)):
        return []
    if isinstance(call, ExchangeCall):
        return [] if isinstance(arch, int) else ["its kernels are for NVIDIA GPUs"]
    if isinstance(call, TrainingCall):
        fits = isinstance(arch, int) and arch >= 90
        return [] if fits else ["torch's grouped product needs compute capability 9.0"]
    machine, backend = machine_of(arch, call.backend), backends.named(call.backend)
    for name, columns in zip(schemes_of_layer(call.scheme), call.shape[2:], strict=True):
        scheme = get_scheme(name)
        if scheme.weight is not None and (reason := scheme.why_not_shape(128, columns)):
            return [reason]
    if call.arrives and call.scheme not in backend.takes.quantized_input:
        return ["takes no input that arrives quantized"]
    return backend.supports(problem_of(call), machine)


def compile_call(call: Call, gpu: Gpu, arch: Arch, compiles: bool = True) -> list[Compiled]:
    """The kernels of one call, compiled for `arch` with the configs that are picked on `gpu`.

    compiles: False lists the launches alone, in about a millisecond.
    """
    E, top_k, K, I = call.shape
    activation, M = Activation(call.activation), call.M
    N = 2 * I if activation.gated else I
    kind = library.ADAPTED if call.rank else library.KINDS[call.kind]
    w13_scheme, w2_scheme = schemes_of_layer(call.scheme)
    static = (activation_of := get_scheme(w13_scheme).activation) and activation_of.static
    scale = _empty(dtype=torch.float32) if static else None
    fields: dict[str, Any] = dict.fromkeys(kind.args._fields)
    fields |= {"scheme": call.scheme, "layout": call.layout}
    fields["options"] = Options(activation, batch_invariant=call.batch_invariant)
    fields |= {"a13_scale": scale, "a2_scale": scale, "activation_scale": scale}
    of_w13 = _weight(call, w13_scheme, N, K, call.global_rows)
    of_w2 = _weight(call, w2_scheme, K, I)
    for names, (data, parts) in ((("w13", "weight"), of_w13), (("w2",), of_w2)):
        for name in names:
            fields[name] = data
            fields |= {f"{name}_{part}": tensor for part, tensor in parts.items()}
    if call.bias:
        b13, b2 = _empty(E, N, dtype=call.dtype), _empty(E, K, dtype=call.dtype)
        fields |= {"w13_bias": b13, "w2_bias": b2, "bias": b13}
    if call.by_expert:
        fields["activation_by_expert"] = _empty(3, E, dtype=torch.float32)
    if call.expert_map:
        fields["expert_map"] = _empty(2 * E, dtype=torch.int32)
    rows = (E, M) if call.kind == "batched_experts" else (M,)
    x = _empty(*rows, K, dtype=call.dtype)
    if call.arrives:
        x, scale, global_scale = _arriving(call, rows)
        fields |= {"hidden_states_scale": scale, "x_scale": scale}
        fields |= {"hidden_states_global_scale": global_scale, "x_global_scale": global_scale}
    fields |= {"hidden_states": x, "x": x}
    fields["out"] = _empty(*rows, N if call.kind == "grouped_linear" else K, dtype=call.dtype)
    fields["topk_ids"] = _empty(M, top_k, dtype=call.ids)
    fields["topk_weights"] = _empty(M, top_k, dtype=call.router)
    fields["expert_num_tokens"] = fields["offsets"] = _empty(E, dtype=torch.int32)
    chosen = backends.named(call.backend)
    shapes = chosen.workspace_shapes(M, problem_of(call))
    names = ("workspace13", "workspace2", "index_workspace")
    fields |= {n: _empty(*s.shape, dtype=s.dtype) for n, s in zip(names, shapes, strict=True)}
    run = chosen.launch.get(call.kind)
    if call.rank:
        adapts, n, r = chosen.takes.adapts, 8, call.rank
        assert adapts is not None, call.backend
        run, size = adapts.run, adapts.elements(M, problem_of(call), (r, r))
        sizes = {"a13": (r, K), "b13": (N, r), "a2": (r, I), "b2": (K, r)}
        fields |= {name: _empty(n, E, *s, dtype=call.dtype) for name, s in sizes.items()}
        fields["adapter_workspace"] = _empty(size, dtype=torch.float32)
        fields["adapter_scales"] = _empty(n, dtype=torch.float32)
        fields["adapter_ids"] = _empty(M, dtype=call.ids)
    assert run is not None, call.kind
    with _compiling(gpu, arch, compiles) as found:
        run(kind.args(**{n: fields[n] for n in kind.args._fields}))
    return found


def compile_router(
    call: RouterCall, gpu: Gpu, arch: Arch, compiles: bool = True
) -> list[Compiled]:
    """The kernels of a router, compiled for `arch` or, without `compiles`, listed."""
    E, top_k, K = call.shape
    logits = _empty(call.M, E, dtype=call.logits)
    weights, ids = _empty(call.M, top_k, dtype=call.weights), _empty(call.M, top_k, dtype=call.ids)
    correction = _empty(E, dtype=torch.float32) if call.correction_bias else None
    with _compiling(gpu, arch, compiles) as found:
        fused.route_tokens(
            _empty(call.M, E, dtype=call.logits),
            _empty(call.M, top_k, dtype=call.weights),
            _empty(call.M, top_k, dtype=call.ids),
            _empty(*router_workspace(call.M, E, K), dtype=torch.float32),
            _empty(call.M, K, dtype=call.dtype),
            _empty(E, K, dtype=call.dtype),
            _empty(E, dtype=call.dtype) if call.bias else None,
            correction,
            *call.choice,
            1.0,
        )
        topk.route(weights, ids, logits, correction, *call.choice, 1.0)
    return found


def compile_training(
    call: TrainingCall, gpu: Gpu, arch: Arch, compiles: bool = True
) -> list[Compiled]:
    """The kernels of a training step that are ours, compiled for `arch` or listed."""
    E, top_k, K, I = call.shape
    activation = Activation(call.activation)
    N, dtype = 2 * I if activation.gated else I, torch.bfloat16
    x, ids = _empty(call.M, K, dtype=dtype), _empty(call.M, top_k, dtype=torch.int32)
    weights = []
    for size, rows in (((N, K), call.global_rows), ((K, I), False)):
        data, parts = _weight(
            Call(call.shape, call.M, call.scheme), call.scheme, *size, global_rows=rows
        )
        weights.append(Weight(data, **parts, scheme=call.scheme))
    router = _empty(call.M, top_k, dtype=torch.float32)
    biases = [_empty(E, size, dtype=dtype) if call.bias else None for size in (N, K)]
    options = Options(activation, call.on_input, needs_grad=True)
    numbers = _empty(3, E, dtype=torch.float32) if call.by_expert else None
    step = ExpertsCall(
        x, *weights, router, ids, *biases, None, options, activation_by_expert=numbers
    )

    def multiply(
        rows: Tensor, weight: Tensor, _: Tensor, transpose: bool, low: Any = None
    ) -> Tensor:
        return rows.new_empty(rows.shape[0], weight.shape[2 if transpose else 1])

    def outer(a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        return a.new_empty(E, a.shape[1], b.shape[1])

    trained = not (call.scheme or call.rank)
    biases_train = trained and call.bias
    needs = Needs(True, trained, trained, True, biases_train, biases_train, *[call.rank > 0] * 2)
    adapters = UNADAPTED
    if call.rank:
        sizes = ((call.rank, K), (N, call.rank)), ((call.rank, I), (K, call.rank))
        matrices = [[_empty(E, *size, dtype=dtype) for size in pair] for pair in sizes]
        adapters = Adapters(*[LowRank(*pair, 2.0) for pair in matrices])
    products = Products("none", multiply, outer, zeroes=False)
    with _compiling(gpu, arch, compiles) as found:
        forward, backward = [FusedStep(step, adapters, products) for _ in range(2)]
        _, h, u, index = forward.forward()
        grad = _empty(call.M, K, dtype=dtype)
        backward.backward(grad, h, u, index, needs)
        if not call.on_input:  # rows that are sorted have no router weights
            counts = _empty(E, dtype=torch.int64)
            rows = GroupedCall(x, *weights, counts, *biases, options)
            forward, backward = [GroupedFusedStep(rows, adapters, products) for _ in range(2)]
            _, h, u, index = forward.forward()
            backward.backward(grad, h, u, index, needs._replace(weights=False))
            masters = _empty(E, N // 2, K, dtype=torch.float32), None
            launch.run([gate_up(_empty(E, N, K, dtype=dtype), *masters, True)], -1, gpu)
            if trained and not call.bias and activation.gated and not activation.interleaved:
                gate = Weight(_empty(E, I, K, dtype=dtype))
                pair = PairStep(gate.data, rows._replace(w13=gate), adapters, products)
                pair.backward(grad, h, h[:, :I], index, needs._replace(weights=False))
    return found


def compile_exchange(
    call: ExchangeCall, gpu: Gpu, arch: Arch, compiles: bool = True
) -> list[Compiled]:
    """The kernels of dispatch and combine, compiled for `arch` or listed."""
    R, T, K, top_k = call.ranks, call.max_num_tokens, call.K, call.top_k
    rows, x = _empty(R * T, K, dtype=call.dtype), _empty(T, K, dtype=call.dtype)
    ids, weights = _empty(T, top_k, dtype=call.ids), _empty(T, top_k, dtype=torch.float32)
    out_ids = _empty(R * T, top_k, dtype=torch.int32)
    out_weights = _empty(R * T, top_k, dtype=torch.float32)

    def mailbox(words: int, T: int = T, row_bytes: int = K * call.dtype.itemsize) -> Mailbox:
        layout = SymmetricLayout(R, T, row_bytes, words)
        buffer = _empty(layout.num_bytes, dtype=torch.uint8)
        peers, epochs = _empty(R, dtype=torch.int64), _empty(PROGRAMS, dtype=torch.int32)
        return Mailbox(layout, 0, (buffer,) * R, peers, epochs)

    of_all = _empty(R * T, top_k, dtype=torch.int32), _empty(2 * R, dtype=torch.int32), 1
    pairs = push.pairs_of(*of_all, None, out_weights)
    sorted_pairs = push.pairs_of(*of_all, _empty(R * T * top_k, dtype=torch.int32), out_weights)
    pairs_y = _empty(R * T * top_k, K, dtype=call.dtype)
    size = 2 * R * T * top_k
    layout = Layout(sorted_pairs.rows, of_all[0], size)
    whole = K // 128 * 128
    data, scale = (
        _empty(size, whole, dtype=torch.float8_e4m3fn),
        _empty(whole // 128, size, dtype=torch.float32),
    )
    scatters = [
        push_scatter(y, x[:, : y.data.shape[1]], layout, top_k, mailbox(0), 1, gpu)
        for y in (Operand(pairs_y), Operand(data, scale, "fp32"))
        if y.data.shape[1]
    ]
    if whole:
        to = Operand(data, scale, "fp32")
        packed = mailbox(0, T, packed_bytes(whole))
        scatters.append(push_scatter(to, x[:, :whole], layout, top_k, packed, 1, gpu, True))
    with _compiling(gpu, arch, compiles) as found:
        for one in (
            push.push_rows(rows, out_ids, out_weights, x, ids, weights, mailbox(top_k), 1),
            push.push_rows(rows, None, None, x, None, None, mailbox(0), 1),
            push.push_rows(
                out_ids, None, None, ids.int(), None, None, mailbox(0, T, 4 * top_k), 1
            ),
            *scatters,
            push.push_sums(x, rows, mailbox(0), 1),
            push.push_sums(x[:1], rows[:R], mailbox(0, 1), 1),  # to Triton, T = 1 is a constant
            push.push_sums(x, pairs_y.float(), mailbox(0), 1, pairs=pairs),
            push.push_sums(x, pairs_y, mailbox(0), 1, pairs=sorted_pairs),
        ):
            launch.run([one], -1, gpu)
    return found


def compile_slots(call: SlotsCall, gpu: Gpu, arch: Arch, compiles: bool = True) -> list[Compiled]:
    """The kernels that bring experts into slots, compiled for `arch` or listed."""
    E, S = call.experts, call.slots
    table = table_of(_empty(E + 2 * S, dtype=torch.int32), E, S)
    ids = None if call.ids is None else _empty(4, 8, dtype=call.ids)
    words = _empty(256, dtype=torch.int32)
    pieces = _empty(call.pieces, 3, dtype=torch.int64)
    with _compiling(gpu, arch, compiles) as found:
        programs = gpu.multiprocessors
        launches = [admit(table, ids, gpu), fetch(table, words, words, pieces, gpu, programs)]
        launch.run(launches, -1, gpu)
    return found


def compile_any(call: AnyCall, gpu: Gpu, arch: Arch, compiles: bool = True) -> list[Compiled]:
    """The kernels of a call of any kind."""
    if isinstance(call, RouterCall):
        return compile_router(call, gpu, arch, compiles)
    if isinstance(call, TrainingCall):
        return compile_training(call, gpu, arch, compiles)
    if isinstance(call, ExchangeCall):
        return compile_exchange(call, gpu, arch, compiles)
    if isinstance(call, SlotsCall):
        return compile_slots(call, gpu, arch, compiles)
    return compile_call(call, gpu, arch, compiles)


def _compile_one(gpu: Gpu, arch: Arch, call: AnyCall) -> None:
    with suppress(Exception):  # the launch itself will say what is wrong
        compile_any(call, gpu, arch)


def compile_all(calls: Sequence[AnyCall], gpu: Gpu, arch: Arch) -> None:
    """Compile many calls on all cores: Triton keeps kernels on disk, where a later launch finds
    them."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_compile_one, gpu, arch), calls))


def compile_here(calls: Sequence[AnyCall]) -> None:
    """`compile_all` for the GPU of this machine: one process would take some seconds a call."""
    start = time.perf_counter()
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    (major, minor), gfx = environment.gpu_architecture(properties)
    compile_all(calls, launch.gpu(device), gfx or 10 * major + minor)
    print(f"compiled {len(calls)} calls in {time.perf_counter() - start:.0f} s", flush=True)


class Usage(NamedTuple):
    """What a kernel takes: registers and spilled bytes a thread, shared memory a block."""

    registers: int
    spilled: int
    shared: int


def _run_tool(name: str, binary: Any, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [TOOLS / name, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage(binary: Any) -> Usage:
    """Read from the compiled kernel; its stack holds nothing but spilled registers."""
    if "amdgcn" in binary.asm:
        found = [
            int(re.search(rf"\.{key}:\s+(\d+)", binary.asm["amdgcn"])[1])
            for key in ("vgpr_count", "private_segment_fixed_size")
        ]
        return Usage(*found, binary.metadata.shared)
    text = _run_tool("cuobjdump", binary, "-res-usage")
    registers, stack, static = (
        int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK", "SHARED")
    )
    # from SM90 on it has 1 KB of the system's, which is not among the 227 of a block
    return Usage(registers, stack, max(0, static - 1024) + binary.metadata.shared)


def describe(binary: Any, warps: int) -> str:
    """One line of what the assembler made of a kernel."""
    registers, spilled, shared = usage(binary)
    if "amdgcn" in binary.asm:
        shapes = set(re.findall(r"v_mfma_\w+?_(\d+x\d+x\d+\w*)", binary.asm["amdgcn"]))
        shapes_text = ",".join(sorted(shapes)) or "-"
        return f"registers {registers}  spilled {spilled}  shared {shared}  mfma {shapes_text}"
    sass = _run_tool("nvdisasm", binary, "-c")
    resident = min(
        65536 // (-(-registers * 32 // 256) * 256 * warps),
        228 * 1024 // (shared + 1024),
        64 // warps,
    )
    ptx = binary.asm["ptx"]
    shapes = set(
        re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.(?:row\.col\.)?(m\d+n\d+k\d+)", ptx)
    )
    kind = "wgmma" if "wgmma" in ptx else "mma"
    kind += " e4m3" if re.search(r"mma[^;]*\.e4m3\.e4m3", ptx) else ""
    copies = {
        width: len(re.findall(rf"LDGSTS\.E[A-Z.]*\.{width}\b", sass)) for width in ("64", "128")
    }
    return (
        f"registers {registers:3d}  spilled {spilled:3d}  shared {shared:6d}  blocks/SM "
        f"{resident}  "
        f"{kind} {','.join(sorted(shapes)) or '-'}  cp.async {len(re.findall('LDGSTS', sass))} "
        f"(16 B: {copies['128']}, 8 B: {copies['64']})  bulk {len(re.findall('UTMALDG', sass))}  "
        f"LDG {len(re.findall(r'LDG.E', sass))}  shuffles {len(re.findall(r'SHFL', sass))}"
    )


def arch_of(text: str) -> Arch:
    """The architecture that a command line names: "90", "gfx942"."""
    return int(text) if text.isdecimal() else text


def arch_name(arch: Arch) -> str:
    """As compilers name it."""
    return arch if isinstance(arch, str) else f"sm_{arch}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=arch_of, default=90, choices=list(SHARED_MEMORY))
    parser.add_argument("--gpu", default="", help="whose measured configs to use; default: none")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--scheme", choices=SCHEMES, nargs="+", default=list(SCHEMES))
    parser.add_argument("--M", type=int, nargs="+", default=[1, 8, 64, 256, 1024, 4096])
    parser.add_argument("--kind", choices=library.KINDS, default="experts")
    parser.add_argument("--transposed", action="store_true", help="weights stored (E, K, N)")
    parser.add_argument("--layout", choices=["", DEEP_GEMM_UE8M0, TRITON_E2M1], default="")
    parser.add_argument("--activation", default="silu")
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--rank", type=int, default=0, help="of adapters of tokens; 0: none")
    parser.add_argument("--arrives", action="store_true", help="the input arrives quantized")
    parser.add_argument("--backend", choices=["triton", "deep_gemm", "cutlass"], default="triton")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    gpu = gpu_of(arguments.arch, arguments.gpu)
    print(f"triton {triton.__version__}, {arch_name(arguments.arch)}")
    told = set()
    for shape in arguments.shape:
        for scheme in arguments.scheme:
            for M in arguments.M:
                call = Call(SHAPES[shape], M, scheme, kind=arguments.kind, bias=arguments.bias)
                call = replace(
                    call,
                    activation=arguments.activation,
                    transposed=arguments.transposed,
                    backend=arguments.backend,
                    layout=arguments.layout,
                    arrives=arguments.arrives,
                    rank=arguments.rank,
                )
                if reasons := refused(call, arguments.arch):
                    print(f"{shape} {scheme or 'bf16'} M={M}: {'; '.join(reasons)}")
                    continue
                for one in compile_call(call, gpu, arguments.arch):
                    if one.binary.hash in told:
                        continue
                    told.add(one.binary.hash)
                    sizes = " ".join(
                        f"{key}={value}"
                        for key, value in one.constants.items()
                        if type(value) is int
                    )
                    print(f"{shape} {scheme or 'bf16'} M={M} {one.name} {sizes} warps={one.warps}")
                    print(f"    {describe(one.binary, one.warps)}", flush=True)


if __name__ == "__main__":
    main()
