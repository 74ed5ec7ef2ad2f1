#include "sm90_products.cuh"

using namespace moe_ops::cutlass_products;

extern "C" int moe_ops_sm90_product_x_wt_run(GroupedProduct const* g) { return launch<X_WT>(*g); }
extern "C" int moe_ops_sm90_product_x_w_run(GroupedProduct const* g) { return launch<X_W>(*g); }
extern "C" int moe_ops_sm90_product_outer_run(GroupedProduct const* g) { return launch<OUTER>(*g); }
extern "C" int moe_ops_sm90_product_shared_memory() { return int(sizeof(Shared<GATED>)); }

extern "C" int moe_ops_sm90_product_activated_run(GatedProduct const* g) {
  Gated gated{g->bias, g->bias_is_float != 0, static_cast<__nv_bfloat16*>(g->gate_up),
              g->interleaved != 0, g->activation, g->alpha, g->beta, g->limit};
  return launch<GATED>(g->product, gated);
}
