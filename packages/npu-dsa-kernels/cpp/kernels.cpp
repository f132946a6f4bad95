// All kernels, for one element type after the other; compiled once for every instruction set, with
// DSA_INSTRUCTION_SET as its name.
//
// Threads share out queries. The gradient of the keys, to which many queries add, is computed in
// blocks of queries: first the weights of every query of the block, queries shared out; then the
// sums, rows of keys shared out. Every row is summed up by one thread in the order of the queries,
// so the result is the same for any number of threads, and memory does not grow with it.
//
// Names: B batch, S queries, T keys, H heads, D key dim, V value dim, K selected keys; n valid ones
// among the K; ld... the distance of two rows in a buffer.

#include "kernels.h"

#include <math.h>
#include <stdlib.h>

#include "parallel.h"
#include "tiles.h"
#include "topk.h"

namespace {

constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kLogitsBytes = 256 << 10;  // of a query at a time: a part of the L2 cache
constexpr int64_t kBlockBytes = 4 << 20;     // of the weights of a block of queries
constexpr int64_t kPartitionsPerThread = 4;
constexpr int64_t kPartitionRows = 16;  // neighbours in a partition of the rows
constexpr int64_t kIndexerQueries = 8;  // that share a panel of keys while it is in the L1 cache

int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
int64_t at_least(int64_t x, int64_t low) { return x < low ? low : x; }
int64_t at_most(int64_t x, int64_t high) { return x < high ? x : high; }

// Memory handed out in pieces: first sizes are added up, then the same calls give addresses.
class Arena {
  public:
    template <class T>
    T* take(int64_t count) {
        T* const piece = reinterpret_cast<T*>(base_ + used_);
        used_ += round_up(count * int64_t(sizeof(T)), kLine);
        return base_ ? piece : nullptr;
    }
    int64_t used() const { return used_; }
    void start(char* base) { base_ = base, used_ = 0; }

  private:
    char* base_ = nullptr;
    int64_t used_ = 0;
};

// `copies` instances of a struct of buffers, which its own lay(Arena&, ...) describes.
template <class Buffers>
class Pool {
  public:
    template <class... Sizes>
    Pool(int64_t copies, Sizes... sizes) {
        Arena arena;
        Buffers buffers;
        buffers.lay(arena, sizes...);
        const int64_t bytes = arena.used();
        memory_ = static_cast<char*>(aligned_alloc(kLine, at_least(copies * bytes, kLine)));
        items_ = static_cast<Buffers*>(malloc(copies * sizeof(Buffers)));
        if (!ok()) return;
        for (int64_t i = 0; i < copies; i++) {
            arena.start(memory_ + i * bytes);
            items_[i].lay(arena, sizes...);
        }
    }
    ~Pool() { free(memory_), free(items_); }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    bool ok() const { return memory_ && items_; }
    Buffers& operator[](int64_t i) const { return items_[i]; }

  private:
    char* memory_;
    Buffers* items_;
};

template <class E>
void put_zeros(E* to, int64_t n) {
    memset(static_cast<void*>(to), 0, n * sizeof(E));
}

// The rows that one query selected; -1 and whatever else is outside of [0, T) is left out.
template <class E>
struct Selection {
    const E** rows;  // padded with a row of zeros
    int32_t* keys;
    int32_t* slots;  // place among the K
    E* zeros;
    int64_t n, padded;

