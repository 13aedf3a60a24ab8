// moe4 plan: which kernels would run a layer, why not the others, and how much memory that takes. Reads
// headers alone, and the scales that w4a4 cannot do without.
#include <fmt/format.h>

#include "arguments.hpp"
#include "command.hpp"
#include "engine_options.hpp"
#include "output.hpp"
#include "progress.hpp"

namespace moe4::cli {

namespace {

struct Options {
    std::string folder;
    int layer = 0;
    std::int64_t num_tokens = 1;
    std::string experts;
    EngineOptions engine;
    bool is_json = false;
};

constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;

Json json_of(const Options& options, const Mode& mode, const Plan& plan) {
    const MoeConfig& config = plan.problem.config;
    Json kernels = Json::array();
    for (const Plan::Choice& choice : plan.choices) {
        const bool is_last = &choice == &plan.choices.back();
        kernels.push_back(
            {{"kernel", choice.kernel},
             {"up_to_tokens_per_expert", is_last ? Json() : Json(choice.up_to_tokens_per_expert)}});
    }
    Json rejections = Json::array();
    for (const Plan::Rejection& rejection : plan.rejections) {
        rejections.push_back({{"kernel", rejection.kernel}, {"reason", rejection.reason}});
    }
    Json document = {{"layer", options.layer},
                     {"hidden_size", config.hidden_size},
                     {"intermediate_size", config.intermediate_size},
                     {"num_experts", config.num_experts},
                     {"top_k", config.router.top_k},
                     {"tokens", options.num_tokens},
                     {"mode", name_of(mode.precision)},
                     {"mode_reason", mode.reason}};
    if (mode.precision == Precision::w4a4) document["activation_scale"] = name_of(mode.activation_scale);
    document["backend"] = plan.backend;
    document["layout"] = plan.layout == WeightLayout::packed ? "packed" : "in-place";
    document["kernels"] = kernels;
    document["rejections"] = rejections;
    document["workspace_bytes"] = plan.workspace_bytes;
    document["weight_bytes"] = plan.weight_bytes;
    return document;
}

int plan(const Options& options) {
    Progress progress("opening " + options.folder);
    const Checkpoint checkpoint = Checkpoint::open(options.folder);
    progress.begin(fmt::format("planning layer {}", options.layer));
    const MoeConfig config = checkpoint.moe_config(options.layer);
    const Mode mode = choose_mode(options.engine, checkpoint, options.layer);
    const auto backend = open_backend(options.engine);
    Problem problem = problem_of(config, mode, options.engine, options.num_tokens);
    problem.experts = parse_experts(options.experts);
    const Plan plan = backend->plan(problem);
    if (mode.precision == Precision::w4a4)
        check_input_scales(checkpoint.moe_layer(options.layer), mode.activation_scale);
    progress.end();
    if (options.is_json) {
        print_json(json_of(options, mode, plan));
    } else {
        print(fmt::format("layer {}: {}, because {}\nbackend: {}\n{}", options.layer, describe(mode),
                          mode.reason, backend->description(), plan.explain()));
    }
    return kOk;
}

}  // namespace

void add_plan(CLI::App& app, Action& action) {
    CLI::App* command =
        app.add_subcommand("plan", "which kernels would run a layer, why not the others, memory");
    const auto options = std::make_shared<Options>();
    add_layer_options(*command, options->folder, options->layer);
    command->add_option("--tokens", options->num_tokens, "largest number of tokens of one run")
        ->check(number_in(std::int64_t{1}, kMostTokens))
        ->capture_default_str();
    add_experts_option(*command, options->experts);
    add_engine_options(*command, options->engine);
    add_json_option(*command, options->is_json);
    command->footer("\nExample: moe4 plan DIR --layer 3 --tokens 64");
    command->callback([&action, options] { action = [options] { return plan(*options); }; });
}

}  // namespace moe4::cli
