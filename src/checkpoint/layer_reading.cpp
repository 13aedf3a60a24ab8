#include "checkpoint/layer_reading.hpp"

#include <cmath>
#include <cstring>

#include "checkpoint/dialects/per_expert.hpp"
#include "checkpoint/mapped_file.hpp"
#include "checkpoint/quantization_claims.hpp"
#include "format/bf16.hpp"
#include "moe/routers.hpp"

namespace moe4::checkpoint {

namespace {

float element(const TensorView& tensor, std::int64_t index) {
    if (tensor.dtype == DType::bf16) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, static_cast<const std::byte*>(tensor.data) + 2 * index, sizeof bits);
        return format::bf16_to_float(bits);
    }
    float value = 0;
    std::memcpy(&value, static_cast<const std::byte*>(tensor.data) + 4 * index, sizeof value);
    return value;
}

void check_finite(const TensorView& tensor, const std::string& name, Refusals& refusals) {
    const std::int64_t count = tensor.shape.num_elements();
    std::int64_t i = 0;
    while (i < count && std::isfinite(element(tensor, i))) ++i;
    if (i == count) return;
    const std::int64_t cols = tensor.shape.rank == 2 ? tensor.shape[1] : 1;
    refuse_broken(refusals, name + " holds " + (std::isnan(element(tensor, i)) ? "NaN" : "an infinity") +
                                " at row " + std::to_string(i / cols) +
                                (cols > 1 ? ", column " + std::to_string(i % cols) : "") +
                                ", expected finite numbers");
}

/// The tensor if it is there and of the shape, and BF16 or F32; else a view without data, and a refusal.
TensorView read_router_tensor(const TensorRange& block, std::string_view name, const Shape& shape, Read read,
                              Refusals& refusals) {
    const std::string expected = "BF16 or F32 " + shape.to_string();
    const ShardEntry* entry = block.find(name);
    if (entry == nullptr) {
        refuse_broken(refusals, missing(block, name, expected));
        return {};
    }
    const TensorView& tensor = entry->tensor;
    if ((tensor.dtype == DType::bf16 || tensor.dtype == DType::f32) && tensor.shape == shape) {
        if (read == Read::values) check_finite(tensor, block.name(name), refusals);
        return tensor;
    }
    refuse_broken(refusals, block.name(name) + " is " + describe(tensor) + ", expected " + expected);
    return {};
}

void read_router(const TensorRange& block, const Family& family, Read read, MoeWeights& weights,
                 Refusals& refusals) {
    const std::int64_t num_experts = weights.config.num_experts;
    weights.router =
        read_router_tensor(block, kRouterWeight, {num_experts, weights.config.hidden_size}, read, refusals);
    if (!family.router_bias.empty())
        weights.router_bias = read_router_tensor(block, family.router_bias, {num_experts}, read, refusals);
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
    for (const auto& [expert, linears] : tensors.experts) {
        if (expert >= num_experts) break;
        for (const TensorRange& linear : linears) names.push_back(linear.module());
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
    reading.tensors = group_tensors(layer, block, *checkpoint.family);
    if (weights.config.num_experts == 0 || weights.config.num_experts > moe::kMaxExperts) return reading;

    check_claims(checkpoint.config, linear_names(reading.tensors, weights.config.num_experts), refusals);
    if (weights.config.hidden_size == 0) return reading;
    read_router(block, *checkpoint.family, read, weights, refusals);
    if (weights.config.intermediate_size == 0 || weights.config.hidden_size % kNvfp4BlockSize != 0 ||
        weights.config.intermediate_size % kNvfp4BlockSize != 0)
        return reading;
    if (checkpoint.dialect != nullptr) weights.leaves = checkpoint.dialect->leaves();
    const ExpertSource source{reading.tensors, weights.config, checkpoint.config, *checkpoint.family, read};
    Experts experts = checkpoint.dialect != nullptr ? checkpoint.dialect->read_experts(source, refusals)
                                                    : read_per_expert(source, weights.leaves, refusals);
    weights.experts = std::move(experts.weights);
    if (experts.owner != nullptr) {
        weights.owner = std::move(experts.owner);
    } else {
        weights.release = MappedFile::release;
    }
    return reading;
}

}  // namespace moe4::checkpoint
