// What a CPU layer promises beyond the numbers of the conformance suite: the same bits whatever runs beside a
// row or does the work, and with kernels that mix within one layer.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "backends/cpu/forward.hpp"
#include "backends/cpu/kernel_list.hpp"
#include "backends/cpu_layer.hpp"
#include "conformance/layer_runner.hpp"
#include "conformance/random_layer.hpp"
#include "moe/parallel.hpp"
#include "moe4/error.hpp"

namespace moe4::cpu {
namespace {

using namespace moe4::testing;

constexpr Precision kPrecisions[] = {Precision::w4a16, Precision::w4a4};

Input select_rows(const Input& input, const std::vector<std::size_t>& tokens, std::size_t hidden_size) {
    Input result{.num_tokens = static_cast<std::int64_t>(tokens.size()),
                 .top_k = input.top_k,
                 .hidden = {},
                 .ids = {},
                 .weights = {}};
    const auto copy_row = [](auto& to, const auto& from, std::size_t token, std::size_t size) {
        const auto first = from.begin() + static_cast<std::ptrdiff_t>(token * size);
        to.insert(to.end(), first, first + static_cast<std::ptrdiff_t>(size));
    };
    for (const std::size_t token : tokens) {
        copy_row(result.hidden, input.hidden, token, hidden_size);
        copy_row(result.ids, input.ids, token, static_cast<std::size_t>(input.top_k));
        copy_row(result.weights, input.weights, token, static_cast<std::size_t>(input.top_k));
    }
    return result;
}

std::vector<float> row(const std::vector<float>& output, std::size_t token, std::size_t hidden_size) {
    const auto first = output.begin() + static_cast<std::ptrdiff_t>(token * hidden_size);
    return {first, first + static_cast<std::ptrdiff_t>(hidden_size)};
}

class CpuLayerBits : public ::testing::TestWithParam<Precision> {
protected:
    static constexpr std::size_t kHidden = 208;
    static constexpr std::int64_t kTokens = 64;
    static constexpr int kTopK = 3;
    RandomLayer layer_{{.hidden_size = kHidden, .intermediate_size = 112, .num_experts = 6}};
    Input input_ = random_input(layer_.weights().config, kTokens, kTopK, Ids::distinct, layer_.random());
    Problem problem_ = problem_of(layer_.weights(), GetParam(), kTokens, kTopK);
    std::vector<float> expected_ =
        run_layer<float>(*make_layer(layer_.weights(), problem_, threads(1)), input_);
};

TEST_P(CpuLayerBits, AreThoseOfAnyThreadCount) {
    for (const int count : {1, 2, 7}) {
        const auto layer = make_layer(layer_.weights(), problem_, threads(count));
        EXPECT_EQ(count_differences(run_layer<float>(*layer, input_), expected_), 0U) << count << " threads";
    }
}

TEST_P(CpuLayerBits, AreThoseOfARowAlone) {
    const auto layer = make_layer(layer_.weights(), problem_);
    for (std::size_t token = 0; token < kTokens; ++token) {
        const auto alone = run_layer<float>(*layer, select_rows(input_, {token}, kHidden));
        EXPECT_EQ(count_differences(alone, row(expected_, token, kHidden)), 0U) << "token " << token;
    }
}

TEST_P(CpuLayerBits, OfAnExpertWithManyRowsAreThoseOfFew) {
    constexpr std::size_t kManyTokens = 600;  // more than two blocks
    constexpr std::size_t kFew = 50;
    Problem problem = problem_;
    problem.max_tokens = kManyTokens;
    problem.top_k = 1;
    const Input many =
        random_input(layer_.weights().config, kManyTokens, 1, Ids::one_expert, layer_.random());
    const auto layer = make_layer(layer_.weights(), problem, threads(3));
    const auto output = run_layer<float>(*layer, many);
    for (std::size_t first = 0; first < kManyTokens; first += kFew) {
        std::vector<std::size_t> tokens(kFew);
        std::iota(tokens.begin(), tokens.end(), first);
        const auto few = run_layer<float>(*layer, select_rows(many, tokens, kHidden));
        const auto begin = output.begin() + static_cast<std::ptrdiff_t>(first * kHidden);
        EXPECT_EQ(count_differences(few, {begin, begin + kFew * kHidden}), 0U) << "tokens from " << first;
    }
}

TEST_P(CpuLayerBits, AreThoseOfAShuffledBatch) {
    std::vector<std::size_t> order(kTokens);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), layer_.random());
    const auto shuffled =
        run_layer<float>(*make_layer(layer_.weights(), problem_), select_rows(input_, order, kHidden));
    for (std::size_t i = 0; i < order.size(); ++i) {
        EXPECT_EQ(count_differences(row(shuffled, i, kHidden), row(expected_, order[i], kHidden)), 0U);
    }
}

