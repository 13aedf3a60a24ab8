#pragma once
// The last stage: a token's output from its rows of y.
#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/smxx/arrange.hpp"

namespace moe4::cuda {

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

/// Once before: a first launch that finds no memory for its kernel would leave group.cleared as it is.
void load_combine();

}  // namespace moe4::cuda
