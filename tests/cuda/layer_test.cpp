// What the CUDA backend promises beside the numbers: memory, errors, batch invariance, which device.
#include <gtest/gtest.h>

#include <limits>

#include "backends/cuda/kernel_list.hpp"
#include "backends/cuda/sm90/wgmma_shape.hpp"
#include "conformance/layer_runner.hpp"
#include "cuda/device_tensor.hpp"
#include "expect_error.hpp"
#include "moe4/error.hpp"

namespace moe4::testing {
namespace {

using test::refusal;

class CudaLayer : public ::testing::Test {
protected:
    void SetUp() override {
        if (!has_gpu()) GTEST_SKIP() << "no GPU";
    }
};

/// Takes all of the device's memory but `left` bytes.
class Hog {
public:
    explicit Hog(std::size_t left) {
        std::size_t total_bytes = 0;
        check_cuda(cudaMemGetInfo(&free_, &total_bytes));
        check_cuda(cudaMalloc(&data_, free_ - left));
        check_cuda(cudaMemGetInfo(&free_, &total_bytes));
    }
    ~Hog() { cudaFree(data_); }
    Hog(const Hog&) = delete;
    Hog& operator=(const Hog&) = delete;
    std::size_t left() const { return free_; }

private:
    void* data_ = nullptr;
    std::size_t free_ = 0;
};

TEST_F(CudaLayer, WhatTheRouterCannotDoMattersToItsUsersAlone) {
    const auto backend = open_backend("cuda");
    const auto route = [&](const RandomLayer& random, int top_k) {
        Problem problem{.config = random.weights().config, .max_tokens = 1, .top_k = 2};
        problem.config.router.top_k = top_k;
        backend->prepare(backend->plan(problem), random.weights())->route({}, {}, {});
    };
    const RandomLayer with_router({.num_experts = 64, .has_router = true});
    const RandomLayer without({.num_experts = 64});
    EXPECT_NE(refusal([&] { route(with_router, 40); }, ErrorKind::unsupported).find("at most 1024 and 32"),
              std::string::npos);
    EXPECT_EQ(refusal([&] { route(without, 2); }, ErrorKind::unsupported),
              "the layer has no router of its own");
}

TEST_F(CudaLayer, MemoryThatDoesNotSufficeIsNamedWithBothSizes) {
    const auto backend = open_backend("cuda");
    RandomLayer large({.hidden_size = 2048, .intermediate_size = 4096, .num_experts = 8});
    const Plan plan = backend->plan({.config = large.weights().config, .max_tokens = 1});
    const Hog hog(std::size_t{64} << 20);
    const std::string sentence =
        refusal([&] { backend->prepare(plan, large.weights()); }, ErrorKind::machine);
    EXPECT_NE(sentence.find(std::to_string(plan.weight_bytes) + " bytes are needed"), std::string::npos)
        << sentence;
    EXPECT_NE(sentence.find(" are free"), std::string::npos) << sentence;
}

TEST_F(CudaLayer, PreparingTakesAtMost1Point1LayersOfMemory) {
    constexpr int kNumExperts = 40;
    constexpr std::size_t kLayerBytes =
        std::size_t{3} * 2048 * 2048 * 9 / 16 * kNumExperts;  // of codes, scales
    RandomLayer random({.hidden_size = 2048, .intermediate_size = 2048, .num_experts = 2});
    MoeWeights& weights = random.weights();
    weights.config.num_experts = kNumExperts;
    for (std::size_t e = 2; e < kNumExperts; ++e) weights.experts.push_back(weights.experts[e % 2]);
    const auto backend = open_backend("cuda");
    const Plan plan = backend->plan({.config = weights.config, .max_tokens = 4});
    backend->prepare(plan, weights);  // what the backend allocates once is there
    const Hog hog(kLayerBytes + kLayerBytes / 10);
    EXPECT_LE(hog.left(), kLayerBytes * 11 / 10);
    EXPECT_NO_THROW(backend->prepare(plan, weights)) << hog.left() << " bytes for " << kLayerBytes;
}

TEST_F(CudaLayer, RefusesTensorsOfAnotherDevice) {
    RandomLayer random({});
    const auto backend = open_backend("cuda");
    const auto layer = backend->prepare(backend->plan({.config = random.weights().config, .max_tokens = 4}),
                                        random.weights());
    const Input input = random_input(random.weights().config, 4, 2, Ids::distinct, random.random());
    const DeviceMemory hidden(input.hidden);
    const DeviceMemory output(4 * 64 * 4);
    const DeviceMemory workspace(layer->plan().workspace_bytes);
    const std::string sentence = refusal(
        [&] {
            layer->run(hidden.view(DType::bf16, {4, 64}), routing(input), output.view(DType::f32, {4, 64}),
                       workspace.workspace());
        },
        ErrorKind::invalid_argument);
    EXPECT_NE(sentence.find("top_k_ids"), std::string::npos) << sentence;
    EXPECT_NE(sentence.find("in host memory"), std::string::npos) << sentence;
}

/// The bits of a token in a large batch against those in small ones.
void expect_batch_invariance(const LayerOptions& options) {
    RandomLayer random(options);
    const MoeConfig& config = random.weights().config;
    constexpr std::int64_t kNumTokens = 400;
    constexpr int kTopK = 4;
    const Input batch = random_input(config, kNumTokens, kTopK, Ids::zipf, random.random());
    const auto part = [&](std::int64_t first, std::int64_t count) {
        const auto slice = [&](const auto& values) {
            const auto each = static_cast<std::int64_t>(values.size()) / kNumTokens;
            return std::decay_t<decltype(values)>(values.begin() + first * each,
                                                  values.begin() + (first + count) * each);
        };
        return Input{count, kTopK, slice(batch.hidden), slice(batch.ids), slice(batch.weights)};
    };
    for (const auto& [precision, scale] : {std::pair{Precision::w4a16, ActivationScale::layer_max},
                                           {Precision::w4a4, ActivationScale::layer_max},
                                           {Precision::w4a4, ActivationScale::per_expert},
                                           {Precision::w4a4, ActivationScale::dynamic_token}}) {
        const auto backend = open_backend("cuda");
        const auto layer = backend->prepare(backend->plan({.config = config,
                                                           .precision = precision,
                                                           .activation_scale = scale,
                                                           .max_tokens = kNumTokens,
                                                           .top_k = kTopK,
                                                           .batch_invariant = true}),
                                            random.weights());
        const std::vector<float> together = run_layer<float>(*layer, batch);
        for (const std::int64_t count : {1, 2, 5, 33, 150}) {
            const std::int64_t first = kNumTokens - count - 3;
            const auto begin = together.begin() + first * config.hidden_size;
            EXPECT_EQ(count_differences(run_layer<float>(*layer, part(first, count)),
                                        {begin, begin + count * config.hidden_size}),
                      0U)
                << count << " tokens";
        }
    }
}

TEST_F(CudaLayer, BatchInvariantBitsAreThoseOfATokenAlone) {
    expect_batch_invariance({.hidden_size = 512, .intermediate_size = 704, .num_experts = 8});
}

TEST_F(CudaLayer, BatchInvariantBitsAreThoseOfATokenAloneWithTilesOf512Rows) {
    constexpr LayerOptions kOptions{.hidden_size = 512, .intermediate_size = 16, .num_experts = 264};
    constexpr cuda::sm90::WgmmaLoad kLoad{kOptions.num_experts, kOptions.hidden_size,
                                          kOptions.intermediate_size};
    static_assert(kLoad.suits_512_rows());
    expect_batch_invariance(kOptions);  // the large batch has those tiles, the smallest ones have not
}

TEST(CudaKernels, WgmmaStartsAtMoreRowsWhereThereAreFewTiles) {
    const auto min_rows = [](std::int64_t hidden_size, std::int64_t intermediate_size, int num_experts,
                             const char* kernel = "") {
        Problem problem;
        problem.config.hidden_size = hidden_size;
        problem.config.intermediate_size = intermediate_size;
        problem.config.num_experts = num_experts;
        return cuda::select(problem, kernel).wgmma_min_rows;
    };
    EXPECT_EQ(min_rows(2048, 768, 128), 11);
    EXPECT_EQ(min_rows(7168, 2048, 16), 11) << "128 tiles of gate_up, 224 of down";
    EXPECT_EQ(min_rows(4096, 14336, 8), 11) << "896 and 128 tiles of 256 rows";
    EXPECT_EQ(min_rows(6144, 4608, 8), 20) << "288 and 192 tiles of 256 rows";
    EXPECT_EQ(min_rows(6144, 4608, 8, "sm90_w4a16_wgmma"), 0) << "alone";
    EXPECT_EQ(min_rows(2048, 768, 128, "sm90_w4a16_mma"), std::numeric_limits<std::int64_t>::max())
        << "never";
}

TEST(CudaKernels, ATileOf512RowsWhereItsWavesAreFull) {
    using Load = cuda::sm90::WgmmaLoad;
    EXPECT_TRUE((Load{128, 2048, 768}.suits_512_rows()));
    EXPECT_TRUE((Load{16, 7168, 2048}.suits_512_rows()));
    EXPECT_FALSE((Load{8, 6144, 4608}.suits_512_rows()));
    EXPECT_FALSE((Load{8, 4096, 14336}.suits_512_rows())) << "64 tiles of down";
}

TEST(CudaKernels, BatchInvarianceLeavesTheOneThatSumsAlikeAtEverySize) {
    Problem problem{.precision = Precision::w4a4};
    problem.config.num_experts = 8;
    EXPECT_EQ(cuda::select(problem, "").choices.size(), 2U);
    problem.batch_invariant = true;
    const cuda::Selection selection = cuda::select(problem, "");
    ASSERT_EQ(selection.choices.size(), 1U);
    EXPECT_EQ(selection.choices[0].kernel, "sm90_w4a4_wgmma");
    ASSERT_EQ(selection.rejections.size(), 1U) << "those of the other precision are not listed";
    EXPECT_NE(selection.rejections[0].reason.find("batch_invariant"), std::string::npos);
}

TEST(CudaKernels, ARefusalGivesEveryReason) {
    Problem problem{.layout = WeightLayout::packed};
    problem.config.num_experts = 8;
    EXPECT_EQ(refusal([&] { cuda::select(problem, ""); }, ErrorKind::unsupported),
              "no CUDA kernel serves this w4a16 problem; sm90_w4a16_wgmma: reads the checkpoint's bytes, and "
              "packed weights were asked for; sm90_w4a16_mma: reads the checkpoint's bytes, and packed "
              "weights were asked for");
    problem.layout = WeightLayout::automatic;
    EXPECT_NE(refusal([&] { cuda::select(problem, "sm90_w4a4_mma"); }, ErrorKind::unsupported)
                  .find("sm90_w4a4_mma: computes w4a4"),
              std::string::npos);
}

TEST_F(CudaLayer, RunsOnTheDeviceAskedForAndLeavesTheCurrentOneAlone) {
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count));
    if (count < 2) GTEST_SKIP() << "one GPU";
    RandomLayer random({});
    const Input input = random_input(random.weights().config, 40, 2, Ids::distinct, random.random());
    std::vector<std::vector<float>> outputs;
    for (int device = 0; device < 2; ++device) {
        BackendOptions options;
        options.device = device;
        const auto backend = open_backend("cuda", options);
        const auto layer = backend->prepare(
            backend->plan({.config = random.weights().config, .max_tokens = 40}), random.weights());
        outputs.push_back(run_layer<float>(*layer, input));
        int current = -1;
        check_cuda(cudaGetDevice(&current));
        EXPECT_EQ(current, 0);
    }
    EXPECT_EQ(count_differences(outputs[0], outputs[1]), 0U);
}

