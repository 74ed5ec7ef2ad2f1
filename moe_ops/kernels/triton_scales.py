"""How a quantization scheme runs on the Triton kernels: which scales there are, where they and quantized
activations live in the workspaces, and the launch that prepares x."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.kernels.triton_launch import Gpu, Launch
from moe_ops.kernels.triton_tiles import FEW_ROWS, Tiles
from moe_ops.meta.workspace import cdiv, maximum, minimum, round_up
from moe_ops.schemes import get_scheme

PARTS = 128  # programs that look for the largest magnitude of x
_CHUNK = 16  # groups of 128 columns that a quantizing program handles at a time
_GAP = 32  # fp32 elements that align what comes second in a workspace


class Scales(NamedTuple):
    """The scales of a scheme, in the words of kernels/triton_matmul.py; "" where there are none."""

    weight: str
    x: str


_PLAIN = Scales("", "")


def describe(scheme: str) -> Scales:
    """The Scales of a scheme's name; "" means plain weights."""
    found = get_scheme(scheme)
    if found.weight is None:
        return _PLAIN
    group = found.weight.group
    weight = "tensor" if group.is_tensor else "channel" if group.is_row else "block"
    activation = found.activation
    assert activation is not None, scheme  # weights alone: triton_packed_launch
    if activation.static:
        return Scales(weight, "static")
    group = activation.group
    return Scales(weight, "tensor" if group.is_tensor else "row" if group.is_row else "group")


@cache
def _storage(scheme: str) -> torch.dtype:
    return get_scheme(scheme).quantized_weight.storage_dtype


scales = cache(describe)  # for launches; in traced code Dynamo warns of a cached function


def h_elements(rows, I: int, experts: int, x_scale: str, aligned: bool):  # noqa: E741
    """fp32 elements that h (rows, I) and its scales need, whatever the tiles. int or SymInt.

    `aligned`: rows of all operands have a 16-byte step.
    """
    if x_scale == "static":
        return cdiv(rows * I, 4)
    if x_scale == "row":
        return rows * I + _GAP + rows
    if x_scale == "tensor":
        return rows * I + _GAP + 1
    if not aligned:
        return rows * I
    quantized = cdiv(rows * I, 4) + _GAP + rows * cdiv(I, 128)
    return maximum(quantized, minimum(rows, FEW_ROWS * experts) * I)


def x_elements(rows, K: int, x_scale: str):
    """fp32 elements that quantized x (rows, K) and its scales need at most. int or SymInt."""
    if x_scale == "tensor":
        return PARTS
    if x_scale in ("group", "row"):
        return cdiv(rows * K, 4) + _GAP + rows * (cdiv(K, 128) if x_scale == "group" else 1)
    return 0


class Input(NamedTuple):
    """A GEMM's input and its scales as the kernels take them."""

    data: Tensor
    strides: tuple  # of an expert (beyond its rows), a row, a column
    scale: Tensor | None = None
    stride_group: int = 0  # between the scales of groups of columns; rows lie side by side
    parts: int = 1
    stride_row: int = 0  # between the scales of rows where they have one each


class Weight(NamedTuple):
    """A weight and its scales as the kernels take them. Quantized x and h have the data's dtype."""

    data: Tensor  # (E, N, K)
    scale: Tensor | None
    scales: Scales
    chip: Gpu

    @property
    def scale_strides(self) -> tuple:
        """Strides of an expert, a row or block of rows, and a block of columns."""
        if self.scale is None:
            return (0, 0, 0)
        return (*self.scale.stride(), 0, 0)[:3]


def weight_of(
    name: str, data: Tensor, scale: Tensor | None, scheme: str, dtype: torch.dtype, chip: Gpu
) -> Weight:
    """The Weight of an op's tensors; ValueError where the dtype is not what the scheme says."""
    expected = _storage(scheme) if scheme else dtype
    if data.dtype != expected:
        raise ValueError(
            f"{name} must have dtype {expected} for scheme {scheme}, got {data.dtype}; quantize it "
            "with moe_ops.quantize"
            if scheme
            else f"{name} must have the input's dtype {dtype}, got {data.dtype}; convert one with .to()"
        )
    if not scheme:
        return Weight(data, None, _PLAIN, chip)
    data = quantized(data, chip.native)
    return Weight(data, scale, scales(scheme), chip)


class Validity(NamedTuple):
    """Which rows of x count for a scale that all share: arguments of the kernel `amax`."""

    name: str  # "pairs", "batched" or "groups"
    has_map: bool
    args: tuple  # ids, map; E, num_ids, top_k; strides of ids (2) and map
    input_weights: Tensor | None = None


