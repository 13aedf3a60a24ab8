#pragma once
// A random layer that owns its bytes, and random inputs for it. All from one seed: MOE4_TEST_SEED, or 1.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "format/bf16.hpp"
#include "format/e4m3.hpp"
#include "moe/reference.hpp"
#include "moe4/moe.hpp"

namespace moe4::testing {

inline std::uint64_t seed() {
    const char* value = std::getenv("MOE4_TEST_SEED");
    return value == nullptr ? 1 : std::strtoull(value, nullptr, 10);
}
inline std::string seed_note() { return "MOE4_TEST_SEED=" + std::to_string(seed()); }

enum class BlockScales {
    ordinary,   // 0.5 to 4
    every,      // every byte from 0 (zero) over the subnormals to 0x7E (448)
    vanishing,  // zeros, subnormals and the smallest normals
};

struct LayerOptions {
    std::int64_t hidden_size = 64;
    std::int64_t intermediate_size = 32;
    int num_experts = 4;
    BlockScales block_scales = BlockScales::ordinary;
    std::int64_t padding = 0;             // bytes between two rows, poisoned with NaN scales
    bool has_reciprocal_globals = false;  // 1/g in double, as compressed-tensors' divisors are held
    bool has_input_scales = true;
    bool has_router = false;
    // Powers of two by which hidden and h are larger than N(0, 1); global and input scales follow.
    double hidden_magnitude = 1.0;
    double h_magnitude = 1.0;
};

class RandomLayer {
public:
    explicit RandomLayer(const LayerOptions& options) : options_(options), random_(seed()) {
        weights_.config.hidden_size = options.hidden_size;
        weights_.config.intermediate_size = options.intermediate_size;
        weights_.config.num_experts = options.num_experts;
        weights_.config.router.top_k = std::min(2, options.num_experts);
        for (int i = 0; i < options.num_experts; ++i) {
            ExpertWeights& expert = weights_.experts.emplace_back();
            const double hidden = options.hidden_magnitude;
            const double h = options.h_magnitude;
            expert.gate = matrix(options.intermediate_size, options.hidden_size, 5.0 * hidden, 1 / hidden);
            expert.up = matrix(options.intermediate_size, options.hidden_size, 5.0 * hidden, h / hidden);
            expert.down = matrix(options.hidden_size, options.intermediate_size, 4.0 * h, 1 / h);
        }
        if (options.has_router) add_router();
    }

    const MoeWeights& weights() const { return weights_; }
    MoeWeights& weights() { return weights_; }
    std::mt19937_64& random() { return random_; }

    /// For tests that break a byte: the packed codes or block scales that a view of this layer reads.
    static std::uint8_t* mutable_bytes(const std::uint8_t* view) { return const_cast<std::uint8_t*>(view); }

private:
    ExpertMatrix matrix(std::int64_t rows, std::int64_t cols, double largest_input, double magnitude) {
        ExpertMatrix result;
        Nvfp4View& view = result.weight;
        view.rows = rows;
        view.cols = cols;
        view.packed_stride = cols / 2 + options_.padding;
        view.scale_stride = cols / 16 + options_.padding;
        view.packed = fill(rows, cols / 2, view.packed_stride, [this] { return byte(0, 255); });
        view.block_scale = fill(rows, cols / 16, view.scale_stride, [this] { return block_scale(); });
        // Makes a row of weights times a row of N(0, 1) about N(0, 1): rms of the codes is 2.9.
        const double scale_rms = options_.block_scales == BlockScales::ordinary ? 2.0
                                 : options_.block_scales == BlockScales::every  ? 130.0
                                                                                : 0.02;
        const double exact =
            magnitude * uniform(0.7, 1.4) / (2.9 * scale_rms * std::sqrt(static_cast<double>(cols)));
        view.global_scale = static_cast<float>(exact);
        if (options_.has_reciprocal_globals) view.global_scale = 1.0 / static_cast<float>(1.0 / exact);
        if (options_.has_input_scales)
            result.input_scale = static_cast<float>(uniform(0.7, 1.0) * largest_input / 2688.0);
        return result;
    }

