// Every CPU kernel that runs here on one expert after the other, as a layer calls it: both GEMMs, 2048 x 768.
// The counters hold it against what DRAM and the kernel's instruction gave in the same run, with as many
// threads: `of_dram` is packed bytes a second over DRAM read, `of_peak` operations a second over the peak.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backends/cpu/kernel_list.hpp"
#include "backends/cpu/limits.hpp"
#include "backends/cpu/workers.hpp"
#include "dense_matrix.hpp"
#include "random_bytes.hpp"

namespace moe4::cpu {
namespace {

constexpr std::int64_t kHidden = 2048;
constexpr std::int64_t kIntermediate = 768;
constexpr std::size_t kMatrixBytes = kHidden * kIntermediate * 9 / 16;

/// Four times the last-level cache, so that weights come from DRAM.
std::size_t working_set() {
    return std::max<std::size_t>(4 * memory_sizes().last_level_cache, std::size_t{128} << 20);
}

/// Copies of one expert as a kernel reads it.
class Experts {
public:
    explicit Experts(const PackedLayout* layout) {
        std::mt19937_64 random(1);
        const std::size_t gate_up =
            layout == nullptr ? 2 * kMatrixBytes : layout->gate_up_bytes(kIntermediate, kHidden);
        const std::size_t down =
            layout == nullptr ? kMatrixBytes : layout->down_bytes(kHidden, kIntermediate);
        const std::size_t count = working_set() / (gate_up + down);
        bytes_ = random_bytes(count * (gate_up + down), random);
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint8_t* expert = bytes_.get() + i * (gate_up + down);
            ExpertData& data = experts_.emplace_back();
            if (layout == nullptr) {
                data.gate = dense_matrix(expert, kIntermediate, kHidden);
                data.up = dense_matrix(expert + kMatrixBytes, kIntermediate, kHidden);
                data.down = dense_matrix(expert + gate_up, kHidden, kIntermediate);
            } else {  // random bytes of a layout are a random expert
                data.packed_gate_up = expert;
                data.packed_down = expert + gate_up;
            }
        }
    }
    const ExpertData& next() { return experts_[next_++ % experts_.size()]; }

private:
    Bytes bytes_;
    std::vector<ExpertData> experts_;
    std::size_t next_ = 0;
};

/// What one thread needs to run a kernel on `num_rows` rows.
class Job {
public:
    Job(const Kernel& kernel, std::int64_t num_rows)
        : kernel_(kernel),
          num_rows_(num_rows),
          scale_(static_cast<std::size_t>(num_rows), 0.002F),
          hidden_(random_hidden(num_rows * kHidden, random_)),
          panel_(random_bytes(kernel.panel_bytes(num_rows, kHidden), random_)),
          h_panel_(random_bytes(kernel.panel_bytes(num_rows, kIntermediate), random_)),
          h_rows_(random_bytes(static_cast<std::size_t>(num_rows * kIntermediate) * 2, random_)),
          y_(random_bytes(static_cast<std::size_t>(num_rows * kHidden) * 4, random_)),
          scratch_(random_bytes(kernel.scratch_bytes(num_rows, kHidden, kIntermediate), random_)) {
        GatherTask gather{hidden_.get(), nullptr, kHidden, num_rows, panel_.get()};
        Bytes encoded;
        if (kernel.encode_rows != nullptr) {
            encoded =
                random_bytes(kernel.encoded_bytes(kHidden) * static_cast<std::size_t>(num_rows), random_);
            kernel.encode_rows({reinterpret_cast<const std::uint16_t*>(hidden_.get()), nullptr, scale_.data(),
                                kHidden, 0, num_rows, encoded.get()});
            gather.rows = encoded.get();
        }
        kernel.gather_rows(gather);
    }

