// `moe4 bench`: how close a layer's speed comes to what this machine can do, both measured in the same run.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <span>

#include "arguments.hpp"
#include "bench_layer.hpp"
#include "bench_report.hpp"
#include "command.hpp"
#include "engine_options.hpp"
#include "output.hpp"
#include "progress.hpp"

namespace moe4::cli {

namespace {

struct BenchOptions {
    std::vector<std::string> shapes = {"qwen3-30b-a3b"};
    std::vector<std::int64_t> tokens = {1, 4, 16, 64, 256, 1024};
    std::vector<std::string> modes = {"w4a4", "w4a16"};
    std::vector<std::string> routings = {"uniform"};
    EngineOptions engine{.backend = "cpu"};
    std::uint64_t seed = 0;
    double seconds = 0.5;
    bool json = false;
    std::string html;
};

/// One shape and mode, prepared often enough that a weight's next use comes after four times the largest
/// cache.
class Bench {
public:
    Bench(const Backend& backend, const BenchShape& shape, Precision precision, const BenchOptions& options,
          std::int64_t most_tokens, std::int64_t fewest_tokens)
        : backend_(backend), shape_(shape), random_(options.seed) {
        const Mode mode{.precision = precision, .reason = ""};
        const Plan plan = backend.plan(problem_of(shape.config(), mode, options.engine, most_tokens));
        const bool has_own_copy = plan.weight_bytes > 0;
        const int wanted = copies_wanted(fewest_tokens);
        const int affordable = copies_affordable(wanted);
        for (int i = 0; i < affordable; ++i) {
            layers_.push_back(backend.prepare(plan, random_weights(shape, has_own_copy, random_)));
        }
        if (affordable < wanted) {
            note(fmt::format(
                "{} copies of the layer fit into memory, {} would keep the weights out of the cache: the "
                "fewest tokens may look too fast",
                affordable, wanted));
        }
        hidden_ = random_hidden(most_tokens * shape.hidden_size, random_);
        output_.resize(hidden_.size());
    }

    BenchRow measure(std::int64_t num_tokens, RoutingKind kind, double seconds) {
        constexpr double kMostRuns = 32;
        constexpr double kFewestRuns = 5;
        constexpr double kSamples = 16;  // of a run, about: what a GPU takes at once stays within `seconds`
        std::vector<RandomRouting> routings;
        const auto add_routings = [&](std::size_t count) {
            while (routings.size() < count)
                routings.push_back(random_routing(shape_, num_tokens, kind, random_));
        };
        add_routings(2);
        const double warm_up = backend_.time_runs(runs(routings, num_tokens)).back();
        add_routings(
            static_cast<std::size_t>(std::clamp(seconds / kSamples / warm_up, kFewestRuns, kMostRuns)));

        std::vector<double> times;
        const auto start = std::chrono::steady_clock::now();
        do {
            const auto samples = backend_.time_runs(runs(routings, num_tokens));
            times.insert(times.end(), samples.begin(), samples.end());
        } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
        double hits = 0;
        for (const RandomRouting& routing : routings) hits += routing.experts_hit;
        hits /= static_cast<double>(routings.size());
        const double bytes = hits * static_cast<double>(shape_.expert_bytes());
        std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2),
                         times.end());
        const double seconds_each = times[times.size() / 2];
        const double operations = 2.0 * 3.0 *
                                  static_cast<double>(shape_.hidden_size * shape_.intermediate_size) *
                                  static_cast<double>(num_tokens * shape_.top_k);
        BenchRow row;
        row.tokens = num_tokens;
        row.us = seconds_each * 1e6;
        row.gb_per_s = bytes / seconds_each * 1e-9;
        row.gop_per_s = operations / seconds_each * 1e-9;
        row.operations_per_byte = operations / bytes;
        row.kernel = kernel_for(static_cast<double>(num_tokens * shape_.top_k) / hits);
        return row;
    }

private:
    int copies_wanted(std::int64_t fewest_tokens) {
        const int hit = random_routing(shape_, fewest_tokens, RoutingKind::uniform, random_).experts_hit;
        const std::uint64_t touched =
            static_cast<std::uint64_t>(hit) * static_cast<std::uint64_t>(shape_.expert_bytes());
        return 1 + static_cast<int>((4 * backend_.memory().last_level_cache + touched - 1) / touched);
    }