    template <class Generate>
    const std::uint8_t* fill(std::int64_t rows, std::int64_t used, std::int64_t stride, Generate generate) {
        std::vector<std::uint8_t>& bytes =
            storage_.emplace_back(static_cast<std::size_t>((rows - 1) * stride + used), format::kE4m3NaN);
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t i = 0; i < used; ++i)
                bytes[static_cast<std::size_t>(row * stride + i)] = generate();
        }
        return bytes.data();
    }

    std::uint8_t block_scale() {
        if (options_.block_scales == BlockScales::ordinary) return byte(0x30, 0x48);
        return byte(0, options_.block_scales == BlockScales::every ? 0x7E : 0x0A);
    }

    std::uint8_t byte(int low, int high) {
        return static_cast<std::uint8_t>(std::uniform_int_distribution<int>(low, high)(random_));
    }
    double uniform(double low, double high) {
        return std::uniform_real_distribution<double>(low, high)(random_);
    }

    void add_router() {
        std::normal_distribution<float> normal(0, 0.1F);
        router_.resize(static_cast<std::size_t>(options_.num_experts * options_.hidden_size));
        for (std::uint16_t& x : router_) x = format::bf16_from_float(normal(random_));
        weights_.router = {router_.data(), DType::bf16, {options_.num_experts, options_.hidden_size}, {}};
    }

    LayerOptions options_;
    std::mt19937_64 random_;
    std::list<std::vector<std::uint8_t>> storage_;
    std::vector<std::uint16_t> router_;
    MoeWeights weights_;
};

enum class Ids {
    distinct,    // a token's experts differ, all alike
    zipf,        // few experts get most of the tokens; a token may meet one twice
    one_expert,  // every slot of every token
    ragged,      // a third are -1 or outside of any layer, with a NaN as their weight
};

struct Input {
    std::int64_t num_tokens = 0;
    int top_k = 1;
    std::vector<std::uint16_t> hidden;  // bf16
    std::vector<std::int32_t> ids;
    std::vector<float> weights;

    moe::ReferenceInput reference() const {
        return {.hidden = hidden,
                .top_k_ids = ids,
                .top_k_weights = weights,
                .num_tokens = num_tokens,
                .top_k = top_k};
    }
};

inline std::int32_t random_id(std::mt19937_64& random, int num_experts, Ids kind) {
    if (kind == Ids::one_expert) return num_experts / 2;
    if (kind == Ids::ragged && random() % 3 == 0)
        return std::vector<std::int32_t>{-1, num_experts, INT32_MAX, INT32_MIN}[random() % 4];
    if (kind == Ids::zipf) {
        const double u = std::uniform_real_distribution<double>(0, 1)(random);
        return static_cast<std::int32_t>(std::pow(num_experts + 1.0, u)) - 1;
    }
    return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(num_experts));
}

inline Input random_input(const MoeConfig& config, std::int64_t num_tokens, int top_k, Ids kind,
                          std::mt19937_64& random) {
    Input input{.num_tokens = num_tokens, .top_k = top_k, .hidden = {}, .ids = {}, .weights = {}};
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < num_tokens * config.hidden_size; ++i)
        input.hidden.push_back(format::bf16_from_float(normal(random)));
    std::uniform_real_distribution<float> weight(0.05F, 0.6F);
    for (std::int64_t slot = 0; slot < num_tokens * top_k; ++slot) {
        std::int32_t id = random_id(random, config.num_experts, kind);
        const auto first_of_token = input.ids.end() - slot % top_k;
        while (kind == Ids::distinct && std::find(first_of_token, input.ids.end(), id) != input.ids.end())
            id = (id + 1) % config.num_experts;
        input.ids.push_back(id);
        const bool is_nobody = id < 0 || id >= config.num_experts;
        input.weights.push_back(is_nobody ? std::numeric_limits<float>::quiet_NaN() : weight(random));
    }
    return input;
}

}  // namespace moe4::testing
