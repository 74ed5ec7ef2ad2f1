"""Grouped GEMMs in plain torch: rows sorted by expert times one weight matrix per expert.

S rows sorted by expert, E experts, `offsets` (E,) int32 the cumulative end row of each on the
device. There are three ways, and on a GPU none of them reads a device tensor on the host:
- CPU: a kernel of ours if experts have few rows, else one matrix product per expert that has
  rows;
- NVIDIA GPU from SM90 on, bf16 and aligned: torch's grouped GEMM;
- everything else, on other devices too: rows padded to blocks of one expert each, weights gathered
  per block.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops import environment
from moe_ops.backends.torch import cpu
from moe_ops.numerics import Scales, dequantize_weight, permute
from moe_ops.ops.args import TokenAdapters
from moe_ops.ops.products import Products
from moe_ops.schemes import get_scheme

_BLOCK = 32  # rows per block of the gather path
_WIDENED_ROWS = 16  # rows from which fp32 is faster on CPUs without 16-bit products
_MOST_GROUPS = 1023  # of torch's grouped GEMM; adapters of an expert are a group each
_CHUNK = 1 << 27  # weight elements dequantized or gathered at a time (0.5 GB in fp32)


def grouped_mm(
    x: Tensor,  # (S, K)
    weight: Tensor,  # (E, N, K), any strides; or the data of quantized weights
    offsets: Tensor,  # (E,)
    *,
    scales: Scales | None = None,  # of quantized weights
    scheme: str = "",
    bias: Tensor | None = None,  # (E, N)
    transpose: bool = False,
    out: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """x @ weight[e].T + bias[e] for the rows of each expert, or x @ weight[e] with `transpose`.

    Weights have x's dtype, or become it a few experts at a time: quantized ones beside x in fp32,
    and plain ones. Returns (S, N), or (S, K)
    with
    `transpose`; rows past offsets[-1] are zero. The result may be written to `out`, which is then
    returned. With `batch_invariant`, on a CPU, a row has the same bits among however many others.
    """
    width = get_scheme(scheme).logical_shape(*weight.shape)[2 if transpose else 1]
    if x.device.type == "cpu":
        if out is None:
            out = x.new_empty(x.shape[0], width)
        if batch_invariant and x.stride(1) != 1:  # the kernels do not take it
            x = x.clone(memory_format=torch.contiguous_format)
        plain = not scheme and not transpose
        if plain and cpu.can_multiply(x, weight, bias, batch_invariant):
            cpu.grouped_mm(x, weight, offsets, bias, out)
            return out
        product, start = product_of_rows if batch_invariant else _product, 0
        for e, end in enumerate(offsets.tolist()):
            if end > start:
                w = values(weight, e, scales, scheme, x.dtype)
                w = w if transpose else w.t()
                product(x[start:end], w, None if bias is None else bias[e], out[start:end])
                start = end
        out[start:] = 0
        return out
    offsets = offsets.clamp(0, x.shape[0])  # they are data, and row ranges must stay inside x
    if not scheme and _native(offsets, x, weight):
        y = F.grouped_mm(x, weight if transpose else weight.transpose(1, 2), offs=offsets)
    else:
        y = _grouped_mm_blocks(x, weight, offsets, scales, scheme, transpose)
    rows = torch.arange(x.shape[0], device=x.device)
    if bias is not None:
        experts = torch.searchsorted(offsets, rows, right=True).clamp(max=weight.shape[0] - 1)
        y = (y.to(torch.float32) + bias.index_select(0, experts)).to(y.dtype)
    y = torch.where((rows < offsets[-1]).unsqueeze(1), y, 0)
    return y if out is None else out.copy_(y)


def adapted_mm(
    rows: Tensor,  # (S, K) in the order of `pairs`
    a: Tensor | None,  # (n, E, r, K)
    b: Tensor | None,  # (n, E, N, r)
    adapters: TokenAdapters,
    pairs: permute.Pairs,
) -> Tensor | None:
    """(S, N): what the adapters of tokens add to a product of their rows, 0 for tokens without
    one. None without matrices. Rows are sorted once more, by adapter and expert.
    """
    if a is None or b is None:
        return None
    (n, E), ids = a.shape[:2], adapters.ids.to(torch.int64)
    of_rows = ids.index_select(0, torch.floor_divide(pairs.order, pairs.valid.shape[1]))
    known = (of_rows >= 0) & (of_rows < n) & (pairs.experts < E)
    group = torch.where(known, of_rows * E + pairs.experts, n * E)
    again = permute.sort_pairs(group.unsqueeze(1), n * E)
    u = grouped_mm(rows.index_select(0, again.order), a.flatten(0, 1), again.offsets)
    scales = adapters.scales.index_select(0, of_rows.clamp(0, n - 1))
    u = (u * scales.index_select(0, again.order).unsqueeze(1)).to(u.dtype)
    y = grouped_mm(u, b.flatten(0, 1), again.offsets)
    return y.index_select(0, again.inverse)


def values(
    weight: Tensor,
    experts: int | Tensor,
    scales: Scales | None,
    scheme: str,
    dtype: torch.dtype,
) -> Tensor:
    """The weights of an expert, or of each of `experts`, in a dtype."""
    w = weight[experts] if isinstance(experts, int) else weight.index_select(0, experts)
    if scales is None:
        return w.to(dtype)
    return dequantize_weight(w, scheme, *scales.of(experts), dtype=dtype)


def _product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = a @ b + bias on a CPU. In fp32, rounded at the end, if that is faster.

    Without instructions for 16-bit numbers, torch multiplies them a row at a time: from a few rows
    on converting the weight to fp32 costs less.
    """
    if a.shape[0] >= _WIDENED_ROWS and _multiplied_by_rows(a.dtype):
        y = torch.mm(a.float(), b.float())
        out.copy_(y if bias is None else y.add_(bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias.to(a.dtype), a, b, out=out)


def product_of_rows(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = a @ b + bias on a CPU, each row with the same bits among however many others, in fp32
    (fp64 for fp64) with one rounding at the end.

    Products of libraries choose their blocks by the number of rows. Where our kernel does not take
    the matrices, each row is a product of its own, from memory of the same alignment.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    rows, weight = a.to(wide).contiguous(), b.t().to(wide).contiguous().unsqueeze(0)
    y = rows.new_empty(out.shape)
    if cpu.can_multiply(rows, weight, None, batch_invariant=True):
        ends = torch.tensor([rows.shape[0]], dtype=torch.int32, device="cpu")
        cpu.grouped_mm(rows, weight, ends, None, y)
    else:
        row, product = rows.new_empty(1, rows.shape[1]), rows.new_empty(1, out.shape[1])
        for i in range(rows.shape[0]):
            row[0] = rows[i]
            # `out` also prevents autocast, which is still on inside an op, from casting operands
            y[i] = torch.mm(row, weight[0].t(), out=product)[0]
    out.copy_(y if bias is None else y.add_(bias))


@functools.cache
def _multiplied_by_rows(dtype: torch.dtype) -> bool:
    """Whether torch multiplies 16-bit matrices a row at a time on this CPU, by what oneDNN
    reports.
    """
    if not torch.backends.mkldnn.is_available():  # then torch lacks the functions below too
        return False
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """a[rows of e].T @ b[rows of e]: (S, N), (S, K) -> (E, N, K); 0 for experts without rows."""
    num_experts = offsets.shape[0]
    offsets = offsets.clamp(0, a.shape[0])
    if a.device.type == "cpu":
        out = a.new_zeros(num_experts, a.shape[1], b.shape[1])
        start = 0
        for e, end in enumerate(offsets.tolist()):
            if end > start:
                _product(a[start:end].t(), b[start:end], None, out[e])
                start = end
        return out
    if _native(offsets, a, b):
        y = F.grouped_mm(a.t(), b, offs=offsets)
        starts = F.pad(offsets[:-1], (1, 0))
        return torch.where((offsets > starts)[:, None, None], y, 0)
    rows, experts = _blocks(offsets, a.shape[0])
    pa, pb = _take(a, rows).float(), _take(b, rows).float()
    out = torch.zeros(num_experts, a.shape[1], b.shape[1], device=a.device)
    product = torch.empty_like(out[:1])
    for i in range(rows.shape[0]):  # one block at a time, which fixes the order of the sum
        torch.mm(pa[i].t(), pb[i], out=product[0])
        out.index_add_(0, experts[i : i + 1], product)
    return out.to(a.dtype)


def _native(offsets: Tensor, *operands: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these operands without its synchronising fallback."""
    device = operands[0].device
    if device.type != "cuda" or environment.capability(device) < (9, 0):
        return False
    if offsets.shape[0] > _MOST_GROUPS:
        return False
    for t in operands:
        row, column = t.stride()[-2:]
        steps = [s for s in t.stride() if s != 1]
        if t.dtype != torch.bfloat16 or 1 not in (row, column) or t.data_ptr() % 16:
            return False
        if any(s % 8 for s in (*steps, *t.shape[-1:])) or (t.ndim == 3 and t.shape[1] % 8):
            return False
    return True


def _blocks(offsets: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Sorted rows in blocks of one expert: rows (nb, _BLOCK), padded with -1, experts (nb,)."""
    num_experts = offsets.shape[0]
    starts = F.pad(offsets[:-1], (1, 0))
    ends = torch.cumsum((offsets - starts + _BLOCK - 1) // _BLOCK, 0)
    count = min(num_rows, num_rows // _BLOCK + num_experts)
    block = torch.arange(count, device=offsets.device)
    experts = torch.searchsorted(ends, block, right=True)
    known = experts < num_experts
    experts = experts.clamp(max=num_experts - 1)
    first = F.pad(ends[:-1], (1, 0)).index_select(0, experts)
    rows = starts.index_select(0, experts) + (block - first) * _BLOCK
    rows = rows.unsqueeze(1) + torch.arange(_BLOCK, device=offsets.device)
    inside = known.unsqueeze(1) & (rows < offsets.index_select(0, experts).unsqueeze(1))
    return torch.where(inside, rows, -1), experts


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] with zeros where rows is -1."""
    taken = x.index_select(0, rows.clamp(min=0).reshape(-1)).unflatten(0, rows.shape)
    return torch.where((rows >= 0).unsqueeze(-1), taken, 0)


def _grouped_mm_blocks(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    scales: Scales | None,
    scheme: str,
    transpose: bool,
) -> Tensor:
    """`grouped_mm` without a bias: rows padded to blocks of one expert, weights gathered."""
    rows, experts = _blocks(offsets, x.shape[0])
    px = _take(x, rows)
    _, N, K = get_scheme(scheme).logical_shape(*weight.shape)
    step = max(1, _CHUNK // (N * K))
    width = K if transpose else N
    products = x.new_empty(*rows.shape, width)
    for i in range(0, rows.shape[0], step):
        chosen = experts[i : i + step]
        w = values(weight, chosen, scales, scheme, x.dtype)
        # `out` also prevents autocast, which is still on inside an op, from casting fp32 operands
        w = w if transpose else w.transpose(1, 2)
        torch.bmm(px[i : i + step], w, out=products[i : i + step])
    y = x.new_zeros(x.shape[0] + 1, width)
    target = torch.where(rows >= 0, rows, x.shape[0]).reshape(-1)
    y.index_copy_(0, target, products.flatten(0, 1))  # padding is written to the spare row
    return y[:-1]


def _native_mm(x: Tensor, weight: Tensor, offsets: Tensor, transpose: bool = False) -> Tensor:
    """`grouped_mm` by torch's grouped GEMM alone: rows past offsets[-1] are unspecified."""
    return F.grouped_mm(x, weight if transpose else weight.transpose(1, 2), offs=offsets)


def _native_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_outer` by torch's grouped GEMM alone: experts without rows are unspecified."""
    return F.grouped_mm(a.t(), b, offs=offsets)


PORTABLE = Products("torch's grouped products", grouped_mm, grouped_outer)
NATIVE = Products(
    "torch's grouped products",
    _native_mm,
    _native_outer,
    most_experts=_MOST_GROUPS,
    zeroes=False,
)
