// Whole expert layers of weights of 4, 8 and 16 bits on a CPU: every weight is read once for up to eight rows,
// in the layout it is stored in, and decoded in registers: with AVX-512 and AVX2 to whole numbers of 8 or 16 bits
// beside tokens as such, or to bf16 and fp32; with NEON to fp32. With AMX, from a few rows an expert on, 32 rows of a
// weight at a time become bf16, once for all rows of x, and int8 is multiplied as it lies. No copy of a weight is made.
//
// One parallel region: tokens are put into the order in which weights are decoded | product with w13 and
// activation | the same of h | product with w2 and weighted sum. Thread t of T takes the same share of rows of
// every expert in use, so that bytes are even whatever the routing is; after the second product it owns its
// columns of the sum, whose order is that of experts. How weights are decoded and multiplied is in
// experts_avx512.inc, experts_amx.inc, experts_int16.inc (AVX2) and experts_fp32.inc (AVX2 and NEON).
//
// Plain C interface without torch's headers, as in grouped_mm.cpp: one build serves every torch.
//
// Legend: M tokens, K hidden size, I intermediate size, E experts, P = M * top_k pairs, N = 2 I.
#include <cstdint>
#if defined(__x86_64__) || defined(__aarch64__)
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 12)
#define MOE_OPS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#else
#include <arm_neon.h>
#endif
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>

#include "bf16.h"
#include "processor.h"

namespace {

constexpr int64_t BLOCK = 128;     // columns of a step
#ifndef MOE_OPS_MOST_ROWS  // fewer compile faster
#define MOE_OPS_MOST_ROWS 8
#endif
constexpr int MOST_ROWS = MOE_OPS_MOST_ROWS;  // rows of x that one decoded weight row meets
constexpr int TILE = 4;            // weight rows of a tile
constexpr int TOKENS_OF_BLOCK = 16, ROWS_OF_PANEL = 32;  // of tiles
constexpr int64_t RESIDENT = 384 << 10;  // bytes of rows of x that stay in a core's cache
// bytes of rows that are prefetched in streams; more where that is not a row for each
constexpr int64_t WINDOW = 16 << 10;

// A weight of all experts: struct Matrix of backends/torch/layer.py. Strides in bytes.
struct Matrix {
    const uint8_t *data, *scale, *zero_point;  // zero_point of 8 bits, or minima of the scales' type, or null
    const float* global;                       // of each expert, or of each of its rows, or null
    const uint16_t* super;                     // fp16 of 256 columns, of scales or of these and minima in turn, or null
    const void* bias;                          // (E, rows), or null
    int64_t expert, row, scale_expert, scale_row, zero_expert, zero_row, bias_expert, global_expert, global_row;
    int64_t super_expert, super_row;
    int32_t groups;         // of a step of 128 columns, where a scale is a group's: 1, 2, 4 or 8
    int32_t scale_type;     // 0 bf16, 1 fp16, 2 fp32, 3 int8, which numbers of `super` multiply
    int32_t minima;         // whether zero_point holds them
    int32_t decoder;        // of _DECODERS of backends/torch/layer.py
    int32_t bias_type;
    int32_t together;       // columns of a unit of planes, of 5 and 6 bits: 32, 64 or 128
    int16_t levels[16];     // what codes of 4 bits stand for, in units of `unit`
    float unit;
};

struct Experts {  // struct Experts of backends/torch/layer.py, which leaves 0 what is in Call
    const uint16_t* x;       // (M, K) bf16, rows at x_row elements
    const void* ids;         // (M, top_k) int64, or int32
    const void* weights;     // (M, top_k) bf16, fp16 or fp32
    const int64_t* map;      // (mapped,) of ids to experts here or -1, or null
    void* out;               // (M, K) bf16, or fp32
    const float* by_expert;  // (3, E) alpha, beta and limit of each expert, or null
    int64_t x_row, weights_row, ids_row, M, top_k, E, mapped, K, I;  // rows: strides in elements
    Matrix w13, w2;
    int32_t activation, interleaved, threads, powers;  // powers: of two, scales of activations
    int32_t batch_invariant;  // the bits of a token's row do not depend on other rows
    int32_t wide;             // `out` is fp32
    int32_t ids_bytes, weights_type;
    float alpha, beta, limit;
};

// What calls of one form differ in: struct Call of backends/torch/layer.py.
struct Call {  // the tensors in the order of ExpertsArgs; null where there are none, or no scheme here has them
    struct Scales {
        const uint8_t *scale, *zero_point;
        const float* global;
        const uint16_t* super;
        const void* activation;
    };
    void* out;
    const uint16_t* x;
    const uint8_t *w13, *w2;
    const void *weights, *ids;
    Scales scales13, scales2;
    const void *x_scale, *x_global;
    const float* by_expert;
    const void *bias13, *bias2;
    const int64_t* map;
    int64_t x_row, weights_row, ids_row, M, top_k, threads;
};

Experts filled(Experts form, const Call& call) {
    auto take = [](Matrix& m, const uint8_t* data, const Call::Scales& of, const void* bias) {
        m.data = data, m.scale = of.scale, m.zero_point = of.zero_point, m.global = of.global, m.super = of.super;
        m.bias = bias;
    };
    form.x = call.x, form.ids = call.ids, form.weights = call.weights, form.map = call.map, form.out = call.out;
    form.x_row = call.x_row, form.weights_row = call.weights_row, form.ids_row = call.ids_row;
    form.M = call.M, form.top_k = call.top_k, form.threads = int32_t(call.threads), form.by_expert = call.by_expert;
    take(form.w13, call.w13, call.scales13, call.bias13);
    take(form.w2, call.w2, call.scales2, call.bias2);
    return form;
}

struct Function {  // the activation of one expert
    int32_t activation, interleaved;
    float alpha, beta, limit;
};

Function function_of(const Experts& a, int64_t e) {
    const float* of = a.by_expert;
    if (!of) return {a.activation, a.interleaved, a.alpha, a.beta, a.limit};
    return {a.activation, a.interleaved, of[e], of[a.E + e], of[2 * a.E + e]};
}

struct Weight {  // of one expert
    const uint8_t *data, *scale, *zero_point;
    const float* global;
    const uint16_t* super;
};

Weight of_expert(const Matrix& m, int64_t e) {
    return {m.data + e * m.expert, m.scale + e * m.scale_expert,
            m.zero_point ? m.zero_point + e * m.zero_expert : nullptr,
            m.global ? (const float*)((const uint8_t*)m.global + e * m.global_expert) : nullptr,
            m.super ? (const uint16_t*)((const uint8_t*)m.super + e * m.super_expert) : nullptr};
}

// The global scale of row n.
inline float global_of(const Matrix& m, const Weight& w, int64_t n) {
    return *(const float*)((const uint8_t*)w.global + n * m.global_row);
}

// Numbers that groups have beside the codes of a row: scales, or minima.
struct OfRow {
    const uint8_t* at;
    const uint16_t* super;
    int type, stride;  // of `at`: Matrix.scale_type; of `super`