    void lay(Arena& arena, int64_t K, int64_t D) {
        rows = arena.take<const E*>(K + kRowPadding);
        keys = arena.take<int32_t>(K);
        slots = arena.take<int32_t>(K);
        zeros = arena.take<E>(D);
    }
    void choose(const int32_t* indices, int64_t K, const E* table, int64_t T, int64_t D) {
        n = 0;
        for (int64_t j = 0; j < K; j++)
            if (indices[j] >= 0 && indices[j] < T) {
                rows[n] = table + indices[j] * D;
                keys[n] = indices[j];
                slots[n++] = int32_t(j);
            }
        padded = round_up(n, kRowPadding);
        for (int64_t j = n; j < padded; j++) rows[j] = zeros;
    }
    // From the order of the rows to that of the slots, zeros where there is no key.
    void put_back(const float* from, int64_t K, float* to) const {
        put_zeros(to, K);
        for (int64_t j = 0; j < n; j++) to[slots[j]] = from[j];
    }
};

int64_t row_stride(int64_t K) { return round_up(K, kRowPadding) + 16; }  // no power of two

// Heads at a time whose logits fit into the cache.
int64_t head_group(int64_t H, int64_t K) {
    const int64_t fitting = kLogitsBytes / (row_stride(K) * int64_t(sizeof(float)));
    return at_most(round_up(H, kHeads), at_least(fitting / kHeads * kHeads, kHeads));
}

template <class E>
void copy_heads(E* to, const E* from, int64_t heads, int64_t padded, int64_t dim) {
    memcpy(static_cast<void*>(to), from, heads * dim * sizeof(E));
    put_zeros(to + heads * dim, (padded - heads) * dim);
}

template <class E>
void put_row(E* to, const float* from, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i += kLanes) put(to + i, load(from + i) * factor);
}

// ------------------------------------------------------------------------------- sparse attention

template <class E>
struct AttentionScratch {
    Selection<E> selection;
    E* q;           // [group, D]
    float* logits;  // [group, ld]
    E* p;           // [group, ld]
    float* out;     // [group, V]
    float* norms;   // [group]
    float* target;  // [ld]

    void lay(Arena& arena, int64_t group, int64_t K, int64_t D, int64_t V) {
        selection.lay(arena, K, D);
        q = arena.take<E>(group * D);
        logits = arena.take<float>(group * row_stride(K));
        p = arena.take<E>(group * row_stride(K));
        out = arena.take<float>(group * V);
        norms = arena.take<float>(group);
        target = arena.take<float>(row_stride(K));
    }
};

// e, p = exp(scale * logits - peak), zeros behind the n-th; the peak, and the sum of e. The logits
// are scaled, e may be in their place.
template <class E>
void exponentials(float* logits, int64_t n, int64_t padded, float scale, float* e, E* p,
                  float* peak, float* total) {
    Vector best = fill(-INFINITY), all = {};
    for (int64_t j = 0; j < padded; j += kLanes) {
        const Vector logit = select(below(j, n), load(logits + j) * scale, fill(-INFINITY));
        best = select(logit > best, logit, best);
        store(logits + j, logit);
    }
    *peak = largest(best);
    if (*peak == -INFINITY) *peak = 0;
    for (int64_t j = 0; j < padded; j += kLanes) {
        const Vector x = exp(load(logits + j) - *peak);
        all += x;
        store(e + j, x);
        put(p + j, x);
    }
    *total = sum(all);
}

template <class E>
int sparse_attention(const dsa_shape& shape, const void* q_, const void* kv_,
                     const int32_t* indices, void* out_, float* lse, float* target) {
    const auto [B, S, T, H, D, V, K, dtype, threads, instruction_set, scale] = shape;
    const E *q = static_cast<const E*>(q_), *kv = static_cast<const E*>(kv_);
    E* const out = static_cast<E*>(out_);
    const int64_t group = head_group(H, K), ld = row_stride(K);
    const Pool<AttentionScratch<E>> pool(threads, group, K, D, V);
    if (!pool.ok()) return DSA_NO_MEMORY;
    dsa::Team::run(threads, [&, B = B, S = S, T = T, H = H, D = D, V = V, K = K, scale = scale](
                                dsa::Team& team, int thread) {
        AttentionScratch<E>& my = pool[thread];
        put_zeros(my.selection.zeros, D);
        team.each(B * S, [&](int64_t t) {
            my.selection.choose(indices + t * K, K, kv + t / S * T * D, T, D);
            const int64_t n = my.selection.n, padded = my.selection.padded;
            put_zeros(my.target, padded);
            for (int64_t h0 = 0; h0 < H; h0 += group) {
                const int64_t heads = at_most(group, H - h0);
                const int64_t tiles = round_up(heads, kHeads);
                copy_heads(my.q, q + (t * H + h0) * D, heads, tiles, D);
                dot_rows(my.q, D, tiles, my.selection.rows, padded, D, my.logits, ld);
                float* const my_lse = lse + t * H + h0;
                for (int64_t h = 0; h < tiles; h++) {
                    float peak, total;
                    float* const logits = my.logits + h * ld;
                    exponentials(logits, n, padded, scale, logits, my.p + h * ld, &peak, &total);
                    my.norms[h] = total == 0 ? 0.0f : 1.0f / total;  // no keys: out is 0
                    if (h >= heads) continue;
                    my_lse[h] = logf(total) + peak;
                    for (int64_t j = 0; target && j < padded; j += kLanes)
                        store(my.target + j,
                              load(my.target + j) + load(logits + j) * my.norms[h]);
                }
                mix_rows(my.p, ld, tiles, my.selection.rows, padded, V, my.out, V);
                for (int64_t h = 0; h < heads; h++)
                    put_row(out + (t * H + h0 + h) * V, my.out + h * V, V, my.norms[h]);
            }
            if (target) my.selection.put_back(my.target, K, target + t * K);
        });
    });
    return DSA_OK;
}

