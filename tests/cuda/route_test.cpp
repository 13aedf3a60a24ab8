// Routing on the device: ids and weights are the reference's bit for bit, from tensors in host memory, from
// tensors of the device, and from a graph.
#include <gtest/gtest.h>

#include "conformance/layer_runner.hpp"
#include "cuda/captured_graph.hpp"
#include "cuda/device_tensor.hpp"
#include "moe/routers.hpp"

namespace moe4::testing {
namespace {

constexpr std::int64_t kHidden = 192;
constexpr std::int64_t kTokens = 64;

struct RouterCase {
    const char* name;
    int num_experts;
    RouterConfig config;
    DType router = DType::bf16;
    std::optional<DType> bias = {};
    friend std::ostream& operator<<(std::ostream& out, const RouterCase& c) { return out << c.name; }
};

/// Random values that a tensor of weights views, as bf16 or f32.
class RouterTensor {
public:
    RouterTensor(DType dtype, Shape shape, float magnitude, std::mt19937_64& random)
        : dtype_(dtype), shape_(shape) {
        std::normal_distribution<float> normal(0, magnitude);
        for (std::int64_t i = 0; i < shape.num_elements(); ++i) {
            floats_.push_back(normal(random));
            bf16_.push_back(format::bf16_from_float(floats_.back()));
        }
    }
    TensorView view() const {
        const void* const data =
            dtype_ == DType::f32 ? static_cast<const void*>(floats_.data()) : bf16_.data();
        return {data, dtype_, shape_, {}};
    }

private:
    DType dtype_;
    Shape shape_;
    std::vector<float> floats_;
    std::vector<std::uint16_t> bf16_;
};

struct Routed {
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
};

class Route : public ::testing::TestWithParam<RouterCase> {
protected:
    void SetUp() override {
        if (!has_gpu()) GTEST_SKIP() << "no GPU";
        const auto backend = open_backend("cuda");
        layer_ =
            backend->prepare(backend->plan({.config = weights().config, .max_tokens = kTokens}), weights());
    }

    Route() {
        const RouterCase& c = GetParam();
        weights().config.router = c.config;
        weights().router = router_.view();
        if (c.bias) weights().router_bias = bias_.view();
    }

    MoeWeights& weights() { return random_.weights(); }
    int top_k() const { return GetParam().config.top_k; }
    Shape slots() const { return {kTokens, top_k()}; }

    std::vector<std::uint16_t> random_hidden() {
        auto hidden =
            random_input(weights().config, kTokens, top_k(), Ids::distinct, random_.random()).hidden;
        hidden[5] = 0x7FC0;  // a NaN: ids 0, 1, 2, ... and NaN weights
        return hidden;
    }
    Routed unrouted() const {
        const auto count = static_cast<std::size_t>(slots().num_elements());
        return {std::vector<std::int32_t>(count, -7), std::vector<float>(count, -7.0F)};
    }
    void expect_reference(const std::vector<std::uint16_t>& hidden, const Routed& found) {
        Routed expected = unrouted();
        for (std::int64_t t = 0; t < kTokens; ++t)
            moe::route_token(weights().config, weights().router, weights().router_bias,
                             &hidden[static_cast<std::size_t>(t * kHidden)],
                             &expected.ids[static_cast<std::size_t>(t * top_k())],
                             &expected.weights[static_cast<std::size_t>(t * top_k())]);
        EXPECT_EQ(found.ids, expected.ids);
        EXPECT_EQ(count_differences(found.weights, expected.weights), 0U)
            << "of " << expected.weights.size() << " weights";
    }

    RandomLayer random_{
        {.hidden_size = kHidden, .intermediate_size = 16, .num_experts = GetParam().num_experts}};
    RouterTensor router_{GetParam().router, {GetParam().num_experts, kHidden}, 0.1F, random_.random()};
    RouterTensor bias_{
        GetParam().bias.value_or(DType::f32), {GetParam().num_experts}, 0.05F, random_.random()};
    std::unique_ptr<Layer> layer_;
};

TEST_P(Route, OfHostTensorsIsTheReferences) {
    const std::vector<std::uint16_t> hidden = random_hidden();
    Routed found = unrouted();
    layer_->route({hidden.data(), DType::bf16, {kTokens, kHidden}, {}},
                  {found.ids.data(), DType::i32, slots(), {}},
                  {found.weights.data(), DType::f32, slots(), {}});
    expect_reference(hidden, found);
}

TEST_P(Route, OfDeviceTensorsAndInAGraphIsTheReferences) {
    std::vector<std::uint16_t> hidden = random_hidden();
    DeviceMemory hidden_memory(hidden);
    DeviceMemory ids(unrouted().ids);
    DeviceMemory weights(unrouted().weights);
    const auto enqueue = [&](cudaStream_t stream) {
        layer_->route(hidden_memory.view(DType::bf16, {kTokens, kHidden}), ids.view(DType::i32, slots()),
                      weights.view(DType::f32, slots()), {stream});
    };
    enqueue(nullptr);
    expect_reference(hidden, {ids.download<std::int32_t>(), weights.download<float>()});
    const CapturedGraph graph(enqueue);
    for (int replay = 0; replay < 2; ++replay) {
        hidden = random_hidden();
        hidden_memory.upload(hidden);
        ids.poison();
        weights.poison();
        graph.replay();
        expect_reference(hidden, {ids.download<std::int32_t>(), weights.download<float>()});
    }
}

constexpr RouterConfig kSoftmax{.score_function = ScoreFunction::softmax, .top_k = 8, .renormalize = true};
constexpr RouterConfig kUnnormalized{.score_function = ScoreFunction::softmax, .top_k = 8};
constexpr RouterConfig kGroups{.score_function = ScoreFunction::sigmoid,
                               .top_k = 8,
                               .renormalize = true,
                               .num_groups = 8,
                               .top_k_groups = 4,
                               .scaling_factor = 2.5};

INSTANTIATE_TEST_SUITE_P(
    Routers, Route,
    ::testing::Values(RouterCase{"softmax_2_of_8",
                                 8,
                                 {.score_function = ScoreFunction::softmax, .top_k = 2, .renormalize = true}},
                      RouterCase{"softmax", 128, kSoftmax},
                      RouterCase{"softmax_f32", 128, kSoftmax, DType::f32},
                      RouterCase{"softmax_not_renormalized", 128, kUnnormalized},
                      RouterCase{"sigmoid_groups", 256, kGroups, DType::bf16, DType::f32},
                      RouterCase{"sigmoid_groups_bf16_bias", 256, kGroups, DType::bf16, DType::bf16},
                      RouterCase{"sigmoid_groups_f32_bf16_bias", 256, kGroups, DType::f32, DType::bf16},
                      RouterCase{"sigmoid_32_of_1024",
                                 1024,
                                 {.score_function = ScoreFunction::sigmoid, .top_k = 32},
                                 DType::bf16,
                                 DType::f32}),
    [](const auto& c) { return std::string(c.param.name); });

}  // namespace
}  // namespace moe4::testing
