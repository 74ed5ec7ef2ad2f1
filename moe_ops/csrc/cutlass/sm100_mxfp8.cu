#include "blockscaled.cuh"

MOE_OPS_BLOCK_SCALED(moe_ops_sm100_mxfp8_bf16,
                     moe_ops::BlockScaled<moe_ops::Mxfp8, moe_ops::OnSm100<moe_ops::Mxfp8>, cutlass::bfloat16_t>)
