#include "moe4/checkpoint.hpp"

#include <algorithm>
#include <mutex>

#include "checkpoint/inspect.hpp"
#include "checkpoint/quantization_claims.hpp"
#include "checkpoint/weight_format.hpp"
#include "moe4/error.hpp"

namespace moe4 {

using namespace checkpoint;

struct Checkpoint::State : OpenedCheckpoint {
    std::vector<int> moe_layers;

    // Comparing every tensor with every claim takes longer than opening, and only inspect asks.
    mutable std::once_flag compared;
    mutable std::vector<std::string> disagreements;
    mutable std::vector<std::string> unmatched;
    mutable std::vector<std::string> unused;

    const State& compare() const {
        std::call_once(compared, [this] {
            disagreements = find_disagreements(*this);
            unmatched = find_unmatched(*this);
            unused = find_unused(*this);
        });
        return *this;
    }
};

namespace {

bool is_unquantized_block(const TensorRange& block) {
    const std::string experts = block.name("experts.");
    return std::all_of(block.present.begin(), block.present.end(), [&](const ShardEntry& entry) {
        if (!entry.name.starts_with(experts)) return true;
        return is_unquantized(entry.tensor.dtype);
    });
}

/// Tensors decide; where they are of no dialect, what the files call it, so that messages look for its
/// leaves.
void choose_dialect(OpenedCheckpoint& checkpoint) {
    for (const Dialect* dialect : dialects()) {
        for (const auto& [layer, block] : checkpoint.blocks) {
            if (!dialect->recognises(block)) continue;
            checkpoint.dialect = dialect;
            checkpoint.dialect_name = dialect->name();
            return;
        }
    }
    for (const Dialect* dialect : dialects()) {
        for (const Quantization& quantization : checkpoint.config.quantizations) {
            if (!dialect->is_called(quantization.method) && !dialect->is_called(quantization.producer))
                continue;
            checkpoint.dialect = dialect;
            checkpoint.dialect_name = dialect->name();
            return;
        }
    }
    const bool is_unquantized =
        std::all_of(checkpoint.blocks.begin(), checkpoint.blocks.end(),
                    [](const auto& block) { return is_unquantized_block(block.second); });
    checkpoint.dialect_name = is_unquantized ? "unquantized" : "unknown";
}

void throw_first(const Refusals& refusals) {
    if (!refusals.empty()) throw refusals.front();
}

}  // namespace

Checkpoint Checkpoint::open(const std::filesystem::path& folder) {
    auto state = std::make_shared<State>();
    state->tensors = ShardedTensors::open(folder);
    state->config = read_model_config(folder);
    state->family = &find_family(state->config);
    state->blocks = find_moe_blocks(*state->tensors, *state->family);
    for (const auto& [layer, block] : state->blocks) state->moe_layers.push_back(layer);
    choose_dialect(*state);
    Checkpoint checkpoint;
    checkpoint.state_ = std::move(state);
    return checkpoint;
}

std::string_view Checkpoint::dialect() const { return state_->dialect_name; }

std::string_view Checkpoint::producer() const {
    for (const Quantization& quantization : state_->config.quantizations) {
        if (!quantization.producer.empty()) return quantization.producer;
    }
    return "";
}

std::string_view Checkpoint::family() const { return state_->family->model_type; }
const std::vector<int>& Checkpoint::moe_layers() const { return state_->moe_layers; }
const std::vector<std::string>& Checkpoint::warnings() const { return state_->tensors->warnings(); }
const std::vector<std::string>& Checkpoint::disagreements() const { return state_->compare().disagreements; }
const std::vector<std::string>& Checkpoint::unmatched() const { return state_->compare().unmatched; }
const std::vector<std::string>& Checkpoint::unused() const { return state_->compare().unused; }
std::uint64_t Checkpoint::num_bytes() const { return state_->tensors->num_bytes(); }

LayerInfo Checkpoint::inspect_layer(int layer, Scan scan) const {
    return checkpoint::inspect_layer(*state_, layer, scan);
}

MoeConfig Checkpoint::moe_config(int layer) const {
    const LayerReading reading = read_layer(*state_, layer, Read::headers);
    throw_first(reading.refusals);
    return reading.weights.config;
}

MoeWeights Checkpoint::moe_layer(int layer) const {
    LayerReading reading = read_layer(*state_, layer, Read::values);
    throw_first(reading.refusals);
    return std::move(reading.weights);
}

PrecisionChoice Checkpoint::preferred_precision(int layer) const {
    const LayerReading reading = read_layer(*state_, layer, Read::headers);
    const MoeWeights& weights = reading.weights;
    PrecisionChoice choice =
        requested_precision(state_->config, linear_names(reading.tensors, weights.config.num_experts));
    if (choice.precision == Precision::w4a16) return choice;
    for (const ExpertWeights& expert : weights.experts) {
        for (const ExpertMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
            if (!matrix->input_scale && matrix->input_scale_fault.empty())
                return {Precision::w4a16, matrix->name + "." + weights.leaves.input_scale + " is missing"};
        }
    }
    return {Precision::w4a4, choice.reason + " and every expert has input scales"};
}

NamedTensor Checkpoint::unquantized_matrix(int layer, int expert, Projection projection) const {
    Refusals refusals;
    const TensorRange& block = moe_block(*state_, layer);
    const MoeConfig config = checkpoint::moe_config(*state_->family, state_->config, refusals);
    throw_first(refusals);
    if (expert < 0 || expert >= config.num_experts) {
        throw Error(ErrorKind::invalid_argument, "layer " + std::to_string(layer) + " has no expert " +
                                                     std::to_string(expert) + ", expected 0 to " +
                                                     std::to_string(config.num_experts - 1));
    }
    const bool is_down = projection == Projection::down;
    const Shape shape = {is_down ? config.hidden_size : config.intermediate_size,
                         is_down ? config.intermediate_size : config.hidden_size};
    const std::string expected = "BF16, F16 or F32 " + shape.to_string();
    const std::string leaf = expert_leaf(*state_->family, expert, projection, "weight");
    const ShardEntry* weight = block.find(leaf);
    if (weight == nullptr) throw Error(ErrorKind::broken_file, missing(block, leaf, expected));
    const std::string sentence =
        block.name(leaf) + " is " + describe(weight->tensor) + ", expected " + expected;
    if (!is_unquantized(weight->tensor.dtype)) throw Error(ErrorKind::unsupported, sentence);
    if (weight->tensor.shape != shape) throw Error(ErrorKind::broken_file, sentence);
    return {std::string(weight->name), weight->tensor};
}

std::optional<TensorView> Checkpoint::find(std::string_view tensor_name) const {
    const ShardEntry* entry = state_->tensors->find(tensor_name);
    if (entry == nullptr) return std::nullopt;
    return entry->tensor;
}

}  // namespace moe4