TEST_P(CpuLayerBits, ANaNChangesNoOtherRow) {
    Input broken = input_;
    constexpr std::size_t kBroken = 20;
    broken.hidden[kBroken * kHidden + 33] = 0x7FC0;
    const auto output = run_layer<float>(*make_layer(layer_.weights(), problem_), broken);
    for (std::size_t token = 0; token < kTokens; ++token) {
        const auto found = row(output, token, kHidden);
        if (token == kBroken) {
            EXPECT_TRUE(std::all_of(found.begin(), found.end(), [](float x) { return x != x; }));
        } else {
            EXPECT_EQ(count_differences(found, row(expected_, token, kHidden)), 0U) << "token " << token;
        }
    }
}

TEST_P(CpuLayerBits, AreThoseOfAnyParallelFor) {
    const ParallelFor serial = [](int count, ThreadPool::Body body, void* context) {
        for (int i = 0; i < count; ++i) body(context, i);
    };
    const ParallelFor reversed = [](int count, ThreadPool::Body body, void* context) {
        for (int i = count - 1; i >= 0; --i) body(context, i);
    };
    const ParallelFor thread_each = [](int count, ThreadPool::Body body, void* context) {
        std::vector<std::thread> each;
        for (int i = 0; i < count; ++i) each.emplace_back(body, context, i);
        for (std::thread& thread : each) thread.join();
    };
    const ParallelFor fewer_threads = moe::on_threads(2);
    for (const ParallelFor& parallel_for : {serial, reversed, thread_each, fewer_threads}) {
        BackendOptions options = threads(5);
        options.parallel_for = parallel_for;
        const auto layer = make_layer(layer_.weights(), problem_, options);
        EXPECT_EQ(count_differences(run_layer<float>(*layer, input_), expected_), 0U);
    }
}

TEST_P(CpuLayerBits, AreThoseOfManyCallersAtOnce) {
    const auto layer = make_layer(layer_.weights(), problem_, threads(3));
    std::vector<std::size_t> differences(6);
    std::vector<std::thread> callers;
    for (std::size_t& result : differences) {
        callers.emplace_back([&] {
            for (int i = 0; i < 5; ++i)
                result += count_differences(run_layer<float>(*layer, input_), expected_);
        });
    }
    for (std::thread& caller : callers) caller.join();
    for (const std::size_t result : differences) EXPECT_EQ(result, 0U);
}

TEST_P(CpuLayerBits, AreTheSameInADirtyWorkspace) {
    const auto layer = make_layer(layer_.weights(), problem_);
    const AlignedBuffer workspace(layer->plan().workspace_bytes);
    for (int i = 0; i < 2; ++i) {
        const auto output = run_layer<float>(*layer, input_, workspace.workspace());
        EXPECT_EQ(count_differences(output, expected_), 0U);
    }
}

TEST_P(CpuLayerBits, AreThoseOfASmallerBatchThanPlanned) {
    Problem roomy = problem_;
    roomy.max_tokens = 1000;
    const auto layer = make_layer(layer_.weights(), roomy);
    EXPECT_EQ(count_differences(run_layer<float>(*layer, input_), expected_), 0U);
}

/// The experts of one process and those of another add up to the layer, but for the order of the slots.
TEST_P(CpuLayerBits, ExpertRangesShareTheSlots) {
    Problem first = problem_;
    first.experts = {0, 2};
    Problem rest = problem_;
    rest.experts = {2, -1};
    const auto a = run_layer<float>(*make_layer(layer_.weights(), first), input_);
    const auto b = run_layer<float>(*make_layer(layer_.weights(), rest), input_);
    for (std::size_t i = 0; i < expected_.size(); ++i) ASSERT_NEAR(a[i] + b[i], expected_[i], 1e-5F);
}

