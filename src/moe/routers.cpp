#include "moe/routers.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "format/bf16.hpp"
#include "moe/activations.hpp"
#include "moe/scalar_lane.hpp"
#include "moe4/error.hpp"

namespace moe4::moe {

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

float to_float(std::uint16_t bf16) { return format::bf16_to_float(bf16); }
float to_float(float x) { return x; }

/// Element `index` of a tensor of any alignment, which holds Element (bf16 bits or float).
template <class Element>
float element(const TensorView& tensor, std::int64_t index) {
    Element value{};
    const auto* bytes = static_cast<const std::byte*>(tensor.data);
    std::memcpy(&value, bytes + index * static_cast<std::int64_t>(sizeof value), sizeof value);
    return to_float(value);
}

float element(const TensorView& tensor, std::int64_t index) {
    return tensor.dtype == DType::bf16 ? element<std::uint16_t>(tensor, index)
                                       : element<float>(tensor, index);
}

/// One row of the router times the token, in double: of eight sums, which keep a core busy.
template <class Element>
float logit(const TensorView& router, int expert, const std::uint16_t* hidden, std::int64_t hidden_size) {
    constexpr std::int64_t kSums = 8;
    double sums[kSums] = {};
    const std::int64_t row = expert * hidden_size;
    const auto add_product = [&](std::int64_t i, std::int64_t k) {
        sums[i] += static_cast<double>(element<Element>(router, row + k)) *
                   static_cast<double>(format::bf16_to_float(hidden[k]));
    };
    std::int64_t k = 0;
    for (; k + kSums <= hidden_size; k += kSums) {
        for (std::int64_t i = 0; i < kSums; ++i) add_product(i, k + i);
    }
    for (; k < hidden_size; ++k) add_product(0, k);
    double sum = 0;
    for (const double part : sums) sum += part;
    return static_cast<float>(sum);
}

float exp_of(float x) { return moe::exp(ScalarLane{x}).value; }

void softmax(std::span<float> scores) {
    const float largest = *std::max_element(scores.begin(), scores.end());
    float sum = 0;
    for (float& score : scores) sum += score = exp_of(score - largest);
    for (float& score : scores) score /= sum;
}

void sigmoid(std::span<float> scores) {
    for (float& score : scores) score = 1.0F / (1.0F + exp_of(-score));
}

/// The index of the largest value not yet taken; ties to the lowest. Some index always, whatever the values.
int take_largest(std::span<const float> values, std::span<bool> taken) {
    int best = -1;
    for (int i = 0; i < static_cast<int>(values.size()); ++i) {
        const auto index = static_cast<std::size_t>(i);
        if (!taken[index] && (best < 0 || values[index] > values[static_cast<std::size_t>(best)])) best = i;
    }
    taken[static_cast<std::size_t>(best)] = true;
    return best;
}

/// Marks the experts of all but the best groups as taken. A group's score: its two largest selections,
/// summed.
void drop_groups(const RouterConfig& config, std::span<const float> selection, std::span<bool> taken) {
    const std::size_t group_size = selection.size() / static_cast<std::size_t>(config.num_groups);
    std::array<float, kMaxExperts> group_scores;
    std::array<bool, kMaxExperts> kept{};
    for (std::size_t group = 0; group < static_cast<std::size_t>(config.num_groups); ++group) {
        float first = kMinusInfinity;
        float second = kMinusInfinity;
        for (const float value : selection.subspan(group * group_size, group_size)) {
            if (value > first) {
                second = first;
                first = value;
            } else {
                second = std::max(second, value);
            }
        }
        group_scores[group] = group_size > 1 ? first + second : first;
    }
    const auto num_groups = static_cast<std::size_t>(config.num_groups);
    for (int i = 0; i < config.top_k_groups; ++i) {
        take_largest(std::span(group_scores).first(num_groups), std::span(kept).first(num_groups));
    }
    for (std::size_t expert = 0; expert < selection.size(); ++expert)
        taken[expert] = !kept[expert / group_size];
}

}  // namespace

