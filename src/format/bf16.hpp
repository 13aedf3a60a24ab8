#pragma once
// bfloat16: the upper half of a float. Usable on host and device (constexpr).
#include <bit>
#include <cstdint>

namespace moe4::format {

constexpr float bf16_to_float(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Round to nearest even; overflow gives infinity, a NaN stays a (quiet) NaN.
constexpr std::uint16_t bf16_from_float(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    if ((bits & 0x7FFF'FFFFU) > 0x7F80'0000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
    return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

/// The same from a double in one rounding: the detour over float is made by rounding to odd, which keeps
/// every bit that decides (float has 16 more significant bits than bf16; 2 suffice).
constexpr std::uint16_t bf16_from_double(double x) {
    auto nearest = static_cast<float>(x);
    const auto bits = std::bit_cast<std::uint32_t>(nearest);
    const bool is_inexact = static_cast<double>(nearest) != x && x == x;
    if (is_inexact && (bits & 1U) == 0U) {
        const bool too_far_from_zero =
            (x < 0 ? -x : x) < static_cast<double>(nearest < 0 ? -nearest : nearest);
        nearest = std::bit_cast<float>(too_far_from_zero ? bits - 1U : bits + 1U);
    }
    return bf16_from_float(nearest);
}

/// IEEE binary16, decode alone: reference checkpoints may hold it.
constexpr float f16_to_float(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1FU;
    const std::uint32_t mantissa = bits & 0x3FFU;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
        return sign != 0 ? -magnitude : magnitude;
    }
    const std::uint32_t wide = exponent == 31 ? 0xFFU : exponent + 112U;
    return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

}  // namespace moe4::format
