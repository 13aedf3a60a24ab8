// What the CPU backend promises of plans, and which problems, weights and arguments it refuses in which
// words.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "backends/cpu_layer.hpp"
#include "conformance/layer_runner.hpp"
#include "conformance/random_layer.hpp"
#include "expect_error.hpp"
#include "moe/routers.hpp"
#include "moe4/error.hpp"

namespace moe4::cpu {
namespace {

using namespace moe4::testing;
using test::refusal;

// Plans.

TEST(CpuPlan, CountsWorkspaceAndWeights) {
    const RandomLayer random({.hidden_size = 256, .intermediate_size = 128, .num_experts = 4});
    const auto backend = open_backend("cpu", threads(2));
    const Problem problem = problem_of(random.weights(), Precision::w4a4, 16, 2);
    const Plan plan = backend->plan(problem);
    EXPECT_EQ(plan.backend, "cpu");
    EXPECT_NE(plan.layout, WeightLayout::automatic);
    ASSERT_FALSE(plan.choices.empty());
    EXPECT_EQ(plan.choices.back().up_to_tokens_per_expert, std::numeric_limits<std::int64_t>::max());
    EXPECT_EQ(plan.weight_bytes == 0, plan.layout == WeightLayout::in_place);
    Problem larger = problem;
    larger.max_tokens = 4096;
    EXPECT_GT(backend->plan(larger).workspace_bytes, plan.workspace_bytes);
    EXPECT_EQ(backend->prepare(plan, random.weights())->plan().workspace_bytes, plan.workspace_bytes);
}

TEST(CpuPlan, ExplainsItself) {
    Plan plan;
    plan.problem.max_tokens = 16;
    plan.layout = WeightLayout::packed;
    plan.choices = {{8, "small"}, {std::numeric_limits<std::int64_t>::max(), "large"}};
    plan.rejections = {{"other", "this CPU lacks amx_bf16"}};
    plan.weight_bytes = 340'000'000;
    plan.workspace_bytes = 12'345;
    EXPECT_EQ(plan.explain(),
              "small: up to 8 tokens an expert\n"
              "large: 9 tokens an expert or more\n"
              "not other: this CPU lacks amx_bf16\n"
              "weights: packed, 340 MB\n"
              "workspace: 12345 bytes for up to 16 tokens\n");
}

TEST(CpuPlan, TheWorkspaceOf4096TokensIsModest) {
    Problem problem;
    problem.config.hidden_size = 2048;
    problem.config.intermediate_size = 768;
    problem.config.num_experts = 128;
    problem.top_k = 8;
    problem.max_tokens = 4096;
    const std::size_t slots = 4096 * 8;
    for (const Precision precision : {Precision::w4a16, Precision::w4a4}) {
        problem.precision = precision;
        const std::size_t bytes = open_backend("cpu", threads(16))->plan(problem).workspace_bytes;
        // At most fp32 for every slot's hidden and h, and a few megabytes a thread.
        EXPECT_LT(bytes, slots * (2048 + 768) * 4 + 16 * (std::size_t{6} << 20));
    }
}

TEST(CpuPlan, RefusesImpossibleProblems) {
    const RandomLayer random({.hidden_size = 64, .intermediate_size = 32, .num_experts = 4});
    const auto backend = open_backend("cpu");
    const auto refused = [&](auto change) {
        Problem problem = problem_of(random.weights(), Precision::w4a16, 4, 2);
        change(problem);
        return refusal([&] { backend->plan(problem); }, ErrorKind::invalid_argument);
    };
    EXPECT_EQ(refused([](Problem& p) { p.config.hidden_size = 72; }),
              "hidden_size is 72, expected a positive multiple of 16 below 2^24");
    EXPECT_EQ(refused([](Problem& p) { p.config.intermediate_size = 0; }),
              "intermediate_size is 0, expected a positive multiple of 16 below 2^24");
    EXPECT_EQ(refused([](Problem& p) { p.top_k = 0, p.config.router.top_k = 0; }),
              "top_k is 0, expected 1 or more slots per token");
    EXPECT_NE(refused([](Problem& p) { p.max_tokens = -1; }), "none");
    EXPECT_NE(refused([](Problem& p) { p.max_tokens = std::int64_t{1} << 40; }), "none");
    EXPECT_NE(refused([](Problem& p) { p.experts = {3, 2}; }), "none");
    EXPECT_EQ(
        refused([](Problem& p) {
            p.precision = Precision::w4a4;
            p.activation_scale = ActivationScale::dynamic;
            p.batch_invariant = true;
        }),
        "batch_invariant is set with dynamic activation scales, which depend on the batch; expected another "
        "activation scale");
}

// Weights.

class CpuPrepare : public ::testing::Test {
protected:
    std::string refused(ErrorKind kind, Precision precision = Precision::w4a16) {
        return refusal([&] { make_layer(weights(), problem_of(weights(), precision, 4, 2)); }, kind);
    }
    MoeWeights& weights() { return layer_.weights(); }
    RandomLayer layer_{{.hidden_size = 64, .intermediate_size = 32, .num_experts = 4}};
};

TEST_F(CpuPrepare, RefusesBlockScalesThatMeanNothing) {
    RandomLayer::mutable_bytes(weights().experts[3].down.weight.block_scale)[1] = 0x7F;
    const std::string message = refused(ErrorKind::broken_file);
    EXPECT_NE(message.find("expert 3: down_proj.weight_scale"), std::string::npos) << message;
}

TEST_F(CpuPrepare, RefusesGlobalScalesThatMeanNothing) {
    weights().experts[1].up.weight.global_scale = 0;
    EXPECT_NE(refused(ErrorKind::broken_file).find("expert 1: up_proj.weight_scale_2"), std::string::npos);
}

TEST_F(CpuPrepare, RefusesMissingInputScalesWhereTheyAreRead) {
    weights().experts[2].gate.input_scale.reset();
    EXPECT_NE(refused(ErrorKind::unsupported, Precision::w4a4).find("expert 2"), std::string::npos);
    EXPECT_EQ(refused(ErrorKind::unsupported, Precision::w4a16), "none");
}

TEST_F(CpuPrepare, RefusesOtherShapesThanPlanned) {
    weights().experts[0].gate.weight.rows = 48;
    EXPECT_EQ(refused(ErrorKind::invalid_argument),
              "layer 0, expert 0: gate_proj.weight holds [48, 64] values, expected [32, 64]");
    weights().experts.pop_back();
    EXPECT_EQ(refused(ErrorKind::invalid_argument),
              "the weights of layer 0 have 3 experts, expected 4 as planned");
}

TEST_F(CpuPrepare, RefusesThePlanOfAnotherBackend) {
    const auto backend = open_backend("cpu");
    Plan plan = backend->plan(problem_of(weights(), Precision::w4a16, 4, 2));
    plan.backend = "cuda";
    EXPECT_EQ(refusal([&] { backend->prepare(plan, weights()); }, ErrorKind::invalid_argument),
              "the plan is of backend \"cuda\", expected cpu");
}

// Arguments of run.

class CpuRun : public ::testing::Test {
protected:
    template <class Change>
    std::string refused(const Change& change) {
        Arguments a{hidden_view(input_, 64),
                    routing(input_),
                    {output_.data(), DType::f32, {3, 64}, {}},
                    workspace_.workspace()};
        change(a);
        return refusal([&] { layer_->run(a.hidden, a.routing, a.output, a.workspace); },
                       ErrorKind::invalid_argument);
    }

