#pragma once
// Layers of random weights and the tokens that visit them, as `moe4 bench` times them.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "moe4/backend.hpp"

namespace moe4::cli {

struct BenchShape {
    std::string name;
    std::int64_t hidden_size = 0;
    std::int64_t intermediate_size = 0;
    int num_experts = 0;
    int top_k = 0;

    MoeConfig config() const {
        return {.hidden_size = hidden_size,
                .intermediate_size = intermediate_size,
                .num_experts = num_experts,
                .router = {.top_k = top_k}};
    }
    std::int64_t expert_bytes() const { return 3 * hidden_size * intermediate_size * 9 / 16; }
};

/// A model's name or "H,I,E,k". Throws invalid_argument, listing the names.
BenchShape parse_shape(const std::string& text);

enum class RoutingKind { uniform, zipf };

/// Every expert's bytes are random. With `one_expert` all of them are views of one expert's bytes: enough for
/// a layer that packs its own copy, and it leaves the memory to those.
MoeWeights random_weights(const BenchShape& shape, bool one_expert, std::mt19937_64& random);

/// N(0, 1) in bf16; after a million they repeat.
std::vector<std::uint16_t> random_hidden(std::int64_t count, std::mt19937_64& random);

/// top_k distinct experts a token, drawn without replacement: evenly, or the expert of rank r with weight 1 /
/// r (ranks are shuffled once for all tokens). Every slot weighs 1 / top_k.
struct RandomRouting {
    std::vector<std::int32_t> top_k_ids;
    std::vector<float> top_k_weights;
    int experts_hit = 0;
};
RandomRouting random_routing(const BenchShape& shape, std::int64_t num_tokens, RoutingKind kind,
                             std::mt19937_64& random);

}  // namespace moe4::cli
