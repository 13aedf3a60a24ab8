#pragma once
// The Machine of kernels/amx_tiles.hpp in plain C++, bit for bit what the instructions do, so that the AMX
// kernels' logic is tested on CPUs without them. What tdpbf16ps does to subnormals (it flushes them) is left
// out: exact block contributions never are subnormal, and w4a16 allows either.
#include <cmath>
#include <cstring>

#include "backends/cpu/kernels/amx_tiles.hpp"
#include "format/bf16.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"
#include "format/quantize.hpp"
#include "moe/activations.hpp"
#include "moe/scalar_lane.hpp"

namespace moe4::testing {

struct EmulatedMachine {
    struct Tile {
        std::uint8_t bytes[16][64];
        int rows, row_bytes;
    };
    static inline thread_local Tile tiles[8];

    static void configure_tiles(int rows, int cols) {
        for (int i = 0; i < 8; ++i) {
            std::memset(tiles[i].bytes, 0, sizeof(tiles[i].bytes));
            tiles[i].rows = i < 6 ? rows : cols / 2;
            tiles[i].row_bytes = i == 4 || i == 5 ? 2 * cols : 64;
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

    struct Vector {
        std::uint16_t lanes[32];
    };
    static Vector load(const void* data) {
        Vector x;
        std::memcpy(&x, data, sizeof(x));
        return x;
    }
    static void store(void* data, const Vector& x) { std::memcpy(data, &x, sizeof(x)); }

    static Vector expand_scales(const std::uint8_t* scales) {
        Vector x;
        for (int i = 0; i < 32; ++i) x.lanes[i] = static_cast<std::uint16_t>(scales[i / 2] << 7);
        return x;
    }

    template <int kNibble>
    static Vector decode(const Vector& codes, const Vector& scales) {
        Vector out;
        for (int i = 0; i < 32; ++i) {
            const auto code = static_cast<std::uint8_t>(codes.lanes[i] >> (4 * kNibble) & 15);
            const float value = 256.0F * format::e2m1_decode(code);
            out.lanes[i] = moved_by_three(f16_bits(value * format::f16_to_float(scales.lanes[i])));
        }
        return out;
    }

    static void prefetch(const std::uint8_t*) {}

    struct Block {
        std::uint16_t bf16[kNvfp4BlockSize];
    };
    static Block load_bf16(const std::uint16_t* x) {
        Block block;
        std::memcpy(block.bf16, x, sizeof(block.bf16));
        return block;
    }
    static void store_bf16(const Block& x, std::uint16_t* out) { std::memcpy(out, x.bf16, sizeof(x.bf16)); }
    static void copy_block(const std::uint16_t* x, std::uint16_t* out) { store_bf16(load_bf16(x), out); }

    static Block activate(const float* gate, const float* up, float factor, float gate_scale,
                          float up_scale) {
        using moe::ScalarLane;
        Block h;
        for (int i = 0; i < kNvfp4BlockSize; ++i) {
            h.bf16[i] = format::bf16_from_float(moe::Silu::apply(ScalarLane{gate_scale * (factor * gate[i])},
                                                                 ScalarLane{up_scale * (factor * up[i])})
                                                    .value);
        }
        return h;
    }

    static void scale(const float* sums, float factor, float scale, float* y) {
        for (int i = 0; i < 16; ++i) y[i] = scale * (factor * sums[i]);
    }

    static void quantize(const Block* blocks, int count, const float* input_scales, std::uint16_t* out,
                         std::int64_t out_stride) {
        for (int b = 0; b < count; ++b) {
            float values[kNvfp4BlockSize];
            for (int i = 0; i < kNvfp4BlockSize; ++i) values[i] = format::bf16_to_float(blocks[b].bf16[i]);
            std::uint8_t codes[kNvfp4BlockSize];
            const float scale =
                format::e4m3_decode(format::quantize_activation_block(values, input_scales[b], codes));
            for (int i = 0; i < kNvfp4BlockSize; ++i) values[i] = format::e2m1_decode(codes[i]) * scale;
            store_pairs(values, cpu::kActivationFactor, out + b * out_stride);
        }
    }

    static void scale_block(const std::uint16_t* bf16, float factor, std::uint16_t* out) {
        float values[kNvfp4BlockSize];
        for (int i = 0; i < kNvfp4BlockSize; ++i) values[i] = format::bf16_to_float(bf16[i]);
        store_pairs(values, factor, out);
    }

private:
    template <int kTile>
    static float bf16(int row, int i) {
        std::uint16_t bits;
        std::memcpy(&bits, tiles[kTile].bytes[row] + 2 * i, 2);
        return format::bf16_to_float(bits);
    }

    /// Of a number that is zero or a normal half without rounding.
    static std::uint16_t f16_bits(float x) {
        const auto bits = std::bit_cast<std::uint32_t>(x);
        const std::uint32_t sign = bits >> 16 & 0x8000U;
        if (x == 0.0F) return static_cast<std::uint16_t>(sign);
        return static_cast<std::uint16_t>(sign | ((bits & 0x7FFFFFFFU) - ((127U - 15U) << 23)) >> 13);
    }

    static std::uint16_t moved_by_three(std::uint16_t half) {
        return static_cast<std::uint16_t>((half & 0x8000U) | (half & 0x7FFFU) >> 3);
    }

    static void store_pairs(const float* values, float factor, std::uint16_t* out) {
        for (int i = 0; i < kNvfp4BlockSize; ++i)
            out[i] = format::bf16_from_float(values[cpu::kPairOrder[i]] * factor);
    }
};

}  // namespace moe4::testing
