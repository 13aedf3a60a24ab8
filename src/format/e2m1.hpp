#pragma once
// e2m1: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, FP4). No infinity, no NaN.
#include <cstdint>

namespace moe4::format {

inline constexpr float kE2m1Max = 6.0F;

/// Twice the value, an integer: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
constexpr int e2m1_doubled(std::uint8_t code) {
    constexpr std::int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return kDoubled[code & 15U];
}

constexpr float e2m1_decode(std::uint8_t code) {
    const float magnitude = 0.5F * static_cast<float>(e2m1_doubled(code & 7U));
    return (code & 8U) != 0 ? -magnitude : magnitude;
}

/// Round to nearest, ties to the even code, saturating at 6; -0 gives 8 and NaN gives 7 (6.0).
constexpr std::uint8_t e2m1_encode(float x) {
    const bool is_negative = x < 0 || (x == 0 && 1 / x < 0);
    const float a = x < 0 ? -x : x;
    const int magnitude = a <= 0.25F   ? 0
                          : a < 0.75F  ? 1
                          : a <= 1.25F ? 2
                          : a < 1.75F  ? 3
                          : a <= 2.5F  ? 4
                          : a < 3.5F   ? 5
                          : a <= 5.0F  ? 6
                                       : 7;
    return static_cast<std::uint8_t>(magnitude | (is_negative ? 8 : 0));
}

}  // namespace moe4::format