def quantized(data: Tensor, native: bool) -> Tensor:
    """e4m3 or int8 data as the kernels take it: bytes where the GPU does not know e4m3."""
    return data if native or data.dtype == torch.int8 else data.view(torch.uint8)


def flat(workspace: Tensor, dtype: torch.dtype, size: int) -> Tensor:
    """The workspace as `dtype`, of which `size` elements are used; kernels take no more of it than its address."""
    found = workspace if workspace.dtype == dtype else workspace.view(dtype)
    assert found.numel() >= size, (found.shape, size)
    return found


def split(
    workspace: Tensor, rows: int, columns: int, dtype: torch.dtype, scales: int
) -> tuple[Tensor, Tensor]:
    """rows * columns elements of `dtype`, and behind them so many fp32 scales."""
    start = round_up(rows * columns * dtype.itemsize, 4 * _GAP) // 4
    behind = flat(workspace, torch.float32, start + scales)[start:]
    return flat(workspace, dtype, rows * columns), behind


def hidden(
    workspace: Tensor,
    rows: int,
    I: int,  # noqa: E741
    dtype: torch.dtype,
    x_scale: str,
    tiles: Tiles,
    static: Tensor | None,
    codes: torch.dtype,
) -> tuple[Input, str]:
    """h as GEMM2 reads it, and GEMM1's H_SCALE."""
    strides = (0, I, 1)
    if not x_scale:
        return Input(flat(workspace, dtype, rows * I), strides), ""
    if x_scale == "static":
        return Input(flat(workspace, codes, rows * I), strides, static), "static"
    if x_scale == "group":
        if tiles.wide_h:
            return Input(flat(workspace, torch.float32, rows * I), strides), ""
        data, scale = split(workspace, rows, I, codes, rows * cdiv(I, 128))
        return Input(data, strides, scale, rows), "group"
    if x_scale == "row":
        data, scale = split(workspace, rows, I, torch.float32, rows)
        return Input(data, strides, scale), "row"
    data, scale = split(workspace, rows, I, torch.float32, 1)
    return Input(data, strides, scale, 0, 1), "tensor"


def amax(
    source: Input,
    rows: int,
    rows_of_expert: int,  # of batched x, else all
    K: int,
    parts: Tensor,  # (PARTS,), written
    validity: Validity,
    zeros: Tensor | None,
    chip: Gpu,
) -> Launch:
    """The largest magnitude of the rows of x that count, that of all in as many parts as programs looked for it."""
    ids, expert_map, experts, num_ids, top_k, *routing_strides = validity.args
    weights = validity.input_weights
    args: tuple = (parts, zeros, source.data, ids, expert_map, weights)
    args += (rows, rows_of_expert, experts, num_ids, top_k, *routing_strides)
    args += ((0, 0) if weights is None else weights.stride()) + (K, *source.strides, validity.name)
    lanes = 1 << max(top_k - 1, 1).bit_length()
    args += (validity.has_map, weights is not None, lanes, 1024, chip.dependent)
    return Launch("amax", (PARTS, 1, 1), args)


def prepare(
    source: Input,  # x as the caller has it
    rows: int,
    rows_of_expert: int,  # of batched x, else all
    K: int,
    x_scale: str,
    tiles: Tiles,
    workspace: Tensor,
    static: Tensor | None,
    validity: Validity,
    zeros: Tensor | None,  # of h: largest magnitudes, which GEMM1 raises
    zeros_a_row: int,
    codes: torch.dtype,
    chip: Gpu,
    route: Launch | None = None,
) -> tuple[list[Launch], Input]:
    """Launches that come before GEMM1, `route` among them, and what it reads as x."""
    x, strides = source.data, source.strides
    before = [] if route is None else [route]
    if x_scale == "static":
        return before, Input(x, strides, static)
    if x_scale == "tensor":
        parts = flat(workspace, torch.float32, PARTS)
        before.append(amax(source, rows, rows_of_expert, K, parts, validity, zeros, chip))
        return before, Input(x, strides, parts, 0, PARTS)
    if not tiles.quantize:
        return before, source
    by_group = x_scale == "group"
    count = cdiv(K, 128) if by_group else 1
    data, scale = split(workspace, rows, K, codes, rows * count)
    columns = _CHUNK * 128
    args = (data, scale, zeros, x, rows_of_expert, zeros_a_row, rows, K, *strides)
    args += (by_group, _CHUNK, chip.native, codes == torch.int8)
    parts_of_row = cdiv(K, columns) if by_group else 1
    quantized_x = Input(data, (0, K, 1), scale, rows)
    if route is None:
        return [Launch("quantize", (rows, parts_of_row, 1), (*args, chip.dependent))], quantized_x
    grid = (route.grid[0] + rows * parts_of_row, 1, 1)
    return [Launch("route_quantize", grid, route.args + args, route.warps)], quantized_x
