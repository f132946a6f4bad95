// Chooses the instruction set at run time and carries the C interface.

#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace dsa {

// Those this library was built for; hatch_build.py lists them as X(name).
#define X(name) extern const Kernels kernels_##name;
DSA_INSTRUCTION_SETS
#undef X

namespace {

bool machine_has(const char* name) {
    const auto is = [name](const char* other) { return strcmp(name, other) == 0; };
#if defined(__x86_64__)
    // __builtin_cpu_supports also asks whether the system saves the registers.
    if (is("avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (is("avx512")) return avx512;
    if (is("avx512_bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long kBf16 = 1UL << 14;  // HWCAP2_BF16
    if (is("neon_bf16")) return getauxval(AT_HWCAP2) & kBf16;
#endif
    return is("baseline");
}

const Kernels* const kAll[] = {
#define X(name) &kernels_##name,
    DSA_INSTRUCTION_SETS
#undef X
};

struct Found {
    const Kernels* usable[sizeof kAll / sizeof *kAll];
    int count = 0;
    char names[256] = "";

    Found() {
        for (const Kernels* kernels : kAll) {
            if (!machine_has(kernels->name)) continue;
            if (count > 0) strcat(names, " ");
            strcat(names, kernels->name);
            usable[count++] = kernels;
        }
    }
};

const Found found;  // set up when the library is loaded

const Kernels* chosen(const dsa_shape* shape) {
    const int i = shape->instruction_set;
    return i >= 0 && i < found.count ? found.usable[i] : nullptr;
}

}  // namespace
}  // namespace dsa

using dsa::chosen;
using dsa::found;

extern "C" {

const char* dsa_instruction_sets(void) { return found.names; }

int dsa_interface_version(void) { return DSA_INTERFACE_VERSION; }

int dsa_multiplies_bfloat16(int instruction_set) {
    return instruction_set >= 0 && instruction_set < found.count &&
           found.usable[instruction_set]->multiplies_bfloat16;
}

int dsa_sparse_attention(const dsa_shape* shape, const void* q, const void* kv,
                         const int32_t* indices, void* out, float* lse, float* target) {
    const auto* kernels = chosen(shape);
    return kernels ? kernels->sparse_attention(*shape, q, kv, indices, out, lse, target)
                   : int(DSA_NO_SUCH_KERNEL);
}

int dsa_sparse_attention_backward(const dsa_shape* shape, const void* q, const void* kv,
                                  const int32_t* indices, const float* lse, const void* d_out,
                                  const float* d_lse, void* dq, float* d_kv) {
    const auto* kernels = chosen(shape);
    return kernels ? kernels->sparse_attention_backward(*shape, q, kv, indices, lse, d_out, d_lse, dq,
                                                    d_kv)
                   : int(DSA_NO_SUCH_KERNEL);
}

int dsa_attention_target(const dsa_shape* shape, const void* q, const void* kv,
                         const int32_t* indices, const float* lse, float* target) {
    const auto* kernels = chosen(shape);
    return kernels ? kernels->attention_target(*shape, q, kv, indices, lse, target)
                   : int(DSA_NO_SUCH_KERNEL);
}

int dsa_indexer_kl_loss(const dsa_shape* shape, const void* q, const void* k, const float* w,
                        const int32_t* indices, const float* target, float* loss) {
    const auto* kernels = chosen(shape);
    return kernels ? kernels->indexer_kl_loss(*shape, q, k, w, indices, target, loss)
                   : int(DSA_NO_SUCH_KERNEL);
}

int dsa_indexer_kl_loss_backward(const dsa_shape* shape, const void* q, const void* k,
                                 const float* w, const int32_t* indices, const float* target,
                                 const float* d_loss, void* dq, float* dk, float* dw) {
    const auto* kernels = chosen(shape);
    return kernels ? kernels->indexer_kl_loss_backward(*shape, q, k, w, indices, target, d_loss, dq, dk,
                                                   dw)
                   : int(DSA_NO_SUCH_KERNEL);
}

int dsa_lightning_indexer(const dsa_shape* shape, const void* q, const void* k, const float* w,
                          const int32_t* bounds, int32_t* indices, float* scores) {
    const auto* kernels = chosen(shape);
    return kernels ? kernels->lightning_indexer(*shape, q, k, w, bounds, indices, scores)
                   : int(DSA_NO_SUCH_KERNEL);
}

}  // extern "C"
