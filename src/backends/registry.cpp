#include "backends/registry.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "moe4/error.hpp"

namespace moe4 {

namespace {

struct Entry {
    std::string_view name;
    BackendInfo (*info)();
    std::unique_ptr<Backend> (*open)(const BackendOptions&);
};
constexpr Entry kBackends[] = {
    // best first; add yours here
    {"cuda", cuda::backend_info, cuda::open_backend},
    {"cpu", cpu::backend_info, cpu::open_backend},
};

/// The kernel that the options or MOE4_KERNEL ask for; empty = none.
std::string kernel_asked_for(const BackendOptions& options) {
    const char* const value = std::getenv("MOE4_KERNEL");
    return !options.kernel.empty() || value == nullptr ? options.kernel : value;
}

bool suits(const BackendInfo& backend, const std::string& kernel) {
    const auto is_it = [&](const KernelInfo& each) { return each.name == kernel; };
    return backend.available && (kernel.empty() || std::ranges::any_of(backend.kernels, is_it));
}

}  // namespace

std::vector<BackendInfo> backends() {
    std::vector<BackendInfo> infos;
    for (const Entry& entry : kBackends) infos.push_back(entry.info());
    return infos;
}

std::unique_ptr<Backend> open_backend(std::string_view name, BackendOptions options) {
    std::string known = "auto";
    for (const Entry& entry : kBackends) {
        if (name == entry.name) return entry.open(options);
        known += ", " + std::string(entry.name);
        const bool is_last = &entry == std::end(kBackends) - 1;  // which says itself why it does not suit
        if (name == "auto" && (is_last || suits(entry.info(), kernel_asked_for(options))))
            return entry.open(options);
    }
    throw Error(ErrorKind::unsupported,
                "there is no backend \"" + std::string(name) + "\", expected one of " + known);
}

}  // namespace moe4
