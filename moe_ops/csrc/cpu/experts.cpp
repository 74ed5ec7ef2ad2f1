// Whole expert layers of weights of 4, 8 and 16 bits on a CPU with AVX-512: every weight is read once for up
// to eight rows, in the layout it is stored in, and decoded in registers to bf16. No copy of a weight is made.
//
// One parallel region: tokens are put into the order in which weights are decoded | product with w13 and
// activation | the same of h | product with w2 and weighted sum. Thread t of T takes the same share of rows of
// every expert in use, so that bytes are even whatever the routing is; after the second product it owns its
// columns of the sum, whose order is that of experts. Decoders are in decoders.inc.
//
// Plain C interface without torch's headers, as in grouped_mm.cpp: one build serves every torch.
//
// Legend: M tokens, K hidden size, I intermediate size, E experts, P = M * top_k pairs, N = 2 I.
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace {

constexpr int64_t BLOCK = 128;     // columns of a step
constexpr int MOST_ROWS = 8;       // rows of x that one decoded weight row meets
constexpr int TILE = 4;            // weight rows of a tile
constexpr int PREFETCH = 2 * TILE; // weight rows ahead
constexpr int64_t RESIDENT = 384 << 10;  // bytes of rows of x that stay in a core's cache

// A weight of all experts: struct Matrix of backends/torch/cpu_experts.py. Strides in bytes.
struct Matrix {
    const uint8_t *data, *scale, *zero_point;  // zero_point uint8, or null
    const float* global;                       // of each expert, or null
    const void* bias;                          // (E, rows), or null
    int64_t expert, row, scale_expert, scale_row, zero_expert, zero_row, bias_expert;
    int32_t groups;         // of a step of 128 columns, where a scale is a group's: 1, 2 or 4
    int32_t scale_type;     // 0 bf16, 1 fp16, 2 fp32
    int32_t bias_type;
};

struct Experts {  // struct Experts of backends/torch/cpu_experts.py
    const uint16_t* x;       // (M, K) bf16, rows at x_row elements
    const int64_t* ids;      // (M, top_k)
    const float* weights;    // (M, top_k)
    const int32_t* map;      // (mapped,) of ids to experts here or -1, or null
    uint16_t* out;           // (M, K)
    int64_t x_row, M, top_k, E, mapped, K, I;
    Matrix w13, w2;
    int32_t scheme, activation, interleaved, threads, powers;  // powers: of two, scales of activations
    float alpha, beta, limit;
};

struct Weight {  // of one expert
    const uint8_t *data, *scale, *zero_point;
    float global;
};

Weight of_expert(const Matrix& m, int64_t e) {
    return {m.data + e * m.expert, m.scale + e * m.scale_expert,
            m.zero_point ? m.zero_point + e * m.zero_expert : nullptr, m.global ? m.global[e] : 1.f};
}

#define ISA "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,gfni,f16c"
#define TARGET __attribute__((target(ISA)))
#define INLINE __attribute__((target(ISA), always_inline)) inline
#define INLINED __attribute__((target(ISA), always_inline))  // a lambda

using V = __m512i;
using F = __m512;

INLINE V load(const void* p) { return _mm512_loadu_si512(p); }
INLINE F dot(F a, V x, V w) { return _mm512_dpbf16_ps(a, (__m512bh)x, (__m512bh)w); }

// Number i of bf16 (type 0), fp16 (1) or fp32 (2).
TARGET inline float number(const void* p, int64_t i, int type) {
    if (type == 2) return ((const float*)p)[i];
    const uint16_t bits = ((const uint16_t*)p)[i];
    if (type == 1) return _cvtsh_ss(bits);
    const uint32_t wide = uint32_t(bits) << 16;
    float found;
    memcpy(&found, &wide, 4);
    return found;
}

#include "decoders.inc"

// Rows n to n + TILE of a weight times MT packed rows: sums in fp32, y[i * y_stride + j].
template <class D, int MT, int NR>
INLINE void part(const D& decoder, const uint8_t* const* x, const uint8_t* const (&w)[NR],
                 const typename D::Row (&of)[NR], int64_t cols, F* sums /* [MT][TILE] */,
                 const uint8_t* const (&ahead)[NR]) {
    // few sums would wait for each other
    constexpr bool FRESH = D::GROUPED || D::BEGINS || MT * NR < 8;
    F acc[MT][NR];
    for (auto& a : acc)
        for (auto& v : a) v = _mm512_setzero_ps();
    auto step = [&](int64_t b, const uint8_t* const(&from)[NR], const typename D::Row(&row)[NR], int64_t at,
                    bool fetch) INLINED {
        V q[NR][4];
        F scale[NR], begin[NR];
        for (int j = 0; j < NR; ++j) {
            decoder.decode(from[j] + at * D::BYTES, q[j]);
            if constexpr (D::GROUPED) scale[j] = decoder.scale(row[j], at);
            if constexpr (D::BEGINS) begin[j] = decoder.begin(row[j], at);
            if (fetch)
                for (int64_t c = 0; c < D::BYTES; c += 64) _mm_prefetch((const char*)(ahead[j] + b * D::BYTES + c), _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MT; ++i) {
            F a[NR];
            for (int j = 0; j < NR; ++j) {
                if constexpr (D::BEGINS)
                    a[j] = _mm512_mul_ps(begin[j], _mm512_loadu_ps(x[i] + b * D::PACKED + 256));
                else
                    a[j] = FRESH ? _mm512_setzero_ps() : acc[i][j];
            }
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) {
                const V xv = load(x[i] + b * D::PACKED + v * 64);
                for (int j = 0; j < NR; ++j) a[j] = dot(a[j], xv, q[j][v]);
            }
            if constexpr (D::TOKENS == GROUPS)
                for (int j = 0; j < NR; ++j) a[j] = _mm512_mul_ps(a[j], _mm512_loadu_ps(x[i] + b * D::PACKED + 256));
            for (int j = 0; j < NR; ++j)
                acc[i][j] = D::GROUPED ? _mm512_fmadd_ps(a[j], scale[j], acc[i][j])
                            : FRESH    ? _mm512_add_ps(acc[i][j], a[j])
                                       : a[j];
        }
    };
    const int64_t whole = cols / BLOCK;
    for (int64_t b = 0; b < whole; ++b) step(b, w, of, b, ahead[0] != nullptr);
    if (const int64_t rest = cols % BLOCK) {  // what is behind a row is another one's, or nobody's
        alignas(64) uint8_t data[NR][256] = {}, scales[NR][16] = {};
        const uint8_t* from[NR];
        typename D::Row row[NR];
        for (int j = 0; j < NR; ++j) {
            memcpy(data[j], w[j] + whole * D::BYTES, rest * D::BYTES / BLOCK);
            from[j] = data[j];
            row[j] = D::rest(of[j], whole, rest, scales[j]);
        }
        step(whole, from, row, 0, false);
    }
    for (int i = 0; i < MT; ++i)
        for (int j = 0; j < NR; ++j) sums[i * TILE + j] = acc[i][j];
}

template <class D, int MT>
TARGET __attribute__((noinline)) void tile(const uint8_t* const* x, const Matrix& m, const Weight& w, int64_t n,
                                           int64_t cols, float* y, int64_t y_stride, const uint8_t* ahead) {
    constexpr int NR = MT <= 2 ? 1 : 2;  // few rows of x: one stream of memory is fastest
    const D decoder(m);
    F sums[MT][TILE];
    for (int j = 0; j < TILE; j += NR) {
        const uint8_t *rows[NR], *next[NR];
        typename D::Row of[NR];
        for (int r = 0; r < NR; ++r) {
            rows[r] = w.data + (n + j + r) * m.row;
            next[r] = ahead ? ahead + (j + r) * m.row : nullptr;
            of[r] = D::row(m, w, n + j + r);
        }
        part<D, MT, NR>(decoder, x, rows, of, cols, &sums[0][j], next);
    }
    const __m128 of_rows = D::row_scales(m, w, n);
    for (int i = 0; i < MT; ++i) {
        __m128 scales = of_rows;
        if constexpr (D::TOKENS == ROWS)
            scales = _mm_mul_ps(scales, _mm_set1_ps(number(x[i] + (cols + BLOCK - 1) / BLOCK * D::PACKED, 0, 2)));
        const F a = sums[i][0], b = sums[i][1], c = sums[i][2], d = sums[i][3];
        const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        const F r = _mm512_add_ps((F)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd),
                                  (F)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
        const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(r), _mm512_extractf32x8_ps(r, 1));
        const __m128 v = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
        _mm_storeu_ps(y + i * y_stride, _mm_mul_ps(v, scales));
    }
}

