// Exact top-k of one row of scores: best first, ties to the lower column, NaN above everything.
#pragma once

#include <stdint.h>
#include <string.h>

namespace {

struct Candidate {
    uint32_t rank;  // of the score: larger is better
    int32_t column;
};

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

struct TopKScratch {
    uint32_t* ranks;        // [columns]
    Candidate* candidates;  // [k]
    Candidate* sorted;      // [k]
    uint32_t* counts;       // [kDigits]
};

inline uint32_t rank_of(float score) {
    if (score != score) return 0xFFFFFFFFu;
    score = score + 0.0f;  // one zero of the two
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The k-th largest of ranks[0 .. n), 1 <= k <= n, and how many are above it: radix selection.
inline uint32_t select_rank(const uint32_t* ranks, int64_t n, int64_t k, uint32_t* counts,
                            int64_t* above) {
    uint32_t prefix = 0, known = 0;  // the digits found so far, and their mask
    *above = 0;
    for (int shift = 32 - kDigitBits;; shift = shift > kDigitBits ? shift - kDigitBits : 0) {
        memset(counts, 0, kDigits * sizeof *counts);
        const uint32_t mask = kDigits - 1;
        if (known == 0)
            for (int64_t i = 0; i < n; i++) counts[ranks[i] >> shift]++;
        else
            for (int64_t i = 0; i < n; i++)
                if ((ranks[i] & known) == prefix) counts[(ranks[i] >> shift) & mask]++;
        uint32_t digit = mask;
        while (*above + counts[digit] < k) *above += counts[digit--];
        prefix |= digit << shift;
        known |= mask << shift;
        if (shift == 0 || counts[digit] == 1) break;
    }
    if (known != 0xFFFFFFFFu)  // the only one with these digits
        for (int64_t i = 0; i < n; i++)
            if ((ranks[i] & known) == prefix) return ranks[i];
    return prefix;
}

// Stable, by falling rank: counting sorts from the lowest digit to the highest.
inline Candidate* sort_by_rank(Candidate* from, Candidate* to, int64_t n, uint32_t* counts) {
    for (int shift = 0; shift < 32; shift += kDigitBits) {
        memset(counts, 0, kDigits * sizeof *counts);
        for (int64_t i = 0; i < n; i++) counts[(from[i].rank >> shift) & (kDigits - 1)]++;
        uint32_t place = 0;
        for (int digit = kDigits - 1; digit >= 0; digit--) {
            const uint32_t count = counts[digit];
            counts[digit] = place;
            place += count;
        }
        for (int64_t i = 0; i < n; i++)
            to[counts[(from[i].rank >> shift) & (kDigits - 1)]++] = from[i];
        Candidate* const swap = from;
        from = to;
        to = swap;
    }
    return from;
}

// Fills indices[0 .. k) and best[0 .. k) from scores[0 .. n), whose columns start at `first`.
inline void top_k(const float* scores, int64_t n, int64_t first, int64_t k, int32_t* indices,
                  float* best, const TopKScratch& scratch) {
    for (int64_t i = 0; i < n; i++) scratch.ranks[i] = rank_of(scores[i]);
    const int64_t found = n < k ? n : k;
    Candidate* candidates = scratch.candidates;
    if (n <= k) {
        for (int64_t i = 0; i < n; i++) candidates[i] = {scratch.ranks[i], int32_t(i)};
    } else {
        int64_t above;
        const uint32_t last = select_rank(scratch.ranks, n, k, scratch.counts, &above);
        int64_t ties = k - above, m = 0;
        for (int64_t i = 0; m < k; i++) {
            const uint32_t rank = scratch.ranks[i];
            if (rank > last || (rank == last && ties-- > 0)) candidates[m++] = {rank, int32_t(i)};
        }
    }
    const Candidate* sorted = sort_by_rank(candidates, scratch.sorted, found, scratch.counts);
    for (int64_t j = 0; j < found; j++) {
        indices[j] = int32_t(first + sorted[j].column);
        best[j] = scores[sorted[j].column];
    }
    for (int64_t j = found; j < k; j++) {
        indices[j] = -1;
        best[j] = -__builtin_inff();
    }
}

}  // namespace
