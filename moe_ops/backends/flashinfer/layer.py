"""The expert layer around FlashInfer's CUTLASS kernels: its own small kernels and the call of the library."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.activations import NO_LIMIT
from moe_ops.backends.flashinfer import library
from moe_ops.backends.flashinfer.library import Kernels
from moe_ops.backends.flashinfer.schemes import ACTIVATIONS, SCHEMES, Scheme
from moe_ops.kernels.triton_launch import Launch, gpu, pointers, run
from moe_ops.kernels.triton_rows import activation_of
from moe_ops.meta.workspace import carve, cdiv, round_up
from moe_ops.ops.args import ExpertsArgs


class _Pieces:
    """Pieces of a buffer, one after the other, each at a multiple of 128 bytes."""

    def __init__(self, buffer: Tensor):
        self.buffer, self.used = buffer.reshape(-1).view(torch.uint8), 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        piece = carve(self.buffer[self.used :], shape, dtype)
        self.used += round_up(piece.nbytes, 128)
        return piece


def experts(a: ExpertsArgs) -> None:
    x, ids, out = a.hidden_states, a.topk_ids, a.out
    M, top_k = ids.shape
    if M == 0:
        return
    _check_contiguous(a)
    E, N = a.w13.shape[:2]
    K, device = x.shape[1], x.get_device()
    scheme = SCHEMES[a.scheme]
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
            ACTIVATIONS[a.activation],
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
    a: ExpertsArgs, local: Tensor, sums: Tensor, constants: Tensor, scheme: Scheme
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
