#include "blockscaled.cuh"

MOE_OPS_BLOCK_SCALED(moe_ops_sm120_nvfp4_bf16,
                     moe_ops::BlockScaled<moe_ops::Nvfp4, moe_ops::OnSm120<moe_ops::Nvfp4>, cutlass::bfloat16_t>)
