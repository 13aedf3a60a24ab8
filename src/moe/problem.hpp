#pragma once
// What every backend refuses of problems that make no sense and of weights that do not fit them.
#include "moe/scales.hpp"
#include "moe4/backend.hpp"

namespace moe4::moe {

std::string_view precision_name(Precision);

/// Slots per token: Problem::top_k, or the router's.
int slots_per_token(const Problem&);

HeldExperts held_experts(const Problem&);

/// w4a4 where A is measured, of the batch or of each row: h can be quantised once all of it is there.
inline bool has_dynamic_scales(const Problem& problem) {
    return problem.precision == Precision::w4a4 &&
           (problem.activation_scale == ActivationScale::dynamic ||
            problem.activation_scale == ActivationScale::dynamic_token);
}

/// w4a4 where A1 is the expert's own: a token has other codes for each of its experts.
inline bool has_expert_scales(const Problem& problem) {
    return problem.precision == Precision::w4a4 && problem.activation_scale == ActivationScale::per_expert;
}

/// Throws invalid_argument for sizes, slots or tokens that no layer has.
void check_problem(const Problem&);

/// Throws invalid_argument for held experts whose matrices have other shapes than the problem or overlap.
void check_weights_fit(const Problem&, const MoeWeights&);

/// Tells the weights' owner that a matrix was copied (MoeWeights::release).
void release(const MoeWeights&, const Nvfp4View&);

}  // namespace moe4::moe
