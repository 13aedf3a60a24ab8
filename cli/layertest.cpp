// moe4 layertest: are a layer's weights, its activation scales or the engine at fault?
#include "moe4/layertest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "arguments.hpp"
#include "command.hpp"
#include "engine_options.hpp"
#include "layer_input.hpp"
#include "layertest_report.hpp"
#include "moe4/error.hpp"
#include "output.hpp"
#include "progress.hpp"

namespace moe4::cli {

namespace {

struct Options {
    std::string folder;
    std::string layer;
    std::string reference;
    std::string input;
    std::int64_t num_tokens = 64;
    std::uint64_t seed = 0;
    EngineOptions engine;
    bool is_json = false;
};

constexpr std::int64_t kMostTokens = 1 << 20;

/// Two checkpoints spell their tensors alike: an error says which of them it is about.
template <class Work>
auto of_folder(const std::string& folder, const Work& work) {
    try {
        return work();
    } catch (const Error& error) {
        const std::string sentence = error.what();
        if (sentence.starts_with(folder)) throw;
        throw Error(error.kind(), folder + ": " + sentence);
    }
}

std::vector<int> chosen_layers(const Options& options, const Checkpoint& checkpoint) {
    if (options.layer == "all") return checkpoint.moe_layers();
    int layer = 0;
    const char* const end = options.layer.data() + options.layer.size();
    const auto parsed = std::from_chars(options.layer.data(), end, layer);
    if (parsed.ec == std::errc{} && parsed.ptr == end) return {layer};
    throw Error(ErrorKind::invalid_argument,
                fmt::format("--layer is \"{}\", expected a number or all", options.layer));
}

/// The tokens of a test and where each goes.
struct Tokens {
    std::int64_t count = 0;
    int top_k = 0;
    std::vector<std::uint16_t> hidden;
    std::vector<std::int32_t> ids;
    std::vector<float> weights;

    Shape slots() const { return {count, top_k}; }
    Routing routing() const {
        return {{ids.data(), DType::i32, slots(), {}}, {weights.data(), DType::f32, slots(), {}}};
    }
};

Tokens read_tokens(const LayerInput& input, const MoeConfig& config) {
    Tokens tokens{.count = input.num_tokens(),
                  .top_k = input.has_routing() ? input.top_k() : config.router.top_k,
                  .hidden = {},
                  .ids = {},
                  .weights = {}};
    const TensorView rows = input.hidden(0, tokens.count, tokens.hidden);
    const auto* values = static_cast<const std::uint16_t*>(rows.data);
    if (values != tokens.hidden.data()) tokens.hidden.assign(values, values + rows.shape.num_elements());
    return tokens;
}

/// One layer, from its weights to its report.
class LayerTest {
public:
    LayerTest(const Options& options, const Checkpoint& checkpoint,
              const std::optional<Checkpoint>& reference, const Backend& backend, Progress& progress)
        : options_(options),
          checkpoint_(checkpoint),
          reference_(reference),
          backend_(backend),
          progress_(progress) {}

    LayertestResult test(int layer_number) const {
        progress_.begin(fmt::format("preparing layer {}", layer_number));
        const MoeWeights weights =
            of_folder(options_.folder, [&] { return checkpoint_.moe_layer(layer_number); });
        const Mode mode = choose_mode(options_.engine, checkpoint_, layer_number);
        std::optional<LayerInput> input;
        if (!options_.input.empty()) input.emplace(options_.input, weights.config);
        Tokens tokens = input ? read_tokens(*input, weights.config) : default_tokens(weights);
        Problem problem = problem_of(weights.config, mode, options_.engine, tokens.count);
        problem.top_k = tokens.top_k;
        const Plan plan = backend_.plan(problem);
        const auto layer = of_folder(options_.folder, [&] { return backend_.prepare(plan, weights); });
        route(*layer, input, tokens);

        progress_.begin(fmt::format("testing layer {}, step", layer_number));
        return {.layer = layer_number,
                .mode = mode,
                .num_tokens = tokens.count,
                .backend = std::string(layer->plan().backend),
                .kernels = kernel_names(layer->plan()),
                .report = layertest(
                    *layer, weights, reference_of(layer_number),
                    {tokens.hidden.data(), DType::bf16, {tokens.count, weights.config.hidden_size}, {}},
                    tokens.routing(), [this](int done, int total) { progress_.update(done, total); }, {},
                    backend_.num_threads())};
    }

private:
    Tokens default_tokens(const MoeWeights& weights) const {
        return {.count = options_.num_tokens,
                .top_k = weights.config.router.top_k,
                .hidden = default_hidden(weights, options_.num_tokens, options_.seed),
                .ids = {},
                .weights = {}};
    }

