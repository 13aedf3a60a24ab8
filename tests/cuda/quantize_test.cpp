// The device's quantiser and its blocked scales, bit for bit against the host's.
#include "backends/cuda/smxx/quantize.hpp"

#include <gtest/gtest.h>

#include "cuda/device_tensor.hpp"
#include "format/quantize.hpp"
#include "moe4/nvfp4.hpp"

namespace moe4::testing {
namespace {

struct Rows {
    std::vector<std::uint16_t> hidden;
    std::vector<std::int32_t> row_token, row_expert;
    std::vector<float> expert_scale;
    std::int64_t cols = 0;
    int num_experts = 0;
};

/// Values of all magnitudes, ties of the codes among them, and a few that are not finite.
Rows random_rows(std::int64_t cols, int num_experts, int num_rows, std::mt19937_64& random) {
    Rows rows;
    rows.cols = cols;
    rows.num_experts = num_experts;
    constexpr int kTokens = 40;
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-12, 12);
    for (std::int64_t i = 0; i < kTokens * cols; ++i) {
        const float x = i % 3 == 0 ? 0.25F * static_cast<float>(static_cast<int>(random() % 49) - 24)
                                   : std::ldexp(normal(random), i % 64 == 1 ? exponent(random) : 0);
        rows.hidden.push_back(format::bf16_from_float(x));
    }
    rows.hidden[3] = 0x7FC0;                                       // NaN
    rows.hidden[static_cast<std::size_t>(cols) + 20] = 0x7F80;     // infinity
    rows.hidden[static_cast<std::size_t>(cols) * 2 + 1] = 0xFF80;  // -infinity
    std::fill_n(rows.hidden.begin() + cols * 3, 32, std::uint16_t{0x8000});
    std::fill_n(rows.hidden.begin() + cols * 4, 32, std::uint16_t{0x0001});
    for (int i = 0; i < num_rows; ++i) {
        rows.row_token.push_back(i < kTokens ? i : static_cast<std::int32_t>(random() % kTokens));
        rows.row_expert.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(num_experts)));
    }
    std::sort(rows.row_expert.begin(), rows.row_expert.end());
    for (int e = 0; e < num_experts; ++e)
        rows.expert_scale.push_back(e % 3 == 0 ? 1.0F : (0.5F + static_cast<float>(random() % 1000)) / 1e5F);
    return rows;
}

void expect_same_as_host(const Rows& rows) {
    const auto num_rows = static_cast<std::int64_t>(rows.row_token.size());
    const std::int64_t num_blocks = rows.cols / 16;
    const std::int64_t most = cuda::most_padded_rows(num_rows, rows.num_experts);
    const DeviceMemory hidden(rows.hidden);
    const DeviceMemory row_token(rows.row_token);
    const DeviceMemory row_expert(rows.row_expert);
    const DeviceMemory count(std::vector<std::int32_t>{static_cast<std::int32_t>(num_rows)});
    const DeviceMemory scale(rows.expert_scale);
    const DeviceMemory codes(static_cast<std::size_t>(num_rows * rows.cols / 2));
    const DeviceMemory scales(swizzled_scale_bytes(most, num_blocks));
    const DeviceMemory first(static_cast<std::size_t>(rows.num_experts + 1) * 4);
    cuda::quantize_and_swizzle({.hidden = static_cast<const std::uint16_t*>(hidden.data()),
                                .cols = rows.cols,
                                .row_token = static_cast<const std::int32_t*>(row_token.data()),
                                .row_expert = static_cast<const std::int32_t*>(row_expert.data()),
                                .num_rows = static_cast<const std::int32_t*>(count.data()),
                                .max_rows = num_rows,
                                .num_experts = rows.num_experts,
                                .expert_scale = static_cast<const float*>(scale.data()),
                                .codes = static_cast<std::uint8_t*>(codes.data()),
                                .scales = static_cast<std::uint8_t*>(scales.data()),
                                .first_padded_row = static_cast<std::int32_t*>(first.data())},
                               nullptr);
    const auto found_codes = codes.download<std::uint8_t>();
    const auto found_scales = scales.download<std::uint8_t>();
    const auto found_first = first.download<std::int32_t>();

    std::int64_t padded_row = 0;
    std::int64_t row = 0;
    std::size_t differing_codes = 0;
    for (int e = 0; e < rows.num_experts; ++e) {
        EXPECT_EQ(found_first[static_cast<std::size_t>(e)], padded_row) << "expert " << e;
        std::vector<std::uint8_t> linear;
        std::int64_t n = 0;
        for (; row < num_rows && rows.row_expert[static_cast<std::size_t>(row)] == e; ++row, ++n) {
            for (std::int64_t block = 0; block < num_blocks; ++block) {
                float x[16];
                std::uint8_t expected[16];
                const std::int64_t at =
                    rows.row_token[static_cast<std::size_t>(row)] * rows.cols + block * 16;
                for (int i = 0; i < 16; ++i)
                    x[i] = format::bf16_to_float(rows.hidden[static_cast<std::size_t>(at + i)]);
                linear.push_back(format::quantize_activation_block(
                    x, rows.expert_scale[static_cast<std::size_t>(e)], expected));
                for (int i = 0; i < 16; ++i) {
                    const std::uint8_t byte =
                        found_codes[static_cast<std::size_t>(row * rows.cols / 2 + block * 8 + i / 2)];
                    const std::uint8_t found = i % 2 == 0 ? byte & 15U : byte >> 4;
                    differing_codes += found != expected[i] && (found & 7U) + (expected[i] & 7U) != 0;
                }
            }
        }
        if (n == 0) continue;
        std::vector<std::uint8_t> expected(swizzled_scale_bytes(n, num_blocks));
        swizzle_scales(linear.data(), n, num_blocks, expected.data());
        const auto begin =
            found_scales.begin() + static_cast<std::ptrdiff_t>(swizzled_scale_bytes(padded_row, num_blocks));
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), begin)) << "scales of expert " << e;
        padded_row += (n + 127) / 128 * 128;
    }
    EXPECT_EQ(found_first.back(), padded_row);
    EXPECT_EQ(differing_codes, 0U) << "of " << num_rows * rows.cols;
}

TEST(SwizzledScales, AreTheHostsBitForBit) {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
    std::mt19937_64 random(seed());
    SCOPED_TRACE(seed_note());
    expect_same_as_host(random_rows(4096, 6, 700, random));
    expect_same_as_host(random_rows(208, 4, 130, random));    // 13 blocks: a padded column
    expect_same_as_host(random_rows(64, 1024, 300, random));  // most experts have no row
    expect_same_as_host(random_rows(128, 1, 1, random));
}

}  // namespace
}  // namespace moe4::testing
