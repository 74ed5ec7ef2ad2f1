// Expert layers on a CPU: the grouped product out[s, :] = x[s, :] @ weight[e].T (+ bias[e]) for few rows per
// expert, and the weighted sum over top_k.
//
// Library GEMMs repack the weight on every call, which costs more than the product while an expert has
// few rows. Here every weight row is read once, straight from memory, as the vectors a dot product needs:
//   rows of one expert x rows of its weight, in register tiles of MT x NT accumulators along K.
//
// Plain C interface, no torch headers: the Python side passes pointers (ctypes), so one build serves
// every torch version. The algorithm stands in grouped_mm.inc, over the registers and element types
// of AVX-512 (with AVX512_BF16) and of AVX2 here; the processor chooses when the library is loaded.
//
// Legend: E experts, N rows and K columns of a weight, S rows of x sorted by expert.
#include <cstdint>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include "bf16.h"
#include "processor.h"

namespace {

constexpr int BLOCKS = 8;  // of experts: EXPERT_BLOCKS of meta/blocks.py

inline int64_t cut(int64_t end, int64_t S) { return end < 0 ? 0 : end < S ? end : S; }

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

using Lanes = __m512;
constexpr int LANES = 16;
TARGET inline Lanes zero() { return _mm512_setzero_ps(); }
TARGET inline Lanes broadcast(float v) { return _mm512_set1_ps(v); }
TARGET inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
TARGET inline float sum(Lanes v) { return _mm512_reduce_add_ps(v); }

// The sums of four registers, side by side.
TARGET inline __m128 sum4(Lanes a, Lanes b, Lanes c, Lanes d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d abd = _mm512_castps_pd(ab), cdd = _mm512_castps_pd(cd);
    __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(abd, cdd)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(abd, cdd)));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(
                                    _mm512_castps_pd(abcd), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

constexpr bool FETCH_AGAIN = true;
constexpr int columns(int MT) { return MT <= 2 ? 8 : 4; }  // 32 registers

struct BF16 {
    using scalar = uint16_t;
    using vector = __m512bh;
    static constexpr int width = 32;
    TARGET static vector load(const scalar* p) { return (vector)_mm512_loadu_si512(p); }
    TARGET static vector load_tail(const scalar* p, int n) {
        return (vector)_mm512_maskz_loadu_epi16((1u << n) - 1, p);
    }
    TARGET static Lanes dot(Lanes acc, vector a, vector b) { return _mm512_dpbf16_ps(acc, a, b); }
    TARGET static Lanes widen(const scalar* p) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    TARGET static void store(scalar* p, Lanes v) {
        _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v));
    }
    TARGET static __m128 widen4(const scalar* p) {
        __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p));
        return _mm_castsi128_ps(_mm_slli_epi32(wide, 16));
    }
    TARGET static void store4(scalar* p, __m128 v) {
        _mm_storel_epi64((__m128i*)p, (__m128i)_mm_cvtneps_pbh(v));
    }
    static float widen1(scalar v) { return widen_bf16(v); }
    static scalar narrow1(float f) { return narrow_bf16(f); }
};

struct FP32 {
    using scalar = float;
    using vector = __m512;
    static constexpr int width = 16;
    TARGET static vector load(const scalar* p) { return _mm512_loadu_ps(p); }
    TARGET static vector load_tail(const scalar* p, int n) {
        return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
    }
    TARGET static Lanes dot(Lanes acc, vector a, vector b) { return _mm512_fmadd_ps(a, b, acc); }
    TARGET static Lanes widen(const scalar* p) { return _mm512_loadu_ps(p); }
    TARGET static void store(scalar* p, Lanes v) { _mm512_storeu_ps(p, v); }
    TARGET static __m128 widen4(const scalar* p) { return _mm_loadu_ps(p); }
    TARGET static void store4(scalar* p, __m128 v) { _mm_storeu_ps(p, v); }
    static float widen1(scalar v) { return v; }
    static scalar narrow1(float f) { return f; }
};

template <class F>
TARGET inline void for_rows(int64_t s, int64_t end, F tile) {
    for (; s + 6 <= end; s += 6) tile.template operator()<6>(s);
    if (s + 4 <= end) tile.template operator()<4>(s), s += 4;
    if (s + 2 <= end) tile.template operator()<2>(s), s += 2;
    if (s < end) tile.template operator()<1>(s);
}

#include "grouped_mm.inc"
#undef TARGET
}  // namespace avx512

namespace avx2 {
#define TARGET __attribute__((target("avx2,fma")))

using Lanes = __m256;
constexpr int LANES = 8;
TARGET inline Lanes zero() { return _mm256_setzero_ps(); }
TARGET inline Lanes broadcast(float v) { return _mm256_set1_ps(v); }
TARGET inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }

// The sums of four registers, side by side.
TARGET inline __m128 sum4(Lanes a, Lanes b, Lanes c, Lanes d) {
    __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
}
TARGET inline float sum(Lanes v) { return _mm_cvtss_f32(sum4(v, v, v, v)); }

constexpr bool FETCH_AGAIN = false;  // rows of 4 KB share their places in L1: 1.6 times as fast without
constexpr int columns(int MT) { return MT == 1 ? 8 : 4; }  // 16 registers

// fp32 bits whose upper half is the value rounded to bf16, to nearest even; NaN stays NaN.
TARGET inline __m256i round_bf16(__m256 v) {
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(up, quiet, is_nan);
}

