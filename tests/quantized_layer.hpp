#pragma once
// A layer of seeded random weights, quantised as ModelOpt does it, with the originals it was made from.
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "format/bf16.hpp"
#include "format/quantize.hpp"
#include "moe4/backend.hpp"

namespace moe4 {

inline std::vector<std::uint16_t> random_bf16(std::mt19937& random, std::size_t count, float deviation = 1) {
    std::normal_distribution<float> normal(0, deviation);
    std::vector<std::uint16_t> values(count);
    for (auto& bits : values) bits = format::bf16_from_float(normal(random));
    return values;
}

/// The views in `weights` point into the other members, which a move keeps where they are.
struct QuantizedLayer {
    struct Matrix {
        std::vector<std::uint16_t> original;
        format::Nvfp4Matrix quantized;
    };
    std::vector<Matrix> matrices;  // [num_experts * 3]
    std::vector<std::uint16_t> router;
    MoeWeights weights;

    explicit QuantizedLayer(unsigned seed, MoeConfig config = {.hidden_size = 64,
                                                               .intermediate_size = 48,
                                                               .num_experts = 6,
                                                               .router = {.top_k = 2, .renormalize = true}}) {
        std::mt19937 random(seed);
        weights.config = config;
        weights.layer = 3;
        matrices.reserve(static_cast<std::size_t>(config.num_experts) * 3);
        for (int e = 0; e < config.num_experts; ++e) {
            const std::string name = "model.layers.3.mlp.experts." + std::to_string(e) + ".";
            weights.experts.push_back(
                {make(random, config.intermediate_size, config.hidden_size, 4.0 / 2688, name + "gate_proj"),
                 make(random, config.intermediate_size, config.hidden_size, 4.0 / 2688, name + "up_proj"),
                 make(random, config.hidden_size, config.intermediate_size, 4.0 / 2688, name + "down_proj")});
        }
        router = random_bf16(random, static_cast<std::size_t>(config.num_experts * config.hidden_size), 0.2F);
        weights.router = {router.data(), DType::bf16, {config.num_experts, config.hidden_size}, {}};
    }
    QuantizedLayer(QuantizedLayer&&) = default;
    QuantizedLayer& operator=(QuantizedLayer&&) = default;

    Matrix& matrix(int expert, Projection projection) {
        return matrices[static_cast<std::size_t>(expert) * 3 + static_cast<std::size_t>(projection)];
    }

    TensorView original(int expert, Projection projection) {
        const Matrix& m = matrix(expert, projection);
        return {m.original.data(), DType::bf16, {m.quantized.rows, m.quantized.cols}, {}};
    }

private:
    ExpertMatrix make(std::mt19937& random, std::int64_t rows, std::int64_t cols, double input_scale,
                      const std::string& name) {
        Matrix& m = matrices.emplace_back();
        const float deviation = 1 / std::sqrt(static_cast<float>(cols));
        m.original = random_bf16(random, static_cast<std::size_t>(rows * cols), deviation);
        m.quantized =
            format::quantize_modelopt(m.original, rows, cols, format::largest_magnitude(m.original));
        return {{m.quantized.packed.data(), m.quantized.block_scale.data(),
                 static_cast<double>(m.quantized.stored_global_scale), rows, cols, cols / 2,
                 cols / kNvfp4BlockSize},
                input_scale,
                name};
    }
};

}  // namespace moe4
