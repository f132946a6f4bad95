// Vectors of the instruction set this file is compiled for: GCC's vector extensions, so that one
// source serves all of them, and intrinsics only for the product of bfloat16 pairs.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace {  // every instruction set has its own copy

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kKeys = 4;  // of a tile of dot products; 4 heads x 4 keys fill half of the registers
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kKeys = 2;
#else
constexpr int kLanes = 4;
#if defined(__aarch64__)
constexpr int kKeys = 4;
#else
constexpr int kKeys = 2;
#endif
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVector __attribute__((vector_size(kLanes * 4)));
typedef float LooseVector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline Vector load(const float* p) { return *reinterpret_cast<const LooseVector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<LooseVector*>(p) = v; }
inline Vector fill(float x) { return x - Vector{}; }
inline Vector select(IntVector mask, Vector yes, Vector no) { return mask ? yes : no; }

template <int W, size_t... L>
inline Vector fold_pair(Vector x, Vector y, std::index_sequence<L...>) {
#if defined(__clang__)
    return __builtin_shufflevector(x, y, ((L & W) ? kLanes + L : L)...) +
           __builtin_shufflevector(x, y, ((L & W) ? kLanes + (L ^ W) : (L ^ W))...);
#else  // GCC has the same builtin only since version 12
    return __builtin_shuffle(x, y, IntVector{int32_t((L & W) ? kLanes + L : L)...}) +
           __builtin_shuffle(x, y, IntVector{int32_t((L & W) ? kLanes + (L ^ W) : (L ^ W))...});
#endif
}

// Lane i of the result is the sum of v[i]'s lanes; v is spent.
template <int W = kLanes / 2>
inline Vector sums(Vector* v) {
    for (int i = 0; i < W; i++)
        v[i] = fold_pair<W>(v[i], v[i + W], std::make_index_sequence<kLanes>());
    if constexpr (W > 1)
        return sums<W / 2>(v);
    else
        return v[0];
}

inline float sum(Vector v) {
    float total = 0;
    for (int i = 0; i < kLanes; i++) total += v[i];
    return total;
}

inline float largest(Vector v) {
    float best = v[0];
    for (int i = 1; i < kLanes; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// Lanes j, j + 1, ... that are below n.
inline IntVector below(int64_t j, int64_t n) {
    IntVector lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    return lane < int32_t(n - j);
}

inline Vector relu(Vector x) { return select(x < Vector{}, Vector{}, x); }  // NaN stays NaN

// exp within 1 ulp or so; NaN stays NaN, very negative numbers give 0, very large ones inf.
inline Vector exp(Vector x) {
    const Vector lowest = fill(-104.0f), highest = fill(89.0f);
    Vector y = select(x > lowest, x, lowest);
    y = select(y < highest, y, highest);
    // 2^n with n = round(y / ln 2), by the trick of adding 1.5 * 2^23
    const Vector shift = fill(12582912.0f);
    const Vector n = (y * 1.44269504088896341f + shift) - shift;
    Vector r = y - n * 0.693359375f;
    r = r + n * 2.12194440054690583e-4f;
    Vector p = fill(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // in two factors, for n below -126 and above 127
    const IntVector whole = __builtin_convertvector(n, IntVector);
    const IntVector half = whole >> 1;
    const IntVector first = (half + 127) << 23, second = (whole - half + 127) << 23;
    Vector first_power, second_power;
    memcpy(&first_power, &first, sizeof first);
    memcpy(&second_power, &second, sizeof second);
    p = p * first_power * second_power;
    p = select(x < lowest, Vector{}, p);
    return select(x == x, p, x);
}

// ------------------------------------------------------------------------------------- bfloat16

struct BFloat16 {
    uint16_t bits;
};

// Rounds to the element type, to the nearest, ties to even.
inline void put(float* p, Vector v) { store(p, v); }

#if defined(__AVX512BF16__)

constexpr bool kMultipliesBFloat16 = true;
typedef __m512i Pairs;  // kLanes pairs of bfloat16

inline void put(BFloat16* p, Vector v) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &narrow, sizeof narrow);
}
inline Pairs load_pairs(const BFloat16* p) { return _mm512_loadu_si512(p); }
inline Pairs fill_pair(const BFloat16* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
}
inline Vector add_products(Vector sum, Pairs a, Pairs b) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// Pairs of (a[i], b[i]); the order of the columns is undone by unshuffle.
inline void zip(Pairs a, Pairs b, Pairs* low, Pairs* high) {
    *low = _mm512_unpacklo_epi16(a, b);
    *high = _mm512_unpackhi_epi16(a, b);
}
inline void unshuffle(Vector* low, Vector* high) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const __m512 l = (__m512)*low, h = (__m512)*high;
    *low = (Vector)_mm512_permutex2var_ps(l, first, h);
    *high = (Vector)_mm512_permutex2var_ps(l, second, h);
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

constexpr bool kMultipliesBFloat16 = true;
typedef uint16x8_t Pairs;

inline void put(BFloat16* p, Vector v) {
    const bfloat16x4_t narrow = vcvt_bf16_f32((float32x4_t)v);
    memcpy(p, &narrow, sizeof narrow);
}
inline Pairs load_pairs(const BFloat16* p) {
    return vld1q_u16(reinterpret_cast<const uint16_t*>(p));
}
inline Pairs fill_pair(const BFloat16* p) {
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    return vreinterpretq_u16_u32(vdupq_n_u32(pair));
}
inline Vector add_products(Vector sum, Pairs a, Pairs b) {
    return (Vector)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_u16(a),
                               vreinterpretq_bf16_u16(b));
}
inline void zip(Pairs a, Pairs b, Pairs* low, Pairs* high) {
    *low = vzip1q_u16(a, b);
    *high = vzip2q_u16(a, b);
}
inline void unshuffle(Vector*, Vector*) {}

#else

constexpr bool kMultipliesBFloat16 = false;

#endif

}  // namespace
