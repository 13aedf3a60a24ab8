#pragma once
// Work that may throw, through a ParallelFor that may not; and a ParallelFor where there are no threads yet.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "moe4/backend.hpp"

namespace moe4::moe {

/// body(i) for every i in [0, count), through `parallel_for` (empty: one after the other). The first
/// exception of a body is thrown here, when all have returned.
template <class Body>
void parallel(const ParallelFor& parallel_for, int count, Body body) {
    struct Context {
        Body& body;
        std::mutex mutex;
        std::exception_ptr failure;
    } context{body, {}, {}};
    const auto call = [](void* opaque, int i) {
        auto& c = *static_cast<Context*>(opaque);
        try {
            c.body(i);
        } catch (...) {
            const std::lock_guard lock(c.mutex);
            if (!c.failure) c.failure = std::current_exception();
        }
    };
    if (parallel_for) {
        parallel_for(count, call, &context);
    } else {
        for (int i = 0; i < count; ++i) call(&context, i);
    }
    if (context.failure) std::rethrow_exception(context.failure);
}

/// On at most so many threads, and no more than the machine has, started anew for each call.
inline ParallelFor on_threads(int most) {
    return [most](int count, void (*body)(void*, int), void* context) {
        std::atomic<int> next{0};
        const auto work = [&] {
            for (int i = next++; i < count; i = next++) body(context, i);
        };
        const int of_machine = static_cast<int>(std::thread::hardware_concurrency());
        std::vector<std::jthread> others;
        try {
            for (int i = 1; i < std::min({count, most, of_machine}); ++i) others.emplace_back(work);
        } catch (const std::system_error&) {
            // Those that did start, and this one, do it all.
        }
        work();
    };
}

}  // namespace moe4::moe
