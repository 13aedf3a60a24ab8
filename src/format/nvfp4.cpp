#include "moe4/nvfp4.hpp"

#include <algorithm>

#include "format/e2m1.hpp"
#include "format/e4m3.hpp"

namespace moe4 {

float e2m1_to_float(std::uint8_t code) { return format::e2m1_decode(code); }
float e4m3_to_float(std::uint8_t byte) { return format::e4m3_decode(byte); }

void dequantize(const Nvfp4View& matrix, float* out) {
    for (std::int64_t row = 0; row < matrix.rows; ++row) {
        const std::uint8_t* packed = matrix.packed + row * matrix.packed_stride;
        const std::uint8_t* scales = matrix.block_scale + row * matrix.scale_stride;
        for (std::int64_t block = 0; block < matrix.cols / kNvfp4BlockSize; ++block) {
            const double exact_scale =
                static_cast<double>(format::e4m3_decode(scales[block])) * matrix.global_scale;
            const auto scale = static_cast<float>(exact_scale);
            for (int i = 0; i < kNvfp4BlockSize / 2; ++i) {
                const std::uint8_t byte = *packed++;
                *out++ = format::e2m1_decode(byte) * scale;
                *out++ = format::e2m1_decode(byte >> 4) * scale;
            }
        }
    }
}

namespace {
constexpr std::int64_t kSwizzleRows = 128;
constexpr std::int64_t kSwizzleBlocks = 4;
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
}  // namespace

// Source: cuBLAS documentation, "Block scaling factors layout": tiles of 128 x 4, in each 32 rows of 16
// bytes.
std::size_t swizzled_scale_offset(std::int64_t row, std::int64_t block, std::int64_t num_blocks) {
    const std::int64_t tile =
        row / kSwizzleRows * ceil_div(num_blocks, kSwizzleBlocks) + block / kSwizzleBlocks;
    return static_cast<std::size_t>(tile * 512 + row % 32 * 16 + row % kSwizzleRows / 32 * 4 +
                                    block % kSwizzleBlocks);
}

std::size_t swizzled_scale_bytes(std::int64_t rows, std::int64_t num_blocks) {
    return static_cast<std::size_t>(ceil_div(rows, kSwizzleRows) * ceil_div(num_blocks, kSwizzleBlocks) *
                                    512);
}

void swizzle_scales(const std::uint8_t* linear, std::int64_t rows, std::int64_t num_blocks,
                    std::uint8_t* swizzled) {
    std::fill_n(swizzled, swizzled_scale_bytes(rows, num_blocks), std::uint8_t{0});
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            swizzled[swizzled_scale_offset(row, block, num_blocks)] = *linear++;
        }
    }
}

void unswizzle_scales(const std::uint8_t* swizzled, std::int64_t rows, std::int64_t num_blocks,
                      std::uint8_t* linear) {
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            *linear++ = swizzled[swizzled_scale_offset(row, block, num_blocks)];
        }
    }
}

}  // namespace moe4
