// Layers by every tile shape of the Hopper GEMMs, timed as `moe4 bench --backend cuda` times the one chosen.
//     moe4_cuda_bench [--sweep] [--w4a4] SHAPE TOKENS...
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/forward.hpp"
#include "backends/cuda/kernel_list.hpp"
#include "backends/cuda/timing.hpp"
#include "cli/bench_layer.hpp"

namespace moe4::cuda {
namespace {

constexpr int kRoutings = 8;
constexpr int kReplays = 9;

template <class T>
DeviceBuffer upload(const std::vector<T>& values) {
    DeviceBuffer buffer(values.size() * sizeof(T), "inputs");
    check(cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "copying inputs");
    return buffer;
}

struct Routed {
    DeviceBuffer ids, weights;
};

class Bench {
public:
    Bench(const cli::BenchShape& shape, Precision precision, std::int64_t max_tokens)
        : shape_(shape), hidden_(upload(cli::random_hidden(max_tokens * shape.hidden_size, random_))) {
        const MoeWeights weights = cli::random_weights(shape, true, random_);
        const Problem problem{.config = weights.config, .precision = precision, .max_tokens = max_tokens};
        min_rows_ = select(problem, "").wgmma_min_rows;
        const bool is_large = shape.num_experts * shape.expert_bytes() > 4'000'000'000;
        UploadPool uploads(0);
        for (int copy = 0; copy < (is_large ? 1 : 2); ++copy)
            layers_.push_back(prepare_layer(problem, min_rows_, weights, 0, uploads));
        output_ = DeviceBuffer(static_cast<std::size_t>(max_tokens * shape.hidden_size) * 2, "the output");
        workspace_ = DeviceBuffer(workspace_bytes(problem, 0), "a workspace");
    }

    void set_tokens(std::int64_t num_tokens) {
        num_tokens_ = num_tokens;
        routings_.clear();
        for (int i = 0; i < kRoutings; ++i) {
            const auto routing = cli::random_routing(shape_, num_tokens, cli::RoutingKind::uniform, random_);
            routings_.push_back({upload(routing.top_k_ids), upload(routing.top_k_weights)});
        }
    }

    GemmChoice chosen() {
        set_min_rows(min_rows_);
        return choose_gemms(layers_.front(), num_tokens_);
    }

    /// Median of a graph's replays, us a layer.
    double time(const GemmChoice& choice) {
        set_min_rows(choice.uses_wgmma ? 0 : min_rows_);
        const int num_runs = num_tokens_ <= 16 ? 32 : num_tokens_ <= 1024 ? 16 : 4;
        const auto enqueue = [&](cudaStream_t stream) {
            for (std::size_t i = 0; i < static_cast<std::size_t>(num_runs); ++i)
                forward(layers_[i % layers_.size()], input(routings_[i % kRoutings]), choice, stream);
        };
        std::vector<double> seconds = time_replays(enqueue, kReplays);
        std::sort(seconds.begin(), seconds.end());
        return 1e6 * seconds[seconds.size() / 2] / num_runs;
    }

private:
    /// Where wgmma is forced the workspace has to hold rows grouped for it.
    void set_min_rows(std::int64_t min_rows) {
        for (PreparedLayer& layer : layers_) layer.wgmma_min_rows = min_rows;
    }

    ForwardInput input(const Routed& routed) const {
        return {.hidden = reinterpret_cast<const std::uint16_t*>(hidden_.data()),
                .top_k_ids = reinterpret_cast<const std::int32_t*>(routed.ids.data()),
                .top_k_weights = reinterpret_cast<const float*>(routed.weights.data()),
                .num_tokens = num_tokens_,
                .output_f32 = nullptr,
                .output_bf16 = reinterpret_cast<std::uint16_t*>(output_.data()),
                .workspace = workspace_.data()};
    }

    cli::BenchShape shape_;
    std::mt19937_64 random_;
    std::int64_t min_rows_ = 0;  // from there on wgmma is chosen
    std::vector<PreparedLayer> layers_;
    DeviceBuffer hidden_, output_, workspace_;
    std::vector<Routed> routings_;
    std::int64_t num_tokens_ = 0;
};

std::string name_of(const GemmChoice& choice) {
    return choice.uses_wgmma ? "wgmma " + std::to_string(choice.wgmma_shape)
                             : "mma " + std::to_string(choice.mma_shape);
}

void run(const std::vector<std::string>& arguments) {
    bool sweeps = false;
    Precision precision = Precision::w4a16;
    auto next = arguments.begin();
    for (; next != arguments.end() && next->starts_with("--"); ++next) {
        if (*next == "--sweep") sweeps = true;
        if (*next == "--w4a4") precision = Precision::w4a4;
    }
    if (arguments.end() - next < 2)
        throw std::runtime_error("usage: moe4_cuda_bench [--sweep] [--w4a4] SHAPE TOKENS...");
    const cli::BenchShape shape = cli::parse_shape(*next++);
    std::vector<std::int64_t> tokens;
    std::transform(next, arguments.end(), std::back_inserter(tokens),
                   [](const std::string& text) { return std::stoll(text); });
    load_kernels();
    Bench bench(shape, precision, *std::max_element(tokens.begin(), tokens.end()));
    for (const std::int64_t count : tokens) {
        bench.set_tokens(count);
        const GemmChoice chosen = bench.chosen();
        std::printf("%s %s M=%lld: %.1f us (%s)", shape.name.c_str(),
                    precision == Precision::w4a4 ? "w4a4" : "w4a16", static_cast<long long>(count),
                    bench.time(chosen), name_of(chosen).c_str());
        std::vector<GemmChoice> others;
        for (int i = 0; sweeps && i < sm90::kNumWgmmaShapes; ++i)
            others.push_back({.uses_wgmma = true, .wgmma_shape = i});
        for (int i = 0; sweeps && i < sm90::kNumMmaShapes; ++i) others.push_back({.mma_shape = i});
        for (const GemmChoice& choice : others)
            std::printf(" | %s %.1f", name_of(choice).c_str(), bench.time(choice));
        std::printf("\n");
        std::fflush(stdout);
    }
}

}  // namespace
}  // namespace moe4::cuda

int main(int argc, char** argv) {
    try {
        moe4::cuda::run({argv + 1, argv + argc});
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
