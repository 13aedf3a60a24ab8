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

/// Which kernels the two GEMMs run with.
struct GemmChoice {
    bool uses_wgmma = false;
    int mma_shape = 0;    // index into sm90::kMmaShapes
    int wgmma_shape = 0;  // index into sm90::kWgmmaShapes
};
GemmChoice choose_gemms(const PreparedLayer&, std::int64_t num_tokens);

/// Bytes of device memory that a run of up to problem.max_tokens needs.
std::size_t workspace_bytes(const Problem&, std::int64_t wgmma_min_rows);

/// Enqueues the kernels; reads nothing back and allocates nothing. The device is current.
void forward(const PreparedLayer&, const ForwardInput&, const GemmChoice&, cudaStream_t);

/// Loads the GEMMs: shared memory above 48 KB has to be asked for once a kernel and device.
void load_kernels();

}  // namespace moe4::cuda
