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
    // Scattered writes are slow: nullptr where nobody reads them.
    std::int32_t* row_token;  // [rows]
    std::int32_t* slot_row;   // [num_tokens, top_k]; -1: adds nothing
};

inline constexpr int kWarpSlots = 32;  // that a warp can group

struct GroupTask {
    const std::int32_t* top_k_ids;  // [num_slots]
    std::int64_t num_slots;
    std::int32_t top_k;
    std::int32_t first_expert, num_held;
    std::int32_t largest_segment;  // rows
    std::int32_t* cleared;         // counters of a kernel that follows
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

/// Quantises the permuted bf16 rows [num_rows, permuted_size(cols)] in place, row r with A = row_scale[r].
struct RequantizeTask {
    std::uint16_t* rows;
    std::int64_t cols;
    std::int64_t max_rows;
    const std::int32_t* num_rows;  // on the device
    const float* row_scale;
};
void requantize(const RequantizeTask&, cudaStream_t);

/// row_scale[r] = largest finite magnitude of the row / 2688, or with shared_largest of all the rows, through
/// *shared_largest (bits of a float), which the stream must have zeroed.
struct RowScaleTask {
    const std::uint16_t* rows;  // bf16 [max_rows, stride], of which the first `cols` are looked at
    std::int64_t cols, stride;
    std::int64_t max_rows;
    const std::int32_t* num_rows;   // on the device; nullptr: max_rows
    std::uint32_t* shared_largest;  // nullptr: each row has its own
    float* row_scale;
};
void scale_rows(const RowScaleTask&, cudaStream_t);

/// out[t] = sum over slots j in order of top_k_weights[t, j] * y[slot_row[t, j]], fp32.
struct CombineTask {
    const float* y;  // [rows, cols]
    const std::int32_t* slot_row;
    const float* top_k_weights;
    std::int64_t num_tokens;
    std::int32_t top_k;
    std::int64_t cols;
    float* out_f32;  // one of the two
    std::uint16_t* out_bf16;
};
void combine(const CombineTask&, cudaStream_t);

/// The same of up to kWarpSlots slots, which it groups by itself: slot_row is not used. Clears group.cleared
/// when y is there.
void combine_few_tokens(const CombineTask&, const GroupTask&, cudaStream_t);

}  // namespace moe4::cuda
