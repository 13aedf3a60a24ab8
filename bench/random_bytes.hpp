#pragma once
// Operands of CPU kernels: memory aligned to 64 bytes, full of random values.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>

namespace moe4::cpu {

struct Free {
    void operator()(std::uint8_t* bytes) const { std::free(bytes); }
};
using Bytes = std::unique_ptr<std::uint8_t, Free>;

/// Valid as codes, as scales and as floats.
inline Bytes random_bytes(std::size_t size, std::mt19937_64& random) {
    Bytes bytes(static_cast<std::uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64)));
    for (std::size_t i = 0; i < size; ++i) bytes.get()[i] = static_cast<std::uint8_t>(random() & 0x77U);
    return bytes;
}

/// bf16 of magnitudes in [1, 2): normal numbers, so that nothing is slow because it is subnormal.
inline Bytes random_hidden(std::int64_t count, std::mt19937_64& random) {
    Bytes bytes(static_cast<std::uint8_t*>(std::aligned_alloc(64, static_cast<std::size_t>(count) * 2)));
    auto* values = reinterpret_cast<std::uint16_t*>(bytes.get());
    for (std::int64_t i = 0; i < count; ++i)
        values[i] = static_cast<std::uint16_t>(0x3F80U | (random() & 0x807FU));
    return bytes;
}

}  // namespace moe4::cpu
