// SM90: grouped products x w^T of e4m3 rows sorted by expert, and the activation of one, quantized
// again: fp8_block. Rows have scales of 128 columns, weights of blocks of 128 x 128. For prefill.
//
// Tiles of 128 rows by two blocks of 128 columns: two blocks of D, or gate and up of one. Two
// warpgroups multiply 64 rows each. The tensor cores add up 128 products in fewer bits than fp32
// has; the sum is scaled and added to the total outside of them, while the other warpgroup
// multiplies.
#pragma once

#include <cuda_fp8.h>

#include "sm90_tiles.cuh"

namespace moe_ops::cutlass_products {

constexpr int SUMS = BLOCK / 2;  // of a thread, of 64 rows by a block

// A block's product of one step: 64 rows by 128 columns by 128 of the sum.
struct Product {
  using Type = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>;

  template <size_t... I>
  __device__ static void add(uint64_t a, uint64_t b, float (&d)[SUMS], bool first,
                             std::index_sequence<I...>) {
    using cute::SM90::GMMA::ScaleOut;
    Type::fma(a, b, d[I]..., first ? ScaleOut::Zero : ScaleOut::One);
  }
  // In turns: of the products of two warpgroups the tensor cores take an instruction at a time, and
  // both end at once, so that nothing is multiplied while both scale. The turn ends with the first
  // half, so that the other warpgroup's product follows the second one without a pause.
  __device__ static void find(uint8_t const* rows, uint8_t const* columns, float (&d)[SUMS],
                              Turns& turns) {
    uint64_t a = matrix(rows), b = matrix(columns);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) cute::warpgroup_fence_operand(d[i]);
    turns.wait();
    cute::warpgroup_arrive();
#pragma unroll
    for (int j = 0; j < BLOCK / 32; ++j) {  // 32 bytes on, in units of 16
      add(a + 2 * j, b + 2 * j, d, j == 0, std::make_index_sequence<SUMS>{});
      if (j == 1) cute::warpgroup_commit_batch();
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    turns.done();
    cute::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < SUMS; ++i) cute::warpgroup_fence_operand(d[i]);
  }
};

// The scales of a thread's two rows and of quarters, in one step after the other. Lanes read those
// of a warp's 16 rows and of the four quarters two steps ahead, for a step takes less time than a
// read of what is not in the L1 cache.
struct StepScales {
  float const* at;
  int64_t stride;
  int left;  // steps that were not read
  float read[2], a[2], b[4];

  // Rows of a quarter share a block of the weight: a half of gate and up rows may end inside one.
  __device__ StepScales(Sizes const& p, Work const& w, int first, int column, bool is_gated) {
    int lane = threadIdx.x % 32;
    if (lane < STORED_ROWS) {
      at = p.scales.a + min(w.start + w.m * TILE_M + first + lane, p.rows - 1);
      stride = p.rows;
    } else {
      int quarter = min(lane - STORED_ROWS, 3), block = quarter / 2, all = is_gated ? 2 * p.n : p.n;
      column += quarter % 2 * PART;
      int row = !is_gated             ? column + block * BLOCK
                : p.gated.interleaved ? 2 * column + block
                                      : column + block * p.n;
      int64_t blocks = (all + BLOCK - 1) / BLOCK;
      at = p.scales.b + (w.expert * blocks + min(row, all - 1) / BLOCK) * w.steps;
      stride = 1;
    }
    left = w.steps;
    fetch(0);
    fetch(1);
  }
  // Written as assembly so that compilers do not read it where it is used.
  __device__ void fetch(int parity) {
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(read[parity]) : "l"(at));
    at += --left > 0 ? stride : 0;
  }
  __device__ void step(int parity) {
    int row = threadIdx.x % 32 / 4;
    a[0] = __shfl_sync(~0u, read[parity], row);
    a[1] = __shfl_sync(~0u, read[parity], row + 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i] = __shfl_sync(~0u, read[parity], STORED_ROWS + i);
    fetch(parity);
  }
};

