"""Backend `flashinfer`: FlashInfer's CUTLASS layer (cutlass_fused_moe) on SM90, SM100 and SM120.

Before the library's own kernels one small kernel of ours brings ids and router weights into the form it reads, applies
`expert_map` and marks ids that mean "not here" with -1, which it skips; another copies, weighs or quantizes the
input's rows where that is needed. The library allocates its own workspace on every call, from torch's caching
allocator: inside a captured graph, from the graph's pool. Gated activations need w13 laid out with up rows before gate
rows: `moe_ops.prepare(w13, "flashinfer", activation=...)`, `moe_ops.prepare(w2, "flashinfer")`.

`expert_map` covers expert parallelism, so the library's own ranks stay 1 of 1; shards of tensor parallelism are weights of
a smaller I.

Its gelu is the exact one, and gelu_tanh runs on it too: they differ by at most 5e-4 an element, by 2e-4 in the norm of
normally distributed ones, of which bf16 rounds away 1.7e-3 and fp16 2.1e-4.

Which of its kernels run is measured by `moe_ops.warmup` alone (kernels/flashinfer_library.py). SM90 is tested by
tests/backends/flashinfer/test_gpu.py; on SM100 and SM120 nothing was run: what is said of them follows the library's sources.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops import installed
from moe_ops.activations import NO_LIMIT, rows_before
from moe_ops.kernels import flashinfer_library as library
from moe_ops.kernels.flashinfer_library import Kernels
from moe_ops.kernels.triton_launch import Launch, gpu, pointers, run
from moe_ops.kernels.triton_rows import activation_of
from moe_ops.library import ExpertsArgs, register
from moe_ops.meta.workspace import carve, cdiv, round_up
from moe_ops.problem import Buffer, Machine, Problem, Workspaces

# FlashInfer's ActivationType
_GELU, _SILU, _SWIGLU, _GEGLU, _RELU2, _SWIGLUSTEP = 0, 2, 3, 4, 6, 7
_ACTIVATIONS = {
    "silu": _SWIGLU,  # with alpha, beta or limit: the library's SwigluBias
    "swigluoai": _SWIGLU,
    "swigluoai_uninterleave": _SWIGLU,
    "swiglustep": _SWIGLUSTEP,
    "gelu": _GEGLU,
    "gelu_tanh": _GEGLU,
    "silu_no_mul": _SILU,
    "gelu_no_mul": _GELU,
    "gelu_tanh_no_mul": _GELU,
    "relu2_no_mul": _RELU2,
}
_HALF = (torch.bfloat16, torch.float16)
_ALL = ((9, 0), (10, 0), (12, 0))
_BLACKWELL = ((10, 0), (12, 0))
_RULES = ("", ":round", ":ceil")


class _Scheme(NamedTuple):
    """How the library runs a scheme."""

    gpus: tuple[tuple[int, int], ...]  # compute capabilities; a minor one of 0 stands for all
    dtypes: tuple[torch.dtype, ...]
    multiple: int  # what K and I must be a multiple of
    layout: str = ""  # of weights, up to the order of rows
    input: str = ""  # what rows are quantized to beforehand
    factors: str = (
        ""  # how scales of weights and activations become factors (kernels/flashinfer_inputs.py)
    )


_SCHEMES = {
    "": _Scheme(_ALL, _HALF, 8),
    "fp8_tensor_static": _Scheme(_ALL, _HALF, 16, "", "e4m3", "product"),
    "fp8_block": _Scheme(((9, 0),), (torch.bfloat16,), 128),
    **{
        f"mxfp4_w4a16{rule}": _Scheme(((9, 0),), _HALF[:1], 128, "flashinfer_mixed")
        for rule in _RULES
    },
    "nvfp4": _Scheme(_BLACKWELL, _HALF, 128, "flashinfer_swizzled", "", "quotient"),
    **{
        f"mxfp4_mxfp8{rule}": _Scheme(
            _BLACKWELL, _HALF, 128, "flashinfer_swizzled", "mxfp8", "one"
        )
        for rule in _RULES
    },
}

_OTHERS = {
    "int4_w4a8": "flashinfer's int4 kernels multiply activations by one scale known beforehand; those of int4_w4a8 have "
    "one for each token, from the data; use backend='triton' or 'torch'"
}


@cache
def available() -> str | None:
    """None, or why the library cannot be used here."""
    missing = installed.why_not("flashinfer", "flashinfer-python", library.VERSION)
    return missing or installed.why_no_triton()


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty means it can."""
    p, reasons = problem, []
    of = f"scheme {p.scheme!r}" if p.scheme else "plain weights"
    scheme = _SCHEMES.get(p.scheme)
    major, minor = machine.capability
    if machine.device_type != "cuda":
        reasons.append(f"flashinfer needs a CUDA device, got {machine.device_type}")
    elif (major, 0) not in _ALL:
        reasons.append(f"flashinfer needs SM90, SM100 or SM120, got SM{major}{minor}")
    elif scheme is not None and (major, 0) not in scheme.gpus:
        wanted = " or ".join([f"SM{a}{b}" for a, b in scheme.gpus])
        reasons.append(
            f"flashinfer runs {p.scheme or 'plain weights'} on {wanted}, got SM{major}{minor}"
        )
    act = p.activation
    if act is not None and act.name not in _ACTIVATIONS:
        reasons.append(f"flashinfer has no activation {act.name!r}")
    if not p.contiguous_weights:
        reasons.append("flashinfer needs contiguous weights and scales; call .contiguous() once")
    if scheme is None:
        reasons.append(_OTHERS.get(p.scheme, f"flashinfer has no kernel for {of}"))
        return reasons
    if p.dtype not in scheme.dtypes:
        names = " or ".join([str(d).removeprefix("torch.") for d in scheme.dtypes])
        reasons.append(f"flashinfer takes {names} for {of}, got {p.dtype}")
    if p.hidden_size % scheme.multiple or p.intermediate_size % scheme.multiple:
        reasons.append(
            f"flashinfer needs K and I to be multiples of {scheme.multiple} for {of}, got "
            f"{p.hidden_size} and {p.intermediate_size}"
        )
    order = rows_before(act)
    wanted = scheme.layout + (f":{order}" if order else "")
    if p.layout != wanted:
        argument = f", activation={act.name!r}" if act is not None and act.gated else ""
        reasons.append(
            f"flashinfer takes weights in layout {wanted!r}, got {p.layout!r}: once call "
            f"moe_ops.prepare(w13, 'flashinfer'{argument}) and moe_ops.prepare(w2, 'flashinfer')"
        )
    return reasons


