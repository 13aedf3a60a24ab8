#include "format/quantize.hpp"

#include <algorithm>
#include <cmath>

#include "format/bf16.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"

namespace moe4::format {

std::uint8_t quantize_activation_block(const float x[kNvfp4BlockSize], float global_scale,
                                       std::uint8_t codes[kNvfp4BlockSize]) {
    std::fill_n(codes, kNvfp4BlockSize, std::uint8_t{0});
    float amax = 0.0F;
    for (int i = 0; i < kNvfp4BlockSize; ++i) {
        if (std::isnan(x[i])) return kE4m3NaN;
        amax = std::max(amax, std::fabs(x[i]));
    }
    if (global_scale == 0.0F) return 0;
    const std::uint8_t block_scale = e4m3_encode(std::min(kE4m3Max, amax / 6.0F / global_scale));
    const float scale = e4m3_decode(block_scale) * global_scale;
    if (scale == 0.0F) return block_scale;
    for (int i = 0; i < kNvfp4BlockSize; ++i) codes[i] = e2m1_encode(x[i] / scale);
    return block_scale;
}

float largest_magnitude(std::span<const std::uint16_t> bf16) {
    float amax = 0.0F;
    for (const std::uint16_t bits : bf16) amax = std::max(amax, std::fabs(bf16_to_float(bits)));
    return amax;
}

namespace {

/// Walks the blocks of a matrix; block(values, row, block) returns the scale byte and the number to divide
/// by.
template <class BlockScale>
Nvfp4Matrix quantize_blocks(std::span<const std::uint16_t> bf16, std::int64_t rows, std::int64_t cols,
                            BlockScale block_scale, std::uint8_t (*encode)(float value, float divisor)) {
    Nvfp4Matrix matrix{.rows = rows, .cols = cols, .packed = {}, .block_scale = {}};
    matrix.packed.reserve(bf16.size() / 2);
    matrix.block_scale.reserve(bf16.size() / kNvfp4BlockSize);
    for (std::size_t first = 0; first < bf16.size(); first += kNvfp4BlockSize) {
        const auto block = bf16.subspan(first, kNvfp4BlockSize);
        const auto [scale, divisor] = block_scale(largest_magnitude(block));
        matrix.block_scale.push_back(scale);
        for (std::size_t i = 0; i < kNvfp4BlockSize; i += 2) {
            const std::uint8_t low = encode(bf16_to_float(block[i]), divisor);
            const std::uint8_t high = encode(bf16_to_float(block[i + 1]), divisor);
            matrix.packed.push_back(static_cast<std::uint8_t>(low | (high << 4)));
        }
    }
    return matrix;
}

struct ScaleAndDivisor {
    std::uint8_t scale;
    float divisor;
};

}  // namespace

Nvfp4Matrix quantize_modelopt(std::span<const std::uint16_t> bf16, std::int64_t rows, std::int64_t cols,
                              float amax) {
    const float global_scale = amax / 2688.0F;
    auto matrix = quantize_blocks(
        bf16, rows, cols,
        [global_scale](float block_amax) -> ScaleAndDivisor {
            float scale = block_amax / (6.0F * global_scale);
            if (block_amax == 0.0F) scale = 1.0F;
            const std::uint8_t byte = e4m3_encode(std::clamp(scale, 0x1p-9F, kE4m3Max));
            return {byte, e4m3_decode(byte) * global_scale};
        },
        [](float value, float divisor) -> std::uint8_t {
            const std::uint8_t code = e2m1_encode(value / divisor);
            return value < 0 ? code : code & 7U;
        });
    matrix.stored_global_scale = global_scale;
    return matrix;
}

Nvfp4Matrix quantize_compressed_tensors(std::span<const std::uint16_t> bf16, std::int64_t rows,
                                        std::int64_t cols, float amax) {
    const auto round_to_bf16 = [](float x) { return bf16_to_float(bf16_from_float(x)); };
    constexpr float kTiny = 0x1p-126F;  // torch.finfo(bfloat16).tiny
    float global_scale = round_to_bf16(round_to_bf16(1.0F / std::max(amax, kTiny)) * 2688.0F);
    if (!std::isfinite(global_scale)) global_scale = 1.0F;
    auto matrix = quantize_blocks(
        bf16, rows, cols,
        [&](float block_amax) -> ScaleAndDivisor {
            const float scale = round_to_bf16(block_amax / 6.0F) * global_scale;
            std::uint8_t byte = e4m3_encode(std::min(scale, kE4m3Max));
            if (byte == 0) byte = e4m3_encode(0.125F);
            return {byte, e4m3_decode(byte) / global_scale};
        },
        [](float value, float divisor) -> std::uint8_t {
            return e2m1_encode(std::clamp(value / divisor, -kE2m1Max, kE2m1Max));
        });
    matrix.stored_global_scale = global_scale;
    return matrix;
}

}  // namespace moe4::format
