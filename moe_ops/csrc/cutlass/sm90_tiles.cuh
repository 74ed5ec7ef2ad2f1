// What the kernels of sm90_products.cuh and sm90_blocks.cuh share besides their schedule: how tiles
// are loaded and stored, and the kernel around both.
#pragma once

#include <cuda.h>

#include <type_traits>
#include <utility>

#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "sm90_schedule.cuh"

namespace moe_ops::cutlass_products {

constexpr int THREADS = 384;  // a warpgroup that loads, two that multiply

// A map of a tensor of bf16 or bytes, the innermost dimension first: sizes, strides of all but that
// one in elements, and boxes whose rows of 128 or 64 bytes are swizzled.
template <size_t N, class Element = __nv_bfloat16>
bool encode(CUtensorMap& map, const void* at, cuuint64_t const (&sizes)[N],
            cuuint64_t const (&strides)[N - 1], cuuint32_t const (&box)[N]) {
  cuuint64_t bytes[N - 1];
  cuuint32_t steps[N];
  for (size_t i = 0; i < N - 1; ++i) bytes[i] = sizeof(Element) * strides[i];
  for (size_t i = 0; i < N; ++i) steps[i] = 1;
  auto type = sizeof(Element) == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  auto swizzle = box[0] * sizeof(Element) == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
             &map, type, N, const_cast<void*>(at), sizes, bytes, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

struct Maps {
  CUtensorMap a, b, d;
  CUtensorMap low_a, low_b;  // what is added (ADDS_LOW_RANK), in steps behind those of a and b
  // of GATED alone: b and low_b are gate rows, and these the up rows
  CUtensorMap b_up, low_b_up;
  CUtensorMap gate_up;
};

// The warp that loads. Both blocks of a cluster load the same numbers of bytes at each step.
template <Kind KIND>
__device__ void load(Shared<KIND>& shared, Maps const& maps, Sizes const& p) {
  constexpr uint64_t HINT = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  int block = cute::block_rank_in_cluster();
  Schedule<KIND> schedule(p);
  Ring<KIND> ring;
  Work w;
  while (schedule.next(w)) {
    int m = w.m * TILE_M, n = w.x;
    int whole = Schedule<KIND>::divided(p.k, STEP<KIND>);  // steps of a and b
    for (int step = 0; step < w.steps && threadIdx.x == 0; ++step, ring.next()) {
      bool low = ADDS_LOW_RANK<KIND> && step >= whole;
      CUtensorMap const& a = low ? maps.low_a : maps.a;
      CUtensorMap const& b = low ? maps.low_b : maps.b;
      CUtensorMap const& b_up = low ? maps.low_b_up : maps.b_up;
      int k = (low ? step - whole : step) * STEP<KIND>;
      Stage<KIND>& stage = shared.stages[ring.at];
      auto* full = reinterpret_cast<uint64_t*>(&shared.full[ring.at]);
      auto box = [&](CUtensorMap const& map, void* to, bool both, auto... at) {
        if constexpr (sizeof...(at) == 4) {
          if (both) {
            cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, full, uint16_t(3), HINT, to, at...);
          } else {
            cute::SM90_TMA_LOAD_4D::copy(&map, full, HINT, to, at...);
          }
        } else if (both) {
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, full, uint16_t(3), HINT, to, at...);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&map, full, HINT, to, at...);
        }
      };
      auto rows = [&](int part, bool both) {
        int at = m + part * PART;
        int x = KIND == OUTER ? at : k, y = w.start + (KIND == OUTER ? k : at);
        box(a, stage.a[part], both, x, y, 0);
      };
      auto columns = [&](int half, bool both) {  // half of a tile's columns, or of a step
        uint8_t* to = stage.b[0] + half * sizeof(stage.b) / 2;
        if constexpr (KIND == X_WT) {
          box(b, to, both, k, n + half * TILE_N / 2, w.expert);
        } else if constexpr (KIND == GATED) {
          constexpr int QUARTER = TILE_N / 4;
          box(b, to, both, k, n + half * QUARTER, w.expert);
          box(b_up, to + QUARTER * 128, both, k, n + half * QUARTER, w.expert);
        } else if constexpr (OF_BLOCKS<KIND>) {
          int row = KIND == GATED_BLOCKS ? n : n + half * BLOCK;
          box(b, to, both, k, row, KIND == GATED_BLOCKS ? half : 0, w.expert);
        } else {
          int y = k + half * TILE_K / 2 + (KIND == OUTER ? w.start : 0);
          for (int part = 0; part < TILE_N / PART; ++part) {
            to = stage.b[part] + half * PART_BYTES / 2;
            box(b, to, both, n + part * PART, y, KIND == OUTER ? 0 : w.expert);
          }
        }
      };
      shared.empty[ring.at].wait(ring.phase ^ 1);
      shared.full[ring.at].arrive_and_expect_tx(sizeof(stage) - (w.half ? PART_BYTES : 0));
      if (w.pair) {
        rows(0, false);
        rows(1, false);
        columns(block, true);
      } else {
        rows(w.half ? 0 : block, !w.half);
        columns(0, false);
        columns(1, false);
      }
    }
    __syncwarp();
  }
}

