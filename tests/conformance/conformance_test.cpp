// Every kernel of every backend that runs here, on every case, against the specification as code. A kernel
// joins by being listed by its backend; --gtest_filter='*cuda*' selects one backend. On the CPU the bits are
// the contract; other backends sum in another order and are held to the tolerance of cases.hpp.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <ostream>
#include <tuple>

#include "backends/cpu/kernel_list.hpp"
#include "conformance/cases.hpp"
#include "conformance/layer_runner.hpp"
#include "conformance/random_layer.hpp"
#include "moe4/backend.hpp"
#include "rel_l2.hpp"

namespace moe4::testing {
namespace {

/// A kernel, or with no name whatever the backend chooses.
struct Target {
    std::string backend;
    std::string kernel;
    Precision precision;
    friend std::ostream& operator<<(std::ostream& out, const Target& target) {
        return out << target.backend << " " << (target.kernel.empty() ? "automatic" : target.kernel);
    }
};

std::vector<Target> targets() {
    std::vector<Target> result;
    for (const BackendInfo& backend : backends()) {
        if (!backend.available) continue;
        for (const Precision precision : {Precision::w4a16, Precision::w4a4})
            result.push_back({std::string(backend.name), "", precision});
        for (const KernelInfo& kernel : backend.kernels) {
            if (kernel.available)
                result.push_back({std::string(backend.name), std::string(kernel.name), kernel.precision});
        }
    }
    return result;
}

/// The order in which a CPU kernel says that it sums; other backends state none.
moe::SumOrder order_of(std::string_view kernel) {
    for (const cpu::Kernel* each : cpu::kernel_list()) {
        if (kernel == each->name) return each->order;
    }
    return {};
}

struct Expectation {
    std::vector<float> reference;
    std::vector<double> oracle;
};

class Scenario {
public:
    explicit Scenario(const Case& c) : case_(c), layer_(c.layer) {
        input_ = random_input(layer_.weights().config, c.num_tokens, c.top_k, c.ids, layer_.random());
        for (std::uint16_t& x : input_.hidden) {
            x = format::bf16_from_float(format::bf16_to_float(x) *
                                        static_cast<float>(c.layer.hidden_magnitude));
        }
        if (c.has_special_values) plant_special_values();
    }

    const MoeWeights& weights() const { return layer_.weights(); }
    const Input& input() const { return input_; }

    const Expectation& expectation(Precision precision, ActivationScale scale, moe::SumOrder order) {
        auto& slot = expectations_[{precision, scale, order.kind, order.pair_distance}];
        if (!slot) {
            const moe::ReferenceProblem problem{
                .precision = precision, .activation_scale = scale, .experts = case_.experts, .order = order};
            slot = {.reference = moe::reference_layer(weights(), problem, input_.reference()),
                    .oracle = moe::oracle_layer(weights(), problem, input_.reference())};
        }
        return *slot;
    }

private:
    /// One value or block in each of the first rows; the rows behind them stay ordinary.
    void plant_special_values() {
        const auto row = [&](int t) {
            return &input_.hidden[static_cast<std::size_t>(t * case_.layer.hidden_size)];
        };
        const float infinity = std::numeric_limits<float>::infinity();
        row(0)[17] = format::bf16_from_float(std::numeric_limits<float>::quiet_NaN());
        row(2)[5] = format::bf16_from_float(infinity);
        row(4)[100] = format::bf16_from_float(-infinity);
        std::fill_n(row(6), case_.layer.hidden_size, std::uint16_t{0});
        std::fill_n(row(8), 16, std::uint16_t{0x8000});  // -0
        for (int i = 0; i < 16; ++i)
            row(10)[16 + i] = static_cast<std::uint16_t>(0x8001 + 3 * i);  // subnormal
        row(12)[31] = 0x7F7F;                                              // the largest finite
        std::fill_n(row(14), case_.layer.hidden_size, std::uint16_t{0x0080});
        input_.weights[static_cast<std::size_t>(16 * case_.top_k)] = infinity;  // the signs of y
    }

