#pragma once
// The router on the device.
#include <cuda_runtime.h>

#include <cstdint>

#include "moe4/moe.hpp"

namespace moe4::cuda {

struct RouteTask {
    const std::uint16_t* hidden;  // bf16 [num_tokens, hidden_size]
    const void* router;           // bf16 or f32 [num_experts, hidden_size]
    bool router_is_f32;
    const float* bias;  // [num_experts]; nullptr: none
    std::int64_t num_tokens;
    std::int64_t hidden_size;
    std::int32_t num_experts;
    RouterConfig config;
    std::int32_t* top_k_ids;
    float* top_k_weights;
};
void route(const RouteTask&, cudaStream_t);

}  // namespace moe4::cuda
