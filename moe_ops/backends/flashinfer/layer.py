"""The expert layer around FlashInfer's CUTLASS kernels: small kernels of ours, and the call of the
library. Imported at first launch only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.activations import NO_LIMIT
from moe_ops.backends.flashinfer import inputs, library
from moe_ops.backends.flashinfer.binding import binding
from moe_ops.backends.flashinfer.library import Kernels
from moe_ops.backends.flashinfer.schemes import ACTIVATIONS, SCHEMES
from moe_ops.kernels import launch
from moe_ops.kernels.launch import Gpu, run
from moe_ops.meta.scales import base_layout
from moe_ops.meta.workspace import carve, round_up
from moe_ops.ops.args import ExpertsArgs
from moe_ops.ops.chunks import chunks

_NO_PDL = Gpu(0, False, False)  # the kernels of inputs.py are launched without it


class _Parts:
    """Parts of a buffer, one after the other, each at a multiple of 128 bytes."""

    def __init__(self, buffer: Tensor):
        self.buffer, self.used = buffer.reshape(-1).view(torch.uint8), 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next part."""
        part = carve(self.buffer[self.used :], shape, dtype)
        self.used += round_up(part.nbytes, 128)
        return part


def experts(a: ExpertsArgs) -> None:
    """Launch `moe_ops::flashinfer_experts`."""
    rows = a.hidden_states.shape[0]
    if rows == 0:
        return
    _check_contiguous(a)
    for part in chunks(a):
        _experts(part, rows)


