#pragma once
// e4m3fn: sign, four exponent bits (bias 7), three mantissa bits; 0x7F and 0xFF are NaN, there is no infinity
// (OCP 8-bit Floating Point Specification 1.0). Smallest subnormal 2^-9, smallest normal 2^-6, largest 448.
#include <bit>
#include <cstdint>
#include <limits>

namespace moe4::format {

inline constexpr float kE4m3Max = 448.0F;
inline constexpr std::uint8_t kE4m3NaN = 0x7F;

constexpr bool e4m3_is_nan(std::uint8_t byte) { return (byte & 0x7FU) == kE4m3NaN; }
constexpr bool e4m3_is_subnormal(std::uint8_t byte) { return (byte & 0x78U) == 0 && (byte & 7U) != 0; }

constexpr float e4m3_decode(std::uint8_t byte) {
    if (e4m3_is_nan(byte)) return std::numeric_limits<float>::quiet_NaN();
    const std::uint32_t exponent = (byte >> 3) & 15U;
    const std::uint32_t mantissa = byte & 7U;
    const float magnitude = exponent == 0
                                ? static_cast<float>(mantissa) * 0x1p-9F
                                : std::bit_cast<float>(((exponent + 120U) << 23) | (mantissa << 20));
    return (byte & 0x80U) != 0 ? -magnitude : magnitude;
}

/// Round to nearest even, saturating at 448 (infinities too); NaN gives NaN.
constexpr std::uint8_t e4m3_encode(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80U);
    const auto magnitude = std::bit_cast<float>(bits & 0x7FFF'FFFFU);
    if (magnitude != magnitude) return sign | kE4m3NaN;
    if (magnitude >= kE4m3Max) return sign | 0x7EU;
    if (magnitude < 0x1p-6F) {  // adding 2^23 rounds magnitude * 2^9 to an integer in the low bits
        return sign |
               static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(magnitude * 512.0F + 0x1p23F) & 15U);
    }
    const auto u = std::bit_cast<std::uint32_t>(magnitude);
    return sign | static_cast<std::uint8_t>(((u + 0x7FFFFU + ((u >> 20) & 1U)) >> 20) - (120U << 3));
}

}  // namespace moe4::format
