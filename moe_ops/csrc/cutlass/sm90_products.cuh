// SM90: grouped products of bf16 rows sorted by expert, sums in fp32: x w^T, x w, a^T b for the rows
// of each expert, and the activation of x w^T. For training and prefill, where experts have some
// hundred rows and training reads weights both ways.
//
// One descriptor of the tensor memory accelerator (TMA) for each operand: the rows of all experts
// are one matrix, weights one array of matrices. CUTLASS's pointer arrays rewrite descriptors at
// each change of expert. A tile reads rows of the next expert, too: they make rows of D that are
// not stored, and in a^T b, which sums over rows, they are overwritten by zeros in shared memory.
//
// Two warpgroups multiply tiles of 128 x 192 in turns: while one rounds, activates and stores its
// sums, the other one has the tensor cores.
//
// Clusters of two blocks share what is the same for the tiles of both: two tiles of rows share
// columns, and the last of an odd number of tiles of rows is done for two tiles of columns, which
// share rows. So an expert's rows are rounded up to 128, not 256, and to 64 for the tensor cores.
#pragma once

#include <cuda.h>

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

// The warp that loads. Both blocks of a cluster load the same numbers of bytes at each step.
template <Kind KIND>
__device__ void load(Shared<KIND>& shared, CUtensorMap const& a, CUtensorMap const& b,
                     Sizes const& p) {
  constexpr uint64_t HINT = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  int block = cute::block_rank_in_cluster();
  Schedule<KIND> schedule(p);
  Ring<KIND> ring;
  Work w;
  for (int i = blockIdx.x / 2; schedule.find(i, w); i += gridDim.x / 2) {
    int m = w.m * TILE_M, n = w.n * COLUMNS_OF_D<KIND>;
    for (int k = 0; k < w.steps * TILE_K && threadIdx.x == 0; k += TILE_K, ring.next()) {
      Stage& stage = shared.stages[ring.at];
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
          box(b, to, both, k, n + half * TILE_N / 4, 0, w.expert);
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

template <Kind KIND>
struct Instruction {
  static constexpr auto K = cute::SM90::GMMA::Major::K, MN = cute::SM90::GMMA::Major::MN;
  static constexpr auto A = KIND == OUTER ? MN : K;
  static constexpr auto B = KIND == X_WT || KIND == GATED ? K : MN;
  using Type = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<A, B>;

  // parts as the instruction reads them, which may be one after the other
  __device__ static uint64_t matrix(void const* parts, cute::SM90::GMMA::Major major) {
    cute::GmmaDescriptor found;
    found.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(parts) >> 4;
    found.bitfield.leading_byte_offset_ = major == K ? 1 : PART_BYTES >> 4;
    found.bitfield.stride_byte_offset_ = 8 * 128 >> 4;
    found.bitfield.base_offset_ = 0;
    found.bitfield.layout_type_ = uint8_t(cute::SM90::GMMA::LayoutType::B128);
    return found;
  }
  // Between 16 numbers along the sum and the next, in 16 bytes.
  static constexpr uint64_t step(cute::SM90::GMMA::Major major) { return major == K ? 2 : 128; }

  template <size_t... I>
  __device__ static void add(uint64_t a, uint64_t b, float (&d)[TILE_N / 2],
                             std::index_sequence<I...>) {
    Type::fma(a, b, d[I]..., cute::SM90::GMMA::ScaleOut::One);
  }
  // All parts of A with 16 numbers along the sum.
  template <int PARTS>
  __device__ static void add(Stage& stage, int j, float (&d)[PARTS][TILE_N / 2]) {
    uint64_t b = matrix(stage.b, B) + j * step(B);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      uint64_t a = matrix(stage.a[part], A) + j * step(A);
      add(a, b, d[part], std::make_index_sequence<TILE_N / 2>{});
    }
  }
};

template <int PARTS>
__device__ void fence(float (&d)[PARTS][TILE_N / 2]) {
#pragma unroll
  for (int i = 0; i < PARTS * TILE_N / 2; ++i) cute::warpgroup_fence_operand(d[0][i]);
}

// A stage is free when the warps of both blocks that multiply it have read it.
template <Kind KIND>
__device__ void release(Shared<KIND>& shared, int stage) {
  int lane = threadIdx.x % 32;
  shared.empty[stage].arrive(lane, lane < 2);
}

// Rows `from` to `to` of parts of a stage, which are another expert's.
__device__ inline void erase(uint8_t (*parts)[PART_BYTES], int count, int from, int to) {
  int chunks = (to - from) * 8;  // of 16 bytes
  for (int i = threadIdx.x % 128; i < chunks * count; i += 128) {
    *reinterpret_cast<uint4*>(parts[i / chunks] + from * 128 + i % chunks * 16) = {};
  }
}

// The warpgroups' turns to wait for stages: one that waited for a stage's second next phase would
// take its last one for it.
struct Turns {
  int group;

  __device__ explicit Turns(int group) : group(group) {
    if (group == 1) done();
  }
  __device__ void wait() { cutlass::arch::NamedBarrier::sync(256, 2 + group); }
  __device__ void done() { cutlass::arch::NamedBarrier::arrive(256, 2 + (group ^ 1)); }
};

// A warpgroup's sums of a tile: of the first PARTS parts of A.
template <Kind KIND, int PARTS>
__device__ void multiply(float (&d)[PARTS][TILE_N / 2], Shared<KIND>& shared, Ring<KIND>& ring,
                         Work const& w, Turns& turns) {
  using I = Instruction<KIND>;
  int rest = KIND == OUTER ? w.rows % TILE_K : 0, whole = w.steps - (rest > 0), previous = 0;
#pragma unroll
  for (int i = 0; i < PARTS * TILE_N / 2; ++i) d[0][i] = 0;
  turns.wait();
  for (int k = 0; k < whole; ++k) {
    shared.full[ring.at].wait(ring.phase);
    fence(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < TILE_K / 16; ++j) I::add(shared.stages[ring.at], j, d);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (k > 0) release(shared, previous);
    previous = ring.at;
    ring.next();
  }
  if (rest > 0) shared.full[ring.at].wait(ring.phase);
  turns.done();
  cute::warpgroup_wait<0>();
  fence(d);
  if (whole > 0) release(shared, previous);
  if (rest > 0) {
    Stage& stage = shared.stages[ring.at];
    int steps = (rest + 15) / 16;
    erase(stage.a, PARTS, rest, 16 * steps);
    erase(stage.b, TILE_N / PART, rest, 16 * steps);
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(128, turns.group);
#pragma unroll 1
    for (int j = 0; j < steps; ++j) {
      fence(d);
      cute::warpgroup_arrive();
      I::add(stage, j, d);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence(d);
    }
    release(shared, ring.at);
    ring.next();
  }
}

__device__ inline uint32_t rounded(float a, float b) {
  __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<uint32_t&>(both);
}

// What a warp stores, 16 rows by 64 or 32 columns at a time: the copy of one buffer goes on while
// the other one is written. Rows of another expert are not stored: TMA stores 16 rows or none.
template <int COLUMNS>
struct Store {
  uint8_t (*buffers)[STORED_ROWS * COLUMNS * 2];
  int columns;  // of D
  int y, rows;  // the first row, and how many are the expert's
  int lane = threadIdx.x % 32, buffer = 0;

  // `values(j)` are the 8 numbers that a thread has of 16 columns: two neighbours of two rows, of
  // the first 8 columns and then of the others. `to` and `stride` are of row 0 in elements.
  template <class Values>
  __device__ void operator()(CUtensorMap const& map, __nv_bfloat16* to, int64_t stride, int x,
                             int z, Values values) {
    uint8_t* out = buffers[buffer ^= 1];
    auto at = [&](int row, int chunk) {
      int swizzled = COLUMNS == 64 ? chunk ^ row % 8 : chunk ^ row / 2 % 4;
      return reinterpret_cast<cute::uint128_t*>(out + row * COLUMNS * 2 + swizzled * 16);
    };
    cute::tma_store_wait<1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j) {
      float s[8];
      values(j, s);
      cute::SM90_U32x4_STSM_N::copy(rounded(s[0], s[1]), rounded(s[2], s[3]), rounded(s[4], s[5]),
                                    rounded(s[6], s[7]), *at(lane % 16, 2 * j + lane / 16));
    }
    cute::tma_store_fence();
    __syncwarp();
    if (rows >= STORED_ROWS) {
      if (lane == 0) cute::SM90_TMA_STORE_3D::copy(&map, out, x, y, z);
    } else {
      constexpr int CHUNKS = COLUMNS / 8;
      int chunk = lane % CHUNKS, column = x + 8 * chunk;
#pragma unroll
      for (int r = lane / CHUNKS; r < STORED_ROWS; r += 32 / CHUNKS) {
        if (r < rows && column < columns) {
          *reinterpret_cast<cute::uint128_t*>(to + (y + r) * stride + column) = *at(r, chunk);
        }
      }
    }
    cute::tma_store_arrive();
  }
};

// Formulas: moe_ops/activations.py.
__device__ inline float above(float x, float limit) { return x > limit ? limit : x; }
__device__ inline float clamped(float x, float limit) { return x < -limit ? -limit : above(x, limit); }
__device__ inline float silu(float x, float alpha = 1) {
  return __fdividef(x, 1 + __expf(-alpha * x));
}

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
    return __fdividef(g, 1 + __expf(-1.5957691216057308f * (g + 0.044715f * g * g * g))) * u;
  }
}

