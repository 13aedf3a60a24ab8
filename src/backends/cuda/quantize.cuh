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

/// The code of x in a block with this scale.
__device__ inline std::uint8_t quantized_code(float x, std::uint8_t scale, float global_scale) {
    const float divisor = __fmul_rn(format::e4m3_decode(scale), global_scale);
    if (divisor == 0.0F || format::e4m3_is_nan(scale)) return 0;
    return format::e2m1_encode(__fdiv_rn(x, divisor));
}

/// e2m1 * e4m3, NaN for a block with a NaN.
__device__ inline float quantized_value(float x, std::uint8_t scale, float global_scale) {
    return format::e2m1_decode(quantized_code(x, scale, global_scale)) * format::e4m3_decode(scale);
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

}  // namespace moe4::cuda
