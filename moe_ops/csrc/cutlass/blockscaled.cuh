// SM100 and SM120: operands of 4 or 8 bits whose blocks of 16 or 32 columns share a scale, which the
// tensor cores apply. A are rows of activations, B weights (N, K); D = alpha[e] * A @ B^T.
//
// Not run on hardware: compiled, and the host functions below compared with what the setup kernel
// writes (tests/backends/cutlass/test_objects.py).
#pragma once

#include "common.cuh"

namespace moe_ops {

// Formats. `Schedule` is that of SM100; `ALIGNMENT` elements are 16 bytes.
struct Nvfp4 {
  using Element = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100;
  static constexpr int ALIGNMENT = 32;
  static constexpr int TILE_K = 256;
};
struct Mxfp4 {
  using Element = cutlass::mx_float4_t<cutlass::float_e2m1_t>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf4Sm100;
  static constexpr int ALIGNMENT = 32;
  static constexpr int TILE_K = 256;
};
struct Mxfp8 {
  using Element = cutlass::mx_float8_t<cutlass::float_e4m3_t>;
  using Schedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf8f6f4Sm100;
  static constexpr int ALIGNMENT = 16;
  static constexpr int TILE_K = 128;
};

template <class Format>
struct OnSm100 {
  using Arch = cutlass::arch::Sm100;
  using Tile = Shape<Int<128>, Int<128>, Int<Format::TILE_K>>;
  using MainSchedule = typename Format::Schedule;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm;
};

template <class Format>
struct OnSm120 {
  using Arch = cutlass::arch::Sm120;
  using Tile = Shape<_128, _128, _128>;
  using MainSchedule = cutlass::gemm::collective::KernelScheduleAuto;
  using EpilogueSchedule = cutlass::epilogue::collective::EpilogueScheduleAuto;
};

template <class Format, class On, class Out>
struct BlockScaled {
  using Class = cutlass::arch::OpClassBlockScaledTensorOp;
  using Tile = typename On::Tile;
  using Cluster = Shape<_1, _1, _1>;
  using RowMajor = cutlass::layout::RowMajor*;
  using ColumnMajor = cutlass::layout::ColumnMajor*;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      typename On::Arch, Class, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float,
      float, void, RowMajor, 8, Out, RowMajor, 8, typename On::EpilogueSchedule>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      typename On::Arch, Class, typename Format::Element, RowMajor, Format::ALIGNMENT,
      typename Format::Element, ColumnMajor, Format::ALIGNMENT, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      typename On::MainSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  using ScaleA = typename Mainloop::InternalLayoutSFA;
  using ScaleB = typename Mainloop::InternalLayoutSFB;
  using Scale = typename Mainloop::ElementSF;
  using Blocks = typename Mainloop::Sm1xxBlkScaledConfig;
  static_assert(sizeof(StrideA) == 8 && sizeof(StrideB) == 8 && sizeof(StrideD) == 8,
                "the setup kernel writes one int64 for a stride");
  static_assert(sizeof(ScaleA) == 20 && sizeof(ScaleB) == 20,
                "the setup kernel writes five int32 for a layout of scales");

  static typename Gemm::Arguments arguments(GroupedGemm const& g) {
    using Data = typename Gemm::ElementA const*;
    auto* d = array<Out*>(g.d);
    auto* stride_d = array<StrideD>(g.stride_d);
    typename Gemm::Arguments made{
        cutlass::gemm::GemmUniversalMode::kGrouped, problem_shape(g),
        {array<Data>(g.a), array<StrideA>(g.stride_a), array<Data>(g.b), array<StrideB>(g.stride_b),
         array<Scale const*>(g.a_scale), array<ScaleA>(g.a_scale_layout),
         array<Scale const*>(g.b_scale), array<ScaleB>(g.b_scale_layout)},
        {{}, nullptr, stride_d, d, stride_d}, hardware(g)};
    auto& fusion = made.epilogue.thread;
    fusion.alpha = 1.f;
    fusion.beta = 0.f;
    fusion.alpha_ptr_array = array<float const* const>(g.alpha);
    fusion.dAlpha = {_0{}, _0{}, g.alpha ? 1 : 0};
    return made;
  }
};

}  // namespace moe_ops

// A block-scaled kernel, and functions of the host for tests:
//   int NAME_layouts(m, n, k, a, b)    writes an entry each of a_scale_layout and b_scale_layout;
//                                      the bytes of one
//   int64_t NAME_a_scale_offset(m, n, k, row, column)   byte of the scale of an element of A
//   int64_t NAME_b_scale_offset(m, n, k, row, column)   the same of B
#define MOE_OPS_BLOCK_SCALED(NAME, ...)                                                     \
  MOE_OPS_KERNEL(NAME, __VA_ARGS__)                                                         \
  extern "C" int NAME##_layouts(int m, int n, int k, void* a, void* b) {                    \
    using K = __VA_ARGS__;                                                                  \
    auto shape = cute::make_shape(m, n, k, 1);                                              \
    *static_cast<K::ScaleA*>(a) = K::Blocks::tile_atom_to_shape_SFA(shape);                 \
    *static_cast<K::ScaleB*>(b) = K::Blocks::tile_atom_to_shape_SFB(shape);                 \
    return sizeof(K::ScaleA);                                                               \
  }                                                                                         \
  extern "C" int64_t NAME##_a_scale_offset(int m, int n, int k, int row, int column) {      \
    using K = __VA_ARGS__;                                                                  \
    return K::Blocks::tile_atom_to_shape_SFA(cute::make_shape(m, n, k, 1))(row, column, 0); \
  }                                                                                         \
  extern "C" int64_t NAME##_b_scale_offset(int m, int n, int k, int row, int column) {      \
    using K = __VA_ARGS__;                                                                  \
    return K::Blocks::tile_atom_to_shape_SFB(cute::make_shape(m, n, k, 1))(row, column, 0); \
  }
