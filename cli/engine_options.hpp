#pragma once
// The options that say how a layer is run, shared by the commands that plan or run one.
#include <memory>
#include <string>
#include <string_view>

#include "moe4/backend.hpp"
#include "moe4/checkpoint.hpp"

namespace CLI {
class App;
}

namespace moe4::cli {

/// As typed; the parser has checked the spelling.
struct EngineOptions {
    std::string mode = "auto";
    std::string activation_scale = {};  // empty: layer-max, and not asked for
    std::string backend = "auto";
    std::string layout = "auto";
    int threads = 0;
    int device = 0;
    bool batch_invariant = false;
};

/// --backend --threads --device --layout --batch-invariant
void add_backend_options(CLI::App& command, EngineOptions& options);
/// The same, --mode and --act-scale
void add_engine_options(CLI::App& command, EngineOptions& options);
/// DIR and --layer N
void add_layer_options(CLI::App& command, std::string& folder, int& layer);

struct Mode {
    Precision precision = Precision::w4a16;
    ActivationScale activation_scale = ActivationScale::layer_max;
    std::string reason;  // a sentence
};
/// Throws invalid_argument for an activation scale with w4a16.
Mode choose_mode(const EngineOptions& options, const Checkpoint& checkpoint, int layer);
/// All of it but slots per token and the experts held.
Problem problem_of(const MoeConfig& config, const Mode& mode, const EngineOptions& options,
                   std::int64_t max_tokens);
std::unique_ptr<Backend> open_backend(const EngineOptions& options);

/// --experts FIRST:COUNT
void add_experts_option(CLI::App& command, std::string& experts);
/// Empty = all; throws invalid_argument. Whether the layer has them is the backend's to say.
ExpertRange parse_experts(const std::string& text);

std::string_view name_of(Precision precision);    // "w4a16"
std::string_view name_of(ActivationScale scale);  // "layer-max"
std::string_view name_of(Projection projection);  // "gate"
std::string describe(const Mode& mode);           // "w4a4, layer-max"
std::string kernel_names(const Plan& plan);       // "scalar_w4a4" or several, few tokens first

}  // namespace moe4::cli
