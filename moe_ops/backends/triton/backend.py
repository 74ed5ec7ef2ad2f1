"""Backend `triton`: every scheme on any CUDA GPU from SM80 on, bf16, fp16 or fp32 activations.

Where activations are quantized to what no GPU up to SM90 multiplies, they are rounded and multiplied in a wider type:
kernels/triton_emulated.py.

Four launches a layer: route (or none for one token), GEMM1 with the activation in its epilogue, GEMM2,
the weighted sum; where activations are quantized one more may prepare them. One token of plain or block-scaled
weights takes two: kernels/triton_vector.py; of weights of 4 and 8 bits: kernels/triton_vector_packed.py. More tokens of
these take five on SM90, few of them four: kernels/gluon_packed.py. Nothing is allocated or read by the host. On a machine without a GPU the
kernels run under Triton's interpreter if TRITON_INTERPRET=1 was set before this import.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_ops import environment
from moe_ops.activations import NO_LIMIT
from moe_ops.backends.triton.relayout import RELAYOUTS
from moe_ops.kernels import (
    gluon_packed_launch,
    triton_emulated_launch,
    triton_large_launch,
    triton_packed_launch,
    triton_packed_tiles,
    triton_scales,
    triton_tiles,
    triton_vector_launch,
)
from moe_ops.kernels.triton_launch import (
    INTERPRETED,
    NATIVE_CAPABILITY,
    Launch,
    gpu,
    pointers,
    run,
)
from moe_ops.kernels.triton_rows import (
    Rows,
    activation_of,
    combine,
    group_blocks,
    pair_rows,
    route,
    sorted_rows,
)
from moe_ops.kernels.triton_scales import Input, Validity, Weight, weight_of
from moe_ops.kernels.triton_tiles import GROUP, LARGE_ROWS, SMALLEST_TILE, Tile, block_bound
from moe_ops.meta.scales import TRITON_E2M1
from moe_ops.meta.workspace import cdiv, maximum
from moe_ops.ops.args import BatchedExpertsArgs, ExpertsArgs, GroupedLinearArgs
from moe_ops.ops.library import register
from moe_ops.ops.problem import Buffer, Machine, Problem, Workspaces
from moe_ops.schemes import SCHEMES, get_scheme

# looked up once: Dynamo would trace what looks them up
_TRITON, _SPOKEN = environment.version("triton"), gluon_packed_launch.spoken()
_BACK = "moe_ops.prepare(weight, 'torch') brings it back"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_QUANTIZING = ("fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_block")
_QUANTIZING += ("int8_w8a8", "int8_w8a8_static")
_PACKED = frozenset(filter(triton_packed_launch.describe, SCHEMES))
_NATIVE = (*_QUANTIZING, *sorted(name for name in _PACKED if SCHEMES[name].weight_only))
_blocks = lru_cache(maxsize=8192)(block_bound)  # spares two sym_min of 0.8 us a call


def available() -> str | None:
    """None, or why Triton cannot be imported here."""
    return environment.why_no_triton()


def supports(problem: Problem, machine: Machine) -> list[str]:
    """Reasons why this backend cannot run the problem; empty means it can."""
    reasons = []
    if machine.device_type != "cuda" and not (machine.device_type == "cpu" and INTERPRETED):
        reasons.append(f"triton needs a CUDA device, got {machine.device_type}")
    elif machine.device_type == "cuda" and machine.capability < (8, 0):
        major, minor = machine.capability
        reasons.append(f"triton needs compute capability 8.0 or higher, got {major}.{minor}")
    if problem.layout == TRITON_E2M1:
        reasons += _reasons_against_e2m1_words(problem, machine)
    elif problem.layout:
        reasons.append(
            f"triton takes weights in their natural layout or in {TRITON_E2M1!r}, got {problem.layout!r}; {_BACK}"
        )
    if problem.dtype not in _DTYPES:
        reasons.append(f"triton takes bfloat16, float16 or float32, got {problem.dtype}")
    return reasons


def _reasons_against_e2m1_words(problem: Problem, machine: Machine) -> list[str]:
    """Why weights prepared for this backend do not run. Kernels without tensor cores and those of SM90 read them."""
    reasons = []
    if not get_scheme(problem.scheme).e2m1_weight_only:
        reasons.append(
            f"triton takes layout {TRITON_E2M1!r} of e2m1 weights beside 16-bit activations, got scheme "
            f"{problem.scheme!r}; {_BACK}"
        )
    if problem.kind != "experts":
        reasons.append(
            f"triton takes weights in layout {TRITON_E2M1!r} in fused_experts alone; {_BACK}"
        )
    if machine.device_type != "cuda":
        return reasons
    if problem.dtype != torch.bfloat16:
        reasons.append(
            f"triton takes bfloat16 beside weights in layout {TRITON_E2M1!r}, got {problem.dtype}; {_BACK}"
        )
    if machine.capability[0] != 9 or INTERPRETED or not _SPOKEN:
        major, minor = machine.capability
        found = "its interpreter" if INTERPRETED else f"Triton {_TRITON}"
        reasons.append(
            f"triton takes weights in layout {TRITON_E2M1!r} on compute capability 9.0 under Triton 3.6, got {major}.{minor} "
            f"under {found}; {_BACK}"
        )
    return reasons


def workspace_shapes(M, problem: Problem) -> Workspaces:
    """workspace13 holds the activation's output h (rows, I; of packed weights in whole pieces) in the input's dtype, workspace2 its
    product y (M * top_k, K) with w2 in fp32, the index workspace the table of blocks (.., 4) and the sort order.

    Where activations are quantized, workspace13 holds h and its scales, and workspace2 quantized x and its
    scales before y takes its place. Where that is emulated, workspace13 holds h in fp32 and behind it rounded h.

    M is T for batched_experts and S for grouped_linear, which writes `out` at once and needs no rows.
    """
    experts, K, I = problem.num_experts, problem.hidden_size, problem.intermediate_size  # noqa: E741
    h, y, rows = 0, 0, M
    packed = triton_packed_launch.describe(problem.scheme) is not None
    tile = triton_packed_tiles.SMALLEST_TILE if packed else SMALLEST_TILE
    if problem.kind == "experts":
        pairs = M * problem.top_k
        h, y = pairs, pairs * K
        index = 4 * block_bound(pairs, experts, tile) + pairs
    elif problem.kind == "batched_experts":
        h = rows = experts * M
        index = 4 * experts * cdiv(M, tile)
    else:
        index = 4 * block_bound(M, experts + 1, tile)
    rounding = triton_emulated_launch.describe(problem.scheme) if packed else None
    x_scale = "" if packed else triton_scales.describe(problem.scheme).x
    if rounding is not None:
        hidden = Buffer((triton_emulated_launch.h_elements(h, I, rounding),), torch.float32)
        y = maximum(y, triton_emulated_launch.x_elements(rows, K, rounding))
    elif x_scale:
        elements = triton_scales.h_elements(h, I, experts, x_scale, K % 16 == I % 16 == 0)
        hidden = Buffer((elements,), torch.float32)
        y = maximum(y, triton_scales.x_elements(rows, K, x_scale))
    else:
        columns = I
        if packed and problem.kind == "experts":
            columns = gluon_packed_launch.padded(I)
            y = gluon_packed_launch.y_rows(pairs) * K
        hidden = Buffer((h * columns,), problem.dtype)
    return Workspaces(hidden, Buffer((y,), torch.float32), Buffer((index,), torch.int32))


def _strides(bias: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if bias is None else bias.stride()


def _gemm1(
    a: ExpertsArgs | BatchedExpertsArgs,
    w: Weight,
    rows: Rows,
    tile: Tile,
    h: Input,
    h_scale: str,
    x: Input,
    input_weights: Tensor | None = None,  # router weights to scale the input by
) -> Launch:
    _, K, I = a.w2.shape  # noqa: E741
    function, gated, interleaved = activation_of(a.activation)
    columns = tile.rows // 2 if gated else tile.rows  # of h
    bias, chip, has_weights = a.w13_bias, w.chip, input_weights is not None
    weight_strides = input_weights.stride() if has_weights else (0, 0)
    limited = a.limit < NO_LIMIT
    args = (  # one tuple: every sum of tuples copies
        *(h.data, h.scale, h.stride_group, x.data, x.scale, w.data, w.scale, bias),
        *rows.args,
        *(input_weights, *weight_strides, K, I, *x.strides, *w.data.stride()),
        *(x.stride_group, *w.scale_strides, *_strides(bias), a.alpha, a.beta, a.limit),
        *(rows.name, rows.has_map, bias is not None, has_weights),
        *(function, gated, interleaved, limited, *w.scales, h_scale, x.parts, chip.native),
        *(K % tile.k == 0, I % columns == 0, GROUP, rows.tokens, *tile[:3], chip.dependent),
    )
    return Launch("gemm1", (rows.blocks * cdiv(I, columns), 1, 1), args, tile.warps)


def _gemm2(
    y: Tensor,
    x: Input,
    w: Weight,
    bias: Tensor | None,
    rows: Rows,
    tile: Tile,
    y_strides: tuple,  # of an expert (beyond its rows), a row, a column
    zero_tail: bool = False,
) -> Launch:
    _, N, K = w.data.shape
    chip = w.chip
    args = (
        *(y, x.data, x.scale, w.data, w.scale, bias),
        *rows.args,
        *(K, N, *x.strides[1:], *w.data.stride(), x.stride_group, *w.scale_strides),
        *(*_strides(bias), *y_strides, rows.name, rows.has_map, bias is not None, zero_tail),
        *(*w.scales, x.parts, chip.native, K % tile.k == 0, N % tile.rows == 0, GROUP),
        *(rows.tokens, *tile[:3], chip.dependent),
    )
    return Launch("gemm2", (rows.blocks * cdiv(N, tile.rows), 1, 1), args, tile.warps)


def _launch_experts(a: ExpertsArgs) -> None:
    x, ids, weights, out = a.hidden_states, a.topk_ids, a.topk_weights, a.out
    M, top_k = ids.shape
    if M == 0:
        return
    E, K, I = a.w2.shape  # noqa: E741
    dtype, device = x.dtype, x.get_device()
    chip = gpu(device)
    if a.scheme in _PACKED:
        return triton_packed_launch.launch_experts(a, chip)
    w13 = weight_of("w13", a.w13, a.w13_scale, a.scheme, dtype, chip)
    w2 = weight_of("w2", a.w2, a.w2_scale, a.scheme, dtype, chip)
    pairs = M * top_k
    function, gated, interleaved = activation_of(a.activation)
    large = pairs >= LARGE_ROWS * E and triton_large_launch.possible(
        w13, w2, dtype.itemsize, gated, interleaved
    )
    vector = M == 1 and triton_vector_launch.possible(w13, w2, top_k)
    tiles = triton_tiles.for_experts(
        M, top_k, E, K, I, dtype, chip, a.scheme, w2.scales, gated, large, vector
    )
    x_strides, on_input = (0, *x.stride()), a.router_weight_on_input
    key = (device, tiles, E, top_k, x_strides, out.stride(), on_input, _layer_key(a))
    if tiles.vector:
        addresses = pointers(x, weights, ids, out, a.workspace13, a.expert_map)
        launches = triton_vector_launch.launches(a, w13, w2, tiles, chip)
        return run(launches, (key, addresses), device, chip.dependent)
    blocks = pairs if tiles.direct else _blocks(pairs, E, tiles.tokens)
    y = triton_scales.flat(a.workspace2, torch.float32, pairs * K)
    index, expert_map = a.index_workspace, a.expert_map
    rows = pair_rows(index, ids, expert_map, E, top_k, tiles.direct, tiles.tokens, blocks)
    first = None if tiles.direct else route(rows, pairs, tiles.chunk, chip)
    launches = [] if first is None else [first]
    input_weights = weights if on_input else None
    h, h_scale = triton_scales.hidden(
        a.workspace13, pairs, I, dtype, w2.scales.x, tiles, a.a2_scale, w2.data.dtype
    )
    source = Input(x, x_strides)
    if w13.scales.x:
        validity = Validity(
            "pairs", rows.has_map, (*rows.args[1:3], *rows.args[4:]), input_weights
        )
        launches, source = triton_scales.prepare(
            source,
            M,
            M,
            K,
            w13.scales.x,
            tiles,
            y,
            a.a13_scale,
            validity,
            h.scale,
            top_k,
            w13.data.dtype,
            chip,
            first,
        )
    if tiles.large:
        scalars = (a.alpha, a.beta, a.limit)
        activation = (*scalars, function, gated, interleaved, a.limit < NO_LIMIT)
        routing = (index, blocks)
        launches += (
            triton_large_launch.gemm1(
                w13, a.w13_bias, h, source, input_weights, (*routing, top_k), activation, tiles
            ),
            triton_large_launch.gemm2(w2, a.w2_bias, y, h, pairs, routing, tiles),
        )
    else:
        launches += (
            _gemm1(a, w13, rows, tiles.gemm1, h, h_scale, source, input_weights),
            _gemm2(y, h, w2, a.w2_bias, rows, tiles.gemm2, (0, K, 1)),
        )
    launches.append(combine(out, y, weights, rows, M, K, not on_input, chip))
    data = (h.data, h.scale, source.data, source.scale) if a.scheme else (h.data,)
    run(
        launches,
        (key, pointers(x, weights, ids, out, y, index, expert_map, *data)),
        device,
        chip.dependent,
    )


def _launch_batched_experts(a: BatchedExpertsArgs) -> None:
    x, out, counts = a.hidden_states, a.out, a.expert_num_tokens
    E, T, K = x.shape
    if T == 0:
        return
    I = a.w2.shape[2]  # noqa: E741
    dtype, device = x.dtype, x.get_device()
    chip = gpu(device)
    if a.scheme in _PACKED:
        return triton_packed_launch.launch_batched_experts(a, chip)
    w13 = weight_of("w13", a.w13, a.w13_scale, a.scheme, dtype, chip)
    w2 = weight_of("w2", a.w2, a.w2_scale, a.scheme, dtype, chip)
    gated, memory = activation_of(a.activation)[1], chip.shared_memory
    size = a.hidden_states.dtype.itemsize
    tiles = triton_tiles.choose(E * T, E, K, I, size, False, memory, *w2.scales, gated)
    index = a.index_workspace
    rows = sorted_rows(index, E * cdiv(T, tiles.tokens), E, tiles.tokens)
    # Rows are numbered e * T + t throughout; what (e, t) is off by from that times the row stride is
    # the expert's own term, zero for a contiguous tensor whatever T is.
    x_strides = (x.stride(0) - T * x.stride(1), x.stride(1), x.stride(2))
    out_strides = (out.stride(0) - T * out.stride(1), out.stride(1), out.stride(2))
    h, h_scale = triton_scales.hidden(
        a.workspace13, E * T, I, dtype, w2.scales.x, tiles, a.a2_scale, w2.data.dtype
    )
    launches = [group_blocks(rows, counts, E, E * T, T, chip)]
    source = Input(x, x_strides)
    if w13.scales.x:
        validity = Validity("batched", False, (counts, None, E, 0, 1, counts.stride(0), 0, 0))
        more, source = triton_scales.prepare(
            source, E * T, T, K, w13.scales.x, tiles, a.workspace2, a.a13_scale, validity, h.scale, 1,
            w13.data.dtype, chip,
        )  # fmt: skip
        launches += more
    launches += (
        _gemm1(a, w13, rows, tiles.gemm1, h, h_scale, source),
        _gemm2(out, h, w2, a.w2_bias, rows, tiles.gemm2, out_strides),
    )
    key = (device, "batched", tiles, E, x_strides, out_strides, _layer_key(a))
    data = (h.data, h.scale, source.data, source.scale)
    run(launches, (key, pointers(x, counts, out, index, *data)), device, chip.dependent)


def _launch_grouped_linear(a: GroupedLinearArgs) -> None:
    x, out, offsets, index = a.x, a.out, a.offsets, a.index_workspace
    S, K = x.shape
    if S == 0:
        return
    E, device = a.weight.shape[0], x.get_device()
    chip = gpu(device)
    if a.scheme in _PACKED:
        return triton_packed_launch.launch_grouped_linear(a, chip)
    w = weight_of("weight", a.weight, a.weight_scale, a.scheme, x.dtype, chip)
    itemsize, memory = x.dtype.itemsize, chip.shared_memory
    tiles = triton_tiles.choose(S, E, K, K, itemsize, False, memory, *w.scales, False)
    # The rows past the last group are one more group, of zeros.
    rows = sorted_rows(index, _blocks(S, E + 1, tiles.tokens), E, tiles.tokens)
    launches = [group_blocks(rows, offsets, E + 1, S, 0, chip)]
    source = Input(x, (0, *x.stride()))
    if w.scales.x:
        validity = Validity("groups", False, (offsets, None, E, 0, 1, offsets.stride(0), 0, 0))
        more, source = triton_scales.prepare(
            source, S, S, K, w.scales.x, tiles, a.workspace2, a.activation_scale, validity, None, 0,
            w.data.dtype, chip,
        )  # fmt: skip
        launches += more
    tile = tiles.gemm1 if w.scales.x else tiles.gemm2
    launches.append(_gemm2(out, source, w, a.bias, rows, tile, (0, *out.stride()), zero_tail=True))
    key = (device, "grouped", tiles, a.weight.shape, x.stride(), out.stride(), w.data.stride())
    key += (a.scheme, w.scale_strides, _strides(a.bias))
    data = (w.data, w.scale, source.data, source.scale)
    run(launches, (key, pointers(x, offsets, out, index, a.bias, *data)), device, chip.dependent)


def _layer_key(a: ExpertsArgs | BatchedExpertsArgs) -> tuple:
    """The part of a specialisation that weights and activation decide."""
    w13, w2, b13, b2 = a.w13, a.w2, a.w13_bias, a.w2_bias
    strides = (w2.shape, w13.stride(), w2.stride(), _strides(b13), _strides(b2))
    key = (a.activation, a.limit < NO_LIMIT, strides, pointers(w13, w2, b13, b2))
    if a.scheme:
        s13, s2 = a.w13_scale, a.w2_scale
        key += (a.scheme, s13.stride(), s2.stride(), pointers(s13, s2))
    return key


BACKEND = register(
    "triton",
    available=available,
    supports=supports,
    workspace_shapes=workspace_shapes,
    launch={
        "experts": _launch_experts,
        "batched_experts": _launch_batched_experts,
        "grouped_linear": _launch_grouped_linear,
    },
    devices=("CUDA",),
    native_schemes=_NATIVE,
    native_capability=NATIVE_CAPABILITY,
    interpreted=INTERPRETED,
    relayouts=RELAYOUTS,
)