template <class D, int MT = 1>
void any_tile(int rows, const uint8_t* const* x, const Matrix& m, const Weight& w, int64_t n, int64_t cols,
              float* y, int64_t y_stride, const uint8_t* ahead) {
    if (rows == MT)
        tile<D, MT>(x, m, w, n, cols, y, y_stride, ahead);
    else if constexpr (MT < MOST_ROWS)
        any_tile<D, MT + 1>(rows, x, m, w, n, cols, y, y_stride, ahead);
}

// Weight rows n0 to n1 times `count` rows of x; the rows at `next` are multiplied after them.
template <class D>
void panel(int64_t count, const uint8_t* const* x, const Matrix& m, const Weight& w, int64_t n0, int64_t n1,
           int64_t cols, float* y, int64_t y_stride, const uint8_t* next) {
    const int64_t parts = (count + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t n = n0; n < n1; n += TILE) {
        const int64_t there = n + PREFETCH;
        const uint8_t* ahead = there < n1 ? w.data + there * m.row : next + (there - n1) * m.row;
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t first = count * p / parts, last = count * (p + 1) / parts;
            any_tile<D>(int(last - first), x + first, m, w, n, cols, y + first * y_stride + (n - n0), y_stride,
                        p || !D::FETCHES ? nullptr : ahead);
        }
    }
}

