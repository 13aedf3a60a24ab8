// Offsets beyond 2^31: of a layer's weights, and of its rows.
#include <gtest/gtest.h>

#include "conformance/cases.hpp"
#include "conformance/layer_runner.hpp"
#include "cuda/device_tensor.hpp"
#include "rel_l2.hpp"

namespace moe4::testing {
namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 31;

class Large : public ::testing::TestWithParam<Precision> {
protected:
    void SetUp() override {
        if (!has_gpu()) GTEST_SKIP() << "no GPU";
    }
};

/// Of found from what a CPU kernel computes, which is the reference's.
void expect_near_cpu(const std::vector<float>& found, const MoeWeights& weights, const Problem& problem,
                     const Input& input) {
    const auto cpu = open_backend("cpu");
    Problem in_place = problem;
    in_place.layout = WeightLayout::in_place;
    const std::vector<float> expected = run_layer<float>(*cpu->prepare(cpu->plan(in_place), weights), input);
    EXPECT_LE(test::rel_l2(found, expected), tolerance(problem.precision, input.num_tokens));
}

TEST_P(Large, WeightsOfManyExperts) {
    constexpr int kNumExperts = 160;
    RandomLayer few({.hidden_size = 7168, .intermediate_size = 2048, .num_experts = 3});
    MoeWeights& weights = few.weights();
    weights.config.num_experts = kNumExperts;
    for (int e = 3; e < kNumExperts; ++e) {  // the same bytes with globals of their own
        weights.experts.push_back(weights.experts[static_cast<std::size_t>(e % 3)]);
        for (ExpertMatrix* matrix :
             {&weights.experts.back().gate, &weights.experts.back().up, &weights.experts.back().down})
            matrix->weight.global_scale *= 1.0F + static_cast<float>(e) / 256;
    }
    ASSERT_GT(kNumExperts * weights.config.hidden_size * weights.config.intermediate_size, kFar);
    for (const std::int64_t num_tokens : {2, 160}) {
        Input input = random_input(weights.config, num_tokens, 2, Ids::distinct, few.random());
        for (std::size_t i = 0; i < input.ids.size(); ++i)
            input.ids[i] = i % 2 == 0 ? kNumExperts - 1 - static_cast<int>(i % 6) : static_cast<int>(i % 5);
        const Problem problem{.config = weights.config, .precision = GetParam(), .max_tokens = num_tokens};
        const auto backend = open_backend("cuda");
        const auto layer = backend->prepare(backend->plan(problem), weights);
        expect_near_cpu(run_layer<float>(*layer, input), weights, problem, input);
    }
}

TEST_P(Large, RowsOfMoreBytesThanAreCopiedAtOnce) {
    RandomLayer random(
        {.hidden_size = (std::int64_t{1} << 22) + 16, .intermediate_size = 16, .num_experts = 1});
    const Problem problem{.config = random.weights().config, .precision = GetParam(), .top_k = 1};
    Input input = random_input(problem.config, 1, 1, Ids::distinct, random.random());
    // All but the row's ends is zero: the tolerance is not for sums of four million products.
    std::fill(input.hidden.begin() + 1024, input.hidden.end() - 1024, std::uint16_t{0});
    const auto backend = open_backend("cuda");
    const auto layer = backend->prepare(backend->plan(problem), random.weights());
    expect_near_cpu(run_layer<float>(*layer, input), random.weights(), problem, input);
}

TEST_P(Large, ManyRows) {
    constexpr std::int64_t kNumTokens = 38'000;
    constexpr std::int64_t kPeriod = 64;
    RandomLayer random({.hidden_size = 7168, .intermediate_size = 32, .num_experts = 8});
    const MoeConfig& config = random.weights().config;
    ASSERT_GT(kNumTokens * 8 * config.hidden_size, kFar);
    const Input first = random_input(config, kPeriod, 8, Ids::distinct, random.random());
    Input all = first;
    const auto repeat = [&](auto& values) {
        const std::size_t period = values.size();
        values.resize(period / kPeriod * kNumTokens);
        for (std::size_t i = period; i < values.size(); ++i) values[i] = values[i - period];
    };
    all.num_tokens = kNumTokens;
    repeat(all.hidden);
    repeat(all.ids);
    repeat(all.weights);

    const Problem problem{.config = config, .precision = GetParam(), .max_tokens = kNumTokens, .top_k = 8};
    const auto backend = open_backend("cuda");
    const auto layer = backend->prepare(backend->plan(problem), random.weights());
    std::vector<float> output = DeviceRun(*layer, all).run();
    const std::size_t period = static_cast<std::size_t>(kPeriod * config.hidden_size);
    std::size_t differing = 0;
    for (std::size_t i = period; i < output.size(); ++i) differing += !same(output[i], output[i - period]);
    EXPECT_EQ(differing, 0U) << "the same token has the same bits wherever it lies";
    output.resize(period);
    expect_near_cpu(output, random.weights(), problem, first);
}

INSTANTIATE_TEST_SUITE_P(Modes, Large, ::testing::Values(Precision::w4a16, Precision::w4a4),
                         [](const auto& mode) { return mode.param == Precision::w4a4 ? "w4a4" : "w4a16"; });

}  // namespace
}  // namespace moe4::testing
