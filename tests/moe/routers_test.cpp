// Every family's router against an independent one in double; ties, NaN, and settings no row can satisfy.
#include "moe/routers.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "format/bf16.hpp"
#include "moe4/error.hpp"

namespace moe4::moe {
namespace {

constexpr std::int64_t kHidden = 100;  // not a multiple of the partial sums of a logit
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Family {
    const char* name;
    int num_experts;
    RouterConfig config;
    DType dtype;
    bool has_bias;
};

const Family kFamilies[] = {
    {"qwen3", 128, {.top_k = 8, .renormalize = true}, DType::bf16, false},
    {"not_renormalized", 60, {.top_k = 4}, DType::bf16, false},
    {"mixtral", 8, {.top_k = 2, .renormalize = true}, DType::f32, false},
    {"deepseek_v3",
     256,
     {.score_function = ScoreFunction::sigmoid,
      .top_k = 8,
      .renormalize = true,
      .num_groups = 8,
      .top_k_groups = 4,
      .scaling_factor = 2.5},
     DType::f32,
     true},
    {"one_group_of_two_experts",
     4,
     {.score_function = ScoreFunction::sigmoid, .top_k = 2, .num_groups = 2, .top_k_groups = 1},
     DType::bf16,
     true},
    {"groups_of_one",
     16,
     {.score_function = ScoreFunction::sigmoid, .top_k = 3, .num_groups = 16, .top_k_groups = 3},
     DType::bf16,
     true},
    {"minimax_m2",
     256,
     {.score_function = ScoreFunction::sigmoid, .top_k = 8, .renormalize = true},
     DType::f32,
     true},
    {"every_expert", 1024, {.top_k = 32, .renormalize = true}, DType::bf16, false},
};

struct Router {
    MoeConfig config;
    std::vector<float> weight;  // as numbers; the view reads `bytes`
    std::vector<float> bias;
    std::vector<std::byte> bytes;
    TensorView view;
    std::optional<TensorView> bias_view;
    std::vector<std::uint16_t> hidden;