void check_router(const MoeConfig& config, const TensorView& router, const std::optional<TensorView>& bias) {
    const RouterConfig& r = config.router;
    if (router.data == nullptr) throw Error(ErrorKind::unsupported, "the layer has no router of its own");
    if (config.num_experts > kMaxExperts || r.top_k > kMaxTopK) {
        throw Error(ErrorKind::unsupported, "a router over " + std::to_string(config.num_experts) +
                                                " experts with top-" + std::to_string(r.top_k) +
                                                ", expected at most " + std::to_string(kMaxExperts) +
                                                " and " + std::to_string(kMaxTopK));
    }
    const Shape expected{config.num_experts, config.hidden_size};
    if (router.shape != expected || (router.dtype != DType::bf16 && router.dtype != DType::f32)) {
        throw Error(ErrorKind::invalid_argument, "the router is " + std::string(dtype_name(router.dtype)) +
                                                     " " + router.shape.to_string() +
                                                     ", expected BF16 or F32 " + expected.to_string());
    }
    if (bias && (bias->shape != Shape{config.num_experts} ||
                 (bias->dtype != DType::bf16 && bias->dtype != DType::f32))) {
        throw Error(ErrorKind::invalid_argument, "the router's bias is " +
                                                     std::string(dtype_name(bias->dtype)) + " " +
                                                     bias->shape.to_string() + ", expected BF16 or F32 " +
                                                     Shape{config.num_experts}.to_string());
    }
    const bool groups_fit = r.num_groups >= 1 && config.num_experts % r.num_groups == 0 &&
                            r.top_k_groups >= 1 && r.top_k_groups <= r.num_groups;
    if (!groups_fit || r.top_k < 1 || r.top_k > config.num_experts / r.num_groups * r.top_k_groups) {
        throw Error(ErrorKind::invalid_argument, "the router picks " + std::to_string(r.top_k) + " of " +
                                                     std::to_string(config.num_experts) + " experts from " +
                                                     std::to_string(r.top_k_groups) + " of " +
                                                     std::to_string(r.num_groups) +
                                                     " groups, which no row can satisfy");
    }
}

void route_token(const MoeConfig& config, const TensorView& router, const std::optional<TensorView>& bias,
                 const std::uint16_t* hidden, std::int32_t* top_k_ids, float* top_k_weights) {
    const RouterConfig& r = config.router;
    const auto num_experts = static_cast<std::size_t>(config.num_experts);
    std::array<float, kMaxExperts> score_storage{};
    std::array<float, kMaxExperts> selection_storage{};
    std::array<bool, kMaxExperts> taken_storage{};
    const auto scores = std::span(score_storage).first(num_experts);
    const auto selection = std::span(selection_storage).first(num_experts);
    const auto taken = std::span(taken_storage).first(num_experts);

    for (std::size_t e = 0; e < num_experts; ++e) {
        const auto row = static_cast<int>(e);
        scores[e] = router.dtype == DType::bf16
                        ? logit<std::uint16_t>(router, row, hidden, config.hidden_size)
                        : logit<float>(router, row, hidden, config.hidden_size);
    }
    if (std::any_of(scores.begin(), scores.end(), [](float x) { return std::isnan(x); })) {
        for (int j = 0; j < r.top_k; ++j) {
            top_k_ids[j] = j;
            top_k_weights[j] = std::numeric_limits<float>::quiet_NaN();
        }
        return;
    }
    r.score_function == ScoreFunction::softmax ? softmax(scores) : sigmoid(scores);
    for (std::size_t e = 0; e < num_experts; ++e) {
        selection[e] = bias ? scores[e] + element(*bias, static_cast<std::int64_t>(e)) : scores[e];
    }
    if (r.top_k_groups < r.num_groups) drop_groups(r, selection, taken);

    float sum = 0;
    for (int j = 0; j < r.top_k; ++j) {
        top_k_ids[j] = take_largest(selection, taken);
        sum += top_k_weights[j] = scores[static_cast<std::size_t>(top_k_ids[j])];
    }
    const float divisor = r.renormalize ? sum + 1e-20F : 1.0F;
    for (int j = 0; j < r.top_k; ++j) {
        top_k_weights[j] = top_k_weights[j] / divisor * static_cast<float>(r.scaling_factor);
    }
}

}  // namespace moe4::moe
