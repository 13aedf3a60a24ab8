// How many threads this process may use: Linux's CPU affinity and the CPU quotas of its cgroups.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

#include "backends/cpu/thread_pool.hpp"

namespace moe4::cpu {

namespace {

#if defined(__linux__)

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

/// cgroup v2: "cpu.max" holds "max 100000" or "150000 100000".
double quota_v2(const std::filesystem::path& cgroup) {
    std::ifstream file(cgroup / "cpu.max");
    double quota = 0;
    double period = 0;
    return file >> quota >> period && period > 0 ? quota / period : kNoLimit;
}

/// cgroup v1: a quota of -1 is none.
double quota_v1(const std::filesystem::path& cgroup) {
    double quota = 0;
    double period = 0;
    std::ifstream(cgroup / "cpu.cfs_quota_us") >> quota;
    std::ifstream(cgroup / "cpu.cfs_period_us") >> period;
    return quota > 0 && period > 0 ? quota / period : kNoLimit;
}

/// The smallest quota on the way from this process's cgroup to the root.
double smallest_quota(const std::filesystem::path& root, std::string cgroup,
                      double (*quota)(const std::filesystem::path&)) {
    double smallest = quota(root);
    while (cgroup.size() > 1) {
        smallest = std::min(smallest, quota(std::filesystem::path(root.string() + cgroup)));
        cgroup.erase(cgroup.find_last_of('/'));
    }
    return smallest;
}

bool names_cpu(const std::string& controllers) {
    std::istringstream list(controllers);
    for (std::string name; std::getline(list, name, ',');) {
        if (name == "cpu") return true;
    }
    return false;
}

/// Lines of /proc/self/cgroup: "0::/user.slice/..." (v2) or "4:cpu,cpuacct:/..." (v1).
double cgroup_quota() {
    double smallest = kNoLimit;
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const std::size_t first = line.find(':');
        const std::size_t second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string cgroup = line.substr(second + 1);
        if (controllers.empty()) {
            smallest = std::min(smallest, smallest_quota("/sys/fs/cgroup", cgroup, quota_v2));
        } else if (names_cpu(controllers)) {
            smallest = std::min(smallest, smallest_quota("/sys/fs/cgroup/cpu", cgroup, quota_v1));
        }
    }
    return smallest;
}

int affinity() {
    for (int num_cpus = 1024; num_cpus <= (1 << 20); num_cpus *= 2) {
        cpu_set_t* set = CPU_ALLOC(num_cpus);
        if (set == nullptr) return 1;
        const std::size_t bytes = CPU_ALLOC_SIZE(num_cpus);
        const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (count > 0) return count;
    }
    return 1;
}

#endif

}  // namespace

int usable_threads() {
#if defined(__linux__)
    const double limit = std::min(static_cast<double>(affinity()), std::ceil(cgroup_quota()));
    return std::max(1, static_cast<int>(limit));
#else
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#endif
}

}  // namespace moe4::cpu
