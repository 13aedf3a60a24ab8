// Three distances that do not depend on one another, so that the verdict can tell whose fault it is.
#include "moe4/layertest.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <span>

#include "format/bf16.hpp"
#include "moe/parallel.hpp"
#include "moe/reference.hpp"
#include "moe/scales.hpp"
#include "moe4/error.hpp"
#include "verdict/distance.hpp"
#include "verdict/weights.hpp"

namespace moe4 {

namespace verdict {
namespace {

/// The inputs as the oracle takes them, copied because a view may have any alignment.
struct Input {
    std::vector<std::uint16_t> hidden;
    std::vector<std::int32_t> top_k_ids;
    std::vector<float> top_k_weights;
    std::int64_t num_tokens = 0;
    int top_k = 0;

    moe::ReferenceInput view() const { return {hidden, top_k_ids, top_k_weights, num_tokens, top_k}; }
};

template <class T>
std::vector<T> copy_of(const TensorView& tensor, std::string_view name, DType dtype, const Shape& shape) {
    if (tensor.dtype != dtype || tensor.shape != shape || tensor.device != Device{}) {
        throw Error(ErrorKind::invalid_argument,
                    std::string(name) + " is " + std::string(dtype_name(tensor.dtype)) + " " +
                        tensor.shape.to_string() + ", expected " + std::string(dtype_name(dtype)) + " " +
                        shape.to_string() + " in host memory");
    }
    std::vector<T> values(static_cast<std::size_t>(shape.num_elements()));
    if (!values.empty()) std::memcpy(values.data(), tensor.data, values.size() * sizeof(T));
    return values;
}

/// A NaN among the inputs makes every output of its row NaN, which says nothing about the layer.
template <class T, class ToFloat>
void check_finite(const std::vector<T>& values, std::int64_t columns, std::string_view name,
                  ToFloat to_float) {
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (std::isfinite(to_float(values[i]))) continue;
        const auto position = static_cast<std::int64_t>(i);
        throw Error(ErrorKind::invalid_argument,
                    std::string(name) + " is not finite at row " + std::to_string(position / columns) +
                        ", column " + std::to_string(position % columns) + ", expected finite numbers");
    }
}

Input checked_input(const MoeConfig& config, const TensorView& hidden, const Routing& routing) {
    Input input;
    if (hidden.shape.rank > 0) input.num_tokens = hidden.shape[0];
    const Shape& ids_shape = routing.top_k_ids.shape;
    if (ids_shape.rank == 2) input.top_k = static_cast<int>(ids_shape[1]);
    const Shape slots{input.num_tokens, input.top_k};
    input.hidden =
        copy_of<std::uint16_t>(hidden, "hidden", DType::bf16, {input.num_tokens, config.hidden_size});
    input.top_k_ids = copy_of<std::int32_t>(routing.top_k_ids, "top_k_ids", DType::i32, slots);
    input.top_k_weights = copy_of<float>(routing.top_k_weights, "top_k_weights", DType::f32, slots);
    check_finite(input.hidden, config.hidden_size, "hidden", format::bf16_to_float);
    check_finite(input.top_k_weights, input.top_k, "top_k_weights", [](float x) { return x; });
    return input;
}

std::vector<float> run_layer(const Layer& layer, const TensorView& hidden, const Routing& routing) {
    struct AlignedDelete {
        void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{64}); }
    };
    const std::size_t bytes = layer.plan().workspace_bytes;
    const std::unique_ptr<std::byte[], AlignedDelete> memory(
        static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{64})));
    std::vector<float> output(static_cast<std::size_t>(hidden.shape.num_elements()),
                              std::numeric_limits<float>::quiet_NaN());
    layer.run(hidden, routing, {output.data(), DType::f32, hidden.shape, {}}, {memory.get(), bytes});
    return output;
}

template <class Real>
Distance distance_between(const std::vector<Real>& found, const std::vector<double>& expected) {
    DistanceSums sums;
    for (std::size_t i = 0; i < found.size(); ++i) sums.add(static_cast<double>(found[i]), expected[i]);
    return sums.distance();
}

