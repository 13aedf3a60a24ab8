#pragma once
// Which global scales a problem uses, and the refusal of weights and scales that cannot mean anything.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moe4/backend.hpp"
#include "moe4/error.hpp"

namespace moe4::moe {

/// The activations' global scales of one expert for the calibrated modes, rounded to fp32 once.
struct InputScales {
    float gate_up = 0.0F;
    float down = 0.0F;
};

/// [num_experts]; the maximum over all experts of the layer for layer_max, the expert's own for per_expert,
/// zeros for the dynamic modes. Throws unsupported (missing) or broken_file (zero, negative, subnormal,
/// infinite, NaN), naming the tensor as the file spells it.
std::vector<InputScales> input_scales(const MoeWeights&, ActivationScale);

/// Throws broken_file for a global scale that is not positive and finite, and for a block scale that is NaN
/// or has its sign set, in any expert of `range`, naming the tensor, row and block. Parallel over experts.
void check_weights(const MoeWeights&, ExpertRange range, const ParallelFor& = {});

/// What of one matrix would be refused, as the error that would be thrown; empty: nothing. The input scale is
/// one for layer_max and per_expert, the block scale named is the first bad one.
std::optional<Error> global_scale_fault(const MoeWeights&, int expert, Projection);
std::optional<Error> input_scale_fault(const MoeWeights&, int expert, Projection);
std::optional<Error> block_scale_fault(const MoeWeights&, int expert, Projection);

/// "model.layers.3.mlp.experts.17.gate_proj.weight_scale"; "layer 3, expert 17: gate_proj.weight_scale" where
/// the weights carry no names.
std::string tensor_name(const MoeWeights&, int expert, Projection, const std::string& leaf);

std::string_view projection_name(Projection);  // "gate_proj", "up_proj", "down_proj"

/// [first, last) of the experts held. Throws invalid_argument when the range does not lie within the layer.
struct HeldExperts {
    int first = 0;
    int last = 0;
    int count() const { return last - first; }
    bool contains(std::int32_t id) const { return id >= first && id < last; }
};
HeldExperts held_experts(const ExpertRange&, int num_experts);

}  // namespace moe4::moe
