// The layers and routings that moe4 bench times: what it says of them is true of what it draws.
#include "cli/bench_layer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace moe4::cli {
namespace {

RandomRouting routing_of(const BenchShape& shape, std::int64_t num_tokens, RoutingKind kind,
                         std::uint64_t seed = 1) {
    std::mt19937_64 random(seed);
    return random_routing(shape, num_tokens, kind, random);
}

class BenchRouting : public ::testing::TestWithParam<RoutingKind> {};

TEST_P(BenchRouting, GivesATokenDistinctExpertsOfEqualWeight) {
    const BenchShape shape{"", 64, 32, 24, 8};
    const RandomRouting routing = routing_of(shape, 100, GetParam());
    ASSERT_EQ(routing.top_k_ids.size(), 800U);
    for (auto first = routing.top_k_ids.begin(); first != routing.top_k_ids.end(); first += 8) {
        const std::set<std::int32_t> of_token(first, first + 8);
        EXPECT_EQ(of_token.size(), 8U);
        EXPECT_GE(*of_token.begin(), 0);
        EXPECT_LT(*of_token.rbegin(), 24);
    }
    EXPECT_EQ(routing.top_k_weights, std::vector<float>(800, 0.125F));
    const std::set<std::int32_t> hit(routing.top_k_ids.begin(), routing.top_k_ids.end());
    EXPECT_EQ(routing.experts_hit, static_cast<int>(hit.size()));
}

TEST_P(BenchRouting, IsDecidedByTheSeed) {
    const BenchShape shape{"", 64, 32, 128, 8};
    const std::vector<std::int32_t> ids = routing_of(shape, 16, GetParam()).top_k_ids;
    EXPECT_EQ(ids, routing_of(shape, 16, GetParam()).top_k_ids);
    EXPECT_NE(ids, routing_of(shape, 16, GetParam(), 2).top_k_ids);
}

/// How often a token has the expert of each rank, drawn one after the other by weight, without replacement.
std::vector<double> chances(std::vector<double> weights, int top_k) {
    std::vector<double> chance(weights.size(), 0.0);
    if (top_k == 0) return chance;
    double sum = 0;
    for (const double weight : weights) sum += weight;
    for (std::size_t drawn = 0; drawn < weights.size(); ++drawn) {
        if (weights[drawn] == 0) continue;
        const double probability = weights[drawn] / sum;
        chance[drawn] += probability;
        std::vector<double> others = weights;
        others[drawn] = 0;
        const std::vector<double> behind = chances(others, top_k - 1);
        for (std::size_t i = 0; i < chance.size(); ++i) chance[i] += probability * behind[i];
    }
    return chance;
}

TEST_P(BenchRouting, CountsOfExpertsAreWithin5SigmaOfTheirChances) {
    constexpr int kNumExperts = 8;
    constexpr int kTokens = 20000;
    std::vector<double> weights;
    for (int rank = 1; rank <= kNumExperts; ++rank)
        weights.push_back(GetParam() == RoutingKind::zipf ? 1.0 / rank : 1.0);
    for (const int top_k : {1, 3}) {
        std::vector<double> counts(kNumExperts, 0.0);
        for (const std::int32_t id :
             routing_of({"", 64, 32, kNumExperts, top_k}, kTokens, GetParam()).top_k_ids)
            counts[static_cast<std::size_t>(id)] += 1;
        std::sort(counts.rbegin(), counts.rend());  // which expert has which rank is drawn too
        const std::vector<double> chance = chances(weights, top_k);
        for (std::size_t rank = 0; rank < counts.size(); ++rank) {
            const double sigma = std::sqrt(kTokens * chance[rank] * (1 - chance[rank]));
            EXPECT_NEAR(counts[rank], kTokens * chance[rank], 5 * sigma)
                << "rank " << rank + 1 << ", " << top_k << " a token";
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Kinds, BenchRouting, ::testing::Values(RoutingKind::uniform, RoutingKind::zipf),
                         [](const auto& kind) {
                             return kind.param == RoutingKind::zipf ? "zipf" : "uniform";
                         });

TEST(BenchShape, OfAModelIsItsConfigs) {
    const BenchShape shape = parse_shape("deepseek-v3");
    EXPECT_EQ(shape.hidden_size, 7168);
    EXPECT_EQ(shape.intermediate_size, 2048);
    EXPECT_EQ(shape.num_experts, 256);
    EXPECT_EQ(shape.top_k, 8);
    EXPECT_EQ(shape.expert_bytes(), std::int64_t{3} * 7168 * 2048 * 9 / 16) << "4.5 bits a weight";
}

}  // namespace
}  // namespace moe4::cli
