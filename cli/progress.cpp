#include "progress.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <utility>

#include "output.hpp"

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

void Progress::end() {
    const std::lock_guard lock(mutex_);
    what_.clear();
    erase();
}

void Progress::erase() {
    if (is_terminal_ && is_shown_) write_stderr("\r\x1b[K");
    is_shown_ = false;
}

void Progress::report_until_stopped() {
    const char* const frame = is_terminal_ ? "\r\x1b[Kmoe4: {} ..." : "moe4: {} ...\n";
    std::unique_lock lock(mutex_);
    for (auto wait = 1000ms; !stopping_.wait_for(lock, wait, [this] { return is_stopped_; });
         wait = is_terminal_ ? 200ms : 5000ms) {
        if (what_.empty()) continue;
        write_stderr(fmt::format(fmt::runtime(frame), line()));
        is_shown_ = true;
    }
    erase();
}

}  // namespace moe4::cli