    int64_t bytes(int64_t groups) const { return groups * (type == 2 ? 4 : type == 3 ? 1 : 2); }
    void move(int64_t groups, int64_t steps) {
        if (at) at += bytes(groups);
        if (super) super += steps / 2 * stride;
    }
};

inline OfRow scales_of(const Matrix& m, const Weight& w, int64_t n) {
    const auto* super = (const uint16_t*)((const uint8_t*)w.super + n * m.super_row);
    return {w.scale + n * m.scale_row, super, m.scale_type, 1 + m.minima};
}

inline OfRow minima_of(const Matrix& m, const Weight& w, int64_t n) {
    OfRow of = scales_of(m, w, n);
    of.at = m.minima ? w.zero_point + n * m.zero_row : nullptr;
    if (of.super) of.super += 1;
    return of;
}

inline const uint8_t* zero_points_of(const Matrix& m, const Weight& w, int64_t n) {
    return w.zero_point && !m.minima ? w.zero_point + n * m.zero_row : nullptr;
}

// Of tokens as whole numbers of 16 bits, where the largest magnitude among some has these bits, NaN's being the
// largest.
inline float scale_of_whole(uint32_t bits) {
    float most;
    memcpy(&most, &bits, 4);
    const float scale = most / 32639;  // 127 * 256 + 127: two bytes with a sign hold it
    return scale < 0x1p-126f ? 0x1p-126f : scale;  // whose inverse is finite
}

// Rows that are prefetched beside those of a tile, one beside each: the first, or null, and the bytes between two.
struct Ahead {
    const uint8_t* from;
    int64_t row;
};

// `all` in parts of at most `most`, and as alike as may be: that many in each but the last.
inline int64_t even(int64_t all, int64_t most) {
    const int64_t parts = std::max<int64_t>((all + most - 1) / most, 1);
    return (all + parts - 1) / parts;
}

enum Tokens { WIDE, GROUPS, ROWS };  // how activations are quantized, and whose scales are: WIDE is not

#if defined(__x86_64__)
__attribute__((target("f16c"))) inline float widen_fp16(uint16_t bits) { return _cvtsh_ss(bits); }
#else
inline float widen_fp16(uint16_t bits) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0); }
#endif

// Number i of bf16 (type 0), fp16 (1) or fp32 (2).
inline float number(const void* p, int64_t i, int type) {
    if (type == 2) return ((const float*)p)[i];
    const uint16_t bits = ((const uint16_t*)p)[i];
    return type == 1 ? widen_fp16(bits) : widen_bf16(bits);
}

// Of pair p.
inline int64_t id_of(const Experts& a, int64_t p) {
    const int64_t i = p / a.top_k * a.ids_row + p % a.top_k;
    return a.ids_bytes == 8 ? ((const int64_t*)a.ids)[i] : ((const int32_t*)a.ids)[i];
}

inline float weight_of(const Experts& a, int64_t p) {
    return number(a.weights, p / a.top_k * a.weights_row + p % a.top_k, a.weights_type);
}

