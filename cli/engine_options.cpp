#include "engine_options.hpp"

#include <fmt/format.h>

#include <charconv>

#include "arguments.hpp"
#include "moe4/error.hpp"

namespace moe4::cli {

namespace {

constexpr std::string_view kScaleNames[] = {"layer-max", "per-expert", "dynamic", "dynamic-token"};
constexpr std::string_view kPrecisionNames[] = {"w4a16", "w4a4"};
constexpr std::string_view kProjectionNames[] = {"gate", "up", "down"};
constexpr int kMostThreads = 1024;

ActivationScale parse_scale(std::string_view text) {
    int index = 0;
    while (index < 3 && kScaleNames[index] != text) ++index;
    return static_cast<ActivationScale>(index);
}

WeightLayout weight_layout(std::string_view layout) {
    return layout == "packed"     ? WeightLayout::packed
           : layout == "in-place" ? WeightLayout::in_place
                                  : WeightLayout::automatic;
}

}  // namespace

std::string_view name_of(Precision precision) { return kPrecisionNames[static_cast<int>(precision)]; }
std::string_view name_of(ActivationScale scale) { return kScaleNames[static_cast<int>(scale)]; }
std::string_view name_of(Projection projection) { return kProjectionNames[static_cast<int>(projection)]; }

std::string describe(const Mode& mode) {
    if (mode.precision == Precision::w4a16) return "w4a16";
    return fmt::format("w4a4, {} activation scales", name_of(mode.activation_scale));
}

std::string kernel_names(const Plan& plan) {
    std::vector<std::string_view> names;
    names.reserve(plan.choices.size());
    for (const Plan::Choice& choice : plan.choices) names.push_back(choice.kernel);
    return fmt::format("{}", fmt::join(names, ", "));
}

void add_layer_options(CLI::App& command, std::string& folder, int& layer) {
    command.add_option("DIR", folder, "the checkpoint: a folder of safetensors with its config.json")
        ->required();
    command.add_option("--layer", layer, "number of the MoE layer, as the checkpoint counts")
        ->required()
        ->check(number_in(0));
}

void add_backend_options(CLI::App& command, EngineOptions& options) {
    command.add_option("--backend", options.backend, "auto: the best that works here")
        ->check(one_of({"auto", "cpu", "cuda"}))
        ->capture_default_str();
    command.add_option("--threads", options.threads, "CPU threads (default: what this process may use)")
        ->check(number_in(1, kMostThreads));
    command.add_option("--device", options.device, "which GPU, of those that CUDA_VISIBLE_DEVICES shows")
        ->check(number_in(0))
        ->capture_default_str();
    command
        .add_option("--layout", options.layout,
                    "packed: weights rearranged once; in-place: the checkpoint's own bytes, no copy")
        ->check(one_of({"auto", "packed", "in-place"}))
        ->capture_default_str();
    command.add_flag("--batch-invariant", options.batch_invariant,
                     "a token's bits do not depend on the tokens beside it (on the CPU always so\nbut for "
                     "dynamic activation scales, which this refuses)");
}

void add_engine_options(CLI::App& command, EngineOptions& options) {
    command
        .add_option("--mode", options.mode,
                    "w4a16: activations stay BF16; w4a4: they are quantised to NVFP4 too;\n"
                    "auto: w4a4 where the checkpoint is calibrated for it and asks for it, else w4a16")
        ->check(one_of({"auto", "w4a16", "w4a4"}))
        ->capture_default_str();
    command
        .add_option("--act-scale", options.activation_scale,
                    "w4a4: where the activations' global scale comes from (default layer-max)")
        ->check(one_of({"layer-max", "per-expert", "dynamic", "dynamic-token"}));
    add_backend_options(command, options);
}

Mode choose_mode(const EngineOptions& options, const Checkpoint& checkpoint, int layer) {
    Mode mode;
    if (options.mode == "auto") {
        PrecisionChoice choice = checkpoint.preferred_precision(layer);
        mode.precision = choice.precision;
        mode.reason = std::move(choice.reason);
    } else {
        mode.precision = options.mode == "w4a4" ? Precision::w4a4 : Precision::w4a16;
        mode.reason = "--mode asks for it";
    }
    if (options.activation_scale.empty()) return mode;
    if (mode.precision == Precision::w4a16) {
        throw Error(ErrorKind::invalid_argument,
                    fmt::format("--act-scale {} is of w4a4, but the mode is w4a16 ({}); expected --mode w4a4",
                                options.activation_scale, mode.reason));
    }
    mode.activation_scale = parse_scale(options.activation_scale);
    return mode;
}

Problem problem_of(const MoeConfig& config, const Mode& mode, const EngineOptions& options,
                   std::int64_t max_tokens) {
    return {.config = config,
            .precision = mode.precision,
            .activation_scale = mode.activation_scale,
            .max_tokens = max_tokens,
            .layout = weight_layout(options.layout),
            .batch_invariant = options.batch_invariant};
}

std::unique_ptr<Backend> open_backend(const EngineOptions& options) {
    return moe4::open_backend(
        options.backend,
        {.threads = options.threads, .parallel_for = {}, .device = options.device, .kernel = {}});
}

void add_experts_option(CLI::App& command, std::string& experts) {
    command.add_option("--experts", experts, "FIRST:COUNT, the experts that are held here (default: all)");
}

ExpertRange parse_experts(const std::string& text) {
    if (text.empty()) return {};
    ExpertRange range{.first = -1, .count = 0};
    const char* const end = text.data() + text.size();
    const auto first = std::from_chars(text.data(), end, range.first);
    if (first.ec == std::errc{} && first.ptr != end && *first.ptr == ':') {
        const auto count = std::from_chars(first.ptr + 1, end, range.count);
        if (count.ec == std::errc{} && count.ptr == end && range.first >= 0 && range.count >= 1) return range;
    }
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format("--experts is \"{}\", expected FIRST:COUNT with FIRST from 0 and COUNT from 1", text));
}

}  // namespace moe4::cli
