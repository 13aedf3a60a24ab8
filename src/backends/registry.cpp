#include "backends/registry.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "moe4/error.hpp"

namespace moe4 {

namespace {

struct Entry {
    std::string_view name;
    BackendInfo (*info)(const BackendOptions&);
    std::unique_ptr<Backend> (*open)(const BackendOptions&);
};
constexpr Entry kBackends[] = {
    // best first; add yours here
    {"cuda", cuda::backend_info, cuda::open_backend},
    {"cpu", cpu::backend_info, cpu::open_backend},
};

bool has_kernel(const BackendInfo& backend, const std::string& kernel) {
    const auto is_it = [&](const KernelInfo& each) { return each.name == kernel; };
    return std::ranges::any_of(backend.kernels, is_it);
}

/// The best that is available; where a kernel is asked for the one that has it, which says itself why it
/// cannot be opened.
const Entry& choose_backend(const BackendOptions& options) {
    const std::string kernel = requested_kernel(options).kernel;
    for (const Entry& entry : kBackends) {
        const BackendInfo info = entry.info(options);
        if (kernel.empty() ? static_cast<bool>(info.available) : has_kernel(info, kernel)) return entry;
    }
    return *(std::end(kBackends) - 1);
}

}  // namespace

KernelRequest requested_kernel(const BackendOptions& options) {
    const char* const variable = std::getenv("MOE4_KERNEL");
    if (!options.kernel.empty() || variable == nullptr) return {options.kernel, "the options ask for"};
    return {variable, "MOE4_KERNEL is"};
}

void check_known(const KernelRequest& request, const std::string& device,
                 const std::vector<std::string_view>& names) {
    std::string known;
    for (const std::string_view name : names) {
        if (request.kernel.empty() || name == request.kernel) return;
        known.append(known.empty() ? "" : ", ").append(name);
    }
    throw Error(ErrorKind::invalid_argument, request.source + " \"" + request.kernel + "\", which no " +
                                                 device + " kernel is called, expected one of " + known);
}

std::vector<BackendInfo> backends() {
    std::vector<BackendInfo> infos;
    for (const Entry& entry : kBackends) infos.push_back(entry.info({}));
    return infos;
}

std::unique_ptr<Backend> open_backend(std::string_view name, const BackendOptions& options) {
    if (name == "auto") return choose_backend(options).open(options);
    std::string known = "auto";
    for (const Entry& entry : kBackends) {
        if (name == entry.name) return entry.open(options);
        known += ", " + std::string(entry.name);
    }
    throw Error(ErrorKind::unsupported,
                "there is no backend \"" + std::string(name) + "\", expected one of " + known);
}

}  // namespace moe4