template <class E>
int attention_target(const dsa_shape& shape, const void* q_, const void* kv_,
                     const int32_t* indices, const float* lse, float* target) {
    const auto [B, S, T, H, D, V, K, dtype, threads, instruction_set, scale] = shape;
    const E *q = static_cast<const E*>(q_), *kv = static_cast<const E*>(kv_);
    const int64_t group = head_group(H, K), ld = row_stride(K);
    const Pool<AttentionScratch<E>> pool(threads, group, K, D, 0);
    if (!pool.ok()) return DSA_NO_MEMORY;
    dsa::Team::run(threads, [&, B = B, S = S, T = T, H = H, D = D, K = K, scale = scale](
                                dsa::Team& team, int thread) {
        AttentionScratch<E>& my = pool[thread];
        put_zeros(my.selection.zeros, D);
        team.each(B * S, [&](int64_t t) {
            my.selection.choose(indices + t * K, K, kv + t / S * T * D, T, D);
            const int64_t padded = my.selection.padded;
            put_zeros(my.target, ld);
            for (int64_t h0 = 0; h0 < H; h0 += group) {
                const int64_t heads = at_most(group, H - h0);
                const int64_t tiles = round_up(heads, kHeads);
                copy_heads(my.q, q + (t * H + h0) * D, heads, tiles, D);
                dot_rows(my.q, D, tiles, my.selection.rows, padded, D, my.logits, ld);
                for (int64_t h = 0; h < heads; h++) {
                    float norm = lse[t * H + h0 + h];
                    if (norm == -INFINITY) norm = 0;
                    for (int64_t j = 0; j < padded; j += kLanes)
                        store(my.target + j, load(my.target + j) +
                                                 exp(load(my.logits + h * ld + j) * scale - norm));
                }
            }
            my.selection.put_back(my.target, K, target + t * K);
        });
    });
    return DSA_OK;
}

// ------------------------------------------------------------------------------ gradient of rows

// What a query adds to its rows: to[j] += sum over h of a[h][j] x[h] (+ a2[h][j] x2[h]).
template <class E>
struct Addend {
    int64_t n, batch;
    int32_t* keys;
    E *a, *a2;  // [heads, ld]; of bfloat16, pairs of heads: [heads / 2, ld, 2]
    E *x, *x2;  // [heads, D], [heads, V], likewise

    void lay(Arena& arena, int64_t heads, int64_t K, int64_t D, int64_t V) {
        keys = arena.take<int32_t>(K);
        a = arena.take<E>(heads * row_stride(K));
        x = arena.take<E>(heads * D);
        a2 = arena.take<E>(V ? heads * row_stride(K) : 0);
        x2 = arena.take<E>(heads * V);
    }
};

// Where rows of heads go in an Addend.
inline void lay_heads(float* to, int64_t ld, const float* from, int64_t lf, int64_t heads,
                      int64_t n) {
    for (int64_t h = 0; h < heads; h++) memcpy(to + h * ld, from + h * lf, n * sizeof(float));
}
inline void lay_heads(BFloat16* to, int64_t ld, const BFloat16* from, int64_t lf, int64_t heads,
                      int64_t n) {
    for (int64_t h = 0; h < heads; h += 2)
        for (int64_t j = 0; j < n; j++) {
            to[h * ld + 2 * j] = from[h * lf + j];
            to[h * ld + 2 * j + 1] = from[(h + 1) * lf + j];
        }
}

