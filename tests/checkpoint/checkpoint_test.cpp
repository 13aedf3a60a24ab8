// Every family in every dialect, as MoeWeights: configuration, router, values, precision.
#include "moe4/checkpoint.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "checkpoint_fixture.hpp"
#include "expect_error.hpp"
#include "format/bf16.hpp"

namespace moe4 {
namespace {

using test::CheckpointFixture;
using test::CheckpointOptions;
using test::expect_error;
using test::Spelling;

double rel_l2(const Nvfp4View& matrix, const TensorView& original) {
    std::vector<float> values(static_cast<std::size_t>(matrix.rows * matrix.cols), NAN);
    dequantize(matrix, values.data());
    double difference = 0.0;
    double norm = 0.0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, static_cast<const std::uint16_t*>(original.data) + i, sizeof bits);
        const double exact = format::bf16_to_float(bits);
        difference += (values[i] - exact) * (values[i] - exact);
        norm += exact * exact;
    }
    return std::sqrt(difference / norm);
}

class EveryFamily : public testing::TestWithParam<std::tuple<const char*, Spelling>> {
protected:
    CheckpointOptions options() const {
        const std::string family = std::get<0>(GetParam());
        const bool is_sparse_throughout = family == "mixtral" || family == "minimax_m2";
        return {.family = family,
                .spelling = std::get<1>(GetParam()),
                .num_layers = 3,
                .first_moe_layer = is_sparse_throughout ? 0 : 1};
    }
};

TEST_P(EveryFamily, LoadsAsTheOriginalQuantised) {
    const CheckpointFixture fixture(options());
    CheckpointOptions original_options = options();
    original_options.spelling = Spelling::unquantized;
    const CheckpointFixture original_fixture(original_options);
    const auto checkpoint = Checkpoint::open(fixture.write());
    const auto original = Checkpoint::open(original_fixture.write());
    EXPECT_EQ(checkpoint.family(), options().family);
    EXPECT_EQ(checkpoint.dialect(),
              options().spelling == Spelling::modelopt ? "modelopt" : "compressed-tensors");
    EXPECT_EQ(original.dialect(), "unquantized");
    EXPECT_EQ(checkpoint.moe_layers().front(), options().first_moe_layer);
    EXPECT_EQ(checkpoint.moe_layers().back(), 2);
    EXPECT_EQ(checkpoint.disagreements(), std::vector<std::string>{});
    EXPECT_EQ(checkpoint.unmatched(), std::vector<std::string>{});
    EXPECT_EQ(checkpoint.unused(), std::vector<std::string>{});
    for (const int layer : checkpoint.moe_layers()) {
        const MoeWeights weights = checkpoint.moe_layer(layer);
        EXPECT_EQ(weights.layer, layer);
        ASSERT_EQ(weights.experts.size(), 4U);
        EXPECT_EQ(weights.router.data, checkpoint.find(fixture.block(layer) + "gate.weight")->data);
        for (int expert = 0; expert < 4; ++expert) {
            for (const Projection projection : kProjections) {
                const ExpertMatrix& matrix = weights.experts[static_cast<std::size_t>(expert)][projection];
                EXPECT_EQ(matrix.name, fixture.module(layer, expert, projection));
                EXPECT_LT(
                    rel_l2(matrix.weight, original.unquantized_matrix(layer, expert, projection).tensor),
                    0.12)
                    << matrix.name;
                ASSERT_TRUE(matrix.input_scale);
                const double amax = projection == Projection::down ? 4.0 + 0.25 * expert : 6.0;
                EXPECT_NEAR(*matrix.input_scale, amax / 2688.0, 1e-9);
            }
        }
    }
}

