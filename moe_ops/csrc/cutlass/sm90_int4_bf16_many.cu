#include "sm90_int4.cuh"

using Out = cutlass::bfloat16_t;

MOE_OPS_INT4(moe_ops_sm90_int4_bf16_128x64, moe_ops::Sm90Int4<Out, 128, 64>)
MOE_OPS_INT4(moe_ops_sm90_int4_bf16_128x128, moe_ops::Sm90Int4<Out, 128, 128>)