// Of group g, of which a step of 128 columns has `groups`.
inline float number(const OfRow& of, int64_t g, int groups) {
    if (of.type < 3) return number(of.at, g, of.type);
    return int8_t(of.at[g]) * widen_fp16(of.super[g / (2 * groups) * of.stride]);
}

// Where the codes of a step of 128 columns of 5 or 6 bits are, which lie in planes (ElementFormat.high_bits): of the 64
// bytes of low bits, in the order of columns, and of the bytes of high bits of the same columns, and where in these
// the bits begin. The low bits of 32 columns follow each other.
template <int BITS>
struct Planes {
    static constexpr int HIGH = BITS - 4, BYTES = BITS * BLOCK / 8;
    int run;  // bytes of high bits of a unit
    alignas(64) uint8_t low[64], high[64], shift[64];

    explicit Planes(int unit) : run(unit * HIGH / 8) {
        for (int i = 0; i < 64; ++i) {
            const int first = 2 * i / unit * (unit / 2 + run), within = i % (unit / 2);
            low[i] = uint8_t(first + within), high[i] = uint8_t(first + unit / 2 + within % run);
            shift[i] = uint8_t(within / run * 2 * HIGH);
        }
    }
    static const Planes& of(const Matrix& m) {
        static const Planes all[] = {Planes(32), Planes(64), Planes(128)};
        return all[m.together / 64];
    }
};

#define INLINE TARGET __attribute__((always_inline)) inline
#define INLINED TARGET __attribute__((always_inline))  // a lambda
#if defined(__x86_64__)
namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,f16c")))
#include "experts_avx512.inc"
#undef TARGET
}  // namespace avx512
#ifdef MOE_OPS_AMX
namespace amx {
#define TARGET                                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,f16c," \
                          "avx512fp16,amx-tile,amx-bf16,amx-int8")))
#include "experts_amx.inc"
#undef TARGET
}  // namespace amx
#endif
namespace avx2 {
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES avx2
#include "lanes_avx2.inc"
#include "experts_fp32.inc"
#include "experts_int16.inc"
#undef LANES
#undef TARGET
}  // namespace avx2
#else
namespace neon {
#define TARGET  // every processor has it
#define LANES neon
#include "lanes_neon.inc"
#include "experts_fp32.inc"
#include "integers_fp32.inc"
#undef LANES
#undef TARGET
}  // namespace neon
#endif

template <class D, int MT = 1>
void any_tile(int rows, const uint8_t* const* x, const Matrix& m, const Weight& w, int64_t n, int64_t cols,
              float* y, int64_t y_stride, Ahead ahead) {
    if (rows == MT)
        D::Isa::template tile<D, MT>(x, m, w, n, cols, y, y_stride, ahead);
    else if constexpr (MT < MOST_ROWS)
        any_tile<D, MT + 1>(rows, x, m, w, n, cols, y, y_stride, ahead);
}

// The tile of MOST_ROWS for fewer rows too, of which the last one is repeated: the number of rows of a tile
// decides in how many registers it adds.
template <class D>
void whole_tile(int rows, const uint8_t* const* x, const Matrix& m, const Weight& w, int64_t n, int64_t cols,
                float* y, int64_t y_stride, Ahead ahead) {
    const uint8_t* all[MOST_ROWS];
    float sums[MOST_ROWS * TILE];
    for (int i = 0; i < MOST_ROWS; ++i) all[i] = x[std::min(i, rows - 1)];
    D::Isa::template tile<D, MOST_ROWS>(all, m, w, n, cols, sums, TILE, ahead);
    for (int i = 0; i < rows; ++i) std::copy_n(sums + i * TILE, TILE, y + i * y_stride);
}

// Weight rows n0 to n1 times `count` rows of x; the rows at `next` are multiplied after them. While others are
// multiplied rows are prefetched: those PREFETCH tiles ahead, or those of a window, beside each tile of the window
// before it one row of every stream.
template <class D>
void panel(int64_t count, const uint8_t* const* x, const Matrix& m, const Weight& w, int64_t n0, int64_t n1,
           int64_t cols, float* y, int64_t y_stride, const uint8_t* next, bool batch_invariant) {
    constexpr int64_t STREAMS = TILE;  // one beside each row of a tile
    const int64_t parts = (count + MOST_ROWS - 1) / MOST_ROWS;
    const bool windows = D::Isa::WINDOWS && is_intel();
    const int64_t most = windows ? std::max<int64_t>(WINDOW / m.row / TILE, STREAMS) : 1;
    const int64_t size = even((n1 - n0) / TILE, most) * TILE;
    for (int64_t begin = n0; begin < n1; begin += size) {
        const int64_t end = std::min(begin + size, n1), there = windows ? end : end + (D::PREFETCH - 1) * TILE;
        const uint8_t* from = there < n1 ? w.data + there * m.row : next + (there - n1) * m.row;
        const int64_t of_stream = (there < n1 ? std::min(size, n1 - there) : size) / STREAMS;  // rows
        for (int64_t n = begin; n < end; n += TILE) {
            const int64_t number = (n - begin) / TILE;
            for (int64_t p = 0; p < parts; ++p) {
                const bool fetch = D::PREFETCH && !p && number < of_stream;
                const Ahead ahead{fetch ? from + number * m.row : nullptr, of_stream * m.row};
                const int64_t first = count * p / parts, last = count * (p + 1) / parts;
                const auto tile = [&](auto of) {
                    of(int(last - first), x + first, m, w, n, cols, y + first * y_stride + (n - n0), y_stride, ahead);
                };
                if (batch_invariant && !D::Isa::template ALIKE<D>)
                    tile(whole_tile<D>);
                else
                    tile(any_tile<D>);
            }
        }
    }
}

