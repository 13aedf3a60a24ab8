#pragma once
// What every backend refuses: problems that make no sense, weights that do not fit the problem, and arguments
// of run and route that do not fit the layer.
#include "moe/scales.hpp"
#include "moe4/backend.hpp"

namespace moe4::moe {

/// Slots per token: Problem::top_k, or the router's.
int slots_per_token(const Problem&);

/// Throws invalid_argument for sizes, slots or tokens that no layer has.
void check_problem(const Problem&);

/// Throws invalid_argument for held experts whose matrices have other shapes than the problem or overlap.
void check_weights_fit(const Problem&, HeldExperts, const MoeWeights&);

/// Throws invalid_argument unless the tensor is this dtype and shape on this device, aligned to `alignment`
/// bytes (nothing is asked of a tensor without elements).
void check_tensor(const char* name, const TensorView&, DType, const Shape&, Device, std::size_t alignment);

/// Throws invalid_argument unless hidden has two dimensions; returns its number of tokens.
std::int64_t num_tokens_of(const TensorView& hidden);

}  // namespace moe4::moe
