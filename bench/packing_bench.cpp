// Packing experts of 2048 x 768 against copying their bytes, in the same run: `of_copy` is packed bytes a
// second over those of memcpy with as many threads.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "backends/cpu/kernel_list.hpp"
#include "backends/cpu/workers.hpp"
#include "dense_matrix.hpp"

namespace moe4::cpu {
namespace {

constexpr std::int64_t kHidden = 2048;
constexpr std::int64_t kIntermediate = 768;
constexpr std::int64_t kMatrixBytes = kHidden * kIntermediate * 9 / 16;
constexpr std::int64_t kExpertBytes = 3 * kMatrixBytes;
constexpr std::int64_t kNumExperts = 256;  // 680 MB, beyond any cache

void pack_expert(const PackedLayout& layout, const std::uint8_t* from, std::uint8_t* to) {
    layout.pack_gate_up(dense_matrix(from, kIntermediate, kHidden),
                        dense_matrix(from + kMatrixBytes, kIntermediate, kHidden), to);
    layout.pack_down(dense_matrix(from + 2 * kMatrixBytes, kHidden, kIntermediate), to + 2 * kMatrixBytes);
}

/// Seconds that workers take for use(from, to, number of experts) of all of them, `step` at a time.
template <class Use>
double seconds(const Workers& workers, std::int64_t step, const Use& use) {
    struct alignas(64) Line {
        std::uint8_t bytes[64];
    };
    static std::vector<Line> from(kNumExperts * kExpertBytes / 64, Line{});
    static std::vector<Line> to(from.size(), Line{});
    const auto begin = std::chrono::steady_clock::now();
    workers.for_each((kNumExperts + step - 1) / step, [&](int, std::int64_t i) {
        const std::int64_t first = i * step;
        use(from[0].bytes + first * kExpertBytes, to[0].bytes + first * kExpertBytes,
            std::min(step, kNumExperts - first));
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Packing and copying in turn, so that both see the same machine.
void pack_experts(benchmark::State& state, const PackedLayout& layout) {
    const Workers workers(static_cast<int>(state.range(0)), {});
    double packing = 0;
    double copying = 0;
    for (auto _ : state) {
        copying += seconds(workers, kNumExperts / state.range(0),
                           [](const std::uint8_t* from, std::uint8_t* to, std::int64_t count) {
                               std::memcpy(to, from, static_cast<std::size_t>(count * kExpertBytes));
                           });
        const double packed = seconds(
            workers, 1,
            [&](const std::uint8_t* from, std::uint8_t* to, std::int64_t) { pack_expert(layout, from, to); });
        state.SetIterationTime(packed);
        packing += packed;
    }
    const double gigabytes = 1e-9 * static_cast<double>(state.iterations() * kNumExperts * kExpertBytes);
    state.counters["GB/s"] = gigabytes / packing;
    state.counters["copy_GB/s"] = gigabytes / copying;
    state.counters["of_copy"] = copying / packing;
}

[[maybe_unused]] const bool kRegistered = [] {
    std::map<const PackedLayout*, std::string> layouts;  // each by the kernels that read it
    const Allowed allowed = read_allowed({});
    for (const Kernel* kernel : kernel_list()) {
        if (kernel->layout == nullptr || !availability(*kernel, allowed)) continue;
        std::string& name = layouts[kernel->layout];
        if (!name.empty()) name += ',';
        name += kernel->name;
    }
    for (const auto& [layout, name] : layouts) {
        auto* bench = benchmark::RegisterBenchmark(
            name.c_str(), [layout = layout](benchmark::State& state) { pack_experts(state, *layout); });
        bench->ArgName("threads")->UseManualTime()->Unit(benchmark::kMillisecond)->Arg(1);
        if (usable_threads() > 1) bench->Arg(usable_threads());
    }
    return true;
}();

}  // namespace
}  // namespace moe4::cpu
