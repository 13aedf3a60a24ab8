#pragma once
// Reading experts that have their tensors to themselves: what the dialects share that differ in leaf names
// alone.
#include <string_view>

#include "checkpoint/dialects/dialect.hpp"

namespace moe4::checkpoint {

Experts read_per_expert(const ExpertSource&, const TensorLeaves&, Refusals&);

/// Whether a tensor under the block's "experts." is called so.
bool has_expert_leaf(const TensorRange& block, std::string_view leaf);

}  // namespace moe4::checkpoint