// Of a part's sums, which are gate and up columns in quarters of a tile.
template <int ACTIVATION, int COLUMNS>
__device__ void store_activated(float (&d)[TILE_N / 2], Store<COLUMNS>& store, CUtensorMap const& map,
                                CUtensorMap const& gate_up, Sizes const& p, int x, int expert) {
  constexpr int QUARTER = TILE_N / 4;
  Gated const& of = p.gated;
  auto column = [&](int j, int i) { return x + 16 * j + i / 4 * 8 + store.lane % 4 * 2 + i % 2; };
#pragma unroll
  for (int first = 0; first < TILE_N / 2; first += COLUMNS, x += COLUMNS) {
    auto sums = [&](int j) {  // of a gate's 16 columns
      int at = first + 16 * j;
      return d + (at / QUARTER * 2 * QUARTER + at % QUARTER) / 2;
    };
    if (of.gate_up) {
#pragma unroll
      for (int up = 0; up < 2; ++up) {
        store(gate_up, of.gate_up + up * p.n, 2 * p.n, x, up, [&](int j, float (&s)[8]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) s[i] = sums(j)[up * QUARTER / 2 + i];
        });
      }
    }
    store(map, p.d, p.n, x, 0, [&](int j, float (&s)[8]) {
      float* g = sums(j);
      float* u = g + QUARTER / 2;
      float of_g[4] = {}, of_u[4] = {};
      if (of.bias) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int at = column(j, i / 2 * 4 + i % 2);
          if (at < p.n) {
            int64_t bias = int64_t(expert) * 2 * p.n;
            of_g[i] = of.bias_at(bias + (of.interleaved ? 2 * at : at));
            of_u[i] = of.bias_at(bias + (of.interleaved ? 2 * at + 1 : p.n + at));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int of_column = i / 4 * 2 + i % 2;
        s[i] = activated<ACTIVATION>(g[i] + of_g[of_column], u[i] + of_u[of_column], of);
      }
    });
  }
}

