// What inspect says of a layer: counts, ranges, faults, modes; and of files and tensors that disagree.
#include "checkpoint/inspect.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "checkpoint/quantization_claims.hpp"
#include "checkpoint_fixture.hpp"

namespace moe4 {
namespace {

using test::CheckpointFixture;
using test::Spelling;

constexpr auto kScan = Checkpoint::Scan::block_scales;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

LayerInfo inspect(const CheckpointFixture& fixture, Checkpoint::Scan scan = kScan) {
    return Checkpoint::open(fixture.write()).inspect_layer(0, scan);
}

bool holds(const std::vector<std::string>& sentences, const std::string& part) {
    return std::any_of(sentences.begin(), sentences.end(),
                       [&](const std::string& s) { return s.find(part) != std::string::npos; });
}

TEST(Inspect, AGoodLayer) {
    const LayerInfo info = inspect(CheckpointFixture{});
    EXPECT_EQ(info.layer, 0);
    EXPECT_EQ(info.format, "nvfp4");
    EXPECT_EQ(info.num_experts, 4);
    EXPECT_EQ(info.hidden_size, 64);
    EXPECT_EQ(info.intermediate_size, 32);
    EXPECT_FALSE(info.has_shared_expert);
    EXPECT_EQ(info.modes, (std::vector{Precision::w4a16, Precision::w4a4}));
    ASSERT_TRUE(info.block_scales);
    EXPECT_EQ(info.block_scales->total, 4U * 3 * 64 * 32 / 16);
    EXPECT_EQ(info.block_scales->nan + info.block_scales->negative, 0U);
    EXPECT_EQ(info.bytes, 4U * 3 * (64 * 32 / 2 + 64 * 32 / 16 + 8));
    EXPECT_EQ(info.gate_up_global_mismatches, 0);
    EXPECT_EQ(info.refusals, std::vector<std::string>{});
    EXPECT_NEAR(info.input_scale[2].min, 4.0 / 2688, 1e-9);
    EXPECT_NEAR(info.input_scale[2].max, 4.75 / 2688, 1e-9);
    for (const ScaleRange& range : info.global_scale) {
        EXPECT_GT(range.min, 0.0);
        EXPECT_LE(range.min, range.max);
        EXPECT_TRUE(range.faults.empty());
    }
}

TEST(Inspect, LooksAtBlockScalesWhenAskedAlone) {
    CheckpointFixture fixture;
    fixture.tensor(0, 0, Projection::gate, "weight_scale").set<std::uint8_t>(5, 0x7F);
    const LayerInfo info = inspect(fixture, Checkpoint::Scan::headers_and_scalars);
    EXPECT_FALSE(info.block_scales);
    EXPECT_TRUE(info.refusals.empty());
}

TEST(Inspect, CountsBlockScales) {
    CheckpointFixture fixture;
    auto& scale = fixture.tensor(0, 3, Projection::down, "weight_scale");
    const std::uint8_t bytes[] = {0x00, 0x00, 0x01, 0x07, 0x08, 0x7E, 0x7F, 0xFF, 0x80, 0x81, 0xFE};
    for (std::size_t i = 0; i < std::size(bytes); ++i) scale.set(i, bytes[i]);
    const LayerInfo info = inspect(fixture);
    EXPECT_EQ(info.block_scales->zero, 2U);
    EXPECT_EQ(info.block_scales->subnormal, 2U);
    EXPECT_EQ(info.block_scales->nan, 2U);
    EXPECT_EQ(info.block_scales->negative, 3U);
    ASSERT_EQ(info.refusals.size(), 1U);
    EXPECT_EQ(
        info.refusals[0],
        "model.layers.0.mlp.experts.3.down_proj.weight_scale holds 0x7F (NaN) at row 3, block 0, expected "
        "scales of 0 or more");
    EXPECT_TRUE(info.modes.empty());
}

TEST(Inspect, ImpossibleGlobalScales) {
    const std::pair<float, const char*> values[] = {
        {0.0F, "0"}, {-1.0F, "-1"}, {kInfinity, "inf"}, {kNaN, "nan"}};
    for (const auto& [value, printed] : values) {
        CheckpointFixture fixture;
        fixture.tensor(0, 2, Projection::up, "weight_scale_2").set(0, value);
        const LayerInfo info = inspect(fixture);
        const std::string sentence = std::string("model.layers.0.mlp.experts.2.up_proj.weight_scale_2 is ") +
                                     printed + ", expected a positive finite number";
        EXPECT_EQ(info.global_scale[1].faults, std::vector<std::string>{sentence});
        EXPECT_EQ(info.refusals, std::vector<std::string>{sentence});
        EXPECT_EQ(info.gate_up_global_mismatches, 1);
        EXPECT_TRUE(info.modes.empty());
    }
}

TEST(Inspect, ImpossibleReciprocals) {
    const std::pair<float, const char*> values[] = {
        {0.0F, "0"}, {-4.0F, "-4"}, {kInfinity, "inf"}, {kNaN, "nan"}};
    for (const auto& [value, printed] : values) {
        CheckpointFixture fixture({.spelling = Spelling::compressed_tensors});
        fixture.tensor(0, 2, Projection::up, "weight_global_scale").set(0, value);
        EXPECT_EQ(inspect(fixture).refusals,
                  std::vector<std::string>{
                      std::string("model.layers.0.mlp.experts.2.up_proj.weight_global_scale is ") + printed +
                      ", expected a positive finite number"});
    }
}

TEST(Inspect, GateAndUpMayDiffer) {
    CheckpointFixture fixture;
    auto& up = fixture.tensor(0, 1, Projection::up, "weight_scale_2");
    up.set(0, up.get<float>() * 2);
    const LayerInfo info = inspect(fixture);
    EXPECT_EQ(info.gate_up_global_mismatches, 1);
    EXPECT_EQ(info.modes.size(), 2U);
}

TEST(Inspect, FaultyInputScalesStopW4a4Alone) {
    for (const float value : {0.0F, -1.0F, kInfinity, kNaN, 1e-40F}) {
        CheckpointFixture fixture;
        fixture.tensor(0, 1, Projection::down, "input_scale").set(0, value);
        const LayerInfo info = inspect(fixture);
        EXPECT_EQ(info.modes, std::vector{Precision::w4a16});
        ASSERT_EQ(info.refusals.size(), 1U);
        EXPECT_TRUE(info.refusals[0].starts_with("w4a4 with calibrated activation scales: model.layers.0"));
        EXPECT_EQ(info.input_scale[2].faults.size(), 1U);
        EXPECT_NO_THROW(Checkpoint::open(fixture.folder().path()).moe_layer(0));
    }
}

TEST(Inspect, MissingInputScales) {
    CheckpointFixture one;
    one.tensors.erase(one.module(0, 1, Projection::down) + ".input_scale");
    EXPECT_TRUE(holds(inspect(one).input_scale[2].faults, "experts.1.down_proj.input_scale is missing"));
    const LayerInfo all = inspect(CheckpointFixture({.has_input_scales = false}));
    EXPECT_EQ(all.modes, std::vector{Precision::w4a16});
    EXPECT_EQ(all.refusals.size(), 1U);
    EXPECT_EQ(all.input_scale[0].faults.size(), 4U);
    EXPECT_GT(all.input_scale[0].min, all.input_scale[0].max);
}

TEST(Inspect, InputScalesOfAnotherKind) {
    CheckpointFixture fixture;
    fixture.tensor(0, 1, Projection::down, "input_scale").dtype = DType::i32;
    fixture.tensor(0, 2, Projection::up, "input_scale").shape = {1, 1};
    const LayerInfo info = inspect(fixture);
    EXPECT_EQ(info.modes, std::vector{Precision::w4a16});
    EXPECT_EQ(
        info.input_scale[2].faults,
        std::vector<std::string>{"model.layers.0.mlp.experts.1.down_proj.input_scale is I32 [], expected "
                                 "F32 [] or [1]"});
    EXPECT_TRUE(holds(info.input_scale[1].faults, "experts.2.up_proj.input_scale is F32 [1, 1], expected"));
    EXPECT_EQ(info.refusals.size(), 1U);
}

TEST(Inspect, ListsEveryRefusal) {
    CheckpointFixture fixture;
    fixture.config["hidden_act"] = "relu2";
    fixture.tensors.erase(fixture.module(0, 0, Projection::gate) + ".weight_scale");
    fixture.tensor(0, 1, Projection::up, "weight_scale_2").set(0, kNaN);
    fixture.tensor(0, 2, Projection::down, "weight_scale").set<std::uint8_t>(0, 0x80);
    const LayerInfo info = inspect(fixture);
    EXPECT_EQ(info.refusals.size(), 4U);
    EXPECT_TRUE(holds(info.refusals, "hidden_act is relu2"));
    EXPECT_TRUE(holds(info.refusals, "experts.0.gate_proj.weight_scale is missing"));
    EXPECT_TRUE(holds(info.refusals, "experts.1.up_proj.weight_scale_2 is nan"));
    EXPECT_TRUE(holds(info.refusals, "experts.2.down_proj.weight_scale holds 0x80 (negative)"));
}

// --- Files against tensors

std::vector<std::string> disagreements(const CheckpointFixture& fixture) {
    return Checkpoint::open(fixture.write()).disagreements();
}

TEST(Disagreements, AnAlgorithmThatTheTensorsDeny) {
    CheckpointFixture fixture;
    fixture.hf_quant_config["quantization"]["quant_algo"] = "FP8";
    const auto found = disagreements(fixture);
    EXPECT_TRUE(holds(
        found, "hf_quant_config.json: quantization.quant_algo is FP8, but experts are nvfp4 (layers 0, 1)"));
    EXPECT_TRUE(holds(found, "config.json: quantization_config.quant_algo is NVFP4, but "));
    EXPECT_EQ(Checkpoint::open(fixture.folder().path()).moe_layer(0).experts.size(), 4U) << "tensors win";
}

TEST(Disagreements, AMethodThatTheTensorsDeny) {
    CheckpointFixture fixture;
    fixture.config["quantization_config"]["quant_method"] = "compressed-tensors";
    EXPECT_TRUE(holds(disagreements(fixture),
                      "quant_method is compressed-tensors, but the tensors are spelled as by modelopt"));
    EXPECT_EQ(Checkpoint::open(fixture.folder().path()).dialect(), "modelopt");
}

TEST(Disagreements, ExpertsThatTheConfigExcludes) {
    CheckpointFixture fixture;
    fixture.hf_quant_config["quantization"]["exclude_modules"].push_back("model.layers.1.mlp*");
    EXPECT_TRUE(holds(disagreements(fixture),
                      "hf_quant_config.json: quantization leaves experts unquantised, but "
                      "experts are nvfp4 (layers 1)"));
}

TEST(Disagreements, AGroupOfOtherNumbers) {
    const auto claim = [](const char* key, const nlohmann::json& value) {
        CheckpointFixture fixture({.spelling = Spelling::compressed_tensors});
        fixture.config["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value;
        const auto found = disagreements(fixture);
        EXPECT_EQ(Checkpoint::open(fixture.folder().path()).moe_layer(0).experts.size(), 4U) << "tensors win";
        return found;
    };
    EXPECT_TRUE(holds(claim("num_bits", 8),
                      "config_groups.group_0.weights.num_bits is 8, but experts are nvfp4 (layers 0, 1)"));
    EXPECT_TRUE(holds(claim("type", "int"),
                      "config_groups.group_0.weights.type is int, but experts are nvfp4 (layers 0, 1)"));
}

TEST(Disagreements, LayersOfAnotherKind) {
    CheckpointFixture dense({.num_layers = 3, .first_moe_layer = 1});
    dense.config["mlp_only_layers"] = nlohmann::json::array();
    EXPECT_TRUE(
        holds(disagreements(dense), "makes layers 0 MoE layers, but no tensor of an expert is there"));
    CheckpointFixture sparse({.family = "deepseek_v3", .num_layers = 4});
    sparse.config["first_k_dense_replace"] = 3;
    EXPECT_TRUE(holds(disagreements(sparse), "makes layers 0 to 2 dense, but experts are there"));
    CheckpointFixture step({.num_layers = 4});
    step.config["decoder_sparse_step"] = 2;
    EXPECT_TRUE(holds(disagreements(step), "makes layers 0, 2 dense"));
}

TEST(Disagreements, MoreExpertsThanTheConfigHas) {
    CheckpointFixture fixture({.num_experts = 6});
    fixture.config["num_experts"] = 4;
    fixture.tensors.at("model.layers.0.mlp.gate.weight").shape = {4, 96};  // not looked at here
    const auto checkpoint = Checkpoint::open(fixture.write());
    EXPECT_TRUE(
        holds(checkpoint.disagreements(), "num_experts is 4, but expert 5 has tensors (layers 0, 1)"));
    EXPECT_TRUE(holds(checkpoint.unused(), "model.layers.1.mlp.experts.5.up_proj.weight_scale_2"));
    EXPECT_FALSE(holds(checkpoint.unused(), "experts.3."));
}

TEST(Unmatched, NamesThatNoTensorHas) {
    CheckpointFixture fixture;
    auto& modules = fixture.hf_quant_config["quantization"]["exclude_modules"];
    modules = {"lm_head",         "lm_head.*", "model.layers.0.self_attn*",
               "*.gate",          "Linear",    "re:.*nothing",
               "model.layers.0",  "mtp.fc",    "model.layers.9*",
               "*.vision_tower.*"};
    fixture.config["quantization_config"].erase("ignore");
    EXPECT_EQ(Checkpoint::open(fixture.write()).unmatched(),
              (std::vector<std::string>{"*.vision_tower.*", "model.layers.9*", "mtp.fc"}));
}

TEST(Unused, StrayTensorsOfTheBlock) {
    CheckpointFixture fixture({.family = "glm4_moe"});
    fixture.tensors["model.layers.1.mlp.something"] = {DType::f32, {1}, std::vector<std::uint8_t>(4)};
    fixture.tensors["model.layers.1.other.weight"] = {DType::f32, {1}, std::vector<std::uint8_t>(4)};
    EXPECT_EQ(Checkpoint::open(fixture.write()).unused(),
              std::vector<std::string>{"model.layers.1.mlp.something"});
}

TEST(ListOfLayers, JoinsNeighbours) {
    using checkpoint::list_of_layers;
    EXPECT_EQ(list_of_layers({}), "");
    EXPECT_EQ(list_of_layers({3}), "3");
    EXPECT_EQ(list_of_layers({3, 4}), "3, 4");
    EXPECT_EQ(list_of_layers({0, 1, 2, 5, 7, 8}), "0 to 2, 5, 7, 8");
}

TEST(Glob, StarsAndQuestionMarks) {
    using checkpoint::matches_glob;
    EXPECT_TRUE(matches_glob("a.b", "a.b"));
    EXPECT_FALSE(matches_glob("a.b", "aXb"));
    EXPECT_TRUE(matches_glob("a*", "a.b.c"));
    EXPECT_TRUE(matches_glob("*c", "a.b.c"));
    EXPECT_TRUE(matches_glob("a*b*c", "a.bb.xc"));
    EXPECT_FALSE(matches_glob("a*b*c", "a.bb.xd"));
    EXPECT_TRUE(matches_glob("a?c", "abc"));
    EXPECT_TRUE(matches_glob("", ""));
    EXPECT_FALSE(matches_glob("", "a"));
    EXPECT_TRUE(matches_glob("**", "a"));
}

}  // namespace
}  // namespace moe4
