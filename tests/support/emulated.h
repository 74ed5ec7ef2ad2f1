// Intrinsics of AVX-512, AVX512-FP16 and AMX for processors without them: SIMDe's, and here those that it lacks or has
// otherwise. tests/support/emulated.py includes it in place of immintrin.h.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

template <class To, class From>
inline To cast(const From& from) {
    To to;
    static_assert(sizeof to == sizeof from);
    memcpy(&to, &from, sizeof to);
    return to;
}

template <class T, class V>
using Numbers = std::array<T, sizeof(V) / sizeof(T)>;

// Number i of the result is of(number i), as far as both have numbers.
template <class To, class From, class R, class V, class Of>
inline R map(V in, Of of) {
    const auto from = cast<Numbers<From, V>>(in);
    Numbers<To, R> to{};
    for (size_t i = 0; i < std::min(from.size(), to.size()); ++i) to[i] = of(from[i]);
    return cast<R>(to);
}

template <class R, class T>
inline R load(uint64_t mask, const void* p) {
    Numbers<T, R> to{};
    for (size_t i = 0; i < to.size(); ++i)
        if (mask >> i & 1) memcpy(&to[i], (const char*)p + i * sizeof(T), sizeof(T));
    return cast<R>(to);
}

template <class T, class V>
inline void store(void* p, uint64_t mask, V v) {
    const auto from = cast<Numbers<T, V>>(v);
    for (size_t i = 0; i < from.size(); ++i)
        if (mask >> i & 1) memcpy((char*)p + i * sizeof(T), &from[i], sizeof(T));
}

template <class T, class V>
inline T sum(V v) {
    T all = 0;
    for (T x : cast<Numbers<T, V>>(v)) all += x;
    return all;
}

inline uint32_t largest(__m512i v) {
    const auto all = cast<Numbers<uint32_t, __m512i>>(v);
    return *std::max_element(all.begin(), all.end());
}

inline uint16_t narrow(float f) {  // denormal numbers are zero
    uint32_t bits = cast<uint32_t>(f);
    if (f != f) return uint16_t(bits >> 16 | 64);
    if (!(bits & 0x7F800000)) bits &= 0x80000000;
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float widen(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    return cast<float>(bits & 0x7F800000 ? bits : bits & 0x80000000);
}

inline __m512i narrow_two(__m512 high, __m512 low) {
    const std::array<__m256i, 2> both = {map<uint16_t, float, __m256i>(low, narrow),
                                         map<uint16_t, float, __m256i>(high, narrow)};
    return cast<__m512i>(both);
}

template <class T, class V, class Of>
inline V zip(V a, V b, Of of) {
    auto x = cast<Numbers<T, V>>(a);
    const auto y = cast<Numbers<T, V>>(b);
    for (size_t i = 0; i < x.size(); ++i) x[i] = of(x[i], y[i]);
    return cast<V>(x);
}

inline __m512i madd(__m512i a, __m512i b) {
    const auto x = cast<Numbers<int16_t, __m512i>>(a), y = cast<Numbers<int16_t, __m512i>>(b);
    Numbers<int32_t, __m512i> to;
    for (size_t i = 0; i < to.size(); ++i) to[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return cast<__m512i>(to);
}

inline __m512i shuffle(__m512i v, int order) {
    const auto from = cast<Numbers<int32_t, __m512i>>(v);
    auto to = from;
    for (size_t i = 0; i < to.size(); ++i) to[i] = from[(i & 12) + (order >> 2 * (i & 3) & 3)];
    return cast<__m512i>(to);
}

// Eight tiles of 16 rows of 64 bytes; to use one that is not configured ends the program.
using Tile = std::array<std::array<uint8_t, 64>, 16>;
struct Tiles {
    std::array<Tile, 8> all;
    bool configured = false;
};
inline Tiles& of_thread() {
    static thread_local Tiles tiles;
    return tiles;
}
inline Tile& tile(int number) {
    if (!of_thread().configured) __builtin_trap();
    return of_thread().all[number];
}
inline void configure(const void* config) {
    of_thread().configured = *(const uint8_t*)config == 1;
    for (Tile& t : of_thread().all) t = {};
}
inline void load_tile(int number, const void* p, int64_t stride) {
    for (auto& row : tile(number)) memcpy(&row, p, sizeof row), p = (const char*)p + stride;
}
inline void store_tile(int number, void* p, int64_t stride) {
    for (const auto& row : tile(number)) memcpy(p, &row, sizeof row), p = (char*)p + stride;
}
inline void multiply(int c, int a, int b) {
    using Row = std::array<float, 16>;
    auto sums = cast<std::array<Row, 16>>(tile(c));
    const auto left = cast<std::array<std::array<uint16_t, 32>, 16>>(tile(a));
    const auto right = cast<std::array<std::array<uint16_t, 32>, 16>>(tile(b));
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n)
                sums[m][n] += widen(left[m][2 * k]) * widen(right[k][2 * n]) +
                              widen(left[m][2 * k + 1]) * widen(right[k][2 * n + 1]);
    for (Row& row : sums)
        for (float& v : row)
            if (std::fabs(v) < 0x1p-126f) v = 0;
    tile(c) = cast<Tile>(sums);
}

inline void multiply_bytes(int c, int a, int b) {  // both with signs
    using Row = std::array<int32_t, 16>;
    auto sums = cast<std::array<Row, 16>>(tile(c));
    const auto left = cast<std::array<std::array<int8_t, 64>, 16>>(tile(a));
    const auto right = cast<std::array<std::array<int8_t, 64>, 16>>(tile(b));
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 64; ++k)
            for (int n = 0; n < 16; ++n) sums[m][n] += left[m][k] * right[k / 4][4 * n + k % 4];
    tile(c) = cast<Tile>(sums);
}

}  // namespace emulated