// A warpgroup's tile.
template <Kind KIND, int PARTS>
__device__ void tile(Shared<KIND>& shared, Ring<KIND>& ring, Store<STORED_COLUMNS<KIND>>& store,
                     CUtensorMap const& map, CUtensorMap const& gate_up, Sizes const& p,
                     Work const& w, Turns& turns) {
  float d[PARTS][TILE_N / 2];
  multiply<KIND>(d, shared, ring, w, turns);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    int m = w.m * TILE_M + part * PART + threadIdx.x % 128 / 32 * STORED_ROWS;
    int n = w.n * COLUMNS_OF_D<KIND>;
    store.y = m + (KIND == OUTER ? 0 : w.start);
    // what is behind an outer product's rows its own map leaves out
    store.rows = KIND == OUTER ? STORED_ROWS : w.rows - m;
    if constexpr (KIND == GATED) {
      auto stored = [&](auto activation) {
        store_activated<decltype(activation)::value>(d[part], store, map, gate_up, p, n, w.expert);
      };
      switch (p.gated.activation) {
        case SILU: stored(cute::Int<SILU>{}); break;
        case GELU: stored(cute::Int<GELU>{}); break;
        case GELU_TANH: stored(cute::Int<GELU_TANH>{}); break;
        case SWIGLUOAI: stored(cute::Int<SWIGLUOAI>{}); break;
        default: stored(cute::Int<SWIGLUSTEP>{});
      }
    } else {
#pragma unroll
      for (int at = 0; at < TILE_N; at += STORED_COLUMNS<KIND>) {
        store(map, p.d, p.n, n + at, KIND == OUTER ? w.expert : 0, [&](int j, float (&s)[8]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) s[i] = d[part][at / 2 + 8 * j + i];
        });
      }
    }
  }
}

