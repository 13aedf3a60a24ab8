#pragma once
// The Machine of kernels/amx.cpp on emulated instructions: its vector code as it is, its tiles in plain C++.
// What tdpbf16ps does to subnormals (it flushes them) is left out: exact block contributions never are
// subnormal, and w4a16 allows either.
#include <cmath>
#include <cstring>

#include "backends/cpu/kernels/amx.cpp"
#include "format/bf16.hpp"

namespace moe4::testing {
namespace {

struct EmulatedMachine : cpu::amx::Machine {
    struct Tile {
        std::uint8_t bytes[16][64];
        int rows, row_bytes;
    };
    static inline thread_local Tile tiles[4];

    static void configure_tiles(int rows, int cols) {
        for (int i = 0; i < 4; ++i) {
            std::memset(tiles[i].bytes, 0, sizeof(tiles[i].bytes));
            tiles[i].rows = i == 3 ? cols / 2 : rows;
            tiles[i].row_bytes = i == 2 ? 2 * cols : 64;
        }
    }
    static void release_tiles() {
        for (Tile& tile : tiles) tile.rows = tile.row_bytes = 0;
    }
    template <int kTile>
    static void clear_tile() {
        std::memset(tiles[kTile].bytes, 0, sizeof(tiles[kTile].bytes));
    }
    template <int kTile>
    static void load_tile(const void* data, std::int64_t stride) {
        clear_tile<kTile>();
        Tile& tile = tiles[kTile];
        for (int row = 0; row < tile.rows; ++row) {
            std::memcpy(tile.bytes[row], static_cast<const std::uint8_t*>(data) + row * stride,
                        static_cast<std::size_t>(tile.row_bytes));
        }
    }
    template <int kTile>
    static void store_tile(void* data, std::int64_t stride) {
        const Tile& tile = tiles[kTile];
        for (int row = 0; row < tile.rows; ++row) {
            std::memcpy(static_cast<std::uint8_t*>(data) + row * stride, tile.bytes[row],
                        static_cast<std::size_t>(tile.row_bytes));
        }
    }

    /// tdpbf16ps: two chains of fused multiply-adds, whose sum is added.
    template <int kSums, int kActivations, int kWeights>
    static void multiply_add() {
        const int num_pairs = tiles[kActivations].row_bytes / 4;
        for (int row = 0; row < tiles[kSums].rows; ++row) {
            for (int n = 0; n < 16; ++n) {
                float first = 0;
                float second = 0;
                for (int p = 0; p < num_pairs; ++p) {
                    first = std::fma(bf16<kActivations>(row, 2 * p), bf16<kWeights>(p, 2 * n), first);
                    second =
                        std::fma(bf16<kActivations>(row, 2 * p + 1), bf16<kWeights>(p, 2 * n + 1), second);
                }
                float sum;
                std::memcpy(&sum, tiles[kSums].bytes[row] + 4 * n, 4);
                sum += first + second;
                std::memcpy(tiles[kSums].bytes[row] + 4 * n, &sum, 4);
            }
        }
    }

private:
    template <int kTile>
    static float bf16(int row, int i) {
        std::uint16_t bits;
        std::memcpy(&bits, tiles[kTile].bytes[row] + 2 * i, 2);
        return format::bf16_to_float(bits);
    }
};

}  // namespace
}  // namespace moe4::testing
