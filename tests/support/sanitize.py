"""Runs every Triton kernel at small sizes, for compute-sanitizer; not a test by itself.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python tests/support/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck \
        --kernel-regex kns=moe_ops python tests/support/sanitize.py \
        [plain] [fp8] [mixed] [emulated] [router] [deep_gemm] [handover]

racecheck reports a reduction of torch's own, hence its filter by kernel name, with which it fails
itself on `router` and `deep_gemm` ("failed to handle a hardware exception", CUDA 13.0); of
`router` alone it reports nothing without one. Where warps of a kernel part for different work, it
takes what Triton hands over to them behind a barrier of all threads for a race: `handover` shows
that of a kernel which does nothing else. Without the caching allocator every tensor has bounds of
its own, so an access past any of them shows.
"""

import importlib.util
import itertools
import sys

import torch

import moe_ops
from moe_ops.activations import NAMES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = ("fp8_block", "fp8_channel", "fp8_tensor", "fp8_w8a16:block", "fp8_w8a16")
PACKED = (
    "int4_w4a16:g32",
    "int4_w4a16:g64:zp",
    "int4_w4a16:channel",
    "mxfp4_w4a16",
    "nvfp4_w4a16",
)
PACKED += ("int8_w8a16:g32", "int8_w8a16:channel", "int8_w8a8", "mxfp6_e3m2_w6a16")
EMULATED = ("int4_w4a8", "mxfp4_w4a8", "mxfp4_mxfp8", "mxfp4", "mxfp6_e2m3", "mxfp8", "nvfp4")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def routing(M: int, E: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights and ids, some of no expert."""
    ids = torch.randint(-1, E + 2, (M, top_k), device="cuda")
    return torch.rand(M, top_k, device="cuda"), ids


def plain() -> int:
    """Layers, batched layers and grouped products in every dtype; number of cases."""
    cases = 0
    shapes = [(1, 4, 2, 64, 48), (7, 5, 3, 65, 33), (70, 4, 2, 128, 128), (300, 3, 2, 96, 80)]
    for (M, E, top_k, K, I), dtype in itertools.product(shapes, DTYPES):
        every = (M, dtype) == (7, torch.bfloat16)
        for name in NAMES if every else ("silu", "swigluoai", "relu2_no_mul"):
            N = 2 * I if moe_ops.Activation(name).gated else I
            x, w13 = randn(M, K, dtype=dtype), randn(E, N, K, dtype=dtype) / K**0.5
            w2 = randn(E, K, I, dtype=dtype) / I**0.5
            weights, ids = routing(M, E, top_k)
            more = {
                "w13_bias": randn(E, N, dtype=dtype),
                "w2_bias": randn(E, K, dtype=dtype),
                "expert_map": torch.randperm(E + 1, device="cuda") - 1,
            }
            for options in ({}, more):
                run(x, w13, w2, weights, ids, activation=name, **options)
            counts = torch.randint(0, M + 2, (E,), device="cuda")
            blocks = randn(E, M, K, dtype=dtype)
            moe_ops.batched_experts(blocks, w13, w2, counts, activation=name, backend="triton")
            ends = torch.sort(torch.randint(0, M, (E,), device="cuda")).values
            moe_ops.grouped_linear(x, w13, ends.int(), backend="triton")
            cases += 4
    return cases


def run(*args, backend="triton", **options) -> None:
    out = moe_ops.fused_experts(*args, backend=backend, **options)
    assert out.isfinite().all()


def quantized(schemes, shapes) -> int:
    """Layers with quantized weights of (M, E, K, I), as they are and as the backend wants them."""
    for scheme, (M, E, K, I) in itertools.product(schemes, shapes):
        w13 = moe_ops.quantize(randn(E, 2 * I, K) / K**0.5, scheme)
        w2 = moe_ops.quantize(randn(E, K, I) / I**0.5, scheme)
        x, pairs = randn(M, K), routing(M, E, 2)
        run(x, w13, w2, *pairs)
        try:
            ready = [moe_ops.prepare(w, "triton") for w in (w13, w2)]
        except ValueError:  # shapes that have no such layout
            continue
        run(x, *ready, *pairs)
    return len(schemes) * len(shapes)


def fp8() -> int:
    """e4m3 weights, also with rows out of 16-byte step, and with rows in step that end out of
    it."""
    for M in (1, 33):
        weights = (
            moe_ops.quantize(randn(3, 132, 130), "fp8_w8a16:block"),
            moe_ops.quantize(randn(3, 130, 66), "fp8_w8a16:block"),
        )
        run(randn(M, 130), *map(ending_early, weights), *routing(M, 3, 2))
    return 2 + quantized(
        FP8, [(1, 4, 256, 128), (7, 5, 272, 144), (70, 3, 384, 256), (300, 3, 129, 65)]
    )


def ending_early(w: torch.Tensor) -> torch.Tensor:
    """The weight with rows 160 bytes apart, in memory that ends with its last element."""
    E, N, K = w.qdata.shape
    memory = torch.empty((E * N - 1) * 160 + K, dtype=torch.uint8, device="cuda")
    data = memory.as_strided((E, N, K), (N * 160, 160, 1)).view(w.qdata.dtype)
    return w._replace(qdata=data.copy_(w.qdata))


def mixed() -> int:
    """Weights of 4 and 8 bits; 192 and 320 leave tails of their tiles."""
    return quantized(
        PACKED,
        [
            (1, 4, 256, 128),
            (4, 9, 256, 128),
            (7, 5, 320, 192),
            (70, 3, 384, 256),
            (300, 3, 192, 64),
        ],
    )


def emulated() -> int:
    """Activations rounded and multiplied in a wider type, in all three operators."""
    for scheme in EMULATED:
        w13 = moe_ops.quantize(randn(3, 256, 384), scheme)
        w2 = moe_ops.quantize(randn(3, 384, 128), scheme)
        counts = torch.tensor([5, 0, 2], device="cuda")
        x = randn(3, 5, 384)
        moe_ops.batched_experts(x, w13, w2, counts, backend="triton")
        moe_ops.grouped_linear(x.flatten(0, 1), w13, counts.cumsum(0).int(), backend="triton")
    shapes = [(1, 4, 256, 128), (7, 5, 384, 256), (70, 3, 128, 384), (300, 3, 1152, 128)]
    return 2 * len(EMULATED) + quantized(EMULATED, shapes)


def router() -> int:
    """`route`, and `route_tokens` of few and many tokens."""
    options = {"num_expert_groups": 8, "topk_groups": 4}
    grouped = {"method": "deepseek_v3", **options}
    cases = 0
    for E, more in ((5, {}), (128, {}), (64, grouped), (256, grouped)):
        if more:
            more = more | {"correction_bias": randn(E, dtype=torch.float32)}
        moe_ops.route(randn(33, E), 4, **more)
        for M, K in ((1, 70), (3, 512), (16, 264), (33, 128)):
            moe_ops.route_tokens(randn(M, K), randn(E, K), 4, **more)
            cases += 1
        cases += 1
    return cases


def deep_gemm() -> int:
    """The kernels around DeepGEMM's products, which run too."""
    cases = 0
    shapes = [(1, 4, 2, 128, 128), (7, 5, 3, 640, 384), (300, 3, 2, 2304, 256)]
    for (M, E, top_k, K, I), scheme in itertools.product(shapes, ("", "fp8_block")):
        w13, w2 = randn(E, 2 * I, K) / K**0.5, randn(E, K, I) / I**0.5
        if scheme:
            w13, w2 = [moe_ops.quantize(w, scheme) for w in (w13, w2)]
        on = {"backend": "deep_gemm", "activation": "swigluoai" if M == 7 else "silu"}
        run(randn(M, K), w13, w2, *routing(M, E, top_k), **on)
        for T in (M, 128):
            counts = torch.randint(0, T + 2, (E,), device="cuda")
            moe_ops.batched_experts(randn(E, T, K), w13, w2, counts, **on)
        cases += 3
    return cases


def handover() -> int:
    """Warps that part, and do nothing: see the top."""
    import handover as parting

    parting.run()
    return 1


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    kinds = (plain, fp8, mixed, emulated, router, deep_gemm, handover)
    found = {kind.__name__: kind for kind in kinds}
    installed = importlib.util.find_spec("deep_gemm") is not None
    usual = [name for name in found if name != "handover" and (name != "deep_gemm" or installed)]
    for name in sys.argv[1:] or usual:
        cases = found[name]()
        torch.cuda.synchronize()
        print(f"{name}: {cases} cases ran", flush=True)


if __name__ == "__main__":
    main()
