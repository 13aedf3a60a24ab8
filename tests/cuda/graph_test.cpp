// A run is a graph's: it captures (nothing in it waits, allocates or reads the device), and its replay with
// other routing and other tokens gives the bits of an eager run.
#include <gtest/gtest.h>

#include <functional>

#include "conformance/layer_runner.hpp"
#include "cuda/captured_graph.hpp"
#include "cuda/device_tensor.hpp"
#include "moe4/error.hpp"

namespace moe4::testing {
namespace {

constexpr int kTopK = 4;

struct Mode {
    const char* name;
    Precision precision;
    ActivationScale scale;
    std::int64_t num_tokens;
    bool uses_wgmma = false;
    bool batch_invariant = false;
    friend std::ostream& operator<<(std::ostream& out, const Mode& mode) { return out << mode.name; }

    /// Where A belongs to rows, x and h are scanned for it, and h is encoded between the GEMMs.
    std::size_t most_launches() const {
        if (precision == Precision::w4a16) return 4;
        if (scale == ActivationScale::dynamic) return 10;
        return scale == ActivationScale::dynamic_token ? 7 : 4;
    }
};

class Graph : public ::testing::TestWithParam<Mode> {
protected:
    void SetUp() override {
        if (!has_gpu()) GTEST_SKIP() << "no GPU";
    }
    static std::unique_ptr<Layer> prepare(const MoeWeights& weights) {
        const Mode& mode = GetParam();
        const auto backend = open_backend("cuda");
        return backend->prepare(backend->plan({.config = weights.config,
                                               .precision = mode.precision,
                                               .activation_scale = mode.scale,
                                               .max_tokens = mode.num_tokens,
                                               .top_k = kTopK,
                                               .batch_invariant = mode.batch_invariant}),
                                weights);
    }
};

CapturedGraph capture(const DeviceRun& run) {
    return CapturedGraph([&](cudaStream_t stream) { run.enqueue(stream); });
}

TEST_P(Graph, ReplaysWithOtherRoutingAsAnEagerRun) {
    const Mode& mode = GetParam();
    RandomLayer random({.hidden_size = 512, .intermediate_size = 208, .num_experts = 16});
    const auto layer = prepare(random.weights());
    const auto input = [&](Ids ids) {
        return random_input(random.weights().config, mode.num_tokens, kTopK, ids, random.random());
    };
    DeviceRun run(*layer, input(Ids::distinct));
    const CapturedGraph graph = capture(run);
    std::vector<Input> inputs = {input(Ids::distinct), input(Ids::one_expert), input(Ids::zipf),
                                 input(Ids::ragged)};
    inputs.push_back(input(Ids::distinct));  // padded: nobody's tokens from the second one on
    std::fill(inputs.back().ids.begin() + kTopK, inputs.back().ids.end(), -1);
    inputs.push_back(input(Ids::distinct));  // none at all
    std::fill(inputs.back().ids.begin(), inputs.back().ids.end(), -1);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        run.load(inputs[i]);
        run.poison();
        graph.replay();
        const std::vector<float> replayed = run.output();
        EXPECT_EQ(count_differences(replayed, run.run()), 0U) << "input " << i;
        EXPECT_EQ(count_differences(replayed, run_layer<float>(*layer, inputs[i])), 0U)
            << "input " << i << " from host memory";
    }
    for (const float x : run.output()) ASSERT_EQ(x, 0.0F) << "tokens that nobody takes";
}

TEST_P(Graph, HasFewLaunchesAndNothingElse) {
    const Mode& mode = GetParam();
    RandomLayer random({.hidden_size = 512, .intermediate_size = 208, .num_experts = 16});
    const auto layer = prepare(random.weights());
    const DeviceRun run(*layer, random_input(random.weights().config, mode.num_tokens, kTopK, Ids::distinct,
                                             random.random()));
    const std::vector<std::string> nodes = capture(run).nodes();
    EXPECT_LE(nodes.size(), mode.most_launches());
    bool has_wgmma = false;
    for (const std::string& node : nodes) {
        EXPECT_EQ(node.find("type "), std::string::npos) << node << " is neither a kernel nor a memset";
        has_wgmma = has_wgmma || node.find("wgmma_gemm") != std::string::npos;
    }
    EXPECT_EQ(has_wgmma, mode.uses_wgmma);
    RecordProperty("launches", static_cast<int>(nodes.size()));
}

TEST_P(Graph, RepeatsBitForBit) {
    const Mode& mode = GetParam();
    RandomLayer random({.hidden_size = 256, .intermediate_size = 704, .num_experts = 16});
    const auto layer = prepare(random.weights());
    DeviceRun run(*layer,
                  random_input(random.weights().config, mode.num_tokens, kTopK, Ids::zipf, random.random()));
    const std::vector<float> first = run.run();
    for (int i = 0; i < 20; ++i) ASSERT_EQ(count_differences(first, run.run()), 0U) << "repeat " << i;
}

TEST_P(Graph, RunsAtTheSameTimeInWorkspacesOfTheirOwn) {
    const Mode& mode = GetParam();
    RandomLayer random({.hidden_size = 512, .intermediate_size = 208, .num_experts = 16});
    const auto layer = prepare(random.weights());
    const Input input =
        random_input(random.weights().config, mode.num_tokens, kTopK, Ids::distinct, random.random());
    std::vector<std::unique_ptr<DeviceRun>> runs;  // more than have counters that are kept cleared
    for (int i = 0; i < 20; ++i) runs.push_back(std::make_unique<DeviceRun>(*layer, input));
    const std::vector<float> alone = runs.front()->run();
    for (const auto& run : runs) ASSERT_EQ(count_differences(alone, run->run()), 0U);
    const CapturedGraph first = capture(*runs.front());
    const CapturedGraph second = capture(*runs[1]);
    const CapturedGraph last = capture(*runs.back());
    for (int i = 0; i < 100; ++i) {
        for (const CapturedGraph* graph : {&first, &second, &last}) graph->launch();
    }
    for (const auto& run : {runs.front().get(), runs[1].get(), runs.back().get()})
        EXPECT_EQ(count_differences(alone, run->output()), 0U);
}

INSTANTIATE_TEST_SUITE_P(
    Modes, Graph,
    ::testing::Values(Mode{"w4a16_1", Precision::w4a16, {}, 1}, Mode{"w4a16_6", Precision::w4a16, {}, 6},
                      Mode{"w4a16_33", Precision::w4a16, {}, 33}, Mode{"w4a16_64", Precision::w4a16, {}, 64},
                      Mode{"w4a16_700", Precision::w4a16, {}, 700, true},
                      Mode{"w4a16_batch_invariant_33", Precision::w4a16, {}, 33, true, true},
                      Mode{"layer_max_1", Precision::w4a4, ActivationScale::layer_max, 1},
                      Mode{"layer_max_3", Precision::w4a4, ActivationScale::layer_max, 3},
                      Mode{"layer_max_64", Precision::w4a4, ActivationScale::layer_max, 64},
                      Mode{"layer_max_700", Precision::w4a4, ActivationScale::layer_max, 700, true},
                      Mode{"layer_max_batch_invariant_33", Precision::w4a4, ActivationScale::layer_max, 33,
                           true, true},
                      Mode{"per_expert_33", Precision::w4a4, ActivationScale::per_expert, 33},
                      Mode{"per_expert_700", Precision::w4a4, ActivationScale::per_expert, 700, true},
                      Mode{"dynamic_33", Precision::w4a4, ActivationScale::dynamic, 33},
                      Mode{"dynamic_700", Precision::w4a4, ActivationScale::dynamic, 700, true},
                      Mode{"dynamic_token_33", Precision::w4a4, ActivationScale::dynamic_token, 33},
                      Mode{"dynamic_token_700", Precision::w4a4, ActivationScale::dynamic_token, 700, true}),
    [](const auto& mode) { return std::string(mode.param.name); });

using Call = std::function<void(cudaStream_t)>;

/// A layer whose run makes a call that a run may not make.
class LayerWithCall final : public Layer {
public:
    LayerWithCall(const Layer& layer, Call call) : layer_(layer), call_(std::move(call)) {}
    const Plan& plan() const override { return layer_.plan(); }
    void route(TensorView, MutableTensorView, MutableTensorView, Stream) const override {}
    void run(TensorView hidden, const Routing& routing, MutableTensorView output, Workspace workspace,
             Stream stream) const override {
        call_(static_cast<cudaStream_t>(stream.handle));
        layer_.run(hidden, routing, output, workspace, stream);
    }

private:
    const Layer& layer_;
    Call call_;
};

/// The tests above see what they are there to see.
class IllegalCall : public ::testing::Test {
protected:
    void SetUp() override {
        if (!has_gpu()) GTEST_SKIP() << "no GPU";
        const auto backend = open_backend("cuda");
        layer_ = backend->prepare(backend->plan({.config = random_.weights().config, .max_tokens = 4}),
                                  random_.weights());
    }
    CapturedGraph capture_with(const Call& call) const {
        const LayerWithCall layer(*layer_, call);
        return capture(DeviceRun(layer, input_));
    }
    std::string failure_with(const Call& call) const {
        try {
            capture_with(call);
        } catch (const std::exception& error) {
            return error.what();
        }
        return "none";
    }

