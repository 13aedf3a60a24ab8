// Tokens quantised for other engines, on the host: against the quantiser and the layout of nvfp4.hpp.
#include "moe4/grouped_tokens.hpp"

#include <gtest/gtest.h>

#include "conformance/random_layer.hpp"
#include "expect_error.hpp"
#include "format/bf16.hpp"
#include "format/quantize.hpp"

namespace moe4::testing {
namespace {

constexpr std::int64_t kTokens = 9;
constexpr std::int64_t kCols = 80;  // five blocks: the last of eight columns of scales are padding
constexpr std::int64_t kBlocks = kCols / 16;

/// 300 rows of five experts, of which one has none and one has more than 128; five rows are not counted.
class GroupedTokensTest : public ::testing::Test {
protected:
    GroupedTokensTest() : random_(seed()) {
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < kTokens * kCols; ++i)
            hidden_.push_back(format::bf16_from_float(normal(random_)));
        for (const auto& [expert, rows] : {std::pair{0, 3}, {1, 200}, {3, 96}, {4, 1}}) {
            row_expert_.insert(row_expert_.end(), static_cast<std::size_t>(rows), expert);
        }
        count_ = {static_cast<std::int32_t>(row_expert_.size())};
        row_expert_.resize(row_expert_.size() + 5, 0);
        for (std::size_t i = 0; i < row_expert_.size(); ++i)
            row_token_.push_back(static_cast<std::int32_t>(random_() % kTokens));
        const auto max_padded = max_padded_rows(num_rows(), kExperts);
        codes_.assign(row_token_.size() * kCols / 2, 0xFF);
        scales_.assign(swizzled_scale_bytes(max_padded, kBlocks), 0xFF);
        first_padded_row_.assign(kExperts + 1, -1);
    }

    static constexpr std::int64_t kExperts = 5;
    std::int64_t num_rows() const { return static_cast<std::int64_t>(row_token_.size()); }
    GroupedTokens tokens() const {
        return {{hidden_.data(), DType::bf16, {kTokens, kCols}, {}},
                {row_token_.data(), DType::i32, {num_rows()}, {}},
                {row_expert_.data(), DType::i32, {num_rows()}, {}},
                {count_.data(), DType::i32, {1}, {}},
                {expert_scale_.data(), DType::f32, {kExperts}, {}}};
    }
    BlockScaledRows out() {
        return {{codes_.data(), DType::u8, {num_rows(), kCols / 2}, {}},
                {scales_.data(), DType::u8, {static_cast<std::int64_t>(scales_.size())}, {}},
                {first_padded_row_.data(), DType::i32, {kExperts + 1}, {}}};
    }

    std::mt19937_64 random_;
    std::vector<std::uint16_t> hidden_;
    std::vector<std::int32_t> row_token_, row_expert_, count_, first_padded_row_;
    std::vector<float> expert_scale_{0.001F, 0.0007F, 1.0F, 0.002F, 0.0F};
    std::vector<std::uint8_t> codes_, scales_;
};

TEST_F(GroupedTokensTest, HaveTheCodesAndTheScalesOfTheQuantiserWhereTheLayoutPutsThem) {
    SCOPED_TRACE(seed_note());
    quantize_grouped_tokens(tokens(), out());
    EXPECT_EQ(first_padded_row_, (std::vector<std::int32_t>{0, 128, 384, 384, 512, 640}));
    std::int64_t first_of_expert = 0;
    for (std::int64_t row = 0; row < count_[0]; ++row) {
        const auto r = static_cast<std::size_t>(row);
        const auto expert = static_cast<std::size_t>(row_expert_[r]);
        if (row > 0 && row_expert_[r] != row_expert_[r - 1]) first_of_expert = row;
        for (std::int64_t block = 0; block < kBlocks; ++block) {
            float x[16];
            std::uint8_t codes[16];
            for (int i = 0; i < 16; ++i)
                x[i] = format::bf16_to_float(
                    hidden_[static_cast<std::size_t>(row_token_[r] * kCols + block * 16 + i)]);
            const std::uint8_t scale = format::quantize_activation_block(x, expert_scale_[expert], codes);
            const std::int64_t padded = first_padded_row_[expert] + row - first_of_expert;
            EXPECT_EQ(scales_[swizzled_scale_offset(padded, block, kBlocks)], scale) << row << " " << block;
            for (int i = 0; i < 16; ++i) {
                const std::uint8_t byte =
                    codes_[static_cast<std::size_t>((row * kCols + block * 16 + i) / 2)];
                EXPECT_EQ(i % 2 == 0 ? byte & 15 : byte >> 4, codes[i]) << row << " " << block << " " << i;
            }
        }
    }
}

TEST_F(GroupedTokensTest, PaddingIsZeroAndWhatIsBehindIsLeftAlone) {
    quantize_grouped_tokens(tokens(), out());
    EXPECT_EQ(scales_[swizzled_scale_offset(3, 0, kBlocks)], 0);  // behind expert 0's rows
    EXPECT_EQ(scales_[swizzled_scale_offset(130, 7, 8)], 0);      // behind the fifth block
    EXPECT_EQ(scales_[swizzled_scale_offset(640, 0, kBlocks)], 0xFF);
    EXPECT_EQ(codes_[static_cast<std::size_t>(count_[0] * kCols / 2)], 0xFF);
}

TEST_F(GroupedTokensTest, RefusalsNameTheTensor) {
    const auto expect_refusal = [&](const char* sentence, const auto& change) {
        GroupedTokens in = tokens();
        BlockScaledRows rows = out();
        change(in, rows);
        test::expect_error(ErrorKind::invalid_argument, [&] { quantize_grouped_tokens(in, rows); }, sentence);
    };
    expect_refusal("row_expert is I32 [3] in host memory, expected I32 [305] in host memory",
                   [](auto& in, auto&) { in.row_expert.shape = {3}; });
    expect_refusal("hidden is [9, 72], expected a hidden_size that is a multiple of 16",
                   [](auto& in, auto&) { in.hidden.shape = {kTokens, 72}; });
    expect_refusal("scales is U8 [128] in host memory, expected U8 [8192] in host memory",
                   [](auto&, auto& rows) { rows.scales.shape = {128}; });
    expect_refusal("codes is U8 [305, 40] on GPU 0, expected U8 [305, 40] in host memory",
                   [](auto&, auto& rows) { rows.codes.device = {DeviceType::cuda, 0}; });
}

}  // namespace
}  // namespace moe4::testing
