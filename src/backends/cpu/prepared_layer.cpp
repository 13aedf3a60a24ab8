#include "backends/cpu/prepared_layer.hpp"

#include <string>

#include "moe/problem.hpp"
#include "moe4/error.hpp"

namespace moe4::cpu {

namespace {

/// Bytes of one expert's two packed parts, each aligned to 64.
struct PackedSizes {
    std::size_t gate_up, down;
};
PackedSizes packed_sizes(const MoeConfig& config, const PackedLayout& layout) {
    return {round_up(layout.gate_up_bytes(config.intermediate_size, config.hidden_size), 64),
            round_up(layout.down_bytes(config.hidden_size, config.intermediate_size), 64)};
}

/// Expert by expert, each one's own bytes given back at once: then both never lie in memory whole. Pages are
/// touched first by the threads that pack, so experts spread over the memory nodes that these run on.
void pack(PreparedLayer& layer, const PackedLayout& layout, const MoeWeights& weights) {
    const PackedSizes sizes = packed_sizes(layer.problem.config, layout);
    const std::size_t bytes = packed_bytes(layer.problem, &layout);
    layer.packed.reset(static_cast<std::uint8_t*>(std::aligned_alloc(64, bytes)));
    if (!layer.packed) {
        throw Error(ErrorKind::machine,
                    "no memory for " + std::to_string(bytes) + " bytes of packed weights");
    }
    layer.workers->for_each(2 * layer.num_held(), [&](int, std::int64_t i) {
        ExpertData& expert = layer.experts[static_cast<std::size_t>(i / 2)].data;
        std::uint8_t* gate_up =
            layer.packed.get() + static_cast<std::size_t>(i / 2) * (sizes.gate_up + sizes.down);
        std::uint8_t* down = gate_up + sizes.gate_up;
        if (i % 2 == 0) {
            layout.pack_gate_up(expert.gate, expert.up, gate_up);
            moe::release(weights, expert.gate);
            moe::release(weights, expert.up);
            expert.packed_gate_up = gate_up;
        } else {
            layout.pack_down(expert.down, down);
            moe::release(weights, expert.down);
            expert.packed_down = down;
        }
    });
}

}  // namespace

std::size_t packed_bytes(const Problem& problem, const PackedLayout* layout) {
    if (layout == nullptr) return 0;
    const PackedSizes sizes = packed_sizes(problem.config, *layout);
    return static_cast<std::size_t>(moe::held_experts(problem).count()) * (sizes.gate_up + sizes.down);
}

std::size_t PreparedLayer::kernel_index(std::int64_t num_rows) const {
    std::size_t i = 0;
    while (i + 1 < kernels.size() && num_rows < kernels[i]->min_rows) ++i;
    return i;
}

PreparedLayer prepare_layer(const Problem& problem, std::vector<const Kernel*> kernels,
                            const MoeWeights& weights, std::shared_ptr<const Workers> workers) {
    PreparedLayer layer;
    layer.problem = problem;
    layer.top_k = moe::slots_per_token(problem);
    layer.held = moe::held_experts(problem);
    layer.kernels = std::move(kernels);
    layer.workers = std::move(workers);
    layer.layout =
        workspace_layout(problem, layer.top_k, layer.num_held(), layer.kernels, layer.workers->count());

    moe::check_weights_fit(problem, weights);
    std::vector<moe::InputScales> scales(weights.experts.size(), {.gate_up = 1.0F, .down = 1.0F});
    if (problem.precision == Precision::w4a4) scales = moe::input_scales(weights, problem.activation_scale);
    moe::check_weights(weights, problem.experts, [&](int count, ThreadPool::Body body, void* context) {
        layer.workers->run(count, body, context);
    });

    for (int i = layer.held.first; i < layer.held.last; ++i) {
        const ExpertWeights& expert = weights.experts[static_cast<std::size_t>(i)];
        const moe::InputScales& scale = scales[static_cast<std::size_t>(i)];
        layer.experts.push_back(
            {.data = {.gate = expert.gate.weight, .up = expert.up.weight, .down = expert.down.weight},
             .gate_scale = expert.gate.weight.global_scale,
             .up_scale = expert.up.weight.global_scale,
             .down_scale = expert.down.weight.global_scale,
             .input_scale = scale.gate_up,
             .h_input_scale = scale.down});
    }
    if (const PackedLayout* layout = layer.kernels.front()->layout; layout != nullptr)
        pack(layer, *layout, weights);
    return layer;
}

}  // namespace moe4::cpu