TEST_F(CudaLayer, TheEnvironmentNamesAKernel) {
    setenv("MOE4_KERNEL", "sm90_w4a16_mma", 1);
    RandomLayer random({});
    const Problem problem{.config = random.weights().config, .max_tokens = 1000};
    EXPECT_EQ(open_backend("auto")->plan(problem).choices.size(), 1U);
    setenv("MOE4_KERNEL", "scalar_w4a16", 1);
    EXPECT_EQ(open_backend("auto")->name(), "cpu") << "which has it";
    const std::string sentence = refusal([] { open_backend("cuda"); }, ErrorKind::invalid_argument);
    unsetenv("MOE4_KERNEL");
    EXPECT_NE(sentence.find("MOE4_KERNEL is \"scalar_w4a16\""), std::string::npos) << sentence;
}

TEST(CudaBackend, SaysWhyThereIsNone) {
    if (has_gpu()) GTEST_SKIP() << "there is a GPU";
    const std::string sentence = refusal([] { open_backend("cuda"); }, ErrorKind::machine);
    EXPECT_NE(sentence.find("no device"), std::string::npos) << sentence;
}

TEST_F(CudaLayer, ADeviceThatIsNotThereIsNamed) {
    BackendOptions options;
    options.device = 99;
    const std::string sentence = refusal([&] { open_backend("cuda", options); }, ErrorKind::machine);
    EXPECT_NE(sentence.find("99"), std::string::npos) << sentence;
}

}  // namespace
}  // namespace moe4::testing