// A matrix in parts as wgmma reads them, which may be one after the other: with 128 bytes along the
// sum, or (`across`) across it.
__device__ inline uint64_t matrix(void const* parts, bool across = false) {
  cute::GmmaDescriptor found;
  found.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(parts) >> 4;
  found.bitfield.leading_byte_offset_ = across ? PART_BYTES >> 4 : 1;
  found.bitfield.stride_byte_offset_ = 8 * 128 >> 4;
  found.bitfield.base_offset_ = 0;
  found.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::B128);
  return found;
}

// Turns of the two warpgroups that multiply.
struct Turns {
  int group;

  __device__ explicit Turns(int group) : group(group) {
    if (group == 1) done();
  }
  __device__ void wait() { cutlass::arch::NamedBarrier::sync(256, 2 + group); }
  __device__ void done() { cutlass::arch::NamedBarrier::arrive(256, 2 + (group ^ 1)); }
};

// A stage is free when the warps of both blocks that multiply it have read it.
template <Kind KIND>
__device__ void release(Shared<KIND>& shared, int stage) {
  int lane = threadIdx.x % 32;
  shared.empty[stage].arrive(lane, lane < 2);
}

__device__ inline uint32_t rounded(float a, float b) {
  __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<uint32_t&>(both);
}

// What a warp stores, 16 rows by 128 or 64 bytes at a time: the copy of one buffer goes on while
// the other one is written. Rows of another expert are not stored: TMA stores 16 rows or none.
template <class Element, int BYTES>
struct Store {
  uint8_t (*buffers)[STORED_ROWS * BYTES];
  int columns;  // of D
  int y, rows;  // the first row, and how many are the expert's
  int lane = threadIdx.x % 32, buffer = 0;

  __device__ uint8_t* at(int row, int chunk) const {  // of 16 bytes, swizzled
    int swizzled = BYTES == 128 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
    return buffers[buffer] + row * BYTES + swizzled * 16;
  }
  // The next buffer, once what was in it is stored.
  __device__ void begin() {
    buffer ^= 1;
    cute::tma_store_wait<1>();
    __syncwarp();
  }
  // The buffer to columns from x on. `to` and `stride` are of row 0 in elements.
  __device__ void send(CUtensorMap const& map, Element* to, int64_t stride, int x, int z) {
    cute::tma_store_fence();
    __syncwarp();
    if (rows >= STORED_ROWS) {
      if (lane == 0) cute::SM90_TMA_STORE_3D::copy(&map, buffers[buffer], x, y, z);
    } else {
      constexpr int CHUNKS = BYTES / 16;
      int chunk = lane % CHUNKS, column = x + 16 / int(sizeof(Element)) * chunk;
#pragma unroll
      for (int r = lane / CHUNKS; r < STORED_ROWS; r += 32 / CHUNKS) {
        if (r < rows && column < columns) {
          *reinterpret_cast<cute::uint128_t*>(to + (y + r) * stride + column) =
              *reinterpret_cast<cute::uint128_t*>(at(r, chunk));
        }
      }
    }
    cute::tma_store_arrive();
  }
  // bf16 of what `values(j)` gives, the 8 numbers that a thread has of 16 columns: two neighbours
  // of two rows, of the first 8 columns and then of the others.
  template <class Values>
  __device__ void operator()(CUtensorMap const& map, Element* to, int64_t stride, int x, int z,
                             Values values) {
    begin();
#pragma unroll
    for (int j = 0; j < BYTES / 32; ++j) {
      float s[8];
      values(j, s);
      auto* out = reinterpret_cast<cute::uint128_t*>(at(lane % 16, 2 * j + lane / 16));
      cute::SM90_U32x4_STSM_N::copy(rounded(s[0], s[1]), rounded(s[2], s[3]), rounded(s[4], s[5]),
                                    rounded(s[6], s[7]), *out);
    }
    send(map, to, stride, x, z);
  }
};

// The larger and the smaller one of two numbers; NaN if one of them is.
__device__ inline float larger(float a, float b) {
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
}
__device__ inline float smaller(float a, float b) {
  float found;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
}

// x / (1 + exp(-z)). What is below 2^-126 counts as zero on the way: without that __expf and
// __fdividef take 9 instructions more.
__device__ inline float times_sigmoid(float x, float z) {
  float e, found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * z));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(1 + e));
  return x * found;
}

// Formulas: moe_ops/activations.py.
__device__ inline float above(float x, float limit) { return smaller(x, limit); }
__device__ inline float clamped(float x, float limit) { return larger(above(x, limit), -limit); }
__device__ inline float silu(float x, float alpha = 1) { return times_sigmoid(x, alpha * x); }

enum Activation { SILU, GELU, GELU_TANH, SWIGLUOAI, SWIGLUSTEP };

