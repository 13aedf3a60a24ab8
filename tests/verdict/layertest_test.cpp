// Faults of every kind put into a sound layer: the verdict must name the one that was put in.
#include "moe4/layertest.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>

#include "moe/reference.hpp"
#include "moe/routers.hpp"
#include "moe4/error.hpp"
#include "quantized_layer.hpp"

namespace moe4 {
namespace {

constexpr std::int64_t kTokens = 64;

/// The contract as an engine, with a place to put a fault.
class ReferenceEngine : public Layer {
public:
    ReferenceEngine(const MoeWeights& weights, Problem problem) : weights_(weights) {
        problem.config = weights.config;
        plan_.problem = problem;
        plan_.backend = "test";
        plan_.choices = {{.up_to_tokens_per_expert = 0, .kernel = "plain_loops"}};
    }
    const Plan& plan() const override { return plan_; }
    void route(TensorView, MutableTensorView, MutableTensorView, Stream) const override {}
    void run(TensorView hidden, const Routing& routing, MutableTensorView output, Workspace,
             Stream) const override {
        const auto values = compute(hidden, routing);
        std::copy(values.begin(), values.end(), static_cast<float*>(output.data));
    }

protected:
    virtual std::vector<float> compute(const TensorView& hidden, const Routing& routing) const {
        return run_reference(weights_, hidden, routing);
    }
    std::vector<float> run_reference(const MoeWeights& weights, const TensorView& hidden,
                                     const Routing& routing) const {
        const Problem& p = plan_.problem;
        const auto slots = static_cast<std::size_t>(routing.top_k_ids.shape.num_elements());
        return moe::reference_layer(
            weights, {p.precision, p.activation_scale, p.experts},
            {.hidden = {static_cast<const std::uint16_t*>(hidden.data),
                        static_cast<std::size_t>(hidden.shape.num_elements())},
             .top_k_ids = {static_cast<const std::int32_t*>(routing.top_k_ids.data), slots},
             .top_k_weights = {static_cast<const float*>(routing.top_k_weights.data), slots},
             .num_tokens = hidden.shape[0],
             .top_k = static_cast<int>(routing.top_k_ids.shape[1])});
    }
    const MoeWeights& weights_;

private:
    Plan plan_;
};

class SwapsGateAndUp : public ReferenceEngine {
    using ReferenceEngine::ReferenceEngine;
    std::vector<float> compute(const TensorView& hidden, const Routing& routing) const override {
        MoeWeights wrong = weights_;
        for (auto& expert : wrong.experts) std::swap(expert.gate, expert.up);
        return run_reference(wrong, hidden, routing);
    }
};

/// Takes block scales below the largest eighth for zero: the slip of a kernel that flushes subnormals.
class DropsSmallScales : public ReferenceEngine {
    using ReferenceEngine::ReferenceEngine;
    std::vector<float> compute(const TensorView& hidden, const Routing& routing) const override {
        MoeWeights wrong = weights_;
        std::vector<std::vector<std::uint8_t>> scales;
        for (auto& expert : wrong.experts) {
            Nvfp4View& down = expert.down.weight;
            auto& copy =
                scales.emplace_back(down.block_scale, down.block_scale + down.rows * down.scale_stride);
            const std::uint8_t largest = *std::max_element(copy.begin(), copy.end());
            for (auto& scale : copy) {
                if (scale + 8 < largest) scale = 0;
            }
            down.block_scale = copy.data();
        }
        return run_reference(wrong, hidden, routing);
    }
};

class WritesANaN : public ReferenceEngine {
    using ReferenceEngine::ReferenceEngine;
    std::vector<float> compute(const TensorView& hidden, const Routing& routing) const override {
        auto values = ReferenceEngine::compute(hidden, routing);
        values[values.size() / 2] = std::numeric_limits<float>::quiet_NaN();
        return values;
    }
};

class LayertestVerdict : public testing::TestWithParam<Precision> {
protected:
    LayertestVerdict() { route(kTokens); }

    void route(std::int64_t num_tokens) {
        const MoeConfig& config = layer.weights.config;
        const auto slots = static_cast<std::size_t>(num_tokens * config.router.top_k);
        hidden = default_hidden(layer.weights, num_tokens, 0);
        ids.assign(slots, -7);
        slot_weights.assign(slots, -7);
        for (std::int64_t t = 0; t < num_tokens; ++t) {
            moe::route_token(config, layer.weights.router, {}, &hidden[static_cast<std::size_t>(t * 64)],
                             &ids[static_cast<std::size_t>(t * 2)],
                             &slot_weights[static_cast<std::size_t>(t * 2)]);
        }
    }

