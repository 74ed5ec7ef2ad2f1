#include "sm90_int4.cuh"

using Out = cutlass::half_t;

MOE_OPS_INT4(moe_ops_sm90_int4_f16_256x32, moe_ops::Sm90Int4<Out, 256, 32>)
MOE_OPS_INT4(moe_ops_sm90_int4_f16_256x64, moe_ops::Sm90Int4<Out, 256, 64>)
