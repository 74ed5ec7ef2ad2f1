"""The arithmetic of e4m3 and int8, against an fp64 oracle written element by element."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ops.numerics import (
    dequantize_weight,
    fake_quantize_activation,
    quantize_activation,
    quantize_weight,
)
from moe_ops.numerics.elements import e4m3_to_float32
from moe_ops.schemes import (
    SCHEMES,
    GroupShape,
    QuantDesc,
)
from tests.test_schemes import ACTIVATIONS, E4M3, QUANTIZED

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def nearest_e4m3(x: float) -> float:
    """Round to nearest, ties to the even mantissa (every second entry of the list is even)."""
    best = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - abs(x)), i % 2))
    return math.copysign(E4M3[best], x)


def groups(rows, cols, group_rows, group_cols):
    """Index pairs of each group of a (rows, cols) matrix, with the group's place among the
    scales."""
    gr, gc = (rows if group_rows == -1 else group_rows), (cols if group_cols == -1 else group_cols)
    for i in range(0, rows, gr):
        for j in range(0, cols, gc):
            yield (i // gr, j // gc), (slice(i, i + gr), slice(j, j + gc))


def oracle_scales(x: torch.Tensor, desc: QuantDesc) -> torch.Tensor:
    """fp32 amax / 448 of each group, as a matrix, rounded up to a power of two if the rule is
    "ceil"; 1 for a group of zeros."""
    group = desc.group
    out = {
        at: x[where].double().abs().max().item() / 448
        for at, where in groups(*x.shape, group.rows, group.cols)
    }
    shape = tuple(max(at[d] for at in out) + 1 for d in (0, 1))
    values = [out[divmod(i, shape[1])] or 1.0 for i in range(len(out))]
    if desc.scale_rule == "ceil":
        values = [2.0 ** math.ceil(math.log2(torch.tensor(v).float().item())) for v in values]
    return torch.tensor(values, dtype=torch.float64).float().reshape(shape)


def oracle_values(x: torch.Tensor, scale: torch.Tensor, group: GroupShape) -> torch.Tensor:
    """Quantized values in fp64 for given scales, the quotient rounded to fp32 as the rule says."""
    out = torch.empty_like(x, dtype=torch.float64)
    for at, where in groups(*x.shape, group.rows, group.cols):
        s = scale[at].item()
        quotient = (x[where].double() / s).float()
        q = [nearest_e4m3(max(-448.0, min(448.0, v))) for v in quotient.flatten().tolist()]
        out[where] = torch.tensor(q, dtype=torch.float64).reshape(quotient.shape) * s
    return out


def round_trip(weight, scheme):
    qdata, scales = quantize_weight(weight, scheme)
    return dequantize_weight(qdata, scheme, *scales)


def sample(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(shape, generator=generator))
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def test_all_codes_are_decoded_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = e4m3_to_float32(codes)
    assert sorted({abs(v) for v in got.tolist() if v == v}) == E4M3
    assert torch.equal(got.view(2, 128).isnan().sum(1), torch.tensor([1, 1]))
    finite = ~got.isnan()
    assert torch.equal(got[finite], codes.to(torch.float32)[finite])
    assert torch.equal(got[finite].signbit(), codes.to(torch.float32)[finite].signbit())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", QUANTIZED)
@settings(max_examples=6, deadline=None)
@given(
    n=st.sampled_from([1, 3, 128, 130]), k=st.sampled_from([1, 40, 129]), seed=st.integers(0, 99)
)
def test_weights_match_the_oracle(scheme, n, k, seed):
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    weight = sample(2, n, k, dtype=dtype, seed=seed)
    desc = SCHEMES[scheme].weight
    qdata, (scale, *_) = quantize_weight(weight, scheme)
    assert qdata.dtype == torch.float8_e4m3fn and qdata.shape == weight.shape
    assert scale.dtype == torch.float32 and qdata.is_contiguous() and scale.is_contiguous()
    assert scale.shape == SCHEMES[scheme].batched_scale_shape(2, n, k)
    values = dequantize_weight(qdata, scheme, scale)
    for e in range(2):
        want_scale = oracle_scales(weight[e], desc)
        assert torch.equal(scale[e].reshape(want_scale.shape), want_scale)
        want = oracle_values(weight[e], want_scale, desc.group)
        assert torch.equal(values[e], want.float())
        one, (one_scale, *_) = quantize_weight(weight[e], scheme)
        assert one_scale.shape == SCHEMES[scheme].scale_shape(n, k)
        assert torch.equal(dequantize_weight(one, scheme, one_scale), values[e])
    gathered = dequantize_weight(qdata[[1, 1, 0]], scheme, scale[[1, 1, 0]], dtype=torch.bfloat16)
    assert torch.equal(gathered, values[[1, 1, 0]].bfloat16())


@pytest.mark.parametrize("scheme", ACTIVATIONS)
@settings(max_examples=6, deadline=None)
@given(m=st.sampled_from([1, 4]), k=st.sampled_from([1, 128, 300]), seed=st.integers(0, 99))
def test_activations_match_the_oracle(scheme, m, k, seed):
    x = sample(m, k, dtype=(torch.float32, torch.bfloat16)[seed % 2], seed=seed)
    desc = SCHEMES[scheme].activation
    static = torch.tensor(x.abs().max().item() / 600) if desc.static else None  # clamps some
    want_scale = static.reshape(1, 1) if desc.static else oracle_scales(x, desc)
    q, scale, *_ = quantize_activation(x, scheme, static)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == desc.scale_shape(m, k)
    assert torch.equal(scale.reshape(want_scale.shape), want_scale)
    got = fake_quantize_activation(x, scheme, static)
    assert got.dtype == torch.float32
    assert torch.equal(got, oracle_values(x, want_scale, desc.group).float())
    if desc.static:
        assert got.abs().max() < x.abs().max().float()
        assert torch.equal(fake_quantize_activation(x, scheme, static.reshape(1)), got)


def test_weight_only_schemes_keep_activations():
    x = sample(3, 5, dtype=torch.bfloat16)
    for scheme in ("", "fp8_w8a16:tensor", "fp8_w8a16", "fp8_w8a16:block"):
        assert torch.equal(fake_quantize_activation(x, scheme), x.float())


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_zeros_stay_zero_and_no_rows_work(scheme):
    weight = sample(2, 130, 140)
    weight[1] = 0
    weight[0, 3] = 0
    values = round_trip(weight, scheme)
    assert values.isfinite().all() and not values[1].any() and not values[0, 3].any()
    tiny = torch.full((1, 2, 3), 1e-44)  # amax / 448 underflows
    assert round_trip(tiny, scheme).isfinite().all()
    static = torch.tensor(0.5) if "static" in scheme else None
    x = sample(4, 300)
    x[1] = 0
    x[2, 128:256] = 0
    got = fake_quantize_activation(x, scheme, static)
    assert got.isfinite().all() and not got[1].any() and not got[2, 128:256].any()
    assert got[0].any()
    zeros = fake_quantize_activation(torch.zeros(2, 5), scheme, static)
    assert torch.equal(zeros, torch.zeros(2, 5))
    assert fake_quantize_activation(x[:0], scheme, static).shape == (0, 300)


def test_rows_nobody_wrote_do_not_set_the_scale():
    x = sample(6, 40)
    valid = torch.tensor([True, False, True, True, False, True])
    want = fake_quantize_activation(x[valid], "fp8_tensor")
    for poison in (float("nan"), float("inf"), 1e30):
        dirty = x.clone()
        dirty[~valid] = poison
        got = fake_quantize_activation(dirty, "fp8_tensor", rows_valid=valid)
        assert torch.equal(got[valid], want)
    none = fake_quantize_activation(
        dirty, "fp8_tensor", rows_valid=torch.zeros(6, dtype=torch.bool)
    )
    assert none.shape == x.shape
    batched = fake_quantize_activation(
        dirty.reshape(2, 3, 40), "fp8_tensor", rows_valid=valid.reshape(2, 3)
    )
    assert torch.equal(batched.reshape(6, 40)[valid], want)


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel"])
def test_one_bad_row_spoils_no_other(scheme):
    x = sample(3, 300)
    want = fake_quantize_activation(x, scheme)
    x[1, 7] = float("nan")
    got = fake_quantize_activation(x, scheme)
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and got[1, :128].isnan().all()


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_arithmetic_traces_with_unknown_row_count(scheme):
    def run(x, qdata, scale):
        return fake_quantize_activation(x, scheme), dequantize_weight(qdata, scheme, scale)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    qdata, (scale, *_) = quantize_weight(sample(2, 130, 300), scheme)
    weights = qdata, scale
    for m in (2, 0, 5):
        x = sample(m, 300, seed=m)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        for got, want in zip(compiled(x, *weights), run(x, *weights), strict=True):
            assert torch.equal(got, want)


@devices
def test_agrees_with_torchao_bit_for_bit(device):
    """On fp32 input; for bf16 torchao rounds the scale itself to bf16."""
    from torchao.quantization import Float8Tensor, PerRow, PerTensor
    from torchao.quantization.quantize_.common import KernelPreference

    weight = sample(64, 96).to(device)
    for scheme, granularity in (("fp8_channel", PerRow()), ("fp8_tensor", PerTensor())):
        peer = Float8Tensor.from_hp(
            weight, granularity=granularity, kernel_preference=KernelPreference.TORCH
        )
        qdata, (scale, *_) = quantize_weight(weight, scheme)
        if device == "cpu":
            assert torch.equal(scale.flatten(), peer.scale.flatten())
            assert torch.equal(qdata.view(torch.uint8), peer.qdata.view(torch.uint8))
            values = dequantize_weight(qdata, scheme, scale)
            assert torch.equal(values, peer.dequantize())
        else:  # its CUDA scale is a product with 1/448
            torch.testing.assert_close(scale.flatten(), peer.scale.flatten(), rtol=2e-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_cpu_and_gpu_agree_bit_for_bit(scheme):
    weight, x = sample(3, 200, 300, dtype=torch.bfloat16), sample(64, 300)
    static = torch.tensor(0.01) if "static" in scheme else None
    qdata, (scale, *_) = quantize_weight(weight, scheme)
    gpu_qdata, (gpu_scale, *_) = quantize_weight(weight.cuda(), scheme)
    assert torch.equal(gpu_scale.cpu(), scale)
    assert torch.equal(gpu_qdata.cpu().view(torch.uint8), qdata.view(torch.uint8))
    values = dequantize_weight(gpu_qdata, scheme, gpu_scale)
    assert torch.equal(values.cpu(), dequantize_weight(qdata, scheme, scale))
    on_gpu, static_gpu = x.cuda(), None if static is None else static.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = fake_quantize_activation(on_gpu, scheme, static_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu(), fake_quantize_activation(x, scheme, static))
