// The numbers that the GEMMs multiply, bit for bit the products of the host's codes and scales: the quantiser
// without branches, which encodes x and h, for every bf16 as a block's largest magnitude.
#include <gtest/gtest.h>

#include "backends/cuda/k_order.hpp"
#include "backends/cuda/smxx/arrange.hpp"
#include "cuda/device_tensor.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"
#include "format/quantize.hpp"

namespace moe4::testing {
namespace {

constexpr std::int64_t kCols = 256;
constexpr std::int64_t kBlocks = kCols / 16;
constexpr std::int64_t kTokens = 65536 / kBlocks;

/// Block i's largest value has the bits i; the others are smaller, many of them ties between two codes.
std::vector<std::uint16_t> hidden_of_all_magnitudes(std::mt19937_64& random) {
    std::uniform_real_distribution<float> fraction(-1.0F, 1.0F);
    std::vector<std::uint16_t> hidden;
    for (std::uint32_t block = 0; block < 65536; ++block) {
        const float largest = format::bf16_to_float(static_cast<std::uint16_t>(block));
        const auto place = random() % 16;
        for (std::uint32_t i = 0; i < 16; ++i) {
            const float twelfths = static_cast<float>(static_cast<int>(random() % 49) - 24) / 24.0F;
            const float x = largest * (i % 2 == 0 ? twelfths : fraction(random));
            hidden.push_back(i == place ? static_cast<std::uint16_t>(block) : format::bf16_from_float(x));
        }
    }
    return hidden;
}

/// Scales with which a token's blocks take scales from below the smallest to above the largest e4m3.
std::vector<float> scales_of_tokens(std::mt19937_64& random) {
    std::uniform_real_distribution<float> exponent(-14.0F, 12.0F);
    std::vector<float> scales;
    for (std::uint32_t token = 0; token < kTokens; ++token) {
        const float largest = std::fabs(format::bf16_to_float(static_cast<std::uint16_t>(token * kBlocks)));
        const float power = exponent(random);
        const float scale = largest * std::exp2(token % 2 == 0 ? power : std::round(power));
        scales.push_back(std::isfinite(scale) ? scale : 1.0F);
    }
    return scales;
}

std::vector<std::uint16_t> encode_on_device(const std::vector<std::uint16_t>& hidden,
                                            const std::vector<float>& scales) {
    const DeviceMemory ids(std::vector<std::int32_t>(kTokens, 0));
    const DeviceMemory counts(2 * sizeof(std::int32_t));
    const DeviceMemory segments(sizeof(cuda::Segment));
    const DeviceMemory slot_row(kTokens * sizeof(std::int32_t));
    const DeviceMemory hidden_memory(hidden);
    const DeviceMemory scale_memory(scales);
    const DeviceMemory rows(hidden.size() * sizeof(std::uint16_t));
    auto* const num_segments = static_cast<std::int32_t*>(counts.data());
    cuda::group_and_encode({.top_k_ids = static_cast<const std::int32_t*>(ids.data()),
                            .num_slots = kTokens,
                            .top_k = 1,
                            .first_expert = 0,
                            .num_held = 1,
                            .largest_segment = kTokens,
                            .cleared = nullptr,
                            .num_cleared = 0,
                            .out = {.num_segments = num_segments,
                                    .num_rows = num_segments + 1,
                                    .segments = static_cast<cuda::Segment*>(segments.data()),
                                    .row_token = nullptr,
                                    .slot_row = static_cast<std::int32_t*>(slot_row.data())}},
                           {.hidden = static_cast<const std::uint16_t*>(hidden_memory.data()),
                            .rows = static_cast<std::uint16_t*>(rows.data()),
                            .cols = kCols,
                            .num_tokens = kTokens,
                            .quantizes = true,
                            .token_scale = static_cast<const float*>(scale_memory.data()),
                            .expert_scale = nullptr,
                            .scales_by_expert = false,
                            .padded_rows = nullptr,
                            .padded_cols = 0,
                            .num_padded_rows = 0},
                           nullptr);
    return rows.download<std::uint16_t>();
}

TEST(EncodedRows, AreTheHostsBitForBit) {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
    std::mt19937_64 random(seed());
    SCOPED_TRACE(seed_note());
    const std::vector<std::uint16_t> hidden = hidden_of_all_magnitudes(random);
    const std::vector<float> scales = scales_of_tokens(random);
    const std::vector<std::uint16_t> found = encode_on_device(hidden, scales);
    int num_wrong = 0;
    for (std::int64_t block = 0; block < kTokens * kBlocks; ++block) {
        float x[16];
        std::uint8_t codes[16];
        for (std::int64_t i = 0; i < 16; ++i)
            x[i] = format::bf16_to_float(hidden[static_cast<std::size_t>(block * 16 + i)]);
        const float scale = scales[static_cast<std::size_t>(block / kBlocks)];
        const float block_scale = format::e4m3_decode(format::quantize_activation_block(x, scale, codes));
        for (int i = 0; i < 16; ++i) {
            const int k = static_cast<int>(block % kBlocks) * 16 + i;
            const float number = format::f16_to_float(
                found[static_cast<std::size_t>(block / kBlocks * kCols + cuda::permuted_position(k))]);
            const float expected = format::e2m1_decode(codes[i]) * block_scale;
            if (number == expected || (std::isnan(number) && std::isnan(expected))) continue;
            if (++num_wrong <= 5)
                ADD_FAILURE() << "block with largest bits " << block << ", scale " << scale << ", x " << x[i]
                              << ": " << number << " for " << expected;
        }
    }
    EXPECT_EQ(num_wrong, 0);
}

}  // namespace
}  // namespace moe4::testing
