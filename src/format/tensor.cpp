#include "moe4/tensor.hpp"

#include <algorithm>
#include <array>

#include "format/bf16.hpp"
#include "moe4/error.hpp"

namespace moe4 {

namespace {

struct DTypeFacts {
    DType dtype;
    std::string_view name;
    int bits;
};

// In the order of the enum.
constexpr std::array kDTypes = {
    DTypeFacts{DType::boolean, "BOOL", 8},
    DTypeFacts{DType::f4, "F4", 4},
    DTypeFacts{DType::f6_e2m3, "F6_E2M3", 6},
    DTypeFacts{DType::f6_e3m2, "F6_E3M2", 6},
    DTypeFacts{DType::u8, "U8", 8},
    DTypeFacts{DType::i8, "I8", 8},
    DTypeFacts{DType::f8_e5m2, "F8_E5M2", 8},
    DTypeFacts{DType::f8_e4m3, "F8_E4M3", 8},
    DTypeFacts{DType::f8_e8m0, "F8_E8M0", 8},
    DTypeFacts{DType::f8_e4m3fnuz, "F8_E4M3FNUZ", 8},
    DTypeFacts{DType::f8_e5m2fnuz, "F8_E5M2FNUZ", 8},
    DTypeFacts{DType::i16, "I16", 16},
    DTypeFacts{DType::u16, "U16", 16},
    DTypeFacts{DType::f16, "F16", 16},
    DTypeFacts{DType::bf16, "BF16", 16},
    DTypeFacts{DType::i32, "I32", 32},
    DTypeFacts{DType::u32, "U32", 32},
    DTypeFacts{DType::f32, "F32", 32},
    DTypeFacts{DType::c64, "C64", 64},
    DTypeFacts{DType::f64, "F64", 64},
    DTypeFacts{DType::i64, "I64", 64},
    DTypeFacts{DType::u64, "U64", 64},
};

}  // namespace

std::string_view dtype_name(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].name; }
int dtype_bits(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].bits; }

std::uint16_t round_to_bf16(float x) { return format::bf16_from_float(x); }

std::optional<DType> dtype_from_name(std::string_view name) {
    const auto* found =
        std::find_if(kDTypes.begin(), kDTypes.end(), [&](const auto& d) { return d.name == name; });
    if (found == kDTypes.end()) return std::nullopt;
    return found->dtype;
}

Shape::Shape(std::initializer_list<std::int64_t> sizes) : rank(static_cast<int>(sizes.size())) {
    if (rank > kMaxRank) {
        throw Error(ErrorKind::unsupported,
                    "a tensor has rank " + std::to_string(rank) + ", expected at most 8");
    }
    std::copy(sizes.begin(), sizes.end(), dims.begin());
}

std::int64_t Shape::num_elements() const {
    const auto* end = dims.data() + rank;
    if (std::find(dims.data(), end, 0) != end) return 0;  // the others may be of any size
    std::int64_t product = 1;
    for (int axis = 0; axis < rank; ++axis) product *= (*this)[axis];
    return product;
}

std::string Shape::to_string() const {
    std::string text = "[";
    for (int axis = 0; axis < rank; ++axis) {
        if (axis > 0) text += ", ";
        text += std::to_string((*this)[axis]);
    }
    return text + "]";
}

std::size_t TensorView::num_bytes() const {
    return static_cast<std::size_t>(shape.num_elements()) * static_cast<std::size_t>(dtype_bits(dtype)) / 8;
}

}  // namespace moe4
