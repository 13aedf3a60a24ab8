#pragma once
// A folder of safetensors files as one set of tensors: the union of the index and the shards' own headers.
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moe4/tensor.hpp"

namespace moe4::checkpoint {

struct ShardEntry {
    std::string_view name;
    TensorView tensor;
    std::uint32_t shard = 0;
};

/// A tensor that the index promises in a file that is not there.
struct MissingEntry {
    std::string_view name;
    std::string_view shard_file;
};

class ShardedTensors {
public:
    /// Maps every shard that is there and checks its header. Rules:
    ///   with an index (model. or consolidated.safetensors.index.json): the shards that it names, all their
    ///   tensors; of a name in two shards the one that the index says is taken; an entry whose shard lacks
    ///   it is a warning where exactly one other shard holds it, else an error; a shard that is absent
    ///   leaves those of its entries that no other shard holds in missing();
    ///   without: all *.safetensors of the folder; a name in two of them is an error.
    /// Throws invalid_argument (no such folder), broken_file or machine.
    static std::shared_ptr<const ShardedTensors> open(const std::filesystem::path& folder);

    std::span<const ShardEntry> entries() const { return entries_; }    // sorted by name, unique
    std::span<const MissingEntry> missing() const { return missing_; }  // sorted by name
    const ShardEntry* find(std::string_view name) const;                // null: not there
    const MissingEntry* find_missing(std::string_view name) const;
    const std::string& shard_path(const ShardEntry& entry) const { return shard_paths_[entry.shard]; }
    const std::vector<std::string>& warnings() const { return warnings_; }
    std::uint64_t num_bytes() const;  // of all entries

private:
    class Join;  // makes one set of many files

    std::vector<ShardEntry> entries_;
    std::vector<MissingEntry> missing_;
    std::vector<std::string> shard_paths_;
    std::vector<std::string> warnings_;
    std::vector<std::shared_ptr<const void>> owners_;  // of the bytes and names that the entries point to
};

}  // namespace moe4::checkpoint
