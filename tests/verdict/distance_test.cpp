// Distances of vectors small enough to work out by hand.
#include "verdict/distance.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace moe4::verdict {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

DistanceSums sums_of(const std::vector<double>& found, const std::vector<double>& expected) {
    DistanceSums sums;
    for (std::size_t i = 0; i < found.size(); ++i) sums.add(found[i], expected[i]);
    return sums;
}

TEST(Distance, OfAPerpendicularStep) {
    const Distance distance = sums_of({3, 4, 5}, {3, 4, 0}).distance();
    EXPECT_DOUBLE_EQ(distance.rel_l2, 1.0);
    EXPECT_DOUBLE_EQ(distance.cosine, std::sqrt(0.5));
    EXPECT_EQ(distance.max_abs, 5.0);
}

TEST(Distance, OfEqualAndOfEmptyVectorsIsZero) {
    for (const auto& x : {std::vector<double>{1, -2}, {0, 0}, {}}) {
        const Distance distance = sums_of(x, x).distance();
        EXPECT_EQ(distance.cosine, 1.0);
        EXPECT_EQ(distance.rel_l2, 0.0);
        EXPECT_EQ(distance.max_abs, 0.0);
    }
}

TEST(Distance, AnythingFromZeroIsInfinite) {
    EXPECT_EQ(sums_of({0, 2}, {0, 0}).distance().rel_l2, kInfinity);
    EXPECT_EQ(sums_of({0, 2}, {0, 0}).distance().max_abs, 2.0);
    EXPECT_EQ(sums_of({0, 0}, {0, 2}).distance().rel_l2, 1.0);
    EXPECT_EQ(sums_of({0, 0}, {0, 2}).distance().cosine, 0.0);
}

TEST(Distance, ANotANumberOnEitherSideIsInfinite) {
    for (const double bad : {kNaN, kInfinity, -kInfinity}) {
        for (const auto& sums :
             {sums_of({1, bad}, {1, 2}), sums_of({1, 2}, {bad, 2}), sums_of({bad}, {bad})}) {
            EXPECT_EQ(sums.distance().rel_l2, kInfinity);
            EXPECT_EQ(sums.distance().max_abs, kInfinity);
            EXPECT_EQ(sums.distance().cosine, 0.0);
        }
    }
}

TEST(Distance, PartsAddUpToTheWhole) {
    DistanceSums parts = sums_of({1, 2}, {1, 3});
    parts.add(sums_of({5, 7}, {4, 4}));
    const Distance whole = sums_of({1, 2, 5, 7}, {1, 3, 4, 4}).distance();
    EXPECT_EQ(parts.distance().rel_l2, whole.rel_l2);
    EXPECT_EQ(parts.distance().cosine, whole.cosine);
    EXPECT_EQ(parts.distance().max_abs, 3.0);
}

TEST(Distance, BestFitFindsTheFactor) {
    const DistanceSums sums = sums_of({4, 8, -12}, {1, 2, -3});
    EXPECT_DOUBLE_EQ(sums.best_factor(), 4.0);
    EXPECT_NEAR(sums.rel_l2_of_best_fit(), 0.0, 1e-7);
    EXPECT_DOUBLE_EQ(sums_of({3, 4}, {3, 0}).rel_l2_of_best_fit(), 4.0 / 3.0);
}

}  // namespace
}  // namespace moe4::verdict
