#include "moe/problem.hpp"

#include <limits>
#include <string>

#include "moe4/error.hpp"

namespace moe4::moe {

namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw Error(ErrorKind::invalid_argument, sentence); }

void check_matrix(const MoeWeights& weights, int expert, Projection projection, std::int64_t rows,
                  std::int64_t cols) {
    const Nvfp4View& matrix = weights.experts[static_cast<std::size_t>(expert)][projection].weight;
    const auto name = [&] { return tensor_name(weights, expert, projection, weights.leaves.packed); };
    if (matrix.rows != rows || matrix.cols != cols) {
        refuse(name() + " holds " + Shape{matrix.rows, matrix.cols}.to_string() + " values, expected " +
               Shape{rows, cols}.to_string());
    }
    if (matrix.packed == nullptr || matrix.block_scale == nullptr || matrix.packed_stride < cols / 2 ||
        matrix.scale_stride < cols / kNvfp4BlockSize) {
        refuse(name() + " has no data or rows that overlap, expected strides of at least " +
               std::to_string(cols / 2) + " and " + std::to_string(cols / kNvfp4BlockSize) + " bytes");
    }
}

}  // namespace

std::string_view precision_name(Precision precision) {
    return precision == Precision::w4a4 ? "w4a4" : "w4a16";
}

int slots_per_token(const Problem& problem) {
    return problem.top_k > 0 ? problem.top_k : problem.config.router.top_k;
}

HeldExperts held_experts(const Problem& problem) {
    return held_experts(problem.experts, problem.config.num_experts);
}

void check_problem(const Problem& problem) {
    const auto check_size = [](const char* name, std::int64_t size) {
        constexpr std::int64_t kLimit = std::int64_t{1} << 24;
        if (size <= 0 || size % kNvfp4BlockSize != 0 || size >= kLimit) {
            refuse(std::string(name) + " is " + std::to_string(size) +
                   ", expected a positive multiple of 16 below 2^24");
        }
    };
    check_size("hidden_size", problem.config.hidden_size);
    check_size("intermediate_size", problem.config.intermediate_size);
    const std::int64_t top_k = slots_per_token(problem);
    if (top_k <= 0) refuse("top_k is " + std::to_string(top_k) + ", expected 1 or more slots per token");
    if (problem.max_tokens < 0 || problem.max_tokens > std::numeric_limits<std::int32_t>::max() / top_k) {
        refuse("max_tokens is " + std::to_string(problem.max_tokens) + " with " + std::to_string(top_k) +
               " slots each, expected 0 or more and fewer than 2^31 slots");
    }
    if (problem.batch_invariant && problem.precision == Precision::w4a4 &&
        problem.activation_scale == ActivationScale::dynamic) {
        refuse(
            "batch_invariant is set with dynamic activation scales, which depend on the batch; expected "
            "another activation scale");
    }
}

void check_weights_fit(const Problem& problem, const MoeWeights& weights) {
    const MoeConfig& config = problem.config;
    const HeldExperts held = held_experts(problem);
    if (weights.experts.size() != static_cast<std::size_t>(config.num_experts)) {
        refuse("the weights of layer " + std::to_string(weights.layer) + " have " +
               std::to_string(weights.experts.size()) + " experts, expected " +
               std::to_string(config.num_experts) + " as planned");
    }
    for (int expert = held.first; expert < held.last; ++expert) {
        check_matrix(weights, expert, Projection::gate, config.intermediate_size, config.hidden_size);
        check_matrix(weights, expert, Projection::up, config.intermediate_size, config.hidden_size);
        check_matrix(weights, expert, Projection::down, config.hidden_size, config.intermediate_size);
    }
}

void release(const MoeWeights& weights, const Nvfp4View& matrix) {
    if (weights.release == nullptr || matrix.rows == 0) return;
    const auto size = [&](std::int64_t stride, std::int64_t row_bytes) {
        return static_cast<std::size_t>((matrix.rows - 1) * stride + row_bytes);
    };
    weights.release(matrix.packed, size(matrix.packed_stride, matrix.cols / 2));
    weights.release(matrix.block_scale, size(matrix.scale_stride, matrix.cols / kNvfp4BlockSize));
}

}  // namespace moe4::moe
