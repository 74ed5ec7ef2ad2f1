// SM90: e4m3 x e4m3 with fp32 scales in the epilogue. A are rows of activations, B weights (N, K).
//
// Sums are those of the tensor cores (FastAccum): at K = 7168 their error is 1.9e-3 of the result,
// rounding it to bf16 1.7e-3; promotion to fp32 registers each 128 columns would take
// a multiple of the time (docs/kernels/cutlass.md).
#pragma once

#include "common.cuh"

namespace moe_ops {

template <class Out, int TILE_M, int TILE_N>
struct Sm90Fp8 {
  using E4m3 = cutlass::float_e4m3_t;
  using Tile = Shape<Int<TILE_M>, Int<TILE_N>, Int<128>>;
  using Cluster = Shape<_1, _1, _1>;
  using RowMajor = cutlass::layout::RowMajor*;
  using ColumnMajor = cutlass::layout::ColumnMajor*;
  using MainSchedule = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8FastAccum;
  using EpilogueSchedule = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
  using Scaled = ScaledEpilogue<Out, Tile>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, 8, Out, RowMajor,
      8, EpilogueSchedule, typename Scaled::Tree>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, E4m3, RowMajor, 16, E4m3, ColumnMajor, 16,
      float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      MainSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  static_assert(sizeof(StrideA) == 8 && sizeof(StrideB) == 8 && sizeof(StrideD) == 8,
                "the setup kernel writes one int64 for a stride");

  static typename Gemm::Arguments arguments(GroupedGemm const& g) {
    auto* d = array<Out*>(g.d);
    auto* stride_d = array<StrideD>(g.stride_d);
    return {cutlass::gemm::GemmUniversalMode::kGrouped, problem_shape(g),
            {array<E4m3 const*>(g.a), array<StrideA>(g.stride_a), array<E4m3 const*>(g.b),
             array<StrideB>(g.stride_b)},
            {Scaled::arguments(g), nullptr, stride_d, d, stride_d}, hardware(g)};
  }
};

}  // namespace moe_ops