int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr int BLOCKS = 8;     // of experts: EXPERT_BLOCKS of meta/blocks.py
constexpr int TREE_ROWS = 4;  // rows of sums that the tree over them needs

// Of token m the n columns of y, whose rows are at `place` of its pairs, or nowhere: terms of one block of experts are
// added in order, then the blocks [first, first + count) by a binary tree. `sums` are TREE_ROWS of n. False: there are
// no terms, and nothing is written. They would be +0, which changes no bit of the other sums, as none is -0.
template <class Of>
bool add_blocks(const Experts& a, int64_t m, const int64_t* place, const float* y, int64_t n, int first, int count,
                float* sums) {
    if (count > 1) {
        const int half = count / 2;
        if (!add_blocks<Of>(a, m, place, y, n, first, half, sums))
            return add_blocks<Of>(a, m, place, y, n, first + half, half, sums);
        if (add_blocks<Of>(a, m, place, y, n, first + half, half, sums + n))
            for (int64_t i = 0; i < n; ++i) sums[i] += sums[n + i];
        return true;
    }
    const int64_t ids = a.map ? a.mapped : a.E, blocks = ids % BLOCKS ? 1 : BLOCKS;
    bool any = false;
    for (int64_t p = m * a.top_k; p < (m + 1) * a.top_k; ++p) {
        if (place[p] < 0 || id_of(a, p) * blocks / ids != first) continue;
        if (!any) std::fill_n(sums, n, 0.f);
        any = true;
        Of::add(sums, y + place[p] * n, nullptr, weight_of(a, p), n);
    }
    for (int64_t i = 0; i < n && any; ++i) sums[i] += 0.f;
    return any;
}

// Whether rows are packed and multiplied in blocks of TOKENS_OF_BLOCK of one expert (AMX), or by themselves.
template <class D>
constexpr bool TILED = requires { D::Isa::begin(); };

template <class D>
constexpr int64_t FROM_ROWS = 0;
template <class D>
    requires requires { D::FROM_ROWS; }
constexpr int64_t FROM_ROWS<D> = D::FROM_ROWS;

// Rows of activations, one or those of a block, and what they are packed with.
template <class From>
struct Unpacked {
    const From* const* rows;
    int count;
    int64_t n;
    bool powers;
    int groups;      // whose sums are needed, or 0
    uint16_t* wide;  // room for numbers of 16 bits
};

// The rows of x of one expert, packed: where they are, or their blocks.
struct Packed {
    const uint8_t* const* rows;
    const uint8_t* blocks;
    int64_t count, bytes;  // rows; of one, or of a block
};

// Rows n0 to n1 of a weight; those at `next` are multiplied after them.
struct Rows {
    const Matrix& m;
    const Weight& w;
    int64_t n0, n1, cols;
    const uint8_t* next;
};

// What a decoder does in a layer, whose other weight may have another one.
struct Product {
    bool tiled;         // rows are packed in blocks
    bool bf16;          // h is rounded, which what is quantized is not before
    bool wide;          // packing needs room for numbers of 16 bits
    int64_t from_rows;  // an expert from which it is faster than others
    int64_t (*bytes)(int64_t n);  // of a packed row of n columns, or of a block
    void (*take_bf16)(const Unpacked<uint16_t>&, uint8_t*);
    void (*take_fp32)(const Unpacked<float>&, uint8_t*);
    void (*multiply)(const Packed&, const Rows&, float* y, int64_t y_stride, bool batch_invariant, uint8_t* room);
};

template <class D, class From>
void take(const Unpacked<From>& of, uint8_t* out) {
    if constexpr (TILED<D>)
        D::Isa::template take<D>(of.rows, of.count, of.n, of.powers, of.groups, of.wide, out);
    else
        D::Isa::template take<D>(of.rows[0], of.n, of.powers, of.wide, out);
}

template <class D>
int64_t packed_bytes(int64_t n) {
    if constexpr (TILED<D>) return typename D::Isa::template Block<D>(n).bytes;
    else {
        const int64_t steps = (n + BLOCK - 1) / BLOCK;
        return steps * D::PACKED + (D::TOKENS == ROWS ? 64 : D::WHOLE ? rounded(steps * 8) : 0);
    }
}