template <class E>
struct PartScratch {
    int32_t* at;  // [K] columns of the weights
    float** to;   // [K] their rows
    E* columns;   // [2, heads, 8]

    void lay(Arena& arena, int64_t heads, int64_t K) {
        at = arena.take<int32_t>(K);
        to = arena.take<float*>(K);
        columns = arena.take<E>(2 * heads * 8);
    }
};

// Adds one part of the rows for every query of the block, in order.
template <class E>
void add_part(const Pool<Addend<E>>& block, int64_t queries, int64_t part, int64_t parts, int64_t T,
              int64_t D, int64_t V, int64_t heads, int64_t ld, float* d_kv, PartScratch<E>& my) {
    for (int64_t i = 0; i < queries; i++) {
        const Addend<E>& addend = block[i];
        int64_t n = 0;
        for (int64_t j = 0; j < addend.n; j++) {
            const int64_t row = addend.batch * T + addend.keys[j];
            if (row / kPartitionRows % parts != part) continue;
            my.at[n] = int32_t(j);
            my.to[n++] = d_kv + row * D;
        }
        const Product<E> keys{addend.a, addend.x, D}, values{addend.a2, addend.x2, V};
        int64_t j = 0;
        for (; j + 8 <= n; j += 8) add_to_rows<8>(keys, values, ld, heads, my.at + j, my.to + j, my.columns);
        for (; j + 4 <= n; j += 4) add_to_rows<4>(keys, values, ld, heads, my.at + j, my.to + j, my.columns);
        for (; j < n; j++) add_to_rows<1>(keys, values, ld, heads, my.at + j, my.to + j, my.columns);
    }
}

int64_t block_queries(int64_t queries, int64_t threads, int64_t bytes) {
    const int64_t fitting = at_least(kBlockBytes / bytes / threads * threads, threads);
    return at_most(at_most(fitting, 64 * threads), queries);
}

template <class E>
struct AttentionBackwardScratch {
    Selection<E> selection;
    PartScratch<E> part;
    E *q, *d_out;          // [heads, D], [heads, V]
    float *logits, *d_p;   // [group, ld]
    E *p, *d_s;            // [group, ld]
    float* dq;             // [group, D]

    void lay(Arena& arena, int64_t heads, int64_t group, int64_t K, int64_t D, int64_t V) {
        selection.lay(arena, K, D);
        part.lay(arena, heads, K);
        q = arena.take<E>(heads * D);
        d_out = arena.take<E>(heads * V);
        logits = arena.take<float>(group * row_stride(K));
        d_p = arena.take<float>(group * row_stride(K));
        p = arena.take<E>(group * row_stride(K));
        d_s = arena.take<E>(group * row_stride(K));
        dq = arena.take<float>(group * D);
    }
};

