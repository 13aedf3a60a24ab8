// Scales that mean nothing are refused by name; those that do become the activations' global scales.
#include "moe/scales.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "moe4/error.hpp"
#include "quantized_layer.hpp"

namespace moe4::moe {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Refusal {
    ErrorKind kind = ErrorKind::machine;
    std::string sentence = "nothing was refused";
};

template <class Function>
Refusal refusal_of(Function function) {
    try {
        function();
    } catch (const Error& error) {
        return {error.kind(), error.what()};
    }
    return {};
}

Refusal check(const QuantizedLayer& layer, ExpertRange range = {}, const ParallelFor& parallel_for = {}) {
    return refusal_of([&] { check_weights(layer.weights, range, parallel_for); });
}

Refusal scales(const QuantizedLayer& layer, ActivationScale mode) {
    return refusal_of([&] { input_scales(layer.weights, mode); });
}

/// Every call on a thread of its own, the last one first.
void run_backwards(int count, void (*body)(void*, int), void* context) {
    for (int i = count - 1; i >= 0; --i) std::thread(body, context, i).join();
}

TEST(InputScales, LayerMaxIsOverAllExpertsAndPerExpertOverGateAndUp) {
    QuantizedLayer layer(1);
    layer.weights.experts[1].gate.input_scale = 0.25;
    layer.weights.experts[1].up.input_scale = 0.5;
    layer.weights.experts[5].down.input_scale = 0.75;
    for (const InputScales& each : input_scales(layer.weights, ActivationScale::layer_max)) {
        EXPECT_EQ(each.gate_up, 0.5F);
        EXPECT_EQ(each.down, 0.75F);
    }
    const auto own = input_scales(layer.weights, ActivationScale::per_expert);
    EXPECT_EQ(own[1].gate_up, 0.5F);
    EXPECT_EQ(own[1].down, static_cast<float>(4.0 / 2688));
    EXPECT_EQ(own[5].gate_up, static_cast<float>(4.0 / 2688));
    EXPECT_EQ(own[5].down, 0.75F);
}

TEST(InputScales, ADivisorIsRoundedOnce) {
    QuantizedLayer layer(1);
    for (auto& expert : layer.weights.experts) expert.gate.input_scale = 1.0 / static_cast<double>(829.0F);
    const auto scale = input_scales(layer.weights, ActivationScale::per_expert)[0];
    EXPECT_EQ(scale.gate_up, std::max(1.0F / 829.0F, static_cast<float>(4.0 / 2688)));
}

TEST(InputScales, AMissingOneIsUnsupportedWhereItIsNeeded) {
    QuantizedLayer layer(1);
    layer.weights.experts[4].up.input_scale.reset();
    for (const auto mode : {ActivationScale::layer_max, ActivationScale::per_expert}) {
        const Refusal refusal = scales(layer, mode);
        EXPECT_EQ(refusal.kind, ErrorKind::unsupported);
        EXPECT_EQ(
            refusal.sentence.find("model.layers.3.mlp.experts.4.up_proj.input_scale is missing, expected"),
            0U)
            << refusal.sentence;
    }
    for (const auto mode : {ActivationScale::dynamic, ActivationScale::dynamic_token}) {
        EXPECT_EQ(scales(layer, mode).sentence, "nothing was refused");
        EXPECT_EQ(input_scales(layer.weights, mode).size(), 6U);
    }
}

TEST(InputScales, ImpossibleOnesAreRefused) {
    for (const double bad : {0.0, -1.0, -0.0, kInfinity, kNaN, 1e-39, 1e39, -kInfinity}) {
        for (const auto mode : {ActivationScale::layer_max, ActivationScale::per_expert}) {
            for (const auto projection : kProjections) {
                QuantizedLayer layer(1);
                auto& expert = layer.weights.experts[5];
                (projection == Projection::gate ? expert.gate
                 : projection == Projection::up ? expert.up
                                                : expert.down)
                    .input_scale = bad;
                const Refusal refusal = scales(layer, mode);
                EXPECT_EQ(refusal.kind, ErrorKind::broken_file) << bad;
                EXPECT_NE(refusal.sentence.find("experts.5." + std::string(projection_name(projection)) +
                                                ".input_scale is "),
                          std::string::npos)
                    << refusal.sentence;
            }
        }
    }
}

TEST(InputScales, TheMessageHoldsTheValueThatTheFileHolds) {
    QuantizedLayer layer(1);
    layer.weights.leaves = {.packed = "weight_packed",
                            .block_scale = "weight_scale",
                            .global_scale = "weight_global_scale",
                            .input_scale = "input_global_scale",
                            .scales_divide = true};
    layer.weights.experts[0].gate.input_scale = 1.0 / -64.0;
    EXPECT_EQ(scales(layer, ActivationScale::layer_max).sentence,
              "model.layers.3.mlp.experts.0.gate_proj.input_global_scale is -64, expected a positive normal "
              "number");
    layer.weights.experts[2].down.weight.global_scale = 1.0 / 0.0;
    EXPECT_EQ(check(layer).sentence,
              "model.layers.3.mlp.experts.2.down_proj.weight_global_scale is 0, expected a positive finite "
              "number");
}

TEST(CheckWeights, AcceptsWhatTheQuantiserWrites) {
    QuantizedLayer layer(1);
    layer.matrix(0, Projection::gate).quantized.block_scale[0] = 0;     // legal: the block is exactly 0
    layer.matrix(0, Projection::gate).quantized.block_scale[1] = 1;     // subnormal
    layer.matrix(0, Projection::gate).quantized.block_scale[2] = 0x7E;  // 448
    EXPECT_EQ(check(layer).sentence, "nothing was refused");
}

TEST(CheckWeights, GlobalScalesThatMeanNothing) {
    for (const double bad : {0.0, -0.0, -2.5, kInfinity, -kInfinity, kNaN}) {
        QuantizedLayer layer(1);
        layer.weights.experts[3].up.weight.global_scale = bad;
        const Refusal refusal = check(layer);
        EXPECT_EQ(refusal.kind, ErrorKind::broken_file);
        EXPECT_EQ(refusal.sentence.find("model.layers.3.mlp.experts.3.up_proj.weight_scale_2 is "), 0U);
    }
}

// Every byte at every position of a row of 13 blocks: whole words and the rest.
TEST(CheckWeights, FindsEveryBadBlockScaleAtEveryPlace) {
    QuantizedLayer layer(
        1, {.hidden_size = 13 * 16, .intermediate_size = 16, .num_experts = 2, .router = {.top_k = 1}});
    auto& scale_bytes = layer.matrix(1, Projection::up).quantized.block_scale;
    for (int byte = 0; byte < 256; ++byte) {
        const bool is_bad = byte >= 0x7F;
        for (std::size_t block = 0; block < 13; ++block) {
            const std::size_t place = 7 * 13 + block;
            const auto before = std::exchange(scale_bytes[place], static_cast<std::uint8_t>(byte));
            const Refusal refusal = check(layer);
            scale_bytes[place] = before;
            ASSERT_EQ(refusal.kind == ErrorKind::broken_file, is_bad) << byte << " at " << block;
            if (!is_bad) continue;
            const std::string where = "row 7, block " + std::to_string(block) + ", expected";
            ASSERT_NE(refusal.sentence.find(where), std::string::npos) << refusal.sentence;
        }
    }
    scale_bytes[7 * 13 + 12] = 0x7F;
    EXPECT_EQ(check(layer).sentence,
              "model.layers.3.mlp.experts.1.up_proj.weight_scale holds 0x7F (NaN) at row 7, block 12, "
              "expected scales of 0 or more");
    scale_bytes[7 * 13 + 12] = 0x80;
    EXPECT_NE(check(layer).sentence.find("0x80 (negative)"), std::string::npos);
}

TEST(CheckWeights, BytesBetweenStridedRowsDoNotCount) {
    QuantizedLayer layer(1);
    auto& view = layer.weights.experts[0].gate.weight;
    const std::int64_t num_blocks = view.cols / kNvfp4BlockSize;
    std::vector<std::uint8_t> apart(static_cast<std::size_t>(view.rows * (num_blocks + 3)), 0xFF);
    for (std::int64_t row = 0; row < view.rows; ++row) {
        std::copy_n(view.block_scale + row * num_blocks, num_blocks,
                    &apart[static_cast<std::size_t>(row * 7)]);
    }
    view.block_scale = apart.data();
    view.scale_stride = num_blocks + 3;
    EXPECT_EQ(check(layer).sentence, "nothing was refused");
    apart[7 * 5 + 3] = 0xFF;
    EXPECT_NE(check(layer).sentence.find("row 5, block 3"), std::string::npos);
}

TEST(CheckWeights, OnlyHeldExpertsCountAndTheLowestIsNamed) {
    QuantizedLayer layer(1);
    layer.matrix(2, Projection::down).quantized.block_scale[0] = 0x7F;
    layer.matrix(4, Projection::gate).quantized.block_scale[0] = 0x7F;
    EXPECT_EQ(check(layer, {0, 2}).sentence, "nothing was refused");
    EXPECT_NE(check(layer, {3, -1}).sentence.find("experts.4.gate_proj"), std::string::npos);
    EXPECT_NE(check(layer, {}, run_backwards).sentence.find("experts.2.down_proj"), std::string::npos);
}

TEST(HeldExpertRange, LiesWithinTheLayer) {
    EXPECT_EQ(held_experts({}, 8).last, 8);
    EXPECT_EQ(held_experts({3, -1}, 8).first, 3);
    EXPECT_EQ(held_experts({3, 5}, 8).last, 8);
    EXPECT_FALSE(held_experts({3, 2}, 8).contains(5));
    EXPECT_FALSE(held_experts({0, 8}, 8).contains(-1));
    const int most = std::numeric_limits<int>::max();
    for (const ExpertRange bad :
         {ExpertRange{-1, 2}, {0, 9}, {8, -1}, {3, 0}, {1, most}, {most, 1}, {most, most}, {7, 2}}) {
        EXPECT_EQ(refusal_of([&] { held_experts(bad, 8); }).kind, ErrorKind::invalid_argument)
            << bad.first << ":" << bad.count;
    }
}

TEST(TensorName, FallsBackOnLayerAndExpert) {
    QuantizedLayer layer(1);
    layer.weights.experts[1].down.name.clear();
    EXPECT_EQ(tensor_name(layer.weights, 1, Projection::down, "weight_scale"),
              "layer 3, expert 1: down_proj.weight_scale");
}

}  // namespace
}  // namespace moe4::moe
