#pragma once
// Grouped tokens as the block-scaled GEMMs of other engines and GPUs read them: packed codes, and block
// scales in the 128x4-blocked layout (moe4/nvfp4.hpp), each expert's rows padded to 128.
#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/k_order.cuh"

namespace moe4::cuda {

/// Device memory.
struct SwizzleTask {
    const std::uint16_t* hidden;     // bf16 [num_tokens, cols]
    std::int64_t cols;               // a multiple of 16
    const std::int32_t* row_token;   // [rows], grouped by expert
    const std::int32_t* row_expert;  // [rows], ascending
    const std::int32_t* num_rows;    // [1]
    std::int64_t max_rows;
    std::int32_t num_experts;        // at most 1024
    const float* expert_scale;       // [num_experts] A
    std::uint8_t* codes;             // [rows, cols / 2]
    std::uint8_t* scales;            // [padded rows] blocked; padding is zeroed
    std::int32_t* first_padded_row;  // [num_experts + 1] where each expert's scales begin
};

/// Rows that the scales may take: known without the counts.
constexpr std::int64_t most_padded_rows(std::int64_t max_rows, std::int32_t num_experts) {
    const std::int64_t experts_hit = max_rows < num_experts ? max_rows : num_experts;
    return round_up(max_rows, 128) + experts_hit * 128;
}

/// Two kernels, no wait.
void quantize_and_swizzle(const SwizzleTask&, cudaStream_t);

}  // namespace moe4::cuda
