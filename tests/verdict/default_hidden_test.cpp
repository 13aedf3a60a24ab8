// The input that layertest makes for itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "moe4/layertest.hpp"
#include "quantized_layer.hpp"

namespace moe4 {
namespace {

constexpr std::int64_t kTokens = 256;

std::vector<double> as_numbers(const std::vector<std::uint16_t>& bf16) {
    std::vector<double> values;
    for (const auto bits : bf16) values.push_back(static_cast<double>(format::bf16_to_float(bits)));
    return values;
}

TEST(DefaultHidden, IsStandardNormalWhereNothingLimitsIt) {
    QuantizedLayer layer(1);
    for (auto& expert : layer.weights.experts) expert.gate.input_scale = expert.up.input_scale = std::nullopt;
    const auto x = as_numbers(default_hidden(layer.weights, kTokens, 0));
    ASSERT_EQ(x.size(), 256U * 64U);
    double sum = 0;
    double squares = 0;
    double fourth = 0;
    for (const double value : x) {
        sum += value;
        squares += value * value;
        fourth += value * value * value * value;
    }
    const auto n = static_cast<double>(x.size());
    EXPECT_NEAR(sum / n, 0.0, 0.03);
    EXPECT_NEAR(squares / n, 1.0, 0.04);
    EXPECT_NEAR(fourth / n, 3.0, 0.3);
}

TEST(DefaultHidden, ItsBitsAreThoseOfTheSeed) {
    const QuantizedLayer layer(1);
    const auto hidden = default_hidden(layer.weights, 2, 0);
    EXPECT_EQ(hidden, default_hidden(layer.weights, 2, 0));
    EXPECT_NE(hidden, default_hidden(layer.weights, 2, 1));
    const auto longer = default_hidden(layer.weights, 4, 0);
    EXPECT_TRUE(std::equal(hidden.begin(), hidden.end(), longer.begin()));
    const std::vector<std::uint16_t> first(hidden.begin(), hidden.begin() + 4);
    EXPECT_EQ(first, (std::vector<std::uint16_t>{0xBEE8, 0x402A, 0xBF7D, 0x3E81}));
}

TEST(DefaultHidden, RowsStayWithinTheCalibratedRange) {
    QuantizedLayer layer(1);
    for (auto& expert : layer.weights.experts) {
        expert.gate.input_scale = 1.0 / 2688;
        expert.up.input_scale = std::numeric_limits<double>::quiet_NaN();  // unusable: not looked at
    }
    layer.weights.experts[2].up.input_scale = 2.25 / 2688;  // the largest counts
    const auto x = as_numbers(default_hidden(layer.weights, kTokens, 0));
    int rows_scaled = 0;
    for (auto row = x.begin(); row != x.end(); row += 64) {
        double largest = 0;
        std::for_each(row, row + 64, [&](double value) { largest = std::max(largest, std::fabs(value)); });
        EXPECT_LE(largest, 2.25);
        rows_scaled += largest == 2.25;
    }
    EXPECT_GT(rows_scaled, kTokens / 4);  // most of 64 normal numbers exceed 2.25 once
    EXPECT_LT(rows_scaled, kTokens);
}

TEST(DefaultHidden, NoTokensNoValues) {
    EXPECT_TRUE(default_hidden(QuantizedLayer(1).weights, 0, 0).empty());
}

}  // namespace
}  // namespace moe4