template <class D>
void multiply(const Packed& x, const Rows& of, float* y, int64_t y_stride, bool batch_invariant, uint8_t* room) {
    if constexpr (TILED<D>) {
        D::Isa::template panel<D>(x.count, x.blocks, typename D::Isa::template Block<D>(of.cols), of.m, of.w, of.n0, of.n1,
                                  of.cols, y, y_stride, of.next, room);
    } else {
        // rows of x at a time: weights are read again for the next ones
        const int64_t several = std::max<int64_t>(MOST_ROWS, RESIDENT / x.bytes / MOST_ROWS * MOST_ROWS);
        for (int64_t c = 0; c < x.count; c += several)
            panel<D>(std::min(several, x.count - c), x.rows + c, of.m, of.w, of.n0, of.n1, of.cols, y + c * y_stride,
                     y_stride, of.next, batch_invariant);
    }
}

template <class D>
constexpr Product product() {
    constexpr bool OF_BF16 = D::ROUNDS && D::TOKENS == WIDE;
    Product of{TILED<D>,        OF_BF16, TILED<D> || D::TOKENS != WIDE || D::WHOLE, FROM_ROWS<D>, packed_bytes<D>,
               take<D, uint16_t>, nullptr, multiply<D>};
    if constexpr (!OF_BF16) of.take_fp32 = take<D, float>;
    return of;
}
template <class D>
constexpr Product PRODUCT = product<D>();

// The decoders of w13 and w2.
struct Products {
    const Product &w13, &w2;
};

// Where everything lies in the scratch memory.
struct Layout {
    int64_t x_row, h_row, share13, share2, width;  // bytes of packed rows or blocks; rows of a thread's share
    int64_t x, h, packed_h, sums, local, wide, wide_bytes, rows_x, rows_h, place, pair, start, hit, bytes;

    Layout(const Experts& a, const Products& of) {
        const int64_t P = a.M * a.top_k, blocks = P / TOKENS_OF_BLOCK + std::min(P, a.E);
        x_row = of.w13.bytes(a.K);
        h_row = of.w2.bytes(a.I);
        const int64_t packed_x = of.w13.tiled ? blocks : a.M, packed_pairs = of.w2.tiled ? blocks : P;
        int64_t most = std::max(a.K, a.I);
        if (of.w13.tiled || of.w2.tiled)  // two steps at least
            most = std::max((most + BLOCK - 1) / BLOCK, int64_t{2}) * BLOCK * ROWS_OF_PANEL;
        const int64_t unit = a.interleaved ? 2 : TILE;
        share13 = ((a.I + unit - 1) / unit + a.threads - 1) / a.threads * unit;
        share2 = ((a.K + TILE - 1) / TILE + a.threads - 1) / a.threads * TILE;
        width = std::max(2 * share13, share2);
        bytes = 0;
        auto take = [&](int64_t size) { const int64_t at = bytes; bytes += rounded(size); return at; };
        x = take(packed_x * x_row);
        h = take(P * a.I * (of.w2.bf16 ? 2 : 4));
        packed_h = take(packed_pairs * h_row);
        sums = take(a.batch_invariant ? a.threads * TREE_ROWS * share2 * 4 : a.M * a.K * 4);
        local = take(a.threads * rounded((P + 1) * width * 4));  // and a row of biases
        wide_bytes = of.w13.wide || of.w2.wide ? rounded(most * 2) : 0;
        wide = take(a.threads * wide_bytes);
        rows_x = take(P * 8);
        rows_h = take(P * 8);
        place = take(P * 8);
        pair = take(P * 8);
        start = take((a.E + 1) * 8);
        hit = take(a.E * 8);
    }
};

// Pairs by expert, first come first: start (E + 1), pair (P), and the experts in use.
int64_t sort(const Experts& a, int64_t* start, int64_t* pair, int64_t* hit) {
    const int64_t P = a.M * a.top_k;
    auto expert = [&](int64_t p) -> int64_t {
        int64_t e = id_of(a, p);
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

// Packs the blocks of all experts in use, thread t of T every Tth: row(s) is sorted row s.
template <class From, class Row>
void pack_blocks(void (*take)(const Unpacked<From>&, uint8_t*), Unpacked<From> of, const int64_t* start,
                 const int64_t* hit, int64_t hits, int64_t t, int64_t T, uint8_t* out, int64_t bytes, Row row) {
    const From* rows[TOKENS_OF_BLOCK];
    of.rows = rows;
    for (int64_t k = 0, block = 0; k < hits; ++k)
        for (int64_t s = start[hit[k]], end = start[hit[k] + 1]; s < end; s += TOKENS_OF_BLOCK, ++block) {
            if (block % T != t) continue;
            of.count = int(std::min<int64_t>(TOKENS_OF_BLOCK, end - s));
            for (int i = 0; i < of.count; ++i) rows[i] = row(s + i);
            take(of, out + block * bytes);
        }
}

// The same of rows by themselves.
template <class From, class Row>
void pack_rows(void (*take)(const Unpacked<From>&, uint8_t*), Unpacked<From> of, int64_t rows, int64_t t, int64_t T,
               uint8_t* out, int64_t bytes, Row row) {
    of.count = 1;
    for (int64_t s = t; s < rows; s += T) {
        const From* one = row(s);
        of.rows = &one;
        take(of, out + s * bytes);
    }
}

// Groups of a step whose sums of tokens zero points need.
int sums_of(const Matrix& m) { return m.zero_point ? m.groups : 0; }

// Where the threads of a call wait for each other: soon in the system's hands, so that on a busy machine the slowest one
// gets its turn. That of libgomp spins for milliseconds, and asks the system to wake threads whether or not one sleeps.
class Barrier {
    alignas(64) std::atomic<int64_t> arrived = 0;
    alignas(64) std::atomic<int64_t> turn = 0;
    static constexpr int SPINS = 1 << 12;  // 80 to 200 us on x86-64 that is not old; less where `pause` is short

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#else
        asm volatile("yield");
#endif
    }

public:
    void wait(int64_t threads) {
        const int64_t now = turn.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            turn.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn.load(std::memory_order_acquire) == now; ++spins)
            if (spins < SPINS)
                pause();
            else
                sched_yield();
    }
};

