#include "checkpoint/families.hpp"

#include <algorithm>

#include "moe/routers.hpp"

namespace moe4::checkpoint {

namespace {

constexpr std::array<std::string_view, 3> kNamed = {"gate_proj", "up_proj", "down_proj"};
constexpr std::array<std::string_view, 3> kNumbered = {"w1", "w3", "w2"};
constexpr std::string_view kGateBias = "gate.e_score_correction_bias";
constexpr std::string_view kBlockBias = "e_score_correction_bias";

constexpr RouterPreset kSoftmax = {.score_function = ScoreFunction::softmax};
constexpr RouterPreset kRenormalizedSoftmax = {
    .score_function = ScoreFunction::softmax, .renormalize = true, .reads_norm_topk_prob = false};
constexpr RouterPreset kRenormalizedSigmoid = {
    .score_function = ScoreFunction::sigmoid, .renormalize = true, .reads_norm_topk_prob = false};
/// Of DeepSeek-V3 and those who took its router over.
constexpr RouterPreset scaled_sigmoid(double factor, int num_groups = 1, int top_k_groups = 1) {
    return {.score_function = ScoreFunction::sigmoid,
            .renormalize = true,
            .num_groups = num_groups,
            .top_k_groups = top_k_groups,
            .scaling_factor = factor};
}

// Sources: the models' configuration and modeling files in transformers. Add yours here.
constexpr Family kFamilies[] = {
    {"qwen3_moe", "mlp", kNamed, "", true, kSoftmax},
    {"mixtral", "block_sparse_moe", kNumbered, "", false, kRenormalizedSoftmax},
    {"deepseek_v3", "mlp", kNamed, kGateBias, true, scaled_sigmoid(2.5, 8, 4)},
    {"deepseek_v32", "mlp", kNamed, kGateBias, true, scaled_sigmoid(2.5, 8, 4)},
    {"kimi_k2", "mlp", kNamed, kGateBias, true, scaled_sigmoid(2.5, 8, 4)},
    {"glm4_moe", "mlp", kNamed, kGateBias, true, scaled_sigmoid(1.0)},
    {"glm4_moe_lite", "mlp", kNamed, kGateBias, true, scaled_sigmoid(1.8)},
    {"glm_moe_dsa", "mlp", kNamed, kGateBias, true, scaled_sigmoid(2.5)},
    {"minimax_m2", "block_sparse_moe", kNumbered, kBlockBias, false, kRenormalizedSigmoid},
};

std::string at(const ModelConfig& config, std::string_view key) {
    return config.file + ": " + std::string(key);
}

std::int64_t required(const ModelConfig& config, const std::optional<std::int64_t>& value, const char* key,
                      Refusals& refusals) {
    if (!value) refuse_broken(refusals, at(config, key) + " is missing, expected a whole number");
    return value.value_or(0);
}

void check_size(const ModelConfig& config, const char* key, std::int64_t value, Refusals& refusals) {
    if (value % kNvfp4BlockSize == 0) return;
    refuse_unsupported(refusals,
                       at(config, key) + " is " + std::to_string(value) + ", expected a multiple of 16");
}

void check_at_most(const ModelConfig& config, const char* key, std::int64_t value, std::int64_t limit,
                   const std::string& reason, Refusals& refusals) {
    if (value <= limit) return;
    refuse_broken(refusals, at(config, key) + " is " + std::to_string(value) + ", expected at most " +
                                std::to_string(limit) + " (" + reason + ")");
}

void check_known(const ModelConfig& config, const char* key, const std::optional<std::string>& value,
                 std::initializer_list<std::string_view> known, Refusals& refusals) {
    if (!value || std::find(known.begin(), known.end(), *value) != known.end()) return;
    std::string list;
    for (const std::string_view name : known) list += (list.empty() ? "" : " or ") + std::string(name);
    refuse_unsupported(refusals, at(config, key) + " is " + *value + ", expected " + list);
}

int num_experts(const ModelConfig& config, Refusals& refusals) {
    if (!config.num_experts) return static_cast<int>(required(config, {}, "num_experts", refusals));
    const auto& [value, where] = *config.num_experts;
    if (value > moe::kMaxExperts) {
        refuse_unsupported(refusals, where + " is " + std::to_string(value) + ", expected at most " +
                                         std::to_string(moe::kMaxExperts));
    }
    return static_cast<int>(value);
}

RouterConfig router_config(const Family& family, const ModelConfig& config, int num_experts,
                           Refusals& refusals) {
    const RouterPreset& preset = family.router;
    check_known(config, "scoring_func", config.scoring_func, {"softmax", "sigmoid"}, refusals);
    check_known(config, "topk_method", config.topk_method, {"noaux_tc"}, refusals);
    RouterConfig router{.score_function = preset.score_function,
                        .top_k = static_cast<int>(
                            required(config, config.num_experts_per_tok, "num_experts_per_tok", refusals)),
                        .renormalize = preset.renormalize,
                        .num_groups = static_cast<int>(config.n_group.value_or(preset.num_groups)),
                        .top_k_groups = static_cast<int>(config.topk_group.value_or(preset.top_k_groups)),
                        .scaling_factor = config.routed_scaling_factor.value_or(preset.scaling_factor)};
    if (config.scoring_func == "sigmoid") router.score_function = ScoreFunction::sigmoid;
    if (config.scoring_func == "softmax") router.score_function = ScoreFunction::softmax;
    if (config.norm_topk_prob && preset.reads_norm_topk_prob) router.renormalize = *config.norm_topk_prob;
    if (num_experts == 0) return router;

    check_at_most(config, "num_experts_per_tok", router.top_k, num_experts,
                  std::to_string(num_experts) + " experts", refusals);
    check_at_most(config, "topk_group", router.top_k_groups, router.num_groups, "n_group", refusals);
    if (num_experts % router.num_groups != 0) {
        refuse_broken(refusals, at(config, "n_group") + " is " + std::to_string(router.num_groups) +
                                    ", expected a divisor of " + std::to_string(num_experts) + " experts");
    } else {
        check_at_most(config, "num_experts_per_tok", router.top_k,
                      std::int64_t{num_experts} / router.num_groups * router.top_k_groups,
                      "the experts of topk_group groups", refusals);
    }
    return router;
}

}  // namespace

std::span<const Family> families() { return kFamilies; }

const Family& find_family(const ModelConfig& config) {
    std::string known;
    for (const Family& family : kFamilies) {
        if (family.model_type == config.model_type) return family;
        known += (known.empty() ? "" : ", ") + std::string(family.model_type);
    }
    throw Error(ErrorKind::unsupported, at(config, "model_type") + " is " +
                                            (config.model_type.empty() ? "missing" : config.model_type) +
                                            ", expected one of " + known);
}

MoeConfig moe_config(const Family& family, const ModelConfig& config, Refusals& refusals) {
    check_known(config, "hidden_act", config.hidden_act, {"silu", "swish"}, refusals);
    const char* intermediate_key =
        family.has_own_intermediate_size ? "moe_intermediate_size" : "intermediate_size";
    const auto& intermediate_size =
        family.has_own_intermediate_size ? config.moe_intermediate_size : config.intermediate_size;
    MoeConfig moe;
    moe.hidden_size = required(config, config.hidden_size, "hidden_size", refusals);
    moe.intermediate_size = required(config, intermediate_size, intermediate_key, refusals);
    moe.num_experts = num_experts(config, refusals);
    check_size(config, "hidden_size", moe.hidden_size, refusals);
    check_size(config, intermediate_key, moe.intermediate_size, refusals);
    moe.router = router_config(family, config, moe.num_experts, refusals);
    return moe;
}

std::optional<bool> says_moe(const ModelConfig& config, int layer) {
    if (!config.num_hidden_layers || layer >= *config.num_hidden_layers) return std::nullopt;
    const auto index = static_cast<std::size_t>(layer);
    if (index < config.mlp_layer_types.size()) return config.mlp_layer_types[index] == "sparse";
    const auto& dense = config.mlp_only_layers;
    if (std::find(dense.begin(), dense.end(), layer) != dense.end()) return false;
    if ((layer + 1) % config.decoder_sparse_step.value_or(1) != 0) return false;
    if (layer < config.first_k_dense_replace.value_or(0)) return false;
    return layer % config.moe_layer_freq.value_or(1) == 0;
}

}  // namespace moe4::checkpoint
