// What it costs to hand tasks to the pool and to wait for them: a layer does so three times or more.
#include <benchmark/benchmark.h>

#include <atomic>

#include "backends/cpu/isa.hpp"
#include "backends/cpu/workers.hpp"

namespace moe4::cpu {
namespace {

void fork_join(benchmark::State& state) {
    const auto threads = static_cast<int>(state.range(0));
    const Workers workers(threads, {});
    for (auto _ : state) {
        std::atomic<int> num_missing{threads};  // a task lasts until all have begun, so each thread takes one
        workers.for_each(threads, [&](int, std::int64_t) {
            for (--num_missing; num_missing.load(std::memory_order_relaxed) > 0;) spin_pause();
        });
    }
}

[[maybe_unused]] const bool kRegistered = [] {
    auto* bench = benchmark::RegisterBenchmark("fork_join", fork_join);
    bench->ArgName("threads")->UseRealTime()->Unit(benchmark::kMicrosecond);
    for (int threads = 1; threads < usable_threads(); threads *= 2) bench->Arg(threads);
    bench->Arg(usable_threads());
    return true;
}();

}  // namespace
}  // namespace moe4::cpu
