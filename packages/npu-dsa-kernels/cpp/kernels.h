// The functions of one instruction set, as dispatch.cpp chooses them.
#pragma once

#include "dsa.h"

namespace dsa {

struct Kernels {
    const char* name;
    bool multiplies_bfloat16;
    int (*sparse_attention)(const dsa_shape&, const void*, const void*, const int32_t*, void*,
                            float*, float*);
    int (*sparse_attention_backward)(const dsa_shape&, const void*, const void*, const int32_t*,
                                     const float*, const void*, const float*, void*, float*);
    int (*attention_target)(const dsa_shape&, const void*, const void*, const int32_t*,
                            const float*, float*);
    int (*indexer_kl_loss)(const dsa_shape&, const void*, const void*, const float*,
                           const int32_t*, const float*, float*);
    int (*indexer_kl_loss_backward)(const dsa_shape&, const void*, const void*, const float*,
                                    const int32_t*, const float*, const float*, void*, float*,
                                    float*);
    int (*lightning_indexer)(const dsa_shape&, const void*, const void*, const float*,
                             const int32_t*, int32_t*, float*);
};

}  // namespace dsa
