#include "sm90_products.cuh"

using namespace moe_ops::cutlass_products;

extern "C" int moe_ops_sm90_product_x_wt_run(GroupedProduct const* g) { return launch<X_WT>(*g); }
extern "C" int moe_ops_sm90_product_x_w_run(GroupedProduct const* g) { return launch<X_W>(*g); }
extern "C" int moe_ops_sm90_product_outer_run(GroupedProduct const* g) { return launch<OUTER>(*g); }
extern "C" int moe_ops_sm90_product_shared_memory() { return int(sizeof(Shared<GATED>)); }

extern "C" int moe_ops_sm90_product_activated_run(GatedProduct const* g) {
  return launch<GATED>(g->product, gated_of(*g), g->up);
}
