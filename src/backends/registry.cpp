#include "backends/registry.hpp"

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
        const bool is_last = &entry == std::end(kBackends) - 1;  // which says itself why it is not available
        if (name == "auto" && (is_last || entry.info().available)) return entry.open(options);
    }
    throw Error(ErrorKind::unsupported,
                "there is no backend \"" + std::string(name) + "\", expected one of " + known);
}

}  // namespace moe4