INLINE F exp_of(F x) {  // 2 ** t, relative error 1e-7; NaN stays NaN
    const F most = _mm512_set1_ps(150);
    F t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    t = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), most), _mm512_min_ps(most, t));
    const F k = _mm512_roundscale_ps(t, 0), r = _mm512_sub_ps(t, k);
    F p = _mm512_set1_ps(1.54035304e-4f);
    for (float c : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, .240226507f, .693147181f, 1.f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, k);
}
INLINE F times_sigmoid(F x, F z) {  // x / (1 + exp(-z))
    const F e = exp_of(_mm512_sub_ps(_mm512_setzero_ps(), z));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1)));
}

// Formulas: moe_ops/activations.py. min and max return their second operand where one is NaN.
enum Activation { SWIGLU, GELU_TANH, SWIGLUSTEP };
INLINE F activated(const Experts& a, F g, F u) {
    const F limit = _mm512_set1_ps(a.limit), least = _mm512_set1_ps(-a.limit);
    if (a.activation == GELU_TANH) {
        const F cube = _mm512_mul_ps(_mm512_mul_ps(g, g), g);
        const F z = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), g);
        return _mm512_mul_ps(times_sigmoid(g, _mm512_mul_ps(z, _mm512_set1_ps(1.5957691216f))), u);
    }
    u = _mm512_max_ps(least, _mm512_min_ps(limit, u));
    if (a.activation == SWIGLUSTEP) return _mm512_mul_ps(_mm512_min_ps(limit, times_sigmoid(g, g)), u);
    g = _mm512_min_ps(limit, g);
    const F s = times_sigmoid(g, _mm512_mul_ps(g, _mm512_set1_ps(a.alpha)));
    return _mm512_mul_ps(s, _mm512_add_ps(u, _mm512_set1_ps(a.beta)));
}