    TensorView hidden_view() const {
        return {hidden.data(), DType::bf16, {static_cast<std::int64_t>(hidden.size()) / 64, 64}, {}};
    }
    Routing routing() const {
        const Shape shape{static_cast<std::int64_t>(ids.size()) / 2, 2};
        return {{ids.data(), DType::i32, shape, {}}, {slot_weights.data(), DType::f32, shape, {}}};
    }

    template <class Engine = ReferenceEngine>
    LayertestReport test(Problem problem = {}) {
        problem.precision = GetParam();
        const Engine engine(layer.weights, problem);
        return layertest(
            engine, layer.weights, [&](int e, Projection p) { return reference(e, p); }, hidden_view(),
            routing());
    }

    NamedTensor reference(int expert, Projection projection) {
        return {"reference " + std::to_string(expert), reference_layer.original(expert, projection)};
    }

    void swap_nibbles(int expert, Projection projection) {
        for (auto& byte : layer.matrix(expert, projection).quantized.packed)
            byte = static_cast<std::uint8_t>(byte << 4 | byte >> 4);
    }

    QuantizedLayer layer{1};
    QuantizedLayer reference_layer{1};
    std::vector<std::uint16_t> hidden;
    std::vector<std::int32_t> ids;
    std::vector<float> slot_weights;
};

INSTANTIATE_TEST_SUITE_P(BothPrecisions, LayertestVerdict, testing::Values(Precision::w4a16, Precision::w4a4),
                         [](const auto& each) { return each.param == Precision::w4a16 ? "w4a16" : "w4a4"; });

bool says(const LayertestReport& report, const std::string& words) {
    return report.verdict.find(words) != std::string::npos;
}

TEST_P(LayertestVerdict, SoundLayer) {
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::none) << report.verdict;
    ASSERT_TRUE(report.weights);
    EXPECT_EQ(report.weights->matrices, 18);
    EXPECT_EQ(report.weights->matrices_over_limit, 0);
    EXPECT_EQ(report.weights->worst.size(), 8U);
    EXPECT_GT(report.weights->overall.rel_l2, 0.06);
    EXPECT_LT(report.weights->overall.rel_l2, 0.12);
    ASSERT_TRUE(report.activations);
    EXPECT_GT(report.activations->rel_l2, 0.05);
    EXPECT_LT(report.activations->rel_l2, 0.25);
    EXPECT_GT(report.engine->rel_l2, 0.0);
    EXPECT_LT(report.engine->rel_l2, GetParam() == Precision::w4a4 ? 2e-3 : 2e-4);
    EXPECT_EQ(report.engine_limit, GetParam() == Precision::w4a4 ? 3e-3 : 1e-3);
    EXPECT_TRUE(says(report, "nothing is wrong")) << report.verdict;
}

TEST_P(LayertestVerdict, GateAndUpSwappedInTheCheckpoint) {
    for (auto& expert : layer.weights.experts) std::swap(expert.gate.weight, expert.up.weight);
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::weights) << report.verdict;
    EXPECT_EQ(report.weights->matrices_over_limit, 12);
    EXPECT_TRUE(says(report, "gate and up are swapped")) << report.verdict;
    EXPECT_LT(report.engine->rel_l2, report.engine_limit);
}

TEST_P(LayertestVerdict, GlobalScaleFourTimesOffInOneExpert) {
    layer.weights.experts[4].down.weight.global_scale *= 4;
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::weights) << report.verdict;
    EXPECT_EQ(report.weights->matrices_over_limit, 1);
    EXPECT_EQ(report.weights->worst[0].expert, 4);
    EXPECT_EQ(report.weights->worst[0].projection, Projection::down);
    EXPECT_NEAR(report.weights->worst[0].distance.rel_l2, 3.0, 0.1);
    EXPECT_TRUE(says(report, "expert 4 down_proj")) << report.verdict;
    EXPECT_TRUE(says(report, "times its reference, as a wrong weight_scale_2 makes it")) << report.verdict;
}

TEST_P(LayertestVerdict, NibblesSwappedInOneMatrix) {
    swap_nibbles(2, Projection::up);
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::weights) << report.verdict;
    EXPECT_EQ(report.weights->matrices_over_limit, 1);
    EXPECT_TRUE(says(report, "expert 2 up_proj")) << report.verdict;
    EXPECT_TRUE(says(report, "nibbles")) << report.verdict;
    EXPECT_FALSE(says(report, "another layer")) << report.verdict;
}

TEST_P(LayertestVerdict, NibblesSwappedEverywhereAreNotAnotherLayer) {
    for (int e = 0; e < 6; ++e) {
        for (const auto p : kProjections) swap_nibbles(e, p);
    }
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::weights);
    EXPECT_TRUE(says(report, "nibbles")) << report.verdict;
    EXPECT_FALSE(says(report, "another layer")) << report.verdict;
}

