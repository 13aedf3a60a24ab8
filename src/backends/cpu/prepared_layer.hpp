#pragma once
// A layer whose weights lie as its kernels read them: all that a run needs beside its arguments.
#include <cstdlib>
#include <memory>
#include <vector>

#include "backends/cpu/kernels/kernel.hpp"
#include "backends/cpu/workers.hpp"
#include "backends/cpu/workspace_layout.hpp"
#include "moe/scales.hpp"
#include "moe4/backend.hpp"

namespace moe4::cpu {

struct PreparedExpert {
    ExpertData data;
    double gate_scale, up_scale, down_scale;  // G
    float input_scale, h_input_scale;         // A1 and A2 of the calibrated modes; 1 for w4a16
};

struct PreparedLayer {
    struct Free {
        void operator()(std::uint8_t* bytes) const { std::free(bytes); }
    };

    Problem problem;
    int top_k = 0;
    moe::HeldExperts held;
    std::vector<const Kernel*> kernels;  // as Selection has them
    WorkspaceLayout layout;
    std::vector<PreparedExpert> experts;  // those held
    std::unique_ptr<std::uint8_t, Free> packed;
    std::shared_ptr<const Workers> workers;

    std::int64_t num_held() const { return held.count(); }
    std::size_t kernel_index(std::int64_t num_rows) const;  // that serves an expert of so many rows
};

/// What the layer of a problem would own: 0 where its kernels read the checkpoint in place.
std::size_t packed_bytes(const Problem&, const PackedLayout*);

/// Checks that the weights fit the problem and can mean something, then packs them. Throws as
/// Backend::prepare.
PreparedLayer prepare_layer(const Problem&, std::vector<const Kernel*> kernels, const MoeWeights&,
                            std::shared_ptr<const Workers>);

}  // namespace moe4::cpu
