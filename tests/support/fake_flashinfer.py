"""FlashInfer's compiled fused-MoE object in plain torch, written from the C++ binding of 0.6.13
and its kernels.

It checks what the binding checks, reads data in the layouts that the kernels read, and knows
nothing of moe_ops: a call with two arguments exchanged, scales in another order or gate rows first
computes something else or raises.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tests.support import oracle

GELU, SILU, SWIGLU, GEGLU, RELU2, SWIGLUSTEP = 0, 2, 3, 4, 6, 7
GATED = (SWIGLU, GEGLU, SWIGLUSTEP)
FLOATS = {torch.bfloat16, torch.float16}
UNFIT = (5, 10 + 9)
NIBBLES = torch.tensor(oracle.code_values("e2m1"), dtype=torch.float64)


class FakeRunner:
    """What `module.init(...)` returns."""

    def __init__(self, kernels):
        (
            self.input,
            self.weight,
            self.output,
            self.fp8_block,
            self.w4,
            self.mxfp8,
            self.packed,
        ) = kernels
        self.calls: list[list[int]] = []  # tactics of each call

    def get_gemm1_tactic_count(self) -> int:
        return 10

    def get_gemm2_tactic_count(self) -> int:
        return 18

    def get_tactic_occupancy(self, tactic: int) -> int:
        """Of GEMM1's tactics, then GEMM2's. One of each does not run here."""
        assert 0 <= tactic < 28
        return int(tactic not in UNFIT)

    def run_moe(
        self,
        output,
        input,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc1_expert_biases,
        fc2_expert_weights,
        fc2_expert_biases,
        quant_scales,
        input_sf,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        swizzled_input_sf,
        tp_size,
        tp_rank,
        ep_size,
        ep_rank,
        cluster_size,
        cluster_rank,
        enable_alltoall,
        min_latency_mode,
        profile_ids,
        enable_pdl,
        activation_type,
    ) -> None:
        assert (tp_size, tp_rank, ep_size, ep_rank, cluster_size, cluster_rank) == (1, 0) * 3
        assert enable_alltoall is False and min_latency_mode is False
        assert type(enable_pdl) is bool and type(swizzled_input_sf) is bool
        self.calls.append(list(profile_ids))
        first, second = profile_ids
        assert first < 10
        # those below GEMM2's count are counted from its first, others on from GEMM1's
        second += 10 if 0 <= second < 18 else 0
        assert second < 28 and not {first, second} & {*UNFIT}
        ids, weights, w1, w2 = (
            token_selected_experts,
            token_final_scales,
            fc1_expert_weights,
            fc2_expert_weights,
        )
        check(input, self.input, 2)
        check(ids, torch.int32, 2)
        check(output, self.output, 2)
        check(w1, self.weight, 3)
        check(w2, self.weight, 3)
        if weights is not None:
            check(weights, torch.float32, 2)
            assert weights.shape == ids.shape
        packing = {torch.uint8: 2, torch.int64: 16}.get(self.weight, 1)
        E, K, I = w2.shape[0], w2.shape[1], w2.shape[2] * packing
        gated = activation_type in GATED
        assert w1.shape[:2] == (E, 2 * I if gated else I) and output.shape == (len(ids), K)
        for tensor in (swiglu_alpha, swiglu_beta, swiglu_limit):
            if tensor is not None:
                check(tensor, torch.float32, 1)
                assert tensor.shape == (E,)
        if fc1_expert_biases is not None or fc2_expert_biases is not None:
            check(fc1_expert_biases, self.output, 2)
            check(fc2_expert_biases, self.output, 2)
            assert fc1_expert_biases.shape == w1.shape[:2] and fc2_expert_biases.shape == (E, K)

        rows, w1, w2, quantize = self.operands(input, input_sf, w1, w2, quant_scales, K, I)
        output.zero_()
        for m, row in enumerate(ids.tolist()):
            here = [e for e in row if 0 <= e < E]
            assert len(set(here)) == len(here), "its sort for many tokens loses repeated experts"
            total = torch.zeros(K, dtype=torch.float64)
            for j, e in enumerate(row):
                if not 0 <= e < E:
                    continue
                gate_up = w1[e] @ rows[m]
                if fc1_expert_biases is not None:
                    gate_up = gate_up.to(self.output).double() + fc1_expert_biases[e].double()
                limits = [
                    None if t is None else float(t[e])
                    for t in (swiglu_alpha, swiglu_beta, swiglu_limit)
                ]
                y = w2[e] @ quantize(activate(gate_up, activation_type, *limits), e)
                if fc2_expert_biases is not None:
                    y = y + fc2_expert_biases[e].double()
                total += y if weights is None else y * float(weights[m, j])
            output[m] = total.to(self.output)

    def operands(self, x, x_scale, w1, w2, scales, K: int, I: int):
        """fp64 rows and weights, and what happens to the activation's output."""

        def to_output(h, e=0):
            return h.to(self.output).double()

        if self.fp8_block:
            assert self.input == torch.bfloat16 and self.weight == torch.float8_e4m3fn
            s1, s2 = scales
            check(s1, torch.float32, 3)
            check(s2, torch.float32, 3)
            w1, w2 = [
                w.double() * s.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
                for w, s in ((w1, s1), (w2, s2))
            ]

            def by_groups(t):
                return oracle.quantized_activation(t.double().view(-1, t.shape[-1]), "fp8_block")

            return by_groups(x), w1, w2, lambda h, e: by_groups(to_output(h))[0]
        if self.weight == torch.uint8 and self.w4 and not self.packed:
            s1, s2 = scales
            return (
                x.double(),
                mixed_e2m1(w1, s1, K),
                mixed_e2m1(w2, s2, I),
                to_output,
            )
        if self.input == torch.float8_e4m3fn and self.weight == torch.float8_e4m3fn:
            dequant1, quant2, dequant2, input_dequant = scales
            check(dequant1, torch.float32, 1)
            check(dequant2, torch.float32, 1)
            check(input_dequant, torch.float32, 0)
            assert quant2.dtype == torch.float32 and quant2.ndim <= 1
            w1 = w1.double() * dequant1.double().view(-1, 1, 1)
            w2 = w2.double() * dequant2.double().view(-1, 1, 1)
            quant2 = quant2.double().expand(len(w2))  # one, or one of each expert
            return x.double(), w1, w2, lambda h, e: oracle.e4m3(h * quant2[e])
        if self.weight == torch.int64:
            return self.blackwell(x, x_scale, w1, w2, scales, K, I, to_output)
        assert self.input == self.weight == self.output and self.output in FLOATS
        assert scales is None
        return x.double(), w1.double(), w2.double(), to_output

    def blackwell(self, x, x_scale, w1, w2, scales, K, I, to_output):
        """nvfp4 of rows that come in 16 bits, and mxfp4 of rows quantized to mxfp8."""
        group = 32 if self.mxfp8 else 16
        if self.mxfp8:
            s1, global1, s2, global2 = scales
        else:
            a1, s1, global1, a2, s2, global2 = scales
            assert a1.dtype == a2.dtype == torch.float32 and a1.ndim == 0 and a2.ndim <= 1
            a2 = a2.expand(len(w2))
        weights = []
        for w, s, factor, columns in ((w1, s1, global1, K), (w2, s2, global2, I)):
            check(s, torch.int32, 3)
            check(factor, torch.float32, 1)
            assert s.shape == (*w.shape[:2], columns // group // 4)
            codes = w.view(torch.uint8)
            elements = NIBBLES[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
            plain = unswizzled(s.view(torch.uint8), *w.shape[1:2], columns // group)
            plain = 2.0 ** (plain.double() - 127) if self.mxfp8 else e4m3_values(plain)
            spread = plain.repeat_interleave(group, 2)
            weights.append(elements * spread * factor.double().view(-1, 1, 1))
        if self.mxfp8:
            check(x_scale, torch.uint8, 2)  # linear: one row after the other
            assert x_scale.shape == (len(x), K // 32)
            rows = x.double() * (2.0 ** (x_scale.double() - 127)).repeat_interleave(32, 1)

            def quantize(h, e):
                return oracle.quantized_activation(to_output(h)[None], "mxfp4_mxfp8")[0]

            return rows, *weights, quantize

        def nvfp4(t, scale):  # times the global scale: the factors take it away again
            q = oracle.quantized_activation(t.double(), "nvfp4", 1 / scale.double())
            return q * scale.double()

        if x.dtype == torch.uint8:  # rows that arrive packed
            check(x_scale, torch.float8_e4m3fn, 2)
            assert x_scale.shape == (len(x), K // 16)
            rows = NIBBLES[torch.stack((x & 15, x >> 4), -1).flatten(-2).long()]
            rows = rows * x_scale.double().repeat_interleave(16, 1)
        else:
            assert x_scale is None
            rows = nvfp4(x, a1)
        return rows, *weights, lambda h, e: nvfp4(to_output(h)[None], a2[e])[0]


def e4m3_values(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).double()


def unswizzled(bytes_: Tensor, rows: int, cols: int) -> Tensor:
    """Scales in row-major order from the order of SM100's tensor cores: the position of row r and
    column c."""
    r, c = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    tile = r // 128 * (cols // 4) + c // 4
    at = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return bytes_.reshape(len(bytes_), -1)[:, at]


def check(tensor: Tensor, dtype: torch.dtype, ndim: int) -> None:
    assert tensor.dtype == dtype and tensor.ndim == ndim and tensor.is_contiguous(), tensor


def activate(v: Tensor, kind: int, alpha, beta, limit) -> Tensor:
    """The linear half comes first, then the gate."""
    if kind == RELU2:
        return v.clamp(min=0) ** 2
    if kind == SILU:
        return v * torch.sigmoid(v)
    if kind == GELU:
        return v * (1 + torch.erf(v / math.sqrt(2))) / 2
    linear, gate = v.chunk(2)
    if kind == GEGLU:
        return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2 * linear
    if kind == SWIGLUSTEP:
        limit = 7.0 if limit is None else limit
        return (gate * torch.sigmoid(gate)).clamp(max=limit) * linear.clamp(-limit, limit)
    assert kind == SWIGLU
    alpha = 1.0 if alpha is None else alpha
    beta = 0.0 if beta is None else beta
    limit = math.inf if limit is None else limit
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + beta)


def mixed_e2m1(w: Tensor, scales: Tensor, columns: int) -> Tensor:
    """fp64 weights of bytes and e8m0 scales as the SM90 kernels beside 16-bit activations read
    them."""
    E, N, B = w.shape
    assert scales.dtype == torch.uint8 and scales.shape == (E, columns // 128, 4 * N)
    flat = torch.stack((w & 15, w >> 4), -1).view(E, -1).long()
    values = NIBBLES[flat[:, nibble_positions(N, columns)]].view(E, N, columns)
    exponents = scales.view(E, columns // 128, N, 4).permute(0, 2, 1, 3).reshape(E, N, -1)
    return values * (2.0 ** (exponents.double() - 127)).repeat_interleave(32, 2)


@functools.cache
def nibble_positions(rows: int, cols: int) -> Tensor:
    """Where the element of each row and column lies: the loops of
    interleave_fp4_weights_for_sm90_mixed_gemm, each nibble followed on its way."""
    where = torch.empty(rows * cols, dtype=torch.int64)
    for block in range(rows // 2):
        for partition in range(cols // 64):
            for lane in range(32):
                row = block // 8 * 16 + block % 8
                to_row = row + (lane // 8 % 2) * 8
                to_lane = lane // 16 * 16 + lane % 4 * 4 + lane % 8 // 4 * 2
                a = row * cols // 2 + partition * 32 + lane
                b = a + 8 * cols // 2
                to = to_row * cols // 2 + partition * 32 + to_lane
                where[2 * a], where[2 * b] = 2 * to, 2 * to + 1
                where[2 * a + 1], where[2 * b + 1] = 2 * to + 2, 2 * to + 3
    return where
