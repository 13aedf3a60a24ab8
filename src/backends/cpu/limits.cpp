#include "backends/cpu/limits.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>

#include "backends/cpu/kernels/instruction_peaks.hpp"
#include "moe4/error.hpp"

namespace moe4::cpu {

namespace {

constexpr int kRepeats = 5;
constexpr std::int64_t kReadBytes = std::int64_t{1} << 30;  // several times the largest cache
constexpr std::int64_t kReadChunk = std::int64_t{1} << 20;
constexpr std::int64_t kPeakIterations = 2'000'000;

/// The median of the seconds that work() takes.
template <class Work>
double median_seconds(const Work& work) {
    std::array<double, kRepeats> seconds{};
    for (double& s : seconds) {
        const auto start = std::chrono::steady_clock::now();
        work();
        s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    std::nth_element(seconds.begin(), seconds.begin() + kRepeats / 2, seconds.end());
    return seconds[kRepeats / 2];
}

double dram_read_gb_per_s(const Workers& workers, IsaSet isa) {
    const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(4096, kReadBytes), std::free);
    if (!memory) {
        throw Error(ErrorKind::machine,
                    "measuring the memory needs " + std::to_string(kReadBytes) + " bytes of it");
    }
    auto* data = static_cast<std::uint8_t*>(memory.get());
    constexpr std::int64_t kChunks = kReadBytes / kReadChunk;
    workers.for_each(kChunks,
                     [&](int, std::int64_t chunk) { std::fill_n(data + chunk * kReadChunk, kReadChunk, 1); });
    const double seconds = median_seconds([&] {
        workers.for_each(kChunks,
                         [&](int, std::int64_t c) { read_memory(data + c * kReadChunk, kReadChunk, isa); });
    });
    return static_cast<double>(kReadBytes) / seconds * 1e-9;
}

double peak_gop_per_s(const Workers& workers, const InstructionPeak& peak) {
    const int threads = workers.count();
    const double seconds = median_seconds(
        [&] { workers.for_each(threads, [&](int, std::int64_t) { peak.loop(kPeakIterations); }); });
    return peak.operations_per_iteration * static_cast<double>(kPeakIterations) * threads / seconds * 1e-9;
}

}  // namespace

std::vector<MachineLimit> measure_limits(const Workers& workers, IsaSet isa) {
    std::vector<MachineLimit> limits{{.name = "dram_read", .value = dram_read_gb_per_s(workers, isa)}};
    for (int i = 0; i < kNumInstructionPeaks; ++i) {
        const InstructionPeak& peak = kInstructionPeaks[i];
        if ((peak.needs & ~isa) == 0)
            limits.push_back({.name = peak.name, .value = peak_gop_per_s(workers, peak)});
    }
    return limits;
}

}  // namespace moe4::cpu
