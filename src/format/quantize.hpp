#pragma once
// The quantisers: one of activations, which is moe4's own contract, and one for each tool that writes
// checkpoints.
#include <cstdint>
#include <span>
#include <vector>

#include "moe4/nvfp4.hpp"

namespace moe4::format {

/// Global scale of the dynamic activation modes: largest_magnitude / (6 * 448), in fp32.
constexpr float dynamic_global_scale(float largest_magnitude) { return largest_magnitude / 2688.0F; }

/// One block of activations, all in fp32, divisions IEEE:
///     amax = max |x|;  s = e4m3(min(448, (amax / 6) / A));  code = e2m1(x / (s * A))
/// s == 0, A == 0 or s * A == 0 -> all codes 0. An infinity saturates (s = 448, code 6). A NaN makes s =
/// 0x7F, so that whatever it meets is NaN, and all codes 0. Writes one code (4 bits) a byte; returns the
/// scale's byte.
std::uint8_t quantize_activation_block(const float x[kNvfp4BlockSize], float global_scale,
                                       std::uint8_t codes[kNvfp4BlockSize]);

/// An NVFP4 matrix that owns its bytes.
struct Nvfp4Matrix {
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    std::vector<std::uint8_t> packed;       // [rows, cols / 2]
    std::vector<std::uint8_t> block_scale;  // [rows, cols / 16]
    float stored_global_scale =
        1.0F;  // as the tool stores it: ModelOpt multiplies, compressed-tensors divides
};

/// ModelOpt 0.47 (NVFP4QTensor.quantize), from bf16:
///     s2 = amax / 2688;  bs = e4m3(clamp(amax_block / (6 * s2), 2^-9, 448)), an all-zero block gets 1.0;
///     code = e2m1(w / f32(bs * s2)), -0 and tiny negatives keep the sign only of w < 0
/// `amax` is of the whole tensor, or of what shares its global scale (ModelOpt: gate and up).
Nvfp4Matrix quantize_modelopt(std::span<const std::uint16_t> bf16, std::int64_t rows, std::int64_t cols,
                              float amax);

/// compressed-tensors 0.19 (NVFP4 pack-quantized, memoryless min-max), from bf16:
///     g = bf16(bf16(1 / amax) * 2688);  bs = e4m3(clamp(bf16(amax_block / 6) * g, 448)), 0 becomes 0.125;
///     code = e2m1(clamp(w / f32(bs / g), 6))
Nvfp4Matrix quantize_compressed_tensors(std::span<const std::uint16_t> bf16, std::int64_t rows,
                                        std::int64_t cols, float amax);

float largest_magnitude(std::span<const std::uint16_t> bf16);

}  // namespace moe4::format
