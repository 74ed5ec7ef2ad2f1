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

#include <utility>

#include "sm90_tiles.cuh"

namespace moe_ops::cutlass_products {

template <int COLUMNS, cute::SM90::GMMA::Major A, cute::SM90::GMMA::Major B>
struct InstructionOf;
template <cute::SM90::GMMA::Major A, cute::SM90::GMMA::Major B>
struct InstructionOf<192, A, B> : cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<A, B> {};
template <cute::SM90::GMMA::Major A, cute::SM90::GMMA::Major B>
struct InstructionOf<128, A, B> : cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_SS<A, B> {};
template <cute::SM90::GMMA::Major A, cute::SM90::GMMA::Major B>
struct InstructionOf<96, A, B> : cute::SM90::GMMA::MMA_64x96x16_F32BF16BF16_SS<A, B> {};

template <Kind KIND, int COLUMNS>
struct Instruction {
  static constexpr auto K = cute::SM90::GMMA::Major::K, MN = cute::SM90::GMMA::Major::MN;
  static constexpr auto A = KIND == OUTER ? MN : K;
  static constexpr auto B = KIND == X_WT || KIND == GATED ? K : MN;
  using Type = InstructionOf<COLUMNS, A, B>;

  // Between 16 numbers along the sum and the next, in 16 bytes.
  static constexpr uint64_t step(cute::SM90::GMMA::Major major) { return major == K ? 2 : 128; }

  template <size_t... I>
  __device__ static void add(uint64_t a, uint64_t b, float (&d)[COLUMNS / 2],
                             std::index_sequence<I...>) {
    Type::fma(a, b, d[I]..., cute::SM90::GMMA::ScaleOut::One);
  }
  // All parts of A with 16 numbers along the sum.
  template <int PARTS>
  __device__ static void add(Stage<KIND>& stage, int j, float (&d)[PARTS][COLUMNS / 2]) {
    uint64_t b = matrix(stage.b, B == MN) + j * step(B);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      uint64_t a = matrix(stage.a[part], A == MN) + j * step(A);
      add(a, b, d[part], std::make_index_sequence<COLUMNS / 2>{});
    }
  }
};

template <int PARTS, int SUMS>
__device__ void fence(float (&d)[PARTS][SUMS]) {
#pragma unroll
  for (int i = 0; i < PARTS * SUMS; ++i) cute::warpgroup_fence_operand(d[0][i]);
}

// Rows `from` to `to` of parts of a stage, which are another expert's.
__device__ inline void erase(uint8_t (*parts)[PART_BYTES], int count, int from, int to) {
  int chunks = (to - from) * 8;  // of 16 bytes
  for (int i = threadIdx.x % 128; i < chunks * count; i += 128) {
    *reinterpret_cast<uint4*>(parts[i / chunks] + from * 128 + i % chunks * 16) = {};
  }
}

// A warpgroup's sums of a tile: of the first PARTS parts of A. Warpgroups wait for stages in turns:
// one that waited for a stage's second next phase would take its last one for it.
template <Kind KIND, int PARTS, int SUMS>
__device__ void multiply(float (&d)[PARTS][SUMS], Shared<KIND>& shared, Ring<KIND>& ring,
                         Work const& w, Turns& turns) {
  using I = Instruction<KIND, 2 * SUMS>;
  int rest = KIND == OUTER ? w.rows % TILE_K : 0, whole = w.steps - (rest > 0), previous = 0;
#pragma unroll
  for (int i = 0; i < PARTS * SUMS; ++i) d[0][i] = 0;
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
    Stage<KIND>& stage = shared.stages[ring.at];
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

// Of a part's sums, which are gate and up columns in quarters of a tile.
template <int ACTIVATION, int SUMS>
__device__ void store_activated(float (&d)[SUMS], Stored<GATED>& store, Maps const& maps,
                                Sizes const& p, int x, float const* bias) {
  constexpr int QUARTER = TILE_N / 4, STORED = STORED_BYTES<GATED> / 2;
  Gated const& of = p.gated;
#pragma unroll
  for (int first = 0; first < SUMS; first += STORED, x += STORED) {
    // Of a gate's 16 columns. Those behind a narrow tile, which lie behind D too, are the last ones.
    auto sums = [&](int j) {
      int at = min(first + 16 * j, SUMS - 16);
      return d + (at / QUARTER * 2 * QUARTER + at % QUARTER) / 2;
    };
    if (of.gate_up) {
#pragma unroll
      for (int up = 0; up < 2; ++up) {
        store(maps.gate_up, of.gate_up + up * p.n, 2 * p.n, x, up, [&](int j, float (&s)[8]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) s[i] = sums(j)[up * QUARTER / 2 + i];
        });
      }
    }
    store(maps.d, d_of(p), p.n, x, 0, [&](int j, float (&s)[8]) {
      float* g = sums(j);
      float* u = g + QUARTER / 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int column = first + 16 * j + 8 * half + store.lane % 4 * 2;
        float2 of_g = two(bias, column), of_u = two(bias, TILE_N / 2 + column);
#pragma unroll
        for (int i = 4 * half; i < 4 * half + 4; i += 2) {
          s[i] = activated<ACTIVATION>(g[i] + of_g.x, u[i] + of_u.x, of);
          s[i + 1] = activated<ACTIVATION>(g[i + 1] + of_g.y, u[i + 1] + of_u.y, of);
        }
      }
    });
  }
}

