// A plan in words.
#include <limits>
#include <string>

#include "moe4/backend.hpp"

namespace moe4 {

namespace {

std::string rows_served(const Plan& plan, std::size_t choice) {
    const std::int64_t first = choice == 0 ? 1 : plan.choices[choice - 1].up_to_tokens_per_expert + 1;
    const std::int64_t last = plan.choices[choice].up_to_tokens_per_expert;
    if (last == std::numeric_limits<std::int64_t>::max())
        return first == 1 ? "any number of tokens an expert"
                          : std::to_string(first) + " tokens an expert or more";
    return "up to " + std::to_string(last) + " tokens an expert";
}

std::string megabytes(std::size_t bytes) {
    constexpr std::size_t kMegabyte = 1'000'000;
    if (bytes < kMegabyte) return std::to_string(bytes) + " bytes";
    return std::to_string((bytes + kMegabyte / 2) / kMegabyte) + " MB";
}

}  // namespace

std::string Plan::explain() const {
    std::string text;
    for (std::size_t i = 0; i < choices.size(); ++i)
        text.append(choices[i].kernel).append(": ").append(rows_served(*this, i)).append("\n");
    for (const Rejection& rejection : rejections)
        text.append("not ").append(rejection.kernel).append(": ").append(rejection.reason).append("\n");
    text.append("weights: ");
    text.append(layout == WeightLayout::packed ? "packed, " + megabytes(weight_bytes)
                : weight_bytes > 0             ? "the checkpoint's bytes, copied, " + megabytes(weight_bytes)
                                               : "the checkpoint's own, read in place");
    text.append("\nworkspace: ").append(megabytes(workspace_bytes));
    text.append(" for up to ").append(std::to_string(problem.max_tokens)).append(" tokens\n");
    return text;
}

}  // namespace moe4
