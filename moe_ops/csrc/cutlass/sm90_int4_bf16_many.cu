#include "sm90_int4.cuh"

using Out = cutlass::bfloat16_t;

MOE_OPS_INT4(moe_ops_sm90_int4_bf16_256x128, moe_ops::Sm90Int4<Out, 256, 128>)
MOE_OPS_INT4(moe_ops_sm90_int4_bf16_128x256, moe_ops::Sm90Int4<Out, 128, 256>)
