// exp and silu on floats from end to end against long double.
#include "moe/activations.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "moe/scalar_lane.hpp"

namespace moe4::moe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

float exp_of(float x) { return moe::exp(ScalarLane{x}).value; }
float silu_of(float gate, float up) { return Silu::apply(ScalarLane{gate}, ScalarLane{up}).value; }

/// Distance from the true value in units of the last place of the float nearest to it.
double ulps(float found, long double truth) {
    const auto nearest = static_cast<float>(truth);
    if (std::isinf(nearest) || std::isinf(found)) return nearest == found ? 0.0 : 1e9;
    const float above = std::nextafter(std::fabs(nearest), kInfinity);
    const long double ulp = static_cast<long double>(above) - static_cast<long double>(std::fabs(nearest));
    return static_cast<double>(std::fabs((static_cast<long double>(found) - truth) / ulp));
}

template <class Function>
void for_floats(std::uint32_t stride, Function function) {
    for (std::uint64_t bits = 0; bits <= 0xFFFF'FFFFU; bits += stride) {
        const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        if (!std::isnan(x)) function(x);
    }
}

TEST(Exp, WithinTwoUlpOverTheWholeRange) {
    double worst = 0;
    float worst_x = 0;
    for_floats(1021, [&](float x) {
        const double error = ulps(exp_of(x), std::exp(static_cast<long double>(x)));
        if (error > worst) worst = error, worst_x = x;
    });
    RecordProperty("worst_ulps", std::to_string(worst));
    std::printf("exp: worst %.3f ulp at %a\n", worst, static_cast<double>(worst_x));
    EXPECT_LE(worst, 2.0) << "at " << worst_x;
}

// Where results leave the range of floats, every float: the last finite, the subnormal and the first zero.
TEST(Exp, WithinTwoUlpAroundBothEnds) {
    for (const auto& [low, high] : {std::pair{88.72F, 88.73F},
                                    {88.99F, 89.01F},
                                    {-87.4F, -87.3F},
                                    {-104.01F, -103.9F},
                                    {-100.02F, -100.0F}}) {
        for (float x = low; x <= high; x = std::nextafter(x, kInfinity)) {
            ASSERT_LE(ulps(exp_of(x), std::exp(static_cast<long double>(x))), 2.0) << x;
        }
    }
}

TEST(Exp, SpecialValues) {
    EXPECT_EQ(exp_of(0.0F), 1.0F);
    EXPECT_EQ(exp_of(-0.0F), 1.0F);
    EXPECT_EQ(exp_of(kInfinity), kInfinity);
    EXPECT_EQ(exp_of(1e30F), kInfinity);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(exp_of(-kInfinity)), 0U);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(exp_of(-1e30F)), 0U);
    EXPECT_TRUE(std::isnan(exp_of(kNaN)));
    EXPECT_TRUE(std::isnan(exp_of(-kNaN)));
}

// Bits that every instruction set must give: hosts with another libm, compiler or vector width included.
TEST(Exp, Bits) {
    struct {
        float x;
        std::uint32_t bits;
    } const table[] = {
        {-103.5F, 0x00000001U},      {-90.25F, 0x0006F2E7U},       {-20.0F, 0x310DA433U},
        {-1.0F, 0x3EBC5AB2U},        {-0.333299994F, 0x3F37702AU}, {0.00100000005F, 0x3F8020C9U},
        {0.693147182F, 0x40000000U}, {1.0F, 0x402DF854U},          {7.75F, 0x45111928U},
        {42.4199982F, 0x5E12F19FU},  {88.6999969F, 0x7F7A37FCU}};
    for (const auto& [x, bits] : table) EXPECT_EQ(std::bit_cast<std::uint32_t>(exp_of(x)), bits) << x;
}

TEST(Silu, FollowsTheFormulaOverTheWholeRange) {
    double worst = 0;
    for_floats(4099, [&](float x) {
        if (std::fabs(x) > 80) return;  // beyond, 1 + exp(-x) overflows or the result is x or 0: see below
        const auto wide = static_cast<long double>(x);
        worst = std::max(worst, ulps(silu_of(x, 1.0F), wide / (1.0L + std::exp(-wide))));
    });
    std::printf("silu: worst %.3f ulp\n", worst);
    EXPECT_LE(worst, 4.0);  // exp 2, the sum and the division half each, the ulps of a quotient twice as wide
}

TEST(Silu, SpecialValues) {
    EXPECT_EQ(silu_of(0.0F, 3.0F), 0.0F);
    EXPECT_EQ(silu_of(100.0F, 2.0F), 200.0F);
    EXPECT_EQ(silu_of(-1e30F, 1.0F), 0.0F);
    EXPECT_EQ(silu_of(kInfinity, 1.0F), kInfinity);
    EXPECT_TRUE(std::isnan(silu_of(kNaN, 1.0F)));
    EXPECT_TRUE(std::isnan(silu_of(1.0F, kNaN)));
    EXPECT_EQ(silu_of(1.0F, 2.0F), 2.0F * silu_of(1.0F, 1.0F));
}

}  // namespace
}  // namespace moe4::moe