template <class E>
int sparse_attention_backward(const dsa_shape& shape, const void* q_, const void* kv_,
                              const int32_t* indices, const float* lse, const void* d_out_,
                              const float* d_lse, void* dq_, float* d_kv) {
    const auto [B, S, T, H, D, V, K, dtype, threads, instruction_set, scale] = shape;
    const E *q = static_cast<const E*>(q_), *kv = static_cast<const E*>(kv_);
    const E* const d_out = static_cast<const E*>(d_out_);
    E* const dq = static_cast<E*>(dq_);
    const int64_t group = head_group(H, K), ld = row_stride(K), all_heads = round_up(H, kHeads);
    const int64_t queries = B * S, parts = kPartitionsPerThread * threads;
    Arena arena;
    Addend<E>().lay(arena, all_heads, K, D, V);
    const int64_t block = block_queries(queries, threads, arena.used());
    const Pool<Addend<E>> addends(block, all_heads, K, D, V);
    const Pool<AttentionBackwardScratch<E>> pool(threads, all_heads, group, K, D, V);
    if (!addends.ok() || !pool.ok()) return DSA_NO_MEMORY;

    const auto weights = [&, S = S, T = T, H = H, D = D, V = V, K = K, scale = scale](
                             int64_t t, AttentionBackwardScratch<E>& my, Addend<E>& addend) {
        Selection<E>& selection = my.selection;
        selection.choose(indices + t * K, K, kv + t / S * T * D, T, D);
        const int64_t n = selection.n, padded = selection.padded;
        addend.n = n;
        addend.batch = t / S;
        memcpy(addend.keys, selection.keys, n * sizeof(int32_t));
        copy_heads(my.q, q + t * H * D, H, all_heads, D);
        copy_heads(my.d_out, d_out + t * H * V, H, all_heads, V);
        lay_heads(addend.x, D, my.q, D, all_heads, D);
        lay_heads(addend.x2, V, my.d_out, V, all_heads, V);
        for (int64_t h0 = 0; h0 < H; h0 += group) {
            const int64_t heads = at_most(group, H - h0), tiles = round_up(heads, kHeads);
            dot_rows(my.q + h0 * D, D, tiles, selection.rows, padded, D, my.logits, ld);
            dot_rows(my.d_out + h0 * V, V, tiles, selection.rows, padded, V, my.d_p, ld);
            for (int64_t h = 0; h < tiles; h++) {
                float* const logits = my.logits + h * ld;
                float* const d_p = my.d_p + h * ld;
                E *const p = my.p + h * ld, *const d_s = my.d_s + h * ld;
                const float norm = h < heads ? lse[t * H + h0 + h] : -INFINITY;
                if (norm == -INFINITY) {  // no keys, or a head that only pads
                    put_zeros(p, padded);
                    put_zeros(d_s, padded);
                    continue;
                }
                Vector total = {};
                for (int64_t j = 0; j < padded; j += kLanes) {
                    const Vector e = exp(load(logits + j) * scale - norm);
                    const Vector probability = select(below(j, n), e, Vector{});
                    total += probability * load(d_p + j);
                    store(logits + j, probability);
                    put(p + j, probability);
                }
                // rowsum(P * dP) is rowsum(dOut * out), without the rounding of a bfloat16 out.
                const float delta = sum(total) - d_lse[t * H + h0 + h];
                for (int64_t j = 0; j < padded; j += kLanes)
                    put(d_s + j, load(logits + j) * (load(d_p + j) - delta) * scale);
            }
            mix_rows(my.d_s, ld, tiles, selection.rows, padded, D, my.dq, D);
            for (int64_t h = 0; h < heads; h++)
                put_row(dq + (t * H + h0 + h) * D, my.dq + h * D, D, 1.0f);
            lay_heads(addend.a + h0 * ld, ld, my.d_s, ld, tiles, padded);
            lay_heads(addend.a2 + h0 * ld, ld, my.p, ld, tiles, padded);
        }
    };

    dsa::Team::run(threads, [&, T = T, H = H, D = D, V = V](dsa::Team& team, int thread) {
        AttentionBackwardScratch<E>& my = pool[thread];
        put_zeros(my.selection.zeros, D);
        for (int64_t first = 0; first < queries; first += block) {
            const int64_t count = at_most(block, queries - first);
            team.each(count, [&](int64_t i) { weights(first + i, my, addends[i]); });
            team.each(parts, [&](int64_t part) {
                add_part(addends, count, part, parts, T, D, V, all_heads, ld, d_kv, my.part);
            });
        }
    });
    return DSA_OK;
}

// --------------------------------------------------------------------------------- indexer KL loss

template <class E>
struct IndexerScratch {
    Selection<E> selection;
    PartScratch<E> part;
    E* q;           // [heads, D]
    float* dots;    // [heads, ld]
    E* d_s;         // [heads, ld]
    float* dq;      // [heads, D]
    float* scores;  // [ld]
    float* p;       // [ld]
    float* target;  // [ld]

    void lay(Arena& arena, int64_t heads, int64_t K, int64_t D) {
        selection.lay(arena, K, D);
        part.lay(arena, heads, K);
        q = arena.take<E>(heads * D);
        dots = arena.take<float>(heads * row_stride(K));
        d_s = arena.take<E>(heads * row_stride(K));
        dq = arena.take<float>(heads * D);
        scores = arena.take<float>(row_stride(K));
        p = arena.take<float>(row_stride(K));
        target = arena.take<float>(row_stride(K));
    }

