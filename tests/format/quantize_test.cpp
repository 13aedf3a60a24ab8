// The quantisers on hand-computed blocks. On real matrices they are held to the tools' own bytes in
// tests/checkpoint.
#include "format/quantize.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "format/bf16.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"

namespace moe4::format {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
using Block = std::array<float, kNvfp4BlockSize>;

struct Quantized {
    std::uint8_t block_scale;
    std::array<std::uint8_t, kNvfp4BlockSize> codes;
};

Quantized quantize(const Block& block, float global_scale) {
    Quantized result{};
    result.codes.fill(0xCD);
    result.block_scale = quantize_activation_block(block.data(), global_scale, result.codes.data());
    return result;
}

TEST(QuantizeActivation, FollowsTheFormulaOnRandomBlocks) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (int repeat = 0; repeat < 20'000; ++repeat) {
        const float global_scale = std::exp2(normal(random) * 8 - 10);
        Block block;
        for (float& x : block) x = normal(random) * global_scale * 500;
        const auto [scale, codes] = quantize(block, global_scale);
        float amax = 0;
        for (const float x : block) amax = std::max(amax, std::fabs(x));
        volatile float sixth = amax / 6.0F;  // volatile: the two divisions are two roundings
        volatile float unrounded = sixth / global_scale;
        ASSERT_EQ(scale, e4m3_encode(std::min(448.0F, static_cast<float>(unrounded))));
        volatile float divisor = e4m3_decode(scale) * global_scale;
        for (std::size_t i = 0; i < block.size(); ++i) {
            volatile float quotient = block[i] / divisor;
            ASSERT_EQ(codes[i], e2m1_encode(quotient));
        }
    }
}

TEST(QuantizeActivation, GoldenBlock) {
    const Block block = {0,    .1F, -.2F, .3F,   .4F,  -.5F, .6F,   .7F,
                         -.8F, .9F, 1,    -1.1F, 1.2F, 1.3F, -1.4F, 1.5F};
    const auto [scale, codes] = quantize(block, 6.0F / 2688.0F);
    EXPECT_EQ(scale, 0x6E);
    const std::array<std::uint8_t, 8> expected = {0x10, 0x2A, 0xC3, 0x54, 0x6D, 0xE6, 0x76, 0x7F};
    for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_EQ(codes[2 * i] | (codes[2 * i + 1] << 4), expected[i]);
}

TEST(QuantizeActivation, ZeroesAndVanishingScales) {
    EXPECT_EQ(quantize(Block{}, 1.0F).block_scale, 0);
    Block block;
    block.fill(3.0F);
    const auto no_global = quantize(block, 0.0F);
    EXPECT_EQ(no_global.block_scale, 0);
    EXPECT_EQ(no_global.codes, (std::array<std::uint8_t, kNvfp4BlockSize>{}));
    block.fill(0x1p-20F);  // amax / 6 is under half of the smallest scale
    const auto tiny = quantize(block, 1.0F);
    EXPECT_EQ(tiny.block_scale, 0);
    EXPECT_EQ(tiny.codes, (std::array<std::uint8_t, kNvfp4BlockSize>{}));
    block.fill(0x1p-149F);  // s * A underflows: no division by zero
    const auto vanishing = quantize(block, 0x1p-149F);
    EXPECT_EQ(vanishing.codes, (std::array<std::uint8_t, kNvfp4BlockSize>{}));
}

TEST(QuantizeActivation, InfinitySaturatesAndNaNMarksTheBlock) {
    Block block;
    block.fill(1.0F);
    block[3] = -kInfinity;
    const auto infinite = quantize(block, 0.01F);
    EXPECT_EQ(infinite.block_scale, 0x7E);
    EXPECT_EQ(infinite.codes[3], 15);
    EXPECT_EQ(infinite.codes[0], e2m1_encode(1.0F / (448.0F * 0.01F)));
    block[9] = kNaN;
    EXPECT_EQ(quantize(block, 0.01F).block_scale, kE4m3NaN);
    EXPECT_EQ(quantize(block, 0.01F).codes, (std::array<std::uint8_t, kNvfp4BlockSize>{}));
}

std::vector<std::uint16_t> to_bf16(const Block& block) {
    std::vector<std::uint16_t> bits;
    for (const float x : block) bits.push_back(bf16_from_float(x));
    return bits;
}

TEST(QuantizeWeights, GoldenBlockOfBothTools) {
    const Block block = {0,    .1F, -.2F, .3F,   .4F,  -.5F, .6F,   .7F,
                         -.8F, .9F, 1,    -1.1F, 1.2F, 1.3F, -1.4F, 1.5F};
    const std::vector<std::uint8_t> expected = {0x10, 0x2A, 0xC3, 0x54, 0x6D, 0xE6, 0x76, 0x7F};
    for (const auto& matrix : {quantize_modelopt(to_bf16(block), 1, 16, 6.0F),
                               quantize_compressed_tensors(to_bf16(block), 1, 16, 6.0F)}) {
        EXPECT_EQ(matrix.block_scale[0], 0x6E);
        EXPECT_EQ(matrix.packed, expected);
    }
}

TEST(QuantizeWeights, TheToolsDifferOnOneBlock) {
    Block block{};
    block[5] = 1.4453125F;
    const float amax = 6.0F;
    EXPECT_EQ(quantize_modelopt(to_bf16(block), 1, 16, amax).block_scale[0], 0x6D);
    EXPECT_EQ(quantize_compressed_tensors(to_bf16(block), 1, 16, amax).block_scale[0], 0x6E);
}

TEST(QuantizeWeights, GlobalScales) {
    const std::vector<std::uint16_t> zeros(16);
    EXPECT_EQ(quantize_modelopt(zeros, 1, 16, 0.5F).stored_global_scale, 0.5F / 2688.0F);
    // bf16(bf16(1 / 0.3) * 2688): 1 / 0.30078125 = 3.3246... -> 3.328125, times 2688 = 8946 -> 8960.
    EXPECT_EQ(quantize_compressed_tensors(zeros, 1, 16, 0.30078125F).stored_global_scale, 8960.0F);
    EXPECT_EQ(quantize_compressed_tensors(zeros, 1, 16, 0.0F).stored_global_scale, 1.0F)
        << "an all-zero tensor";
}

TEST(QuantizeWeights, ZeroAndTinyBlocks) {
    const std::vector<std::uint16_t> zeros(16);
    EXPECT_EQ(quantize_modelopt(zeros, 1, 16, 6.0F).block_scale[0], 0x38) << "1.0";
    EXPECT_EQ(quantize_compressed_tensors(zeros, 1, 16, 6.0F).block_scale[0], 0x20) << "0.125";
    Block tiny{};
    tiny[0] = -0x1p-40F;
    EXPECT_EQ(quantize_modelopt(to_bf16(tiny), 1, 16, 6.0F).block_scale[0], 0x01) << "clamped up to 2^-9";
    EXPECT_EQ(quantize_modelopt(to_bf16(tiny), 1, 16, 6.0F).packed[0], 0x08) << "the sign of w < 0 survives";
    EXPECT_EQ(quantize_compressed_tensors(to_bf16(tiny), 1, 16, 6.0F).block_scale[0], 0x20);
}

TEST(QuantizeWeights, ModelOptDropsTheSignOfMinusZero) {
    Block block{};
    block[0] = -0.0F;
    block[1] = 1.0F;
    EXPECT_EQ(quantize_modelopt(to_bf16(block), 1, 16, 1.0F).packed[0] & 15, 0);
}

}  // namespace
}  // namespace moe4::format
