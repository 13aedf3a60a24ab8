// The stages of a run around its GEMMs, on one thread and rows of 2048: rows of x are encoded and arranged as
// a GEMM reads them, rows of y summed. `of_copy` is bytes read a second over those of memcpy in the same run.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "backends/cpu/kernel_list.hpp"
#include "random_bytes.hpp"

namespace moe4::cpu {
namespace {

constexpr std::int64_t kCols = 2048;
constexpr int kTopK = 8;

template <class Work>
double seconds(const Work& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// `stage`, which reads `bytes`, and a copy of as many in turn, so that both see the same machine.
template <class Stage>
void against_copy(benchmark::State& state, std::int64_t bytes, const Stage& stage) {
    std::mt19937_64 random(1);
    const Bytes from = random_bytes(static_cast<std::size_t>(bytes), random);
    const Bytes to = random_bytes(static_cast<std::size_t>(bytes), random);
    double working = 0;
    double copying = 0;
    for (auto _ : state) {
        copying += seconds([&] {
            std::memcpy(to.get(), from.get(), static_cast<std::size_t>(bytes));
            benchmark::ClobberMemory();
        });
        const double taken = seconds(stage);
        state.SetIterationTime(taken);
        working += taken;
    }
    state.counters["GB/s"] = 1e-9 * static_cast<double>(state.iterations() * bytes) / working;
    state.counters["of_copy"] = copying / working;
}

void encode(benchmark::State& state, const Kernel& kernel) {
    const std::int64_t num_rows = state.range(0);
    std::mt19937_64 random(1);
    const Bytes hidden = random_hidden(num_rows * kCols, random);
    const Bytes rows = random_bytes(static_cast<std::size_t>(num_rows) * kernel.encoded_bytes(kCols), random);
    const std::vector<float> scale(static_cast<std::size_t>(num_rows), 0.001F);
    against_copy(state, num_rows * kCols * 2, [&] {
        kernel.encode_rows({.values = reinterpret_cast<const std::uint16_t*>(hidden.get()),
                            .index = nullptr,
                            .input_scale = scale.data(),
                            .cols = kCols,
                            .first = 0,
                            .last = num_rows,
                            .rows = rows.get()});
    });
}

void gather(benchmark::State& state, const Kernel& kernel) {
    const std::int64_t num_rows = state.range(0);
    std::mt19937_64 random(1);
    const std::size_t row_bytes = kernel.encoded_bytes(kCols);
    const Bytes rows = random_bytes(static_cast<std::size_t>(num_rows) * row_bytes, random);
    const Bytes panel = random_bytes(kernel.panel_bytes(num_rows, kCols), random);
    against_copy(state, num_rows * static_cast<std::int64_t>(row_bytes), [&] {
        kernel.gather_rows({.rows = rows.get(),
                            .index = nullptr,
                            .cols = kCols,
                            .num_rows = num_rows,
                            .panel = panel.get()});
    });
}

void combine(benchmark::State& state, const Kernel& kernel) {
    const std::int64_t num_tokens = state.range(0);
    const std::int64_t num_slots = num_tokens * kTopK;
    std::mt19937_64 random(1);
    const Bytes y = random_bytes(static_cast<std::size_t>(num_slots * kCols) * 4, random);
    const Bytes out = random_bytes(static_cast<std::size_t>(num_tokens * kCols) * 2, random);
    std::vector<std::int32_t> slot_row;
    for (std::int64_t slot = 0; slot < num_slots; ++slot)  // a token's rows lie with those of its experts
        slot_row.push_back(static_cast<std::int32_t>(slot % kTopK * num_tokens + slot / kTopK));
    const std::vector<float> weight(slot_row.size(), 1.0F / kTopK);
    against_copy(state, num_slots * kCols * 4, [&] {
        kernel.combine({.y = reinterpret_cast<const float*>(y.get()),
                        .y_stride = kCols,
                        .slot_row = slot_row.data(),
                        .weight = weight.data(),
                        .num_tokens = num_tokens,
                        .top_k = kTopK,
                        .cols = kCols,
                        .out_f32 = nullptr,
                        .out_bf16 = reinterpret_cast<std::uint16_t*>(out.get()),
                        .out_stride = kCols});
    });
}

/// A stage of one kernel for all kernels that share it.
template <class Function>
void register_stage(const char* stage, Function* Kernel::* member,
                    void (*run)(benchmark::State&, const Kernel&)) {
    std::map<Function*, std::pair<const Kernel*, std::string>> by_function;
    const Allowed allowed = read_allowed({});
    for (const Kernel* kernel : kernel_list()) {
        if (kernel->*member == nullptr || !availability(*kernel, allowed)) continue;
        auto& [first, name] = by_function[kernel->*member];
        if (first == nullptr) first = kernel;
        name += name.empty() ? stage : ",";
        name += kernel->name;
    }
    for (const auto& [function, entry] : by_function) {
        auto* bench = benchmark::RegisterBenchmark(
            entry.second.c_str(),
            [kernel = entry.first, run](benchmark::State& state) { run(state, *kernel); });
        bench->ArgName("rows")->UseManualTime()->Unit(benchmark::kMicrosecond)->Arg(1)->Arg(32)->Arg(256);
    }
}

[[maybe_unused]] const bool kRegistered = [] {
    register_stage("encode/", &Kernel::encode_rows, encode);
    register_stage("gather/", &Kernel::gather_rows, gather);
    register_stage("combine/", &Kernel::combine, combine);
    return true;
}();

}  // namespace
}  // namespace moe4::cpu
