// SM90: grouped products of bf16 rows sorted by expert, sums in fp32: x w^T, x w, and a^T b for the
// rows of each expert. For training, where weights are read both ways and experts have some hundred
// rows.
//
// One descriptor of the tensor memory accelerator (TMA) for each operand: the rows of all experts
// are one matrix, weights one array of matrices. CUTLASS's pointer arrays rewrite descriptors at
// each change of expert. A tile reads rows of the next expert, too: they make rows of D that are
// not stored, and in a^T b, which sums over rows, they are overwritten by zeros in shared memory.
//
// Clusters of two blocks, with tiles of 128 x 256 each, share what is the same for both: two tiles
// of rows share columns, and the last of an odd number of tiles of rows is done for two tiles of
// columns, which share rows. So an expert's rows are rounded up to 128, not 256. If the last of an
// odd number has at most 64 rows, both warpgroups take all, and half of the columns each.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <utility>

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "grouped.h"

namespace moe_ops::cutlass_products {

enum Kind { X_WT, X_W, OUTER };

constexpr int TILE_M = 128, TILE_N = 256, TILE_K = 64, STAGES = 4;
constexpr int PART = 64;            // rows or columns of a part of a tile: 128 bytes of the other
constexpr int PAIRS = 8;            // pairs of tiles of rows that are done for the same columns
constexpr int STORED_ROWS = 16, STORED_COLUMNS = 64;  // what a warp stores at a time
constexpr int THREADS = 384;        // a warp that loads, three idle ones, eight that multiply
constexpr int PART_BYTES = PART * TILE_K * 2;

using Barrier = cutlass::arch::ClusterTransactionBarrier;

struct alignas(1024) Shared {  // rows of 128 bytes, swizzled
  struct Stage {
    uint8_t a[TILE_M / PART][PART_BYTES];
    uint8_t b[TILE_N / PART][PART_BYTES];
  } stages[STAGES];
  uint8_t out[8][2][STORED_ROWS * STORED_COLUMNS * 2];  // of each warp, two buffers
  Barrier full[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= 227 * 1024);

struct Sizes {
  const int* ends;
  __nv_bfloat16* d;
  int groups, m, n, k;
};

// What a cluster does next.
struct Work {
  int expert, start, rows;  // the expert, its first row and their number
  int m, n;                 // this block's tile
  bool pair;                // the blocks share columns; else they share rows
  bool half;                // of at most 64 rows
};

// Finds the work of a cluster in that of all experts. A warp does it together: each lane knows one
// of 32 experts.
template <Kind KIND>
struct Schedule {
  Sizes const& p;
  int lane, block, first = 0;  // experts first to first + 31
  int start, end, last;        // rows of this lane's expert; work of all experts up to it

  __device__ explicit Schedule(Sizes const& p)
      : p(p), lane(threadIdx.x % 32), block(cute::block_rank_in_cluster()) {
    read(0);
  }

  __device__ static int divided(int a, int b) { return (a + b - 1) / b; }

  // Work of an expert whose D has so many rows.
  __device__ int work(int rows) const {
    int tiles_m = divided(rows, TILE_M), tiles_n = divided(p.n, TILE_N);
    return tiles_m / 2 * tiles_n + tiles_m % 2 * divided(tiles_n, 2);
  }
  __device__ int rows_of_d(int rows) const { return KIND == OUTER ? p.m : rows; }

  __device__ void read(int before) {
    int e = first + lane;
    end = e < p.groups ? p.ends[e] : 0;
    start = 0 < e && e < p.groups ? p.ends[e - 1] : 0;
    last = e < p.groups ? work(rows_of_d(end - start)) : 0;
    for (int i = 1; i < 32; i *= 2) {
      int left = __shfl_up_sync(~0u, last, i);
      last += lane >= i ? left : 0;
    }
    last += before;
  }

