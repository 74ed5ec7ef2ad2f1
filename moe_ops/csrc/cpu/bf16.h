// bf16 numbers, one at a time.
#pragma once

#include <cstdint>

inline float widen_bf16(uint16_t v) {
    uint32_t bits = uint32_t(v) << 16;
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t narrow_bf16(float f) {  // round to nearest even
    uint32_t bits;
    __builtin_memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);  // NaN stays NaN
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
