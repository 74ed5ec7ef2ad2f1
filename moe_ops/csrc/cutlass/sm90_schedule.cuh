// Tiles of grouped products on SM90, and who does which: sm90_products.cuh, sm90_blocks.cuh.
#pragma once

#include <cuda_bf16.h>

#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "grouped.h"

namespace moe_ops::cutlass_products {

// GATED is x w^T and the activation behind it: half of its columns are of the gate. BLOCKS and
// GATED_BLOCKS are the same of e4m3 with scales of blocks, the others of bf16.
enum Kind { X_WT, X_W, OUTER, GATED, BLOCKS, GATED_BLOCKS };
template <Kind KIND>
constexpr bool IS_GATED = KIND == GATED || KIND == GATED_BLOCKS;
template <Kind KIND>
constexpr bool OF_BLOCKS = KIND == BLOCKS || KIND == GATED_BLOCKS;

constexpr int TILE_M = 128, TILE_N = 192, TILE_K = 64;  // of bf16
constexpr int BLOCK = 128;          // columns of e4m3 that share a scale, and two of them a tile
constexpr int PART = 64;            // rows or columns of a part of a tile: 128 bytes of the other
constexpr int PAIRS = 8;            // pairs of tiles of rows that are done for the same columns
constexpr int PLACES = 5;           // that a cluster moves on by in each round
constexpr int PART_BYTES = PART * 128;
constexpr int STORED_ROWS = 16;     // what a warp stores at a time
template <Kind KIND>
constexpr bool ADDS_LOW_RANK = KIND != OUTER && !OF_BLOCKS<KIND>;
template <Kind KIND>
constexpr int COLUMNS_OF_TILE = OF_BLOCKS<KIND> ? 2 * BLOCK : TILE_N;
template <Kind KIND>
constexpr int COLUMNS_OF_D = COLUMNS_OF_TILE<KIND> / (IS_GATED<KIND> ? 2 : 1);
// Columns of narrow tiles of bf16, gate and up ones together. D's last ones are narrow where its
// columns fill no whole number of wide tiles: one or two of them, and one of a gated kind. They load
// as much as wide ones. A cluster with a narrow tile runs ahead of the others by a third of a tile,
// or a half, and what they all read has to stay in L2 so long: sums of few steps have them alone.
template <Kind KIND>
constexpr int NARROW = IS_GATED<KIND> ? TILE_N / 2 : TILE_N - 64;
constexpr int MOST_STEPS = 48;
template <Kind KIND>
constexpr int STEP = OF_BLOCKS<KIND> ? BLOCK : TILE_K;  // along the sum: 128 bytes
// Outer products store as much as they multiply where experts have few rows: they have one stage less, and wider
// buffers of what is stored.
template <Kind KIND>
constexpr int STAGES = KIND == OUTER || OF_BLOCKS<KIND> ? 4 : 5;
template <Kind KIND>
constexpr int STORED_BYTES = KIND == OUTER || OF_BLOCKS<KIND> ? 128 : 64;  // of a row, at a time

using Barrier = cutlass::arch::ClusterTransactionBarrier;

template <Kind KIND>
struct Stage {  // rows of 128 bytes, swizzled
  uint8_t a[TILE_M / PART][PART_BYTES];
  uint8_t b[COLUMNS_OF_TILE<KIND> / PART][PART_BYTES];
};

template <Kind KIND>
struct alignas(1024) Shared {
  Stage<KIND> stages[STAGES<KIND>];
  uint8_t out[8][2][STORED_ROWS * STORED_BYTES<KIND>];  // of each warp, two buffers
  float bias[2][IS_GATED<KIND> ? COLUMNS_OF_TILE<KIND> : 2];  // of each warpgroup's tile
  Barrier full[STAGES<KIND>], empty[STAGES<KIND>];
  static_assert(sizeof(stages) + sizeof(out) + sizeof(bias) <= 226 * 1024);
};

constexpr float NO_LIMIT = 3.0e38f;  // moe_ops/activations.py

struct Gated {  // of gated kinds alone
  void const* bias;        // (groups, 2 n), or null
  bool bias_is_float;      // else bf16
  __nv_bfloat16* gate_up;  // (rows, 2 n), written: the product, or null
  bool interleaved;        // gate and up rows of weights take turns; bias is as they are
  int activation;  // sm90_tiles.cuh
  float alpha, beta, limit;  // NO_LIMIT where there is none

