#include "grouped.h"

// Read before anything else of the library is called.
extern "C" int moe_ops_cutlass_abi() { return MOE_OPS_CUTLASS_ABI; }
extern "C" int moe_ops_cutlass_struct_bytes() { return sizeof(GroupedGemm); }
extern "C" int moe_ops_cutlass_product_bytes() { return sizeof(GroupedProduct); }

// The CUDA version that is linked in, and that of the driver: 1000 * major + 10 * minor.
extern "C" int moe_ops_cutlass_runtime_version() {
  int version = 0;
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}
extern "C" int moe_ops_cutlass_driver_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}