// A warp that multiplies.
template <Kind KIND>
__device__ void compute(Shared<KIND>& shared, CUtensorMap const& map, CUtensorMap const& gate_up,
                        Sizes const& p, int warp) {
  Turns turns(warp / 4);
  Schedule<KIND> schedule(p);
  Store<STORED_COLUMNS<KIND>> store{shared.out[warp], p.n};
  Ring<KIND> ring;
  Work w;
  for (int i = blockIdx.x / 2, turn = 0; schedule.find(i, w); i += gridDim.x / 2, turn ^= 1) {
    if (turn != turns.group) {
      ring.skip(w.steps);
    } else if (w.half) {
      tile<KIND, 1>(shared, ring, store, map, gate_up, p, w, turns);
    } else {
      tile<KIND, 2>(shared, ring, store, map, gate_up, p, w, turns);
    }
  }
  cute::tma_store_wait<0>();
}

template <Kind KIND>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    product(__grid_constant__ CUtensorMap const a, __grid_constant__ CUtensorMap const b,
            __grid_constant__ CUtensorMap const d, __grid_constant__ CUtensorMap const gate_up,
            __grid_constant__ Sizes const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<KIND>*>(memory);
  int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);  // the same number for the whole warp
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES<KIND>; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(2 * 4);  // warps of both blocks
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_sync();
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0) load<KIND>(shared, a, b, p);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    compute<KIND>(shared, d, gate_up, p, warp - 4);
  }
  __syncwarp();
  cute::cluster_sync();  // the other block may still write here
#endif
}

// A map of a bf16 tensor, the innermost dimension first: sizes, strides of all but that one in
// elements, and boxes whose rows are swizzled.
template <size_t N>
bool encode(CUtensorMap& map, const void* at, cuuint64_t const (&sizes)[N],
            cuuint64_t const (&strides)[N - 1], cuuint32_t const (&box)[N]) {
  cuuint64_t bytes[N - 1];
  cuuint32_t steps[N];
  for (size_t i = 0; i < N - 1; ++i) bytes[i] = 2 * strides[i];
  for (size_t i = 0; i < N; ++i) steps[i] = 1;
  auto swizzle = box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
             &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, N, const_cast<void*>(at), sizes, bytes, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Returns what `launch` of common.cuh returns.
template <Kind KIND>
int launch(GroupedProduct const& g, Gated const& gated = {}) {
  CUtensorMap a{}, b{}, d{}, gate_up{};
  bool ok = true;
  uint64_t rows = g.rows, m = g.m, n = g.n, k = g.k, groups = g.groups;
  constexpr uint32_t STORED = STORED_COLUMNS<KIND>, HALF = TILE_N / 2;
  if constexpr (KIND == OUTER) {
    ok &= encode<3>(a, g.a, {m, rows, 1}, {m, m * rows}, {64, TILE_K, 1});
    ok &= encode<3>(b, g.b, {n, rows, 1}, {n, n * rows}, {64, TILE_K / 2, 1});
    ok &= encode<3>(d, g.d, {n, m, groups}, {n, n * m}, {STORED, STORED_ROWS, 1});
  } else {
    ok &= encode<3>(a, g.a, {k, rows, 1}, {k, k * rows}, {64, PART, 1});
    ok &= encode<3>(d, g.d, {n, rows, 1}, {n, n * rows}, {STORED, STORED_ROWS, 1});
  }
  if constexpr (KIND == X_WT) {
    ok &= encode<3>(b, g.b, {k, n, groups}, {k, k * n}, {64, HALF, 1});
  } else if constexpr (KIND == X_W) {
    ok &= encode<3>(b, g.b, {n, k, groups}, {n, n * k}, {64, TILE_K / 2, 1});
  } else if constexpr (KIND == GATED) {
    uint64_t of_row = gated.interleaved ? 2 * k : k, of_up = gated.interleaved ? k : n * k;
    ok &= encode<4>(b, g.b, {k, n, 2, groups}, {of_row, of_up, 2 * n * k}, {64, HALF / 2, 2, 1});
    if (gated.gate_up) {
      ok &= encode<3>(gate_up, gated.gate_up, {n, rows, 2}, {2 * n, n}, {STORED, STORED_ROWS, 1});
    }
  }
  if (!ok) return 100;
  constexpr auto SHARED = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t e = cudaFuncSetAttribute(product<KIND>, SHARED, sizeof(Shared<KIND>));
  if (e != cudaSuccess) return 300;
  auto* ends = static_cast<const int*>(g.ends);
  Sizes sizes{ends, static_cast<__nv_bfloat16*>(g.d), g.groups, g.m, g.n, g.k, gated};
  product<KIND><<<g.sm_count / 2 * 2, THREADS, sizeof(Shared<KIND>), g.stream>>>(a, b, d, gate_up,
                                                                                sizes);
  return cudaGetLastError() == cudaSuccess ? 0 : 400;
}

}  // namespace moe_ops::cutlass_products
