#include "checkpoint/layer_tensors.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include "moe/routers.hpp"
#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace {

// What may stand before "layers.N.": text models, and the two orders in which multimodal ones wrap them.
constexpr std::string_view kOuterPrefixes[] = {"model.", "language_model.model.", "model.language_model."};
constexpr std::string_view kExperts = "experts.";
constexpr int kMaxLayers = 1 << 16;

bool consume(std::string_view& text, std::string_view prefix) {
    if (!text.starts_with(prefix)) return false;
    text.remove_prefix(prefix.size());
    return true;
}

/// "17." -> 17, if below `limit`; a number that is spelled otherwise ("017", "+1") is none.
std::optional<int> consume_index(std::string_view& text, int limit) {
    int index = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
    const auto length = static_cast<std::size_t>(end - text.data());
    if (error != std::errc() || text.front() == '-' || index >= limit) return std::nullopt;
    if (length > 1 && text.front() == '0') return std::nullopt;
    text.remove_prefix(length);
    if (!consume(text, ".")) return std::nullopt;
    return index;
}

struct Place {
    int layer;
    std::string_view block_prefix;
};

std::optional<Place> find_place(std::string_view name, const Family& family) {
    for (const std::string_view outer : kOuterPrefixes) {
        std::string_view rest = name;
        if (!consume(rest, outer) || !consume(rest, "layers.")) continue;
        const std::optional<int> layer = consume_index(rest, kMaxLayers);
        if (!layer || !consume(rest, family.block) || !consume(rest, ".")) continue;
        return Place{*layer, name.substr(0, name.size() - rest.size())};
    }
    return std::nullopt;
}

/// Calls found(place, run of entries that share the block's prefix, whether one is an expert's), in order.
template <class Entry, class Found>
void walk_blocks(std::span<const Entry> entries, const Family& family, Found found) {
    for (std::size_t first = 0; first < entries.size();) {
        const std::optional<Place> place = find_place(entries[first].name, family);
        std::size_t last = first + 1;
        if (place) {
            bool has_experts = false;
            for (last = first; last < entries.size(); ++last) {
                std::string_view name = entries[last].name;
                if (!consume(name, place->block_prefix)) break;
                has_experts = has_experts || name.starts_with(kExperts);
            }
            found(*place, entries.subspan(first, last - first), has_experts);
        }
        first = last;
    }
}

/// The run of entries, beginning at `first`, whose names begin with `prefix`.
template <class Entry>
std::span<const Entry> run_of(std::span<const Entry> entries, std::size_t first, std::string_view prefix) {
    std::size_t last = first;
    while (last < entries.size() && entries[last].name.starts_with(prefix)) ++last;
    return entries.subspan(first, last - first);
}

template <class Entry>
const Entry* find_in(std::span<const Entry> entries, const std::string& prefix, std::string_view rest) {
    // All names share the prefix, so that their order is that of what follows.
    const auto found = std::lower_bound(entries.begin(), entries.end(), rest,
                                        [&](const Entry& entry, std::string_view wanted) {
                                            return entry.name.substr(prefix.size()) < wanted;
                                        });
    return found != entries.end() && found->name.substr(prefix.size()) == rest ? &*found : nullptr;
}

Linears& linears_of(LayerTensors& tensors, const Family& family, int expert) {
    const auto [entry, is_new] = tensors.experts.try_emplace(expert);
    Linears& linears = entry->second;
    if (is_new) {
        for (const Projection projection : kProjections) {
            linears[static_cast<std::size_t>(projection)].prefix =
                tensors.block.name(expert_leaf(family, expert, projection, ""));
        }
    }
    return linears;
}

/// Splits the tensors under "experts." into linears; `range` is the member of TensorRange to fill.
template <class Entry>
void group_experts(LayerTensors& tensors, std::span<const Entry> entries, const Family& family,
                   std::span<const Entry> TensorRange::* range) {
    const std::string experts = tensors.block.name(kExperts);
    for (std::size_t at = 0; at < entries.size();) {
        std::string_view rest = entries[at].name;
        if (!consume(rest, experts)) {
            ++at;
            continue;
        }
        const std::optional<int> expert = consume_index(rest, moe::kMaxExperts);
        const auto* projection =
            std::find(family.projections.begin(), family.projections.end(), rest.substr(0, rest.find('.')));
        if (!expert || projection == family.projections.end() || !consume(rest, *projection) ||
            !consume(rest, ".")) {
            tensors.strangers.push_back(entries[at++].name);
            continue;
        }
        TensorRange& linear = linears_of(
            tensors, family, *expert)[static_cast<std::size_t>(projection - family.projections.begin())];
        linear.*range = run_of(entries, at, linear.prefix);
        at += (linear.*range).size();
    }
}

}  // namespace

std::string describe(DType dtype, const Shape& shape) {
    return std::string(dtype_name(dtype)) + " " + shape.to_string();
}
std::string describe(const TensorView& tensor) { return describe(tensor.dtype, tensor.shape); }

std::string expert_leaf(const Family& family, int expert, Projection projection, std::string_view leaf) {
    std::string name(kExperts);
    name += std::to_string(expert) + ".";
    name += family.projections[static_cast<std::size_t>(projection)];
    return name + "." + std::string(leaf);
}

std::string missing(const TensorRange& range, std::string_view rest, const std::string& expected) {
    std::string sentence = range.name(rest) + " is missing, expected " + expected;
    if (const MissingEntry* absent = range.find_absent(rest))
        sentence +=
            " in " + std::string(absent->shard_file) + ", which the index names and which is not there";
    return sentence;
}

const ShardEntry* TensorRange::find(std::string_view rest) const { return find_in(present, prefix, rest); }
const MissingEntry* TensorRange::find_absent(std::string_view rest) const {
    return find_in(absent, prefix, rest);
}

std::map<int, TensorRange> find_moe_blocks(const ShardedTensors& tensors, const Family& family) {
    std::map<int, TensorRange> blocks;
    std::set<int> with_experts;
    const auto claim = [&](const Place& place, bool has_experts) -> TensorRange& {
        TensorRange& block = blocks[place.layer];
        if (!block.prefix.empty() && block.prefix != place.block_prefix) {
            throw Error(ErrorKind::unsupported,
                        "layer " + std::to_string(place.layer) + " lies under " + block.prefix +
                            "* and under " + std::string(place.block_prefix) + "*, expected one of them");
        }
        block.prefix = place.block_prefix;
        if (has_experts) with_experts.insert(place.layer);
        return block;
    };
    walk_blocks(tensors.entries(), family, [&](const Place& place, auto run, bool has_experts) {
        claim(place, has_experts).present = run;
    });
    walk_blocks(tensors.missing(), family, [&](const Place& place, auto run, bool has_experts) {
        claim(place, has_experts).absent = run;
    });
    std::erase_if(blocks, [&](const auto& block) { return !with_experts.contains(block.first); });
    return blocks;
}

LayerTensors group_tensors(int layer, const TensorRange& block, const Family& family) {
    LayerTensors tensors{.layer = layer, .block = block, .experts = {}, .strangers = {}};
    group_experts(tensors, block.present, family, &TensorRange::present);
    group_experts(tensors, block.absent, family, &TensorRange::absent);
    for (const ShardEntry& entry : block.present) {
        if (entry.name.substr(block.prefix.size()).starts_with(kExperts))
            tensors.expert_bytes += entry.tensor.num_bytes();
    }
    return tensors;
}

}  // namespace moe4::checkpoint
