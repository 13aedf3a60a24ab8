#include "backends/registry.hpp"

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

}  // namespace

std::vector<BackendInfo> backends() {
    std::vector<BackendInfo> infos;
    for (const Entry& entry : kBackends) infos.push_back(entry.info());
    return infos;
}

std::unique_ptr<Backend> open_backend(std::string_view name, BackendOptions options) {
    std::string known = "auto";
    std::string reasons;
    for (const Entry& entry : kBackends) {
        if (name == entry.name) return entry.open(options);
        known += ", " + std::string(entry.name);
        if (name != "auto") continue;
        const Support available = entry.info().available;
        if (available) return entry.open(options);
        reasons += "; " + std::string(entry.name) + ": " + available.reason;
    }
    if (name == "auto") throw Error(ErrorKind::machine, "no backend is available" + reasons);
    throw Error(ErrorKind::unsupported,
                "there is no backend \"" + std::string(name) + "\", expected one of " + known);
}

}  // namespace moe4