template <class Of>
void layer(const Experts& a, const Products& decoders, uint8_t* scratch) {
    const Layout at(a, decoders);
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
    auto* place = (int64_t*)(scratch + at.place);
    std::fill_n(place, a.M * a.top_k, -1);
    for (int64_t s = 0; s < pairs; ++s) place[pair[s]] = s;
    auto write = [&](int64_t m, int64_t k0, int64_t n, const float* from) {
        if (a.wide)
            std::copy_n(from, n, (float*)a.out + m * a.K + k0);
        else
            Of::narrow(from, (uint16_t*)a.out + m * a.K + k0, n);
    };
    auto* h16 = (uint16_t*)(scratch + at.h);  // one of these
    auto* h32 = (float*)(scratch + at.h);
    Barrier barrier;
#pragma omp parallel num_threads(a.threads)
    {
        const int64_t t = omp_get_thread_num(), T = omp_get_num_threads();
        float* y = (float*)(scratch + at.local + t * rounded((a.M * a.top_k + 1) * at.width * 4));
        float* bias = y + a.M * a.top_k * at.width;
        auto* wide = (uint16_t*)(scratch + at.wide + t * at.wide_bytes);
        // rows of one expert from sorted row `first` on, whose blocks begin with number `block`
        auto packed = [&](int64_t from, const uint8_t** rows, int64_t bytes, int64_t first, int64_t block,
                          int64_t count) {
            return Packed{rows + first, scratch + from + block * bytes, count, bytes};
        };
        constexpr bool TILES = requires { Of::begin(); };
        if constexpr (TILES) Of::begin();
        const Unpacked<uint16_t> tokens{nullptr, 0, a.K, a.powers != 0, sums_of(a.w13), wide};
        if (decoders.w13.tiled)
            pack_blocks(decoders.w13.take_bf16, tokens, start, hit, hits, t, T, scratch + at.x, at.x_row,
                        [&](int64_t s) { return a.x + pair[s] / a.top_k * a.x_row; });
        else
            pack_rows(decoders.w13.take_bf16, tokens, a.M, t, T, scratch + at.x, at.x_row,
                      [&](int64_t m) { return a.x + m * a.x_row; });
        barrier.wait(T);
        // fewer threads than asked for share what is left in turns
        for (int64_t part = t; part < a.threads; part += T) {
            const int64_t i0 = std::min(part * at.share13, a.I), i1 = std::min(i0 + at.share13, a.I), n = i1 - i0;
            for (int64_t k = 0, block = 0; k < hits && n > 0; ++k) {
                const int64_t e = hit[k], first = start[e], count = start[e + 1] - first;
                const Weight w = of_expert(a.w13, e), after = of_expert(a.w13, hit[std::min(k + 1, hits - 1)]);
                const uint8_t* next = after.data + (a.interleaved ? 2 * i0 : i0) * a.w13.row;
                auto rows = [&](int64_t n0, int64_t n1, float* to, const uint8_t* then) {
                    decoders.w13.multiply(packed(at.x, rows_x, at.x_row, first, block, count),
                                          {a.w13, w, n0, n1, a.K, then}, to, 2 * n, a.batch_invariant, (uint8_t*)wide);
                };
                if (a.interleaved) {
                    rows(2 * i0, 2 * i1, y, next);
                } else {
                    rows(i0, i1, y, w.data + (a.I + i0) * a.w13.row);
                    rows(a.I + i0, a.I + i1, y + n, next);
                }
                block += (count + TOKENS_OF_BLOCK - 1) / TOKENS_OF_BLOCK;
                if (a.w13.bias)
                    for (int64_t i = 0; i < 2 * n; ++i) {
                        const int64_t of = a.interleaved ? 2 * i0 + i : i < n ? i0 + i : a.I + i0 + i - n;
                        bias[i] = number(a.w13.bias, e * a.w13.bias_expert + of, a.w13.bias_type);
                    }
                const Function function = function_of(a, e);
                auto activate = [&](auto* h) {
                    for (int64_t c = 0; c < count; ++c)
                        Of::activate(function, y + c * 2 * n, a.w13.bias ? bias : nullptr, i0, i1, h + (first + c) * a.I);
                };
                if constexpr (Of::ROUNDS) {
                    if (decoders.w2.bf16) {
                        activate(h16);
                        continue;
                    }
                }
                activate(h32);
            }
        }
        barrier.wait(T);
        auto pack_h = [&](auto take, const auto* h) {
            using From = std::remove_cvref_t<decltype(*h)>;
            const Unpacked<From> of{nullptr, 0, a.I, a.powers != 0, sums_of(a.w2), wide};
            auto row = [&](int64_t s) { return h + s * a.I; };
            if (decoders.w2.tiled)
                pack_blocks(take, of, start, hit, hits, t, T, scratch + at.packed_h, at.h_row, row);
            else
                pack_rows(take, of, pairs, t, T, scratch + at.packed_h, at.h_row, row);
        };
        if (decoders.w2.bf16)
            pack_h(decoders.w2.take_bf16, h16);
        else
            pack_h(decoders.w2.take_fp32, h32);
        barrier.wait(T);
        for (int64_t part = t; part < a.threads; part += T) {
            const int64_t k0 = std::min(part * at.share2, a.K), n = std::min(k0 + at.share2, a.K) - k0;
            for (int64_t m = 0; m < a.M && n > 0 && !a.batch_invariant; ++m) std::fill_n(sums + m * a.K + k0, n, 0.f);
            for (int64_t k = 0, block = 0; k < hits && n > 0; ++k) {
                const int64_t e = hit[k], first = start[e], count = start[e + 1] - first;
                const Weight w = of_expert(a.w2, e), after = of_expert(a.w2, hit[std::min(k + 1, hits - 1)]);
                float* to = a.batch_invariant ? y + first * n : y;  // all rows, or those of one expert
                decoders.w2.multiply(packed(at.packed_h, rows_h, at.h_row, first, block, count),
                                     {a.w2, w, k0, k0 + n, a.I, after.data + k0 * a.w2.row}, to, n, a.batch_invariant,
                                     (uint8_t*)wide);
                block += (count + TOKENS_OF_BLOCK - 1) / TOKENS_OF_BLOCK;
                if (a.w2.bias)
                    for (int64_t i = 0; i < n; ++i)
                        bias[i] = number(a.w2.bias, e * a.w2.bias_expert + k0 + i, a.w2.bias_type);
                for (int64_t c = 0; c < count; ++c) {
                    const int64_t p = pair[first + c];
                    if (!a.batch_invariant)
                        Of::add(sums + p / a.top_k * a.K + k0, to + c * n, a.w2.bias ? bias : nullptr, weight_of(a, p),
                                n);
                    else if (a.w2.bias)
                        for (int64_t i = 0; i < n; ++i) to[c * n + i] += bias[i];
                }
            }
            float* of_token = sums + t * TREE_ROWS * at.share2;
            for (int64_t m = 0; m < a.M && n > 0; ++m) {
                if (!a.batch_invariant)
                    write(m, k0, n, sums + m * a.K + k0);
                else {
                    if (!add_blocks<Of>(a, m, place, y, n, 0, BLOCKS, of_token)) std::fill_n(of_token, n, 0.f);
                    write(m, k0, n, of_token);
                }
            }
        }
        if constexpr (TILES) Of::end();
    }
}