    static void route(const Layer& layer, const std::optional<LayerInput>& input, Tokens& tokens) {
        tokens.ids.resize(static_cast<std::size_t>(tokens.slots().num_elements()));
        tokens.weights.resize(tokens.ids.size());
        if (input && input->has_routing()) {
            input->read_routing(0, tokens.count, tokens.ids.data(), tokens.weights.data());
            return;
        }
        const std::int64_t hidden_size = layer.plan().problem.config.hidden_size;
        layer.route({tokens.hidden.data(), DType::bf16, {tokens.count, hidden_size}, {}},
                    {tokens.ids.data(), DType::i32, tokens.slots(), {}},
                    {tokens.weights.data(), DType::f32, tokens.slots(), {}});
    }

    std::function<NamedTensor(int, Projection)> reference_of(int layer) const {
        if (!reference_) return {};
        return [this, layer](int expert, Projection projection) {
            return of_folder(options_.reference, [&] {
                NamedTensor matrix = reference_->unquantized_matrix(layer, expert, projection);
                matrix.name = options_.reference + ": " + matrix.name;
                return matrix;
            });
        };
    }

    const Options& options_;
    const Checkpoint& checkpoint_;
    const std::optional<Checkpoint>& reference_;
    const Backend& backend_;
    Progress& progress_;
};

/// A layer that cannot be tested ends the command, after the results of those before it.
int test_layers(const Options& options) {
    Progress progress("opening " + options.folder);
    const Checkpoint checkpoint = Checkpoint::open(options.folder);
    std::optional<Checkpoint> reference;
    if (!options.reference.empty()) {
        progress.begin("opening " + options.reference);
        reference = of_folder(options.reference, [&] { return Checkpoint::open(options.reference); });
    }
    const auto backend = open_backend(options.engine);
    const LayerTest layer_test(options, checkpoint, reference, *backend, progress);
    const std::vector<int> layers = chosen_layers(options, checkpoint);
    if (layers.empty())
        throw Error(ErrorKind::unsupported, fmt::format("{} has no MoE layer", options.folder));

    std::vector<LayertestResult> results;
    std::optional<Error> failure;
    for (std::size_t i = 0; i < layers.size() && !failure; ++i) {
        try {
            results.push_back(layer_test.test(layers[i]));
        } catch (const Error& error) {
            failure = error;
        }
        progress.end();
        if (!options.is_json && !failure) print(text_of(results.back()));
    }
    if (failure && (results.empty() || !options.is_json)) throw *failure;
    if (options.is_json) print_json(json_of(results, failure));
    if (failure) {
        note(failure->what());
        return static_cast<int>(failure->kind());
    }
    return first_at_fault(results).report.cause == Cause::none ? kOk : kCheckFailed;
}

}  // namespace

void add_layertest(CLI::App& app, Action& action) {
    CLI::App* command = app.add_subcommand(
        "layertest", "are a layer's weights, its activation scales or the engine at fault?");
    const auto options = std::make_shared<Options>();
    command
        ->add_option("DIR", options->folder, "the checkpoint: a folder of safetensors with its config.json")
        ->required();
    command->add_option("--layer", options->layer, "number of the MoE layer, or all")->required();
    command->add_option("--reference", options->reference,
                        "folder of the model before it was quantised (BF16, F16 or F32): judges the weights");
    CLI::Option* input =
        command->add_option("--input", options->input,
                            "safetensors with hidden and, maybe, top_k_ids and top_k_weights, as for run");
    command->add_option("--tokens", options->num_tokens, "without --input: that many rows of N(0, 1)")
        ->check(number_in(std::int64_t{1}, kMostTokens))
        ->capture_default_str()
        ->excludes(input);
    command->add_option("--seed", options->seed, "without --input: which rows")
        ->check(number_in(std::uint64_t{0}))
        ->capture_default_str()
        ->excludes(input);
    add_engine_options(*command, options->engine);
    add_json_option(*command, options->is_json);
    command->footer(
        "\nPrints up to three distances and one verdict; exits 1 when something is at fault.\n"
        "  weights      dequantised against the reference: 0.06 to 0.12 is normal, over 0.16 is a fault\n"
        "  activations  w4a4 against w4a16, both exact: 0.05 to 0.16 is normal, over 0.35 is a fault\n"
        "  engine       the kernels against the exact result in the same mode: over 1e-3 (w4a16) or 3e-3 "
        "(w4a4)\n"
        "               is a fault\n"
        "\nExample: moe4 layertest DIR --layer 3 --reference BF16_DIR");
    command->callback([&action, options] { action = [options] { return test_layers(*options); }; });
}

}  // namespace moe4::cli
