#include "backends/cuda/kernel_list.hpp"

#include <limits>

#include "backends/cuda/sm90/wgmma_shape.hpp"
#include "moe/problem.hpp"
#include "moe/routers.hpp"
#include "moe4/error.hpp"

namespace moe4::cuda {

namespace {

constexpr Kernel kKernels[] = {
    // best first for many rows; add yours here
    {.name = "sm90_w4a16_wgmma",
     .precision = Precision::w4a16,
     .min_rows = 11,
     .min_rows_of_few_tiles = 20,
     .is_wgmma = true,
     .is_batch_invariant = true},
    {.name = "sm90_w4a4_wgmma",
     .precision = Precision::w4a4,
     .min_rows = 11,
     .min_rows_of_few_tiles = 18,
     .is_wgmma = true,
     .is_batch_invariant = true},
    {.name = "sm90_w4a16_mma", .precision = Precision::w4a16},
    {.name = "sm90_w4a4_mma", .precision = Precision::w4a4},
};

Support serves(const Kernel& kernel, const Problem& problem, int num_held, const std::string& asked_for) {
    if (!asked_for.empty() && asked_for != kernel.name) return {asked_for + " was asked for"};
    if (kernel.precision != problem.precision)
        return {"computes " + std::string(moe::precision_name(kernel.precision))};
    if (problem.layout == WeightLayout::packed)
        return {"reads the checkpoint's bytes, and packed weights were asked for"};
    if (problem.batch_invariant && !kernel.is_batch_invariant)
        return {"splits its sums by how many tokens there are, and the problem is batch_invariant"};
    if (num_held > moe::kMaxExperts) {
        return {"groups tokens by at most " + std::to_string(moe::kMaxExperts) +
                " experts, the range holds " + std::to_string(num_held)};
    }
    return {};
}

}  // namespace

std::span<const Kernel> kernel_list() { return kKernels; }

Support supports_device(const cudaDeviceProp& device) {
    if (device.major == 9 && device.minor == 0) return {};
    return {"no kernel for " + std::string(device.name) + " of compute capability " +
            std::to_string(device.major) + "." + std::to_string(device.minor) + ", expected 9.0"};
}

std::string describe_device(const cudaDeviceProp& device) {
    return std::string(device.name) + ", sm_" + std::to_string(device.major) + std::to_string(device.minor) +
           ", " + std::to_string(device.multiProcessorCount) + " multiprocessors";
}

void check_known(const KernelRequest& request) {
    std::vector<std::string_view> names;
    for (const Kernel& kernel : kKernels) names.push_back(kernel.name);
    moe4::check_known(request, "CUDA", names);
}

Selection select(const Problem& problem, const std::string& kernel) {
    constexpr std::int64_t kAllRows = std::numeric_limits<std::int64_t>::max();
    const int num_held = moe::held_experts(problem).count();
    const sm90::WgmmaLoad load{num_held, problem.config.hidden_size, problem.config.intermediate_size};
    const bool has_few_tiles = load.has_few_tiles();
    Selection selection;
    std::string reasons;
    std::int64_t up_to = kAllRows;
    for (const Kernel& each : kKernels) {
        const Support support = serves(each, problem, num_held, kernel);
        if (support) {
            const bool is_first = selection.choices.empty();
            selection.wgmma_min_rows = each.is_wgmma ? 0 : is_first ? kAllRows : up_to + 1;
            selection.choices.insert(selection.choices.begin(),
                                     {.up_to_tokens_per_expert = up_to, .kernel = each.name});
            up_to = (has_few_tiles ? each.min_rows_of_few_tiles : each.min_rows) - 1;
        } else if (each.precision == problem.precision || each.name == kernel) {
            reasons += "; " + std::string(each.name) + ": " + support.reason;
            selection.rejections.push_back({each.name, support.reason});
        }
    }
    if (selection.choices.empty()) {
        throw Error(ErrorKind::unsupported, "no CUDA kernel serves this " +
                                                std::string(moe::precision_name(problem.precision)) +
                                                " problem" + reasons);
    }
    return selection;
}

}  // namespace moe4::cuda
