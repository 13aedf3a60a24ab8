#include "backends/cuda/kernel_list.hpp"

#include "backends/cuda/sm90/wgmma_shape.hpp"
#include "moe/routers.hpp"
#include "moe4/error.hpp"

namespace moe4::cuda {

namespace {

constexpr Kernel kKernels[] = {
    // best first for many rows; add yours here
    {.name = "sm90_w4a16_wgmma",
     .precision = Precision::w4a16,
     .min_rows = 11,
     .min_rows_of_few_tiles = 24,
     .is_batch_invariant = true},
    {.name = "sm90_w4a4_wgmma",
     .precision = Precision::w4a4,
     .min_rows = 11,
     .min_rows_of_few_tiles = 24,
     .is_batch_invariant = true},
    {.name = "sm90_w4a16_mma", .precision = Precision::w4a16, .min_rows = 0, .is_batch_invariant = false},
    {.name = "sm90_w4a4_mma", .precision = Precision::w4a4, .min_rows = 0, .is_batch_invariant = false},
};

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
    std::string known;
    for (const Kernel& each : kKernels) {
        if (request.kernel.empty() || each.name == request.kernel) return;
        known += (known.empty() ? "" : ", ") + std::string(each.name);
    }
    throw Error(ErrorKind::invalid_argument, request.source + " \"" + request.kernel +
                                                 "\", which no CUDA kernel is called, expected one of " +
                                                 known);
}

Plan choose_kernels(const Problem& problem, int num_held, const std::string& kernel) {
    Plan plan;
    std::int64_t up_to = std::numeric_limits<std::int64_t>::max();
    const bool has_few_tiles = !sm90::fills_512_rows(num_held, problem.config.intermediate_size);
    const auto reason_against = [&](const Kernel& each) -> std::string {
        if (!kernel.empty() && each.name != kernel) return "another kernel was asked for";
        if (each.precision != problem.precision) return "computes another precision";
        if (problem.batch_invariant && !each.is_batch_invariant)
            return "splits its sums by how many tokens there are, and the problem is batch_invariant";
        if (num_held > moe::kMaxExperts) {
            return "groups tokens by at most " + std::to_string(moe::kMaxExperts) +
                   " experts, the range holds " + std::to_string(num_held);
        }
        return {};
    };
    for (const Kernel& each : kKernels) {
        std::string reason = reason_against(each);
        if (!reason.empty()) {
            plan.rejections.push_back({each.name, std::move(reason)});
            continue;
        }
        plan.choices.insert(plan.choices.begin(), {.up_to_tokens_per_expert = up_to, .kernel = each.name});
        up_to = (has_few_tiles ? each.min_rows_of_few_tiles : each.min_rows) - 1;
    }
    if (!plan.choices.empty()) return plan;
    std::string reasons;
    for (const Plan::Rejection& rejection : plan.rejections)
        reasons += (reasons.empty() ? "" : "; ") + std::string(rejection.kernel) + ": " + rejection.reason;
    throw Error(ErrorKind::unsupported, "no kernel of the cuda backend runs this problem: " + reasons);
}

std::int64_t wgmma_min_rows(const Plan& plan) {
    // The choices are mma, wgmma or both, in this order.
    if (!plan.choices.back().kernel.ends_with("_wgmma")) return std::numeric_limits<std::int64_t>::max();
    return plan.choices.size() == 1 ? 0 : plan.choices.front().up_to_tokens_per_expert + 1;
}

}  // namespace moe4::cuda