// A warpgroup's sums of 64 rows by both blocks.
template <Kind KIND>
__device__ void multiply(float (&d)[2][SUMS], Shared<KIND>& shared, Ring<KIND>& ring,
                         Sizes const& p, Work const& w, int warp, Turns& turns) {
#pragma unroll
  for (int i = 0; i < 2 * SUMS; ++i) d[0][i] = 0;
  StepScales scales(p, w, warp * STORED_ROWS, w.n * COLUMNS_OF_D<KIND>, IS_GATED<KIND>);
  auto step = [&](int parity) {
    auto& stage = shared.stages[ring.at];
    scales.step(parity);
    shared.full[ring.at].wait(ring.phase);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      float sums[SUMS];
      Product::find(stage.a[warp / 4], stage.b[2 * block], sums, turns);
      if (block == 1) release(shared, ring.at);
#pragma unroll
      for (int i = 0; i < SUMS; ++i) {
        int half = i / (SUMS / 2), lower = i / 2 % 2;
        d[block][i] += sums[i] * (scales.a[lower] * scales.b[2 * block + half]);
      }
    }
    ring.next();
  };
  int k = 0;
  for (; k + 1 < w.steps; k += 2) {
    step(0);
    step(1);
  }
  if (k < w.steps) step(0);
}

// The scale of e4m3 elements of at most this magnitude: kernels/device/e4m3.py.
__device__ inline float scale_of(float amax, bool powers) {
  float scale = __fdiv_rn(amax, 448.f);
  if (powers) scale = __uint_as_float((__float_as_uint(scale) + 0x7FFFFFu) & 0xFF800000u);
  return scale == 0 ? 1 : scale;
}

// Activates gate and up into gate, with its bias, and stores it as e4m3 with a scale a row. PLAIN is
// of whole tiles without biases or limits: a quarter of the instructions is for these.
template <int ACTIVATION, bool PLAIN>
__device__ void store_activated(float (&g)[SUMS], float (&u)[SUMS], Stored<GATED_BLOCKS>& store,
                                CUtensorMap const& map, Sizes const& p, Work const& w, int row,
                                float const* bias) {
  Gated const& of = p.gated;
  int x = w.n * BLOCK;
  float amax[2] = {};
#pragma unroll
  for (int j = 0; j < BLOCK / 8; ++j) {
    int at = 8 * j + store.lane % 4 * 2, column = x + at;
    float2 of_g{}, of_u{};
    if constexpr (!PLAIN) {
      of_g = two(bias, at);
      of_u = two(bias, BLOCK + at);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float &gate = g[4 * j + i], up = u[4 * j + i];
      if constexpr (PLAIN) {
        gate = silu(gate) * up;
      } else {
        gate = activated<ACTIVATION>(gate + (i % 2 ? of_g.y : of_g.x), up + (i % 2 ? of_u.y : of_u.x), of);
        gate = column < p.n ? gate : 0;
      }
      amax[i / 2] = larger(amax[i / 2], fabsf(gate));
    }
  }
  float scale[2];
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {
    float most = amax[lower];
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
      most = larger(most, __shfl_xor_sync(~0u, most, lane));
    }
    scale[lower] = scale_of(most, p.scales.powers);
    int in_tile = row + 8 * lower;
    // a tile of a cluster may lie behind the last column
    if (store.lane % 4 == 0 && x < p.n && w.m * TILE_M + in_tile < w.rows) {
      p.scales.d[int64_t(w.n) * p.rows + w.start + w.m * TILE_M + in_tile] = scale[lower];
    }
  }
  float inverse[2] = {fminf(__frcp_rn(scale[0]), 3e38f), fminf(__frcp_rn(scale[1]), 3e38f)};
  store.begin();
#pragma unroll
  for (int i = 0; i < SUMS; i += 2) {
    int lower = i / 2 % 2, column = i / 4 * 8 + store.lane % 4 * 2;
    float found[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // rounded like a division
      float q = g[i + j] * inverse[lower];
      found[j] = fmaf(fmaf(-q, scale[lower], g[i + j]), inverse[lower], q);
    }
    uint8_t* to = store.at(store.lane / 4 + 8 * lower, column / 16) + column % 16;
    *reinterpret_cast<__nv_fp8x2_storage_t*>(to) =
        __nv_cvt_float2_to_fp8x2(make_float2(found[0], found[1]), __NV_SATFINITE, __NV_E4M3);
  }
  store.send(map, static_cast<uint8_t*>(p.d), p.n, x, 0);
}

