#include "checkpoint/inspect.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "checkpoint/weight_format.hpp"
#include "moe/scales.hpp"

namespace moe4::checkpoint {

namespace {

/// Calls visit(expert, projection) for every matrix that could be read.
template <class Visit>
void for_each_matrix(const MoeWeights& weights, Visit visit) {
    for (std::size_t expert = 0; expert < weights.experts.size(); ++expert) {
        for (const Projection projection : kProjections) {
            if (weights.experts[expert][projection].weight.packed != nullptr)
                visit(static_cast<int>(expert), projection);
        }
    }
}

const ExpertMatrix& matrix_of(const MoeWeights& weights, int expert, Projection projection) {
    return weights.experts[static_cast<std::size_t>(expert)][projection];
}

void widen(ScaleRange& range, double value) {
    range.min = std::min(range.min, value);
    range.max = std::max(range.max, value);
}

void scan_global_scales(const MoeWeights& weights, LayerInfo& info) {
    for (ScaleRange& range : info.global_scale) range = {.min = HUGE_VAL, .max = -HUGE_VAL, .faults = {}};
    for_each_matrix(weights, [&](int expert, Projection projection) {
        ScaleRange& range = info.global_scale[static_cast<int>(projection)];
        if (const auto fault = moe::global_scale_fault(weights, expert, projection)) {
            range.faults.emplace_back(fault->what());
            info.refusals.emplace_back(fault->what());
        } else {
            widen(range, matrix_of(weights, expert, projection).weight.global_scale);
        }
    });
    for (const ExpertWeights& expert : weights.experts) {
        if (expert.gate.weight.packed == nullptr || expert.up.weight.packed == nullptr) continue;
        info.gate_up_global_mismatches += expert.gate.weight.global_scale != expert.up.weight.global_scale;
    }
}

/// Their faults hinder w4a4 with a calibrated scale alone, and one of them is reason enough.
void scan_input_scales(const MoeWeights& weights, LayerInfo& info) {
    for (ScaleRange& range : info.input_scale) range = {.min = HUGE_VAL, .max = -HUGE_VAL, .faults = {}};
    for_each_matrix(weights, [&](int expert, Projection projection) {
        ScaleRange& range = info.input_scale[static_cast<int>(projection)];
        if (const auto fault = moe::input_scale_fault(weights, expert, projection)) {
            range.faults.emplace_back(fault->what());
        } else {
            widen(range, *matrix_of(weights, expert, projection).input_scale);
        }
    });
}

void count_block_scales(const Nvfp4View& matrix, BlockScaleCounts& counts) {
    std::array<std::uint64_t, 256> histogram{};
    const std::int64_t num_blocks = matrix.cols / kNvfp4BlockSize;
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        const std::uint8_t* scales = matrix.block_scale + row * matrix.scale_stride;
        for (std::int64_t block = 0; block < num_blocks; ++block) ++histogram[scales[block]];
    }
    for (std::size_t byte = 0; byte < histogram.size(); ++byte) {
        counts.total += histogram[byte];
        if ((byte & 0x7FU) == 0x7F) {
            counts.nan += histogram[byte];
        } else if (byte >= 0x80) {
            counts.negative += histogram[byte];
        } else if (byte == 0) {
            counts.zero += histogram[byte];
        } else if (byte < 0x08) {
            counts.subnormal += histogram[byte];
        }
    }
}

void scan_block_scales(const MoeWeights& weights, LayerInfo& info) {
    BlockScaleCounts& counts = info.block_scales.emplace();
    for_each_matrix(weights, [&](int expert, Projection projection) {
        const std::uint64_t bad_before = counts.nan + counts.negative;
        count_block_scales(matrix_of(weights, expert, projection).weight, counts);
        if (counts.nan + counts.negative == bad_before) return;
        info.refusals.emplace_back(moe::block_scale_fault(weights, expert, projection)->what());
    });
}

/// Refusals so far are of the weights and stop both; a faulty input scale stops w4a4 with calibrated scales.
void decide_modes(LayerInfo& info) {
    if (!info.refusals.empty()) return;
    info.modes.push_back(Precision::w4a16);
    for (const ScaleRange& range : info.input_scale) {
        if (range.faults.empty()) continue;
        info.refusals.push_back("w4a4 with calibrated activation scales: " + range.faults.front());
        return;
    }
    info.modes.push_back(Precision::w4a4);
}

bool has_shared_expert(const TensorRange& block, const ModelConfig& config) {
    const auto is_shared = [&](const auto& entry) {
        return entry.name.substr(block.prefix.size()).starts_with("shared_expert");
    };
    return config.n_shared_experts.value_or(0) > 0 ||
           std::any_of(block.present.begin(), block.present.end(), is_shared) ||
           std::any_of(block.absent.begin(), block.absent.end(), is_shared);
}

}  // namespace

LayerInfo inspect_layer(const OpenedCheckpoint& checkpoint, int layer, Checkpoint::Scan scan) {
    const bool reads_values = scan == Checkpoint::Scan::block_scales;
    const LayerReading reading = read_layer(checkpoint, layer, reads_values ? Read::values : Read::scalars);
    const MoeWeights& weights = reading.weights;
    const auto format = layer_format(reading.tensors, weights.config.num_experts);
    LayerInfo info;
    info.layer = layer;
    info.format = format ? format_name(*format) : "mixed";
    info.num_experts = weights.config.num_experts;
    info.hidden_size = weights.config.hidden_size;
    info.intermediate_size = weights.config.intermediate_size;
    info.has_shared_expert = has_shared_expert(reading.tensors.block, checkpoint.config);
    info.bytes = reading.tensors.expert_bytes;
    for (const Error& refusal : reading.refusals) info.refusals.emplace_back(refusal.what());
    scan_global_scales(weights, info);
    scan_input_scales(weights, info);
    if (reads_values) scan_block_scales(weights, info);
    decide_modes(info);
    return info;
}

}  // namespace moe4::checkpoint
