// moe4 run: the routed experts of one layer on the tokens of a file.
#include <fmt/format.h>

#include <new>

#include "arguments.hpp"
#include "command.hpp"
#include "engine_options.hpp"
#include "layer_input.hpp"
#include "moe4/error.hpp"
#include "output.hpp"
#include "output_file.hpp"
#include "progress.hpp"

namespace moe4::cli {

namespace {

struct Options {
    std::string folder;
    int layer = 0;
    std::string input;
    std::string output;
    std::string output_dtype = "bf16";
    std::string experts;
    EngineOptions engine;
    bool is_json = false;
};

/// Aligned as a Workspace has to be.
class WorkspaceMemory {
public:
    explicit WorkspaceMemory(std::size_t bytes) : bytes_(bytes), data_(::operator new(bytes, kAlignment)) {}
    ~WorkspaceMemory() { ::operator delete(data_, kAlignment); }
    WorkspaceMemory(const WorkspaceMemory&) = delete;
    WorkspaceMemory& operator=(const WorkspaceMemory&) = delete;
    Workspace get() const { return {data_, bytes_}; }

private:
    static constexpr std::align_val_t kAlignment{64};
    std::size_t bytes_;
    void* data_;
};

std::size_t layer_bytes(const MoeConfig& config) {
    const Nvfp4View matrix{.rows = config.intermediate_size, .cols = config.hidden_size};
    return 3 * static_cast<std::size_t>(config.num_experts) * matrix.num_bytes();
}

/// Plans as many tokens at once as fit beside the weights: 32 MB and an eighth of the layer for the workspace
/// and the rows in flight. Rows do not depend on each other, except with dynamic scales, which see the whole
/// batch.
Plan plan_batch(const Backend& backend, Problem problem) {
    const bool is_dynamic =
        problem.precision == Precision::w4a4 && problem.activation_scale == ActivationScale::dynamic;
    const std::size_t limit = (std::size_t{32} << 20) + layer_bytes(problem.config) / 8;
    const auto row_bytes = static_cast<std::size_t>(problem.config.hidden_size) * (sizeof(float) + 2);
    for (;;) {
        Plan plan = backend.plan(problem);
        const std::size_t bytes =
            plan.workspace_bytes + static_cast<std::size_t>(problem.max_tokens) * row_bytes;
        if (is_dynamic || problem.max_tokens <= 1 || bytes <= limit) return plan;
        problem.max_tokens = (problem.max_tokens + 1) / 2;
    }
}

/// Batch by batch from the input file to the output file.
class Run {
public:
    Run(const Layer& layer, const LayerInput& input, DType output_dtype)
        : layer_(layer),
          input_(input),
          output_dtype_(output_dtype),
          hidden_size_(layer.plan().problem.config.hidden_size),
          top_k_(input.has_routing() ? input.top_k() : layer.plan().problem.config.router.top_k),
          workspace_(layer.plan().workspace_bytes),
          ids_(static_cast<std::size_t>(input.num_tokens() * top_k_)),
          weights_(ids_.size()) {}

    void write(OutputFile& file, Progress& progress) {
        const std::int64_t num_tokens = input_.num_tokens();
        const std::int64_t batch = std::max<std::int64_t>(1, layer_.plan().problem.max_tokens);
        output_.resize(static_cast<std::size_t>(std::min(batch, num_tokens) * hidden_size_) *
                       element_bytes());
        for (std::int64_t first = 0; first < num_tokens; first += batch) {
            const std::int64_t count = std::min(batch, num_tokens - first);
            run_batch(first, count);
            file.append(output_.data(), static_cast<std::size_t>(count * hidden_size_) * element_bytes());
            progress.update(first + count, num_tokens);
        }
        file.append(ids_.data(), ids_.size() * sizeof(std::int32_t));
        file.append(weights_.data(), weights_.size() * sizeof(float));
        file.finish();
    }

private:
    std::size_t element_bytes() const { return static_cast<std::size_t>(dtype_bits(output_dtype_)) / 8; }

    void run_batch(std::int64_t first, std::int64_t count) {
        const TensorView hidden = input_.hidden(first, count, hidden_buffer_);
        std::int32_t* const ids = ids_.data() + first * top_k_;
        float* const weights = weights_.data() + first * top_k_;
        const MutableTensorView id_view{ids, DType::i32, {count, top_k_}, {}};
        const MutableTensorView weight_view{weights, DType::f32, {count, top_k_}, {}};
        if (input_.has_routing()) {
            input_.read_routing(first, count, ids, weights);
        } else {
            layer_.route(hidden, id_view, weight_view);
        }
        layer_.run(hidden, {id_view, weight_view}, {output_.data(), output_dtype_, {count, hidden_size_}, {}},
                   workspace_.get());
    }