/// 6 * x[1] is beyond the largest float, and 1 * x[0] brings the sum back: only a true fused multiply-add is
/// finite.
TEST(CpuLayer, ProductsBeyondTheLargestFloatMayCancel) {
    RandomLayer random({.hidden_size = 16, .intermediate_size = 16, .num_experts = 1});
    for (ExpertMatrix* matrix : {&random.weights().experts[0].gate, &random.weights().experts[0].up}) {
        matrix->weight.global_scale = 0x1p-126;
        for (int row = 0; row < 16; ++row) {
            std::uint8_t* codes = RandomLayer::mutable_bytes(matrix->weight.packed) + row * 8;
            std::fill_n(codes, 8, std::uint8_t{0});
            codes[0] = 0x72;                                                     // 1.0, 6.0
            RandomLayer::mutable_bytes(matrix->weight.block_scale)[row] = 0x38;  // 1.0
        }
    }
    Input input{.num_tokens = 1, .top_k = 1, .hidden = {}, .ids = {0}, .weights = {1.0F}};
    input.hidden.assign(16, 0);
    input.hidden[0] = format::bf16_from_float(-0x1.Ep127F);
    input.hidden[1] = format::bf16_from_float(0x1.98p125F);
    const auto expected = moe::reference_layer(random.weights(), {}, input.reference());
    for (const Kernel* kernel : kernel_list()) {
        BackendOptions options = threads(1);
        options.kernel = kernel->name;
        if (kernel->precision != Precision::w4a16 || !availability(*kernel, read_allowed(options))) continue;
        const Problem problem = problem_of(random.weights(), Precision::w4a16, 1, 1);
        const auto output = run_layer<float>(*make_layer(random.weights(), problem, options), input);
        EXPECT_EQ(count_differences(output, expected), 0U) << kernel->name;
        for (const float y : output) EXPECT_TRUE(std::isfinite(y)) << kernel->name;
    }
}

// Kernels that only these tests contain, made of the scalar one.

const Kernel& scalar_kernel(Precision precision) {
    for (const Kernel* kernel : kernel_list()) {
        if (kernel->needs == 0 && kernel->precision == precision) return *kernel;
    }
    throw std::logic_error("every build has a scalar kernel");
}

/// The bytes of a matrix without gaps: codes, then scales.
std::size_t dense_bytes(std::int64_t rows, std::int64_t cols) {
    return static_cast<std::size_t>(rows * (cols / 2 + cols / 16));
}
std::uint8_t* copy_dense(const Nvfp4View& view, std::uint8_t* out) {
    for (std::int64_t r = 0; r < view.rows; ++r, out += view.cols / 2)
        std::memcpy(out, view.packed + r * view.packed_stride, static_cast<std::size_t>(view.cols / 2));
    for (std::int64_t r = 0; r < view.rows; ++r, out += view.cols / 16)
        std::memcpy(out, view.block_scale + r * view.scale_stride, static_cast<std::size_t>(view.cols / 16));
    return out;
}
Nvfp4View dense_view(const std::uint8_t* bytes, std::int64_t rows, std::int64_t cols) {
    return {bytes, bytes + rows * cols / 2, 1.0, rows, cols, cols / 2, cols / 16};
}

constexpr PackedLayout kDense{
    .name = "dense",
    .gate_up_bytes = [](std::int64_t rows, std::int64_t cols) { return 2 * dense_bytes(rows, cols); },
    .down_bytes = dense_bytes,
    .pack_gate_up = [](const Nvfp4View& gate, const Nvfp4View& up,
                       std::uint8_t* out) { copy_dense(up, copy_dense(gate, out)); },
    .pack_down = [](const Nvfp4View& down, std::uint8_t* out) { copy_dense(down, out); },
};

template <Precision kPrecision>
Kernel dense_kernel() {
    Kernel kernel = scalar_kernel(kPrecision);
    kernel.name = "dense";
    kernel.layout = &kDense;
    kernel.gate_up = [](const GateUpTask& task) {
        const std::size_t bytes = dense_bytes(task.intermediate_size, task.hidden_size);
        const std::uint8_t* packed = task.expert->packed_gate_up;
        ExpertData expert;
        expert.gate = dense_view(packed, task.intermediate_size, task.hidden_size);
        expert.up = dense_view(packed + bytes, task.intermediate_size, task.hidden_size);
        GateUpTask in_place = task;
        in_place.expert = &expert;
        scalar_kernel(kPrecision).gate_up(in_place);
    };
    kernel.down = [](const DownTask& task) {
        ExpertData expert;
        expert.down = dense_view(task.expert->packed_down, task.hidden_size, task.intermediate_size);
        DownTask in_place = task;
        in_place.expert = &expert;
        scalar_kernel(kPrecision).down(in_place);
    };
    return kernel;
}