struct BF16 {
    using scalar = uint16_t;
    struct vector {
        __m256 even, odd;
    };
    static constexpr int width = 16;
    TARGET static vector split(__m256i v) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
                _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xffff0000)))};
    }
    TARGET static vector load(const scalar* p) {
        return split(_mm256_loadu_si256((const __m256i*)p));
    }
    TARGET static vector load_tail(const scalar* p, int n) {
        alignas(32) scalar padded[width] = {};
        __builtin_memcpy(padded, p, n * sizeof(scalar));
        return load(padded);
    }
    TARGET static Lanes dot(Lanes acc, vector a, vector b) {
        return _mm256_fmadd_ps(a.odd, b.odd, _mm256_fmadd_ps(a.even, b.even, acc));
    }
    TARGET static Lanes widen(const scalar* p) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    TARGET static void store(scalar* p, Lanes v) {
        __m256i upper = _mm256_srli_epi32(round_bf16(v), 16);
        _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(upper),
                                                       _mm256_extracti128_si256(upper, 1)));
    }
    TARGET static __m128 widen4(const scalar* p) {
        __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)p));
        return _mm_castsi128_ps(_mm_slli_epi32(wide, 16));
    }
    TARGET static void store4(scalar* p, __m128 v) {
        __m128i upper =
            _mm256_castsi256_si128(_mm256_srli_epi32(round_bf16(_mm256_castps128_ps256(v)), 16));
        _mm_storel_epi64((__m128i*)p, _mm_packus_epi32(upper, upper));
    }
    static float widen1(scalar v) { return widen_bf16(v); }
    static scalar narrow1(float f) { return narrow_bf16(f); }
};

struct FP32 {
    using scalar = float;
    using vector = __m256;
    static constexpr int width = 8;
    TARGET static vector load(const scalar* p) { return _mm256_loadu_ps(p); }
    TARGET static vector load_tail(const scalar* p, int n) {
        alignas(32) scalar padded[width] = {};
        __builtin_memcpy(padded, p, n * sizeof(scalar));
        return load(padded);
    }
    TARGET static Lanes dot(Lanes acc, vector a, vector b) { return _mm256_fmadd_ps(a, b, acc); }
    TARGET static Lanes widen(const scalar* p) { return _mm256_loadu_ps(p); }
    TARGET static void store(scalar* p, Lanes v) { _mm256_storeu_ps(p, v); }
    TARGET static __m128 widen4(const scalar* p) { return _mm_loadu_ps(p); }
    TARGET static void store4(scalar* p, __m128 v) { _mm_storeu_ps(p, v); }
    static float widen1(scalar v) { return v; }
    static scalar narrow1(float f) { return f; }
};

template <class F>
TARGET inline void for_rows(int64_t s, int64_t end, F tile) {
    for (; s + 3 <= end; s += 3) tile.template operator()<3>(s);
    if (s + 2 <= end) tile.template operator()<2>(s), s += 2;
    if (s < end) tile.template operator()<1>(s);
}

#include "grouped_mm.inc"
#undef TARGET
}  // namespace avx2

int allowed = 512;  // the widest AVX to use

bool has_avx512() {
    return allowed >= 512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

}  // namespace

extern "C" {

// Which AVX is in use from now on, no wider than `most`: 512, 2 or, where this processor has neither, 0.
int moe_ops_cpu_avx(int most) {
    allowed = most;
    if (has_avx512()) return 512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 2 : 0;
}

// 1 if this processor multiplies tiles of bf16 (AMX), which library GEMMs then do.
int moe_ops_cpu_amx() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1);
}

#define ENTRIES(suffix, TYPE, scalar)                                                             \
    void moe_ops_cpu_grouped_mm_##suffix(                                                         \
        const void* x, int64_t x_stride, const void* weight, int64_t expert_stride,               \
        int64_t w_stride, const void* bias, void* out, int64_t out_stride, const int32_t* ends,   \
        int64_t S, int64_t E, int64_t N, int64_t K, int threads) {                                \
        const auto run = has_avx512() ? avx512::grouped_mm<avx512::TYPE>                          \
                                      : avx2::grouped_mm<avx2::TYPE>;                             \
        run((const scalar*)x, x_stride, (const scalar*)weight, expert_stride, w_stride,           \
            (const scalar*)bias, (scalar*)out, out_stride, ends, S, E, N, K, threads);            \
    }                                                                                             \
    void moe_ops_cpu_sum_##suffix(const void* y, const float* weights, const int64_t* rows,   \
                                      const int64_t* blocks, void* out, int wide, int64_t M,      \
                                      int64_t top_k, int64_t K, int threads) {                    \
        const auto run =                                                                          \
            has_avx512() ? avx512::combine<avx512::TYPE> : avx2::combine<avx2::TYPE>;             \
        run((const scalar*)y, weights, rows, blocks, out, wide, M, top_k, K, threads);            \
    }

ENTRIES(bf16, BF16, uint16_t)
ENTRIES(fp32, FP32, float)
}
#else
extern "C" int moe_ops_cpu_avx(int) { return 0; }
#endif

// The hash of the sources that this was compiled from (moe_ops/csrc/build.py), "" where nobody said.
#ifndef MOE_OPS_CPU_SOURCES
#define MOE_OPS_CPU_SOURCES ""
#endif
extern "C" const char* moe_ops_cpu_sources() { return MOE_OPS_CPU_SOURCES; }
