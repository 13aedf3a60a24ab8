#pragma once
// What a tensor is: bytes, a dtype, a shape and where they live. Nothing here owns memory.
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace moe4 {

/// Every dtype of the safetensors format. The names are the format's own (`dtype_name`).
enum class DType : std::uint8_t {
    boolean,
    f4,
    f6_e2m3,
    f6_e3m2,
    u8,
    i8,
    f8_e5m2,
    f8_e4m3,
    f8_e8m0,
    f8_e4m3fnuz,
    f8_e5m2fnuz,
    i16,
    u16,
    f16,
    bf16,
    i32,
    u32,
    f32,
    c64,
    f64,
    i64,
    u64,
};

std::string_view dtype_name(DType);                           // "BF16", "F8_E4M3", ...
std::optional<DType> dtype_from_name(std::string_view name);  // empty = not a dtype of the format
int dtype_bits(DType);                                        // 4, 6, 8, 16, 32 or 64

/// The bits of the nearest bfloat16 (the upper half of a float), ties to even; a NaN stays a NaN.
std::uint16_t round_to_bf16(float x);

enum class DeviceType : std::uint8_t { cpu, cuda };
struct Device {
    DeviceType type = DeviceType::cpu;
    int index = 0;
    friend bool operator==(const Device&, const Device&) = default;
};

/// Up to eight dimensions, outermost first. Rank 0 is a scalar.
struct Shape {
    static constexpr int kMaxRank = 8;
    std::array<std::int64_t, kMaxRank> dims{};
    int rank = 0;

    Shape() = default;
    Shape(std::initializer_list<std::int64_t> sizes);  // throws Error above kMaxRank
    std::int64_t operator[](int axis) const { return dims[static_cast<std::size_t>(axis)]; }
    std::int64_t num_elements() const;  // 1 for a scalar
    std::string to_string() const;      // "[64, 2048]"
    friend bool operator==(const Shape&, const Shape&) = default;
};

/// Dense, row-major, non-owning. `data` may have any alignment.
struct TensorView {
    const void* data = nullptr;
    DType dtype = DType::f32;
    Shape shape;
    Device device;
    std::size_t num_bytes() const;
};

struct NamedTensor {
    std::string name;
    TensorView tensor;  // in host memory
};

struct MutableTensorView {
    void* data = nullptr;
    DType dtype = DType::f32;
    Shape shape;
    Device device;
    operator TensorView() const { return {data, dtype, shape, device}; }
};

}  // namespace moe4
