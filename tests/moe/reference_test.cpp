// The reference and the oracle against a second, naive writing of the same page, and what the page promises.
#include "moe/reference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <thread>

#include "format/e2m1.hpp"
#include "format/e4m3.hpp"
#include "format/quantize.hpp"
#include "moe/activations.hpp"
#include "moe/scalar_lane.hpp"
#include "moe4/error.hpp"
#include "quantized_layer.hpp"

namespace moe4::moe {
namespace {

constexpr std::int64_t kHidden = 80;  // neither is a multiple of 32: a rest in every grouping
constexpr std::int64_t kIntermediate = 48;
constexpr int kExperts = 5;
constexpr int kTopK = 3;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// One dot product of values [k]; where both sides have block scales the values carry them already.
using Sum = std::function<double(const std::vector<float>& x, const std::vector<float>& w)>;

double exact_sum(const std::vector<float>& x, const std::vector<float>& w) {
    double sum = 0;
    for (std::size_t k = 0; k < x.size(); ++k) sum += static_cast<double>(x[k]) * static_cast<double>(w[k]);
    return sum;
}

/// fma over the k of `order`, in fp32.
float chain(const std::vector<float>& x, const std::vector<float>& w, const std::vector<std::size_t>& order,
            float sum = 0) {
    for (const std::size_t k : order) sum = k < x.size() ? std::fma(x[k], w[k], sum) : sum;
    return sum;
}

/// Each block's sum is exact in fp32 and is added in one rounding.
double block_sum(const std::vector<float>& x, const std::vector<float>& w) {
    float sum = 0;
    for (std::size_t first = 0; first < x.size(); first += kNvfp4BlockSize) {
        double block = 0;
        for (std::size_t k = first; k < first + kNvfp4BlockSize; ++k)
            block += static_cast<double>(x[k]) * static_cast<double>(w[k]);
        sum = static_cast<float>(static_cast<double>(sum) + block);
    }
    return static_cast<double>(sum);
}

std::vector<float> weight_row(const Nvfp4View& matrix, std::int64_t row) {
    std::vector<float> values;
    for (std::int64_t k = 0; k < matrix.cols; ++k) {
        const std::uint8_t byte = matrix.packed[row * matrix.packed_stride + k / 2];
        const std::uint8_t code = k % 2 == 0 ? byte & 15U : byte >> 4;
        values.push_back(format::e2m1_decode(code) *
                         format::e4m3_decode(matrix.block_scale[row * matrix.scale_stride + k / 16]));
    }
    return values;
}

/// The values that enter a product, in units of the global scale.
std::vector<float> activations(const std::uint16_t* x, std::int64_t size, const float* global_scale) {
    std::vector<float> values(static_cast<std::size_t>(size));
    std::transform(x, x + size, values.begin(), format::bf16_to_float);
    if (global_scale == nullptr) return values;
    for (std::size_t first = 0; first < values.size(); first += kNvfp4BlockSize) {
        std::uint8_t codes[kNvfp4BlockSize];
        const float scale =
            format::e4m3_decode(format::quantize_activation_block(&values[first], *global_scale, codes));
        for (std::size_t i = 0; i < kNvfp4BlockSize; ++i)
            values[first + i] = scale * format::e2m1_decode(codes[i]);
    }
    return values;
}

struct Case {
    QuantizedLayer layer{1,
                         {.hidden_size = kHidden,
                          .intermediate_size = kIntermediate,
                          .num_experts = kExperts,
                          .router = {.top_k = kTopK}}};
    std::vector<std::uint16_t> hidden;
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    std::int64_t num_tokens;

