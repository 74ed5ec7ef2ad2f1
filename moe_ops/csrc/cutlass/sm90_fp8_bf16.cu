#include "sm90_fp8.cuh"

using Out = cutlass::bfloat16_t;

// Of nine tiles the best or next to it at 4 to 1024 rows an expert: docs/kernels/cutlass.md
MOE_OPS_KERNEL(moe_ops_sm90_fp8_bf16, moe_ops::Sm90Fp8<Out, 64, 256>)
