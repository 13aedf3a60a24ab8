#pragma once
// The tensors of each MoE layer: found by their names in one walk over the sorted list, grouped by expert.
#include <array>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/families.hpp"
#include "checkpoint/shards.hpp"
#include "moe4/moe.hpp"

namespace moe4::checkpoint {

/// Neighbours in the sorted lists: all tensors whose names begin alike.
struct TensorRange {
    std::string prefix;  // "model.layers.3.mlp."
    std::span<const ShardEntry> present;
    std::span<const MissingEntry> absent;  // promised by the index, in a shard that is not there

    const ShardEntry* find(std::string_view rest_of_name) const;  // null: not there
    const MissingEntry* find_absent(std::string_view rest_of_name) const;
    std::string name(std::string_view rest_of_name) const { return prefix + std::string(rest_of_name); }
    std::string module() const { return prefix.substr(0, prefix.size() - 1); }
};

/// The blocks, named as the family does, that hold experts; by layer. Throws unsupported when tensors under
/// two prefixes claim the same layer.
std::map<int, TensorRange> find_moe_blocks(const ShardedTensors&, const Family&);

/// Within the block: "experts.17.gate_proj.weight".
std::string expert_leaf(const Family&, int expert, Projection, std::string_view leaf);

using Linears = std::array<TensorRange, 3>;  // by Projection, "model.layers.3.mlp.experts.17.gate_proj."

struct LayerTensors {
    int layer = 0;
    TensorRange block;
    std::map<int, Linears> experts;           // those that have tensors, of the kMaxExperts a layer can have
    std::vector<std::string_view> strangers;  // tensors under "experts." that belong to no linear of those
    std::uint64_t expert_bytes = 0;           // of all that is present under "experts."
};

/// Takes as long as the block has tensors, whatever numbers their names hold.
LayerTensors group_tensors(int layer, const TensorRange& block, const Family&);

/// "F8_E4M3 [7168, 127]"
std::string describe(DType, const Shape&);
std::string describe(const TensorView&);

/// "NAME is missing, expected ...", and where the index says that it should be.
std::string missing(const TensorRange&, std::string_view rest_of_name, const std::string& expected);

}  // namespace moe4::checkpoint