/// For experts with 9 rows or more: other tiles and groups, and h left to a second pass.
template <Precision kPrecision>
Kernel large_kernel() {
    Kernel kernel = dense_kernel<kPrecision>();
    kernel.name = "dense_large";
    kernel.min_rows = 9;
    kernel.encodes_h = false;
    kernel.rows_per_group = 16;
    kernel.gate_up_tile = 48;
    kernel.down_tile = 96;
    return kernel;
}

std::vector<float> forward_output(const PreparedLayer& layer, const Input& input) {
    const AlignedBuffer workspace(layer.layout.bytes);
    std::vector<float> output(static_cast<std::size_t>(input.num_tokens * layer.problem.config.hidden_size),
                              std::numeric_limits<float>::quiet_NaN());
    forward(layer, {.hidden = input.hidden.data(),
                    .top_k_ids = input.ids.data(),
                    .top_k_weights = input.weights.data(),
                    .num_tokens = input.num_tokens,
                    .output_f32 = output.data(),
                    .output_bf16 = nullptr,
                    .workspace = static_cast<std::uint8_t*>(workspace.workspace().data)});
    return output;
}

TEST_P(CpuLayerBits, AreThoseOfPackedKernelsThatMix) {
    const bool is_w4a4 = GetParam() == Precision::w4a4;
    const Kernel small = is_w4a4 ? dense_kernel<Precision::w4a4>() : dense_kernel<Precision::w4a16>();
    const Kernel large = is_w4a4 ? large_kernel<Precision::w4a4>() : large_kernel<Precision::w4a16>();
    // Experts of 1 to 40 rows, so that both kernels serve some.
    const Input zipf = random_input(layer_.weights().config, kTokens, kTopK, Ids::zipf, layer_.random());
    const auto workers = std::make_shared<Workers>(3, ParallelFor{});
    for (const auto scale : {ActivationScale::layer_max, ActivationScale::per_expert,
                             ActivationScale::dynamic, ActivationScale::dynamic_token}) {
        Problem problem = problem_;
        problem.activation_scale = scale;
        const PreparedLayer mixed = prepare_layer(problem, {&large, &small}, layer_.weights(), workers);
        EXPECT_EQ(mixed.kernels[mixed.kernel_index(9)], &large);
        EXPECT_EQ(mixed.kernels[mixed.kernel_index(8)], &small);
        BackendOptions scalar = threads(2);  // whatever this machine would choose may sum in another order
        scalar.kernel = is_w4a4 ? "scalar_w4a4" : "scalar_w4a16";
        const auto plain = run_layer<float>(*make_layer(layer_.weights(), problem, scalar), zipf);
        EXPECT_EQ(count_differences(forward_output(mixed, zipf), plain), 0U);
    }
}

/// As on thousands of rows, whose y would not fit.
TEST_P(CpuLayerBits, AreThoseOfAnyNumberOfBands) {
    for (const auto scale : {ActivationScale::layer_max, ActivationScale::dynamic}) {
        Problem problem = problem_;
        problem.activation_scale = scale;
        PreparedLayer layer = prepare_layer(problem, {&scalar_kernel(GetParam())}, layer_.weights(),
                                            std::make_shared<Workers>(3, ParallelFor{}));
        const auto one_band = forward_output(layer, input_);
        layer.layout.y_bytes = static_cast<std::size_t>(kTokens * kTopK * 4 * layer.layout.band_unit);
        EXPECT_EQ(count_differences(forward_output(layer, input_), one_band), 0U);
    }
}

/// The first piece of every block takes as long as if its thread had lost its core.
template <Precision kPrecision>
Kernel disturbed_kernel() {
    static constexpr std::chrono::milliseconds kLong{2};  // others sleep by then
    Kernel kernel = scalar_kernel(kPrecision);
    kernel.gate_up = [](const GateUpTask& task) {
        if (task.first == 0) std::this_thread::sleep_for(kLong);
        scalar_kernel(kPrecision).gate_up(task);
    };
    kernel.down = [](const DownTask& task) {
        if (task.first == 0) std::this_thread::sleep_for(kLong);
        scalar_kernel(kPrecision).down(task);
    };
    return kernel;
}

