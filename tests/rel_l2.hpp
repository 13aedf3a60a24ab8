#pragma once
// How far what was found lies from what was expected.
#include <vector>

#include "verdict/distance.hpp"

namespace moe4::test {

/// Norm of the difference / norm of what was expected; infinite where NaN or infinity stand in one of them.
template <class Found, class Expected>
double rel_l2(const std::vector<Found>& found, const std::vector<Expected>& expected) {
    verdict::DistanceSums sums;
    for (std::size_t i = 0; i < expected.size(); ++i)
        sums.add(static_cast<double>(found.at(i)), static_cast<double>(expected[i]));
    return sums.distance().rel_l2;
}

}  // namespace moe4::test
