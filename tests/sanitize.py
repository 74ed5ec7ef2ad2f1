"""Runs every Triton kernel at small sizes, for compute-sanitizer; not a test by itself.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --kernel-regex kns=moe_ops \
        python tests/sanitize.py

racecheck reports a reduction of torch's own, hence its filter by kernel name. Without the caching allocator
every tensor has bounds of its own, so an access past any of them shows.
"""

import itertools

import torch

import moe_ops
from moe_ops.activations import NAMES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def main() -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    cases = 0
    shapes = [(1, 4, 2, 64, 48), (7, 5, 3, 65, 33), (70, 4, 2, 128, 128), (300, 3, 2, 96, 80)]
    for (M, E, top_k, K, I), dtype in itertools.product(shapes, DTYPES):
        names = (
            NAMES if (M, dtype) == (7, torch.bfloat16) else ("silu", "swigluoai", "relu2_no_mul")
        )
        for name in names:
            N = 2 * I if moe_ops.Activation(name).gated else I
            x, w13, w2 = (
                randn(M, K, dtype=dtype),
                randn(E, N, K, dtype=dtype) / K**0.5,
                randn(E, K, I, dtype=dtype) / I**0.5,
            )
            ids = torch.randint(-1, E + 2, (M, top_k), generator=generator, device="cuda")
            weights = torch.rand(M, top_k, generator=generator, device="cuda")
            expert_map = torch.randperm(E + 1, generator=generator, device="cuda") - 1
            for extra in (False, True):
                options = {}
                if extra:
                    options = {
                        "w13_bias": randn(E, N, dtype=dtype),
                        "w2_bias": randn(E, K, dtype=dtype),
                        "expert_map": expert_map,
                    }
                out = moe_ops.fused_experts(
                    x, w13, w2, weights, ids, activation=name, backend="triton", **options
                )
                assert out.isfinite().all()
                cases += 1
            counts = torch.randint(0, M + 2, (E,), generator=generator, device="cuda")
            blocks = randn(E, M, K, dtype=dtype)
            moe_ops.batched_experts(blocks, w13, w2, counts, activation=name, backend="triton")
            ends = torch.sort(torch.randint(0, M, (E,), generator=generator, device="cuda")).values
            moe_ops.grouped_linear(x, w13, ends.int(), backend="triton")
            cases += 2
    for scheme in ("fp8_block", "fp8_channel", "fp8_tensor", "fp8_w8a16:block", "fp8_w8a16"):
        for M, E, K, I in (
            (1, 4, 256, 128),
            (7, 5, 272, 144),
            (70, 3, 384, 256),
            (300, 3, 129, 65),
        ):
            w13 = moe_ops.quantize(randn(E, 2 * I, K, dtype=torch.bfloat16) / K**0.5, scheme)
            w2 = moe_ops.quantize(randn(E, K, I, dtype=torch.bfloat16) / I**0.5, scheme)
            x = randn(M, K, dtype=torch.bfloat16)
            ids = torch.randint(-1, E + 2, (M, 2), generator=generator, device="cuda")
            weights = torch.rand(M, 2, generator=generator, device="cuda")
            out = moe_ops.fused_experts(x, w13, w2, weights, ids, backend="triton")
            assert out.isfinite().all()
            cases += 1
    for E, groups in ((5, None), (128, None), (64, 8), (256, 8)):
        logits = randn(33, E, dtype=torch.bfloat16)
        bias = randn(E, dtype=torch.float32)
        if groups:
            moe_ops.route(
                logits,
                4,
                "deepseek_v3",
                num_expert_groups=groups,
                topk_groups=4,
                correction_bias=bias,
            )
        else:
            moe_ops.route(logits, 4)
        cases += 1
    torch.cuda.synchronize()
    print(f"{cases} cases ran")


if __name__ == "__main__":
    main()