// in the order of _DECODERS of backends/torch/layer.py
#define PRODUCTS(isa, of_integers)                                                                               \
    {PRODUCT<isa::Bf16>, PRODUCT<of_integers::Int4>, PRODUCT<of_integers::Int4Any>, PRODUCT<of_integers::Int4Minima>,   \
     PRODUCT<of_integers::Mxfp4>, PRODUCT<of_integers::Nvfp4>, PRODUCT<of_integers::Levels>, PRODUCT<of_integers::Int5>, \
     PRODUCT<of_integers::Int6>, PRODUCT<of_integers::Int8>, PRODUCT<of_integers::Int8Any>,                           \
     PRODUCT<of_integers::Int8Minima>, PRODUCT<isa::Fp8>, PRODUCT<isa::Fp8Blocks>, PRODUCT<of_integers::Int8Tokens>,    \
     PRODUCT<isa::Fp8Tokens>, PRODUCT<isa::Fp8BlocksTokens>}

int in_use = 0;  // instructions, as `widest` names them

#if defined(__x86_64__)
const Product OF_AVX512[] = PRODUCTS(avx512, avx512), OF_AVX2[] = PRODUCTS(avx2, avx2::whole);
const Product OF_AVX512_AS_BF16[] = PRODUCTS(avx512, avx512::as_bf16);
const Product OF_AVX512_ALIKE[] = PRODUCTS(avx512::alike, avx512);
int as_bf16 = -1;  // whether 4 bits become bf16 with AVX-512; -1: where that is faster

