#include "sm90_blocks.cuh"

using namespace moe_ops::cutlass_products;

extern "C" int moe_ops_sm90_blocks_x_wt_run(BlockScaledProduct const* g) {
  return launch_blocks<BLOCKS>(*g);
}
extern "C" int moe_ops_sm90_blocks_activated_run(BlockScaledProduct const* g) {
  return launch_blocks<GATED_BLOCKS>(*g);
}
extern "C" int moe_ops_sm90_blocks_shared_memory() { return int(sizeof(Shared<GATED_BLOCKS>)); }
