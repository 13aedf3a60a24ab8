#pragma once
// Says on stderr what is going on, once that has taken a second.
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

namespace moe4::cli {

/// On a terminal one line, rewritten; elsewhere a line every five seconds. Lives as long as the work.
class Progress {
public:
    explicit Progress(std::string what);
    ~Progress();
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    void begin(std::string what);  // the next step; forgets the counts
    void update(std::int64_t done, std::int64_t total);
    void end();  // before something is printed: leaves the terminal's line empty until the next begin()

private:
    void report_until_stopped();
    void erase();
    std::string line() const;

    const bool is_terminal_;
    mutable std::mutex mutex_;
    std::condition_variable stopping_;
    bool is_stopped_ = false;
    bool is_shown_ = false;
    std::string what_;
    std::int64_t done_ = 0, total_ = 0;
    std::thread reporter_;  // last: it reads the others
};

}  // namespace moe4::cli