    // Selects, scores, and normalises the target. False if the row takes no part in the loss.
    bool compare(const dsa_shape& shape, int64_t t, const E* q_, const E* k, const float* w,
                 const int32_t* indices, const float* target_) {
        const int64_t H = shape.H, D = shape.D, K = shape.K, T = shape.T, ld = row_stride(K);
        const int64_t heads = round_up(H, kHeads);
        selection.choose(indices + t * K, K, k + t / shape.S * T * D, T, D);
        const int64_t n = selection.n, padded = selection.padded;
        double total = 0;
        for (int64_t j = 0; j < n; j++) {
            target[j] = target_[t * K + selection.slots[j]];
            total += double(target[j]);
        }
        if (total == 0) return false;
        for (int64_t j = 0; j < n; j++) target[j] = float(double(target[j]) / total);
        for (int64_t j = n; j < padded; j++) target[j] = 0;
        copy_heads(q, q_ + t * H * D, H, heads, D);
        dot_rows(q, D, heads, selection.rows, padded, D, dots, ld);
        for (int64_t j = 0; j < padded; j += kLanes) {
            Vector score = {};
            for (int64_t h = 0; h < H; h++) score += w[t * H + h] * relu(load(dots + h * ld + j));
            store(scores + j, score);
        }
        return true;
    }
};

template <class E>
int indexer_kl_loss(const dsa_shape& shape, const void* q, const void* k, const float* w,
                    const int32_t* indices, const float* target, float* loss) {
    const Pool<IndexerScratch<E>> pool(shape.threads, round_up(shape.H, kHeads), shape.K, shape.D);
    if (!pool.ok()) return DSA_NO_MEMORY;
    dsa::Team::run(shape.threads, [&](dsa::Team& team, int thread) {
        IndexerScratch<E>& my = pool[thread];
        put_zeros(my.selection.zeros, shape.D);
        team.each(shape.B * shape.S, [&](int64_t t) {
            loss[t] = 0;
            if (!my.compare(shape, t, static_cast<const E*>(q), static_cast<const E*>(k), w,
                            indices, target))
                return;
            const int64_t n = my.selection.n;
            float peak, total;
            exponentials(my.scores, n, my.selection.padded, 1.0f, my.p, my.p, &peak, &total);
            const float norm = logf(total) + peak;
            double divergence = 0;
            for (int64_t j = 0; j < n; j++) {
                const float p = my.target[j];
                if (p == 0) continue;  // 0 log 0 = 0
                divergence += double(p * (logf(p) - (my.scores[j] - norm)));
            }
            loss[t] = float(divergence);
        });
    });
    return DSA_OK;
}

template <class E>
int indexer_kl_loss_backward(const dsa_shape& shape, const void* q_, const void* k,
                             const float* w, const int32_t* indices, const float* target,
                             const float* d_loss, void* dq_, float* dk, float* dw) {
    const auto [B, S, T, H, D, V, K, dtype, threads, instruction_set, scale] = shape;
    const E* const q = static_cast<const E*>(q_);
    E* const dq = static_cast<E*>(dq_);
    const int64_t ld = row_stride(K), heads = round_up(H, kHeads), queries = B * S;
    const int64_t parts = kPartitionsPerThread * threads;
    Arena arena;
    Addend<E>().lay(arena, heads, K, D, 0);
    const int64_t block = block_queries(queries, threads, arena.used());
    const Pool<Addend<E>> addends(block, heads, K, D, int64_t(0));
    const Pool<IndexerScratch<E>> pool(threads, heads, K, D);
    if (!addends.ok() || !pool.ok()) return DSA_NO_MEMORY;

    const auto weights = [&, S = S, H = H, D = D](int64_t t, IndexerScratch<E>& my,
                                                  Addend<E>& addend) {
        addend.n = 0;
        if (!my.compare(shape, t, q, static_cast<const E*>(k), w, indices, target)) {
            put_zeros(dq + t * H * D, H * D);
            put_zeros(dw + t * H, H);
            return;
        }
        const int64_t n = my.selection.n, padded = my.selection.padded;
        float peak, total;
        exponentials(my.scores, n, padded, 1.0f, my.p, my.p, &peak, &total);
        float* const d_i = my.p;  // dI = y - p, exactly
        for (int64_t j = 0; j < padded; j += kLanes)
            store(d_i + j, (load(my.p + j) / total - load(my.target + j)) * d_loss[t]);
        put_zeros(my.d_s + H * ld, (heads - H) * ld);
        for (int64_t h = 0; h < H; h++) {
            Vector d_w = {};
            for (int64_t j = 0; j < padded; j += kLanes) {
                const Vector dot = load(my.dots + h * ld + j), slope = load(d_i + j);
                d_w += slope * relu(dot);
                put(my.d_s + h * ld + j,
                    select(dot > Vector{}, slope * w[t * H + h], Vector{}));
            }
            dw[t * H + h] = sum(d_w);
        }
        mix_rows(my.d_s, ld, heads, my.selection.rows, padded, D, my.dq, D);
        for (int64_t h = 0; h < H; h++) put_row(dq + (t * H + h) * D, my.dq + h * D, D, 1.0f);
        addend.n = n;
        addend.batch = t / S;
        memcpy(addend.keys, my.selection.keys, n * sizeof(int32_t));
        lay_heads(addend.x, D, my.q, D, heads, D);
        lay_heads(addend.a, ld, my.d_s, ld, heads, padded);
    };

    dsa::Team::run(threads, [&, T = T, H = H, D = D](dsa::Team& team, int thread) {
        IndexerScratch<E>& my = pool[thread];
        put_zeros(my.selection.zeros, D);
        for (int64_t first = 0; first < queries; first += block) {
            const int64_t count = at_most(block, queries - first);
            team.each(count, [&](int64_t i) { weights(first + i, my, addends[i]); });
            team.each(parts, [&](int64_t part) {
                add_part(addends, count, part, parts, T, D, int64_t(0), heads, ld, dk, my.part);
            });
        }
    });
    return DSA_OK;
}

