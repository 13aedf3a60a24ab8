// e4m3: every byte, and encoding of all floats (by a stride) and of every boundary against a search.
#include "format/e4m3.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace moe4::format {
namespace {

/// The value by its definition: (-1)^s * 2^(e - 7) * (1 + m / 8), subnormal 2^-6 * m / 8.
double value_of(int byte) {
    const int exponent = (byte >> 3) & 15;
    const int mantissa = byte & 7;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
    return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

std::uint8_t nearest_byte(double magnitude) {
    int best = 0;
    for (int byte = 1; byte <= 0x7E; ++byte) {
        const double distance = std::fabs(value_of(byte) - magnitude);
        const double best_distance = std::fabs(value_of(best) - magnitude);
        if (distance < best_distance || (distance == best_distance && byte % 2 == 0)) best = byte;
    }
    return static_cast<std::uint8_t>(best);
}

TEST(E4m3, DecodesEveryByteAndEncodesItBack) {
    for (int byte = 0; byte < 256; ++byte) {
        const auto b = static_cast<std::uint8_t>(byte);
        if ((byte & 0x7F) == 0x7F) {
            EXPECT_TRUE(std::isnan(e4m3_decode(b)));
            EXPECT_TRUE(e4m3_is_nan(b));
            continue;
        }
        EXPECT_FALSE(e4m3_is_nan(b));
        EXPECT_EQ(static_cast<double>(e4m3_decode(b)), value_of(byte));
        EXPECT_EQ(std::signbit(e4m3_decode(b)), byte >= 0x80);
        EXPECT_EQ(e4m3_encode(e4m3_decode(b)), b);
        EXPECT_EQ(e4m3_is_subnormal(b), (byte & 0x7F) >= 1 && (byte & 0x7F) <= 7);
    }
}

TEST(E4m3, TiesBetweenNeighboursGoToTheEvenByte) {
    for (int byte = 0; byte < 0x7E; ++byte) {
        const auto middle = static_cast<float>((value_of(byte) + value_of(byte + 1)) / 2);  // exact
        EXPECT_EQ(e4m3_encode(middle), byte % 2 == 0 ? byte : byte + 1) << byte;
        EXPECT_EQ(e4m3_encode(std::nextafter(middle, 0.0F)), byte);
        EXPECT_EQ(e4m3_encode(std::nextafter(middle, 1e9F)), byte + 1);
    }
}

TEST(E4m3, SaturatesAndKeepsNaN) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    EXPECT_EQ(e4m3_encode(448.0F), 0x7E);
    EXPECT_EQ(e4m3_encode(1e9F), 0x7E);
    EXPECT_EQ(e4m3_encode(kInfinity), 0x7E);
    EXPECT_EQ(e4m3_encode(-kInfinity), 0xFE);
    EXPECT_EQ(e4m3_encode(std::numeric_limits<float>::quiet_NaN()) & 0x7F, 0x7F);
    EXPECT_EQ(e4m3_encode(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(E4m3, RoundsEveryFloatToTheNearest) {
    for (std::uint32_t bits = 0; bits < 0x7F80'0000U; bits += 99'991) {
        const auto x = std::bit_cast<float>(bits);
        ASSERT_EQ(e4m3_encode(x), nearest_byte(static_cast<double>(x))) << x;
        ASSERT_EQ(e4m3_encode(-x), nearest_byte(static_cast<double>(x)) | 0x80) << -x;
    }
}

}  // namespace
}  // namespace moe4::format
