// A run is a graph's: it captures (nothing in it waits, allocates or reads the device), and its replay with
// other routing and other tokens gives the bits of an eager run.
#include <gtest/gtest.h>

#include "conformance/layer_runner.hpp"
#include "cuda/device_tensor.hpp"

namespace moe4::testing {
namespace {

constexpr int kTopK = 4;

struct Mode {
    const char* name;
    Precision precision;
    ActivationScale scale;
    std::int64_t num_tokens;
    friend std::ostream& operator<<(std::ostream& out, const Mode& mode) { return out << mode.name; }
};

class Graph : public ::testing::TestWithParam<Mode> {
protected:
    void SetUp() override {
        if (!has_gpu()) GTEST_SKIP() << "no GPU";
    }
};

/// A stream's work as a graph. Whatever is illegal while it is recorded fails the run, which names the call.
class Captured {
public:
    explicit Captured(const DeviceRun& run) {
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
        run.enqueue(stream_);
        cudaGraph_t graph = nullptr;
        check_cuda(cudaStreamEndCapture(stream_, &graph));
        check_cuda(cudaGraphInstantiate(&executable_, graph, 0));
        check_cuda(cudaGraphDestroy(graph));
    }
    ~Captured() {
        cudaGraphExecDestroy(executable_);
        cudaStreamDestroy(stream_);
    }
    void replay() const {
        launch();
        check_cuda(cudaStreamSynchronize(stream_));
    }
    void launch() const { check_cuda(cudaGraphLaunch(executable_, stream_)); }

private:
    cudaStream_t stream_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

TEST_P(Graph, ReplaysWithOtherRoutingAsAnEagerRun) {
    const Mode& mode = GetParam();
    RandomLayer random({.hidden_size = 512, .intermediate_size = 208, .num_experts = 16});
    const auto backend = open_backend("cuda");
    const auto layer = backend->prepare(backend->plan({.config = random.weights().config,
                                                       .precision = mode.precision,
                                                       .activation_scale = mode.scale,
                                                       .max_tokens = mode.num_tokens,
                                                       .top_k = kTopK}),
                                        random.weights());
    const auto input = [&](Ids ids) {
        return random_input(random.weights().config, mode.num_tokens, kTopK, ids, random.random());
    };
    DeviceRun run(*layer, input(Ids::distinct));
    const Captured graph(run);
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

TEST_P(Graph, RepeatsBitForBit) {
    const Mode& mode = GetParam();
    RandomLayer random({.hidden_size = 256, .intermediate_size = 704, .num_experts = 16});
    const auto backend = open_backend("cuda");
    const auto layer = backend->prepare(backend->plan({.config = random.weights().config,
                                                       .precision = mode.precision,
                                                       .activation_scale = mode.scale,
                                                       .max_tokens = mode.num_tokens,
                                                       .top_k = kTopK}),
                                        random.weights());
    DeviceRun run(*layer,
                  random_input(random.weights().config, mode.num_tokens, kTopK, Ids::zipf, random.random()));
    const std::vector<float> first = run.run();
    for (int i = 0; i < 20; ++i) ASSERT_EQ(count_differences(first, run.run()), 0U) << "repeat " << i;
}

TEST_P(Graph, RunsAtTheSameTimeInWorkspacesOfTheirOwn) {
    const Mode& mode = GetParam();
    RandomLayer random({.hidden_size = 512, .intermediate_size = 208, .num_experts = 16});
    const auto backend = open_backend("cuda");
    const auto layer = backend->prepare(backend->plan({.config = random.weights().config,
                                                       .precision = mode.precision,
                                                       .activation_scale = mode.scale,
                                                       .max_tokens = mode.num_tokens,
                                                       .top_k = kTopK}),
                                        random.weights());
    const Input input =
        random_input(random.weights().config, mode.num_tokens, kTopK, Ids::distinct, random.random());
    std::vector<std::unique_ptr<DeviceRun>> runs;  // more than have counters that are kept cleared
    for (int i = 0; i < 20; ++i) runs.push_back(std::make_unique<DeviceRun>(*layer, input));
    const std::vector<float> alone = runs.front()->run();
    for (const auto& run : runs) ASSERT_EQ(count_differences(alone, run->run()), 0U);
    const Captured first(*runs.front());
    const Captured second(*runs[1]);
    const Captured last(*runs.back());
    for (int i = 0; i < 100; ++i) {
        for (const Captured* graph : {&first, &second, &last}) graph->launch();
    }
    for (const auto& run : {runs.front().get(), runs[1].get(), runs.back().get()})
        EXPECT_EQ(count_differences(alone, run->output()), 0U);
}

INSTANTIATE_TEST_SUITE_P(
    Modes, Graph,
    ::testing::Values(Mode{"w4a16_1", Precision::w4a16, {}, 1}, Mode{"w4a16_8", Precision::w4a16, {}, 8},
                      Mode{"w4a16_33", Precision::w4a16, {}, 33},
                      Mode{"w4a16_700", Precision::w4a16, {}, 700},
                      Mode{"layer_max_1", Precision::w4a4, ActivationScale::layer_max, 1},
                      Mode{"layer_max_3", Precision::w4a4, ActivationScale::layer_max, 3},
                      Mode{"layer_max_700", Precision::w4a4, ActivationScale::layer_max, 700},
                      Mode{"per_expert_33", Precision::w4a4, ActivationScale::per_expert, 33},
                      Mode{"dynamic_33", Precision::w4a4, ActivationScale::dynamic, 33},
                      Mode{"dynamic_token_33", Precision::w4a4, ActivationScale::dynamic_token, 33}),
    [](const auto& mode) { return std::string(mode.param.name); });

}  // namespace
}  // namespace moe4::testing