  __device__ bool find(int index, Work& w) {
    for (int all; index >= (all = __shfl_sync(~0u, last, 31)); read(all)) {
      first += 32;
      if (first >= p.groups) return false;
    }
    int at = __ffs(__ballot_sync(~0u, last > index)) - 1;
    w.expert = first + at;
    w.start = __shfl_sync(~0u, start, at);
    w.rows = __shfl_sync(~0u, end, at) - w.start;
    int rows = rows_of_d(w.rows), tiles_n = divided(p.n, TILE_N), pairs = divided(rows, TILE_M) / 2;
    index -= __shfl_sync(~0u, last, at) - work(rows);
    w.pair = index < pairs * tiles_n;
    if (w.pair) {
      int from = index / (PAIRS * tiles_n) * PAIRS, several = min(PAIRS, pairs - from);
      index -= from * tiles_n;
      w.m = 2 * (from + index % several) + block;
      w.n = index / several;
    } else {
      w.m = 2 * pairs;
      w.n = 2 * (index - pairs * tiles_n) + block;
    }
    w.half = !w.pair && rows - w.m * TILE_M <= PART;
    return true;
  }
};

struct Ring {
  int at = 0;
  uint32_t phase = 0;

  __device__ void next() {
    if (++at == STAGES) {
      at = 0;
      phase ^= 1;
    }
  }
};

// The warp that loads. Both blocks of a cluster load the same numbers of bytes at each step.
template <Kind KIND>
__device__ void load(Shared& shared, CUtensorMap const& a, CUtensorMap const& b, Sizes const& p) {
  constexpr uint64_t HINT = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr int B_BOX = KIND == X_WT ? 2 : 1;  // parts that one instruction loads
  int block = cute::block_rank_in_cluster();
  Schedule<KIND> schedule(p);
  Ring ring;
  Work w;
  for (int i = blockIdx.x / 2; schedule.find(i, w); i += gridDim.x / 2) {
    int length = KIND == OUTER ? w.rows : p.k, m = w.m * TILE_M, n = w.n * TILE_N;
    for (int k = 0; k < length && threadIdx.x == 0; k += TILE_K, ring.next()) {
      Shared::Stage& stage = shared.stages[ring.at];
      auto* full = reinterpret_cast<uint64_t*>(&shared.full[ring.at]);
      auto box = [&](CUtensorMap const& map, void* to, int x, int y, int z, bool both) {
        if (both) {
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, full, uint16_t(3), HINT, to, x, y, z);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&map, full, HINT, to, x, y, z);
        }
      };
      auto rows = [&](int part, bool both) {
        int at = m + part * PART;
        int x = KIND == OUTER ? at : k, y = w.start + (KIND == OUTER ? k : at);
        box(a, stage.a[part], x, y, 0, both);
      };
      auto columns = [&](int half, bool both) {
        for (int part = 2 * half; part < 2 * half + 2; part += B_BOX) {
          int at = n + part * PART, along = KIND == OUTER ? w.start + k : k;
          int x = KIND == X_WT ? along : at, y = KIND == X_WT ? at : along;
          box(b, stage.b[part], x, y, KIND == OUTER ? 0 : w.expert, both);
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

template <Kind KIND, int COLUMNS>
struct Instruction {
  static constexpr auto K = cute::SM90::GMMA::Major::K, MN = cute::SM90::GMMA::Major::MN;
  static constexpr auto A = KIND == OUTER ? MN : K, B = KIND == X_WT ? K : MN;
  using Wide = cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<A, B>;
  using Narrow = cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<A, B>;
  using Type = cute::conditional_t<COLUMNS == 256, Wide, Narrow>;

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
  __device__ static void add(uint64_t a, uint64_t b, float (&d)[COLUMNS / 2],
                             std::index_sequence<I...>) {
    Type::fma(a, b, d[I]..., cute::SM90::GMMA::ScaleOut::One);
  }
  __device__ static void add(uint64_t a, uint64_t b, int j, float (&d)[COLUMNS / 2]) {
    add(a + j * step(A), b + j * step(B), d, std::make_index_sequence<COLUMNS / 2>{});
  }
};

template <int LENGTH>
__device__ void fence(float (&d)[LENGTH]) {
#pragma unroll
  for (int i = 0; i < LENGTH; ++i) cute::warpgroup_fence_operand(d[i]);
}

// A stage is free when all warps of both blocks have read it.
__device__ inline void release(Shared& shared, int stage) {
  int lane = threadIdx.x % 32;
  shared.empty[stage].arrive(lane, lane < 2);
}

// Rows `from` to `to` of parts of a stage, which are another expert's. Both warpgroups do it: the
// one that is ahead multiplies what it wrote itself.
__device__ inline void erase(uint8_t (*parts)[PART_BYTES], int count, int from, int to) {
  int chunks = (to - from) * 8;  // of 16 bytes
  for (int i = threadIdx.x % 128; i < chunks * count; i += 128) {
    *reinterpret_cast<uint4*>(parts[i / chunks] + from * 128 + i % chunks * 16) = {};
  }
}

// A warpgroup's sums: of part `a_part` of A with COLUMNS columns from part `b_part` of B on.
template <Kind KIND, int COLUMNS>
__device__ void multiply(float (&d)[COLUMNS / 2], Shared& shared, Ring& ring, int a_part,
                         int b_part, int length, int group) {
  using I = Instruction<KIND, COLUMNS>;
  int whole = KIND == OUTER ? length / TILE_K : (length + TILE_K - 1) / TILE_K;
  int rest = KIND == OUTER ? length % TILE_K : 0, previous = 0;
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; ++i) d[i] = 0;
  for (int k = 0; k < whole; ++k) {
    Shared::Stage& stage = shared.stages[ring.at];
    uint64_t a = I::matrix(stage.a[a_part], I::A), b = I::matrix(stage.b[b_part], I::B);
    shared.full[ring.at].wait(ring.phase);
    fence(d);
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < TILE_K / 16; ++j) I::add(a, b, j, d);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    if (k > 0) release(shared, previous);
    previous = ring.at;
    ring.next();
  }
  cute::warpgroup_wait<0>();
  fence(d);
  if (whole > 0) release(shared, previous);
  if (rest > 0) {
    Shared::Stage& stage = shared.stages[ring.at];
    uint64_t a = I::matrix(stage.a[a_part], I::A), b = I::matrix(stage.b[b_part], I::B);
    int steps = (rest + 15) / 16;
    shared.full[ring.at].wait(ring.phase);
    erase(stage.a + a_part, 1, rest, 16 * steps);
    erase(stage.b + b_part, COLUMNS / PART, rest, 16 * steps);
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(128, group);
#pragma unroll 1
    for (int j = 0; j < steps; ++j) {
      fence(d);
      cute::warpgroup_arrive();
      I::add(a, b, j, d);
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

// A warp's 16 rows, 64 columns at a time: the copy of one buffer goes on while the other one is
// written. Rows of another expert are not stored: TMA stores 16 rows or none.
template <int COLUMNS>
__device__ void store(float (&d)[COLUMNS / 2], uint8_t (*buffers)[STORED_ROWS * STORED_COLUMNS * 2],
                      CUtensorMap const& map, Sizes const& p, int x, int y, int z, int rows) {
  int lane = threadIdx.x % 32;
  int row = lane % 16, right = lane / 16;  // of what a lane addresses: two 8 x 8 matrices, twice
#pragma unroll
  for (int part = 0; part < COLUMNS / STORED_COLUMNS; ++part, x += STORED_COLUMNS) {
    uint8_t* out = buffers[part % 2];
    auto at = [&](int row, int chunk) {
      return reinterpret_cast<cute::uint128_t*>(out + row * 128 + (chunk ^ row % 8) * 16);
    };
    cute::tma_store_wait<1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      float* s = d + part * 32 + 4 * j;
      cute::SM90_U32x4_STSM_N::copy(rounded(s[0], s[1]), rounded(s[2], s[3]), rounded(s[4], s[5]),
                                    rounded(s[6], s[7]), *at(row, j + right));
    }
    cute::tma_store_fence();
    __syncwarp();
    if (rows >= STORED_ROWS) {
      if (lane == 0) cute::SM90_TMA_STORE_3D::copy(&map, out, x, y, z);
    } else {
      int chunk = lane % 8, column = x + 8 * chunk;
#pragma unroll
      for (int r = lane / 8; r < STORED_ROWS; r += 4) {
        if (r < rows && column < p.n) {
          *reinterpret_cast<cute::uint128_t*>(p.d + int64_t(y + r) * p.n + column) = *at(r, chunk);
        }
      }
    }
    cute::tma_store_arrive();
  }
}

// A warp that multiplies.
template <Kind KIND>
__device__ void compute(Shared& shared, CUtensorMap const& map, Sizes const& p, int warp) {
  int group = warp / 4;
  auto* buffers = shared.out[warp];
  Schedule<KIND> schedule(p);
  Ring ring;
  Work w;
  for (int i = blockIdx.x / 2; schedule.find(i, w); i += gridDim.x / 2) {
    int length = KIND == OUTER ? w.rows : p.k;
    int m = w.m * TILE_M + (w.half ? 0 : group * PART) + warp % 4 * STORED_ROWS;
    int n = w.n * TILE_N + (w.half ? group * 2 * PART : 0);
    // what is behind an outer product's rows its own map leaves out
    int rows = KIND == OUTER ? STORED_ROWS : w.rows - m;
    int y = m + (KIND == OUTER ? 0 : w.start), z = KIND == OUTER ? w.expert : 0;
    if (w.half) {
      float d[64];
      multiply<KIND, 128>(d, shared, ring, 0, 2 * group, length, group);
      store<128>(d, buffers, map, p, n, y, z, rows);
    } else {
      float d[128];
      multiply<KIND, 256>(d, shared, ring, group, 0, length, group);
      store<256>(d, buffers, map, p, n, y, z, rows);
    }
  }
  cute::tma_store_wait<0>();
}

template <Kind KIND>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    product(__grid_constant__ CUtensorMap const a, __grid_constant__ CUtensorMap const b,
            __grid_constant__ CUtensorMap const d, __grid_constant__ Sizes const p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);  // the same number for the whole warp
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(2 * 8);  // warps of both blocks
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_sync();
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0) load<KIND>(shared, a, b, p);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    compute<KIND>(shared, d, p, warp - 4);
  }
  __syncwarp();
  cute::cluster_sync();  // the other block may still write here
#endif
}

// A map of (z, y, x) bf16 with boxes of `rows` x 64, 128-byte swizzled.
inline bool encode(CUtensorMap& map, const void* at, uint64_t x, uint64_t y, uint64_t z,
                   uint32_t rows) {
  cuuint64_t sizes[] = {x, y, z}, strides[] = {2 * x, 2 * x * y};
  cuuint32_t box[] = {64, rows, 1}, steps[] = {1, 1, 1};
  return CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
             &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(at), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Returns what `launch` of common.cuh returns.
template <Kind KIND>
int launch(GroupedProduct const& g) {
  CUtensorMap a, b, d;
  bool ok = true;
  if constexpr (KIND == OUTER) {
    ok &= encode(a, g.a, g.m, g.rows, 1, TILE_K) && encode(b, g.b, g.n, g.rows, 1, TILE_K);
    ok &= encode(d, g.d, g.n, g.m, g.groups, STORED_ROWS);
  } else {
    ok &= encode(a, g.a, g.k, g.rows, 1, PART) && encode(d, g.d, g.n, g.rows, 1, STORED_ROWS);
    ok &= KIND == X_WT ? encode(b, g.b, g.k, g.n, g.groups, 2 * PART)
                       : encode(b, g.b, g.n, g.k, g.groups, TILE_K);
  }
  if (!ok) return 100;
  constexpr auto SHARED = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t e = cudaFuncSetAttribute(product<KIND>, SHARED, sizeof(Shared));
  if (e != cudaSuccess) return 300;
  auto* ends = static_cast<const int*>(g.ends);
  Sizes sizes{ends, static_cast<__nv_bfloat16*>(g.d), g.groups, g.m, g.n, g.k};
  product<KIND><<<g.sm_count / 2 * 2, THREADS, sizeof(Shared), g.stream>>>(a, b, d, sizes);
  return cudaGetLastError() == cudaSuccess ? 0 : 400;
}

}  // namespace moe_ops::cutlass_products