    const Layer& layer_;
    const LayerInput& input_;
    const DType output_dtype_;
    const std::int64_t hidden_size_;
    const std::int64_t top_k_;
    WorkspaceMemory workspace_;
    std::vector<std::int32_t> ids_;
    std::vector<float> weights_;
    std::vector<std::byte> output_;
    std::vector<std::uint16_t> hidden_buffer_;
};

/// What a reader of the result has to know.
std::vector<std::string> remarks(const Checkpoint& checkpoint, const Options& options,
                                 const LayerInput& input, const MoeConfig& config) {
    std::vector<std::string> sentences;
    if (checkpoint.inspect_layer(options.layer, Checkpoint::Scan::headers_and_scalars).has_shared_expert) {
        sentences.push_back(fmt::format(
            "the shared expert of layer {} is not included: the output is of the routed experts alone",
            options.layer));
    }
    const std::int64_t unknown = input.has_routing() ? input.num_unknown_ids(config.num_experts) : 0;
    if (unknown > 0) {
        sentences.push_back(fmt::format("{} of the top_k_ids name none of the {} experts and add nothing",
                                        unknown, config.num_experts));
    }
    return sentences;
}

Json json_of(const Options& options, const Mode& mode, const LayerInput& input, const Plan& plan,
             const std::vector<std::string>& notes) {
    Json document = {
        {"layer", options.layer}, {"mode", name_of(mode.precision)}, {"mode_reason", mode.reason}};
    if (mode.precision == Precision::w4a4) document["activation_scale"] = name_of(mode.activation_scale);
    document["backend"] = plan.backend;
    document["kernels"] = kernel_names(plan);
    document["routing"] = input.has_routing() ? "input" : "router";
    document["tokens"] = input.num_tokens();
    document["output"] = options.output;
    document["output_dtype"] = options.output_dtype;
    document["notes"] = notes;
    return document;
}

int run(const Options& options) {
    Progress progress("opening " + options.folder);
    const Checkpoint checkpoint = Checkpoint::open(options.folder);
    const MoeConfig config = checkpoint.moe_config(options.layer);
    refuse_to_overwrite(options.output, options.folder);
    refuse_to_overwrite(options.output, options.input);
    const LayerInput input(options.input, config);
    const Mode mode = choose_mode(options.engine, checkpoint, options.layer);
    const auto backend = open_backend(options.engine);
    Problem problem = problem_of(config, mode, options.engine, input.num_tokens());
    if (input.has_routing()) problem.top_k = input.top_k();
    problem.experts = parse_experts(options.experts);
    const Plan plan = plan_batch(*backend, problem);
    progress.end();
    note(fmt::format("layer {} runs in {}, because {}", options.layer, describe(mode), mode.reason));
    note(fmt::format("kernels on {}: {}", plan.backend, kernel_names(plan)));
    const std::vector<std::string> notes = remarks(checkpoint, options, input, config);
    for (const std::string& sentence : notes) note(sentence);

    const std::int64_t top_k = input.has_routing() ? input.top_k() : config.router.top_k;
    const DType dtype = options.output_dtype == "f32" ? DType::f32 : DType::bf16;
    const TensorSpec tensors[] = {{"output", dtype, {input.num_tokens(), config.hidden_size}},
                                  {"top_k_ids", DType::i32, {input.num_tokens(), top_k}},
                                  {"top_k_weights", DType::f32, {input.num_tokens(), top_k}}};
    OutputFile file(options.output,
                    tensors);  // before the work, which would be lost on a disk that is read-only
    progress.begin(fmt::format("preparing layer {}", options.layer));
    const auto layer = backend->prepare(plan, checkpoint.moe_layer(options.layer));
    progress.begin(fmt::format("running layer {}, tokens", options.layer));
    Run(*layer, input, dtype).write(file, progress);
    progress.end();

    if (options.is_json) {
        print_json(json_of(options, mode, input, plan, notes));
    } else {
        print(fmt::format("{}: output {} {}, top_k_ids, top_k_weights\n", options.output, dtype_name(dtype),
                          tensors[0].shape.to_string()));
    }
    return kOk;
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
    CLI::App* command =
        app.add_subcommand("run", "run the routed experts of one layer on the tokens of a file");
    const auto options = std::make_shared<Options>();
    add_layer_options(*command, options->folder, options->layer);
    command
        ->add_option(
            "--input", options->input,
            "safetensors: hidden [T,H] BF16 (or F32, rounded to BF16) and, to bring the routing along,\n"
            "top_k_ids [T,k] I32 or I64 with top_k_weights [T,k] F32; else the layer's router runs.\n"
            "An id of -1 or outside the experts held adds exactly 0")
        ->required();
    command
        ->add_option("--output", options->output,
                     "safetensors to write: output [T,H], top_k_ids [T,k] I32, top_k_weights [T,k] F32\n"
                     "Appears when it is complete, in the place of a file or a link of that name")
        ->required();
    command->add_option("--output-dtype", options->output_dtype, "f32: the sum before the last rounding")
        ->check(one_of({"bf16", "f32"}))
        ->capture_default_str();
    add_experts_option(*command, options->experts);
    add_engine_options(*command, options->engine);
    add_json_option(*command, options->is_json);
    command->footer(
        "\nExample: moe4 run DIR --layer 3 --input x.safetensors --output y.safetensors --mode w4a4");
    command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace moe4::cli