bool fits_fp32(const std::vector<double>& values) {
    constexpr double kMax = std::numeric_limits<float>::max();
    return std::all_of(values.begin(), values.end(), [](double x) { return std::fabs(x) <= kMax; });
}

std::string text(double x) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.3g", x);
    return digits;
}

std::string text(const MatrixDistance& matrix) {
    return "expert " + std::to_string(matrix.expert) + " " +
           std::string(moe::projection_name(matrix.projection));
}

constexpr std::string_view kNoSlots = "no token goes to an expert that is held";

/// What one distance has to say: nothing where it is in order.
struct Findings {
    std::string engine;
    std::string weights;
    std::string activations;
};

std::string describe_engine(const LayertestReport& report, const Plan& plan) {
    std::string kernels;
    for (const Plan::Choice& choice : plan.choices) {
        kernels += (kernels.empty() ? " with " : ", ") + std::string(choice.kernel);
    }
    return "the output of the engine (" + std::string(plan.backend) + kernels + ") lies " +
           text(report.engine->rel_l2) + " from the exact result of the same bytes, over the limit of " +
           text(report.engine_limit);
}

/// The worst matrices by name, and why the first of them is so far off.
std::string describe_weights(const LayertestReport::Weights& found, const MoeWeights& weights,
                             const Reference& reference, const LayertestLimits& limits) {
    constexpr std::size_t kNumNamed = 4;
    std::string sentence = std::to_string(found.matrices_over_limit) + " of " +
                           std::to_string(found.matrices) + " matrices lie over " +
                           text(limits.weight_rel_l2) + " from the reference: ";
    std::size_t named = 0;
    for (const MatrixDistance& matrix : found.worst) {
        if (named == kNumNamed || matrix.distance.rel_l2 <= limits.weight_rel_l2) break;
        sentence += (named++ == 0 ? "" : ", ") + text(matrix) + " (" + text(matrix.distance.rel_l2) + ")";
    }
    if (static_cast<int>(named) < found.matrices_over_limit) sentence += ", ...";
    const std::string hint = explain_matrix(weights, found.worst[0], reference, limits.weight_rel_l2);
    if (!hint.empty()) return sentence + "; of " + text(found.worst[0]) + ": " + hint;
    const bool nearly_all = found.matrices_of_another * 10 >= found.matrices * 9;
    return sentence + (nearly_all ? "; a reference of another layer or model looks the same" : "");
}

std::string describe_sound(const LayertestReport& report) {
    std::vector<std::string> parts;
    if (report.weights) {
        parts.push_back("the weights lie " + text(report.weights->overall.rel_l2) +
                        " from the reference (the worst matrix " +
                        text(report.weights->worst[0].distance.rel_l2) + ")");
    }
    if (report.activations)
        parts.push_back("4-bit activations move the output by " + text(report.activations->rel_l2));
    if (report.engine)
        parts.push_back("the engine lies " + text(report.engine->rel_l2) + " from the exact result");

    std::string sentence = !report.engine   ? "the engine was not tested, because " + std::string(kNoSlots)
                           : report.weights ? "nothing is wrong"
                                            : "the engine is right; the weights were not judged, which takes "
                                              "the BF16 original as a reference";
    for (std::size_t i = 0; i < parts.size(); ++i)
        sentence += (i == 0 ? ": " : i + 1 < parts.size() ? ", " : ", and ") + parts[i];
    return sentence;
}

void conclude(LayertestReport& report, const Findings& findings) {
    struct {
        Cause cause;
        std::string_view name;
        const std::string& finding;
    } const in_order[] = {{Cause::engine, "engine: ", findings.engine},
                          {Cause::weights, "weights: ", findings.weights},
                          {Cause::activations, "activations: ", findings.activations}};
    for (const auto& [cause, name, finding] : in_order) {
        if (finding.empty()) continue;
        if (report.cause == Cause::none) {
            report.cause = cause;
            report.verdict = std::string(name) + finding;
        } else {
            report.verdict += "; besides, " + finding;
        }
    }
    if (report.cause == Cause::none) report.verdict = describe_sound(report);
}