def workspace_shapes(M, problem: Problem) -> Workspaces:
    """workspace13 holds the input's rows where they are not read as they come, (M, K); workspace2 the router's
    weights (M, top_k) and the layer's constants in fp32, the scales of quantized rows, and biases in the output's dtype; the
    index workspace local ids (M, top_k). The library's own workspace is not among them: it allocates that."""
    p = problem
    pairs = M * p.top_k
    floats = (
        round_up(pairs, 32)
        + 7 * round_up(p.num_experts, 32)
        + round_up(M * p.hidden_size, 4096) // 128
    )
    if p.has_bias:
        floats = floats + round_up(p.num_experts * p.num_rows, 64) // 2
        floats = floats + round_up(p.num_experts * p.hidden_size, 64) // 2
    return Workspaces(
        Buffer((M, p.hidden_size), p.dtype),
        Buffer((floats,), torch.float32),
        Buffer((pairs,), torch.int32),
    )


class _Pieces:
    """Pieces of a buffer, one after the other, each at a multiple of 128 bytes."""

    def __init__(self, buffer: Tensor):
        self.buffer, self.used = buffer.reshape(-1).view(torch.uint8), 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        piece = carve(self.buffer[self.used :], shape, dtype)
        self.used += round_up(piece.nbytes, 128)
        return piece


