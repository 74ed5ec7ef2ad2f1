#include "sm90_fp8.cuh"

using Out = cutlass::half_t;

// 64 rows a block up to some 64 rows an expert, 256 columns above: docs/kernels/cutlass.md
MOE_OPS_KERNEL(moe_ops_sm90_fp8_f16_64x128, moe_ops::Sm90Fp8<Out, 64, 128, false>)
MOE_OPS_KERNEL(moe_ops_sm90_fp8_f16_128x256, moe_ops::Sm90Fp8<Out, 128, 256, true>)