// A warpgroup's tile.
template <Kind KIND, int PARTS, int COLUMNS>
__device__ void tile(Shared<KIND>& shared, Ring<KIND>& ring, Stored<KIND>& store,
                     Maps const& maps, Sizes const& p, Work const& w, Turns& turns) {
  float d[PARTS][COLUMNS / 2];
  multiply<KIND>(d, shared, ring, w, turns);
  float const* bias = nullptr;
  if constexpr (KIND == GATED) bias = biases(shared, p, w, turns.group);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    int m = w.m * TILE_M + part * PART + threadIdx.x % 128 / 32 * STORED_ROWS;
    store.y = m + (KIND == OUTER ? 0 : w.start);
    // what is behind an outer product's rows its own map leaves out
    store.rows = KIND == OUTER ? STORED_ROWS : w.rows - m;
    if constexpr (KIND == GATED) {
      with_activation(p.gated.activation, [&](auto activation) {
        store_activated<decltype(activation)::value>(d[part], store, maps, p, w.x, bias);
      });
    } else {
#pragma unroll
      for (int at = 0; at < COLUMNS; at += STORED_BYTES<KIND> / 2) {
        store(maps.d, d_of(p), p.n, w.x + at, KIND == OUTER ? w.expert : 0, [&](int j, float (&s)[8]) {
#pragma unroll
          for (int i = 0; i < 8; ++i) s[i] = d[part][at / 2 + 8 * j + i];
        });
      }
    }
  }
}

template <Kind KIND>
  requires(!OF_BLOCKS<KIND>)
__device__ void compute(Shared<KIND>& shared, Maps const& maps, Sizes const& p, int warp) {
  Turns turns(warp / 4);
  Schedule<KIND> schedule(p);
  Stored<KIND> store{shared.out[warp], p.n};
  Ring<KIND> ring;
  Work w;
  auto take = [&](auto columns) {
    constexpr int COLUMNS = decltype(columns)::value;
    if (w.half) {
      tile<KIND, 1, COLUMNS>(shared, ring, store, maps, p, w, turns);
    } else {
      tile<KIND, 2, COLUMNS>(shared, ring, store, maps, p, w, turns);
    }
  };
  for (int turn = 0; schedule.next(w); turn ^= 1) {
    if (turn != turns.group) {
      ring.skip(w.steps);
    } else if (w.narrow) {
      take(cute::Int<NARROW<KIND>>{});
    } else {
      take(cute::Int<TILE_N>{});
    }
  }
  cute::tma_store_wait<0>();
}

// Returns what `launch` of common.cuh returns. `up` is GatedProduct.up.
template <Kind KIND>
int launch(GroupedProduct const& g, Gated const& gated = {}, void const* up = nullptr) {
  Maps maps{};
  bool ok = true;
  uint64_t rows = g.rows, m = g.m, n = g.n, k = g.k, groups = g.groups;
  constexpr uint32_t STORED = STORED_BYTES<KIND> / 2, HALF = TILE_N / 2;
  if constexpr (KIND == OUTER) {
    ok &= encode<3>(maps.a, g.a, {m, rows, 1}, {m, m * rows}, {64, TILE_K, 1});
    ok &= encode<3>(maps.b, g.b, {n, rows, 1}, {n, n * rows}, {64, TILE_K / 2, 1});
    ok &= encode<3>(maps.d, g.d, {n, m, groups}, {n, n * m}, {STORED, STORED_ROWS, 1});
  } else {
    auto operands = [&](CUtensorMap& a, void const* of_a, CUtensorMap& b, void const* of_b, CUtensorMap& b_up,
                        void const* of_up, uint64_t k) {
      ok &= encode<3>(a, of_a, {k, rows, 1}, {k, k * rows}, {64, PART, 1});
      if constexpr (KIND == X_WT) {
        ok &= encode<3>(b, of_b, {k, n, groups}, {k, k * n}, {64, HALF, 1});
      } else if constexpr (KIND == X_W) {
        ok &= encode<3>(b, of_b, {n, k, groups}, {n, n * k}, {64, TILE_K / 2, 1});
      } else {
        uint64_t row = gated.interleaved ? 2 * k : k, group = of_up ? n * k : 2 * n * k;
        if (!of_up) of_up = static_cast<__nv_bfloat16 const*>(of_b) + (gated.interleaved ? k : n * k);
        ok &= encode<3>(b, of_b, {k, n, groups}, {row, group}, {64, HALF / 2, 1});
        ok &= encode<3>(b_up, of_up, {k, n, groups}, {row, group}, {64, HALF / 2, 1});
      }
    };
    operands(maps.a, g.a, maps.b, g.b, maps.b_up, up, k);
    if (g.rank > 0) operands(maps.low_a, g.low_a, maps.low_b, g.low_b, maps.low_b_up, nullptr, g.rank);
    ok &= encode<3>(maps.d, g.d, {n, rows, 1}, {n, n * rows}, {STORED, STORED_ROWS, 1});
    if (gated.gate_up) {
      ok &= encode<3>(maps.gate_up, gated.gate_up, {n, rows, 2}, {2 * n, n}, {STORED, STORED_ROWS, 1});
    }
  }
  if (!ok) return 100;
  return start<KIND>(maps, g, gated, {});
}

}  // namespace moe_ops::cutlass_products
