// config.json and hf_quant_config.json: both ages of spellings, and every way to be wrong.
#include "checkpoint/model_config.hpp"

#include <gtest/gtest.h>

#include "expect_error.hpp"
#include "temporary_folder.hpp"

namespace moe4::checkpoint {
namespace {

using test::expect_error;

ModelConfig parse(std::string_view text, std::string_view hf_quant_text = {}) {
    return parse_model_config(text, "config.json", hf_quant_text, "hf_quant_config.json");
}

void expect_broken(std::string_view text, const std::string& part) {
    expect_error(ErrorKind::broken_file, [&] { parse(text); }, "config.json", part);
}

TEST(ModelConfig, ReadsTheModelKeys) {
    const ModelConfig config =
        parse(R"({"model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 7168,
        "moe_intermediate_size": 2048, "intermediate_size": 18432, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": true, "num_hidden_layers": 61,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_shared_experts": 1, "mlp_only_layers": [1, 2],
        "decoder_sparse_step": 2, "mlp_layer_types": ["dense", "sparse"], "rope_scaling": {"factor": 40}})");
    EXPECT_EQ(config.model_type, "deepseek_v3");
    EXPECT_EQ(config.hidden_act, "silu");
    EXPECT_EQ(config.hidden_size, 7168);
    EXPECT_EQ(config.moe_intermediate_size, 2048);
    EXPECT_EQ(config.intermediate_size, 18432);
    EXPECT_EQ(config.num_experts->value, 256);
    EXPECT_EQ(config.num_experts_per_tok, 8);
    EXPECT_EQ(config.n_group, 8);
    EXPECT_EQ(config.topk_group, 4);
    EXPECT_EQ(config.norm_topk_prob, true);
    EXPECT_EQ(config.num_hidden_layers, 61);
    EXPECT_EQ(config.routed_scaling_factor, 2.5);
    EXPECT_EQ(config.scoring_func, "sigmoid");
    EXPECT_EQ(config.topk_method, "noaux_tc");
    EXPECT_EQ(config.first_k_dense_replace, 3);
    EXPECT_EQ(config.moe_layer_freq, 1);
    EXPECT_EQ(config.n_shared_experts, 1);
    EXPECT_EQ(config.mlp_only_layers, (std::vector<std::int64_t>{1, 2}));
    EXPECT_EQ(config.decoder_sparse_step, 2);
    EXPECT_EQ(config.mlp_layer_types, (std::vector<std::string>{"dense", "sparse"}));
    EXPECT_TRUE(config.quantizations.empty());
}

TEST(ModelConfig, BrokenJsonIsToldByItsPlace) {
    expect_broken("{\"hidden_size\": 1,\n \"n_group\" 2}",
                  "config.json is not valid JSON at line 2 (byte 31)");
    expect_broken("", "config.json is not valid JSON at line 1");
    const auto error = test::error_of([] { parse("{]"); });
    EXPECT_EQ(std::string(error->what()).find("json.exception"), std::string::npos) << error->what();
}

TEST(ModelConfig, NullIsAbsent) {
    const ModelConfig config =
        parse(R"({"hidden_size": null, "n_group": null, "quantization_config": null})");
    EXPECT_FALSE(config.hidden_size);
    EXPECT_FALSE(config.n_group);
    EXPECT_TRUE(config.quantizations.empty());
}

TEST(ModelConfig, EveryNameOfTheNumberOfExperts) {
    EXPECT_EQ(parse(R"({"num_experts": 16})").num_experts->value, 16);
    EXPECT_EQ(parse(R"({"num_local_experts": 16})").num_experts->value, 16);
    EXPECT_EQ(parse(R"({"num_local_experts": 16})").num_experts->where, "config.json: num_local_experts");
    EXPECT_EQ(parse(R"({"n_routed_experts": 16})").num_experts->value, 16);
    EXPECT_EQ(parse(R"({"num_experts": 16, "num_local_experts": 16})").num_experts->value, 16);
    expect_broken(R"({"num_experts": 16, "num_local_experts": 8})",
                  "num_local_experts is 8 but config.json: num_experts is 16");
}

TEST(ModelConfig, ModelKeysOfAMultimodalModelLieInTextConfig) {
    const ModelConfig config = parse(R"({"model_type": "kimi_k25", "hidden_size": 1,
        "text_config": {"model_type": "kimi_k2", "hidden_size": 7168,
                        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}})");
    EXPECT_EQ(config.model_type, "kimi_k2");
    EXPECT_EQ(config.hidden_size, 7168);
    ASSERT_EQ(config.quantizations.size(), 1U);
    EXPECT_EQ(config.quantizations[0].algorithm->where,
              "config.json: text_config.quantization_config.quant_algo");
}

