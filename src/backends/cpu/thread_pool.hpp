#pragma once
// A fork-join pool: threads that spin for a moment after each region, then sleep.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "backends/cpu/isa.hpp"

namespace moe4::cpu {

/// Waits until `value`, an atomic, is no longer `old`: first spinning, then asleep.
template <class Atomic, class T>
void wait_for_change(const Atomic& value, T old) {
    constexpr std::chrono::microseconds kSpin{50};  // longer than the gap between two regions of a layer
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 64; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            spin_pause();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    value.wait(old, std::memory_order_acquire);
}

/// Counts a number of things to wait for: who waits for zero sees what was written before each count.
template <class Atomic>
void count_down(Atomic&& value) {
    if (value.fetch_sub(1, std::memory_order_acq_rel) == 1) value.notify_all();
}
template <class Atomic>
void wait_for_zero(const Atomic& value) {
    for (auto left = value.load(std::memory_order_acquire); left != 0;
         left = value.load(std::memory_order_acquire)) {
        wait_for_change(value, left);
    }
}

/// How many threads this process may run at once: its CPU affinity, less where a cgroup's quota is smaller.
int usable_threads();

class ThreadPool {
public:
    using Body = void (*)(void* context, int index);  // must not throw

    /// Starts num_threads - 1 threads; the caller of run() is the last. Throws machine when they do not
    /// start.
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    /// Calls body(context, i) for every i in [0, count), each once, and returns when all have returned. While
    /// another thread is in here (or when called from a body) all run on the calling thread.
    void run(int count, Body body, void* context);

private:
    struct Claim {
        Body body;
        void* context;
        int index;
    };
    bool claim(Claim&);
    void work_until_empty();
    void thread_main();
    void stop();

    // A region is published by its ticket: its number in the upper half, how many indices are unclaimed in
    // the lower. An index is claimed by a compare-and-swap of the whole ticket, so a thread that wakes late
    // cannot claim with the fields of another region; they stay as they are while anything is unclaimed.
    std::atomic<std::uint64_t> ticket_{0};
    std::atomic<Body> body_{nullptr};
    std::atomic<void*> context_{nullptr};
    alignas(64) std::atomic<int> num_unfinished_{0};
    alignas(64) std::atomic<std::uint32_t> region_{0};  // what sleepers wait on
    std::atomic<bool> is_busy_{false};
    std::atomic<bool> is_stopping_{false};
    std::vector<std::thread> threads_;
};

}  // namespace moe4::cpu