INLINE void write16(uint16_t* p, __mmask16 here, F v) {
    _mm256_mask_storeu_epi16(p, here, (__m256i)_mm512_cvtneps_pbh(v));
}
INLINE void write16(float* p, __mmask16 here, F v) { _mm512_mask_storeu_ps(p, here, v); }

// Columns i0 to i1 of h of a row of sums, gate and up of these columns.
template <class H>
TARGET void activate(const Experts& a, const float* y, const float* bias, int64_t i0, int64_t i1, H* h) {
    const int64_t n = i1 - i0;
    const V even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const V odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 here = first(n - i);
        F g, u;
        auto read = [&](const float* from) INLINED {
            if (a.interleaved) {
                const __mmask16 low = first(2 * (n - i)), high = n - i > 8 ? first(2 * (n - i) - 16) : 0;
                const F l = _mm512_maskz_loadu_ps(low, from + 2 * i), r = _mm512_maskz_loadu_ps(high, from + 2 * i + 16);
                g = _mm512_permutex2var_ps(l, even, r);
                u = _mm512_permutex2var_ps(l, odd, r);
            } else {
                g = _mm512_maskz_loadu_ps(here, from + i);
                u = _mm512_maskz_loadu_ps(here, from + n + i);
            }
        };
        read(y);
        if (bias) {
            const F of_g = g, of_u = u;
            read(bias);
            g = _mm512_add_ps(g, of_g);
            u = _mm512_add_ps(u, of_u);
        }
        write16(h + i0 + i, here, activated(a, g, u));
    }
}

TARGET void add(float* sums, const float* y, const float* bias, float weight, int64_t n) {
    const F w = _mm512_set1_ps(weight);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 here = first(n - i);
        F v = _mm512_maskz_loadu_ps(here, y + i);
        if (bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(here, bias + i));
        _mm512_mask_storeu_ps(sums + i, here, _mm512_fmadd_ps(w, v, _mm512_maskz_loadu_ps(here, sums + i)));
    }
}

TARGET void narrow(const float* sums, uint16_t* out, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 here = first(n - i);
        write16(out + i, here, _mm512_maskz_loadu_ps(here, sums + i));
    }
}

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Where everything lies in the scratch memory.
template <class D>
struct Layout {
    using H = std::conditional_t<D::TOKENS == WIDE, uint16_t, float>;  // quantized tokens are not rounded before
    int64_t x_row, h_row, share13, share2, width;  // bytes of packed rows; rows of a thread's share
    int64_t x, h, packed_h, sums, local, wide, rows_x, rows_h, pair, start, hit, bytes;

    explicit Layout(const Experts& a) {
        const int64_t P = a.M * a.top_k;
        const int64_t behind = D::TOKENS == ROWS ? 64 : 0;
        x_row = (a.K + BLOCK - 1) / BLOCK * D::PACKED + behind;
        h_row = (a.I + BLOCK - 1) / BLOCK * D::PACKED + behind;
        const int64_t unit = a.interleaved ? 2 : TILE;
        share13 = ((a.I + unit - 1) / unit + a.threads - 1) / a.threads * unit;
        share2 = ((a.K + TILE - 1) / TILE + a.threads - 1) / a.threads * TILE;
        width = std::max(2 * share13, share2);
        bytes = 0;
        auto take = [&](int64_t size) { const int64_t at = bytes; bytes += rounded(size); return at; };
        x = take(a.M * x_row);
        h = take(P * a.I * sizeof(H));
        packed_h = take(P * h_row);
        sums = take(a.M * a.K * 4);
        local = take(a.threads * rounded((P + 1) * width * 4));  // and a row of biases
        wide = take(D::TOKENS == WIDE ? 0 : a.threads * rounded(std::max(a.K, a.I) * 2));
        rows_x = take(P * 8);
        rows_h = take(P * 8);
        pair = take(P * 8);
        start = take((a.E + 1) * 8);
        hit = take(a.E * 8);
    }
};

