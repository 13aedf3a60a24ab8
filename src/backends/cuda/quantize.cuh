#pragma once
// NVFP4 activations on the device. Kernels multiply e2m1 * e4m3 as one 16-bit number, which holds the product
// exactly; the global scale A meets the fp32 sum. Formulas: format/quantize.hpp.
#include <cuda_bf16.h>

#include <cstdint>

#include "format/bf16.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"

namespace moe4::cuda {

/// |x| as an integer that orders as |x| does, NaN above everything.
__device__ inline std::uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFF'FFFFU; }

inline constexpr std::uint32_t kInfinityBits = 0x7F80'0000U;

/// The e4m3 scale of a block whose largest magnitude has these bits.
__device__ inline std::uint8_t block_scale_of(std::uint32_t largest, float global_scale) {
    if (largest > kInfinityBits) return format::kE4m3NaN;
    if (global_scale == 0.0F) return 0;
    const float scale = __fdiv_rn(__fdiv_rn(__uint_as_float(largest), 6.0F), global_scale);
    return format::e4m3_encode(fminf(format::kE4m3Max, scale));
}

/// The codes of a block, as the numbers that GEMMs multiply.
class BlockQuantizer {
public:
    __device__ BlockQuantizer(std::uint32_t largest, float global_scale)
        : scale_(format::e4m3_decode(block_scale_of(largest, global_scale))),
          divisor_(scale_ * global_scale),
          reciprocal_(1.0F / divisor_),
          is_ordinary_(divisor_ > 0x1p-100F && divisor_ < 0x1p100F) {}

    /// e2m1 * e4m3, NaN for a block with a NaN.
    __device__ float value(float x) const { return e2m1_value(code(x)) * scale_; }

    __device__ std::uint8_t code(float x) const {
        if (divisor_ == 0.0F || divisor_ != divisor_) return 0;
        return format::e2m1_encode(is_ordinary_ ? quotient(x) : x / divisor_);
    }

private:
    /// x / divisor to the last bit wherever a code could change: with a correctly rounded reciprocal one step
    /// of Newton's rounds correctly (Markstein 1990), short of underflow, which the range of divisors leaves
    /// to quotients far below 1/4. An infinity would give a NaN on the way.
    __device__ float quotient(float x) const {
        const float q = x * reciprocal_;
        const float corrected = __fmaf_rn(__fmaf_rn(-q, divisor_, x), reciprocal_, q);
        return magnitude_bits(q) < kInfinityBits ? corrected : q;
    }
    /// The bits of a code are those of a float's exponent and mantissa, but for the bias.
    __device__ static float e2m1_value(std::uint8_t code) {
        return __uint_as_float((code & 8U) << 28 | (code & 7U) << 22) * 0x1p126F;
    }

    float scale_, divisor_, reciprocal_;
    bool is_ordinary_;
};

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

}  // namespace moe4::cuda
