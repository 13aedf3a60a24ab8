#include "checkpoint/shards.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/json_scanner.hpp"
#include "checkpoint/mapped_file.hpp"
#include "checkpoint/name_order.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace fs = std::filesystem;

namespace {

constexpr std::uint32_t kAbsent = UINT32_MAX;
constexpr std::size_t kMaxWarnings = 16;

struct Shard {
    std::shared_ptr<const MappedFile> file;
    SafetensorsHeader header;
};

/// model.safetensors.index.json: which file holds which tensor.
struct Index {
    struct File {
        std::string_view name;
        std::uint32_t shard = kAbsent;
    };
    struct Entry {
        std::string_view name;
        std::uint32_t file = 0;
    };
    std::string path;
    std::shared_ptr<const MappedFile> json;
    StringArena unescaped;
    std::vector<File> files;
    std::vector<Entry> entries;  // sorted by name, unique
};

[[noreturn]] void fail(const std::string& where, const std::string& what) {
    throw Error(ErrorKind::broken_file, where + ": " + what);
}

bool is_there(const fs::path& path) {
    std::error_code
        ignored;  // a file that may not be looked at is there; opening it says why it cannot be read
    return fs::exists(fs::status(path, ignored));
}

std::optional<fs::path> find_index(const fs::path& folder) {
    for (const char* name : {"model.safetensors.index.json", "consolidated.safetensors.index.json"}) {
        if (is_there(folder / name)) return folder / name;
    }
    return std::nullopt;
}

std::vector<fs::path> safetensors_files(const fs::path& folder) {
    std::vector<fs::path> paths;
    std::error_code error;
    for (fs::directory_iterator file(folder, error), end; !error && file != end; file.increment(error)) {
        const bool is_hidden = file->path().filename().native().starts_with('.');  // "._*" of macOS
        if (file->path().extension() == ".safetensors" && !is_hidden) paths.push_back(file->path());
    }
    if (error) throw Error(ErrorKind::machine, folder.string() + ": " + error.message());
    if (paths.empty()) fail(folder.string(), "holds no *.safetensors file");
    std::sort(paths.begin(), paths.end());
    return paths;
}

bool leaves_folder(std::string_view file) {
    return file.empty() || file == "." || file == ".." ||
           file.find_first_of(std::string_view("/\0", 2)) != std::string_view::npos;
}

/// The members of weight_map, {name: file}, in the order of the index.
void parse_weight_map(JsonScanner& json, Index& index) {
    std::map<std::string_view, std::uint32_t> number_of;
    json.object([&](std::string_view name) {
        const std::string_view file = json.string();
        const auto number = static_cast<std::uint32_t>(index.files.size());
        const auto [known, is_new] = number_of.emplace(file, number);
        if (is_new) {
            if (leaves_folder(file)) {
                fail(index.path, "tensor " + in_quotes(name) + " lies in " + in_quotes(file) +
                                     ", expected the name of a file in the same folder");
            }
            index.files.push_back({file});
        }
        index.entries.push_back({name, known->second});
    });
}

void sort_entries(Index& index) {
    const auto name_of = [&](std::uint32_t i) { return index.entries[i].name; };
    std::vector<Index::Entry> sorted;
    sorted.reserve(index.entries.size());
    for (const std::uint32_t i : order_by_name(index.entries.size(), name_of)) {
        if (!sorted.empty() && sorted.back().name == name_of(i)) {
            fail(index.path, "tensor " + in_quotes(name_of(i)) + " stands twice");
        }
        sorted.push_back(index.entries[i]);
    }
    index.entries = std::move(sorted);
}

std::shared_ptr<Index> read_index(const fs::path& path) {
    auto index = std::make_shared<Index>();
    index->path = path.string();
    index->json = MappedFile::open(path, ErrorKind::broken_file);
    JsonScanner json(index->json->text(), index->path, index->unescaped);
    bool has_map = false;
    json.object([&](std::string_view key) {
        if (key != "weight_map") return json.skip_value();
        if (std::exchange(has_map, true)) fail(index->path, "has two weight_maps");
        parse_weight_map(json, *index);
    });
    json.expect_end();
    if (!has_map) fail(index->path, "has no weight_map");
    sort_entries(*index);
    return index;
}

template <class Entry>
const Entry* find_by_name(const std::vector<Entry>& entries, std::string_view name) {
    const auto found =
        std::lower_bound(entries.begin(), entries.end(), name,
                         [](const Entry& entry, std::string_view n) { return entry.name < n; });
    return found != entries.end() && found->name == name ? &*found : nullptr;
}

}  // namespace

class ShardedTensors::Join {
public:
    Join(ShardedTensors& tensors, const Index* index) : tensors_(tensors), index_(index) {}