// Pairs by expert, first come first: start (E + 1), pair (P), and the experts in use.
int64_t sort(const Experts& a, int64_t* start, int64_t* pair, int64_t* hit) {
    const int64_t P = a.M * a.top_k;
    auto expert = [&](int64_t p) -> int64_t {
        int64_t e = a.ids[p];
        if (a.map) e = e >= 0 && e < a.mapped ? a.map[e] : -1;
        return e >= 0 && e < a.E ? e : -1;
    };
    std::fill(start, start + a.E + 1, 0);
    for (int64_t p = 0; p < P; ++p)
        if (const int64_t e = expert(p); e >= 0) ++start[e + 1];
    int64_t hits = 0;
    for (int64_t e = 0; e < a.E; ++e) {
        if (start[e + 1]) hit[hits++] = e;
        start[e + 1] += start[e];
    }
    for (int64_t p = 0; p < P; ++p)
        if (const int64_t e = expert(p); e >= 0) pair[start[e]++] = p;
    for (int64_t e = a.E; e > 0; --e) start[e] = start[e - 1];
    start[0] = 0;
    return hits;
}

template <class D>
void layer(const Experts& a, uint8_t* scratch) {
    const Layout<D> at(a);
    float* sums = (float*)(scratch + at.sums);
    auto** rows_x = (const uint8_t**)(scratch + at.rows_x);
    auto** rows_h = (const uint8_t**)(scratch + at.rows_h);
    int64_t *pair = (int64_t*)(scratch + at.pair), *start = (int64_t*)(scratch + at.start);
    int64_t* hit = (int64_t*)(scratch + at.hit);
    const int64_t hits = sort(a, start, pair, hit), pairs = start[a.E];
    for (int64_t s = 0; s < pairs; ++s) {
        rows_x[s] = scratch + at.x + pair[s] / a.top_k * at.x_row;
        rows_h[s] = scratch + at.packed_h + s * at.h_row;
    }
    // rows of x at a time: weights are read again for the next ones
    auto several = [](int64_t row) { return std::max<int64_t>(MOST_ROWS, RESIDENT / row / MOST_ROWS * MOST_ROWS); };
    auto* h = (typename Layout<D>::H*)(scratch + at.h);
#pragma omp parallel num_threads(a.threads)
    {
        const int64_t t = omp_get_thread_num(), T = omp_get_num_threads();
        float* y = (float*)(scratch + at.local + t * rounded((a.M * a.top_k + 1) * at.width * 4));
        float* bias = y + a.M * a.top_k * at.width;
        auto* wide = (uint16_t*)(scratch + at.wide + t * rounded(std::max(a.K, a.I) * 2));
        for (int64_t m = t; m < a.M; m += T)
            take<D>(a.x + m * a.x_row, a.K, a.powers, wide, scratch + at.x + m * at.x_row);
#pragma omp barrier
        // fewer threads than asked for share what is left in turns
        for (int64_t part = t; part < a.threads; part += T) {
            const int64_t i0 = std::min(part * at.share13, a.I), i1 = std::min(i0 + at.share13, a.I), n = i1 - i0;
            for (int64_t k = 0; k < hits && n > 0; ++k) {
                const int64_t e = hit[k], first = start[e], count = start[e + 1] - first;
                const Weight w = of_expert(a.w13, e), after = of_expert(a.w13, hit[std::min(k + 1, hits - 1)]);
                const uint8_t* next = after.data + (a.interleaved ? 2 * i0 : i0) * a.w13.row;
                const uint8_t* up = w.data + (a.I + i0) * a.w13.row;
                for (int64_t c = 0; c < count; c += several(at.x_row)) {
                    const int64_t rows = std::min(several(at.x_row), count - c);
                    const uint8_t** x = rows_x + first + c;
                    float* to = y + c * 2 * n;
                    if (a.interleaved) {
                        panel<D>(rows, x, a.w13, w, 2 * i0, 2 * i1, a.K, to, 2 * n, next);
                    } else {
                        panel<D>(rows, x, a.w13, w, i0, i1, a.K, to, 2 * n, up);
                        panel<D>(rows, x, a.w13, w, a.I + i0, a.I + i1, a.K, to + n, 2 * n, next);
                    }
                }
                if (a.w13.bias)
                    for (int64_t i = 0; i < 2 * n; ++i) {
                        const int64_t of = a.interleaved ? 2 * i0 + i : i < n ? i0 + i : a.I + i0 + i - n;
                        bias[i] = number(a.w13.bias, e * a.w13.bias_expert + of, a.w13.bias_type);
                    }
                for (int64_t c = 0; c < count; ++c)
                    activate(a, y + c * 2 * n, a.w13.bias ? bias : nullptr, i0, i1, h + (first + c) * a.I);
            }
        }
#pragma omp barrier
        for (int64_t s = t; s < pairs; s += T)
            take<D>(h + s * a.I, a.I, a.powers, wide, scratch + at.packed_h + s * at.h_row);
#pragma omp barrier
        for (int64_t part = t; part < a.threads; part += T) {
            const int64_t k0 = std::min(part * at.share2, a.K), n = std::min(k0 + at.share2, a.K) - k0;
            for (int64_t m = 0; m < a.M && n > 0; ++m) std::fill_n(sums + m * a.K + k0, n, 0.f);
            for (int64_t k = 0; k < hits && n > 0; ++k) {
                const int64_t e = hit[k], first = start[e], count = start[e + 1] - first;
                const Weight w = of_expert(a.w2, e), after = of_expert(a.w2, hit[std::min(k + 1, hits - 1)]);
                for (int64_t c = 0; c < count; c += several(at.h_row))
                    panel<D>(std::min(several(at.h_row), count - c), rows_h + first + c, a.w2, w, k0, k0 + n, a.I,
                             y + c * n, n, after.data + k0 * a.w2.row);
                if (a.w2.bias)
                    for (int64_t i = 0; i < n; ++i)
                        bias[i] = number(a.w2.bias, e * a.w2.bias_expert + k0 + i, a.w2.bias_type);
                for (int64_t c = 0; c < count; ++c) {
                    const int64_t p = pair[first + c];
                    add(sums + p / a.top_k * a.K + k0, y + c * n, a.w2.bias ? bias : nullptr, a.weights[p], n);
                }
            }
            for (int64_t m = 0; m < a.M && n > 0; ++m) narrow(sums + m * a.K + k0, a.out + m * a.K + k0, n);
        }
    }
}