    struct Arguments {
        TensorView hidden;
        Routing routing;
        MutableTensorView output;
        Workspace workspace;
    };
    RandomLayer random_{{.hidden_size = 64, .intermediate_size = 32, .num_experts = 4, .has_router = true}};
    std::unique_ptr<Layer> layer_ =
        make_layer(random_.weights(), problem_of(random_.weights(), Precision::w4a4, 3, 2));
    Input input_ = random_input(random_.weights().config, 3, 2, Ids::distinct, random_.random());
    std::vector<float> output_ = std::vector<float>(3 * 64 + 1);
    AlignedBuffer workspace_{layer_->plan().workspace_bytes};
};

TEST_F(CpuRun, RefusesArgumentsThatDoNotFit) {
    EXPECT_EQ(refused([](Arguments&) {}), "none");
    EXPECT_EQ(refused([](Arguments& a) { a.hidden.shape = {3, 48}; }),
              "hidden is BF16 [3, 48] in host memory, expected BF16 [3, 64] in host memory");
    EXPECT_EQ(refused([](Arguments& a) { a.hidden.dtype = DType::f16; }),
              "hidden is F16 [3, 64] in host memory, expected BF16 [3, 64] in host memory");
    EXPECT_EQ(refused([](Arguments& a) { a.hidden.device = {DeviceType::cuda, 0}; }),
              "hidden is BF16 [3, 64] on GPU 0, expected BF16 [3, 64] in host memory");
    EXPECT_EQ(refused([](Arguments& a) { a.hidden.shape = {64}; }),
              "hidden is [64], expected [num_tokens, hidden_size]");
    EXPECT_EQ(refused([](Arguments& a) { a.hidden.shape = {-1, 64}; }),
              "hidden is [-1, 64], expected [num_tokens, hidden_size]");
    EXPECT_EQ(refused([](Arguments& a) { a.hidden.shape = {4, 64}; }),
              "hidden has 4 tokens, expected at most the 3 that were planned");
    EXPECT_EQ(refused([](Arguments& a) { a.hidden.data = nullptr; }),
              "hidden has no data, expected memory aligned to 2 bytes");
    EXPECT_EQ(refused([](Arguments& a) { a.routing.top_k_ids.shape = {3, 1}; }),
              "top_k_ids is I32 [3, 1] in host memory, expected I32 [3, 2] in host memory");
    EXPECT_EQ(refused([](Arguments& a) { a.routing.top_k_ids.dtype = DType::i64; }),
              "top_k_ids is I64 [3, 2] in host memory, expected I32 [3, 2] in host memory");
    EXPECT_EQ(refused([](Arguments& a) { a.routing.top_k_weights.dtype = DType::bf16; }),
              "top_k_weights is BF16 [3, 2] in host memory, expected F32 [3, 2] in host memory");
    EXPECT_EQ(refused([](Arguments& a) { a.output.shape = {2, 64}; }),
              "output is F32 [2, 64] in host memory, expected F32 [3, 64] in host memory");
    EXPECT_EQ(refused([](Arguments& a) { a.output.dtype = DType::f16; }),
              "output is F16 [3, 64] in host memory, expected BF16 [3, 64] in host memory");
    EXPECT_EQ(refused([](Arguments& a) { a.output.data = static_cast<char*>(a.output.data) + 1; }),
              "output is misaligned, expected memory aligned to 4 bytes");
    EXPECT_NE(refused([](Arguments& a) { a.workspace.bytes -= 1; }), "none");
    EXPECT_NE(refused([](Arguments& a) { a.workspace.data = nullptr; }), "none");
    EXPECT_EQ(refused([](Arguments& a) { a.workspace.data = static_cast<char*>(a.workspace.data) + 4; }),
              "the workspace is misaligned, expected an address that is a multiple of 64");
}

TEST_F(CpuRun, NoTokensNeedNoMemory) {
    layer_->run({nullptr, DType::bf16, {0, 64}, {}},
                {{nullptr, DType::i32, {0, 2}, {}}, {nullptr, DType::f32, {0, 2}, {}}},
                {nullptr, DType::f32, {0, 64}, {}}, {});
}

TEST_F(CpuRun, SlotsOfNobodyAddExactlyNothing) {
    std::fill(input_.ids.begin(), input_.ids.end(), -1);
    std::fill(input_.weights.begin(), input_.weights.end(), std::numeric_limits<float>::quiet_NaN());
    for (const float x : run_layer<float>(*layer_, input_)) ASSERT_TRUE(same(x, 0.0F));
}

TEST_F(CpuRun, RoutesAsTheReferenceDoes) {
    std::vector<std::int32_t> ids(6, -7);
    std::vector<float> weights(6, std::numeric_limits<float>::quiet_NaN());
    layer_->route(hidden_view(input_, 64), {ids.data(), DType::i32, {3, 2}, {}},
                  {weights.data(), DType::f32, {3, 2}, {}});
    for (std::size_t t = 0; t < 3; ++t) {
        std::int32_t expected_ids[2];
        float expected_weights[2];
        const MoeWeights& w = random_.weights();
        moe::route_token(w.config, w.router, w.router_bias, &input_.hidden[t * 64], expected_ids,
                         expected_weights);
        for (std::size_t j = 0; j < 2; ++j) {
            EXPECT_EQ(ids[2 * t + j], expected_ids[j]);
            EXPECT_EQ(weights[2 * t + j], expected_weights[j]);
        }
    }
    const std::string message = refusal(
        [&] {
            layer_->route(hidden_view(input_, 64), {ids.data(), DType::i32, {3, 1}, {}},
                          {weights.data(), DType::f32, {3, 2}, {}});
        },
        ErrorKind::invalid_argument);
    EXPECT_EQ(message, "top_k_ids is I32 [3, 1] in host memory, expected I32 [3, 2] in host memory");
}

TEST(CpuRoute, NeedsARouter) {
    const RandomLayer random({.hidden_size = 64, .intermediate_size = 32, .num_experts = 4});
    const auto layer = make_layer(random.weights(), problem_of(random.weights(), Precision::w4a16, 1, 2));
    EXPECT_EQ(refusal([&] { layer->route({}, {}, {}); }, ErrorKind::unsupported),
              "the layer has no router of its own");
}

TEST(CpuRoute, WhatTheRouterCannotDoMattersToItsUsersAlone) {
    const RandomLayer random(
        {.hidden_size = 64, .intermediate_size = 32, .num_experts = 64, .has_router = true});
    Problem problem = problem_of(random.weights(), Precision::w4a16, 1, 2);
    problem.config.router.top_k = 40;
    const auto layer = make_layer(random.weights(), problem);
    EXPECT_NE(refusal([&] { layer->route({}, {}, {}); }, ErrorKind::unsupported).find("at most 1024 and 32"),
              std::string::npos);
}

TEST(CpuBackend, DescribesItself) {
    const auto backend = open_backend("cpu", threads(3));
    EXPECT_EQ(backend->name(), "cpu");
    EXPECT_NE(backend->description().find(", 3 threads"), std::string::npos) << backend->description();
}

}  // namespace
}  // namespace moe4::cpu
