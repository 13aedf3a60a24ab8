#pragma once
// The model families: how each names its tensors and how it routes. One row each in families.cpp.
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/model_config.hpp"
#include "checkpoint/refusal.hpp"
#include "moe4/moe.hpp"

namespace moe4::checkpoint {

/// What a family does where config.json leaves a key out: the defaults of its class in transformers.
struct RouterPreset {
    ScoreFunction score_function = ScoreFunction::softmax;
    bool renormalize = false;
    bool reads_norm_topk_prob = true;  // else the key changes nothing
    int num_groups = 1;
    int top_k_groups = 1;
    double scaling_factor = 1.0;
};

struct Family {
    std::string_view model_type;                  // of config.json
    std::string_view block;                       // the MoE block within a layer, "mlp"
    std::array<std::string_view, 3> projections;  // by Projection, "gate_proj"
    std::string_view router_bias;                 // within the block; empty: the family has none
    bool has_own_intermediate_size;  // moe_intermediate_size; else intermediate_size is the experts'
    RouterPreset router;
};

inline constexpr std::string_view kRouterWeight = "gate.weight";  // within the block, of every family

std::span<const Family> families();
/// Throws unsupported for a model_type that is in no row, naming those that are.
const Family& find_family(const ModelConfig&);

/// The layer's configuration, or what is wrong with it, one refusal a fault: sizes that are missing or no
/// multiple of 16, an activation, score function or top-k method that is not known, groups that do not
/// divide.
MoeConfig moe_config(const Family&, const ModelConfig&, Refusals&);

/// Whether config.json makes `layer` a MoE layer; empty when it has no opinion.
std::optional<bool> says_moe(const ModelConfig&, int layer);

}  // namespace moe4::checkpoint
