// Preparing a layer of 1.3 GB against a plain copy of as many bytes from pinned memory, in the same run:
// `of_copy` is the layer's bytes a second over those of the copy.
#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "dense_matrix.hpp"
#include "moe4/backend.hpp"

namespace {

using namespace moe4;

constexpr std::int64_t kHidden = 4096;
constexpr std::int64_t kIntermediate = 1536;
constexpr int kNumExperts = 128;
constexpr std::int64_t kMatrixBytes = kHidden * kIntermediate * 9 / 16;
constexpr std::size_t kLayerBytes = std::size_t{kNumExperts} * 3 * kMatrixBytes;

void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <class Work>
double seconds(const Work& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Bytes that are valid as codes and as scales.
MoeWeights layer_of(const std::vector<std::uint8_t>& bytes) {
    MoeWeights weights;
    weights.config.hidden_size = kHidden;
    weights.config.intermediate_size = kIntermediate;
    weights.config.num_experts = kNumExperts;
    weights.config.router.top_k = 8;
    const std::uint8_t* next = bytes.data();
    const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
        ExpertMatrix result;
        result.weight = dense_matrix(next, rows, cols);
        next += kMatrixBytes;
        return result;
    };
    for (int i = 0; i < kNumExperts; ++i) {
        ExpertWeights& expert = weights.experts.emplace_back();
        expert.gate = matrix(kIntermediate, kHidden);
        expert.up = matrix(kIntermediate, kHidden);
        expert.down = matrix(kHidden, kIntermediate);
    }
    return weights;
}

void prepare(benchmark::State& state) {
    const auto backend = open_backend("cuda");
    std::vector<std::uint8_t> bytes(kLayerBytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(0x30 + i * 7 % 23);
    const MoeWeights weights = layer_of(bytes);
    const Plan plan = backend->plan({.config = weights.config});
    void* pinned = nullptr;
    void* device = nullptr;
    check(cudaMallocHost(&pinned, kLayerBytes));
    check(cudaMalloc(&device, kLayerBytes));
    std::memcpy(pinned, bytes.data(), kLayerBytes);
    double copying = 0;
    double preparing = 0;
    for (auto _ : state) {
        copying += seconds([&] { check(cudaMemcpy(device, pinned, kLayerBytes, cudaMemcpyHostToDevice)); });
        std::unique_ptr<Layer> layer;
        const double prepared = seconds([&] { layer = backend->prepare(plan, weights); });
        state.SetIterationTime(prepared);
        preparing += prepared;
    }
    const double gigabytes =
        1e-9 * static_cast<double>(state.iterations()) * static_cast<double>(kLayerBytes);
    state.counters["GB/s"] = gigabytes / preparing;
    state.counters["copy_GB/s"] = gigabytes / copying;
    state.counters["of_copy"] = copying / preparing;
    cudaFreeHost(pinned);
    cudaFree(device);
}
BENCHMARK(prepare)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
