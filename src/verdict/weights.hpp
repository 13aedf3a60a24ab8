#pragma once
// The first distance: every quantised matrix against the one that it was made from.
#include <functional>
#include <string>

#include "moe/scales.hpp"
#include "moe4/layertest.hpp"

namespace moe4::verdict {

using Reference = std::function<NamedTensor(int expert, Projection)>;

/// Calls step() after every matrix, from one thread at a time. Throws invalid_argument for a reference of
/// another shape or dtype, broken_file for one that is not finite, and what `reference` throws.
LayertestReport::Weights compare_weights(const MoeWeights&, const moe::HeldExperts&, const Reference&,
                                         const LayertestLimits&, const ParallelFor&,
                                         const std::function<void()>& step);

/// What the matrix fits when it is read in another way (gate as up, nibbles swapped, ...); empty when none
/// of them brings it within `limit` of its reference. It claims only what it has measured.
std::string explain_matrix(const MoeWeights&, const MatrixDistance&, const Reference&, double limit);

}  // namespace moe4::verdict
