#pragma once
// Weights in registers: a 32-bit word of eight consecutive codes becomes four pairs of 16-bit numbers by
// moving bits and one multiplication by the block scale. All exact: e2m1 placed into the exponent and
// mantissa bits of a wider format is the value times a power of two, e4m3 has four significant bits, their
// product at most six. The power of two that is left over is taken out of the fp32 sum.
#include <cstdint>

#include "backends/cuda/ptx/mma.cuh"

namespace moe4::cuda {

/// Pairs of a word's values n, in the order that the tensor core's k16 steps want them (k_order.hpp).
struct DecodedWord {
    std::uint32_t step0[2];  // (0, 4), (1, 5)
    std::uint32_t step1[2];  // (2, 6), (3, 7)
};

/// bf16 tokens: code -> e2m1 * 2^-126, scale -> e4m3 * 2^119.
struct Bf16Format {
    static constexpr bool kF16 = false;
    static constexpr float kUndo = 0x1p7F;

    __device__ static std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
        std::uint32_t product;
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
        return product;
    }
    /// Scale `block` of four, in both halves.
    __device__ static std::uint32_t scale(std::uint32_t four_scales, unsigned block) {
        const std::uint32_t bits = __byte_perm(four_scales, 0, 0x4040 | block | block << 8) << 4;
        return multiply(multiply(bits, 0x7F007F00U), 0x77807780U);  // 2^127, 2^112
    }
    /// Multiplying by 2^a + 2^b places sign and magnitude with one instruction; the mask drops the rest.
    __device__ static DecodedWord decode(std::uint32_t codes, std::uint32_t scale) {
        constexpr std::uint32_t kKept = 0x81C081C0U;
        const std::uint32_t upper = codes >> 8;
        return {{multiply((codes & 0x000F000FU) * 0x1040U & kKept, scale),
                 multiply((codes & 0x00F000F0U) * 0x0104U & kKept, scale)},
                {multiply((upper & 0x000F000FU) * 0x1040U & kKept, scale),
                 multiply((upper & 0x00F000F0U) * 0x0104U & kKept, scale)}};
    }
    __device__ static void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
        ptx::mma_bf16(d, a0, a1, a2, a3, b0, b1);
    }
};

/// fp16 tokens, which hold quantised activations exactly: code -> e2m1 * 2^-14, scale as it is.
struct F16Format {
    static constexpr bool kF16 = true;
    static constexpr float kUndo = 0x1p14F;

    __device__ static std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
        std::uint32_t product;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
        return product;
    }
    __device__ static std::uint32_t scale(std::uint32_t four_scales, unsigned block) {
        std::uint32_t both;
        const auto two = static_cast<std::uint16_t>(block < 2 ? four_scales : four_scales >> 16);
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(two));
        return block % 2 == 0 ? twice_low(both) : twice_high(both);
    }
    __device__ static DecodedWord decode(std::uint32_t codes, std::uint32_t scale) {
        constexpr std::uint32_t kKept = 0x8E008E00U;
        const std::uint32_t even = merge_signs(codes << 4, codes << 1);  // s...eem. in every byte
        const std::uint32_t odd = merge_signs(codes, codes >> 3);
        return {{multiply(even << 8 & kKept, scale), multiply(odd << 8 & kKept, scale)},
                {multiply(even & kKept, scale), multiply(odd & kKept, scale)}};
    }
    __device__ static void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
        ptx::mma_f16(d, a0, a1, a2, a3, b0, b1);
    }

private:
    // Halves, not bytes: then it is an operand's modifier in the multiplication.
    __device__ static std::uint32_t twice_low(std::uint32_t pair) {
        std::uint32_t both;
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }"
            : "=r"(both)
            : "r"(pair));
        return both;
    }
    __device__ static std::uint32_t twice_high(std::uint32_t pair) {
        std::uint32_t both;
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }"
            : "=r"(both)
            : "r"(pair));
        return both;
    }
    __device__ static std::uint32_t merge_signs(std::uint32_t signs, std::uint32_t rest) {
        std::uint32_t merged;  // (signs & 0x80808080) | (rest & ~0x80808080)
        asm("lop3.b32 %0, %1, %2, 0x80808080, 0xE4;" : "=r"(merged) : "r"(signs), "r"(rest));
        return merged;
    }
};

}  // namespace moe4::cuda
