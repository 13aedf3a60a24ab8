#pragma once
// One run of a layer on the CPU.
#include "backends/cpu/prepared_layer.hpp"

namespace moe4::cpu {

/// The arguments of Layer::run after they have been checked.
struct ForwardInput {
    const std::uint16_t* hidden;  // bf16 [num_tokens, hidden_size]
    const std::int32_t* top_k_ids;
    const float* top_k_weights;
    std::int64_t num_tokens;
    float* output_f32;  // one of the two
    std::uint16_t* output_bf16;
    std::uint8_t* workspace;  // PreparedLayer::layout.bytes, aligned to 64
};

/// Allocates nothing and throws nothing.
void forward(const PreparedLayer&, const ForwardInput&);

}  // namespace moe4::cpu