    Router(const Family& family, unsigned seed) {
        config = {.hidden_size = kHidden, .num_experts = family.num_experts, .router = family.config};
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        weight.resize(static_cast<std::size_t>(family.num_experts * kHidden));
        const std::size_t size = family.dtype == DType::bf16 ? 2 : 4;
        bytes.resize(weight.size() * size + 1);  // the tensor begins at an odd address
        for (std::size_t i = 0; i < weight.size(); ++i) {
            weight[i] = 0.2F * normal(random);
            const std::uint16_t bf16 = format::bf16_from_float(weight[i]);
            if (size == 2) weight[i] = format::bf16_to_float(bf16);
            std::memcpy(&bytes[1 + i * size], size == 2 ? static_cast<const void*>(&bf16) : &weight[i], size);
        }
        view = {&bytes[1], family.dtype, {family.num_experts, kHidden}, {}};
        if (family.has_bias) {
            for (int e = 0; e < family.num_experts; ++e) bias.push_back(0.3F * normal(random));
            bias_view = {bias.data(), DType::f32, {family.num_experts}, {}};
        }
        for (std::int64_t k = 0; k < kHidden; ++k) hidden.push_back(format::bf16_from_float(normal(random)));
    }
};

struct Routed {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
};

Routed route(const Router& router) {
    const auto top_k = static_cast<std::size_t>(router.config.router.top_k);
    Routed result{std::vector<std::int32_t>(top_k, -7), std::vector<float>(top_k, -7)};
    route_token(router.config, router.view, router.bias_view, router.hidden.data(), result.ids.data(),
                result.weights.data());
    return result;
}

/// By sorting, in double, with dropped groups at -infinity.
struct Exact {
    std::vector<double> score;
    std::vector<double> selection;
    std::vector<std::int32_t> ids;
    std::vector<double> weights;
    double group_gap = 1.0;  // how near the choice of groups was to another one
};

Exact route_exactly(const Router& router) {
    const RouterConfig& r = router.config.router;
    const auto num_experts = static_cast<std::size_t>(router.config.num_experts);
    Exact exact;
    for (std::size_t e = 0; e < num_experts; ++e) {
        double logit = 0;
        for (std::size_t k = 0; k < kHidden; ++k) {
            logit += static_cast<double>(router.weight[e * kHidden + k]) *
                     static_cast<double>(format::bf16_to_float(router.hidden[k]));
        }
        exact.score.push_back(r.score_function == ScoreFunction::softmax ? std::exp(logit)
                                                                         : 1 / (1 + std::exp(-logit)));
    }
    if (r.score_function == ScoreFunction::softmax) {
        const double sum = std::accumulate(exact.score.begin(), exact.score.end(), 0.0);
        for (double& score : exact.score) score /= sum;
    }
    exact.selection = exact.score;
    for (std::size_t e = 0; e < router.bias.size(); ++e)
        exact.selection[e] += static_cast<double>(router.bias[e]);

    const std::size_t group_size = num_experts / static_cast<std::size_t>(r.num_groups);
    std::vector<std::pair<double, std::size_t>> groups;  // negated score, index
    for (std::size_t first = 0; first < num_experts; first += group_size) {
        std::vector<double> sorted(exact.selection.begin() + static_cast<std::ptrdiff_t>(first),
                                   exact.selection.begin() + static_cast<std::ptrdiff_t>(first + group_size));
        std::sort(sorted.rbegin(), sorted.rend());
        groups.emplace_back(-(sorted[0] + (group_size > 1 ? sorted[1] : 0)), first);
    }
    std::sort(groups.begin(), groups.end());
    const auto num_kept = static_cast<std::size_t>(r.top_k_groups);
    if (num_kept < groups.size()) exact.group_gap = groups[num_kept].first - groups[num_kept - 1].first;
    for (std::size_t g = num_kept; g < groups.size(); ++g) {
        for (std::size_t i = 0; i < group_size; ++i)
            exact.selection[groups[g].second + i] = -std::numeric_limits<double>::infinity();
    }

    std::vector<std::int32_t> order(num_experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return exact.selection[static_cast<std::size_t>(a)] > exact.selection[static_cast<std::size_t>(b)];
    });
    exact.ids.assign(order.begin(), order.begin() + r.top_k);
    double sum = 1e-20;
    for (const auto id : exact.ids) sum += exact.score[static_cast<std::size_t>(id)];
    for (const auto id : exact.ids) {
        exact.weights.push_back(exact.score[static_cast<std::size_t>(id)] / (r.renormalize ? sum : 1.0) *
                                r.scaling_factor);
    }
    return exact;
}

class FamilyRouter : public testing::TestWithParam<Family> {};
INSTANTIATE_TEST_SUITE_P(Families, FamilyRouter, testing::ValuesIn(kFamilies),
                         [](const auto& family) { return std::string(family.param.name); });

TEST_P(FamilyRouter, AgreesWithAnExactOne) {
    for (unsigned seed = 1; seed <= 40; ++seed) {
        const Router router(GetParam(), seed);
        check_router(router.config, router.view, router.bias_view);
        const Routed found = route(router);
        const Exact exact = route_exactly(router);
        if (exact.group_gap < 1e-6) continue;
        for (std::size_t j = 0; j < found.ids.size(); ++j) {
            const auto id = static_cast<std::size_t>(found.ids[j]);
            ASSERT_LT(id, exact.score.size());
            // Two experts closer than fp32 can tell may change places.
            ASSERT_NEAR(exact.selection[id], exact.selection[static_cast<std::size_t>(exact.ids[j])], 1e-6)
                << "seed " << seed << ", slot " << j;
            if (found.ids[j] != exact.ids[j]) continue;
            ASSERT_NEAR(found.weights[j], exact.weights[j], 2e-6 * exact.weights[j]) << "seed " << seed;
        }
        auto sorted = found.ids;
        std::sort(sorted.begin(), sorted.end());
        ASSERT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end()) << "an expert chosen twice";
    }
}

TEST_P(FamilyRouter, TiesGoToTheLowestIndex) {
    Router router(GetParam(), 1);
    std::fill(router.hidden.begin(), router.hidden.end(), std::uint16_t{0});
    std::fill(router.bias.begin(), router.bias.end(), 0.25F);
    const Routed found = route(router);
    for (std::size_t j = 0; j < found.ids.size(); ++j) {
        EXPECT_EQ(found.ids[j], static_cast<int>(j));
        EXPECT_EQ(found.weights[j], found.weights[0]);
    }
}

TEST_P(FamilyRouter, ANaNInTheRowGivesTheFirstExpertsAndNaNWeights) {
    Router router(GetParam(), 1);
    router.hidden[57] = 0x7FC0;
    const Routed found = route(router);
    for (std::size_t j = 0; j < found.ids.size(); ++j) {
        EXPECT_EQ(found.ids[j], static_cast<int>(j));
        EXPECT_TRUE(std::isnan(found.weights[j]));
    }
}

