// Times whole layers on the GPU: a graph of many layers, weights from HBM, routing of its own for each layer.
//     moe4_cuda_bench [--limits] [--sweep] [--w4a4] HIDDEN,INTERMEDIATE,EXPERTS,TOP_K TOKENS...
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/forward.hpp"
#include "backends/cuda/kernel_list.hpp"
#include "backends/cuda/limits.hpp"
#include "backends/cuda/timing.hpp"

namespace moe4::cuda {
namespace {

constexpr int kRoutings = 8;
constexpr double kReadBytesPerUs = 4.66e6;  // measured by a plain read kernel
constexpr double kFlopPerUs = 802e6;        // measured, cuBLAS bf16 8192^3 in a burst

struct Routed {
    DeviceBuffer hidden, ids, weights;
    std::int64_t experts_hit = 0;
};

template <class T>
DeviceBuffer upload(const std::vector<T>& values) {
    DeviceBuffer buffer(values.size() * sizeof(T), "inputs");
    check(cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
    return buffer;
}

/// Distinct experts a token, all alike.
Routed random_routing(const Problem& problem, std::int64_t tokens, std::mt19937& random) {
    const MoeConfig& config = problem.config;
    std::vector<std::int32_t> experts(static_cast<std::size_t>(config.num_experts));
    for (std::size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<std::int32_t>(e);
    std::vector<bool> hit(experts.size());
    std::vector<std::int32_t> ids;
    for (std::int64_t t = 0; t < tokens; ++t) {
        for (int j = 0; j < problem.top_k; ++j) {
            const auto at = static_cast<std::size_t>(j);
            std::swap(experts[at], experts[at + random() % (experts.size() - at)]);
            ids.push_back(experts[at]);
            hit[static_cast<std::size_t>(experts[at])] = true;
        }
    }
    std::vector<std::uint16_t> hidden(static_cast<std::size_t>(tokens * config.hidden_size));
    for (std::uint16_t& x : hidden)  // sign and exponents about 1, random mantissa
        x = static_cast<std::uint16_t>((random() & 0x807F) | (0x3F00 + 0x80 * (random() % 2)));
    std::vector<float> weights(ids.size(), 1.0F / static_cast<float>(problem.top_k));
    return {upload(hidden), upload(ids), upload(weights), std::count(hit.begin(), hit.end(), true)};
}

void fill_weights(PreparedLayer& layer, std::mt19937& random) {
    const WeightLayoutBytes at = weight_layout(layer.problem.config, layer.num_held());
    std::vector<std::uint32_t> codes(std::size_t{16} << 20);
    for (std::uint32_t& word : codes) word = static_cast<std::uint32_t>(random());
    std::vector<std::uint8_t> scales(std::size_t{16} << 20);
    for (std::uint8_t& byte : scales) byte = static_cast<std::uint8_t>(0x30 + random() % 0x18);
    const auto fill = [&](std::size_t first, std::size_t last, const void* from, std::size_t bytes) {
        for (std::size_t i = first; i < last; i += bytes) {
            check(
                cudaMemcpy(layer.weights.data() + i, from, std::min(bytes, last - i), cudaMemcpyHostToDevice),
                "filling");
        }
    };
    fill(at.gate_up_codes, at.gate_up_scales, codes.data(), codes.size() * 4);
    fill(at.gate_up_scales, at.down_codes, scales.data(), scales.size());
    fill(at.down_codes, at.down_scales, codes.data(), codes.size() * 4);
    fill(at.down_scales, at.bytes, scales.data(), scales.size());
    const double rms = 2.9 * 2;
    const ExpertScaleValues values{
        .global = {1 / (rms * 45), 1 / (rms * 45), 1 / (rms * 45)},
        .input = {.gate_up = layer.problem.precision == Precision::w4a4 ? 5.0F / 2688 : 1.0F,
                  .down = layer.problem.precision == Precision::w4a4 ? 5.0F / 2688 : 1.0F}};
    set_scales(layer, std::vector<ExpertScaleValues>(static_cast<std::size_t>(layer.num_held()), values));
}

class Bench {
public:
    Bench(const Problem& problem, int copies)
        : problem_(problem), min_rows_(select(problem, "").wgmma_min_rows) {
        std::mt19937 random(1);
        for (int i = 0; i < copies; ++i) {
            layers_.push_back(allocate_layer(problem, min_rows_, 0));
            fill_weights(layers_.back(), random);
        }
        output_ = DeviceBuffer(static_cast<std::size_t>(problem.max_tokens * problem.config.hidden_size) * 2,
                               "out");
        workspace_ = DeviceBuffer(workspace_bytes(problem, 0), "workspace");
    }

    void set_tokens(std::int64_t tokens) {
        tokens_ = tokens;
        routings_.clear();
        std::mt19937 random(static_cast<unsigned>(tokens));
        for (int i = 0; i < kRoutings; ++i) routings_.push_back(random_routing(problem_, tokens, random));
    }

    GemmChoice chosen() {
        set_min_rows(min_rows_);
        return choose_gemms(layers_.front(), tokens_);
    }

    /// Median of the graph's replays, us a layer.
    double time(const GemmChoice& choice, int replays) {
        set_min_rows(choice.uses_wgmma ? 0 : min_rows_);
        const int num_layers = tokens_ <= 16 ? 32 : tokens_ <= 1024 ? 16 : 4;
        const auto run_all = [&](cudaStream_t stream) {
            for (int i = 0; i < num_layers; ++i) {
                const Routed& routed = routings_[static_cast<std::size_t>(i % kRoutings)];
                forward(layers_[static_cast<std::size_t>(i) % layers_.size()],
                        {.hidden = reinterpret_cast<const std::uint16_t*>(routed.hidden.data()),
                         .top_k_ids = reinterpret_cast<const std::int32_t*>(routed.ids.data()),
                         .top_k_weights = reinterpret_cast<const float*>(routed.weights.data()),
                         .num_tokens = tokens_,
                         .output_f32 = nullptr,
                         .output_bf16 = reinterpret_cast<std::uint16_t*>(output_.data()),
                         .workspace = workspace_.data()},
                        choice, stream);
            }
        };
        std::vector<double> seconds = time_replays(run_all, replays);
        std::sort(seconds.begin(), seconds.end());
        return 1e6 * seconds[seconds.size() / 2] / num_layers;
    }

    double floor_us() const {
        double hit = 0;
        for (const Routed& routed : routings_) hit += static_cast<double>(routed.experts_hit) / kRoutings;
        const double H = static_cast<double>(problem_.config.hidden_size);
        const double I = static_cast<double>(problem_.config.intermediate_size);
        const double bytes = 0.5625 * 3 * H * I * hit + 4 * H * static_cast<double>(tokens_);
        const double flops = 6 * H * I * static_cast<double>(tokens_ * problem_.top_k);
        return std::max(bytes / kReadBytesPerUs, flops / kFlopPerUs);
    }

private:
    /// Where wgmma is forced the workspace has to hold rows grouped for it.
    void set_min_rows(std::int64_t min_rows) {
        for (PreparedLayer& layer : layers_) layer.wgmma_min_rows = min_rows;
    }

    Problem problem_;
    std::int64_t min_rows_;  // from there on wgmma is chosen
    std::vector<PreparedLayer> layers_;
    DeviceBuffer output_, workspace_;
    std::vector<Routed> routings_;
    std::int64_t tokens_ = 0;
};

void run(int argc, char** argv) {
    bool sweeps = false;
    bool shows_limits = false;
    Problem problem;
    int at = 1;
    for (; at < argc && argv[at][0] == '-'; ++at) {
        sweeps |= std::strcmp(argv[at], "--sweep") == 0;
        shows_limits |= std::strcmp(argv[at], "--limits") == 0;
        if (std::strcmp(argv[at], "--w4a4") == 0) problem.precision = Precision::w4a4;
    }
    long sizes[4] = {};
    if (at + 1 >= argc ||
        std::sscanf(argv[at], "%ld,%ld,%ld,%ld", sizes, sizes + 1, sizes + 2, sizes + 3) != 4) {
        std::fprintf(stderr,
                     "usage: moe4_cuda_bench [--limits] [--sweep] [--w4a4] HIDDEN,INTERMEDIATE,EXPERTS,TOP_K "
                     "TOKENS...\n");
        std::exit(2);
    }
    problem.config.hidden_size = sizes[0];
    problem.config.intermediate_size = sizes[1];
    problem.config.num_experts = static_cast<int>(sizes[2]);
    problem.top_k = static_cast<int>(sizes[3]);
    std::vector<std::int64_t> tokens;
    for (int i = at + 1; i < argc; ++i) tokens.push_back(std::atol(argv[i]));
    problem.max_tokens = *std::max_element(tokens.begin(), tokens.end());
    load_kernels();
    int num_sms = 0;
    check(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
    for (const MachineLimit& limit : shows_limits ? measure_limits(num_sms) : std::vector<MachineLimit>{})
        std::printf("%s %.0f\n", std::string(limit.name).c_str(), limit.value);
    const double bytes = 0.5625 * 3 * static_cast<double>(sizes[0] * sizes[1] * sizes[2]);
    Bench bench(problem, bytes > 4e9 ? 1 : 2);
    for (const std::int64_t m : tokens) {
        bench.set_tokens(m);
        const GemmChoice chosen = bench.chosen();
        const double us = bench.time(chosen, 9);
        const char* const kind = chosen.uses_wgmma ? "wgmma" : "mma";
        std::printf("%s %s M=%ld: %.1f us, %.2fx floor (%s %d)", argv[at],
                    problem.precision == Precision::w4a4 ? "w4a4" : "w4a16", static_cast<long>(m), us,
                    us / bench.floor_us(), kind, chosen.uses_wgmma ? chosen.wgmma_shape : chosen.mma_shape);
        if (sweeps) {
            for (int shape = 0; shape < sm90::kNumWgmmaShapes; ++shape)
                std::printf(" | wgmma %d %.1f", shape,
                            bench.time({.uses_wgmma = true, .wgmma_shape = shape}, 5));
            for (int shape = 0; shape < sm90::kNumMmaShapes; ++shape)
                std::printf(" | mma %d %.1f", shape, bench.time({.mma_shape = shape}, 5));
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}

}  // namespace
}  // namespace moe4::cuda

int main(int argc, char** argv) {
    try {
        moe4::cuda::run(argc, argv);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