TEST_P(LayertestVerdict, ScalesInSwizzledOrder) {
    layer = QuantizedLayer(5, {.hidden_size = 64,
                               .intermediate_size = 128,
                               .num_experts = 6,
                               .router = {.top_k = 2, .renormalize = true}});
    reference_layer = QuantizedLayer(5, layer.weights.config);
    // Rows of very different sizes, so that misplaced scales show.
    for (auto* each : {&layer, &reference_layer}) {
        auto& m = each->matrix(1, Projection::gate);
        for (std::size_t i = 0; i < m.original.size(); ++i) {
            m.original[i] = format::bf16_from_float(
                std::ldexp(format::bf16_to_float(m.original[i]), -static_cast<int>(i / 64 % 7)));
        }
        m.quantized = format::quantize_modelopt(m.original, 128, 64, format::largest_magnitude(m.original));
        auto& view = each->weights.experts[1].gate.weight;
        view.packed = m.quantized.packed.data();
        view.block_scale = m.quantized.block_scale.data();
        view.global_scale = static_cast<double>(m.quantized.stored_global_scale);
    }
    auto& scales = layer.matrix(1, Projection::gate).quantized.block_scale;
    const auto linear = scales;
    swizzle_scales(linear.data(), 128, 4, scales.data());
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::weights);
    EXPECT_TRUE(says(report, "expert 1 gate_proj")) << report.verdict;
    EXPECT_TRUE(says(report, "swizzled")) << report.verdict;
}

TEST_P(LayertestVerdict, ReferenceOfAnotherLayer) {
    reference_layer = QuantizedLayer(2);
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::weights);
    EXPECT_EQ(report.weights->matrices_of_another, 18);
    EXPECT_TRUE(says(report, "a reference of another layer or model looks the same")) << report.verdict;
}

TEST_P(LayertestVerdict, WrongEngineOnGoodWeights) {
    for (const auto& report : {test<SwapsGateAndUp>(), test<DropsSmallScales>(), test<WritesANaN>()}) {
        EXPECT_EQ(report.cause, Cause::engine) << report.verdict;
        EXPECT_GT(report.engine->rel_l2, 0.01);
        EXPECT_EQ(report.weights->matrices_over_limit, 0);
        EXPECT_TRUE(says(report, "plain_loops")) << report.verdict;
        EXPECT_FALSE(says(report, "besides")) << report.verdict;
    }
    EXPECT_EQ(test<WritesANaN>().engine->rel_l2, std::numeric_limits<double>::infinity());
}

TEST_P(LayertestVerdict, WrongEngineOnBadWeightsNamesBoth) {
    layer.weights.experts[4].down.weight.global_scale *= 4;
    const LayertestReport report = test<SwapsGateAndUp>();
    EXPECT_EQ(report.cause, Cause::engine);
    EXPECT_TRUE(says(report, "besides, 1 of 18 matrices")) << report.verdict;
}

TEST_P(LayertestVerdict, ActivationsThatTheirScaleCannotHold) {
    for (auto& expert : layer.weights.experts) {
        expert.gate.input_scale = expert.up.input_scale = 1e3;  // every block scale rounds to 0
        expert.down.input_scale = 1e3;
    }
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::activations) << report.verdict;
    EXPECT_GT(report.activations->rel_l2, 0.35);
}

TEST_P(LayertestVerdict, OverflowIsNotTheEnginesFault) {
    for (auto& expert : layer.weights.experts) {
        expert.gate.weight.global_scale *= 1e37;
        expert.up.weight.global_scale *= 1e37;
        expert.down.weight.global_scale *= 1e37;
    }
    EXPECT_EQ(test().cause, Cause::weights) << test().verdict;
}

TEST_P(LayertestVerdict, AGlobalScaleThatOverflowsInsideIsNotTheEnginesFault) {
    for (const Projection projection : kProjections) {
        for (const double factor : {1e38, 1e40}) {
            layer = QuantizedLayer(1);
            auto& expert = layer.weights.experts[4];
            (projection == Projection::gate ? expert.gate
             : projection == Projection::up ? expert.up
                                            : expert.down)
                .weight.global_scale *= factor;
            const ReferenceEngine engine(layer.weights, {.precision = GetParam()});
            const auto report = layertest(engine, layer.weights, {}, hidden_view(), routing());
            EXPECT_NE(report.cause, Cause::engine) << report.verdict;
        }
    }
}