TEST_P(EveryFamily, HasItsRouter) {
    const CheckpointFixture fixture(options());
    const auto checkpoint = Checkpoint::open(fixture.write());
    const MoeWeights weights = checkpoint.moe_layer(2);
    const RouterConfig& router = weights.config.router;
    const std::string family = options().family;
    const bool is_deepseek = family == "deepseek_v3" || family == "glm4_moe";
    EXPECT_EQ(router.top_k, 2);
    EXPECT_TRUE(router.renormalize);
    EXPECT_EQ(router.score_function,
              family == "qwen3_moe" || family == "mixtral" ? ScoreFunction::softmax : ScoreFunction::sigmoid);
    EXPECT_EQ(router.num_groups, family == "deepseek_v3" ? 2 : 1);
    EXPECT_EQ(router.top_k_groups, 1);
    EXPECT_EQ(router.scaling_factor, is_deepseek ? 2.5 : 1.0);
    EXPECT_EQ(weights.router_bias.has_value(), router.score_function == ScoreFunction::sigmoid);
    if (weights.router_bias) {
        EXPECT_EQ(weights.router_bias->shape, (Shape{4}));
        EXPECT_EQ(weights.router_bias->dtype, DType::f32);
    }
    const MoeConfig config = checkpoint.moe_config(2);
    EXPECT_EQ(config.hidden_size, 64);
    EXPECT_EQ(config.intermediate_size, 32);
    EXPECT_EQ(config.num_experts, 4);
    EXPECT_EQ(checkpoint.inspect_layer(2, Checkpoint::Scan::headers_and_scalars).has_shared_expert,
              is_deepseek);
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, EveryFamily,
                         testing::Combine(testing::Values("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe",
                                                          "minimax_m2"),
                                          testing::Values(Spelling::modelopt, Spelling::compressed_tensors)),
                         [](const auto& values) {
                             return std::string(std::get<0>(values.param)) +
                                    (std::get<1>(values.param) == Spelling::modelopt ? "_modelopt"
                                                                                     : "_compressed_tensors");
                         });

TEST(Checkpoint, ReciprocalScalesAreInvertedInDouble) {
    CheckpointFixture fixture({.spelling = Spelling::compressed_tensors});
    auto& global = fixture.tensor(1, 2, Projection::up, "weight_global_scale");
    auto& input = fixture.tensor(1, 2, Projection::up, "input_global_scale");
    global.set(0, 7776.0F);
    input.set(0, 60.0F);
    global.shape = Shape{};  // both spellings of a scalar are legal
    const MoeWeights weights = Checkpoint::open(fixture.write()).moe_layer(1);
    EXPECT_TRUE(weights.leaves.scales_divide);
    EXPECT_EQ(weights.experts[2].up.weight.global_scale, 1.0 / 7776.0);
    EXPECT_EQ(weights.experts[2].up.input_scale, 1.0 / 60.0);
}

TEST(Checkpoint, WeightsOutliveTheCheckpoint) {
    const CheckpointFixture fixture;
    const MoeWeights weights = Checkpoint::open(fixture.write()).moe_layer(0);
    std::vector<float> values(64 * 32);
    dequantize(weights.experts[3].down.weight, values.data());
    EXPECT_NE(values.back(), 0.0F);
}

TEST(Checkpoint, OuterPrefixesOfMultimodalModels) {
    for (const char* outer : {"language_model.model.", "model.language_model."}) {
        CheckpointFixture fixture;
        std::map<std::string, test::StoredTensor> renamed;
        for (auto& [name, tensor] : fixture.tensors)
            renamed[name.starts_with("model.") ? outer + name.substr(6) : name] = tensor;
        fixture.tensors = renamed;
        const auto checkpoint = Checkpoint::open(fixture.write());
        EXPECT_EQ(checkpoint.moe_layers(), (std::vector<int>{0, 1}));
        EXPECT_EQ(checkpoint.moe_layer(1).experts[0].gate.name,
                  std::string(outer) + "layers.1.mlp.experts.0.gate_proj");
    }
}

TEST(Checkpoint, TwoPrefixesForOneLayerAreRefused) {
    CheckpointFixture fixture;
    for (const auto& [name, tensor] : std::map(fixture.tensors))
        fixture.tensors["language_model." + name] = tensor;
    expect_error(
        ErrorKind::unsupported, [&] { Checkpoint::open(fixture.write()); }, "layer 0",
        "language_model.model.layers.0.mlp.");
}

