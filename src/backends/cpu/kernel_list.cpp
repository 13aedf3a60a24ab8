#include "backends/cpu/kernel_list.hpp"

#include <algorithm>
#include <cstdlib>

#include "backends/registry.hpp"
#include "moe/problem.hpp"
#include "moe4/error.hpp"

namespace moe4::cpu {

#ifdef MOE4_X86_KERNELS
namespace amx {
extern const Kernel kW4a16, kW4a16InPlace, kW4a4, kW4a4InPlace;
}
namespace avx2 {
extern const Kernel kW4a16, kW4a16InPlace, kW4a4, kW4a4InPlace;
}
namespace avx512 {
extern const Kernel kW4a16, kW4a16InPlace;
}
namespace avx512_bf16 {
extern const Kernel kW4a16, kW4a16InPlace;
}
namespace avx512_vnni {
extern const Kernel kW4a4, kW4a4InPlace;
}
#endif
namespace scalar {
extern const Kernel kW4a16, kW4a4;
}

namespace {

// clang-format off
constexpr const Kernel* kKernels[] = {
    // best first; add yours here
#ifdef MOE4_X86_KERNELS
    &amx::kW4a4,
    &amx::kW4a4InPlace,
    &amx::kW4a16,
    &amx::kW4a16InPlace,
    &avx512_vnni::kW4a4,
    &avx512_vnni::kW4a4InPlace,
    &avx512_bf16::kW4a16,
    &avx512_bf16::kW4a16InPlace,
    &avx512::kW4a16,
    &avx512::kW4a16InPlace,
    &avx2::kW4a4,
    &avx2::kW4a4InPlace,
    &avx2::kW4a16,
    &avx2::kW4a16InPlace,
#endif
    &scalar::kW4a4,
    &scalar::kW4a16,
};
// clang-format on

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::string layout_name(const Kernel& kernel) {
    return kernel.layout == nullptr ? "the checkpoint in place"
                                    : "weights packed as " + std::string(kernel.layout->name);
}

Support serves(const Kernel& kernel, const Problem& problem, const Allowed& allowed) {
    if (!allowed.kernel.empty() && allowed.kernel != kernel.name) return {allowed.kernel + " was asked for"};
    if (kernel.precision != problem.precision)
        return {"computes " + std::string(moe::precision_name(kernel.precision))};
    if (const Support available = availability(kernel, allowed); !available) return available;
    if (problem.layout == WeightLayout::in_place && kernel.layout != nullptr)
        return {"reads " + layout_name(kernel) + ", and the checkpoint in place was asked for"};
    if (problem.layout == WeightLayout::packed && kernel.layout == nullptr)
        return {"reads the checkpoint in place, and packed weights were asked for"};
    return {};
}

/// Whether a kernel that serves the problem has a place behind those chosen before it.
Support joins(const Kernel& kernel, const std::vector<const Kernel*>& chosen) {
    if (chosen.empty()) return {};
    if (layout_name(kernel) != layout_name(*chosen.front()))
        return {"reads " + layout_name(kernel) + ", and " + chosen.front()->name + " reads " +
                layout_name(*chosen.front())};
    if (kernel.order != chosen.front()->order)
        return {"sums in another order than " + std::string(chosen.front()->name)};
    if (kernel.min_rows >= chosen.back()->min_rows) return {std::string(chosen.back()->name) + " is faster"};
    return {};
}

}  // namespace

std::span<const Kernel* const> kernel_list() { return kKernels; }

Allowed read_allowed(const BackendOptions& options) {
    const KernelRequest request = requested_kernel(options);
    Allowed allowed{.machine = detect_isa(), .ceiling_name = {}, .kernel = request.kernel};
    if (const std::string level = environment("MOE4_ISA"); !level.empty()) {
        allowed.ceiling = isa_up_to(level);
        allowed.ceiling_name = "MOE4_ISA=" + level;
    }
    std::vector<std::string_view> names;
    for (const Kernel* kernel : kKernels) names.emplace_back(kernel->name);
    check_known(request, "CPU", names);
    return allowed;
}

Support availability(const Kernel& kernel, const Allowed& allowed) {
    if (const IsaSet missing = kernel.needs & ~allowed.machine; missing != 0)
        return {"this CPU lacks " + isa_names(missing)};
    if (const IsaSet ruled_out = kernel.needs & ~allowed.ceiling; ruled_out != 0)
        return {allowed.ceiling_name + " rules out " + isa_names(ruled_out)};
    return {};
}

Selection select(std::span<const Kernel* const> list, const Problem& problem, const Allowed& allowed) {
    Selection selection;
    std::string reasons;
    for (const Kernel* kernel : list) {
        Support support = serves(*kernel, problem, allowed);
        if (support) support = joins(*kernel, selection.kernels);
        if (support) {
            selection.kernels.push_back(kernel);
        } else if (kernel->precision == problem.precision || allowed.kernel == kernel->name) {
            reasons += "; " + std::string(kernel->name) + ": " + support.reason;
            selection.rejections.push_back({kernel->name, support.reason});
        }
    }
    if (selection.kernels.empty()) {
        throw Error(ErrorKind::unsupported, "no CPU kernel serves this " +
                                                std::string(moe::precision_name(problem.precision)) +
                                                " problem" + reasons);
    }
    return selection;
}

}  // namespace moe4::cpu
