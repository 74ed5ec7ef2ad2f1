// What all grouped GEMMs over CUTLASS 3.x collectives share.
#pragma once

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "grouped.h"

namespace moe_ops {

using cute::_0;
using cute::_1;
using cute::_128;
using cute::Int;
using cute::Shape;
using cute::Stride;

using ProblemShape = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;

// Sizes are on the device alone: without those of the host CUTLASS checks none of them, and
// launches one block for each multiprocessor.
inline ProblemShape problem_shape(GroupedGemm const& g) {
  using Sizes = Shape<int, int, int>;
  return {g.groups, static_cast<Sizes*>(const_cast<void*>(g.problem_sizes)), nullptr};
}

inline cutlass::KernelHardwareInfo hardware(GroupedGemm const& g) {
  cutlass::KernelHardwareInfo info;
  info.device_id = 0;  // used to ask for sm_count alone, which is given
  info.sm_count = g.sm_count;
  return info;
}

// An array over groups, as CUTLASS types it.
template <class T>
T* array(const void* address) {
  return static_cast<T*>(const_cast<void*>(address));
}

// What NAME_run returns: 100 + cutlass::Status if the arguments are wrong, 200 if the workspace is
// too small, 300 + status if the kernel cannot be set up, 400 + status if it cannot be launched.
template <class Gemm>
int launch(typename Gemm::Arguments const& arguments, GroupedGemm const& g) {
  using cutlass::Status;
  if (Status s = Gemm::can_implement(arguments); s != Status::kSuccess) return 100 + int(s);
  if (Gemm::get_workspace_size(arguments) > g.workspace_bytes) return 200;
  Gemm gemm;
  if (Status s = gemm.initialize(arguments, g.workspace, g.stream); s != Status::kSuccess) {
    return 300 + int(s);
  }
  Status s = gemm.run(g.stream, nullptr, g.pdl != 0);
  return s == Status::kSuccess ? 0 : 400 + int(s);
}

// D = row_scale * (column_scale * accumulator), in fp32 and rounded once. A flag at run time says
// whether scales are vectors or one number for the group.
template <class ElementD, class Tile>
struct ScaledEpilogue {
  using Row = cutlass::epilogue::fusion::Sm90ColBroadcast<0, Tile, float*, float,
                                                          Stride<bool, _0, _0>>;
  using Column = cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float*, float,
                                                             Stride<_0, bool, _0>>;
  template <class Out>
  using Multiply = cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, Out, float,
                                                          cutlass::FloatRoundStyle::round_to_nearest>;
  using Inner = cutlass::epilogue::fusion::Sm90EVT<Multiply<float>, Column,
                                                   cutlass::epilogue::fusion::Sm90AccFetch>;
  using Tree = cutlass::epilogue::fusion::Sm90EVT<Multiply<ElementD>, Row, Inner>;

  static typename Tree::Arguments arguments(GroupedGemm const& g) {
    using Scales = float const* const;
    typename Row::Arguments row{array<Scales>(g.row_scale), 0.f,
                                {g.row_scale_is_vector != 0, {}, {}}};
    typename Column::Arguments column{array<Scales>(g.column_scale), 0.f,
                                      {{}, g.column_scale_is_vector != 0, {}}};
    return {row, {column, {}, {}}, {}};
  }
};

}  // namespace moe_ops

// The functions of kernel NAME, which a struct with `Kernel`, `Gemm` and `arguments` describes.
#define MOE_OPS_KERNEL(NAME, ...)                                                  \
  extern "C" int NAME##_run(GroupedGemm const* g) {                                \
    using K = __VA_ARGS__;                                                         \
    return moe_ops::launch<K::Gemm>(K::arguments(*g), *g);                         \
  }                                                                                \
  extern "C" size_t NAME##_workspace(GroupedGemm const* g) {                       \
    using K = __VA_ARGS__;                                                         \
    return K::Gemm::get_workspace_size(K::arguments(*g));                          \
  }                                                                                \
  extern "C" int NAME##_shared_memory() {                                          \
    using K = __VA_ARGS__;                                                         \
    return K::Kernel::SharedStorageSize;                                           \
  }