TEST(ModelConfig, ReadsCompressedTensors) {
    for (const char* key : {"quantization_config", "compression_config"}) {
        const ModelConfig config = parse(std::string(R"({")") + key + R"(": {
            "quant_method": "compressed-tensors", "version": "0.19.0", "format": "nvfp4-pack-quantized",
            "ignore": ["lm_head", "re:.*gate"], "config_groups": {"group_0": {"targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                            "symmetric": true, "dynamic": false},
                "input_activations": {"num_bits": 4, "dynamic": "local"}, "output_activations": null}}}})");
        ASSERT_EQ(config.quantizations.size(), 1U);
        const Quantization& quantization = config.quantizations[0];
        EXPECT_EQ(quantization.producer, "compressed-tensors 0.19.0");
        EXPECT_EQ(quantization.format->value, "nvfp4-pack-quantized");
        EXPECT_EQ(quantization.excluded, (std::vector<std::string>{"lm_head", "re:.*gate"}));
        ASSERT_EQ(quantization.groups.size(), 1U);
        const QuantizationGroup& group = quantization.groups[0];
        EXPECT_EQ(group.where, std::string("config.json: ") + key + ".config_groups.group_0");
        EXPECT_EQ(group.weights->num_bits, 4);
        EXPECT_EQ(group.weights->type, "float");
        EXPECT_EQ(group.weights->strategy, "tensor_group");
        EXPECT_EQ(group.weights->group_size, 16);
        EXPECT_EQ(group.weights->symmetric, true);
        EXPECT_EQ(group.weights->dynamic, "false");
        EXPECT_EQ(group.input_activations->dynamic, "local");
    }
}

TEST(ModelConfig, ReadsBothOfModelOptsFiles) {
    const ModelConfig config =
        parse(R"({"quantization_config": {"quant_method": "modelopt", "quant_algo": "nvfp4",
                   "producer": {"name": "modelopt", "version": "0.47.0"}, "ignore": ["lm_head"]}})",
              R"({"producer": {"name": "modelopt", "version": "0.29.0"},
                  "quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": null, "group_size": 16,
                    "exclude_modules": ["model.layers.0*"],
                    "quantized_layers": {"model.layers.1.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}}})");
    ASSERT_EQ(config.quantizations.size(), 2U);
    EXPECT_EQ(config.quantizations[0].producer, "modelopt 0.47.0");
    EXPECT_EQ(config.quantizations[0].algorithm->value, "NVFP4");
    EXPECT_EQ(config.quantizations[1].producer, "modelopt 0.29.0");
    EXPECT_EQ(config.quantizations[1].algorithm->where, "hf_quant_config.json: quantization.quant_algo");
    EXPECT_EQ(config.quantizations[1].group_size->value, 16);
    EXPECT_EQ(config.quantizations[1].excluded, std::vector<std::string>{"model.layers.0*"});
    EXPECT_EQ(config.quantizations[1].layer_algorithms.at("model.layers.1.mlp.experts"), "W4A16_NVFP4");
}