// ------------------------------------------------------------------------------- lightning indexer

template <class E>
struct RankingScratch {
    E* q;           // [heads, D]
    float* scores;  // [kIndexerQueries, padded T]
    TopKScratch topk;

    void lay(Arena& arena, int64_t heads, int64_t T, int64_t D, int64_t K) {
        q = arena.take<E>(kIndexerQueries * heads * D);
        scores = arena.take<float>(kIndexerQueries * round_up(T, kPanelKeys));
        topk.ranks = arena.take<uint32_t>(T);
        topk.candidates = arena.take<Candidate>(at_most(K, T));
        topk.sorted = arena.take<Candidate>(at_most(K, T));
        topk.counts = arena.take<uint32_t>(kDigits);
    }
};

template <class E>
struct Panels {
    E* keys;
    void lay(Arena& arena, int64_t elements) { keys = arena.take<E>(elements); }
};

template <class E>
int lightning_indexer(const dsa_shape& shape, const void* q_, const void* k_, const float* w,
                      const int32_t* bounds, int32_t* indices, float* scores) {
    const auto [B, S, T, H, D, V, K, dtype, threads, instruction_set, scale] = shape;
    const E *q = static_cast<const E*>(q_), *k = static_cast<const E*>(k_);
    const int64_t heads = round_up(H, kHeads), ld = round_up(T, kPanelKeys);
    const int64_t panels = ld / kPanelKeys, blocks = (S + kIndexerQueries - 1) / kIndexerQueries;
    const Pool<RankingScratch<E>> pool(threads, heads, T, D, K);
    const Pool<Panels<E>> packed(1, ld * D);  // of one batch entry at a time
    if (!pool.ok() || !packed.ok()) return DSA_NO_MEMORY;
    E* const table = packed[0].keys;

    dsa::Team::run(threads, [&, B = B, S = S, T = T, H = H, D = D, K = K](dsa::Team& team,
                                                                          int thread) {
        RankingScratch<E>& my = pool[thread];
        for (int64_t b = 0; b < B; b++) {
            team.each(panels, [&](int64_t i) {
                fill_panel(k + (b * T + i * kPanelKeys) * D, at_most(T - i * kPanelKeys, kPanelKeys),
                           D, table + i * kPanelKeys * D);
            });
            // The last queries see the most keys: first, so that no thread is left with one.
            team.each(blocks, [&](int64_t i) {
                const int64_t s0 = (blocks - 1 - i) * kIndexerQueries;
                const int64_t count = at_most(kIndexerQueries, S - s0);
                int64_t lo[kIndexerQueries], hi[kIndexerQueries], first = T, last = 0;
                for (int64_t r = 0; r < count; r++) {
                    const int64_t t = b * S + s0 + r;
                    lo[r] = bounds ? at_least(bounds[2 * t], 0) : 0;
                    hi[r] = at_most(bounds ? bounds[2 * t + 1] : s0 + r + 1, T);
                    copy_heads(my.q + r * heads * D, q + t * H * D, H, heads, D);
                    if (lo[r] >= hi[r]) continue;
                    first = at_most(lo[r], first);
                    last = at_least(hi[r], last);
                }
                for (int64_t p = first / kPanelKeys; p * kPanelKeys < last; p++)
                    for (int64_t r = 0; r < count; r++) {
                        const int64_t key = p * kPanelKeys;
                        if (key >= hi[r] || key + kPanelKeys <= lo[r]) continue;
                        score_panel(my.q + r * heads * D, w + (b * S + s0 + r) * H, H,
                                    table + key * D, D, my.scores + r * ld + key);
                    }
                for (int64_t r = 0; r < count; r++) {
                    const int64_t t = b * S + s0 + r, n = at_least(hi[r] - lo[r], 0);
                    top_k(my.scores + r * ld + (n ? lo[r] : 0), n, lo[r], K, indices + t * K,
                          scores + t * K, my.topk);
                }
            });
        }
    });
    return DSA_OK;
}