TEST_P(FamilyRouter, InfinitiesStayWithinTheExperts) {
    Router router(GetParam(), 1);
    for (const std::uint16_t infinity : {0x7F80, 0xFF80}) {
        router.hidden[0] = infinity;
        for (const auto id : route(router).ids) {
            EXPECT_GE(id, 0);
            EXPECT_LT(id, router.config.num_experts);
        }
    }
}

// Two groups of two: the bias lifts experts 2 and 3 over the others, which are better without it.
TEST(Router, BiasSelectsButDoesNotWeigh) {
    Router router({"", 4, {.score_function = ScoreFunction::sigmoid, .top_k = 2}, DType::f32, true}, 1);
    std::fill(router.hidden.begin(), router.hidden.end(), std::uint16_t{0});
    router.bias = {0, 0, 1, 2};
    const Routed found = route(router);
    EXPECT_EQ(found.ids, (std::vector<std::int32_t>{3, 2}));
    EXPECT_EQ(found.weights, (std::vector<float>{0.5F, 0.5F}));
}

// The experts of a dropped group are out even where those of the kept one are all negative.
TEST(Router, DroppedGroupsAreOutWhateverTheSign) {
    Router router({"",
                   6,
                   {.score_function = ScoreFunction::sigmoid, .top_k = 3, .num_groups = 2, .top_k_groups = 1},
                   DType::f32,
                   true},
                  1);
    std::fill(router.hidden.begin(), router.hidden.end(), std::uint16_t{0});
    router.bias = {-3, -5, -9, -1, -8, -8};  // sums of two: -7 and -8 (each with 2 * 0.5)
    EXPECT_EQ(route(router).ids, (std::vector<std::int32_t>{0, 1, 2}));
}

ErrorKind kind_of_refusal(const Router& router, const char* words) {
    try {
        check_router(router.config, router.view, router.bias_view);
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
        return error.kind();
    }
    return ErrorKind::machine;
}

TEST(Router, RefusesWhatNoRowCanSatisfy) {
    const Family family{
        "",
        8,
        {.score_function = ScoreFunction::sigmoid, .top_k = 2, .num_groups = 4, .top_k_groups = 1},
        DType::f32,
        true};
    const auto refuse = [&](auto change, const char* words) {
        Router router(family, 1);
        change(router);
        return kind_of_refusal(router, words);
    };
    constexpr auto kInvalid = ErrorKind::invalid_argument;
    EXPECT_EQ(refuse([](Router&) {}, ""), ErrorKind::machine) << "the sound one is not refused";
    EXPECT_EQ(refuse([](Router& r) { r.config.router.top_k = 3; }, "picks 3 of 8"), kInvalid);
    EXPECT_EQ(refuse([](Router& r) { r.config.router.top_k = 0; }, "picks 0 of 8"), kInvalid);
    EXPECT_EQ(refuse([](Router& r) { r.config.router.num_groups = 3; }, "1 of 3 groups"), kInvalid);
    EXPECT_EQ(refuse([](Router& r) { r.config.router.num_groups = 0; }, "1 of 0 groups"), kInvalid);
    EXPECT_EQ(refuse([](Router& r) { r.config.router.top_k_groups = 5; }, "5 of 4 groups"), kInvalid);
    EXPECT_EQ(refuse([](Router& r) { r.view.shape = {8, kHidden + 1}; }, "F32 [8, 101]"), kInvalid);
    EXPECT_EQ(refuse([](Router& r) { r.view.dtype = DType::f16; }, "F16"), kInvalid);
    EXPECT_EQ(refuse([](Router& r) { r.bias_view->shape = {7}; }, "bias is F32 [7]"), kInvalid);
    EXPECT_EQ(refuse([](Router& r) { r.view.data = nullptr; }, "no router"), ErrorKind::unsupported);
    EXPECT_EQ(refuse([](Router& r) { r.config.num_experts = 2048; }, "2048"), ErrorKind::unsupported);
    EXPECT_EQ(refuse([](Router& r) { r.config.router.top_k = 33; }, "top-33"), ErrorKind::unsupported);
}

// kNaN as a bias must not lead outside the experts either.
TEST(Router, ANaNBiasStaysWithinTheExperts) {
    Router router(kFamilies[3], 1);
    std::fill(router.bias.begin(), router.bias.end(), kNaN);
    for (const auto id : route(router).ids) {
        EXPECT_GE(id, 0);
        EXPECT_LT(id, 256);
    }
}

}  // namespace
}  // namespace moe4::moe
