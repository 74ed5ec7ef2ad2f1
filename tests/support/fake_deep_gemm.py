"""DeepGEMM's grouped products in plain torch, from their documentation: what backend deep_gemm
calls in tests on a CPU.

As the library does they take data, scales and rows in the layouts that TMA reads, and refuse
others. Rows that belong to no expert become NaN, or stay as they are: the library leaves open what
they hold.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
import types

import torch
from torch import Tensor

from moe_ops.backends.deep_gemm import backend
from tests.support import oracle

BLOCK = 128  # rows that a masked product stores at least
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def spread(scale: Tensor, rows: int, K: int, width: int) -> Tensor:
    """(.., rows, K) multipliers of scales whose rows lie side by side, as TMA reads them: fp32
    (.., rows, K / width), or int32 words of four exponents (.., rows, ceil(K / (4 width)))."""
    step, groups = -(-rows // 4) * 4, -(-K // width)
    packed = scale.dtype == torch.int32
    assert packed or scale.dtype == torch.float32
    words = -(-groups // 4) if packed else groups
    assert scale.shape[-2:] == (rows, words), (scale.shape, rows, words)
    assert scale.stride()[-2:] == (1, step), scale.stride()
    if scale.ndim == 3:
        assert scale.stride(0) == step * words
    if packed:
        bytes_ = torch.stack([(scale >> 8 * j) & 255 for j in range(4)], -1).flatten(-2)
        scale = 2.0 ** (bytes_[..., :groups].double() - 127)
    return scale.double().repeat_interleave(width, -1)[..., :K]


def values(operand, width: int = 128) -> Tensor:
    """fp64 values of rows (.., rows, K): bf16, or (e4m3, scales of `width` columns)."""
    if isinstance(operand, Tensor):
        assert operand.dtype == BF16 and operand.is_contiguous()
        return operand.double()
    data, scale = operand
    assert data.dtype == E4M3 and data.is_contiguous()
    return data.double() * spread(scale, *data.shape[-2:], width)


def weights(operand, width: int = 128) -> Tensor:
    """fp64 values of weights (E, N, K): bf16, or (e4m3, scales of 128 x 128), or (e4m3 or int8
    pairs of e2m1, exponents of `width` columns)."""
    if isinstance(operand, Tensor):
        return values(operand)
    data, scale = operand
    if scale.dtype == torch.int32:
        assert data.is_contiguous()
        if data.dtype == torch.int8:
            table = torch.tensor(oracle.code_values("e2m1"), dtype=torch.float64)
            data = table.to(data.device)[oracle.codes(data, 4)]
        return data.double() * spread(scale, *data.shape[-2:], width)
    E, N, K = data.shape
    assert data.dtype == E4M3 and data.is_contiguous() and width == 128
    assert scale.dtype == torch.float32 and scale.is_contiguous()
    assert scale.shape == (E, -(-N // 128), -(-K // 128))
    return oracle.dequantized(data, scale, "fp8_block")


def operands(a, b, recipe_a, recipe_b) -> tuple[Tensor, Tensor]:
    """Values of both; exponents come with their recipes (rows, columns) that share one."""
    packed = not isinstance(a, Tensor) and a[1].dtype == torch.int32
    assert (recipe_a is not None) == (recipe_b is not None) == packed
    if packed:
        assert recipe_a[0] == recipe_b[0] == 1 and b[1].dtype == torch.int32
    return values(a, recipe_a[1] if packed else 128), weights(b, recipe_b[1] if packed else 128)


class Alignment:
    """Rows that groups of the contiguous layout are padded to."""

    rows = 128


def experts_of_rows(groups: Tensor, rows: int) -> Tensor:
    """The expert of each row (rows,), -1 without one, from end rows (E,)."""
    experts = torch.full((rows,), -1, device=groups.device)
    start = 0
    for e, end in enumerate(groups.tolist()):
        assert start <= end <= rows, (start, end, rows)
        experts[start:end] = e
        start = -(-end // Alignment.rows) * Alignment.rows
    return experts


def check_rows(experts: Tensor) -> None:
    """Within a block of rows there is one expert, and padding only behind its rows."""
    assert experts.numel() % Alignment.rows == 0
    for block in experts.view(-1, Alignment.rows).tolist():
        inside = [e for e in block if e != -1]
        assert inside == block[: len(inside)] and len(set(inside)) <= 1, block


def contiguous(
    a,
    b,
    d,
    grouped_layout,
    recipe_a=None,
    recipe_b=None,
    use_psum_layout=False,
    expected_m_for_psum_layout=None,
):
    x, w = operands(a, b, recipe_a, recipe_b)
    (rows, K), (E, N, width) = x.shape, w.shape
    assert width == K and d.shape == (rows, N) and d.dtype == BF16 and d.is_contiguous()
    assert grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous()
    assert use_psum_layout, "no other layout is used"
    assert grouped_layout.shape == (E,) and expected_m_for_psum_layout > 0
    experts = experts_of_rows(grouped_layout, rows)
    check_rows(experts)
    d.fill_(torch.nan)
    for e in range(E):
        mine = experts == e
        d[mine] = (x[mine] @ w[e].T).to(BF16)


def masked(a, b, d, masked_m, expected_m, recipe_a=None, recipe_b=None):
    x, w = operands(a, b, recipe_a, recipe_b)
    (E, rows, K), N = x.shape, w.shape[1]
    assert w.shape == (E, N, K) and d.shape == (E, rows, N) and d.dtype == BF16
    assert d.is_contiguous() and masked_m.dtype == torch.int32 and masked_m.shape == (E,)
    assert type(expected_m) is int and expected_m > 0
    for e, count in enumerate(masked_m.tolist()):
        assert (
            0 <= count <= expected_m <= rows
        )  # the backend expects as many as a batch has room for
        # whole blocks are stored: past the last row they reach into the next expert's
        blocks = -(-count // BLOCK) * BLOCK
        d.view(-1, N)[e * rows + count : e * rows + blocks] = torch.nan
        d[e, :count] = (x[e, :count] @ w[e].T).to(BF16)


def install(monkeypatch) -> types.ModuleType:
    """Let the fake be imported, as the distribution and version that the backends ask for."""
    made, real = module(), importlib.metadata.version
    monkeypatch.setitem(sys.modules, "deep_gemm", made)
    known = {"sgl-deep-gemm": backend.TESTED[1]}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: known.get(name) or real(name))
    return made


def module() -> types.ModuleType:
    """A module deep_gemm to put into sys.modules."""
    fake = types.ModuleType("deep_gemm")
    fake.__spec__ = importlib.machinery.ModuleSpec("deep_gemm", None)
    fake.get_mk_alignment_for_contiguous_layout = lambda: Alignment.rows
    fake.set_mk_alignment_for_contiguous_layout = lambda rows: setattr(Alignment, "rows", rows)
    fake.m_grouped_fp8_fp4_gemm_nt_contiguous = contiguous
    fake.m_grouped_bf16_gemm_nt_contiguous = contiguous
    fake.m_grouped_fp8_fp4_gemm_nt_masked = fake.m_grouped_bf16_gemm_nt_masked = masked
    return fake