struct Entry {
    int64_t (*bytes)(const Experts&);
    void (*run)(const Experts&, uint8_t*);
};
template <class D>
constexpr Entry ENTRY = {[](const Experts& a) { return Layout<D>(a).bytes; }, layer<D>};
// in the order of SCHEMES of backends/torch/cpu_experts.py
const Entry ENTRIES[] = {ENTRY<Bf16>, ENTRY<Int4>, ENTRY<Int4Any>, ENTRY<Mxfp4>, ENTRY<Nvfp4>,
                         ENTRY<Int8>, ENTRY<Fp8>,  ENTRY<Fp8Blocks>, ENTRY<Int8Tokens>, ENTRY<Fp8Tokens>,
                         ENTRY<Fp8BlocksTokens>};

}  // namespace

extern "C" {

// Whether this processor has the instructions.
int moe_ops_cpu_experts_runs() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("gfni");
}

int64_t moe_ops_cpu_experts_struct_bytes() { return sizeof(Experts); }

// Bytes of scratch memory that a call needs, at a multiple of 64.
int64_t moe_ops_cpu_experts_scratch(const Experts* a) { return ENTRIES[a->scheme].bytes(*a); }

void moe_ops_cpu_experts(const Experts* a, void* scratch) { ENTRIES[a->scheme].run(*a, (uint8_t*)scratch); }
}
#else
extern "C" int moe_ops_cpu_experts_runs() { return 0; }
#endif
