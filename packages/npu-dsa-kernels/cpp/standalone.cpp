// The compiled kernels against plain loops in double precision, without Python: for the sanitizers,
// and for machines that only an emulator has. Prints a line for each instruction set and element
// type; exits with 1 if a value is off.

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "dsa.h"

namespace {

typedef std::vector<double> Numbers;

struct Random {
    uint64_t state;
    uint32_t next() { return uint32_t((state = state * 6364136223846793005ULL + 1) >> 33); }
    double normal() {  // close enough: a sum of uniform numbers
        double x = -6;
        for (int i = 0; i < 12; i++) x += next() / 2147483648.0;
        return x;
    }
};

// A tensor in the element type, and its exact values.
struct Tensor {
    bool bf16;
    Numbers value;
    std::vector<float> wide;
    std::vector<uint16_t> narrow;

    Tensor(int64_t n, bool bf16_) : bf16(bf16_), value(n), wide(bf16 ? 0 : n), narrow(bf16 ? n : 0) {}
    Tensor(int64_t n, bool bf16_, Random* random) : Tensor(n, bf16_) {
        for (int64_t i = 0; i < n; i++) {
            const float x = float(random->normal());
            uint32_t bits;
            memcpy(&bits, &x, 4);
            if (bf16) bits &= 0xFFFF0000u;
            float kept;
            memcpy(&kept, &bits, 4);
            value[i] = kept;
            if (bf16)
                narrow[i] = uint16_t(bits >> 16);
            else
                wide[i] = kept;
        }
    }
    void* data() { return bf16 ? static_cast<void*>(narrow.data()) : wide.data(); }
    double at(int64_t i) const {
        if (!bf16) return wide[i];
        const uint32_t bits = uint32_t(narrow[i]) << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
};

int failures = 0;

template <class Actual>
void compare(const char* what, const Actual& actual, const Numbers& expected, double tolerance) {
    double largest = 1e-30, worst = 0;
    for (double x : expected)
        if (isfinite(x)) largest = fmax(largest, fabs(x));
    for (size_t i = 0; i < expected.size(); i++) {
        const double a = actual(i), e = expected[i];
        if (a == e) continue;
        worst = fmax(worst, isfinite(a) && isfinite(e) ? fabs(a - e) / largest : 1e30);
    }
    if (worst > tolerance) {
        printf("  %s is off by %g (allowed %g)\n", what, worst, tolerance);
        failures++;
    }
}

void compare(const char* what, const std::vector<float>& actual, const Numbers& expected,
             double tolerance) {
    compare(what, [&](size_t i) { return double(actual[i]); }, expected, tolerance);
}
void compare(const char* what, const Tensor& actual, const Numbers& expected, double tolerance) {
    compare(what, [&](size_t i) { return actual.at(i); }, expected, tolerance);
}

// One set of sizes through all functions.
void run(int64_t B, int64_t S, int64_t T, int64_t H, int64_t D, int64_t V, int64_t K, bool bf16,
         int instruction_set, int threads, uint64_t seed) {
    Random random{seed};
    const double rounded = bf16 ? 4.0 / 256 : 1e-5;
    const double scale = 0.2;
    const int64_t N = B * S;
    const dsa_shape shape = {B, S, T, H, D, V, K, bf16 ? DSA_BFLOAT16 : DSA_FLOAT32, threads,
                             instruction_set, float(scale)};
    Tensor q(N * H * D, bf16, &random), kv(B * T * D, bf16, &random);
    Tensor d_out(N * H * V, bf16, &random), w(N * H, false, &random);
    Tensor d_lse(N * H, false, &random), d_loss(N, false, &random);
    std::vector<int32_t> indices(N * K);
    std::vector<float> given(N * K);
    for (int64_t t = 0; t < N; t++) {
        const int64_t first = random.next() % T;
        for (int64_t j = 0; j < K; j++) {
            const uint32_t kind = random.next() % 16;
            given[t * K + j] = float(random.next() % 1000) / 1000;
            indices[t * K + j] = kind == 0    ? -1
                                 : kind == 1  ? int32_t(T + random.next() % 3)
                                 : kind == 2  ? INT32_MIN
                                 : kind == 3  ? INT32_MAX
                                 : j < T      ? int32_t((first + j * 1) % T)
                                              : -1;
            if (t % 7 == 3) indices[t * K + j] = -1;
        }
    }

    Numbers out(N * H * V), lse(N * H), dq(N * H * D), d_kv(B * T * D), target(N * K);
    Numbers loss(N), dqi(N * H * D), dki(B * T * D), dw(N * H);
    for (int64_t t = 0; t < N; t++) {
        const int64_t b = t / S;
        std::vector<int64_t> slot;
        for (int64_t j = 0; j < K; j++)
            if (indices[t * K + j] >= 0 && indices[t * K + j] < T) slot.push_back(j);
        const int64_t n = int64_t(slot.size());
        const auto row = [&](int64_t j) { return (b * T + indices[t * K + slot[j]]) * D; };
        const auto dot = [&](int64_t h, int64_t j) {
            double x = 0;
            for (int64_t d = 0; d < D; d++)
                x += q.value[(t * H + h) * D + d] * kv.value[row(j) + d];
            return x;
        };
        Numbers score(n);
        for (int64_t h = 0; h < H; h++) {
            Numbers p(n), dp(n);
            double peak = -INFINITY, total = 0, delta = 0;
            for (int64_t j = 0; j < n; j++) {
                const double x = dot(h, j);
                score[j] += w.value[t * H + h] * fmax(x, 0);
                p[j] = scale * x;
                peak = fmax(peak, p[j]);
            }
            for (int64_t j = 0; j < n; j++) total += exp(p[j] - peak);
            lse[t * H + h] = n ? peak + log(total) : -INFINITY;
            for (int64_t j = 0; j < n; j++) {
                p[j] = exp(p[j] - lse[t * H + h]);
                target[t * K + slot[j]] += p[j];
                for (int64_t d = 0; d < V; d++) {
                    out[(t * H + h) * V + d] += p[j] * kv.value[row(j) + d];
                    dp[j] += d_out.value[(t * H + h) * V + d] * kv.value[row(j) + d];
                }
                delta += p[j] * dp[j];
            }
            for (int64_t j = 0; j < n; j++) {
                const double ds = p[j] * (dp[j] - delta + d_lse.value[t * H + h]) * scale;
                for (int64_t d = 0; d < D; d++) {
                    dq[(t * H + h) * D + d] += ds * kv.value[row(j) + d];
                    d_kv[row(j) + d] += ds * q.value[(t * H + h) * D + d];
                    if (d < V) d_kv[row(j) + d] += p[j] * d_out.value[(t * H + h) * V + d];
                }
            }
        }
        double mass = 0, peak = -INFINITY, total = 0;
        for (int64_t j = 0; j < n; j++) mass += given[t * K + slot[j]];
        if (mass == 0) continue;
        for (int64_t j = 0; j < n; j++) peak = fmax(peak, score[j]);
        for (int64_t j = 0; j < n; j++) total += exp(score[j] - peak);
        for (int64_t j = 0; j < n; j++) {
            const double p = given[t * K + slot[j]] / mass, log_y = score[j] - peak - log(total);
            if (p > 0) loss[t] += p * (log(p) - log_y);
            const double di = (exp(log_y) - p) * d_loss.value[t];
            for (int64_t h = 0; h < H; h++) {
                const double x = dot(h, j);
                if (!(x > 0)) continue;
                dw[t * H + h] += di * x;
                for (int64_t d = 0; d < D; d++) {
                    dqi[(t * H + h) * D + d] += di * w.value[t * H + h] * kv.value[row(j) + d];
                    dki[row(j) + d] += di * w.value[t * H + h] * q.value[(t * H + h) * D + d];
                }
            }
        }
    }

    Tensor a_out(N * H * V, bf16), a_dq(N * H * D, bf16), a_dqi(N * H * D, bf16);
    std::vector<float> a_lse(N * H), a_kv(B * T * D), a_target(N * K), a_loss(N), a_ki(B * T * D);
    std::vector<float> a_with(N * K);
    std::vector<float> a_dw(N * H);
    int status = 0;
    status |= dsa_sparse_attention(&shape, q.data(), kv.data(), indices.data(), a_out.data(),
                                   a_lse.data(), a_with.data());
    status |= dsa_sparse_attention_backward(&shape, q.data(), kv.data(), indices.data(),
                                            a_lse.data(), d_out.data(), d_lse.wide.data(),
                                            a_dq.data(), a_kv.data());
    status |= dsa_attention_target(&shape, q.data(), kv.data(), indices.data(), a_lse.data(),
                                   a_target.data());
    status |= dsa_indexer_kl_loss(&shape, q.data(), kv.data(), w.wide.data(), indices.data(),
                                  given.data(), a_loss.data());
    status |= dsa_indexer_kl_loss_backward(&shape, q.data(), kv.data(), w.wide.data(),
                                           indices.data(), given.data(), d_loss.wide.data(),
                                           a_dqi.data(), a_ki.data(), a_dw.data());
    compare("status", [&](size_t) { return double(status); }, Numbers(1), 0);
    compare("out", a_out, out, rounded);
    compare("lse", a_lse, lse, 1e-5);
    compare("dq", a_dq, dq, rounded);
    compare("d_kv", a_kv, d_kv, rounded);
    compare("target", a_target, target, 1e-5);
    compare("target of the attention", a_with, target, 1e-5);
    compare("loss", a_loss, loss, 1e-5);
    compare("dq_index", a_dqi, dqi, rounded);
    compare("dk_index", a_ki, dki, rounded);
    compare("dw", a_dw, dw, 1e-5);

    // The indexer: bounds that reach outside, and rows that see nothing.
    std::vector<int32_t> bounds(N * 2), best(N * K);
    std::vector<float> scores(N * K);
    for (int64_t t = 0; t < N; t++) {
        bounds[2 * t] = int32_t(random.next() % T) - 2;
        bounds[2 * t + 1] = t % 5 == 4 ? bounds[2 * t] : bounds[2 * t] + int32_t(random.next() % T);
        if (t % 11 == 10) bounds[2 * t] = INT32_MIN, bounds[2 * t + 1] = INT32_MAX;
    }
    status = dsa_lightning_indexer(&shape, q.data(), kv.data(), w.wide.data(), bounds.data(),
                                   best.data(), scores.data());
    compare("indexer status", [&](size_t) { return double(status); }, Numbers(1), 0);
    Numbers expected(N * K), filled(N * K);
    for (int64_t t = 0; t < N; t++) {
        const int64_t b = t / S;
        const int64_t lo = bounds[2 * t] > 0 ? bounds[2 * t] : 0;
        const int64_t hi = bounds[2 * t + 1] < T ? bounds[2 * t + 1] : T;
        const int64_t visible = hi > lo ? hi - lo : 0;
        for (int64_t j = 0; j < K; j++) {
            const int64_t key = best[t * K + j];
            filled[t * K + j] = j < visible;
            expected[t * K + j] = -INFINITY;
            if (key < lo || key >= hi) continue;
            expected[t * K + j] = 0;
            for (int64_t h = 0; h < H; h++) {
                double x = 0;
                for (int64_t d = 0; d < D; d++)
                    x += q.value[(t * H + h) * D + d] * kv.value[(b * T + key) * D + d];
                expected[t * K + j] += w.value[t * H + h] * fmax(x, 0);
            }
        }
    }
    compare("scores", scores, expected, 1e-5);
    compare("indices", [&](size_t i) { return double(best[i] >= 0); }, filled, 0);
    for (int64_t i = 0; i + 1 < N * K; i++)
        if ((i + 1) % K && scores[i] < scores[i + 1]) {
            printf("  scores rise in row %lld\n", (long long)(i / K));
            failures++;
            break;
        }
}

}  // namespace

int main() {
    std::vector<char> names(dsa_instruction_sets(),
                            dsa_instruction_sets() + strlen(dsa_instruction_sets()) + 1);
    int set = 0;
    for (char* name = strtok(names.data(), " "); name; name = strtok(nullptr, " "), set++) {
        for (int bf16 = 0; bf16 <= dsa_multiplies_bfloat16(set); bf16++) {
            const int before = failures;
            run(1, 1, 1, 1, 32, 32, 1, bf16, set, 1, 1);
            run(2, 37, 50, 5, 64, 32, 20, bf16, set, 3, 2);
            run(1, 90, 33, 16, 96, 96, 33, bf16, set, 2, 3);
            run(1, 20, 300, 9, 32, 32, 150, bf16, set, 4, 4);
            printf("%s %s: %s\n", name, bf16 ? "bfloat16" : "float32",
                   failures == before ? "equal to the definition" : "WRONG");
        }
    }
    return failures ? 1 : 0;
}
