#pragma once
// The NVFP4 format: what the bytes of a matrix mean. Every kernel is tested against this page.
#include <cstddef>
#include <cstdint>

namespace moe4 {

inline constexpr int kNvfp4BlockSize = 16;  // consecutive values of a row that share one e4m3 scale

/// One NVFP4 matrix [rows, cols] where a checkpoint left it; cols is a multiple of 16.
///     value(r, c) = e2m1(code(r, c)) * e4m3(block_scale(r, c / 16)) * global_scale
/// The even column is the low nibble. global_scale always multiplies: of a dialect that stores the divisor g
/// it is 1/g in double precision, which loses nothing. Rows may lie apart (interleaved or sliced matrices).
struct Nvfp4View {
    const std::uint8_t* packed = nullptr;       // e2m1 codes, two a byte: row r at packed + r * packed_stride
    const std::uint8_t* block_scale = nullptr;  // e4m3: row r at block_scale + r * scale_stride
    double global_scale = 1.0;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    std::int64_t packed_stride = 0;  // bytes, at least cols / 2
    std::int64_t scale_stride = 0;   // bytes, at least cols / 16
    std::size_t num_bytes() const { return static_cast<std::size_t>(rows * (cols / 2 + cols / 16)); }
};

float e2m1_to_float(std::uint8_t code);  // bits 3..0: sign, exponent, mantissa; the rest is ignored
float e4m3_to_float(std::uint8_t byte);  // 0x7F and 0xFF are NaN; there is no infinity

/// out[rows, cols] = f32(e2m1 * f32(e4m3 * global_scale)): the two roundings that ModelOpt and
/// compressed-tensors make, bit for bit. The compute path makes neither.
void dequantize(const Nvfp4View& matrix, float* out);

/// Where scale (row, block) lies in the 128x4-blocked layout that cuBLASLt, CUTLASS and FlashInfer read:
/// rows padded to 128 and blocks to 4; see swizzled_scale_bytes.
std::size_t swizzled_scale_offset(std::int64_t row, std::int64_t block, std::int64_t num_blocks);
std::size_t swizzled_scale_bytes(std::int64_t rows, std::int64_t num_blocks);
/// linear [rows, num_blocks] -> swizzled [swizzled_scale_bytes], padding zeroed; and back.
void swizzle_scales(const std::uint8_t* linear, std::int64_t rows, std::int64_t num_blocks,
                    std::uint8_t* swizzled);
void unswizzle_scales(const std::uint8_t* swizzled, std::int64_t rows, std::int64_t num_blocks,
                      std::uint8_t* linear);

}  // namespace moe4
