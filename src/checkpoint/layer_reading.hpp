#pragma once
// An opened checkpoint, and one layer of it as far as it can be read.
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "checkpoint/dialects/dialect.hpp"
#include "checkpoint/families.hpp"
#include "checkpoint/layer_tensors.hpp"
#include "checkpoint/model_config.hpp"
#include "checkpoint/shards.hpp"

namespace moe4::checkpoint {

struct OpenedCheckpoint {
    std::shared_ptr<const ShardedTensors> tensors;
    ModelConfig config;
    const Family* family = nullptr;
    std::map<int, TensorRange> blocks;  // of the MoE layers
    const Dialect* dialect = nullptr;   // null: no tensor and no file is of a known one
    std::string_view dialect_name;

    std::int64_t num_experts() const { return config.num_experts ? config.num_experts->value : 0; }
};

struct LayerReading {
    LayerTensors tensors;
    MoeWeights weights;  // complete when there are no refusals; else a matrix that was refused has no packed
    Refusals refusals;   // all but those that take the values of scales to see
};

/// Throws invalid_argument when there is no such MoE layer.
const TensorRange& moe_block(const OpenedCheckpoint&, int layer);

/// Throws as moe_block.
LayerReading read_layer(const OpenedCheckpoint&, int layer, Read);

/// The names of the linears of the layer's experts that have tensors.
std::vector<std::string> linear_names(const LayerTensors&, std::int64_t num_experts);

}  // namespace moe4::checkpoint
