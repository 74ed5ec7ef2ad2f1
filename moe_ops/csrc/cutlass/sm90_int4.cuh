// SM90: int4 weights with e4m3 scales of groups of 128 columns x e4m3 activations, fp32 scales of
// weight rows and of tokens in the epilogue.
//
// The product is exchanged: A are the weights (N, K), which the tensor cores take from registers
// once a table of eight numbers has turned their codes into e4m3(code * scale), B the rows of
// activations, and D, column-major (N, rows), is row-major (rows, N) in memory. m is N, n the
// number of rows.
#pragma once

#include "common.cuh"

namespace moe_ops {

using Int4 = cutlass::int4b_t;

// What cutlass/util/mixed_dtype_utils.hpp (which wants curand_kernel.h) calls
// compute_memory_reordering_atom: values that one thread of the WGMMA with A in registers reads
// become neighbours in memory.
template <class Element>
constexpr auto reorder_atom() {
  using namespace cute;
  using Traits = MMA_Traits<
      decltype(SM90::GMMA::rs_op_selector<Element, Element, float, Shape<_64, _16, _32>>())>;
  auto tv = typename Traits::ALayout{};
  auto warp = make_layout_like(composition(tv, make_shape(Int<32>{}, size<1>(tv))));
  auto shape = shape_div(select<0, 2>(typename Traits::Shape_MNK{}),
                         size(typename Traits::ThrID{}) / Int<32>{});
  auto values = logical_product(Layout<_1>{}, size<1>(tv));
  auto offsets = select<1, 0>(logical_product(values, make_layout(size<0>(warp))));
  return composition(offsets, right_inverse(warp).with_shape(shape));
}

template <class Out, int TILE_M, int TILE_N>
struct Sm90Int4 {
  using E4m3 = cutlass::float_e4m3_t;
  using Table = cutlass::Array<E4m3, 8>;  // e4m3(-8 s), e4m3(-7 s), .., e4m3(-s)
  using Tile = Shape<Int<TILE_M>, Int<TILE_N>, Int<128>>;
  using Cluster = Shape<_1, _1, _1>;
  using ColumnMajor = cutlass::layout::ColumnMajor*;
  using MainSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
  // (N, K, 1) in memory: atoms of 16 x 32 weights, along N first
  using StrideW = cute::remove_pointer_t<cutlass::detail::TagToStrideB_t<ColumnMajor>>;
  using LayoutW = decltype(cute::tile_to_shape(reorder_atom<E4m3>(),
                                               cute::Layout<Shape<int, int, _1>, StrideW>{}));
  using Scaled = ScaledEpilogue<Out, Tile>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, ColumnMajor, 8, Out,
      ColumnMajor, 8, EpilogueSchedule, typename Scaled::Tree>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cute::tuple<Int4, Table>, LayoutW*, 32,
      E4m3, ColumnMajor, 16, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      MainSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  using StrideScale = typename Mainloop::StrideScale;
  static_assert(sizeof(StrideB) == 8 && sizeof(StrideD) == 8,
                "the setup kernel writes one int64 for a stride");
  static_assert(sizeof(LayoutW) == 12, "the setup kernel writes three int32 for a layout of weights");
  static_assert(cute::is_same_v<StrideScale, Stride<_1, int64_t, int64_t>> &&
                    sizeof(StrideScale) == 16,
                "the setup kernel writes two int64 for the strides of scales");
  static_assert(cute::is_same_v<typename Kernel::InternalStrideA, LayoutW>,
                "the kernel reads an array of layouts where those of others read strides");

  static typename Gemm::Arguments arguments(GroupedGemm const& g) {
    auto* d = array<Out*>(g.d);
    auto* stride_d = array<StrideD>(g.stride_d);
    return {cutlass::gemm::GemmUniversalMode::kGrouped, problem_shape(g),
            {array<Int4 const*>(g.a), array<LayoutW>(g.stride_a), array<E4m3 const*>(g.b),
             array<StrideB>(g.stride_b), array<Table const*>(g.a_scale),
             array<StrideScale>(g.a_scale_layout), g.group_size},
            {Scaled::arguments(g), nullptr, stride_d, d, stride_d}, hardware(g)};
  }

  static LayoutW layout(int n, int k) {
    return cute::tile_to_shape(reorder_atom<E4m3>(), cute::make_shape(n, k, Int<1>{}));
  }
};

}  // namespace moe_ops

// An int4 kernel, and functions of the host for tests, of a weight (n, k):
//   int NAME_layout(n, k, layout)                 writes an entry of stride_a; its bytes
//   int64_t NAME_weight_offset(n, k, row, column) place of a weight among all, in nibbles
#define MOE_OPS_INT4(NAME, ...)                                                        \
  MOE_OPS_KERNEL(NAME, __VA_ARGS__)                                                    \
  extern "C" int NAME##_layout(int n, int k, void* layout) {                           \
    using K = __VA_ARGS__;                                                             \
    *static_cast<K::LayoutW*>(layout) = K::layout(n, k);                               \
    return sizeof(K::LayoutW);                                                         \
  }                                                                                    \
  extern "C" int64_t NAME##_weight_offset(int n, int k, int row, int column) {         \
    using K = __VA_ARGS__;                                                             \
    return K::layout(n, k)(row, column, 0);                                            \
  }
