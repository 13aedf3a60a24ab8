// Runs the first MoE layer of a checkpoint on random tokens: ./run_one_layer DIR. Meant to be copied.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "moe4/moe4.hpp"

int main(int argc, char** argv) try {
    if (argc != 2) return std::fprintf(stderr, "usage: run_one_layer CHECKPOINT_DIR\n"), 2;
    const auto checkpoint = moe4::Checkpoint::open(argv[1]);
    if (checkpoint.moe_layers().empty()) return std::fprintf(stderr, "no MoE layer in %s\n", argv[1]), 2;
    const int layer_number = checkpoint.moe_layers().front();
    const moe4::MoeWeights weights = checkpoint.moe_layer(layer_number);
    const moe4::MoeConfig& config = weights.config;

    constexpr std::int64_t kTokens = 64;
    const auto backend = moe4::open_backend("cpu");
    const moe4::Plan plan = backend->plan({.config = config, .max_tokens = kTokens});
    std::fputs(plan.explain().c_str(), stdout);
    const auto layer = backend->prepare(plan, weights);

    std::mt19937 random(0);
    std::vector<std::uint16_t> hidden(static_cast<std::size_t>(kTokens * config.hidden_size));  // bf16
    for (auto& x : hidden) x = static_cast<std::uint16_t>(0x3F00 + random() % 256 + (random() % 2) * 0x8000);
    std::vector<float> output(hidden.size());
    const int top_k = config.router.top_k;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(kTokens * top_k));
    std::vector<float> top_k_weights(ids.size());
    const std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, plan.workspace_bytes),
                                                         std::free);

    if (!scratch) throw std::bad_alloc();

    using moe4::DType;
    const moe4::TensorView x{hidden.data(), DType::bf16, {kTokens, config.hidden_size}};
    const moe4::MutableTensorView ids_view{ids.data(), DType::i32, {kTokens, top_k}};
    const moe4::MutableTensorView weights_view{top_k_weights.data(), DType::f32, {kTokens, top_k}};
    layer->route(x, ids_view, weights_view);
    layer->run(x, {ids_view, weights_view}, {output.data(), DType::f32, {kTokens, config.hidden_size}},
               {scratch.get(), plan.workspace_bytes});
    std::printf("layer %d: output[0][0..3] = %g %g %g %g\n", layer_number, static_cast<double>(output[0]),
                static_cast<double>(output[1]), static_cast<double>(output[2]),
                static_cast<double>(output[3]));
    return 0;
} catch (const moe4::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.kind());
}
