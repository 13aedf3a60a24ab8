#pragma once
// A fork-join pool: threads that spin for a moment after each region, then sleep.
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace moe4::cpu {

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
