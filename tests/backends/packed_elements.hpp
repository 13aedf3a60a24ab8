#pragma once
// That a packed layout holds every code and scale where packed_layout.hpp says, and zeros where the matrix
// has nothing.
#include <gtest/gtest.h>

#include <utility>

#include "backends/cpu/packed_layout.hpp"
#include "conformance/layer_runner.hpp"
#include "conformance/random_layer.hpp"

namespace moe4::testing {

struct PackedElement {
    int code, scale;
    friend bool operator==(const PackedElement&, const PackedElement&) = default;
};

inline PackedElement element_of(const Nvfp4View& matrix, std::int64_t row, std::int64_t col) {
    if (row >= matrix.rows || col >= matrix.cols) return {0, 0};
    const int byte = matrix.packed[row * matrix.packed_stride + col / 2];
    return {col % 2 == 0 ? byte & 15 : byte >> 4, matrix.block_scale[row * matrix.scale_stride + col / 16]};
}

/// Lane `lane` of a tile's half at column `col` of the matrix.
inline PackedElement element_of(const cpu::PackedChunk* tile, int half, int lane, std::int64_t col) {
    const cpu::PackedHalf& packed = tile[col / cpu::kPackedChunkCols].half[half];
    const std::int64_t k = col % cpu::kPackedChunkCols;
    const int byte = packed.codes[k / 8][lane][k % 8 / 2];
    return {k % 2 == 0 ? byte & 15 : byte >> 4, packed.scale[k / 16][lane]};
}

inline void expect_tile(const cpu::PackedChunk* tile, std::int64_t num_chunks, int half,
                        const Nvfp4View& matrix, std::int64_t first_row) {
    for (int lane = 0; lane < cpu::kPackedHalfRows; ++lane) {
        for (std::int64_t col = 0; col < num_chunks * cpu::kPackedChunkCols; ++col) {
            ASSERT_EQ(element_of(tile, half, lane, col), element_of(matrix, first_row + lane, col))
                << "row " << first_row + lane << ", column " << col;
        }
    }
}

inline void expect_every_element_and_zeros(const cpu::PackedLayout& layout) {
    SCOPED_TRACE(seed_note());
    constexpr std::pair<std::int64_t, std::int64_t> kSizes[] = {{16, 16}, {48, 80}, {208, 112}, {320, 64}};
    for (const auto& [hidden, intermediate] : kSizes) {
        RandomLayer layer(
            {.hidden_size = hidden, .intermediate_size = intermediate, .num_experts = 1, .padding = 3});
        const ExpertWeights& expert = layer.weights().experts[0];
        const std::size_t gate_up_bytes = layout.gate_up_bytes(intermediate, hidden);
        const std::int64_t chunks = (hidden + cpu::kPackedChunkCols - 1) / cpu::kPackedChunkCols;
        ASSERT_EQ(gate_up_bytes,
                  static_cast<std::size_t>(intermediate / 16 * chunks) * sizeof(cpu::PackedChunk));
        const AlignedBuffer gate_up(gate_up_bytes);
        const auto* tile = static_cast<const cpu::PackedChunk*>(gate_up.workspace().data);
        layout.pack_gate_up(expert.gate.weight, expert.up.weight,
                            static_cast<std::uint8_t*>(gate_up.workspace().data));
        for (std::int64_t row = 0; row < intermediate; row += 16, tile += chunks) {
            expect_tile(tile, chunks, 0, expert.gate.weight, row);
            expect_tile(tile, chunks, 1, expert.up.weight, row);
        }

        const std::int64_t down_chunks = (intermediate + cpu::kPackedChunkCols - 1) / cpu::kPackedChunkCols;
        const AlignedBuffer down(layout.down_bytes(hidden, intermediate));
        tile = static_cast<const cpu::PackedChunk*>(down.workspace().data);
        layout.pack_down(expert.down.weight, static_cast<std::uint8_t*>(down.workspace().data));
        for (std::int64_t row = 0; row < hidden; row += 32, tile += down_chunks) {
            expect_tile(tile, down_chunks, 0, expert.down.weight, row);
            expect_tile(tile, down_chunks, 1, expert.down.weight, row + 16);
        }
    }
}

}  // namespace moe4::testing
