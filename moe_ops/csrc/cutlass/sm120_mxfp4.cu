#include "blockscaled.cuh"

MOE_OPS_BLOCK_SCALED(moe_ops_sm120_mxfp4_bf16,
                     moe_ops::BlockScaled<moe_ops::Mxfp4, moe_ops::OnSm120<moe_ops::Mxfp4>, cutlass::bfloat16_t>)