  __device__ float bias_at(int64_t i) const {
    return bias_is_float ? static_cast<float const*>(bias)[i]
                         : __bfloat162float(static_cast<__nv_bfloat16 const*>(bias)[i]);
  }
};

struct Scales {  // of kinds of blocks alone, fp32
  float const* a;  // (k / 128, rows), with both rounded up
  float const* b;  // (groups, rows of b / 128, k / 128), with both rounded up
  float* d;        // (n / 128, rows), written with d of e4m3
  bool powers;     // whether those of d are powers of two
};

struct Sizes {
  const int* ends;
  void* d;
  int groups, rows, m, n, k, rank;
  Gated gated;
  Scales scales;
};

// What a cluster does next.
struct Work {
  int expert, start, rows;  // the expert, its first row and their number
  int m, n;                 // this block's tile
  int x;                    // its first column of D
  bool pair;                // the blocks share columns; else they share rows
  bool half;                // of at most 64 rows
  bool narrow;              // of fewer columns
  int steps;                // along the sum
};

// Finds the work of a cluster in that of all experts. A warp does it together: each lane knows one
// of 32 experts.
template <Kind KIND>
struct Schedule {
  Sizes const& p;
  int lane, block, round = 0;
  int first = 0;               // experts first to first + 31
  int start, end, last;        // rows of this lane's expert; work of all experts up to it

  __device__ explicit Schedule(Sizes const& p)
      : p(p), lane(threadIdx.x % 32), block(cute::block_rank_in_cluster()) {
    read(0);
  }

  __device__ static int divided(int a, int b) { return (a + b - 1) / b; }

  // Work of an expert whose D has so many rows.
  __device__ int work(int rows) const {
    int tiles_m = divided(rows, TILE_M), tiles_n = divided(p.n, COLUMNS_OF_D<KIND>);
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

  // The next work of this cluster, if there is any. Clusters take work in rounds, in each of them at
  // another place: tiles that take less time come at regular places, and a cluster that got most of
  // them would run ahead and read for itself what the others read together.
  __device__ bool next(Work& w) {
    int clusters = gridDim.x / 2, at = (blockIdx.x / 2 + round * PLACES) % clusters;
    return find(round++ * clusters + at, w);
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
    int rows = rows_of_d(w.rows), pairs = divided(rows, TILE_M) / 2;
    int tiles_n = divided(p.n, COLUMNS_OF_D<KIND>);
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
    w.steps = divided(KIND == OUTER ? w.rows : p.k, STEP<KIND>);
    if constexpr (ADDS_LOW_RANK<KIND>) w.steps += divided(p.rank, STEP<KIND>);
    w.x = w.n * COLUMNS_OF_D<KIND>;
    w.narrow = false;
    if constexpr (!OF_BLOCKS<KIND>) {
      constexpr int LESS = (TILE_N - NARROW<KIND>) / (IS_GATED<KIND> ? 2 : 1);
      int narrow = min((tiles_n * COLUMNS_OF_D<KIND> - p.n) / LESS, tiles_n);
      int before = w.n - (tiles_n - narrow);  // of them
      if (w.steps <= MOST_STEPS && before >= 0) {
        w.narrow = true;
        w.x -= before * LESS;
      }
    }
    return true;
  }
};

template <Kind KIND>
struct Ring {
  int at = 0;
  uint32_t phase = 0;

  __device__ void next() {
    if (++at == STAGES<KIND>) {
      at = 0;
      phase ^= 1;
    }
  }
  __device__ void skip(int steps) {
    phase ^= (at + steps) / STAGES<KIND> % 2;
    at = (at + steps) % STAGES<KIND>;
  }
};

}  // namespace moe_ops::cutlass_products