#define __m512h __m512i
#undef _mm256_maskz_loadu_epi8
#undef _mm512_cvtepi8_epi16
#undef _mm512_cvtepu8_epi16
#undef _mm512_abs_ps
#undef _mm512_broadcast_i32x4
#undef _mm512_cvtph_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_madd_epi16
#undef _mm512_maskz_loadu_epi8
#undef _mm512_roundscale_ps
#undef _mm512_scalef_ps
#undef _mm512_shuffle_epi32
#undef _mm_maskz_loadu_epi16
#undef _mm_maskz_loadu_epi8
#undef _mm_maskz_loadu_ps
#undef _mm256_maskz_loadu_ps
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_release
#undef _tile_stored
#undef _tile_zero
#define _mm_maskz_loadu_epi16(k, p) emulated::load<__m128i, int16_t>(k, p)
#define _mm_maskz_loadu_epi8(k, p) emulated::load<__m128i, int8_t>(k, p)
#define _mm_maskz_loadu_ps(k, p) emulated::load<__m128, float>(k, p)
#define _mm256_maskz_loadu_ps(k, p) emulated::load<__m256, float>(k, p)
#define _mm256_maskz_loadu_epi8(k, p) emulated::load<__m256i, int8_t>(k, p)
#define _mm256_maskz_loadu_epi16(k, p) emulated::load<__m256i, int16_t>(k, p)
#define _mm256_mask_storeu_epi16(p, k, v) emulated::store<int16_t>(p, k, v)
#define _mm512_maskz_loadu_epi8(k, p) emulated::load<__m512i, int8_t>(k, p)
#define _mm512_maskz_loadu_ps(k, p) emulated::load<__m512, float>(k, p)
#define _mm512_mask_storeu_ps(p, k, v) emulated::store<float>(p, k, v)
// SIMDe's leaves -0 as it is
#define _mm512_abs_ps(v) emulated::map<float, float, __m512>(v, [](float x) { return std::fabs(x); })
#define _mm512_broadcast_i32x4(v) emulated::cast<__m512i>(std::array<__m128i, 4>{v, v, v, v})
#define _mm512_extractf32x8_ps(v, half) emulated::cast<std::array<__m256, 2>>(v)[half]
#define _mm512_cvtepi32_epi16(v) emulated::map<int16_t, int32_t, __m256i>(v, [](int32_t x) { return int16_t(x); })
#define _mm512_cvtepi32_epi8(v) emulated::map<int8_t, int32_t, __m128i>(v, [](int32_t x) { return int8_t(x); })
#define _mm512_cvtepi32_ps(v) emulated::map<float, int32_t, __m512>(v, [](int32_t x) { return float(x); })
#define _mm512_cvtepi8_epi32(v) emulated::map<int32_t, int8_t, __m512i>(v, [](int8_t x) { return int32_t(x); })
#define _mm512_cvtepu8_epi32(v) emulated::map<int32_t, uint8_t, __m512i>(v, [](uint8_t x) { return int32_t(x); })
#define _mm512_cvtepi8_epi16(v) emulated::map<int16_t, int8_t, __m512i>(v, [](int8_t x) { return int16_t(x); })
#define _mm512_cvtepu8_epi16(v) emulated::map<int16_t, uint8_t, __m512i>(v, [](uint8_t x) { return int16_t(x); })
#define _mm512_cvtepi16_epi32(v) emulated::map<int32_t, int16_t, __m512i>(v, [](int16_t x) { return int32_t(x); })
#define _mm512_cvtepu16_epi32(v) emulated::map<int32_t, uint16_t, __m512i>(v, [](uint16_t x) { return int32_t(x); })
#define _mm512_cvtph_ps(v) emulated::map<float, uint16_t, __m512>(v, [](uint16_t x) { return _cvtsh_ss(x); })
#define _mm512_cvtneps_pbh(v) emulated::map<uint16_t, float, __m256i>(v, emulated::narrow)
#define _mm512_cvtne2ps_pbh(high, low) emulated::narrow_two(high, low)
#define _mm512_cvtps_epi32(v)                   \
    emulated::map<int32_t, float, __m512i>(v, [](float x) { \
        return std::fabs(x) < 0x1p31f ? int32_t(std::nearbyint(x)) : INT32_MIN; })
