#include "checkpoint/shards.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>

#include "checkpoint/json_scanner.hpp"
#include "checkpoint/mapped_file.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace fs = std::filesystem;

struct ShardedTensors::Shard {
    std::shared_ptr<const MappedFile> file;
    SafetensorsHeader header;
};

/// model.safetensors.index.json: which file holds which tensor.
struct ShardedTensors::Index {
    struct Entry {
        std::string_view name;
        std::string_view shard_file;
    };
    static constexpr std::uint32_t kAbsent = UINT32_MAX;

    std::string path;
    std::shared_ptr<const MappedFile> file;
    std::deque<std::string> owned;                       // strings with escapes
    std::vector<Entry> entries;                          // sorted by name
    std::map<std::string_view, std::uint32_t> shard_of;  // file name -> shard, or kAbsent
};

namespace {

[[noreturn]] void fail(const std::string& where, const std::string& what) {
    throw Error(ErrorKind::broken_file, where + ": " + what);
}

std::string quoted(std::string_view name) { return "tensor \"" + std::string(name) + "\""; }

std::string_view text_of(const MappedFile& file) {
    return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

std::optional<fs::path> find_index(const fs::path& folder) {
    for (const char* name : {"model.safetensors.index.json", "consolidated.safetensors.index.json"}) {
        if (fs::exists(folder / name)) return folder / name;
    }
    return std::nullopt;
}

std::vector<fs::path> safetensors_files(const fs::path& folder) {
    std::vector<fs::path> paths;
    for (const auto& file : fs::directory_iterator(folder)) {
        if (file.path().extension() == ".safetensors") paths.push_back(file.path());
    }
    std::sort(paths.begin(), paths.end());
    return paths;
}

template <class Entry>
const Entry* find_by_name(const std::vector<Entry>& entries, std::string_view name) {
    const auto found =
        std::lower_bound(entries.begin(), entries.end(), name,
                         [](const Entry& entry, std::string_view n) { return entry.name < n; });
    return found != entries.end() && found->name == name ? &*found : nullptr;
}

/// Parses {"weight_map": {name: file}, ...}; everything else in it is skipped.
template <class Index>
void parse_index(Index& index) {
    JsonScanner json(text_of(*index.file), index.path, index.owned);
    bool has_map = false;
    json.object([&](std::string_view key) {
        if (key != "weight_map") return json.skip_value();
        if (has_map) fail(index.path, "has two weight_maps");
        has_map = true;
        json.object([&](std::string_view name) { index.entries.push_back({name, json.string()}); });
    });
    json.expect_end();
    if (!has_map) fail(index.path, "has no weight_map");
    const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
    if (!std::is_sorted(index.entries.begin(), index.entries.end(), by_name)) {
        std::sort(index.entries.begin(), index.entries.end(), by_name);
    }
    for (std::size_t i = 0; i < index.entries.size(); ++i) {
        const auto& [name, shard_file] = index.entries[i];
        if (i > 0 && index.entries[i - 1].name == name) fail(index.path, quoted(name) + " stands twice");
        const bool is_new = index.shard_of.emplace(shard_file, Index::kAbsent).second;
        const bool leaves_folder = shard_file.empty() || shard_file == "." || shard_file == ".." ||
                                   shard_file.find('/') != std::string_view::npos ||
                                   shard_file.find('\0') != std::string_view::npos;
        if (is_new && leaves_folder) {
            fail(index.path, quoted(name) + " lies in \"" + std::string(shard_file) +
                                 "\", expected a file of the same folder");
        }
    }
}

}  // namespace

std::shared_ptr<const ShardedTensors> ShardedTensors::open(const fs::path& folder) {
    std::error_code ignored;
    if (!fs::is_directory(folder, ignored)) {
        throw Error(ErrorKind::invalid_argument, folder.string() + ": no such folder");
    }
    auto tensors = std::make_shared<ShardedTensors>();
    std::vector<fs::path> paths;
    if (const auto index_path = find_index(folder)) {
        auto index = std::make_shared<Index>();
        index->path = index_path->string();
        index->file = MappedFile::open(*index_path);
        parse_index(*index);
        for (auto& [shard_file, shard] : index->shard_of) {
            if (!fs::exists(folder / shard_file)) continue;
            shard = static_cast<std::uint32_t>(paths.size());
            paths.push_back(folder / shard_file);
        }
        tensors->index_ = std::move(index);
    } else {
        paths = safetensors_files(folder);
        if (paths.empty()) fail(folder.string(), "holds no *.safetensors file");
    }
    tensors->read_shards(paths);
    tensors->merge(tensors->index_.get());
    if (tensors->index_) tensors->check_index(*tensors->index_);
    return tensors;
}

void ShardedTensors::read_shards(const std::vector<fs::path>& paths) {
    for (const fs::path& path : paths) {
        auto shard = std::make_shared<Shard>();
        shard->file = MappedFile::open(path);
        shard->header = parse_safetensors_header(text_of(*shard->file), path.string());
        const auto number = static_cast<std::uint32_t>(shards_.size());
        for (const HeaderEntry& entry : shard->header.entries) {
            entries_.push_back({entry.name,
                                {shard->file->bytes().data() + entry.begin, entry.dtype, entry.shape, {}},
                                number});
        }
        shards_.push_back(std::move(shard));
        shard_paths_.push_back(path.string());
    }
    const auto by_name = [](const ShardEntry& a, const ShardEntry& b) {
        return std::pair(a.name, a.shard) < std::pair(b.name, b.shard);
    };
    if (!std::is_sorted(entries_.begin(), entries_.end(), by_name))
        std::sort(entries_.begin(), entries_.end(), by_name);
}

/// Leaves one entry a name: the index's where several shards hold it.
void ShardedTensors::merge(const Index* index) {
    std::size_t kept = 0;
    for (std::size_t first = 0; first < entries_.size();) {
        std::size_t last = first + 1;
        while (last < entries_.size() && entries_[last].name == entries_[first].name) ++last;
        std::size_t chosen = first;
        if (last - first > 1) {
            const Index::Entry* wanted =
                index != nullptr ? find_by_name(index->entries, entries_[first].name) : nullptr;
            const std::uint32_t shard =
                wanted != nullptr ? index->shard_of.at(wanted->shard_file) : Index::kAbsent;
            while (chosen < last && entries_[chosen].shard != shard) ++chosen;
            if (chosen == last) {
                fail(shard_paths_[entries_[first].shard], quoted(entries_[first].name) + " is also in " +
                                                              shard_paths_[entries_[first + 1].shard] +
                                                              ", and no index says which holds");
            }
        }
        entries_[kept++] = entries_[chosen];
        first = last;
    }
    entries_.resize(kept);
}

void ShardedTensors::check_index(const Index& index) {
    for (const auto& [name, shard_file] : index.entries) {
        const std::uint32_t shard = index.shard_of.at(shard_file);
        const ShardEntry* entry = find(name);
        if (entry != nullptr && entry->shard == shard) continue;
        if (shard == Index::kAbsent) {
            if (entry == nullptr) missing_.push_back({name, shard_file});
            continue;
        }
        const std::string promise = quoted(name) + " is promised in " + std::string(shard_file);
        if (entry == nullptr) fail(index.path, promise + ", which does not hold it, nor does another shard");
        warnings_.push_back(index.path + ": " + promise + ", but lies in " + shard_path(*entry));
    }
}

const ShardEntry* ShardedTensors::find(std::string_view name) const { return find_by_name(entries_, name); }

const MissingEntry* ShardedTensors::find_missing(std::string_view name) const {
    return find_by_name(missing_, name);
}

std::uint64_t ShardedTensors::num_bytes() const {
    std::uint64_t bytes = 0;
    for (const ShardEntry& entry : entries_) bytes += entry.tensor.num_bytes();
    return bytes;
}

}  // namespace moe4::checkpoint
