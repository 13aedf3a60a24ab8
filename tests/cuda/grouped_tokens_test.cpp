// Tokens quantised for other engines on the device, byte for byte as on the host, what is not written too.
#include <gtest/gtest.h>

#include "cuda/device_tensor.hpp"
#include "moe4/grouped_tokens.hpp"
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

/// Poisoned; on the host or on the device.
template <class Memory>
struct Outputs {
    Outputs(const Rows& rows, std::int64_t max_padded)
        : codes(rows.row_token.size() * static_cast<std::size_t>(rows.cols) / 2),
          scales(swizzled_scale_bytes(max_padded, rows.cols / 16)),
          first_padded_row(static_cast<std::size_t>(rows.num_experts + 1) * 4) {}
    Memory codes, scales, first_padded_row;
};

struct HostMemory {
    explicit HostMemory(std::size_t size) : bytes(size, 0xFF) {}
    MutableTensorView view(DType dtype, Shape shape) { return {bytes.data(), dtype, shape, {}}; }
    std::vector<std::uint8_t> bytes;
};

template <class Memory>
BlockScaledRows views(Outputs<Memory>& out, const Rows& rows, std::int64_t max_padded) {
    const auto num_rows = static_cast<std::int64_t>(rows.row_token.size());
    const auto scale_bytes = static_cast<std::int64_t>(swizzled_scale_bytes(max_padded, rows.cols / 16));
    return {out.codes.view(DType::u8, {num_rows, rows.cols / 2}), out.scales.view(DType::u8, {scale_bytes}),
            out.first_padded_row.view(DType::i32, {rows.num_experts + 1})};
}

void expect_same_as_host(const Rows& rows) {
    const auto num_rows = static_cast<std::int64_t>(rows.row_token.size());
    const std::int64_t max_padded = max_padded_rows(num_rows, rows.num_experts);
    const std::vector<std::int32_t> count{static_cast<std::int32_t>(num_rows)};
    const auto num_tokens = static_cast<std::int64_t>(rows.hidden.size()) / rows.cols;
    Outputs<HostMemory> expected(rows, max_padded);
    quantize_grouped_tokens({{rows.hidden.data(), DType::bf16, {num_tokens, rows.cols}, {}},
                             {rows.row_token.data(), DType::i32, {num_rows}, {}},
                             {rows.row_expert.data(), DType::i32, {num_rows}, {}},
                             {count.data(), DType::i32, {1}, {}},
                             {rows.expert_scale.data(), DType::f32, {rows.num_experts}, {}}},
                            views(expected, rows, max_padded));
    const DeviceMemory hidden(rows.hidden);
    const DeviceMemory row_token(rows.row_token);
    const DeviceMemory row_expert(rows.row_expert);
    const DeviceMemory device_count(count);
    const DeviceMemory scale(rows.expert_scale);
    Outputs<DeviceMemory> found(rows, max_padded);
    quantize_grouped_tokens({hidden.view(DType::bf16, {num_tokens, rows.cols}),
                             row_token.view(DType::i32, {num_rows}), row_expert.view(DType::i32, {num_rows}),
                             device_count.view(DType::i32, {1}), scale.view(DType::f32, {rows.num_experts})},
                            views(found, rows, max_padded));
    EXPECT_EQ(found.codes.download<std::uint8_t>(), expected.codes.bytes);
    EXPECT_EQ(found.scales.download<std::uint8_t>(), expected.scales.bytes);
    EXPECT_EQ(found.first_padded_row.download<std::uint8_t>(), expected.first_padded_row.bytes);
}

TEST(GroupedTokens, AreTheHostsByteForByte) {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
    std::mt19937_64 random(seed());
    SCOPED_TRACE(seed_note());
    expect_same_as_host(random_rows(4096, 6, 700, random));
    expect_same_as_host(random_rows(208, 4, 130, random));    // 13 blocks: a padded column
    expect_same_as_host(random_rows(64, 1024, 300, random));  // most experts have no row
    expect_same_as_host(random_rows(128, 1, 1, random));
    expect_same_as_host(random_rows(64, 3, 0, random));
}

}  // namespace
}  // namespace moe4::testing
