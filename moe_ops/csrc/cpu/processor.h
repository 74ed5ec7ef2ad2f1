// What processors of x86-64 differ in beside their instructions.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Whether this processor reads on by itself in several pages at once, so that streams in each are faster than one, and
// multiplies bytes faster than bf16 with AVX-512. Elsewhere neither was seen.
static inline bool is_intel() {
#if defined(__x86_64__)
    static const bool is = __builtin_cpu_is("intel");
    return is;
#else
    return false;
#endif
}

#if defined(__x86_64__)
// Asks for a line, into the first cache or only the second. With AVX-512 two cores of an EPYC (Zen 4) multiplied rows
// of 8 and 16 bits up to 1.7 times as fast with the second: what comes from memory leaves the first one's miss buffers
// to what is multiplied. Rows of 4 bits, and rows that AVX2 decodes, were as fast or faster with the first. Always inline:
// in a function of its own g++ sees no effect, and leaves out all calls.
__attribute__((always_inline)) static inline void prefetch(const void* line, bool first) {
    if (first)
        _mm_prefetch((const char*)line, _MM_HINT_T0);
    else
        _mm_prefetch((const char*)line, _MM_HINT_T1);
}
#endif
