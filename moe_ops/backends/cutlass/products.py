"""Products of rows sorted by expert on SM90, and the activation of one: of bf16
(csrc/cutlass/sm90_products.cuh), and of e4m3 with scales of blocks (sm90_blocks.cuh). torch alone.

Those of bf16 run where the object is built (`kernels`). Nothing is built for them in training:
torch's grouped product takes their place.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.backends.cutlass import library
from moe_ops.backends.cutlass.library import Gemms
from moe_ops.backends.cutlass.schemes import ACTIVATIONS
from moe_ops.kernels.activation import Activated
from moe_ops.meta.workspace import cdiv
from moe_ops.ops.products import Products

_ARCHITECTURE = "sm_90a"
_KERNEL, _BLOCKS = "moe_ops_sm90_product", "moe_ops_sm90_blocks"

# Pairs from which on products leave multiprocessors to kernels that copy or sum rows beside them,
# and columns of h up to which they do: beside products of more, such kernels are short. It pays
# where copies are a part of the step: docs/kernels/training.md.
SPARE_FROM, SPARE_UP_TO = 65536, 4096


class GroupedProduct(ctypes.Structure):
    """struct GroupedProduct of csrc/cutlass/grouped.h."""

    _fields_ = [
        ("groups", ctypes.c_int32),
        ("sm_count", ctypes.c_int32),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("d", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("low_a", ctypes.c_void_p),
        ("low_b", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
    ]


class GatedProduct(ctypes.Structure):
    """struct GatedProduct of csrc/cutlass/grouped.h."""

    _fields_ = [
        ("product", GroupedProduct),
        ("bias", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("bias_is_float", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("up", ctypes.c_void_p),
    ]


class BlockScaledProduct(ctypes.Structure):
    """struct BlockScaledProduct of csrc/cutlass/grouped.h."""

    _fields_ = [
        ("gated", GatedProduct),
        ("a_scale", ctypes.c_void_p),
        ("b_scale", ctypes.c_void_p),
        ("d_scale", ctypes.c_void_p),
        ("powers", ctypes.c_int32),
    ]


class Scaled(NamedTuple):
    """e4m3 with contiguous fp32 scales: rows (S, K) with (ceil(K / 128), S), or a weight (E, N, K)
    with (E, ceil(N / 128), ceil(K / 128)).
    """

    data: Tensor
    scale: Tensor


def kernels(device: int) -> Gemms | None:
    """The kernels for a device; None where there are none."""
    found = library.if_built(device, _ARCHITECTURE)
    return found if found is not None and found.architecture == _ARCHITECTURE else None


def takes(x: Tensor) -> bool:
    """Whether there are kernels for such rows."""
    return x.dtype == torch.bfloat16 and kernels(x.get_device()) is not None


def multiply(
    rows: Tensor,  # (S, K) bf16
    weight: Tensor,  # (E, N, K), contiguous or stored (E, K, N)
    ends: Tensor,  # (E,) int32, the row after each expert's last
    transpose: bool = False,
    low: tuple[Tensor, Tensor] | None = None,  # rows (S, r), matrices (E, N, r) or (E, r, K)
    spare: int = 0,
) -> Tensor:
    """rows @ weight[e].T for the rows of each expert, or with `transpose` rows (S, N) @ weight[e];
    plus the same product of `low`, whose matrices are contiguous and of any rank r.

    Sizes are multiples of 8, and addresses of 16. Rows past ends[-1] are neither read into others
    nor written. `spare` multiprocessors are left to a kernel that is launched to run beside this
    one.
    """
    out = rows.new_empty(rows.shape[0], weight.shape[2 if transpose else 1])
    multiply_into(out, rows, weight, ends, transpose, low, spare)
    return out


def multiply_into(
    out: Tensor,
    rows: Tensor,
    weight: Tensor,
    ends: Tensor,
    transpose: bool = False,
    low: tuple[Tensor, Tensor] | None = None,
    spare: int = 0,
) -> None:
    """`multiply`, written to `out`."""
    gemms = kernels(rows.get_device())
    assert gemms is not None
    assert weight.is_contiguous() or weight.mT.is_contiguous()
    n, k = weight.shape[1:]
    if transpose:
        n, k = k, n
    # stored (E, n, k), or (E, k, n)
    name = "x_wt" if weight.is_contiguous() != transpose else "x_w"
    added = _added(low, transpose, weight.is_contiguous())
    _run(gemms, name, rows, weight, out, ends, added, spare, n=n, k=k)


def _added(
    low: tuple[Tensor, Tensor] | None, transpose: bool, as_stored: bool
) -> tuple[Tensor, Tensor] | None:
    """`low` as kernels take it: in the order in which the weight is stored, of a rank that is a
    multiple of 8, at multiples of 16 bytes.
    """
    if low is None:
        return None
    rows, matrix = low
    more = -rows.shape[1] % 8
    if more:  # columns of zeros
        rows = F.pad(rows, (0, more))
        matrix = F.pad(matrix, (0, 0, 0, more) if transpose else (0, more))
    if not as_stored:
        matrix = matrix.mT.contiguous()
    return rows, matrix if library.aligned(matrix) else matrix.clone()


def outer(
    a: Tensor,  # (S, M) bf16
    b: Tensor,  # (S, N) bf16
    ends: Tensor,  # (E,) int32
    spare: int = 0,
) -> Tensor:
    """(E, M, N): a.T @ b for the rows of each expert, zeros of one without rows. `spare` as in
    `multiply`.
    """
    gemms = kernels(a.get_device())
    assert gemms is not None and b.is_contiguous()
    m, n = a.shape[1], b.shape[1]
    out = a.new_empty(ends.shape[0], m, n)
    _run(gemms, "outer", a, b, out, ends, spare=spare, m=m, n=n)
    return out


def activate_into(
    out: Tensor,  # (S, I) bf16, written
    rows: Tensor,  # (S, K) bf16
    weight: Tensor,  # (E, 2 I, K), contiguous
    ends: Tensor,  # (E,) int32
    activation: Activated,  # a gated one
    bias: Tensor | None = None,  # (E, 2 I), contiguous
    gate_up: Tensor | None = None,  # (S, 2 I) bf16, written: rows @ weight[e].T; not interleaved
    low: tuple[Tensor, Tensor] | None = None,  # (S, r), (E, 2 I, r): added to gate_up
    up: Tensor | None = None,  # (E, I, K), contiguous: the up rows; then `weight` is the gate's
) -> None:
    """activation(rows @ weight[e].T + bias[e]) for the rows of each expert, where there is a
    kernel. The sums are not rounded before the activation. Sizes, addresses and rows past ends[-1]
    as in `multiply`.
    """
    gemms = kernels(rows.get_device())
    assert gemms is not None and weight.is_contiguous()
    if gate_up is not None:
        assert gate_up.is_contiguous() and gate_up.dtype == torch.bfloat16
        assert library.aligned(gate_up) and not activation.INTERLEAVED
    if up is not None:
        assert up.shape == weight.shape and up.is_contiguous() and library.aligned(up)
        assert up.dtype == torch.bfloat16 and low is None and not activation.INTERLEAVED
    if out.shape[0] > 0:
        sizes = {"n": out.shape[1], "k": rows.shape[1]}
        added = _added(low, False, True)
        product = _product(gemms, rows, weight, out, ends, added, **sizes)
        bias = _bias(bias)
        gated = _gated(product, activation, bias)
        gated.gate_up, gated.up = _address(gate_up), _address(up)
        gemms.run(f"{_KERNEL}_activated", gated)


def multiply_blocks_into(out: Tensor, rows: Scaled, weight: Scaled, ends: Tensor) -> None:
    """rows @ weight[e].T for the rows of each expert, written to `out` (S, N) bf16. N and K are
    multiples of 16; addresses and rows past ends[-1] as in `multiply`.
    """
    gemms = kernels(out.get_device())
    assert gemms is not None
    if out.shape[0] > 0:
        product = _of_blocks(gemms, rows, weight, out, ends)
        scaled = BlockScaledProduct(gated=GatedProduct(product=product))
        _scales(scaled, rows, weight)
        gemms.run(f"{_BLOCKS}_x_wt", scaled)


def activate_blocks_into(
    out: Scaled,  # (S, I), written
    rows: Scaled,  # (S, K)
    weight: Scaled,  # (E, 2 I, K)
    ends: Tensor,  # (E,) int32
    activation: Activated,  # a gated one
    powers: bool,  # whether scales of `out` are powers of two
    bias: Tensor | None = None,  # (E, 2 I), contiguous
) -> None:
    """activation(rows @ weight[e].T + bias[e]) for the rows of each expert, quantized by groups of
    128 columns. I is a multiple of 16, and of 64 unless gate and up rows take turns, and K of 16.
    """
    gemms = kernels(rows.data.get_device())
    assert gemms is not None
    assert activation.INTERLEAVED or out.data.shape[1] % 64 == 0
    if out.data.shape[0] > 0:
        product = _of_blocks(gemms, rows, weight, out.data, ends)
        bias = _bias(bias)
        scaled = BlockScaledProduct(gated=_gated(product, activation, bias), powers=powers)
        _scales(scaled, rows, weight)
        assert out.scale.is_contiguous() and out.scale.dtype == torch.float32
        scaled.d_scale = _address(out.scale)
        gemms.run(f"{_BLOCKS}_activated", scaled)


def _bias(bias: Tensor | None) -> Tensor | None:
    """A bias as kernels take it: bf16 or fp32."""
    assert bias is None or bias.is_contiguous()
    return bias if bias is None or bias.dtype == torch.bfloat16 else bias.float()


def _gated(product: GroupedProduct, activation: Activated, bias: Tensor | None) -> GatedProduct:
    assert activation.GATED
    return GatedProduct(
        product=product,
        bias=_address(bias),
        bias_is_float=bias is not None and bias.dtype == torch.float32,
        interleaved=activation.INTERLEAVED,
        activation=ACTIVATIONS.index(activation.ACTIVATION),
        alpha=activation.alpha,
        beta=activation.beta,
        limit=activation.limit,
    )


def _scales(scaled: BlockScaledProduct, rows: Scaled, weight: Scaled) -> None:
    (S, K), (E, N, _) = rows.data.shape, weight.data.shape
    assert rows.scale.shape == (cdiv(K, 128), S), rows.scale.shape
    assert weight.scale.shape == (E, cdiv(N, 128), cdiv(K, 128)), weight.scale.shape
    for scale in (rows.scale, weight.scale):
        assert scale.is_contiguous() and scale.dtype == torch.float32
    scaled.a_scale, scaled.b_scale = _address(rows.scale), _address(weight.scale)


def _of_blocks(
    gemms: Gemms, rows: Scaled, weight: Scaled, out: Tensor, ends: Tensor
) -> GroupedProduct:
    sizes: dict[str, Any] = {"n": out.shape[1], "k": rows.data.shape[1]}
    assert rows.data.dtype == weight.data.dtype == torch.float8_e4m3fn
    assert weight.data.is_contiguous() and not any([size % 16 for size in sizes.values()]), sizes
    return _product(gemms, rows.data, weight.data, out, ends, **sizes)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _product(
    gemms: Gemms,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ends: Tensor,
    added: tuple[Tensor, Tensor] | None = None,
    spare: int = 0,
    **sizes: Any,
) -> GroupedProduct:
    assert a.dtype == b.dtype and d.is_contiguous() and a.is_contiguous()
    assert ends.is_contiguous() and ends.dtype == torch.int32
    assert all([library.aligned(t) for t in (a, b, d)])
    assert not any([size % 8 for size in sizes.values()]), sizes
    if added is not None:
        low_a, low_b = added
        assert low_a.dtype == low_b.dtype == a.dtype and low_a.shape[1] % 8 == 0
        assert all([t.is_contiguous() and library.aligned(t) for t in added])
        sizes |= {"low_a": low_a.data_ptr(), "low_b": low_b.data_ptr(), "rank": low_a.shape[1]}
    return GroupedProduct(
        groups=ends.shape[0],
        sm_count=gemms.sm_count - spare,
        a=a.data_ptr(),
        b=b.data_ptr(),
        d=d.data_ptr(),
        ends=ends.data_ptr(),
        rows=a.shape[0],
        stream=library.stream_of(a.get_device()),
        **sizes,
    )


def _run(
    gemms: Gemms,
    name: str,
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ends: Tensor,
    added: tuple[Tensor, Tensor] | None = None,
    spare: int = 0,
    **sizes: Any,
) -> None:
    assert a.dtype == d.dtype == torch.bfloat16
    if a.shape[0] > 0:
        gemms.run(f"{_KERNEL}_{name}", _product(gemms, a, b, d, ends, added, spare, **sizes))
    elif name == "outer":
        d.zero_()


def spare(device: int, pairs: int, columns: int) -> int:
    """Multiprocessors that products of a training step leave to other kernels."""
    gemms = kernels(device)
    assert gemms is not None
    many = pairs >= SPARE_FROM and columns <= SPARE_UP_TO
    return gemms.sm_count // 44 * 2 if many else 0  # 6 of 132, whole clusters of two


PRODUCTS = Products(
    "grouped products of csrc/cutlass",
    multiply,
    outer,
    activate_into,
    ACTIVATIONS,
    adds=True,
    pairs=True,
    spare=spare,
)