template <int ACTIVATION>
__device__ float activated(float g, float u, Gated const& p) {
  if constexpr (ACTIVATION == SILU) {
    return silu(above(g, p.limit)) * clamped(u, p.limit);
  } else if constexpr (ACTIVATION == SWIGLUOAI) {
    return silu(above(g, p.limit), p.alpha) * (clamped(u, p.limit) + p.beta);
  } else if constexpr (ACTIVATION == SWIGLUSTEP) {
    return above(silu(g), p.limit) * clamped(u, p.limit);
  } else if constexpr (ACTIVATION == GELU) {
    return 0.5f * g * (1 + erff(g * 0.7071067811865476f)) * u;
  } else {  // (1 + tanh(z)) / 2 = sigmoid(2 z)
    static_assert(ACTIVATION == GELU_TANH);
    return times_sigmoid(g, 1.5957691216057308f * (g + 0.044715f * g * g * g)) * u;
  }
}

// `run` with an activation as a constant.
template <class Run>
__device__ __forceinline__ void with_activation(int activation, Run const& run) {
  switch (activation) {
    case SILU: run(cute::Int<SILU>{}); break;
    case GELU: run(cute::Int<GELU>{}); break;
    case GELU_TANH: run(cute::Int<GELU_TANH>{}); break;
    case SWIGLUOAI: run(cute::Int<SWIGLUOAI>{}); break;
    default: run(cute::Int<SWIGLUSTEP>{});
  }
}

// The biases of a tile's columns in shared memory: those of gate, then those of up; null without.
// All threads of a warpgroup ask for them.
template <Kind KIND>
__device__ float const* biases(Shared<KIND>& shared, Sizes const& p, Work const& w, int group) {
  constexpr int COLUMNS = COLUMNS_OF_D<KIND>;
  Gated const& of = p.gated;
  if (!of.bias) return nullptr;
  float* found = shared.bias[group];
  int64_t row = int64_t(w.expert) * 2 * p.n;
  for (int i = threadIdx.x % 128; i < 2 * COLUMNS; i += 128) {
    int up = i / COLUMNS, column = w.x + i % COLUMNS;
    int at = of.interleaved ? 2 * column + up : up * p.n + column;
    found[i] = column < p.n ? of.bias_at(row + at) : 0;
  }
  cutlass::arch::NamedBarrier::sync(128, group);
  return found;
}

// Two neighbours of them.
__device__ inline float2 two(float const* bias, int column) {
  return bias ? *reinterpret_cast<float2 const*>(bias + column) : float2{};
}

template <Kind KIND>
using Stored = Store<std::conditional_t<KIND == GATED_BLOCKS, uint8_t, __nv_bfloat16>, STORED_BYTES<KIND>>;
__device__ inline __nv_bfloat16* d_of(Sizes const& p) { return static_cast<__nv_bfloat16*>(p.d); }

// A warp that multiplies: sm90_products.cuh and sm90_blocks.cuh.
template <Kind KIND>
  requires(!OF_BLOCKS<KIND>)
__device__ void compute(Shared<KIND>& shared, Maps const& maps, Sizes const& p, int warp);
template <Kind KIND>
  requires(OF_BLOCKS<KIND>)
__device__ void compute(Shared<KIND>& shared, Maps const& maps, Sizes const& p, int warp);

template <Kind KIND>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    product(__grid_constant__ Maps const maps, __grid_constant__ Sizes const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<KIND>*>(memory);
  int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);  // the same number for the whole warp
  // A kernel that is launched to run beside this one starts when all of its blocks are here, and so
  // on multiprocessors that it leaves: GroupedProduct.sm_count.
  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES<KIND>; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(2 * (OF_BLOCKS<KIND> ? 8 : 4));  // warps of both blocks
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_sync();
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0) load<KIND>(shared, maps, p);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    compute<KIND>(shared, maps, p, warp - 4);
  }
  __syncwarp();
  cute::cluster_sync();  // the other block may still write here
#endif
}

inline Gated gated_of(GatedProduct const& g) {
  return {g.bias, g.bias_is_float != 0, static_cast<__nv_bfloat16*>(g.gate_up), g.interleaved != 0,
          g.activation, g.alpha, g.beta, g.limit};
}

// Returns what `launch` of common.cuh returns, of CUDA's errors 3000 and 4000 + cudaError.
template <Kind KIND>
int start(Maps const& maps, GroupedProduct const& g, Gated const& gated, Scales const& scales) {
  constexpr auto SHARED = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t e = cudaFuncSetAttribute(product<KIND>, SHARED, sizeof(Shared<KIND>));
  if (e != cudaSuccess) return 3000 + int(e);
  auto* ends = static_cast<const int*>(g.ends);
  Sizes sizes{ends, g.d, g.groups, g.rows, g.m, g.n, g.k, g.rank, gated, scales};
  int blocks = g.sm_count < 2 ? 2 : g.sm_count / 2 * 2;  // whole clusters
  product<KIND><<<blocks, THREADS, sizeof(Shared<KIND>), g.stream>>>(maps, sizes);
  e = cudaGetLastError();
  return e == cudaSuccess ? 0 : 4000 + int(e);
}

}  // namespace moe_ops::cutlass_products
