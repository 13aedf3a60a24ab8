// e2m1: every code, every rounding boundary, and all floats against a search for the nearest value.
#include "format/e2m1.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace moe4::format {
namespace {

constexpr float kValues[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};

TEST(E2m1, DecodesEveryCode) {
    for (int code = 0; code < 16; ++code) {
        const float expected = (code & 8) != 0 ? -kValues[code & 7] : kValues[code & 7];
        const float found = e2m1_decode(static_cast<std::uint8_t>(code));
        EXPECT_EQ(std::bit_cast<std::uint32_t>(found), std::bit_cast<std::uint32_t>(expected)) << code;
        EXPECT_EQ(static_cast<float>(e2m1_doubled(static_cast<std::uint8_t>(code))), 2 * expected);
        EXPECT_EQ(e2m1_encode(expected), code);
    }
}

TEST(E2m1, TiesGoToTheEvenCode) {
    EXPECT_EQ(e2m1_encode(0.25F), 0);
    EXPECT_EQ(e2m1_encode(0.75F), 2);
    EXPECT_EQ(e2m1_encode(1.25F), 2);
    EXPECT_EQ(e2m1_encode(1.75F), 4);
    EXPECT_EQ(e2m1_encode(2.5F), 4);
    EXPECT_EQ(e2m1_encode(3.5F), 6);
    EXPECT_EQ(e2m1_encode(5.0F), 6);
    EXPECT_EQ(e2m1_encode(-5.0F), 14);
}

TEST(E2m1, SaturatesAtSix) {
    EXPECT_EQ(e2m1_encode(std::nextafter(5.0F, 6.0F)), 7);
    EXPECT_EQ(e2m1_encode(1e30F), 7);
    EXPECT_EQ(e2m1_encode(-std::numeric_limits<float>::infinity()), 15);
    EXPECT_EQ(e2m1_encode(std::numeric_limits<float>::quiet_NaN()), 7);
    EXPECT_EQ(e2m1_encode(-0.0F), 8);
}

/// The nearest value, of two equally near the one with the even code.
std::uint8_t nearest_code(float magnitude) {
    int best = 0;
    for (int code = 1; code < 8; ++code) {
        const double distance =
            std::fabs(static_cast<double>(kValues[code]) - static_cast<double>(magnitude));
        const double best_distance =
            std::fabs(static_cast<double>(kValues[best]) - static_cast<double>(magnitude));
        if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
    }
    return static_cast<std::uint8_t>(best);
}

TEST(E2m1, RoundsEveryFloatToTheNearest) {
    for (std::uint32_t bits = 0; bits < 0x7F80'0000U; bits += 997) {
        const auto x = std::bit_cast<float>(bits);
        const std::uint8_t expected = nearest_code(std::min(x, 8.0F));  // above, distances drown in rounding
        ASSERT_EQ(e2m1_encode(x), expected) << x;
        ASSERT_EQ(e2m1_encode(-x), expected | 8) << -x;
    }
}

}  // namespace
}  // namespace moe4::format
