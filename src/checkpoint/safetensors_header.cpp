// Rules: the header is at most 100 MB of JSON that begins with '{'; a tensor's shape and dtype fill its bytes
// exactly; the tensors cover the rest of the file without overlap or gap; no name twice
// (huggingface/safetensors, "Format").
#include "checkpoint/safetensors_header.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "checkpoint/name_order.hpp"
#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace {

static_assert(std::endian::native == std::endian::little, "tensors are used where they lie");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

[[noreturn]] void fail(const std::string& source, const std::string& what) {
    throw Error(ErrorKind::broken_file, source + ": " + what);
}

std::string tensor(std::string_view name) { return "tensor " + in_quotes(name); }

std::string_view header_json(std::string_view file, const std::string& source) {
    if (file.size() < kLengthBytes) {
        fail(source, "is " + std::to_string(file.size()) + " bytes long, too short for a safetensors file");
    }
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), kLengthBytes);
    if (!file.substr(kLengthBytes).starts_with('{')) {
        fail(source, "is not a safetensors file: its header does not begin with '{'");
    }
    if (length > kMaxHeaderBytes) {
        fail(source, "claims a header of " + std::to_string(length) + " bytes, expected at most 100000000");
    }
    if (length > file.size() - kLengthBytes) {
        fail(source, "claims a header of " + std::to_string(length) + " bytes, but " +
                         std::to_string(file.size() - kLengthBytes) + " follow: the file is cut short");
    }
    return file.substr(kLengthBytes, length);
}

/// What the header says of one tensor, small because a header has room for two million of them.
struct Claim {
    std::uint64_t begin = 0;  // bytes from the end of the header
    std::uint64_t end = 0;
    const char* name = nullptr;
    std::uint32_t name_length = 0;
    std::uint32_t dtype : 5 = 0;
    std::uint32_t shape_at : 27 = 0;  // where the header spells the shape; 27 bits reach beyond 100 MB

    std::string_view name_view() const { return {name, name_length}; }
};
static_assert(kMaxHeaderBytes < (1U << 27) && static_cast<int>(DType::u64) < (1 << 5));

/// The fewest bytes that a tensor takes in the header.
constexpr std::size_t kMinEntryBytes =
    std::string_view(R"("":{"dtype":"U8","shape":[],"data_offsets":[0,0]},)").size();

Shape parse_shape(JsonScanner& json, std::string_view name) {
    Shape shape;
    json.array([&] {
        if (shape.rank == Shape::kMaxRank) json.fail(tensor(name) + " has more than 8 dimensions");
        const std::uint64_t size = json.unsigned_integer();
        if (size > INT64_MAX) {
            json.fail(tensor(name) + " has a dimension of " + std::to_string(size) + ", expected below 2^63");
        }
        shape.dims[static_cast<std::size_t>(shape.rank++)] = static_cast<std::int64_t>(size);
    });
    return shape;
}

DType parse_dtype(JsonScanner& json, std::string_view name) {
    const std::string_view spelled = json.string();
    const std::optional<DType> dtype = dtype_from_name(spelled);
    if (!dtype) json.fail(tensor(name) + " has the unknown dtype " + in_quotes(spelled));
    return *dtype;
}

/// Bytes that shape and dtype need; empty when they overflow or end within a byte.
std::optional<std::uint64_t> needed_bytes(DType dtype, const Shape& shape) {
    const auto dims = std::span(shape.dims).first(static_cast<std::size_t>(shape.rank));
    if (std::find(dims.begin(), dims.end(), 0) != dims.end()) return 0;
    auto bits = static_cast<std::uint64_t>(dtype_bits(dtype));
    for (const std::int64_t size : dims) {
        if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits)) return std::nullopt;
    }
    if (bits % 8 != 0) return std::nullopt;
    return bits / 8;
}

void check_size(std::string_view name, DType dtype, const Shape& shape, std::uint64_t begin,
                std::uint64_t end, const std::string& source) {
    if (end < begin) {
        fail(source, tensor(name) + " ends at byte " + std::to_string(end) + ", before it begins at " +
                         std::to_string(begin));
    }
    const std::optional<std::uint64_t> needed = needed_bytes(dtype, shape);
    if (needed && *needed == end - begin) return;
    const std::string described =
        tensor(name) + " is " + std::string(dtype_name(dtype)) + " " + shape.to_string();
    if (!needed) fail(source, described + ", which is no possible number of bytes");
    fail(source, described + " and needs " + std::to_string(*needed) + " bytes, but its data_offsets span " +
                     std::to_string(end - begin));
}

