#pragma once
// In which order the activations' K lies in memory. A tensor core's lane t of a quad wants values 2t, 2t+1,
// 2t+8 and 2t+9 of every 16; the checkpoint's bytes give it whole 32-bit words of eight consecutive codes.
// The sum does not care which k a tensor core calls 0 as long as weights and activations agree, so the
// weights stay as they are and the activations are permuted. Within a chunk of 256 k, with k = 64 t + 8 word
// + n:
//     position = 32 word + 16 (n / 2 % 2) + 8 (n % 2) + 2 t + n / 4
// Lane t of a quad then owns 64 consecutive k of a row: 32 bytes of codes and four scales.
#include <cstdint>

namespace moe4::cuda {

inline constexpr int kChunk = 256;  // k

constexpr std::int64_t round_up(std::int64_t x, std::int64_t step) { return (x + step - 1) / step * step; }

/// Elements of a permuted row; those behind the last k are zeros.
constexpr std::int64_t permuted_size(std::int64_t k) { return round_up(k, kChunk); }

constexpr int permuted_position(int index) {
    const auto k = static_cast<unsigned>(index);  // shifts and masks, not divisions of a signed number
    const unsigned n = k % 8;
    return static_cast<int>(k / kChunk * kChunk + k / 8 % 8 * 32 + n / 2 % 2 * 16 + n % 2 * 8 +
                            k / 64 % 4 * 2 + n / 4);
}

}  // namespace moe4::cuda
