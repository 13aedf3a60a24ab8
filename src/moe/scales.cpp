#include "moe/scales.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>

#include "format/e4m3.hpp"
#include "moe/parallel.hpp"
#include "moe4/error.hpp"

namespace moe4::moe {

namespace {

std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", x);
    return text;
}

/// A scale as the file spells it: reciprocal dialects hold 1 / x.
std::string as_stored(const MoeWeights& weights, double multiplier) {
    return number(weights.leaves.scales_divide ? 1.0 / multiplier : multiplier);
}

float usable_input_scale(const MoeWeights& weights, int expert, Projection projection) {
    if (const auto fault = input_scale_fault(weights, expert, projection)) throw *fault;
    return static_cast<float>(*weights.experts[static_cast<std::size_t>(expert)][projection].input_scale);
}

/// Whether any of eight e4m3 bytes is NaN or has its sign set: of a byte without sign, adding 1 sets it for
/// 0x7F alone.
constexpr bool has_bad_scale(std::uint64_t eight) {
    constexpr std::uint64_t kSigns = 0x8080'8080'8080'8080U;
    constexpr std::uint64_t kOnes = 0x0101'0101'0101'0101U;
    return ((eight | ((eight & ~kSigns) + kOnes)) & kSigns) != 0;
}

bool row_has_bad_scale(const std::uint8_t* scales, std::int64_t num_blocks) {
    std::int64_t block = 0;
    std::uint64_t eight = 0;
    for (; block + 8 <= num_blocks; block += 8) {
        std::memcpy(&eight, scales + block, 8);
        if (has_bad_scale(eight)) return true;
    }
    eight = 0;
    std::memcpy(&eight, scales + block, static_cast<std::size_t>(num_blocks - block));
    return has_bad_scale(eight);
}

}  // namespace

std::string tensor_name(const MoeWeights& weights, int expert, Projection projection,
                        const std::string& leaf) {
    const std::string& name = weights.experts[static_cast<std::size_t>(expert)][projection].name;
    if (!name.empty()) return name + "." + leaf;
    return "layer " + std::to_string(weights.layer) + ", expert " + std::to_string(expert) + ": " +
           std::string(projection_name(projection)) + "." + leaf;
}

std::string_view projection_name(Projection projection) {
    constexpr std::string_view kNames[] = {"gate_proj", "up_proj", "down_proj"};
    return kNames[static_cast<std::size_t>(projection)];
}

std::optional<Error> global_scale_fault(const MoeWeights& weights, int expert, Projection projection) {
    const double scale = weights.experts[static_cast<std::size_t>(expert)][projection].weight.global_scale;
    if (scale > 0.0 && std::isfinite(scale)) return std::nullopt;
    return Error(ErrorKind::broken_file,
                 tensor_name(weights, expert, projection, weights.leaves.global_scale) + " is " +
                     as_stored(weights, scale) + ", expected a positive finite number");
}

std::optional<Error> input_scale_fault(const MoeWeights& weights, int expert, Projection projection) {
    const std::optional<double>& scale =
        weights.experts[static_cast<std::size_t>(expert)][projection].input_scale;
    const std::string name = tensor_name(weights, expert, projection, weights.leaves.input_scale);
    const std::string& fault =
        weights.experts[static_cast<std::size_t>(expert)][projection].input_scale_fault;
    if (!fault.empty()) return Error(ErrorKind::broken_file, fault);
    if (!scale) {
        return Error(
            ErrorKind::unsupported,
            name +
                " is missing, expected a calibrated activation scale for w4a4 (the activation scales "
                "dynamic and dynamic-token, and w4a16, do without)");
    }
    const auto rounded = static_cast<float>(*scale);
    if (rounded >= std::numeric_limits<float>::min() && std::isfinite(rounded)) return std::nullopt;
    return Error(ErrorKind::broken_file,
                 name + " is " + as_stored(weights, *scale) + ", expected a positive normal number");
}