TEST(Checkpoint, LayersBeyondTheModelsOwnAreLayers) {  // multi-token prediction of DeepSeek and GLM
    CheckpointFixture fixture({.family = "deepseek_v3", .num_layers = 3});
    fixture.config["num_hidden_layers"] = 2;
    const auto checkpoint = Checkpoint::open(fixture.write());
    EXPECT_EQ(checkpoint.moe_layers(), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(checkpoint.moe_layer(2).experts.size(), 4U);
    EXPECT_EQ(checkpoint.disagreements(), std::vector<std::string>{});
}

TEST(Checkpoint, NewerSpellingsOfTheConfig) {
    CheckpointFixture fixture;
    fixture.config["num_local_experts"] = fixture.config["num_experts"];
    fixture.config.erase("num_experts");
    fixture.config["rope_parameters"] = {{"rope_theta", 10000.0}, {"rope_type", "default"}};
    fixture.config.erase("rope_theta");
    fixture.config["dtype"] = fixture.config["torch_dtype"];
    fixture.config.erase("torch_dtype");
    EXPECT_EQ(Checkpoint::open(fixture.write()).moe_layer(0).experts.size(), 4U);
}

TEST(Checkpoint, RouterDefaultsWhereTheConfigIsSilent) {
    const auto router_without = [](const char* family, std::initializer_list<const char*> keys) {
        CheckpointFixture fixture({.family = family, .num_experts = 16});
        for (const char* key : keys) fixture.config.erase(key);
        return Checkpoint::open(fixture.write()).moe_config(0).router;
    };
    EXPECT_FALSE(router_without("qwen3_moe", {"norm_topk_prob"}).renormalize);
    const RouterConfig deepseek = router_without(
        "deepseek_v3", {"norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "scoring_func"});
    EXPECT_TRUE(deepseek.renormalize);
    EXPECT_EQ(deepseek.num_groups, 8);
    EXPECT_EQ(deepseek.top_k_groups, 4);
    EXPECT_EQ(deepseek.scaling_factor, 2.5);
    EXPECT_EQ(deepseek.score_function, ScoreFunction::sigmoid);
    const RouterConfig glm =
        router_without("glm4_moe", {"norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor"});
    EXPECT_TRUE(glm.renormalize);
    EXPECT_EQ(glm.num_groups, 1);
    EXPECT_EQ(glm.scaling_factor, 1.0);
    EXPECT_EQ(router_without("minimax_m2", {"scoring_func"}).score_function, ScoreFunction::sigmoid);
}

TEST(Checkpoint, FamiliesWithTheRouterOfDeepSeek) {
    for (const char* family : {"deepseek_v32", "kimi_k2", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"}) {
        CheckpointFixture fixture({.family = "deepseek_v3"});
        fixture.config["model_type"] = family;
        fixture.config["n_group"] = 1;
        const auto checkpoint = Checkpoint::open(fixture.write());
        EXPECT_EQ(checkpoint.family(), family);
        const MoeWeights weights = checkpoint.moe_layer(1);
        EXPECT_EQ(weights.config.router.score_function, ScoreFunction::sigmoid);
        EXPECT_EQ(weights.config.router.scaling_factor, 2.5);
        EXPECT_TRUE(weights.router_bias);
    }
}

TEST(Checkpoint, RouterKeysAreFollowed) {
    CheckpointFixture qwen;
    qwen.config["norm_topk_prob"] = false;
    EXPECT_FALSE(Checkpoint::open(qwen.write()).moe_config(0).router.renormalize);
    CheckpointFixture minimax({.family = "minimax_m2"});
    minimax.config["scoring_func"] = "softmax";
    EXPECT_EQ(Checkpoint::open(minimax.write()).moe_config(0).router.score_function, ScoreFunction::softmax);
    CheckpointFixture mixtral({.family = "mixtral"});
    mixtral.config["norm_topk_prob"] = false;  // no key of this family
    EXPECT_TRUE(Checkpoint::open(mixtral.write()).moe_config(0).router.renormalize);
}

// --- Which precision

PrecisionChoice preferred(const CheckpointFixture& fixture) {
    return Checkpoint::open(fixture.write()).preferred_precision(0);
}

TEST(PreferredPrecision, W4a4WhereTheCheckpointAsksAndIsCalibrated) {
    const PrecisionChoice modelopt = preferred(CheckpointFixture{});
    EXPECT_EQ(modelopt.precision, Precision::w4a4);
    EXPECT_NE(modelopt.reason.find("config.json: quantization_config.quant_algo is NVFP4"),
              std::string::npos);
    const PrecisionChoice ct = preferred(CheckpointFixture({.spelling = Spelling::compressed_tensors}));
    EXPECT_EQ(ct.precision, Precision::w4a4);
    EXPECT_NE(ct.reason.find("config_groups.group_0.input_activations.num_bits is 4"), std::string::npos);
}

TEST(PreferredPrecision, W4a16WhereItDoesNotAsk) {
    for (const Spelling spelling : {Spelling::modelopt, Spelling::compressed_tensors}) {
        EXPECT_EQ(preferred(CheckpointFixture({.spelling = spelling, .has_input_scales = false})).precision,
                  Precision::w4a16);
    }
    CheckpointFixture labelled;  // has input scales, which the algorithm does not use
    labelled.config["quantization_config"]["quant_algo"] = "W4A16_NVFP4";
    EXPECT_NE(preferred(labelled).reason.find("is W4A16_NVFP4"), std::string::npos);
    CheckpointFixture only_one_file;
    only_one_file.hf_quant_config["quantization"]["quant_algo"] = "W4A16_NVFP4";
    EXPECT_EQ(preferred(only_one_file).precision, Precision::w4a16);

    CheckpointFixture dynamic({.spelling = Spelling::compressed_tensors});
    dynamic.config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["dynamic"] = true;
    EXPECT_NE(preferred(dynamic).reason.find("input_activations.dynamic is true"), std::string::npos);

    CheckpointFixture silent;
    silent.config.erase("quantization_config");
    silent.hf_quant_config = nullptr;
    std::filesystem::remove(silent.folder() / "hf_quant_config.json");
    EXPECT_EQ(preferred(silent).reason, "no file asks for quantised activations");
}

TEST(PreferredPrecision, W4a16WhereAnInputScaleIsMissing) {
    CheckpointFixture fixture;
    fixture.tensors.erase(fixture.module(0, 3, Projection::down) + ".input_scale");
    const PrecisionChoice choice = preferred(fixture);
    EXPECT_EQ(choice.precision, Precision::w4a16);
    EXPECT_EQ(choice.reason, "model.layers.0.mlp.experts.3.down_proj.input_scale is missing");
}

TEST(PreferredPrecision, OfEachLayerOfAMixedCheckpoint) {
    CheckpointFixture fixture;
    fixture.config.erase("quantization_config");
    auto& quantization = fixture.hf_quant_config["quantization"];
    quantization["quant_algo"] = "MIXED_PRECISION";
    quantization["quantized_layers"] = {{"model.layers.0.mlp.experts", {{"quant_algo", "W4A16_NVFP4"}}},
                                        {"model.layers.1.mlp.experts", {{"quant_algo", "NVFP4"}}},
                                        {"model.layers.1.self_attn.o_proj", {{"quant_algo", "FP8"}}}};
    const auto checkpoint = Checkpoint::open(fixture.write());
    EXPECT_EQ(checkpoint.preferred_precision(0).precision, Precision::w4a16);
    EXPECT_EQ(checkpoint.preferred_precision(1).precision, Precision::w4a4);
    EXPECT_EQ(checkpoint.disagreements(), std::vector<std::string>{});
}

// --- The unquantised reference

TEST(UnquantizedMatrix, AnyFloatingPointDtype) {
    CheckpointFixture fixture({.spelling = Spelling::unquantized});
    auto& weight = fixture.tensor(1, 2, Projection::down, "weight");
    weight.dtype = DType::f16;
    const auto checkpoint = Checkpoint::open(fixture.write());
    EXPECT_EQ(checkpoint.unquantized_matrix(1, 2, Projection::down).tensor.dtype, DType::f16);
    EXPECT_EQ(checkpoint.unquantized_matrix(1, 2, Projection::down).tensor.shape, (Shape{64, 32}));
}

TEST(UnquantizedMatrix, Refusals) {
    CheckpointFixture fixture({.spelling = Spelling::unquantized});
    fixture.tensors.erase(fixture.module(0, 1, Projection::up) + ".weight");
    fixture.tensor(0, 1, Projection::gate, "weight").shape = {64, 32};
    const auto checkpoint = Checkpoint::open(fixture.write());
    expect_error(
        ErrorKind::broken_file, [&] { checkpoint.unquantized_matrix(0, 1, Projection::up); },
        "model.layers.0.mlp.experts.1.up_proj.weight is missing");
    expect_error(
        ErrorKind::broken_file, [&] { checkpoint.unquantized_matrix(0, 1, Projection::gate); },
        "is BF16 [64, 32], expected BF16, F16 or F32 [32, 64]");
    expect_error(
        ErrorKind::invalid_argument, [&] { checkpoint.unquantized_matrix(0, 4, Projection::gate); },
        "layer 0 has no expert 4");
    expect_error(
        ErrorKind::invalid_argument, [&] { checkpoint.unquantized_matrix(7, 0, Projection::gate); },
        "layer 7 is no MoE layer");
    const CheckpointFixture quantised;
    expect_error(
        ErrorKind::unsupported,
        [&] { Checkpoint::open(quantised.write()).unquantized_matrix(0, 0, Projection::gate); },
        "gate_proj.weight is U8");
}

}  // namespace
}  // namespace moe4
