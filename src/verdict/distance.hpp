#pragma once
// The sums behind a Distance: of parts they add up to the sums of the whole.
#include <algorithm>
#include <cmath>
#include <limits>

#include "moe4/layertest.hpp"

namespace moe4::verdict {

class DistanceSums {
public:
    void add(double found, double expected) {
        const double difference = found - expected;
        found_squared_ += found * found;
        expected_squared_ += expected * expected;
        product_ += found * expected;
        difference_squared_ += difference * difference;
        max_abs_ = std::max(max_abs_, std::fabs(difference));  // a NaN shows in the sums
    }

    void add(const DistanceSums& part) {
        found_squared_ += part.found_squared_;
        expected_squared_ += part.expected_squared_;
        product_ += part.product_;
        difference_squared_ += part.difference_squared_;
        max_abs_ = std::max(max_abs_, part.max_abs_);
    }

    Distance distance() const {
        constexpr double kInfinity = std::numeric_limits<double>::infinity();
        if (!std::isfinite(difference_squared_)) return {0.0, kInfinity, kInfinity};
        if (difference_squared_ == 0.0) return {1.0, 0.0, 0.0};
        if (expected_squared_ == 0.0) return {0.0, kInfinity, max_abs_};
        return {cosine(), std::sqrt(difference_squared_ / expected_squared_), max_abs_};
    }

    /// The c for which c * expected comes closest to found, and how far (rel-L2) found then still lies from
    /// it. The expectation is not zero.
    double best_factor() const { return product_ / expected_squared_; }
    double rel_l2_of_best_fit() const {
        return std::sqrt(std::max(0.0, 1.0 - cosine() * cosine())) / std::fabs(cosine());
    }

private:
    double cosine() const {
        if (found_squared_ == 0.0) return 0.0;
        return std::clamp(product_ / std::sqrt(found_squared_) / std::sqrt(expected_squared_), -1.0, 1.0);
    }

    double found_squared_ = 0.0;
    double expected_squared_ = 0.0;
    double product_ = 0.0;
    double difference_squared_ = 0.0;
    double max_abs_ = 0.0;
};

}  // namespace moe4::verdict
