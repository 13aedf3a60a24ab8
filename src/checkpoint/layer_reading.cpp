#include "checkpoint/layer_reading.hpp"

#include "checkpoint/dialects/per_expert.hpp"
#include "checkpoint/quantization_claims.hpp"

namespace moe4::checkpoint {

namespace {

/// The tensor if it is there and of the shape, and BF16 or F32; else a view without data, and a refusal.
TensorView read_router_tensor(const TensorRange& block, std::string_view name, const Shape& shape,
                              Refusals& refusals) {
    const std::string expected = "BF16 or F32 " + shape.to_string();
    const ShardEntry* entry = block.find(name);
    if (entry == nullptr) {
        refuse_missing(block, name, expected, refusals);
        return {};
    }
    const TensorView& tensor = entry->tensor;
    if ((tensor.dtype == DType::bf16 || tensor.dtype == DType::f32) && tensor.shape == shape) return tensor;
    refuse_broken(refusals, block.name(name) + " is " + describe(tensor) + ", expected " + expected);
    return {};
}

void read_router(const TensorRange& block, const Family& family, MoeWeights& weights, Refusals& refusals) {
    const std::int64_t num_experts = weights.config.num_experts;
    weights.router =
        read_router_tensor(block, kRouterWeight, {num_experts, weights.config.hidden_size}, refusals);
    if (!family.router_bias.empty())
        weights.router_bias = read_router_tensor(block, family.router_bias, {num_experts}, refusals);
    for (const ShardEntry& entry : block.present) {
        const std::string_view name = entry.name.substr(block.prefix.size());
        if (!name.starts_with("gate.") || name == kRouterWeight || name == family.router_bias) continue;
        refuse_unsupported(refusals, std::string(entry.name) + " (" + describe(entry.tensor) +
                                         ") is not known and may change what the router chooses");
    }
}

}  // namespace

std::vector<std::string> linear_names(const LayerTensors& tensors, std::int64_t num_experts) {
    std::vector<std::string> names;
    for (std::size_t expert = 0; expert < static_cast<std::size_t>(num_experts); ++expert) {
        for (const TensorRange& linear : tensors.experts[expert]) names.push_back(linear.module());
    }
    return names;
}

const TensorRange& moe_block(const OpenedCheckpoint& checkpoint, int layer) {
    const auto& blocks = checkpoint.blocks;
    const auto block = blocks.find(layer);
    if (block != blocks.end()) return block->second;
    const std::string expected = blocks.empty() ? "the checkpoint has none"
                                                : "expected one of " + std::to_string(blocks.begin()->first) +
                                                      " to " + std::to_string(blocks.rbegin()->first);
    throw Error(ErrorKind::invalid_argument,
                "layer " + std::to_string(layer) + " is no MoE layer, " + expected);
}

LayerReading read_layer(const OpenedCheckpoint& checkpoint, int layer, Read read) {
    const TensorRange& block = moe_block(checkpoint, layer);
    LayerReading reading;
    Refusals& refusals = reading.refusals;
    MoeWeights& weights = reading.weights;
    weights.layer = layer;
    weights.owner = checkpoint.tensors;
    weights.config = moe_config(*checkpoint.family, checkpoint.config, refusals);
    reading.tensors = group_tensors(layer, block, *checkpoint.family, weights.config.num_experts);
    if (weights.config.num_experts == 0) return reading;

    check_claims(checkpoint.config, linear_names(reading.tensors, weights.config.num_experts), refusals);
    if (weights.config.hidden_size == 0) return reading;
    read_router(block, *checkpoint.family, weights, refusals);
    if (weights.config.intermediate_size == 0 || weights.config.hidden_size % kNvfp4BlockSize != 0 ||
        weights.config.intermediate_size % kNvfp4BlockSize != 0)
        return reading;
    if (checkpoint.dialect != nullptr) weights.leaves = checkpoint.dialect->leaves();
    const ExpertSource source{reading.tensors, weights.config, checkpoint.config, read};
    Experts experts = checkpoint.dialect != nullptr ? checkpoint.dialect->read_experts(source, refusals)
                                                    : read_per_expert(source, weights.leaves, refusals);
    weights.experts = std::move(experts.weights);
    if (experts.owner != nullptr) weights.owner = std::move(experts.owner);
    return reading;
}

}  // namespace moe4::checkpoint
