#include "backends/cpu/thread_pool.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "backends/cpu/workers.hpp"

namespace moe4::cpu {
namespace {

struct Counts {
    explicit Counts(std::size_t size) : calls(size) {}
    static void count(void* context, int index) {
        ++static_cast<Counts*>(context)->calls[static_cast<std::size_t>(index)];
    }
    bool all(int expected) const {
        for (const auto& each : calls) {
            if (each != expected) return false;
        }
        return true;
    }
    std::vector<std::atomic<int>> calls;
};

TEST(ThreadPool, CallsEveryIndexOnce) {
    for (const int num_threads : {1, 2, 3, 7}) {
        ThreadPool pool(num_threads);
        for (const int count : {0, 1, 2, 5, 100, 1000}) {
            Counts counts(static_cast<std::size_t>(count));
            pool.run(count, Counts::count, &counts);
            EXPECT_TRUE(counts.all(1)) << num_threads << " threads, " << count << " indices";
        }
    }
}

TEST(ThreadPool, ManyRegionsInARow) {
    ThreadPool pool(4);
    Counts counts(4);
    constexpr int kRegions = 20'000;
    for (int i = 0; i < kRegions; ++i) pool.run(4, Counts::count, &counts);
    EXPECT_TRUE(counts.all(kRegions));
}

TEST(ThreadPool, WakesThreadsThatSleep) {
    ThreadPool pool(3);
    Counts counts(3);
    for (int i = 0; i < 5; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far beyond the spinning
        pool.run(3, Counts::count, &counts);
    }
    EXPECT_TRUE(counts.all(5));
}

TEST(ThreadPool, UsesItsThreads) {
    ThreadPool pool(2);
    std::atomic<int> arrived{0};
    // Returns only when two threads are inside at once.
    pool.run(
        2,
        [](void* context, int) {
            auto& count = *static_cast<std::atomic<int>*>(context);
            ++count;
            while (count < 2) std::this_thread::yield();
        },
        &arrived);
    EXPECT_EQ(arrived, 2);
}

TEST(ThreadPool, ManyCallersAtOnce) {
    ThreadPool pool(3);
    constexpr int kCallers = 6;
    constexpr int kRegions = 300;
    std::vector<Counts> counts;
    for (int i = 0; i < kCallers; ++i) counts.emplace_back(5);
    std::vector<std::thread> callers;
    for (Counts& each : counts) {
        callers.emplace_back([&pool, &each] {
            for (int i = 0; i < kRegions; ++i) pool.run(5, Counts::count, &each);
        });
    }
    for (std::thread& caller : callers) caller.join();
    for (const Counts& each : counts) EXPECT_TRUE(each.all(kRegions));
}

TEST(ThreadPool, MayBeCalledFromWithin) {
    struct Nested {
        ThreadPool pool{3};
        Counts counts{4};
    } nested;
    nested.pool.run(
        6,
        [](void* context, int) {
            auto& n = *static_cast<Nested*>(context);
            n.pool.run(4, Counts::count, &n.counts);
        },
        &nested);
    EXPECT_TRUE(nested.counts.all(6));
}

TEST(ThreadPool, JoinsWithoutEverRunning) {
    for (int i = 0; i < 50; ++i) ThreadPool pool(5);
}

TEST(UsableThreads, IsWithinTheMachine) {
    EXPECT_GE(usable_threads(), 1);
    EXPECT_LE(usable_threads(), static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(Workers, NoTwoTasksOfAWorkerOverlap) {
    const Workers workers(4, {});
    std::vector<std::atomic<int>> is_inside(4);
    Counts counts(500);
    std::atomic<bool> overlapped{false};
    workers.for_each(500, [&](int worker, std::int64_t i) {
        if (is_inside[static_cast<std::size_t>(worker)]++ != 0) overlapped = true;
        Counts::count(&counts, static_cast<int>(i));
        --is_inside[static_cast<std::size_t>(worker)];
    });
    EXPECT_TRUE(counts.all(1));
    EXPECT_FALSE(overlapped);
}

}  // namespace
}  // namespace moe4::cpu
