#pragma once
// What every backend refuses of the arguments of Layer::run and Layer::route.
#include "moe4/backend.hpp"

namespace moe4::moe {

/// Where a call's tensors lie, and to how many bytes those are aligned that are read and written as vectors
/// (hidden and output); the others are aligned to their elements.
struct Placement {
    Device device = {};
    std::size_t vector_alignment = 2;
};

/// Throws invalid_argument naming a tensor whose dtype, shape, device or alignment is another. Nothing is
/// asked of the memory of a tensor without elements.
void check_tensor(const char* name, const TensorView&, DType, const Shape&, Device, std::size_t alignment);

/// Throws invalid_argument unless hidden has two dimensions; returns its number of tokens.
std::int64_t num_tokens_of(const TensorView& hidden);

/// check_tensor() of each.
void check_route_arguments(const MoeConfig&, const TensorView& hidden, const TensorView& top_k_ids,
                           const TensorView& top_k_weights, const Placement&);

/// The same for run, whose output is bf16 or f32, and for more tokens than were planned.
void check_run_arguments(const Problem&, const TensorView& hidden, const Routing&, const TensorView& output,
                         const Placement&);

/// Throws invalid_argument for scratch memory that is smaller than planned or not aligned to 64 bytes.
void check_workspace(const Plan&, const Workspace&);

}  // namespace moe4::moe
