#pragma once
// Sorting hundreds of thousands of names that begin alike, such as "model.layers.17.mlp.experts.203...".
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace moe4::checkpoint {

/// A name's index with eight of its bytes, which decide nearly every comparison without touching the name.
struct KeyedName {
    std::uint64_t key;
    std::uint32_t index;
};

/// Bytes [start, start + 8) of a name as a number that sorts as they do; 0 behind its end.
inline std::uint64_t name_key(std::string_view name, std::size_t start) {
    std::uint64_t key = 0;
    if (start < name.size())
        std::memcpy(&key, name.data() + start, std::min<std::size_t>(8, name.size() - start));
    return __builtin_bswap64(key);
}

/// Sorts names that are equal in their first `start` bytes: by the next eight, then each run of equals by
/// those that follow. Few or long names are left to plain comparison, which bounds the recursion.
template <class NameOf>
void sort_by_name(std::span<KeyedName> names, std::size_t start, const NameOf& name_of) {
    constexpr std::size_t kFew = 8;
    constexpr std::size_t kLong = 128;
    if (names.size() <= kFew || start >= kLong) {
        std::sort(names.begin(), names.end(), [&](const KeyedName& a, const KeyedName& b) {
            return std::pair(name_of(a.index), a.index) < std::pair(name_of(b.index), b.index);
        });
        return;
    }
    for (KeyedName& name : names) name.key = name_key(name_of(name.index), start);
    std::sort(names.begin(), names.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
    for (std::size_t first = 0; first < names.size();) {
        std::size_t last = first + 1;
        while (last < names.size() && names[last].key == names[first].key) ++last;
        if (last - first > 1) sort_by_name(names.subspan(first, last - first), start + 8, name_of);
        first = last;
    }
}

/// The indices [0, count) in the order of name_of(index), a std::string_view; equal names by index.
template <class NameOf>
std::vector<std::uint32_t> order_by_name(std::size_t count, const NameOf& name_of) {
    std::vector<std::uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0U);
    const auto is_less = [&](std::uint32_t a, std::uint32_t b) { return name_of(a) < name_of(b); };
    if (std::is_sorted(order.begin(), order.end(), is_less)) return order;
    std::vector<KeyedName> names(count);
    for (std::size_t i = 0; i < count; ++i) names[i] = {0, static_cast<std::uint32_t>(i)};
    sort_by_name(std::span(names), 0, name_of);
    std::transform(names.begin(), names.end(), order.begin(), [](const KeyedName& n) { return n.index; });
    return order;
}

}  // namespace moe4::checkpoint