    int copies_affordable(int wanted) const {
        const std::uint64_t layer = static_cast<std::uint64_t>(shape_.num_experts) *
                                    static_cast<std::uint64_t>(shape_.expert_bytes());
        const std::uint64_t affordable = backend_.memory().free / 4 * 3 / (layer + layer / 20);
        return static_cast<int>(std::clamp<std::uint64_t>(affordable, 1, static_cast<std::uint64_t>(wanted)));
    }

    /// One run a routing, on the layers in turn.
    std::vector<TimedRun> runs(std::span<const RandomRouting> routings, std::int64_t num_tokens) {
        const Shape rows{num_tokens, shape_.hidden_size};
        const Shape slots{num_tokens, shape_.top_k};
        std::vector<TimedRun> runs;
        for (const RandomRouting& routing : routings) {
            runs.push_back(
                {.layer = layers_[next_layer_].get(),
                 .hidden = {hidden_.data(), DType::bf16, rows, {}},
                 .routing = {.top_k_ids = {routing.top_k_ids.data(), DType::i32, slots, {}},
                             .top_k_weights = {routing.top_k_weights.data(), DType::f32, slots, {}}},
                 .output = {output_.data(), DType::bf16, rows, {}}});
            next_layer_ = (next_layer_ + 1) % layers_.size();
        }
        return runs;
    }

    std::string kernel_for(double rows_per_expert) const {
        for (const Plan::Choice& choice : layers_.front()->plan().choices) {
            if (rows_per_expert <= static_cast<double>(choice.up_to_tokens_per_expert))
                return std::string(choice.kernel);
        }
        return std::string(layers_.front()->plan().choices.back().kernel);
    }

    const Backend& backend_;
    BenchShape shape_;
    std::mt19937_64 random_;
    std::vector<std::unique_ptr<Layer>> layers_;
    std::size_t next_layer_ = 0;
    std::vector<std::uint16_t> hidden_;
    std::vector<std::uint16_t> output_;
};

std::vector<KernelInfo> kernels_of(const Backend& backend) {
    for (BackendInfo& info : backends())
        if (info.name == backend.name()) return std::move(info.kernels);
    return {};
}

/// Whichever is lower: what memory can feed, or what the kernel's instructions can do.
void set_limit(BenchRow& row, const std::vector<MachineLimit>& limits,
               const std::vector<KernelInfo>& kernels) {
    std::map<std::string_view, double> value;
    for (const MachineLimit& limit : limits) value[limit.name] = limit.value;
    row.limit = "dram_read";
    row.limit_value = value["dram_read"];
    row.ratio = row.gb_per_s / row.limit_value;
    for (const KernelInfo& kernel : kernels) {
        if (kernel.name != row.kernel || kernel.limit.empty() || !value.contains(kernel.limit)) continue;
        const double arithmetic = value[kernel.limit] * kernel.limit_share;
        if (arithmetic >= row.limit_value * row.operations_per_byte) continue;
        row.limit = kernel.limit_share == 1.0 ? std::string(kernel.limit)
                                              : fmt::format("{:.2f} {}", kernel.limit_share, kernel.limit);
        row.limit_value = arithmetic;
        row.ratio = row.gop_per_s / arithmetic;
    }
}

