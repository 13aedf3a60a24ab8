// The packed layout holds every code and scale where its header says, and zeros where the matrix has nothing.
// Of the AVX-512 packer skipped where the CPU lacks it.
#include "backends/cpu/packed_layout.hpp"

#include <gtest/gtest.h>

#include <utility>

#include "conformance/layer_runner.hpp"
#include "conformance/random_layer.hpp"

namespace moe4::cpu {
namespace {

using namespace moe4::testing;

struct Element {
    int code, scale;
    friend bool operator==(const Element&, const Element&) = default;
};

Element element_of(const Nvfp4View& matrix, std::int64_t row, std::int64_t col) {
    if (row >= matrix.rows || col >= matrix.cols) return {0, 0};
    const int byte = matrix.packed[row * matrix.packed_stride + col / 2];
    return {col % 2 == 0 ? byte & 15 : byte >> 4, matrix.block_scale[row * matrix.scale_stride + col / 16]};
}

/// Lane `lane` of a tile's half at column `col` of the matrix.
Element element_of(const PackedChunk* tile, int half, int lane, std::int64_t col) {
    const PackedHalf& packed = tile[col / kPackedChunkCols].half[half];
    const std::int64_t k = col % kPackedChunkCols;
    const int byte = packed.codes[k / 8][lane][k % 8 / 2];
    return {k % 2 == 0 ? byte & 15 : byte >> 4, packed.scale[k / 16][lane]};
}

void expect_tile(const PackedChunk* tile, std::int64_t num_chunks, int half, const Nvfp4View& matrix,
                 std::int64_t first_row) {
    for (int lane = 0; lane < kPackedHalfRows; ++lane) {
        for (std::int64_t col = 0; col < num_chunks * kPackedChunkCols; ++col) {
            ASSERT_EQ(element_of(tile, half, lane, col), element_of(matrix, first_row + lane, col))
                << "row " << first_row + lane << ", column " << col;
        }
    }
}

void expect_every_element_and_zeros(const PackedLayout& layout) {
    SCOPED_TRACE(seed_note());
    constexpr std::pair<std::int64_t, std::int64_t> kSizes[] = {{16, 16}, {48, 80}, {208, 112}, {320, 64}};
    for (const auto& [hidden, intermediate] : kSizes) {
        RandomLayer layer(
            {.hidden_size = hidden, .intermediate_size = intermediate, .num_experts = 1, .padding = 3});
        const ExpertWeights& expert = layer.weights().experts[0];
        const std::size_t gate_up_bytes = layout.gate_up_bytes(intermediate, hidden);
        const std::int64_t chunks = (hidden + kPackedChunkCols - 1) / kPackedChunkCols;
        ASSERT_EQ(gate_up_bytes, static_cast<std::size_t>(intermediate / 16 * chunks) * sizeof(PackedChunk));
        const AlignedBuffer gate_up(gate_up_bytes);
        const auto* tile = static_cast<const PackedChunk*>(gate_up.workspace().data);
        layout.pack_gate_up(expert.gate.weight, expert.up.weight,
                            static_cast<std::uint8_t*>(gate_up.workspace().data));
        for (std::int64_t row = 0; row < intermediate; row += 16, tile += chunks) {
            expect_tile(tile, chunks, 0, expert.gate.weight, row);
            expect_tile(tile, chunks, 1, expert.up.weight, row);
        }

        const std::int64_t down_chunks = (intermediate + kPackedChunkCols - 1) / kPackedChunkCols;
        const AlignedBuffer down(layout.down_bytes(hidden, intermediate));
        tile = static_cast<const PackedChunk*>(down.workspace().data);
        layout.pack_down(expert.down.weight, static_cast<std::uint8_t*>(down.workspace().data));
        for (std::int64_t row = 0; row < hidden; row += 32, tile += down_chunks) {
            expect_tile(tile, down_chunks, 0, expert.down.weight, row);
            expect_tile(tile, down_chunks, 1, expert.down.weight, row + 16);
        }
    }
}

TEST(PackedLayout, HoldsEveryElementAndZeros) {
    if ((detect_isa() & kAvx512) == 0) GTEST_SKIP() << "this CPU lacks avx512";
    expect_every_element_and_zeros(kPackedLayout);
}

TEST(PackedLayout, IsTheSameWithoutAnInstructionSet) {
    expect_every_element_and_zeros(kPortablePackedLayout);
}

}  // namespace
}  // namespace moe4::cpu
