// dequantize with strides, the scale swizzle and its inverse, dtype facts.
#include "moe4/nvfp4.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "moe4/error.hpp"
#include "moe4/tensor.hpp"

namespace moe4 {
namespace {

TEST(Dequantize, RoundsTwiceAsTheToolsDoAndRespectsStrides) {
    constexpr int kRows = 5;
    constexpr int kCols = 48;
    constexpr int kPackedStride = 31;  // rows lie apart and nothing is aligned
    constexpr int kScaleStride = 5;
    std::mt19937 random(3);
    std::vector<std::uint8_t> packed(kRows * kPackedStride);
    std::vector<std::uint8_t> scales(kRows * kScaleStride);
    for (auto& byte : packed) byte = static_cast<std::uint8_t>(random());
    for (auto& byte : scales) byte = static_cast<std::uint8_t>(random() % 0x7F);
    for (const double global_scale : {static_cast<double>(0.0123F), 1.0 / 7776.0}) {
        const Nvfp4View view{packed.data(), scales.data(), global_scale, kRows,
                             kCols,         kPackedStride, kScaleStride};
        std::vector<float> out(kRows * kCols, -1e30F);
        dequantize(view, out.data());
        for (int row = 0; row < kRows; ++row) {
            for (int col = 0; col < kCols; ++col) {
                const std::uint8_t byte = packed[static_cast<std::size_t>(row * kPackedStride + col / 2)];
                const float code = e2m1_to_float(col % 2 == 0 ? byte & 15 : byte >> 4);
                const float scale =
                    e4m3_to_float(scales[static_cast<std::size_t>(row * kScaleStride + col / 16)]);
                // Both tools: fp32 product or quotient first, then times the code.
                volatile float effective =
                    global_scale < 0.001 ? scale / 7776.0F : scale * static_cast<float>(global_scale);
                ASSERT_EQ(out[static_cast<std::size_t>(row * kCols + col)], code * effective)
                    << row << "," << col;
            }
        }
    }
}

TEST(Swizzle, KnownOffsets) {
    EXPECT_EQ(swizzled_scale_offset(33, 5, 8), 533U);
    EXPECT_EQ(swizzled_scale_offset(129, 2, 8), 1042U);
    EXPECT_EQ(swizzled_scale_offset(0, 4, 6), 512U);
    EXPECT_EQ(swizzled_scale_bytes(129, 6), 2U * 2U * 512U);
    EXPECT_EQ(swizzled_scale_bytes(0, 6), 0U);
}

TEST(Swizzle, IsABijectionWithZeroPadding) {
    for (const auto& [rows, blocks] : {std::pair{1, 1}, {128, 4}, {130, 7}, {300, 116}, {192, 12}}) {
        std::vector<std::uint8_t> linear(static_cast<std::size_t>(rows) * static_cast<std::size_t>(blocks));
        for (std::size_t i = 0; i < linear.size(); ++i) linear[i] = static_cast<std::uint8_t>(1 + i % 255);
        std::vector<std::uint8_t> swizzled(swizzled_scale_bytes(rows, blocks), 0xEE);
        swizzle_scales(linear.data(), rows, blocks, swizzled.data());
        std::set<std::size_t> offsets;
        for (int row = 0; row < rows; ++row) {
            for (int block = 0; block < blocks; ++block)
                offsets.insert(swizzled_scale_offset(row, block, blocks));
        }
        EXPECT_EQ(offsets.size(), linear.size());
        for (std::size_t i = 0; i < swizzled.size(); ++i) EXPECT_EQ(swizzled[i] != 0, offsets.contains(i));
        std::vector<std::uint8_t> back(linear.size(), 0xEE);
        unswizzle_scales(swizzled.data(), rows, blocks, back.data());
        EXPECT_EQ(back, linear);
    }
}

TEST(DType, NamesAndSizes) {
    for (int i = 0; i <= static_cast<int>(DType::u64); ++i) {
        const auto dtype = static_cast<DType>(i);
        EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
        EXPECT_GE(dtype_bits(dtype), 4);
    }
    EXPECT_EQ(dtype_name(DType::f8_e4m3), "F8_E4M3");
    EXPECT_EQ(dtype_bits(DType::c64), 64);
    EXPECT_EQ(dtype_from_name("F128"), std::nullopt);
}

TEST(Shape, CountsElements) {
    EXPECT_EQ(Shape{}.num_elements(), 1);
    EXPECT_EQ((Shape{3, 0, 5}.num_elements()), 0);
    EXPECT_EQ((Shape{64, 2048}.to_string()), "[64, 2048]");
    EXPECT_THROW((Shape{1, 1, 1, 1, 1, 1, 1, 1, 1}), Error);
}

}  // namespace
}  // namespace moe4
