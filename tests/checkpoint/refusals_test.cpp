// What moe_layer refuses: the tensor as the file spells it, what was found and what was expected.
#include <gtest/gtest.h>

#include <limits>

#include "checkpoint_fixture.hpp"
#include "expect_error.hpp"
#include "moe4/checkpoint.hpp"

namespace moe4 {
namespace {

using test::CheckpointFixture;
using test::expect_error;
using test::Spelling;

template <class... Part>
void expect_refusal(const CheckpointFixture& fixture, ErrorKind kind, const Part&... parts) {
    const auto checkpoint = Checkpoint::open(fixture.write());
    expect_error(kind, [&] { checkpoint.moe_layer(0); }, parts...);
    expect_error(kind, [&] { checkpoint.moe_config(0); }, parts...);
    const LayerInfo info = checkpoint.inspect_layer(0, Checkpoint::Scan::block_scales);
    ASSERT_FALSE(info.refusals.empty());
    for (const std::string& part : {std::string(parts)...})
        EXPECT_NE(info.refusals.front().find(part), std::string::npos) << info.refusals.front();
    EXPECT_TRUE(info.modes.empty());
    EXPECT_EQ(checkpoint.moe_layer(1).experts.size(), 4U) << "the other layer is whole";
}

/// Refuses in both layers.
template <class... Part>
void expect_config_refusal(const CheckpointFixture& fixture, ErrorKind kind, const Part&... parts) {
    const auto checkpoint = Checkpoint::open(fixture.write());
    expect_error(kind, [&] { checkpoint.moe_layer(0); }, parts...);
    const LayerInfo info = checkpoint.inspect_layer(0, Checkpoint::Scan::headers_and_scalars);
    EXPECT_FALSE(info.refusals.empty());
    EXPECT_TRUE(info.modes.empty());
}

// --- Tensors

TEST(Refusals, AMissingTensor) {
    for (const Spelling spelling : {Spelling::modelopt, Spelling::compressed_tensors}) {
        const CheckpointFixture whole({.spelling = spelling});
        for (const Projection projection : kProjections) {
            const std::string module = whole.module(0, 2, projection);
            for (const auto& [name, tensor] : whole.tensors) {
                if (!name.starts_with(module + ".") || name.find(".input_") != std::string::npos) continue;
                CheckpointFixture fixture({.spelling = spelling});
                fixture.tensors.erase(name);
                expect_refusal(fixture, ErrorKind::broken_file, name + " is missing, expected ",
                               std::string(dtype_name(tensor.dtype)));
            }
        }
    }
}

TEST(Refusals, ANameWithControlCharactersIsToldInFull) {
    CheckpointFixture fixture;
    fixture.tensors[fixture.module(0, 3, Projection::down) + std::string(".a\0b\x1b[2J", 8)] = {
        DType::u8, {1}, {0}};
    expect_refusal(fixture, ErrorKind::unsupported,
                   "experts.3.down_proj.a\\u0000b\\u001b[2J is not known and may change the result");
}

TEST(Refusals, AMissingRouter) {
    CheckpointFixture fixture({.family = "deepseek_v3"});
    fixture.tensors.erase("model.layers.0.mlp.gate.e_score_correction_bias");
    expect_refusal(fixture, ErrorKind::broken_file,
                   "model.layers.0.mlp.gate.e_score_correction_bias is missing, expected BF16 or F32 [4]");
    fixture.tensors.erase("model.layers.0.mlp.gate.weight");
    expect_refusal(fixture, ErrorKind::broken_file,
                   "model.layers.0.mlp.gate.weight is missing, expected BF16 or F32 [4, 64]");
}

TEST(Refusals, AMissingExpert) {
    CheckpointFixture fixture;
    std::erase_if(fixture.tensors,
                  [](const auto& t) { return t.first.starts_with("model.layers.0.mlp.experts.3."); });
    expect_refusal(fixture, ErrorKind::broken_file,
                   "model.layers.0.mlp.experts.3.gate_proj.weight is missing, expected U8 [32, 32]; so are 2 "
                   "more matrices of layer 0");
}

TEST(Refusals, MoreExpertsThanALayerCanHave) {
    CheckpointFixture config;
    config.config["num_local_experts"] = 1025;
    config.config.erase("num_experts");
    expect_config_refusal(config, ErrorKind::unsupported,
                          "config.json: num_local_experts is 1025, expected at most 1024");
    CheckpointFixture tensors;
    const std::string name = "model.layers.0.mlp.experts.1024.gate_proj.weight";
    tensors.tensors[name] = {DType::u8, {1}, {0}};
    expect_refusal(tensors, ErrorKind::unsupported, name + " is not known, expected",
                   "experts 0 to 1023 alone");
}

TEST(Refusals, NumbersTakeNoTimeThatTensorsDoNot) {
    CheckpointFixture fixture({.num_layers = 1});
    fixture.config["num_experts"] = 1024;
    for (int layer = 1; layer < 3000; ++layer) {
        for (const char* expert : {"1023", "65535"})
            fixture.tensors[fixture.block(layer) + "experts." + expert + ".gate_proj.weight"] = {
                DType::u8, {1}, {0}};
    }
    const auto checkpoint = Checkpoint::open(fixture.write());
    std::size_t num_refusals = 0;
    for (const int layer : checkpoint.moe_layers())
        num_refusals += checkpoint.inspect_layer(layer, Checkpoint::Scan::block_scales).refusals.size();
    EXPECT_LT(num_refusals, 10U * 3000U);
    EXPECT_EQ(checkpoint.unused().size(), 0U);
}

TEST(Refusals, AShardThatIsNotThere) {
    const CheckpointFixture fixture;
    const auto& folder = fixture.write();
    nlohmann::json index;
    for (const auto& [name, tensor] : fixture.tensors) index["weight_map"][name] = "model.safetensors";
    index["weight_map"]["model.layers.5.mlp.experts.0.gate_proj.weight"] = "model-00002-of-00002.safetensors";
    fixture.folder().write("model.safetensors.index.json", index.dump());
    const auto checkpoint = Checkpoint::open(folder);
    EXPECT_EQ(checkpoint.moe_layers(), (std::vector<int>{0, 1, 5}));
    EXPECT_EQ(checkpoint.moe_layer(0).experts.size(), 4U);
    const LayerInfo info = checkpoint.inspect_layer(5, Checkpoint::Scan::headers_and_scalars);
    const std::string wanted =
        "model.layers.5.mlp.experts.0.gate_proj.weight is missing, expected U8 [32, 32] in "
        "model-00002-of-00002.safetensors, which the index names and which is not there; so are 11 more "
        "matrices of layer 5";
    EXPECT_NE(std::find(info.refusals.begin(), info.refusals.end(), wanted), info.refusals.end());
    expect_error(ErrorKind::broken_file, [&] { checkpoint.moe_layer(5); }, "is missing");
    EXPECT_FALSE(checkpoint.find("model.layers.5.mlp.experts.0.gate_proj.weight"));
}

TEST(Refusals, AWrongShape) {
    CheckpointFixture scale;
    auto& block_scale = scale.tensor(0, 1, Projection::down, "weight_scale");
    block_scale.shape = {64, 1};
    block_scale.bytes.resize(64);
    expect_refusal(
        scale, ErrorKind::broken_file,
        "model.layers.0.mlp.experts.1.down_proj.weight_scale is F8_E4M3 [64, 1], expected F8_E4M3 [64, 2] "
        "(intermediate_size 32 / 16)");

    CheckpointFixture codes({.spelling = Spelling::compressed_tensors});
    codes.tensor(0, 1, Projection::gate, "weight_packed").shape = {16, 64};
    expect_refusal(
        codes, ErrorKind::broken_file,
        "model.layers.0.mlp.experts.1.gate_proj.weight_packed is U8 [16, 64], expected U8 [32, 32] "
        "(hidden_size 64 / 2)");

    CheckpointFixture global;
    auto& scalar = global.tensor(0, 0, Projection::up, "weight_scale_2");
    scalar.shape = {2};
    scalar.bytes.resize(8);
    expect_refusal(global, ErrorKind::broken_file,
                   "up_proj.weight_scale_2 is F32 [2], expected F32 [] or [1]");

    CheckpointFixture router;
    router.tensors.at("model.layers.0.mlp.gate.weight").shape = {2, 128};
    expect_refusal(router, ErrorKind::broken_file,
                   "model.layers.0.mlp.gate.weight is BF16 [2, 128], expected BF16 or F32 [4, 64]");
}

TEST(Refusals, AWrongDtype) {
    CheckpointFixture scale;
    scale.tensor(0, 1, Projection::down, "weight_scale").dtype = DType::f8_e5m2;
    expect_refusal(scale, ErrorKind::broken_file,
                   "down_proj.weight_scale is F8_E5M2 [64, 2], expected F8_E4M3 [64, 2]");
    CheckpointFixture bytes_as_scale;
    bytes_as_scale.tensor(0, 1, Projection::down, "weight_scale").dtype = DType::u8;
    expect_refusal(bytes_as_scale, ErrorKind::broken_file,
                   "weight_scale is U8 [64, 2], expected F8_E4M3 [64, 2]");
    CheckpointFixture codes;
    codes.tensor(0, 1, Projection::down, "weight").dtype = DType::i8;
    expect_refusal(codes, ErrorKind::broken_file, "down_proj.weight is I8 [64, 16], expected U8 [64, 16]");
    CheckpointFixture global;
    global.tensor(0, 0, Projection::up, "weight_scale_2").dtype = DType::i32;
    expect_refusal(global, ErrorKind::broken_file,
                   "up_proj.weight_scale_2 is I32 [], expected F32 [] or [1]");
    CheckpointFixture router;
    router.tensors.at("model.layers.0.mlp.gate.weight").dtype = DType::f16;
    expect_refusal(router, ErrorKind::broken_file,
                   "gate.weight is F16 [4, 64], expected BF16 or F32 [4, 64]");
}

TEST(Refusals, ARouterThatIsNotFinite) {
    const float kNaN = std::numeric_limits<float>::quiet_NaN();
    CheckpointFixture weight;
    auto& router = weight.tensors.at("model.layers.0.mlp.gate.weight");
    for (const auto& [bits, name] : {std::pair{0x7FC0, "NaN"}, std::pair{0xFF80, "an infinity"}}) {
        router.set<std::uint16_t>(3 * 64 + 17, static_cast<std::uint16_t>(bits));
        const auto checkpoint = Checkpoint::open(weight.write());
        const std::string sentence = std::string("model.layers.0.mlp.gate.weight holds ") + name +
                                     " at row 3, column 17, expected finite numbers";
        expect_error(ErrorKind::broken_file, [&] { checkpoint.moe_layer(0); }, sentence);
        EXPECT_EQ(checkpoint.inspect_layer(0, Checkpoint::Scan::block_scales).refusals,
                  std::vector<std::string>{sentence});
    }
    CheckpointFixture bias({.family = "deepseek_v3"});
    bias.tensors.at("model.layers.0.mlp.gate.e_score_correction_bias").set(2, kNaN);
    expect_error(
        ErrorKind::broken_file, [&] { Checkpoint::open(bias.write()).moe_layer(0); },
        "gate.e_score_correction_bias holds NaN at row 2, expected finite numbers");
}

TEST(Refusals, AnInputScaleOfAnotherKindIsNone) {  // w4a16 and the dynamic scales never look at it
    CheckpointFixture fixture;
    fixture.tensor(0, 0, Projection::up, "input_scale").dtype = DType::i32;
    const auto checkpoint = Checkpoint::open(fixture.write());
    const ExpertMatrix up = checkpoint.moe_layer(0).experts[0].up;
    EXPECT_FALSE(up.input_scale);
    EXPECT_EQ(up.input_scale_fault, up.name + ".input_scale is I32 [], expected F32 [] or [1]");
    EXPECT_EQ(checkpoint.preferred_precision(0).precision, Precision::w4a4)
        << "which then says what is wrong";
}

TEST(Refusals, ATensorThatChangesTheResult) {
    for (const char* leaf : {"pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "bias",
                             "weight_zero_point", "something_new"}) {
        CheckpointFixture fixture;
        const std::string name = fixture.module(0, 3, Projection::down) + "." + leaf;
        fixture.tensors[name] = {DType::f32, {1}, std::vector<std::uint8_t>(4)};
        expect_refusal(fixture, ErrorKind::unsupported, name + " is not known");
    }
    for (const char* name :
         {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.0.scale",
          "model.layers.0.mlp.experts.01.gate_proj.weight", "model.layers.0.mlp.gate.bias"}) {
        CheckpointFixture fixture;
        fixture.tensors[name] = {DType::f32, {1}, std::vector<std::uint8_t>(4)};
        expect_refusal(fixture, ErrorKind::unsupported, name);
    }
}

// --- Other formats under an NVFP4 label

void make_fp8(CheckpointFixture& fixture, int layer, int expert, Projection projection) {
    auto& weight = fixture.tensor(layer, expert, projection, "weight");
    weight.dtype = DType::f8_e4m3;
    weight.shape = {weight.shape[0], weight.shape[1] * 2};
    weight.bytes.resize(weight.bytes.size() * 2);
}

TEST(Refusals, Fp8UnderAnNvfp4Label) {
    CheckpointFixture fixture;
    make_fp8(fixture, 0, 2, Projection::up);
    expect_refusal(
        fixture, ErrorKind::unsupported, "labelled NVFP4 (", "config.json: quantization_config.quant_algo",
        ") but model.layers.0.mlp.experts.2.up_proj.weight is F8_E4M3 [32, 64] (fp8), expected U8 [32, 32]");
    EXPECT_EQ(Checkpoint::open(fixture.write()).inspect_layer(0, Checkpoint::Scan::block_scales).format,
              "mixed");
}

TEST(Refusals, Bf16UnderAnNvfp4Label) {
    for (const Spelling spelling : {Spelling::modelopt, Spelling::compressed_tensors}) {
        CheckpointFixture fixture({.spelling = spelling});
        const CheckpointFixture original({.spelling = Spelling::unquantized});
        const auto is_replaced = [](const auto& tensor) {
            return tensor.first.starts_with("model.layers.0.mlp.experts.");
        };
        std::erase_if(fixture.tensors, is_replaced);
        for (const auto& tensor : original.tensors) {
            if (is_replaced(tensor)) fixture.tensors.insert(tensor);
        }
        expect_refusal(fixture, ErrorKind::unsupported, "labelled NVFP4 (",
                       "config.json: quantization_config",
                       ") but model.layers.0.mlp.experts.0.gate_proj.weight is BF16 [32, 64] (bf16)",
                       "as in all experts of layer 0");
        const auto checkpoint = Checkpoint::open(fixture.write());
        EXPECT_EQ(checkpoint.inspect_layer(0, Checkpoint::Scan::block_scales).format, "bf16");
        ASSERT_FALSE(checkpoint.disagreements().empty());
        EXPECT_NE(checkpoint.disagreements().front().find("but experts are bf16 (layers 0)"),
                  std::string::npos)
            << checkpoint.disagreements().front();
    }
}

TEST(Refusals, Mxfp4UnderAnNvfp4Label) {
    CheckpointFixture fixture;
    auto& scale = fixture.tensor(0, 0, Projection::gate, "weight_scale");
    scale.dtype = DType::f8_e8m0;
    scale.shape = {32, 2};
    scale.bytes.resize(64);
    expect_refusal(
        fixture, ErrorKind::unsupported,
        "but model.layers.0.mlp.experts.0.gate_proj.weight_scale is F8_E8M0 [32, 2] (mxfp4), expected "
        "F8_E4M3 [32, 4]");
}

TEST(Refusals, ACheckpointThatIsNotQuantised) {
    const CheckpointFixture fixture({.spelling = Spelling::unquantized});
    const auto checkpoint = Checkpoint::open(fixture.write());
    expect_error(
        ErrorKind::unsupported, [&] { checkpoint.moe_layer(0); },
        "model.layers.0.mlp.experts.0.gate_proj.weight is BF16 [32, 64] (bf16), expected U8 [32, 32] "
        "(NVFP4)");
    EXPECT_EQ(checkpoint.inspect_layer(0, Checkpoint::Scan::block_scales).refusals.size(), 1U);
}

TEST(Refusals, ExpertsInOneTensor) {
    CheckpointFixture fixture({.spelling = Spelling::unquantized});
    std::erase_if(fixture.tensors,
                  [](const auto& t) { return t.first.starts_with("model.layers.0.mlp.experts."); });
    fixture.tensors["model.layers.0.mlp.experts.gate_up_proj"] = {DType::bf16, {1}, {0, 0}};
    const auto checkpoint = Checkpoint::open(fixture.write());
    expect_error(
        ErrorKind::unsupported, [&] { checkpoint.moe_layer(0); },
        "model.layers.0.mlp.experts.gate_up_proj is not known");
    EXPECT_EQ(checkpoint.inspect_layer(0, Checkpoint::Scan::block_scales).refusals.size(), 1U);
}

TEST(Refusals, Fp8UnderTheLabelOfAnOlderExport) {  // which has hf_quant_config.json alone
    CheckpointFixture fixture;
    fixture.config.erase("quantization_config");
    for (const int layer : {0, 1}) {
        for (int expert = 0; expert < 4; ++expert) {
            for (const Projection projection : kProjections) {
                make_fp8(fixture, layer, expert, projection);
                fixture.tensors.erase(fixture.module(layer, expert, projection) + ".weight_scale_2");
            }
        }
    }
    const auto checkpoint = Checkpoint::open(fixture.write());
    EXPECT_EQ(checkpoint.dialect(), "modelopt");
    expect_error(
        ErrorKind::unsupported, [&] { checkpoint.moe_layer(1); }, "labelled NVFP4 (",
        "hf_quant_config.json: quantization.quant_algo", "gate_proj.weight is F8_E4M3 [32, 64] (fp8)");
}

TEST(Refusals, AnFp8Checkpoint) {
    CheckpointFixture fixture({.spelling = Spelling::unquantized});
    for (auto& [name, tensor] : fixture.tensors) {
        if (name.find(".experts.") == std::string::npos) continue;
        tensor.dtype = DType::f8_e4m3;
        tensor.bytes.resize(tensor.bytes.size() / 2);
    }
    fixture.config["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
    const auto checkpoint = Checkpoint::open(fixture.write());
    EXPECT_EQ(checkpoint.dialect(), "unknown");
    EXPECT_EQ(checkpoint.inspect_layer(0, Checkpoint::Scan::block_scales).format, "fp8");
    expect_error(ErrorKind::unsupported, [&] { checkpoint.moe_layer(0); }, "is F8_E4M3 [32, 64] (fp8)");
}

// --- Configurations

TEST(Refusals, AnAlgorithmThatIsNotRun) {
    for (const char* name : {"NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8", "NVFP4_E5M3", "SOMETHING_NEW"}) {
        CheckpointFixture config;
        config.config["quantization_config"]["quant_algo"] = name;
        expect_config_refusal(config, ErrorKind::unsupported,
                              std::string("config.json: quantization_config.quant_algo is ") + name +
                                  ", expected NVFP4 or W4A16_NVFP4");
        CheckpointFixture hf_quant_config;
        hf_quant_config.hf_quant_config["quantization"]["quant_algo"] = name;
        expect_config_refusal(hf_quant_config, ErrorKind::unsupported,
                              std::string("hf_quant_config.json: quantization.quant_algo is ") + name);
    }
}

TEST(Refusals, AnAlgorithmOfOneLayer) {
    CheckpointFixture fixture;
    fixture.config.erase("quantization_config");
    fixture.hf_quant_config["quantization"]["quant_algo"] = "MIXED_PRECISION";
    fixture.hf_quant_config["quantization"]["quantized_layers"] = {
        {"model.layers.0.mlp.experts.1.down_proj", {{"quant_algo", "NVFP4_AWQ"}}},
        {"model.layers.0.mlp.experts", {{"quant_algo", "NVFP4"}}},
        {"model.layers.1.mlp.experts", {{"quant_algo", "NVFP4"}}}};
    expect_refusal(fixture, ErrorKind::unsupported,
                   "quantized_layers.model.layers.0.mlp.experts.1.down_proj.quant_algo is NVFP4_AWQ");
}

TEST(Refusals, AGroupSizeOtherThan16) {
    CheckpointFixture modelopt;
    modelopt.hf_quant_config["quantization"]["group_size"] = 32;
    expect_config_refusal(modelopt, ErrorKind::unsupported,
                          "hf_quant_config.json: quantization.group_size is 32, expected 16");
    CheckpointFixture ct({.spelling = Spelling::compressed_tensors});
    ct.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32;
    expect_config_refusal(ct, ErrorKind::unsupported,
                          "config_groups.group_0.weights.group_size is 32, expected 16");
}

TEST(Refusals, ASchemeThatIsNotNvfp4) {
    const auto refuse = [](const char* part, const char* key, const nlohmann::json& value,
                           const std::string& says) {
        CheckpointFixture fixture({.spelling = Spelling::compressed_tensors});
        fixture.config["quantization_config"]["config_groups"]["group_0"][part][key] = value;
        expect_config_refusal(fixture, ErrorKind::unsupported, "config_groups.group_0." + says);
    };
    refuse("weights", "strategy", "group", "weights.strategy is group, expected tensor_group");
    refuse("weights", "symmetric", false, "weights.symmetric is false, expected true");
    refuse("weights", "dynamic", true, "weights.dynamic is true, expected false");
    refuse("input_activations", "num_bits", 8, "input_activations.num_bits is 8, expected 4");
    refuse("input_activations", "type", "int", "input_activations.type is int, expected float");
    refuse("input_activations", "group_size", 32, "input_activations.group_size is 32, expected 16");
    refuse("input_activations", "strategy", "token", "input_activations.strategy is token");
    refuse("input_activations", "dynamic", "sometimes", "input_activations.dynamic is sometimes");
}

TEST(Refusals, AFormatThatIsNotKnown) {
    CheckpointFixture fixture({.spelling = Spelling::compressed_tensors});
    fixture.config["quantization_config"]["format"] = "mixfp4-pack-quantized";
    expect_config_refusal(
        fixture, ErrorKind::unsupported,
        "quantization_config.format is mixfp4-pack-quantized, expected nvfp4-pack-quantized");
}

TEST(Refusals, ATransform) {
    CheckpointFixture fixture({.spelling = Spelling::compressed_tensors});
    auto& quantization = fixture.config["quantization_config"];
    quantization["transform_config"] = {{"config_groups", {{"R1", {{"type", "hadamard"}}}}}};
    expect_config_refusal(fixture, ErrorKind::unsupported,
                          "config.json: quantization_config.transform_config transforms weights");
    quantization["transform_config"] = nlohmann::json::object();
    EXPECT_EQ(Checkpoint::open(fixture.write()).moe_layer(0).experts.size(), 4U);
}

TEST(Refusals, AnActivationThatIsNotKnown) {
    CheckpointFixture fixture;
    fixture.config["hidden_act"] = "gelu_pytorch_tanh";
    expect_config_refusal(fixture, ErrorKind::unsupported, "hidden_act is gelu_pytorch_tanh, expected silu");
}

TEST(Refusals, ARouterThatIsNotKnown) {
    CheckpointFixture score({.family = "deepseek_v3"});
    score.config["scoring_func"] = "sqrtsoftplus";
    expect_config_refusal(score, ErrorKind::unsupported,
                          "scoring_func is sqrtsoftplus, expected softmax or sigmoid");
    CheckpointFixture method({.family = "deepseek_v3"});
    method.config["topk_method"] = "group_limited_greedy";
    expect_config_refusal(method, ErrorKind::unsupported,
                          "topk_method is group_limited_greedy, expected noaux_tc");
}

TEST(Refusals, ARouterThatCannotBe) {
    const auto refuse = [](const char* key, int value, const char* says) {
        CheckpointFixture fixture({.family = "deepseek_v3"});
        fixture.config[key] = value;
        expect_config_refusal(fixture, ErrorKind::broken_file, says);
    };
    refuse("num_experts_per_tok", 5, "num_experts_per_tok is 5, expected at most 4 (4 experts)");
    refuse("num_experts_per_tok", 3,
           "num_experts_per_tok is 3, expected at most 2 (the experts of topk_group groups)");
    refuse("n_group", 3, "n_group is 3, expected a divisor of 4 experts");
    refuse("topk_group", 3, "topk_group is 3, expected at most 2 (n_group)");
}

TEST(Refusals, AFamilyThatIsNotKnown) {
    CheckpointFixture fixture;
    fixture.config["model_type"] = "gpt_oss";
    expect_error(
        ErrorKind::unsupported, [&] { Checkpoint::open(fixture.write()); }, "model_type is gpt_oss",
        "qwen3_moe, mixtral, deepseek_v3", "minimax_m2");
    fixture.config.erase("model_type");
    expect_error(ErrorKind::unsupported, [&] { Checkpoint::open(fixture.write()); }, "model_type is missing");
}

TEST(Refusals, AKeyThatIsMissing) {
    for (const char* key : {"hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"}) {
        CheckpointFixture fixture;
        fixture.config.erase(key);
        expect_config_refusal(fixture, ErrorKind::broken_file,
                              std::string("config.json: ") + key + " is missing");
    }
}

TEST(Refusals, ASizeThatIsNoMultipleOf16) {
    CheckpointFixture fixture;
    fixture.config["moe_intermediate_size"] = 40;
    expect_config_refusal(fixture, ErrorKind::unsupported,
                          "moe_intermediate_size is 40, expected a multiple of 16");
}

TEST(Refusals, ALayerThatIsNotThere) {
    const CheckpointFixture fixture;
    const auto checkpoint = Checkpoint::open(fixture.write());
    expect_error(
        ErrorKind::invalid_argument, [&] { checkpoint.moe_layer(2); }, "layer 2 is no MoE layer", "0 to 1");
    expect_error(ErrorKind::invalid_argument, [&] { checkpoint.moe_layer(-1); }, "layer -1");
}

TEST(Refusals, AFolderThatIsNotThere) {
    expect_error(ErrorKind::invalid_argument, [] { Checkpoint::open("/nowhere/at/all"); }, "/nowhere/at/all");
}

TEST(Refusals, AFolderWithoutConfig) {
    const CheckpointFixture fixture;
    std::filesystem::remove(fixture.write() / "config.json");
    expect_error(
        ErrorKind::broken_file, [&] { Checkpoint::open(fixture.folder().path()); }, "config.json is missing");
}

}  // namespace
}  // namespace moe4
