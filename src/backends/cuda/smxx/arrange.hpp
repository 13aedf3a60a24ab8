#pragma once
// The first stage: which rows go to which expert, and the tokens in the form that the GEMMs read.
#include <cuda_runtime.h>

#include <cstdint>

#include "moe4/backend.hpp"

namespace moe4::cuda {

/// Rows of one expert that one tile of a GEMM covers.
struct alignas(16) Segment {
    std::int32_t expert;  // counted from the first one held
    std::int32_t first_row;
    std::int32_t num_rows;
    std::int32_t unused;
};

/// Device memory. A row is one slot of a token whose expert is held; rows are grouped by expert, in the order
/// of the slots.
struct Grouping {
    std::int32_t* num_segments;  // [1]
    std::int32_t* num_rows;      // [1]
    Segment* segments;
    std::int32_t* row_token;  // [rows]; nullptr where nobody reads it: scattered writes are slow
    std::int32_t* slot_row;   // [num_tokens, top_k]; -1: adds nothing
};

inline constexpr int kWarpSlots = 32;  // that a warp can group

struct GroupTask {
    const std::int32_t* top_k_ids;  // [num_slots]
    std::int64_t num_slots;
    std::int32_t top_k;
    std::int32_t first_expert, num_held;
    std::int32_t largest_segment;  // rows
    std::int32_t* cleared;         // counters, so that the next kernel that counts finds 0
    std::int64_t num_cleared;
    Grouping out;
};

/// How the 16-bit rows of a GEMM are made.
struct EncodeTask {
    const std::uint16_t* hidden;  // bf16 [num_tokens, cols]
    std::uint16_t* rows;          // [.., permuted_size(cols)] in the order of k_order.hpp, zeros behind cols
    std::int64_t cols;
    std::int64_t num_tokens;
    bool quantizes;              // to fp16 e2m1 * e4m3, else the bf16 values
    const float* token_scale;    // A of each token; nullptr: expert_scale
    const float* expert_scale;   // A of each expert
    bool scales_by_expert;       // else the first expert's is everyone's
    std::uint16_t* padded_rows;  // other rows whose padding is to be zeroed: h; nullptr: none
    std::int64_t padded_cols;
    std::int64_t num_padded_rows;

#ifdef __CUDACC__
    __device__ float scale(std::int64_t token, std::int32_t expert) const {
        return token_scale != nullptr ? token_scale[token] : expert_scale[expert];
    }
#endif
};

/// One kernel: groups the slots by expert, and encodes one row a token beside it.
void group_and_encode(const GroupTask&, const EncodeTask&, cudaStream_t);

/// One kernel: groups the slots by expert, and encodes each token to all of its rows. Once before: the kernel
/// may have the shared memory that it needs.
void group_and_scatter(const GroupTask&, const EncodeTask&, int num_sms, cudaStream_t);
void load_scatter();

}  // namespace moe4::cuda