    explicit Case(std::int64_t tokens = 24) : num_tokens(tokens) {
        std::mt19937 random(3);
        hidden = random_bf16(random, static_cast<std::size_t>(tokens * kHidden));
        std::uniform_real_distribution<float> uniform(0.1F, 0.9F);
        for (std::int64_t slot = 0; slot < tokens * kTopK; ++slot) {
            ids.push_back(static_cast<std::int32_t>(random() % kExperts));
            weights.push_back(uniform(random));
        }
        for (auto& expert : layer.weights.experts) {
            expert.gate.input_scale = static_cast<double>(static_cast<float>(uniform(random) / 600));
            expert.up.input_scale = static_cast<double>(static_cast<float>(uniform(random) / 600));
            expert.down.input_scale = static_cast<double>(static_cast<float>(uniform(random) / 900));
        }
    }
    ReferenceInput input() const { return {hidden, ids, weights, num_tokens, kTopK}; }
    std::vector<float> reference(const ReferenceProblem& problem) const {
        return reference_layer(layer.weights, problem, input());
    }
    std::vector<double> oracle(const ReferenceProblem& problem) const {
        return oracle_layer(layer.weights, problem, input());
    }
};

float largest(const std::uint16_t* x, std::int64_t size) {
    return format::largest_magnitude(std::span(x, static_cast<std::size_t>(size)));
}

/// docs/NUMERICS.md once more, slot by slot. All of it is fp32, with `sum` in the place of the two sums.
std::vector<float> naive_layer(const Case& c, const ReferenceProblem& problem, const Sum& sum) {
    const auto& experts = c.layer.weights.experts;
    const bool is_w4a4 = problem.precision == Precision::w4a4;
    const auto apply = [](float a, double g, double value) {
        return static_cast<float>(static_cast<double>(a) * g) * static_cast<float>(value);
    };
    float calibrated_hidden = 0;
    float calibrated_h = 0;
    for (const auto& e : experts) {
        calibrated_hidden = std::max({calibrated_hidden, static_cast<float>(*e.gate.input_scale),
                                      static_cast<float>(*e.up.input_scale)});
        calibrated_h = std::max(calibrated_h, static_cast<float>(*e.down.input_scale));
    }
    const auto scale = [&](const std::uint16_t* row, std::int64_t size, float row_or_batch_amax, float own,
                           float layer_max) {
        switch (problem.activation_scale) {
            case ActivationScale::layer_max:
                return layer_max;
            case ActivationScale::per_expert:
                return own;
            case ActivationScale::dynamic:
                return row_or_batch_amax / 2688.0F;
            case ActivationScale::dynamic_token:
                return largest(row, size) / 2688.0F;
        }
        return 0.0F;
    };

    std::vector<std::vector<std::uint16_t>> h(c.ids.size());
    for (std::size_t slot = 0; slot < c.ids.size(); ++slot) {
        const auto& e = experts[static_cast<std::size_t>(c.ids[slot])];
        const std::uint16_t* x = &c.hidden[slot / kTopK * kHidden];
        const float own =
            std::max(static_cast<float>(*e.gate.input_scale), static_cast<float>(*e.up.input_scale));
        float a = 1;
        if (is_w4a4) {
            a = scale(x, kHidden, largest(c.hidden.data(), c.num_tokens * kHidden), own, calibrated_hidden);
        }
        const auto values = activations(x, kHidden, is_w4a4 ? &a : nullptr);
        for (std::int64_t n = 0; n < kIntermediate; ++n) {
            const float gate =
                apply(a, e.gate.weight.global_scale, sum(values, weight_row(e.gate.weight, n)));
            const float up = apply(a, e.up.weight.global_scale, sum(values, weight_row(e.up.weight, n)));
            h[slot].push_back(format::bf16_from_float(Silu::apply(ScalarLane{gate}, ScalarLane{up}).value));
        }
    }
    float h_amax = 0;
    for (const auto& row : h) h_amax = std::max(h_amax, largest(row.data(), kIntermediate));
    std::vector<float> out(static_cast<std::size_t>(c.num_tokens * kHidden), 0.0F);
    for (std::size_t slot = 0; slot < c.ids.size(); ++slot) {
        const auto& e = experts[static_cast<std::size_t>(c.ids[slot])];
        float a = 1;
        if (is_w4a4) {
            a = scale(h[slot].data(), kIntermediate, h_amax, static_cast<float>(*e.down.input_scale),
                      calibrated_h);
        }
        const auto values = activations(h[slot].data(), kIntermediate, is_w4a4 ? &a : nullptr);
        for (std::int64_t n = 0; n < kHidden; ++n) {
            const float y = apply(a, e.down.weight.global_scale, sum(values, weight_row(e.down.weight, n)));
            float& target = out[slot / kTopK * kHidden + static_cast<std::size_t>(n)];
            target = std::fma(c.weights[slot], y, target);
        }
    }
    return out;
}

template <class Found, class Expected>
double rel_l2(const std::vector<Found>& found, const std::vector<Expected>& expected) {
    double difference = 0;
    double norm = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        difference += std::pow(static_cast<double>(found.at(i)) - static_cast<double>(expected[i]), 2);
        norm += std::pow(static_cast<double>(expected[i]), 2);
    }
    return std::sqrt(difference / norm);
}

const ReferenceProblem kEveryProblem[] = {
    {Precision::w4a16, ActivationScale::layer_max, {}, {}},
    {Precision::w4a4, ActivationScale::layer_max, {}, {}},
    {Precision::w4a4, ActivationScale::per_expert, {}, {}},
    {Precision::w4a4, ActivationScale::dynamic, {}, {}},
    {Precision::w4a4, ActivationScale::dynamic_token, {}, {}},
};

std::string problem_name(const testing::TestParamInfo<ReferenceProblem>& problem) {
    constexpr const char* kScales[] = {"layer_max", "per_expert", "dynamic", "dynamic_token"};
    return std::string(problem.param.precision == Precision::w4a4 ? "w4a4_" : "w4a16_") +
           kScales[static_cast<int>(problem.param.activation_scale)];
}

class EveryProblem : public testing::TestWithParam<ReferenceProblem> {};
INSTANTIATE_TEST_SUITE_P(Modes, EveryProblem, testing::ValuesIn(kEveryProblem), problem_name);

TEST_P(EveryProblem, IsTheNaiveLayerBitForBit) {
    const Case c;
    const std::vector<std::size_t> ascending = [] {
        std::vector<std::size_t> k(kHidden);
        for (std::size_t i = 0; i < k.size(); ++i) k[i] = i;
        return k;
    }();
    const Sum sum = GetParam().precision == Precision::w4a4
                        ? Sum(block_sum)
                        : Sum([&](const auto& x, const auto& w) { return chain(x, w, ascending); });
    EXPECT_EQ(c.reference(GetParam()), naive_layer(c, GetParam(), sum));
}

TEST_P(EveryProblem, OracleDiffersByRoundingAlone) {
    const Case c;
    const auto oracle = c.oracle(GetParam());
    // One h on the other side of a bf16 tie moves a row by 1e-3; the naive layer rounds to fp32 in between.
    EXPECT_LT(rel_l2(naive_layer(c, GetParam(), exact_sum), oracle), 5e-4);
    EXPECT_LT(rel_l2(c.reference(GetParam()), oracle), GetParam().precision == Precision::w4a4 ? 3e-3 : 1e-3);
}

TEST_P(EveryProblem, ParallelExpertsGiveTheSameBitsAndCountThemselves) {
    const Case c;
    int last_done = 0;
    int last_total = 0;
    const auto in_threads = oracle_layer(
        c.layer.weights, GetParam(), c.input(),
        [](int count, void (*body)(void*, int), void* context) {
            std::vector<std::thread> threads;
            for (int i = 0; i < count; ++i) threads.emplace_back(body, context, i);
            for (auto& thread : threads) thread.join();
        },
        [&](int done, int total) {
            EXPECT_EQ(done, last_done + 1);
            last_done = done;
            last_total = total;
        });
    EXPECT_EQ(in_threads, c.oracle(GetParam()));
    EXPECT_EQ(last_done, 2 * kExperts);
    EXPECT_EQ(last_total, 2 * kExperts);
}

TEST_P(EveryProblem, SlotsOutsideTheRangeAddNothingWhateverTheirWeight) {
    Case c;
    Case without;
    ReferenceProblem problem = GetParam();
    problem.experts = {1, 3};
    for (std::size_t slot = 0; slot < c.ids.size(); ++slot) {
        if (slot % 4 == 0) c.ids[slot] = slot % 8 == 0 ? -1 : std::numeric_limits<std::int32_t>::max();
        if (c.ids[slot] < 1 || c.ids[slot] > 3) {
            c.weights[slot] = kNaN;
            without.ids[slot] = -1;
            without.weights[slot] = 1;
        }
    }
    const auto found = c.reference(problem);
    EXPECT_TRUE(std::none_of(found.begin(), found.end(), [](float x) { return std::isnan(x); }));
    EXPECT_EQ(found, without.reference(problem));
    const auto oracle = c.oracle(problem);
    EXPECT_TRUE(std::none_of(oracle.begin(), oracle.end(), [](double x) { return std::isnan(x); }));
}

TEST_P(EveryProblem, ANaNPoisonsItsRowAlone) {
    const Case sound;
    Case poisoned;
    for (const std::uint16_t bad : {std::uint16_t{0x7FC0}, std::uint16_t{0xFFFF}}) {
        poisoned.hidden[5 * kHidden + 17] = bad;
        const auto found = poisoned.reference(GetParam());
        const auto oracle = poisoned.oracle(GetParam());
        const auto expected = sound.reference(GetParam());
        for (std::size_t i = 0; i < found.size(); ++i) {
            const bool is_poisoned = i / kHidden == 5;
            ASSERT_EQ(std::isnan(found[i]), is_poisoned) << i;
            ASSERT_EQ(std::isnan(oracle[i]), is_poisoned) << i;
            // `dynamic` may lose the batch's largest value with the row.
            const bool depends_on_batch = GetParam().activation_scale == ActivationScale::dynamic;
            if (!is_poisoned && !depends_on_batch) {
                ASSERT_EQ(found[i], expected[i]) << i;
            }
        }
    }
}

// `dynamic` is exempt by definition: its scale is the batch's.
TEST_P(EveryProblem, ARowDoesNotDependOnItsBatch) {
    const Case batch;
    const auto together = batch.reference(GetParam());
    int equal_rows = 0;
    for (const std::size_t t : {0U, 7U, 23U}) {
        const ReferenceInput alone{std::span(batch.hidden).subspan(t * kHidden, kHidden),
                                   std::span(batch.ids).subspan(t * kTopK, kTopK),
                                   std::span(batch.weights).subspan(t * kTopK, kTopK), 1, kTopK};
        const auto row = reference_layer(batch.layer.weights, GetParam(), alone);
        equal_rows += std::equal(row.begin(), row.end(), &together[t * kHidden]);
    }
    if (GetParam().activation_scale == ActivationScale::dynamic) {
        EXPECT_LT(equal_rows, 3);
    } else {
        EXPECT_EQ(equal_rows, 3);
    }
}

TEST_P(EveryProblem, NoTokensGiveNoOutput) {
    const Case c(0);
    EXPECT_TRUE(c.reference(GetParam()).empty());
    EXPECT_TRUE(c.oracle(GetParam()).empty());
}

TEST_P(EveryProblem, ZeroBlockScalesAreZeroNotNothing) {
    Case c;
    auto& scales = c.layer.matrix(2, Projection::down).quantized.block_scale;
    std::fill(scales.begin(), scales.end(), std::uint8_t{0});
    std::fill(c.ids.begin(), c.ids.end(), 2);
    const auto found = c.reference(GetParam());
    EXPECT_TRUE(std::all_of(found.begin(), found.end(), [](float x) { return x == 0.0F; }));
}

TEST(Reference, ScalesThatW4a4NeedsAndW4a16DoesNot) {
    Case c;
    c.layer.weights.experts[4].gate.input_scale.reset();
    const ReferenceProblem w4a4{Precision::w4a4, ActivationScale::layer_max, {0, 2}, {}};
    EXPECT_THROW(c.reference(w4a4), Error) << "layer_max is over all experts of the layer, held or not";
    EXPECT_NO_THROW(c.reference({Precision::w4a16, ActivationScale::layer_max, {}, {}}));
    EXPECT_NO_THROW(c.reference({Precision::w4a4, ActivationScale::dynamic, {}, {}}));
}

// The largest A of the layer decides also where its expert is not held.
TEST(Reference, LayerMaxReachesBeyondTheHeldExperts) {
    Case c;
    const ReferenceProblem held{Precision::w4a4, ActivationScale::layer_max, {0, 2}, {}};
    const auto before = c.reference(held);
    c.layer.weights.experts[4].gate.input_scale = 0.01;
    EXPECT_NE(c.reference(held), before);
}

/// The k of one chain after the other, written out: pairs of neighbours, and pairs four apart.
struct Orders {
    std::vector<std::size_t> firsts;
    std::vector<std::size_t> seconds;
};

Orders pairs(int distance, std::size_t begin, std::size_t end) {
    Orders orders;
    for (std::size_t k = begin; k < end; ++k) {
        const bool is_second = (k / static_cast<std::size_t>(distance)) % 2 == 1;
        (is_second ? orders.seconds : orders.firsts).push_back(k);
    }
    return orders;
}

TEST(SumOrder, TwoChainsPer32Values) {
    const Case c;
    for (const int distance : {1, 4, 8}) {
        const ReferenceProblem problem{
            Precision::w4a16, ActivationScale::layer_max, {}, {SumOrder::two_chains, distance}};
        const auto expected = naive_layer(c, problem, [&](const auto& x, const auto& w) {
            float sum = 0;
            for (std::size_t first = 0; first < x.size(); first += 32) {
                const auto [firsts, seconds] = pairs(distance, first, std::min(first + 32, x.size()));
                sum += chain(x, w, firsts) + chain(x, w, seconds);
            }
            return sum;
        });
        EXPECT_EQ(c.reference(problem), expected) << distance;
        EXPECT_NE(c.reference({Precision::w4a16, ActivationScale::layer_max, {}, {}}), expected);
    }
}

TEST(SumOrder, SecondThenFirst) {
    const Case c;
    for (const int distance : {1, 4, 8}) {
        const ReferenceProblem problem{
            Precision::w4a16, ActivationScale::layer_max, {}, {SumOrder::second_then_first, distance}};
        const auto expected = naive_layer(c, problem, [&](const auto& x, const auto& w) {
            const auto [firsts, seconds] = pairs(distance, 0, x.size());
            float sum = 0;
            for (std::size_t p = 0; p < firsts.size(); ++p) sum = chain(x, w, {seconds[p], firsts[p]}, sum);
            return sum;
        });
        EXPECT_EQ(c.reference(problem), expected) << distance;
    }
}

/// With scales that are powers of two a block's sum over codes is that over weights.
void make_scales_powers_of_two(const Case& c) {
    std::mt19937 random(9);
    for (const ExpertWeights& expert : c.layer.weights.experts) {
        for (const Projection projection : kProjections) {
            const Nvfp4View& matrix = expert[projection].weight;
            auto* scales = const_cast<std::uint8_t*>(matrix.block_scale);
            for (std::int64_t i = 0; i < matrix.rows * matrix.scale_stride; ++i)
                scales[i] = static_cast<std::uint8_t>((4 + random() % 6) << 3);
        }
    }
}

TEST(SumOrder, ScaledBlocks) {
    const Case c;
    make_scales_powers_of_two(c);
    const ReferenceProblem problem{
        Precision::w4a16, ActivationScale::layer_max, {}, {SumOrder::scaled_blocks, 4}};
    const auto expected = naive_layer(c, problem, [&](const auto& x, const auto& w) {
        float sum = 0;
        for (std::size_t first = 0; first < x.size(); first += kNvfp4BlockSize) {
            const auto [firsts, seconds] = pairs(4, first, first + kNvfp4BlockSize);
            float dot = 0;
            for (std::size_t p = 0; p < firsts.size(); ++p) dot = chain(x, w, {seconds[p], firsts[p]}, dot);
            sum += dot;
        }
        return sum;
    });
    EXPECT_EQ(c.reference(problem), expected);
}

TEST(SumOrder, FixedBlocks) {
    const Case c;
    make_scales_powers_of_two(c);
    const ReferenceProblem problem{
        Precision::w4a16, ActivationScale::layer_max, {}, {SumOrder::fixed_blocks}};
    const auto expected = naive_layer(c, problem, [&](const auto& x, const auto& w) {
        float sum = 0;
        for (std::size_t first = 0; first < x.size(); first += kNvfp4BlockSize) {
            float largest = 0;
            for (std::size_t k = first; k < first + kNvfp4BlockSize; ++k)
                largest = std::max(largest, std::fabs(x[k]));
            int exponent = -126;
            while (largest > std::ldexp(127.0F, exponent + 16)) ++exponent;
            double dot = 0;
            for (std::size_t k = first; k < first + kNvfp4BlockSize; ++k)
                dot += std::nearbyint(std::ldexp(double{x[k]}, -exponent)) * double{w[k]};
            sum += std::ldexp(static_cast<float>(dot), exponent);
        }
        return sum;
    });
    EXPECT_EQ(c.reference(problem), expected);
    EXPECT_NE(c.reference({Precision::w4a16, ActivationScale::layer_max, {}, {}}), expected);
}

TEST(SumOrder, IsOfW4a16Alone) {
    const Case c;
    EXPECT_EQ(c.reference({Precision::w4a4, ActivationScale::layer_max, {}, {SumOrder::two_chains, 1}}),
              c.reference({Precision::w4a4, ActivationScale::layer_max, {}, {}}));
}

}  // namespace
}  // namespace moe4::moe
