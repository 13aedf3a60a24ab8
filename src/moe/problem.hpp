#pragma once
// What every backend refuses of problems that make no sense and of weights that do not fit them.
#include "moe/scales.hpp"
#include "moe4/backend.hpp"

namespace moe4::moe {

std::string_view precision_name(Precision);

/// Slots per token: Problem::top_k, or the router's.
int slots_per_token(const Problem&);

HeldExperts held_experts(const Problem&);

/// Throws invalid_argument for sizes, slots or tokens that no layer has.
void check_problem(const Problem&);

/// Throws invalid_argument for held experts whose matrices have other shapes than the problem or overlap.
void check_weights_fit(const Problem&, const MoeWeights&);

/// Tells the weights' owner that a matrix was copied (MoeWeights::release).
void release(const MoeWeights&, const Nvfp4View&);

}  // namespace moe4::moe
