#pragma once
// Work that may throw, through a ParallelFor that may not.
#include <exception>
#include <mutex>

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

}  // namespace moe4::moe
