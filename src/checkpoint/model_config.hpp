#pragma once
// What config.json and hf_quant_config.json say, typed and checked; nothing of it is believed over a tensor.
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moe4::checkpoint {

/// A value and the place that states it, "config.json: quantization_config.quant_algo".
template <class T>
struct Stated {
    T value;
    std::string where;
};

/// One number format of a "config_groups" entry. Empty: the file does not say.
struct NumberScheme {
    std::optional<std::int64_t> num_bits;
    std::optional<std::int64_t> group_size;
    std::optional<bool> symmetric;
    std::string type;      // "float", "int"
    std::string strategy;  // "tensor_group", "channel", ...
    std::string dynamic;   // "true", "false", "local"
};

struct QuantizationGroup {
    std::string where;
    std::string format;  // compressed-tensors: "nvfp4-pack-quantized"
    std::optional<NumberScheme> weights;
    std::optional<NumberScheme> input_activations;
};

/// What one file says of the quantisation. Algorithms in upper case.
struct Quantization {
    std::string where;                             // "config.json: quantization_config"
    std::string method;                            // quant_method
    std::string producer;                          // "modelopt 0.47.0"
    std::optional<Stated<std::string>> algorithm;  // quant_algo
    std::optional<Stated<std::string>> format;     // compressed-tensors
    std::optional<Stated<std::int64_t>> group_size;
    std::vector<QuantizationGroup> groups;
    std::string transform;  // where a non-empty transform_config stands: weights and activations are rotated
    std::vector<std::string> excluded;  // modules and patterns: exclude_modules, ignore
    std::map<std::string, std::string, std::less<>>
        layer_algorithms;  // quantized_layers: module -> algorithm
};

/// The keys that a family may read, in the spelling of either age. Empty: the file does not say.
struct ModelConfig {
    std::string file;  // how messages call config.json
    std::string model_type;
    std::optional<std::string> hidden_act;
    std::optional<std::int64_t> hidden_size;
    std::optional<std::int64_t> intermediate_size;
    std::optional<std::int64_t> moe_intermediate_size;
    std::optional<std::int64_t> num_hidden_layers;
    std::optional<Stated<std::int64_t>> num_experts;  // or num_local_experts or n_routed_experts
    std::optional<std::int64_t> num_experts_per_tok;
    std::optional<std::int64_t> n_shared_experts;

    std::optional<std::string> scoring_func;
    std::optional<std::string> topk_method;
    std::optional<bool> norm_topk_prob;
    std::optional<std::int64_t> n_group;
    std::optional<std::int64_t> topk_group;
    std::optional<double> routed_scaling_factor;

    std::vector<std::int64_t> mlp_only_layers;
    std::optional<std::int64_t> decoder_sparse_step;
    std::optional<std::int64_t> first_k_dense_replace;
    std::optional<std::int64_t> moe_layer_freq;
    std::vector<std::string> mlp_layer_types;  // "sparse" or "dense", one a layer

    std::vector<Quantization> quantizations;  // of config.json, then of hf_quant_config.json
};

/// `text` is config.json, `hf_quant_text` hf_quant_config.json or empty. Model keys are read from
/// "text_config" where there is one. Throws broken_file naming file, key, found and expected.
ModelConfig parse_model_config(std::string_view text, const std::string& file,
                               std::string_view hf_quant_text = {}, const std::string& hf_quant_file = {});

/// Of a checkpoint's folder. Throws broken_file also when there is no config.json.
ModelConfig read_model_config(const std::filesystem::path& folder);

}  // namespace moe4::checkpoint