/// Counts steps of all stages, from any thread.
class Progress {
public:
    Progress(const std::function<void(int, int)>& report, int total) : report_(report), total_(total) {}
    void step() {
        const std::lock_guard lock(mutex_);
        ++done_;
        if (report_) report_(done_, total_);
    }

private:
    const std::function<void(int, int)>& report_;
    const int total_;
    int done_ = 0;
    std::mutex mutex_;
};

}  // namespace
}  // namespace verdict

LayertestReport layertest(const Layer& layer, const MoeWeights& weights,
                          const std::function<NamedTensor(int expert, Projection)>& reference,
                          TensorView hidden, const Routing& routing,
                          const std::function<void(int, int)>& progress, LayertestLimits limits,
                          int num_threads) {
    using namespace verdict;
    const ParallelFor parallel_for =
        moe::on_threads(num_threads > 0 ? num_threads : std::numeric_limits<int>::max());
    const Problem& problem = layer.plan().problem;
    const Input input = checked_input(weights.config, hidden, routing);
    const moe::HeldExperts held = moe::held_experts(problem.experts, weights.config.num_experts);
    LayertestReport report;
    Findings findings;

    bool runs_w4a4 = true;
    try {
        moe::input_scales(weights, problem.activation_scale);
    } catch (const Error& error) {
        if (problem.precision == Precision::w4a4) throw;
        runs_w4a4 = false;
        report.activations_note = error.what();
    }
    const bool has_slots = std::any_of(input.top_k_ids.begin(), input.top_k_ids.end(),
                                       [&](std::int32_t id) { return held.contains(id); });
    const int num_held = held.count();
    const int num_oracles = !has_slots ? 0 : runs_w4a4 ? 2 : 1;
    Progress steps(progress, num_held * ((reference ? 3 : 0) + 2 * num_oracles));
    const auto step = [&] { steps.step(); };

    const std::vector<float> output = run_layer(layer, hidden, routing);
    if (reference) {
        report.weights = compare_weights(weights, held, reference, limits, parallel_for, step);
        if (report.weights->matrices_over_limit > 0) {
            findings.weights = describe_weights(*report.weights, weights, reference, limits);
        }
    }

    const bool is_w4a4 = problem.precision == Precision::w4a4;
    report.engine_limit = is_w4a4 ? 3e-3 : 1e-3;
    if (!has_slots) {
        report.activations_note = kNoSlots;
        conclude(report, findings);
        return report;
    }
    const auto exact = [&](Precision precision) {
        return moe::oracle_layer(weights, {precision, problem.activation_scale, problem.experts},
                                 input.view(), parallel_for, [&](int, int) { step(); });
    };
    const std::vector<double> w4a16 = exact(Precision::w4a16);
    const std::vector<double> w4a4 = runs_w4a4 ? exact(Precision::w4a4) : std::vector<double>{};
    const std::vector<double>& expected = is_w4a4 ? w4a4 : w4a16;

    report.engine = distance_between(output, expected);
    if (!fits_fp32(expected)) {
        findings.weights += (findings.weights.empty() ? "" : "; ") +
                            std::string("the exact result of this input overflows fp32, as a " +
                                        weights.leaves.global_scale + " that is far off makes it");
    } else if (!(report.engine->rel_l2 <= report.engine_limit)) {
        findings.engine = describe_engine(report, layer.plan());
    }
    if (runs_w4a4) {
        report.activations = distance_between(w4a4, w4a16);
        if (!(report.activations->rel_l2 <= limits.activation_rel_l2)) {
            findings.activations = "4-bit activations move the output by " +
                                   text(report.activations->rel_l2) + ", over the limit of " +
                                   text(limits.activation_rel_l2);
        }
    }
    conclude(report, findings);
    return report;
}

}  // namespace moe4
