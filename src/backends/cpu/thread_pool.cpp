#include "backends/cpu/thread_pool.hpp"

#include <string>
#include <system_error>

#include "moe4/error.hpp"

namespace moe4::cpu {

namespace {

constexpr std::uint64_t ticket(std::uint32_t region, int num_unclaimed) {
    return (std::uint64_t{region} << 32) | static_cast<std::uint32_t>(num_unclaimed);
}
constexpr int num_unclaimed(std::uint64_t ticket) { return static_cast<int>(ticket & 0xFFFF'FFFFU); }

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
    try {
        for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { thread_main(); });
    } catch (const std::system_error& error) {
        const std::size_t num_started = threads_.size();
        stop();
        throw Error(ErrorKind::machine, "only " + std::to_string(num_started + 1) + " of " +
                                            std::to_string(num_threads) +
                                            " threads could be started: " + error.what());
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    is_stopping_ = true;
    ++region_;
    region_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int count, Body body, void* context) {
    if (count <= 1 || threads_.empty() || is_busy_.exchange(true, std::memory_order_acquire)) {
        for (int i = 0; i < count; ++i) body(context, i);
        return;
    }
    body_.store(body, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_unfinished_.store(count, std::memory_order_relaxed);
    const std::uint32_t region = region_.load(std::memory_order_relaxed) + 1;
    ticket_.store(ticket(region, count), std::memory_order_release);
    region_.store(region, std::memory_order_release);
    region_.notify_all();

    work_until_empty();
    wait_for_zero(num_unfinished_);
    is_busy_.store(false, std::memory_order_release);
}

bool ThreadPool::claim(Claim& result) {
    std::uint64_t current = ticket_.load(std::memory_order_acquire);
    while (num_unclaimed(current) > 0) {
        result = {.body = body_.load(std::memory_order_relaxed),
                  .context = context_.load(std::memory_order_relaxed),
                  .index = num_unclaimed(current) - 1};
        if (ticket_.compare_exchange_weak(current, current - 1, std::memory_order_acq_rel,
                                          std::memory_order_acquire)) {
            return true;
        }
    }
    return false;
}

void ThreadPool::work_until_empty() {
    Claim task{};
    while (claim(task)) {
        task.body(task.context, task.index);
        count_down(num_unfinished_);
    }
}

void ThreadPool::thread_main() {
    std::uint32_t seen = 0;
    while (!is_stopping_.load(std::memory_order_acquire)) {
        work_until_empty();
        wait_for_change(region_, seen);
        seen = region_.load(std::memory_order_acquire);
    }
}

}  // namespace moe4::cpu