    void run(const ExpertData& expert) {
        kernel_.gate_up(
            {.expert = &expert,
             .panel = panel_.get(),
             .gate_scale = scale_.data(),
             .up_scale = scale_.data(),
             .input_scale = scale_.data(),
             .num_rows = num_rows_,
             .hidden_size = kHidden,
             .intermediate_size = kIntermediate,
             .first = 0,
             .last = kIntermediate,
             .h_panel = kernel_.encodes_h ? h_panel_.get() : nullptr,
             .h_rows = kernel_.encodes_h ? nullptr : reinterpret_cast<std::uint16_t*>(h_rows_.get()),
             .scratch = scratch_.get()});
        kernel_.down({.expert = &expert,
                      .panel = h_panel_.get(),
                      .scale = scale_.data(),
                      .num_rows = num_rows_,
                      .hidden_size = kHidden,
                      .intermediate_size = kIntermediate,
                      .first = 0,
                      .last = kHidden,
                      .y = reinterpret_cast<float*>(y_.get()),
                      .y_stride = kHidden,
                      .past_caches = false,
                      .scratch = scratch_.get()});
    }

private:
    std::mt19937_64 random_{2};
    const Kernel& kernel_;
    std::int64_t num_rows_;
    std::vector<float> scale_;
    Bytes hidden_, panel_, h_panel_, h_rows_, y_, scratch_;
};

double limit(int threads, const std::string& name) {
    static std::map<int, std::vector<MachineLimit>> limits;
    auto& measured = limits[threads];
    if (measured.empty()) {
        const Workers workers(threads, {});
        measured = measure_memory(workers, detect_isa());
        for (const MachineLimit& each : measure_arithmetic(workers, detect_isa())) measured.push_back(each);
    }
    for (const MachineLimit& each : measured) {
        if (each.name == name) return each.value;
    }
    return 0.0;
}

void run_experts(benchmark::State& state, const Kernel& kernel) {
    const std::int64_t num_rows = state.range(0);
    const auto threads = static_cast<int>(state.range(1));
    const double dram = limit(threads, "dram_read");
    const double peak = kernel.peak == nullptr ? 0.0 : limit(threads, kernel.peak);
    static std::map<const PackedLayout*, std::unique_ptr<Experts>> experts;
    if (!experts.contains(kernel.layout)) {
        experts.clear();
        experts[kernel.layout] = std::make_unique<Experts>(kernel.layout);
    }
    const Workers workers(threads, {});
    std::vector<std::unique_ptr<Job>> jobs;
    for (int i = 0; i < threads; ++i) jobs.push_back(std::make_unique<Job>(kernel, num_rows));
    const int experts_per_run = 8 * threads;
    std::vector<const ExpertData*> batch(static_cast<std::size_t>(experts_per_run));
    const auto begin = std::chrono::steady_clock::now();
    for (auto _ : state) {
        for (const ExpertData*& expert : batch) expert = &experts[kernel.layout]->next();
        workers.for_each(experts_per_run, [&](int worker, std::int64_t i) {
            jobs[static_cast<std::size_t>(worker)]->run(*batch[static_cast<std::size_t>(i)]);
        });
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    const double experts_per_s = static_cast<double>(state.iterations() * experts_per_run) / seconds.count();
    const double gb_per_s = 3e-9 * static_cast<double>(kMatrixBytes) * experts_per_s;
    const double gop_per_s = 6e-9 * static_cast<double>(kHidden * kIntermediate * num_rows) * experts_per_s;
    state.counters["GB/s"] = gb_per_s;
    state.counters["GOP/s"] = gop_per_s;
    state.counters["of_dram"] = gb_per_s / dram;
    if (peak > 0) state.counters["of_peak"] = gop_per_s / peak;
}

[[maybe_unused]] const bool kRegistered = [] {
    const Allowed allowed = read_allowed({});
    for (const Kernel* kernel : kernel_list()) {
        if (!availability(*kernel, allowed)) continue;
        auto* bench = benchmark::RegisterBenchmark(
            kernel->name, [kernel](benchmark::State& state) { run_experts(state, *kernel); });
        bench->ArgNames({"rows", "threads"})->UseRealTime()->Unit(benchmark::kMillisecond);
        for (const int rows : {1, 2, 4, 8, 32, 128}) {
            bench->Args({rows, 1});
            if (usable_threads() > 1) bench->Args({rows, usable_threads()});
        }
    }
    return true;
}();

}  // namespace
}  // namespace moe4::cpu
