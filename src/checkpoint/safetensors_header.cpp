// Rules: the header is at most 100 MB of JSON that begins with '{'; a tensor's shape and dtype fill its bytes
// exactly; the tensors cover the rest of the file without overlap or gap; no name twice
// (huggingface/safetensors, "Format").
#include "checkpoint/safetensors_header.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>

#include "checkpoint/json_scanner.hpp"
#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace {

static_assert(std::endian::native == std::endian::little, "tensors are used where they lie");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

[[noreturn]] void fail(const std::string& source, const std::string& what) {
    throw Error(ErrorKind::broken_file, source + ": " + what);
}

std::string quoted(std::string_view name) { return "tensor \"" + std::string(name) + "\""; }

std::string_view header_json(std::string_view file, const std::string& source) {
    if (file.starts_with("version https://git-lfs")) {
        fail(source, "a Git LFS pointer, not the file itself (git lfs pull fetches it)");
    }
    if (file.size() < kLengthBytes) {
        fail(source, "is " + std::to_string(file.size()) + " bytes long, too short for a safetensors file");
    }
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), kLengthBytes);
    if (length > kMaxHeaderBytes) {
        fail(source, "claims a header of " + std::to_string(length) + " bytes, expected at most 100000000");
    }
    if (length > file.size() - kLengthBytes) {
        fail(source, "claims a header of " + std::to_string(length) + " bytes, but " +
                         std::to_string(file.size() - kLengthBytes) + " follow: the file is cut short");
    }
    const std::string_view json = file.substr(kLengthBytes, length);
    if (!json.starts_with('{')) fail(source, "the header does not begin with '{': not a safetensors file");
    return json;
}

/// One `{"dtype": ..., "shape": [...], "data_offsets": [begin, end]}`.
HeaderEntry parse_entry(JsonScanner& json, std::string_view name, const std::string& source) {
    HeaderEntry entry{.name = name, .shape = {}};
    bool has_dtype = false;
    bool has_shape = false;
    int num_offsets = 0;
    const auto once = [&](bool is_second, std::string_view key) {
        if (is_second) fail(source, quoted(name) + " has two " + std::string(key));
    };
    json.object([&](std::string_view key) {
        if (key == "dtype") {
            once(has_dtype, key);
            has_dtype = true;
            const std::string_view spelled = json.string();
            const std::optional<DType> dtype = dtype_from_name(spelled);
            if (!dtype) fail(source, quoted(name) + " has the unknown dtype " + std::string(spelled));
            entry.dtype = *dtype;
        } else if (key == "shape") {
            once(has_shape, key);
            has_shape = true;
            json.array([&] {
                if (entry.shape.rank == Shape::kMaxRank)
                    fail(source, quoted(name) + " has more than 8 dimensions");
                const std::uint64_t size = json.unsigned_integer();
                if (size > INT64_MAX)
                    fail(source, quoted(name) + " has the impossible size " + std::to_string(size));
                entry.shape.dims[static_cast<std::size_t>(entry.shape.rank++)] =
                    static_cast<std::int64_t>(size);
            });
        } else if (key == "data_offsets") {
            once(num_offsets > 0, key);
            json.array([&] {
                const std::uint64_t offset = json.unsigned_integer();
                (num_offsets == 0 ? entry.begin : entry.end) = offset;
                ++num_offsets;
            });
            if (num_offsets != 2) fail(source, quoted(name) + " needs two data_offsets");
        } else {
            fail(source, quoted(name) + " has the unknown key \"" + std::string(key) + "\"");
        }
    });
    if (!has_dtype || !has_shape || num_offsets != 2) {
        fail(source, quoted(name) + " lacks its dtype, shape or data_offsets");
    }
    return entry;
}

/// Bytes that shape and dtype need; empty when they overflow or end within a byte.
std::optional<std::uint64_t> needed_bytes(const HeaderEntry& entry) {
    std::uint64_t bits = static_cast<std::uint64_t>(dtype_bits(entry.dtype));
    const auto dims = entry.shape.dims.begin();
    if (std::find(dims, dims + entry.shape.rank, 0) != dims + entry.shape.rank) return 0;
    for (int axis = 0; axis < entry.shape.rank; ++axis) {
        if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(entry.shape[axis]), &bits))
            return std::nullopt;
    }
    if (bits % 8 != 0) return std::nullopt;
    return bits / 8;
}

void check_size(const HeaderEntry& entry, const std::string& source) {
    if (entry.end < entry.begin) fail(source, quoted(entry.name) + " ends before it begins");
    const std::optional<std::uint64_t> needed = needed_bytes(entry);
    const std::string described =
        quoted(entry.name) + " is " + std::string(dtype_name(entry.dtype)) + " " + entry.shape.to_string();
    if (!needed) fail(source, described + ", which is no possible number of bytes");
    if (*needed != entry.end - entry.begin) {
        fail(source, described + " and needs " + std::to_string(*needed) +
                         " bytes, but its data_offsets span " + std::to_string(entry.end - entry.begin));
    }
}

/// Sorts the entries by what `key` gives of them.
template <class Key>
std::vector<std::uint32_t> order_by(const std::vector<HeaderEntry>& entries, Key key) {
    std::vector<std::uint32_t> order(entries.size());
    std::iota(order.begin(), order.end(), 0U);
    const auto less = [&](std::uint32_t a, std::uint32_t b) { return key(entries[a]) < key(entries[b]); };
    if (!std::is_sorted(order.begin(), order.end(), less)) std::sort(order.begin(), order.end(), less);
    return order;
}

/// The data of the tensors follow one another from the first to the last byte behind the header.
void check_coverage(const std::vector<HeaderEntry>& entries, std::uint64_t data_bytes,
                    const std::string& source) {
    const auto order = order_by(entries, [](const HeaderEntry& e) { return std::pair(e.begin, e.end); });
    std::uint64_t covered = 0;
    for (const std::uint32_t i : order) {
        const HeaderEntry& entry = entries[i];
        if (entry.begin < covered) fail(source, quoted(entry.name) + " overlaps the tensor before it");
        if (entry.begin > covered) {
            fail(source, std::to_string(entry.begin - covered) + " bytes before " + quoted(entry.name) +
                             " belong to no tensor");
        }
        covered = entry.end;
    }
    if (covered > data_bytes) {
        fail(source, "the tensors need " + std::to_string(covered) + " bytes, but " +
                         std::to_string(data_bytes) + " follow the header: the file is cut short");
    }
    if (covered < data_bytes) {
        fail(source,
             std::to_string(data_bytes - covered) + " bytes after the last tensor belong to no tensor");
    }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& source) {
    const std::string_view text = header_json(file, source);
    SafetensorsHeader header;
    std::vector<HeaderEntry> entries;
    JsonScanner json(text, source, header.owned_names);
    json.object([&](std::string_view name) {
        if (name == "__metadata__") {
            json.object([&](std::string_view) { json.string(); });
            return;
        }
        entries.push_back(parse_entry(json, name, source));
        check_size(entries.back(), source);
    });
    json.expect_end();

    const std::uint64_t data_begin = kLengthBytes + text.size();
    check_coverage(entries, file.size() - data_begin, source);
    header.entries.reserve(entries.size());
    for (const std::uint32_t i : order_by(entries, [](const HeaderEntry& e) { return e.name; })) {
        if (!header.entries.empty() && header.entries.back().name == entries[i].name) {
            fail(source, quoted(entries[i].name) + " stands twice in the header");
        }
        header.entries.push_back(entries[i]);
        header.entries.back().begin += data_begin;
        header.entries.back().end += data_begin;
    }
    return header;
}

}  // namespace moe4::checkpoint
