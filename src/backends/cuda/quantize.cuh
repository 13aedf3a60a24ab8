#pragma once
// NVFP4 activations on the device. Kernels multiply e2m1 * e4m3 as one 16-bit number, which holds the product
// exactly; the global scale A meets the fp32 sum. Formulas: format/quantize.hpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "format/bf16.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"

namespace moe4::cuda {

/// |x| as an integer that orders as |x| does, NaN above everything.
__device__ inline std::uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFF'FFFFU; }

inline constexpr std::uint32_t kInfinityBits = 0x7F80'0000U;

/// x / d to the last bit, given the correctly rounded 1 / d: one step of Newton's from a product (Markstein
/// 1990). Holds short of overflow and underflow; with divide() an infinite x stays infinite.
__device__ inline float divide_finite(float x, float d, float reciprocal) {
    const float q = x * reciprocal;
    return __fmaf_rn(__fmaf_rn(-q, d, x), reciprocal, q);
}
__device__ inline float divide(float x, float d, float reciprocal) {
    const float q = x * reciprocal;
    return magnitude_bits(q) < kInfinityBits ? divide_finite(x, d, reciprocal) : q;
}

/// 1 / x to the last bit for an ordinary x: a step of Newton's from the hardware's, which is within 1 ulp.
__device__ inline float reciprocal_of_ordinary(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return __fmaf_rn(__fmaf_rn(-x, y, 1.0F), y, y);
}

__device__ inline bool is_ordinary(float x) { return x > 0x1p-60F && x < 0x1p60F; }

/// RNE to e4m3, at most 448, NaN to 0x7F; and back.
__device__ inline float round_to_e4m3(float x) {
    std::uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(pair) : "f"(x));
    std::uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return __half2float(__ushort_as_half(static_cast<std::uint16_t>(halves)));
}

/// The scale of a block whose largest magnitude has these bits.
__device__ inline float block_scale_of(std::uint32_t largest, float global_scale, float reciprocal) {
    const float amax = __uint_as_float(largest);
    if (is_ordinary(amax) && is_ordinary(global_scale))
        return round_to_e4m3(divide(divide(amax, 6.0F, 1.0F / 6.0F), global_scale, reciprocal));
    if (largest > kInfinityBits) return amax;
    return global_scale == 0.0F ? 0.0F : round_to_e4m3(fminf(format::kE4m3Max, amax / 6.0F / global_scale));
}

/// A magnitude rounded to e2m1 (ties to even), or to more than 6. Adding 2^22 rounds to multiples of 1/2, the
/// step below 2; 2^23 and 2^24 do for [2, 4) and [4, 8).
__device__ inline float round_to_step(float magnitude) {
    const float power = __uint_as_float(__float_as_uint(fmaxf(magnitude, 1.0F)) & kInfinityBits);
    return __fmaf_rn(power, -0x1p22F, __fmaf_rn(power, 0x1p22F, magnitude));
}
__device__ inline float round_to_e2m1(float magnitude) {
    return fminf(round_to_step(magnitude), format::kE2m1Max);
}

/// Two values as one word, the first in the low half. fp16 here is exact; bf16 rounds to nearest even.
template <bool kF16>
__device__ inline std::uint32_t pack_pair(float low, float high) {
    std::uint32_t pair;
    if constexpr (kF16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/// A pair of bf16 as floats.
__device__ inline float low_of_pair(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_of_pair(std::uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000U); }

__device__ inline std::uint32_t magnitudes_of_pair(std::uint32_t pair) {
    std::uint32_t magnitudes;  // not `& 0x7FFF7FFF`, which the compiler makes one of each half
    asm("abs.bf16x2 %0, %1;" : "=r"(magnitudes) : "r"(pair));
    return magnitudes;
}

/// The values of a block as the numbers that GEMMs multiply, e2m1 * e4m3. `reciprocal` is 1 / global_scale.
class BlockQuantizer {
public:
    /// Of a block whose largest magnitude has these bits.
    __device__ static BlockQuantizer of_any(std::uint32_t largest, float global_scale, float reciprocal) {
        const float scale = block_scale_of(largest, global_scale, reciprocal);
        const float divisor = scale * global_scale;
        return {scale, divisor, 1.0F / divisor};
    }

    /// Without branches. Holds where is_usual() says so afterwards.
    __device__ static BlockQuantizer of_usual(std::uint32_t largest, float global_scale, float reciprocal) {
        const float sixth = divide_finite(__uint_as_float(largest), 6.0F, 1.0F / 6.0F);
        const float scale = round_to_e4m3(divide_finite(sixth, global_scale, reciprocal));
        const float divisor = scale * global_scale;
        return {scale, divisor, reciprocal_of_ordinary(divisor)};
    }
    __device__ bool is_usual(std::uint32_t largest, float global_scale) const {
        return is_ordinary(__uint_as_float(largest)) && is_ordinary(global_scale) && is_ordinary(divisor_);
    }
    /// What underflows in the division lies far below 1/4, half of the smallest code.
    __device__ float usual_value(float x) const {
        return rounded(divide_finite(x, divisor_, reciprocal_), x);
    }
    /// A pair of bf16 to one of fp16: what is the same for both is done for both at once.
    __device__ std::uint32_t usual_pair(std::uint32_t pair) const {
        const std::uint32_t magnitudes = magnitudes_of_pair(pair);
        const auto steps = [&](float x) { return round_to_step(divide_finite(x, divisor_, reciprocal_)); };
        const __half2 rounded =
            __floats2half2_rn(steps(low_of_pair(magnitudes)), steps(high_of_pair(magnitudes)));
        const __half2 scaled =
            __hmul2(__hmin2(rounded, __float2half2_rn(format::kE2m1Max)), __float2half2_rn(scale_));
        return reinterpret_cast<const std::uint32_t&>(scaled) | (pair & 0x80008000U);
    }

    /// NaN for a block with a NaN.
    __device__ float value(float x) const {
        if (is_ordinary(divisor_)) return rounded(divide(x, divisor_, reciprocal_), x);
        if (divisor_ == 0.0F || divisor_ != divisor_) return 0.0F * scale_;
        return rounded(x / divisor_, x);
    }
    __device__ std::uint32_t pair(std::uint32_t pair) const {
        return pack_pair<true>(value(low_of_pair(pair)), value(high_of_pair(pair)));
    }
    /// value(x) as a code; a block with a NaN has zeros.
    __device__ std::uint32_t code(float x) const {
        if (divisor_ == 0.0F || divisor_ != divisor_) return 0;
        const float q = is_ordinary(divisor_) ? divide(x, divisor_, reciprocal_) : x / divisor_;
        const float magnitude =
            round_to_e2m1(fabsf(q)) * 0x1p-126F;  // exponent and mantissa are the code's bits
        return __float_as_uint(magnitude) >> 22 | (__float_as_uint(x) >> 31) << 3;
    }
    __device__ std::uint8_t scale_byte() const {
        std::uint16_t pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(pair) : "f"(scale_));
        return static_cast<std::uint8_t>(pair & 0x7FU);
    }

private:
    __device__ BlockQuantizer(float scale, float divisor, float reciprocal)
        : scale_(scale), divisor_(divisor), reciprocal_(reciprocal) {}

    __device__ float rounded(float quotient, float sign) const {
        return copysignf(round_to_e2m1(fabsf(quotient)) * scale_, sign);
    }

    float scale_, divisor_, reciprocal_;
};

}  // namespace moe4::cuda
