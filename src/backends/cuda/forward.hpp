#pragma once
// One run of a layer on the GPU.
#include "backends/cuda/prepared_layer.hpp"

namespace moe4::cuda {

/// The arguments of Layer::run after they have been checked; device memory.
struct ForwardInput {
    const std::uint16_t* hidden;  // bf16 [num_tokens, hidden_size]
    const std::int32_t* top_k_ids;
    const float* top_k_weights;
    std::int64_t num_tokens;  // 1 or more
    float* output_f32;        // one of the two
    std::uint16_t* output_bf16;
    std::uint8_t* workspace;
};

/// Which tile shapes the two GEMMs run with.
struct MmaChoice {
    int gate_up, down;  // indices into sm90::kMmaShapes
};
MmaChoice choose_mma(const PreparedLayer&, std::int64_t num_tokens);

/// Enqueues the kernels; reads nothing back and allocates nothing. The device is current.
void forward(const PreparedLayer&, const ForwardInput&, const MmaChoice&, cudaStream_t);

/// Shared memory above 48 KB has to be asked for once a kernel and device; also loads every kernel, so that
/// the first run may be captured.
void load_kernels();

}  // namespace moe4::cuda