    void add_shard(const fs::path& path) {
        auto shard = std::make_shared<Shard>();
        shard->file = MappedFile::open(path, ErrorKind::broken_file);
        shard->header = parse_safetensors_header(shard->file->text(), path.string());
        const auto number = static_cast<std::uint32_t>(shards_.size());
        for (const auto& entry : shard->header.entries) held_.push_back({&entry, number});
        tensors_.shard_paths_.push_back(path.string());
        tensors_.owners_.push_back(shard);
        shards_.push_back(std::move(shard));
    }

    /// Walks the names of the shards and of the index side by side.
    void finish() {
        sort_held();
        tensors_.entries_.reserve(held_.size());
        const std::span promises = index_ ? std::span(index_->entries) : std::span<const Index::Entry>();
        std::size_t first = 0;
        auto promise = promises.begin();
        while (first < held_.size() || promise != promises.end()) {
            const bool index_is_next =
                first == held_.size() || (promise != promises.end() && promise->name < held_[first].name());
            const std::string_view name = index_is_next ? promise->name : held_[first].name();
            std::size_t last = first;
            while (last < held_.size() && held_[last].name() == name) ++last;
            const bool is_promised = promise != promises.end() && promise->name == name;
            settle(name, std::span(held_).subspan(first, last - first),
                   is_promised ? &index_->files[promise->file] : nullptr);
            first = last;
            if (is_promised) ++promise;
        }
        if (num_misplaced_ > kMaxWarnings) {
            tensors_.warnings_.push_back(index_->path + ": " + std::to_string(num_misplaced_ - kMaxWarnings) +
                                         " more tensors lie in another shard than promised");
        }
        for (auto& shard : shards_) shard->header.entries = {};  // they are in entries_ now
    }

private:
    struct Held {
        const SafetensorsFile::Entry* entry;
        std::uint32_t shard;
        std::string_view name() const { return entry->name; }
    };

    void sort_held() {
        std::vector<Held> sorted;
        sorted.reserve(held_.size());
        const auto name_of = [&](std::uint32_t i) { return held_[i].name(); };
        for (const std::uint32_t i : order_by_name(held_.size(), name_of)) sorted.push_back(held_[i]);
        held_ = std::move(sorted);
    }

    /// Decides which of the shards that hold a name has the tensor; `promised` is null without an index
    /// entry.
    void settle(std::string_view name, std::span<const Held> holders, const Index::File* promised) {
        if (promised != nullptr) {
            for (const Held& held : holders) {
                if (held.shard == promised->shard) return take(held);
            }
            if (holders.empty() && promised->shard == kAbsent) {
                return tensors_.missing_.push_back({name, promised->name});
            }
            if (holders.size() != 1) fail(index_->path, misplaced(name, holders, *promised));
            if (++num_misplaced_ <= kMaxWarnings) {
                tensors_.warnings_.push_back(index_->path + ": " + misplaced(name, holders, *promised));
            }
        } else if (holders.size() > 1) {
            fail(path_of(holders[0]), "tensor " + in_quotes(name) + " is also in " + path_of(holders[1]) +
                                          ", and no index says which holds");
        }
        take(holders[0]);
    }

    std::string misplaced(std::string_view name, std::span<const Held> holders,
                          const Index::File& promised) const {
        std::string sentence = "tensor " + in_quotes(name) + " is promised in " + in_quotes(promised.name);
        if (holders.empty()) return sentence + ", which does not hold it, nor does another shard";
        sentence += ", but lies in " + path_of(holders[0]);
        if (holders.size() > 1) sentence += " and in " + path_of(holders[1]);
        return sentence;
    }

    void take(const Held& held) {
        tensors_.entries_.push_back({held.entry->name, held.entry->tensor, held.shard});
    }
    const std::string& path_of(const Held& held) const { return tensors_.shard_paths_[held.shard]; }

    ShardedTensors& tensors_;
    const Index* index_;
    std::vector<std::shared_ptr<Shard>> shards_;
    std::vector<Held> held_;
    std::size_t num_misplaced_ = 0;
};

std::shared_ptr<const ShardedTensors> ShardedTensors::open(const fs::path& folder) {
    std::error_code ignored;
    if (!fs::is_directory(folder, ignored)) {
        throw Error(ErrorKind::invalid_argument,
                    folder.string() + (fs::exists(folder, ignored) ? ": is a file, expected a folder"
                                                                   : ": no such folder"));
    }
    auto tensors = std::make_shared<ShardedTensors>();
    if (const auto index_path = find_index(folder)) {
        const std::shared_ptr<Index> index = read_index(*index_path);
        tensors->owners_.push_back(index);
        Join join(*tensors, index.get());
        std::uint32_t num_shards = 0;
        for (Index::File& file : index->files) {
            if (!is_there(folder / file.name)) continue;
            file.shard = num_shards++;
            join.add_shard(folder / file.name);
        }
        join.finish();
    } else {
        Join join(*tensors, nullptr);
        for (const fs::path& path : safetensors_files(folder)) join.add_shard(path);
        join.finish();
    }
    return tensors;
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