def _launch_experts(a: ExpertsArgs) -> None:
    x, ids, out = a.hidden_states, a.topk_ids, a.out
    M, top_k = ids.shape
    if M == 0:
        return
    _check_contiguous(a)
    E, N = a.w13.shape[:2]
    K, device = x.shape[1], x.get_device()
    scheme = _SCHEMES[a.scheme]
    _, gated, _ = activation_of(a.activation)
    order = a.layout.partition(":")[2]
    chip = gpu(device)
    launches, keys = [], []

    pieces = _Pieces(a.workspace2)
    local = carve(a.index_workspace, (M, top_k), torch.int32)
    sums = pieces.take((M, top_k), torch.float32)
    slot = round_up(E, 32)
    constants = pieces.take((7, slot), torch.float32)
    launch, key = _route(a, local, sums, constants, scheme)
    launches.append(launch)
    keys.append(key)

    on_input = a.router_weight_on_input
    rows, row_scales = x, None
    if scheme.input or on_input or not x.is_contiguous():
        dtype = torch.float8_e4m3fn if scheme.input else x.dtype
        rows = carve(a.workspace13, (M, K), dtype)
        if scheme.input == "mxfp8":
            row_scales = pieces.take((M, K // 32), torch.uint8)
        launch, key = _rows(a, rows, row_scales, scheme.input, chip.native)
        launches.append(launch)
        keys.append(key)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if a.w13_bias is not None or a.w2_bias is not None:
        biases = (pieces.take((E, N), out.dtype), pieces.take((E, K), out.dtype))
        launch, key = _biases(a, biases, order)
        launches.append(launch)
        keys.append(key)

    kernels, w13, w2, scales = _weights(a, rows.dtype, constants, E)
    plain_silu = a.activation == "silu" and a.limit >= NO_LIMIT
    swiglu = (None, None, None)
    if gated and a.activation not in ("gelu", "gelu_tanh") and not plain_silu:
        swiglu = tuple([constants[i, :E] for i in range(3)])
    I = N // 2 if gated else N  # noqa: E741
    made = (device, kernels, E, N, K, I, top_k, a.activation, plain_silu, biases[0] is None)
    made += (M if a.scheme == "fp8_block" else 0,)  # compiled for tiles that it chooses by M
    library.check_warm(made)
    run(launches, ("flashinfer", device, *keys), device, False)
    of = library.runner(device, kernels)

    def call(tactics: library.Tactics) -> None:
        of.run_moe(
            out,
            rows,
            local,
            None if on_input else sums,
            w13,
            biases[0],
            w2,
            biases[1],
            scales,
            row_scales,
            *swiglu,
            False,  # swizzled_input_sf
            *(1, 0, 1, 0, 1, 0),  # sizes and ranks of tensor and expert parallelism, and clusters
            False,  # enable_alltoall
            False,  # min_latency_mode
            list(tactics),
            chip.dependent,  # enable_pdl
            _ACTIVATIONS[a.activation],
        )

    name = library.key_of(a.scheme, out.dtype, (E, K, I, top_k), a.activation, a.deterministic, M)
    # fp8_block has one tactic
    if library.tuning() and a.scheme != "fp8_block" and library.numbered(device):
        library.tune(chip.name, name, of, call)
    call(library.tactics(chip.name, name))
    library.mark_warm(made)


def _check_contiguous(a: ExpertsArgs) -> None:
    """The library reads bare addresses."""
    scales = ("w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    for name in ("out", "w13", "w2", *scales):
        tensor = getattr(a, name)
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous for backend 'flashinfer', got strides {tensor.stride()}; call "
                ".contiguous() once"
            )


def _weights(
    a: ExpertsArgs, row_dtype: torch.dtype, constants: Tensor, E: int
) -> tuple[Kernels, Tensor, Tensor, list[Tensor] | None]:
    """The kernels' family, both weights as it wants them typed, and its `quant_scales`."""
    dtype = a.out.dtype
    s13, s2 = a.w13_scale, a.w2_scale
    if not a.scheme:
        return Kernels(dtype, dtype, dtype), a.w13, a.w2, None
    if a.scheme == "fp8_block":
        kernels = Kernels(dtype, a.w13.dtype, dtype, fp8_block=True)
        return kernels, a.w13, a.w2, [s13, s2]
    if a.scheme == "fp8_tensor_static":
        # [factor of w13, inverse scale of a2, factor of w2, scale of a13]
        scales = [constants[3, :E], constants[6, 0], constants[4, :E], a.a13_scale.reshape(())]
        return Kernels(row_dtype, a.w13.dtype, dtype), a.w13, a.w2, scales
    if a.layout.startswith("flashinfer_swizzled"):
        w13, w2 = a.w13.view(torch.int64), a.w2.view(torch.int64)
        s13, s2 = s13.view(torch.int32), s2.view(torch.int32)
        f13, f2 = constants[3, :E], constants[4, :E]
        if (
            a.scheme == "nvfp4"
        ):  # it quantizes rows itself, by the inverses of the activations' scales
            scales = [constants[5, 0], s13, f13, constants[6, 0], s2, f2]
            return Kernels(dtype, torch.int64, dtype), w13, w2, scales
        return Kernels(row_dtype, torch.int64, dtype, mxfp8=True), w13, w2, [s13, f13, s2, f2]
    kernels = Kernels(dtype, torch.uint8, dtype, w4_groups=True)
    return kernels, a.w13, a.w2, [s13, s2]


def _route(
    a: ExpertsArgs, local: Tensor, sums: Tensor, constants: Tensor, scheme: _Scheme
) -> tuple[Launch, tuple]:
    ids, weights, map_ = a.topk_ids, a.topk_weights, a.expert_map
    M, top_k = ids.shape
    E = a.w13.shape[0]
    num_ids, map_stride = (E, 0) if map_ is None else (map_.shape[0], map_.stride(0))
    lanes = 1 << (top_k - 1).bit_length()
    rows = max(1, 512 // lanes**2)
    of_weights = (None, None)
    if scheme.factors == "product":
        of_weights = (a.w13_scale, a.w2_scale)
    elif scheme.factors == "quotient":
        of_weights = (a.w13_global_scale, a.w2_global_scale)
    scales = (
        *of_weights,
        *((a.a13_scale, a.a2_scale) if of_weights[0] is not None else (None,) * 2),
    )
    names = (top_k, lanes, rows, 1 << (E - 1).bit_length(), map_ is not None, scheme.factors)
    tensors = (ids, map_, weights, local, sums, constants, *scales)
    args = (*tensors, M, E, num_ids, *ids.stride(), map_stride, *weights.stride())
    args += (a.alpha, a.beta, a.limit, constants.stride(0), *names)
    return Launch("flashinfer_route", (cdiv(M, rows), 1, 1), args), (*names, *pointers(*tensors))


def _rows(
    a: ExpertsArgs, rows: Tensor, scales: Tensor | None, to: str, native: bool
) -> tuple[Launch, tuple]:
    x, K = a.hidden_states, a.hidden_states.shape[1]
    weights = a.topk_weights if a.router_weight_on_input else None
    static = a.a13_scale if to == "e4m3" else None
    groups = 32
    tensors = (rows, scales, x, weights, static)
    data = rows if native or not to else rows.view(torch.uint8)
    stride = 0 if weights is None else weights.stride(0)
    args = (data, *tensors[1:], K, *x.stride(), stride, to, native, groups)
    key = (K, *x.stride(), to, native, *pointers(*tensors))
    return Launch("flashinfer_rows", (x.shape[0], cdiv(K, 32 * groups), 1), args), key


def _biases(a: ExpertsArgs, made: tuple[Tensor, Tensor], order: str) -> tuple[Launch, tuple]:
    (E, N), K = made[0].shape, made[1].shape[1]
    given = (a.w13_bias, a.w2_bias)
    strides: tuple[int, ...] = ()
    for bias in given:
        strides += (0, 0) if bias is None else bias.stride()
    tensors = (*made, *given)
    args = (*tensors, N, K, *strides, order, 512)
    return Launch("flashinfer_biases", (E, cdiv(max(N, K), 512), 1), args), (
        order,
        *pointers(*tensors),
    )


BACKEND = register(
    "flashinfer",
    available=available,
    supports=supports,
    workspace_shapes=workspace_shapes,
    launch={"experts": _launch_experts},
    devices=("CUDA",),
    native_schemes=tuple(_SCHEMES),
    native_capability=(9, 0),
    warm=library.warm,
)