TEST_P(CpuLayerBits, AreThoseOfDisturbedThreads) {
    const Kernel& plain = scalar_kernel(GetParam());
    const Kernel disturbed = GetParam() == Precision::w4a4 ? disturbed_kernel<Precision::w4a4>()
                                                           : disturbed_kernel<Precision::w4a16>();
    for (const ParallelFor& parallel_for : {ParallelFor{}, moe::on_threads(2)}) {
        const auto workers = std::make_shared<Workers>(16, parallel_for);
        for (const auto scale : {ActivationScale::layer_max, ActivationScale::dynamic_token}) {
            Problem problem = problem_;
            problem.activation_scale = scale;
            const auto layer_of = [&](const Kernel& kernel) {
                return prepare_layer(problem, {&kernel}, layer_.weights(), workers);
            };
            const auto expected = forward_output(layer_of(plain), input_);
            EXPECT_EQ(count_differences(forward_output(layer_of(disturbed), input_), expected), 0U);
        }
    }
}

TEST(CpuLayer, InPlaceReadsTheBytesItWasGivenAndKeepsTheirOwner) {
    for (const Precision precision : kPrecisions) {
        RandomLayer random({});
        MoeWeights& weights = random.weights();
        const auto bytes_owner = std::make_shared<int>();
        weights.owner = bytes_owner;
        Problem problem = problem_of(weights, precision, 4, 2);
        problem.layout = WeightLayout::in_place;
        auto layer = make_layer(weights, problem);
        const Input input = random_input(weights.config, 4, 2, Ids::distinct, random.random());
        const std::vector<float> before = run_layer<float>(*layer, input);
        for (const ExpertWeights& expert : weights.experts)
            RandomLayer::mutable_bytes(expert.down.weight.packed)[0] ^= 0x88U;  // the signs of two weights
        EXPECT_NE(run_layer<float>(*layer, input), before);
        weights.owner.reset();
        EXPECT_EQ(bytes_owner.use_count(), 2) << "the layer's";
        layer.reset();
        EXPECT_EQ(bytes_owner.use_count(), 1);
    }
}

/// An activation scale of w4a4 changes nothing in w4a16: neither what is reserved nor what is used.
TEST(CpuWorkspace, OfW4a16IsTheSameForEveryActivationScale) {
    const Kernel kernel = dense_kernel<Precision::w4a4>();  // any that encodes
    Problem problem{.precision = Precision::w4a16, .max_tokens = 100};
    problem.config.hidden_size = 64;
    problem.config.intermediate_size = 32;
    const std::vector<const Kernel*> kernels{&kernel, &kernel};
    const auto bytes = [&] { return workspace_layout(problem, 1, 4, kernels, 2).bytes; };
    const std::size_t plain = bytes();
    problem.activation_scale = ActivationScale::per_expert;
    EXPECT_EQ(bytes(), plain);
}

INSTANTIATE_TEST_SUITE_P(Precisions, CpuLayerBits, ::testing::ValuesIn(kPrecisions),
                         [](const auto& parameters) {
                             return std::string(moe::precision_name(parameters.param));
                         });

// The pieces of a phase have a table of their own in the workspace: too many of them would overwrite the
// rest.
TEST(CpuLayerPieces, FitTheirTableForAnyNumberOfWorkers) {
    const ParallelFor serial = [](int count, ThreadPool::Body body, void* context) {
        for (int i = 0; i < count; ++i) body(context, i);
    };
    for (const int intermediate_size : {768, 1024, 1408, 2048}) {
        RandomLayer random({.hidden_size = 32, .intermediate_size = intermediate_size, .num_experts = 8});
        for (const int top_k : {1, 8}) {
            const Problem problem = problem_of(random.weights(), Precision::w4a4, 2, top_k);
            const Input input =
                random_input(random.weights().config, 2, top_k, Ids::distinct, random.random());
            const auto expected = run_layer<float>(*make_layer(random.weights(), problem, threads(1)), input);
            for (int workers = 2; workers <= 128; ++workers) {
                BackendOptions options = threads(workers);
                options.parallel_for = serial;
                const auto found = run_layer<float>(*make_layer(random.weights(), problem, options), input);
                ASSERT_EQ(count_differences(found, expected), 0U) << intermediate_size << " " << workers;
            }
        }
    }
}

}  // namespace
}  // namespace moe4::cpu