#ifdef MOE_OPS_AMX
const Product OF_AMX[] = PRODUCTS(amx, amx);

// Whether this processor has AMX, beside AVX-512 in fp16, and Linux lets this process use it from now on.
bool has_tiles() {
    static const bool has = [] {
        unsigned a, b, c, d;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
        const bool bf16 = d >> 22 & 1, fp16 = d >> 23 & 1, tile = d >> 24 & 1, int8 = d >> 25 & 1;
        return bf16 && fp16 && tile && int8 && !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18);
    }();
    return has;
}
#else
const Product* const OF_AMX = OF_AVX512;
bool has_tiles() { return false; }
#endif

// The widest instructions here that are no wider than `most`: 1024 (AMX beside AVX-512), 512 (AVX-512), 2 (AVX2), or 0
// where there are none.
int widest(int most) {
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                      __builtin_cpu_supports("avx512vnni");
    if (most >= 512 && wide) return most >= 1024 && has_tiles() ? 1024 : 512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? 2 : 0;
}

constexpr int64_t MOST_COLUMNS = 1 << 16;  // of bytes whose products have sums of 32 bits

Products products_of(const Experts& a, const Product* of) { return {of[a.w13.decoder], of[a.w2.decoder]}; }

// Whether experts have so many rows on average, those of other processes included, that these decoders are faster.
bool many_rows(const Experts& a, const Product* of) {
    const Products decoders = products_of(a, of);
    const int64_t from_rows =
        std::max(decoders.w13.from_rows + a.w13.groups, decoders.w2.from_rows + a.w2.groups);
    return !a.batch_invariant && a.M * a.top_k >= from_rows * std::max(a.E, a.mapped);
}

bool of_tiles(const Experts& a) {
    // a tile has 32 columns
    return std::max(a.K, a.I) <= MOST_COLUMNS && std::max(a.w13.groups, a.w2.groups) <= 4 && many_rows(a, OF_AMX);
}

void run(const Experts& a, uint8_t* scratch) {
    if (in_use < 512) return layer<avx2::Isa>(a, products_of(a, OF_AVX2), scratch);
#ifdef MOE_OPS_AMX
    if (in_use == 1024 && of_tiles(a)) return layer<amx::Isa>(a, products_of(a, OF_AMX), scratch);
#endif
    const bool of_words = as_bf16 < 0 ? !is_intel() && many_rows(a, OF_AVX512_AS_BF16) : as_bf16;
    const Product* of = a.batch_invariant ? OF_AVX512_ALIKE : of_words ? OF_AVX512_AS_BF16 : OF_AVX512;
    layer<avx512::Isa>(a, products_of(a, of), scratch);
}

int64_t scratch_bytes(const Experts& a) {
    int64_t most = 0;
    for (const Product* of : {OF_AVX512, OF_AVX512_AS_BF16, OF_AVX2})
        most = std::max(most, Layout(a, products_of(a, of)).bytes);
    return of_tiles(a) ? std::max(most, Layout(a, products_of(a, OF_AMX)).bytes) : most;
}
#else
const Product products[] = PRODUCTS(neon, neon);

int widest(int) { return 128; }

Products products_of(const Experts& a) { return {products[a.w13.decoder], products[a.w2.decoder]}; }

void run(const Experts& a, uint8_t* scratch) { layer<neon::Isa>(a, products_of(a), scratch); }

int64_t scratch_bytes(const Experts& a) { return Layout(a, products_of(a)).bytes; }
#endif

}  // namespace

extern "C" {

// Chooses the instructions in use from now on, no wider than `most` on x86-64, and says which they are: 1024 (AMX for
// several rows an expert, else AVX-512), 512 (AVX-512), 2 (AVX2) or, where this processor has none of them, 0; 128 (NEON).
int moe_ops_cpu_experts_avx(int most) { return in_use = widest(most); }

// Whether weights of 4 bits become bf16 with AVX-512 from now on: 1, 0, or -1, where a call is faster so.
void moe_ops_cpu_experts_as_bf16(int as) {
#if defined(__x86_64__)
    as_bf16 = as;
#endif
}

// Which instructions are in use, as of the last choice.
int moe_ops_cpu_experts_in_use() { return in_use; }

int64_t moe_ops_cpu_experts_struct_bytes() { return sizeof(Experts) + sizeof(Call); }

// `form`: what calls have in common, 0 where they differ. Bytes of scratch memory that a call needs, at a
// multiple of 64, whichever instructions are in use: callers remember it.
int64_t moe_ops_cpu_experts_scratch(const Experts* form, const Call* call) {
    return scratch_bytes(filled(*form, *call));
}

void moe_ops_cpu_experts_run(const Experts* form, const Call* call, void* scratch) {
    run(filled(*form, *call), (uint8_t*)scratch);
}
}
#else
extern "C" int moe_ops_cpu_experts_avx(int) { return 0; }
extern "C" void moe_ops_cpu_experts_as_bf16(int) {}
extern "C" int moe_ops_cpu_experts_in_use() { return 0; }
#endif