// ------------------------------------------------------------------------------------ the table

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define DSA_FOR_DTYPE(function, shape, ...)                                      \
    ((shape).dtype == DSA_BFLOAT16  ? function<BFloat16>(shape, __VA_ARGS__)     \
     : (shape).dtype == DSA_FLOAT32 ? function<float>(shape, __VA_ARGS__)        \
                                    : int(DSA_NO_SUCH_KERNEL))
#else
#define DSA_FOR_DTYPE(function, shape, ...) \
    ((shape).dtype == DSA_FLOAT32 ? function<float>(shape, __VA_ARGS__) : int(DSA_NO_SUCH_KERNEL))
#endif

#define DSA_STRING_(x) #x
#define DSA_STRING(x) DSA_STRING_(x)
#define DSA_JOIN_(a, b) a##b
#define DSA_JOIN(a, b) DSA_JOIN_(a, b)

}  // namespace

namespace dsa {

extern const Kernels DSA_JOIN(kernels_, DSA_INSTRUCTION_SET);
const Kernels DSA_JOIN(kernels_, DSA_INSTRUCTION_SET) = {
    DSA_STRING(DSA_INSTRUCTION_SET),
    kMultipliesBFloat16,
    [](const dsa_shape& shape, const void* q, const void* kv, const int32_t* indices, void* out,
       float* lse, float* target) {
        return DSA_FOR_DTYPE(::sparse_attention, shape, q, kv, indices, out, lse, target);
    },
    [](const dsa_shape& shape, const void* q, const void* kv, const int32_t* indices,
       const float* lse, const void* d_out, const float* d_lse, void* dq, float* d_kv) {
        return DSA_FOR_DTYPE(::sparse_attention_backward, shape, q, kv, indices, lse, d_out, d_lse,
                             dq, d_kv);
    },
    [](const dsa_shape& shape, const void* q, const void* kv, const int32_t* indices,
       const float* lse, float* target) {
        return DSA_FOR_DTYPE(::attention_target, shape, q, kv, indices, lse, target);
    },
    [](const dsa_shape& shape, const void* q, const void* k, const float* w,
       const int32_t* indices, const float* target, float* loss) {
        return DSA_FOR_DTYPE(::indexer_kl_loss, shape, q, k, w, indices, target, loss);
    },
    [](const dsa_shape& shape, const void* q, const void* k, const float* w,
       const int32_t* indices, const float* target, const float* d_loss, void* dq, float* dk,
       float* dw) {
        return DSA_FOR_DTYPE(::indexer_kl_loss_backward, shape, q, k, w, indices, target, d_loss,
                             dq, dk, dw);
    },
    [](const dsa_shape& shape, const void* q, const void* k, const float* w, const int32_t* bounds,
       int32_t* indices, float* scores) {
        return DSA_FOR_DTYPE(::lightning_indexer, shape, q, k, w, bounds, indices, scores);
    },
};

}  // namespace dsa