def _experts(a: ExpertsArgs, rows_of_call: int) -> None:
    """A layer, or a chunk of its tokens, with the tactics for so many rows."""
    x, ids, out = a.hidden_states, a.topk_ids, a.out
    M, top_k = ids.shape
    E, N = a.w13.shape[:2]
    K, device = a.w2.shape[1], x.get_device()  # padded, if weights are
    padded = out.shape[1] != K
    scheme, arrived = SCHEMES[a.scheme], a.hidden_states_scale
    activation, gated = a.options.activation, a.options.activation.gated
    gpu = launch.gpu(device)

    parts = _Parts(a.workspace2)
    local = carve(a.index_workspace, (M, top_k), torch.int32)
    sums = parts.take((M, top_k), torch.float32)
    constants = parts.take((8, round_up(E, 32)), torch.float32)
    if arrived is not None:
        a = a._replace(a13_scale=_scale_of_arrived(a, parts))
    launches = [inputs.route(a, local, sums, constants, scheme)]

    on_input = a.options.router_weight_on_input
    rows, row_scales, target = x, None, out
    if arrived is not None:
        if padded or not x.is_contiguous():
            columns = x.shape[1] * K // out.shape[1]  # bytes
            rows = carve(a.workspace13, (M, columns), x.dtype)
            inputs.copy_rows(a, rows)
        if scheme.input != "e4m3":
            row_scales = arrived
            if padded or not arrived.is_contiguous():
                groups = K // (16 if a.scheme == "nvfp4" else 32)
                row_scales = parts.take((M, groups), arrived.dtype)
                row_scales[:, arrived.shape[1] :].zero_()
                row_scales[:, : arrived.shape[1]].copy_(arrived)
    elif scheme.input:
        rows = carve(a.workspace13, (M, K), torch.float8_e4m3fn)
        if scheme.input == "mxfp8":
            row_scales = parts.take((M, K // 32), torch.uint8)
        launches.append(inputs.quantize(a, rows, row_scales, scheme.input, gpu))
    elif on_input or padded or not x.is_contiguous():
        rows = carve(a.workspace13, (M, K), x.dtype)
        inputs.copy_rows(a, rows)
    if padded:
        both = _Parts(a.workspace13)
        both.take((M, K), rows.dtype)
        target = both.take((M, K), out.dtype)
    w13_bias = w2_bias = None
    if a.w13_bias is not None or a.w2_bias is not None:
        w13_bias, w2_bias = parts.take((E, N), out.dtype), parts.take((E, K), out.dtype)
        inputs.copy_bias(a.w13_bias, w13_bias, base_layout(a.layout).partition(":")[2])
        inputs.copy_bias(a.w2_bias, w2_bias, "")

    kernels, w13, w2, scales = _weights(a, rows.dtype, constants, E)
    plain_silu = activation.name == "silu" and activation.limit >= NO_LIMIT
    swiglu: list[Tensor | None] = [None] * 3
    if gated and activation.name not in ("gelu", "gelu_tanh") and not plain_silu:
        swiglu = [constants[i, :E] for i in range(3)]
    I = N // 2 if gated else N
    made = (
        *(device, kernels, E, N, K, I, top_k, activation.name, plain_silu, w13_bias is None),
        # the library chooses tiles by M, and compiles for them
        M if a.scheme == "fp8_block" else 0,
    )
    library.check_warm(made)
    run(launches, device, _NO_PDL)
    runner = library.runner(device, kernels)

    def call(tactics: library.Tactics) -> None:
        runner.run_moe(
            target,
            rows,
            local,
            None if on_input else sums,
            w13,
            w13_bias,
            w2,
            w2_bias,
            scales,
            row_scales,
            *swiglu,
            *binding().nones,
            False,  # swizzled_input_sf
            *(1, 0, 1, 0, 1, 0),  # sizes and ranks of tensor and expert parallelism, and clusters
            False,  # enable_alltoall
            False,  # min_latency_mode
            list(tactics),
            gpu.pdl,  # enable_pdl
            ACTIVATIONS[activation.name],
        )

    # by the least power of two of rows; fp8_block has one tactic
    sizes, rows_of_key = (E, K, I, top_k), max(rows_of_call - 1, 0).bit_length()
    deterministic = not a.options.atomic_sums
    of_call = (a.scheme, out.dtype, sizes, activation.name, deterministic)
    key = (gpu.name, *of_call, rows_of_key)
    if library.tuning() and a.scheme != "fp8_block" and library.numbered(device):
        library.tune(key, runner, call, deterministic)
    call(library.tactics(key))
    if padded:
        out.copy_(target[:, : out.shape[1]])
    library.mark_warm(made)


def _scale_of_arrived(a: ExpertsArgs, parts: _Parts) -> Tensor | None:
    """The one scale of an input that arrives quantized, in the place of the static one.

    Raises:
        ValueError: the input does not have the dtype that the scheme quantizes to.
    """
    expected = torch.uint8 if a.scheme == "nvfp4" else torch.float8_e4m3fn
    if a.hidden_states.dtype != expected:
        raise ValueError(
            f"hidden_states with scales must have dtype {expected} for scheme {a.scheme}, got "
            f"{a.hidden_states.dtype}"
        )
    if a.scheme == "fp8_tensor_static":
        return a.hidden_states_scale
    if a.hidden_states_global_scale is None:
        return a.a13_scale
    scale = parts.take((1,), torch.float32)
    return torch.reciprocal(a.hidden_states_global_scale.view(1), out=scale)


def _check_contiguous(a: ExpertsArgs) -> None:
    """Raise unless tensors are contiguous: the library reads bare addresses."""
    scales = ("w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale")
    for name in ("out", "w13", "w2", *scales):
        tensor = getattr(a, name)
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous for backend 'flashinfer', got strides "
                f"{tensor.stride()}; call .contiguous() once"
            )


def _weights(
    a: ExpertsArgs, row_dtype: torch.dtype, constants: Tensor, E: int
) -> tuple[Kernels, Tensor, Tensor, list[Tensor] | None]:
    """(the family of kernels, w13 and w2 in the dtypes that it takes, its `quant_scales`)."""
    dtype = a.out.dtype
    s13, s2 = a.w13_scale, a.w2_scale
    if not a.scheme:
        return Kernels(dtype, dtype, dtype), a.w13, a.w2, None
    assert s13 is not None and s2 is not None, a.scheme
    by_expert = a.a2_scale is not None and a.a2_scale.numel() > 1
    inverse = constants[6, :E] if by_expert else constants[6, 0]
    if a.scheme == "fp8_block":
        kernels = Kernels(dtype, a.w13.dtype, dtype, fp8_block=True)
        return kernels, a.w13, a.w2, [s13, s2]
    if a.scheme == "fp8_tensor_static":
        # [factor of w13, inverse scale of a2, factor of w2, scale of a13]
        scales = [constants[3, :E], inverse, constants[4, :E], constants[7, 0]]
        return Kernels(row_dtype, a.w13.dtype, dtype), a.w13, a.w2, scales
    if a.layout.startswith("flashinfer_swizzled"):
        w13, w2 = a.w13.view(torch.int64), a.w2.view(torch.int64)
        s13, s2 = s13.view(torch.int32), s2.view(torch.int32)
        f13, f2 = constants[3, :E], constants[4, :E]
        if a.scheme == "nvfp4":
            # the library quantizes rows in 16 bits itself, by the inverses of the scales
            scales = [constants[5, 0], s13, f13, inverse, s2, f2]
            return Kernels(row_dtype, torch.int64, dtype), w13, w2, scales
        return Kernels(row_dtype, torch.int64, dtype, mxfp8=True), w13, w2, [s13, f13, s2, f2]
    kernels = Kernels(dtype, torch.uint8, dtype, w4_groups=True)
    return kernels, a.w13, a.w2, [s13, s2]
