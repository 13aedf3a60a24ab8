#include "backends/cpu/packed_layout.hpp"

#include <algorithm>
#include <cstring>

namespace moe4::cpu {

namespace {

std::int64_t num_chunks(std::int64_t cols) { return (cols + kPackedChunkCols - 1) / kPackedChunkCols; }

std::size_t packed_bytes(std::int64_t num_tiles, std::int64_t cols) {
    return static_cast<std::size_t>(num_tiles * num_chunks(cols)) * sizeof(PackedChunk);
}

/// `num_blocks` blocks of one row, from `block` of the matrix on; the rest of the chunk is left as it is.
void pack_row(const Nvfp4View& matrix, std::int64_t row, std::int64_t block, std::int64_t num_blocks,
              PackedHalf& half, std::int64_t lane) {
    const std::uint8_t* scales = matrix.block_scale + row * matrix.scale_stride + block;
    const std::uint8_t* codes = matrix.packed + row * matrix.packed_stride + block * kNvfp4BlockSize / 2;
    for (std::int64_t i = 0; i < num_blocks; ++i) {
        half.scale[i][lane] = scales[i];
        std::memcpy(half.codes[2 * i][lane], codes + 8 * i, 4);
        std::memcpy(half.codes[2 * i + 1][lane], codes + 8 * i + 4, 4);
    }
}

/// Up to 16 rows from first_row on into one half of a tile, two chunks at a time: a cache line of every row.
void pack_half(const Nvfp4View& matrix, std::int64_t first_row, PackedChunk* tile, int half) {
    constexpr std::int64_t kChunksPerLine = 2;
    const std::int64_t num_rows = std::clamp<std::int64_t>(matrix.rows - first_row, 0, kPackedHalfRows);
    const std::int64_t num_blocks = matrix.cols / kNvfp4BlockSize;
    const std::int64_t count = num_chunks(matrix.cols);
    for (std::int64_t chunk = 0; chunk < count; chunk += kChunksPerLine) {
        const std::int64_t last = std::min(count, chunk + kChunksPerLine);
        const bool is_full =
            num_rows == kPackedHalfRows && num_blocks >= last * std::int64_t{kPackedChunkBlocks};
        for (std::int64_t c = chunk; c < last && !is_full; ++c)
            std::memset(&tile[c].half[half], 0, sizeof(PackedHalf));
        for (std::int64_t lane = 0; lane < num_rows; ++lane) {
            for (std::int64_t c = chunk; c < last; ++c) {
                const std::int64_t block = c * kPackedChunkBlocks;
                pack_row(matrix, first_row + lane, block,
                         std::min<std::int64_t>(kPackedChunkBlocks, num_blocks - block), tile[c].half[half],
                         lane);
            }
        }
    }
}

std::size_t gate_up_bytes(std::int64_t intermediate_size, std::int64_t hidden_size) {
    return packed_bytes(intermediate_size / kPackedHalfRows, hidden_size);
}

std::size_t down_bytes(std::int64_t hidden_size, std::int64_t intermediate_size) {
    return packed_bytes((hidden_size + kPackedTileRows - 1) / kPackedTileRows, intermediate_size);
}

void pack_gate_up(const Nvfp4View& gate, const Nvfp4View& up, std::uint8_t* out) {
    auto* tile = reinterpret_cast<PackedChunk*>(out);
    for (std::int64_t row = 0; row < gate.rows; row += kPackedHalfRows, tile += num_chunks(gate.cols)) {
        pack_half(gate, row, tile, 0);
        pack_half(up, row, tile, 1);
    }
}

void pack_down(const Nvfp4View& down, std::uint8_t* out) {
    auto* tile = reinterpret_cast<PackedChunk*>(out);
    for (std::int64_t row = 0; row < down.rows; row += kPackedTileRows, tile += num_chunks(down.cols)) {
        pack_half(down, row, tile, 0);
        pack_half(down, row + kPackedHalfRows, tile, 1);
    }
}

}  // namespace

const PackedLayout kPortablePackedLayout = {.name = "tiles of 32 rows",
                                            .gate_up_bytes = gate_up_bytes,
                                            .down_bytes = down_bytes,
                                            .pack_gate_up = pack_gate_up,
                                            .pack_down = pack_down};

}  // namespace moe4::cpu
