// The products that all kernels are made of, between the heads of one query and rows of keys that
// lie anywhere in memory. Heads come padded to kHeads, with zeros; lists of rows padded to
// kRowPadding, with a row of zeros; row lengths are multiples of DSA_DIM_MULTIPLE.
#pragma once

#include "vector.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTile = 8;  // x 2 vectors: half of 32 registers
#else
constexpr int kTile = 4;
#endif
constexpr int kDotHeads = 4;
constexpr int kHeads = 8;
constexpr int kRowPadding = 16;  // a multiple of kKeys, kLanes and 2
constexpr int kPanelKeys = 2 * kLanes;

// One step of a sum of products for an element type: how it is loaded and multiplied.
template <class E>
struct Step;

template <>
struct Step<float> {
    static constexpr int kElements = kLanes;  // of a row that one vector holds
    static constexpr int kDepth = 1;          // products that one lane sums up in a step
    typedef Vector Value;
    static Value load(const float* p) { return ::load(p); }
    static Value broadcast(const float* p) { return fill(*p); }
    static Vector add(Vector sum, Value a, Value b) { return sum + a * b; }
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <>
struct Step<BFloat16> {
    static constexpr int kElements = 2 * kLanes;
    static constexpr int kDepth = 2;
    typedef Pairs Value;
    static Value load(const BFloat16* p) { return load_pairs(p); }
    static Value broadcast(const BFloat16* p) { return fill_pair(p); }
    static Vector add(Vector sum, Value a, Value b) { return add_products(sum, a, b); }
};
#endif

// s[h][j] = q[h] . rows[j]
template <class E>
__attribute__((noinline)) void dot_rows(const E* q, int64_t ldq, int64_t heads, const E* const* rows, int64_t n, int64_t dim,
              float* s, int64_t lds) {
    typedef Step<E> S;
    for (int64_t j = 0; j < n; j += kKeys) {
        const E* row[kKeys];
        for (int k = 0; k < kKeys; k++) row[k] = rows[j + k];
        const E* const* const next = rows + (j + kKeys < n ? j + kKeys : j);
        for (int64_t h = 0; h < heads; h += kDotHeads) {
            Vector dot[kDotHeads * kKeys] = {};
            for (int64_t d = 0; d < dim; d += S::kElements) {
                if (h == 0)
                    for (int k = 0; k < kKeys; k++) __builtin_prefetch(next[k] + d);
                typename S::Value b[kKeys];
#pragma GCC unroll 4
                for (int k = 0; k < kKeys; k++) b[k] = S::load(row[k] + d);
#pragma GCC unroll 4
                for (int i = 0; i < kDotHeads; i++) {
                    const typename S::Value a = S::load(q + (h + i) * ldq + d);
#pragma GCC unroll 4
                    for (int k = 0; k < kKeys; k++)
                        dot[i * kKeys + k] = S::add(dot[i * kKeys + k], a, b[k]);
                }
            }
            float result[kDotHeads * kKeys];
            for (int v = 0; v < kDotHeads * kKeys; v += kLanes) store(result + v, sums(dot + v));
            for (int i = 0; i < kDotHeads; i++)
                memcpy(s + (h + i) * lds + j, result + i * kKeys, kKeys * sizeof(float));
        }
    }
}

// out[h][d] = sum over j of p[h][j] * rows[j][d]
__attribute__((noinline)) void mix_rows(const float* p, int64_t ldp, int64_t heads, const float* const* rows,
                     int64_t n, int64_t dim, float* out, int64_t ldo) {
    for (int64_t d = 0; d < dim; d += 2 * kLanes)
        for (int64_t h = 0; h < heads; h += kTile) {
            Vector sum[kTile][2] = {};
            const float* weight = p + h * ldp;
            for (int64_t j = 0; j < n; j++) {
                const Vector left = load(rows[j] + d), right = load(rows[j] + d + kLanes);
#pragma GCC unroll 8
                for (int i = 0; i < kTile; i++) {
                    const Vector x = fill(weight[i * ldp + j]);
                    sum[i][0] += x * left;
                    sum[i][1] += x * right;
                }
            }
            for (int i = 0; i < kTile; i++)
                for (int v = 0; v < 2; v++) store(out + (h + i) * ldo + d + v * kLanes, sum[i][v]);
        }
}

// Weights [heads, columns] and what they weigh [heads, dim]; of bfloat16, pairs of heads:
// weights [heads / 2, columns, 2], x [heads / 2, dim, 2].
template <class E>
struct Product {
    const E *weights, *x;
    int64_t dim;
};

// Some columns of the weights side by side: read in place they would each take a line of the L1
// cache for every head.
template <int N, class E>
inline void gather_columns(const E* weights, int64_t lda, int64_t heads, const int32_t* at, E* to) {
    constexpr int kDepth = Step<E>::kDepth;
    for (int64_t h = 0; h < heads; h += kDepth)
        for (int k = 0; k < N; k++)
            memcpy(to + h * N + k * kDepth, weights + h * lda + at[k] * kDepth, kDepth * sizeof(E));
}

template <int N, class E>
inline void add_heads(Vector (*sum)[2], const E* columns, const E* x, int64_t dim, int64_t heads) {
    typedef Step<E> S;
    for (int64_t h = 0; h < heads; h += S::kDepth) {
        const typename S::Value x0 = S::load(x + h * dim), x1 = S::load(x + h * dim + S::kElements);
#pragma GCC unroll 8
        for (int k = 0; k < N; k++) {
            const typename S::Value weight = S::broadcast(columns + h * N + k * S::kDepth);
            sum[k][0] = S::add(sum[k][0], weight, x0);
            sum[k][1] = S::add(sum[k][1], weight, x1);
        }
    }
}

// to[k][d] += sum over h of a.weights[h][at[k]] * a.x[h][d], and the same of b where it has a d.
// `columns` is a buffer of 2 * heads * N elements.
template <int N, class E>
__attribute__((noinline)) void add_to_rows(const Product<E>& a, const Product<E>& b, int64_t lda,
                                           int64_t heads, const int32_t* at, float* const* to,
                                           E* columns) {
    constexpr int kDepth = Step<E>::kDepth;
    E* const b_columns = columns + heads * N;
    gather_columns<N>(a.weights, lda, heads, at, columns);
    if (b.dim > 0) gather_columns<N>(b.weights, lda, heads, at, b_columns);
    for (int64_t d = 0; d < a.dim; d += 2 * kLanes) {
        for (int k = 0; k < N; k++)
            for (int v = 0; v < 2; v++) __builtin_prefetch(to[k] + d + v * kLanes, 1);
        Vector sum[N][2] = {};
        add_heads<N>(sum, columns, a.x + d * kDepth, a.dim, heads);
        if (d < b.dim) add_heads<N>(sum, b_columns, b.x + d * kDepth, b.dim, heads);
        for (int k = 0; k < N; k++)
            for (int v = 0; v < 2; v++) {
                float* const place = to[k] + d + v * kLanes;
                store(place, load(place) + sum[k][v]);
            }
    }
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

__attribute__((noinline)) void mix_rows(const BFloat16* p, int64_t ldp, int64_t heads, const BFloat16* const* rows,
                     int64_t n, int64_t dim, float* out, int64_t ldo) {
    for (int64_t d = 0; d < dim; d += 2 * kLanes)
        for (int64_t h = 0; h < heads; h += kTile) {
            Vector sum[kTile][2] = {};
            const BFloat16* weight = p + h * ldp;
            for (int64_t j = 0; j < n; j += 2) {
                Pairs low, high;
                zip(load_pairs(rows[j] + d), load_pairs(rows[j + 1] + d), &low, &high);
#pragma GCC unroll 8
                for (int i = 0; i < kTile; i++) {
                    const Pairs x = fill_pair(weight + i * ldp + j);
                    sum[i][0] = add_products(sum[i][0], x, low);
                    sum[i][1] = add_products(sum[i][1], x, high);
                }
            }
            for (int i = 0; i < kTile; i++) {
                unshuffle(&sum[i][0], &sum[i][1]);
                for (int v = 0; v < 2; v++) store(out + (h + i) * ldo + d + v * kLanes, sum[i][v]);
            }
        }
}

#endif

// Keys side by side: panel[d / depth][key][d % depth], kPanelKeys of them, with zeros after the last.
template <class E>
void fill_panel(const E* k, int64_t n, int64_t dim, E* panel) {
    constexpr int kDepth = Step<E>::kDepth;
    for (int64_t key = 0; key < kPanelKeys; key++)
        for (int64_t d = 0; d < dim; d++)
            panel[(d / kDepth * kPanelKeys + key) * kDepth + d % kDepth] =
                key < n ? k[key * dim + d] : E{};
}

// scores[key] = sum over h < heads of w[h] * relu(q[h] . panel[:, key])
template <class E>
__attribute__((noinline)) void score_panel(const E* q, const float* w, int64_t heads, const E* panel, int64_t dim,
                 float* scores) {
    typedef Step<E> S;
    Vector total[2] = {};
    for (int64_t h = 0; h < heads; h += kTile) {
        Vector dot[kTile][2] = {};
        for (int64_t d = 0; d < dim; d += S::kDepth) {
            const typename S::Value left = S::load(panel + d * kPanelKeys);
            const typename S::Value right = S::load(panel + d * kPanelKeys + S::kElements);
#pragma GCC unroll 8
            for (int i = 0; i < kTile; i++) {
                const typename S::Value x = S::broadcast(q + (h + i) * dim + d);
                dot[i][0] = S::add(dot[i][0], x, left);
                dot[i][1] = S::add(dot[i][1], x, right);
            }
        }
        for (int i = 0; i < kTile && h + i < heads; i++)
            for (int v = 0; v < 2; v++) total[v] += w[h + i] * relu(dot[i][v]);
    }
    for (int v = 0; v < 2; v++) store(scores + v * kLanes, total[v]);
}

}  // namespace