    const Case& case_;
    RandomLayer layer_;
    Input input_;
    std::map<std::tuple<Precision, ActivationScale, moe::SumOrder::Kind, int>, std::optional<Expectation>>
        expectations_;
};

/// Scenarios are shared by the kernels, so that each expectation is computed once.
Scenario& scenario(std::size_t index) {
    static std::map<std::size_t, std::unique_ptr<Scenario>> scenarios;
    auto& slot = scenarios[index];
    if (!slot) slot = std::make_unique<Scenario>(cases()[index]);
    return *slot;
}

constexpr ActivationScale kModes[] = {ActivationScale::layer_max, ActivationScale::per_expert,
                                      ActivationScale::dynamic, ActivationScale::dynamic_token};
constexpr const char* kModeNames[] = {"layer_max", "per_expert", "dynamic", "dynamic_token"};

using Parameters = std::tuple<Target, std::size_t>;
class Conformance : public ::testing::TestWithParam<Parameters> {};

void expect_same_bits(const std::vector<float>& found, const std::vector<float>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    const std::size_t differing = count_differences(found, expected);
    for (std::size_t i = 0; differing > 0 && i < found.size(); ++i) {
        if (same(found[i], expected[i])) continue;
        FAIL() << differing << " of " << found.size() << " values differ from the reference, the first at "
               << i << ": " << found[i] << ", expected " << expected[i];
    }
}

/// NaN and infinities are where the reference has them; a row's other values are near the oracle's.
void expect_special_values(const std::vector<float>& found, const Expectation& expected,
                           std::int64_t hidden_size, double row_tolerance) {
    const auto width = static_cast<std::size_t>(hidden_size);
    ASSERT_EQ(found.size(), expected.reference.size());
    for (std::size_t first = 0; first < found.size(); first += width) {
        std::vector<float> finite;
        std::vector<double> oracle;
        std::size_t num_wrong = 0;
        for (std::size_t i = first; i < first + width; ++i) {
            if (std::isfinite(expected.reference[i])) {
                finite.push_back(found[i]);
                oracle.push_back(expected.oracle[i]);
            } else {
                num_wrong += same(found[i], expected.reference[i]) ? 0 : 1;
            }
        }
        EXPECT_EQ(num_wrong, 0U) << "NaN or infinity expected in row " << first / width << ", of "
                                 << width - finite.size();
        EXPECT_LE(test::rel_l2(finite, oracle), row_tolerance) << "finite values of row " << first / width;
    }
}

TEST_P(Conformance, MatchesTheSpecification) {
    SCOPED_TRACE(seed_note());
    const auto& [target, index] = GetParam();
    const Case& c = cases()[index];
    Scenario& s = scenario(index);
    BackendOptions options;
    options.kernel = target.kernel;
    const auto backend = open_backend(target.backend, options);
    for (std::size_t mode = 0; mode < (target.precision == Precision::w4a4 ? std::size(kModes) : 1); ++mode) {
        SCOPED_TRACE(target.precision == Precision::w4a4 ? kModeNames[mode] : "w4a16");
        const Plan plan = backend->plan({.config = s.weights().config,
                                         .precision = target.precision,
                                         .activation_scale = kModes[mode],
                                         .max_tokens = std::max<std::int64_t>(1, c.num_tokens),
                                         .top_k = c.top_k,
                                         .experts = c.experts});
        const auto layer = backend->prepare(plan, s.weights());
        const std::vector<float> output = run_layer<float>(*layer, s.input());
        const Expectation& expected =
            s.expectation(target.precision, kModes[mode], order_of(plan.choices.back().kernel));

        if (target.backend == "cpu") expect_same_bits(output, expected.reference);
        if (c.has_special_values) {
            expect_special_values(output, expected, c.layer.hidden_size, tolerance(target.precision, 1));
        } else {
            EXPECT_LE(test::rel_l2(output, expected.oracle), tolerance(target.precision, c.num_tokens))
                << "rel-L2 against the fp64 oracle";
        }
        const auto rounded = run_layer<std::uint16_t>(*layer, s.input());
        for (std::size_t i = 0; i < output.size(); ++i) {
            const float narrow = format::bf16_to_float(format::bf16_from_float(output[i]));
            ASSERT_TRUE(same(format::bf16_to_float(rounded[i]), narrow)) << "bf16 output " << i;
        }
    }
}

std::string test_name(const ::testing::TestParamInfo<Parameters>& info) {
    const auto& [target, index] = info.param;
    const std::string kernel = target.kernel.empty()
                                   ? (target.precision == Precision::w4a4 ? "auto_w4a4" : "auto_w4a16")
                                   : target.kernel;
    return target.backend + "_" + kernel + "_" + cases()[index].name;
}

INSTANTIATE_TEST_SUITE_P(All, Conformance,
                         ::testing::Combine(::testing::ValuesIn(targets()),
                                            ::testing::Range(std::size_t{0}, cases().size())),
                         test_name);

}  // namespace
}  // namespace moe4::testing