TEST_P(LayertestVerdict, WithoutAReference) {
    const ReferenceEngine engine(layer.weights, {.precision = GetParam()});
    const LayertestReport report = layertest(engine, layer.weights, {}, hidden_view(), routing());
    EXPECT_EQ(report.cause, Cause::none);
    EXPECT_FALSE(report.weights);
}

TEST_P(LayertestVerdict, WithoutASlotToComputeNothingIsClaimed) {
    const auto expect_no_claim = [&](const LayertestReport& report) {
        EXPECT_EQ(report.cause, Cause::none);
        EXPECT_FALSE(report.engine);
        EXPECT_FALSE(report.activations);
        EXPECT_TRUE(
            says(report, "the engine was not tested, because no token goes to an expert that is held"))
            << report.verdict;
        EXPECT_TRUE(says(report, "the weights lie")) << report.verdict;
    };
    slot_weights.assign(slot_weights.size(), 1.0F);
    ids.assign(ids.size(), -1);
    expect_no_claim(test());
    ids.assign(ids.size(), 5);
    expect_no_claim(test({.experts = {0, 5}}));
    route(0);
    expect_no_claim(test());
}

TEST_P(LayertestVerdict, OnlyTheHeldExpertsAreTested) {
    layer.weights.experts[4].down.weight.global_scale *= 4;
    const LayertestReport report = test({.experts = {1, 3}});
    EXPECT_EQ(report.cause, Cause::none) << report.verdict;
    EXPECT_EQ(report.weights->matrices, 9);
    EXPECT_EQ(test({.experts = {4, 1}}).cause, Cause::weights);
}

TEST_P(LayertestVerdict, ProgressCountsToItsTotalWhateverTheThreads) {
    const ReferenceEngine engine(layer.weights, {.precision = GetParam()});
    std::set<int> seen;
    int last_total = 0;
    const auto original = [&](int e, Projection p) { return reference(e, p); };
    layertest(engine, layer.weights, original, hidden_view(), routing(), [&](int done, int total) {
        seen.insert(done);
        last_total = total;
    });
    EXPECT_EQ(static_cast<int>(seen.size()), last_total);
    EXPECT_EQ(*seen.rbegin(), last_total);
}

TEST_P(LayertestVerdict, UnfitInputsAreRefusedByName) {
    const auto message = [&] {
        try {
            test();
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
            return std::string(error.what());
        }
        return std::string("nothing was refused");
    };
    hidden[3 * 64 + 5] = 0x7FC0;
    EXPECT_EQ(message(), "hidden is not finite at row 3, column 5, expected finite numbers");
    hidden[3 * 64 + 5] = 0;
    slot_weights[2] = std::numeric_limits<float>::infinity();
    EXPECT_EQ(message(), "top_k_weights is not finite at row 1, column 0, expected finite numbers");
    slot_weights[2] = 1;
    ids.resize(ids.size() - 2);
    EXPECT_EQ(message(), "top_k_ids is I32 [63, 2], expected I32 [64, 2] in host memory");
    route(kTokens);
    reference_layer.matrix(5, Projection::up).quantized.rows = 47;
    EXPECT_EQ(message(),
              "reference 5 is BF16 [47, 64], expected BF16, F16 or F32 [48, 64] as the reference of "
              "model.layers.3.mlp.experts.5.up_proj.weight");
}

TEST_P(LayertestVerdict, AReferenceThatIsNotFiniteIsABrokenFile) {
    for (const auto& [bits, name] : {std::pair{0x7FC0, "NaN"}, std::pair{0xFF80, "an infinity"}}) {
        reference_layer.matrix(2, Projection::down).original[3 * 48 + 7] = static_cast<std::uint16_t>(bits);
        try {
            test();
            ADD_FAILURE() << "nothing was refused";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::broken_file);
            EXPECT_EQ(error.what(), std::string("reference 2 holds ") + name +
                                        " at row 3, column 7, expected finite numbers");
        }
    }
}

using LayertestOfUncalibrated = LayertestVerdict;
INSTANTIATE_TEST_SUITE_P(OnlyW4a16, LayertestOfUncalibrated, testing::Values(Precision::w4a16),
                         [](const auto&) { return "w4a16"; });

TEST_P(LayertestOfUncalibrated, LeavesTheActivationsOutAndSaysWhy) {
    layer.weights.experts[5].up.input_scale.reset();
    const LayertestReport report = test();
    EXPECT_EQ(report.cause, Cause::none) << report.verdict;
    EXPECT_FALSE(report.activations);
    EXPECT_NE(report.activations_note.find("experts.5.up_proj.input_scale is missing"), std::string::npos);
    EXPECT_TRUE(test({.activation_scale = ActivationScale::dynamic}).activations);
}

}  // namespace
}  // namespace moe4