std::vector<BenchRow> measure_rows(const Backend& backend, const std::vector<BenchShape>& shapes,
                                   const BenchOptions& options, Progress& progress) {
    const auto [fewest, most] = std::minmax_element(options.tokens.begin(), options.tokens.end());
    std::vector<BenchRow> rows;
    for (const BenchShape& shape : shapes) {
        for (const std::string& mode : options.modes) {
            progress.begin(fmt::format("preparing {} {}", shape.name, mode));
            Bench measured(backend, shape, mode == "w4a4" ? Precision::w4a4 : Precision::w4a16, options,
                           *most, *fewest);
            for (const std::string& routing : options.routings) {
                for (const std::int64_t tokens : options.tokens) {
                    progress.begin(fmt::format("{} {} {} tokens {}", shape.name, mode, tokens, routing));
                    BenchRow row =
                        measured.measure(tokens, routing == "zipf" ? RoutingKind::zipf : RoutingKind::uniform,
                                         options.seconds);
                    row.shape = shape.name;
                    row.mode = mode;
                    row.routing = routing;
                    rows.push_back(std::move(row));
                }
            }
        }
    }
    return rows;
}

int bench(const BenchOptions& options) {
    std::vector<BenchShape> shapes;
    shapes.reserve(options.shapes.size());
    for (const std::string& text : options.shapes) shapes.push_back(parse_shape(text));
    if (!options.html.empty()) refuse_unwritable(options.html);  // now, not when all has been measured
    const auto backend = open_backend(options.engine);
    BenchReport report;
    report.machine = backend->description();
    report.threads = backend->num_threads();
    Progress progress("measuring the machine");
    report.limits = backend->measure_memory();
    report.rows = measure_rows(*backend, shapes, options, progress);
    progress.begin("measuring the machine");
    for (const MachineLimit& limit : backend->measure_arithmetic()) report.limits.push_back(limit);
    progress.end();
    const std::vector<KernelInfo> kernels = kernels_of(*backend);
    for (BenchRow& row : report.rows) set_limit(row, report.limits, kernels);
    if (!options.html.empty()) write_html(report, options.html);
    options.json ? print_json(json_of(report)) : print(text_of(report));
    return kOk;
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
    auto options = std::make_shared<BenchOptions>();
    CLI::App* command =
        app.add_subcommand("bench", "time layers of random weights against this machine's limits");
    command->footer(
        "DRAM read is measured before the rows, the peaks of the instructions that the kernels use after "
        "them. A row's limit\n"
        "is the lower of the kernel's arithmetic bound and what DRAM can feed; ratio is how much of it was "
        "reached.\n"
        "GB/s are of packed weights (4.5 bits each) of the experts hit; layers are rotated over copies, so "
        "that weights\n"
        "come from memory; on a GPU as one graph, their inputs there already. Example:\n"
        "  moe4 bench --shape qwen3-30b-a3b deepseek-v3 --tokens 1,8,64 --html report.html");
    command->add_option("--shape", options->shapes, "models, or one HIDDEN,INTERMEDIATE,EXPERTS,TOP_K each")
        ->type_name("NAME|H,I,E,k ...")
        ->capture_default_str();
    command->add_option("--tokens", options->tokens, "tokens in a run")
        ->delimiter(',')
        ->check(number_in(std::int64_t{1}, std::int64_t{1} << 20))
        ->capture_default_str();
    command->add_option("--mode", options->modes, "w4a16, w4a4 or both")
        ->delimiter(',')
        ->check(one_of({"w4a16", "w4a4"}))
        ->capture_default_str();
    command->add_option("--routing", options->routings, "uniform, zipf or both")
        ->delimiter(',')
        ->check(one_of({"uniform", "zipf"}))
        ->capture_default_str();
    add_backend_options(*command, options->engine);
    command->add_option("--seconds", options->seconds, "how long to measure a row at least")
        ->check(number_in(0.01, 60.0))
        ->capture_default_str();
    command->add_option("--seed", options->seed, "of weights, tokens and routing")
        ->check(number_in(decltype(options->seed){0}))
        ->capture_default_str();
    command->add_option("--html", options->html, "also write a report with a roofline plot to this file");
    add_json_option(*command, options->json);
    command->callback([options, &action] { action = [options] { return bench(*options); }; });
}

}  // namespace moe4::cli
