// The C interface of the compiled CPU kernels. Every tensor is contiguous; every function returns
// 0, or a dsa_status when it did nothing.
#pragma once

#include <stdint.h>

#define DSA_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum dsa_status { DSA_OK = 0, DSA_NO_MEMORY = 1, DSA_NO_SUCH_KERNEL = 2 };

enum dsa_dtype { DSA_FLOAT32 = 0, DSA_BFLOAT16 = 1 };

// B batch, S queries, T keys, H heads, D key dim, V value dim, K selected keys.
// D and V are multiples of DSA_DIM_MULTIPLE, and V <= D (the indexer has no values: V is 0).
#define DSA_DIM_MULTIPLE 32

typedef struct {
    int64_t B, S, T, H, D, V, K;
    int32_t dtype;            // of q, kv, out, d_out, dq
    int32_t threads;          // at least 1
    int32_t instruction_set;  // number in dsa_instruction_sets()
    float scale;              // of the logits; unused by the indexer
} dsa_shape;

// Moves with every change of this file: a caller of another version must not call.
#define DSA_INTERFACE_VERSION 1
DSA_API int dsa_interface_version(void);
// Instruction sets in this library that the machine can run, best first, separated by spaces.
DSA_API const char* dsa_instruction_sets(void);
// Whether one of them multiplies bfloat16 pairs itself. If not, pass float32.
DSA_API int dsa_multiplies_bfloat16(int instruction_set);

// q [B,S,H,D], kv [B,T,D], indices [B,S,K] -> out [B,S,H,V], lse [B,S,H], and target [B,S,K] if it
// is not null
DSA_API int dsa_sparse_attention(const dsa_shape* shape, const void* q, const void* kv,
                         const int32_t* indices, void* out, float* lse, float* target);
// d_out like out, d_lse like lse -> dq like q, d_kv float32 [B,T,D], which must come in as zeros
DSA_API int dsa_sparse_attention_backward(const dsa_shape* shape, const void* q, const void* kv,
                                  const int32_t* indices, const float* lse, const void* d_out,
                                  const float* d_lse, void* dq, float* d_kv);
// -> target [B,S,K]
DSA_API int dsa_attention_target(const dsa_shape* shape, const void* q, const void* kv,
                         const int32_t* indices, const float* lse, float* target);
// q [B,S,H,D], k [B,T,D], w float32 [B,S,H], target [B,S,K] -> loss [B,S]
DSA_API int dsa_indexer_kl_loss(const dsa_shape* shape, const void* q, const void* k, const float* w,
                        const int32_t* indices, const float* target, float* loss);
// -> dq like q, dk float32 [B,T,D], which must come in as zeros, dw [B,S,H]
DSA_API int dsa_indexer_kl_loss_backward(const dsa_shape* shape, const void* q, const void* k,
                                 const float* w, const int32_t* indices, const float* target,
                                 const float* d_loss, void* dq, float* dk, float* dw);
// bounds int32 [B,S,2], or null for causal -> indices [B,S,K], scores [B,S,K]
DSA_API int dsa_lightning_indexer(const dsa_shape* shape, const void* q, const void* k, const float* w,
                          const int32_t* bounds, int32_t* indices, float* scores);

#ifdef __cplusplus
}
#endif
