#pragma once
// A layer on a GPU: the checkpoint's bytes, rows of codes padded to multiples of 16 bytes, block scales by
// chunks of K, and its experts' scales.
#include <array>
#include <atomic>
#include <memory>
#include <optional>

#include "backends/cuda/grouped_gemm.hpp"
#include "backends/cuda/runtime.hpp"
#include "backends/cuda/sm90/mma_shape.hpp"
#include "backends/cuda/sm90/wgmma_shape.hpp"
#include "backends/cuda/upload.hpp"
#include "moe/problem.hpp"
#include "moe4/backend.hpp"
#include "moe4/error.hpp"

namespace moe4::cuda {

/// Where the parts of a layer's weights lie in one piece of device memory, in bytes.
struct WeightLayoutBytes {
    std::int64_t gate_up_code_pitch, down_code_pitch;  // of a row
    std::int64_t gate_up_chunks, down_chunks;          // of kChunk k
    std::size_t gate_up_codes;                         // [experts, 2, intermediate_size, pitch]
    std::size_t gate_up_scales;                        // [experts, chunks, 2, intermediate_size, 16]
    std::size_t down_codes;                            // [experts, hidden_size, pitch]
    std::size_t down_scales;                           // [experts, chunks, hidden_size, 16]
    std::size_t bytes;
};
WeightLayoutBytes weight_layout(const MoeConfig&, int num_held);

/// On the device, [experts held] each.
struct ExpertScales {
    const double *gate, *up, *down;                      // G
    const float *gate_factor, *up_factor, *down_factor;  // A * G; G where A belongs to a row
    const float *input_scale, *h_input_scale;            // A1, A2 of the calibrated modes
};

struct DeviceRouter {
    DeviceBuffer weights;  // [num_experts, hidden_size]
    DType dtype = DType::bf16;
    DeviceBuffer bias;  // f32 [num_experts]; no data: none
};

/// Counters that are zero whenever no run uses them, which the caller's scratch memory cannot be. A set
/// belongs to a workspace: no two runs use one at the same time.
class CounterPool {
public:
    CounterPool();
    /// nullptr: there have been more workspaces than sets.
    sm90::RunCounters* of(const void* workspace);

private:
    static constexpr std::size_t kSets = 16;
    DeviceBuffer memory_;
    std::array<std::atomic<const void*>, kSets> workspaces_{};
};

struct PreparedLayer {
    Problem problem;
    int top_k = 0;
    moe::HeldExperts held;
    int device = 0;
    int num_sms = 0;
    std::int64_t wgmma_min_rows = 0;  // per expert on average: from there on wgmma, else mma
    DeviceBuffer weights, scale_memory;
    ExpertScales scales{};
    WeightMaps gate_up_maps[sm90::kNumMmaShapes], down_maps[sm90::kNumMmaShapes];
    WeightMaps wgmma_gate_up_maps[sm90::kNumWgmmaShapes], wgmma_down_maps[sm90::kNumWgmmaShapes];
    std::unique_ptr<CounterPool> counters;
    std::optional<Error> router_refusal;  // what route() throws; else there is a router
    DeviceRouter router;

    int num_held() const { return held.count(); }
};

/// Memory on the current device for the weights of a layer, and the maps that read it; nothing is copied yet.
PreparedLayer allocate_layer(const Problem&, std::int64_t wgmma_min_rows, int device);

/// What ExpertScales is made from.
struct ExpertScaleValues {
    double global[3];  // by Projection
    moe::InputScales input;
};
void set_scales(PreparedLayer&, std::span<const ExpertScaleValues> experts);

/// Checks the weights, then copies them to the current device. Throws as Backend::prepare.
PreparedLayer prepare_layer(const Problem&, std::int64_t wgmma_min_rows, const MoeWeights&, int device,
                            UploadPool&);

}  // namespace moe4::cuda
