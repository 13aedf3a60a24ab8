#include "backends/cpu/limits.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

#include "backends/cpu/kernels/instruction_peaks.hpp"
#include "moe4/error.hpp"

namespace moe4::cpu {

namespace {

constexpr int kRepeats = 5;
constexpr std::int64_t kReadChunk = std::int64_t{1} << 20;
constexpr std::int64_t kPeakIterations = 2'000'000;

/// So many times the last cache that next to nothing is found there the next time.
std::int64_t read_bytes() {
    constexpr std::int64_t kLeast = std::int64_t{1} << 30;
    const auto cache = static_cast<std::int64_t>(memory_sizes().last_level_cache);
    return std::max(kLeast, (8 * cache + kReadChunk - 1) / kReadChunk * kReadChunk);
}

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
    const std::int64_t bytes = read_bytes();
    const std::unique_ptr<void, void (*)(void*)> memory(
        std::aligned_alloc(4096, static_cast<std::size_t>(bytes)), std::free);
    if (!memory) {
        throw Error(ErrorKind::machine,
                    "measuring the memory needs " + std::to_string(bytes) + " bytes of it");
    }
    auto* data = static_cast<std::uint8_t*>(memory.get());
    const std::int64_t num_chunks = bytes / kReadChunk;
    workers.for_each(num_chunks,
                     [&](int, std::int64_t chunk) { std::fill_n(data + chunk * kReadChunk, kReadChunk, 1); });
    const double seconds = median_seconds([&] {
        workers.for_each(num_chunks,
                         [&](int, std::int64_t c) { read_memory(data + c * kReadChunk, kReadChunk, isa); });
    });
    return static_cast<double>(bytes) / seconds * 1e-9;
}

double peak_gop_per_s(const Workers& workers, const InstructionPeak& peak) {
    const int threads = workers.count();
    const double seconds = median_seconds(
        [&] { workers.for_each(threads, [&](int, std::int64_t) { peak.loop(kPeakIterations); }); });
    return peak.operations_per_iteration * static_cast<double>(kPeakIterations) * threads / seconds * 1e-9;
}

}  // namespace

MemorySizes memory_sizes() {
    MemorySizes sizes{.last_level_cache = std::uint64_t{32} << 20,
                      .free = static_cast<std::uint64_t>(sysconf(_SC_AVPHYS_PAGES)) *
                              static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE))};
    for (const char* index : {"index3", "index2"}) {
        std::ifstream file("/sys/devices/system/cpu/cpu0/cache/" + std::string(index) + "/size");
        std::uint64_t kilobytes = 0;
        if (!(file >> kilobytes)) continue;
        sizes.last_level_cache = kilobytes * 1024;
        break;
    }
    return sizes;
}

std::vector<MachineLimit> measure_memory(const Workers& workers, IsaSet isa) {
    return {{.name = "dram_read", .value = dram_read_gb_per_s(workers, isa)}};
}

std::vector<MachineLimit> measure_arithmetic(const Workers& workers, IsaSet isa) {
    std::vector<MachineLimit> limits;
    for (int i = 0; i < kNumInstructionPeaks; ++i) {
        const InstructionPeak& peak = kInstructionPeaks[i];
        if ((peak.needs & ~isa) == 0)
            limits.push_back({.name = peak.name, .value = peak_gop_per_s(workers, peak)});
    }
    return limits;
}

}  // namespace moe4::cpu
