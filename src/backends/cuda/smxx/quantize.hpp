#pragma once
// The kernels of moe4/grouped_tokens.hpp.
#include <cuda_runtime.h>

#include <cstdint>

namespace moe4::cuda {

/// Device memory.
struct SwizzleTask {
    const std::uint16_t* hidden;     // bf16 [num_tokens, cols]
    std::int64_t cols;               // a multiple of 16
    const std::int32_t* row_token;   // [rows], grouped by expert
    const std::int32_t* row_expert;  // [rows], ascending
    const std::int32_t* num_rows;    // [1]
    std::int64_t max_padded_rows;    // of all experts, known without their counts
    std::int32_t num_experts;        // at most 1024
    const float* expert_scale;       // [num_experts] A
    std::uint8_t* codes;             // [rows, cols / 2]
    std::uint8_t* scales;            // [padded rows] blocked; padding is zeroed
    std::int32_t* first_padded_row;  // [num_experts + 1] where each expert's scales begin
};

/// Two kernels, no wait.
void quantize_and_swizzle(const SwizzleTask&, cudaStream_t);

}  // namespace moe4::cuda