#define _mm512_cvtss_f32(v) emulated::cast<emulated::Numbers<float, __m512>>(v)[0]
#define _mm512_roundscale_ps(v, k) emulated::map<float, float, __m512>(v, [](float x) { return std::nearbyint(x); })
#define _mm512_scalef_ps(a, b) \
    emulated::zip<float>(a, b, [](float x, float y) { return y != y ? y : std::ldexp(x, int(std::floor(y))); })
// of finite numbers above 0
#define _mm512_getexp_ps(v) emulated::map<float, float, __m512>(v, [](float x) { return std::logb(x); })
#define _mm512_getmant_ps(v, interval, sign) \
    emulated::map<float, float, __m512>(v, [](float x) { return x / std::exp2(std::logb(x)); })
#define _mm512_mul_ph(a, b)                                             \
    emulated::zip<uint16_t>((__m512i)(a), (__m512i)(b), [](uint16_t x, uint16_t y) { \
        return uint16_t(_cvtss_sh(_cvtsh_ss(x) * _cvtsh_ss(y), 0)); })
#define _mm512_madd_epi16(a, b) emulated::madd(a, b)
#define _mm512_shuffle_epi32(v, order) emulated::shuffle(v, int(order))
#define _mm512_reduce_add_ps(v) emulated::sum<float>(v)
#define _mm512_reduce_max_epu32(v) emulated::largest(v)
#define _tile_loadconfig(p) emulated::configure(p)
#define _tile_release() (emulated::of_thread().configured = false)
#define _tile_zero(number) (void)(emulated::tile(number) = {})
#define _tile_loadd(number, p, stride) emulated::load_tile(number, p, stride)
#define _tile_stored(number, p, stride) emulated::store_tile(number, p, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
#define _tile_dpbssd(c, a, b) emulated::multiply_bytes(c, a, b)