    RandomLayer random_{LayerOptions{}};
    Input input_ = random_input(random_.weights().config, 4, 2, Ids::distinct, random_.random());
    std::unique_ptr<Layer> layer_;
};

constexpr const char* kNotPermitted = ": operation not permitted when stream is capturing";

TEST_F(IllegalCall, IsNamed) {
    EXPECT_EQ(failure_with([](cudaStream_t) {}), "none");
    EXPECT_EQ(failure_with([](cudaStream_t stream) {
                  cuda::check(cudaStreamSynchronize(stream), "waiting for the device");
              }),
              std::string("waiting for the device") + kNotPermitted);
    EXPECT_EQ(failure_with([](cudaStream_t) { cuda::DeviceBuffer(64, "a buffer"); }),
              std::string("allocating device memory") + kNotPermitted);
    EXPECT_EQ(failure_with([&](cudaStream_t) { run_layer<float>(*layer_, input_); }),
              std::string("allocating device memory") + kNotPermitted)
        << "of a run on host memory";
    EXPECT_EQ(failure_with([](cudaStream_t) {}), "none") << "nothing is left of the captures that failed";
}

TEST_F(IllegalCall, ThatIsNotCheckedFailsTheNextLaunch) {
    EXPECT_EQ(failure_with([](cudaStream_t stream) { cudaStreamSynchronize(stream); }),
              "launching a kernel: operation failed due to a previous error during capture");
}

TEST_F(IllegalCall, ThatCapturesIsANodeOfAnotherType) {
    std::uint32_t read = 0;
    const DeviceMemory memory(sizeof read);
    const std::vector<std::string> nodes =
        capture_with([&](cudaStream_t stream) {
            cudaMemcpyAsync(&read, memory.data(), sizeof read, cudaMemcpyDeviceToHost, stream);
        }).nodes();
    EXPECT_NE(std::find(nodes.begin(), nodes.end(), "type " + std::to_string(cudaGraphNodeTypeMemcpy)),
              nodes.end());
}

}  // namespace
}  // namespace moe4::testing
