// The input that layertest makes when it is given none; its bits depend on the seed alone.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "format/bf16.hpp"
#include "moe4/layertest.hpp"

namespace moe4 {

namespace {

/// SplitMix64 (Steele, Lea, Flood 2014) under a Box-Muller transform: the standard library's distributions
/// give other numbers elsewhere.
class NormalNumbers {
public:
    explicit NormalNumbers(std::uint64_t seed) : state_(seed) {}
    double next() {
        const double radius = std::sqrt(-2.0 * std::log(uniform()));
        return radius * std::cos(2.0 * std::numbers::pi * uniform());
    }

private:
    /// In (0, 1).
    double uniform() {
        state_ += 0x9E37'79B9'7F4A'7C15U;
        std::uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xBF58'476D'1CE4'E5B9U;
        z = (z ^ (z >> 27)) * 0x94D0'49BB'1331'11EBU;
        z ^= z >> 31;
        return (static_cast<double>(z >> 11) + 0.5) * 0x1p-53;
    }
    std::uint64_t state_;
};

double largest_calibrated_value(const MoeWeights& weights) {
    double largest_scale = 0.0;
    for (const ExpertWeights& expert : weights.experts) {
        for (const auto& scale : {expert.gate.input_scale, expert.up.input_scale}) {
            if (scale && std::isfinite(*scale)) largest_scale = std::max(largest_scale, *scale);
        }
    }
    return largest_scale > 0.0 ? largest_scale * 2688.0 : std::numeric_limits<double>::infinity();
}

}  // namespace

std::vector<std::uint16_t> default_hidden(const MoeWeights& weights, std::int64_t num_tokens,
                                          std::uint64_t seed) {
    const double limit = largest_calibrated_value(weights);
    NormalNumbers normal(seed);
    std::vector<double> row(static_cast<std::size_t>(weights.config.hidden_size));
    std::vector<std::uint16_t> hidden;
    hidden.reserve(static_cast<std::size_t>(num_tokens) * row.size());
    for (std::int64_t token = 0; token < num_tokens; ++token) {
        double largest = 0.0;
        for (double& x : row) {
            x = normal.next();
            largest = std::max(largest, std::fabs(x));
        }
        const double factor = std::min(1.0, limit / largest);
        for (const double x : row) hidden.push_back(format::bf16_from_double(x * factor));
    }
    return hidden;
}

}  // namespace moe4
