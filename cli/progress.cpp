#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

namespace moe4::cli {

using namespace std::chrono_literals;

Progress::Progress(std::string what)
    : is_terminal_(::isatty(STDERR_FILENO) == 1),
      what_(std::move(what)),
      reporter_([this] { report_until_stopped(); }) {}

Progress::~Progress() {
    {
        const std::lock_guard lock(mutex_);
        is_stopped_ = true;
    }
    stopping_.notify_one();
    reporter_.join();
}

void Progress::begin(std::string what) {
    const std::lock_guard lock(mutex_);
    what_ = std::move(what);
    done_ = total_ = 0;
}

void Progress::update(std::int64_t done, std::int64_t total) {
    const std::lock_guard lock(mutex_);
    done_ = done;
    total_ = total;
}

std::string Progress::line() const {
    return total_ == 0 ? what_ : fmt::format("{}, {} of {}", what_, done_, total_);
}

void Progress::report_until_stopped() {
    std::unique_lock lock(mutex_);
    const auto is_stopped = [this] { return is_stopped_; };
    if (stopping_.wait_for(lock, 1s, is_stopped)) return;
    const auto interval = is_terminal_ ? 200ms : 5000ms;
    const char* const frame = is_terminal_ ? "\r\x1b[Kmoe4: {} ..." : "moe4: {} ...\n";
    do {
        fmt::print(stderr, fmt::runtime(frame), line());
        std::fflush(stderr);
    } while (!stopping_.wait_for(lock, interval, is_stopped));
    if (is_terminal_) fmt::print(stderr, "\r\x1b[K");
}

}  // namespace moe4::cli