TEST(ModelConfig, RefusesWrongTypes) {
    expect_broken(R"({"hidden_size": "512"})", "hidden_size is \"512\", expected a whole number");
    expect_broken(R"({"hidden_size": 512.0})", "hidden_size is 512.0, expected a whole number");
    expect_broken(R"({"hidden_size": [512]})", "hidden_size is an array");
    expect_broken(R"({"hidden_size": true})", "hidden_size is true");
    expect_broken(R"({"model_type": 3})", "model_type is 3, expected a string");
    expect_broken(R"({"norm_topk_prob": 1})", "norm_topk_prob is 1, expected true or false");
    expect_broken(R"({"routed_scaling_factor": "2.5"})", "expected a finite number");
    expect_broken(R"({"mlp_only_layers": 3})", "mlp_only_layers is 3, expected an array");
    expect_broken(R"({"mlp_only_layers": ["3"]})", "mlp_only_layers is \"3\"");
    expect_broken(R"({"text_config": []})", "text_config is an array, expected an object");
    expect_broken(R"({"quantization_config": "modelopt"})", "quantization_config is \"modelopt\"");
    expect_broken(R"({"quantization_config": {"ignore": [1]}})", "quantization_config.ignore is 1");
    expect_broken(R"({"quantization_config": {"config_groups": {"group_0": 1}}})", "group_0 is 1");
    expect_broken(R"({"quantization_config": {"config_groups": {"g": {"weights": {"num_bits": "4"}}}}})",
                  "quantization_config.config_groups.g.weights.num_bits is \"4\"");
}

TEST(ModelConfig, RefusesNumbersOutOfRange) {
    expect_broken(R"({"hidden_size": 0})", "hidden_size is 0");
    expect_broken(R"({"hidden_size": -512})", "hidden_size is -512");
    expect_broken(R"({"hidden_size": 18446744073709551615})", "hidden_size is 18446744073709551615");
    expect_broken(R"({"num_experts": 1073741824})", "expected a whole number from 1 to 65536");
    expect_broken(R"({"decoder_sparse_step": 0})", "decoder_sparse_step is 0");
    expect_broken(R"({"moe_layer_freq": 0})", "moe_layer_freq is 0");
    expect_broken(R"({"n_group": 0})", "n_group is 0");
    expect_broken(R"({"routed_scaling_factor": 1e999})", "config.json holds a number that is out of range");
}

TEST(ModelConfig, RefusesWhatIsNoJsonObject) {
    expect_broken("", "not valid JSON");
    expect_broken("{", "not valid JSON");
    expect_broken("[]", "is an array, expected a JSON object");
    expect_broken("{} {}", "not valid JSON");
    expect_broken("{\"a\": NaN}", "not valid JSON");
    expect_broken("{\"\xFF\": 1}", "not valid JSON");
    expect_broken(R"({"hidden_size": 1, "hidden_size": 2})", "\"hidden_size\" twice");
    expect_broken(R"({"a": {"b": 1, "c": {"b": 1}, "b": 2}})", "\"b\" twice");
    expect_broken("{\"a\": " + std::string(100'000, '[') + std::string(100'000, ']') + "}", "64 levels");
    expect_error(ErrorKind::broken_file, [] { parse("{}", "[1]"); }, "hf_quant_config.json", "an array");
    expect_error(
        ErrorKind::broken_file, [] { parse("{}", "{}"); }, "hf_quant_config.json: quantization is missing");
}

TEST(ModelConfig, AFolderNeedsAConfig) {
    const test::TemporaryFolder folder;
    expect_error(ErrorKind::broken_file, [&] { read_model_config(folder.path()); }, "config.json is missing");
    folder.write("config.json", R"({"model_type": "mixtral"})");
    EXPECT_EQ(read_model_config(folder.path()).model_type, "mixtral");
    folder.write("hf_quant_config.json", "");
    expect_error(ErrorKind::broken_file, [&] { read_model_config(folder.path()); }, "hf_quant_config.json");
}

}  // namespace
}  // namespace moe4::checkpoint