/// One `{"dtype": ..., "shape": [...], "data_offsets": [begin, end]}`. Other members are skipped, as the
/// format's reference implementation does.
Claim parse_claim(JsonScanner& json, std::string_view name, const std::string& source) {
    Claim claim{.name = name.data(), .name_length = static_cast<std::uint32_t>(name.size())};
    std::optional<DType> dtype;
    std::optional<Shape> shape;
    int num_offsets = 0;
    const auto once = [&](bool is_second, std::string_view key) {
        if (is_second) fail(source, tensor(name) + " has two " + std::string(key));
    };
    json.object([&](std::string_view key) {
        if (key == "dtype") {
            once(dtype.has_value(), key);
            dtype = parse_dtype(json, name);
        } else if (key == "shape") {
            once(shape.has_value(), key);
            claim.shape_at = static_cast<std::uint32_t>(json.position()) & ((1U << 27) - 1);
            shape = parse_shape(json, name);
        } else if (key == "data_offsets") {
            once(num_offsets > 0, key);
            json.array([&] {
                (num_offsets == 0 ? claim.begin : claim.end) = json.unsigned_integer();
                if (++num_offsets > 2) fail(source, tensor(name) + " has more than two data_offsets");
            });
        } else {
            json.skip_value();
        }
    });
    if (!dtype || !shape || num_offsets != 2) {
        fail(source, tensor(name) + " lacks its dtype, shape or data_offsets");
    }
    claim.dtype = static_cast<std::uint32_t>(*dtype) & 31U;
    check_size(name, *dtype, *shape, claim.begin, claim.end, source);
    return claim;
}

std::vector<Claim> parse_claims(JsonScanner& json, std::size_t header_bytes, const std::string& source) {
    std::vector<Claim> claims;
    claims.reserve(header_bytes / kMinEntryBytes + 1);  // never grows; pages that stay unused cost nothing
    bool has_metadata = false;
    json.object([&](std::string_view name) {
        if (name != "__metadata__") return claims.push_back(parse_claim(json, name, source));
        if (std::exchange(has_metadata, true)) fail(source, "has two __metadata__");
        json.object([&](std::string_view) { json.skip_string(); });
    });
    json.expect_end();
    return claims;
}

/// The data of the tensors follow one another from the first to the last byte behind the header.
void check_coverage(std::vector<Claim>& claims, std::uint64_t data_bytes, const std::string& source) {
    const auto by_place = [](const Claim& a, const Claim& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    };
    if (!std::is_sorted(claims.begin(), claims.end(), by_place))
        std::sort(claims.begin(), claims.end(), by_place);
    std::uint64_t covered = 0;
    for (const Claim& claim : claims) {
        if (claim.begin < covered) {
            fail(source, tensor(claim.name_view()) + " begins at byte " + std::to_string(claim.begin) +
                             " of the data and overlaps the tensor before it, which ends at " +
                             std::to_string(covered));
        }
        if (claim.begin > covered) {
            fail(source, std::to_string(claim.begin - covered) + " bytes before " +
                             tensor(claim.name_view()) + " belong to no tensor");
        }
        covered = claim.end;
    }
    const std::string sizes = "the tensors need " + std::to_string(covered) + " bytes, but " +
                              std::to_string(data_bytes) + " follow the header: ";
    if (covered > data_bytes) fail(source, sizes + "the file is cut short");
    if (covered < data_bytes) {
        fail(source, sizes + std::to_string(data_bytes - covered) + " at the end belong to no tensor");
    }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& source) {
    const std::string_view text = header_json(file, source);
    SafetensorsHeader header;
    JsonScanner json(text, source, header.unescaped_names);
    std::vector<Claim> claims = parse_claims(json, text.size(), source);
    check_coverage(claims, file.size() - kLengthBytes - text.size(), source);

    const auto name_of = [&](std::uint32_t i) { return claims[i].name_view(); };
    const std::vector<std::uint32_t> order = order_by_name(claims.size(), name_of);
    const auto twice = std::adjacent_find(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        return name_of(a) == name_of(b);
    });
    if (twice != order.end()) fail(source, tensor(name_of(*twice)) + " stands twice in the header");

    const char* data = file.data() + kLengthBytes + text.size();
    header.entries.reserve(claims.size());
    for (const std::uint32_t i : order) {
        json.return_to(claims[i].shape_at);
        const Shape shape = parse_shape(json, name_of(i));
        header.entries.push_back(
            {name_of(i), {data + claims[i].begin, static_cast<DType>(claims[i].dtype), shape, {}}});
    }
    return header;
}

}  // namespace moe4::checkpoint
