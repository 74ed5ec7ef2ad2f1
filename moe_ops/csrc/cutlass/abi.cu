#include "grouped.h"

// Read before anything else of the library is called.
extern "C" int moe_ops_cutlass_abi() { return MOE_OPS_CUTLASS_ABI; }
extern "C" int moe_ops_cutlass_struct_bytes() { return sizeof(GroupedGemm); }