template <Kind KIND>
__device__ void tile(Shared<KIND>& shared, Ring<KIND>& ring, Stored<KIND>& store,
                     CUtensorMap const& map, Sizes const& p, Work const& w, int warp,
                     Turns& turns) {
  float d[2][SUMS];
  int first = warp * STORED_ROWS, row = first + store.lane / 4;
  multiply<KIND>(d, shared, ring, p, w, warp, turns);
  int m = w.m * TILE_M + first;
  store.y = w.start + m;
  store.rows = w.rows - m;
  if constexpr (KIND == GATED_BLOCKS) {
    float const* bias = biases(shared, p, w, turns.group);
    bool whole = (w.n + 1) * BLOCK <= p.n, limited = p.gated.limit < NO_LIMIT;
    with_activation(p.gated.activation, [&](auto activation) {
      constexpr int ACTIVATION = decltype(activation)::value;
      if (ACTIVATION == SILU && whole && !p.gated.bias && !limited) {
        store_activated<SILU, true>(d[0], d[1], store, map, p, w, row, bias);
      } else {
        store_activated<ACTIVATION, false>(d[0], d[1], store, map, p, w, row, bias);
      }
    });
  } else {
#pragma unroll
    for (int at = 0; at < 2 * BLOCK; at += 64) {
      store(map, d_of(p), p.n, w.n * 2 * BLOCK + at, 0, [&](int j, float (&s)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = d[0][at / 2 + 8 * j + i];
      });
    }
  }
}

template <Kind KIND>
  requires(OF_BLOCKS<KIND>)
__device__ void compute(Shared<KIND>& shared, Maps const& maps, Sizes const& p, int warp) {
  Schedule<KIND> schedule(p);
  Stored<KIND> store{shared.out[warp], p.n};
  Ring<KIND> ring;
  Turns turns(warp / 4);
  Work w;
  while (schedule.next(w)) {
    if (w.half && warp >= 4) {  // no rows
      for (int k = 0; k < w.steps; ++k, ring.next()) {
        shared.full[ring.at].wait(ring.phase);
        for (int block = 0; block < 2; ++block) {
          turns.wait();
          turns.done();
        }
        release(shared, ring.at);
      }
    } else {
      tile<KIND>(shared, ring, store, maps.d, p, w, warp, turns);
    }
  }
  cute::tma_store_wait<0>();
}

// Returns what `launch` of common.cuh returns.
template <Kind KIND>
int launch_blocks(BlockScaledProduct const& f) {
  GroupedProduct const& g = f.gated.product;
  Maps maps{};
  uint64_t rows = g.rows, n = g.n, k = g.k, groups = g.groups;
  bool ok = encode<3, uint8_t>(maps.a, g.a, {k, rows, 1}, {k, k * rows}, {BLOCK, PART, 1});
  if constexpr (KIND == GATED_BLOCKS) {
    uint64_t of_row = f.gated.interleaved ? 2 * k : k, of_up = f.gated.interleaved ? k : n * k;
    ok &= encode<4, uint8_t>(maps.b, g.b, {k, n, 2, groups}, {of_row, of_up, 2 * n * k},
                             {BLOCK, BLOCK, 1, 1});
    ok &= encode<3, uint8_t>(maps.d, g.d, {n, rows, 1}, {n, n * rows}, {128, STORED_ROWS, 1});
  } else {
    ok &= encode<4, uint8_t>(maps.b, g.b, {k, n, 1, groups}, {k, n * k, n * k}, {BLOCK, BLOCK, 1, 1});
    ok &= encode<3>(maps.d, g.d, {n, rows, 1}, {n, n * rows}, {64, STORED_ROWS, 1});
  }
  if (!ok) return 100;
  Scales scales{static_cast<float const*>(f.a_scale), static_cast<float const*>(f.b_scale),
                static_cast<float*>(f.d_scale), f.powers != 0};
  return start<KIND>(maps, g, gated_of(f.gated), scales);
}

}  // namespace moe_ops::cutlass_products
