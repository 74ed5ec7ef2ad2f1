"""DeepGEMM's grouped products in plain torch, from their documentation: what backend deep_gemm calls in tests on a CPU.

As the library does they take data, scales and rows in the layouts that TMA reads, and refuse others. Rows that belong to
no expert become NaN, or stay as they are: the library leaves open what they hold.
"""

from __future__ import annotations

import importlib.machinery
import types

import torch
from torch import Tensor

from tests import oracle

ALIGNMENT = 128
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def row_scales(scale: Tensor, rows: int, K: int) -> Tensor:
    """(.., rows, K) multipliers of scales (.., rows, K / 128) whose rows lie side by side, padded to 16 bytes."""
    step = -(-rows // 4) * 4
    assert scale.dtype == torch.float32 and scale.shape[-2:] == (rows, -(-K // 128))
    assert scale.stride()[-2:] == (1, step), scale.stride()
    if scale.ndim == 3:
        assert scale.stride(0) == step * scale.shape[2]
    return scale.double().repeat_interleave(128, -1)[..., :K]


def values(operand) -> Tensor:
    """fp64 values of rows (.., rows, K): bf16, or (e4m3, scales of 128 columns)."""
    if isinstance(operand, Tensor):
        assert operand.dtype == BF16 and operand.is_contiguous()
        return operand.double()
    data, scale = operand
    assert data.dtype == E4M3 and data.is_contiguous()
    return data.double() * row_scales(scale, *data.shape[-2:])


def weights(operand) -> Tensor:
    """fp64 values of weights (E, N, K): bf16, or (e4m3, scales of 128 x 128)."""
    if isinstance(operand, Tensor):
        return values(operand)
    data, scale = operand
    E, N, K = data.shape
    assert data.dtype == E4M3 and data.is_contiguous()
    assert scale.dtype == torch.float32 and scale.is_contiguous()
    assert scale.shape == (E, -(-N // 128), -(-K // 128))
    return oracle.dequantized(data, scale, "fp8_block")


def experts_of_rows(groups: Tensor, rows: int, E: int) -> Tensor:
    """The expert of each row (rows,), -1 without one, from end rows (E,): groups begin on ALIGNMENT."""
    experts = torch.full((rows,), -1)
    start = 0
    for e, end in enumerate(groups.tolist()):
        assert start <= end <= rows, (start, end, rows)
        experts[start:end] = e
        start = -(-end // ALIGNMENT) * ALIGNMENT
    return experts


def check_rows(experts: Tensor) -> None:
    """Within ALIGNMENT rows there is one expert, and padding only behind its rows."""
    assert experts.numel() % ALIGNMENT == 0
    for block in experts.view(-1, ALIGNMENT).tolist():
        inside = [e for e in block if e != -1]
        assert inside == block[: len(inside)] and len(set(inside)) <= 1, block


def contiguous(a, b, d, grouped_layout, *, use_psum_layout=False, expected_m_for_psum_layout=None):
    x, w = values(a), weights(b)
    (rows, K), (E, N, width) = x.shape, w.shape
    assert width == K and d.shape == (rows, N) and d.dtype == BF16 and d.is_contiguous()
    assert grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous()
    if use_psum_layout:
        assert grouped_layout.shape == (E,) and expected_m_for_psum_layout > 0
        experts = experts_of_rows(grouped_layout, rows, E)
    else:
        assert grouped_layout.shape == (rows,) and expected_m_for_psum_layout is None
        experts = grouped_layout.long()
    check_rows(experts)
    d.fill_(torch.nan)
    for e in range(E):
        mine = experts == e
        d[mine] = (x[mine] @ w[e].T).to(BF16)


def masked(a, b, d, masked_m, expected_m):
    x, w = values(a), weights(b)
    (E, rows, K), N = x.shape, w.shape[1]
    assert w.shape == (E, N, K) and d.shape == (E, rows, N) and d.dtype == BF16
    assert d.is_contiguous() and masked_m.dtype == torch.int32 and masked_m.shape == (E,)
    assert type(expected_m) is int and expected_m > 0
    for e, count in enumerate(masked_m.tolist()):
        assert 0 <= count <= rows
        # whole blocks are stored: past the last row they reach into the next expert's
        blocks = -(-count // ALIGNMENT) * ALIGNMENT
        d.view(-1, N)[e * rows + count : e * rows + blocks] = torch.nan
        d[e, :count] = (x[e, :count] @ w[e].T).to(BF16)


def module() -> types.ModuleType:
    """A module deep_gemm to put into sys.modules."""
    fake = types.ModuleType("deep_gemm")
    fake.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    fake.get_mk_alignment_for_contiguous_layout = lambda: ALIGNMENT
    fake.m_grouped_fp8_gemm_nt_contiguous = fake.m_grouped_bf16_gemm_nt_contiguous = contiguous
    fake.fp8_m_grouped_gemm_nt_masked = fake.m_grouped_bf16_gemm_nt_masked = masked
    return fake