std::optional<Error> block_scale_fault(const MoeWeights& weights, int expert, Projection projection) {
    const Nvfp4View& matrix = weights.experts[static_cast<std::size_t>(expert)][projection].weight;
    const std::int64_t num_blocks = matrix.cols / kNvfp4BlockSize;
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        const std::uint8_t* scales = matrix.block_scale + row * matrix.scale_stride;
        if (!row_has_bad_scale(scales, num_blocks)) continue;
        const std::uint8_t* bad = std::find_if(scales, scales + num_blocks, [](std::uint8_t byte) {
            return (byte & 0x80U) != 0 || format::e4m3_is_nan(byte);
        });
        char found[8];
        std::snprintf(found, sizeof found, "0x%02X", *bad);
        return Error(ErrorKind::broken_file,
                     tensor_name(weights, expert, projection, weights.leaves.block_scale) + " holds " +
                         found + " (" + (format::e4m3_is_nan(*bad) ? "NaN" : "negative") + ") at row " +
                         std::to_string(row) + ", block " + std::to_string(bad - scales) +
                         ", expected scales of 0 or more");
    }
    return std::nullopt;
}

HeldExperts held_experts(const ExpertRange& range, int num_experts) {
    const bool begins_within = range.first >= 0 && range.first < num_experts;
    const int count = range.count < 0 && begins_within ? num_experts - range.first : range.count;
    if (!begins_within || count < 1 || count > num_experts - range.first) {
        throw Error(ErrorKind::invalid_argument,
                    "the expert range " + std::to_string(range.first) + ":" + std::to_string(count) +
                        " does not lie within the layer, expected first and count within " +
                        std::to_string(num_experts) + " experts");
    }
    return {range.first, range.first + count};
}

std::vector<InputScales> input_scales(const MoeWeights& weights, ActivationScale mode) {
    std::vector<InputScales> scales(weights.experts.size());
    if (mode == ActivationScale::dynamic || mode == ActivationScale::dynamic_token) return scales;
    InputScales largest;
    for (std::size_t i = 0; i < scales.size(); ++i) {
        const int expert = static_cast<int>(i);
        scales[i] = {.gate_up = std::max(usable_input_scale(weights, expert, Projection::gate),
                                         usable_input_scale(weights, expert, Projection::up)),
                     .down = usable_input_scale(weights, expert, Projection::down)};
        largest = {std::max(largest.gate_up, scales[i].gate_up), std::max(largest.down, scales[i].down)};
    }
    if (mode == ActivationScale::layer_max) std::fill(scales.begin(), scales.end(), largest);
    return scales;
}

void check_weights(const MoeWeights& weights, ExpertRange range, const ParallelFor& parallel_for) {
    const HeldExperts held = held_experts(range, static_cast<int>(weights.experts.size()));
    const auto is_bad = [&](int expert) {
        for (const Projection projection : kProjections) {
            const Nvfp4View& matrix = weights.experts[static_cast<std::size_t>(expert)][projection].weight;
            const std::int64_t num_blocks = matrix.cols / kNvfp4BlockSize;
            for (std::int64_t row = 0; row < matrix.rows; ++row) {
                if (row_has_bad_scale(matrix.block_scale + row * matrix.scale_stride, num_blocks))
                    return true;
            }
        }
        return false;
    };
    for (int expert = held.first; expert < held.last; ++expert) {
        for (const Projection projection : kProjections) {
            if (const auto fault = global_scale_fault(weights, expert, projection)) throw *fault;
        }
    }

    std::atomic<int> lowest_bad = held.last;  // so that the message does not depend on the schedule
    parallel(parallel_for, held.count(), [&](int index) {
        const int expert = held.first + index;
        if (expert >= lowest_bad || !is_bad(expert)) return;
        int seen = lowest_bad;
        while (expert < seen && !lowest_bad.compare_exchange_weak(seen, expert)) {
        }
    });
    if (lowest_bad < held.last) {
        for (const Projection projection : kProjections) {
            if (const auto fault = block_scale_fault(weights, lowest_bad, projection)) throw *fault;
        }
    }
}

}  // namespace moe4::moe

namespace moe4 {

void check_input_scales(const MoeWeights& weights, ActivationScale mode) { moe::input_scales(weights, mode); }

}  // namespace moe4
