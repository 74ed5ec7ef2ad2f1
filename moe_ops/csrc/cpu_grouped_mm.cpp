// Grouped matrix product for few rows per expert on a CPU: out[s, :] = x[s, :] @ weight[e].T (+ bias[e]).
//
// Library GEMMs repack the weight on every call, which costs more than the product while an expert has
// few rows. Here every weight row is read once, straight from memory, as the vectors a dot product needs:
//   rows of one expert x rows of its weight, in register tiles of MT x NT accumulators along K.
//
// Plain C interface, no torch headers: the Python side passes pointers (ctypes), so one build serves
// every torch version. Needs AVX-512 (and AVX512_BF16 for bf16); the caller falls back without it.
//
// Legend: E experts, N rows and K columns of a weight, S rows of x sorted by expert.
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>

namespace {

struct BF16 {
    using scalar = uint16_t;
    static constexpr int width = 32;  // elements a vector
    using vector = __m512bh;
    static __attribute__((target("avx512f,avx512bw,avx512bf16"))) vector load(const scalar* p) {
        return (vector)_mm512_loadu_si512(p);
    }
    static __attribute__((target("avx512f,avx512bw,avx512bf16"))) vector load_tail(
        const scalar* p, int n) {
        return (vector)_mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1, p);
    }
    static __attribute__((target("avx512f,avx512bw,avx512bf16"))) __m512 dot(
        __m512 acc, vector a, vector b) {
        return _mm512_dpbf16_ps(acc, a, b);
    }
    static float widen(scalar v) {
        uint32_t bits = uint32_t(v) << 16;
        float f;
        __builtin_memcpy(&f, &bits, 4);
        return f;
    }
    static scalar narrow(float f) {  // round to nearest even
        uint32_t bits;
        __builtin_memcpy(&bits, &f, 4);
        if ((bits & 0x7fffffff) > 0x7f800000) return scalar((bits >> 16) | 0x40);  // NaN stays NaN
        return scalar((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

struct FP32 {
    using scalar = float;
    static constexpr int width = 16;
    using vector = __m512;
    static __attribute__((target("avx512f,avx512bw,avx512bf16"))) vector load(const scalar* p) {
        return _mm512_loadu_ps(p);
    }
    static __attribute__((target("avx512f,avx512bw,avx512bf16"))) vector load_tail(
        const scalar* p, int n) {
        return _mm512_maskz_loadu_ps(__mmask16(n >= 16 ? 0xffff : (1u << n) - 1), p);
    }
    static __attribute__((target("avx512f,avx512bw,avx512bf16"))) __m512 dot(
        __m512 acc, vector a, vector b) {
        return _mm512_fmadd_ps(a, b, acc);
    }
    static float widen(scalar v) { return v; }
    static scalar narrow(float f) { return f; }
};

// One MT x NT tile: MT rows of x against NT rows of the weight over all of K.
template <class T, int MT, int NT>
__attribute__((target("avx512f,avx512bw,avx512bf16"))) inline void tile(
    const typename T::scalar* x, int64_t x_stride, const typename T::scalar* w, int64_t w_stride,
    const typename T::scalar* bias, typename T::scalar* out, int64_t out_stride, int64_t K) {
    __m512 acc[MT][NT];
    for (int i = 0; i < MT; ++i)
        for (int j = 0; j < NT; ++j) acc[i][j] = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + T::width <= K; k += T::width) {
        typename T::vector b[NT];
        for (int j = 0; j < NT; ++j) {
            b[j] = T::load(w + j * w_stride + k);
            // the next tile's row at the same column: 5 to 20 % over no prefetch from memory
            _mm_prefetch((const char*)(w + (j + NT) * w_stride + k), _MM_HINT_T0);
        }
        for (int i = 0; i < MT; ++i) {
            typename T::vector a = T::load(x + i * x_stride + k);
            for (int j = 0; j < NT; ++j) acc[i][j] = T::dot(acc[i][j], a, b[j]);
        }
    }
    if (k < K) {
        int n = int(K - k);
        for (int i = 0; i < MT; ++i) {
            typename T::vector a = T::load_tail(x + i * x_stride + k, n);
            for (int j = 0; j < NT; ++j)
                acc[i][j] = T::dot(acc[i][j], a, T::load_tail(w + j * w_stride + k, n));
        }
    }
    for (int i = 0; i < MT; ++i)
        for (int j = 0; j < NT; ++j) {
            float v = _mm512_reduce_add_ps(acc[i][j]);
            if (bias) v += T::widen(bias[j]);
            out[i * out_stride + j] = T::narrow(v);
        }
}

template <class T, int MT>
__attribute__((target("avx512f,avx512bw,avx512bf16"))) inline void stripe(
    const typename T::scalar* x, int64_t x_stride, const typename T::scalar* w, int64_t w_stride,
    const typename T::scalar* bias, typename T::scalar* out, int64_t out_stride, int64_t n,
    int64_t K) {
    int64_t j = 0;
    constexpr int NT = MT == 1 ? 8 : MT == 2 ? 8 : 4;
    for (; j + NT <= n; j += NT)
        tile<T, MT, NT>(x, x_stride, w + j * w_stride, w_stride, bias ? bias + j : nullptr,
                        out + j, out_stride, K);
    for (; j < n; ++j)
        tile<T, MT, 1>(x, x_stride, w + j * w_stride, w_stride, bias ? bias + j : nullptr,
                       out + j, out_stride, K);
}

template <class T>
void grouped_mm(const typename T::scalar* x, int64_t x_stride, const typename T::scalar* weight,
                int64_t expert_stride, int64_t w_stride, const typename T::scalar* bias,
                typename T::scalar* out, int64_t out_stride, const int32_t* ends, int64_t E,
                int64_t N, int64_t K, int threads) {
    constexpr int64_t ROWS = 64;  // weight rows a task: small enough to balance, 128 KB at K = 1024, bf16
    const int64_t stripes = (N + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads)
    for (int64_t task = 0; task < E * stripes; ++task) {
        const int64_t e = task / stripes, first = (task % stripes) * ROWS;
        const int64_t start = e ? ends[e - 1] : 0, end = ends[e];
        if (start >= end) continue;
        const int64_t n = N - first < ROWS ? N - first : ROWS;
        const auto* w = weight + e * expert_stride + first * w_stride;
        const auto* b = bias ? bias + e * N + first : nullptr;
        int64_t s = start;
        for (; s + 4 <= end; s += 4)
            stripe<T, 4>(x + s * x_stride, x_stride, w, w_stride, b, out + s * out_stride + first,
                         out_stride, n, K);
        if (s + 2 <= end) {
            stripe<T, 2>(x + s * x_stride, x_stride, w, w_stride, b, out + s * out_stride + first,
                         out_stride, n, K);
            s += 2;
        }
        if (s < end)
            stripe<T, 1>(x + s * x_stride, x_stride, w, w_stride, b, out + s * out_stride + first,
                         out_stride, n, K);
    }
}

}  // namespace

extern "C" {

// 1 if this processor runs the kernel.
int moe_ops_cpu_supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512bf16");
}

void moe_ops_cpu_grouped_mm_bf16(const void* x, int64_t x_stride, const void* weight,
                                 int64_t expert_stride, int64_t w_stride, const void* bias,
                                 void* out, int64_t out_stride, const int32_t* ends, int64_t E,
                                 int64_t N, int64_t K, int threads) {
    grouped_mm<BF16>((const uint16_t*)x, x_stride, (const uint16_t*)weight, expert_stride,
                     w_stride, (const uint16_t*)bias, (uint16_t*)out, out_stride, ends, E, N, K,
                     threads);
}

void moe_ops_cpu_grouped_mm_fp32(const void* x, int64_t x_stride, const void* weight,
                                 int64_t expert_stride, int64_t w_stride, const void* bias,
                                 void* out, int64_t out_stride, const int32_t* ends, int64_t E,
                                 int64_t N, int64_t K, int threads) {
    grouped_mm<FP32>((const float*)x, x_stride, (const float*)weight, expert_stride, w_stride,
                     (const float*)bias, (float*)out, out_stride, ends, E, N, K, threads);
}
}
#else
extern "C" int moe_ops_cpu_supported() { return 0; }
#endif
