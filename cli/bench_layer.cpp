#include "bench_layer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "moe4/error.hpp"

namespace moe4::cli {

namespace {

const BenchShape kShapes[] = {
    // hidden, expert intermediate, experts, top-k; add yours here
    {"qwen3-30b-a3b", 2048, 768, 128, 8},     {"qwen3-235b-a22b", 4096, 1536, 128, 8},
    {"qwen3-coder-480b", 6144, 2560, 160, 8}, {"qwen3-next-80b", 2048, 512, 512, 10},
    {"deepseek-v3", 7168, 2048, 256, 8},      {"kimi-k2", 7168, 2048, 384, 8},
    {"glm-4.5-air", 4096, 1408, 128, 8},      {"minimax-m2", 3072, 1536, 256, 8},
    {"mixtral-8x7b", 4096, 14336, 8, 2},      {"tiny", 512, 192, 16, 4},
};

/// Four integers of 1 or more, or nothing.
bool parse_numbers(const std::string& text, std::int64_t (&numbers)[4]) {
    const char* at = text.data();
    const char* end = at + text.size();
    for (int i = 0; i < 4; ++i) {
        const auto [rest, error] = std::from_chars(at, end, numbers[i]);
        if (error != std::errc{} || numbers[i] < 1 || numbers[i] > 1'000'000) return false;
        if (i < 3 && (rest == end || *rest != ',')) return false;
        at = i < 3 ? rest + 1 : rest;
    }
    return at == end;
}

/// Fills with eight random bytes at a time: (random & mask) + offset in each.
void fill(std::vector<std::uint8_t>& bytes, std::uint8_t mask, std::uint8_t offset, std::mt19937_64& random) {
    constexpr std::uint64_t kEach = 0x0101'0101'0101'0101U;
    for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
        const std::uint64_t eight = (random() & (mask * kEach)) + offset * kEach;
        std::memcpy(&bytes[i], &eight, 8);
    }
}

struct ExpertBytes {
    std::vector<std::uint8_t> packed;
    std::vector<std::uint8_t> scales;
};

ExpertWeights expert_of(const BenchShape& shape, const ExpertBytes& bytes) {
    // Weights of a size like a model's: codes and scales are about 3 each, so 0.002 makes them about 0.02.
    constexpr double kGlobalScale = 0.002;
    constexpr double kInputScale = 6.0 / 2688.0;
    const std::int64_t values = shape.hidden_size * shape.intermediate_size;
    const auto matrix = [&](int index, std::int64_t rows, std::int64_t cols) {
        return ExpertMatrix{
            {bytes.packed.data() + index * values / 2, bytes.scales.data() + index * values / 16,
             kGlobalScale, rows, cols, cols / 2, cols / 16},
            kInputScale,
            {}};
    };
    return {matrix(0, shape.intermediate_size, shape.hidden_size),
            matrix(1, shape.intermediate_size, shape.hidden_size),
            matrix(2, shape.hidden_size, shape.intermediate_size)};
}

}  // namespace

BenchShape parse_shape(const std::string& text) {
    std::string names;
    for (const BenchShape& shape : kShapes) {
        if (shape.name == text) return shape;
        names += (names.empty() ? "" : ", ") + shape.name;
    }
    std::int64_t numbers[4] = {};
    if (!parse_numbers(text, numbers)) {
        throw Error(
            ErrorKind::invalid_argument,
            fmt::format("the shape is \"{}\", expected HIDDEN,INTERMEDIATE,EXPERTS,TOP_K or one of {}", text,
                        names));
    }
    const BenchShape shape{text, numbers[0], numbers[1], static_cast<int>(numbers[2]),
                           static_cast<int>(numbers[3])};
    if (shape.hidden_size % 16 != 0 || shape.intermediate_size % 16 != 0 || shape.top_k > shape.num_experts) {
        throw Error(
            ErrorKind::invalid_argument,
            fmt::format("the shape is {}, expected multiples of 16 and no more slots than experts", text));
    }
    return shape;
}

MoeWeights random_weights(const BenchShape& shape, bool one_expert, std::mt19937_64& random) {
    const auto values = static_cast<std::size_t>(3 * shape.hidden_size * shape.intermediate_size);
    auto experts = std::make_shared<std::vector<ExpertBytes>>(one_expert ? 1 : shape.num_experts);
    for (ExpertBytes& bytes : *experts) {
        bytes.packed.resize(values / 2);
        bytes.scales.resize(values / 16);
        fill(bytes.packed, 0xFF, 0, random);
        fill(bytes.scales, 0x1F, 0x30, random);  // 0.5 to 7.5
    }
    MoeWeights weights;
    weights.config = shape.config();
    for (int e = 0; e < shape.num_experts; ++e) {
        weights.experts.push_back(expert_of(shape, (*experts)[one_expert ? 0 : static_cast<std::size_t>(e)]));
    }
    weights.owner = std::move(experts);
    return weights;
}

std::vector<std::uint16_t> random_hidden(std::int64_t count, std::mt19937_64& random) {
    constexpr std::size_t kDrawn = std::size_t{1} << 20;
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> hidden(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < hidden.size(); ++i)
        hidden[i] = i < kDrawn ? round_to_bf16(normal(random)) : hidden[i - kDrawn];
    return hidden;
}

RandomRouting random_routing(const BenchShape& shape, std::int64_t num_tokens, RoutingKind kind,
                             std::mt19937_64& random) {
    std::vector<std::int32_t> by_rank(static_cast<std::size_t>(shape.num_experts));
    std::iota(by_rank.begin(), by_rank.end(), 0);
    std::shuffle(by_rank.begin(), by_rank.end(), random);
    std::uniform_real_distribution<double> chance(0.0, 1.0);
    std::vector<std::pair<double, std::int32_t>> keys(by_rank.size());

    RandomRouting routing;
    std::vector<bool> is_hit(by_rank.size(), false);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
        // Drawing without replacement by weight is taking the smallest of exponential variates of that rate.
        for (std::size_t rank = 0; rank < keys.size(); ++rank) {
            const double weight = kind == RoutingKind::zipf ? 1.0 / static_cast<double>(rank + 1) : 1.0;
            keys[rank] = {-std::log(1.0 - chance(random)) / weight, by_rank[rank]};
        }
        std::partial_sort(keys.begin(), keys.begin() + shape.top_k, keys.end());
        for (int j = 0; j < shape.top_k; ++j) {
            const std::int32_t id = keys[static_cast<std::size_t>(j)].second;
            routing.top_k_ids.push_back(id);
            routing.top_k_weights.push_back(1.0F / static_cast<float>(shape.top_k));
            is_hit[static_cast<std::size_t>(id)] = true;
        }
    }
    routing.experts_hit = static_cast<int>(std::count(is_hit.begin(), is_hit.end(), true));
    return routing;
}

}  // namespace moe4::cli
