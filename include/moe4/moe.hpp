#pragma once
// A Mixture-of-Experts layer: its configuration and its weights in host memory, in one canonical form.
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moe4/nvfp4.hpp"
#include "moe4/tensor.hpp"

namespace moe4 {

/// h = activation(gate, up).
enum class Activation : std::uint8_t {
    silu,  // gate / (1 + exp(-gate)) * up
};

enum class ScoreFunction : std::uint8_t { softmax, sigmoid };

/// Every router of the supported families is one setting of these fields. In order:
///     logits = hidden x router^T;  score = score_function(logits)
///     selection = score + bias, where there is one
///     keep the top_k_groups of num_groups whose two best selections sum highest
///     choose the top_k best selections of those
///     weight = score of the chosen, divided by (their sum + 1e-20) if renormalize, times scaling_factor
/// Ties go to the lowest index. A row with a NaN logit gets ids 0..top_k-1 and NaN weights.
struct RouterConfig {
    ScoreFunction score_function = ScoreFunction::softmax;
    int top_k = 0;
    bool renormalize = false;     // HF norm_topk_prob
    int num_groups = 1;           // HF n_group
    int top_k_groups = 1;         // HF topk_group
    double scaling_factor = 1.0;  // HF routed_scaling_factor
};

struct MoeConfig {
    std::int64_t hidden_size = 0;
    std::int64_t intermediate_size = 0;
    int num_experts = 0;
    Activation activation = Activation::silu;
    RouterConfig router;
};

enum class Projection : std::uint8_t { gate, up, down };
inline constexpr Projection kProjections[] = {Projection::gate, Projection::up, Projection::down};

/// One quantised linear of an expert.
struct ExpertMatrix {
    Nvfp4View weight;
    std::optional<double> input_scale;   // calibrated activation scale, multiplies; empty: none can be read
    std::string name;                    // as the file spells it, "model.layers.3.mlp.experts.17.down_proj"
    std::string input_scale_fault = {};  // why it cannot, a sentence; empty: the checkpoint has none
};

/// y = down( activation(gate(x), up(x)) ). Names follow Hugging Face; w1 = gate, w3 = up, w2 = down.
struct ExpertWeights {
    ExpertMatrix gate;  // [intermediate_size, hidden_size]
    ExpertMatrix up;    // [intermediate_size, hidden_size]
    ExpertMatrix down;  // [hidden_size, intermediate_size]
    const ExpertMatrix& operator[](Projection p) const {
        return p == Projection::gate ? gate : p == Projection::up ? up : down;
    }
};

/// How the checkpoint spells the parts of a matrix, so that a message can name the tensor that the user will
/// look for.
struct TensorLeaves {
    std::string packed = "weight";
    std::string block_scale = "weight_scale";
    std::string global_scale = "weight_scale_2";
    std::string input_scale = "input_scale";
    bool scales_divide = false;  // the file stores 1 / global_scale and 1 / input_scale
};

/// The routed experts of one layer. The views stay valid as long as `owner` (a mapped file) lives.
struct MoeWeights {
    MoeConfig config;
    int layer = 0;
    std::vector<ExpertWeights> experts;     // [num_experts]
    TensorView router;                      // [num_experts, hidden_size] bf16 or f32; data == nullptr: none
    std::optional<TensorView> router_bias;  // [num_experts] f32 or bf16, HF e_score_correction_bias
    TensorLeaves leaves;
    std::shared_ptr<const void> owner;
    /// Says that these bytes of a view were copied and need not stay in memory: a mapped file gives their
    /// pages back, and reads them again should they be needed. From any thread. Null: they stay.
    void (*release)(const void* bytes, std::size_t size) = nullptr;
};

}  // namespace moe4
