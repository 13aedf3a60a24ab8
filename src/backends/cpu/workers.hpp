#pragma once
// Where a layer's tasks run: on a pool of our own or on the caller's threads. Each worker takes the next task
// when it has finished one, so a slow thread delays nobody; and since a task may wait only for tasks before
// it, which others have begun or it has done itself, workers may also run one after the other.
#include <algorithm>
#include <atomic>
#include <memory>

#include "backends/cpu/thread_pool.hpp"
#include "moe4/backend.hpp"

namespace moe4::cpu {

class Workers {
public:
    Workers(int count, ParallelFor parallel_for) : count_(count), parallel_for_(std::move(parallel_for)) {
        if (!parallel_for_) pool_ = std::make_unique<ThreadPool>(count);
    }

    int count() const { return count_; }

    /// task(worker, i) for every i in [0, num_tasks), begun in ascending order; worker is below count() and
    /// no two tasks have the same at once. Allocates nothing.
    template <class Task>
    void for_each(std::int64_t num_tasks, const Task& task) const {
        struct Region {
            const Task& task;
            const std::int64_t num_tasks;
            alignas(64) std::atomic<std::int64_t> next{0};
        } region{task, num_tasks};
        const auto work = [](void* context, int worker) {
            auto& r = *static_cast<Region*>(context);
            for (std::int64_t i = r.next++; i < r.num_tasks; i = r.next++) r.task(worker, i);
        };
        run(static_cast<int>(std::min<std::int64_t>(count_, num_tasks)), work, &region);
    }

    /// The same threads for those who have no use for a worker's number.
    void run(int count, ThreadPool::Body body, void* context) const {
        if (count == 1) return body(context, 0);
        if (pool_) return pool_->run(count, body, context);
        parallel_for_(count, body, context);
    }

private:
    int count_;
    ParallelFor parallel_for_;
    std::unique_ptr<ThreadPool> pool_;
};

}  // namespace moe4::cpu
