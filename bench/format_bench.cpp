// The number formats: activation quantiser and dequantize, in values a second.
#include <benchmark/benchmark.h>

#include <random>
#include <vector>

#include "format/quantize.hpp"

namespace {

void quantize_activations(benchmark::State& state) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> hidden(7168);
    for (float& x : hidden) x = normal(random);
    std::uint8_t codes[moe4::kNvfp4BlockSize];
    for (auto _ : state) {
        for (std::size_t k = 0; k < hidden.size(); k += moe4::kNvfp4BlockSize) {
            benchmark::DoNotOptimize(moe4::format::quantize_activation_block(&hidden[k], 0.002F, codes));
        }
    }
    state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(hidden.size()));
}
BENCHMARK(quantize_activations);

void dequantize(benchmark::State& state) {
    constexpr std::int64_t kRows = 256;
    constexpr std::int64_t kCols = 2048;
    std::mt19937 random(1);
    std::vector<std::uint8_t> packed(kRows * kCols / 2);
    std::vector<std::uint8_t> scales(kRows * kCols / 16);
    for (auto& byte : packed) byte = static_cast<std::uint8_t>(random());
    for (auto& byte : scales) byte = static_cast<std::uint8_t>(random() % 0x7F);
    std::vector<float> out(kRows * kCols);
    const moe4::Nvfp4View view{packed.data(), scales.data(), 0.001, kRows, kCols, kCols / 2, kCols / 16};
    for (auto _ : state) {
        moe4::dequantize(view, out.data());
        benchmark::ClobberMemory();
    }
    state.SetItemsProcessed(state.iterations() * kRows * kCols);
}
BENCHMARK(dequantize);

}  // namespace
