// bfloat16 rounding from float and, in one step, from double; binary16 decoding.
#include "format/bf16.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

namespace moe4::format {
namespace {

/// Nearest bf16 of a finite double by comparing the two neighbours exactly, ties to even.
std::uint16_t nearest_bf16(double x) {
    auto below = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(x)) >> 16);
    const double magnitude = std::fabs(x);
    const auto value = [](std::uint16_t bits) { return std::fabs(static_cast<double>(bf16_to_float(bits))); };
    while (value(below) > magnitude) --below;
    const double low = magnitude - value(below);
    const double high = value(below + 1) - magnitude;
    return low < high || (low == high && below % 2 == 0) ? below : static_cast<std::uint16_t>(below + 1);
}

TEST(Bf16, EveryValueSurvives) {
    for (int bits = 0; bits < 0x10000; ++bits) {
        const float x = bf16_to_float(static_cast<std::uint16_t>(bits));
        if (std::isnan(x)) {
            EXPECT_TRUE(std::isnan(bf16_to_float(bf16_from_float(x))));
        } else {
            ASSERT_EQ(bf16_from_float(x), bits);
            ASSERT_EQ(bf16_from_double(static_cast<double>(x)), bits);
        }
    }
}

TEST(Bf16, RoundsToNearestEven) {
    std::mt19937_64 random(1);
    std::uniform_real_distribution<double> exponent(-120, 120);
    for (int i = 0; i < 200'000; ++i) {
        const double x = std::exp2(exponent(random)) * (i % 2 == 0 ? 1 : -1);
        ASSERT_EQ(bf16_from_double(x), nearest_bf16(x)) << x;
        const auto f = static_cast<float>(x);
        ASSERT_EQ(bf16_from_float(f), nearest_bf16(static_cast<double>(f))) << f;
    }
}

TEST(Bf16, FromDoubleRoundsOnce) {
    // Just above a bf16 tie, but nearer to the tie than a float can say: two roundings would give the even
    // side.
    const double tie = 1.0 + 0x1p-8;
    EXPECT_EQ(bf16_from_double(tie), 0x3F80);
    EXPECT_EQ(bf16_from_double(tie + 0x1p-40), 0x3F81);
    EXPECT_EQ(bf16_from_double(-(tie + 0x1p-40)), 0xBF81);
    EXPECT_EQ(bf16_from_double(tie + 0x1p-7 - 0x1p-40), 0x3F81);
}

TEST(Bf16, OverflowIsInfinityAndNaNStaysNaN) {
    EXPECT_EQ(bf16_from_float(std::numeric_limits<float>::max()), 0x7F80);
    EXPECT_EQ(bf16_from_double(1e300), 0x7F80);
    EXPECT_TRUE(std::isnan(bf16_to_float(bf16_from_float(std::bit_cast<float>(0x7F80'0001U)))));
    EXPECT_TRUE(std::isnan(bf16_to_float(bf16_from_double(std::numeric_limits<double>::quiet_NaN()))));
}

TEST(F16, DecodesEveryValue) {
    for (int bits = 0; bits < 0x10000; ++bits) {
        const int exponent = (bits >> 10) & 31;
        const int mantissa = bits & 0x3FF;
        const float found = f16_to_float(static_cast<std::uint16_t>(bits));
        if (exponent == 31) {
            EXPECT_EQ(std::isinf(found), mantissa == 0);
            EXPECT_EQ(std::isnan(found), mantissa != 0);
            continue;
        }
        const double magnitude =
            exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
        ASSERT_EQ(static_cast<double>(found), bits >= 0x8000 ? -magnitude : magnitude) << bits;
    }
}

}  // namespace
}  // namespace moe4::format
